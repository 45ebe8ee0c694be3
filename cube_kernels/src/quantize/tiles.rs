//! Quantization of tiles in shared memory: both tensors from one read, columnwise tensors, and
//! 16x16 tiles.

use cubecl::prelude::*;

use super::{
    block_2d::{choose_tile_scales, code_at, write_transposed},
    columnwise::{quantize_columns, write_columns},
    plan::{QuantArgs, QuantTarget},
    rowwise::{row_amax_of, row_block},
    scale_table::{BlockRule, Lines, ScaleTable, TablePlan, quantize_by_table},
    step::QuantizeStep,
    target::TargetSpec,
    tile::{self, BAND, Grouping, Shape, ShapeLaunch, Tile, tile_bands},
    tile_memory::{TileGrid, TileGridLaunch, TileMemory, TilePlan},
};
use crate::{
    BLOCK, Layout, Nvfp4Error, Usage,
    cube::{block::Encoded, scale::swizzled_at},
    format::swizzle::TILE_INNER,
    launch::Words,
    memory::address_type,
    reference::padding::padded_bound,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Makes the tensors `row` and `col` of `x`, if given, from one read of it.
///
/// Tensors of groups follow one another. Those of [`QuantizeStep::BlocksSideBySide`] are operands
/// of the grouped GEMMs instead, plain matrices with one amax per group, or per stored row of each
/// group: there are `cols` stored rows, in each of which group `g` takes the columns from entry `g`
/// of [`GroupOffsets::aligned`](crate::moe::GroupOffsets::aligned)`(client, x.rows, unit)` on.
/// `unit` is 16 or the size of the transform, and at least 64 with whole tiles. There is space for
/// `padded_bound(x.rows, groups, unit)` columns; those after the last group are not written.
pub(super) fn launch_tiles(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: Option<&TargetSpec>,
    col: Option<&TargetSpec>,
    step: QuantizeStep,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    let is_side_by_side = matches!(step, QuantizeStep::BlocksSideBySide(_));
    let words = Words::of(x);
    let args = |usage, target: Option<&TargetSpec>| {
        target
            .map(|target| QuantArgs::new(client, x, groups, usage, target))
            .transpose()
    };
    let row = args(Usage::Rowwise, row)?;
    let mut col = args(Usage::Columnwise, col)?;
    if let (true, Some(col)) = (is_side_by_side, &mut col) {
        let unit = match col.plan.whole_tiles {
            true => col.out.unit().max(TILE_INNER),
            false => col.out.unit(),
        };
        let layout = Layout {
            rows: padded_bound(x.rows, groups.count(), unit),
            ..col.out.layout
        };
        col.out = DeviceQuantized::empty(client, layout, Groups::One, &col.out.amax);
    }
    let row_blocks = match &col {
        Some(col) if is_side_by_side || col.plan.whole_tiles => col.out.blocks(),
        _ => 0,
    };
    let swizzled_cols = col.as_ref().is_some_and(|col| col.plan.swizzled);
    // Swizzled scales of a columnwise tensor are padded to 128 stored rows, which are columns here.
    let width = tile::cols(x.dtype);
    let unit = if swizzled_cols { 128 } else { width };
    let tile_cols = x.cols.next_multiple_of(unit) / width;
    let row_tiles = groups.units(x.rows, tile::ROWS);
    if x.is_empty() {
        let [row, col] = [row, col].map(|made| made.map(|args| args.out));
        return Ok((row, col));
    }
    let (count, dim) = tile_bands(client, row_tiles, tile_cols);
    let plan = TilePlan {
        row: row.as_ref().map(|row| row.plan),
        col: col.as_ref().map(|col| col.plan),
        tiles: matches!(step, QuantizeStep::Tiles(_)),
        side_by_side: is_side_by_side,
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
        units: dim.x as usize,
        kind: x.dtype,
    };
    let (r, c) = match (&row, &col) {
        (Some(row), Some(col)) => (row, col),
        (Some(made), None) | (None, Some(made)) => (made, made),
        (None, None) => unreachable!("a tensor was asked for"),
    };
    let target = |made: &Option<QuantArgs>, other: &QuantArgs| match made {
        Some(made) => made.target(),
        None => other.absent(),
    };
    let shape = (x.rows, x.cols);
    let map = tile::map_tiles(client, shape, groups, row_tiles, plan.span(), &r.out.amax);
    let shape = ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols);
    let elements = (x.len())
        .max(c.out.code_blocks() * BLOCK)
        .max(r.out.code_blocks() * BLOCK)
        // With few long rows, the padding of swizzled scales makes more scales than elements.
        .max(c.out.scale_bytes())
        .max(r.out.scale_bytes());
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        quantize_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(elements),
            words.width,
            words.arg(),
            TileGridLaunch::new(map, shape, row_tiles, row_blocks),
            target(&row, c),
            target(&col, r),
            plan,
            words.elem,
        );
    }
    let [row, col] = [row, col].map(|made| made.map(|args| args.out));
    Ok((row, col))
}

