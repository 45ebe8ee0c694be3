//! Fused RMSNorm and packed linear layer.

use burn_core::backend::Dispatch;
use burn_core::tensor::{FloatDType, Tensor};
use nvfp4_formats::Nvfp4Error;

use super::{Activations, Nvfp4PackedLinear};
use crate::functions::{into_bias, try_swiglu};
use crate::layers::NormParameters;
use crate::nn::{ResidualStream, RmsNorm, cast, rows};
use crate::ops::norm_linear::{NormLinearOps, NormLinearSpec};

/// Packed linear layer after the norm of the residual stream, optionally followed by SwiGLU.
///
/// The result has the same bits as the separate steps. With bf16 activations that are not quantized
/// (W4A16), without gradients and with small M, a single kernel computes it on a GPU: in a decoding
/// step, each kernel less saves one or two microseconds.
#[derive(Debug, Clone, Copy)]
pub struct NormLinear<'a> {
    /// Norm before the linear layer.
    pub norm: &'a RmsNorm,
    /// Linear layer after the norm.
    pub linear: &'a Nvfp4PackedLinear,
    /// True if the output of the layer is gate and up, concatenated, to which [SwiGLU](try_swiglu)
    /// is applied.
    pub swiglu: bool,
}

impl NormLinear<'_> {
    /// Returns the stream with the pending term added, `[batch, time, d_in]`, and the output of the
    /// linear layer for its norm, `[batch, time, d_out]` (half as wide with SwiGLU), both in the
    /// dtype of the stream.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, devices or dtypes differ or are not
    /// supported, the terms of the stream differ in shape, its last axis differs from that of the
    /// norm or the `d_in` of the layer, or `d_out` is odd with SwiGLU.
    pub fn try_forward(
        &self,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        let Self {
            norm,
            linear,
            swiglu,
        } = *self;
        let is_tracked = [Some(&stream.sum), stream.pending.as_ref()]
            .into_iter()
            .flatten()
            .any(|tensor| tensor.is_tracked());
        let gain = norm.gamma.val();
        let quantizes = linear.activations() != Activations::HighPrecision;
        if quantizes || is_tracked || gain.is_tracked() {
            let (sum, x) = norm.try_forward_stream(stream)?;
            let y = linear.try_forward(x)?;
            let y = if swiglu { try_swiglu(y)? } else { y };
            return Ok((sum, y));
        }
        let ResidualStream { sum, pending } = stream;
        let (x, residual) = match pending {
            Some(pending) => (pending, Some(sum)),
            None => (sum, None),
        };
        NormParameters::rms(gain.clone(), norm.epsilon).check(&x, residual.as_ref())?;
        linear.check_x(&x)?;
        let [d_out, _] = linear.weight.shape();
        if swiglu && !d_out.is_multiple_of(2) {
            return Err(Nvfp4Error::shape(
                "linear",
                format!("a weight of {d_out} rows"),
                "an even number of rows: gate and up, concatenated",
            ));
        }
        let (matrix, mut dims) = rows(x.clone());
        let gain = cast(gain, FloatDType::F32);
        let made = Dispatch::nvfp4_norm_linear(
            matrix.into_dispatch(),
            residual
                .map(|residual| rows(residual).0.into_dispatch())
                .into(),
            gain.into_dispatch(),
            linear.weight.quantized(),
            into_bias(linear.bias.as_ref().map(|bias| bias.val())),
            NormLinearSpec {
                epsilon: norm.epsilon as f32,
                swiglu,
            },
        );
        let sum = match made.sum.into_option() {
            Some(sum) => Tensor::<2>::from_dispatch(sum).reshape(dims),
            None => x,
        };
        dims[2] = if swiglu { d_out / 2 } else { d_out };
        Ok((sum, Tensor::<2>::from_dispatch(made.y).reshape(dims)))
    }
}
