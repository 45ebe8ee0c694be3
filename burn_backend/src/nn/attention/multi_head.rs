//! burn-nn's multi-head attention with projections in NVFP4.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor};
use burn_nn::{Dropout, Initializer};
use nvfp4_formats::Nvfp4Error;

use super::cache::MhaCache;
use super::input::{Masks, MhaInput};
use super::mask::AttentionMask;
use super::padded::PackedKeys;
use super::unfused::{UnfusedAttention, by_heads, to_rows};
use crate::attention::{
    AttentionParams, MAX_HEAD, Sequences, try_attention, try_attention_qkv_with_amax,
};
use crate::functions::or_panic;
use crate::nn::{Nvfp4Linear, Nvfp4LinearConfig, cast, checked_dropout, drops, equal_parts};
use crate::recipe::Nvfp4Recipe;
use crate::validate;

/// Configuration of a [`MultiHeadAttention`]; the fields and defaults of
/// `burn_nn::attention::MultiHeadAttentionConfig`, and a recipe.
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Width of the inputs and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Number of heads. Must divide `d_model`.
    pub n_heads: usize,
    /// Dropout probability of the attention weights, in `[0, 1)`. In training, only 0 allows the
    /// kernels; see the [module](crate::nn::attention#flash-attention).
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Score of a masked key. The kernels give keys hidden by `causal` a weight of exactly 0.
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// True to add one to the denominator of the softmax, so that a head can attend to nothing.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// True if the key projection has a bias.
    #[config(default = true)]
    pub key_bias: bool,
    /// True if the value projection has a bias.
    #[config(default = true)]
    pub value_bias: bool,
    /// True if the query projection has a bias.
    #[config(default = true)]
    pub query_bias: bool,
    /// True if the output projection has a bias.
    #[config(default = true)]
    pub output_bias: bool,
    /// Quantization recipe of the projections.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl MultiHeadAttentionConfig {
    /// Creates an attention on `device`.
    ///
    /// # Errors
    /// Returns an error if `d_model` is not a positive multiple of 16, `n_heads` does not divide
    /// it, `dropout` is outside `[0, 1)`, or the device has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<MultiHeadAttention, Nvfp4Error> {
        let d_model = self.d_model;
        validate::blocks("d_model", "d_model", d_model)?;
        let d_k = equal_parts(("d_model", d_model), ("n_heads", self.n_heads))?;
        let linear = |bias| {
            Nvfp4LinearConfig::new(d_model, d_model)
                .with_bias(bias)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        Ok(MultiHeadAttention {
            query: linear(self.query_bias)?,
            key: linear(self.key_bias)?,
            value: linear(self.value_bias)?,
            output: linear(self.output_bias)?,
            dropout: checked_dropout(self.dropout)?,
            d_model,
            n_heads: self.n_heads,
            d_k,
            min_float: self.min_float,
            quiet_softmax: self.quiet_softmax,
            warned: Warned::default(),
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> MultiHeadAttention {
        or_panic("MultiHeadAttentionConfig::init", self.try_init(device))
    }
}

/// Multi-head attention with projections in NVFP4. Replaces `burn_nn::attention::MultiHeadAttention`:
/// same fields, ids and record.
///
/// Scores, softmax and the weighted sum of values are in high precision: operands in the dtype of
/// the input, accumulation and softmax in `f32`. The [module](crate::nn::attention#flash-attention)
/// lists the inputs that need Burn's operations instead of the kernels.
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// Projection of queries, `[d_model, d_model]`.
    pub query: Nvfp4Linear,
    /// Projection of keys, `[d_model, d_model]`.
    pub key: Nvfp4Linear,
    /// Projection of values, `[d_model, d_model]`.
    pub value: Nvfp4Linear,
    /// Output projection, `[d_model, d_model]`.
    pub output: Nvfp4Linear,
    /// Dropout of the attention weights.
    pub dropout: Dropout,
    /// Width of the inputs and the output.
    #[module(skip)]
    pub d_model: usize,
    /// Number of heads.
    #[module(skip)]
    pub n_heads: usize,
    /// Head size.
    #[module(skip)]
    pub d_k: usize,
    /// Score of a masked key.
    #[module(skip)]
    pub min_float: f64,
    /// True to add one to the denominator of the softmax.
    #[module(skip)]
    pub quiet_softmax: bool,
    #[module(skip)]
    warned: Warned,
}

/// True once a warning was emitted; shared by clones of a module.
#[derive(Debug, Clone, Default)]
struct Warned(Arc<AtomicBool>);

impl Warned {
    /// Returns true in the first call.
    fn is_first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}

/// Projected queries, keys and values.
#[derive(Debug, Clone)]
#[allow(
    clippy::large_enum_variant,
    reason = "tensor handles, moved once a forward"
)]
enum Projected {
    /// Concatenated along the features, `[batch, time, 3 * d_model]`.
    Joined(Tensor<3>),
    /// `[batch, queries, d_model]` and twice `[batch, keys, d_model]`.
    Separate([Tensor<3>; 3]),
}

