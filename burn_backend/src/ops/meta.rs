//! Shapes and dtypes of the results, which Fusion needs before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::{DType, FloatDType, Shape};
use nvfp4_formats::reference::Activation;
use nvfp4_formats::{Layout, Storage, StoredForm, Usage};

use super::branch::{Branch, BranchPoint};
use super::layout::{GroupCount, code_words};
use super::spec::QuantParams;
use super::tensors::{
    ActivationAmaxesMetadata, AmaxPairMetadata, BothStoragesMetadata, GemmGroupsMetadata,
    MaybeTensorMetadata, Named, OperandMetadata, QuantUsages, QuantizedDataMetadata,
    QuantizedMatrixMetadata, QuantizedPairMetadata, RowGroupsMetadata, UnpermuteGradientsMetadata,
};

pub(super) fn quantize(
    x: &TensorSpec,
    groups: &RowGroupsMetadata,
    usages: &QuantUsages,
) -> QuantizedPairMetadata {
    let (groups, shape) = (groups.count(), (x.shape[0], x.shape[1]));
    let tensor = |made: Option<(QuantParams, StoredForm)>, usage| {
        made.map(|(params, form)| quantized(groups, groups.layout(shape, usage, &params, form)))
    };
    let rowwise = tensor(usages.rowwise, Usage::Rowwise);
    match (rowwise, tensor(usages.columnwise, Usage::Columnwise)) {
        (Some(rowwise), Some(columnwise)) => QuantizedPairMetadata::Both(rowwise, columnwise),
        (Some(rowwise), None) => QuantizedPairMetadata::Rowwise(rowwise),
        (None, Some(columnwise)) => QuantizedPairMetadata::Columnwise(columnwise),
        (None, None) => unreachable!("one usage at least"),
    }
}

pub(super) fn amax(x: &TensorSpec, params: &QuantParams, usage: &Usage) -> TensorSpec {
    let (groups, shape) = (GroupCount::Whole, (x.shape[0], x.shape[1]));
    let layout = groups.layout(shape, *usage, params, StoredForm::ROWS);
    TensorSpec::new(Shape::new([groups.amax_len(&layout)]), DType::F32)
}

pub(super) fn amax_pair(
    _x: &TensorSpec,
    _rowwise: &QuantParams,
    _columnwise: &QuantParams,
) -> AmaxPairMetadata {
    let one = || TensorSpec::new(Shape::new([1]), DType::F32);
    AmaxPairMetadata {
        rowwise: one(),
        columnwise: one(),
    }
}

pub(super) fn activation_amaxes(
    x: &TensorSpec,
    grad: &MaybeTensorMetadata,
    activation: &Activation,
    rowwise: &QuantParams,
    columnwise: &QuantParams,
) -> ActivationAmaxesMetadata {
    ActivationAmaxesMetadata {
        values: activated(x, grad, activation),
        amax: amax_pair(x, rowwise, columnwise),
    }
}

pub(super) fn quantize_with_amax(
    x: &TensorSpec,
    _rowwise_amax: &MaybeTensorMetadata,
    _columnwise_amax: &MaybeTensorMetadata,
    usages: &QuantUsages,
) -> QuantizedPairMetadata {
    quantize(x, &RowGroupsMetadata::Whole, usages)
}

pub(super) fn quantize_with_entry(
    x: &TensorSpec,
    _maxima: &TensorSpec,
    _entry: &usize,
    usages: &QuantUsages,
) -> QuantizedPairMetadata {
    quantize(x, &RowGroupsMetadata::Whole, usages)
}

pub(super) fn quantize_activation(
    x: &TensorSpec,
    grad: &MaybeTensorMetadata,
    groups: &RowGroupsMetadata,
    activation: &Activation,
    usages: &QuantUsages,
) -> QuantizedPairMetadata {
    quantize(&activated(x, grad, activation), groups, usages)
}

pub(super) fn quantize_in_both_storages(
    x: &TensorSpec,
    activation: &Option<Activation>,
    params: &QuantParams,
) -> BothStoragesMetadata {
    let cols = x.shape[1] / activation.map_or(1, Activation::inputs);
    let groups = GroupCount::Whole;
    let tensor = |form| {
        let layout = groups.layout((x.shape[0], cols), Usage::Rowwise, params, form);
        quantized(groups, layout)
    };
    BothStoragesMetadata {
        packed: tensor(StoredForm::ROWS),
        unscaled: tensor(StoredForm::Bf16Unscaled),
    }
}

/// Returns the specification of an activation, or of its gradient.
fn activated(x: &TensorSpec, grad: &MaybeTensorMetadata, activation: &Activation) -> TensorSpec {
    let cols = match grad {
        MaybeTensorMetadata::Absent => x.shape[1] / activation.inputs(),
        MaybeTensorMetadata::Present(_) => x.shape[1],
    };
    TensorSpec::new(Shape::new([x.shape[0], cols]), x.dtype)
}

