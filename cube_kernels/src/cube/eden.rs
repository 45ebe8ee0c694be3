//! MS-EDEN; see [`reference::ms_eden`](crate::reference::ms_eden), whose documentation numbers the
//! steps.
//!
//! The unit of work is a tile of 128 positions along K (a group) by 32 lines. On CUDA one plane
//! processes a tile: eight neighbouring units share two lines and transform them by shuffles. On
//! other devices a cube processes a tile, as `f32` in shared memory, in phases between barriers;
//! each phase is split into 256 tasks of 16 values.

use cubecl::prelude::*;

use crate::{HadamardSize, tensor::FloatKind};

use super::{
    codec::{
        Conversion, decode_e4m3, magnitude_bits, nearest_codes, round_to_bf16,
        sign_nibbles_of_pairs,
    },
    hadamard::{Signs, unpack_pairs},
    philox::{Random, block_words},
    ptx,
    scale::scale_byte,
    words::unpack,
};

/// Lines per tile.
pub const LINES: usize = 32;
/// Tasks per phase: a line by an eighth of the group.
pub const TASKS: usize = LINES * 8;
/// Values of a tile in shared memory, including the padding of either layout.
pub const TILE: usize = 4384;
/// Pitch of a line in the arrays of block sums and scales: eight, plus one against bank conflicts.
pub const SUMS: usize = 9;

/// Scale factors derived from the amax of the transformed values: steps 2 and 3.
#[derive(CubeType, Clone, Copy)]
pub struct EdenScale {
    /// `amax'`.
    pub amax: f32,
    /// `m`.
    pub block: f32,
    /// `D`.
    pub decode: f32,
}

#[cube]
impl EdenScale {
    /// Derives the scale from the amax and the two factors of the target.
    pub fn from_amax(amax: f32, amax_factor: f32, block_factor: f32) -> EdenScale {
        let scaled = amax * amax_factor;
        let overflows = scaled > f32::MAX && amax <= f32::MAX;
        let stored = select(overflows, f32::MAX, scaled);
        let quotient = 2688.0f32 / stored;
        let usable = quotient > 0.0f32 && stored > 0.0f32;
        let clamped = select(quotient > f32::MAX, f32::MAX, quotient);
        let encode = select(usable, clamped, 1.0f32);
        EdenScale {
            amax: stored,
            block: encode * block_factor,
            decode: 1.0f32 / encode,
        }
    }

    /// Returns the scale byte of a block before its correction: step 4.
    pub fn block_scale(&self, amax: f32, #[comptime] conversion: Conversion) -> u32 {
        let scaled = amax * self.block;
        let byte = scale_byte(select(scaled > f32::MAX, f32::MAX, scaled), conversion);
        select(byte == 0u32, 0x38u32, byte)
    }

    /// Returns `e` of step 4.
    pub fn encode_multiplier(&self, scale: u32, #[comptime] conversion: Conversion) -> f32 {
        let product = decode_e4m3(scale) * self.decode;
        let multiplier = if comptime!(conversion.has_ptx()) {
            ptx::rcp_rn(product)
        } else {
            1.0f32 / product
        };
        select(multiplier > f32::MAX, f32::MAX, multiplier)
    }
}

/// Returns the index in shared memory of position `k` of a group and line `line`. If `across`,
/// neighbouring lines are adjacent, as in the source; otherwise neighbouring positions. The padding
/// puts the 32 values that a plane accesses at once in 32 banks, in every phase.
#[cube]
pub fn slot(k: usize, line: usize, #[comptime] across: bool) -> usize {
    if comptime!(across) {
        k * 33usize + (k / 16usize) * 20usize + line
    } else {
        line * 136usize + (k / 16usize) * 17usize + k % 16usize
    }
}

/// Returns the signs of segment `segment` (16 elements), in the low bits.
#[cube]
pub fn segment_signs(signs: &Signs, segment: usize) -> u32 {
    let low = select(segment < 2usize, signs.word0, signs.word1);
    let high = select(segment < 6usize, signs.word2, signs.word3);
    let word = select(segment < 4usize, low, high);
    select(segment % 2usize == 1usize, word >> 16u32, word)
}

/// Applies the signs of a segment; `word` is that of [`segment_signs()`].
#[cube]
pub fn flip_segment(block: &mut Array<f32>, word: u32) {
    #[unroll]
    for i in 0..16usize {
        let flip = (word << comptime!(31 - i as u32)) & 0x8000_0000u32;
        block[i] = f32::reinterpret(u32::reinterpret(block[i]) ^ flip);
    }
}

