//! Attention sinks: a logit per head that joins the softmax of every row and has no value.
//!
//! Let `l` be the log-sum-exp of a row's scores, `s` the sink of its head and `d = l - s`. The keys
//! keep the share `sigmoid(d)` of the weight, and the sink gets `sigmoid(-d)`. The output is
//! therefore that of plain attention times `sigmoid(d)`, and the log-sum-exp with the sink is
//! `s + max(d, 0) + ln(1 + exp(-|d|))`.
//!
//! The backward of plain attention computes the weights as `exp(score - lse)`, and the gradient of
//! a score as its weight times `dout · v - dout · out`. With the output and the log-sum-exp that
//! include the sink, both formulas hold with a sink, so the same kernels compute the gradients of
//! queries, keys and values. The gradient of a sink is the sum over its rows of
//! `-sigmoid(-d) (dout · out)`.

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

use super::autodiff::{Saved, register};
use super::{
    AttentionForward, AttentionInputs, AttentionOps, AttentionRope, AttentionSequences,
    AttentionSpec,
};
use crate::ops::dtype::{cast, float_dtype};

/// Lower bound of log-sum-exps: that of a row without keys is negative infinity.
const LOWEST: f32 = -1e30;

/// Adds `sinks`, a float tensor of `spec.heads` elements, to the results of plain attention.
/// Returns the new results, and the weight of the sink, `f32[heads, q_tokens]`.
pub(super) fn apply<B: Backend>(
    forward: AttentionForward<B>,
    sinks: FloatTensor<B>,
    spec: AttentionSpec,
) -> (AttentionForward<B>, FloatTensor<B>) {
    let AttentionForward { inputs, out, lse } = forward;
    let tokens = out.shape()[0];
    let column = Shape::new([spec.heads, 1]);
    let sinks = B::float_reshape(cast::<B>(sinks, FloatDType::F32), column);
    let sinks = B::float_expand(sinks, Shape::new([spec.heads, tokens]));
    let difference = B::float_sub(B::float_clamp_min(lse, LOWEST.into()), sinks.clone());
    let exponential = B::float_exp(B::float_neg(B::float_abs(difference.clone())));
    let lse = B::float_add(
        B::float_add(sinks, B::relu(difference.clone())),
        B::float_log1p(exponential),
    );
    let weight = B::sigmoid(B::float_neg(difference.clone()));
    let kept = B::float_swap_dims(B::sigmoid(difference), 0, 1);
    let kept = B::float_reshape(kept, Shape::new([tokens, spec.heads, 1]));
    let (dtype, shape) = (float_dtype(out.dtype()), out.shape());
    let scaled = B::float_mul(by_head::<B>(out, spec), kept);
    let out = cast::<B>(B::float_reshape(scaled, shape), dtype);
    (AttentionForward { inputs, out, lse }, weight)
}

/// Reshapes `[q_tokens, heads * head]` to `f32[q_tokens, heads, head]`.
fn by_head<B: Backend>(x: FloatTensor<B>, spec: AttentionSpec) -> FloatTensor<B> {
    let tokens = x.shape()[0];
    let x = cast::<B>(x, FloatDType::F32);
    B::float_reshape(x, Shape::new([tokens, spec.heads, spec.head]))
}

/// Tensors saved for the backward.
#[derive(Clone, Debug)]
pub(super) struct SavedSinks<B: Backend> {
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
