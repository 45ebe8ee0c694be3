//! Quantization requests with a given amax.

use cubecl::{client::Client, server::Handle};

use super::{
    plan::QuantRequest,
    rowwise::{by_rows, quantize_rows, quantize_rows_in_both_storages},
    tiles::{Kind, launch_tiles},
};
use crate::{
    BlockScaling, Hadamard, Nvfp4Error, ScaleLayout, Storage, Usage,
    moe::groups::GroupOffsets,
    tensor::{AmaxGranularity, DeviceNvfp4Params, DeviceQuantized, DeviceRounding, Groups, Matrix},
};

/// Quantizes `x` to a rowwise tensor with one amax and compact scales: 1x16 blocks along each row.
/// See [`reference::quantize_row`](crate::reference::quantize_row).
///
/// # Errors
/// Returns an error if the columns of `x` are no multiple of 16, or if a buffer is smaller than its
/// shape.
pub fn quantize_row(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
) -> Result<DeviceQuantized, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        Usage::Rowwise,
        &plain(amax, rounding, None),
    )
}

/// Quantizes `x` to a columnwise tensor with one amax and compact scales: 16x1 blocks down each
/// column, stored transposed, the last block padded with zeros. With `hadamard`, the values are
/// transformed first, and `amax` must be that of the transformed values. See
/// [`reference::quantize_col`](crate::reference::quantize_col).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn quantize_col(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
    hadamard: Option<Hadamard>,
) -> Result<DeviceQuantized, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        Usage::Columnwise,
        &plain(amax, rounding, hadamard),
    )
}

fn plain(amax: &Handle, rounding: DeviceRounding, hadamard: Option<Hadamard>) -> QuantRequest<'_> {
    QuantRequest {
        amax,
        scope: AmaxGranularity::PerTensor,
        copy: DeviceNvfp4Params {
            hadamard,
            ..DeviceNvfp4Params::new(rounding)
        },
    }
}

/// Quantizes `x` along `usage`. See [`reference::quantize`](crate::reference::quantize). With
/// groups, each group is quantized as a separate matrix; only the block indices of stochastic
/// rounding continue from group to group.
///
/// # Errors
/// Returns an error if K of a rowwise tensor is no multiple of 16 (with a transform, of its size),
/// if stochastic four over six is requested, if the groups do not fit, or if a buffer is smaller
/// than its shape.
pub fn quantize(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    request: &QuantRequest<'_>,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let request = (request, Storage::Packed);
    if usage == Usage::Rowwise && by_rows(groups, &request.0.copy) {
        return quantize_rows(client, x, groups, request);
    }
    let (row, col) = match usage {
        Usage::Rowwise => (Some(request), None),
        Usage::Columnwise => (None, Some(request)),
    };
    let (row, col) = launch_tiles(client, x, groups, row, col, Kind::Blocks)?;
    Ok(row.or(col).expect("one was asked for"))
}

