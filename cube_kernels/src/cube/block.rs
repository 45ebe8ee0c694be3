//! Quantization of one block of 16 values: its amax, scale byte and codes.

use cubecl::prelude::*;

use super::{
    codec::{
        Conversion, binade_bits, clamp_to_six, decode_e4m3, magnitude_bits, nearest_bits,
        nearest_codes, nearest_word, sign_nibbles, sign_nibbles_of_pairs, stochastic_codes,
        stochastic_word,
    },
    philox::{Numbering, Random, block_words},
    ptx,
    scale::{GlobalScale, scale_byte},
};
use crate::{BlockScaling, ErrorNorm};

/// Comptime configuration of one quantized copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockPlan {
    /// True to round stochastically.
    pub stochastic: bool,
    /// True if the random offset has a part in device memory.
    pub device_offset: bool,
    /// Numbering of blocks for random draws.
    pub numbering: Numbering,
    /// Computation of block scales.
    pub scaling: BlockScaling,
    /// Implementation of conversions.
    pub conversion: Conversion,
}

/// Returns the random source with the device-resident part of its offset, if any, added.
#[cube]
pub fn resolve_offset(random: &Random, offset: &[u32], #[comptime] policy: BlockPlan) -> Random {
    let mut low = random.offset_low;
    let mut high = random.offset_high;
    if comptime!(policy.stochastic && policy.device_offset) {
        low += offset[0];
        // The unsigned addition wrapped if and only if the sum is below a summand.
        high += offset[1] + u32::cast_from(low < random.offset_low);
    }
    Random {
        key_low: random.key_low,
        key_high: random.key_high,
        offset_low: low,
        offset_high: high,
    }
}

/// A quantized block.
#[derive(CubeType, Clone, Copy)]
pub struct Encoded {
    /// Scale byte.
    pub scale: u32,
    /// 16 codes, lowest nibble first.
    pub codes: Vector<u32, Const<2>>,
}

/// Returns the largest magnitude of 16 values from `first` on; NaN if any is NaN.
#[cube]
pub fn block_amax(
    block: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] conversion: Conversion,
) -> f32 {
    if comptime!(conversion.has_ptx()) {
        // Two dependency chains: a single one would have the latency of 16 instructions.
        let mut even = 0.0f32;
        let mut odd = 0.0f32;
        #[unroll]
        for i in 0..8usize {
            even = ptx::max_nan_abs(even, block[comptime!(first + 2 * i)]);
            odd = ptx::max_nan_abs(odd, block[comptime!(first + 2 * i + 1)]);
        }
        ptx::max_nan_abs(even, odd)
    } else {
        let mut bits = 0u32;
        #[unroll]
        for i in 0..16usize {
            bits = max(bits, magnitude_bits(block[comptime!(first + i)]));
        }
        f32::reinterpret(bits)
    }
}

/// Returns the largest magnitude in eight bf16 pairs from `first` on; NaN if any is NaN. Requires
/// PTX.
#[cube]
pub fn pairs_amax(pairs: &Array<u32>, #[comptime] first: usize) -> f32 {
    let both = max_of_pairs(pairs, first, 8usize);
    let low = f32::reinterpret(both << 16u32);
    ptx::max_nan_abs(low, f32::reinterpret(both & 0xFFFF_0000u32))
}

/// Returns the largest magnitudes in the lower and in the upper halves of bf16 pairs, as a pair.
/// Requires PTX.
#[cube]
pub fn max_of_pairs(pairs: &Array<u32>, #[comptime] first: usize, #[comptime] count: usize) -> u32 {
    // Computing magnitudes would cost an instruction each.
    let mut high = pairs[first];
    let mut low = pairs[first];
    #[unroll]
    for i in 1..count {
        high = ptx::max_nan_bf16x2(high, pairs[comptime!(first + i)]);
        low = ptx::min_nan_bf16x2(low, pairs[comptime!(first + i)]);
    }
    // Negates the minimum: one of the two is the largest magnitude, and the other is not above it.
    ptx::max_nan_bf16x2(high, low ^ 0x8000_8000u32)
}

