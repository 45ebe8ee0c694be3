//! Loading blocks from a matrix, and turning one block into codes.

use super::{Element, philox, round_nearest, round_stochastic, scaling::GlobalScale};
use crate::{BLOCK, Rounding};

/// The 16x16 tile whose upper left corner is (`row0`, `col0`), transposed: entry `[c][r]`. Elements
/// outside the matrix are zero.
#[inline]
pub(super) fn load_column_tile<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    row0: usize,
    col0: usize,
) -> [[f32; BLOCK]; BLOCK] {
    transpose(&load_row_tile(x, rows, cols, row0, col0))
}

/// The 16x16 tile at (`row0`, `col0`) as 16 rows; zeros beyond the matrix.
#[inline]
pub(super) fn load_row_tile<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    row0: usize,
    col0: usize,
) -> [[f32; BLOCK]; BLOCK] {
    let mut tile = [[0f32; BLOCK]; BLOCK];
    let width = BLOCK.min(cols - col0);
    for (r, row) in tile.iter_mut().take(rows - row0).enumerate() {
        let source = &x[(row0 + r) * cols + col0..][..width];
        for (value, source) in row.iter_mut().zip(source) {
            *value = source.to_f32();
        }
    }
    tile
}

/// Rows from columns, and columns from rows.
#[inline]
pub(super) fn transpose(tile: &[[f32; BLOCK]; BLOCK]) -> [[f32; BLOCK]; BLOCK] {
    std::array::from_fn(|c| std::array::from_fn(|r| tile[r][c]))
}

/// The largest magnitude of a block, as the bits of an `f32`: NaN compares above infinity.
#[inline(always)]
pub(super) fn magnitude_bits(block: &[f32; BLOCK]) -> u32 {
    block
        .iter()
        .fold(0, |max, value| max.max(value.to_bits() & 0x7FFF_FFFF))
}

/// Eight bytes of codes for `block`, given its scale byte. `index` is the block's logical index in
/// the stored matrix, from which stochastic rounding draws its bits.
#[inline(always)]
pub(super) fn encode_block(
    block: &[f32; BLOCK],
    multiplier: f32,
    rounding: &Rounding,
    index: u64,
) -> [u8; 8] {
    let mut codes = [0u8; BLOCK];
    match rounding {
        Rounding::Nearest => {
            for (code, value) in codes.iter_mut().zip(block) {
                *code = round_nearest(value * multiplier);
            }
        }
        Rounding::Stochastic(stream) => {
            let random = philox::block_bytes(stream, index);
            for ((code, value), random) in codes.iter_mut().zip(block).zip(random) {
                *code = round_stochastic(value * multiplier, random);
            }
        }
    }
    pack_codes(&codes)
}

/// Two codes to a byte, the earlier one in the low nibble.
#[inline(always)]
pub(super) fn pack_codes(codes: &[u8; BLOCK]) -> [u8; 8] {
    std::array::from_fn(|i| codes[2 * i] | codes[2 * i + 1] << 4)
}

/// Scale byte and codes of one 1x16 block.
#[inline(always)]
pub(super) fn quantize_block(
    block: &[f32; BLOCK],
    global: &GlobalScale,
    rounding: &Rounding,
    index: u64,
) -> (u8, [u8; 8]) {
    let scale = super::block_scale(f32::from_bits(magnitude_bits(block)), global);
    let multiplier = super::encode_multiplier(scale, global);
    (scale, encode_block(block, multiplier, rounding, index))
}
