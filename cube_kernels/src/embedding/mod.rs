//! Embedding lookup, and the gradient of the table in a fixed summation order, without a one-hot
//! GEMM or float atomics; see [`reference::embedding`](crate::reference::embedding) and
//! [`reference::embedding_gradient`](crate::reference::embedding_gradient).
//!
//! For the gradient, the tokens are sorted by id on the device. Nothing waits for the device.

#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel;

use cubecl::{prelude::*, server::Handle};

use crate::{
    Nvfp4Error,
    capabilities::{conversion_of, overlaps_kernels},
    cube::row_blocks::ROW_BLOCK,
    launch::{buffer, grid},
    loss::row_plan,
    memory::{address_type, allocate, check_memory},
    moe::groups::to_u32,
    reference::{EMBEDDING_RUN, TablePart},
    sort,
    tensor::{FloatKind, Matrix},
    zeroed::zeros,
};
use kernel::{
    LookUpLaunch, LookUpPlan, SortedTokensLaunch, embedding_kernel, join_runs_kernel,
    sum_runs_kernel,
};

/// Returns row `ids[i]` (`u32`) of a table for each of `tokens` tokens `i`, rounded to `dtype`:
/// `[tokens, cols]`. `table` (`[rows, cols]`) is the shard `part` of the table: ids of rows outside
/// the shard give zeros, ids outside the table NaN.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, a size does not fit 32 bits, the shard
/// is not within its table, or it is empty and there are ids.
pub fn embedding(
    client: &Client,
    (table, part): (&Matrix, TablePart),
    ids: &Handle,
    tokens: usize,
    dtype: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    table.check("table")?;
    check_memory("ids", ids, tokens * 4)?;
    to_u32("ids", tokens)?;
    to_u32("table", part.of)?;
    if part.first + table.rows > part.of {
        let found = format!("rows {} to {}", part.first, part.first + table.rows);
        return Err(Nvfp4Error::value(
            "part",
            found,
            format!("below {}", part.of),
        ));
    }
    let out = Matrix::empty(client, tokens, table.cols, dtype);
    if out.is_empty() {
        return Ok(out);
    }
    if table.rows == 0 {
        return Err(Nvfp4Error::shape(
            "table",
            format!("0 x {}", table.cols),
            "at least one row",
        ));
    }
    let (from, from_plan) = row_plan(table);
    let (to, to_plan) = row_plan(&out);
    let (count, dim) = grid(client, tokens * table.cols.div_ceil(ROW_BLOCK));
    let plan = LookUpPlan {
        from: from_plan,
        to: to_plan,
        conversion: conversion_of(client),
        overlaps: overlaps_kernels(client),
    };
    // SAFETY: the kernel stays below the tokens, and reads rows that there are.
    unsafe {
        embedding_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(table.len().max(out.len())),
            from.width,
            to.width,
            from.arg(),
            LookUpLaunch::new(
                buffer(ids, tokens),
                tokens,
                part.first,
                table.rows,
                part.of,
                table.cols,
            ),
            to.arg(),
            plan,
            from.elem,
            to.elem,
        );
    }
    Ok(out)
}

/// Computes the gradient of a table of `vocab` rows from `grad` (`[tokens, cols]`), the gradient of
/// the rows looked up by `ids` (`u32`): `f32[vocab, cols]`. Ids that are not a row are ignored.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, or a size does not fit 32 bits.
pub fn embedding_gradient(
    client: &Client,
    grad: &Matrix,
    ids: &Handle,
    vocab: usize,
) -> Result<Matrix, Nvfp4Error> {
    grad.check("grad")?;
    let (tokens, cols) = (grad.rows, grad.cols);
    check_memory("ids", ids, tokens * 4)?;
    to_u32("ids", tokens)?;
    to_u32("vocab", vocab + 1)?;
    let len = vocab * cols;
    to_u32("the gradient of the table", len)?;
    let out = Matrix::new(zeros(client, len), vocab, cols, FloatKind::F32)?;
    if out.is_empty() || tokens == 0 {
        return Ok(out);
    }
    let sorted = sort::sort(client, ids, tokens, vocab);
    let (words, plan) = row_plan(grad);
    let runs = tokens.div_ceil(EMBEDDING_RUN);
    let partial = allocate(client, 2 * runs * cols * 4);
    // Rows of whole vectors of 16 bytes.
    let width = if cols.is_multiple_of(ROW_BLOCK) { 4 } else { 1 };
    let arg = || {
        // SAFETY: both were made for so many tokens.
        let (keys, order) =
            unsafe { (buffer(&sorted.keys, tokens), buffer(&sorted.order, tokens)) };
        SortedTokensLaunch::new(keys, order, tokens, vocab, cols)
    };
    let address = address_type(grad.len().max(len).max(2 * runs * cols));
    let (count, dim) = grid(client, runs * cols.div_ceil(ROW_BLOCK));
    // SAFETY: the kernels stay below the tokens and the rows of the table.
    unsafe {
        sum_runs_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            words.width,
            width,
            words.arg(),
            arg(),
            buffer(&out.handle, len / width),
            buffer(&partial, 2 * runs * cols / width),
            plan,
            words.elem,
        );
        let (count, dim) = grid(client, runs * cols / width);
        join_runs_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            width,
            buffer(&partial, 2 * runs * cols / width),
            arg(),
            buffer(&out.handle, len / width),
        );
    }
    Ok(out)
}
