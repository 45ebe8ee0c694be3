//! What kernels read on the way from memory.

use cubecl::prelude::*;

use super::super::tile::{self, LoadPlan, Shape, Tile};
use crate::{
    cube::{
        activation::{SquareSum, swiglu, swiglu_backward},
        codec::Conversion,
        words::{block_words, load_block_words, pack, unpack, unpack_block},
    },
    tensor::FloatKind,
};

/// Words of a vector: kernels with a fused prologue load 16 bytes at a time.
const VECTOR: usize = 4;

/// Elements of a vector.
pub(super) const fn per_vector(kind: FloatKind) -> usize {
    VECTOR * 4 / kind.size()
}

/// Which variant of an enum a kernel was launched with. CubeCL's hash of such an argument does not
/// see it, and finds compiled kernels that are kept by the hash alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaunchedVariant {
    /// `PrologueInputs::RmsNorm`.
    RmsNorm,
    /// `PrologueInputs::SwiGlu`.
    SwiGlu,
    /// `PrologueInputs::SwiGluBackward`.
    SwiGluBackward,
    /// `RowNorm::Found`.
    FoundNorm,
}

/// What a kernel reads beside `x`, and what it makes of both.
#[derive(CubeType, CubeLaunch)]
pub enum PrologueInputs {
    /// `x` as it is.
    Plain,
    /// `x` normalised.
    RmsNorm(NormInputs),
    /// A gated activation; `x` is not read.
    SwiGlu(GateInputs),
    /// The gradients of a gated activation, concatenated; `x` is that of its output.
    SwiGluBackward(GateInputs),
}

/// Factors of a normalisation.
#[derive(CubeType, CubeLaunch)]
pub struct NormInputs {
    /// One for each row.
    pub rstd: Box<[f32]>,
    /// One for each column.
    pub gain: Box<[Vector<f32, Const<4>>]>,
    /// [`LaunchedVariant::RmsNorm`].
    #[cube(comptime)]
    pub variant: LaunchedVariant,
}

/// Inputs of a gated activation.
#[derive(CubeType, CubeLaunch)]
pub struct GateInputs {
    /// The gate.
    pub gate: Box<[Vector<u32, Const<4>>]>,
    /// What is multiplied with it; the same memory where both are concatenated.
    pub up: Box<[Vector<u32, Const<4>>]>,
    /// Vectors from one row to the next.
    pub pitch: usize,
    /// Vectors of a row before its part of `up`.
    pub up_start: usize,
    /// [`LaunchedVariant::SwiGlu`] or [`LaunchedVariant::SwiGluBackward`].
    #[cube(comptime)]
    pub variant: LaunchedVariant,
}

/// What vectors of one column of vectors have in common.
#[derive(CubeType)]
pub struct Column {
    /// Gains of its elements.
    gains: Array<f32>,
    /// Where its inputs stand in a row.
    vector: usize,
    /// Of two concatenated gradients, whether it belongs to the second.
    of_up: bool,
}

/// What a vector is made from.
#[derive(CubeType)]
pub struct Loaded {
    first: Array<u32>,
    gate: Array<u32>,
    up: Array<u32>,
    rstd: f32,
}

#[cube]
fn words_of<F: Numeric, N: Size>(vector: Vector<F, N>) -> Array<u32> {
    let mut words = Array::<u32>::new(VECTOR);
    #[unroll]
    for i in 0..VECTOR {
        words[i] = u32::cast_from(vector.extract(i));
    }
    words
}

#[cube]
fn no_words() -> Array<u32> {
    Array::<u32>::new(VECTOR)
}

/// The gains of the elements of vector `vector` of a row.
#[cube]
fn load_gains(
    gain: &[Vector<f32, Const<4>>],
    vector: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let parts = comptime!(per_vector(kind) / 4);
    let mut gains = Array::<f32>::new(comptime!(per_vector(kind)));
    #[unroll]
    for part in 0..parts {
        let loaded = gain[vector * parts + part];
        #[unroll]
        for i in 0..4usize {
            gains[comptime!(part * 4 + i)] = loaded.extract(i);
        }
    }
    gains
}

