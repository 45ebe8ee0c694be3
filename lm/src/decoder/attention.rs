//! Attention with rotary positions, grouped queries, and norms of queries and keys where the
//! architecture has them.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::attention::{AttentionParams, Sequences, try_attention, try_attention_qkv};
use burn_nvfp4::nn::RmsNorm;

use super::call::Call;
use super::names::Site;
use super::positions::{Places, Tables, rotate};
use super::projection::Projection;

/// Attention of one layer.
#[derive(Module, Debug)]
pub struct Attention {
    /// Queries, keys and values concatenated, to `(heads + 2 * kv_heads) * head` columns.
    pub qkv: Projection,
    /// From `heads * head` columns.
    pub out: Projection,
    /// Of each head of queries, before the rotation.
    pub q_norm: Option<RmsNorm>,
    /// Of each head of keys, before the rotation.
    pub k_norm: Option<RmsNorm>,
    #[module(skip)]
    pub(super) heads: usize,
    #[module(skip)]
    pub(super) kv_heads: usize,
    #[module(skip)]
    pub(super) head: usize,
    #[module(skip)]
    pub(super) window: Option<usize>,
}

impl Attention {
    /// `[batch, time, d_model]` to the same, in the type of `x`. `layer` is its number in the
    /// cache.
    pub(super) fn forward(
        &self,
        x: Tensor<3>,
        layer: usize,
        call: &mut Call<'_>,
    ) -> Result<Tensor<3>> {
        let [batch, time, d_model] = x.dims();
        let x: Tensor<2> = x.reshape([batch * time, d_model]);
        call.show(layer, Site::Qkv, &x, None)?;
        let qkv = self.qkv.forward(x)?;
        let params = AttentionParams {
            window: self.window,
            ..AttentionParams::causal(self.head)
        };
        // Where there is no cache.
        let (sequences, places) = match call.rows {
            Some(rows) => (rows.sequences.clone(), rows.places.clone()),
            None => (Sequences::Equal(batch), Places::FromZero { time }),
        };
        if call.observer.is_some() {
            let [_, k, v] = self.rotated(qkv.clone(), &call.tables, &places, [batch, time]);
            call.show_cache(layer, &k, &v)?;
        }
        let mixed = match &mut call.cache {
            None if self.q_norm.is_none() && self.k_norm.is_none() => {
                let heads = [self.heads, self.kv_heads];
                let rotary = call.tables.rotary()?;
                try_attention_qkv(qkv, heads, &sequences, Some(&rotary), params)?
            }
            None => {
                let [q, k, v] = self.rotated(qkv, &call.tables, &places, [batch, time]);
                let [q, k, v] = [q, k, v].map(tokens);
                flat(try_attention(q, k, v, &sequences, params)?)
            }
            Some((cache, chunk)) => {
                let [q, k, v] = self.rotated(qkv, &call.tables, &chunk.places, [batch, time]);
                let all = cache.write(layer, chunk, &k, &v);
                let [q, k, v] = [q, all.k, all.v].map(tokens);
                flat(try_attention(q, k, v, &chunk.sequences, params)?)
            }
        };
        call.show(layer, Site::Out, &mixed, None)?;
        let out = self.out.forward(mixed)?;
        Ok(out.reshape([batch, time, d_model]))
    }

    /// Queries and keys, normalised and rotated, and values, `[batch, time, heads, head]` each.
    fn rotated(
        &self,
        qkv: Tensor<2>,
        tables: &Tables,
        places: &Places,
        [batch, time]: [usize; 2],
    ) -> [Tensor<4>; 3] {
        let dtype: FloatDType = qkv.dtype().into();
        let part = |first: usize, heads: usize| {
            let columns = qkv.clone().narrow(1, first * self.head, heads * self.head);
            columns.reshape([batch, time, heads, self.head])
        };
        let turn = tables.at(places);
        let normed = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(x, dtype),
            None => x,
        };
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let q = rotate(normed(part(0, heads), &self.q_norm), &turn);
        let k = rotate(normed(part(heads, kv_heads), &self.k_norm), &turn);
        [q, k, part(heads + kv_heads, kv_heads)]
    }
}

/// Sequences one behind another, `[batch * time, heads, head]`.
fn tokens(x: Tensor<4>) -> Tensor<3> {
    let [batch, time, heads, head] = x.dims();
    x.reshape([batch * time, heads, head])
}

/// `[tokens, heads * head]`.
fn flat(x: Tensor<3>) -> Tensor<2> {
    let [tokens, heads, head] = x.dims();
    x.reshape([tokens, heads * head])
}