/// Makes the requested copies of `x`, `(rowwise, columnwise)`, from one read of it, each as by
/// [`quantize`] and in the requested storage: a copy that only the next GEMM reads, once, may be
/// stored as values.
///
/// # Errors
/// See [`quantize`]; also returns an error if scales of values are to be swizzled.
pub fn quantize_operands(
    client: &Client,
    x: &Matrix,
    row: Option<(&QuantRequest<'_>, Storage)>,
    col: Option<(&QuantRequest<'_>, Storage)>,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    match (row, col) {
        (None, None) => Ok((None, None)),
        (Some(row), None) => Ok((Some(quantize_rows(client, x, &Groups::One, row)?), None)),
        (row, col) => launch_tiles(client, x, &Groups::One, row, col, Kind::Blocks),
    }
}

/// Makes the rowwise tensor of `x` in both storages, `(packed, values)`, from one read of it: as by
/// [`quantize`], and with the decoded values as by [`quantize_operands`]. If a GEMM multiplies
/// values, it reads the latter next, and the former is kept for later.
///
/// # Errors
/// See [`quantize`]; also returns an error if scales are to be swizzled.
pub fn quantize_in_both_storages(
    client: &Client,
    x: &Matrix,
    request: &QuantRequest<'_>,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    quantize_rows_in_both_storages(client, x, request)
}

/// Quantizes `x` to both copies from one read of it, `(rowwise, columnwise)`, each as by
/// [`quantize`].
///
/// # Errors
/// See [`quantize`].
pub fn quantize_both(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: &QuantRequest<'_>,
    col: &QuantRequest<'_>,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let [row, col] = [row, col].map(|request| Some((request, Storage::Packed)));
    let copies = launch_tiles(client, x, groups, row, col, Kind::Blocks)?;
    let [row, col] = [copies.0, copies.1].map(|made| made.expect("asked for"));
    Ok((row, col))
}

/// Makes the requested copies of `x`, `(rowwise, columnwise)`, each as by [`quantize`] of the
/// groups, as operands of the grouped GEMMs: plain matrices, with one amax per group, or per stored
/// row of each group.
///
/// The rowwise tensor is that of [`quantize`]. In the columnwise one the groups share stored rows
/// instead of following each other: there are `cols` stored rows, in each of which group `g` takes
/// the columns from entry `g` of [`GroupOffsets::aligned`]`(client, x.rows, unit)` on. `unit` is 16
/// or the size of the transform, and at least 64 with
/// [`whole_tiles`](DeviceNvfp4Params::whole_tiles). There is space for `padded_bound(x.rows,
/// groups, unit)` columns; those after the last group are not written. Rows of `x` after the last
/// group are not written in the rowwise tensor, whose scales in 128x4 tiles start anew at each
/// group; with whole tiles, the scales of the columnwise one are those of one matrix. Stochastic
/// rounding numbers blocks like [`quantize`], group after group.
///
/// # Errors
/// See [`quantize`]; also returns an error if scales of a columnwise tensor are to be swizzled
/// without [`whole_tiles`](DeviceNvfp4Params::whole_tiles).
pub fn quantize_side_by_side(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    row: Option<&QuantRequest<'_>>,
    col: Option<&QuantRequest<'_>>,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    let groups = Groups::Offsets {
        offsets: groups.offsets.clone(),
        count: groups.count,
    };
    if row.is_none() && col.is_none() {
        return Ok((None, None));
    }
    let [row, col] = [row, col].map(|request| request.map(|request| (request, Storage::Packed)));
    let (row, col) = match (row, col) {
        (Some(row), None) if by_rows(&groups, &row.0.copy) => {
            (Some(quantize_rows(client, x, &groups, row)?), None)
        }
        (row, col) => launch_tiles(client, x, &groups, row, col, Kind::SideBySide)?,
    };
    // Rows of codes, and of compact scales, are those of one matrix.
    let row = row.map(|row| match row.layout.scale_layout {
        ScaleLayout::Compact => DeviceQuantized {
            groups: Groups::One,
            ..row
        },
        ScaleLayout::Swizzled128x4 => row,
    });
    Ok((row, col))
}

/// Quantizes `x` to both copies in 16x16 tiles, rounded to nearest: `(rowwise, columnwise)`, the
/// second one the exact transpose of the first. See
/// [`reference::quantize_tile`](crate::reference::quantize_tile).
///
/// # Errors
/// Returns an error if the columns of `x` are no multiple of 16, or if a buffer is smaller than its
/// shape.
pub fn quantize_tile(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let layouts = [ScaleLayout::Compact; 2];
    quantize_tile_with(
        client,
        x,
        &Groups::One,
        amax,
        BlockScaling::Standard,
        layouts,
    )
}

/// [`quantize_tile`] of every group, with one amax per group, any scaling, and scales in `layouts`
/// (rowwise, columnwise). Four over six decides once per tile.
///
/// # Errors
/// See [`quantize_tile`]; also returns an error if the groups do not fit.
pub fn quantize_tile_with(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    amax: &Handle,
    scaling: BlockScaling,
    layouts: [ScaleLayout; 2],
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let [row, col] = layouts.map(|layout| of_tiles(amax, scaling, layout));
    let [row, col] = [&row, &col].map(|request| Some((request, Storage::Packed)));
    let copies = launch_tiles(client, x, groups, row, col, Kind::Tiles)?;
    let [row, col] = [copies.0, copies.1].map(|made| made.expect("asked for"));
    Ok((row, col))
}

/// Makes only the copy of [`quantize_tile_with`] along `usage`, without writing the other one.
///
/// # Errors
/// See [`quantize_tile_with`].
pub fn quantize_tile_copy(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    amax: &Handle,
    scaling: BlockScaling,
    layout: ScaleLayout,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let request = of_tiles(amax, scaling, layout);
    let request = Some((&request, Storage::Packed));
    let (row, col) = match usage {
        Usage::Rowwise => (request, None),
        Usage::Columnwise => (None, request),
    };
    let (row, col) = launch_tiles(client, x, groups, row, col, Kind::Tiles)?;
    Ok(row.or(col).expect("asked for"))
}

/// Returns the request for a copy of 16x16 tiles.
fn of_tiles(amax: &Handle, scaling: BlockScaling, layout: ScaleLayout) -> QuantRequest<'_> {
    QuantRequest {
        amax,
        scope: AmaxGranularity::PerTensor,
        copy: DeviceNvfp4Params {
            scaling,
            layout,
            ..DeviceNvfp4Params::new(DeviceRounding::Nearest)
        },
    }
}