pub(super) fn requantize(
    source: &QuantizedMatrixMetadata,
    groups: &RowGroupsMetadata,
    usage: &Usage,
    params: &QuantParams,
    form: &StoredForm,
    _via: &FloatDType,
) -> QuantizedMatrixMetadata {
    let (groups, shape) = (groups.count(), (source.layout.rows, source.layout.cols));
    quantized(groups, groups.layout(shape, *usage, params, *form))
}

pub(super) fn in_form(
    source: &QuantizedMatrixMetadata,
    groups: &RowGroupsMetadata,
    form: &StoredForm,
) -> QuantizedMatrixMetadata {
    quantized(groups.count(), source.layout.in_form(*form))
}

pub(super) fn dequantize(
    source: &QuantizedMatrixMetadata,
    _groups: &RowGroupsMetadata,
    dtype: &FloatDType,
) -> TensorSpec {
    let Layout { rows, cols, .. } = source.layout;
    TensorSpec::new(Shape::new([rows, cols]), (*dtype).into())
}

pub(super) fn branch(
    operand: &OperandMetadata,
    _branch: &Branch,
    _point: &BranchPoint,
) -> OperandMetadata {
    operand.clone()
}

pub(super) fn gemm(
    a: &OperandMetadata,
    b: &OperandMetadata,
    _bias: &MaybeTensorMetadata,
    groups: &GemmGroupsMetadata,
    dtype: &FloatDType,
) -> TensorSpec {
    let (m, n) = (outer(a), outer(b));
    let count = |offsets: &TensorSpec| offsets.shape[0] - 1;
    let shape = match (groups, b) {
        (GemmGroupsMetadata::None, _) => Shape::new([m, n]),
        // The matrices are stacked along the K dimension.
        (
            GemmGroupsMetadata::M { .. },
            OperandMetadata::Float(_, Usage::Columnwise) | OperandMetadata::QuantizedMnMajor(_),
        ) => Shape::new([m, n]),
        (GemmGroupsMetadata::M { offsets, .. }, _) => Shape::new([m, n / count(offsets)]),
        (GemmGroupsMetadata::K { offsets, .. }, _) => Shape::new([count(offsets), m, n]),
    };
    TensorSpec::new(shape, (*dtype).into())
}

pub(super) fn broadcast_group_values(
    _values: &TensorSpec,
    _offsets: &TensorSpec,
    rows: &usize,
) -> TensorSpec {
    TensorSpec::new(Shape::new([*rows]), DType::F32)
}

pub(super) fn segment_sum(x: &TensorSpec, offsets: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([offsets.shape[0] - 1, x.shape[1]]), DType::F32)
}

pub(super) fn sum_rows(
    x: &TensorSpec,
    _weights: &MaybeTensorMetadata,
    places: &TensorSpec,
    _named: &Named,
) -> TensorSpec {
    TensorSpec::new(Shape::new([places.shape[0], x.shape[1]]), x.dtype)
}

pub(super) fn named_rows(x: &TensorSpec, numbers: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([numbers.shape[0], x.shape[1]]), x.dtype)
}

pub(super) fn activation_of_groups(
    x: &TensorSpec,
    grad: &MaybeTensorMetadata,
    _groups: &RowGroupsMetadata,
    activation: &Activation,
) -> TensorSpec {
    activated(x, grad, activation)
}

pub(super) fn moe_unpermute_backward(
    _dout: &TensorSpec,
    y: &TensorSpec,
    weights: &TensorSpec,
    _places: &TensorSpec,
    _choices: &TensorSpec,
    _named: &Named,
) -> UnpermuteGradientsMetadata {
    UnpermuteGradientsMetadata {
        rows: TensorSpec::new(y.shape.clone(), y.dtype),
        weights: TensorSpec::new(weights.shape.clone(), DType::F32),
    }
}

/// Returns the number of output rows or columns of an operand.
fn outer(operand: &OperandMetadata) -> usize {
    match operand {
        OperandMetadata::Quantized(quantized) => quantized.layout.outer(),
        OperandMetadata::QuantizedMnMajor(quantized) => quantized.layout.inner(),
        OperandMetadata::Float(tensor, usage) => {
            usage.stored_shape(tensor.shape[0], tensor.shape[1]).0
        }
    }
}

/// Returns a quantized matrix of this layout.
pub(super) fn quantized(groups: GroupCount, layout: Layout) -> QuantizedMatrixMetadata {
    let outer = layout.outer();
    let data = match layout.storage {
        Storage::Packed => {
            let (width, dtype) = code_words(&layout);
            QuantizedDataMetadata::Packed {
                codes: TensorSpec::new(Shape::new([outer, width]), dtype),
                scales: TensorSpec::new(Shape::new(groups.scale_shape(&layout)), DType::U8),
            }
        }
        Storage::Bf16Unscaled => {
            let shape = Shape::new([outer, layout.padded_inner()]);
            QuantizedDataMetadata::Bf16Unscaled(TensorSpec::new(shape, DType::BF16))
        }
    };
    let amax = match layout.format.has_global_scale() {
        true => {
            let shape = Shape::new([groups.amax_len(&layout)]);
            MaybeTensorMetadata::Present(TensorSpec::new(shape, DType::F32))
        }
        false => MaybeTensorMetadata::Absent,
    };
    QuantizedMatrixMetadata { data, amax, layout }
}