/// The words of a vector of normalised elements.
#[cube]
fn normalized(
    x: &Array<u32>,
    rstd: f32,
    gains: &Array<f32>,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let per_word = comptime!(4 / kind.size());
    let unrolled = comptime!(conversion.has_ptx());
    let mut words = Array::<u32>::new(VECTOR);
    #[unroll(unrolled)]
    for w in 0..VECTOR {
        let low = unpack(x[w], 0u32, kind) * rstd * gains[w * per_word];
        let high = if comptime!(per_word == 2) {
            unpack(x[w], 1u32, kind) * rstd * gains[w * per_word + comptime!(per_word - 1)]
        } else {
            0.0f32.runtime()
        };
        words[w] = pack(low, high, kind, conversion);
    }
    words
}

#[cube]
impl PrologueInputs {
    /// What the vectors at `vector` of all rows have in common. Computed rows have `row_vectors`
    /// vectors.
    pub fn column(&self, vector: usize, row_vectors: usize, #[comptime] kind: FloatKind) -> Column {
        #[comptime]
        match self {
            PrologueInputs::RmsNorm(norm) => Column {
                gains: load_gains(&norm.gain, vector, kind),
                vector,
                of_up: false.runtime(),
            },
            PrologueInputs::SwiGluBackward(_) => {
                let half = row_vectors / 2usize;
                let of_up = vector >= half;
                Column {
                    gains: Array::<f32>::new(1usize),
                    vector: vector - select(of_up, half, 0usize),
                    of_up,
                }
            }
            _ => Column {
                gains: Array::<f32>::new(1usize),
                vector,
                of_up: false.runtime(),
            },
        }
    }

    /// Loads what the vector in `row` of `column` is made from.
    pub fn load<F: Numeric, N: Size>(
        &self,
        x: &[Vector<F, N>],
        row: usize,
        column: &Column,
        row_vectors: usize,
    ) -> Loaded {
        let vector = column.vector;
        #[comptime]
        match self {
            PrologueInputs::Plain => Loaded {
                first: words_of::<F, N>(x[row * row_vectors + vector]),
                gate: no_words(),
                up: no_words(),
                rstd: 0.0f32.runtime(),
            },
            PrologueInputs::RmsNorm(norm) => Loaded {
                first: words_of::<F, N>(x[row * row_vectors + vector]),
                gate: no_words(),
                up: no_words(),
                rstd: norm.rstd[row],
            },
            PrologueInputs::SwiGlu(inputs) => {
                let start = row * inputs.pitch + vector;
                Loaded {
                    first: no_words(),
                    gate: words_of::<u32, Const<4>>(inputs.gate[start]),
                    up: words_of::<u32, Const<4>>(inputs.up[start + inputs.up_start]),
                    rstd: 0.0f32.runtime(),
                }
            }
            PrologueInputs::SwiGluBackward(inputs) => {
                let start = row * inputs.pitch + vector;
                Loaded {
                    first: words_of::<F, N>(x[row * (row_vectors / 2usize) + vector]),
                    gate: words_of::<u32, Const<4>>(inputs.gate[start]),
                    up: words_of::<u32, Const<4>>(inputs.up[start + inputs.up_start]),
                    rstd: 0.0f32.runtime(),
                }
            }
        }
    }

    /// The words of a vector.
    pub fn words(
        &self,
        loaded: &Loaded,
        column: &Column,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) -> Array<u32> {
        // Elsewhere what a multiply-add becomes is too long for many copies.
        let unrolled = comptime!(conversion.has_ptx());
        #[comptime]
        match self {
            PrologueInputs::Plain => {
                let mut words = Array::<u32>::new(VECTOR);
                #[unroll]
                for w in 0..VECTOR {
                    words[w] = loaded.first[w];
                }
                words
            }
            PrologueInputs::RmsNorm(_) => {
                normalized(&loaded.first, loaded.rstd, &column.gains, conversion, kind)
            }
            PrologueInputs::SwiGlu(_) => {
                let mut words = Array::<u32>::new(VECTOR);
                #[unroll(unrolled)]
                for w in 0..VECTOR {
                    let mut pair = Array::<f32>::new(2usize);
                    #[unroll]
                    for half in 0..comptime!(4 / kind.size() as u32) {
                        let gate = unpack(loaded.gate[w], half, kind);
                        let up = unpack(loaded.up[w], half, kind);
                        pair[half as usize] = swiglu(gate, up, conversion);
                    }
                    words[w] = pack(pair[0], pair[1], kind, conversion);
                }
                words
            }
            PrologueInputs::SwiGluBackward(_) => {
                let both = gradients(loaded, conversion, kind);
                let mut words = Array::<u32>::new(VECTOR);
                #[unroll]
                for w in 0..VECTOR {
                    words[w] = select(column.of_up, both.by_up[w], both.by_gate[w]);
                }
                words
            }
        }
    }

