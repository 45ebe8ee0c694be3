//! The kernels that find amax values.

use cubecl::prelude::*;

use super::super::{
    prologue::{self, PrologueInputs, PrologueOut},
    tile::{self, Grouping, LoadPlan, Shape, Tile},
};
use crate::{
    HadamardSize,
    cube::{
        block::{block_amax, max_of_pairs},
        codec::{Conversion, canonical, magnitude_bits, round_to_bf16},
        hadamard::Signs,
        ptx,
        words::{block_words, unpack},
    },
    launch::per_word,
    tensor::{AmaxGranularity, FloatKind},
};

/// The most planes of a cube.
const PLANES: usize = 32;

/// Raises entry `index` of `out` to `bits`, once for each cube where there are planes: atomic
/// operations on one address take turns. All units of the cube must be here. Magnitudes are compared
/// as integers, so the order in which cubes arrive does not matter.
#[cube]
fn atomic_amax(out: &mut [Atomic<u32>], index: usize, bits: u32, #[comptime] planes: bool) {
    if comptime!(planes) {
        let mut maxima: Shared<[u32]> = Shared::new_slice(PLANES);
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 {
            maxima[(UNIT_POS / PLANE_DIM) as usize] = plane;
        }
        sync_cube();
        if UNIT_POS < PLANE_DIM {
            let mut largest = 0u32;
            if UNIT_POS < CUBE_DIM / PLANE_DIM {
                largest = maxima[UNIT_POS as usize];
            }
            let largest = plane_max(largest);
            if UNIT_POS == 0u32 {
                out[index].fetch_max(largest);
            }
        }
    } else {
        out[index].fetch_max(bits);
    }
}

/// The magnitude bits of the larger of `bits` and the elements of a word (or of one element).
#[cube]
fn fold<F: Numeric>(
    bits: u32,
    stored: F,
    #[comptime] elements: bool,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> u32 {
    let word = u32::cast_from(stored);
    let mut largest = bits;
    #[unroll]
    for half in 0..comptime!(if elements {
        1u32
    } else {
        per_word(kind) as u32
    }) {
        let value = unpack(word, half, kind);
        if comptime!(conversion.has_ptx()) {
            let so_far = f32::reinterpret(largest);
            largest = u32::reinterpret(ptx::max_nan_abs(so_far, value));
        } else {
            largest = max(largest, magnitude_bits(value));
        }
    }
    largest
}

/// A maximum on its way: magnitude bits, or, of words of two bf16, the largest and the smallest
/// value in each half, which take half an instruction an element where magnitudes take two.
#[derive(CubeType)]
struct Running {
    magnitude: u32,
    high: u32,
    low: u32,
}

#[cube]
impl Running {
    fn new() -> Running {
        Running {
            magnitude: 0u32,
            high: 0u32,
            low: 0u32,
        }
    }

    fn fold<F: Numeric>(
        &mut self,
        stored: F,
        #[comptime] elements: bool,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) {
        if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && !elements) {
            let word = u32::cast_from(stored);
            self.high = ptx::max_nan_bf16x2(self.high, word);
            self.low = ptx::min_nan_bf16x2(self.low, word);
        } else {
            self.magnitude = fold::<F>(self.magnitude, stored, elements, conversion, kind);
        }
    }

    fn bits(
        &self,
        #[comptime] elements: bool,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) -> u32 {
        if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && !elements) {
            let both = ptx::max_nan_abs_bf16x2(self.high, self.low);
            larger_half(both)
        } else {
            self.magnitude
        }
    }
}

/// The magnitude bits of the larger of a pair of bf16 magnitudes.
#[cube]
fn larger_half(both: u32) -> u32 {
    let low = f32::reinterpret(both << 16u32);
    u32::reinterpret(ptx::max_nan_abs(
        low,
        f32::reinterpret(both & 0xFFFF_0000u32),
    ))
}