/// Applies signs and distances 1 to 8 to one segment: the first half of the transform.
#[cube]
pub fn transform_segment(block: &mut Array<f32>, signs: &Signs, segment: usize) {
    flip_segment(block, segment_signs(signs, segment));
    #[unroll]
    for stage in 0..4u32 {
        let distance = comptime!(1usize << stage);
        #[unroll]
        for i in 0..16usize {
            if comptime!(i & distance == 0) {
                let a = block[i];
                let b = block[comptime!(i + distance)];
                block[i] = a + b;
                block[comptime!(i + distance)] = a - b;
            }
        }
    }
}

/// Returns the segment of a task in phases over segments: neighbouring units take neighbouring
/// segments.
#[cube]
pub fn segment_of(task: usize) -> usize {
    task % 8usize
}

/// Returns the line of a task in phases over segments.
#[cube]
pub fn line_of(task: usize) -> usize {
    task / 8usize
}

/// Loads one segment from shared memory.
#[cube]
pub fn load_segment(
    tile: &[f32],
    segment: usize,
    line: usize,
    #[comptime] across: bool,
) -> Array<f32> {
    let base = slot(segment * 16usize, line, across);
    let step = comptime!(if across { 33usize } else { 1 });
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        block[i] = tile[base + comptime!(i * step)];
    }
    block
}

/// The inverse of [`load_segment()`].
#[cube]
pub fn store_segment(
    block: &Array<f32>,
    tile: &mut [f32],
    segment: usize,
    line: usize,
    #[comptime] across: bool,
) {
    let base = slot(segment * 16usize, line, across);
    let step = comptime!(if across { 33usize } else { 1 });
    #[unroll]
    for i in 0..16usize {
        tile[base + comptime!(i * step)] = block[i];
    }
}

/// Applies distances 16 to 64, the factor, and rounding in place: the second half of the transform.
/// A task has two times eight values, 16 positions apart. `hardware` rounds by the conversion
/// instruction, which yields a different NaN but otherwise identical results.
#[cube]
pub fn transform_between_segments(
    tile: &mut [f32],
    #[comptime] across: bool,
    #[comptime] hardware: bool,
) {
    let step = comptime!(if across { 16usize * 33 + 20 } else { 17 });
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let mut line = task / 8usize;
        let mut position = task % 8usize;
        if comptime!(across) {
            line = task % 32usize;
            position = task / 32usize;
        }
        #[unroll]
        for half in 0..2usize {
            let base = slot(position + comptime!(half * 8), line, across);
            let mut values = Array::<f32>::new(8usize);
            #[unroll]
            for s in 0..8usize {
                values[s] = tile[base + comptime!(s * step)];
            }
            #[unroll]
            for stage in 0..3u32 {
                let distance = comptime!(1usize << stage);
                #[unroll]
                for s in 0..8usize {
                    if comptime!(s & distance == 0) {
                        let a = values[s];
                        let b = values[comptime!(s + distance)];
                        values[s] = a + b;
                        values[comptime!(s + distance)] = a - b;
                    }
                }
            }
            #[unroll]
            for pair in 0..4usize {
                let factor = comptime!(HadamardSize::H128.factor());
                let low = fma(values[comptime!(pair * 2)], factor, 0.0f32);
                let high = fma(values[comptime!(pair * 2 + 1)], factor, 0.0f32);
                let at = base + comptime!(pair * 2 * step);
                if comptime!(hardware) {
                    let word = ptx::cvt_rn_bf16x2(low, high);
                    tile[at] = f32::reinterpret(word << 16u32);
                    tile[at + step] = f32::reinterpret(word & 0xFFFF_0000u32);
                } else {
                    tile[at] = round_to_bf16(low);
                    tile[at + step] = round_to_bf16(high);
                }
            }
        }
        task += CUBE_DIM as usize;
    }
}

/// Returns the largest magnitude of a segment, as bits.
#[cube]
pub fn segment_amax(block: &Array<f32>) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..16usize {
        bits = max(bits, magnitude_bits(block[i]));
    }
    bits
}

/// The two sums of a block in step 5.
#[derive(CubeType, Clone, Copy)]
pub struct EdenSums {
    /// `Σ y · y`.
    pub xx: f32,
    /// `Σ y · q`.
    pub xq: f32,
}

/// Codes of a block with its sums.
#[derive(CubeType)]
pub struct EdenBlock {
    /// Codes, two words.
    pub codes: Vector<u32, Const<2>>,
    /// Sums.
    pub sums: EdenSums,
}