    /// The column of the matrix that column `c` of a tile stands for; `paired` as in
    /// [`start_load()`].
    pub fn column_of(
        &self,
        tile: &Tile,
        c: usize,
        shape: &Shape,
        #[comptime] paired: bool,
        #[comptime] kind: FloatKind,
    ) -> usize {
        #[comptime]
        match self {
            PrologueInputs::SwiGluBackward(_) => {
                if comptime!(paired) {
                    let half = comptime!(tile::cols(kind) / 2);
                    let of_up = c >= half;
                    let column = tile.col0 / 2usize + c - select(of_up, half, 0usize);
                    let width = shape.cols / 2usize;
                    // Behind the end of either half there is no column.
                    let start = select(of_up, width, 0usize);
                    select(column < width, start + column, shape.cols)
                } else {
                    tile.col0 + c
                }
            }
            _ => tile.col0 + c,
        }
    }
}

/// The words of the gradients by both inputs.
#[derive(CubeType)]
struct GradientWords {
    by_gate: Array<u32>,
    by_up: Array<u32>,
}

#[cube]
fn gradients(
    loaded: &Loaded,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> GradientWords {
    let unrolled = comptime!(conversion.has_ptx());
    let mut by_gate = Array::<u32>::new(VECTOR);
    let mut by_up = Array::<u32>::new(VECTOR);
    #[unroll(unrolled)]
    for w in 0..VECTOR {
        let mut gate_pair = Array::<f32>::new(2usize);
        let mut up_pair = Array::<f32>::new(2usize);
        #[unroll]
        for half in 0..comptime!(4 / kind.size() as u32) {
            let grad = unpack(loaded.first[w], half, kind);
            let gate = unpack(loaded.gate[w], half, kind);
            let up = unpack(loaded.up[w], half, kind);
            let both = swiglu_backward(grad, gate, up, conversion);
            gate_pair[half as usize] = both.by_gate;
            up_pair[half as usize] = both.by_up;
        }
        by_gate[w] = pack(gate_pair[0], gate_pair[1], kind, conversion);
        by_up[w] = pack(up_pair[0], up_pair[1], kind, conversion);
    }
    GradientWords { by_gate, by_up }
}

/// Where a kernel writes what its prologue computed, too.
#[derive(CubeType, CubeLaunch)]
pub enum PrologueOut {
    /// Nowhere.
    None,
    /// A matrix.
    Matrix(Box<[Vector<u32, Const<4>>]>),
}

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

/// [`tile::start_load()`] of what `prologue` makes; it is also written to `written`.
///
/// Where gradients of a gated activation are [paired](LoadPlan::paired), both come from the same
/// numbers, and the caller asks for [`PrologueInputs::column_of()`].
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
            if comptime!(plan.paired) {
                prologue_pairs::<F, N>(x, prologue, written, shared, tile, shape, plan);
            } else {
                prologue_tile::<F, N>(x, prologue, written, shared, tile, shape, plan);
            }
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
    // With units for whole rows a unit stays in its column of vectors.
    let whole = comptime!(
        units.is_multiple_of(per_row) && (tile::ROWS * per_row).is_multiple_of(units * IN_FLIGHT)
    );
    let mut first = UNIT_POS as usize;
    if comptime!(whole) {
        let column = prologue.column(
            min(vector0 + first % per_row, row_vectors - 1usize),
            row_vectors,
            kind,
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
                kind,
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

/// Vectors of a tile: number `first`, counted along its rows, and every `units`-th one.
#[derive(CubeType, Clone, Copy)]
struct VectorRun {
    /// The first row of the tile, and the row behind the last of its group.
    row0: usize,
    row_end: usize,
    first: usize,
    /// The first vector of the tile in a row.
    vector0: usize,
    /// Vectors of a row.
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
        // Behind the end the last row is read again, and not used.
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
            // Behind the end the last row and vector are read again, and not used.
            let item = first + j * units;
            let row = min(tile.row0 + item / per_row, tile.row_end - 1usize);
            let column = Column {
                gains: Array::<f32>::new(1usize),
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

/// The words of block `block` of row `row`, of which there are `blocks` in a row.
#[cube]
pub fn load_block<N: Size>(
    x: &[Vector<u32, N>],
    prologue: &PrologueInputs,
    row: usize,
    block: usize,
    blocks: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    #[comptime]
    match prologue {
        PrologueInputs::Plain => {
            let width = N::value();
            let per_block = comptime!(block_words(kind) / width);
            load_block_words::<N>(x, (row * blocks + block) * per_block, kind)
        }
        _ => {
            let vectors = comptime!(block_words(kind) / VECTOR);
            let mut words = Array::<u32>::new(comptime!(block_words(kind)));
            #[unroll]
            for v in 0..vectors {
                let column = prologue.column(block * vectors + v, blocks * vectors, kind);
                let loaded = prologue.load::<u32, N>(x, row, &column, blocks * vectors);
                let part = prologue.words(&loaded, &column, conversion, kind);
                #[unroll]
                for i in 0..VECTOR {
                    words[comptime!(v * VECTOR + i)] = part[i];
                }
            }
            words
        }
    }
}

/// The words of a block along a row, normalised.
#[cube]
pub fn normalized_block(
    x: &Array<u32>,
    gain: &[Vector<f32, Const<4>>],
    rstd: f32,
    block: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let vectors = comptime!(block_words(kind) / VECTOR);
    let mut words = Array::<u32>::new(comptime!(block_words(kind)));
    #[unroll]
    for v in 0..vectors {
        let mut raw = Array::<u32>::new(VECTOR);
        #[unroll]
        for i in 0..VECTOR {
            raw[i] = x[comptime!(v * VECTOR + i)];
        }
        let gains = load_gains(gain, block * vectors + v, kind);
        let part = normalized(&raw, rstd, &gains, conversion, kind);
        #[unroll]
        for i in 0..VECTOR {
            words[comptime!(v * VECTOR + i)] = part[i];
        }
    }
    words
}

/// One unit computes every `units`-th vector, or pair of vectors.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn prologue_kernel<N: Size>(
    x: &[Vector<u32, N>],
    prologue: PrologueInputs,
    out: &mut [Vector<u32, Const<4>>],
    rows: usize,
    row_vectors: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    let mut item = ABSOLUTE_POS;
    #[comptime]
    match &prologue {
        PrologueInputs::SwiGluBackward(_) => {
            let half = row_vectors / 2usize;
            while item < rows * half {
                let row = item / half;
                let column = prologue.column(item - row * half, row_vectors, kind);
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
                let column = prologue.column(item - row * row_vectors, row_vectors, kind);
                let loaded = prologue.load::<u32, N>(x, row, &column, row_vectors);
                out[item] = vector_of(&prologue.words(&loaded, &column, conversion, kind));
                item += CUBE_COUNT * CUBE_DIM as usize;
            }
        }
    }
}

/// One cube takes a row at a time.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn rms_norm_rstd_kernel<N: Size>(
    x: &[Vector<u32, N>],
    out: &mut [f32],
    rows: usize,
    blocks: usize,
    epsilon: f32,
    #[comptime] planes: bool,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    let width = N::value();
    let per_block = comptime!(block_words(kind) / width);
    let mut sum = SquareSum::new(planes);
    let mut row = CUBE_POS;
    while row < rows {
        sum.clear(planes);
        let mut block = UNIT_POS as usize;
        while block < blocks {
            let words = load_block_words::<N>(x, (row * blocks + block) * per_block, kind);
            sum.add(&unpack_block(&words, kind), block, planes, conversion);
            block += CUBE_DIM as usize;
        }
        let rstd = sum.rstd(blocks * 16usize, epsilon, planes, conversion);
        if UNIT_POS == 0u32 {
            out[row] = rstd;
        }
        row += CUBE_COUNT;
    }
}
