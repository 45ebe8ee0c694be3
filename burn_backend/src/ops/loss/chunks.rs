//! A head and its cross entropy, a chunk of tokens at a time, with the operations that every
//! backend has.

use burn_core::backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape, Slice};
use nvfp4_kernels::{CrossEntropy, Reduction, Usage};

use super::super::dtype::cast;
use super::super::{GemmGroups, MaybeTensor, Operand, float_dtype};
use super::{LinearLoss, LinearLossRequest, LossAndGradient, LossOps};

/// [`linear_cross_entropy_gradients`](LossOps::linear_cross_entropy_gradients), each chunk's loss a
/// sum; `counted` is what losses and gradients are multiplied with at last, where the mean is asked
/// for. Chunks of `most` rows.
#[cfg_attr(
    not(any(feature = "flex", feature = "cpu", feature = "cuda")),
    allow(dead_code)
)]
pub(super) fn linear_cross_entropy<B: LossOps>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    targets: IntTensor<B>,
    params: CrossEntropy,
    request: LinearLossRequest,
    (most, counted): (usize, FloatTensor<B>),
) -> LinearLoss<B> {
    let (rows, d, vocab) = (x.shape()[0], x.shape()[1], w.shape()[1]);
    let (dtype, w_dtype) = (float_dtype(x.dtype()), float_dtype(w.dtype()));
    let device = x.device();
    let w = cast::<B>(w, dtype);
    let params = CrossEntropy {
        reduction: Reduction::Sum,
        ..params
    };
    let gemm = |a, b, dtype| B::nvfp4_gemm(a, b, MaybeTensor::Absent, GemmGroups::None, dtype);
    let (row, col) = (Usage::Rowwise, Usage::Columnwise);
    let mut loss: Option<FloatTensor<B>> = None;
    let mut dx = Vec::new();
    let mut dw: Option<FloatTensor<B>> = None;
    for start in (0..rows).step_by(most.max(1)) {
        let range = Slice::from(start..rows.min(start + most));
        let part = B::float_slice(x.clone(), &[range, Slice::from(0..d)]);
        let targets = B::int_slice(targets.clone(), &[range]);
        let logits = gemm(
            Operand::Float(part.clone(), row),
            Operand::Float(w.clone(), col),
            dtype,
        );
        let of_chunk = if request.x || request.w {
            let LossAndGradient { loss, gradient } =
                B::cross_entropy_gradient(logits, targets, params);
            // Before it is multiplied: a mean's gradients are small, sums of them may be less so.
            let gradient = B::scale_gradient(gradient, counted.clone());
            if request.x {
                dx.push(gemm(
                    Operand::Float(gradient.clone(), row),
                    Operand::Float(w.clone(), row),
                    dtype,
                ));
            }
            if request.w {
                let (a, b) = (Operand::Float(part, col), Operand::Float(gradient, col));
                let more = gemm(a, b, FloatDType::F32);
                dw = Some(match dw {
                    Some(dw) => B::float_add(dw, more),
                    None => more,
                });
            }
            loss
        } else {
            B::cross_entropy_loss(logits, targets, params)
        };
        loss = Some(match loss {
            Some(loss) => B::float_add(loss, of_chunk),
            None => of_chunk,
        });
    }
    let zeros = |shape, dtype| B::float_zeros(Shape::new(shape), &device, dtype);
    let dx = request.x.then(|| match dx.len() {
        0 => B::float_zeros(Shape::new([0, d]), &device, dtype),
        1 => dx.pop().expect("one"),
        _ => B::float_cat(dx, 0),
    });
    let dw = request.w.then(|| {
        let dw =
            dw.unwrap_or_else(|| B::float_zeros(Shape::new([d, vocab]), &device, FloatDType::F32));
        cast::<B>(dw, w_dtype)
    });
    let loss = loss.unwrap_or_else(|| zeros([1], FloatDType::F32));
    LinearLoss {
        loss: B::scale_gradient(loss, counted),
        dx: dx.into(),
        dw: dw.into(),
    }
}
