//! Linear layers of a decoder, with a weight in one of several forms.
//!
//! Only this module knows the forms: all users of a weight call [`Projection::forward`] or
//! [`Experts::forward`]. A new form is a new variant.

use anyhow::{Result, bail};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_nvfp4::nn::{
    ExpertShard, NormLinear, Nvfp4GroupedLinear, Nvfp4Linear, Nvfp4PackedGroupedLinear,
    Nvfp4PackedLinear, RmsNorm,
};
use burn_nvfp4::{ExpertOffsets, Nvfp4Recipe};

use super::dense;
use super::lora::LoraProjection;
use super::rounded::{RoundedExperts, RoundedLinear};
use super::scaled::{ScaledPackedExperts, ScaledPackedLinear};
use super::values::{matrix_of, scaled_matrix_of, scaled_stack_of, stack_of};

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
pub enum Projection {
    /// High precision: `W` is `[d_in, d_out]` in its stored type.
    Dense(Linear),
    /// Trained in NVFP4: `W` is in high precision, and quantized on use.
    Nvfp4(Nvfp4Linear),
    /// Inference or frozen: `W` is stored in NVFP4.
    Packed(Nvfp4PackedLinear),
    /// Stored in NVFP4, with a scale per input feature.
    Scaled(ScaledPackedLinear),
    /// Inference of a layer in FP8: `W` in high precision, inputs rounded.
    Rounded(RoundedLinear),
    /// Frozen, with trained adapters.
    Lora(LoraProjection),
}

impl Projection {
    /// Maps `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        match self {
            Self::Dense(linear) => dense::forward(linear, x),
            Self::Nvfp4(linear) => Ok(linear.try_forward(x)?),
            Self::Packed(linear) => Ok(linear.try_forward(x)?),
            Self::Scaled(linear) => linear.forward(x),
            Self::Rounded(linear) => linear.forward(x),
            Self::Lora(lora) => lora.forward(x),
        }
    }

    /// Fuses the layer with the norm before it and, if `swiglu`, SwiGLU of its output. Returns none
    /// unless the weight is stored in NVFP4 without scales or adapters.
    pub(super) fn behind<'a>(&'a self, norm: &'a RmsNorm, swiglu: bool) -> Option<NormLinear<'a>> {
        match self {
            Self::Packed(linear) => Some(NormLinear {
                norm,
                linear,
                swiglu,
            }),
            Self::Dense(_)
            | Self::Nvfp4(_)
            | Self::Scaled(_)
            | Self::Rounded(_)
            | Self::Lora(_) => None,
        }
    }

    /// Returns the weight in high precision, `[d_in, d_out]`, with adapters merged, and the bias.
    pub fn dense(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = match self {
            Self::Dense(linear) | Self::Rounded(RoundedLinear { linear, .. }) => {
                (linear.weight.val(), &linear.bias)
            }
            Self::Nvfp4(linear) => (linear.weight.val(), &linear.bias),
            Self::Packed(linear) => (matrix_of(&linear.weight), &linear.bias),
            Self::Scaled(scaled) => (scaled_matrix_of(scaled), &scaled.linear.bias),
            Self::Lora(lora) => return lora.merged(),
        };
        (weight, bias.as_ref().map(|bias| bias.val()))
    }

    /// Returns the shape, `[d_in, d_out]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) | Self::Rounded(RoundedLinear { linear, .. }) => {
                linear.weight.lazy_shape().dims()
            }
            Self::Nvfp4(linear) => linear.weight.lazy_shape().dims(),
            Self::Packed(linear) | Self::Scaled(ScaledPackedLinear { linear, .. }) => {
                let [d_out, d_in] = linear.weight.shape();
                [d_in, d_out]
            }
            Self::Lora(lora) => lora.base.shape(),
        }
    }

    /// Returns true if the weight is stored in NVFP4, with or without adapters.
    pub fn is_packed(&self) -> bool {
        match self {
            Self::Packed(_) | Self::Scaled(_) => true,
            Self::Dense(_) | Self::Nvfp4(_) | Self::Rounded(_) => false,
            Self::Lora(lora) => lora.base.is_packed(),
        }
    }

    /// Converts the layer for inference: a weight trained in NVFP4 is quantized once, and its
    /// high-precision copy is dropped. Outputs equal those of validation.
    ///
    /// # Errors
    /// Returns an error if the recipe has formats other than NVFP4 for weights or activations, or
    /// if there are adapters.
    pub fn into_packed(self) -> Result<Self> {
        match self {
            Self::Nvfp4(linear) if !linear.state.is_high_precision() => {
                Ok(Self::Packed(linear.try_to_packed()?))
            }
            Self::Lora(_) => bail!("a projection with adapters cannot be packed: merge them first"),
            other => Ok(other),
        }
    }

    /// Converts the layer for training with `recipe`, keeping parameters and IDs. Packed weights
    /// are dequantized, inputs are not rounded; frozen weights with adapters are merged.
    ///
    /// # Errors
    /// Returns an error if a width is not a multiple of 16, or if the recipe does not pass its
    /// checks.
    pub fn into_nvfp4(self, recipe: &Nvfp4Recipe) -> Result<Self> {
        let linear = match self {
            Self::Dense(linear) => linear,
            Self::Nvfp4(linear) => linear.into_linear(),
            Self::Packed(_) | Self::Scaled(_) | Self::Rounded(_) | Self::Lora(_) => {
                let (weight, bias) = self.dense();
                let weight = Param::from_tensor(weight);
                let bias = bias.map(Param::from_tensor);
                Linear { weight, bias }
            }
        };
        Ok(Self::Nvfp4(Nvfp4Linear::from_linear(linear, recipe)?))
    }
}

