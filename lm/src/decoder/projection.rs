//! The linear layers of a decoder, in one of the forms that a weight may have.
//!
//! This is the one place that knows the forms: what computes with a weight calls
//! [`Projection::forward`] or [`Experts::forward`], and another form is another variant.

use anyhow::{Result, bail};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::functions::try_linear;
use burn_nvfp4::nn::{
    NormLinear, Nvfp4GroupedLinear, Nvfp4Linear, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear,
    RmsNorm,
};
use burn_nvfp4::ops::LinearSpec;
use burn_nvfp4::{ExpertOffsets, Nvfp4Recipe};

use super::lora::LoraProjection;
use super::scaled::{ScaledPackedExperts, ScaledPackedLinear};
use super::values::{matrix_of, scaled_matrix_of, scaled_stack_of, stack_of};
use crate::model::cast;

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
pub enum Projection {
    /// In high precision: `W` is `[d_in, d_out]` in the type that it is stored in.
    Dense(Linear),
    /// Trained in NVFP4: `W` is in high precision, and quantized when it is used.
    Nvfp4(Nvfp4Linear),
    /// For inference, or frozen: `W` is stored in NVFP4.
    Packed(Nvfp4PackedLinear),
    /// The same, whose input is multiplied by a scale for each feature first.
    Scaled(ScaledPackedLinear),
    /// Frozen, with trained adapters beside it.
    Lora(LoraProjection),
}

impl Projection {
    /// `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// When a shape, type or device does not fit.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        match self {
            Self::Dense(linear) => dense(linear, x),
            Self::Nvfp4(linear) => Ok(linear.try_forward(x)?),
            Self::Packed(linear) => Ok(linear.try_forward(x)?),
            Self::Scaled(linear) => linear.forward(x),
            Self::Lora(lora) => lora.forward(x),
        }
    }

    /// The layer behind a norm, with SwiGLU of its output or not, as one layer, where the weight is
    /// stored in NVFP4 and nothing else belongs to it.
    pub(super) fn behind<'a>(&'a self, norm: &'a RmsNorm, swiglu: bool) -> Option<NormLinear<'a>> {
        match self {
            Self::Packed(linear) => Some(NormLinear {
                norm,
                linear,
                swiglu,
            }),
            Self::Dense(_) | Self::Nvfp4(_) | Self::Scaled(_) | Self::Lora(_) => None,
        }
    }

    /// The weight in high precision, `[d_in, d_out]`, with adapters merged, and the bias.
    pub fn dense(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = match self {
            Self::Dense(linear) => (linear.weight.val(), &linear.bias),
            Self::Nvfp4(linear) => (linear.weight.val(), &linear.bias),
            Self::Packed(linear) => (matrix_of(&linear.weight), &linear.bias),
            Self::Scaled(scaled) => (scaled_matrix_of(scaled), &scaled.linear.bias),
            Self::Lora(lora) => return lora.merged(),
        };
        (weight, bias.as_ref().map(|bias| bias.val()))
    }

    /// `[d_in, d_out]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) => linear.weight.lazy_shape().dims(),
            Self::Nvfp4(linear) => linear.weight.lazy_shape().dims(),
            Self::Packed(linear) | Self::Scaled(ScaledPackedLinear { linear, .. }) => {
                let [d_out, d_in] = linear.weight.shape();
                [d_in, d_out]
            }
            Self::Lora(lora) => lora.base.shape(),
        }
    }

    /// Whether the weight is stored in NVFP4, with adapters or without.
    pub fn is_packed(&self) -> bool {
        match self {
            Self::Packed(_) | Self::Scaled(_) => true,
            Self::Dense(_) | Self::Nvfp4(_) => false,
            Self::Lora(lora) => lora.base.is_packed(),
        }
    }

    /// The layer for inference: what is trained in NVFP4 is quantized once, and no weight in high
    /// precision is left of it. Outputs stay what they are in validation.
    ///
    /// # Errors
    /// When the recipe has weights or activations in other formats than NVFP4, or there are
    /// adapters.
    pub fn into_packed(self) -> Result<Self> {
        match self {
            Self::Nvfp4(linear) if !linear.state.is_high_precision() => {
                Ok(Self::Packed(linear.try_to_packed()?))
            }
            Self::Lora(_) => bail!("a projection with adapters cannot be packed: merge them first"),
            other => Ok(other),
        }
    }

    /// The same parameters, with their ids, for training with `recipe`; of packed weights, the
    /// values that they stand for, and of frozen ones with adapters, both merged.
    ///
    /// # Errors
    /// When a width is no multiple of 16, or the recipe does not pass its checks.
    pub fn into_nvfp4(self, recipe: &Nvfp4Recipe) -> Result<Self> {
        let linear = match self {
            Self::Dense(linear) => linear,
            Self::Nvfp4(linear) => linear.into_linear(),
            Self::Packed(_) | Self::Scaled(_) | Self::Lora(_) => {
                let (weight, bias) = self.dense();
                let weight = Param::from_tensor(weight);
                let bias = bias.map(Param::from_tensor);
                Linear { weight, bias }
            }
        };
        Ok(Self::Nvfp4(Nvfp4Linear::from_linear(linear, recipe)?))
    }
}

