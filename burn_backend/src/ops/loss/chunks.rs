//! Output head and its cross entropy, in chunks of tokens, with backend-independent operations.

use burn_core::backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape, Slice};
use nvfp4_formats::{CrossEntropy, Reduction, Usage};

use super::super::dtype::cast;
use super::super::{GemmGroups, MaybeTensor, Operand, float_dtype};
use super::{LinearKl, LinearLoss, LinearLossRequest, LossAndGradient, LossOps};

/// Implements [`linear_cross_entropy_gradients`](LossOps::linear_cross_entropy_gradients) in chunks
/// of `most` rows, with each chunk's loss as a sum. `counted` is the final factor of losses and
/// gradients, for a mean.
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
    let rows = x.shape()[0];
    let head = ChunkedHead::new(x, w, request);
    let params = CrossEntropy {
        reduction: Reduction::Sum,
        ..params
    };
    let mut found = HeadSums::default();
    for start in (0..rows).step_by(most.max(1)) {
        let range = Slice::from(start..rows.min(start + most));
        let targets = B::int_slice(targets.clone(), &[range]);
        let (part, logits) = head.logits(range);
        if request.x || request.w {
            let LossAndGradient { loss, gradient } =
                B::cross_entropy_gradient(logits, targets, params);
            // Before the GEMMs: a mean's gradients are small, but their sums need not be.
            let gradient = B::scale_gradient(gradient, counted.clone());
            found.add(&head, loss, Some((part, gradient)));
        } else {
            found.add(&head, B::cross_entropy_loss(logits, targets, params), None);
        }
    }
    let found = found.of(&head);
    LinearLoss {
        loss: B::scale_gradient(found.loss, counted),
        ..found
    }
}

/// Implements [`linear_kl_gradients`](LossOps::linear_kl_gradients) in chunks of `most` rows.
#[cfg_attr(
    not(any(feature = "flex", feature = "cpu", feature = "cuda")),
    allow(dead_code)
)]
pub(super) fn linear_kl<B: LossOps>(
    [x, w]: [FloatTensor<B>; 2],
    [teacher_x, teacher_w]: [FloatTensor<B>; 2],
    targets: IntTensor<B>,
    scale: FloatTensor<B>,
    request: LinearKl,
    most: usize,
) -> LinearLoss<B> {
    let rows = x.shape()[0];
    let nothing = LinearLossRequest {
        x: false,
        w: false,
        ..request.gradients
    };
    let teacher_x = cast::<B>(teacher_x, float_dtype(x.dtype()));
    let head = ChunkedHead::<B>::new(x, w, request.gradients);
    let teacher = ChunkedHead::<B>::new(teacher_x, teacher_w, nothing);
    let mut found = HeadSums::default();
    for start in (0..rows).step_by(most.max(1)) {
        let range = Slice::from(start..rows.min(start + most));
        let targets = B::int_slice(targets.clone(), &[range]);
        let (part, own) = head.logits(range);
        let (_, other) = teacher.logits(range);
        let LossAndGradient { loss, gradient } =
            B::kl_divergence_gradient(own, other, targets, scale.clone(), request.params);
        found.add(&head, loss, Some((part, gradient)));
    }
    found.of(&head)
}

/// Features and weight of an output head.
pub(super) struct ChunkedHead<B: LossOps> {
    x: FloatTensor<B>,
    /// Weight in the dtype of `x`.
    w: FloatTensor<B>,
    /// Dtype of the weight's gradient.
    w_dtype: FloatDType,
    request: LinearLossRequest,
}

impl<B: LossOps> ChunkedHead<B> {
    pub(super) fn new(x: FloatTensor<B>, w: FloatTensor<B>, request: LinearLossRequest) -> Self {
        let w_dtype = float_dtype(w.dtype());
        let w = cast::<B>(w, float_dtype(x.dtype()));
        Self {
            x,
            w,
            w_dtype,
            request,
        }
    }

    /// Returns the dtype of the features and of the logits.
    pub(super) fn dtype(&self) -> FloatDType {
        float_dtype(self.x.dtype())
    }

    fn gemm(a: Operand<B>, b: Operand<B>, dtype: FloatDType) -> FloatTensor<B> {
        B::nvfp4_gemm(a, b, MaybeTensor::Absent, GemmGroups::None, dtype)
    }

    /// Returns features and logits of some rows.
    pub(super) fn logits(&self, rows: Slice) -> (FloatTensor<B>, FloatTensor<B>) {
        let all = Slice::from(0..self.x.shape()[1]);
        let part = B::float_slice(self.x.clone(), &[rows, all]);
        let a = Operand::Float(part.clone(), Usage::Rowwise);
        let b = Operand::Float(self.w.clone(), Usage::Columnwise);
        (part, Self::gemm(a, b, self.dtype()))
    }
}

/// Accumulated results of chunks.
pub(super) struct HeadSums<B: LossOps> {
    loss: Option<FloatTensor<B>>,
    dx: Vec<FloatTensor<B>>,
    dw: Option<FloatTensor<B>>,
}

impl<B: LossOps> Default for HeadSums<B> {
    fn default() -> Self {
        Self {
            loss: None,
            dx: Vec::new(),
            dw: None,
        }
    }
}

impl<B: LossOps> HeadSums<B> {
    /// Adds the loss of a chunk, and the gradients from its features and the gradient of its
    /// logits.
    pub(super) fn add(
        &mut self,
        head: &ChunkedHead<B>,
        loss: FloatTensor<B>,
        chunk: Option<(FloatTensor<B>, FloatTensor<B>)>,
    ) {
        let sum = |sum: Option<FloatTensor<B>>, more| match sum {
            Some(sum) => B::float_add(sum, more),
            None => more,
        };
        self.loss = Some(sum(self.loss.take(), loss));
        let Some((part, gradient)) = chunk else {
            return;
        };
        if head.request.x {
            let a = Operand::Float(gradient.clone(), Usage::Rowwise);
            let b = Operand::Float(head.w.clone(), Usage::Rowwise);
            self.dx.push(ChunkedHead::<B>::gemm(a, b, head.dtype()));
        }
        if head.request.w {
            let a = Operand::Float(part, Usage::Columnwise);
            let b = Operand::Float(gradient, Usage::Columnwise);
            let more = ChunkedHead::<B>::gemm(a, b, FloatDType::F32);
            self.dw = Some(sum(self.dw.take(), more));
        }
    }

    /// Returns the results; zeros if there was no chunk.
    pub(super) fn of(mut self, head: &ChunkedHead<B>) -> LinearLoss<B> {
        let (d, vocab) = (head.x.shape()[1], head.w.shape()[1]);
        let device = head.x.device();
        let zeros = |shape: &[usize], dtype| B::float_zeros(Shape::from(shape), &device, dtype);
        let dx = head.request.x.then(|| match self.dx.len() {
            0 => zeros(&[0, d], head.dtype()),
            1 => self.dx.pop().expect("one"),
            _ => B::float_cat(self.dx, 0),
        });
        let dw = head.request.w.then(|| {
            let dw = self
                .dw
                .unwrap_or_else(|| zeros(&[d, vocab], FloatDType::F32));
            cast::<B>(dw, head.w_dtype)
        });
        LinearLoss {
            loss: self.loss.unwrap_or_else(|| zeros(&[1], FloatDType::F32)),
            dx: dx.into(),
            dw: dw.into(),
        }
    }
}
