//! Producers: what a quantization kernel reads may be computed on the way from memory, and is then
//! never written there.
//!
//! A kernel takes a [`Producer`] beside `x`. Its variant is a comptime choice, so that a kernel that
//! reads a plain matrix has nothing of the others in it. Values are rounded to the element type of the
//! inputs, packed in words, and from there on the kernel is the same.

use cubecl::{prelude::*, server::Handle};

use super::tile::{self, Shape, Tile};
use crate::launch::{Words, buffer, cubes, grid};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{conversion_of, is_cpu},
    cube::{
        activation::{SquareSum, swiglu, swiglu_backward},
        codec::Conversion,
        words::{block_words, load_block_words, pack, unpack, unpack_block},
    },
    memory::{address_type, allocate, check_memory, is_aligned},
    tensor::{FloatKind, Matrix},
};

/// Where a gated activation has its two inputs, both `rows` x `width`.
#[derive(Debug, Clone, Copy)]
pub enum Gated<'a> {
    /// In one matrix of `rows` x `2 width`, the gate in the first half of each row: the output of one
    /// projection.
    SideBySide(&'a Matrix),
    /// In two matrices.
    Apart {
        /// What goes through SiLU.
        gate: &'a Matrix,
        /// What is multiplied with it.
        up: &'a Matrix,
    },
}

/// The matrix that a kernel quantizes: one in memory, or one that is computed while its inputs are read.
///
/// Computed ones have rows of a multiple of 16 elements and inputs that start at multiples of 16 bytes;
/// values are rounded to the type of the inputs before anything else happens to them, so that a fused
/// kernel gives the bytes of [`produce()`] followed by the same kernel.
///
/// What reads and writes least where both the maxima and the copies are wanted: for RMS normalisation
/// [`amaxes`](super::amaxes) and [`quantize_both`](super::quantize_both) of the source, which compute it twice
/// and write it never; for SwiGLU and its gradients
/// [`produce_with_amaxes`](super::produce_with_amaxes) and then the copies of what was written, since two
/// inputs read again are as many bytes as one output written and read, and take the exponential again. Per
/// token, in one read, [`quantize_per_token`](super::quantize_per_token()) of the source.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// The matrix itself.
    Plain(&'a Matrix),
    /// `x · rstd · gain`; see [`reference::rms_norm`](crate::reference::rms_norm).
    RmsNorm {
        /// What is normalised.
        x: &'a Matrix,
        /// `1 / sqrt(mean(x²) + ε)` of each row, `f32`: see [`rms_norm_rstd`].
        rstd: &'a Handle,
        /// One factor for each column, `f32`.
        gain: &'a Handle,
    },
    /// `silu(gate) · up`; see [`reference::swiglu`](crate::reference::swiglu).
    SwiGlu(Gated<'a>),
    /// The gradients of SwiGLU by both inputs, `rows` x `2 width`, that by the gate in the first half of
    /// each row; see [`reference::swiglu_backward`](crate::reference::swiglu_backward).
    SwiGluBackward {
        /// The gradient by the output, `rows` x `width`.
        grad: &'a Matrix,
        /// The inputs.
        inputs: Gated<'a>,
    },
}

impl<'a> From<&'a Matrix> for Source<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Self::Plain(matrix)
    }
}

/// A [`Source`] that was checked: what launches need of it.
pub(crate) struct Input {
    /// Shape and type of what is produced; the memory is that of the first input.
    pub matrix: Matrix,
    /// How the first input is loaded.
    pub words: Words,
    operands: Operands,
}

/// The inputs beside the first.
enum Operands {
    None,
    RmsNorm { rstd: Handle, gain: Handle },
    SwiGlu(GateArgs),
    SwiGluBackward(GateArgs),
}

/// A [`Gated`] as a kernel finds it.
struct GateArgs {
    gate: Matrix,
    up: Matrix,
    /// Elements from one row to the next.
    pitch: usize,
    /// Elements of a row before its part of `up`.
    up_start: usize,
}

impl GateArgs {
    /// The inputs, which must be `rows` x `width`.
    fn new(inputs: &Gated<'_>) -> Result<Self, Nvfp4Error> {
        match *inputs {
            Gated::SideBySide(both) => {
                check_input("gate_up", both, 2)?;
                Ok(Self {
                    gate: both.clone(),
                    up: both.clone(),
                    pitch: both.cols,
                    up_start: both.cols / 2,
                })
            }
            Gated::Apart { gate, up } => {
                check_input("gate", gate, 1)?;
                check_input("up", up, 1)?;
                check_same("up", up, "gate", (gate.rows, gate.cols, gate.dtype))?;
                Ok(Self {
                    gate: gate.clone(),
                    up: up.clone(),
                    pitch: gate.cols,
                    up_start: 0,
                })
            }
        }
    }

