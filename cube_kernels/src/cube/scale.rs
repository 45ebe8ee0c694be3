//! The two levels of scale; see [`reference::GlobalScale`](crate::reference::GlobalScale).

use cubecl::prelude::*;

use super::{
    codec::{Conversion, decode_e4m3, encode_e4m3},
    exact::rcp_of_ordinary,
    ptx,
};
use crate::BlockScaling;

/// Scale factors derived from one amax.
#[derive(CubeType, Clone, Copy)]
pub struct GlobalScale {
    /// Amax.
    pub amax: f32,
    /// `S`.
    pub encode: f32,
    /// `m = fl(S · fl(1/6))`: factor from block amax to block scale.
    pub block: f32,
    /// `D = fl(1 / S)`.
    pub decode: f32,
}

#[cube]
impl GlobalScale {
    /// Derives the scales of a tensor whose largest magnitude is `amax`.
    pub fn from_amax(amax: f32, #[comptime] scaling: BlockScaling) -> GlobalScale {
        let quotient = comptime!(scaling.range()) / amax;
        // False for NaN, for the 0 of an infinite amax, and by its second half for amax = 0.
        let usable = quotient > 0.0f32 && amax > 0.0f32;
        let clamped = select(quotient > f32::MAX, f32::MAX, quotient);
        let encode = select(usable, clamped, 1.0f32);
        GlobalScale {
            amax,
            encode,
            block: encode * comptime!(1.0f32 / 6.0f32),
            decode: 1.0f32 / encode,
        }
    }

    /// Returns the scales for blocks of `multiple` times the values, a power of two. Scale bytes
    /// are unchanged, and multipliers are divided by `multiple`. Not for four over six.
    pub fn of_multiples(&self, #[comptime] multiple: f32) -> GlobalScale {
        GlobalScale {
            amax: self.amax,
            encode: self.encode,
            block: self.block * comptime!(1.0 / multiple),
            decode: self.decode * comptime!(multiple),
        }
    }

    /// Returns the scale byte of a block whose largest magnitude is `amax`, for scaling without a
    /// choice between two candidates.
    pub fn block_scale(
        &self,
        amax: f32,
        #[comptime] scaling: BlockScaling,
        #[comptime] conversion: Conversion,
    ) -> u32 {
        let mut magnitude = amax;
        if comptime!(scaling == BlockScaling::Headroom) {
            magnitude = amax * 1.0625f32;
        }
        scale_byte(magnitude * self.block, conversion)
    }

    /// Returns `fl(fl(a / 6) · S)`, from which four over six derives both candidates.
    pub fn block_base(&self, amax: f32) -> f32 {
        (amax / 6.0f32) * self.encode
    }

    /// Returns the factor that maps the elements of a block with scale byte `scale` to the grid.
    pub fn encode_multiplier(&self, scale: u32, #[comptime] conversion: Conversion) -> f32 {
        let product = decode_e4m3(scale) * self.decode;
        let multiplier = if comptime!(conversion.has_ptx()) {
            ptx::rcp_rn(product)
        } else {
            1.0f32 / product
        };
        select(multiplier > f32::MAX, f32::MAX, multiplier)
    }

    /// Returns [`encode_multiplier`](GlobalScale::encode_multiplier) in a third of its
    /// instructions, if the result is below [`LARGEST_USUAL`] and the amax of the block is a
    /// number; for NaN, returns any number. Otherwise the result is not below that limit, or NaN.
    /// Requires PTX.
    ///
    /// `value · decode` is below 2¹²⁶ for every byte, since `448 / fl(2688 / f32::MAX)` is. If it
    /// is not a normal number, the reciprocal is NaN; if it is a small one, the reciprocal is
    /// large. With the scales [of multiples](GlobalScale::of_multiples), `value · decode` is below
    /// 2¹²⁶ if the amax of the block is, because it is at most a third of that amax.
    pub fn usual_multiplier(&self, scale: u32) -> f32 {
        // The same as in `decode_e4m3`.
        let value = f32::reinterpret(scale << 20u32) * f32::reinterpret(247u32 << 23u32);
        rcp_of_ordinary(value * self.decode)
    }
}

/// Limit of [`GlobalScale::usual_multiplier`]: 2⁹⁰.
pub const LARGEST_USUAL: f32 = 1_237_940_039_285_380_274_899_124_224.0;

/// Returns the E4M3 byte of a non-negative scale; values above 448 become 448, NaN stays NaN.
#[cube]
pub fn scale_byte(scale: f32, #[comptime] conversion: Conversion) -> u32 {
    if comptime!(conversion.has_e4m3()) {
        ptx::cvt_rn_e4m3x2(scale, 0.0f32)
    } else {
        encode_e4m3(scale)
    }
}

/// Returns the index of the scale of block `block` of stored row `row` in the 128x4 layout, in
/// which rows take `padded_blocks` tiles; see [`reference::swizzle`](crate::reference::swizzle).
#[cube]
pub fn swizzled_at(row: usize, block: usize, padded_blocks: usize) -> usize {
    ((row / 128usize) * padded_blocks + block / 4usize) * 512usize
        + (row % 32usize) * 16usize
        + ((row % 128usize) / 32usize) * 4usize
        + block % 4usize
}
