//! Transformer encoder.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor};
use burn_nn::activation::ActivationConfig;
use burn_nn::{Dropout, Initializer};
use nvfp4_formats::Nvfp4Error;

use super::{add_sublayer, check_cache, norm_between, sublayers};
use crate::functions::or_panic;
use crate::nn::attention::{
    AttentionMask, Masks, MhaCache, MhaInput, MultiHeadAttention, OutputCache,
};
use crate::nn::{LayerNorm, Nvfp4FeedForward, ResidualStream, checked_dropout};
use crate::recipe::Nvfp4Recipe;

/// Configuration of a [`TransformerEncoder`]; the fields and defaults of
/// `burn_nn::transformer::TransformerEncoderConfig`, and a recipe.
#[derive(Config, Debug)]
pub struct TransformerEncoderConfig {
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

impl TransformerEncoderConfig {
    /// Creates an encoder on `device`.
    ///
    /// # Errors
    /// Returns an error if a width is not a positive multiple of 16, `n_heads` does not divide
    /// `d_model`, `dropout` is outside `[0, 1)`, `layer_norm_eps` is not positive, or the device
    /// has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<TransformerEncoder, Nvfp4Error> {
        let layers = (0..self.n_layers).map(|_| TransformerEncoderLayer::try_new(self, device));
        Ok(TransformerEncoder {
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
    pub fn init(&self, device: &Device) -> TransformerEncoder {
        or_panic("TransformerEncoderConfig::init", self.try_init(device))
    }
}

/// Transformer encoder. Replaces `burn_nn::transformer::TransformerEncoder`: same fields, ids and
/// record.
#[derive(Module, Debug)]
pub struct TransformerEncoder {
    /// Layers.
    pub layers: Vec<TransformerEncoderLayer>,
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

/// Input of a [`TransformerEncoder`].
#[derive(Debug, Clone)]
pub struct TransformerEncoderInput {
    tensor: Tensor<3>,
    masks: Masks,
}

impl TransformerEncoderInput {
    /// Creates an input of `tensor`, `[batch, time, d_model]`, of type `f32`, `bf16` or `f16`.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            masks: Masks::default(),
        }
    }

    /// Sets the padding mask, `[batch, time]`; see [`MhaInput::mask_pad`].
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Sets the attention mask, `[batch, time, time]`; see [`MhaInput::mask_attn`].
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn.into());
        self
    }

    /// Hides later positions; see [`MhaInput::causal`].
    pub fn causal(mut self) -> Self {
        self.masks.causal = true;
        self
    }
}

impl TransformerEncoder {
    /// Applies the encoder: `[batch, time, d_model]` to the same shape and dtype.
    ///
    /// # Errors
    /// Returns an error if a shape, dtype or device does not fit.
    pub fn try_forward(&self, input: TransformerEncoderInput) -> Result<Tensor<3>, Nvfp4Error> {
        let TransformerEncoderInput { tensor, masks } = input;
        let mut layers = self.layers.iter();
        let stream = layers.try_fold(tensor.into(), |stream: ResidualStream, layer| {
            let input = layer.checked(stream.sum.clone(), masks.clone())?;
            layer.run(input, stream, None)
        })?;
        Ok(stream.into_sum())
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: TransformerEncoderInput) -> Tensor<3> {
        or_panic("TransformerEncoder::forward", self.try_forward(input))
    }

    /// Applies the encoder to a sequence of which `cache` has the first positions. Computes the
    /// others, and returns all. A mask is that of the whole sequence.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward); also if the input has no position after those in
    /// the cache, its batch is not that of the cache, or the cache is that of another encoder.
    pub fn try_forward_autoregressive_inference(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerEncoderAutoregressiveCache,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let TransformerEncoderInput { tensor, masks } = input;
        check_cache(cache.layers.len(), self.layers.len())?;
        let mut layers = self.layers.iter().zip(&mut cache.layers);
        layers.try_fold(tensor, |x, (layer, cache)| {
            layer.forward_cached(x, masks.clone(), cache)
        })
    }

    /// Panicking version of
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference).
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerEncoderAutoregressiveCache,
    ) -> Tensor<3> {
        or_panic(
            "TransformerEncoder::forward_autoregressive_inference",
            self.try_forward_autoregressive_inference(input, cache),
        )
    }

    /// Creates an empty cache for autoregressive inference.
    pub fn new_autoregressive_cache(&self) -> TransformerEncoderAutoregressiveCache {
        let empty = |_| TransformerEncoderLayerAutoregressiveCache::empty();
        TransformerEncoderAutoregressiveCache {
            layers: self.layers.iter().map(empty).collect(),
        }
    }
}

/// Layer of a [`TransformerEncoder`]: self-attention, then a feed-forward.
#[derive(Module, Debug)]
pub struct TransformerEncoderLayer {
    /// Self-attention.
    pub mha: MultiHeadAttention,
    /// Feed-forward.
    pub pwff: Nvfp4FeedForward,
    /// Norm between the sublayers.
    pub norm_1: LayerNorm,
    /// Norm before the first sublayer with `norm_first`, otherwise after the last one.
    pub norm_2: LayerNorm,
    /// Dropout of the sublayers' outputs.
    pub dropout: Dropout,
    /// True to normalize the input of each sublayer, false to normalize the sum after it.
    #[module(skip)]
    pub norm_first: bool,
}

