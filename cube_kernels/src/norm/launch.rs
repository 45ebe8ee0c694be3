//! Launches of the kernels of norms.

use cubecl::{prelude::*, server::Handle};

use super::{
    backward::{NormGradInputsLaunch, NormGradOutputsLaunch, norm_backward_kernel},
    forward::{NormInputsLaunch, NormOutputsLaunch, norm_kernel},
    parts::norm_parts_kernel,
    plan::{NormPlan, Pass, cubes},
};
use crate::{
    Nvfp4Error,
    capabilities::is_cpu,
    launch::{buffer, grid, tile_grid},
    memory::{address_type, allocate, check_memory, is_aligned, upload},
    quantize::{
        AmaxRequest, Amaxes,
        amax::{AmaxOutLaunch, amaxes},
    },
    reference::{Norm, PART_LANES, norm_parts},
    tensor::{Groups, Matrix},
};

/// Request to normalize rows.
#[derive(Debug, Clone, Copy)]
pub struct NormRequest<'a> {
    /// Kind of norm.
    pub norm: Norm,
    /// Input `[rows, cols]`; added to `residual` first if that is given.
    pub x: &'a Matrix,
    /// Residual, of the shape and type of `x`.
    pub residual: Option<&'a Matrix>,
    /// Gain, `f32[cols]`.
    pub gain: &'a Handle,
    /// Bias, `f32[cols]`; only for [`Norm::Layer`].
    pub bias: Option<&'a Handle>,
    /// Term added to the mean square, or to the variance.
    pub epsilon: f32,
    /// Amax values of the normalized rows to compute, with the results of a separate pass. They are
    /// computed in the pass that writes the rows if these have a multiple of 16 columns and the
    /// transform mixes 16 rows; otherwise in a separate pass.
    pub amax: AmaxRequest,
}

/// Result of a norm.
#[derive(Debug, Clone)]
pub struct NormResult {
    /// Sum of `x` and the residual, rounded to their type; `None` without a residual.
    pub sum: Option<Matrix>,
    /// Normalized rows, of the shape and type of `x`.
    pub normed: Matrix,
    /// Statistics for the backward: the rstd of each row, `f32[rows]`, followed by the row means
    /// for [`Norm::Layer`].
    pub stats: Handle,
    /// Requested amax values.
    pub amax: Amaxes,
}

/// Request for the backward of a norm.
#[derive(Debug, Clone, Copy)]
pub struct NormBackwardRequest<'a> {
    /// Kind of norm.
    pub norm: Norm,
    /// Gradient of the normalized rows, of the shape and type of `x`.
    pub grad: &'a Matrix,
    /// Gradient that the sum receives from its other uses, of the shape and type of `x`.
    pub sum_grad: Option<&'a Matrix>,
    /// Input of the normalization: the sum, if there was a residual.
    pub x: &'a Matrix,
    /// Statistics from the forward.
    pub stats: &'a Handle,
    /// Gain, `f32[cols]`.
    pub gain: &'a Handle,
    /// True to compute the gradient of the bias.
    pub bias: bool,
    /// Amax values of the gradient of the normalization's input to compute, with the results of a
    /// separate pass. They are computed in the pass that writes the gradient if it has a multiple
    /// of 16 columns. Those of columns further require that the transform mixes 16 rows and that
    /// [parts begin](crate::reference::norm_parts_are_strips) at multiples of 16 rows. Otherwise
    /// they are computed in a separate pass.
    pub amax: AmaxRequest,
}

/// Gradients of a norm.
#[derive(Debug, Clone)]
pub struct NormGradients {
    /// Gradient of the normalization's input, and so of `x` and of the residual.
    pub x: Matrix,
    /// Gradient of the gain, `f32[cols]`.
    pub gain: Handle,
    /// Gradient of the bias, `f32[cols]`.
    pub bias: Option<Handle>,
    /// Requested amax values.
    pub amax: Amaxes,
}

/// Returns the number of floats of the statistics of `rows` rows.
fn stats_len(norm: Norm, rows: usize) -> usize {
    match norm {
        Norm::Rms => rows,
        Norm::Layer => 2 * rows,
    }
}

