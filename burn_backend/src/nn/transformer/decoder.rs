//! Transformer decoder with cross-attention.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor};
use burn_nn::activation::ActivationConfig;
use burn_nn::{Dropout, Initializer};
use nvfp4_formats::Nvfp4Error;

use super::{add_sublayer, check_cache, norm_between, sublayers};
use crate::functions::or_panic;
use crate::nn::attention::{Masks, MhaCache, MhaInput, MultiHeadAttention, Names, OutputCache};
use crate::nn::{LayerNorm, Nvfp4FeedForward, ResidualStream, checked_dropout};
use crate::recipe::Nvfp4Recipe;

/// Configuration of a [`TransformerDecoder`]; the fields and defaults of
/// `burn_nn::transformer::TransformerDecoderConfig`, and a recipe.
#[derive(Config, Debug)]
pub struct TransformerDecoderConfig {
    /// Width of the residual stream, a positive multiple of 16.
    pub d_model: usize,
    /// Hidden width of the feed-forwards, a positive multiple of 16.
    pub d_ff: usize,
    /// Number of attention heads. Must divide `d_model`.
    pub n_heads: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Dropout probability of attention weights, hidden features and sublayers, in `[0, 1)`. In
    /// training, only 0 allows the kernels of attention.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// True to normalize the input of each sublayer, false to normalize the sum after it.
    #[config(default = false)]
    pub norm_first: bool,
    /// True to add one to the denominator of the softmax, so that a head can attend to nothing.
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Activation of the feed-forwards.
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// ε of the norms, added to the variance; positive.
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl TransformerDecoderConfig {
    /// Creates a decoder on `device`.
    ///
    /// # Errors
    /// Returns an error if a width is not a positive multiple of 16, `n_heads` does not divide
    /// `d_model`, `dropout` is outside `[0, 1)`, `layer_norm_eps` is not positive, or the device
    /// has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<TransformerDecoder, Nvfp4Error> {
        let layers = (0..self.n_layers).map(|_| TransformerDecoderLayer::try_new(self, device));
        Ok(TransformerDecoder {
            layers: layers.collect::<Result<_, _>>()?,
            d_model: self.d_model,
            d_ff: self.d_ff,
            n_heads: self.n_heads,
            n_layers: self.n_layers,
            dropout: self.dropout,
            norm_first: self.norm_first,
            quiet_softmax: self.quiet_softmax,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> TransformerDecoder {
        or_panic("TransformerDecoderConfig::init", self.try_init(device))
    }
}

/// Transformer decoder with cross-attention to a memory. Replaces
/// `burn_nn::transformer::TransformerDecoder`: same fields, ids and record.
#[derive(Module, Debug)]
pub struct TransformerDecoder {
    /// Layers.
    pub layers: Vec<TransformerDecoderLayer>,
    /// Width of the residual stream.
    #[module(skip)]
    pub d_model: usize,
    /// Hidden width of the feed-forwards.
    #[module(skip)]
    pub d_ff: usize,
    /// Number of attention heads.
    #[module(skip)]
    pub n_heads: usize,
    /// Number of layers.
    #[module(skip)]
    pub n_layers: usize,
    /// Dropout probability.
    #[module(skip)]
    pub dropout: f64,
    /// True to normalize the input of each sublayer, false to normalize the sum after it.
    #[module(skip)]
    pub norm_first: bool,
    /// True to add one to the denominator of the softmax.
    #[module(skip)]
    pub quiet_softmax: bool,
}

/// Input of a [`TransformerDecoder`], and output of its layers, which replace the target.
#[derive(Debug, Clone)]
pub struct TransformerDecoderInput {
    target: Tensor<3>,
    target_masks: Masks,
    memory: Tensor<3>,
    memory_masks: Masks,
}

impl TransformerDecoderInput {
    /// Creates an input of `target`, `[batch, time, d_model]`, and the `memory` that it attends to,
    /// `[batch, keys, d_model]`; both of one type, `f32`, `bf16` or `f16`.
    pub fn new(target: Tensor<3>, memory: Tensor<3>) -> Self {
        Self {
            target,
            target_masks: Masks::default(),
            memory,
            memory_masks: Masks::default(),
        }
    }

    /// Sets the padding mask of the memory, `[batch, keys]`; see [`MhaInput::mask_pad`].
    pub fn memory_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.memory_masks.pad = Some(mask_pad);
        self
    }

    /// Sets the mask of cross-attention, `[batch, time, keys]`; see [`MhaInput::mask_attn`].
    pub fn memory_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.memory_masks.attn = Some(mask_attn.into());
        self
    }

    /// Sets the padding mask of the target, `[batch, time]`; see [`MhaInput::mask_pad`].
    pub fn target_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.target_masks.pad = Some(mask_pad);
        self
    }