/// Reshapes `[batch, time, width]` to the rows that a layer takes.
pub(super) fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, time, width] = x.dims();
    x.reshape([batch * time, width])
}

/// A linear layer for each expert, applied to tokens that are sorted by expert.
#[derive(Module, Debug)]
pub enum Experts {
    /// All weights in high precision, `[experts, d_in, d_out]`; the recipe of the layer decides
    /// whether they are quantized on use.
    Grouped(Nvfp4GroupedLinear),
    /// Training with the experts of the layer on several ranks; this rank has some of them.
    Sharded(ExpertShard),
    /// Inference or frozen: all weights are stored in NVFP4.
    Packed(Nvfp4PackedGroupedLinear),
    /// Stored in NVFP4, with a scale per input feature and expert.
    Scaled(ScaledPackedExperts),
    /// Inference of layers in FP8: weights in high precision, inputs rounded.
    Rounded(RoundedExperts),
}

impl Experts {
    /// Maps `[tokens, d_in]` to `[tokens, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>, experts: &ExpertOffsets) -> Result<Tensor<2>> {
        match self {
            Self::Grouped(linear) => Ok(linear.try_forward(x, experts)?),
            Self::Sharded(_) => bail!("experts on several ranks exchange their tokens first"),
            Self::Packed(linear) => Ok(linear.try_forward(x, experts)?),
            Self::Scaled(linear) => linear.forward(x, experts),
            Self::Rounded(linear) => linear.forward(x, experts),
        }
    }

    /// Returns the weights in high precision, `[experts, d_in, d_out]`; those of this rank's experts
    /// if they are sharded.
    pub fn dense(&self) -> Tensor<3> {
        match self {
            Self::Sharded(shard) => shard.layer.weight.val(),
            Self::Grouped(linear) | Self::Rounded(RoundedExperts { linear, .. }) => {
                linear.weight.val()
            }
            Self::Packed(linear) => stack_of(&linear.weight),
            Self::Scaled(scaled) => scaled_stack_of(scaled),
        }
    }

    /// Returns the biases, `[experts, d_out]`, if any.
    pub fn bias(&self) -> Option<Tensor<2>> {
        let bias = match self {
            Self::Sharded(shard) => &shard.layer.bias,
            Self::Grouped(linear) | Self::Rounded(RoundedExperts { linear, .. }) => &linear.bias,
            Self::Packed(linear) => &linear.bias,
            Self::Scaled(scaled) => &scaled.linear.bias,
        };
        bias.as_ref().map(|bias| bias.val())
    }

    /// Returns true if the weights are stored in NVFP4.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_) | Self::Scaled(_))
    }

    /// Converts the layer for inference, like [`Projection::into_packed`]. Experts whose recipe
    /// quantizes nothing are unchanged.
    ///
    /// # Errors
    /// Returns an error if the recipe has formats other than NVFP4 for weights or activations.
    pub fn into_packed(self) -> Result<Self> {
        match self {
            Self::Grouped(linear) => {
                let quantizes = linear.recipe().is_quantized() && !linear.state.is_high_precision();
                match quantizes {
                    true => Ok(Self::Packed(linear.try_to_packed()?)),
                    false => Ok(Self::Grouped(linear)),
                }
            }
            other => Ok(other),
        }
    }
}
