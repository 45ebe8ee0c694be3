//! Softmax cross entropy of logits in device memory, with the gradient computed in place; see
//! [`reference::cross_entropy`](crate::reference::cross_entropy).
//!
//! The steps are separate, so that a caller can process the rows in chunks: [`target_scale`] of all
//! targets, [`cross_entropy_rows`] of each chunk of logits, [`sum_losses`] of all rows. Nothing
//! waits for the device.

#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel;
mod kl;
#[allow(missing_docs)] // As above.
mod kl_kernel;
mod linear;

pub use kl::{LinearKlRequest, kl_divergence_rows, linear_kl_divergence};
pub use linear::{Head, LinearLoss, LinearLossRequest, linear_cross_entropy};

use cubecl::{prelude::*, server::Handle};

use crate::{
    CrossEntropy, Nvfp4Error, Reduction,
    capabilities::{conversion_of, is_cpu},
    cube::row_blocks::{ROW_BLOCK, RowPlan},
    launch::{Words, buffer, grid, units},
    memory::{address_type, allocate, check_memory},
    moe::groups::to_u32,
    reference::cross_entropy_lanes,
    tensor::{FloatKind, Matrix},
};
use kernel::{
    CrossEntropyArgsLaunch, CrossEntropyPlan, GROUP, cross_entropy_kernel, scale_kernel,
    sum_losses_kernel, target_scale_kernel,
};

/// Bytes of a row that stay in shared memory between the two passes if three cubes of 512 units
/// share an SM.
const HELD_OF_THREE: usize = 64 << 10;
/// Bytes of a row that stay in shared memory if one cube of 1024 units has an SM. The rest of the
/// row is reread from the L2 cache, which has room for one row per SM.
const HELD_OF_ONE: usize = 192 << 10;

/// Units of a cube in which each plane processes a row.
const UNITS_OF_PLANES: usize = 256;

/// Returns the plan for loading the rows of `x` in blocks of 8, and the words of the loads.
pub(crate) fn row_plan(x: &Matrix) -> (Words, RowPlan) {
    let mut words = Words::of(x);
    let plan = RowPlan {
        elements: words.elem.size() == 2,
        whole: x.cols.is_multiple_of(ROW_BLOCK),
        kind: x.dtype,
    };
    // A block is at most one 16-byte vector for 16-bit elements, two for f32.
    words.width = words.width.min(4);
    (words, plan)
}

/// Returns the factor of the losses and gradients of rows, one `f32`: `1 / count` with the number
/// of `targets` (`i32[rows]`) that are not ignored, or 0 for none; 1 for [`Reduction::Sum`].
///
/// # Errors
/// Returns an error if `targets` is smaller than `rows`, or a size does not fit 32 bits.
pub fn target_scale(
    client: &Client,
    targets: &Handle,
    rows: usize,
    params: &CrossEntropy,
) -> Result<Handle, Nvfp4Error> {
    check_memory("targets", targets, rows * 4)?;
    to_u32("rows", rows)?;
    let out = allocate(client, 4);
    let units = if is_cpu(client) { units(client) } else { 1024 };
    // SAFETY: the kernel stays below the rows.
    unsafe {
        target_scale_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(units as u32),
            buffer(targets, rows.max(1)),
            buffer(&out, 1),
            rows,
            params.ignore as u32,
            params.reduction == Reduction::Mean,
            conversion_of(client),
            units,
        );
    }
    Ok(out)
}

/// Writes the losses of the rows of `logits` (`[rows, vocab]`), `f32[rows]`, to `losses`, not
/// scaled. If `scale` (one `f32`) is given, the logits are replaced by their gradient times
/// `scale`, in place. This takes one read and one write, except that a row's bytes beyond 64 KiB
/// (192 KiB for more than 65536 logits) are read twice. `targets` are `i32[rows]`.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, there are rows without a class, a size
/// does not fit 32 bits, or `params` fail [`CrossEntropy::check`].
pub fn cross_entropy_rows(
    client: &Client,
    logits: &Matrix,
    targets: &Handle,
    losses: &Handle,
    scale: Option<&Handle>,
    params: &CrossEntropy,
) -> Result<(), Nvfp4Error> {
    params.check()?;
    logits.check("logits")?;
    let (rows, vocab) = (logits.rows, logits.cols);
    if !has_rows("logits", logits, [targets, losses], scale)? {
        return Ok(());
    }
    let (words, row_plan) = row_plan(logits);
    let RowLaunch {
        lanes,
        planes,
        units,
        cubes,
    } = RowLaunch::new(client, rows, vocab);
    let plan = CrossEntropyPlan {
        lanes,
        planes,
        held: match planes && scale.is_some() {
            true => held_groups(lanes, vocab, row_plan),
            false => 0,
        },
        gradient: scale.is_some(),
        smoothing: params.smoothing > 0.0,
        rows: row_plan,
        conversion: conversion_of(client),
    };
    let row_vectors = vocab / (row_plan.per_scalar() * words.width);
    let args = CrossEntropyArgsLaunch::new(
        rows,
        vocab,
        row_vectors,
        params.ignore as u32,
        params.smoothing,
        1.0 / vocab as f32,
        params.z_loss,
    );
    // SAFETY: the buffers were checked, and the kernel stays below rows and classes; targets that
    // are no class are not followed.
    unsafe {
        cross_entropy_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(units as u32),
            address_type(logits.len()),
            words.width,
            words.arg(),
            buffer(targets, rows),
            // Without a scale only the losses are written.
            buffer(scale.unwrap_or(losses), 1),
            buffer(losses, rows),
            args,
            plan,
            words.elem,
        );
    }
    Ok(())
}