/// Vectors that a unit loads before it looks at the first.
pub(super) const AMAX_UNROLL: usize = 4;

/// One unit folds every `units`-th vector, a few at a time.
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
    while i + comptime!(AMAX_UNROLL - 1) * stride < vectors {
        let mut loaded = Array::<Vector<F, N>>::new(AMAX_UNROLL);
        #[unroll]
        for j in 0..AMAX_UNROLL {
            loaded[j] = x[i + j * stride];
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
    while i < vectors {
        let vector = x[i];
        #[unroll]
        for k in 0..N::value() {
            largest.fold::<F>(vector.extract(k), elements, conversion, kind);
        }
        i += stride;
    }
    let bits = largest.bits(elements, conversion, kind);
    atomic_amax(out, 0usize, canonical(bits), planes);
}

/// The comptime choices of `amax_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmaxPlan {
    /// Maxima for rowwise tensors.
    pub rows: Option<AmaxGranularity>,
    /// Maxima for columnwise tensors.
    pub cols: Option<AmaxGranularity>,
    /// The transform of the columns.
    pub hadamard: Option<HadamardSize>,
    /// Whether its signs are the default ones, which are then built in.
    pub default_signs: bool,
    /// How groups are given.
    pub grouping: Grouping,
    /// Whether `x` is loaded by elements.
    pub elements: bool,
    /// Units of a cube.
    pub units: usize,
    /// Whether planes can reduce.
    pub planes: bool,
    /// Who compares.
    pub conversion: Conversion,
    /// The element type of `x`.
    pub kind: FloatKind,
}

impl AmaxPlan {
    const fn load(&self) -> LoadPlan {
        LoadPlan {
            paired: true,
            elements: self.elements,
            units: self.units,
            conversion: self.conversion,
            kind: self.kind,
        }
    }
}

/// The tiles of a matrix and of its groups; `map` is what `tile::map_tiles` wrote.
#[derive(CubeType, CubeLaunch)]
pub struct AmaxTiles {
    /// A record for each row of tiles, where groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// The matrix.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
}

/// Where amax values are raised. Where the plan has none, any memory.
#[derive(CubeType, CubeLaunch)]
pub struct AmaxOut {
    /// Those of rows.
    pub rows: Box<[Atomic<u32>]>,
    /// Those of columns.
    pub cols: Box<[Atomic<u32>]>,
}

