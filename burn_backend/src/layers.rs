//! Norms and activations on plain tensors, re-exported by [`functions`](crate::functions).
//!
//! All functions take `f32`, `bf16` or `f16`, compute in `f32`, round each element of the result
//! once, and are differentiable. The order of sums depends only on the shape, so results are the
//! same on every device and in every run.

use burn_core::backend::Dispatch;
use burn_core::tensor::{FloatDType, Tensor};
use nvfp4_formats::Nvfp4Error;

use crate::functions::{into_bias, or_panic};
use crate::ops::layers::{Activation, ActivationOps, Gelu, Norm, NormOps, NormSpec, OutputAmax};
use crate::validate;

/// Returns an error if norms and activations do not accept `x`, or its rows are empty.
fn check_input<const D: usize>(name: &'static str, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
    const { assert!(D > 0, "the input needs at least one axis") };
    validate::operand(name, x)?;
    match x.dims()[D - 1] {
        0 => Err(Nvfp4Error::shape(
            name,
            format!("{:?}", x.dims()),
            "a last axis of at least one element",
        )),
        _ => Ok(()),
    }
}

/// Returns an error if the rows of `x` are not as wide as γ, or β does not match γ.
fn check_factors<const D: usize>(
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    x: &Tensor<D>,
) -> Result<(), Nvfp4Error> {
    for (name, factors) in [("gamma", Some(gamma)), ("beta", beta)] {
        if let Some(factors) = factors {
            validate::operand(name, factors)?;
            validate::same_device(("x", &x.device()), (name, &factors.device()))?;
        }
    }
    let [width] = gamma.dims();
    if x.dims()[D - 1] != width {
        let expected = format!("a last axis of {width}, the width of `gamma`");
        return Err(Nvfp4Error::shape("x", format!("{:?}", x.dims()), expected));
    }
    match beta {
        None => Ok(()),
        Some(beta) => validate::shape("beta", beta.dims(), [width], || "that of `gamma`".into()),
    }
}

/// Returns an error if a residual does not match `x`.
fn check_residual<const D: usize>(residual: &Tensor<D>, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
    let name = "residual";
    validate::operand(name, residual)?;
    validate::same_device(("x", &x.device()), (name, &residual.device()))?;
    validate::shape(name, residual.dims(), x.dims(), || "that of `x`".into())?;
    if residual.dtype() != x.dtype() {
        return Err(Nvfp4Error::DType {
            argument: name,
            found: format!("{:?}", residual.dtype()),
            expected: format!("{:?}, the type of `x`", x.dtype()),
        });
    }
    Ok(())
}

fn check_epsilon(epsilon: f64) -> Result<(), Nvfp4Error> {
    match epsilon >= 0.0 && epsilon.is_finite() {
        true => Ok(()),
        false => Err(Nvfp4Error::value(
            "epsilon",
            epsilon.to_string(),
            "at least 0",
        )),
    }
}

/// Kind and parameters of a norm.
#[derive(Clone, Debug)]
pub(crate) struct NormParameters {
    pub norm: Norm,
    pub gamma: Tensor<1>,
    /// None for RMSNorm.
    pub beta: Option<Tensor<1>>,
    pub epsilon: f64,
}

impl NormParameters {
    pub fn rms(gamma: Tensor<1>, epsilon: f64) -> Self {
        Self {
            norm: Norm::Rms,
            gamma,
            beta: None,
            epsilon,
        }
    }

    /// Returns true if autodiff tracks a parameter.
    pub fn is_tracked(&self) -> bool {
        self.gamma.is_tracked() || self.beta.as_ref().is_some_and(Tensor::is_tracked)
    }

    /// Returns an error if the norm does not accept `x`, with or without a residual.
    pub fn check<const D: usize>(
        &self,
        x: &Tensor<D>,
        residual: Option<&Tensor<D>>,
    ) -> Result<(), Nvfp4Error> {
        check_input("x", x)?;
        if let Some(residual) = residual {
            check_residual(residual, x)?;
        }
        check_factors(&self.gamma, self.beta.as_ref(), x)?;
        check_epsilon(self.epsilon)
    }
}

/// Amax values that the layers before and after a norm need.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NormAmax {
    /// Amax of the output, for the layer after the norm.
    pub output: Option<OutputAmax>,
    /// Amax of the gradient of `x`, for the layer that computed `x`.
    pub grad: Option<OutputAmax>,
}

/// Returns `x + residual` and its norm, or `x` and its norm. The backward adds their gradients in
/// its pass. Also computes the amax values that the adjacent layers need.
///
/// # Errors
/// Same as [`NormParameters::check`].
pub(crate) fn try_norm<const D: usize>(
    x: Tensor<D>,
    residual: Option<Tensor<D>>,
    parameters: NormParameters,
    amax: NormAmax,
) -> Result<(Tensor<D>, Tensor<D>), Nvfp4Error> {
    parameters.check(&x, residual.as_ref())?;
    let dims = x.dims();
    let matrix = |x: Tensor<D>| -> Tensor<2> {
        let cols = dims[D - 1];
        x.reshape([dims[..D - 1].iter().product(), cols])
    };
    let spec = NormSpec {
        norm: parameters.norm,
        epsilon: parameters.epsilon as f32,
        amax: amax.output,
        grad_amax: amax.grad,
    };
    let f32 = |factors: Tensor<1>| crate::nn::cast(factors, FloatDType::F32);
    let made = Dispatch::nvfp4_norm(
        matrix(x).into_dispatch(),
        residual
            .map(|residual| matrix(residual).into_dispatch())
            .into(),
        f32(parameters.gamma).into_dispatch(),
        into_bias(parameters.beta.map(f32)),
        spec,
    );
    let [sum, normed] = [made.sum, made.normed].map(Tensor::<2>::from_dispatch);
    Ok((sum.reshape(dims), normed.reshape(dims)))
}