    fn width(&self) -> usize {
        self.pitch - self.up_start
    }

    fn launch(&self) -> GateInputsLaunch {
        let per_vector = per_vector(self.gate.dtype);
        GateInputsLaunch::new(
            Words::of(&self.gate).arg(),
            Words::of(&self.up).arg(),
            self.pitch / per_vector,
            self.up_start / per_vector,
        )
    }
}

/// An error unless rows are `parts` times a multiple of 16 elements and all vectors of 16 bytes aligned.
fn check_input(argument: &'static str, x: &Matrix, parts: usize) -> Result<(), Nvfp4Error> {
    x.check(argument)?;
    if !x.cols.is_multiple_of(parts * BLOCK) {
        return Err(Nvfp4Error::shape(
            argument,
            format!("{} x {}", x.rows, x.cols),
            format!("columns in a multiple of {}", parts * BLOCK),
        ));
    }
    check_aligned(argument, &x.handle)
}

fn check_aligned(argument: &'static str, handle: &Handle) -> Result<(), Nvfp4Error> {
    if is_aligned(handle) {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        argument,
        format!("at byte {} of its memory", handle.offset_start.unwrap_or(0)),
        "at a multiple of 16 bytes",
    ))
}

fn check_same(
    argument: &'static str,
    x: &Matrix,
    like: &str,
    (rows, cols, dtype): (usize, usize, FloatKind),
) -> Result<(), Nvfp4Error> {
    if (x.rows, x.cols, x.dtype) == (rows, cols, dtype) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        argument,
        format!("{} x {} of {:?}", x.rows, x.cols, x.dtype),
        format!("{rows} x {cols} of {dtype:?}, as `{like}`"),
    ))
}

impl Input {
    /// Checks a source.
    pub fn new(source: Source<'_>) -> Result<Self, Nvfp4Error> {
        let (first, cols, operands) = match source {
            Source::Plain(x) => {
                x.check("x")?;
                (x, x.cols, Operands::None)
            }
            Source::RmsNorm { x, rstd, gain } => {
                check_input("x", x, 1)?;
                check_memory("rstd", rstd, x.rows * 4)?;
                check_gain(gain, x.cols)?;
                let (rstd, gain) = (rstd.clone(), gain.clone());
                (x, x.cols, Operands::RmsNorm { rstd, gain })
            }
            Source::SwiGlu(inputs) => {
                let args = GateArgs::new(&inputs)?;
                let width = args.width();
                let first = match inputs {
                    Gated::SideBySide(both) => both,
                    Gated::Apart { gate, .. } => gate,
                };
                (first, width, Operands::SwiGlu(args))
            }
            Source::SwiGluBackward { grad, inputs } => {
                let args = GateArgs::new(&inputs)?;
                let width = args.width();
                check_input("grad", grad, 1)?;
                check_same(
                    "grad",
                    grad,
                    "gate",
                    (args.gate.rows, width, args.gate.dtype),
                )?;
                (grad, 2 * width, Operands::SwiGluBackward(args))
            }
        };
        Ok(Self {
            matrix: Matrix {
                cols,
                ..first.clone()
            },
            words: Words::of(first),
            operands,
        })
    }

    /// Whether the matrix lies in memory as it is.
    pub fn is_plain(&self) -> bool {
        matches!(self.operands, Operands::None)
    }

    /// The argument of a kernel.
    pub fn producer(&self) -> ProducerArgs {
        match &self.operands {
            Operands::None => ProducerArgs::Plain,
            Operands::RmsNorm { rstd, gain } => {
                // SAFETY: both were checked.
                let rstd = unsafe { buffer(rstd, self.matrix.rows) };
                ProducerArgs::RmsNorm(NormInputsLaunch::new(
                    rstd,
                    gain_arg(gain, self.matrix.cols),
                ))
            }
            Operands::SwiGlu(args) => ProducerArgs::SwiGlu(args.launch()),
            Operands::SwiGluBackward(args) => ProducerArgs::SwiGluBackward(args.launch()),
        }
    }
}

