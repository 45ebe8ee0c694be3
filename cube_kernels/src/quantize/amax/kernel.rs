//! Amax kernels.

use cubecl::prelude::*;

use super::{
    super::{
        prologue::{self, PrologueInputs, PrologueOut},
        tile::{self, Grouping, Shape, TilePlace},
    },
    fold::{
        AmaxOut, AmaxPlan, Maxima, Running, atomic_amax, fold_words, leave_group, with_factor,
        words_amax,
    },
};
use crate::{
    cube::{
        codec::{Conversion, canonical},
        hadamard::Signs,
        words::block_words,
    },
    tensor::{AmaxGranularity, FloatKind},
};

/// Entries from one block of all rows of a tile to the next, against bank conflicts: neighbouring
/// units have four neighbouring rows of eight blocks, or read neighbouring rows.
const ROW_PITCH: usize = tile::ROWS + 4;

/// Vectors that a unit loads before it processes the first.
pub(super) const AMAX_UNROLL: usize = 4;

/// Each unit folds every `units`-th vector, several at a time.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Atomic<u32>],
    vectors: usize,
    #[comptime] elements: bool,
    #[comptime] planes: bool,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut largest = Running::new();
    let mut i = ABSOLUTE_POS;
    while i < vectors {
        let mut loaded = Array::<Vector<F, N>>::new(AMAX_UNROLL);
        #[unroll]
        for j in 0..AMAX_UNROLL {
            // After the end the last vector is loaded again, which changes no maximum. Loading the
            // remainder one by one would wait for each load.
            loaded[j] = x[min(i + j * stride, vectors - 1usize)];
        }
        #[unroll]
        for j in 0..AMAX_UNROLL {
            #[unroll]
            for k in 0..N::value() {
                largest.fold::<F>(loaded[j].extract(k), elements, conversion, kind);
            }
        }
        i += AMAX_UNROLL * stride;
    }
    let bits = largest.bits(elements, conversion, kind);
    atomic_amax(out, 0usize, canonical(bits), planes);
}

/// Tiles of a matrix and of its groups; `tile::map_tiles` writes `map`.
#[derive(CubeType, CubeLaunch)]
pub struct AmaxTiles {
    /// Record per row of tiles, if groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// Matrix shape.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
}

/// Each cube folds one tile at a time, while the next one is loaded. Units that share an entry
/// first combine it in shared memory. The amax of a whole group is written when the cube ends.
///
/// Without groups, a cube takes every `CUBE_COUNT`th tile, in bands. With groups, it takes every
/// `CUBE_COUNT_X`th of one of `row_tiles` rows of tiles, so that it stays within one group.
/// `tile::map_tiles` writes `map`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_tiles_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    prologue: PrologueInputs,
    mut written: PrologueOut,
    tiles: AmaxTiles,
    mut out: AmaxOut,
    signs: Signs,
    #[comptime] plan: AmaxPlan,
    #[define(F)] _storage: ElemType,
) {
    let (units, conversion, kind) = comptime!((plan.units, plan.conversion, plan.kind));
    let load = comptime!(plan.load());
    let width = N::value();
    let asynchronous = comptime!(load.asynchronous(width));
    let shape = &tiles.shape;
    let row_tiles = tiles.row_tiles;
    let span = comptime!(tile::span(plan.hadamard));
    let grouping = comptime!(plan.grouping);
    let mut data: Shared<[u32]> = Shared::new_aligned_slice(tile::LEN, 16usize);
    // One entry per block: along rows, and down columns.
    let mut row_maxima: Shared<[u32]> =
        Shared::new_slice(comptime!(if plan.rows == Some(AmaxGranularity::PerRow) {
            tile::row_blocks(kind) * ROW_PITCH
        } else {
            1
        }));
    let mut col_maxima: Shared<[u32]> =
        Shared::new_slice(comptime!(if plan.cols == Some(AmaxGranularity::PerRow) {
            tile::cols(kind) * 8
        } else {
            1
        }));
    // Row of tiles in which the cube stays, with groups.
    let run = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) as usize;
    let mut index = CUBE_POS;
    let mut stride = CUBE_COUNT;
    let mut end = row_tiles * shape.tile_cols;
    if comptime!(grouping != Grouping::One) {
        index = CUBE_POS_X as usize;
        stride = CUBE_COUNT_X as usize;
        end = if run < row_tiles {
            shape.tile_cols
        } else {
            0usize.runtime()
        };
    }
    let mut maxima = Maxima::new();
    let mut group = 0usize;
    // Position of the tile being loaded, kept because it takes divisions to compute.
    let mut row_tile = 0usize;
    let mut tile_col = 0usize;
    if index < end {
        let place = place_of(&tiles, run, index, plan);
        row_tile = place.row;
        tile_col = place.col;
        let tile = tile::tile_at(&tiles.map, row_tile, tile_col, shape, span, grouping, kind);
        group = tile.group;
        if tile.row0 < tile.row_end {
            prologue::start_load::<F, N>(x, &prologue, &mut written, &mut data, &tile, shape, load);
        } else {
            end = 0usize;
        }
    }
    let first = index;
    while index < end {
        let tile = tile::tile_at(&tiles.map, row_tile, tile_col, shape, span, grouping, kind);
        tile::wait_for_load(asynchronous);
        if comptime!(plan.rows == Some(AmaxGranularity::PerRow)) {
            for turn in 0..comptime!(tile::blocks(kind) / units) {
                let place = tile::row_place(turn, units, kind);
                let words = tile::load_row_block(&data, place.row, place.block, conversion, kind);
                row_maxima[place.block * ROW_PITCH + place.row] =
                    words_amax(&words, comptime!(block_words(kind)), conversion, kind);
            }
        }
        if comptime!(plan.cols.is_some() || plan.rows == Some(AmaxGranularity::PerTensor)) {
            let rows = tile.row_end - tile.row0;
            fold_columns(&data, &mut col_maxima, &signs, rows, &mut maxima, plan);
        }
        sync_cube();

        index += stride;
        if index < end {
            let place = place_of(&tiles, run, index, plan);
            row_tile = place.row;
            tile_col = place.col;
            let next = tile::tile_at(&tiles.map, row_tile, tile_col, shape, span, grouping, kind);
            prologue::start_load::<F, N>(x, &prologue, &mut written, &mut data, &next, shape, load);
        }
        if comptime!(plan.rows == Some(AmaxGranularity::PerRow)) {
            let per_row = comptime!(tile::row_blocks(kind));
            let mut r = UNIT_POS as usize;
            while r < tile::ROWS {
                let mut bits = 0u32;
                #[unroll]
                for b in 0..per_row {
                    bits = max(bits, row_maxima[comptime!(b * ROW_PITCH) + r]);
                }
                if tile.row0 + r < tile.row_end {
                    out.rows[tile.row0 + r].fetch_max(canonical(bits));
                }
                r += CUBE_DIM as usize;
            }
        }
        if comptime!(plan.cols == Some(AmaxGranularity::PerRow)) {
            // Blocks of 16 rows that have an entry.
            let step = comptime!(span / tile::lanes(plan.hadamard, conversion) / 16);
            // Start with the units that had no row.
            let behind = comptime!(match plan.rows {
                Some(AmaxGranularity::PerRow) if units.is_power_of_two() => tile::ROWS % units,
                _ => 0,
            });
            let mut c = (UNIT_POS as usize + behind) % units;
            while c < comptime!(tile::cols(kind)) {
                let mut bits = 0u32;
                #[unroll]
                for chunk in 0..comptime!(8 / step) {
                    let entry = comptime!(chunk * step * tile::cols(kind));
                    bits = max(bits, col_maxima[entry + c]);
                }
                let column = prologue.column_of(&tile, c, shape, kind);
                if column < shape.cols {
                    let bits = canonical(with_factor(bits, plan.hadamard));
                    out.cols[tile.group * shape.cols + column].fetch_max(bits);
                }
                c += CUBE_DIM as usize;
            }
        }
    }
    if first < end {
        leave_group(&mut out, group, &maxima, plan);
    }
}