/// One cube folds one tile at a time, while the next is on its way. Units that share an entry meet
/// in shared memory first; a maximum of a whole group leaves the cube at its end.
///
/// Without groups a cube takes every `CUBE_COUNT`th tile, in bands; with groups every
/// `CUBE_COUNT_X`th of one of `row_tiles` rows of tiles, so that it stays in one group. `map` is
/// what `tile::map_tiles` wrote.
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
    // One entry for each block: along rows, and down columns.
    let mut row_maxima: Shared<[u32]> =
        Shared::new_slice(comptime!(if plan.rows == Some(AmaxGranularity::PerRow) {
            tile::blocks(kind)
        } else {
            1
        }));
    let mut col_maxima: Shared<[u32]> =
        Shared::new_slice(comptime!(if plan.cols == Some(AmaxGranularity::PerRow) {
            tile::cols(kind) * 8
        } else {
            1
        }));
    // The row of tiles that the cube stays in, where there are groups.
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
    let mut row_bits = 0u32;
    let mut col_bits = 0u32;
    let mut group = 0usize;
    if index < end {
        let tile = tile_of(&tiles, run, index, span, plan);
        group = tile.group;
        if tile.row0 < tile.row_end {
            prologue::start_load::<F, N>(x, &prologue, &mut written, &mut data, &tile, shape, load);
        } else {
            end = 0usize;
        }
    }
    let first = index;
    while index < end {
        let tile = tile_of(&tiles, run, index, span, plan);
        tile::wait_for_load(asynchronous);
        if comptime!(plan.rows == Some(AmaxGranularity::PerRow)) {
            for turn in 0..comptime!(tile::blocks(kind) / units) {
                let place = tile::row_place(turn, units, kind);
                let words = tile::load_row_block(&data, place.row, place.block, conversion, kind);
                row_maxima[place.row * comptime!(tile::row_blocks(kind)) + place.block] =
                    words_amax(&words, comptime!(block_words(kind)), conversion, kind);
            }
        }
        if comptime!(plan.cols.is_some() || plan.rows == Some(AmaxGranularity::PerTensor)) {
            let rows = tile.row_end - tile.row0;
            let bits = fold_columns(&data, &mut col_maxima, &signs, rows, plan, kind);
            row_bits = max(row_bits, bits.rows);
            col_bits = max(col_bits, bits.cols);
        }
        sync_cube();

        index += stride;
        if index < end {
            let next = tile_of(&tiles, run, index, span, plan);
            prologue::start_load::<F, N>(x, &prologue, &mut written, &mut data, &next, shape, load);
        }
        if comptime!(plan.rows == Some(AmaxGranularity::PerRow)) {
            let per_row = comptime!(tile::row_blocks(kind));
            let mut r = UNIT_POS as usize;
            while r < tile::ROWS {
                let mut bits = 0u32;
                #[unroll]
                for b in 0..per_row {
                    bits = max(bits, row_maxima[r * per_row + b]);
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
            let mut c = UNIT_POS as usize;
            while c < comptime!(tile::cols(kind)) {
                let mut bits = 0u32;
                #[unroll]
                for chunk in 0..comptime!(8 / step) {
                    let entry = comptime!(chunk * step * tile::cols(kind));
                    bits = max(bits, col_maxima[entry + c]);
                }
                let column = prologue.column_of(&tile, c, shape, true, kind);
                if column < shape.cols {
                    out.cols[tile.group * shape.cols + column].fetch_max(canonical(bits));
                }
                c += CUBE_DIM as usize;
            }
        }
    }
    if first < end {
        leave_group(&mut out, group, row_bits, col_bits, plan);
    }
}

/// The tile of a cube: number `index` in bands, or with groups the one in column `index` of row
/// `run` of tiles. Both count from the end of the matrix: what quantizes it next begins at its
/// beginning, which the L2 cache then still holds.
#[cube]
fn tile_of(
    tiles: &AmaxTiles,
    run: usize,
    index: usize,
    #[comptime] span: usize,
    #[comptime] plan: AmaxPlan,
) -> Tile {
    let (grouping, kind) = comptime!((plan.grouping, plan.kind));
    let (shape, row_tiles) = (&tiles.shape, tiles.row_tiles);
    if comptime!(grouping == Grouping::One) {
        let index = row_tiles * shape.tile_cols - 1usize - index;
        let place = tile::in_bands(index, row_tiles, shape.tile_cols, tile::BAND);
        tile::tile_at(
            &tiles.map, place.row, place.col, shape, span, grouping, kind,
        )
    } else {
        tile::tile_at(
            &tiles.map,
            row_tiles - 1usize - run,
            index,
            shape,
            span,
            grouping,
            kind,
        )
    }
}

/// Raises the amax values of a group.
#[cube]
fn leave_group(
    out: &mut AmaxOut,
    group: usize,
    row_bits: u32,
    col_bits: u32,
    #[comptime] plan: AmaxPlan,
) {
    if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
        atomic_amax(&mut out.rows, group, canonical(row_bits), plan.planes);
    }
    if comptime!(plan.cols == Some(AmaxGranularity::PerTensor)) {
        atomic_amax(&mut out.cols, group, canonical(col_bits), plan.planes);
    }
}

