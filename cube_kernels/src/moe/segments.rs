//! Helpers of linear layers besides GEMMs: sums over the rows of a matrix or of each group, zeroing
//! of the rows after the last group, and broadcast of per-group values to rows.

use cubecl::{prelude::*, server::Handle};

use super::groups::{GroupOffsets, find_group, span, to_u32};
use crate::launch::grid;
use crate::{
    Nvfp4Error,
    capabilities::is_cpu,
    cube::codec::{load, store},
    memory::{address_type, allocate, check_memory},
    tensor::{FloatKind, Matrix},
};

/// Partial sums per column: the rows of a group are distributed over them in turn.
const LANES: usize = 8;

/// Smallest number of rows of a part of [`column_sums`].
const PART_ROWS: usize = 64;

/// Largest number of parts of [`column_sums`].
const PARTS: usize = 128;

/// Sums the rows of each group, `count x cols` in `f32`: zeros for an empty group.
///
/// Row `r` of a group is added to partial sum `r % 8`, rows ascending, and the partial sums in a
/// tree (`s += s[i + 4]`, then `+ 2`, then `+ 1`), so that results are bit-identical on every
/// runtime and from run to run.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn segment_sum(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
) -> Result<Matrix, Nvfp4Error> {
    x.check("x")?;
    groups.check("groups")?;
    to_u32("rows", x.rows)?;
    let out = Matrix::empty(client, groups.count, x.cols, FloatKind::F32);
    if out.is_empty() {
        return Ok(out);
    }
    let (count, dim) = grid(client, out.len());
    // SAFETY: the kernel stays below the sums, and below the rows of `x` whatever the offsets are.
    unsafe {
        segment_sum_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(out.len())),
            BufferArg::from_raw_parts(x.handle.clone(), x.len()),
            groups.arg(),
            BufferArg::from_raw_parts(out.handle.clone(), out.len()),
            x.rows,
            x.cols,
            groups.count,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    Ok(out)
}

/// Sums the columns of `x`: `1 x cols` in `f32`, zeros if there are no rows.
///
/// One sum per column would leave a GPU idle: the rows are split into up to 128 parts of equal
/// length, at least 64 rows each; the last part may be shorter. The sum of each part, and then that
/// of the parts, has the order of [`segment_sum`].
///
/// # Errors
/// Returns an error if the buffer is smaller than its shape.
pub fn column_sums(client: &Client, x: &Matrix) -> Result<Matrix, Nvfp4Error> {
    x.check("x")?;
    to_u32("rows", x.rows)?;
    let parts = (x.rows / PART_ROWS).clamp(1, PARTS);
    let sums = part_sums(client, x, parts);
    Ok(match parts {
        1 => sums,
        _ => part_sums(client, &sums, 1),
    })
}

/// Sums the rows of each of `parts` equal parts of `x`, `parts x cols` in `f32`.
fn part_sums(client: &Client, x: &Matrix, parts: usize) -> Matrix {
    let out = Matrix::empty(client, parts, x.cols, FloatKind::F32);
    if out.is_empty() {
        return out;
    }
    let (count, dim) = grid(client, out.len());
    // SAFETY: the kernel stays below the sums and below the rows of `x`, whose buffer was checked.
    unsafe {
        part_sums_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(out.len())),
            BufferArg::from_raw_parts(x.handle.clone(), x.len()),
            BufferArg::from_raw_parts(out.handle.clone(), out.len()),
            x.rows,
            x.cols,
            parts,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    out
}

/// Writes zeros to the rows of `x` after the last group, which a grouped GEMM leaves unchanged.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn zero_padding_rows(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    groups.check("groups")?;
    to_u32("rows", x.rows)?;
    if x.is_empty() {
        return Ok(());
    }
    // There are usually few such rows or none, so the grid is small.
    let items = if is_cpu(client) {
        1
    } else {
        x.len().min(1 << 16)
    };
    let (count, dim) = grid(client, items);
    // SAFETY: the kernel stays below the elements of `x`.
    unsafe {
        zero_padding_rows_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            groups.arg(),
            BufferArg::from_raw_parts(x.handle.clone(), x.len()),
            x.rows,
            x.cols,
            groups.count,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    Ok(())
}

