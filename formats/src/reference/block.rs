//! Loads blocks along the rows of a matrix, 16 at a time, and encodes blocks to codes.

use super::{
    Element, Elements,
    hadamard::transform_lanes,
    philox, random_bits,
    rounding::{nearest_code, stochastic_code},
    simd::{Lanes, Tile, lanes},
};
use crate::{BLOCK, Hadamard, Rounding};

/// Fills `rows` with 16 transformed blocks of the rowwise tensor, from block `first` on, with zeros
/// beyond the tensor. Blocks are numbered over the whole tensor, `blocks` per row.
///
/// `first` is a multiple of 16, so that a group of `hadamard` never straddles two calls.
#[inline(always)]
pub(super) fn load_blocks(
    x: Elements<'_>,
    cols: usize,
    blocks: usize,
    first: usize,
    hadamard: Option<&Hadamard>,
    rows: &mut Tile,
) {
    match x {
        Elements::F32(x) => load_blocks_of(x, cols, blocks, first, rows),
        Elements::Bf16(x) => load_blocks_of(x, cols, blocks, first, rows),
        Elements::F16(x) => load_blocks_of(x, cols, blocks, first, rows),
    }
    if let Some(hadamard) = hadamard {
        let values = rows.as_flattened_mut();
        for group in values.chunks_exact_mut(hadamard.size().elements()) {
            transform_lanes(group.as_chunks_mut::<1>().0, hadamard);
        }
    }
}

/// Fills `rows` like [`load_blocks`], without the transform.
#[inline(always)]
fn load_blocks_of<T: Element>(x: &[T], cols: usize, blocks: usize, first: usize, rows: &mut Tile) {
    *rows = [[0f32; BLOCK]; BLOCK];
    if cols == blocks * BLOCK {
        // Without padding, all blocks are contiguous.
        let source = &x[first * BLOCK..];
        let source = &source[..source.len().min(BLOCK * BLOCK)];
        for (value, source) in rows.as_flattened_mut().iter_mut().zip(source) {
            *value = source.to_f32();
        }
    } else {
        for (i, block) in rows.iter_mut().enumerate() {
            let (row, col) = ((first + i) / blocks, (first + i) % blocks * BLOCK);
            if row * cols < x.len() && col < cols {
                let source = &x[row * cols + col..][..BLOCK];
                for (value, source) in block.iter_mut().zip(source) {
                    *value = source.to_f32();
                }
            }
        }
    }
}

/// Returns the codes of the 16 blocks of `tile`, eight little-endian bytes each, given the factors
/// that scale them to the grid. `index` is each block's logical index in the stored matrix, from
/// which stochastic rounding draws its bits.
#[inline(always)]
pub(super) fn encode_tile(
    tile: &Tile,
    multipliers: &Lanes<f32>,
    rounding: &Rounding,
    index: &Lanes<u64>,
) -> Lanes<u64> {
    match rounding {
        Rounding::Nearest => encode_by(|i, lane| nearest_code(tile[i][lane] * multipliers[lane])),
        Rounding::Stochastic(stream) => {
            // Eight blocks at a time: the state of 16 does not fit in registers.
            let mut words = [[0u32; BLOCK]; 4];
            for (part, index) in index.as_chunks::<8>().0.iter().enumerate() {
                let drawn = philox::block_words(stream.offset, stream.key(), index);
                for (words, drawn) in words.iter_mut().zip(drawn) {
                    words[8 * part..][..8].copy_from_slice(&drawn);
                }
            }
            if let Some(order) = random_bits::order() {
                for word in words.as_flattened_mut() {
                    *word = order.software_word(*word);
                }
            }
            encode_by(|i, lane| {
                let random = words[i / 4][lane] >> (8 * (i % 4)) & 0xFF;
                stochastic_code(tile[i][lane] * multipliers[lane], random)
            })
        }
    }
}

/// Packs two codes per byte, the earlier one in the low nibble; `code` returns the code of an
/// element and lane.
#[inline(always)]
fn encode_by(code: impl Fn(usize, usize) -> u32) -> Lanes<u64> {
    let mut words = [[0u32; BLOCK]; 2];
    for (half, word) in words.iter_mut().enumerate() {
        // Last code first, so that each step shifts by the same distance.
        for i in (8 * half..8 * half + 8).rev() {
            for (lane, word) in word.iter_mut().enumerate() {
                *word = *word << 4 | code(i, lane);
            }
        }
    }
    lanes(|lane| words[0][lane] as u64 | (words[1][lane] as u64) << 32)
}