/// The magnitude bits of the largest of the elements of some words.
#[cube]
fn words_amax(
    words: &Array<u32>,
    #[comptime] count: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> u32 {
    if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16) {
        let both = max_of_pairs(words, 0usize, count);
        let low = f32::reinterpret(both << 16u32);
        u32::reinterpret(ptx::max_nan_abs(
            low,
            f32::reinterpret(both & 0xFFFF_0000u32),
        ))
    } else {
        let mut bits = 0u32;
        #[unroll]
        for w in 0..count {
            bits = fold::<u32>(bits, words[w], false, conversion, kind);
        }
        bits
    }
}

/// The amax values of what a unit saw: before a transform, and after it.
#[derive(CubeType, Clone, Copy)]
struct Maxima {
    rows: u32,
    cols: u32,
}

/// Folds the columns of a tile, and all of its elements as they stand where the maximum of whole
/// groups of rows is asked for. Columns beyond the matrix are zeros, as are rows beyond the tile's
/// `rows`, which groups that are short have in many tiles, and whose blocks are left out there.
#[cube]
fn fold_columns(
    data: &Shared<[u32]>,
    col_maxima: &mut Shared<[u32]>,
    signs: &Signs,
    rows: usize,
    #[comptime] plan: AmaxPlan,
    #[comptime] kind: FloatKind,
) -> Maxima {
    let conversion = comptime!(plan.conversion);
    let span = comptime!(tile::span(plan.hadamard));
    let per_word = comptime!(4 / kind.size());
    let packed = comptime!(conversion.has_ptx() && kind == FloatKind::Bf16);
    let mut row_bits = 0u32;
    let mut col_bits = 0u32;
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
        let word = at.word;
        let words = tile::load_words(data, at.block * 16usize, word, count, conversion);
        if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
            row_bits = max(row_bits, words_amax(&words, count, conversion, kind));
        }
        if comptime!(plan.cols.is_some()) {
            let both = if comptime!(packed && plan.hadamard.is_none()) {
                max_of_pairs(&words, 0usize, count)
            } else {
                0u32.runtime()
            };
            #[unroll]
            for half in 0..comptime!(per_word as u32) {
                let here = if comptime!(packed && plan.hadamard.is_none() && half == 0) {
                    both << 16u32
                } else if comptime!(packed && plan.hadamard.is_none()) {
                    both & 0xFFFF_0000u32
                } else {
                    let mut values = tile::unpack_column(
                        &words,
                        signs,
                        at.lane,
                        half,
                        plan.hadamard,
                        plan.default_signs,
                        conversion,
                        kind,
                    );
                    column_amax(&mut values, at.lane, count, plan)
                };
                if comptime!(plan.cols == Some(AmaxGranularity::PerRow)) {
                    col_maxima[at.block * comptime!(tile::cols(kind))
                        + word * per_word
                        + half as usize] = here;
                } else {
                    col_bits = max(col_bits, here);
                }
            }
        }
        item += plan.units;
    }
    Maxima {
        rows: row_bits,
        cols: col_bits,
    }
}

/// The magnitude bits of the largest value of a column, after the transform where there is one.
#[cube]
fn column_amax(
    values: &mut Array<f32>,
    lane: usize,
    #[comptime] count: usize,
    #[comptime] plan: AmaxPlan,
) -> u32 {
    if comptime!(plan.hadamard.is_some()) {
        let size = comptime!(plan.hadamard.unwrap());
        tile::transform_values(values, lane, size, plan.conversion);
    }
    let mut bits = 0u32;
    #[unroll]
    for b in 0..comptime!(count / 16) {
        let part = block_amax(&*values, comptime!(b * 16), plan.conversion);
        bits = max(bits, magnitude_bits(part));
    }
    if comptime!(plan.hadamard.is_some()) {
        // Multiplication and rounding keep the order, so the maximum may go first.
        let factor = comptime!(plan.hadamard.unwrap().factor());
        bits = magnitude_bits(round_to_bf16(f32::reinterpret(bits) * factor));
    }
    bits
}
