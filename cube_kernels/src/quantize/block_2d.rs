//! 16x16 tiles with one scale each. The columnwise tensor is the exact transpose of the rowwise
//! one, so that nothing is quantized twice.

use cubecl::prelude::*;

use super::{
    plan::QuantOut,
    scale_table::ScaleTable,
    tile::{self, Shape, Tile},
    tile_memory::{CODE_PITCH, TileMemory, TilePlan, tile_count},
};
use crate::{
    BlockScaling, ErrorNorm,
    cube::{
        block::{block_amax, candidate_errors, candidate_scales, pairs_amax, stays_below_7},
        codec::{Conversion, magnitude_bits},
        ptx,
        scale::swizzled_at,
        words::unpack_block,
    },
    tensor::FloatKind,
};

/// Chooses the scale bytes of the 16x16 tiles of a tile in shared memory. Bit 8 is set if
/// [`stays_below_7()`] holds for the whole 16x16 tile. Synchronizes before it returns.
#[cube]
pub(super) fn choose_tile_scales(
    memory: &mut TileMemory,
    table: &ScaleTable,
    #[comptime] tiled: TilePlan,
) {
    let (plan, kind) = comptime!((tiled.either(), tiled.kind));
    let units = comptime!(tiled.units);
    let global = table.global();
    let conversion = comptime!(plan.policy.conversion);
    let blocks = comptime!(tile::blocks(kind));
    let per_row = comptime!(tile::row_blocks(kind));
    let count = comptime!(tile_count(kind));
    for turn in 0..comptime!(blocks / units) {
        let place = tile::row_place(turn, units, kind);
        let words = tile::load_row_block(&memory.data, place.row, place.block, conversion, kind);
        let amax = if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16) {
            pairs_amax(&words, 0usize)
        } else {
            block_amax(&unpack_block(&words, kind), 0usize, conversion)
        };
        memory.partial[place.row * per_row + place.block] = magnitude_bits(amax);
    }
    sync_cube();
    let mut item = UNIT_POS as usize;
    while item < count {
        let first = (item / per_row) * (16usize * per_row) + item % per_row;
        let mut bits = 0u32;
        for r in 0..16usize {
            bits = max(bits, memory.partial[first + r * per_row]);
        }
        let amax = f32::reinterpret(bits);
        memory.tile_scales[item] = match comptime!(plan.policy.scaling) {
            BlockScaling::FourOverSix(_) => {
                // Stores both candidates, the one for 6 in the low byte.
                let both = candidate_scales(amax, &global, conversion);
                both.extract(0usize) | (both.extract(1usize) << 8u32)
            }
            _ => {
                let scale = global.block_scale(amax, plan.policy.scaling, conversion);
                let below_7 = stays_below_7(amax, table.multipliers[scale as usize]);
                scale | (u32::cast_from(below_7) << 8u32)
            }
        };
        item += CUBE_DIM as usize;
    }
    sync_cube();
    if comptime!(matches!(plan.policy.scaling, BlockScaling::FourOverSix(_))) {
        let norm = comptime!(match plan.policy.scaling {
            BlockScaling::FourOverSix(norm) => norm,
            _ => ErrorNorm::Mae,
        });
        for turn in 0..comptime!(blocks / units) {
            let place = tile::row_place(turn, units, kind);
            let words =
                tile::load_row_block(&memory.data, place.row, place.block, conversion, kind);
            let block = unpack_block(&words, kind);
            let both = memory.tile_scales[(place.row / 16usize) * per_row + place.block];
            let mut scales = Vector::<u32, Const<2>>::empty();
            scales.insert(0usize, both & 0xFFu32);
            scales.insert(1usize, both >> 8u32);
            let errors = candidate_errors(&block, 0usize, scales, &global, norm, conversion);
            let target = place.row * per_row + place.block;
            memory.partial[target] = u32::reinterpret(errors.extract(0usize));
            memory.partial[target + blocks] = u32::reinterpret(errors.extract(1usize));
        }
        sync_cube();
        let mut item = UNIT_POS as usize;
        while item < count {
            let first = (item / per_row) * (16usize * per_row) + item % per_row;
            let six = sum_of_rows(&memory.partial, first, per_row);
            let four = sum_of_rows(&memory.partial, first + blocks, per_row);
            let both = memory.tile_scales[item];
            memory.tile_scales[item] = select(four < six, both >> 8u32, both & 0xFFu32);
            item += CUBE_DIM as usize;
        }
        sync_cube();
    }
}

