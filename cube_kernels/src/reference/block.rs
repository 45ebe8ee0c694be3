//! Loading blocks from a matrix, and turning one block into codes.

use super::{Element, philox, round_nearest, round_stochastic};
use crate::{BLOCK, Rounding};

/// Fills `tile` with 16 columns of a `rows` x `cols` matrix, from (`row0`, `col0`) on; zeros beyond
/// the matrix.
#[inline(always)]
pub(super) fn load_rows<T: Element>(
    x: &[T],
    (rows, cols): (usize, usize),
    (row0, col0): (usize, usize),
    tile: &mut [[f32; BLOCK]],
) {
    let width = BLOCK.min(cols - col0);
    for (r, row) in tile.iter_mut().enumerate() {
        *row = [0f32; BLOCK];
        if row0 + r < rows {
            let source = &x[(row0 + r) * cols + col0..][..width];
            for (value, source) in row.iter_mut().zip(source) {
                *value = source.to_f32();
            }
        }
    }
}

/// The 16x16 tile at (`row0`, `col0`) as 16 rows; zeros beyond the matrix.
#[inline(always)]
pub(super) fn load_tile<T: Element>(
    x: &[T],
    shape: (usize, usize),
    origin: (usize, usize),
) -> [[f32; BLOCK]; BLOCK] {
    let mut tile = [[0f32; BLOCK]; BLOCK];
    load_rows(x, shape, origin, &mut tile);
    tile
}

/// Rows from columns, and columns from rows.
#[inline]
pub(super) fn transpose(tile: &[[f32; BLOCK]; BLOCK]) -> [[f32; BLOCK]; BLOCK] {
    std::array::from_fn(|c| std::array::from_fn(|r| tile[r][c]))
}

/// The largest magnitude in `rows`. Magnitudes compare as integers, NaN above infinity.
#[inline(always)]
pub(super) fn magnitude(rows: &[[f32; BLOCK]]) -> f32 {
    let bits = rows
        .as_flattened()
        .iter()
        .fold(0, |max: u32, value| max.max(value.to_bits() & 0x7FFF_FFFF));
    f32::from_bits(bits)
}

/// Eight bytes of codes for `block`, given the factor that brings it onto the grid. `index` is the
/// block's logical index in the stored matrix, from which stochastic rounding draws its bits.
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
fn pack_codes(codes: &[u8; BLOCK]) -> [u8; 8] {
    std::array::from_fn(|i| codes[2 * i] | codes[2 * i + 1] << 4)
}
