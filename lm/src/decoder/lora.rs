//! Low-rank adapters for frozen projections (LoRA, arXiv 2106.09685).
//!
//! A projection `y = x W` becomes `y = x W + (alpha / rank) (x A) B`, where `A` (`[d_in, rank]`)
//! and `B` (`[rank, d_out]`) are trained. `B` is initialized to 0. Modules that are fused into one
//! weight here, such as queries, keys and values, have separate adapters under their PEFT names.
//!
//! The adapters of a fused projection are computed together. Their matrices `A` are side by side,
//! `[d_in, R]`, where `R` is the sum of the ranks. Their matrices `B` are the blocks of one matrix,
//! `[R, d_out]`, which is zero elsewhere. `R` is padded with zeros to a multiple of
//! [`RANK_UNIT`]. Both products run on the GEMM kernels of the training step, and the second one is
//! added to the output of the frozen layer in its epilogue.
//!
//! Before its product, `B` is multiplied by a constant: the scale in the blocks, 0 elsewhere.
//! Autodiff multiplies the gradient by the same constant, so zeros outside of the blocks stay zero.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_nvfp4::functions::{LinearSpec, try_add_linear, try_linear};
use burn_nvfp4::nn::{Nvfp4Linear, Nvfp4PackedLinear};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::dense;
use super::rounded::RoundedLinear;
use super::scaled::ScaledPackedLinear;
use super::values::{matrix_of, scaled_matrix_of};
use crate::model::cast;

/// Default targets: the projections of attention and of feed-forwards outside of experts.
pub const DEFAULT_TARGETS: &str = concat!(
    r"\.(self_attn|mlp|shared_experts)\.",
    r"((q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa)$"
);

/// Unit of the joined rank: GEMM kernels read rows of whole 16 bytes.
pub const RANK_UNIT: usize = 8;

/// Returns the joined rank of `count` adapters of one projection, which have rank `rank` each.
pub fn joined_rank(count: usize, rank: usize) -> usize {
    (count * rank).next_multiple_of(RANK_UNIT)
}

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
    /// Joined matrix `A`, `[d_in, R]`; f32 in training.
    pub a: Param<Tensor<2>>,
    /// Joined matrix `B`, `[R, d_out]`, zero outside of the adapters' blocks; f32 in training.
    pub b: Param<Tensor<2>>,
    /// Constant factors of `b`, f32: the scale in the blocks, 0 elsewhere.
    pub(super) factors: Tensor<2>,
    /// Modules with adapters, in the order of their output columns.
    #[module(skip)]
    pub(super) modules: Vec<AdaptedModule>,
    #[module(skip)]
    pub(super) rank: usize,
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
    /// Inference of a layer in FP8, with rounded inputs.
    Rounded(RoundedLinear),
}

impl FrozenBase {
    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        match self {
            Self::Dense(linear) => dense::forward(linear, x),
            Self::Nvfp4(linear) => Ok(linear.try_forward(x)?),
            Self::Packed(linear) => Ok(linear.try_forward(x)?),
            Self::Scaled(linear) => linear.forward(x),
            Self::Rounded(linear) => linear.forward(x),
        }
    }

    /// Returns the shape, `[d_in, d_out]`.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) | Self::Rounded(RoundedLinear { linear, .. }) => {
                linear.weight.lazy_shape().dims()
            }
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
            Self::Dense(linear) | Self::Rounded(RoundedLinear { linear, .. }) => {
                (cast(linear.weight.val(), FloatDType::F32), &linear.bias)
            }
            Self::Nvfp4(linear) => (cast(linear.weight.val(), FloatDType::F32), &linear.bias),
            Self::Packed(linear) => (matrix_of(&linear.weight), &linear.bias),
            Self::Scaled(scaled) => (scaled_matrix_of(scaled), &scaled.linear.bias),
        };
        (weight, bias.as_ref().map(|bias| bias.val()))
    }
}

