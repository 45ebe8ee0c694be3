//! Low-rank adapters beside frozen projections (LoRA, arXiv 2106.09685).
//!
//! A projection `y = x W` becomes `y = x W + (alpha / rank) (x A) B`, of which `A` (`[d_in, rank]`)
//! and `B` (`[rank, d_out]`) are trained. `B` begins as 0. Projections that are one weight here, such
//! as queries, keys and values, have adapters of their own, under the names that they have in PEFT.

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::nn::Nvfp4Linear;
use regex::Regex;
use serde::{Deserialize, Serialize};

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
    /// Not trained; its recipe says whether it is quantized when it is used.
    pub base: Nvfp4Linear,
    /// In the order of the columns that they add to.
    pub adapters: Vec<Adapter>,
    #[module(skip)]
    pub(super) scale: f64,
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
        let y = self.base.try_forward(x.clone())?;
        let dtype: FloatDType = x.dtype().into();
        let added = |adapter: &Adapter| {
            let [a, b] = [&adapter.a, &adapter.b].map(|part| cast(part.val(), dtype));
            x.clone().matmul(a).matmul(b).mul_scalar(self.scale)
        };
        Ok(y.clone() + self.spread(added, &y))
    }

    /// The weight that computes the same, `[d_in, d_out]`, f32.
    pub(super) fn merged(&self) -> Tensor<2> {
        let weight = cast(self.base.weight.val(), FloatDType::F32);
        let product = |adapter: &Adapter| {
            let product = adapter.a.val().matmul(adapter.b.val());
            product.mul_scalar(self.scale)
        };
        weight.clone() + self.spread(product, &weight)
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
