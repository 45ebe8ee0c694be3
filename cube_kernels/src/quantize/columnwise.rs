//! The columnwise tensor: blocks down the columns of a tile.

use cubecl::prelude::*;

use super::{
    plan::{QuantOut, QuantPlan, QuantTarget},
    scale_table::{BlockRule, ScaleTable, TablePlan, quantize_by_table},
    tile::{self, ColumnItem, Shape, Tile},
    tile_memory::{SCALE_PITCH, STAGE_PITCH, TileMemory, TilePlan},
};
use crate::{
    HadamardSize,
    cube::{
        block::{
            Encoded, Multiplier, block_amax, encode_block, max_of_pairs, pairs_amax,
            quantize_with_amax, stays_below_7,
        },
        hadamard::{Signs, normalize, normalized_pairs, pairs_of, unpack_pairs},
        philox::Random,
        scale::{GlobalScale, LARGEST_USUAL, swizzled_at},
        unscaled::scale_pair,
    },
    tensor::FloatKind,
};

/// Quantizes the blocks down the columns of a tile; codes and scales are staged in shared memory.
#[cube]
pub(super) fn quantize_columns(
    memory: &mut TileMemory,
    tile: &Tile,
    shape: &Shape,
    target: &QuantTarget,
    table: &ScaleTable,
    #[comptime] tiled: TilePlan,
) {
    let (plan, kind) = comptime!((tiled.col.unwrap(), tiled.kind));
    let units = comptime!(tiled.units);
    let random = target.draw.resolve(plan.policy);
    let policy = comptime!(plan.policy);
    let conversion = comptime!(policy.conversion);
    let per_word = comptime!(4 / kind.size());
    let span = comptime!(tile::span(plan.hadamard));
    // True if the amax of a column is computed from words, two columns at once.
    let packed_amax =
        comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none());
    let count = comptime!(span / tile::lanes(plan.hadamard, conversion));
    let shared = comptime!(tile::lanes(plan.hadamard, conversion) > 1);
    // Blocks per stored row of this group's copy, and the first of them in this tile.
    let per_unit = comptime!(span / 16);
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(span) * per_unit;
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    let base = shape.cols * tile.units_before * per_unit;
    let group_scale = table.global();
    let multiple = comptime!(tiled.col_multiple() != 1.0);

    let mut item = UNIT_POS as usize;
    while item < comptime!(tile::column_items(plan.hadamard, conversion)) {
        let at = tile::column_item(item, units, plan.hadamard, conversion);
        let word = at.word;
        let first = block0 + at.block;
        // Units that share a transform stay together; only their stores depend on where the matrix
        // ends.
        if shared || first < group_blocks {
            let words = tile::load_words(&memory.data, at.block * 16usize, word, count, conversion);
            let both = if comptime!(packed_amax) {
                max_of_pairs(&words, 0usize, 16usize)
            } else {
                0u32.runtime()
            };
            #[unroll]
            for half in 0..comptime!(per_word as u32) {
                let c = word * per_word + half as usize;
                let column = tile.col0 + c;
                let inside = first < group_blocks && column < shape.cols;
                if comptime!(multiple) {
                    if inside {
                        let index = base + column * group_blocks + first;
                        let lines = comptime!(tiled.col_lines());
                        let rule = MultipleRule {
                            global: table.of_line(&group_scale, c, lines, plan),
                            index: target.draw.number(index, group_blocks, policy),
                        };
                        let encoded = quantize_multiple(
                            &memory.data,
                            &at,
                            &rule,
                            &target.draw.signs,
                            table,
                            &random,
                            half,
                            tiled,
                        );
                        stage_block(memory, &encoded, word, half as usize, at.block, plan);
                    }
                } else if shared || inside {
                    // Reloaded for the second column: keeping them would take registers that a
                    // fourth cube per SM needs.
                    let words = if comptime!(packed_amax || half == 0) {
                        words
                    } else {
                        tile::load_words(&memory.data, at.block * 16usize, word, count, conversion)
                    };
                    let mut values = tile::unpack_column(
                        &words,
                        &target.draw.signs,
                        at.lane,
                        half,
                        plan.hadamard,
                        plan.default_signs,
                        conversion,
                        kind,
                    );
                    let pairs = transform_column(&mut values, at.lane, count, plan);
                    if inside {
                        let lines = comptime!(tiled.col_lines());
                        let global = table.of_line(&group_scale, c, lines, plan);
                        #[unroll]
                        for b in 0..comptime!(count / 16) {
                            let place = at.block + b;
                            let from = comptime!(b * 16);
                            let largest = if comptime!(packed_amax && half == 0) {
                                f32::reinterpret(both << 16u32)
                            } else if comptime!(packed_amax) {
                                f32::reinterpret(both & 0xFFFF_0000u32)
                            } else if comptime!(conversion.has_ptx() && plan.hadamard.is_some()) {
                                pairs_amax(&pairs, comptime!(from / 2))
                            } else {
                                block_amax(&values, from, conversion)
                            };
                            let index = base + column * group_blocks + first + b;
                            let rule = BlockRule {
                                amax: largest,
                                scale: 0u32.runtime(),
                                below_7: false.runtime(),
                                index: target.draw.number(index, group_blocks, policy),
                            };
                            let by = comptime!(TablePlan {
                                first: from,
                                tiles: false,
                                in_pairs: conversion.has_ptx() && plan.hadamard.is_some(),
                                quant: plan,
                            });
                            let encoded = quantize_by_table(
                                &values, &pairs, &rule, &global, table, &random, by,
                            );
                            stage_block(memory, &encoded, word, half as usize, place, plan);
                        }
                    }
                }
            }
        }
        item += units;
    }
}

