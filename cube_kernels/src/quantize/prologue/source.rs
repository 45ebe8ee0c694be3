//! The matrix that a kernel quantizes, as it is given.

use cubecl::{prelude::*, server::Handle};

use super::{
    inputs::{GateInputsLaunch, LaunchedVariant, PrologueInputsArgs, per_vector},
    kernel::{ProloguePlan, prologue_kernel},
};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{conversion_of, overlaps_kernels},
    launch::{Words, buffer, grid},
    memory::{address_type, is_aligned},
    moe::GroupOffsets,
    tensor::{FloatKind, Groups, Matrix},
};

/// A matrix that is computed while its inputs are read.
///
/// It has rows of a multiple of 16 elements, and inputs that start at multiples of 16 bytes. Values
/// are rounded to the type of the inputs, and amax values that are found beside them are those of
/// rounded ones.
#[derive(Debug, Clone, Copy)]
pub enum Prologue<'a> {
    /// `silu(gate) · up` of gate and up, `rows` x `2 width`, the gate in the first half of each
    /// row: the output of one projection. See [`reference::swiglu`](crate::reference::swiglu).
    SwiGlu(&'a Matrix),
    /// The gradients of SwiGLU by both inputs, `rows` x `2 width`, that by the gate in the first
    /// half of each row; see [`reference::swiglu_backward`](crate::reference::swiglu_backward).
    SwiGluBackward {
        /// The gradient by the output, `rows` x `width`.
        grad: &'a Matrix,
        /// Gate and up.
        gate_up: &'a Matrix,
    },
}

/// A [`Prologue`], or a matrix, that was checked: what launches need of it.
pub(crate) struct Input {
    /// Shape and type of what is computed; the memory is that of the first input.
    pub matrix: Matrix,
    /// How the first input is loaded.
    pub words: Words,
    operands: Operands,
}

/// The inputs beside the first.
enum Operands {
    None,
    SwiGlu(Matrix),
    SwiGluBackward(Matrix),
}

/// Gate and up, concatenated, as a kernel finds them.
fn gate_args(gate_up: &Matrix, variant: LaunchedVariant) -> GateInputsLaunch {
    let vectors = gate_up.cols / per_vector(gate_up.dtype);
    let words = || Words::of(gate_up).arg();
    GateInputsLaunch::new(words(), words(), vectors, vectors / 2, variant)
}

/// An error unless rows are `parts` times a multiple of 16 elements and all vectors of 16 bytes
/// aligned.
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
        let (first, cols, operands) = match prologue {
            Prologue::SwiGlu(gate_up) => {
                check_input("gate_up", gate_up, 2)?;
                (gate_up, gate_up.cols / 2, Operands::SwiGlu(gate_up.clone()))
            }
            Prologue::SwiGluBackward { grad, gate_up } => {
                check_input("gate_up", gate_up, 2)?;
                check_input("grad", grad, 1)?;
                let (rows, width) = (gate_up.rows, gate_up.cols / 2);
                check_same("grad", grad, "gate", (rows, width, gate_up.dtype))?;
                (
                    grad,
                    gate_up.cols,
                    Operands::SwiGluBackward(gate_up.clone()),
                )
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

    /// What a kernel reads beside the first input.
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
        }
    }
}

/// The matrix that `prologue` computes, in memory.
///
/// # Errors
/// When an input of `prologue` is no multiple of 16 columns wide, does not fit the others, does not
/// start at a multiple of 16 bytes, or its memory is smaller than its shape.
pub fn run_prologue(client: &Client, prologue: Prologue<'_>) -> Result<Matrix, Nvfp4Error> {
    run_prologue_of_groups(client, prologue, &Groups::One)
}

/// [`run_prologue`] of rows in `groups`: of groups with offsets, rows behind the last one are left
/// as they are, and take no time.
///
/// # Errors
/// As [`run_prologue`], and when the groups do not fit.
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
