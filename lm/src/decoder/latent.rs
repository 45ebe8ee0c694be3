//! Latent attention: queries, keys and values are made from low-rank projections of the layer's
//! input, and a part of each head has a rotary position.
//!
//! The first projections are [`Attention::qkv`](super::attention::Attention::qkv). Attention and
//! its cache have complete keys and values, one head of keys for each of queries. Heads are padded
//! with zeros to the same width, which changes no score and no output.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{IntDType, Tensor};
use burn_nvfp4::decode;
use burn_nvfp4::nn::RmsNorm;

use super::call::Call;
use super::names::Site;
use super::positions::{Places, Tables, rotate};
use super::projection::Projection;
use crate::hf::LatentConfig;

/// Second projections of latent attention.
#[derive(Module, Debug)]
pub struct Latent {
    /// Makes queries; `None` if the first projection does.
    pub query: Option<LowRank>,
    /// Makes the keys' elements without a position, and the values.
    pub kv: LowRank,
    #[module(skip)]
    pub(super) sizes: LatentConfig,
}

/// A projection from few features, after a norm.
#[derive(Module, Debug)]
pub struct LowRank {
    /// Norm of the features.
    pub norm: RmsNorm,
    /// Projection.
    pub up: Projection,
}

/// Rotary positions of the tokens of a call.
pub(super) struct Turn<'a> {
    pub tables: &'a Tables,
    pub places: &'a Places,
    /// Batch size and time.
    pub shape: [usize; 2],
}

impl Latent {
    /// Returns queries, keys and values, `[tokens, heads, width]` each, made from the output of the
    /// first projections. `layer` is the layer index.
    pub(super) fn heads(
        &self,
        first: Tensor<2>,
        (heads, layer): (usize, usize),
        turn: &Turn<'_>,
        call: &mut Call<'_>,
    ) -> Result<[Tensor<3>; 3]> {
        let LatentConfig {
            kv_rank,
            nope,
            rope,
            value,
            interleaved,
            ..
        } = self.sizes;
        let [tokens, columns] = first.dims();
        let of_query = columns - kv_rank - rope;
        let query = first.clone().narrow(1, 0, of_query);
        let query = match &self.query {
            None => query,
            Some(low_rank) => low_rank.forward(query, (Site::LatentQuery, layer), call)?,
        };
        let query: Tensor<3> = query.reshape([tokens, heads, nope + rope]);
        let compressed = first.clone().narrow(1, of_query, kv_rank);
        let kv = self.kv.forward(compressed, (Site::LatentKv, layer), call)?;
        let kv: Tensor<3> = kv.reshape([tokens, heads, nope + value]);
        let shared = first.narrow(1, of_query + kv_rank, rope);
        let shared: Tensor<3> = shared.reshape([tokens, 1, rope]);

        let table = turn.tables.at(turn.places);
        let rotated = |x: Tensor<3>| {
            let [_, heads, _] = x.dims();
            let [batch, time] = turn.shape;
            let mut x: Tensor<4> = x.reshape([batch, time, heads, rope]);
            if interleaved {
                x = apart(x);
            }
            rotate(x, &table).reshape([tokens, heads, rope])
        };
        let q = Tensor::cat(
            vec![
                query.clone().narrow(2, 0, nope),
                rotated(query.narrow(2, nope, rope)),
            ],
            2,
        );
        let k = Tensor::cat(
            vec![
                kv.clone().narrow(2, 0, nope),
                rotated(shared).expand([tokens, heads, rope]),
            ],
            2,
        );
        let v = kv.narrow(2, nope, value);
        Ok([q, k, v].map(|x| padded(x, self.sizes.width())))
    }

    /// Drops the padding of the attention's output, `[tokens, heads * width]`.
    pub(super) fn unpadded(&self, mixed: Tensor<2>, heads: usize) -> Tensor<2> {
        let ([tokens, _], width, value) = (mixed.dims(), self.sizes.width(), self.sizes.value);
        if width == value {
            return mixed;
        }
        let mixed: Tensor<3> = mixed.reshape([tokens, heads, width]);
        mixed.narrow(2, 0, value).reshape([tokens, heads * value])
    }
}

impl LowRank {
    fn forward(
        &self,
        x: Tensor<2>,
        (site, layer): (Site, usize),
        call: &mut Call<'_>,
    ) -> Result<Tensor<2>> {
        let x = self.norm.try_forward(x)?;
        call.show(layer, site, &x, None)?;
        self.up.forward(x)
    }
}

/// Returns the positions of the new tokens of a cache, `time` of each sequence. Those of padding
/// are the last of `tables` at most.
pub(super) fn places_in_cache(places: &decode::Places, time: usize, tables: &Tables) -> Places {
    let starts = places.starts.clone().cast(IntDType::I32);
    let [batch] = starts.dims();
    let steps = Tensor::arange(0..time as i64, &starts.device()).cast(IntDType::I32);
    let positions = starts.reshape([batch, 1]) + steps.reshape([1, time]);
    let [rows, _] = tables.cos.dims();
    Places::Of {
        positions: positions.clamp_max(rows as i64 - 1).reshape([batch * time]),
        shape: [batch, time],
    }
}

/// Moves the first elements of pairs of neighbors to the first half of each head, and the second
/// ones to the second half. Queries and keys are reordered alike, so their products are the same.
fn apart(x: Tensor<4>) -> Tensor<4> {
    let [batch, time, heads, size] = x.dims();
    let pairs: Tensor<5> = x.reshape([batch, time, heads, size / 2, 2]);
    pairs.swap_dims(3, 4).reshape([batch, time, heads, size])
}

/// Appends zeros to each head.
fn padded(x: Tensor<3>, width: usize) -> Tensor<3> {
    let [tokens, heads, size] = x.dims();
    if size == width {
        return x;
    }
    let options = (&x.device(), x.dtype());
    let zeros = Tensor::zeros([tokens, heads, width - size], options);
    Tensor::cat(vec![x, zeros], 2)
}
