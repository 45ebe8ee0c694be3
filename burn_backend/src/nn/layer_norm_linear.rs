//! Norm and the linear layer after it.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor};
use burn_nn::Initializer;
use nvfp4_formats::Nvfp4Error;

use super::input_norm::NormSettings;
use super::{InputNorm, NormKind, Nvfp4Linear, Nvfp4LinearConfig};
use crate::functions::or_panic;
use crate::recipe::Nvfp4Recipe;

/// Configuration of a [`LayerNormLinear`].
#[derive(Config, Debug)]
pub struct LayerNormLinearConfig {
    /// Number of input features, a positive multiple of 16.
    pub d_input: usize,
    /// Number of output features, a positive multiple of 16.
    pub d_output: usize,
    /// True if the linear layer has a bias.
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
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl LayerNormLinearConfig {
    /// Creates a norm and a linear layer on `device`.
    ///
    /// # Errors
    /// Same as [`Nvfp4LinearConfig::try_init`]; also if `epsilon` is not positive.
    pub fn try_init(&self, device: &Device) -> Result<LayerNormLinear, Nvfp4Error> {
        let settings = NormSettings {
            kind: self.normalization,
            epsilon: self.epsilon,
            zero_centered_gamma: self.zero_centered_gamma,
        };
        let linear = Nvfp4LinearConfig::new(self.d_input, self.d_output)
            .with_bias(self.bias)
            .with_initializer(self.initializer.clone())
            .with_recipe(self.recipe.clone())
            .try_init(device)?;
        Ok(LayerNormLinear {
            norm: InputNorm::try_new(self.d_input, settings, device)?,
            linear,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> LayerNormLinear {
        or_panic("LayerNormLinearConfig::init", self.try_init(device))
    }
}

/// Norm, then a linear layer in NVFP4: TransformerEngine's `LayerNormLinear`.
///
/// Values and gradients have the bits of the two modules. The pass that writes the norm also
/// computes the amax values with which the layer quantizes it. The record is that of a module with
/// the fields `norm` ([`LayerNorm`](super::LayerNorm) or [`RmsNorm`](super::RmsNorm)) and `linear`,
/// of burn-nn or of this crate.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn_core::tensor::{Device, Tensor};
/// use burn_nvfp4::nn::{LayerNormLinearConfig, NormKind};
///
/// let device = Device::flex();
/// let config = LayerNormLinearConfig::new(32, 96).with_normalization(NormKind::RmsNorm);
/// let layer = config.init(&device);
/// let x = Tensor::<3>::ones([1, 6, 32], &device);
/// let (y, normed) = layer.try_forward_with_layernorm_output(x)?;
/// assert_eq!((y.dims(), normed.dims()), ([1, 6, 96], [1, 6, 32]));
/// # }
/// # Ok::<(), burn_nvfp4::Nvfp4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct LayerNormLinear {
    /// Norm of the input.
    pub norm: InputNorm,
    /// Linear layer, `[d_input, d_output]`.
    pub linear: Nvfp4Linear,
}

impl LayerNormLinear {
    /// Applies norm and layer: `[..., d_input]` to `[..., d_output]`, in the dtype of `x`.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the width of the norm is not `d_input`.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        Ok(self.try_forward_with_layernorm_output(x)?.0)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("LayerNormLinear::forward", self.try_forward(x))
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
        self.linear.check(&x)?;
        self.norm.check(&x)?;
        let normed = (self.norm).try_forward_for(&self.linear, |value| value, x)?;
        Ok((self.linear.try_forward(normed.clone())?, normed))
    }
}
