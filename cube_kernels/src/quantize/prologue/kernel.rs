//! Kernels that compute their input while they load it.

use cubecl::prelude::*;

use super::{
    super::tile::{self, LoadPlan, Shape, Tile},
    inputs::*,
};
use crate::{
    cube::{
        codec::Conversion,
        overlap::{let_next_begin, wait_for_previous, written_before},
    },
    tensor::FloatKind,
};

#[cube]
impl PrologueOut {
    fn write(&mut self, index: usize, words: &Array<u32>) {
        #[comptime]
        match self {
            PrologueOut::None => {}
            PrologueOut::Matrix(out) => out[index] = vector_of(words),
        }
    }
}

#[cube]
fn vector_of(words: &Array<u32>) -> Vector<u32, Const<4>> {
    let mut vector = Vector::<u32, Const<4>>::empty();
    #[unroll]
    for i in 0..VECTOR {
        vector.insert(i, words[i]);
    }
    vector
}

/// Vectors whose inputs a unit loads before it computes the first.
const IN_FLIGHT: usize = 4;

/// [`tile::start_load()`] of the result of `prologue`, which is also written to `written`.
///
/// Gradients of a gated activation are paired, because both are computed from the same inputs: the
/// first half of the tile holds those by the gate, the second half those by the other input, of the
/// same columns. The caller maps columns by [`PrologueInputs::column_of()`].
#[cube]
pub fn start_load<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    prologue: &PrologueInputs,
    written: &mut PrologueOut,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] plan: LoadPlan,
) {
    #[comptime]
    match prologue {
        PrologueInputs::Plain => tile::start_load::<F, N>(x, shared, tile, shape, plan),
        PrologueInputs::SwiGluBackward(_) => {
            prologue_pairs::<F, N>(x, prologue, written, shared, tile, shape, plan);
        }
        _ => prologue_tile::<F, N>(x, prologue, written, shared, tile, shape, plan),
    }
}

#[cube]
fn prologue_tile<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    prologue: &PrologueInputs,
    written: &mut PrologueOut,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] plan: LoadPlan,
) {
    let (units, kind) = comptime!((plan.units, plan.kind));
    let per_row = comptime!(tile::WORDS / VECTOR);
    let row_vectors = shape.cols / comptime!(per_vector(kind));
    let vector0 = tile.col0 / comptime!(per_vector(kind));
    // With units for whole rows, a unit stays in its column of vectors.
    let whole = comptime!(
        units.is_multiple_of(per_row) && (tile::ROWS * per_row).is_multiple_of(units * IN_FLIGHT)
    );
    let mut first = UNIT_POS as usize;
    if comptime!(whole) {
        let column = prologue.column(
            min(vector0 + first % per_row, row_vectors - 1usize),
            row_vectors,
        );
        while first < comptime!(tile::ROWS * per_row) {
            let run = VectorRun {
                row0: tile.row0,
                row_end: tile.row_end,
                first,
                vector0,
                row_vectors,
            };
            prologue_vectors::<F, N>(x, prologue, written, shared, &column, &run, IN_FLIGHT, plan);
            first += comptime!(IN_FLIGHT * units);
        }
    } else {
        while first < comptime!(tile::ROWS * per_row) {
            let column = prologue.column(
                min(vector0 + first % per_row, row_vectors - 1usize),
                row_vectors,
            );
            let run = VectorRun {
                row0: tile.row0,
                row_end: tile.row_end,
                first,
                vector0,
                row_vectors,
            };
            prologue_vectors::<F, N>(x, prologue, written, shared, &column, &run, 1usize, plan);
            first += units;
        }
    }
}

/// Vectors of a tile: number `first`, counted along its rows, and every `units`-th one after it.
#[derive(CubeType, Clone, Copy)]
struct VectorRun {
    /// First row of the tile, and end row of its group (exclusive).
    row0: usize,
    row_end: usize,
    first: usize,
    /// First vector of the tile in a row.
    vector0: usize,
    /// Vectors per row.
    row_vectors: usize,
}

/// Computes `count` vectors of a tile.
#[cube]
fn prologue_vectors<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    prologue: &PrologueInputs,
    written: &mut PrologueOut,
    shared: &mut Shared<[u32]>,
    column: &Column,
    run: &VectorRun,
    #[comptime] count: usize,
    #[comptime] plan: LoadPlan,
) {
    let (units, conversion, kind) = comptime!((plan.units, plan.conversion, plan.kind));
    let per_row = comptime!(tile::WORDS / VECTOR);
    let (first, vector0, row_vectors) = (run.first, run.vector0, run.row_vectors);
    let mut pending = Sequence::<Loaded>::new();
    #[unroll]
    for j in 0..count {
        // After the end the last row is read again, and not used.
        let row = min(
            run.row0 + (first + j * units) / per_row,
            run.row_end - 1usize,
        );
        pending.push(prologue.load::<F, N>(x, row, column, row_vectors));
    }
    #[unroll]
    for j in 0..count {
        let item = first + j * units;
        let r = item / per_row;
        let row = run.row0 + r;
        let vector = vector0 + item % per_row;
        let inside = row < run.row_end && vector < row_vectors;
        let words = prologue.words(pending.index(j), column, conversion, kind);
        let start = tile::word_at(r, (item % per_row) * VECTOR);
        #[unroll]
        for i in 0..VECTOR {
            shared[start + i] = select(inside, words[i], 0u32);
        }
        if inside {
            written.write(row * row_vectors + vector, &words);
        }
    }
}

