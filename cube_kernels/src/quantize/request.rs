//! Quantization from a given amax, as it is asked for.

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

/// The rowwise tensor of `x` with one amax and compact scales: 1x16 blocks along each row. See
/// [`reference::quantize_row`](crate::reference::quantize_row).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
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

/// The columnwise tensor of `x` with one amax and compact scales: 16x1 blocks down each column,
/// stored transposed, the last block padded with zeros; transformed first with `hadamard`, in which
/// case `amax` is that of the transformed values. See
/// [`reference::quantize_col`](crate::reference::quantize_col).
///
/// # Errors
/// When a buffer is smaller than its shape.
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

/// One copy of `x`, along `usage`. See [`reference::quantize`](crate::reference::quantize); with
/// groups, each group is quantized as a matrix of its own, but for the block indices of stochastic
/// rounding, which go on from group to group.
///
/// # Errors
/// When the contraction of a rowwise tensor is no multiple of 16 (with a transform, of its size),
/// four over six is asked to round stochastically, the groups do not fit, or a buffer is smaller
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

/// The copies of `x` that are asked for, `(rowwise, columnwise)`, from one read of it, each as
/// [`quantize`] makes it and in the form that is asked for: what a GEMM multiplies next, and
/// once, may be written as values.
///
/// # Errors
/// As [`quantize`], and when scales of values are to be swizzled.
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

/// The rowwise tensor of `x` in both storages from one read of it, `(packed, values)`: as
/// [`quantize`] makes it, and what its codes and scales stand for, as [`quantize_operands`] writes
/// it. Where a GEMM multiplies values, this is what it reads next, and what is kept for later.
///
/// # Errors
/// As [`quantize`], and when scales are to be swizzled.
pub fn quantize_in_both_storages(
    client: &Client,
    x: &Matrix,
    request: &QuantRequest<'_>,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    quantize_rows_in_both_storages(client, x, request)
}

/// Both copies of `x` from one read of it: `(rowwise, columnwise)`, each as [`quantize`] makes it.
///
/// # Errors
/// As [`quantize`].
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

/// The copies of `x` that are asked for, `(rowwise, columnwise)`, each as [`quantize`] makes it of
/// the groups, as operands of the grouped GEMMs: plain matrices, with one amax for each group, or
/// for each stored row of each group.
///
/// The rowwise tensor is that of [`quantize`]. In the columnwise one the groups share stored rows
/// and do not lie one after another: `cols` stored rows, in each of which group `g` takes the
/// columns from entry `g` of [`GroupOffsets::aligned`]`(client, x.rows, unit)` on, `unit` being 16
/// or the size of the transform, and 64 at least in
/// [`whole_tiles`](DeviceNvfp4Params::whole_tiles). It has room for `padded_bound(x.rows, groups,
/// unit)` of them; those behind the last group are not written. Rows of `x` behind the last group
/// are not written in the rowwise tensor, whose scales in 128x4 tiles begin anew at each group;
/// those in whole tiles of the columnwise one are one matrix. Stochastic rounding numbers blocks as
/// [`quantize`] does, group after group.
///
/// # Errors
/// As [`quantize`], and when scales of a columnwise tensor are to be swizzled without
/// [`whole_tiles`](DeviceNvfp4Params::whole_tiles).
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

/// Both copies of `x` in 16x16 tiles, rounded to nearest: `(rowwise, columnwise)`, the second the
/// exact transpose of the first. See
/// [`reference::quantize_tile`](crate::reference::quantize_tile).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
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

/// [`quantize_tile`] of every group, with one amax for each, any scaling, and scales in `layouts`
/// (rowwise, columnwise). Four over six decides once for a tile.
///
/// # Errors
/// As [`quantize_tile`], and when the groups do not fit.
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

/// One of the two copies of [`quantize_tile_with`], that along `usage`, without the bytes of the
/// other.
///
/// # Errors
/// As [`quantize_tile_with`].
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

/// A copy of 16x16 tiles.
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
