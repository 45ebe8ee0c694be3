//! Quantized head for inference.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_nvfp4::nn::{Fp8Linear, Nvfp4Linear, Nvfp4PackedLinear};
use clap::ValueEnum;
use serde::Serialize;

use crate::interchange::Scheme;

/// Storage format of the head's weight, for computing logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HeadPrecision {
    /// As it was loaded
    #[default]
    Stored,
    /// E4M3, with one scale per token of the vocabulary
    Fp8,
    /// NVFP4 weights, high-precision activations
    Nvfp4,
}

/// Quantized head.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has one of them")]
pub(super) enum QuantizedHead {
    /// [`HeadPrecision::Fp8`].
    Fp8(Fp8Linear),
    /// [`HeadPrecision::Nvfp4`].
    Nvfp4(Nvfp4PackedLinear),
}

impl QuantizedHead {
    /// Quantizes `weight` (`[d_model, vocab]`), rounding to nearest. Returns none for
    /// [`HeadPrecision::Stored`].
    ///
    /// # Errors
    /// Returns an error if `d_model` is not a multiple of 64 for FP8, or of 16 for NVFP4.
    pub(super) fn try_new(weight: Tensor<2>, precision: HeadPrecision) -> Result<Option<Self>> {
        Ok(match precision {
            HeadPrecision::Stored => None,
            HeadPrecision::Fp8 => Some(Self::Fp8(Fp8Linear::try_from_weight(weight)?)),
            HeadPrecision::Nvfp4 => {
                let linear = Linear {
                    weight: Param::from_tensor(weight),
                    bias: None,
                };
                let linear = Nvfp4Linear::from_linear(linear, &Scheme::W4a16.recipe())?;
                Some(Self::Nvfp4(linear.try_to_packed()?))
            }
        })
    }

    /// Maps `[rows, d_model]` to `[rows, vocab]`, in the type of `x`.
    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Fp8(head) => head.forward(x),
            Self::Nvfp4(head) => head.forward(x),
        }
    }

    /// Returns the bytes of codes and scales.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Fp8(head) => head.bytes(),
            Self::Nvfp4(head) => head.weight.bytes(),
        }
    }
}
