//! Backwards of [`cross_entropy`](LossOps::cross_entropy),
//! [`linear_cross_entropy`](LossOps::linear_cross_entropy) and
//! [`embedding_rows`](LossOps::embedding_rows).

use burn_core::backend::{
    Autodiff, AutodiffBackend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Scalar};

use super::super::dtype::cast;
use super::super::{MaybeTensor, float_dtype};
use super::{
    CrossEntropy, KlDivergence, LinearKl, LinearLoss, LinearLossRequest, LossAndGradient, LossOps,
    TablePart,
};

/// Cross entropy, with its gradient as state: parents `[logits]`.
#[derive(Debug)]
struct CrossEntropyStep;

impl<B: LossOps> Backward<B, 1> for CrossEntropyStep {
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let factor = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::scale_gradient(ops.state, factor));
        }
    }
}

/// Gradients of an output head.
#[derive(Clone, Debug)]
struct HeadGradients<B: LossOps> {
    dx: MaybeTensor<B>,
    dw: MaybeTensor<B>,
}

/// Output head with its loss, with its gradients as state: parents `[x, w]`.
#[derive(Debug)]
struct LinearLossStep;

impl<B: LossOps> Backward<B, 2> for LinearLossStep {
    type State = HeadGradients<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let factor = grads.consume::<B>(&ops.node);
        let HeadGradients { dx, dw } = ops.state;
        for (node, gradient) in ops.parents.into_iter().zip([dx, dw]) {
            if let Some((node, gradient)) = node.zip(gradient.into_option()) {
                let scaled = B::scale_gradient(gradient, factor.clone());
                grads.register::<B>(node.id, scaled);
            }
        }
    }
}

/// State saved for the backward of an embedding.
#[derive(Clone, Debug)]
struct SavedEmbedding<B: LossOps> {
    ids: IntTensor<B>,
    /// Index of the first row.
    first: usize,
    rows: usize,
    dtype: FloatDType,
}

/// Embedding lookup: parents `[table]`.
#[derive(Debug)]
struct EmbeddingStep;

impl<B: LossOps> Backward<B, 1> for EmbeddingStep {
    type State = SavedEmbedding<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let SavedEmbedding {
            ids,
            first,
            rows,
            dtype,
        } = ops.state;
        if let [Some(node)] = ops.parents {
            let ids = match first {
                0 => ids,
                first => B::int_sub_scalar(ids, Scalar::from(first as i64)),
            };
            let gradient = B::embedding_gradient(dy, ids, rows);
            grads.register::<B>(node.id, cast::<B>(gradient, dtype));
        }
    }
}

