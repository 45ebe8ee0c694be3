//! Decoders with random weights for benchmarks; no folder is read.

use anyhow::{Result, ensure};
use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_nvfp4::nn::{
    Activations, Embedding, LmHead, Nvfp4PackedLinear, Nvfp4Weight, RmsNorm, RmsNormConfig,
};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::Rng;

use super::attention::{Attention, Heads};
use super::feed_forward::{FeedForward, Gated};
use super::positions::Positions;
use super::projection::Projection;
use super::{Decoder, DecoderLayer, FrozenForm};
use crate::hf::{BlockConfig, DecoderConfig, FeedForwardConfig, LayerConfig};
use crate::model::check_dtype;
use crate::random::stream;

/// Standard deviation of weights.
const DEVIATION: f32 = 0.02;
/// Standard deviation of E2M1 values under uniformly distributed codes.
const OF_CODES: f32 = 2.93;

impl Decoder {
    /// Creates a model with random weights in `form`. Embedding, head and norms are in high
    /// precision; high-precision matrices have type `dtype`.
    ///
    /// # Errors
    /// Returns an error if a layer differs from Llama's or has experts, or if the device lacks the
    /// type or the memory.
    pub fn random(
        config: &DecoderConfig,
        device: &Device,
        dtype: FloatDType,
        form: FrozenForm,
        seed: u64,
    ) -> Result<Self> {
        check_dtype(dtype, device)?;
        ensure!(
            config.block == BlockConfig::default(),
            "random weights are for models whose layers are those of Llama"
        );
        let mut random = Random {
            config,
            device,
            dtype,
            form,
            bytes: stream(seed, "packed", 0),
        };
        let embedding = random.dense([config.vocab, config.d_model]);
        let head = match config.tied {
            true => None,
            false => {
                let head = random.dense([config.vocab, config.d_model]);
                Some(LmHead::new(Param::from_tensor(head.transpose())))
            }
        };
        let layers = config.layers.iter().map(|layer| random.layer(layer));
        Ok(Self {
            embedding: Embedding::new(Param::from_tensor(embedding)),
            layers: layers.collect::<Result<_>>()?,
            norm: random.norm(),
            head,
            quantized_head: None,
            config: config.clone(),
            dtype,
            positions: Positions::new(config),
            kv_scales: None,
        })
    }

    /// Returns the bytes of packed weights, including an FP8 or NVFP4 head, and the bytes of all
    /// weights that a decoding step reads: packed weights, an unpacked head, and norms. The lookup
    /// of one embedding row is not counted.
    pub fn bytes_of_step(&self) -> (usize, usize) {
        let of = |projection: &Projection| match projection {
            Projection::Packed(layer) => (layer.weight.bytes(), 0),
            Projection::Scaled(layer) => {
                let scale = layer.scale.val().shape().num_elements() * 4;
                (layer.linear.weight.bytes(), scale)
            }
            other => {
                let (weight, _) = other.dense();
                (0, weight.shape().num_elements() * weight.dtype().size())
            }
        };
        let norm = |norm: &RmsNorm| norm.gamma.val().shape().num_elements() * 4;
        let mut packed = 0;
        let mut others = norm(&self.norm);
        for layer in &self.layers {
            for (of_packed, other) in layer.projections().into_iter().map(|(_, it)| of(it)) {
                packed += of_packed;
                others += other;
            }
            others += norm(&layer.attention_norm) + norm(&layer.feed_forward_norm);
            let post = [&layer.attention_post_norm, &layer.feed_forward_post_norm];
            others += post.into_iter().flatten().map(norm).sum::<usize>();
        }
        if let Some(head) = &self.quantized_head {
            packed += head.bytes();
            return (packed, packed + others);
        }
        let head = self.head_weight();
        others += head.shape().num_elements() * head.dtype().size();
        (packed, packed + others)
    }
}

/// Source of random weights.
struct Random<'a> {
    config: &'a DecoderConfig,
    device: &'a Device,
    dtype: FloatDType,
    form: FrozenForm,
    bytes: ChaCha8Rng,
}

impl Random<'_> {
    /// Returns a matrix in high precision.
    fn dense(&self, shape: [usize; 2]) -> Tensor<2> {
        let distribution = Distribution::Normal(0.0, f64::from(DEVIATION));
        let options = (self.device, DType::from(self.dtype));
        Tensor::random(shape, distribution, options)
    }

    fn norm(&self) -> RmsNorm {
        let norm = RmsNormConfig::new(self.config.d_model).with_epsilon(self.config.epsilon);
        norm.init(self.device)
    }

    fn layer(&mut self, layer: &LayerConfig) -> Result<DecoderLayer> {
        let config = self.config;
        let FeedForwardConfig::Dense { hidden } = layer.feed_forward else {
            anyhow::bail!("random weights are for models without experts");
        };
        let (width, heads) = (config.d_model, config.heads + 2 * config.kv_heads);
        Ok(DecoderLayer {
            attention_norm: self.norm(),
            attention: Attention {
                qkv: self.projection([heads * config.head, width])?,
                out: self.projection([width, config.heads * config.head])?,
                q_norm: None,
                k_norm: None,
                latent: None,
                sinks: None,
                heads: Heads::new(config, layer),
            },
            attention_post_norm: None,
            feed_forward_norm: self.norm(),
            feed_forward: FeedForward::Dense(Gated {
                gate_up: self.projection([2 * hidden, width])?,
                down: self.projection([width, hidden])?,
                activation: config.block.activation,
                recompute: false,
            }),
            feed_forward_post_norm: None,
            norm_plus_one: false,
        })
    }

    fn projection(&mut self, [n, k]: [usize; 2]) -> Result<Projection> {
        let activations = match self.form {
            FrozenForm::High => {
                let weight = Param::from_tensor(self.dense([k, n]));
                return Ok(Projection::Dense(Linear { weight, bias: None }));
            }
            FrozenForm::W4a16 => Activations::HighPrecision,
            FrozenForm::W4a4 => Activations::DYNAMIC,
        };
        let mut codes = vec![0; n * k / 2];
        self.bytes.fill_bytes(&mut codes);
        let mut scales = vec![0; n * k / 16];
        self.bytes.fill_bytes(&mut scales);
        // Values from 0.5 to 1.875.
        for scale in &mut scales {
            *scale = 0x30 | (*scale & 0x0F);
        }
        let global = vec![DEVIATION / OF_CODES];
        let weight = Nvfp4Weight::try_from_bytes([n, k], codes, scales, global, self.device)?;
        let layer = Nvfp4PackedLinear::try_new(weight, activations, None, None)?;
        Ok(Projection::Packed(layer))
    }
}
