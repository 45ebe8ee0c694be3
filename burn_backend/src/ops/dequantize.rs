//! Dequantization with backend-independent operations.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape, Slice};
use nvfp4_formats::{AmaxGranularity, Layout, Usage};

use super::Nvfp4KernelOps;
use super::dtype::cast;
use super::tensors::{MaybeTensor, QuantizedData, QuantizedMatrix, RowGroups};

/// Expands `source`, with one amax per group of rows, to one amax per row.
pub(super) fn with_amax_per_row<B: Nvfp4KernelOps>(
    source: QuantizedMatrix<B>,
    groups: &RowGroups<B>,
) -> QuantizedMatrix<B> {
    let layout = source.layout;
    let amax = match (source.amax, layout.amax) {
        (MaybeTensor::Present(amax), AmaxGranularity::PerTensor) => amax,
        (amax, _) => return QuantizedMatrix { amax, ..source },
    };
    let rows = layout.rows;
    let amax = match groups {
        RowGroups::Whole => {
            return QuantizedMatrix {
                amax: MaybeTensor::Present(amax),
                ..source
            };
        }
        RowGroups::Offsets(offsets) | RowGroups::Window { offsets, .. } => {
            B::nvfp4_broadcast_group_values(amax, offsets.clone(), rows)
        }
        RowGroups::Batch(count) => {
            let amax = B::float_reshape(amax, Shape::new([*count, 1]));
            let amax = B::float_expand(amax, Shape::new([*count, rows / count]));
            B::float_reshape(amax, Shape::new([rows]))
        }
    };
    QuantizedMatrix {
        amax: MaybeTensor::Present(amax),
        layout: Layout {
            amax: AmaxGranularity::PerRow,
            ..layout
        },
        ..source
    }
}

/// Dequantizes a tensor that is stored as bf16 values.
pub(super) fn scaled<B: Backend>(source: QuantizedMatrix<B>, dtype: FloatDType) -> FloatTensor<B> {
    let layout = source.layout;
    let (QuantizedData::Bf16Unscaled(values), MaybeTensor::Present(amax)) =
        (source.data, source.amax)
    else {
        unreachable!("bf16 values with a global scale");
    };
    let factors = B::float_div_scalar(amax, layout.scaling.range().into());
    let factors = B::float_reshape(factors, Shape::new([layout.amax_len(), 1]));
    let x = B::float_mul(cast::<B>(values, FloatDType::F32), factors);
    let stored = [0..layout.outer(), 0..layout.inner()].map(Slice::from);
    let x = B::float_slice(x, &stored);
    let x = match layout.usage {
        Usage::Rowwise => x,
        Usage::Columnwise => B::float_swap_dims(x, 0, 1),
    };
    cast::<B>(x, dtype)
}
