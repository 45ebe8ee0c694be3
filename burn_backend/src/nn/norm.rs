//! RMS and layer norms, each in one pass, and the residual stream that they add to.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, FloatDType, Tensor};
use burn_nn::{LayerNorm as BurnLayerNorm, LayerNormConfig, RmsNorm as BurnRmsNorm};
use nvfp4_formats::Nvfp4Error;

use super::{Nvfp4Linear, cast};
use crate::functions::{or_panic, try_layer_norm, try_rms_norm};
use crate::layers::{NormAmax, try_add_rms_norm_with_amax, try_norm_of_stream};
use crate::parallel::whole_dims;
use crate::validate;

/// RMSNorm: `x / sqrt(mean(x²) + ε) · gain` over the last axis, computed in `f32` for all input and
/// output dtypes.
///
/// Differs from `burn_nn::RmsNorm` in precision (that one divides and multiplies in the dtype of
/// its input) and in the name of its parameter.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Gain, one factor per feature, `[width]`.
    pub gain: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    /// Default ε, added to the mean square.
    pub const EPSILON: f64 = 1e-6;

    /// Creates a norm of `width` features with gains of 1 and an ε of [`EPSILON`](Self::EPSILON).
    pub fn new(width: usize, device: &Device) -> Self {
        Self {
            gain: Param::from_tensor(Tensor::ones([width], device)),
            epsilon: Self::EPSILON,
        }
    }

    /// Takes over the parameter of `norm`, with its id, and its ε.
    pub fn from_rms_norm(norm: BurnRmsNorm) -> Self {
        Self {
            gain: norm.gamma,
            epsilon: norm.epsilon,
        }
    }

    /// Returns the parameter as a `burn_nn::RmsNorm`, with its id.
    pub fn into_rms_norm(self) -> BurnRmsNorm {
        BurnRmsNorm {
            gamma: self.gain,
            epsilon: self.epsilon,
        }
    }

    /// ε, added to the mean square.
    pub(super) fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// Returns an error if the norm does not accept rows of `width` on `device`. `name` is the name
    /// of its gain in the enclosing module.
    pub(super) fn check_part(
        &self,
        name: &'static str,
        device: &Device,
        width: usize,
    ) -> Result<(), Nvfp4Error> {
        validate::parameter(device, name, &self.gain)?;
        validate::shape(name, whole_dims(&self.gain), [width], || {
            "the last axis of `x`".into()
        })
    }

    /// Normalizes `x`, `[..., width]`, in one pass. The result has the same shape and dtype
    /// `dtype`.
    ///
    /// # Panics
    /// If the device has no implementation, the dtype of `x` is not supported, or its last axis
    /// differs from that of the gain.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
        self.forward_with(self.gain.val(), x, dtype)
    }

    /// Version of [`forward`](Self::forward) with another gain.
    pub(super) fn forward_with<const D: usize>(
        &self,
        gain: Tensor<1>,
        x: Tensor<D>,
        dtype: FloatDType,
    ) -> Tensor<D> {
        // A narrower input would cut off digits that a wider output has.
        let x = match dtype {
            FloatDType::F32 => cast(x, dtype),
            _ => x,
        };
        let normed = try_rms_norm(x, gain, self.epsilon);
        cast(or_panic("RmsNorm::forward", normed), dtype)
    }

    /// Adds the [pending term](ResidualStream) to the residual stream in the pass that normalizes
    /// the sum. Returns the stream and its norm in the dtype of the stream.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, a dtype is not supported, the last
    /// axis differs from that of the gain, or the terms of the stream differ in shape, dtype or
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
        self.try_forward_stream_with(self.gain.val(), neighbours, stream)
    }

    /// Version of [`try_forward_stream_for`](Self::try_forward_stream_for) with another gain.
    pub(super) fn try_forward_stream_with(
        &self,
        gain: Tensor<1>,
        Neighbours { before, next }: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        let ResidualStream { sum, pending } = stream;
        let is_tracked = sum.is_tracked()
            || pending.as_ref().is_some_and(|pending| pending.is_tracked())
            || gain.is_tracked();
        let before = before.filter(|_| is_tracked && pending.is_some());
        let amax = NormAmax {
            output: next.and_then(|next| next.next_spec().input_amax(is_tracked)),
            grad: before.and_then(|before| before.next_spec().gradient_amax()),
        };
        match pending {
            None => try_norm_of_stream(sum, gain, self.epsilon, amax),
            Some(pending) => try_add_rms_norm_with_amax(pending, sum, gain, self.epsilon, amax),
        }
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream).
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
    epsilon: f64,
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
        let config = LayerNormConfig::new(width)
            .with_epsilon(self.epsilon)
            .with_bias(false);
        let mut norm = config.init(&self.gamma.lazy_device());
        norm.gamma = self.gamma;
        norm.beta = self.beta;
        norm
    }

    /// Normalizes `x`, `[..., width]`, to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`try_layer_norm`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let beta = self.beta.as_ref().map(|beta| beta.val());
        try_layer_norm(x, self.gamma.val(), beta, self.epsilon)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("LayerNorm::forward", self.try_forward(x))
    }
}
