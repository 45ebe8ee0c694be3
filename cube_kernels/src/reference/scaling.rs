//! The two levels of scale.

use crate::format::e4m3;

/// 6 · 448: the largest scaled value, and the numerator of every global scale.
pub const SCALE_RANGE: f32 = 2688.0;

/// What derives from one `amax`: the factor that brings the tensor into range, and its friends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GlobalScale {
    /// `S = min(fl(2688 / amax), FLT_MAX)`, or 1 where that is zero or undefined.
    pub encode: f32,
    /// `m = fl(S · fl(1/6))`: block maximum to block scale.
    pub block: f32,
    /// `D = fl(1 / S)`.
    pub decode: f32,
}

impl GlobalScale {
    /// The scales of a tensor whose largest magnitude is `amax`. Zero, NaN and infinity give the
    /// neutral `S = 1`.
    #[inline]
    pub fn from_amax(amax: f32) -> Self {
        Self::with_range(amax, SCALE_RANGE)
    }

    /// The same with `range` in place of 2688.
    #[inline]
    pub(super) fn with_range(amax: f32, range: f32) -> Self {
        let quotient = range / amax;
        // False for NaN, for the 0 of an infinite amax, and by its second half for amax = 0.
        let usable = quotient > 0.0 && amax > 0.0;
        let encode = if usable { quotient.min(f32::MAX) } else { 1.0 };
        Self {
            encode,
            block: encode * (1.0 / 6.0),
            decode: 1.0 / encode,
        }
    }
}

/// The scale byte of a block whose largest magnitude is `amax`.
#[inline(always)]
pub fn block_scale(amax: f32, global: &GlobalScale) -> u8 {
    let scaled = amax * global.block;
    // A NaN must reach the byte, so this is a comparison and not `f32::min`.
    e4m3::encode(if scaled > f32::MAX { f32::MAX } else { scaled })
}

/// The factor `e` that brings the elements of a block with scale byte `scale` onto the E2M1 grid:
/// `min(fl(1 / fl(e4m3(scale) · D)), FLT_MAX)`.
#[inline(always)]
pub fn encode_multiplier(scale: u8, global: &GlobalScale) -> f32 {
    let multiplier = 1.0 / (e4m3::decode(scale) * global.decode);
    if multiplier > f32::MAX {
        f32::MAX
    } else {
        multiplier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degenerate_maxima_are_neutral() {
        for amax in [0.0, f32::INFINITY, f32::NAN] {
            let scale = GlobalScale::from_amax(amax);
            assert_eq!((scale.encode, scale.decode), (1.0, 1.0), "{amax}");
        }
    }

    #[test]
    fn tiny_maxima_saturate() {
        let scale = GlobalScale::from_amax(f32::from_bits(1));
        assert_eq!(scale.encode, f32::MAX);
        assert!(scale.decode > 0.0);
    }

    #[test]
    fn largest_block_gets_the_largest_scale() {
        for amax in [1e-30f32, 1e-3, 1.0, 3.7, 1e30] {
            let global = GlobalScale::from_amax(amax);
            assert_eq!(block_scale(amax, &global), e4m3::MAX_BYTE, "{amax}");
        }
    }

    #[test]
    fn zero_scale_keeps_a_finite_multiplier() {
        let global = GlobalScale::from_amax(1.0);
        assert_eq!(encode_multiplier(0, &global), f32::MAX);
    }
}