/// Returns an error unless `matrix` has the shape and type of `x`, or is `x`.
fn check_like(argument: &'static str, matrix: &Matrix, x: &Matrix) -> Result<(), Nvfp4Error> {
    matrix.check(argument)?;
    if (matrix.rows, matrix.cols, matrix.dtype) == (x.rows, x.cols, x.dtype) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        argument,
        format!("{} x {} of {:?}", matrix.rows, matrix.cols, matrix.dtype),
        format!("{} x {} of {:?}, as `x`", x.rows, x.cols, x.dtype),
    ))
}

fn check_x(x: &Matrix) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    if x.cols == 0 {
        let found = format!("{} x 0", x.rows);
        return Err(Nvfp4Error::shape("x", found, "at least one column"));
    }
    Ok(())
}

/// Normalizes the rows of `x`, or of the sum of `x` and a residual.
///
/// # Errors
/// Returns an error if there are no columns, the residual differs from `x` in shape or type, a bias
/// is given for [`Norm::Rms`], or a buffer is smaller than its shape.
pub fn norm(client: &Client, request: &NormRequest<'_>) -> Result<NormResult, Nvfp4Error> {
    let NormRequest {
        norm,
        x,
        residual,
        gain,
        bias,
        epsilon,
        amax,
    } = *request;
    check_x(x)?;
    if let Some(residual) = residual {
        check_like("residual", residual, x)?;
    }
    check_memory("gain", gain, x.cols * 4)?;
    if let Some(bias) = bias {
        check_memory("bias", bias, x.cols * 4)?;
        if norm == Norm::Rms {
            return Err(Nvfp4Error::value("bias", "one", "none, of RMSNorm"));
        }
    }
    let empty = || Matrix::empty(client, x.rows, x.cols, x.dtype);
    let mut result = NormResult {
        sum: residual.map(|_| empty()),
        normed: empty(),
        stats: allocate(client, stats_len(norm, x.rows) * 4),
        amax: Amaxes::default(),
    };
    if x.is_empty() {
        result.amax = amaxes(client, &result.normed, &Groups::One, &amax)?;
        return Ok(result);
    }
    let handles = [
        Some(&x.handle),
        residual.map(|residual| &residual.handle),
        Some(gain),
        bias,
    ];
    let plan = NormPlan {
        residual: residual.is_some(),
        bias: bias.is_some(),
        ..NormPlan::new(client, (norm, Pass::Forward), x, are_aligned(&handles))
    };
    let (scalar, width, factors) = plan.loads();
    let plan = NormPlan {
        amax: (amax.of_written(client, x.dtype)).filter(|_| plan.whole),
        ..plan
    };
    let amax_out = match plan.amax {
        Some(_) => {
            let lens = amax.lens(1, x.rows, x.cols);
            result.amax = amax.zeros(client, lens);
            result.amax.arg(lens)
        }
        // SAFETY: of one row at least; not written.
        None => unsafe { AmaxOutLaunch::new(buffer(&result.stats, 1), buffer(&result.stats, 1)) },
    };
    let (count, dim) = cubes(client, x.rows.div_ceil(plan.cube_rows()), &plan);
    // SAFETY: the matrices were checked.
    let matrix = |matrix: &Matrix| unsafe { plan.matrix(matrix) };
    // SAFETY: the kernel stays below the shape, for which the buffers were checked.
    unsafe {
        norm_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            width,
            factors,
            NormInputsLaunch::new(
                matrix(x),
                matrix(residual.unwrap_or(x)),
                buffer(gain, x.cols / factors),
                buffer(bias.unwrap_or(gain), x.cols / factors),
                epsilon,
            ),
            NormOutputsLaunch::new(
                matrix(result.sum.as_ref().unwrap_or(&result.normed)),
                matrix(&result.normed),
                buffer(&result.stats, stats_len(norm, x.rows)),
                amax_out,
            ),
            amax.signs(),
            x.rows,
            x.cols,
            plan,
            scalar,
        );
    }
    if plan.amax.is_none() {
        result.amax = amaxes(client, &result.normed, &Groups::One, &amax)?;
    }
    Ok(result)
}