/// Stages the codes and the scale of block `place` of a column in shared memory.
#[cube]
fn stage_block(
    memory: &mut TileMemory,
    block: &Encoded,
    word: usize,
    half: usize,
    place: usize,
    #[comptime] plan: QuantPlan,
) {
    let slot = stage_slot(word, half);
    memory.stage[slot + place * 2usize] = block.codes.extract(0usize);
    memory.stage[slot + place * 2usize + 1usize] = block.codes.extract(1usize);
    let scale = if comptime!(plan.unscaled) {
        scale_pair(block.scale)
    } else {
        block.scale
    };
    memory.stage_scales[scale_slot(word, half, place)] = scale;
}

/// Parameters for quantizing a multiple of a block; see [`TilePlan::col_multiple`].
#[derive(CubeType)]
struct MultipleRule {
    /// Scale of the stored row, for these multiples.
    global: GlobalScale,
    /// Block number for random bits.
    index: u64,
}

/// Quantizes four times the transformed values of a column's block if they and their multiplier are
/// in the usual range, and otherwise the values themselves.
///
/// The largest of these multiples is below 2¹²⁰ here, and at least 2⁻⁸⁹: the block's scale is at
/// most twice what it should be. No bit of a value of 2⁻¹²⁶ or more depends on the factor of 1/4.
/// Smaller values, which lose bits by that factor, are below 2⁻³² when they are rounded to E2M1,
/// where only the sign is left of them.
#[cube]
fn quantize_multiple(
    data: &Shared<[u32]>,
    at: &ColumnItem,
    rule: &MultipleRule,
    signs: &Signs,
    table: &ScaleTable,
    random: &Random,
    #[comptime] half: u32,
    #[comptime] tiled: TilePlan,
) -> Encoded {
    let (plan, kind) = comptime!((tiled.col.unwrap(), tiled.kind));
    let policy = comptime!(plan.policy);
    let conversion = comptime!(policy.conversion);
    let mut values = load_column(data, at, signs, half, plan, kind);
    tile::transform_values(&mut values, at.lane, HadamardSize::H16, conversion);
    let pairs = pairs_of(&values, 16usize);
    let largest = pairs_amax(&pairs, 0usize);
    let mut scale = rule.global.block_scale(largest, policy.scaling, conversion);
    let factor = table.multiplier(scale, &rule.global, plan);
    let codes = if largest < LARGEST_MULTIPLE && factor < LARGEST_USUAL {
        unpack_pairs(&pairs, &mut values, 16usize);
        let by = Multiplier {
            factor,
            below_7: stays_below_7(largest, factor),
            finite: true,
        };
        encode_block(
            &values, 0usize, &pairs, &by, rule.index, random, true, policy,
        )
    } else {
        let mut values = load_column(data, at, signs, half, plan, kind);
        let pairs = transform_column(&mut values, at.lane, 16usize, plan);
        let largest = pairs_amax(&pairs, 0usize);
        let global = rule
            .global
            .of_multiples(comptime!(1.0 / tiled.col_multiple()));
        let block = quantize_with_amax(
            &values, 0usize, largest, &global, rule.index, random, policy,
        );
        scale = block.scale;
        block.codes
    };
    Encoded { scale, codes }
}

/// Upper bound in [`quantize_multiple()`]: 2¹²⁰.
const LARGEST_MULTIPLE: f32 = 1_329_227_995_784_915_872_903_807_060_280_344_576.0;

/// Loads the values of a column's block of 16, with the signs of the transform.
#[cube]
fn load_column(
    data: &Shared<[u32]>,
    at: &ColumnItem,
    signs: &Signs,
    #[comptime] half: u32,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let conversion = comptime!(plan.policy.conversion);
    let words = tile::load_words(data, at.block * 16usize, at.word, 16usize, conversion);
    tile::unpack_column(
        &words,
        signs,
        at.lane,
        half,
        plan.hadamard,
        plan.default_signs,
        conversion,
        kind,
    )
}

/// Transforms `count` values of a column if the plan requires it. With PTX, also returns them as
/// bf16 pairs.
#[cube]
fn transform_column(
    values: &mut Array<f32>,
    lane: usize,
    #[comptime] count: usize,
    #[comptime] plan: QuantPlan,
) -> Array<u32> {
    let conversion = comptime!(plan.policy.conversion);
    if comptime!(plan.hadamard.is_some()) {
        let size = comptime!(plan.hadamard.unwrap());
        tile::transform_values(values, lane, size, conversion);
        if comptime!(conversion.has_ptx()) {
            let pairs = normalized_pairs(&*values, count, size);
            unpack_pairs(&pairs, values, count);
            pairs
        } else {
            normalize(values, size, conversion);
            Array::<u32>::new(1usize)
        }
    } else {
        Array::<u32>::new(1usize)
    }
}

