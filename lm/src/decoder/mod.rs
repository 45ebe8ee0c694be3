//! Decoders of Hugging Face's Llama, Mistral, Qwen3, Qwen3-MoE and Mixtral, as Burn modules.
//!
//! - [`Decoder`]: the model, without a cache and with one.
//! - [`load`] and [`save`]: from a folder and to one, tensor by tensor; [`names`] says which tensor
//!   is which parameter.
//! - [`lora`]: low-rank adapters beside frozen projections; [`Decoder::into_lora`] adds them.
//! - [`FrozenForm`]: weights that are not trained, in high precision or packed.
//! - [`projection`]: the linear layers, in one of the forms that a weight may have.
//! - [`attention`], [`feed_forward`] and [`positions`]: the parts of a layer.
//! - [`cache`]: keys and values of tokens that the model has seen.
//! - [`observe`]: what the linear layers read.
//! - [`generate`] and [`steps`]: texts that go on with prompts.
//!
//! What is fused here is one weight: queries, keys and values, and gate and up. Their parts share
//! one global scale when they are quantized, which every engine that serves NVFP4 needs.

mod adapters;
pub mod attention;
pub mod cache;
mod call;
pub mod feed_forward;
mod frozen;
pub mod generate;
mod head_precision;
pub mod load;
pub mod lora;
pub mod names;
pub mod observe;
mod packed;
mod packed_rows;
pub mod positions;
pub mod projection;
mod random;
pub mod save;
pub mod scaled;
pub mod steps;
mod training;
mod values;

pub use cache::{KvCache, KvPrecision};
pub use frozen::FrozenForm;
pub use generate::Generation;
pub use head_precision::HeadPrecision;
pub use lora::LoraConfig;
pub use packed_rows::PackedRows;
pub use steps::DecodeSteps;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_nvfp4::decode::KvFormat;
use burn_nvfp4::nn::{Embedding, LmHead, ResidualStream, RmsNorm};

use crate::hf::DecoderConfig;
use crate::model::cast;
use attention::Attention;
use call::Call;
use feed_forward::FeedForward;
use head_precision::QuantizedHead;
use observe::Observer;
use positions::Positions;

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Decoder {
    /// One row per token, `[vocab, d_model]`.
    pub embedding: Embedding,
    /// The layers, in order.
    pub layers: Vec<DecoderLayer>,
    /// Before the head.
    pub norm: RmsNorm,
    /// From features to logits; `None` where it is the embedding.
    pub head: Option<LmHead>,
    /// The head in fewer bits, for inference: logits are computed with it where it is there.
    quantized_head: Option<QuantizedHead>,
    #[module(skip)]
    config: DecoderConfig,
    #[module(skip)]
    dtype: FloatDType,
    #[module(skip)]
    positions: Positions,
    /// Of keys and of values of each layer, where the folder quantizes the cache to FP8.
    #[module(skip)]
    kv_scales: Option<Vec<[f32; 2]>>,
}

/// One layer: attention and feed-forward, each behind a norm and added to the residual stream.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// `input_layernorm`.
    pub attention_norm: RmsNorm,
    /// `self_attn`.
    pub attention: Attention,
    /// `post_attention_layernorm`.
    pub feed_forward_norm: RmsNorm,
    /// `mlp` or `block_sparse_moe`.
    pub feed_forward: FeedForward,
}

impl DecoderLayer {
    fn forward(
        &self,
        stream: ResidualStream,
        index: usize,
        call: &mut Call<'_>,
    ) -> Result<ResidualStream> {
        let stream = self
            .attention
            .forward(&self.attention_norm, stream, index, call)?;
        self.feed_forward
            .forward(&self.feed_forward_norm, stream, index, call)
    }
}

impl Decoder {
    /// What the model was built from.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Type of the activations.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Where the model is.
    pub fn device(&self) -> Device {
        self.embedding.weight.lazy_device()
    }

    /// Whether rotary positions of texts of up to `length` tokens do not depend on their length.
    pub(crate) fn has_fixed_positions(&self, length: usize) -> bool {
        self.positions.is_fixed(length)
    }