/// Returns the sum of the errors of 16 rows, in the tree order of the specification (section 7).
#[cube]
fn sum_of_rows(errors: &Shared<[u32]>, first: usize, #[comptime] per_row: usize) -> f32 {
    let mut rows = Array::<f32>::new(16usize);
    #[unroll]
    for r in 0..16usize {
        rows[r] = f32::reinterpret(errors[first + r * per_row]);
    }
    #[unroll]
    for stage in 0..4u32 {
        let width = comptime!(8usize >> stage);
        #[unroll]
        for r in 0..width {
            rows[r] += rows[comptime!(r + width)];
        }
    }
    rows[0]
}

/// Returns the index of the two staged words of codes of a block along a row. Units that transpose
/// 16 rows of eight columns each read words of four neighbouring columns of eight times 16 rows,
/// which are all in different banks.
#[cube]
pub fn code_at(row: usize, block: usize) -> usize {
    row * CODE_PITCH + row / 8usize * 2usize + block * 2usize
}

/// Writes the transposed codes of a tile, and the scales of its 16x16 tiles for each of their
/// columns. A unit transposes 16 rows of eight columns at a time.
#[cube]
pub(super) fn write_transposed(
    memory: &TileMemory,
    tile: &Tile,
    shape: &Shape,
    out: &mut QuantOut,
    #[comptime] tiled: TilePlan,
) {
    let (plan, kind) = comptime!((tiled.col.unwrap(), tiled.kind));
    let units = comptime!(tiled.units);
    let conversion = comptime!(plan.policy.conversion);
    let per_row = comptime!(tile::row_blocks(kind));
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(16);
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    let start = shape.cols * tile.units_before;
    let padded_group = group_blocks.div_ceil(4);
    let padded_start = shape.cols.div_ceil(128) * 128usize * tile.padded_before * 4usize;
    let mut item = UNIT_POS as usize;
    while item < comptime!(8 * 2 * tile::row_blocks(kind)) {
        // Neighbouring units take the 16-row blocks of the same columns, which are adjacent in the
        // result.
        let place = item % 8usize;
        let eight = item / 8usize;
        let block = block0 + place;
        let column0 = tile.col0 + eight * 8usize;
        let inside = block < group_blocks;
        let scale = if inside {
            memory.tile_scales[place * per_row + eight / 2usize] & 0xFFu32
        } else {
            0u32.runtime()
        };
        let first = code_at(place * 16usize, 0usize) + eight;
        let mut low = Array::<u32>::new(8usize);
        let mut high = Array::<u32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            low[i] = memory.partial[first + comptime!(i * CODE_PITCH)];
            high[i] = memory.partial[first + comptime!((8 + i) * CODE_PITCH + 2)];
        }
        transpose_8x8(&mut low, conversion);
        transpose_8x8(&mut high, conversion);
        #[unroll]
        for j in 0..8usize {
            let column = column0 + j;
            if inside && column < shape.cols {
                let mut pair = Vector::<u32, Const<2>>::empty();
                pair.insert(0usize, low[j]);
                pair.insert(1usize, high[j]);
                let at = start + column * group_blocks + block;
                out.store_codes(at, pair);
                if comptime!(!plan.swizzled) {
                    out.store_scale(at, scale);
                }
            }
            if comptime!(plan.swizzled) {
                // Columns and blocks after the last one pad the layout with zeros.
                if block < padded_group * 4usize {
                    let target = padded_start + swizzled_at(column, block, padded_group);
                    let byte = select(column < shape.cols, scale, 0u32);
                    out.store_scale(target, byte);
                }
            }
        }
        item += units;
    }
}

/// Transposes eight words of eight nibbles: nibble `i` of word `j` becomes nibble `j` of word `i`.
/// Exchanges halves, then bytes, then nibbles.
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

/// Returns bytes of `a` (numbers 0 to 3) and `b` (4 to 7), selected by the nibbles of `selector`,
/// lowest first.
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
