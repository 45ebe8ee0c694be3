//! Conversion of a quantized matrix to another form.

use burn_core::backend::ops::IntTensorOps;
use burn_core::tensor::{DType, IntDType, Shape};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use nvfp4_formats::{Layout, StoredForm};
use nvfp4_kernels::quantize;

use super::super::layout::code_words;
use super::super::tensors::{QuantizedData, QuantizedMatrix, RowGroups};
use super::super::{trace_op, usage_name};
use super::tensors::{device_groups, launched, like_quantized, to_burn, to_device};

/// Implements [`nvfp4_in_form`](super::super::Nvfp4KernelOps::nvfp4_in_form).
pub(super) fn in_form(
    source: QuantizedMatrix<CubeBackend>,
    groups: RowGroups<CubeBackend>,
    form: StoredForm,
) -> QuantizedMatrix<CubeBackend> {
    let layout = source.layout.in_form(form);
    if layout == source.layout {
        return source;
    }
    let (like, count) = (like_quantized(&source), groups.count());
    let (op, usage) = match layout.form.has_tiles() {
        true => ("swizzle", usage_name(layout.usage)),
        false => ("unswizzle", usage_name(layout.usage)),
    };
    trace_op(op, usage, layout.rows, layout.cols);
    let source = to_device(padded(source, layout), device_groups(groups));
    let made = launched(quantize::in_form(&like.client, &source, form));
    to_burn(&like, made, count, layout)
}

/// Pads `source`, which has row-major scales, with zero rows up to those of `layout`.
fn padded(source: QuantizedMatrix<CubeBackend>, layout: Layout) -> QuantizedMatrix<CubeBackend> {
    let rows = layout.rows;
    if rows == source.layout.rows {
        return source;
    }
    let (amax, own) = (source.amax.clone(), source.layout);
    let (codes, scales) = source.into_packed();
    let layout = Layout { rows, ..own };
    QuantizedMatrix {
        data: QuantizedData::Packed {
            codes: widened(codes, code_words(&layout).0),
            scales: widened(scales, layout.blocks()),
        },
        amax,
        layout,
    }
}

/// Pads each row of `x` with zeros up to `width`.
fn widened(x: CubeTensor, width: usize) -> CubeTensor {
    let [rows, own] = [x.meta.shape()[0], x.meta.shape()[1]];
    if own == width {
        return x;
    }
    let dtype = match x.dtype {
        DType::U8 => IntDType::U8,
        _ => IntDType::U32,
    };
    let shape = Shape::new([rows, width - own]);
    let zeros = CubeBackend::int_zeros(shape, &x.device, dtype);
    CubeBackend::int_cat(vec![x, zeros], 1)
}