/// Module with an adapter, in a projection that may fuse several.
#[derive(Debug, Clone)]
pub(crate) struct AdaptedModule {
    /// Name of the module.
    pub(super) name: String,
    /// Its output columns in the projection.
    pub(super) columns: Range<usize>,
}

/// Adapter of one module.
#[derive(Debug)]
pub(crate) struct Adapter {
    /// Its module.
    pub(super) module: AdaptedModule,
    /// Matrix `A`, `[d_in, rank]`.
    pub(crate) a: Tensor<2>,
    /// Matrix `B`, `[rank, outputs]`.
    pub(crate) b: Tensor<2>,
}

impl LoraProjection {
    /// Puts `adapters`, which have one rank, type and device, beside `base`. They are in the order
    /// of their output columns, and there is at least one.
    pub(super) fn new(base: FrozenBase, adapters: Vec<Adapter>, scale: f64) -> Self {
        let [d_in, d_out] = base.shape();
        let [rank, _] = adapters[0].b.dims();
        let joined = joined_rank(adapters.len(), rank);
        let (device, dtype) = (adapters[0].a.device(), adapters[0].a.dtype());
        let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (&device, dtype));
        let mut a = zeros([d_in, joined], dtype);
        let mut b = zeros([joined, d_out], dtype);
        let mut factors = zeros([joined, d_out], DType::F32);
        let mut modules = Vec::new();
        for (index, adapter) in adapters.into_iter().enumerate() {
            let (rows, columns) = (rows(index, rank), adapter.module.columns.clone());
            let block = [rows.clone(), columns];
            let scales = adapter.b.zeros_like().cast(DType::F32).add_scalar(scale);
            a = a.slice_assign([0..d_in, rows], adapter.a);
            b = b.slice_assign(block.clone(), adapter.b);
            factors = factors.slice_assign(block, scales);
            modules.push(adapter.module);
        }
        Self {
            base,
            a: Param::from_tensor(a),
            b: Param::from_tensor(b),
            factors,
            modules,
            rank,
            scale,
        }
    }

    /// Returns the separate adapters, in the order of their output columns.
    pub(super) fn adapters(&self) -> Vec<Adapter> {
        let (a, b) = (self.a.val(), self.b.val());
        let [d_in, _] = a.dims();
        let modules = self.modules.iter().enumerate();
        let adapters = modules.map(|(index, module)| {
            let rows = rows(index, self.rank);
            Adapter {
                module: module.clone(),
                a: a.clone().slice([0..d_in, rows.clone()]),
                b: b.clone().slice([rows, module.columns.clone()]),
            }
        });
        adapters.collect()
    }

    /// Maps `[rows, d_in]` to `[rows, d_out]`, in the type of `x`. The output of the frozen layer is
    /// rounded to that type, and so is its sum with the product of the adapters.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let spec = LinearSpec::high_precision();
        let y = self.base.forward(x.clone())?;
        let low = try_linear(x, self.a.val(), None, spec)?;
        let b = cast(self.b.val(), FloatDType::F32) * self.factors.clone();
        Ok(try_add_linear(y, low, b, spec)?)
    }

    /// Returns the equivalent merged weight, `[d_in, d_out]`, f32, and the bias.
    pub(super) fn merged(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (mut weight, bias) = self.base.dense();
        let [d_in, _] = weight.dims();
        for Adapter { module, a, b } in self.adapters() {
            let [a, b] = [a, b].map(|part| cast(part, FloatDType::F32));
            let block = [0..d_in, module.columns];
            let sum = weight.clone().slice(block.clone()) + a.matmul(b).mul_scalar(self.scale);
            weight = weight.slice_assign(block, sum);
        }
        (weight, bias)
    }
}

/// Returns the rows of adapter `index` in the joined `B`, which are its columns in the joined `A`.
fn rows(index: usize, rank: usize) -> Range<usize> {
    index * rank..(index + 1) * rank
}
