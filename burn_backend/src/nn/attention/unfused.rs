//! Attention by Burn's operations, for masks, dropout and heads that the kernels do not support.

use burn_core::tensor::activation::{quiet_softmax, softmax};
use burn_core::tensor::{Bool, Device, FloatDType, Int, Tensor};
use burn_nn::Dropout;

use crate::attention::AttentionParams;
use crate::nn::cast;

/// Attention that materializes its weights, one matrix of queries by keys per head.
#[derive(Debug, Clone)]
pub(in crate::nn) struct UnfusedAttention {
    /// Parameters of scores and softmax.
    pub params: AttentionParams,
    /// Score of a masked key.
    pub masked: f64,
    /// True where a key is padding, `[batch, keys]`; the batch may be 1.
    pub padding: Option<Tensor<2, Bool>>,
    /// True where a query must not see a key, `[batch, queries, keys]`; the first two may be 1.
    pub mask: Option<Tensor<3, Bool>>,
}

impl UnfusedAttention {
    /// Returns the mixed values and the attention weights after `dropout`, both in the dtype of
    /// `v`.
    ///
    /// # Shapes
    ///
    /// - `q`: `[batch, heads, queries, head]`
    /// - `k` and `v`: `[batch, heads, keys, head]`, of one dtype
    /// - mixed values: same as `q`
    /// - weights: `[batch, heads, queries, keys]`
    pub fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        dropout: Option<&Dropout>,
    ) -> (Tensor<4>, Tensor<4>) {
        let weights = self.weights(q, k);
        let weights = match dropout {
            Some(dropout) => dropout.forward(weights),
            None => weights,
        };
        let weights = cast(weights, v.dtype().into());
        (weights.clone().matmul(v), weights)
    }

    /// Returns the attention weights, `f32[batch, heads, queries, keys]`, without dropout.
    pub fn weights(&self, q: Tensor<4>, k: Tensor<4>) -> Tensor<4> {
        let ([batch, heads, queries, _], [.., keys, _]) = (q.dims(), k.dims());
        let shape = [batch, heads, queries, keys];
        // Scales q instead of the scores, because it is smaller.
        let q = q.mul_scalar(f64::from(self.params.scale));
        let q = cast(q, k.dtype().into());
        let mut scores = cast(q.matmul(k.swap_dims(2, 3)), FloatDType::F32);
        if let Some(softcap) = self.params.softcap {
            scores = scores.div_scalar(softcap).tanh().mul_scalar(softcap);
        }
        if self.params.causal {
            let hidden = self.hidden(queries, keys, &scores.device());
            let hidden = hidden.reshape([1, 1, queries, keys]);
            scores = scores.mask_fill(hidden.expand(shape), self.masked);
        }
        if let Some(padding) = &self.padding {
            let [batch, keys] = padding.dims();
            let padding = padding.clone().reshape([batch, 1, 1, keys]);
            scores = scores.mask_fill(padding.expand(shape), self.masked);
        }
        if let Some(mask) = &self.mask {
            let [batch, queries, keys] = mask.dims();
            let mask = mask.clone().reshape([batch, 1, queries, keys]);
            scores = scores.mask_fill(mask.expand(shape), self.masked);
        }
        match self.params.quiet_softmax {
            true => quiet_softmax(scores, 3),
            false => softmax(scores, 3),
        }
    }

    /// Mask of the keys (columns) that a query (row) of a causal sequence must not see. The last
    /// query sees the last key.
    fn hidden(&self, queries: usize, keys: usize, device: &Device) -> Tensor<2, Bool> {
        let shape = [queries, keys];
        let numbers = |range| Tensor::<1, Int>::arange(range, device);
        let first = keys as i64 - queries as i64;
        let query = numbers(first..keys as i64).reshape([queries, 1]);
        let key = numbers(0..keys as i64).reshape([1, keys]);
        let (query, key) = (query.expand(shape), key.expand(shape));
        let later = key.clone().greater(query.clone());
        match self.params.window {
            None => later,
            Some(window) => later.bool_or((query - key).greater_equal_elem(window as i64)),
        }
    }
}

/// Splits the last axis of `[batch, time, width]` into heads: `[batch, heads, time, head]`.
pub(super) fn by_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, time, width] = x.dims();
    x.reshape([batch, time, heads, width / heads])
        .swap_dims(1, 2)
}

/// Inverse of [`by_heads`], with the tokens of all sequences as rows.
pub(super) fn to_rows(x: Tensor<4>) -> Tensor<2> {
    let [batch, heads, time, head] = x.dims();
    x.swap_dims(1, 2).reshape([batch * time, heads * head])
}