#[cube]
fn prologue_pairs<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    prologue: &PrologueInputs,
    written: &mut PrologueOut,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] plan: LoadPlan,
) {
    let (units, conversion, kind) = comptime!((plan.units, plan.conversion, plan.kind));
    let per_row = comptime!(tile::WORDS / VECTOR / 2);
    let items = comptime!(tile::ROWS * per_row);
    let in_flight = comptime!(if items.is_multiple_of(units * IN_FLIGHT) {
        IN_FLIGHT
    } else {
        1
    });
    let row_vectors = shape.cols / comptime!(per_vector(kind));
    let half = row_vectors / 2usize;
    let vector0 = tile.col0 / comptime!(2 * per_vector(kind));
    let mut first = UNIT_POS as usize;
    while first < items {
        let mut pending = Sequence::<Loaded>::new();
        #[unroll]
        for j in 0..in_flight {
            // After the end the last row and vector are read again, and not used.
            let item = first + j * units;
            let row = min(tile.row0 + item / per_row, tile.row_end - 1usize);
            let column = Column {
                vector: min(vector0 + item % per_row, half - 1usize),
                of_up: false.runtime(),
            };
            pending.push(prologue.load::<F, N>(x, row, &column, row_vectors));
        }
        #[unroll]
        for j in 0..in_flight {
            let item = first + j * units;
            let r = item / per_row;
            let v = item % per_row;
            let row = tile.row0 + r;
            let inside = row < tile.row_end && vector0 + v < half;
            let both = gradients(pending.index(j), conversion, kind);
            let start = tile::word_at(r, v * VECTOR);
            #[unroll]
            for i in 0..VECTOR {
                shared[start + i] = select(inside, both.by_gate[i], 0u32);
                shared[start + comptime!(tile::WORDS / 2 + i)] =
                    select(inside, both.by_up[i], 0u32);
            }
            if inside {
                let index = row * row_vectors + vector0 + v;
                written.write(index, &both.by_gate);
                written.write(index + half, &both.by_up);
            }
        }
        first += comptime!(in_flight * units);
    }
}

/// Comptime configuration of [`prologue_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProloguePlan {
    /// True if the number of rows is in device memory.
    pub bounded: bool,
    /// True if the kernel can begin before the previous one has ended.
    pub overlaps: bool,
    /// Implementation of conversions.
    pub conversion: Conversion,
    /// Element type.
    pub kind: FloatKind,
}

/// Each unit computes every `units`-th vector, or pair of vectors, of `rows` rows or, if the plan
/// is bounded, of the rows before `end`, a word in device memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn prologue_kernel<N: Size>(
    x: &[Vector<u32, N>],
    prologue: PrologueInputs,
    out: &mut [Vector<u32, Const<4>>],
    end: &[u32],
    rows: usize,
    row_vectors: usize,
    #[comptime] plan: ProloguePlan,
) {
    let (conversion, kind) = comptime!((plan.conversion, plan.kind));
    written_before(x, plan.overlaps);
    prologue.written_before(plan.overlaps);
    if comptime!(plan.bounded) {
        written_before(end, plan.overlaps);
    }
    wait_for_previous(plan.overlaps);
    let_next_begin(plan.overlaps);
    let rows = if comptime!(plan.bounded) {
        min(rows, end[0] as usize)
    } else {
        rows
    };
    let mut item = ABSOLUTE_POS;
    #[comptime]
    match &prologue {
        PrologueInputs::SwiGluBackward(_) => {
            let half = row_vectors / 2usize;
            while item < rows * half {
                let row = item / half;
                let column = prologue.column(item - row * half, row_vectors);
                let loaded = prologue.load::<u32, N>(x, row, &column, row_vectors);
                let both = gradients(&loaded, conversion, kind);
                let index = item + row * half;
                out[index] = vector_of(&both.by_gate);
                out[index + half] = vector_of(&both.by_up);
                item += CUBE_COUNT * CUBE_DIM as usize;
            }
        }
        _ => {
            while item < rows * row_vectors {
                let row = item / row_vectors;
                let column = prologue.column(item - row * row_vectors, row_vectors);
                let loaded = prologue.load::<u32, N>(x, row, &column, row_vectors);
                out[item] = vector_of(&prologue.words(&loaded, &column, conversion, kind));
                item += CUBE_COUNT * CUBE_DIM as usize;
            }
        }
    }
}
