//! Layers whose weights are stored in NVFP4, without a high-precision copy: for inference, or as
//! frozen layers in training.
//!
//! [`Nvfp4Weight`] holds the codes and scales; [`Nvfp4PackedLinear`] is a linear layer with one
//! such weight, and [`Nvfp4PackedGroupedLinear`] has one per expert. [`Activations`] sets whether
//! the input is quantized too. Both can be created from the bytes of a checkpoint, or from trained
//! layers, with the same results. [`NormLinear`] fuses a norm with the linear layer that follows
//! it. [`PackedParameter`] packs the weight of a high-precision layer in its place.

mod grouped;
mod linear;
mod norm_linear;
mod observer;
mod parameter;
mod scales;
mod weight;

pub use crate::ops::packed::Activations;
pub use grouped::Nvfp4PackedGroupedLinear;
pub use linear::Nvfp4PackedLinear;
pub use norm_linear::NormLinear;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use observer::Observer;
pub use parameter::PackedParameter;
pub use scales::BlockScales;
pub use weight::Nvfp4Weight;

use burn_core::tensor::{DType, Tensor};
use nvfp4_formats::{AmaxGranularity, Nvfp4Error};

use crate::ops::{LinearSpec, OperandSpec, QuantParams};
use crate::validate;

/// Checks the static global scale `input` of the `activations` of a layer. `count` is the number of
/// scales: one shared by all groups of the input, or one per group.
fn check_input(
    activations: &Activations,
    input: Option<&Tensor<1>>,
    weight: &Nvfp4Weight,
    count: usize,
) -> Result<(), Nvfp4Error> {
    match (activations, input) {
        (Activations::Static, None) => Err(Nvfp4Error::value(
            "input",
            "none",
            "the global scale of the input, which static activations are quantized under",
        )),
        (Activations::Static, Some(input)) => {
            let device = weight.codes.device();
            validate::same_device(("weight", &device), ("input", &input.device()))?;
            validate::buffer("input", input, [count], DType::F32)
        }
        (_, None) => Ok(()),
        (_, Some(_)) => Err(Nvfp4Error::value(
            "input",
            format!("a static global scale with {activations:?}"),
            "none: only static activations have one",
        )),
    }
}

/// Returns the activation quantization of the forward of `spec`, and its weight quantization, with
/// one global scale.
fn trained(
    spec: &LinearSpec,
    is_high_precision: bool,
) -> Result<(Activations, QuantParams), Nvfp4Error> {
    let refused =
        |found: String| Nvfp4Error::value("recipe", found, "nvfp4, with one global scale");
    if is_high_precision {
        return Err(refused("a layer in high precision".into()));
    }
    let params = match spec.fprop_w {
        OperandSpec::Quantized(params)
            if spec.fprop_w.is_nvfp4() && params.amax == AmaxGranularity::PerTensor =>
        {
            params
        }
        other => return Err(refused(format!("weights in {other:?}"))),
    };
    match spec.fprop_x {
        OperandSpec::HighPrecision => Ok((Activations::HighPrecision, params)),
        OperandSpec::Quantized(x) if spec.fprop_x.is_nvfp4() => {
            Ok((Activations::Dynamic(x), params))
        }
        other => Err(refused(format!("activations in {other:?}"))),
    }
}
