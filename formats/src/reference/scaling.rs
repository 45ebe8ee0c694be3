//! Global and block scales (numerics, sections 4, 7 and 8).

use super::{
    rounding::nearest_code,
    simd::{Lanes, Tile, lanes},
};
use crate::{
    BLOCK, BlockScaling, BlockShape, ErrorNorm,
    format::{e2m1, e4m3},
};

/// 6 · 448: the largest scaled value, and the numerator of the standard global scale.
pub const SCALE_RANGE: f32 = 2688.0;

/// Factor of the block amax that leaves room for the rounding of the scale byte, which may lower
/// the scale by a seventeenth.
const HEADROOM: f32 = 17.0 / 16.0;

/// Scale factors derived from one amax.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GlobalScale {
    /// `S = min(fl(2688 / amax), FLT_MAX)`, or 1 if that is zero or undefined.
    pub encode: f32,
    /// `m = fl(S · fl(1/6))`: factor from block amax to block scale.
    pub block: f32,
    /// `D = fl(1 / S)`.
    pub decode: f32,
}

impl GlobalScale {
    /// Returns the scale factors of a tensor with amax `amax`. Zero, NaN and infinity give the
    /// neutral `S = 1`.
    #[inline]
    pub fn from_amax(amax: f32) -> Self {
        Self::with_range(amax, SCALE_RANGE)
    }

    /// Returns the scale factors with `range` instead of 2688; see [`BlockScaling::range`].
    #[inline(always)]
    pub fn with_range(amax: f32, range: f32) -> Self {
        let quotient = range / amax;
        // False for NaN, for the 0 of an infinite amax, and through the second condition for amax =
        // 0.
        let usable = quotient > 0.0 && amax > 0.0;
        let encode = if usable { quotient.min(f32::MAX) } else { 1.0 };
        Self {
            encode,
            block: encode * (1.0 / 6.0),
            decode: 1.0 / encode,
        }
    }
}

/// Scaling rule of 16 blocks, with the global scale of each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaler {
    amax: Lanes<f32>,
    encode: Lanes<f32>,
    block: Lanes<f32>,
    decode: Lanes<f32>,
    scaling: BlockScaling,
}

impl Scaler {
    /// Returns the rule for blocks with these global `amax` values.
    #[inline(always)]
    pub(super) fn new(amax: Lanes<f32>, scaling: BlockScaling) -> Self {
        let global = |lane: usize| GlobalScale::with_range(amax[lane], scaling.range());
        Self {
            amax,
            encode: lanes(|lane| global(lane).encode),
            block: lanes(|lane| global(lane).block),
            decode: lanes(|lane| global(lane).decode),
            scaling,
        }
    }

    /// Returns the scale byte of each of the 16 blocks of `tile`.
    ///
    /// With [`BlockShape::Block2d`] they share one. The lanes must then be the tile's rows in the
    /// source, because that determines the order in which errors are summed.
    #[inline(always)]
    pub(super) fn scale_bytes(&self, tile: &Tile, shape: BlockShape) -> Lanes<u32> {
        let mut bits = magnitudes(tile);
        if shape == BlockShape::Block2d {
            bits = [bits.into_iter().max().unwrap_or(0); BLOCK];
        }
        let amax = lanes(|lane| f32::from_bits(bits[lane] as u32));
        match self.scaling {
            BlockScaling::Standard | BlockScaling::Static => self.round_scales(amax),
            BlockScaling::Headroom => self.round_scales(lanes(|lane| amax[lane] * HEADROOM)),
            BlockScaling::FourOverSix(norm) => self.four_over_six(tile, shape, amax, norm),
        }
    }

    /// Computes [`block_scale`] of each lane.
    #[inline(always)]
    fn round_scales(&self, amax: Lanes<f32>) -> Lanes<u32> {
        lanes(|lane| round_scale(amax[lane] * self.block[lane], f32::MAX))
    }

    /// Computes [`encode_multiplier`] of each lane.
    #[inline(always)]
    pub(super) fn multipliers(&self, bytes: &Lanes<u32>) -> Lanes<f32> {
        lanes(|lane| multiplier(e4m3::decode_wide(bytes[lane]), self.decode[lane]))
    }