    /// An empty cache: room for `batch` sequences of `capacity` tokens, in FP8 where the model's
    /// folder quantizes the cache, and else in the type of the activations.
    ///
    /// # Errors
    /// When one of both is zero, or heads are no multiple of 8.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.cache_as(batch, capacity, None)
    }

    /// [`cache`](Self::cache), stored as `precision` says where it is given.
    ///
    /// # Errors
    /// As [`cache`](Self::cache).
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

    /// What the head reads, `[batch, time, d_model]` in the type of the activations: the final norm
    /// of `tokens` (`[batch, time]`), whose sequences start at position 0.
    ///
    /// # Errors
    /// When there is no token, or a type or device does not fit.
    pub fn features(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        self.without_cache(tokens, None)
    }

    /// [`features`](Self::features) of rows of several documents, which lie as `rows` says.
    ///
    /// # Errors
    /// When the rows are of another shape than the tokens, or a type or device does not fit.
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

    /// [`features`](Self::features) of `tokens`, with every input of a linear layer shown to
    /// `observer`.
    ///
    /// # Errors
    /// As [`features`](Self::features), and those of the observer.
    pub fn observed(
        &self,
        tokens: Tensor<2, Int>,
        observer: &mut dyn Observer,
    ) -> Result<Tensor<3>> {
        self.without_cache(tokens, Some(observer))
    }

    /// [`features`](Self::features), with what linear layers read shown to `observer`.
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

    /// As [`features`](Self::features) of tokens that come behind those in `cache`, which takes
    /// them up: `counts[i]` of row `i`; the rest of the row is padding, whose features have no
    /// meaning.
    ///
    /// # Errors
    /// When rows and cache differ in number, a count is longer than its row, a sequence would get
    /// longer than the cache's capacity, or a type or device does not fit.
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

    /// The logits of the token after each of `tokens` (`[batch, time]`), f32
    /// `[batch, time, vocab]`.
    ///
    /// # Errors
    /// As [`features`](Self::features).
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        Ok(self.logits(self.features(tokens)?))
    }

    /// [`forward`](Self::forward) of tokens behind those in `cache`.
    ///
    /// # Errors
    /// As [`features_cached`](Self::features_cached).
    pub fn forward_cached(
        &self,
        tokens: Tensor<2, Int>,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor<3>> {
        Ok(self.logits(self.features_cached(tokens, counts, cache)?))
    }

    /// The same model, whose logits are computed with a head in this precision, to nearest: a step
    /// of decoding reads half of the bytes of a bf16 head in FP8, and 28 % in NVFP4. Logits of both
    /// are rounded to the type of the activations; those of FP8 are constants to autodiff. The
    /// weight in high precision stays, and is the one that is saved; where it is the embedding,
    /// tokens are looked up in it.
    ///
    /// # Errors
    /// When the width of the model is no multiple of 64 in FP8, or of 16 in NVFP4.
    pub fn with_head(self, precision: HeadPrecision) -> Result<Self> {
        let quantized_head = QuantizedHead::try_new(self.head_weight(), precision)?;
        Ok(Self {
            quantized_head,
            ..self
        })
    }

    /// The logits of features: f32 `[..., vocab]`.
    pub fn logits<const D: usize>(&self, features: Tensor<D>) -> Tensor<D> {
        cast(self.rounded_logits(features), FloatDType::F32)
    }

    /// The logits in the type in which the head gives them.
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
        logits.reshape(dims)
    }

    fn run(&self, tokens: Tensor<2, Int>, mut call: Call<'_>) -> Result<Tensor<3>> {
        let x = self.embedding.try_forward(tokens, self.dtype)?;
        let mut stream = ResidualStream::from(x);
        for (index, layer) in self.layers.iter().enumerate() {
            stream = layer.forward(stream, index, &mut call)?;
        }
        Ok(self.norm.try_forward_stream(stream)?.1)
    }
}

#[cfg(all(test, feature = "flex"))]
mod head_tests;
#[cfg(all(test, feature = "flex"))]
mod load_tests;
#[cfg(all(test, feature = "flex"))]
mod packed_tests;
#[cfg(all(test, feature = "flex"))]
mod steps_tests;
#[cfg(all(test, feature = "flex"))]
mod tests;
