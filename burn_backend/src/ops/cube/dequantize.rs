//! Dequantization.

use burn_core::tensor::FloatDType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use nvfp4_formats::Layout;
use nvfp4_kernels::quantize;
use nvfp4_kernels::tensor::Groups;

use super::super::dequantize::{scaled, with_amax_per_row};
use super::super::dtype::float_kind;
use super::super::tensors::{QuantizedMatrix, RowGroups};
use super::super::{trace_op, usage_name};
use super::tensors::{device_groups, launched, like_quantized, result, to_device};

/// Implements [`nvfp4_dequantize`](super::super::Nvfp4KernelOps::nvfp4_dequantize).
pub(super) fn dequantize(
    source: QuantizedMatrix<CubeBackend>,
    groups: &RowGroups<CubeBackend>,
    dtype: FloatDType,
) -> CubeTensor {
    let source = with_amax_per_row::<CubeBackend>(source, groups);
    let layout = source.layout;
    let Layout { rows, cols, .. } = layout;
    if !layout.form.is_packed() {
        return scaled::<CubeBackend>(source, dtype);
    }
    let op = match layout.format.is_mx() {
        true => "mx_dequantize",
        false => "dequantize",
    };
    trace_op(op, usage_name(layout.usage), rows, cols);
    let (like, kind) = (like_quantized(&source), float_kind(dtype));
    // Groups affect only tiles of scales, which begin at each group: each row has its own amax.
    let groups = match layout.form.has_tiles() {
        false => Groups::One,
        true => device_groups(groups.clone()),
    };
    let source = to_device(source, groups);
    let values = launched(quantize::dequantize(&like.client, &source, kind));
    result(&like, values)
}
