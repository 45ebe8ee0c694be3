//! Matrix that a fused prologue computes, and the launch of its kernel.

use cubecl::{prelude::*, server::Handle};

use super::{
    inputs::{
        GateInputsLaunch, GatherInputsLaunch, LaunchedVariant, PrologueInputsArgs, per_vector,
    },
    kernel::{ProloguePlan, prologue_kernel},
};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{conversion_of, overlaps_kernels},
    launch::{Words, buffer, grid},
    memory::{address_type, check_memory, is_aligned},
    moe::GroupOffsets,
    tensor::{FloatKind, Groups, Matrix},
};

/// Matrix that is computed while its inputs are read.
///
/// It has rows of a multiple of 16 elements, and inputs that start at multiples of 16 bytes. Values
/// are rounded to the type of the inputs, and amax values are those of the rounded values.
#[derive(Debug, Clone, Copy)]
pub enum Prologue<'a> {
    /// SwiGLU, `silu(gate) · up`, of one matrix of `rows` x `2 width`, with the gate in the first
    /// half of each row: the output of one projection. See
    /// [`reference::swiglu`](crate::reference::swiglu).
    SwiGlu(&'a Matrix),
    /// Gradients of SwiGLU with respect to both inputs, `rows` x `2 width`, that of the gate in the
    /// first half of each row; see
    /// [`reference::swiglu_backward`](crate::reference::swiglu_backward).
    SwiGluBackward {
        /// Gradient of the output, `rows` x `width`.
        grad: &'a Matrix,
        /// Input of the forward pass: gate and up.
        gate_up: &'a Matrix,
    },
    /// Rows of a matrix by index: row `i` is row `numbers[i]` of `x`, or the last one if the index
    /// is out of range.
    Gather {
        /// Matrix with at least one row.
        x: &'a Matrix,
        /// Indices, `u32[rows]`.
        numbers: &'a Handle,
        /// Number of gathered rows.
        rows: usize,
    },
}

/// Launch data of a checked [`Prologue`] or matrix.
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
    SwiGlu(Matrix),
    SwiGluBackward(Matrix),
    /// Indices, and the number of rows that they select from.
    Gather(Handle, usize),
}

/// Returns the kernel arguments of the concatenated gate and up.
fn gate_args(gate_up: &Matrix, variant: LaunchedVariant) -> GateInputsLaunch {
    let vectors = gate_up.cols / per_vector(gate_up.dtype);
    let words = || Words::of(gate_up).arg();
    GateInputsLaunch::new(words(), words(), vectors, vectors / 2, variant)
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
    /// Checks a matrix.
    pub fn plain(x: &Matrix) -> Result<Self, Nvfp4Error> {
        x.check("x")?;
        Ok(Self {
            matrix: x.clone(),
            words: Words::of(x),
            operands: Operands::None,
        })
    }

    /// Checks a prologue.
    pub fn new(prologue: Prologue<'_>) -> Result<Self, Nvfp4Error> {
        let (first, [rows, cols], operands) = match prologue {
            Prologue::SwiGlu(gate_up) => {
                check_input("gate_up", gate_up, 2)?;
                let shape = [gate_up.rows, gate_up.cols / 2];
                (gate_up, shape, Operands::SwiGlu(gate_up.clone()))
            }
            Prologue::Gather { x, numbers, rows } => {
                check_input("x", x, 1)?;
                check_memory("numbers", numbers, rows * 4)?;
                if x.rows == 0 {
                    let found = format!("0 x {}", x.cols);
                    return Err(Nvfp4Error::shape("x", found, "at least one row"));
                }
                let operands = Operands::Gather(numbers.clone(), x.rows);
                (x, [rows, x.cols], operands)
            }
            Prologue::SwiGluBackward { grad, gate_up } => {
                check_input("gate_up", gate_up, 2)?;
                check_input("grad", grad, 1)?;
                let (rows, width) = (gate_up.rows, gate_up.cols / 2);
                check_same("grad", grad, "gate", (rows, width, gate_up.dtype))?;
                let shape = [rows, gate_up.cols];
                (grad, shape, Operands::SwiGluBackward(gate_up.clone()))
            }
        };
        Ok(Self {
            matrix: Matrix {
                rows,
                cols,
                ..first.clone()
            },
            words: Words::of(first),
            operands,
        })
    }

    /// Returns the number of elements of the computed matrix, or of the first input, if that has
    /// more.
    pub fn longest(&self) -> usize {
        match &self.operands {
            Operands::Gather(_, rows) => self.matrix.rows.max(*rows) * self.matrix.cols,
            Operands::None | Operands::SwiGlu(_) | Operands::SwiGluBackward(_) => self.matrix.len(),
        }
    }

    /// Returns true if the matrix is in memory.
    pub fn is_plain(&self) -> bool {
        matches!(self.operands, Operands::None)
    }

    /// Returns the kernel inputs besides the first one.
    pub fn prologue_inputs(&self) -> PrologueInputsArgs {
        match &self.operands {
            Operands::None => PrologueInputsArgs::Plain,
            Operands::SwiGlu(gate_up) => {
                PrologueInputsArgs::SwiGlu(gate_args(gate_up, LaunchedVariant::SwiGlu))
            }
            Operands::SwiGluBackward(gate_up) => PrologueInputsArgs::SwiGluBackward(gate_args(
                gate_up,
                LaunchedVariant::SwiGluBackward,
            )),
            Operands::Gather(numbers, rows) => {
                // SAFETY: as many numbers as rows of the computed matrix were checked.
                let numbers = unsafe { buffer(numbers, self.matrix.rows) };
                let variant = LaunchedVariant::Gather;
                PrologueInputsArgs::Gather(GatherInputsLaunch::new(numbers, *rows, variant))
            }
        }
    }
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
            address_type(input.longest()),
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
