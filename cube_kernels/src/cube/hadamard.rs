//! The random Hadamard transform; see [`reference::transform`](crate::reference::transform).

use cubecl::prelude::*;

use super::{
    codec::{Conversion, round_to_bf16},
    ptx,
};
use crate::{Hadamard, HadamardSize};

/// Signs of a transform, 32 elements per word: bit `i % 32` of word `i / 32` negates element `i`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Signs {
    /// Elements 0 to 31.
    pub word0: u32,
    /// Elements 32 to 63.
    pub word1: u32,
    /// Elements 64 to 95.
    pub word2: u32,
    /// Elements 96 to 127.
    pub word3: u32,
}

#[cube]
impl Signs {
    /// Returns 1 if element `i` is negated, else 0.
    pub fn bit(&self, #[comptime] i: usize) -> u32 {
        let word = if comptime!(i / 32 == 0) {
            self.word0
        } else if comptime!(i / 32 == 1) {
            self.word1
        } else if comptime!(i / 32 == 2) {
            self.word2
        } else {
            self.word3
        };
        (word >> comptime!(i as u32 % 32)) & 1u32
    }

    /// Returns the signs of elements `16 lane` to `16 lane + 15`, in the lower bits.
    pub fn of_lane(&self, lane: usize) -> u32 {
        let low = select(lane < 2usize, self.word0, self.word1);
        let high = select(lane < 6usize, self.word2, self.word3);
        let word = select(lane < 4usize, low, high);
        word >> ((u32::cast_from(lane) & 1u32) * 16u32)
    }
}

/// Returns the argument of a kernel for these words.
pub(crate) fn signs_launch(words: [u32; 4]) -> SignsLaunch {
    SignsLaunch::new(words[0], words[1], words[2], words[3])
}

/// Returns the signs of an optional transform.
pub(crate) fn signs_of(hadamard: Option<Hadamard>) -> SignsLaunch {
    signs_launch(hadamard.map_or([0; 4], |hadamard| hadamard.sign_words()))
}

/// Finalizer of SplitMix64, as in [`Hadamard::seeded_with_size`].
#[cube]
fn splitmix64(value: u64) -> u64 {
    let z = value + 0x9E37_79B9_7F4A_7C15u64;
    let z = (z ^ (z >> 30u64)) * 0xBF58_476D_1CE4_E5B9u64;
    let z = (z ^ (z >> 27u64)) * 0x94D0_49BB_1331_11EBu64;
    z ^ (z >> 31u64)
}

/// Returns the signs of [`Hadamard::seeded_with_size`] for 128 elements.
#[cube]
pub fn seeded_signs(seed: u64) -> Signs {
    let first = splitmix64(seed);
    let second = splitmix64(seed ^ 0xFFFF_FFFF_FFFF_FFFFu64);
    Signs {
        word0: u32::cast_from(first & 0xFFFF_FFFFu64),
        word1: u32::cast_from(first >> 32u64),
        word2: u32::cast_from(second & 0xFFFF_FFFFu64),
        word3: u32::cast_from(second >> 32u64),
    }
}

/// Computes `values · H` in place, without signs and without the factor: combines neighbours at
/// distances 1, 2, 4, ... in this order.
#[cube]
pub fn butterfly(values: &mut Array<f32>, #[comptime] size: HadamardSize) {
    #[unroll]
    for stage in 0..comptime!(size.elements().ilog2()) {
        combine(values, stage, size.elements());
    }
}

/// Applies stage `stage` of [`butterfly()`] to `elements` elements.
#[cube]
pub fn combine(values: &mut Array<f32>, #[comptime] stage: u32, #[comptime] elements: usize) {
    let distance = comptime!(1usize << stage);
    #[unroll]
    for i in 0..elements {
        if comptime!(i & distance == 0) {
            let a = values[i];
            let b = values[comptime!(i + distance)];
            values[i] = a + b;
            values[comptime!(i + distance)] = a - b;
        }
    }
}

/// Returns the first `count` of `values · 1/√size`, rounded to bf16, in pairs. Requires PTX.
#[cube]
pub fn normalized_pairs(
    values: &Array<f32>,
    #[comptime] count: usize,
    #[comptime] size: HadamardSize,
) -> Array<u32> {
    let factor = comptime!(size.factor());
    let mut pairs = Array::<u32>::new(comptime!(count / 2));
    #[unroll]
    for pair in 0..comptime!(count / 2) {
        let low = values[comptime!(2 * pair)] * factor;
        let high = values[comptime!(2 * pair + 1)] * factor;
        pairs[pair] = ptx::cvt_rn_bf16x2(low, high);
    }
    pairs
}

/// Returns the first `count` of `values`, rounded to bf16, in pairs. Requires PTX.
#[cube]
pub fn pairs_of(values: &Array<f32>, #[comptime] count: usize) -> Array<u32> {
    let mut pairs = Array::<u32>::new(comptime!(count / 2));
    #[unroll]
    for pair in 0..comptime!(count / 2) {
        let low = values[comptime!(2 * pair)];
        pairs[pair] = ptx::cvt_rn_bf16x2(low, values[comptime!(2 * pair + 1)]);
    }
    pairs
}

/// Returns `value · 1/√size`, rounded to bf16. Requires PTX.
#[cube]
pub fn round_normalized(value: f32, #[comptime] size: HadamardSize) -> f32 {
    let pair = ptx::cvt_rn_bf16x2(value * comptime!(size.factor()), 0.0f32);
    f32::reinterpret(pair << 16u32)
}

/// Computes `values · 1/√size`, rounded to bf16: the second half of a transform.
#[cube]
pub fn normalize(
    values: &mut Array<f32>,
    #[comptime] size: HadamardSize,
    #[comptime] conversion: Conversion,
) {
    if comptime!(conversion.has_ptx()) {
        let pairs = normalized_pairs(&*values, comptime!(size.elements()), size);
        unpack_pairs(&pairs, values, comptime!(size.elements()));
    } else {
        let factor = comptime!(size.factor());
        #[unroll]
        for i in 0..comptime!(size.elements()) {
            values[i] = round_to_bf16(values[i] * factor);
        }
    }
}

/// Unpacks the `count` values of bf16 pairs.
#[cube]
pub fn unpack_pairs(pairs: &Array<u32>, values: &mut Array<f32>, #[comptime] count: usize) {
    #[unroll]
    for pair in 0..comptime!(count / 2) {
        values[comptime!(2 * pair)] = f32::reinterpret(pairs[pair] << 16u32);
        values[comptime!(2 * pair + 1)] = f32::reinterpret(pairs[pair] & 0xFFFF_0000u32);
    }
}