    /// Sets the mask of self-attention, `[batch, time, time]`; see [`MhaInput::mask_attn`].
    pub fn target_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.target_masks.attn = Some(mask_attn.into());
        self
    }

    /// Hides later positions of the target; see [`MhaInput::causal`].
    pub fn target_causal(mut self) -> Self {
        self.target_masks.causal = true;
        self
    }

    /// Returns the inputs of self-attention and cross-attention, without norms.
    fn attention_inputs(&self) -> [MhaInput; 2] {
        let (target, memory) = (self.target.clone(), self.memory.clone());
        let of_target = Names {
            query: "target",
            key: "target",
            value: "target",
            mask_pad: "target_mask_pad",
            mask_attn: "target_mask_attn",
        };
        let of_memory = Names {
            key: "memory",
            value: "memory",
            mask_pad: "memory_mask_pad",
            mask_attn: "memory_mask_attn",
            ..of_target
        };
        [
            MhaInput::self_attn(target.clone())
                .with_masks(self.target_masks.clone())
                .with_names(of_target),
            MhaInput::new(target, memory.clone(), memory)
                .with_masks(self.memory_masks.clone())
                .with_names(of_memory),
        ]
    }
}

impl TransformerDecoder {
    /// Applies the decoder. The output has the shape and dtype of the target.
    ///
    /// # Errors
    /// Returns an error if a shape, dtype or device does not fit.
    pub fn try_forward(&self, input: TransformerDecoderInput) -> Result<Tensor<3>, Nvfp4Error> {
        let mut layers = self.layers.iter();
        let stream = ResidualStream::from(input.target.clone());
        let stream = layers.try_fold(stream, |stream, layer| {
            layer.run(layer.checked(&input)?, stream, None)
        })?;
        Ok(stream.into_sum())
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: TransformerDecoderInput) -> Tensor<3> {
        or_panic("TransformerDecoder::forward", self.try_forward(input))
    }

    /// Applies the decoder to a target of which `cache` has the first positions. Computes the
    /// others, and returns all. Masks are those of the whole target. The memory is projected in the
    /// first call; later calls use the cached keys and values.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward); also if the target has no position after those
    /// in the cache, its batch is not that of the cache, or the cache is that of another decoder.
    pub fn try_forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderAutoregressiveCache,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        check_cache(cache.layers.len(), self.layers.len())?;
        let mut layers = self.layers.iter().zip(&mut cache.layers);
        let output = layers.try_fold(input, |input, (layer, cache)| {
            layer.try_forward_autoregressive_inference(input, cache)
        })?;
        Ok(output.target)
    }

    /// Panicking version of
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference).
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderAutoregressiveCache,
    ) -> Tensor<3> {
        or_panic(
            "TransformerDecoder::forward_autoregressive_inference",
            self.try_forward_autoregressive_inference(input, cache),
        )
    }

    /// Creates an empty cache for autoregressive inference.
    pub fn new_autoregressive_cache(&self) -> TransformerDecoderAutoregressiveCache {
        let empty = |_| TransformerDecoderLayerAutoregressiveCache::empty();
        TransformerDecoderAutoregressiveCache {
            layers: self.layers.iter().map(empty).collect(),
        }
    }
}

/// Layer of a [`TransformerDecoder`]: self-attention, cross-attention, then a feed-forward.
#[derive(Module, Debug)]
pub struct TransformerDecoderLayer {
    /// Cross-attention.
    pub cross_attn: MultiHeadAttention,
    /// Self-attention.
    pub self_attn: MultiHeadAttention,
    /// Feed-forward.
    pub pwff: Nvfp4FeedForward,
    /// Norm between self-attention and cross-attention.
    pub norm_1: LayerNorm,
    /// Norm between cross-attention and feed-forward.
    pub norm_2: LayerNorm,
    /// Norm before the first sublayer with `norm_first`, otherwise after the last one.
    pub norm_3: LayerNorm,
    /// Dropout of the sublayers' outputs.
    pub dropout: Dropout,
    /// True to normalize the input of each sublayer, false to normalize the sum after it.
    #[module(skip)]
    pub norm_first: bool,
}

impl TransformerDecoderLayer {
    /// Creates a layer on `device`.
    ///
    /// # Errors
    /// Same as [`TransformerDecoderConfig::try_init`].
    pub fn try_new(config: &TransformerDecoderConfig, device: &Device) -> Result<Self, Nvfp4Error> {
        let (norm, attention, feed_forward) = sublayers!(config);
        Ok(Self {
            cross_attn: attention.try_init(device)?,
            self_attn: attention.try_init(device)?,
            pwff: feed_forward.try_init(device)?,
            norm_1: norm.try_init(device)?,
            norm_2: norm.try_init(device)?,
            norm_3: norm.try_init(device)?,
            dropout: checked_dropout(config.dropout)?,
            norm_first: config.norm_first,
        })
    }

    /// Panicking version of [`try_new`](Self::try_new).
    #[track_caller]
    pub fn new(config: &TransformerDecoderConfig, device: &Device) -> Self {
        let layer = Self::try_new(config, device);
        or_panic("TransformerDecoderLayer::new", layer)
    }

