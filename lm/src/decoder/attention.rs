//! Attention with rotary embedding, grouped-query heads, and query and key norms if the
//! architecture has them.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Tensor;
use burn_nvfp4::attention::{AttentionParams, Sequences, try_attention, try_attention_qkv};
use burn_nvfp4::decode::NewTokens;
use burn_nvfp4::nn::{ResidualStream, RmsNorm};

use super::call::Call;
use super::names::Site;
use super::positions::{Places, Tables, rotate};
use super::projection::{Projection, rows};

/// Attention of one layer.
#[derive(Module, Debug)]
pub struct Attention {
    /// Fused query, key and value projection, with `(heads + 2 * kv_heads) * head` output columns.
    pub qkv: Projection,
    /// Output projection, from `heads * head` columns.
    pub out: Projection,
    /// Per-head norm of queries, before the rotary embedding.
    pub q_norm: Option<RmsNorm>,
    /// Per-head norm of keys, before the rotary embedding.
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
    /// Returns the stream with the attention output of its `norm` pending, to be added later.
    /// `layer` is the layer index in the cache.
    pub(super) fn forward(
        &self,
        norm: &RmsNorm,
        stream: ResidualStream,
        layer: usize,
        call: &mut Call<'_>,
    ) -> Result<ResidualStream> {
        let [batch, time, d_model] = stream.sum.dims();
        let (sum, qkv) = match self.qkv.behind(norm, false) {
            Some(fused) if call.observer.is_none() => fused.try_forward(stream)?,
            _ => {
                let (sum, x) = norm.try_forward_stream(stream)?;
                let x = rows(x);
                call.show(layer, Site::Qkv, &x, None)?;
                let qkv = self.qkv.forward(x)?;
                let [_, width] = qkv.dims();
                (sum, qkv.reshape([batch, time, width]))
            }
        };
        let qkv = rows(qkv);
        let params = AttentionParams {
            window: self.window,
            ..AttentionParams::causal(self.head)
        };
        // Used without a cache.
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
                let rotary = call.tables.rotary()?;
                let (new, layer) = (self.new_tokens(qkv), &mut cache.layers[layer]);
                match &chunk.sequences {
                    None => {
                        let of = (self.heads, params);
                        layer.attend(new, &chunk.places, Some(&rotary), of)?
                    }
                    Some(sequences) => {
                        let q = layer.append(new, &chunk.places, Some(&rotary), self.heads)?;
                        let [k, v] = layer.keys_and_values(q.dtype().into());
                        flat(try_attention(q, k, v, sequences, params)?)
                    }
                }
            }
        };
        call.show(layer, Site::Out, &mixed, None)?;
        let out = self.out.forward(mixed)?;
        Ok(ResidualStream {
            sum,
            pending: Some(out.reshape([batch, time, d_model])),
        })
    }

    /// Returns queries and keys after norm and rotary embedding, and values,
    /// `[batch, time, heads, head]` each.
    fn rotated(
        &self,
        qkv: Tensor<2>,
        tables: &Tables,
        places: &Places,
        [batch, time]: [usize; 2],
    ) -> [Tensor<4>; 3] {
        let turn = tables.at(places);
        let [q, k, v] = self.normed(qkv).map(|x| {
            let [_, heads, head] = x.dims();
            x.reshape([batch, time, heads, head])
        });
        [rotate(q, &turn), rotate(k, &turn), v]
    }

    /// Returns queries and keys after the norm, and values, `[tokens, heads, head]` each.
    fn normed(&self, qkv: Tensor<2>) -> [Tensor<3>; 3] {
        let [tokens, _] = qkv.dims();
        let part = |first: usize, heads: usize| {
            let columns = qkv.clone().narrow(1, first * self.head, heads * self.head);
            columns.reshape([tokens, heads, self.head])
        };
        let normed = |x: Tensor<3>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let q = normed(part(0, heads), &self.q_norm);
        let k = normed(part(heads, kv_heads), &self.k_norm);
        [q, k, part(heads + kv_heads, kv_heads)]
    }

    /// Returns the input of the cache, which applies the rotary embedding to queries and keys.
    fn new_tokens(&self, qkv: Tensor<2>) -> NewTokens {
        match (&self.q_norm, &self.k_norm) {
            (None, None) => NewTokens::Qkv(qkv),
            _ => NewTokens::Separate(self.normed(qkv)),
        }
    }
}

/// Concatenates sequences, `[batch * time, heads, head]`.
fn tokens(x: Tensor<4>) -> Tensor<3> {
    let [batch, time, heads, head] = x.dims();
    x.reshape([batch * time, heads, head])
}

/// Reshapes to `[tokens, heads * head]`.
fn flat(x: Tensor<3>) -> Tensor<2> {
    let [tokens, heads, head] = x.dims();
    x.reshape([tokens, heads * head])
}