/// An error unless `gain` holds a factor for each column, in aligned vectors.
pub(crate) fn check_gain(gain: &Handle, cols: usize) -> Result<(), Nvfp4Error> {
    check_memory("gain", gain, cols * 4)?;
    check_aligned("gain", gain)
}

/// The gains of a kernel, in vectors.
pub(crate) fn gain_arg(gain: &Handle, cols: usize) -> BufferArg {
    // SAFETY: checked by `check_gain`.
    unsafe { buffer(gain, cols / 4) }
}

/// The matrix that `source` stands for, in memory.
///
/// # Errors
/// When an input of `source` is no multiple of 16 columns wide, does not fit the others, does not start at a
/// multiple of 16 bytes, or its memory is smaller than its shape.
pub fn produce(client: &Client, source: Source<'_>) -> Result<Matrix, Nvfp4Error> {
    let input = Input::new(source)?;
    if input.is_plain() {
        return Ok(input.matrix);
    }
    let x = &input.matrix;
    let out = Matrix::empty(client, x.rows, x.cols, x.dtype);
    if x.is_empty() {
        return Ok(out);
    }
    let row_vectors = x.cols / per_vector(x.dtype);
    let (count, dim) = grid(client, x.rows * row_vectors);
    // SAFETY: the kernel stays below the number of vectors, for which the inputs were checked.
    unsafe {
        produce_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            input.words.width,
            input.words.arg(),
            input.producer(),
            Words::of(&out).arg(),
            x.rows,
            row_vectors,
            conversion_of(client),
            x.dtype,
        );
    }
    Ok(out)
}

/// `1 / sqrt(mean(x²) + epsilon)` of each row of `x`, `f32`: what a normalisation keeps for its backward.
/// See [`reference::rms_norm_rstd`](crate::reference::rms_norm_rstd).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, it does not start at a multiple of 16 bytes, or its memory
/// is smaller than its shape.
pub fn rms_norm_rstd(client: &Client, x: &Matrix, epsilon: f32) -> Result<Handle, Nvfp4Error> {
    check_input("x", x, 1)?;
    let out = allocate(client, x.rows * 4);
    if x.is_empty() {
        return Ok(out);
    }
    let words = Words::of(x);
    let (count, dim) = row_cubes(client, x.rows, x.cols / BLOCK);
    // SAFETY: the kernel stays below the shape, for which the memory was checked.
    unsafe {
        rms_norm_rstd_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            buffer(&out, x.rows),
            x.rows,
            x.cols / BLOCK,
            epsilon,
            !is_cpu(client),
            conversion_of(client),
            x.dtype,
        );
    }
    Ok(out)
}

/// Cubes that take a row at a time, with no more units than a row has blocks.
pub(crate) fn row_cubes(client: &Client, rows: usize, blocks: usize) -> (CubeCount, CubeDim) {
    let (count, dim) = cubes(client, rows);
    let dim = if is_cpu(client) {
        dim
    } else {
        CubeDim::new_1d(blocks.next_multiple_of(32).min(dim.x as usize) as u32)
    };
    (count, dim)
}

/// Words of a vector: kernels with producers load 16 bytes at a time.
const VECTOR: usize = 4;

/// Elements of a vector.
const fn per_vector(kind: FloatKind) -> usize {
    VECTOR * 4 / kind.size()
}

/// What a kernel reads beside `x`, and what it makes of both.
#[derive(CubeType, CubeLaunch)]
pub enum Producer {
    /// `x` as it is.
    Plain,
    /// `x` normalised.
    RmsNorm(NormInputs),
    /// A gated activation; `x` is not read.
    SwiGlu(GateInputs),
    /// The gradients of a gated activation side by side; `x` is that of its output.
    SwiGluBackward(GateInputs),
}

/// Factors of a normalisation.
#[derive(CubeType, CubeLaunch)]
pub struct NormInputs {
    /// One for each row.
    pub rstd: Box<[f32]>,
    /// One for each column.
    pub gain: Box<[Vector<f32, Const<4>>]>,
}

/// Inputs of a gated activation.
#[derive(CubeType, CubeLaunch)]
pub struct GateInputs {
    /// The gate.
    pub gate: Box<[Vector<u32, Const<4>>]>,
    /// What is multiplied with it; the same memory where both lie side by side.
    pub up: Box<[Vector<u32, Const<4>>]>,
    /// Vectors from one row to the next.
    pub pitch: usize,
    /// Vectors of a row before its part of `up`.
    pub up_start: usize,
}

