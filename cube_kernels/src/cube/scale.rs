//! The two levels of scale; see [`reference::GlobalScale`](crate::reference::GlobalScale).

use cubecl::prelude::*;

use super::codec::{decode_e4m3, encode_e4m3};

/// What derives from one amax.
#[derive(CubeType, Clone, Copy)]
pub struct GlobalScale {
    /// `m`: block maximum to block scale.
    pub block: f32,
    /// `D = fl(1 / S)`.
    pub decode: f32,
}

#[cube]
impl GlobalScale {
    /// The scales of a tensor whose largest magnitude is `amax`.
    pub fn from_amax(amax: f32) -> GlobalScale {
        let quotient = 2688.0f32 / amax;
        // False for NaN, for the 0 of an infinite amax, and by its second half for amax = 0.
        let usable = quotient > 0.0f32 && amax > 0.0f32;
        let clamped = select(quotient > f32::MAX, f32::MAX, quotient);
        let encode = select(usable, clamped, 1.0f32);
        GlobalScale {
            block: encode * comptime!(1.0f32 / 6.0f32),
            decode: 1.0f32 / encode,
        }
    }

    /// The scale byte of a block whose largest magnitude is `amax`.
    pub fn block_scale(&self, amax: f32) -> u32 {
        let scaled = amax * self.block;
        encode_e4m3(select(scaled > f32::MAX, f32::MAX, scaled))
    }

    /// The factor that brings the elements of a block with scale byte `scale` onto the grid.
    pub fn encode_multiplier(&self, scale: u32) -> f32 {
        let multiplier = 1.0f32 / (decode_e4m3(scale) * self.decode);
        select(multiplier > f32::MAX, f32::MAX, multiplier)
    }
}
