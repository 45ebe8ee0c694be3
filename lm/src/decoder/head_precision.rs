//! The head in fewer bits, for inference.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_nvfp4::nn::{Fp8Linear, Nvfp4Linear, Nvfp4PackedLinear};
use clap::ValueEnum;
use serde::Serialize;

use super::Decoder;
use crate::interchange::Scheme;

/// How the weight of the head is stored for logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HeadPrecision {
    /// As it was loaded
    #[default]
    Stored,
    /// E4M3 with a scale for each token of the vocabulary
    Fp8,
    /// NVFP4, multiplied with activations in high precision
    Nvfp4,
}

/// The head in fewer bits.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has one of them")]
pub(super) enum QuantizedHead {
    /// [`HeadPrecision::Fp8`].
    Fp8(Fp8Linear),
    /// [`HeadPrecision::Nvfp4`].
    Nvfp4(Nvfp4PackedLinear),
}

impl QuantizedHead {
    /// `[rows, d_model]` to `[rows, vocab]`, in the type of `x`.
    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Fp8(head) => head.forward(x),
            Self::Nvfp4(head) => head.forward(x),
        }
    }

    /// Bytes of codes and scales.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Fp8(head) => head.bytes(),
            Self::Nvfp4(head) => head.weight.bytes(),
        }
    }
}

impl Decoder {
    /// The same model, whose logits are computed with a head in this precision, to nearest: a step
    /// of decoding reads half of the bytes of a bf16 head in FP8, and a quarter in NVFP4. Logits of
    /// both are rounded to the type of the activations, and constants to autodiff in FP8. The weight
    /// in high precision stays, and is the one that is saved; where it is the embedding, tokens are
    /// looked up in it.
    ///
    /// # Errors
    /// When the width of the model is no multiple of 64 in FP8, or of 16 in NVFP4.
    pub fn with_head(mut self, precision: HeadPrecision) -> Result<Self> {
        self.quantized_head = match precision {
            HeadPrecision::Stored => None,
            HeadPrecision::Fp8 => {
                let head = Fp8Linear::try_from_weight(self.head_weight())?;
                Some(QuantizedHead::Fp8(head))
            }
            HeadPrecision::Nvfp4 => {
                let linear = Linear {
                    weight: Param::from_tensor(self.head_weight()),
                    bias: None,
                };
                let linear = Nvfp4Linear::from_linear(linear, &Scheme::W4a16.recipe())?;
                Some(QuantizedHead::Nvfp4(linear.try_to_packed()?))
            }
        };
        Ok(self)
    }
}