/// What vectors of one column of vectors have in common.
#[derive(CubeType)]
pub struct Column {
    /// Gains of its elements.
    gains: Array<f32>,
    /// Where its inputs stand in a row.
    vector: usize,
    /// Of two gradients side by side, whether it belongs to the second.
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
impl Producer {
    /// What the vectors at `vector` of all rows have in common. Produced rows have `row_vectors` vectors.
    pub fn column(&self, vector: usize, row_vectors: usize, #[comptime] kind: FloatKind) -> Column {
        #[comptime]
        match self {
            Producer::RmsNorm(norm) => Column {
                gains: load_gains(&norm.gain, vector, kind),
                vector,
                of_up: false.runtime(),
            },
            Producer::SwiGluBackward(_) => {
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
            Producer::Plain => Loaded {
                first: words_of::<F, N>(x[row * row_vectors + vector]),
                gate: no_words(),
                up: no_words(),
                rstd: 0.0f32.runtime(),
            },
            Producer::RmsNorm(norm) => Loaded {
                first: words_of::<F, N>(x[row * row_vectors + vector]),
                gate: no_words(),
                up: no_words(),
                rstd: norm.rstd[row],
            },
            Producer::SwiGlu(inputs) => {
                let start = row * inputs.pitch + vector;
                Loaded {
                    first: no_words(),
                    gate: words_of::<u32, Const<4>>(inputs.gate[start]),
                    up: words_of::<u32, Const<4>>(inputs.up[start + inputs.up_start]),
                    rstd: 0.0f32.runtime(),
                }
            }
            Producer::SwiGluBackward(inputs) => {
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
            Producer::Plain => {
                let mut words = Array::<u32>::new(VECTOR);
                #[unroll]
                for w in 0..VECTOR {
                    words[w] = loaded.first[w];
                }
                words
            }
            Producer::RmsNorm(_) => {
                normalized(&loaded.first, loaded.rstd, &column.gains, conversion, kind)
            }
            Producer::SwiGlu(_) => {
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
            Producer::SwiGluBackward(_) => {
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

    /// The column of the matrix that column `c` of a tile stands for; `paired` as in [`start_load()`].
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
            Producer::SwiGluBackward(_) => {
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

/// Where a kernel writes what it produced, too.
#[derive(CubeType, CubeLaunch)]
pub enum Sink {
    /// Nowhere.
    None,
    /// A matrix.
    Matrix(Box<[Vector<u32, Const<4>>]>),
}

#[cube]
impl Sink {
    fn write(&mut self, index: usize, words: &Array<u32>) {
        #[comptime]
        match self {
            Sink::None => {}
            Sink::Matrix(out) => out[index] = vector_of(words),
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

/// [`tile::start_load()`] of what `producer` makes; it is also written to `sink`.
///
/// Where gradients of a gated activation are `paired`, a tile has those by the gate in its first half and
/// those by the other input, of the same columns, in its second: both come from the same numbers. The
/// caller then asks for [`Producer::column_of()`].
#[cube]
pub fn start_load<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    producer: &Producer,
    sink: &mut Sink,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] paired: bool,
    #[comptime] elements: bool,
    #[comptime] units: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    #[comptime]
    match producer {
        Producer::Plain => {
            tile::start_load::<F, N>(x, shared, tile, shape, elements, units, conversion, kind);
        }
        Producer::SwiGluBackward(_) => {
            if comptime!(paired) {
                produce_pairs::<F, N>(
                    x, producer, sink, shared, tile, shape, units, conversion, kind,
                );
            } else {
                produce_tile::<F, N>(
                    x, producer, sink, shared, tile, shape, units, conversion, kind,
                );
            }
        }
        _ => produce_tile::<F, N>(
            x, producer, sink, shared, tile, shape, units, conversion, kind,
        ),
    }
}

#[cube]
fn produce_tile<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    producer: &Producer,
    sink: &mut Sink,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] units: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    let per_row = comptime!(tile::WORDS / VECTOR);
    let row_vectors = shape.cols / comptime!(per_vector(kind));
    let vector0 = tile.col0 / comptime!(per_vector(kind));
    // With units for whole rows a unit stays in its column of vectors.
    let whole = comptime!(
        units.is_multiple_of(per_row) && (tile::ROWS * per_row).is_multiple_of(units * IN_FLIGHT)
    );
    let mut first = UNIT_POS as usize;
    if comptime!(whole) {
        let column = producer.column(
            min(vector0 + first % per_row, row_vectors - 1usize),
            row_vectors,
            kind,
        );
        while first < comptime!(tile::ROWS * per_row) {
            produce_vectors::<F, N>(
                x,
                producer,
                sink,
                shared,
                tile,
                &column,
                first,
                vector0,
                row_vectors,
                IN_FLIGHT,
                units,
                conversion,
                kind,
            );
            first += comptime!(IN_FLIGHT * units);
        }
    } else {
        while first < comptime!(tile::ROWS * per_row) {
            let column = producer.column(
                min(vector0 + first % per_row, row_vectors - 1usize),
                row_vectors,
                kind,
            );
            produce_vectors::<F, N>(
                x,
                producer,
                sink,
                shared,
                tile,
                &column,
                first,
                vector0,
                row_vectors,
                1usize,
                units,
                conversion,
                kind,
            );
            first += units;
        }
    }
}

/// Produces `count` vectors of a tile: number `first`, counted along its rows, and every `units`-th one.
#[cube]
fn produce_vectors<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    producer: &Producer,
    sink: &mut Sink,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    column: &Column,
    first: usize,
    vector0: usize,
    row_vectors: usize,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    let per_row = comptime!(tile::WORDS / VECTOR);
    let mut pending = Sequence::<Loaded>::new();
    #[unroll]
    for j in 0..count {
        // Behind the end the last row is read again, and not used.
        let row = min(
            tile.row0 + (first + j * units) / per_row,
            tile.row_end - 1usize,
        );
        pending.push(producer.load::<F, N>(x, row, column, row_vectors));
    }
    #[unroll]
    for j in 0..count {
        let item = first + j * units;
        let r = item / per_row;
        let row = tile.row0 + r;
        let vector = vector0 + item % per_row;
        let inside = row < tile.row_end && vector < row_vectors;
        let words = producer.words(pending.index(j), column, conversion, kind);
        let start = tile::word_at(r, (item % per_row) * VECTOR);
        #[unroll]
        for i in 0..VECTOR {
            shared[start + i] = select(inside, words[i], 0u32);
        }
        if inside {
            sink.write(row * row_vectors + vector, &words);
        }
    }
}

#[cube]
fn produce_pairs<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    producer: &Producer,
    sink: &mut Sink,
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] units: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
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
            pending.push(producer.load::<F, N>(x, row, &column, row_vectors));
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
                sink.write(index, &both.by_gate);
                sink.write(index + half, &both.by_up);
            }
        }
        first += comptime!(in_flight * units);
    }
}

/// The words of block `block` of row `row`, of which there are `blocks` in a row.
#[cube]
pub fn load_block<N: Size>(
    x: &[Vector<u32, N>],
    producer: &Producer,
    row: usize,
    block: usize,
    blocks: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    #[comptime]
    match producer {
        Producer::Plain => {
            let width = N::value();
            let per_block = comptime!(block_words(kind) / width);
            load_block_words::<N>(x, (row * blocks + block) * per_block, kind)
        }
        _ => {
            let vectors = comptime!(block_words(kind) / VECTOR);
            let mut words = Array::<u32>::new(comptime!(block_words(kind)));
            #[unroll]
            for v in 0..vectors {
                let column = producer.column(block * vectors + v, blocks * vectors, kind);
                let loaded = producer.load::<u32, N>(x, row, &column, blocks * vectors);
                let part = producer.words(&loaded, &column, conversion, kind);
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

/// One unit produces every `units`-th vector, or pair of vectors.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn produce_kernel<N: Size>(
    x: &[Vector<u32, N>],
    producer: Producer,
    out: &mut [Vector<u32, Const<4>>],
    rows: usize,
    row_vectors: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) {
    let mut item = ABSOLUTE_POS;
    #[comptime]
    match &producer {
        Producer::SwiGluBackward(_) => {
            let half = row_vectors / 2usize;
            while item < rows * half {
                let row = item / half;
                let column = producer.column(item - row * half, row_vectors, kind);
                let loaded = producer.load::<u32, N>(x, row, &column, row_vectors);
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
                let column = producer.column(item - row * row_vectors, row_vectors, kind);
                let loaded = producer.load::<u32, N>(x, row, &column, row_vectors);
                out[item] = vector_of(&producer.words(&loaded, &column, conversion, kind));
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