/// Computes the gradients of [`norm()`].
///
/// # Errors
/// Returns an error if there are no columns, a matrix differs from `x` in shape or type, the
/// gradient of a bias is requested for [`Norm::Rms`], or a buffer is smaller than its shape.
pub fn norm_backward(
    client: &Client,
    request: &NormBackwardRequest<'_>,
) -> Result<NormGradients, Nvfp4Error> {
    let NormBackwardRequest {
        norm,
        grad,
        sum_grad,
        x,
        stats,
        gain,
        bias,
        amax,
    } = *request;
    check_x(x)?;
    check_like("grad", grad, x)?;
    if let Some(sum_grad) = sum_grad {
        check_like("sum_grad", sum_grad, x)?;
    }
    check_memory("stats", stats, stats_len(norm, x.rows) * 4)?;
    check_memory("gain", gain, x.cols * 4)?;
    if bias && norm == Norm::Rms {
        return Err(Nvfp4Error::value("bias", "true", "false, of RMSNorm"));
    }
    let by_x = Matrix::empty(client, x.rows, x.cols, x.dtype);
    if x.is_empty() {
        let zeros = || upload(client, &vec![0; x.cols * 4]);
        return Ok(NormGradients {
            amax: amaxes(client, &by_x, &Groups::One, &amax)?,
            x: by_x,
            gain: zeros(),
            bias: bias.then(zeros),
        });
    }
    let handles = [
        Some(&grad.handle),
        sum_grad.map(|grad| &grad.handle),
        Some(&x.handle),
        Some(gain),
    ];
    let plan = NormPlan {
        residual: sum_grad.is_some(),
        bias,
        ..NormPlan::new(client, (norm, Pass::Backward), x, are_aligned(&handles))
    };
    let in_pass = amax.of_written(client, x.dtype);
    let plan = NormPlan {
        amax: in_pass.filter(|amax| plan.whole && (amax.cols.is_none() || plan.strips)),
        ..plan
    };
    let lens = amax.lens(1, x.rows, x.cols);
    let mut found = match plan.amax {
        Some(_) => amax.zeros(client, lens),
        None => Amaxes::default(),
    };
    let amax_out = match plan.amax {
        Some(_) => found.arg(lens),
        // SAFETY: of one column at least; not written.
        None => unsafe { AmaxOutLaunch::new(buffer(gain, 1), buffer(gain, 1)) },
    };
    let parts = norm_parts(x.rows);
    let partial = || allocate(client, parts * x.cols * 4);
    let (gains, biases) = (partial(), bias.then(partial));
    let (scalar, width, factors) = plan.loads();
    let (count, dim) = cubes(client, parts, &plan);
    // SAFETY: the matrices were checked.
    let matrix = |matrix: &Matrix| unsafe { plan.matrix(matrix) };
    let partial_len = parts * x.cols / factors;
    // SAFETY: the kernel stays below the shape, for which the buffers were checked.
    unsafe {
        norm_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            // The first row of a part is computed as a product of rows and parts.
            address_type(x.len().max(x.rows * (parts + 1))),
            width,
            factors,
            NormGradInputsLaunch::new(
                matrix(grad),
                matrix(sum_grad.unwrap_or(grad)),
                matrix(x),
                buffer(stats, stats_len(norm, x.rows)),
                buffer(gain, x.cols / factors),
            ),
            NormGradOutputsLaunch::new(
                matrix(&by_x),
                buffer(&gains, partial_len),
                buffer(biases.as_ref().unwrap_or(&gains), partial_len),
                amax_out,
            ),
            amax.signs(),
            x.rows,
            parts,
            x.cols,
            plan,
            scalar,
        );
    }
    if plan.amax.is_none() {
        found = amaxes(client, &by_x, &Groups::One, &amax)?;
    }
    Ok(NormGradients {
        amax: found,
        x: by_x,
        gain: sum_parts(client, &gains, parts, x.cols),
        bias: biases.map(|biases| sum_parts(client, &biases, parts, x.cols)),
    })
}

/// Sums the rows of `partial`, `f32[parts, cols]`.
fn sum_parts(client: &Client, partial: &Handle, parts: usize, cols: usize) -> Handle {
    const UNITS: usize = 256;
    let out = allocate(client, cols * 4);
    let shared = !is_cpu(client);
    let (count, dim) = if shared {
        let (count, _) = tile_grid(client, cols.div_ceil(UNITS / PART_LANES));
        (count, CubeDim::new_1d(UNITS as u32))
    } else {
        grid(client, cols)
    };
    // SAFETY: the kernel stays below the parts and columns of the buffers.
    unsafe {
        norm_parts_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(parts * cols),
            buffer(partial, parts * cols),
            buffer(&out, cols),
            parts,
            cols,
            shared,
        );
    }
    out
}

fn are_aligned(handles: &[Option<&Handle>]) -> bool {
    handles.iter().flatten().all(|handle| is_aligned(handle))
}
