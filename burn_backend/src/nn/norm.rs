//! RMS and layer norms, each in one pass, and the residual stream that they add to. The other norms
//! are burn-nn's own.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, Tensor};
use burn_nn::{
    Initializer, LayerNorm as BurnLayerNorm, LayerNormConfig as BurnLayerNormConfig,
    RmsNorm as BurnRmsNorm,
};
use nvfp4_formats::Nvfp4Error;

pub use burn_nn::norm::*;

use super::Nvfp4Linear;
use crate::functions::{or_panic, try_layer_norm, try_rms_norm};
use crate::layers::{NormAmax, NormParameters, try_norm};
use crate::ops::layers::Norm;
use crate::validate;
use crate::whole::whole_dims;

/// Configuration of [`RmsNorm`]; same fields and defaults as `burn_nn::RmsNormConfig`.
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Number of features.
    pub d_model: usize,
    /// ε, added to the mean square; positive.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl RmsNormConfig {
    /// Creates a norm whose factors are 1.
    ///
    /// # Errors
    /// Returns an error if `epsilon` is not positive.
    pub fn try_init(&self, device: &Device) -> Result<RmsNorm, Nvfp4Error> {
        check_epsilon("epsilon", self.epsilon)?;
        Ok(RmsNorm {
            gamma: Initializer::Ones.init([self.d_model], device),
            epsilon: self.epsilon,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> RmsNorm {
        or_panic("RmsNormConfig::init", self.try_init(device))
    }
}

/// Returns an error if the ε `epsilon`, called `argument`, is not positive.
pub(super) fn check_epsilon(argument: &'static str, epsilon: f64) -> Result<(), Nvfp4Error> {
    match epsilon > 0.0 {
        true => Ok(()),
        false => Err(Nvfp4Error::value(
            argument,
            epsilon.to_string(),
            "a positive number",
        )),
    }
}

/// RMSNorm: `x / sqrt(mean(x²) + ε) · γ` over the last axis. Replaces `burn_nn::RmsNorm`: same
/// fields, ids and record.
///
/// Computes in `f32` for all input dtypes; Burn's divides and multiplies in the dtype of its input.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// γ, one factor per feature, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// ε, added to the mean square.
    #[module(skip)]
    pub epsilon: f64,
}

impl RmsNorm {
    /// Takes over the parameter of `norm`, with its id, and its ε.
    pub fn from_rms_norm(norm: BurnRmsNorm) -> Self {
        Self {
            gamma: norm.gamma,
            epsilon: norm.epsilon,
        }
    }

    /// Returns the parameter as a `burn_nn::RmsNorm`, with its id.
    pub fn into_rms_norm(self) -> BurnRmsNorm {
        BurnRmsNorm {
            gamma: self.gamma,
            epsilon: self.epsilon,
        }
    }

    /// Returns an error if the norm does not accept rows of `width` on `device`. `name` is the name
    /// of its γ in the enclosing module.
    pub(super) fn check_part(
        &self,
        name: &'static str,
        device: &Device,
        width: usize,
    ) -> Result<(), Nvfp4Error> {
        check_factors(name, &self.gamma, device, width)
    }

    /// Normalizes `x`, `[..., d_model]`, in one pass. The result has the shape and dtype of `x`.
    ///
    /// # Errors
    /// Same as [`try_rms_norm`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        try_rms_norm(x, self.gamma.val(), self.epsilon)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("RmsNorm::forward", self.try_forward(x))
    }

    /// Adds the [pending term](ResidualStream) to the residual stream in the pass that normalizes
    /// the sum. Returns the stream and its norm in the dtype of the stream.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, a dtype is not supported, the last
    /// axis differs from that of γ, or the terms of the stream differ in shape, dtype or
    /// device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.try_forward_stream_for(Neighbours::default(), stream)
    }

    /// Version of [`try_forward_stream`](Self::try_forward_stream) between layers that quantize the
    /// norm and the gradient of the pending term: computes their amax values in the same passes.
    pub(crate) fn try_forward_stream_for(
        &self,
        neighbours: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.try_forward_stream_with(self.gamma.val(), neighbours, stream)
    }

    /// Version of [`try_forward_stream_for`](Self::try_forward_stream_for) with another γ.
    pub(super) fn try_forward_stream_with(
        &self,
        gamma: Tensor<1>,
        neighbours: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        try_norm_stream(neighbours, stream, NormParameters::rms(gamma, self.epsilon))
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream).
    #[track_caller]
    pub fn forward_stream(&self, stream: ResidualStream) -> (Tensor<3>, Tensor<3>) {
        or_panic("RmsNorm::forward_stream", self.try_forward_stream(stream))
    }
}

