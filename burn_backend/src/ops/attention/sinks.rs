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

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape};

use super::spec::AttentionSpec;
use super::tensors::AttentionForward;
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
pub(super) fn by_head<B: Backend>(x: FloatTensor<B>, spec: AttentionSpec) -> FloatTensor<B> {
    let tokens = x.shape()[0];
    let x = cast::<B>(x, FloatDType::F32);
    B::float_reshape(x, Shape::new([tokens, spec.heads, spec.head]))
}
