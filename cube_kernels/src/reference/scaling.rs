//! The two levels of scale (specification, sections 4, 7 and 8).

use super::{block::magnitude, round_nearest};
use crate::{
    BLOCK, BlockScaling, ErrorNorm,
    format::{e2m1, e4m3},
};

/// 6 · 448: the largest scaled value, and the numerator of every global scale.
pub const SCALE_RANGE: f32 = 2688.0;

/// By what the block maximum is multiplied to leave room for the rounding of the scale byte, which
/// may take a seventeenth of it away.
const HEADROOM: f32 = 17.0 / 16.0;

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

    /// The same with `range` in place of 2688; see [`BlockScaling::range`].
    #[inline]
    pub fn with_range(amax: f32, range: f32) -> Self {
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

/// The rule by which one stored row, or one tensor, finds its block scales.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockScaler {
    pub(super) global: GlobalScale,
    amax: f32,
    scaling: BlockScaling,
}

impl BlockScaler {
    /// The rule for blocks under `amax`.
    #[inline]
    pub(super) fn new(amax: f32, scaling: BlockScaling) -> Self {
        Self {
            global: GlobalScale::with_range(amax, scaling.range()),
            amax,
            scaling,
        }
    }

    /// The scale byte that `rows` share: one block, or the 16 rows of a tile in the orientation of
    /// the source, which decides the order in which errors are summed.
    #[inline(always)]
    pub(super) fn scale_byte(&self, rows: &[[f32; BLOCK]]) -> u8 {
        let amax = magnitude(rows);
        match self.scaling {
            BlockScaling::Standard => block_scale(amax, &self.global),
            BlockScaling::Headroom => block_scale(amax * HEADROOM, &self.global),
            BlockScaling::FourOverSix(norm) => self.four_over_six(rows, amax, norm),
        }
    }

    /// The scale that maps the maximum to 6, unless mapping it to 4 has the smaller error.
    fn four_over_six(&self, rows: &[[f32; BLOCK]], amax: f32, norm: ErrorNorm) -> u8 {
        // A true division here, unlike the multiplication by fl(1/6) of the other rules.
        let base = amax / 6.0 * self.global.encode;
        // A NaN must reach the byte, so this is a comparison and not `f32::min`.
        let clamp = |scale: f32| e4m3::encode(if scale > e4m3::MAX { e4m3::MAX } else { scale });
        let (six, four) = (clamp(base), clamp(base * 1.5));
        if self.error(rows, four, norm) < self.error(rows, six, norm) {
            four
        } else {
            six
        }
    }

    /// What rounding to nearest under the scale byte `scale` costs. The 16 columns of a row are
    /// summed in order, then the row sums by a tree.
    fn error(&self, rows: &[[f32; BLOCK]], scale: u8, norm: ErrorNorm) -> f32 {
        let multiplier = encode_multiplier(scale, &self.global);
        let (scale, range) = (e4m3::decode(scale), self.scaling.range());
        let mut sums = [0f32; BLOCK];
        for (sum, row) in sums.iter_mut().zip(rows) {
            for &value in row {
                let quantized = e2m1::decode(round_nearest(value * multiplier));
                let difference = (quantized * scale * self.amax / range - value).abs();
                *sum += match norm {
                    ErrorNorm::Mae => difference,
                    ErrorNorm::Mse => difference * difference,
                };
            }
        }
        // With a single row the other sums are zero and change nothing.
        for width in [8, 4, 2, 1] {
            for r in 0..width {
                sums[r] += sums[r + width];
            }
        }
        sums[0]
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
