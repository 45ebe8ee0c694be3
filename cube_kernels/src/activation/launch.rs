//! Launches of activations.

use cubecl::prelude::*;

use super::kernel::{GeluPlan, SwiGluPlan, gelu_kernel, swiglu_elements_kernel};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::conversion_of,
    launch::{buffer, grid},
    memory::{address_type, is_aligned},
    quantize::prologue::{Prologue, run_prologue_of_groups},
    reference::{Activation, Gelu},
    tensor::{Groups, Matrix},
};

/// Applies `activation` to the rows of `x`, in the type of `x`. The output is `[rows, cols]`, or
/// `[rows, cols / 2]` for SwiGLU.
///
/// # Errors
/// Returns an error if `x` has an odd number of columns for SwiGLU, or its memory is smaller than
/// its shape.
pub fn activation(
    client: &Client,
    activation: Activation,
    x: &Matrix,
) -> Result<Matrix, Nvfp4Error> {
    activation_of_groups(client, activation, (x, None), &Groups::One)
}

/// Computes [`activation()`] of `x`, or [`activation_backward`] if the gradient of the output is
/// given, for rows in `groups`. With offsets, rows after the last group have undefined elements;
/// they take no time if the rows of a SwiGLU are whole vectors.
///
/// # Errors
/// Returns the errors of these functions, and an error if the groups do not fit.
pub fn activation_of_groups(
    client: &Client,
    activation: Activation,
    (x, grad): (&Matrix, Option<&Matrix>),
    groups: &Groups,
) -> Result<Matrix, Nvfp4Error> {
    check_activation(activation, x, grad)?;
    groups.check(x.rows)?;
    if let Some(prologue) = prologue_of(activation, x, grad) {
        return run_prologue_of_groups(client, prologue, groups);
    }
    match activation {
        Activation::SwiGlu => {
            let cols = match grad {
                None => x.cols / 2,
                Some(_) => x.cols,
            };
            let out = Matrix::empty(client, x.rows, cols, x.dtype);
            swiglu_elements(client, x, grad, &out);
            Ok(out)
        }
        Activation::Gelu(form) => Ok(gelu(client, form, x, grad)),
    }
}

/// Returns the fused prologue that computes `activation` of `x`, or its gradient, if there is one:
/// for SwiGLU of rows of whole vectors.
pub(crate) fn prologue_of<'a>(
    activation: Activation,
    x: &'a Matrix,
    grad: Option<&'a Matrix>,
) -> Option<Prologue<'a>> {
    match (activation, grad) {
        (Activation::SwiGlu, None) if is_whole(&[x]) => Some(Prologue::SwiGlu(x)),
        (Activation::SwiGlu, Some(grad)) if is_whole(&[grad, x]) => {
            Some(Prologue::SwiGluBackward { grad, gate_up: x })
        }
        _ => None,
    }
}

/// Computes the gradient of [`activation()`] with respect to `x`, in the shape and type of `x`,
/// from `grad`, the gradient of its output.
///
/// # Errors
/// Returns an error if `grad` differs from the output in shape or type, `x` has an odd number of
/// columns for SwiGLU, or a buffer is smaller than its shape.
pub fn activation_backward(
    client: &Client,
    activation: Activation,
    grad: &Matrix,
    x: &Matrix,
) -> Result<Matrix, Nvfp4Error> {
    activation_of_groups(client, activation, (x, Some(grad)), &Groups::One)
}

/// Returns an error unless `activation` can be computed of `x`, or its gradient from `grad`.
pub(crate) fn check_activation(
    activation: Activation,
    x: &Matrix,
    grad: Option<&Matrix>,
) -> Result<(), Nvfp4Error> {
    check_input(activation, x)?;
    let Some(grad) = grad else {
        return Ok(());
    };
    grad.check("grad")?;
    let cols = x.cols / activation.inputs();
    if (grad.rows, grad.cols, grad.dtype) != (x.rows, cols, x.dtype) {
        return Err(Nvfp4Error::shape(
            "grad",
            format!("{} x {} of {:?}", grad.rows, grad.cols, grad.dtype),
            format!("{} x {cols} of {:?}, as the output", x.rows, x.dtype),
        ));
    }
    Ok(())
}

fn check_input(activation: Activation, x: &Matrix) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    if x.cols.is_multiple_of(activation.inputs()) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "x",
        format!("{} x {}", x.rows, x.cols),
        "an even number of columns: gate and up, concatenated",
    ))
}

/// True if the prologue's kernel supports the matrices of a SwiGLU.
fn is_whole(matrices: &[&Matrix]) -> bool {
    let is_whole = |x: &&Matrix| x.cols.is_multiple_of(BLOCK) && is_aligned(&x.handle);
    let halves = |x: &&Matrix| (x.cols / 2).is_multiple_of(BLOCK);
    matrices.iter().all(is_whole) && matrices.last().is_some_and(halves)
}

/// Computes GELU of each element of `x`, or its gradient if `grad` is given.
fn gelu(client: &Client, gelu: Gelu, x: &Matrix, grad: Option<&Matrix>) -> Matrix {
    let out = Matrix::empty(client, x.rows, x.cols, x.dtype);
    if x.is_empty() {
        return out;
    }
    let per_vector = 16 / x.dtype.size();
    let handles = [Some(x), grad].into_iter().flatten();
    let aligned = handles.into_iter().all(|matrix| is_aligned(&matrix.handle));
    let whole = aligned && x.len().is_multiple_of(per_vector);
    let (scalar, width, len) = match whole {
        true => (u32::elem_type_native(), 4, x.len() / per_vector),
        false => (x.dtype.storage_type(), 1, x.len()),
    };
    let (count, dim) = grid(client, len);
    // SAFETY: the kernel stays below the vectors, which the matrices hold.
    unsafe {
        gelu_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            width,
            buffer(&x.handle, len),
            buffer(&grad.unwrap_or(x).handle, len),
            buffer(&out.handle, len),
            len,
            GeluPlan {
                gelu,
                backward: grad.is_some(),
                whole,
                kind: x.dtype,
                conversion: conversion_of(client),
            },
            scalar,
        );
    }
    out
}

/// Computes SwiGLU of rows of any length into `out`, or its gradients if `grad` is given.
fn swiglu_elements(client: &Client, x: &Matrix, grad: Option<&Matrix>, out: &Matrix) {
    if x.is_empty() {
        return;
    }
    let items = x.len() / 2;
    let (count, dim) = grid(client, items);
    // SAFETY: the kernel stays below the elements of the matrices, which were checked.
    unsafe {
        swiglu_elements_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            buffer(&x.handle, x.len()),
            buffer(&grad.unwrap_or(x).handle, items),
            buffer(&out.handle, out.len()),
            x.rows,
            x.cols / 2,
            SwiGluPlan {
                backward: grad.is_some(),
                kind: x.dtype,
                conversion: conversion_of(client),
            },
            x.dtype.storage_type(),
        );
    }
}
