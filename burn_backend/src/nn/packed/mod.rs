//! Layers whose weights are stored in NVFP4, with no copy of them in high precision: for inference,
//! and frozen in training.
//!
//! [`Nvfp4Weight`] holds the codes and scales; [`Nvfp4PackedLinear`] is a linear layer of it, and
//! [`Nvfp4PackedGroupedLinear`] one for each expert. [`Activations`] says whether the input is
//! quantized too. Both are made of checkpoints' bytes, or of trained layers, which they compute as.
//! [`NormLinear`] is a norm with a linear layer behind it.

mod grouped;
mod linear;
mod norm_linear;
mod scales;
mod weight;

pub use crate::ops::packed::Activations;
pub use grouped::Nvfp4PackedGroupedLinear;
pub use linear::Nvfp4PackedLinear;
pub use norm_linear::NormLinear;
pub use scales::BlockScales;
pub use weight::Nvfp4Weight;

use burn_core::tensor::{DType, Tensor};
use nvfp4_kernels::{AmaxGranularity, Nvfp4Error};

use crate::ops::{LinearSpec, OperandSpec, QuantParams};
use crate::validate;

/// The activations of a layer with the static global scale `input`, if it has one, which
/// `count` groups of its input share or have each.
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

/// The activations of the forward of `spec`, and how it quantizes weights, with one global scale.
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