/// Broadcasts `values` (`f32[count]`) to rows: `f32[rows]` with the value of each row's group, or 0
/// for rows of no group. It converts per-group amax values to the per-row ones of dense kernels.
///
/// # Errors
/// Returns an error if `values` is smaller than the number of groups, or there are more than 2^32
/// rows.
pub fn broadcast_group_values(
    client: &Client,
    values: &Handle,
    groups: &GroupOffsets,
    rows: usize,
) -> Result<Handle, Nvfp4Error> {
    groups.check("groups")?;
    check_memory("values", values, groups.count * 4)?;
    to_u32("rows", rows)?;
    let out = allocate(client, rows * 4);
    if rows == 0 {
        return Ok(out);
    }
    let (count, dim) = grid(client, rows);
    // SAFETY: the kernel stays below the rows, and reads the values of groups that there are.
    unsafe {
        broadcast_group_values_kernel::launch_unchecked(
            client,
            count,
            dim,
            BufferArg::from_raw_parts(values.clone(), groups.count),
            groups.arg(),
            BufferArg::from_raw_parts(out.clone(), rows),
            rows,
            groups.count,
        );
    }
    Ok(out)
}

/// Each unit sums every `units`-th column of a group.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn segment_sum_kernel<F: Numeric>(
    x: &[F],
    offsets: &[u32],
    out: &mut [f32],
    rows: usize,
    cols: usize,
    groups: usize,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut item = ABSOLUTE_POS;
    while item < groups * cols {
        let group = item / cols;
        let column = item - group * cols;
        let members = span(offsets, group, rows);
        out[item] = sum_of_rows::<F>(x, members.start, members.end, column, cols, kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each unit sums every `units`-th column of a part.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn part_sums_kernel<F: Numeric>(
    x: &[F],
    out: &mut [f32],
    rows: usize,
    cols: usize,
    parts: usize,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let len = rows.div_ceil(parts);
    let mut item = ABSOLUTE_POS;
    while item < parts * cols {
        let part = item / cols;
        let column = item - part * cols;
        let first = part * len;
        let end = min(first + len, rows);
        out[item] = sum_of_rows::<F>(x, first, end, column, cols, kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Sums the rows from `first` up to `end` of one column, in the order of [`segment_sum`].
#[cube]
fn sum_of_rows<F: Numeric>(
    x: &[F],
    first: usize,
    end: usize,
    column: usize,
    cols: usize,
    #[comptime] kind: FloatKind,
) -> f32 {
    let mut sums = Array::<f32>::new(LANES);
    #[unroll]
    for lane in 0..LANES {
        sums[lane] = 0.0f32;
    }
    let mut row = first;
    while row < end {
        #[unroll]
        for lane in 0..LANES {
            if row + lane < end {
                sums[lane] += load::<F>(x[(row + lane) * cols + column], kind);
            }
        }
        row += comptime!(LANES);
    }
    #[unroll]
    for stage in 0..3u32 {
        let width = comptime!(LANES >> (stage + 1));
        #[unroll]
        for lane in 0..width {
            sums[lane] += sums[comptime!(lane + width)];
        }
    }
    sums[0]
}

/// Writes zeros from the end of the last group on.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn zero_padding_rows_kernel<F: Numeric>(
    offsets: &[u32],
    x: &mut [F],
    rows: usize,
    cols: usize,
    groups: usize,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let end = min(offsets[groups] as usize, rows);
    let mut item = end * cols + ABSOLUTE_POS;
    while item < rows * cols {
        x[item] = store::<F>(0.0f32, kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each unit looks up the group of every `units`-th row.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn broadcast_group_values_kernel(
    values: &[f32],
    offsets: &[u32],
    out: &mut [f32],
    rows: usize,
    groups: usize,
) {
    let mut row = ABSOLUTE_POS;
    while row < rows {
        let group = find_group(offsets, groups, row);
        let members = span(offsets, group, rows);
        let mut value = 0.0f32;
        if row >= members.start && row < members.end {
            value = values[group];
        }
        out[row] = value;
        row += CUBE_COUNT * CUBE_DIM as usize;
    }
}
