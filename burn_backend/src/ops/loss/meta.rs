//! Shapes and dtypes of the results, which Fusion needs before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::{DType, FloatDType, Shape};
use nvfp4_formats::{CrossEntropy, KlDivergence};

use super::{
    LinearKl, LinearLossMetadata, LinearLossRequest, LossAndGradientMetadata, MaybeTensorMetadata,
    TablePart,
};

pub(super) fn loss(
    _logits: &TensorSpec,
    _targets: &TensorSpec,
    _params: &CrossEntropy,
) -> TensorSpec {
    TensorSpec::new(Shape::new([1]), DType::F32)
}

pub(super) fn loss_and_gradient(
    logits: &TensorSpec,
    targets: &TensorSpec,
    params: &CrossEntropy,
) -> LossAndGradientMetadata {
    LossAndGradientMetadata {
        loss: loss(logits, targets, params),
        gradient: TensorSpec::new(logits.shape.clone(), logits.dtype),
    }
}

pub(super) fn divergence_and_gradient(
    student: &TensorSpec,
    _teacher: &TensorSpec,
    _targets: &TensorSpec,
    _scale: &TensorSpec,
    _params: &KlDivergence,
) -> LossAndGradientMetadata {
    LossAndGradientMetadata {
        loss: TensorSpec::new(Shape::new([1]), DType::F32),
        gradient: TensorSpec::new(student.shape.clone(), student.dtype),
    }
}

pub(super) fn linear_kl(
    x: &TensorSpec,
    w: &TensorSpec,
    _teacher_x: &TensorSpec,
    _teacher_w: &TensorSpec,
    targets: &TensorSpec,
    _scale: &TensorSpec,
    request: &LinearKl,
) -> LinearLossMetadata {
    let params = CrossEntropy::default();
    linear_loss(x, w, targets, &params, &request.gradients)
}

pub(super) fn linear_loss(
    x: &TensorSpec,
    w: &TensorSpec,
    _targets: &TensorSpec,
    _params: &CrossEntropy,
    request: &LinearLossRequest,
) -> LinearLossMetadata {
    let like = |wanted, of: &TensorSpec| match wanted {
        true => MaybeTensorMetadata::Present(TensorSpec::new(of.shape.clone(), of.dtype)),
        false => MaybeTensorMetadata::Absent,
    };
    LinearLossMetadata {
        loss: TensorSpec::new(Shape::new([1]), DType::F32),
        dx: like(request.x, x),
        dw: like(request.w, w),
    }
}

pub(super) fn scaled(x: &TensorSpec, _factor: &TensorSpec) -> TensorSpec {
    TensorSpec::new(x.shape.clone(), x.dtype)
}

pub(super) fn embedding(
    table: &TensorSpec,
    _part: &TablePart,
    ids: &TensorSpec,
    dtype: &FloatDType,
) -> TensorSpec {
    TensorSpec::new(Shape::new([ids.shape[0], table.shape[1]]), (*dtype).into())
}

pub(super) fn embedding_gradient(dy: &TensorSpec, _ids: &TensorSpec, vocab: &usize) -> TensorSpec {
    TensorSpec::new(Shape::new([*vocab, dy.shape[1]]), DType::F32)
}
