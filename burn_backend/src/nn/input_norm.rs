//! Norm of the input of a linear layer.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, FloatDType, Tensor};
use burn_nn::Initializer;
use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

use super::norm::{check_epsilon, check_factors, try_norm_for};
use super::{LayerNorm, Nvfp4Linear, RmsNorm, cast};
use crate::functions::or_panic;
use crate::layers::{NormAmax, NormParameters, try_norm};
use crate::ops::layers::Norm;

/// Kind of a norm; TransformerEngine's `normalization`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormKind {
    /// LayerNorm, with γ and β.
    #[default]
    LayerNorm,
    /// RMSNorm, with γ.
    #[serde(rename = "RMSNorm")]
    RmsNorm,
}

/// Norm of the input of a [`LayerNormLinear`](super::LayerNormLinear) or
/// [`LayerNormMlp`](super::LayerNormMlp): a [`LayerNorm`] or an [`RmsNorm`], with the same record.
///
/// With a zero-centered γ, `gamma` holds γ - 1, so weight decay pulls γ to 1; the norm multiplies
/// by `gamma + 1`.
#[derive(Module, Debug)]
pub struct InputNorm {
    /// One factor per feature, `[width]`: γ, or γ - 1 if zero-centered.
    pub gamma: Param<Tensor<1>>,
    /// β, added to each feature, `[width]`; `None` for RMSNorm.
    pub beta: Option<Param<Tensor<1>>>,
    #[module(skip)]
    settings: NormSettings,
}

/// Settings of an [`InputNorm`].
#[derive(Clone, Copy, Debug)]
pub(super) struct NormSettings {
    pub kind: NormKind,
    pub epsilon: f64,
    pub zero_centered_gamma: bool,
}

impl InputNorm {
    /// Creates a norm of `width` features, with a γ of 1 and a β of 0.
    ///
    /// # Errors
    /// Returns an error if `epsilon` is not positive.
    pub(super) fn try_new(
        width: usize,
        settings: NormSettings,
        device: &Device,
    ) -> Result<Self, Nvfp4Error> {
        check_epsilon("epsilon", settings.epsilon)?;
        let gamma = match settings.zero_centered_gamma {
            true => Initializer::Zeros,
            false => Initializer::Ones,
        };
        let beta = || Initializer::Zeros.init([width], device);
        Ok(Self {
            gamma: gamma.init([width], device),
            beta: (settings.kind == NormKind::LayerNorm).then(beta),
            settings,
        })
    }

    /// Returns true if `gamma` holds γ - 1.
    pub fn has_zero_centered_gamma(&self) -> bool {
        self.settings.zero_centered_gamma
    }

    /// Normalizes `x`, `[..., width]`, to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`try_layer_norm`](crate::functions::try_layer_norm).
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let parameters = self.parameters(|parameter| parameter);
        Ok(try_norm(x, None, parameters, NormAmax::default())?.1)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("InputNorm::forward", self.try_forward(x))
    }

    /// Version of [`try_forward`](Self::try_forward) before the layer `next`, which quantizes the
    /// output: computes the amax values in the same pass. `value` maps the values of γ and β.
    pub(super) fn try_forward_for<const D: usize>(
        &self,
        next: &Nvfp4Linear,
        value: impl Fn(Tensor<1>) -> Tensor<1>,
        x: Tensor<D>,
    ) -> Result<Tensor<D>, Nvfp4Error> {
        try_norm_for(next, x, self.parameters(value))
    }

    /// Returns the parameters, whose values `value` maps.
    fn parameters(&self, value: impl Fn(Tensor<1>) -> Tensor<1>) -> NormParameters {
        let gamma = value(self.gamma.val());
        NormParameters {
            norm: match self.settings.kind {
                NormKind::LayerNorm => Norm::Layer,
                NormKind::RmsNorm => Norm::Rms,
            },
            gamma: match self.settings.zero_centered_gamma {
                // In the dtype in which the norm multiplies.
                true => cast(gamma, FloatDType::F32).add_scalar(1.0),
                false => gamma,
            },
            beta: self.beta.as_ref().map(|beta| value(beta.val())),
            epsilon: self.settings.epsilon,
        }
    }

    /// Returns an error if the norm, the field `norm` of a module, does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        let (device, width) = (x.device(), x.dims()[D - 1]);
        check_factors("norm.gamma", &self.gamma, &device, width)?;
        let mut beta = self.beta.iter();
        beta.try_for_each(|beta| check_factors("norm.beta", beta, &device, width))
    }
}

/// Takes over the parameters, with their ids.
impl From<LayerNorm> for InputNorm {
    fn from(norm: LayerNorm) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            settings: NormSettings {
                kind: NormKind::LayerNorm,
                epsilon: norm.epsilon,
                zero_centered_gamma: false,
            },
        }
    }
}

/// Takes over the parameter, with its id.
impl From<RmsNorm> for InputNorm {
    fn from(norm: RmsNorm) -> Self {
        Self {
            gamma: norm.gamma,
            beta: None,
            settings: NormSettings {
                kind: NormKind::RmsNorm,
                epsilon: norm.epsilon,
                zero_centered_gamma: false,
            },
        }
    }
}