/// Layers before and after a norm, if known.
#[derive(Clone, Copy, Default)]
pub(crate) struct Neighbours<'a> {
    /// Layer whose output is pending, or one that quantizes its gradient in the same way.
    pub before: Option<&'a Nvfp4Linear>,
    /// Layer after the norm.
    pub next: Option<&'a Nvfp4Linear>,
}

impl Neighbours<'_> {
    /// Returns the amax values that the layers need of the norm of `x`, or of `x + residual`.
    fn amax<const D: usize>(
        self,
        x: &Tensor<D>,
        residual: Option<&Tensor<D>>,
        parameters: &NormParameters,
    ) -> NormAmax {
        let is_tracked = x.is_tracked()
            || residual.is_some_and(|residual| residual.is_tracked())
            || parameters.is_tracked();
        let before = (self.before).filter(|_| is_tracked && residual.is_some());
        NormAmax {
            output: (self.next).and_then(|next| next.next_spec().input_amax(is_tracked)),
            grad: before.and_then(|before| before.next_spec().gradient_amax()),
        }
    }
}

/// Adds the pending term to the residual stream in the pass that normalizes the sum. Returns the
/// stream and its norm, and computes the amax values that the neighbours need in the same passes.
fn try_norm_stream(
    neighbours: Neighbours<'_>,
    stream: ResidualStream,
    parameters: NormParameters,
) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
    let ResidualStream { sum, pending } = stream;
    let (x, residual) = match pending {
        None => (sum, None),
        Some(pending) => (pending, Some(sum)),
    };
    let amax = neighbours.amax(&x, residual.as_ref(), &parameters);
    try_norm(x, residual, parameters, amax)
}

/// Normalizes `x` for the layer `next`: computes the amax values with which it quantizes its input
/// in the pass that writes the norm.
pub(super) fn try_norm_for<const D: usize>(
    next: &Nvfp4Linear,
    x: Tensor<D>,
    parameters: NormParameters,
) -> Result<Tensor<D>, Nvfp4Error> {
    let neighbours = Neighbours {
        before: None,
        next: Some(next),
    };
    let amax = neighbours.amax(&x, None, &parameters);
    Ok(try_norm(x, None, parameters, amax)?.1)
}

/// Returns an error if a γ or β, called `name`, does not fit rows of `width` on `device`.
pub(super) fn check_factors(
    name: &'static str,
    factors: &Param<Tensor<1>>,
    device: &Device,
    width: usize,
) -> Result<(), Nvfp4Error> {
    validate::parameter(device, name, factors)?;
    let why = || "the last axis of `x`".into();
    validate::shape(name, whole_dims(factors), [width], why)
}

/// Residual stream of a transformer and the pending output of the last layer. The next norm adds
/// the two when it reads them, so the addition needs no separate pass.
#[derive(Clone, Debug)]
pub struct ResidualStream {
    /// Accumulated stream, `[batch, time, d_model]`.
    pub sum: Tensor<3>,
    /// Term not yet added to `sum`, of the same shape and dtype.
    pub pending: Option<Tensor<3>>,
}