    /// Returns the scale that maps the block amax to 6, unless mapping it to 4 has the smaller
    /// error.
    #[inline(always)]
    fn four_over_six(
        &self,
        tile: &Tile,
        shape: BlockShape,
        amax: Lanes<f32>,
        norm: ErrorNorm,
    ) -> Lanes<u32> {
        // This is a true division, unlike the multiplication by fl(1/6) of the other rules.
        let base = lanes(|lane| amax[lane] / 6.0 * self.encode[lane]);
        let six = lanes(|lane| round_scale(base[lane], e4m3::MAX));
        let four = lanes(|lane| round_scale(base[lane] * 1.5, e4m3::MAX));
        let error_six = self.errors(tile, shape, &six, norm);
        let error_four = self.errors(tile, shape, &four, norm);
        lanes(|lane| {
            if error_four[lane] < error_six[lane] {
                four[lane]
            } else {
                six[lane]
            }
        })
    }

    /// Returns the error of rounding to nearest with the scale bytes `bytes`: the sum over each
    /// block, in order; for tiles the sums of their rows, added in a tree.
    #[inline(always)]
    fn errors(
        &self,
        tile: &Tile,
        shape: BlockShape,
        bytes: &Lanes<u32>,
        norm: ErrorNorm,
    ) -> Lanes<f32> {
        let multipliers = self.multipliers(bytes);
        let scales = lanes(|lane| e4m3::decode_wide(bytes[lane]));
        let range = self.scaling.range();
        let mut sums = [0f32; BLOCK];
        for row in tile {
            sums = lanes(|lane| {
                let code = nearest_code(row[lane] * multipliers[lane]);
                let decoded = e2m1::decode_wide(code) * scales[lane] * self.amax[lane] / range;
                let difference = (decoded - row[lane]).abs();
                sums[lane]
                    + match norm {
                        ErrorNorm::Mae => difference,
                        ErrorNorm::Mse => difference * difference,
                    }
            });
        }
        if shape == BlockShape::Block2d {
            for width in [8, 4, 2, 1] {
                for lane in 0..width {
                    sums[lane] += sums[lane + width];
                }
            }
            sums = [sums[0]; BLOCK];
        }
        sums
    }
}

/// Returns the bits of the largest magnitude in each lane of `tile`. They compare as integers, with
/// NaN above infinity.
#[inline(always)]
pub(super) fn magnitudes(tile: &Tile) -> Lanes<i32> {
    const HALF: usize = BLOCK * BLOCK / 2;
    let (low, high) = tile.as_flattened().split_at(HALF);
    // A tree of flat loops: the compiler would vectorize a running maximum across rows, with
    // gathers.
    let mut maxima = [0i32; HALF];
    for (max, (low, high)) in maxima.iter_mut().zip(low.iter().zip(high)) {
        let [low, high] = [low, high].map(|value| (value.to_bits() & 0x7FFF_FFFF) as i32);
        *max = low.max(high);
    }
    for width in [HALF / 2, HALF / 4, HALF / 8] {
        let (low, high) = maxima.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(&*high) {
            *low = (*low).max(*high);
        }
    }
    lanes(|lane| maxima[lane])
}

/// Returns the E4M3 byte of a block scale, at most `bound`.
#[inline(always)]
fn round_scale(scale: f32, bound: f32) -> u32 {
    // A NaN must reach the byte, so this is a comparison and not `f32::min`.
    e4m3::encode_wide(if scale > bound { bound } else { scale })
}

/// Returns `min(fl(1 / fl(scale · D)), FLT_MAX)`.
#[inline(always)]
fn multiplier(scale: f32, decode: f32) -> f32 {
    let multiplier = 1.0 / (scale * decode);
    if multiplier > f32::MAX {
        f32::MAX
    } else {
        multiplier
    }
}

/// Returns the scale byte of a block with amax `amax`.
#[inline(always)]
pub fn block_scale(amax: f32, global: &GlobalScale) -> u8 {
    round_scale(amax * global.block, f32::MAX) as u8
}

/// Returns the factor `e` that scales the elements of a block with scale byte `scale` to the E2M1
/// grid: `min(fl(1 / fl(e4m3(scale) · D)), FLT_MAX)`.
#[inline(always)]
pub fn encode_multiplier(scale: u8, global: &GlobalScale) -> f32 {
    multiplier(e4m3::decode(scale), global.decode)
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