/// Returns the index of the staged codes of a column. Neighbouring units hold neighbouring words,
/// so the columns of a word are an odd number of banks apart.
#[cube]
fn stage_slot(word: usize, half: usize) -> usize {
    (half * tile::WORDS + word) * STAGE_PITCH + half
}

/// Returns the index of the staged scale of a column's block. Writes of 8 blocks of two columns,
/// and reads of four neighbouring columns, go to different banks.
#[cube]
fn scale_slot(word: usize, half: usize, place: usize) -> usize {
    place * SCALE_PITCH + half * comptime!(tile::WORDS + 2) + word
}

/// Writes the codes and scales staged in `stage`, or the values that they represent.
#[cube]
pub(super) fn write_columns(
    memory: &TileMemory,
    tile: &Tile,
    shape: &Shape,
    row_blocks: usize,
    out: &mut QuantOut,
    #[comptime] tiled: TilePlan,
) {
    let (plan, kind) = comptime!((tiled.col.unwrap(), tiled.kind));
    let (units, side_by_side) = comptime!((tiled.units, tiled.side_by_side));
    let per_word = comptime!(4 / kind.size());
    let span = comptime!(tile::span(plan.hadamard));
    let per_unit = comptime!(span / 16);
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(span) * per_unit;
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    let whole_tiles = comptime!(plan.whole_tiles);
    let per_padded = comptime!(tile::padded_unit(span) / 16);
    // Start of the group's copy, and pitch of its stored rows. Random bits are drawn for the same
    // blocks in either order.
    let mut start = shape.cols * tile.units_before * per_unit;
    let mut row_pitch = group_blocks;
    if comptime!(whole_tiles) {
        start = tile.padded_before * per_padded;
        row_pitch = row_blocks;
    } else if comptime!(side_by_side) {
        start = tile.units_before * per_unit;
        row_pitch = row_blocks;
    }
    let padded_group = group_blocks.div_ceil(4);
    let padded_base = shape.cols.div_ceil(128) * 128usize * tile.padded_before * per_padded;
    // With units for several whole columns, each iteration handles the same position of later
    // columns.
    let writers = comptime!(plan.writers());
    let across = comptime!(8 * writers);
    let whole = comptime!(units.is_multiple_of(2 * across));
    let step = comptime!(units / across);
    #[unroll(whole)]
    for turn in 0..comptime!(tile::cols(kind) * across / units) {
        let c = if comptime!(whole) {
            UNIT_POS as usize / across + turn * step
        } else {
            (UNIT_POS as usize + turn * units) / across
        };
        let part = if comptime!(whole) {
            UNIT_POS as usize % across
        } else {
            (UNIT_POS as usize + turn * units) % across
        };
        let place = part / writers;
        let column = tile.col0 + c;
        let block = block0 + place;
        let inside = column < shape.cols && block < group_blocks;
        let word = if comptime!(whole) {
            UNIT_POS as usize / across / per_word + turn * comptime!(step / per_word)
        } else {
            c / per_word
        };
        let half = if comptime!(whole) {
            (UNIT_POS as usize / across) % per_word
        } else {
            c % per_word
        };
        let slot = stage_slot(word, half);
        let mut scale = 0u32;
        if comptime!(whole_tiles) {
            // Blocks that pad the last scale tile of the group also have codes: zeros.
            if column < shape.cols && block < padded_group * 4usize && !inside {
                let zeros = Vector::<u32, Const<2>>::new(0u32);
                out.store_codes(start + column * row_pitch + block, zeros);
            }
        }
        if inside {
            if comptime!(plan.unscaled) {
                // One unit per word of codes.
                let vector = (start + column * row_pitch + block) * writers + part % writers;
                let pair = memory.stage_scales[scale_slot(word, half, place)];
                let conversion = comptime!(plan.policy.conversion);
                out.store_word(vector, memory.stage[slot + part], pair, conversion);
            } else {
                let mut pair = Vector::<u32, Const<2>>::empty();
                pair.insert(0usize, memory.stage[slot + place * 2usize]);
                pair.insert(1usize, memory.stage[slot + place * 2usize + 1usize]);
                scale = memory.stage_scales[scale_slot(word, half, place)];
                out.store_codes(start + column * row_pitch + block, pair);
            }
        }
        if comptime!(plan.unscaled) {
            // Unscaled values have no scales.
        } else if comptime!(plan.swizzled) {
            if block < padded_group * 4usize {
                let target = if comptime!(whole_tiles) {
                    // With whole tiles, the tiles of all groups are those of one matrix.
                    swizzled_at(column, start + block, row_blocks / 4usize)
                } else {
                    padded_base + swizzled_at(column, block, padded_group)
                };
                out.store_scale(target, scale);
            }
        } else if inside {
            out.store_scale(start + column * row_pitch + block, scale);
        }
    }
}
