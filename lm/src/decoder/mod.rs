//! Decoders of Hugging Face's Llama, Mistral, Qwen, Mixtral, Gemma, gpt-oss and DeepSeek, as Burn
//! modules.
//!
//! - [`Decoder`]: the model, with and without a cache.
//! - [`load`] and [`save`]: load a folder and save one, tensor by tensor; [`names`] maps tensors to
//!   parameters, and [`fused`] splits tensors of all experts.
//! - [`lora`]: low-rank adapters beside projections. [`Decoder::into_lora`] adds them for training;
//!   [`Decoder::with_adapter`] applies those of an [`AdapterFolder`] to a loaded model.
//! - [`Decoder::into_expert_parallel`]: distributes the experts of mixtures over ranks.
//! - [`FrozenForm`]: form of frozen weights, in high precision or packed.
//! - [`projection`]: linear layers, with a weight in one of several forms.
//! - [`attention`], [`latent`], [`feed_forward`] and [`positions`]: the parts of a layer.
//! - [`cache`]: the key-value cache.
//! - [`observe`]: observes the inputs of linear layers; [`LayerwiseDecoder`] needs the memory of one
//!   layer for that.
//! - [`generate`] and [`steps`]: generate continuations of prompts.
//!
//! Queries, keys and values are fused to one weight, and so are gate and up. The fused parts share
//! one global scale when they are quantized, as every engine that serves NVFP4 requires.

mod adapter_folder;
mod adapters;
pub mod attention;
pub mod cache;
mod call;
mod dense;
mod expert_parallel;
pub mod feed_forward;
mod frozen;
pub mod fused;
pub mod generate;
mod head_precision;
pub mod latent;
mod layerwise;
pub mod load;
pub mod lora;
pub mod names;
mod norm;
pub mod observe;
mod packed;
mod packed_rows;
pub mod positions;
pub mod projection;
mod projections;
mod random;
pub(crate) mod replace;
mod rounded;
mod router;
pub mod save;
pub mod scaled;
pub mod steps;
mod stored_part;
mod training;
mod values;

pub use adapter_folder::AdapterFolder;
pub use cache::{KvCache, KvPrecision};
pub use frozen::FrozenForm;
pub use generate::Generation;
pub use head_precision::HeadPrecision;
pub use layerwise::LayerwiseDecoder;
pub use lora::LoraConfig;
pub use packed_rows::PackedRows;
pub use steps::DecodeSteps;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_nvfp4::decode::KvFormat;
use burn_nvfp4::nn::{Embedding, LmHead, ResidualStream, RmsNorm};
use half::{bf16, f16};

use crate::hf::DecoderConfig;
use crate::model::cast;
use attention::Attention;
use call::Call;
use feed_forward::FeedForward;
use head_precision::QuantizedHead;
use norm::effective;
use observe::Observer;
use positions::Positions;

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Token embedding, `[vocab, d_model]`.
    pub embedding: Embedding,
    /// Layers, in order.
    pub layers: Vec<DecoderLayer>,
    /// Norm before the head.
    pub norm: RmsNorm,
    /// Head: maps features to logits; `None` if tied to the embedding.
    pub head: Option<LmHead>,
    /// Quantized head for inference; if present, it computes the logits.
    quantized_head: Option<QuantizedHead>,
    #[module(skip)]
    config: DecoderConfig,
    #[module(skip)]
    dtype: FloatDType,
    #[module(skip)]
    positions: Positions,
    /// Scale factors of the keys and values of each layer, if the folder quantizes the cache to
    /// FP8.
    #[module(skip)]
    kv_scales: Option<Vec<[f32; 2]>>,
}

/// One layer: attention and feed-forward, each after a norm, and each added to the residual stream;
/// in some architectures after a second norm.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// `input_layernorm`.
    pub attention_norm: RmsNorm,
    /// `self_attn`.
    pub attention: Attention,
    /// Norm of the attention's output: `post_attention_layernorm` if present.
    pub attention_post_norm: Option<RmsNorm>,
    /// `pre_feedforward_layernorm` if there are norms of outputs, else `post_attention_layernorm`.
    pub feed_forward_norm: RmsNorm,
    /// `mlp` or `block_sparse_moe`.
    pub feed_forward: FeedForward,
    /// Norm of the feed-forward's output: `post_feedforward_layernorm` if present.
    pub feed_forward_post_norm: Option<RmsNorm>,
    /// True if norms multiply by 1 + weight.
    #[module(skip)]
    norm_plus_one: bool,
}

impl DecoderLayer {
    fn forward(
        &self,
        stream: ResidualStream,
        index: usize,
        call: &mut Call<'_>,
    ) -> Result<ResidualStream> {
        let norm = effective(&self.attention_norm, self.norm_plus_one);
        let stream = self.attention.forward(&norm, stream, index, call)?;
        let stream = self.after(self.attention_post_norm.as_ref(), stream)?;
        let norm = effective(&self.feed_forward_norm, self.norm_plus_one);
        let stream = self.feed_forward.forward(&norm, stream, index, call)?;
        self.after(self.feed_forward_post_norm.as_ref(), stream)
    }

