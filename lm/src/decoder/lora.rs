//! Low-rank adapters for frozen projections (LoRA, arXiv 2106.09685).
//!
//! A projection `y = x W` becomes `y = x W + (alpha / rank) (x A) B`, where `A` (`[d_in, rank]`)
//! and `B` (`[rank, d_out]`) are trained. `B` is initialized to 0. Modules that are fused into one
//! weight here, such as queries, keys and values, have separate adapters under their PEFT names.

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::nn::{Nvfp4Linear, Nvfp4PackedLinear};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::dense;
use super::scaled::ScaledPackedLinear;
use super::values::{matrix_of, scaled_matrix_of};
use crate::model::cast;

/// Default targets: the projections of attention and of feed-forwards outside of experts.
pub const DEFAULT_TARGETS: &str = concat!(
    r"\.(self_attn|mlp|shared_experts)\.",
    r"((q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa)$"
);

/// Configuration of adapters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank: the number of columns of `A`.
    pub rank: usize,
    /// The adapters' output is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Regular expression that matches names of modules, such as `model.layers.0.self_attn.q_proj`.
    pub targets: String,
}

impl LoraConfig {
    /// Returns the scale of the adapters' output.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Checks the numbers, and compiles the targets to a regular expression.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check(&self) -> Result<Regex> {
        ensure!(self.rank > 0, "lora is 0, but the rank must be at least 1");
        ensure!(
            self.alpha.is_finite() && self.alpha > 0.0,
            "lora-alpha is {}, but it must be a positive number",
            self.alpha
        );
        Regex::new(&self.targets).with_context(|| {
            format!(
                "lora-targets is {:?}, which is not a valid regular expression",
                self.targets
            )
        })
    }
}

/// A projection with adapters: frozen in training, or of inference.
#[derive(Module, Debug)]
pub struct LoraProjection {
    /// Frozen layer.
    pub base: FrozenBase,
    /// Adapters, in the order of their output columns.
    pub adapters: Vec<Adapter>,
    #[module(skip)]
    pub(super) scale: f64,
}

/// Frozen layer under adapters, in one of the forms of its weight.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
pub enum FrozenBase {
    /// Inference in high precision.
    Dense(Linear),
    /// High precision; its recipe decides whether it is quantized on use.
    Nvfp4(Nvfp4Linear),
    /// Stored in NVFP4.
    Packed(Nvfp4PackedLinear),
    /// Stored in NVFP4, with a scale per input feature.
    Scaled(ScaledPackedLinear),
}

impl FrozenBase {
    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        match self {
            Self::Dense(linear) => dense::forward(linear, x),
            Self::Nvfp4(linear) => Ok(linear.try_forward(x)?),
            Self::Packed(linear) => Ok(linear.try_forward(x)?),
            Self::Scaled(linear) => linear.forward(x),
        }
    }

    /// Returns the shape, `[d_in, d_out]`.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) => linear.weight.lazy_shape().dims(),
            Self::Nvfp4(linear) => linear.weight.lazy_shape().dims(),
            Self::Packed(linear) | Self::Scaled(ScaledPackedLinear { linear, .. }) => {
                let [d_out, d_in] = linear.weight.shape();
                [d_in, d_out]
            }
        }
    }

    /// Returns true if the weight is stored in NVFP4.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_) | Self::Scaled(_))
    }

    /// Returns the dequantized weight, `[d_in, d_out]`, f32, and the bias.
    fn dense(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = match self {
            Self::Dense(linear) => (cast(linear.weight.val(), FloatDType::F32), &linear.bias),
            Self::Nvfp4(linear) => (cast(linear.weight.val(), FloatDType::F32), &linear.bias),
            Self::Packed(linear) => (matrix_of(&linear.weight), &linear.bias),
            Self::Scaled(scaled) => (scaled_matrix_of(scaled), &scaled.linear.bias),
        };
        (weight, bias.as_ref().map(|bias| bias.val()))
    }
}

/// Adapter of one module.
#[derive(Module, Debug)]
pub struct Adapter {
    /// Matrix `A`, `[d_in, rank]`; f32 in training.
    pub a: Param<Tensor<2>>,
    /// Matrix `B`, `[rank, outputs]`; f32 in training.
    pub b: Param<Tensor<2>>,
    /// Name of the module.
    #[module(skip)]
    pub(super) name: String,
    /// First column of the module in the projection.
    #[module(skip)]
    pub(super) first: usize,
}

impl LoraProjection {
    /// Maps `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let y = self.base.forward(x.clone())?;
        let dtype: FloatDType = x.dtype().into();
        let added = |adapter: &Adapter| {
            let [a, b] = [&adapter.a, &adapter.b].map(|part| cast(part.val(), dtype));
            x.clone().matmul(a).matmul(b).mul_scalar(self.scale)
        };
        Ok(y.clone() + self.spread(added, &y))
    }

    /// Returns the equivalent merged weight, `[d_in, d_out]`, f32, and the bias.
    pub(super) fn merged(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = self.base.dense();
        let product = |adapter: &Adapter| {
            let [a, b] = [&adapter.a, &adapter.b].map(|part| cast(part.val(), FloatDType::F32));
            let product = a.matmul(b);
            product.mul_scalar(self.scale)
        };
        (weight.clone() + self.spread(product, &weight), bias)
    }

    /// Concatenates the columns of all adapters at their positions, filled with zeros to the width
    /// of `like`.
    fn spread(&self, columns: impl Fn(&Adapter) -> Tensor<2>, like: &Tensor<2>) -> Tensor<2> {
        let [rows, width] = like.dims();
        let options = (&like.device(), like.dtype());
        let zeros = |count: usize| Tensor::<2>::zeros([rows, count], options);
        let mut parts = Vec::new();
        let mut end = 0;
        for adapter in &self.adapters {
            if adapter.first > end {
                parts.push(zeros(adapter.first - end));
            }
            let own = columns(adapter);
            end = adapter.first + own.dims()[1];
            parts.push(own);
        }
        if end < width {
            parts.push(zeros(width - end));
        }
        Tensor::cat(parts, 1)
    }
}
