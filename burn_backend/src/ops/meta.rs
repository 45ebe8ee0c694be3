//! Shapes and dtypes of the results, which Fusion needs before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::{DType, FloatDType, Shape};
use nvfp4_formats::reference::Activation;
use nvfp4_formats::{Layout, StoredForm, Usage};

use super::branch::{Branch, BranchPoint};
use super::layout::{GroupCount, code_words};
use super::spec::QuantParams;
use super::tensors::{
    ComputedAmaxMetadata, GatherSpec, GemmGroupsMetadata, MaybeTensorMetadata, Named,
    OperandMetadata, QuantizeRequestMetadata, QuantizeSourceMetadata, QuantizedDataMetadata,
    QuantizedMatrixMetadata, QuantizedPairMetadata, RowGroupsMetadata, UnpermuteGradientsMetadata,
};

pub(super) fn quantize(request: &QuantizeRequestMetadata) -> QuantizedPairMetadata {
    let (groups, shape) = (request.groups.count(), shape_of(&request.source));
    let tensor = |params: &QuantParams, form, usage| {
        quantized(groups, groups.layout(shape, usage, params, form))
    };
    let made = |made: Option<(QuantParams, StoredForm)>, usage| {
        made.map(|(params, form)| tensor(&params, form, usage))
    };
    let row = made(request.rowwise, Usage::Rowwise);
    let col = made(request.columnwise, Usage::Columnwise);
    match (row, col, &request.rowwise) {
        (Some(packed), None, Some((params, _))) if request.unscaled => {
            QuantizedPairMetadata::BothStorages {
                packed,
                unscaled: tensor(params, StoredForm::Bf16Unscaled, Usage::Rowwise),
            }
        }
        (Some(rowwise), Some(columnwise), _) => QuantizedPairMetadata::Both(rowwise, columnwise),
        (Some(rowwise), None, _) => QuantizedPairMetadata::Rowwise(rowwise),
        (None, Some(columnwise), _) => QuantizedPairMetadata::Columnwise(columnwise),
        (None, None, _) => unreachable!("one usage at least"),
    }
}

pub(super) fn amax(request: &QuantizeRequestMetadata) -> ComputedAmaxMetadata {
    let (groups, shape) = (request.groups.count(), shape_of(&request.source));
    let amax = |made: Option<(QuantParams, StoredForm)>, usage| match made {
        Some((params, _)) if params.format.has_global_scale() => {
            let layout = groups.layout(shape, usage, &params, StoredForm::Rows);
            let shape = Shape::new([groups.amax_len(&layout)]);
            MaybeTensorMetadata::Present(TensorSpec::new(shape, DType::F32))
        }
        _ => MaybeTensorMetadata::Absent,
    };
    ComputedAmaxMetadata {
        values: match &request.source {
            QuantizeSourceMetadata::Activation {
                x,
                grad,
                activation,
            } => MaybeTensorMetadata::Present(activated(x, grad, activation)),
            _ => MaybeTensorMetadata::Absent,
        },
        rowwise: amax(request.rowwise, Usage::Rowwise),
        columnwise: amax(request.columnwise, Usage::Columnwise),
    }
}

/// Returns the rows and columns of the values of a source.
fn shape_of(source: &QuantizeSourceMetadata) -> (usize, usize) {
    match source {
        QuantizeSourceMetadata::Matrix(x) => (x.shape[0], x.shape[1]),
        QuantizeSourceMetadata::Activation {
            x,
            grad,
            activation,
        } => {
            let values = activated(x, grad, activation);
            (values.shape[0], values.shape[1])
        }
        QuantizeSourceMetadata::Quantized { tensor, .. } => {
            (tensor.layout.rows, tensor.layout.cols)
        }
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

pub(super) fn add_gemm(
    added: &TensorSpec,
    _a: &OperandMetadata,
    _b: &OperandMetadata,
) -> TensorSpec {
    TensorSpec::new(added.shape.clone(), added.dtype)
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

pub(super) fn column_sums(x: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([x.shape[1]]), DType::F32)
}

pub(super) fn sum_rows(
    x: &TensorSpec,
    _weights: &MaybeTensorMetadata,
    places: &TensorSpec,
    _named: &Named,
) -> TensorSpec {
    TensorSpec::new(Shape::new([places.shape[0], x.shape[1]]), x.dtype)
}

pub(super) fn gather_rows(
    x: &TensorSpec,
    numbers: &TensorSpec,
    _groups: &RowGroupsMetadata,
    _spec: &GatherSpec,
) -> TensorSpec {
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
    let data = match layout.form.is_packed() {
        true => {
            let (width, dtype) = code_words(&layout);
            QuantizedDataMetadata::Packed {
                codes: TensorSpec::new(Shape::new([outer, width]), dtype),
                scales: TensorSpec::new(Shape::new(groups.scale_shape(&layout)), DType::U8),
            }
        }
        false => {
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