/// True if `logits` has rows. Checks that targets and losses have one entry per row.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, there are rows without a class, or a
/// size does not fit 32 bits.
fn has_rows(
    argument: &'static str,
    logits: &Matrix,
    [targets, losses]: [&Handle; 2],
    scale: Option<&Handle>,
) -> Result<bool, Nvfp4Error> {
    let (rows, vocab) = (logits.rows, logits.cols);
    check_memory("targets", targets, rows * 4)?;
    check_memory("losses", losses, rows * 4)?;
    if let Some(scale) = scale {
        check_memory("scale", scale, 4)?;
    }
    to_u32("rows", rows)?;
    // Targets are `i32`.
    to_u32("vocab", 2 * vocab)?;
    if rows > 0 && vocab == 0 {
        let found = format!("{rows} x 0");
        return Err(Nvfp4Error::shape(argument, found, "at least one class"));
    }
    Ok(rows > 0)
}

/// Launch geometry for rows of logits.
struct RowLaunch {
    /// Lanes that share a row.
    lanes: usize,
    /// True if each lane is a unit.
    planes: bool,
    /// Units per cube.
    units: usize,
    cubes: u32,
}

impl RowLaunch {
    fn new(client: &Client, rows: usize, vocab: usize) -> Self {
        let (planes, lanes) = (!is_cpu(client), cross_entropy_lanes(vocab));
        let (units, cubes) = match (planes, lanes) {
            (false, _) => (units(client), rows.min(4)),
            (true, 32) => (UNITS_OF_PLANES, rows.div_ceil(UNITS_OF_PLANES / 32)),
            (true, lanes) => (lanes, rows),
        };
        Self {
            lanes,
            planes,
            units,
            cubes: cubes.min(1 << 24) as u32,
        }
    }
}

/// Returns the groups of blocks per lane that stay in shared memory.
fn held_groups(lanes: usize, vocab: usize, plan: RowPlan) -> usize {
    let bytes = match lanes {
        32 => return 0,
        512 => HELD_OF_THREE,
        _ => HELD_OF_ONE,
    };
    if !plan.whole {
        return 0;
    }
    let group = GROUP * lanes * ROW_BLOCK;
    (bytes / (group * plan.kind.size())).min(vocab.div_ceil(group))
}

/// Sums the losses of `rows` rows and multiplies by `scale`, one `f32`, in the order of
/// [`reference::sum_losses`](crate::reference::sum_losses).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn sum_losses(
    client: &Client,
    losses: &Handle,
    rows: usize,
    scale: &Handle,
) -> Result<Handle, Nvfp4Error> {
    check_memory("losses", losses, rows * 4)?;
    check_memory("scale", scale, 4)?;
    to_u32("rows", rows)?;
    let out = allocate(client, 4);
    let units = if is_cpu(client) { units(client) } else { 1024 };
    // SAFETY: the kernel stays below the rows.
    unsafe {
        sum_losses_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(units as u32),
            buffer(losses, rows.max(1)),
            buffer(scale, 1),
            buffer(&out, 1),
            rows,
        );
    }
    Ok(out)
}

/// Computes the cross entropy of all of `logits` at once: one `f32`. With `gradient`, the logits
/// are replaced by the gradient of that loss, in place.
///
/// # Errors
/// Returns the errors of [`cross_entropy_rows`].
pub fn cross_entropy(
    client: &Client,
    logits: &Matrix,
    targets: &Handle,
    gradient: bool,
    params: &CrossEntropy,
) -> Result<Handle, Nvfp4Error> {
    let losses = allocate(client, logits.rows * 4);
    let scale = target_scale(client, targets, logits.rows, params)?;
    let used = gradient.then_some(&scale);
    cross_entropy_rows(client, logits, targets, &losses, used, params)?;
    sum_losses(client, &losses, logits.rows, &scale)
}

/// Multiplies `x` by `factor`, one `f32`, in place. If the factor is 1, as for the gradient of a
/// loss that is not scaled further, the memory of `x` is not accessed: only the launch costs time.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn scale(client: &Client, x: &Matrix, factor: &Handle) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    check_memory("factor", factor, 4)?;
    if x.is_empty() {
        return Ok(());
    }
    let flat = Matrix {
        rows: 1,
        cols: x.len(),
        ..x.clone()
    };
    let (words, plan) = row_plan(&flat);
    let blocks = flat.cols.div_ceil(ROW_BLOCK);
    let (count, dim) = grid(client, blocks);
    // SAFETY: the kernel stays below the elements of `x`.
    unsafe {
        scale_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            words.width,
            words.arg(),
            buffer(factor, 1),
            blocks,
            flat.cols,
            conversion_of(client),
            plan,
            words.elem,
        );
    }
    Ok(())
}

/// Returns the number of rows of logits of `vocab` classes that fit in `bytes` of memory, rounded
/// to a multiple of 128, the tile height of GEMMs, and at least 128.
pub fn chunk_rows(vocab: usize, dtype: FloatKind, bytes: usize) -> usize {
    let row = (vocab * dtype.size()).max(1);
    (bytes / row / 128 * 128).max(128)
}