/// Returns scale byte and codes of the 16 values of `block` from `first` on, whose largest
/// magnitude is `amax`. `index` is the logical index of the block in the stored matrix.
#[cube]
pub fn quantize_with_amax(
    block: &Array<f32>,
    #[comptime] first: usize,
    amax: f32,
    global: &GlobalScale,
    index: u64,
    random: &Random,
    #[comptime] policy: BlockPlan,
) -> Encoded {
    let scale = match comptime!(policy.scaling) {
        BlockScaling::FourOverSix(norm) => {
            four_over_six(block, first, amax, global, norm, policy.conversion)
        }
        _ => global.block_scale(amax, policy.scaling, policy.conversion),
    };
    let factor = global.encode_multiplier(scale, policy.conversion);
    let below_7 = stays_below_7(amax, factor);
    Encoded {
        scale,
        codes: encode_block(
            block,
            first,
            &Array::<u32>::new(1usize),
            &Multiplier {
                factor,
                below_7,
                finite: false,
            },
            index,
            random,
            false,
            policy,
        ),
    }
}

/// Returns true if the elements of a block with this largest magnitude and multiplier stay below 7;
/// larger ones must be clamped before they are rounded to nearest. They stay below 7 if the scale
/// byte has full precision. False for NaN.
#[cube]
pub fn stays_below_7(amax: f32, multiplier: f32) -> bool {
    amax * multiplier < 7.0f32
}

/// Multiplier of a block's elements before rounding.
#[derive(CubeType, Clone, Copy)]
pub struct Multiplier {
    /// Factor that corresponds to the scale byte.
    pub factor: f32,
    /// Result of [`stays_below_7()`].
    pub below_7: bool,
    /// True if it is known not to be NaN.
    #[cube(comptime)]
    pub finite: bool,
}

/// Returns the codes of 16 values. If `in_pairs`, `pairs` also holds them as bf16 from pair `first
/// / 2` on, from which their signs take fewer instructions.
#[cube]
pub fn encode_block(
    block: &Array<f32>,
    #[comptime] first: usize,
    pairs: &Array<u32>,
    by: &Multiplier,
    index: u64,
    random: &Random,
    #[comptime] in_pairs: bool,
    #[comptime] policy: BlockPlan,
) -> Vector<u32, Const<2>> {
    let multiplier = by.factor;
    let conversion = comptime!(policy.conversion);
    let native = comptime!(if policy.stochastic {
        conversion.has_stochastic()
    } else {
        conversion.has_nearest()
    });
    let mut codes = Vector::<u32, Const<2>>::empty();
    let words = if comptime!(policy.stochastic) {
        block_words(index, random)
    } else {
        Array::<u32>::new(4usize)
    };
    if comptime!(!native && conversion.has_ptx()) {
        let mut signs = Array::<u32>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            signs[half] = if comptime!(in_pairs) {
                sign_nibbles_of_pairs(pairs, comptime!(first / 2 + half * 4))
            } else {
                sign_nibbles(block, comptime!(first + half * 8))
            };
        }
        if comptime!(policy.stochastic) {
            // If a block contains a NaN, its multiplier is NaN, and so are all its elements.
            let finite = multiplier <= f32::MAX;
            #[unroll]
            for half in 0..2usize {
                let from = comptime!(first + half * 8);
                let low = words[comptime!(half * 2)];
                let high = words[comptime!(half * 2 + 1)];
                let word = stochastic_word(block, from, multiplier, signs[half], low, high);
                codes.insert(
                    half,
                    if comptime!(by.finite) {
                        word
                    } else {
                        select(finite, word, 0x7777_7777u32)
                    },
                );
            }
        } else if by.below_7 {
            #[unroll]
            for half in 0..2usize {
                let from = comptime!(first + half * 8);
                codes.insert(
                    half,
                    nearest_word(block, from, multiplier, signs[half], true),
                );
            }
        } else {
            let finite = multiplier <= f32::MAX;
            #[unroll]
            for half in 0..2usize {
                let from = comptime!(first + half * 8);
                let word = nearest_word(block, from, multiplier, signs[half], false);
                codes.insert(half, select(finite, word, 0x7777_7777u32));
            }
        }
    } else {
        let mut scaled = Array::<f32>::new(16usize);
        #[unroll]
        for i in 0..16usize {
            scaled[i] = block[comptime!(first + i)] * multiplier;
        }
        #[unroll]
        for half in 0..2usize {
            let first = comptime!(half * 8);
            let word = if comptime!(policy.stochastic) {
                let low = words[comptime!(half * 2)];
                let high = words[comptime!(half * 2 + 1)];
                stochastic_codes(&scaled, first, low, high, conversion)
            } else {
                nearest_codes(&scaled, first, conversion)
            };
            codes.insert(half, word);
        }
    }
    codes
}

