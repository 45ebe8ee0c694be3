//! Matrices as 32-bit words: two elements of 16 bits, or one of 32.
//!
//! Kernels load and share whole words, independent of their element type, and unpack them for
//! computation. A matrix of 16-bit elements with an odd row length has no words; it is loaded by
//! elements.

use cubecl::prelude::*;
use half::f16;

use super::{
    codec::{Conversion, round_to_bf16},
    ptx::{cvt_rn_bf16x2, cvt_rn_f16x2},
};
use crate::tensor::FloatKind;

/// Returns element `half` of a word (0: the lower, earlier one), exactly.
#[cube]
pub fn unpack(word: u32, #[comptime] half: u32, #[comptime] kind: FloatKind) -> f32 {
    match comptime!(kind) {
        FloatKind::F32 => f32::reinterpret(word),
        FloatKind::Bf16 => {
            if comptime!(half == 0) {
                f32::reinterpret(word << 16u32)
            } else {
                f32::reinterpret(word & 0xFFFF_0000u32)
            }
        }
        FloatKind::F16 => {
            let bits = u16::cast_from((word >> comptime!(16 * half)) & 0xFFFFu32);
            f32::cast_from(f16::reinterpret(bits))
        }
    }
}

/// Packs two values (only `low` if a word is one element), rounded to nearest even, into a word.
#[cube]
pub fn pack(
    low: f32,
    high: f32,
    #[comptime] kind: FloatKind,
    #[comptime] conversion: Conversion,
) -> u32 {
    match comptime!(kind) {
        FloatKind::F32 => u32::reinterpret(low),
        FloatKind::Bf16 => {
            if comptime!(conversion.has_ptx()) {
                cvt_rn_bf16x2(f32::reinterpret(low), f32::reinterpret(high))
            } else {
                (u32::reinterpret(round_to_bf16(low)) >> 16u32)
                    | u32::reinterpret(round_to_bf16(high))
            }
        }
        FloatKind::F16 => {
            if comptime!(conversion.has_ptx()) {
                cvt_rn_f16x2(f32::reinterpret(low), f32::reinterpret(high))
            } else {
                u32::cast_from(u16::reinterpret(f16::cast_from(low)))
                    | (u32::cast_from(u16::reinterpret(f16::cast_from(high))) << 16u32)
            }
        }
    }
}

/// Returns `word` with its elements negated if `negate` is 1.
#[cube]
pub fn flip_signs(word: u32, negate: u32, #[comptime] kind: FloatKind) -> u32 {
    word ^ (negate
        * comptime!(if kind.size() == 4 {
            0x8000_0000u32
        } else {
            0x8000_8000u32
        }))
}

/// Returns the words per block of 16.
pub const fn block_words(kind: FloatKind) -> usize {
    4 * kind.size()
}

/// Loads 16 consecutive elements, whose words start at vector `first`.
#[cube]
pub fn load_block_words<N: Size>(
    x: &[Vector<u32, N>],
    first: usize,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let width = N::value();
    let mut words = Array::<u32>::new(comptime!(block_words(kind)));
    #[unroll]
    for v in 0..comptime!(block_words(kind) / width) {
        let vector = x[first + v];
        #[unroll]
        for i in 0..width {
            words[comptime!(v * width + i)] = vector.extract(i);
        }
    }
    words
}

/// Returns the elements of the words of one block.
#[cube]
pub fn unpack_block(words: &Array<u32>, #[comptime] kind: FloatKind) -> Array<f32> {
    let mut block = Array::<f32>::new(16usize);
    let per_word = comptime!(4 / kind.size());
    #[unroll]
    for i in 0..16usize {
        block[i] = unpack(
            words[comptime!(i / per_word)],
            comptime!((i % per_word) as u32),
            kind,
        );
    }
    block
}
