//! Largest magnitudes: of a matrix, of its rows, of its columns, of its groups, before and after the
//! column-wise transform.

use cubecl::{prelude::*, server::Handle};

use super::{
    plan::signs_of,
    prologue::{self, Input, Producer, Sink, SinkArgs, Source, produce},
    tile::{self, Grouping, Shape, ShapeLaunch, Tile},
};
use crate::launch::{
    Words, buffer, computed_tile_cubes, grid, per_word, resident_grid, tile_cubes, tile_runs,
};
use crate::{
    Hadamard, HadamardSize, Nvfp4Error, Usage,
    capabilities::{conversion_of, is_cpu},
    cube::{
        block::{block_amax, max_of_pairs},
        codec::{Conversion, canonical, magnitude_bits, round_to_bf16},
        hadamard::Signs,
        ptx,
        words::{block_words, unpack},
    },
    memory::{address_type, allocate},
    tensor::{AmaxGranularity, FloatKind, Groups, Matrix},
};

/// The largest magnitude in `x`, one `f32` in device memory; 0 for an empty matrix. With `hadamard`
/// that of the column-wise transformed matrix. Deterministic, and NaN and infinity survive: see
/// [`reference::amax`](crate::reference::amax).
///
/// # Errors
/// When the memory of `x` is smaller than its shape.
pub fn amax(client: &Client, x: &Matrix, hadamard: Option<Hadamard>) -> Result<Handle, Nvfp4Error> {
    match hadamard {
        None => amax_of_matrix(client, x),
        Some(hadamard) => {
            let request = AmaxRequest {
                cols: Some((AmaxGranularity::PerTensor, Some(hadamard))),
                ..AmaxRequest::default()
            };
            let found = amaxes(client, x, &Groups::One, &request)?;
            Ok(found.cols.expect("asked for"))
        }
    }
}

/// Which maxima [`amaxes`] finds in one read of a matrix.
#[derive(Debug, Clone, Copy, Default)]
pub struct AmaxRequest {
    /// Those for row-wise copies: of each group, or of each row (per token).
    pub rows: Option<AmaxGranularity>,
    /// Those for column-wise copies: of each group, or of each column of each group; of the
    /// transformed values where there is a transform.
    pub cols: Option<(AmaxGranularity, Option<Hadamard>)>,
}

impl AmaxRequest {
    /// Those for a copy along `usage` alone; `hadamard` is that of a column-wise copy, and of no effect on a
    /// row-wise one.
    pub fn along(usage: Usage, scope: AmaxGranularity, hadamard: Option<Hadamard>) -> Self {
        match usage {
            Usage::Rowwise => Self {
                rows: Some(scope),
                cols: None,
            },
            Usage::Columnwise => Self {
                rows: None,
                cols: Some((scope, hadamard)),
            },
        }
    }
}

/// What [`amaxes`] found: `f32` values in device memory.
#[derive(Debug, Clone, Default)]
pub struct Amaxes {
    /// For row-wise copies: one for each group, or for each row.
    pub rows: Option<Handle>,
    /// For column-wise copies: one for each group, or `groups x cols`.
    pub cols: Option<Handle>,
}

/// Several maxima in one read of `x` (or of what it is made from); 0 where there is nothing to compare. See
/// [`reference::amax_rows`](crate::reference::amax_rows),
/// [`reference::amax_cols`](crate::reference::amax_cols) and
/// [`reference::amax_rht`](crate::reference::amax_rht). Rows behind the last group have an undefined
/// maximum.
///
/// # Errors
/// When the groups do not fit, or the memory of `x` is smaller than its shape; for a computed `x` as
/// [`produce`].
pub fn amaxes<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<Amaxes, Nvfp4Error> {
    find(client, &Input::new(x.into())?, groups, request, None)
}