/// Decoded codes of a block with its sums.
#[derive(CubeType)]
pub struct EdenRounded {
    /// Eight pairs of bf16.
    pub pairs: Array<u32>,
    /// Sums.
    pub sums: EdenSums,
}

/// The code nearest to a magnitude.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Nearest {
    /// Value of the code.
    value: f32,
    /// A word whose lowest byte is the code.
    code: u32,
}

/// Returns the code nearest to a magnitude of at most 6.
///
/// The unit in the last place of `2²²` times the power of two below the magnitude (at least 1) is
/// the distance between two grid points. The sum rounds to the grid, with ties to even codes, and
/// ends in the index of the grid point within its binade. Exponent and top bit of the mantissa are
/// 298, and two more per binade above 1, as many as there are codes in it; 214 grid points in the
/// sum make that 512.
#[cube]
fn nearest(magnitude: f32) -> Nearest {
    let binade = max(u32::reinterpret(magnitude), 0x3F80_0000u32) & 0x7F80_0000u32;
    let place = f32::reinterpret((binade | 214u32) + comptime!(22u32 << 23));
    let sum = magnitude + place;
    let bits = u32::reinterpret(sum);
    Nearest {
        value: sum - place,
        code: bits + (bits >> 22u32),
    }
}

/// Returns the value of the code nearest to a magnitude of at most 6: [`nearest()`] without the
/// code.
#[cube]
fn nearest_value(magnitude: f32) -> f32 {
    let binade = max(u32::reinterpret(magnitude), 0x3F80_0000u32) & 0x7F80_0000u32;
    let binade = f32::reinterpret(binade);
    let sum = fma(binade, comptime!((1u32 << 22) as f32), magnitude);
    fma(binade, comptime!(-((1u32 << 22) as f32)), sum)
}

/// Returns codes and sums of a block.
#[cube]
pub fn quantize_block(
    block: &Array<f32>,
    multiplier: f32,
    #[comptime] conversion: Conversion,
) -> EdenBlock {
    let mut scaled = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        scaled[i] = block[i] * multiplier;
    }
    let mut codes = Vector::<u32, Const<2>>::empty();
    let mut xx = 0.0f32;
    let mut xq = 0.0f32;
    #[unroll]
    for half in 0..2usize {
        let mut word = 0u32;
        #[unroll]
        for i in 0..8usize {
            let y = scaled[comptime!(half * 8 + i)];
            let bits = u32::reinterpret(y);
            let magnitude = bits & 0x7FFF_FFFFu32;
            // Saturates at 6, also for NaN: the following operations are on finite values.
            let found = nearest(f32::reinterpret(min(magnitude, 0x40C0_0000u32)));
            word |= (found.code & 7u32) << comptime!(4 * i as u32);
            word |= (bits >> comptime!(28 - 4 * i as u32)) & comptime!(8u32 << (4 * i));
            // Magnitudes give the same sums, since both factors have the same sign.
            let y = f32::reinterpret(magnitude);
            xx = fma(y, y, xx);
            xq = fma(y, found.value, xq);
        }
        if comptime!(conversion.has_nearest()) {
            codes.insert(
                half,
                nearest_codes(&scaled, comptime!(half * 8), conversion),
            );
        } else {
            // A value is NaN if the multiplier is, and then all are: 6 without a sign.
            codes.insert(half, select(multiplier.is_nan(), 0x7777_7777u32, word));
        }
    }
    let sums = EdenSums { xx, xq };
    EdenBlock { codes, sums }
}

/// [`quantize_block()`] of a block as eight bf16 pairs, returning the decoded values, which takes
/// fewer instructions than codes. Requires PTX.
#[cube]
pub fn round_pairs(pairs: &Array<u32>, multiplier: f32) -> EdenRounded {
    let mut values = Array::<u32>::new(8usize);
    let mut xx = 0.0f32;
    let mut xq = 0.0f32;
    #[unroll]
    for pair in 0..8usize {
        let mut two = Array::<u32>::new(2usize);
        #[unroll]
        for odd in 0..2usize {
            let value = unpack(pairs[pair], comptime!(odd as u32), FloatKind::Bf16);
            let y = value * multiplier;
            // Saturates at 6, also for NaN, which the multiplication made positive.
            let found = nearest_value(ptx::min_abs(y, 6.0f32));
            let found = (u32::reinterpret(y) & 0x8000_0000u32) | u32::reinterpret(found);
            xx = fma(y, y, xx);
            xq = fma(y, f32::reinterpret(found), xq);
            two[odd] = found;
        }
        // At most two significant bits: the upper half, a bf16, is exact.
        values[pair] = ptx::prmt(two[0], two[1], 0x7632u32);
    }
    let sums = EdenSums { xx, xq };
    EdenRounded {
        pairs: values,
        sums,
    }
}

