//! Pads groups of rows to an alignment, and removes the padding, without waiting for the device.
//!
//! Grouped GEMMs require the tokens of each expert in a multiple of 16, 32 or 128 rows. Rows are
//! copied bitwise, 16 bytes at a time if their length allows; see
//! [`reference::padding`](mod@crate::reference::padding).

use cubecl::{prelude::*, server::Handle};

use super::groups::{GroupOffsets, GroupRows, GroupRowsLaunch, find_group, span, to_u32};
use crate::launch::grid;
use crate::{
    Nvfp4Error,
    memory::address_type,
    reference::padding::padded_bound,
    tensor::{FloatKind, Matrix},
};

/// Pads each group of rows of `x` by zero rows to a multiple of `alignment`. Returns the padded
/// rows and the offsets of the padded groups.
///
/// The result has [`padded_bound(rows, groups, alignment)`](padded_bound) rows for any group sizes:
/// those after the last group are zero. Rows of `x` that belong to no group are dropped.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, `alignment` is zero, or there are more
/// than 2^32 rows.
pub fn pad_groups(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    alignment: usize,
) -> Result<(Matrix, GroupOffsets), Nvfp4Error> {
    pad(client, x, groups, alignment, MovePlan::Pad)
}

/// Like [`pad_groups`], but leaves the rows after the last group undefined, which saves their time.
///
/// # Errors
/// Returns the errors of [`pad_groups`].
pub fn pad_groups_only(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    alignment: usize,
) -> Result<(Matrix, GroupOffsets), Nvfp4Error> {
    pad(client, x, groups, alignment, MovePlan::PadOnly)
}

fn pad(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    alignment: usize,
    plan: MovePlan,
) -> Result<(Matrix, GroupOffsets), Nvfp4Error> {
    x.check("x")?;
    groups.check("groups")?;
    let bound = bound(x.rows, groups, alignment)?;
    let padded = groups.rescaled(client, x.rows, alignment, alignment)?;
    let out = Matrix::empty(client, bound, x.cols, x.dtype);
    launch(client, x, groups, &padded, &out, plan);
    Ok((out, padded))
}

/// Inverts [`pad_groups`] with the same groups: returns `rows` rows, in which rows of no group are
/// zero.
///
/// # Errors
/// Returns an error if `padded` does not have the number of rows that [`pad_groups`] returns, and
/// the errors of [`pad_groups`].
pub fn unpad_groups(
    client: &Client,
    padded: &Matrix,
    rows: usize,
    groups: &GroupOffsets,
    alignment: usize,
) -> Result<Matrix, Nvfp4Error> {
    padded.check("padded")?;
    groups.check("groups")?;
    let bound = bound(rows, groups, alignment)?;
    if padded.rows != bound {
        return Err(Nvfp4Error::shape(
            "padded",
            format!("{} rows", padded.rows),
            format!("{bound}, for {rows} rows in {} groups", groups.count),
        ));
    }
    let starts = groups.rescaled(client, rows, alignment, alignment)?;
    let out = Matrix::empty(client, rows, padded.cols, padded.dtype);
    launch(client, padded, groups, &starts, &out, MovePlan::Unpad);
    Ok(out)
}

fn bound(rows: usize, groups: &GroupOffsets, alignment: usize) -> Result<usize, Nvfp4Error> {
    if alignment == 0 {
        return Err(Nvfp4Error::value("alignment", "0", "at least 1"));
    }
    let bound = padded_bound(rows, groups.count, alignment);
    to_u32("rows", bound)?;
    Ok(bound)
}

fn launch(
    client: &Client,
    source: &Matrix,
    groups: &GroupOffsets,
    padded: &GroupOffsets,
    out: &Matrix,
    plan: MovePlan,
) {
    if out.is_empty() {
        return;
    }
    // Rows are copied as whole words or half words, whatever the element type.
    let row_bytes = out.cols * out.dtype.size();
    let halves = !row_bytes.is_multiple_of(4);
    let (storage, size) = if halves {
        (FloatKind::Bf16.storage_type(), 2)
    } else {
        (u32::elem_type_native(), 4)
    };
    let mut width = 16 / size;
    while !row_bytes.is_multiple_of(width * size) {
        width /= 2;
    }
    let per_row = row_bytes / (width * size);
    let (count, dim) = grid(client, out.rows * per_row);
    let arg = |handle: &Handle, rows: usize| {
        // SAFETY: the matrices hold their rows.
        unsafe { BufferArg::from_raw_parts(handle.clone(), rows * per_row) }
    };
    // SAFETY: the kernel stays below the rows of both matrices, whatever the offsets are.
    unsafe {
        move_groups_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(out.rows.max(source.rows) * row_bytes),
            width,
            arg(&source.handle, source.rows),
            GroupRowsLaunch::new(groups.arg(), padded.arg(), groups.count),
            arg(&out.handle, out.rows),
            source.rows,
            out.rows,
            per_row,
            plan,
            storage,
        );
    }
}

/// Comptime choice of [`move_groups_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MovePlan {
    /// Pads groups, and writes zeros to rows after the last group.
    Pad,
    /// Pads groups, and does not write rows after the last group.
    PadOnly,
    /// Removes padding.
    Unpad,
}

/// Each unit copies every `units`-th vector of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn move_groups_kernel<S: Numeric, N: Size>(
    source: &[Vector<S, N>],
    groups: GroupRows,
    out: &mut [Vector<S, N>],
    source_rows: usize,
    out_rows: usize,
    per_row: usize,
    #[comptime] plan: MovePlan,
    #[define(S)] _storage: ElemType,
) {
    let end = if comptime!(plan == MovePlan::PadOnly) {
        min(out_rows, groups.starts[groups.count] as usize)
    } else {
        out_rows
    };
    let mut item = ABSOLUTE_POS;
    while item < end * per_row {
        let row = item / per_row;
        let mut from = source_rows;
        if comptime!(plan != MovePlan::Unpad) {
            let group = find_group(&groups.starts, groups.count, row);
            let rows = span(&groups.offsets, group, source_rows);
            let position = rows.start + (row - groups.starts[group] as usize);
            if position < rows.end {
                from = position;
            }
        } else {
            let group = find_group(&groups.offsets, groups.count, row);
            let rows = span(&groups.offsets, group, out_rows);
            if row >= rows.start && row < rows.end {
                from = groups.starts[group] as usize + (row - rows.start);
            }
        }
        let mut vector = Vector::<S, N>::new(S::from_int(0));
        if from < source_rows {
            vector = source[from * per_row + item % per_row];
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