    /// Applies `norm`, if any, to the pending term of the stream.
    fn after(&self, norm: Option<&RmsNorm>, stream: ResidualStream) -> Result<ResidualStream> {
        let Some(norm) = norm.map(|norm| effective(norm, self.norm_plus_one)) else {
            return Ok(stream);
        };
        let ResidualStream { sum, pending } = stream;
        let pending = pending
            .map(|pending| norm.try_forward(pending))
            .transpose()?;
        Ok(ResidualStream { sum, pending })
    }
}

impl Decoder {
    /// Returns the configuration of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the type of the activations.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Returns the device of the model.
    pub fn device(&self) -> Device {
        self.embedding.weight.lazy_device()
    }

    /// Returns true if the rotary embedding of texts of up to `length` tokens does not depend on
    /// their length.
    pub(crate) fn has_fixed_positions(&self, length: usize) -> bool {
        self.positions.is_fixed(length)
    }

    /// Creates an empty cache with space for `batch` sequences of `capacity` tokens, in FP8 if the
    /// model's folder quantizes the cache, else in the type of the activations.
    ///
    /// # Errors
    /// Returns an error if `batch` or `capacity` is zero, or the head dimension is not a multiple
    /// of 8.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.cache_as(batch, capacity, None)
    }

    /// Creates a [`cache`](Self::cache) with the given `precision`, if any.
    ///
    /// # Errors
    /// Returns the errors of [`cache`](Self::cache).
    pub fn cache_as(
        &self,
        batch: usize,
        capacity: usize,
        precision: Option<KvPrecision>,
    ) -> Result<KvCache> {
        let precision = precision.unwrap_or(match self.kv_scales {
            Some(_) => KvPrecision::Fp8,
            None => KvPrecision::Activations,
        });
        let formats = (0..self.config.layers.len()).map(|index| match precision {
            KvPrecision::Activations => KvFormat::Float(self.dtype),
            KvPrecision::Fp8 => {
                let scales = self.kv_scales.as_ref();
                let [k_scale, v_scale] = scales.map_or([1.0; 2], |all| all[index]);
                KvFormat::E4m3 { k_scale, v_scale }
            }
        });
        KvCache::new(&self.config, [batch, capacity], &self.device(), formats)
    }

    /// Returns the input of the head, `[batch, time, d_model]` in the type of the activations: the
    /// final norm for `tokens` (`[batch, time]`), whose sequences start at position 0.
    ///
    /// # Errors
    /// Returns an error if there is no token, or if a type or device does not match.
    pub fn features(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        self.without_cache(tokens, None)
    }

    /// Returns [`features`](Self::features) of rows packed with several documents, whose positions
    /// `rows` describes.
    ///
    /// # Errors
    /// Returns an error if the rows have another shape than the tokens, or if a type or device does
    /// not match.
    pub fn features_packed(&self, tokens: Tensor<2, Int>, rows: &PackedRows) -> Result<Tensor<3>> {
        let [batch, time] = tokens.dims();
        let found = rows.shape();
        ensure!(
            found == [batch, time],
            "`tokens` is [{batch}, {time}], but the rows are {found:?}"
        );
        let tables = self.positions.tables(rows.longest, &tokens.device())?;
        let call = Call {
            tables,
            rows: Some(rows),
            cache: None,
            observer: None,
        };
        self.run(tokens, call)
    }

    /// Returns [`features`](Self::features) of `tokens`, and shows every input of a linear layer to
    /// `observer`.
    ///
    /// # Errors
    /// Returns the errors of [`features`](Self::features) and of the observer.
    pub fn observed(
        &self,
        tokens: Tensor<2, Int>,
        observer: &mut dyn Observer,
    ) -> Result<Tensor<3>> {
        self.without_cache(tokens, Some(observer))
    }

    /// Returns [`features`](Self::features), and shows the inputs of linear layers to `observer`.
    fn without_cache(
        &self,
        tokens: Tensor<2, Int>,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Tensor<3>> {
        let [batch, time] = tokens.dims();
        ensure!(
            batch * time > 0,
            "`tokens` is [{batch}, {time}], but must have at least one token"
        );
        let tables = self.positions.tables(time, &tokens.device())?;
        let call = Call {
            tables,
            rows: None,
            cache: None,
            observer,
        };
        self.run(tokens, call)
    }

    /// Returns [`features`](Self::features) of tokens that follow those in `cache`, and adds them
    /// to it. Row `i` has `counts[i]` new tokens; the rest of the row is padding, whose features
    /// are meaningless.
    ///
    /// # Errors
    /// Returns an error if the number of rows differs from that of the cache, a count exceeds its
    /// row, a sequence would exceed the cache's capacity, or a type or device does not match.
    pub fn features_cached(
        &self,
        tokens: Tensor<2, Int>,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor<3>> {
        let [batch, time] = tokens.dims();
        ensure!(
            batch == cache.lengths().len() && time > 0,
            "`tokens` is [{batch}, {time}], but must be a row of at least one token for each of {} \
             sequences",
            cache.lengths().len()
        );
        let chunk = cache.chunk(time, counts)?;
        let tables = self
            .positions
            .tables(chunk.longest.max(1), &tokens.device())?;
        let cached = Some((&mut *cache, chunk));
        let features = self.run(
            tokens,
            Call {
                tables,
                rows: None,
                cache: cached,
                observer: None,
            },
        )?;
        cache.advance(counts);
        Ok(features)
    }

    /// Returns the logits of the token after each of `tokens` (`[batch, time]`), f32
    /// `[batch, time, vocab]`.
    ///
    /// # Errors
    /// Returns the errors of [`features`](Self::features).
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        Ok(self.logits(self.features(tokens)?))
    }

    /// Runs [`forward`](Self::forward) on tokens that follow those in `cache`.
    ///
    /// # Errors
    /// Returns the errors of [`features_cached`](Self::features_cached).
    pub fn forward_cached(
        &self,
        tokens: Tensor<2, Int>,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor<3>> {
        Ok(self.logits(self.features_cached(tokens, counts, cache)?))
    }

    /// Makes the model compute logits with a head in this precision, rounded to nearest. A decoding
    /// step reads half of the bytes of a bf16 head with FP8, and 28 % with NVFP4. Logits of both
    /// are rounded to the type of the activations; those of FP8 are constants to autodiff. The
    /// high-precision weight is kept: it is the one that is saved, and the embedding if tied.
    ///
    /// # Errors
    /// Returns an error if the width of the model is not a multiple of 64 for FP8, or of 16 for
    /// NVFP4.
    pub fn with_head(self, precision: HeadPrecision) -> Result<Self> {
        let quantized_head = QuantizedHead::try_new(self.head_weight(), precision)?;
        Ok(Self {
            quantized_head,
            ..self
        })
    }

    /// Returns the logits of features: f32 `[..., vocab]`.
    pub fn logits<const D: usize>(&self, features: Tensor<D>) -> Tensor<D> {
        cast(self.rounded_logits(features), FloatDType::F32)
    }

    /// Returns the logits in the output type of the head, or in f32 if they have a soft cap.
    fn rounded_logits<const D: usize>(&self, features: Tensor<D>) -> Tensor<D> {
        let mut dims = features.dims();
        let rows = dims[..D - 1].iter().product();
        let x: Tensor<2> = features.reshape([rows, dims[D - 1]]);
        let logits = match (&self.quantized_head, &self.head) {
            (Some(head), _) => head.forward(x),
            (None, Some(head)) => head.logits(x),
            (None, None) => {
                let table = cast(self.embedding.weight.val(), x.dtype().into());
                x.matmul(table.transpose())
            }
        };
        dims[D - 1] = logits.dims()[1];
        self.capped(logits).reshape(dims)
    }

    /// Applies the soft cap, if any, in f32.
    fn capped(&self, logits: Tensor<2>) -> Tensor<2> {
        let Some(cap) = self.config.logit_cap else {
            return logits;
        };
        let logits = cast(logits, FloatDType::F32).div_scalar(cap);
        logits.tanh().mul_scalar(cap)
    }

    fn run(&self, tokens: Tensor<2, Int>, mut call: Call<'_>) -> Result<Tensor<3>> {
        let mut stream = embed(&self.embedding, &self.config, tokens, self.dtype)?;
        for (index, layer) in self.layers.iter().enumerate() {
            stream = layer.forward(stream, index, &mut call)?;
        }
        let norm = effective(&self.norm, self.config.block.norm_plus_one);
        Ok(norm.try_forward_stream(stream)?.1)
    }
}

/// Returns the input of the first layer.
fn embed(
    embedding: &Embedding,
    config: &DecoderConfig,
    tokens: Tensor<2, Int>,
    dtype: FloatDType,
) -> Result<ResidualStream> {
    let mut x = embedding.try_forward_as(tokens, dtype)?;
    if config.scaled_embedding {
        x = x.mul_scalar(embedding_scale(config.d_model, dtype));
    }
    Ok(ResidualStream::from(x))
}

/// Returns the factor of scaled embeddings, rounded to the type of the activations as by
/// transformers, where it is that of the embedding.
fn embedding_scale(d_model: usize, dtype: FloatDType) -> f32 {
    let scale = (d_model as f64).sqrt() as f32;
    match dtype {
        FloatDType::BF16 => bf16::from_f32(scale).to_f32(),
        FloatDType::F16 => f16::from_f32(scale).to_f32(),
        _ => scale,
    }
}

#[cfg(all(test, feature = "flex"))]
mod adapter_tests;
#[cfg(all(test, feature = "flex"))]
mod fused_tests;
#[cfg(all(test, feature = "flex"))]
mod head_tests;
#[cfg(all(test, feature = "flex"))]
mod load_tests;
#[cfg(all(test, feature = "flex"))]
mod lora_tests;
#[cfg(all(test, feature = "flex"))]
mod odd_tests;
#[cfg(all(test, feature = "flex"))]
mod packed_tests;
#[cfg(all(test, feature = "flex"))]
mod steps_tests;
#[cfg(all(test, feature = "flex"))]
mod tests;