/// RMSNorm: `x / sqrt(mean(x²) + epsilon) · gamma` over the last axis of `x` (`[..., width]`), with
/// `gamma` `[width]`. The result has the shape and dtype of `x`.
///
/// The backward keeps `x` and one number per row.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// the last axis is empty or differs from that of `gamma`, or `epsilon` is negative.
pub fn try_rms_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f64,
) -> Result<Tensor<D>, Nvfp4Error> {
    let parameters = NormParameters::rms(gamma, epsilon);
    Ok(try_norm(x, None, parameters, NormAmax::default())?.1)
}

/// Panicking version of [`try_rms_norm`].
#[track_caller]
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    or_panic("rms_norm", try_rms_norm(x, gamma, epsilon))
}

/// Computes `x + residual`, rounded to their dtype, and the [`rms_norm`] of that, in one pass. Both
/// results have the shape and dtype of `x`.
///
/// The backward adds the gradients of both results in its pass. It keeps the sum and one number per
/// row.
///
/// # Errors
/// Same as [`try_rms_norm`]; also if `residual` differs from `x` in shape, dtype or device.
pub fn try_add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f64,
) -> Result<(Tensor<D>, Tensor<D>), Nvfp4Error> {
    let parameters = NormParameters::rms(gamma, epsilon);
    try_norm(x, Some(residual), parameters, NormAmax::default())
}

/// Panicking version of [`try_add_rms_norm`].
#[track_caller]
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    or_panic(
        "add_rms_norm",
        try_add_rms_norm(x, residual, gamma, epsilon),
    )
}

/// LayerNorm: `(x - mean(x)) / sqrt(variance(x) + epsilon) · gamma + beta` over the last axis of `x`
/// (`[..., width]`), with `gamma` and `beta` `[width]`. The result has the shape and dtype of `x`.
///
/// The backward keeps `x` and two numbers per row.
///
/// # Errors
/// Same as [`try_rms_norm`]; also if `beta` does not match.
pub fn try_layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Result<Tensor<D>, Nvfp4Error> {
    let parameters = NormParameters {
        norm: Norm::Layer,
        gamma,
        beta,
        epsilon,
    };
    Ok(try_norm(x, None, parameters, NormAmax::default())?.1)
}

/// Panicking version of [`try_layer_norm`].
#[track_caller]
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    or_panic("layer_norm", try_layer_norm(x, gamma, beta, epsilon))
}

/// Applies an activation along the last axis, after the checks.
fn activation_unchecked<const D: usize>(activation: Activation, x: Tensor<D>) -> Tensor<D> {
    let mut dims = x.dims();
    let cols = dims[D - 1];
    let x: Tensor<2> = x.reshape([dims[..D - 1].iter().product(), cols]);
    let out = Dispatch::nvfp4_activation(x.into_dispatch(), activation);
    dims[D - 1] /= activation.inputs();
    Tensor::<2>::from_dispatch(out).reshape(dims)
}

/// SwiGLU: `silu(gate) · up` of the two halves of the last axis of `gate_up` (`[..., 2 * width]`),
/// to `[..., width]` of the same dtype.
///
/// The backward keeps `gate_up`.
///
/// # Errors
/// Returns an error if the device has no implementation, the dtype is not supported, or the last
/// axis is odd or empty.
pub fn try_swiglu<const D: usize>(gate_up: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
    check_input("gate_up", &gate_up)?;
    let dims = gate_up.dims();
    if !dims[D - 1].is_multiple_of(2) {
        return Err(Nvfp4Error::shape(
            "gate_up",
            format!("{dims:?}"),
            "an even last axis: gate and up, concatenated",
        ));
    }
    Ok(activation_unchecked(Activation::SwiGlu, gate_up))
}

/// Panicking version of [`try_swiglu`].
#[track_caller]
pub fn swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    or_panic("swiglu", try_swiglu(gate_up))
}

/// GELU of each element of `x`, in its shape and dtype. `form` selects the exact form (normal
/// distribution function) or the `tanh` approximation.
///
/// The backward keeps `x`.
///
/// # Errors
/// Returns an error if the device has no implementation, the dtype is not supported, or the last
/// axis is empty.
pub fn try_gelu<const D: usize>(x: Tensor<D>, form: Gelu) -> Result<Tensor<D>, Nvfp4Error> {
    check_input("x", &x)?;
    Ok(activation_unchecked(Activation::Gelu(form), x))
}

/// Panicking version of [`try_gelu`].
#[track_caller]
pub fn gelu<const D: usize>(x: Tensor<D>, form: Gelu) -> Tensor<D> {
    or_panic("gelu", try_gelu(x, form))
}