impl TransformerEncoderLayer {
    /// Creates a layer on `device`.
    ///
    /// # Errors
    /// Same as [`TransformerEncoderConfig::try_init`].
    pub fn try_new(config: &TransformerEncoderConfig, device: &Device) -> Result<Self, Nvfp4Error> {
        let (norm, attention, feed_forward) = sublayers!(config);
        Ok(Self {
            mha: attention.try_init(device)?,
            pwff: feed_forward.try_init(device)?,
            norm_1: norm.try_init(device)?,
            norm_2: norm.try_init(device)?,
            dropout: checked_dropout(config.dropout)?,
            norm_first: config.norm_first,
        })
    }

    /// Panicking version of [`try_new`](Self::try_new).
    #[track_caller]
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        let layer = Self::try_new(config, device);
        or_panic("TransformerEncoderLayer::new", layer)
    }

    /// Applies the layer: `[batch, time, d_model]` to the same shape and dtype. The masks are those
    /// of [`TransformerEncoderInput`].
    ///
    /// # Errors
    /// Same as [`TransformerEncoder::try_forward`].
    pub fn try_forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        self.forward_masked(input, separate(mask_pad, mask_attn))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let output = self.try_forward(input, mask_pad, mask_attn);
        or_panic("TransformerEncoderLayer::forward", output)
    }

    /// Applies the layer to a sequence of which `cache` has the first positions; see
    /// [`TransformerEncoder::try_forward_autoregressive_inference`].
    ///
    /// # Errors
    /// Same as that function.
    pub fn try_forward_autoregressive_inference(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        cache: &mut TransformerEncoderLayerAutoregressiveCache,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        self.forward_cached(input, separate(mask_pad, mask_attn), cache)
    }

    /// Panicking version of
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference).
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        cache: &mut TransformerEncoderLayerAutoregressiveCache,
    ) -> Tensor<3> {
        or_panic(
            "TransformerEncoderLayer::forward_autoregressive_inference",
            self.try_forward_autoregressive_inference(input, mask_pad, mask_attn, cache),
        )
    }

    fn forward_masked(&self, x: Tensor<3>, masks: Masks) -> Result<Tensor<3>, Nvfp4Error> {
        let input = self.checked(x.clone(), masks)?;
        Ok(self.run(input, x.into(), None)?.into_sum())
    }

    fn forward_cached(
        &self,
        x: Tensor<3>,
        masks: Masks,
        cache: &mut TransformerEncoderLayerAutoregressiveCache,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let input = self.checked(x, masks)?;
        let past = cache.output.past("tensor", &input.query)?;
        let input = input.after(past, true);
        let stream = input.query.clone().into();
        let next = self.run(input, stream, Some(&mut cache.mha))?;
        Ok(cache.output.append(next.into_sum()))
    }

    /// Returns the input of the attention, without norm, or an error if the layer does not accept
    /// it.
    fn checked(&self, x: Tensor<3>, masks: Masks) -> Result<MhaInput, Nvfp4Error> {
        let input = MhaInput::self_attn(x).with_masks(masks);
        self.mha.check(&input)?;
        self.pwff.check(&input.query)?;
        let (device, [_, _, width]) = (input.query.device(), input.query.dims());
        (self.norm_1).check_part(["norm_1.gamma", "norm_1.beta"], &device, width)?;
        (self.norm_2).check_part(["norm_2.gamma", "norm_2.beta"], &device, width)?;
        Ok(input)
    }

    /// Applies the layer to the residual stream, whose shape and masks `input` has. `cache` is that
    /// of the attention.
    fn run(
        &self,
        input: MhaInput,
        stream: ResidualStream,
        cache: Option<&mut MhaCache>,
    ) -> Result<ResidualStream, Nvfp4Error> {
        let residual = (&self.dropout, self.norm_first);
        let (mha, pwff) = (&self.mha, &self.pwff);
        // Around the attention are the feed-forwards of the layers before and after, which are like
        // this one.
        let attention = norm_between(&pwff.linear_outer, &self.norm_2, &mha.query);
        let feed_forward = norm_between(&mha.output, &self.norm_1, &pwff.linear_inner);
        let stream = add_sublayer(residual, stream, [attention, feed_forward], |query| {
            Ok(mha.run(input.with_query(query), cache)?.context)
        })?;
        add_sublayer(residual, stream, [feed_forward, attention], |x| {
            self.pwff.try_forward(x)
        })
    }
}

/// Returns the masks of separate arguments.
fn separate(pad: Option<Tensor<2, Bool>>, attn: Option<Tensor<3, Bool>>) -> Masks {
    Masks {
        pad,
        attn: attn.map(AttentionMask::from),
        causal: false,
    }
}

/// Cache of a [`TransformerEncoderLayer`].
#[derive(Debug)]
pub struct TransformerEncoderLayerAutoregressiveCache {
    mha: MhaCache,
    output: OutputCache,
}

impl TransformerEncoderLayerAutoregressiveCache {
    /// Creates an empty cache.
    pub fn empty() -> Self {
        Self {
            mha: MhaCache::autoregressive(),
            output: OutputCache::default(),
        }
    }
}

/// Cache of a [`TransformerEncoder`] for autoregressive inference, created by
/// [`TransformerEncoder::new_autoregressive_cache`]: keys, values and outputs of all layers.
#[derive(Debug)]
pub struct TransformerEncoderAutoregressiveCache {
    layers: Vec<TransformerEncoderLayerAutoregressiveCache>,
}