/// Returns the two candidate scale bytes of four over six for a block or tile with this largest
/// magnitude: for 6, then for 4.
#[cube]
pub fn candidate_scales(
    amax: f32,
    global: &GlobalScale,
    #[comptime] conversion: Conversion,
) -> Vector<u32, Const<2>> {
    let base = global.block_base(amax);
    let mut scales = Vector::<u32, Const<2>>::empty();
    scales.insert(0usize, scale_byte(base, conversion));
    scales.insert(1usize, scale_byte(base * 1.5f32, conversion));
    scales
}

/// Returns the scale byte that four over six selects.
#[cube]
fn four_over_six(
    block: &Array<f32>,
    #[comptime] first: usize,
    amax: f32,
    global: &GlobalScale,
    #[comptime] norm: ErrorNorm,
    #[comptime] conversion: Conversion,
) -> u32 {
    let scales = candidate_scales(amax, global, conversion);
    let errors = candidate_errors(block, first, scales, global, norm, conversion);
    let keeps_four = errors.extract(1usize) < errors.extract(0usize);
    select(keeps_four, scales.extract(1usize), scales.extract(0usize))
}

/// Returns the sums of the errors of the 16 values of `block` from `first` on, element 0 first,
/// when rounded to nearest with each of the scale bytes `scales`.
#[cube]
pub fn candidate_errors(
    block: &Array<f32>,
    #[comptime] first: usize,
    scales: Vector<u32, Const<2>>,
    global: &GlobalScale,
    #[comptime] norm: ErrorNorm,
    #[comptime] conversion: Conversion,
) -> Vector<f32, Const<2>> {
    if comptime!(conversion.has_ptx()) {
        // Division by multiplication needs headroom for its intermediate results; see `divide`. A
        // single test covers all elements; separate tests would serialize them.
        if global.amax > 1e-24f32 && global.amax < 1e30f32 {
            errors_of(block, first, scales, global, norm, true, conversion)
        } else {
            errors_of(block, first, scales, global, norm, false, conversion)
        }
    } else {
        errors_of(block, first, scales, global, norm, false, conversion)
    }
}

/// [`candidate_errors()`], without divisions if the amax of the tensor is `ordinary`.
#[cube]
fn errors_of(
    block: &Array<f32>,
    #[comptime] first: usize,
    scales: Vector<u32, Const<2>>,
    global: &GlobalScale,
    #[comptime] norm: ErrorNorm,
    #[comptime] ordinary: bool,
    #[comptime] conversion: Conversion,
) -> Vector<f32, Const<2>> {
    let mut errors = Vector::<f32, Const<2>>::empty();
    #[unroll]
    for candidate in 0..2usize {
        let scale = scales.extract(candidate);
        let multiplier = global.encode_multiplier(scale, conversion);
        let value = decode_e4m3(scale);
        let mut error = 0.0f32;
        #[unroll]
        for i in 0..16usize {
            let x = block[comptime!(first + i)];
            let magnitude = clamp_to_six(x * multiplier, conversion);
            let binade = binade_bits(magnitude);
            let sum = nearest_bits(magnitude, binade);
            // Exact: both operands are multiples of the grid's step.
            let rounded = f32::reinterpret(sum) - f32::reinterpret(binade) * 4_194_305.0f32;
            // Code and element have the same sign, so magnitudes suffice.
            let decoded = divide(rounded * value * global.amax, ordinary);
            let difference = decoded - x.abs();
            let term = match comptime!(norm) {
                ErrorNorm::Mae => difference.abs(),
                ErrorNorm::Mse => difference * difference,
            };
            if comptime!(conversion.has_ptx()) {
                error = ptx::add_rn(error, term);
            } else {
                error += term;
            }
        }
        errors.insert(candidate, error);
    }
    errors
}

/// Returns `value / 1536`, correctly rounded.
///
/// With `y` the correctly rounded reciprocal and `q` the quotient to within a unit in the last
/// place, `fma(fma(-1536, q, value), y, q)` is the correctly rounded quotient (Markstein, 1990) if
/// nothing under- or overflows, which `ordinary` asserts. Requires PTX in that case.
#[cube]
fn divide(value: f32, #[comptime] ordinary: bool) -> f32 {
    if comptime!(ordinary) {
        let reciprocal = 0.000_651_041_7f32;
        let quotient = value * reciprocal;
        let rest = ptx::fma_rn(-1536.0f32, quotient, value);
        ptx::fma_rn(rest, reciprocal, quotient)
    } else {
        value / 1536.0f32
    }
}