/// [`produce`] and [`amaxes`] in one read of the inputs. Rows behind the last group have undefined
/// elements.
///
/// # Errors
/// As [`amaxes`].
pub fn produce_with_amaxes(
    client: &Client,
    source: Source<'_>,
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<(Matrix, Amaxes), Nvfp4Error> {
    let input = Input::new(source)?;
    if input.is_plain() || (request.rows.is_none() && request.cols.is_none()) {
        let found = find(client, &input, groups, request, None)?;
        return Ok((produce(client, source)?, found));
    }
    let Matrix {
        rows, cols, dtype, ..
    } = input.matrix;
    let out = Matrix::empty(client, rows, cols, dtype);
    let found = find(client, &input, groups, request, Some(&out))?;
    Ok((out, found))
}

fn find(
    client: &Client,
    input: &Input,
    groups: &Groups,
    request: &AmaxRequest,
    written: Option<&Matrix>,
) -> Result<Amaxes, Nvfp4Error> {
    let Input {
        matrix: x, words, ..
    } = input;
    groups.check(x.rows)?;
    let len = |scope, outer| match scope {
        AmaxGranularity::PerTensor => groups.count(),
        AmaxGranularity::PerRow => outer,
    };
    let rows_len = request.rows.map_or(0, |scope| len(scope, x.rows));
    let cols_len = request
        .cols
        .map_or(0, |(scope, _)| len(scope, groups.count() * x.cols));
    let [rows, cols] = [rows_len, cols_len].map(|count| allocate(client, count * 4));
    zero(client, [(&rows, rows_len), (&cols, cols_len)]);
    let found = Amaxes {
        rows: request.rows.map(|_| rows),
        cols: request.cols.map(|_| cols),
    };
    if x.is_empty() || (request.rows.is_none() && request.cols.is_none()) {
        return Ok(found);
    }
    let hadamard = request.cols.and_then(|(_, hadamard)| hadamard);
    let tile_cols = x.cols.div_ceil(tile::cols(x.dtype));
    let row_tiles = groups.units(x.rows, tile::ROWS);
    let (count, dim) = match groups {
        Groups::One if input.is_plain() => tile_cubes(client, row_tiles * tile_cols),
        Groups::One => computed_tile_cubes(client, row_tiles * tile_cols),
        _ => tile_runs(client, row_tiles, tile_cols),
    };
    let plan = AmaxPlan {
        rows: request.rows,
        cols: request.cols.map(|(scope, _)| scope),
        hadamard: hadamard.map(|hadamard| hadamard.size()),
        default_signs: hadamard == Some(Hadamard::default()),
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
        units: dim.x as usize,
        planes: !is_cpu(client),
        conversion: conversion_of(client),
    };
    // Not asked for: the other one, which the kernel then does not touch for it.
    let rows = found
        .rows
        .as_ref()
        .or(found.cols.as_ref())
        .expect("one is asked for");
    let cols = found.cols.as_ref().unwrap_or(rows);
    let span = tile::span(plan.hadamard);
    let map = tile::map_tiles(client, (x.rows, x.cols), groups, row_tiles, span, rows);
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        amax_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            input.producer(),
            written.map_or(SinkArgs::None, |out| SinkArgs::Matrix(Words::of(out).arg())),
            map,
            ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols),
            row_tiles,
            buffer(rows, rows_len.max(1)),
            buffer(cols, cols_len.max(1)),
            signs_of(hadamard),
            plan,
            x.dtype,
            words.elem,
        );
    }
    Ok(found)
}

fn amax_of_matrix(client: &Client, x: &Matrix) -> Result<Handle, Nvfp4Error> {
    x.check("x")?;
    let out = zeros(client, 1);
    if x.is_empty() {
        return Ok(out);
    }
    // The matrix is one row here: what counts is how many words it has.
    let flat = Matrix {
        rows: 1,
        cols: x.len(),
        ..x.clone()
    };
    let words = Words::of(&flat);
    let vectors = x.len() * x.dtype.size() / (words.elem.size() * words.width);
    let (count, dim) = resident_grid(client, vectors.div_ceil(AMAX_UNROLL));
    // SAFETY: the kernel stays below the number of vectors, and the memory was checked.
    unsafe {
        amax_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            buffer(&out, 1),
            vectors,
            words.elem.size() == 2,
            !is_cpu(client),
            conversion_of(client),
            x.dtype,
            words.elem,
        );
    }
    Ok(out)
}

/// `count` words of zeros, which kernels may raise. A kernel and not a copy from the host, so that a graph can
/// capture it.
pub(crate) fn zeros(client: &Client, count: usize) -> Handle {
    let out = allocate(client, count * 4);
    zero(client, [(&out, count), (&out, 0)]);
    out
}

/// Clears the first words of two buffers, as many as stand beside them, in one launch.
fn zero(client: &Client, buffers: [(&Handle, usize); 2]) {
    let Some(some) = buffers.iter().find(|(_, words)| *words > 0) else {
        return;
    };
    let [(first, words), (second, others)] = buffers.map(|(handle, words)| match words {
        0 => (some.0, 0),
        _ => (handle, words),
    });
    let (cube_count, dim) = grid(client, words.max(others));
    // SAFETY: the kernel stays below the numbers of words.
    unsafe {
        zero_kernel::launch_unchecked(
            client,
            cube_count,
            dim,
            buffer(first, words.max(1)),
            buffer(second, others.max(1)),
            words,
            others,
        );
    }
}