/// Each cube quantizes a tile: it loads the tile; its units quantize the blocks of columns, whose
/// codes and scales are staged in shared memory, and those of rows; then whole columns, 64 bytes of
/// codes, are written contiguously. Other cubes of the SM compute while one waits.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_tiles_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    grid: TileGrid,
    mut row: QuantTarget,
    mut col: QuantTarget,
    #[comptime] plan: TilePlan,
    #[define(F)] _storage: ElemType,
) {
    let units = comptime!(plan.units);
    let load = comptime!(plan.load());
    let width = N::value();
    let asynchronous = comptime!(load.asynchronous(width));
    let grouping = comptime!(plan.grouping);
    let span = comptime!(plan.span());
    let mut memory = TileMemory::new(plan);
    let mut row_table = ScaleTable::new(plan.row_lines());
    let mut col_table = ScaleTable::new(plan.col_lines());

    let band = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) as usize;
    let tile_col = CUBE_POS_X as usize / BAND;
    let row_tile = band * BAND + CUBE_POS_X as usize % BAND;
    if row_tile < grid.row_tiles {
        let shape = &grid.shape;
        let tile = tile::tile_at(
            &grid.map, row_tile, tile_col, shape, span, grouping, plan.kind,
        );
        if tile.row0 < tile.row_end {
            tile::start_load::<F, N>(x, &mut memory.data, &tile, shape, load);
            // If there are two tables to fill, each takes half of the units.
            let row_tabled = comptime!(plan.tiles || plan.row.is_some_and(|row| !row.per_row));
            let col_tabled = comptime!(plan.col.is_some_and(|col| !col.per_row) && !plan.tiles);
            let halves = comptime!(row_tabled && col_tabled && units == 256);
            let count = comptime!(if halves {
                units as u32 / 2
            } else {
                units as u32
            });
            if comptime!(row_tabled) {
                let policy = comptime!(plan.either().policy);
                if UNIT_POS < count {
                    row_table.fill(row.amax[tile.group], UNIT_POS, count, 1.0, policy);
                }
            }
            if comptime!(col_tabled) {
                let policy = comptime!(plan.col.unwrap().policy);
                let unit = if comptime!(halves) {
                    UNIT_POS - count
                } else {
                    UNIT_POS
                };
                if unit < count {
                    let multiple = comptime!(plan.col_multiple());
                    col_table.fill(col.amax[tile.group], unit, count, multiple, policy);
                }
            }
            if comptime!(plan.row_lines() > 0) {
                let lines = Lines {
                    first: tile.row0,
                    count: min(tile.row_end - tile.row0, tile::ROWS),
                    own: UNIT_POS as usize,
                };
                let policy = comptime!(plan.row.unwrap().policy);
                let most = comptime!(plan.row_lines());
                row_table.fill_lines(&row.amax, lines, most, 1.0, policy);
            }
            if comptime!(plan.col_lines() > 0) {
                // If both tables are filled, start with the units that had no rows.
                let behind = comptime!(if units.is_power_of_two() {
                    plan.row_lines()
                } else {
                    0
                });
                let lines = Lines {
                    first: tile.group * shape.cols + tile.col0,
                    count: min(shape.cols - min(tile.col0, shape.cols), plan.col_lines()),
                    own: (UNIT_POS as usize + behind) % units,
                };
                let policy = comptime!(plan.col.unwrap().policy);
                let most = comptime!(plan.col_lines());
                let multiple = comptime!(plan.col_multiple());
                col_table.fill_lines(&col.amax, lines, most, multiple, policy);
            }
            tile::wait_for_load(asynchronous);

            if comptime!(plan.tiles) {
                choose_tile_scales(&mut memory, &row_table, plan);
            }
            if comptime!(plan.col.is_some() && !plan.tiles) {
                quantize_columns(&mut memory, &tile, shape, &col, &col_table, plan);
            }
            if comptime!(plan.tiles || plan.row.is_some()) {
                quantize_rows_of_tile(&mut memory, &tile, shape, &mut row, &row_table, plan);
            }
            sync_cube();
            if comptime!(plan.tiles && plan.col.is_some()) {
                write_transposed(&memory, &tile, shape, &mut col.out, plan);
            } else if comptime!(plan.col.is_some()) {
                write_columns(&memory, &tile, shape, grid.row_blocks, &mut col.out, plan);
            }
        }
    }
}

