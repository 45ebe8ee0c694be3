//! Source matrix of a quantization kernel.

use cubecl::{prelude::*, server::Handle};

use super::{
    inputs::{GateInputsLaunch, LaunchedVariant, NormInputsLaunch, PrologueInputsArgs, per_vector},
    kernel::{ProloguePlan, prologue_kernel, rms_norm_rstd_kernel},
};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{conversion_of, is_cpu, overlaps_kernels},
    launch::{Words, buffer, cubes, grid},
    memory::{address_type, allocate, check_memory, is_aligned},
    moe::GroupOffsets,
    tensor::{FloatKind, Groups, Matrix},
};

/// The two inputs of a gated activation, both `rows` x `width`.
#[derive(Debug, Clone, Copy)]
pub enum GateUp<'a> {
    /// One matrix of `rows` x `2 width`, with the gate in the first half of each row: the output of
    /// one projection.
    Concatenated(&'a Matrix),
    /// Two matrices.
    Separate {
        /// Input of SiLU.
        gate: &'a Matrix,
        /// Factor multiplied with it.
        up: &'a Matrix,
    },
}

/// Source matrix of a quantization kernel: a matrix in memory, or one that is computed while its
/// inputs are read.
///
/// Computed matrices have rows of a multiple of 16 elements and inputs that start at multiples of
/// 16 bytes. Values are first rounded to the type of the inputs, so that a fused kernel is
/// byte-identical to [`run_prologue()`] followed by the same kernel.
///
/// Fusion pays off if amax and quantized tensors are both needed. These calls transfer the fewest
/// bytes:
/// - RMSNorm: [`amaxes`](crate::quantize::amaxes) and
///   [`quantize_both`](crate::quantize::quantize_both) of the prologue, which compute it twice and
///   never write it.
/// - SwiGLU and its gradients:
///   [`run_prologue_with_amaxes`](crate::quantize::run_prologue_with_amaxes), then the quantized
///   tensors of the written matrix. Reading two inputs again takes as many bytes as writing and
///   reading one output, and repeats the exponential.
/// - Per row, in one read: [`quantize_per_token`](fn@crate::quantize::quantize_per_token) of the
///   prologue.
#[derive(Debug, Clone, Copy)]
pub enum Prologue<'a> {
    /// The matrix itself.
    Plain(&'a Matrix),
    /// RMSNorm, `x · rstd · gain`; see [`reference::rms_norm`](crate::reference::rms_norm).
    RmsNorm {
        /// Input.
        x: &'a Matrix,
        /// `1 / sqrt(mean(x²) + ε)` per row, `f32`: see [`rms_norm_rstd`].
        rstd: &'a Handle,
        /// Gain per column, `f32`.
        gain: &'a Handle,
    },
    /// SwiGLU, `silu(gate) · up`; see [`reference::swiglu`](crate::reference::swiglu).
    SwiGlu(GateUp<'a>),
    /// Gradients of SwiGLU with respect to both inputs, `rows` x `2 width`, that of the gate in the
    /// first half of each row; see
    /// [`reference::swiglu_backward`](crate::reference::swiglu_backward).
    SwiGluBackward {
        /// Gradient of the output, `rows` x `width`.
        grad: &'a Matrix,
        /// Inputs of the forward pass.
        inputs: GateUp<'a>,
    },
}

impl<'a> From<&'a Matrix> for Prologue<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Self::Plain(matrix)
    }
}

/// Launch data of a checked [`Prologue`].
pub(crate) struct Input {
    /// Shape and type of the computed matrix; the memory is that of the first input.
    pub matrix: Matrix,
    /// Load width of the first input.
    pub words: Words,
    operands: Operands,
}

/// Inputs besides the first.
enum Operands {
    None,
    RmsNorm { rstd: Handle, gain: Handle },
    SwiGlu(GateArgs),
    SwiGluBackward(GateArgs),
}

/// Kernel arguments of a [`GateUp`].
struct GateArgs {
    gate: Matrix,
    up: Matrix,
    /// Row pitch in elements.
    pitch: usize,
    /// Offset of `up` in a row, in elements.
    up_start: usize,
}