impl<B: LossOps, C: CheckpointStrategy> LossOps for Autodiff<B, C> {
    fn cross_entropy_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        let loss = B::cross_entropy_loss(logits.into_primitive(), targets, params);
        Self::from_inner(loss)
    }

    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> LossAndGradient<Self> {
        let found = B::cross_entropy_gradient(logits.into_primitive(), targets, params);
        LossAndGradient {
            loss: Self::from_inner(found.loss),
            gradient: Self::from_inner(found.gradient),
        }
    }

    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        // The guard keeps the parent alive until the step is registered.
        let (logits, node) = logits.into_parts();
        match CrossEntropyStep
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let found = B::cross_entropy_gradient(logits, targets, params);
                prep.finish(found.gradient, found.loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::cross_entropy_loss(logits, targets, params)),
        }
    }

    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        request: LinearLossRequest,
    ) -> LinearLoss<Self> {
        let (x, w) = (x.into_primitive(), w.into_primitive());
        constants(B::linear_cross_entropy_gradients(
            x, w, targets, params, request,
        ))
    }

    fn linear_cross_entropy(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        chunk_bytes: usize,
    ) -> FloatTensor<Self> {
        let request = LinearLossRequest {
            x: x.is_tracked(),
            w: w.is_tracked(),
            chunk_bytes,
        };
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        let step = LinearLossStep.prepare::<C>([x_node, w_node]);
        let LinearLoss { loss, dx, dw } =
            B::linear_cross_entropy_gradients(x, w, targets, params, request);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(HeadGradients { dx, dw }, loss),
            OpsKind::UnTracked(prep) => prep.finish(loss),
        }
    }

    fn kl_divergence_gradient(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        params: KlDivergence,
    ) -> LossAndGradient<Self> {
        let [student, teacher, scale] = [student, teacher, scale].map(|it| it.into_primitive());
        let found = B::kl_divergence_gradient(student, teacher, targets, scale, params);
        LossAndGradient {
            loss: Self::from_inner(found.loss),
            gradient: Self::from_inner(found.gradient),
        }
    }

    fn linear_kl_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        teacher_x: FloatTensor<Self>,
        teacher_w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        request: LinearKl,
    ) -> LinearLoss<Self> {
        let [x, w, teacher_x, teacher_w, scale] =
            [x, w, teacher_x, teacher_w, scale].map(|it| it.into_primitive());
        constants(B::linear_kl_gradients(
            x, w, teacher_x, teacher_w, targets, scale, request,
        ))
    }

    fn linear_kl_divergence(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        teacher_x: FloatTensor<Self>,
        teacher_w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        request: LinearKl,
    ) -> FloatTensor<Self> {
        let request = LinearKl {
            gradients: LinearLossRequest {
                x: x.is_tracked(),
                w: w.is_tracked(),
                ..request.gradients
            },
            ..request
        };
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        let [teacher_x, teacher_w, scale] =
            [teacher_x, teacher_w, scale].map(|it| it.into_primitive());
        let step = LinearLossStep.prepare::<C>([x_node, w_node]);
        let LinearLoss { loss, dx, dw } =
            B::linear_kl_gradients(x, w, teacher_x, teacher_w, targets, scale, request);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(HeadGradients { dx, dw }, loss),
            OpsKind::UnTracked(prep) => prep.finish(loss),
        }
    }

    fn loss_with_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        loss: FloatTensor<Self>,
        dx: MaybeTensor<Self>,
        dw: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let (_x, x_node) = x.into_parts();
        let (_w, w_node) = w.into_parts();
        let inner = |tensor: MaybeTensor<Self>| -> MaybeTensor<B> {
            tensor.into_option().map(|it| it.into_primitive()).into()
        };
        let (dx, dw) = (inner(dx), inner(dw));
        let loss = loss.into_primitive();
        let step = LinearLossStep.prepare::<C>([x_node, w_node]);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(HeadGradients { dx, dw }, loss),
            OpsKind::UnTracked(prep) => prep.finish(loss),
        }
    }

    fn scale_gradient(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, factor) = (x.into_primitive(), factor.into_primitive());
        Self::from_inner(B::scale_gradient(x, factor))
    }

    fn embedding_rows(
        table: FloatTensor<Self>,
        part: TablePart,
        ids: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (table, node) = table.into_parts();
        match EmbeddingStep
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let saved = SavedEmbedding {
                    ids: ids.clone(),
                    first: part.first,
                    rows: table.shape()[0],
                    dtype: float_dtype(table.dtype()),
                };
                prep.finish(saved, B::embedding_rows(table, part, ids, dtype))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::embedding_rows(table, part, ids, dtype)),
        }
    }

    fn embedding_gradient(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab: usize,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::embedding_gradient(dy.into_primitive(), ids, vocab))
    }
}

fn constants<B: LossOps, C: CheckpointStrategy>(
    found: LinearLoss<B>,
) -> LinearLoss<Autodiff<B, C>> {
    let outer = |tensor: MaybeTensor<B>| -> MaybeTensor<Autodiff<B, C>> {
        tensor
            .into_option()
            .map(Autodiff::<B, C>::from_inner)
            .into()
    };
    LinearLoss {
        loss: Autodiff::<B, C>::from_inner(found.loss),
        dx: outer(found.dx),
        dw: outer(found.dw),
    }
}
