//! Kernel inputs of the fused prologue.

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

/// Words per vector: kernels with a fused prologue load 16 bytes at a time.
pub(super) const VECTOR: usize = 4;

/// Returns the elements per vector.
pub(super) const fn per_vector(kind: FloatKind) -> usize {
    VECTOR * 4 / kind.size()
}

/// Variant of an enum with which a kernel was launched. CubeCL's hash of such an argument does not
/// include it, and would find cached kernels by the hash alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaunchedVariant {
    /// `PrologueInputs::SwiGlu`.
    SwiGlu,
    /// `PrologueInputs::SwiGluBackward`.
    SwiGluBackward,
    /// `PrologueInputs::Gather`.
    Gather,
}

/// Prologue and its inputs besides `x`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum PrologueInputs {
    /// `x` unchanged.
    Plain,
    /// Gated activation; `x` is not read.
    SwiGlu(GateInputs),
    /// Concatenated gradients of a gated activation; `x` is the gradient of its output.
    SwiGluBackward(GateInputs),
    /// Rows of `x` by index.
    Gather(GatherInputs),
}

/// Inputs of a gated activation.
#[derive(CubeType, CubeLaunch)]
pub struct GateInputs {
    /// Gate.
    pub gate: Box<[Vector<u32, Const<4>>]>,
    /// Factor multiplied with the activated gate (up): the same memory.
    pub up: Box<[Vector<u32, Const<4>>]>,
    /// Row pitch in vectors.
    pub pitch: usize,
    /// Offset of `up` in a row, in vectors.
    pub up_start: usize,
    /// [`LaunchedVariant::SwiGlu`] or [`LaunchedVariant::SwiGluBackward`].
    #[cube(comptime)]
    #[allow(dead_code, reason = "read when the kernel is expanded")]
    pub variant: LaunchedVariant,
}

/// Indices of gathered rows.
#[derive(CubeType, CubeLaunch)]
pub struct GatherInputs {
    /// Row of `x` for each row.
    pub numbers: Box<[u32]>,
    /// Number of rows of `x`.
    pub rows: usize,
    /// [`LaunchedVariant::Gather`].
    #[cube(comptime)]
    #[allow(dead_code, reason = "read when the kernel is expanded")]
    pub variant: LaunchedVariant,
}

/// Values that all vectors of one column of vectors share.
#[derive(CubeType)]
pub struct Column {
    /// Index of its inputs in a row.
    pub vector: usize,
    /// True if it belongs to the second of two concatenated gradients.
    pub of_up: bool,
}

/// Loaded inputs of a vector.
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
    /// Returns the values that the vectors at `vector` of all rows share. Computed rows have
    /// `row_vectors` vectors.
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

    /// Declares that previous kernels may write the inputs besides `x`.
    pub fn written_before(&self, #[comptime] overlaps: bool) {
        #[comptime]
        match self {
            PrologueInputs::Plain => {}
            PrologueInputs::SwiGlu(inputs) | PrologueInputs::SwiGluBackward(inputs) => {
                written_before(&inputs.gate, overlaps);
                written_before(&inputs.up, overlaps);
            }
            PrologueInputs::Gather(inputs) => written_before(&inputs.numbers, overlaps),
        }
    }

    /// Loads the inputs of the vector in `row` of `column`.
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
            PrologueInputs::Gather(inputs) => {
                // No access is out of bounds, for any index.
                let from = min(inputs.numbers[row] as usize, inputs.rows - 1usize);
                Loaded {
                    first: words_of::<F, N>(x[from * row_vectors + vector]),
                    gate: no_words(),
                    up: no_words(),
                }
            }
        }
    }

    /// Returns the words of a vector.
    pub fn words(
        &self,
        loaded: &Loaded,
        column: &Column,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) -> Array<u32> {
        // On other targets the expansion of a multiply-add is too long for many copies.
        let unrolled = comptime!(conversion.has_ptx());
        #[comptime]
        match self {
            PrologueInputs::Plain | PrologueInputs::Gather(_) => {
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

    /// Returns the column of the matrix that corresponds to column `c` of a tile of
    /// [`start_load()`].
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
                // Columns after the end of either half are invalid.
                let start = select(of_up, width, 0usize);
                select(column < width, start + column, shape.cols)
            }
            _ => tile.col0 + c,
        }
    }
}

/// Words of the gradients with respect to both inputs.
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

/// Output of the prologue's result.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum PrologueOut {
    /// Not written.
    None,
    /// Written to a matrix.
    Matrix(Box<[Vector<u32, Const<4>>]>),
}