impl Projected {
    /// Returns a tensor with the batch, positions and device of the queries.
    fn query(&self) -> &Tensor<3> {
        let (Self::Joined(x) | Self::Separate([x, ..])) = self;
        x
    }

    /// Returns batch, queries and keys.
    fn sizes(&self) -> [usize; 3] {
        let (Self::Joined(x) | Self::Separate([_, x, _])) = self;
        let ([batch, queries, _], [_, keys, _]) = (self.query().dims(), x.dims());
        [batch, queries, keys]
    }

    fn split(self) -> [Tensor<3>; 3] {
        match self {
            Self::Joined(qkv) => {
                let width = qkv.dims()[2] / 3;
                std::array::from_fn(|index| qkv.clone().narrow(2, index * width, width))
            }
            Self::Separate(parts) => parts,
        }
    }
}

/// Attention weights of an output.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "one a forward")]
enum Weights {
    /// Computed by the forward, after dropout.
    Known(Tensor<4>),
    /// Not computed: the kernels never have them.
    Deferred {
        projected: Projected,
        attention: UnfusedAttention,
        heads: usize,
    },
}

/// Output of [`MultiHeadAttention::forward`].
#[derive(Debug, Clone)]
pub struct MhaOutput {
    /// Output, `[batch, queries, d_model]`, in the dtype of the query.
    pub context: Tensor<3>,
    weights: Weights,
}

impl MhaOutput {
    /// Returns the attention weights, `[batch, heads, queries, keys]`. In training they are those
    /// after dropout.
    ///
    /// After a forward with the kernels, Burn's operations compute them in this call. After a
    /// forward with a cache they are those of the queries that the forward computed.
    pub fn weights(&self) -> Tensor<4> {
        match &self.weights {
            Weights::Known(weights) => weights.clone(),
            Weights::Deferred {
                projected,
                attention,
                heads,
            } => {
                let [q, k, _] = projected.clone().split().map(|x| by_heads(x, *heads));
                let dtype = q.dtype().into();
                cast(attention.weights(q, k), dtype)
            }
        }
    }
}

impl MultiHeadAttention {
    /// Applies the attention.
    ///
    /// # Errors
    /// Returns an error if a shape, dtype or device does not fit, or a causal input has more
    /// queries than keys.
    pub fn try_forward(&self, input: MhaInput) -> Result<MhaOutput, Nvfp4Error> {
        self.check(&input)?;
        self.run(input, None)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: MhaInput) -> MhaOutput {
        or_panic("MultiHeadAttention::forward", self.try_forward(input))
    }

    /// Applies the attention to a sequence of which `cache` has the first positions. Computes the
    /// others and appends them to `cache`. The context includes all positions.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward); also if the input has no position after those in
    /// the cache, its batch is not that of the cache, or the number of its keys does not fit: in
    /// self-attention that of its queries, in cross-attention that of the cache.
    pub fn try_forward_cache(
        &self,
        input: MhaInput,
        cache: &mut MhaCache,
    ) -> Result<MhaOutput, Nvfp4Error> {
        self.check(&input)?;
        let past = cache.output.past(input.names.query, &input.query)?;
        cache.check_keys(&input)?;
        let output = self.run(input.after(past, cache.grows()), Some(cache))?;
        Ok(MhaOutput {
            context: cache.output.append(output.context),
            ..output
        })
    }

