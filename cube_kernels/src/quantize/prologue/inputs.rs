//! What kernels read on the way from memory.

use cubecl::prelude::*;

use super::super::tile::{self, Shape, Tile};
use crate::{
    cube::{
        activation::{swiglu, swiglu_backward},
        codec::Conversion,
        overlap::written_before,
        words::{pack, unpack},
    },
    tensor::FloatKind,
};

/// Words of a vector: kernels with a fused prologue load 16 bytes at a time.
pub(super) const VECTOR: usize = 4;

/// Elements of a vector.
pub(super) const fn per_vector(kind: FloatKind) -> usize {
    VECTOR * 4 / kind.size()
}

/// Which variant of an enum a kernel was launched with. CubeCL's hash of such an argument does not
/// see it, and finds compiled kernels that are kept by the hash alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaunchedVariant {
    /// `PrologueInputs::SwiGlu`.
    SwiGlu,
    /// `PrologueInputs::SwiGluBackward`.
    SwiGluBackward,
}

/// What a kernel reads beside `x`, and what it makes of both.
#[derive(CubeType, CubeLaunch)]
pub enum PrologueInputs {
    /// `x` as it is.
    Plain,
    /// A gated activation; `x` is not read.
    SwiGlu(GateInputs),
    /// The gradients of a gated activation, concatenated; `x` is that of its output.
    SwiGluBackward(GateInputs),
}

/// Inputs of a gated activation.
#[derive(CubeType, CubeLaunch)]
pub struct GateInputs {
    /// The gate.
    pub gate: Box<[Vector<u32, Const<4>>]>,
    /// What is multiplied with it: the same memory.
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
    /// Where its inputs stand in a row.
    pub vector: usize,
    /// Of two concatenated gradients, whether it belongs to the second.
    pub of_up: bool,
}

/// What a vector is made from.
#[derive(CubeType)]
pub struct Loaded {
    first: Array<u32>,
    gate: Array<u32>,
    up: Array<u32>,
}

#[cube]
pub(super) fn words_of<F: Numeric, N: Size>(vector: Vector<F, N>) -> Array<u32> {
    let mut words = Array::<u32>::new(VECTOR);
    #[unroll]
    for i in 0..VECTOR {
        words[i] = u32::cast_from(vector.extract(i));
    }
    words
}

#[cube]
pub(super) fn no_words() -> Array<u32> {
    Array::<u32>::new(VECTOR)
}

#[cube]
impl PrologueInputs {
    /// What the vectors at `vector` of all rows have in common. Computed rows have `row_vectors`
    /// vectors.
    pub fn column(&self, vector: usize, row_vectors: usize) -> Column {
        #[comptime]
        match self {
            PrologueInputs::SwiGluBackward(_) => {
                let half = row_vectors / 2usize;
                let of_up = vector >= half;
                Column {
                    vector: vector - select(of_up, half, 0usize),
                    of_up,
                }
            }
            _ => Column {
                vector,
                of_up: false.runtime(),
            },
        }
    }

    /// Kernels before this one may write what is read beside `x`.
    pub fn written_before(&self, #[comptime] overlaps: bool) {
        #[comptime]
        match self {
            PrologueInputs::Plain => {}
            PrologueInputs::SwiGlu(inputs) | PrologueInputs::SwiGluBackward(inputs) => {
                written_before(&inputs.gate, overlaps);
                written_before(&inputs.up, overlaps);
            }
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
            },
            PrologueInputs::SwiGlu(inputs) => {
                let start = row * inputs.pitch + vector;
                Loaded {
                    first: no_words(),
                    gate: words_of::<u32, Const<4>>(inputs.gate[start]),
                    up: words_of::<u32, Const<4>>(inputs.up[start + inputs.up_start]),
                }
            }
            PrologueInputs::SwiGluBackward(inputs) => {
                let start = row * inputs.pitch + vector;
                Loaded {
                    first: words_of::<F, N>(x[row * (row_vectors / 2usize) + vector]),
                    gate: words_of::<u32, Const<4>>(inputs.gate[start]),
                    up: words_of::<u32, Const<4>>(inputs.up[start + inputs.up_start]),
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

    /// The column of the matrix that column `c` of a tile stands for, as [`start_load()`] has them.
    pub fn column_of(
        &self,
        tile: &Tile,
        c: usize,
        shape: &Shape,
        #[comptime] kind: FloatKind,
    ) -> usize {
        #[comptime]
        match self {
            PrologueInputs::SwiGluBackward(_) => {
                let half = comptime!(tile::cols(kind) / 2);
                let of_up = c >= half;
                let column = tile.col0 / 2usize + c - select(of_up, half, 0usize);
                let width = shape.cols / 2usize;
                // Behind the end of either half there is no column.
                let start = select(of_up, width, 0usize);
                select(column < width, start + column, shape.cols)
            }
            _ => tile.col0 + c,
        }
    }
}

/// The words of the gradients by both inputs.
#[derive(CubeType)]
pub(super) struct GradientWords {
    pub by_gate: Array<u32>,
    pub by_up: Array<u32>,
}

#[cube]
pub(super) fn gradients(
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
