//! Backward of attention with sinks; [`sinks`](super::sinks) has the formulas.

use burn_core::backend::{
    Autodiff, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn_core::tensor::{FloatDType, Shape};

use super::saved::{Saved, register};
use super::sinks::{apply, by_head};
use super::{AttentionInputs, AttentionOps, AttentionRope, AttentionSequences, AttentionSpec};
use crate::ops::dtype::{cast, float_dtype};

/// Tensors saved for the backward.
#[derive(Clone, Debug)]
struct SavedSinks<B: Backend> {
    attention: Saved<B>,
    /// Weight of the sink, `f32[heads, q_tokens]`.
    weight: FloatTensor<B>,
    /// Type of the sinks.
    dtype: FloatDType,
}

impl<B: AttentionOps> SavedSinks<B> {
    /// Returns the gradients of the inputs and of the sinks.
    fn backward(self, dout: FloatTensor<B>) -> (AttentionInputs<B>, FloatTensor<B>) {
        let spec = self.attention.spec;
        let out = by_head::<B>(self.attention.forward.out.clone(), spec);
        let tokens = out.shape()[0];
        let products = B::float_mul(by_head::<B>(dout.clone(), spec), out);
        let products = B::float_sum_dim(products, 2);
        let products = B::float_reshape(products, Shape::new([tokens, spec.heads]));
        let by_row = B::float_mul(B::float_swap_dims(products, 0, 1), self.weight);
        let sums = B::float_reshape(B::float_sum_dim(by_row, 1), Shape::new([spec.heads]));
        let dsinks = cast::<B>(B::float_neg(sums), self.dtype);
        (self.attention.backward(dout), dsinks)
    }
}

/// Attention of three tensors: parents `[q, k, v, sinks]`.
#[derive(Debug)]
struct Separate;

impl<B: AttentionOps> Backward<B, 4> for Separate {
    type State = SavedSinks<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        if let (AttentionInputs::Separate { q, k, v }, sinks) = ops.state.backward(dout) {
            register::<B, 4>(nodes, [q, k, v, sinks], grads);
        }
    }
}

/// Attention of one fused matrix: parents `[qkv, sinks]`.
#[derive(Debug)]
struct Fused;

impl<B: AttentionOps> Backward<B, 2> for Fused {
    type State = SavedSinks<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        if let (AttentionInputs::Qkv(qkv), sinks) = ops.state.backward(dout) {
            register::<B, 2>(nodes, [qkv, sinks], grads);
        }
    }
}

/// Differentiable attention with sinks. `sequences` and `rope` are those of the inner backend.
pub(super) fn attention<B: AttentionOps, C: CheckpointStrategy>(
    inputs: AttentionInputs<Autodiff<B, C>>,
    sequences: AttentionSequences<B>,
    rope: AttentionRope<B>,
    sinks: FloatTensor<Autodiff<B, C>>,
    spec: AttentionSpec,
) -> FloatTensor<Autodiff<B, C>> {
    let (sinks, sinks_node) = sinks.into_parts();
    let run = |inputs| {
        let dtype = float_dtype(sinks.dtype());
        let forward = B::nvfp4_attention_forward(inputs, sequences.clone(), rope.clone(), spec);
        let (forward, weight) = apply::<B>(forward, sinks, spec);
        let out = forward.out.clone();
        let attention = Saved {
            forward,
            sequences,
            rope,
            spec,
        };
        let saved = SavedSinks {
            attention,
            weight,
            dtype,
        };
        (saved, out)
    };
    match inputs {
        AttentionInputs::Separate { q, k, v } => {
            let ((q, q_node), (k, k_node)) = (q.into_parts(), k.into_parts());
            let (v, v_node) = v.into_parts();
            let step = Separate.prepare::<C>([q_node, k_node, v_node, sinks_node]);
            let (saved, out) = run(AttentionInputs::Separate { q, k, v });
            match step.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish(saved, out),
                OpsKind::UnTracked(prep) => prep.finish(out),
            }
        }
        AttentionInputs::Qkv(qkv) => {
            let (qkv, node) = qkv.into_parts();
            let step = Fused.prepare::<C>([node, sinks_node]);
            let (saved, out) = run(AttentionInputs::Qkv(qkv));
            match step.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish(saved, out),
                OpsKind::UnTracked(prep) => prep.finish(out),
            }
        }
    }
}