    /// Panicking version of [`try_forward_cache`](Self::try_forward_cache).
    #[track_caller]
    pub fn forward_cache(&self, input: MhaInput, cache: &mut MhaCache) -> MhaOutput {
        or_panic(
            "MultiHeadAttention::forward_cache",
            self.try_forward_cache(input, cache),
        )
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `input`.
    pub(in crate::nn) fn check(&self, input: &MhaInput) -> Result<(), Nvfp4Error> {
        input.check(self.d_model)?;
        let device = input.query.device();
        for (names, linear) in [
            (["query.weight", "query.bias"], &self.query),
            (["key.weight", "key.bias"], &self.key),
            (["value.weight", "value.bias"], &self.value),
            (["output.weight", "output.bias"], &self.output),
        ] {
            linear.check_part(names, &device, [self.d_model; 2])?;
        }
        Ok(())
    }

    /// Applies the attention to an `input` that was checked. With a `cache`, the input has only the
    /// positions after those cached, except for the masks of keys; keys and values are appended to
    /// the cache.
    pub(in crate::nn) fn run(
        &self,
        input: MhaInput,
        cache: Option<&mut MhaCache>,
    ) -> Result<MhaOutput, Nvfp4Error> {
        let MhaInput {
            query,
            key_value,
            masks,
            ..
        } = input;
        // Queries of self-attention without a cache are the keys.
        let is_whole = key_value.is_none() && cache.is_none();
        let fixed = cache.as_ref().and_then(|cache| cache.fixed());
        let projected = match (fixed, key_value) {
            (Some([k, v]), _) => Projected::Separate([self.query.try_forward(query)?, k, v]),
            (None, None) => {
                let layers = [&self.query, &self.key, &self.value];
                Projected::Joined(Nvfp4Linear::try_forward_joined(&layers, query)?)
            }
            (None, Some([key, value])) => Projected::Separate([
                self.query.try_forward(query)?,
                self.key.try_forward(key)?,
                self.value.try_forward(value)?,
            ]),
        };
        let projected = match cache {
            Some(cache) if cache.fixed().is_none() => {
                let [q, k, v] = projected.split();
                let [k, v] = cache.append([k, v]);
                Projected::Separate([q, k, v])
            }
            _ => projected,
        };
        self.attend(projected, masks, is_whole)
    }

    /// Computes the output from the projections, by the kernels if they support the case. The
    /// queries `is_whole` are also the keys.
    fn attend(
        &self,
        projected: Projected,
        masks: Masks,
        is_whole: bool,
    ) -> Result<MhaOutput, Nvfp4Error> {
        let [batch, queries, _] = projected.query().dims();
        let heads = self.n_heads;
        let unsupported = self.unsupported(&masks, &projected, is_whole);
        let attention = UnfusedAttention {
            params: AttentionParams {
                causal: masks.is_causal(),
                quiet_softmax: self.quiet_softmax,
                ..AttentionParams::new(self.d_k)
            },
            masked: self.min_float,
            padding: masks.pad,
            mask: masks.attn.and_then(AttentionMask::other),
        };
        let (mixed, weights) = match unsupported {
            Some(reason) => {
                match projected.query().is_tracked() && self.warned.is_first() {
                    true => tracing::warn!(reason, "training attention by Burn's operations"),
                    false => tracing::debug!(reason, "attention by Burn's operations"),
                }
                let operands = projected.split().map(|x| by_heads(x, heads));
                let (mixed, weights) = attention.attend(operands, Some(&self.dropout));
                (to_rows(mixed), Weights::Known(weights))
            }
            None => {
                let (padding, params) = (attention.padding.clone(), attention.params);
                let mixed = self.attend_fused(projected.clone(), padding, params)?;
                let weights = Weights::Deferred {
                    projected,
                    attention,
                    heads,
                };
                (mixed, weights)
            }
        };
        let context = self.output.try_forward(mixed)?;
        Ok(MhaOutput {
            context: context.reshape([batch, queries, self.d_model]),
            weights,
        })
    }

    /// Returns the mixed values, `[batch * queries, d_model]`, by the kernels.
    fn attend_fused(
        &self,
        projected: Projected,
        padding: Option<Tensor<2, Bool>>,
        params: AttentionParams,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let (heads, d_model) = (self.n_heads, self.d_model);
        let [batch, queries, keys] = projected.sizes();
        let packed = padding
            .map(|padding| PackedKeys::try_new(padding, [batch, queries, keys], params.causal))
            .transpose()?;
        let equal = Sequences::Equal(batch.max(1));
        let sequences = packed.as_ref().map_or(&equal, |packed| &packed.sequences);
        let pack = |x: Tensor<2>| match &packed {
            Some(packed) => packed.pack(x),
            None => Ok(x),
        };
        match projected {
            Projected::Joined(qkv) => {
                let amax = self.output.next_spec().input_amax(qkv.is_tracked());
                // Of a copy in another order they would be computed in vain.
                let amax = amax.filter(|_| packed.is_none());
                let qkv = pack(qkv.reshape([batch * queries, 3 * d_model]))?;
                let sizes = [heads; 2];
                let mixed = try_attention_qkv_with_amax(qkv, sizes, sequences, None, params, amax)?;
                match &packed {
                    Some(packed) => packed.unpack(mixed),
                    None => Ok(mixed),
                }
            }
            Projected::Separate([q, k, v]) => {
                let by_head = |x: Tensor<2>| {
                    let [rows, _] = x.dims();
                    x.reshape([rows, heads, self.d_k])
                };
                let q = by_head(q.reshape([batch * queries, d_model]));
                let [k, v] = [k, v].map(|x| pack(x.reshape([batch * keys, d_model])));
                let mixed = try_attention(q, by_head(k?), by_head(v?), sequences, params)?;
                Ok(mixed.reshape([batch * queries, d_model]))
            }
        }
    }

    /// Returns the reason why the kernels cannot compute the attention, if there is one.
    fn unsupported(
        &self,
        masks: &Masks,
        projected: &Projected,
        is_whole: bool,
    ) -> Option<&'static str> {
        let is_padded = masks.pad.is_some();
        let is_other = matches!(masks.attn, Some(AttentionMask::Other(_)));
        let drops = drops(&self.dropout, &projected.query().device());
        let reasons = [
            (
                is_other,
                "a mask_attn that is not the tensor of generate_autoregressive_mask",
            ),
            (
                is_padded && masks.is_causal() && !is_whole,
                "mask_pad of a causal attention with a cache or with separate keys",
            ),
            (
                is_padded && !PackedKeys::supports(projected.sizes()),
                "mask_pad of more than 256 sequences, or of none",
            ),
            (drops, "dropout of attention weights"),
            (self.d_k > MAX_HEAD, "heads wider than 256"),
        ];
        let found = reasons.into_iter().find(|(holds, _)| *holds);
        found.map(|(_, reason)| reason)
    }
}