/// Returns the position of a cube's tile: number `index` in bands or, with groups, column `index`
/// of row `run` of tiles. Both count from the end of the matrix, so that the L2 cache still holds
/// its beginning, where the following quantization starts.
#[cube]
fn place_of(tiles: &AmaxTiles, run: usize, index: usize, #[comptime] plan: AmaxPlan) -> TilePlace {
    let (shape, row_tiles) = (&tiles.shape, tiles.row_tiles);
    if comptime!(plan.grouping == Grouping::One) {
        let index = row_tiles * shape.tile_cols - 1usize - index;
        tile::in_bands(index, row_tiles, shape.tile_cols, tile::BAND)
    } else {
        TilePlace {
            row: row_tiles - 1usize - run,
            col: index,
        }
    }
}

/// Folds the columns of a tile, and all of its elements untransformed if the amax of whole groups
/// of rows is requested. Columns beyond the matrix are zeros. So are rows beyond the tile's `rows`,
/// which many tiles of short groups have; their blocks are skipped.
#[cube]
fn fold_columns(
    data: &Shared<[u32]>,
    col_maxima: &mut Shared<[u32]>,
    signs: &Signs,
    rows: usize,
    maxima: &mut Maxima,
    #[comptime] plan: AmaxPlan,
) {
    let (conversion, kind) = comptime!((plan.conversion, plan.kind));
    let span = comptime!(tile::span(plan.hadamard));
    let per_word = comptime!(4 / kind.size());
    let count = comptime!(span / tile::lanes(plan.hadamard, conversion));
    let mut end = comptime!(tile::column_items(plan.hadamard, conversion)).runtime();
    if comptime!(plan.grouping != Grouping::One && plan.cols != Some(AmaxGranularity::PerRow)) {
        let spans = rows.div_ceil(span);
        end = min(
            end,
            spans * comptime!(tile::WORDS * tile::lanes(plan.hadamard, conversion)),
        );
    }
    let mut item = UNIT_POS as usize;
    while item < end {
        let at = tile::column_item(item, plan.units, plan.hadamard, conversion);
        let words = tile::load_words(data, at.block * 16usize, at.word, count, conversion);
        let folded = fold_words(&words, signs, at.lane, plan);
        maxima.include(&folded, plan);
        if comptime!(plan.cols == Some(AmaxGranularity::PerRow)) {
            let entry = at.block * comptime!(tile::cols(kind)) + at.word * per_word;
            #[unroll]
            for half in 0..per_word {
                col_maxima[entry + half] = folded.columns[half];
            }
        }
        item += plan.units;
    }
}
