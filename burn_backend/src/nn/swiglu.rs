//! burn-nn's gated activation, in NVFP4.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor};
use burn_nn::{Initializer, LinearLayout};
use nvfp4_formats::Nvfp4Error;

use super::{Nvfp4Linear, Nvfp4LinearConfig};
use crate::functions::{or_panic, try_swiglu};
use crate::recipe::Nvfp4Recipe;
use crate::whole::whole_dims;

/// Configuration of a [`SwiGlu`]; the fields and defaults of `burn_nn::SwiGluConfig`, and a recipe.
#[derive(Config, Debug)]
pub struct SwiGluConfig {
    /// Number of input features, a positive multiple of 16.
    pub d_input: usize,
    /// Number of output features, a positive multiple of 16.
    pub d_output: usize,
    /// True if the projections have a bias.
    #[config(default = false)]
    pub bias: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Layout of the weights in records, as in `burn_nn::LinearConfig`.
    #[config(default = "LinearLayout::Row")]
    pub layout: LinearLayout,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl SwiGluConfig {
    /// Creates a gated activation on `device`.
    ///
    /// # Errors
    /// Same as [`Nvfp4LinearConfig::try_init`].
    pub fn try_init(&self, device: &Device) -> Result<SwiGlu, Nvfp4Error> {
        let config = Nvfp4LinearConfig::new(self.d_input, self.d_output)
            .with_bias(self.bias)
            .with_initializer(self.initializer.clone())
            .with_layout(self.layout)
            .with_recipe(self.recipe.clone());
        Ok(SwiGlu {
            linear_inner: config.try_init(device)?,
            linear_outer: config.try_init(device)?,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> SwiGlu {
        or_panic("SwiGluConfig::init", self.try_init(device))
    }
}

/// Gated activation `silu(x G) · (x U)` with both GEMMs in NVFP4. Replaces `burn_nn::SwiGlu`: same
/// fields, ids and record.
///
/// Layers of one recipe and mode are computed together: the input is quantized once, and both
/// weights share one global scale. [`Nvfp4SwiGlu`](super::Nvfp4SwiGlu) also includes the projection
/// that follows, in the same operation.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// Gate `G`, `[d_input, d_output]`.
    pub linear_inner: Nvfp4Linear,
    /// Factor `U`, `[d_input, d_output]`.
    pub linear_outer: Nvfp4Linear,
}

impl SwiGlu {
    /// Applies the activation: `[..., d_input]` to `[..., d_output]`, in the dtype of `x`.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the shapes of the two layers differ.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.linear_inner.check(&x)?;
        let (names, shape) = (
            ["linear_outer.weight", "linear_outer.bias"],
            whole_dims(&self.linear_inner.weight),
        );
        self.linear_outer.check_part(names, &x.device(), shape)?;
        let layers = [&self.linear_inner, &self.linear_outer];
        try_swiglu(Nvfp4Linear::try_forward_joined(&layers, x)?)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("SwiGlu::forward", self.try_forward(x))
    }
}
