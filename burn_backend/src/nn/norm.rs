//! Norms, each in one pass, and the residual stream that they add to.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, FloatDType, Tensor};
use burn_nn::{LayerNorm as BurnLayerNorm, LayerNormConfig, RmsNorm as BurnRmsNorm};
use nvfp4_kernels::Nvfp4Error;

use super::{Nvfp4Linear, cast};
use crate::functions::{or_panic, try_layer_norm, try_rms_norm};
use crate::layers::{NormAmax, try_add_rms_norm_with_amax, try_norm_of_stream};
use crate::parallel::whole_dims;
use crate::validate;

/// `x / sqrt(mean(x²) + ε) · gain` over the last axis, computed in `f32` whatever the types of its
/// input and output.
///
/// It differs from `burn_nn::RmsNorm` in that (which divides and multiplies in the type of its
/// input), and in the name of its parameter.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// One factor per feature, `[width]`.
    pub gain: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    /// The default ε, which is added to the mean square.
    pub const EPSILON: f64 = 1e-6;

    /// A norm of `width` features with gains of 1 and an ε of [`EPSILON`](Self::EPSILON).
    pub fn new(width: usize, device: &Device) -> Self {
        Self {
            gain: Param::from_tensor(Tensor::ones([width], device)),
            epsilon: Self::EPSILON,
        }
    }

    /// Take over the parameter of `norm`, with its id, and its ε.
    pub fn from_rms_norm(norm: BurnRmsNorm) -> Self {
        Self {
            gain: norm.gamma,
            epsilon: norm.epsilon,
        }
    }

    /// Gives the parameter to a `burn_nn::RmsNorm`, with its id.
    pub fn into_rms_norm(self) -> BurnRmsNorm {
        BurnRmsNorm {
            gamma: self.gain,
            epsilon: self.epsilon,
        }
    }

    /// What is added to the mean square.
    pub(super) fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// Fail unless the norm, its gain called `name` in the module that it is part of, takes rows of
    /// `width` on `device`.
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

    /// Normalise `x`, `[..., width]`, to the same shape in type `dtype`: in one pass.
    ///
    /// # Panics
    /// When the device has no implementation, the type of `x` is not supported, or its last axis is
    /// not that of the gain.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
        self.forward_with(self.gain.val(), x, dtype)
    }

    /// [`forward`](Self::forward) with another gain.
    pub(super) fn forward_with<const D: usize>(
        &self,
        gain: Tensor<1>,
        x: Tensor<D>,
        dtype: FloatDType,
    ) -> Tensor<D> {
        // A wider output has the digits that a narrower input would cut off.
        let x = match dtype {
            FloatDType::F32 => cast(x, dtype),
            _ => x,
        };
        let normed = try_rms_norm(x, gain, self.epsilon);
        cast(or_panic("RmsNorm::forward", normed), dtype)
    }

    /// What is [still to be added](ResidualStream) to the residual stream is added, in the pass
    /// that normalises the sum: the stream, and its norm in the type of the stream.
    ///
    /// # Errors
    /// When the device has no implementation, a type is not supported, the last axis is not that of
    /// the gain, or the parts of the stream differ in shape, type or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.try_forward_stream_for(Neighbours::default(), stream)
    }

    /// [`try_forward_stream`](Self::try_forward_stream) between layers that quantize the norm, and
    /// the gradient of what is pending: their amax values are found in the same passes.
    pub(crate) fn try_forward_stream_for(
        &self,
        neighbours: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.try_forward_stream_with(self.gain.val(), neighbours, stream)
    }

    /// [`try_forward_stream_for`](Self::try_forward_stream_for) with another gain.
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

    /// [`try_forward_stream`](Self::try_forward_stream), panicking where it fails.
    pub fn forward_stream(&self, stream: ResidualStream) -> (Tensor<3>, Tensor<3>) {
        or_panic("RmsNorm::forward_stream", self.try_forward_stream(stream))
    }
}

/// The layers beside a norm, where they are known.
#[derive(Clone, Copy, Default)]
pub(crate) struct Neighbours<'a> {
    /// The one whose output is pending, or one that quantizes its gradient alike.
    pub before: Option<&'a Nvfp4Linear>,
    /// The one behind the norm.
    pub next: Option<&'a Nvfp4Linear>,
}

/// The residual stream of a transformer, with the output of the last layer beside it: the next norm
/// adds it while it reads both, so that the addition takes no pass of its own.
#[derive(Clone, Debug)]
pub struct ResidualStream {
    /// The stream so far, `[batch, time, d_model]`.
    pub sum: Tensor<3>,
    /// What is still to be added to it, of its shape and type.
    pub pending: Option<Tensor<3>>,
}

impl From<Tensor<3>> for ResidualStream {
    fn from(sum: Tensor<3>) -> Self {
        Self { sum, pending: None }
    }
}

impl ResidualStream {
    /// The stream, with everything added.
    pub fn into_sum(self) -> Tensor<3> {
        match self.pending {
            None => self.sum,
            Some(pending) => self.sum + pending,
        }
    }
}

/// Layer normalisation with one pass forward and one backward, in place of `burn_nn::LayerNorm`:
/// the same parameters, ids and paths in a record.
///
/// `(x - mean(x)) / sqrt(variance(x) + ε) · γ + β` over the last axis, in `f32` whatever the type
/// of its input, in which its output is.
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
    /// Take over the parameters of `norm`, with their ids, and its ε, which is not public there.
    pub fn from_layer_norm(norm: BurnLayerNorm, epsilon: f64) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            epsilon,
        }
    }

    /// Gives the parameters to a `burn_nn::LayerNorm`, with their ids.
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

    /// Normalise `x`, `[..., width]`, to the same shape and type.
    ///
    /// # Errors
    /// As [`try_layer_norm`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let beta = self.beta.as_ref().map(|beta| beta.val());
        try_layer_norm(x, self.gamma.val(), beta, self.epsilon)
    }

    /// [`try_forward`](Self::try_forward), panicking where it fails.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("LayerNorm::forward", self.try_forward(x))
    }
}