impl From<Tensor<3>> for ResidualStream {
    fn from(sum: Tensor<3>) -> Self {
        Self { sum, pending: None }
    }
}

impl ResidualStream {
    /// Returns the stream with the pending term added.
    pub fn into_sum(self) -> Tensor<3> {
        match self.pending {
            None => self.sum,
            Some(pending) => self.sum + pending,
        }
    }
}

/// Configuration of [`LayerNorm`]; same fields and defaults as `burn_nn::LayerNormConfig`.
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Number of features.
    pub d_model: usize,
    /// ε, added to the variance; positive.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// True if the norm has a β.
    #[config(default = true)]
    pub bias: bool,
}

impl LayerNormConfig {
    /// Creates a norm with a γ of 1 and a β of 0.
    ///
    /// # Errors
    /// Returns an error if `epsilon` is not positive.
    pub fn try_init(&self, device: &Device) -> Result<LayerNorm, Nvfp4Error> {
        check_epsilon("epsilon", self.epsilon)?;
        let beta = || Initializer::Zeros.init([self.d_model], device);
        Ok(LayerNorm {
            gamma: Initializer::Ones.init([self.d_model], device),
            beta: self.bias.then(beta),
            epsilon: self.epsilon,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> LayerNorm {
        or_panic("LayerNormConfig::init", self.try_init(device))
    }
}

/// Layer normalization with one pass in the forward and one in the backward. Replaces
/// `burn_nn::LayerNorm`: same parameters, ids and record paths.
///
/// Computes `(x - mean(x)) / sqrt(variance(x) + ε) · γ + β` over the last axis in `f32` for all
/// input dtypes. The output has the dtype of the input.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// γ, one factor per feature, `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// β, added to each feature, `[width]`.
    pub beta: Option<Param<Tensor<1>>>,
    #[module(skip)]
    pub(super) epsilon: f64,
}

impl LayerNorm {
    /// Takes over the parameters of `norm`, with their ids. `epsilon` is its ε, which `burn_nn`
    /// does not make public.
    pub fn from_layer_norm(norm: BurnLayerNorm, epsilon: f64) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            epsilon,
        }
    }

    /// Returns the parameters as a `burn_nn::LayerNorm`, with their ids.
    pub fn into_layer_norm(self) -> BurnLayerNorm {
        let [width] = self.gamma.lazy_shape().dims();
        let config = BurnLayerNormConfig::new(width)
            .with_epsilon(self.epsilon)
            .with_bias(false);
        let mut norm = config.init(&self.gamma.lazy_device());
        norm.gamma = self.gamma;
        norm.beta = self.beta;
        norm
    }

    /// Returns an error if the norm does not accept rows of `width` on `device`. `names` are those
    /// of γ and β in the enclosing module.
    pub(super) fn check_part(
        &self,
        names: [&'static str; 2],
        device: &Device,
        width: usize,
    ) -> Result<(), Nvfp4Error> {
        check_factors(names[0], &self.gamma, device, width)?;
        let mut beta = self.beta.iter();
        beta.try_for_each(|beta| check_factors(names[1], beta, device, width))
    }

    /// Normalizes `x`, `[..., width]`, to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`try_layer_norm`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let beta = self.beta.as_ref().map(|beta| beta.val());
        try_layer_norm(x, self.gamma.val(), beta, self.epsilon)
    }

    /// Adds the [pending term](ResidualStream) to the residual stream in the pass that normalizes
    /// the sum, like [`RmsNorm::try_forward_stream`], between these layers.
    pub(crate) fn try_forward_stream_for(
        &self,
        neighbours: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        try_norm_stream(neighbours, stream, self.parameters())
    }

    fn parameters(&self) -> NormParameters {
        NormParameters {
            norm: Norm::Layer,
            gamma: self.gamma.val(),
            beta: self.beta.as_ref().map(|beta| beta.val()),
            epsilon: self.epsilon,
        }
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("LayerNorm::forward", self.try_forward(x))
    }
}