/// `[batch, time, width]` as the rows that a layer takes.
pub(super) fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, time, width] = x.dims();
    x.reshape([batch * time, width])
}

/// A layer in high precision: of bf16 by the kernels of the training step, else by Burn's matmul.
fn dense(linear: &Linear, x: Tensor<2>) -> Result<Tensor<2>> {
    let dtype: FloatDType = x.dtype().into();
    let weight = cast(linear.weight.val(), dtype);
    let bias = linear.bias.as_ref().map(|bias| cast(bias.val(), dtype));
    let [d_in, d_out] = weight.dims();
    if dtype == FloatDType::BF16 && [d_in, d_out].iter().all(|it| it.is_multiple_of(16)) {
        return Ok(try_linear(x, weight, bias, LinearSpec::high_precision())?);
    }
    let y = x.matmul(weight);
    Ok(match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    })
}

/// A linear layer for each expert, applied to tokens that are sorted by expert.
#[derive(Module, Debug)]
pub enum Experts {
    /// All weights in high precision, `[experts, d_in, d_out]`; the recipe of the layer says
    /// whether they are quantized when they are used.
    Grouped(Nvfp4GroupedLinear),
    /// For inference, or frozen: all weights are stored in NVFP4.
    Packed(Nvfp4PackedGroupedLinear),
    /// The same, whose inputs are multiplied by a scale for each feature and expert first.
    Scaled(ScaledPackedExperts),
}

impl Experts {
    /// `[tokens, d_in]` to `[tokens, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// When a shape, type or device does not fit.
    pub fn forward(&self, x: Tensor<2>, experts: &ExpertOffsets) -> Result<Tensor<2>> {
        match self {
            Self::Grouped(linear) => Ok(linear.try_forward(x, experts)?),
            Self::Packed(linear) => Ok(linear.try_forward(x, experts)?),
            Self::Scaled(linear) => linear.forward(x, experts),
        }
    }

    /// The weights in high precision, `[experts, d_in, d_out]`.
    pub fn dense(&self) -> Tensor<3> {
        match self {
            Self::Grouped(linear) => linear.weight.val(),
            Self::Packed(linear) => stack_of(&linear.weight),
            Self::Scaled(scaled) => scaled_stack_of(scaled),
        }
    }

    /// Whether the weights are stored in NVFP4.
    pub fn is_packed(&self) -> bool {
        !matches!(self, Self::Grouped(_))
    }

    /// The layer for inference, as [`Projection::into_packed`]. Experts whose recipe quantizes
    /// nothing stay as they are.
    ///
    /// # Errors
    /// When the recipe has weights or activations in other formats than NVFP4.
    pub fn into_packed(self) -> Result<Self> {
        match self {
            Self::Grouped(linear) => {
                let quantizes = linear.recipe().is_quantized() && !linear.state.is_high_precision();
                match quantizes {
                    true => Ok(Self::Packed(linear.try_to_packed()?)),
                    false => Ok(Self::Grouped(linear)),
                }
            }
            packed => Ok(packed),
        }
    }
}
