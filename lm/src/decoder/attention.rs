//! Attention with rotary embedding, grouped-query heads, and query and key norms if the
//! architecture has them; [latent](super::latent) attention makes its heads in another way.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_nvfp4::attention::{
    AttentionParams, Sequences, try_attention, try_attention_qkv, try_attention_qkv_with_sinks,
    try_attention_with_sinks,
};
use burn_nvfp4::decode::NewTokens;
use burn_nvfp4::nn::{ResidualStream, RmsNorm};

use super::call::Call;
use super::latent::{Latent, Turn, places_in_cache};
use super::names::Site;
use super::norm::effective;
use super::positions::{Places, Tables, rotate};
use super::projection::{Projection, rows};
use crate::hf::{DecoderConfig, LayerConfig};

/// Attention of one layer.
#[derive(Module, Debug)]
pub struct Attention {
    /// Fused query, key and value projection, with `(heads + 2 * kv_heads) * head` output columns;
    /// in latent attention, the first projections.
    pub qkv: Projection,
    /// Output projection, from `heads * head` columns.
    pub out: Projection,
    /// Per-head norm of queries, before the rotary embedding.
    pub q_norm: Option<RmsNorm>,
    /// Per-head norm of keys, before the rotary embedding.
    pub k_norm: Option<RmsNorm>,
    /// Second projections of latent attention.
    pub latent: Option<Latent>,
    /// Sink of each head: a score that every row has besides those of its keys, `[heads]`.
    pub sinks: Option<Param<Tensor<1>>>,
    #[module(skip)]
    pub(super) heads: Heads,
}

/// Heads of an attention, and its arithmetic.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    count: usize,
    kv_count: usize,
    size: usize,
    params: AttentionParams,
    /// Index of the rotary embedding.
    rope: usize,
    /// True if norms multiply by 1 + weight.
    norm_plus_one: bool,
}

impl Heads {
    /// Returns the heads of a layer.
    pub fn new(config: &DecoderConfig, layer: &LayerConfig) -> Self {
        let block = &config.block;
        let plain = AttentionParams::causal(config.head);
        let scale = block.query_scalar.map(|scalar| scalar.sqrt().recip());
        Self {
            count: config.heads,
            kv_count: config.kv_heads,
            size: config.head,
            params: AttentionParams {
                scale: scale.map_or(plain.scale, |scale| scale as f32),
                window: layer.window,
                softcap: block.score_cap,
                ..plain
            },
            rope: layer.rope,
            norm_plus_one: block.norm_plus_one,
        }
    }
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
        let mixed = match &self.latent {
            Some(latent) => self.mixed_latent(latent, rows(qkv), ([batch, time], layer), call)?,
            None => self.mixed(rows(qkv), ([batch, time], layer), call)?,
        };
        call.show(layer, Site::Out, &mixed, None)?;
        let out = self.out.forward(mixed)?;
        Ok(ResidualStream {
            sum,
            pending: Some(out.reshape([batch, time, d_model])),
        })
    }

    /// Returns the attention's output, `[tokens, heads * head]`, from that of the projection.
    fn mixed(
        &self,
        qkv: Tensor<2>,
        ([batch, time], layer): ([usize; 2], usize),
        call: &mut Call<'_>,
    ) -> Result<Tensor<2>> {
        let (heads, params) = (&self.heads, self.heads.params);
        let tables = call.tables[heads.rope].clone();
        // Used without a cache.
        let (sequences, places) = match call.rows {
            Some(rows) => (rows.sequences.clone(), rows.places.clone()),
            None => (Sequences::Equal(batch), Places::FromZero { time }),
        };
        if call.observer.is_some() {
            let [_, k, v] = self.rotated(qkv.clone(), &tables, &places, [batch, time]);
            call.show_cache(layer, &k, &v)?;
        }
        let sinks = self.sinks.as_ref().map(|sinks| sinks.val());
        Ok(match &mut call.cache {
            None if self.q_norm.is_none() && self.k_norm.is_none() => {
                let counts = [heads.count, heads.kv_count];
                let rotary = tables.rotary()?;
                let rotary = Some(&rotary);
                match sinks {
                    None => try_attention_qkv(qkv, counts, &sequences, rotary, params)?,
                    Some(sinks) => {
                        let places = (&sequences, rotary);
                        try_attention_qkv_with_sinks(qkv, counts, places, sinks, params)?
                    }
                }
            }
            None => {
                let [q, k, v] = self.rotated(qkv, &tables, &places, [batch, time]);
                let qkv = [q, k, v].map(tokens);
                flat(try_attention_with_sinks(qkv, &sequences, sinks, params)?)
            }
            Some((cache, chunk)) => {
                let rotary = tables.rotary()?;
                let (new, layer) = (self.new_tokens(qkv), &mut cache.layers[layer]);
                match &chunk.sequences {
                    None => {
                        let of = (heads.count, params);
                        layer.attend(new, &chunk.places, Some(&rotary), of)?
                    }
                    Some(sequences) => {
                        let q = layer.append(new, &chunk.places, Some(&rotary), heads.count)?;
                        let [k, v] = layer.keys_and_values(q.dtype().into());
                        let qkv = [q, k, v];
                        flat(try_attention_with_sinks(qkv, sequences, sinks, params)?)
                    }
                }
            }
        })
    }

    /// Returns the output of latent attention, `[tokens, heads * value]`, from that of the first
    /// projections.
    fn mixed_latent(
        &self,
        latent: &Latent,
        first: Tensor<2>,
        (shape, layer): ([usize; 2], usize),
        call: &mut Call<'_>,
    ) -> Result<Tensor<2>> {
        let (heads, params) = (self.heads.count, self.heads.params);
        let tables = call.tables[self.heads.rope].clone();
        let [batch, time] = shape;
        let places = match (&call.cache, call.rows) {
            (Some((_, chunk)), _) => places_in_cache(&chunk.places, time, &tables),
            (None, Some(rows)) => rows.places.clone(),
            (None, None) => Places::FromZero { time },
        };
        let turn = Turn {
            tables: &tables,
            places: &places,
            shape,
        };
        let [q, k, v] = latent.heads(first, (heads, layer), &turn, call)?;
        let mixed = match &mut call.cache {
            None => {
                let sequences = match call.rows {
                    Some(rows) => rows.sequences.clone(),
                    None => Sequences::Equal(batch),
                };
                flat(try_attention(q, k, v, &sequences, params)?)
            }
            Some((cache, chunk)) => {
                let (new, layer) = (NewTokens::Separate([q, k, v]), &mut cache.layers[layer]);
                match &chunk.sequences {
                    None => layer.attend(new, &chunk.places, None, (heads, params))?,
                    Some(sequences) => {
                        let q = layer.append(new, &chunk.places, None, heads)?;
                        let [k, v] = layer.keys_and_values(q.dtype().into());
                        flat(try_attention(q, k, v, sequences, params)?)
                    }
                }
            }
        };
        Ok(latent.unpadded(mixed, heads))
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
        let &Heads {
            count: heads,
            kv_count: kv_heads,
            size,
            norm_plus_one: plus_one,
            ..
        } = &self.heads;
        let part = |first: usize, heads: usize| {
            let columns = qkv.clone().narrow(1, first * size, heads * size);
            columns.reshape([tokens, heads, size])
        };
        let normed = |x: Tensor<3>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => effective(norm, plus_one).forward(x),
            None => x,
        };
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