/// One unit clears every `units`-th word of both.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn zero_kernel(first: &mut [u32], second: &mut [u32], words: usize, others: usize) {
    let mut i = ABSOLUTE_POS;
    while i < max(words, others) {
        if i < words {
            first[i] = 0u32;
        }
        if i < others {
            second[i] = 0u32;
        }
        i += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Raises entry `index` of `out` to `bits`, once for each plane where there are planes. Magnitudes are
/// compared as integers, so the order in which units arrive does not matter.
#[cube]
fn raise(out: &mut [Atomic<u32>], index: usize, bits: u32, #[comptime] planes: bool) {
    if comptime!(planes) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 {
            out[index].fetch_max(plane);
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

/// A maximum on its way: magnitude bits, or, of words of two bf16, the largest and the smallest value
/// in each half, which take half an instruction an element where magnitudes take two.
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
const AMAX_UNROLL: usize = 4;

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
    raise(out, 0usize, canonical(bits), planes);
}

/// The comptime choices of `amax_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmaxPlan {
    /// Maxima for row-wise copies.
    pub rows: Option<AmaxGranularity>,
    /// Maxima for column-wise copies.
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
}

/// One cube folds one tile at a time, while the next is on its way. Units that share an entry meet in
/// shared memory first; a maximum of a whole group leaves the cube at its end.
///
/// Without groups a cube takes every `CUBE_COUNT`th tile, in bands; with groups every `CUBE_COUNT_X`th of one
/// of `row_tiles` rows of tiles, so that it stays in one group. `map` is what
/// `tile::map_tiles` wrote.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_tiles_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    producer: Producer,
    mut sink: Sink,
    map: &[Vector<u32, Const<4>>],
    shape: Shape,
    row_tiles: usize,
    rows_out: &mut [Atomic<u32>],
    cols_out: &mut [Atomic<u32>],
    signs: Signs,
    #[comptime] plan: AmaxPlan,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let elements = comptime!(plan.elements);
    let units = comptime!(plan.units);
    let conversion = comptime!(plan.conversion);
    let width = N::value();
    let asynchronous = comptime!(tile::asynchronous(conversion, elements, width, units));
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
        let tile = tile_of(map, run, index, row_tiles, &shape, span, grouping, kind);
        group = tile.group;
        if tile.row0 < tile.row_end {
            prologue::start_load::<F, N>(
                x, &producer, &mut sink, &mut data, &tile, &shape, true, elements, units,
                conversion, kind,
            );
        } else {
            end = 0usize;
        }
    }
    let first = index;
    while index < end {
        let tile = tile_of(map, run, index, row_tiles, &shape, span, grouping, kind);
        tile::finish_load(asynchronous);
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
            let next = tile_of(map, run, index, row_tiles, &shape, span, grouping, kind);
            prologue::start_load::<F, N>(
                x, &producer, &mut sink, &mut data, &next, &shape, true, elements, units,
                conversion, kind,
            );
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
                    rows_out[tile.row0 + r].fetch_max(canonical(bits));
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
                let column = producer.column_of(&tile, c, &shape, true, kind);
                if column < shape.cols {
                    cols_out[tile.group * shape.cols + column].fetch_max(canonical(bits));
                }
                c += CUBE_DIM as usize;
            }
        }
    }
    if first < end {
        leave_group(rows_out, cols_out, group, row_bits, col_bits, plan);
    }
}

/// The tile of a cube: number `index` in bands, or with groups the one in column `index` of row `run` of tiles. Both
/// count from the end of the matrix: what quantizes it next begins at its beginning, which the L2 cache then
/// still holds.
#[cube]
fn tile_of(
    map: &[Vector<u32, Const<4>>],
    run: usize,
    index: usize,
    row_tiles: usize,
    shape: &Shape,
    #[comptime] span: usize,
    #[comptime] grouping: Grouping,
    #[comptime] kind: FloatKind,
) -> Tile {
    if comptime!(grouping == Grouping::One) {
        let index = row_tiles * shape.tile_cols - 1usize - index;
        let place = tile::in_bands(index, row_tiles, shape.tile_cols, tile::BAND);
        tile::tile_at(map, place.row, place.col, shape, span, grouping, kind)
    } else {
        tile::tile_at(
            map,
            row_tiles - 1usize - run,
            index,
            shape,
            span,
            grouping,
            kind,
        )
    }
}

/// Raises the maxima of a group.
#[cube]
fn leave_group(
    rows_out: &mut [Atomic<u32>],
    cols_out: &mut [Atomic<u32>],
    group: usize,
    row_bits: u32,
    col_bits: u32,
    #[comptime] plan: AmaxPlan,
) {
    if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
        raise(rows_out, group, canonical(row_bits), plan.planes);
    }
    if comptime!(plan.cols == Some(AmaxGranularity::PerTensor)) {
        raise(cols_out, group, canonical(col_bits), plan.planes);
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

/// The maxima of what a unit saw: before a transform, and after it.
#[derive(CubeType, Clone, Copy)]
struct Maxima {
    rows: u32,
    cols: u32,
}

/// Folds the columns of a tile, and all of its elements as they stand where the maximum of whole groups
/// of rows is asked for. Columns beyond the matrix are zeros, as are rows beyond the tile's `rows`, which
/// groups that are short have in many tiles, and whose blocks are left out there.
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