    /// Applies the layer. The output is the input with another target.
    ///
    /// # Errors
    /// Same as [`TransformerDecoder::try_forward`].
    pub fn try_forward(
        &self,
        input: TransformerDecoderInput,
    ) -> Result<TransformerDecoderInput, Nvfp4Error> {
        let stream = input.target.clone().into();
        let stream = self.run(self.checked(&input)?, stream, None)?;
        let target = stream.into_sum();
        Ok(TransformerDecoderInput { target, ..input })
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: TransformerDecoderInput) -> TransformerDecoderInput {
        or_panic("TransformerDecoderLayer::forward", self.try_forward(input))
    }

    /// Applies the layer to a target of which `cache` has the first positions; see
    /// [`TransformerDecoder::try_forward_autoregressive_inference`].
    ///
    /// # Errors
    /// Same as that function.
    pub fn try_forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderLayerAutoregressiveCache,
    ) -> Result<TransformerDecoderInput, Nvfp4Error> {
        let [of_target, of_memory] = self.checked(&input)?;
        let past = cache.output.past("target", &input.target)?;
        cache.cross_attn.check_keys(&of_memory)?;
        let inputs = [of_target.after(past, true), of_memory.after(past, false)];
        let stream = inputs[0].query.clone().into();
        let caches = [&mut cache.self_attn, &mut cache.cross_attn];
        let next = self.run(inputs, stream, Some(caches))?;
        let target = cache.output.append(next.into_sum());
        Ok(TransformerDecoderInput { target, ..input })
    }

    /// Panicking version of
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference).
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderLayerAutoregressiveCache,
    ) -> TransformerDecoderInput {
        or_panic(
            "TransformerDecoderLayer::forward_autoregressive_inference",
            self.try_forward_autoregressive_inference(input, cache),
        )
    }

    /// Returns the inputs of both attentions, without norms, or an error if the layer does not
    /// accept them.
    fn checked(&self, input: &TransformerDecoderInput) -> Result<[MhaInput; 2], Nvfp4Error> {
        let [of_target, of_memory] = input.attention_inputs();
        self.self_attn.check(&of_target)?;
        self.cross_attn.check(&of_memory)?;
        self.pwff.check(&input.target)?;
        let (device, [_, _, width]) = (input.target.device(), input.target.dims());
        (self.norm_1).check_part(["norm_1.gamma", "norm_1.beta"], &device, width)?;
        (self.norm_2).check_part(["norm_2.gamma", "norm_2.beta"], &device, width)?;
        (self.norm_3).check_part(["norm_3.gamma", "norm_3.beta"], &device, width)?;
        Ok([of_target, of_memory])
    }

    /// Applies the layer to the residual stream, whose shape the queries of the inputs of
    /// self-attention and cross-attention have. `caches` are those of the attentions.
    fn run(
        &self,
        [of_target, of_memory]: [MhaInput; 2],
        stream: ResidualStream,
        caches: Option<[&mut MhaCache; 2]>,
    ) -> Result<ResidualStream, Nvfp4Error> {
        let residual = (&self.dropout, self.norm_first);
        let (own, cross) = caches.map(|[own, cross]| (own, cross)).unzip();
        let (self_attn, cross_attn, pwff) = (&self.self_attn, &self.cross_attn, &self.pwff);
        // Around the self-attention are the feed-forwards of the layers before and after, which are
        // like this one.
        let self_attention = norm_between(&pwff.linear_outer, &self.norm_3, &self_attn.query);
        let cross_attention = norm_between(&self_attn.output, &self.norm_1, &cross_attn.query);
        let feed_forward = norm_between(&cross_attn.output, &self.norm_2, &pwff.linear_inner);
        let norms = [self_attention, cross_attention];
        let stream = add_sublayer(residual, stream, norms, |query| {
            Ok(self_attn.run(of_target.with_query(query), own)?.context)
        })?;
        let norms = [cross_attention, feed_forward];
        let stream = add_sublayer(residual, stream, norms, |query| {
            Ok(cross_attn.run(of_memory.with_query(query), cross)?.context)
        })?;
        let norms = [feed_forward, self_attention];
        add_sublayer(residual, stream, norms, |x| pwff.try_forward(x))
    }
}

/// Cache of a [`TransformerDecoderLayer`].
#[derive(Debug)]
pub struct TransformerDecoderLayerAutoregressiveCache {
    cross_attn: MhaCache,
    self_attn: MhaCache,
    output: OutputCache,
}

impl TransformerDecoderLayerAutoregressiveCache {
    /// Creates an empty cache.
    pub fn empty() -> Self {
        Self {
            cross_attn: MhaCache::autoregressive_cross_attention(),
            self_attn: MhaCache::autoregressive(),
            output: OutputCache::default(),
        }
    }
}

/// Cache of a [`TransformerDecoder`] for autoregressive inference, created by
/// [`TransformerDecoder::new_autoregressive_cache`]: keys, values and outputs of all layers.
#[derive(Debug)]
pub struct TransformerDecoderAutoregressiveCache {
    layers: Vec<TransformerDecoderLayerAutoregressiveCache>,
}