/// Quantizes the blocks along the rows of a tile, for the rowwise tensor, if requested. If there is
/// a columnwise tensor, codes of 16x16 tiles are also staged in shared memory for the
/// transposition, including those of rows after the last one, which pad blocks of columns.
#[cube]
fn quantize_rows_of_tile(
    memory: &mut TileMemory,
    tile: &Tile,
    shape: &Shape,
    target: &mut QuantTarget,
    table: &ScaleTable,
    #[comptime] tiled: TilePlan,
) {
    let (plan, kind) = comptime!((tiled.either(), tiled.kind));
    let (tiles, units) = comptime!((tiled.tiles, tiled.units));
    let stores = comptime!(tiled.row.is_some());
    let transposes = comptime!(tiles && tiled.col.is_some());
    let conversion = comptime!(plan.policy.conversion);
    let random = target.draw.resolve(plan.policy);
    let blocks = shape.cols / 16usize;
    let padded_blocks = blocks.div_ceil(4);
    let group_scale = table.global();
    for turn in 0..comptime!(tile::blocks(kind) / units) {
        let place = tile::row_place(turn, units, kind);
        let r = place.row;
        let row_index = tile.row0 + r;
        let block_index = tile.col0 / 16usize + place.block;
        let inside = row_index < tile.row_end && block_index < blocks;
        let stored = row_index * blocks + block_index;
        let mut block_codes = Vector::<u32, Const<2>>::new(0u32);
        let mut scale = 0u32;
        if tiles || inside {
            let words = tile::load_row_block(&memory.data, r, place.block, conversion, kind);
            let block = row_block(&words, &target.draw.signs, plan, kind);
            let largest = row_amax_of(&words, &block, tiles, plan, kind);
            let global = table.of_line(&group_scale, r, comptime!(tiled.row_lines()), plan);
            let of_tile = if comptime!(tiles) {
                memory.tile_scales[(r / 16usize) * comptime!(tile::row_blocks(kind)) + place.block]
            } else {
                0u32.runtime()
            };
            let rule = BlockRule {
                amax: largest,
                scale: of_tile & 0xFFu32,
                below_7: of_tile > 0xFFu32,
                index: target.draw.number(stored, blocks, plan.policy),
            };
            let by = comptime!(TablePlan {
                first: 0,
                tiles,
                in_pairs: conversion.has_ptx()
                    && kind == FloatKind::Bf16
                    && plan.hadamard.is_none(),
                quant: plan,
            });
            let encoded = quantize_by_table(&block, &words, &rule, &global, table, &random, by);
            scale = encoded.scale;
            if comptime!(tiles) {
                // A tile that the last row cuts: rows below it are padding, with zero scales.
                scale = select(inside, scale, 0u32);
            }
            if comptime!(transposes) {
                let at = code_at(r, place.block);
                memory.partial[at] = encoded.codes.extract(0usize);
                memory.partial[at + 1usize] = encoded.codes.extract(1usize);
            }
            if comptime!(plan.unscaled) {
                block_codes = encoded.codes;
            } else if stores && inside {
                target.out.store_codes(stored, encoded.codes);
            }
        }
        if comptime!(stores) {
            if comptime!(plan.unscaled) {
                let block = Encoded {
                    scale,
                    codes: block_codes,
                };
                target.out.store_values(stored, &block, inside, conversion);
            } else if comptime!(plan.swizzled) {
                // Columns of tiles beyond these only pad the columnwise tensor.
                if block_index < padded_blocks * 4usize {
                    let row = tile.row_tile * 128usize + r;
                    let at = swizzled_at(row, block_index, padded_blocks);
                    target.out.store_scale(at, scale);
                }
            } else if inside {
                target.out.store_scale(stored, scale);
            }
        }
    }
}