impl GateArgs {
    /// Checks the inputs, which must be `rows` x `width`.
    fn new(inputs: &GateUp<'_>) -> Result<Self, Nvfp4Error> {
        match *inputs {
            GateUp::Concatenated(both) => {
                check_input("gate_up", both, 2)?;
                Ok(Self {
                    gate: both.clone(),
                    up: both.clone(),
                    pitch: both.cols,
                    up_start: both.cols / 2,
                })
            }
            GateUp::Separate { gate, up } => {
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

    fn launch(&self, variant: LaunchedVariant) -> GateInputsLaunch {
        let per_vector = per_vector(self.gate.dtype);
        GateInputsLaunch::new(
            Words::of(&self.gate).arg(),
            Words::of(&self.up).arg(),
            self.pitch / per_vector,
            self.up_start / per_vector,
            variant,
        )
    }
}

/// Returns an error unless row lengths are a multiple of `parts` times 16 elements, and vectors of
/// 16 bytes are aligned.
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
    /// Checks a prologue.
    pub fn new(prologue: Prologue<'_>) -> Result<Self, Nvfp4Error> {
        let (first, cols, operands) = match prologue {
            Prologue::Plain(x) => {
                x.check("x")?;
                (x, x.cols, Operands::None)
            }
            Prologue::RmsNorm { x, rstd, gain } => {
                check_input("x", x, 1)?;
                check_memory("rstd", rstd, x.rows * 4)?;
                check_gain(gain, x.cols)?;
                let (rstd, gain) = (rstd.clone(), gain.clone());
                (x, x.cols, Operands::RmsNorm { rstd, gain })
            }
            Prologue::SwiGlu(inputs) => {
                let args = GateArgs::new(&inputs)?;
                let width = args.width();
                let first = match inputs {
                    GateUp::Concatenated(both) => both,
                    GateUp::Separate { gate, .. } => gate,
                };
                (first, width, Operands::SwiGlu(args))
            }
            Prologue::SwiGluBackward { grad, inputs } => {
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

    /// Returns true if the matrix is in memory.
    pub fn is_plain(&self) -> bool {
        matches!(self.operands, Operands::None)
    }

    /// Returns the kernel inputs besides the first one.
    pub fn prologue_inputs(&self) -> PrologueInputsArgs {
        match &self.operands {
            Operands::None => PrologueInputsArgs::Plain,
            Operands::RmsNorm { rstd, gain } => {
                // SAFETY: both were checked.
                let rstd = unsafe { buffer(rstd, self.matrix.rows) };
                PrologueInputsArgs::RmsNorm(NormInputsLaunch::new(
                    rstd,
                    gain_arg(gain, self.matrix.cols),
                    LaunchedVariant::RmsNorm,
                ))
            }
            Operands::SwiGlu(args) => {
                PrologueInputsArgs::SwiGlu(args.launch(LaunchedVariant::SwiGlu))
            }
            Operands::SwiGluBackward(args) => {
                PrologueInputsArgs::SwiGluBackward(args.launch(LaunchedVariant::SwiGluBackward))
            }
        }
    }
}

/// Returns an error unless `gain` holds a factor per column, in aligned vectors.
pub(crate) fn check_gain(gain: &Handle, cols: usize) -> Result<(), Nvfp4Error> {
    check_memory("gain", gain, cols * 4)?;
    check_aligned("gain", gain)
}

/// Returns the gains as a kernel argument, in vectors.
pub(crate) fn gain_arg(gain: &Handle, cols: usize) -> BufferArg {
    // SAFETY: checked by `check_gain`.
    unsafe { buffer(gain, cols / 4) }
}

/// Computes the matrix of `prologue` and writes it to memory.
///
/// # Errors
/// Returns an error if an input of `prologue` has a width that is no multiple of 16, does not match
/// the others, does not start at a multiple of 16 bytes, or has less memory than its shape
/// requires.
pub fn run_prologue(client: &Client, prologue: Prologue<'_>) -> Result<Matrix, Nvfp4Error> {
    run_prologue_of_groups(client, prologue, &Groups::One)
}

/// [`run_prologue`] for rows in `groups`. With group offsets, rows after the last group are left
/// unchanged, and take no time.
///
/// # Errors
/// See [`run_prologue`]; also returns an error if the groups do not fit.
pub fn run_prologue_of_groups(
    client: &Client,
    prologue: Prologue<'_>,
    groups: &Groups,
) -> Result<Matrix, Nvfp4Error> {
    let input = Input::new(prologue)?;
    groups.check(input.matrix.rows)?;
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
    let end = match groups {
        Groups::Offsets { offsets, count } => {
            let offsets = GroupOffsets::new(offsets.clone(), *count)?;
            Some(offsets.end())
        }
        Groups::One | Groups::Batch(_) => None,
    };
    let bounded = end.is_some();
    // SAFETY: the kernel stays below the number of vectors, for which the inputs were checked; a
    // word that is not read is any memory.
    unsafe {
        prologue_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            input.words.width,
            input.words.arg(),
            input.prologue_inputs(),
            Words::of(&out).arg(),
            end.unwrap_or_else(|| buffer(&out.handle, 1)),
            x.rows,
            row_vectors,
            ProloguePlan {
                bounded,
                overlaps: overlaps_kernels(client),
                conversion: conversion_of(client),
                kind: x.dtype,
            },
        );
    }
    Ok(out)
}

/// Returns `1 / sqrt(mean(x²) + epsilon)` of each row of `x`, `f32`, which a normalization keeps
/// for its backward pass. See [`reference::rms_norm_rstd`](crate::reference::rms_norm_rstd).
///
/// # Errors
/// Returns an error if the columns of `x` are no multiple of 16, if it does not start at a multiple
/// of 16 bytes, or if its memory is smaller than its shape.
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

/// Returns cubes that process a row at a time, with at most as many units as a row has blocks.
pub(crate) fn row_cubes(client: &Client, rows: usize, blocks: usize) -> (CubeCount, CubeDim) {
    let (count, dim) = cubes(client, rows);
    let dim = if is_cpu(client) {
        dim
    } else {
        CubeDim::new_1d(blocks.next_multiple_of(32).min(dim.x as usize) as u32)
    };
    (count, dim)
}
