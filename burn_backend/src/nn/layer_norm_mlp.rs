//! Norm and the feed-forward after it.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor};
use burn_nn::Initializer;
use nvfp4_formats::Nvfp4Error;

use super::feed_forward::{check_pair, feed_forward_of};
use super::input_norm::NormSettings;
use super::{InputNorm, MlpActivation, NormKind, Nvfp4Linear, Nvfp4LinearConfig, rows};
use crate::functions::or_panic;
use crate::recipe::Nvfp4Recipe;

/// Configuration of a [`LayerNormMlp`].
#[derive(Config, Debug)]
pub struct LayerNormMlpConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Hidden width, a positive multiple of 16.
    pub d_hidden: usize,
    /// True if both linear layers have a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Kind of the norm.
    #[config(default = "NormKind::LayerNorm")]
    pub normalization: NormKind,
    /// ε of the norm; positive.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// True if the parameter γ of the norm is stored as γ - 1.
    #[config(default = false)]
    pub zero_centered_gamma: bool,
    /// Activation between the linear layers.
    #[config(default = "MlpActivation::Gelu")]
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the activation instead of keeping it; see
    /// [`Nvfp4SwiGlu::with_recompute`](super::Nvfp4SwiGlu::with_recompute). For GELU and SwiGLU.
    #[config(default = false)]
    pub recompute: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl LayerNormMlpConfig {
    /// Creates a norm and a feed-forward on `device`.
    ///
    /// # Errors
    /// Same as [`Nvfp4LinearConfig::try_init`]; also if `epsilon` is not positive, or the
    /// activation does not support `recompute`.
    pub fn try_init(&self, device: &Device) -> Result<LayerNormMlp, Nvfp4Error> {
        let settings = NormSettings {
            kind: self.normalization,
            epsilon: self.epsilon,
            zero_centered_gamma: self.zero_centered_gamma,
        };
        self.activation.check_recompute(self.recompute)?;
        let linear = |d_input, d_output| {
            Nvfp4LinearConfig::new(d_input, d_output)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        let d_inner = self.activation.inputs() * self.d_hidden;
        Ok(LayerNormMlp {
            norm: InputNorm::try_new(self.d_model, settings, device)?,
            linear_inner: linear(self.d_model, d_inner)?,
            linear_outer: linear(self.d_hidden, self.d_model)?,
            activation: self.activation,
            recompute: self.recompute,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> LayerNormMlp {
        or_panic("LayerNormMlpConfig::init", self.try_init(device))
    }
}

/// Norm, then a feed-forward with both GEMMs in NVFP4: TransformerEngine's `LayerNormMLP`.
///
/// Values and gradients have the bits of the separate modules. The pass that writes the norm also
/// computes the amax values with which the first layer quantizes it. GELU and SwiGLU are one
/// operation with the quantization of their output, as in [`Nvfp4SwiGlu`](super::Nvfp4SwiGlu).
///
/// The record is that of a module with the fields `norm` ([`LayerNorm`](super::LayerNorm) or
/// [`RmsNorm`](super::RmsNorm)), and `linear_inner` and `linear_outer`, as in burn-nn's
/// position-wise feed-forward. For experts, apply the norm before the router, and
/// [`try_feed_forward_of_experts`](super::try_feed_forward_of_experts) after it.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn_core::tensor::{Device, Tensor};
/// use burn_nvfp4::nn::LayerNormMlpConfig;
///
/// let mlp = LayerNormMlpConfig::new(32, 64)
///     .with_activation("swiglu".parse()?)
///     .with_zero_centered_gamma(true)
///     .init(&Device::flex());
/// assert_eq!(mlp.linear_inner.weight.dims(), [32, 128]);
/// let y = mlp.forward(Tensor::<3>::ones([1, 6, 32], &Device::flex()));
/// assert_eq!(y.dims(), [1, 6, 32]);
/// # }
/// # Ok::<(), burn_nvfp4::Nvfp4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct LayerNormMlp {
    /// Norm of the input.
    pub norm: InputNorm,
    /// First layer, `[d_model, d_hidden]`, or for a gated activation `[d_model, 2 * d_hidden]`:
    /// the gate, then the factor.
    pub linear_inner: Nvfp4Linear,
    /// Second layer, `[d_hidden, d_model]`.
    pub linear_outer: Nvfp4Linear,
    /// Activation between the linear layers.
    #[module(skip)]
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the activation.
    #[module(skip)]
    pub recompute: bool,
}

impl LayerNormMlp {
    /// Applies norm and feed-forward: `[..., d_model]` to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the shapes of norm and layers do not match, or
    /// the activation does not support `recompute`.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        Ok(self.try_forward_with_layernorm_output(x)?.0)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("LayerNormMlp::forward", self.try_forward(x))
    }

    /// Version of [`try_forward`](Self::try_forward) that also returns the output of the norm, of
    /// the shape and dtype of `x`: TransformerEngine's `return_layernorm_output`.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward).
    pub fn try_forward_with_layernorm_output<const D: usize>(
        &self,
        x: Tensor<D>,
    ) -> Result<(Tensor<D>, Tensor<D>), Nvfp4Error> {
        let (inner, outer) = (&self.linear_inner, &self.linear_outer);
        self.activation.check_recompute(self.recompute)?;
        let names = ["linear_outer.weight", "linear_outer.bias"];
        check_pair(inner, (names, outer), self.activation, &x)?;
        self.norm.check(&x)?;
        let normed = (self.norm).try_forward_for(inner, |value| value, x)?;
        let (x, dims) = rows(normed.clone());
        let settings = (self.activation, self.recompute);
        let y = feed_forward_of((inner, outer), settings, x)?;
        Ok((y.reshape(dims), normed))
    }
}
