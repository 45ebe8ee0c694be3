//! Codes of 16x16 tiles, transposed in shared memory: the column-wise copy of such tiles is the exact
//! transpose of the row-wise one, so nothing is quantized twice.

use cubecl::prelude::*;

use super::{
    plan::QuantPlan,
    tile::{self, ROWS, Shape, Tile},
};
use crate::{
    cube::{codec::Conversion, ptx, scale::swizzled_at},
    tensor::FloatKind,
};

/// Words of codes from one row of a tile to the next: 16, and two that spread rows over banks.
const PITCH: usize = 18;

/// Words of codes of a tile, each 8 rows two further on; see [`code_at()`].
pub(crate) const LEN: usize = ROWS * PITCH + ROWS / 8 * 2;

/// Where the two words of codes of a block along a row wait. Units that transpose 16 rows of eight columns
/// each read words of four neighbouring columns of eight times 16 rows: all in different banks.
#[cube]
pub fn code_at(row: usize, block: usize) -> usize {
    row * PITCH + row / 8usize * 2usize + block * 2usize
}

/// Writes the transposed codes of a tile, and the scales of its 16x16 tiles for each of their columns. A
/// unit takes 16 rows of eight columns at a time.
#[cube]
pub fn write_transposed<C: Size>(
    copy: &Shared<[u32]>,
    tile_scales: &Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    codes: &mut [Vector<u32, C>],
    scales: &mut [u8],
    #[comptime] units: usize,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) {
    let conversion = comptime!(plan.policy.conversion);
    let per_row = comptime!(tile::row_blocks(kind));
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(16);
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    let start = shape.cols * tile.units_before;
    let padded_group = group_blocks.div_ceil(4);
    let padded_start = shape.cols.div_ceil(128) * 128usize * tile.padded_before * 4usize;
    let mut item = UNIT_POS as usize;
    while item < comptime!(8 * 2 * tile::row_blocks(kind)) {
        // Neighbours take the 16-row blocks of the same columns, which lie side by side in the copy.
        let place = item % 8usize;
        let eight = item / 8usize;
        let block = block0 + place;
        let column0 = tile.col0 + eight * 8usize;
        let inside = block < group_blocks;
        let scale = if inside {
            tile_scales[place * per_row + eight / 2usize] & 0xFFu32
        } else {
            0u32.runtime()
        };
        let first = code_at(place * 16usize, 0usize) + eight;
        let mut low = Array::<u32>::new(8usize);
        let mut high = Array::<u32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            low[i] = copy[first + comptime!(i * PITCH)];
            high[i] = copy[first + comptime!((8 + i) * PITCH + 2)];
        }
        transpose_8x8(&mut low, conversion);
        transpose_8x8(&mut high, conversion);
        #[unroll]
        for j in 0..8usize {
            let column = column0 + j;
            if inside && column < shape.cols {
                let mut pair = Vector::<u32, C>::empty();
                pair.insert(0usize, low[j]);
                pair.insert(1usize, high[j]);
                codes[start + column * group_blocks + block] = pair;
                if comptime!(!plan.swizzled) {
                    scales[start + column * group_blocks + block] = u8::cast_from(scale);
                }
            }
            if comptime!(plan.swizzled) {
                // Columns behind the last one and blocks behind the last one pad the layout with zeros.
                if block < padded_group * 4usize {
                    let target = padded_start + swizzled_at(column, block, padded_group);
                    let byte = select(column < shape.cols, scale, 0u32);
                    scales[target] = u8::cast_from(byte);
                }
            }
        }
        item += units;
    }
}

/// Transposes eight words of eight nibbles: nibble `i` of word `j` becomes nibble `j` of word `i`.
/// Halves, then bytes, then nibbles change places.
#[cube]
pub fn transpose_8x8(words: &mut Array<u32>, #[comptime] conversion: Conversion) {
    #[unroll]
    for i in 0..4usize {
        let (a, b) = (words[i], words[i + 4]);
        words[i] = bytes_of(a, b, 0x5410u32, conversion);
        words[i + 4] = bytes_of(a, b, 0x7632u32, conversion);
    }
    #[unroll]
    for pair in 0..4usize {
        let i = comptime!(pair / 2 * 4 + pair % 2);
        let (a, b) = (words[i], words[i + 2]);
        words[i] = bytes_of(a, b, 0x6240u32, conversion);
        words[i + 2] = bytes_of(a, b, 0x7351u32, conversion);
    }
    #[unroll]
    for pair in 0..4usize {
        let i = comptime!(pair * 2);
        let (a, b) = (words[i], words[i + 1]);
        words[i] = (a & 0x0F0F_0F0Fu32) | ((b & 0x0F0F_0F0Fu32) << 4u32);
        words[i + 1] = ((a >> 4u32) & 0x0F0F_0F0Fu32) | (b & 0xF0F0_F0F0u32);
    }
}

/// Bytes of `a` (numbers 0 to 3) and `b` (4 to 7), chosen by the nibbles of `selector`, lowest first.
#[cube]
fn bytes_of(a: u32, b: u32, #[comptime] selector: u32, #[comptime] conversion: Conversion) -> u32 {
    if comptime!(conversion.has_ptx()) {
        ptx::prmt(a, b, selector)
    } else {
        let mut bytes = 0u32;
        #[unroll]
        for i in 0..4u32 {
            let number = comptime!(selector >> (4 * i) & 7);
            let from = if comptime!(number < 4) { a } else { b };
            let byte = (from >> comptime!(8 * (number % 4))) & 0xFFu32;
            bytes |= byte << comptime!(8 * i);
        }
        bytes
    }
}
