//! Largest magnitudes: of a matrix, of its rows, of its columns, of its groups, before and after the
//! column-wise transform.

use cubecl::{prelude::*, server::Handle};

use super::{
    launch::{Words, buffer, cubes, grid, per_word, signs_of},
    tile::{self, Grouping, Shape, ShapeLaunch},
};
use crate::{
    Hadamard, HadamardSize, Nvfp4Error,
    cube::{
        block::block_amax,
        codec::{Conversion, canonical, magnitude_bits, round_to_bf16},
        hadamard::{Signs, butterfly},
        ptx,
        words::unpack,
    },
    device::{AmaxScope, FloatKind, Groups, Matrix, address_type, allocate, conversion_of, is_cpu},
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
                cols: Some((AmaxScope::Group, Some(hadamard))),
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
    pub rows: Option<AmaxScope>,
    /// Those for column-wise copies: of each group, or of each column of each group; of the
    /// transformed values where there is a transform.
    pub cols: Option<(AmaxScope, Option<Hadamard>)>,
}

/// What [`amaxes`] found: `f32` values in device memory.
#[derive(Debug, Clone, Default)]
pub struct Amaxes {
    /// For row-wise copies: one for each group, or for each row.
    pub rows: Option<Handle>,
    /// For column-wise copies: one for each group, or `groups x cols`.
    pub cols: Option<Handle>,
}

/// Several maxima in one read of `x`; 0 where there is nothing to compare. See
/// [`reference::amax_rows`](crate::reference::amax_rows),
/// [`reference::amax_cols`](crate::reference::amax_cols) and
/// [`reference::amax_rht`](crate::reference::amax_rht). Rows behind the last group have an undefined
/// maximum.
///
/// # Errors
/// When the groups do not fit, or the memory of `x` is smaller than its shape.
pub fn amaxes(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<Amaxes, Nvfp4Error> {
    x.check("x")?;
    groups.check(x.rows)?;
    let len = |scope, outer| match scope {
        AmaxScope::Group => groups.count(),
        AmaxScope::Outer => outer,
    };
    let rows_len = request.rows.map_or(0, |scope| len(scope, x.rows));
    let cols_len = request
        .cols
        .map_or(0, |(scope, _)| len(scope, groups.count() * x.cols));
    let zeroed = |count: usize| (count > 0).then(|| zeros(client, count));
    let found = Amaxes {
        rows: request.rows.map(|_| zeros(client, rows_len)),
        cols: zeroed(cols_len).or_else(|| request.cols.map(|_| allocate(client, 0))),
    };
    if x.is_empty() || (request.rows.is_none() && request.cols.is_none()) {
        return Ok(found);
    }
    let words = Words::of(x);
    let hadamard = request.cols.and_then(|(_, hadamard)| hadamard);
    let plan = AmaxPlan {
        rows: request.rows,
        cols: request.cols.map(|(scope, _)| scope),
        hadamard: hadamard.map(|hadamard| hadamard.size()),
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
        planes: !is_cpu(client),
        conversion: conversion_of(client),
    };
    let tile_cols = x.cols.div_ceil(tile::COLS);
    let (count, dim) = cubes(client, groups.units(x.rows, tile::ROWS) * tile_cols);
    // Not asked for: the other one, which the kernel then does not touch for it.
    let rows = found
        .rows
        .as_ref()
        .or(found.cols.as_ref())
        .expect("one is asked for");
    let cols = found.cols.as_ref().unwrap_or(rows);
    let offsets = match groups {
        // SAFETY: checked above.
        Groups::Offsets { offsets, count } => unsafe { buffer(offsets, count + 1) },
        _ => unsafe { buffer(rows, 1) },
    };
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        amax_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            offsets,
            ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols),
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
    let (count, dim) = grid(client, vectors.div_ceil(AMAX_UNROLL));
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

/// `count` zeros.
fn zeros(client: &Client, count: usize) -> Handle {
    let out = allocate(client, count * 4);
    if count > 0 {
        let (cube_count, dim) = grid(client, count);
        // SAFETY: the kernel stays below the number of words.
        unsafe {
            zero_kernel::launch_unchecked(client, cube_count, dim, buffer(&out, count), count);
        }
    }
    out
}

#[cube(launch_unchecked)]
fn zero_kernel(out: &mut [u32], count: usize) {
    let mut i = ABSOLUTE_POS;
    while i < count {
        out[i] = 0u32;
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
            largest = u32::reinterpret(ptx::max_abs_nan(so_far, value));
        } else {
            largest = max(largest, magnitude_bits(value));
        }
    }
    largest
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
    let mut bits = 0u32;
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
                bits = fold::<F>(bits, loaded[j].extract(k), elements, conversion, kind);
            }
        }
        i += AMAX_UNROLL * stride;
    }
    while i < vectors {
        let vector = x[i];
        #[unroll]
        for k in 0..N::value() {
            bits = fold::<F>(bits, vector.extract(k), elements, conversion, kind);
        }
        i += stride;
    }
    raise(out, 0usize, canonical(bits), planes);
}

