//! Layers for inference: their weights are stored in NVFP4, and no copy of them in high precision.
//!
//! [`Nvfp4Weight`] holds the codes and scales; [`Nvfp4PackedLinear`] is a linear layer of it, and
//! [`Nvfp4PackedGroupedLinear`] one for each expert. [`Activations`] says whether the input is
//! quantized too. Both are made of checkpoints' bytes, or of trained layers, which they compute as.

mod grouped;
mod linear;
mod scales;
mod weight;

pub use grouped::Nvfp4PackedGroupedLinear;
pub use linear::Nvfp4PackedLinear;
pub use scales::BlockScales;
pub use weight::Nvfp4Weight;

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Tensor};
use nvfp4_kernels::{AmaxGranularity, Nvfp4Error, Rounding, Usage};

use crate::ops::inference::{InferenceOps, PackedShape, STATIC};
use crate::ops::{
    LinearSpec, Nvfp4KernelOps, Operand, OperandSpec, QuantParams, QuantUsages, RowGroups,
};
use crate::validate;

/// What a layer of packed weights does with its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// W4A16: nothing.
    HighPrecision,
    /// W4A4: quantized as these parameters say, under the global scale of its own amax.
    Dynamic(QuantParams),
    /// W4A4: quantized in 1x16 blocks to nearest, under the global scale that the layer has for it.
    Static,
}

impl Activations {
    /// 1x16 blocks to nearest, under the global scale of the input's amax.
    pub const DYNAMIC: Self = Self::Dynamic(QuantParams::nvfp4(Rounding::Nearest));

    /// How the input is represented.
    fn spec(&self) -> OperandSpec {
        match self {
            Self::HighPrecision => OperandSpec::HighPrecision,
            Self::Dynamic(params) => OperandSpec::Quantized(*params),
            Self::Static => OperandSpec::Quantized(STATIC),
        }
    }

    /// `x` (`[rows, d_in]`, in `groups`) as the left operand of a GEMM with `weight`, as that reads
    /// it. `global` is the static global scale, which is there where it is needed.
    fn operand(
        &self,
        x: Tensor<2>,
        global: Option<Tensor<1>>,
        groups: RowGroups<Dispatch>,
        weight: &PackedShape,
    ) -> Operand<Dispatch> {
        let form = weight.form(&x.device(), &self.spec(), x.dims()[0]);
        let x = x.into_dispatch();
        match (self, global) {
            (Self::HighPrecision, _) => Operand::Float(x, Usage::Rowwise),
            (Self::Dynamic(params), _) => {
                let usages = QuantUsages::one(Usage::Rowwise, *params, form);
                Operand::Quantized(Dispatch::nvfp4_quantize(x, groups, usages).into_one())
            }
            (Self::Static, global) => {
                let global = global
                    .expect("checked when the layer was made")
                    .into_dispatch();
                Operand::Quantized(Dispatch::nvfp4_quantize_static(x, global, groups, form))
            }
        }
    }
}

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