/// [`quantize_block()`] of a block as eight bf16 pairs. Requires PTX.
#[cube]
pub fn quantize_pairs(
    pairs: &Array<u32>,
    multiplier: f32,
    #[comptime] conversion: Conversion,
) -> EdenBlock {
    let mut block = Array::<f32>::new(16usize);
    unpack_pairs(pairs, &mut block, 16usize);
    #[unroll]
    for i in 0..16usize {
        block[i] *= multiplier;
    }
    let mut codes = Vector::<u32, Const<2>>::empty();
    let mut xx = 0.0f32;
    let mut xq = 0.0f32;
    #[unroll]
    for half in 0..2usize {
        let mut bytes = Array::<u32>::new(4usize);
        #[unroll]
        for pair in 0..4usize {
            let mut two = Array::<u32>::new(2usize);
            #[unroll]
            for odd in 0..2usize {
                let y = block[comptime!(half * 8 + pair * 2 + odd)];
                let found = nearest(ptx::min_abs(y, 6.0f32));
                xx = fma(y, y, xx);
                xq = fma(y.abs(), found.value, xq);
                two[odd] = found.code;
            }
            bytes[pair] = two[1] * 16u32 + two[0];
        }
        if comptime!(conversion.has_nearest()) {
            codes.insert(half, nearest_codes(&block, comptime!(half * 8), conversion));
        } else {
            let low = ptx::prmt(bytes[0], bytes[1], 0x40u32);
            let high = ptx::prmt(bytes[2], bytes[3], 0x40u32);
            let signs = sign_nibbles_of_pairs(pairs, comptime!(half * 4)) & 0x8888_8888u32;
            let word = ptx::prmt(low, high, 0x5410u32) | signs;
            codes.insert(half, select(multiplier.is_nan(), 0x7777_7777u32, word));
        }
    }
    let sums = EdenSums { xx, xq };
    EdenBlock { codes, sums }
}

/// Returns the correction of a group: step 6.
#[cube]
pub fn eden_correction(xx: f32, xq: f32) -> f32 {
    let ratio = xx / xq;
    let usable = xq > 0.0f32 && ratio <= f32::MAX;
    select(usable, ratio, 1.0f32)
}

/// Rounding of step 7; see
/// [`reference::round_scale_stochastic`](crate::reference::round_scale_stochastic).
#[cube]
pub fn round_scale_stochastic(value: f32, random: u32, #[comptime] conversion: Conversion) -> u32 {
    let bits = u32::reinterpret(value);
    let dithered = ((bits + (random << 4u32)) >> 20u32) - 960u32;
    // From 2^-6 up to but excluding 448: a difference of bits, because the value is not negative.
    let normal = bits - 0x3C80_0000u32 < 0x0760_0000u32;
    // The upper byte has the conversion of the second value, zero.
    select(normal, dithered, scale_byte(value, conversion))
}

/// Returns the eight scale bytes of the group of one line: steps 5 to 7, from the sums and bytes of
/// its blocks. `index` is the logical index of the group.
#[cube]
pub fn correct_group(
    xx: &[f32],
    xq: &[f32],
    bytes: &[u32],
    line: usize,
    index: u64,
    random: &Random,
    #[comptime] conversion: Conversion,
) -> Vector<u32, Const<2>> {
    let base = line * comptime!(SUMS);
    let mut group_xx = 0.0f32;
    let mut group_xq = 0.0f32;
    #[unroll]
    for b in 0..8usize {
        let scale = decode_e4m3(bytes[base + b]);
        let weight = scale * scale;
        group_xx = fma(weight, xx[base + b], group_xx);
        group_xq = fma(weight, xq[base + b], group_xq);
    }
    let correction = eden_correction(group_xx, group_xq);
    let words = block_words(index, random);
    let mut scales = Vector::<u32, Const<2>>::empty();
    #[unroll]
    for half in 0..2usize {
        let mut word = 0u32;
        #[unroll]
        for i in 0..4usize {
            let b = comptime!(half * 4 + i);
            let random = (words[comptime!(b / 2)] >> comptime!(16 * (b as u32 % 2))) & 0xFFFFu32;
            let corrected = decode_e4m3(bytes[base + b]) * correction;
            word |=
                round_scale_stochastic(corrected, random, conversion) << comptime!(8 * i as u32);
        }
        scales.insert(half, word);
    }
    scales
}