/// The comptime choices of `amax_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmaxPlan {
    /// Maxima for row-wise copies.
    pub rows: Option<AmaxScope>,
    /// Maxima for column-wise copies.
    pub cols: Option<AmaxScope>,
    /// The transform of the columns.
    pub hadamard: Option<HadamardSize>,
    /// How groups are given.
    pub grouping: Grouping,
    /// Whether `x` is loaded by elements.
    pub elements: bool,
    /// Whether planes can reduce.
    pub planes: bool,
    /// Who compares.
    pub conversion: Conversion,
}

/// One cube folds one tile at a time: first its rows, then its columns. Units that share an entry meet
/// in shared memory first.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_tiles_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    offsets: &[u32],
    shape: Shape,
    rows_out: &mut [Atomic<u32>],
    cols_out: &mut [Atomic<u32>],
    signs: Signs,
    #[comptime] plan: AmaxPlan,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let pitch = comptime!(tile::pitch(kind));
    let words = comptime!(tile::words(kind));
    let per_word = comptime!(4 / kind.size());
    let span = comptime!(tile::span(plan.hadamard));
    let grouping = comptime!(plan.grouping);
    let mut data: Shared<[u32]> = Shared::new_slice(comptime!(tile::ROWS * pitch));
    let groups = tile::plan_groups(offsets, &shape, span, grouping);
    let tiles = groups.row_tiles(&shape, grouping) * shape.tile_cols;

    let mut index = CUBE_POS;
    while index < tiles {
        let tile = groups.locate(index, &shape, span, grouping);
        tile::load_tile::<F, N>(x, &mut data, &tile, &shape, plan.elements, kind);
        sync_cube();
        if comptime!(plan.rows.is_some()) {
            let mut bits = 0u32;
            let mut item = UNIT_POS as usize;
            // Four units to a row, each a quarter of its words.
            while item < 512usize {
                let start = (item / 4usize) * pitch + (item % 4usize) * comptime!(words / 4);
                let mut here = 0u32;
                #[unroll]
                for w in 0..comptime!(words / 4) {
                    here = fold::<u32>(here, data[start + w], false, plan.conversion, kind);
                }
                let here = canonical(here);
                if comptime!(plan.rows == Some(AmaxScope::Outer)) {
                    let row = tile.row0 + item / 4usize;
                    if row < tile.row_end {
                        rows_out[row].fetch_max(here);
                    }
                } else {
                    bits = max(bits, here);
                }
                item += CUBE_DIM as usize;
            }
            if comptime!(plan.rows == Some(AmaxScope::Group)) {
                raise(rows_out, tile.group, bits, plan.planes);
            }
        }
        if comptime!(plan.cols.is_some()) {
            let mut bits = 0u32;
            let mut item = UNIT_POS as usize;
            while item < comptime!(words * (tile::ROWS / span)) {
                let word = item % words;
                let chunk = item / words;
                let column_words =
                    tile::load_words(&data, chunk * span, word, &signs, plan.hadamard, kind);
                #[unroll]
                for half in 0..comptime!(per_word as u32) {
                    let mut values = tile::unpack_column(&column_words, half, plan.hadamard, kind);
                    if comptime!(plan.hadamard.is_some()) {
                        butterfly(&mut values, comptime!(plan.hadamard.unwrap()));
                    }
                    let mut here = 0u32;
                    #[unroll]
                    for b in 0..comptime!(span / 16) {
                        let part = block_amax(&values, comptime!(b * 16), plan.conversion);
                        here = max(here, magnitude_bits(part));
                    }
                    if comptime!(plan.hadamard.is_some()) {
                        // Multiplication and rounding keep the order, so the maximum may go first.
                        let factor = comptime!(plan.hadamard.unwrap().factor());
                        here = magnitude_bits(round_to_bf16(f32::reinterpret(here) * factor));
                    }
                    let here = canonical(here);
                    if comptime!(plan.cols == Some(AmaxScope::Outer)) {
                        let column = tile.col0 + word * per_word + half as usize;
                        if column < shape.cols {
                            cols_out[tile.group * shape.cols + column].fetch_max(here);
                        }
                    } else {
                        // Columns beyond the matrix are zeros.
                        bits = max(bits, here);
                    }
                }
                item += CUBE_DIM as usize;
            }
            if comptime!(plan.cols == Some(AmaxScope::Group)) {
                raise(cols_out, tile.group, bits, plan.planes);
            }
        }
        sync_cube();
        index += CUBE_COUNT;
    }
}
