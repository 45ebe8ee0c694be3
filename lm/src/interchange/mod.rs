//! NVFP4 checkpoints of other tools: reading, checking, converting and writing them.
//!
//! Two dialects hold the same codes and block scales under other names and conventions:
//!
//! | | ModelOpt | compressed-tensors |
//! |---|---|---|
//! | codes | `weight` U8 `[n, k/2]` | `weight_packed` |
//! | block scales | `weight_scale` F8_E4M3 `[n, k/16]` | the same |
//! | global scale | `weight_scale_2` F32 `[]`, multiplies | `weight_global_scale` `[1]`, divides |
//! | input scale | `input_scale` F32 `[]`, multiplies | `input_global_scale` `[1]`, divides |
//! | scale of input features | `pre_quant_scale` `[k]`, of `NVFP4_AWQ` | none |
//!
//! - [`packed`]: one weight, its global scale with its meaning, and dequantization.
//! - [`PreQuantScale`]: factors of the input features.
//! - [`names`]: fused groups, experts and routers by the names of modules.
//! - [`exclude`]: which modules a file says are not quantized.
//! - [`config`]: the JSON of both dialects.
//! - [`modelopt`], [`compressed_tensors`]: names, types and shapes of tensors.
//! - [`checkpoint`]: a folder's tensors as modules, with all that readers would choke on.
//! - [`mod@convert`]: a folder to another folder.
//!
//! Codes and block scales are never changed. The global scale is kept as the bits of the file: a
//! folder that is written in its own dialect has the same tensors, byte for byte. From multiply to
//! divide a global scale may move by one unit in the last place, which is counted.

pub mod checkpoint;
pub mod compressed_tensors;
pub mod config;
pub mod convert;
pub mod exclude;
mod leaves;
pub mod modelopt;
pub mod names;
pub mod packed;
mod pre_quant;
mod tensors;

use anyhow::Result;
use burn_nvfp4::Nvfp4Recipe;
use clap::ValueEnum;

use crate::hf::{TensorFolder, TensorWriter};

pub use checkpoint::{Checkpoint, Problem};
pub use config::QuantConfig;
pub use convert::{Conversion, convert};
pub use leaves::Leaves;
pub use packed::{Arithmetic, GlobalScale, PackedWeight};
pub use pre_quant::PreQuantScale;

/// Whose conventions a checkpoint follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    /// NVIDIA Model Optimizer: for TensorRT-LLM, vLLM and SGLang
    #[value(name = "modelopt")]
    ModelOpt,
    /// compressed-tensors, as llm-compressor writes it: for vLLM and transformers
    CompressedTensors,
}

impl Dialect {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    /// How the tool of the dialect turns codes into values.
    pub const fn arithmetic(self) -> Arithmetic {
        match self {
            Self::ModelOpt => Arithmetic::ModelOpt,
            Self::CompressedTensors => Arithmetic::CompressedTensors,
        }
    }

    /// The other one.
    pub const fn other(self) -> Self {
        match self {
            Self::ModelOpt => Self::CompressedTensors,
            Self::CompressedTensors => Self::ModelOpt,
        }
    }

    /// The weight of the linear layer `module`.
    ///
    /// # Errors
    /// By the name of the tensor that is missing or wrong.
    pub fn read(self, tensors: &TensorFolder, module: &str) -> Result<PackedWeight> {
        match self {
            Self::ModelOpt => modelopt::read(tensors, module),
            Self::CompressedTensors => compressed_tensors::read(tensors, module),
        }
    }

    /// Add the tensors of the linear layer `module` to `writer`. Returns how many of its two global
    /// scales dequantize by another factor than before, one unit in the last place away.
    ///
    /// # Errors
    /// As [`TensorWriter::add`].
    pub fn write(
        self,
        writer: &mut TensorWriter,
        module: &str,
        weight: &PackedWeight,
    ) -> Result<u32> {
        match self {
            Self::ModelOpt => modelopt::write(writer, module, weight),
            Self::CompressedTensors => compressed_tensors::write(writer, module, weight),
        }
    }

    /// The name of the FP8 scale of the keys (`'k'`) or values (`'v'`) that the attention `module`
    /// caches.
    pub fn kv_scale(self, module: &str, which: char) -> String {
        match self {
            Self::ModelOpt => modelopt::kv_scale(module, which),
            Self::CompressedTensors => compressed_tensors::kv_scale(module, which),
        }
    }

    /// Shape of a scalar in a file.
    pub const fn scalar_shape(self) -> &'static [usize] {
        match self {
            Self::ModelOpt => modelopt::SCALAR,
            Self::CompressedTensors => compressed_tensors::SCALAR,
        }
    }

    /// The names of the tensors of a quantized linear layer, after the module's name and a dot.
    pub const fn leaves(self) -> Leaves {
        match self {
            Self::ModelOpt => modelopt::LEAVES,
            Self::CompressedTensors => compressed_tensors::LEAVES,
        }
    }
}

/// What is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scheme {
    /// Weights only
    #[value(name = "w4a16")]
    W4a16,
    /// Weights, and activations under a static global scale
    #[value(name = "w4a4")]
    W4a4,
}

impl Scheme {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::W4a16 => "w4a16",
            Self::W4a4 => "w4a4",
        }
    }

    /// The recipe whose forward quantizes so, in 1x16 blocks to nearest, as engines do; its
    /// backward is that of the quantized values in high precision.
    pub fn recipe(self) -> Nvfp4Recipe {
        match self {
            Self::W4a16 => Nvfp4Recipe::weight_only_qat(),
            Self::W4a4 => Nvfp4Recipe::fwd_nvfp4_bwd_bf16().with_weight_2d(false),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod pre_quant_tests;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "flex"))]
mod tools;
