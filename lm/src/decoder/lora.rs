//! Low-rank adapters beside frozen projections (LoRA, arXiv 2106.09685).
//!
//! A projection `y = x W` becomes `y = x W + (alpha / rank) (x A) B`, of which `A` (`[d_in, rank]`)
//! and `B` (`[rank, d_out]`) are trained. `B` begins as 0. Projections that are one weight here,
//! such as queries, keys and values, have adapters of their own, under the names that they have in
//! PEFT.

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::nn::{Nvfp4Linear, Nvfp4PackedLinear};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::scaled::ScaledPackedLinear;
use super::values::{matrix_of, scaled_matrix_of};
use crate::model::cast;

/// The projections of attention and of dense feed-forwards.
pub const DEFAULT_TARGETS: &str = r"\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj$";

/// Which projections have adapters, and of which size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Columns of `A`.
    pub rank: usize,
    /// Adapters count `alpha / rank`.
    pub alpha: f64,
    /// A regular expression of the names of modules, such as
    /// `model.layers.0.self_attn.q_proj`.
    pub targets: String,
}

impl LoraConfig {
    /// The factor of adapters.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Check the numbers, and that the targets are a regular expression.
    ///
    /// # Errors
    /// Names the value that is wrong, and what it may be.
    pub fn check(&self) -> Result<Regex> {
        ensure!(self.rank > 0, "lora is 0, but the rank must be at least 1");
        ensure!(
            self.alpha.is_finite() && self.alpha > 0.0,
            "lora-alpha is {}, but it must be a positive number",
            self.alpha
        );
        Regex::new(&self.targets)
            .with_context(|| format!("lora-targets is {:?}, no regular expression", self.targets))
    }
}

/// A frozen projection with adapters.
#[derive(Module, Debug)]
pub struct LoraProjection {
    /// Not trained.
    pub base: FrozenBase,
    /// In the order of the columns that they add to.
    pub adapters: Vec<Adapter>,
    #[module(skip)]
    pub(super) scale: f64,
}

/// The frozen layer beside adapters, in one of the forms that its weight may have.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
pub enum FrozenBase {
    /// In high precision; its recipe says whether it is quantized when it is used.
    Nvfp4(Nvfp4Linear),
    /// Stored in NVFP4.
    Packed(Nvfp4PackedLinear),
    /// The same, whose input is multiplied by a scale for each feature first.
    Scaled(ScaledPackedLinear),
}

impl FrozenBase {
    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        match self {
            Self::Nvfp4(linear) => Ok(linear.try_forward(x)?),
            Self::Packed(linear) => Ok(linear.try_forward(x)?),
            Self::Scaled(linear) => linear.forward(x),
        }
    }

    /// `[d_in, d_out]`.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Nvfp4(linear) => linear.weight.lazy_shape().dims(),
            Self::Packed(linear) | Self::Scaled(ScaledPackedLinear { linear, .. }) => {
                let [d_out, d_in] = linear.weight.shape();
                [d_in, d_out]
            }
        }
    }

    /// Whether the weight is stored in NVFP4.
    pub fn is_packed(&self) -> bool {
        !matches!(self, Self::Nvfp4(_))
    }

    /// The values of the weight, `[d_in, d_out]`, f32, and the bias.
    fn dense(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = match self {
            Self::Nvfp4(linear) => (cast(linear.weight.val(), FloatDType::F32), &linear.bias),
            Self::Packed(linear) => (matrix_of(&linear.weight), &linear.bias),
            Self::Scaled(scaled) => (scaled_matrix_of(scaled), &scaled.linear.bias),
        };
        (weight, bias.as_ref().map(|bias| bias.val()))
    }
}

/// The adapter of one module.
#[derive(Module, Debug)]
pub struct Adapter {
    /// `[d_in, rank]`, f32.
    pub a: Param<Tensor<2>>,
    /// `[rank, outputs]`, f32.
    pub b: Param<Tensor<2>>,
    /// The name of the module.
    #[module(skip)]
    pub(super) name: String,
    /// Its first column in the projection.
    #[module(skip)]
    pub(super) first: usize,
}

impl LoraProjection {
    /// `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// When a shape, type or device does not fit.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let y = self.base.forward(x.clone())?;
        let dtype: FloatDType = x.dtype().into();
        let added = |adapter: &Adapter| {
            let [a, b] = [&adapter.a, &adapter.b].map(|part| cast(part.val(), dtype));
            x.clone().matmul(a).matmul(b).mul_scalar(self.scale)
        };
        Ok(y.clone() + self.spread(added, &y))
    }

    /// The weight that computes the same, `[d_in, d_out]`, f32, and the bias.
    pub(super) fn merged(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = self.base.dense();
        let product = |adapter: &Adapter| {
            let product = adapter.a.val().matmul(adapter.b.val());
            product.mul_scalar(self.scale)
        };
        (weight.clone() + self.spread(product, &weight), bias)
    }

    /// The columns of each adapter where they belong, between zeros, as many as `like` has.
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
