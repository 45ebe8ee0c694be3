//! Reads, checks, converts and writes NVFP4 checkpoints of other tools.
//!
//! Two dialects store the same codes and block scales under different names and conventions:
//!
//! | | ModelOpt | compressed-tensors |
//! |---|---|---|
//! | codes | `weight` U8 `[n, k/2]` | `weight_packed` |
//! | block scales | `weight_scale` F8_E4M3 `[n, k/16]` | the same |
//! | global scale | `weight_scale_2` F32 `[]`, multiplies | `weight_global_scale` `[1]`, divides |
//! | input scale | `input_scale` F32 `[]`, multiplies | `input_global_scale` `[1]`, divides |
//! | scale of input features | `pre_quant_scale` `[k]`, of `NVFP4_AWQ` | none |
//!
//! - [`packed`]: one weight, its global scale with its convention, and dequantization.
//! - [`PreQuantScale`]: scales of the input features.
//! - [`names`]: derives fused groups, experts and routers from module names.
//! - [`exclude`]: matches the modules that a file excludes from quantization.
//! - [`config`]: JSON of both dialects; [`mod@format`]: the format of each layer, NVFP4 or FP8.
//! - [`modelopt`], [`compressed_tensors`]: names, types and shapes of tensors.
//! - [`checkpoint`]: groups a folder's tensors into modules and reports everything that readers
//!   would reject.
//! - [`mod@convert`]: converts a folder.
//!
//! Codes and block scales are never changed. The global scale keeps the bits of the file: a folder
//! written in its own dialect has the same tensors, byte for byte. Conversion from a multiplier to
//! a divisor may change a global scale by one unit in the last place; such changes are counted.

pub mod checkpoint;
pub mod compressed_tensors;
pub mod config;
pub mod convert;
pub mod exclude;
pub mod format;
mod fp8;
mod leaves;
pub mod modelopt;
pub mod names;
pub mod packed;
mod pre_quant;
mod tensors;

use anyhow::Result;
use burn_nvfp4::Nvfp4Recipe;
use clap::ValueEnum;

use crate::hf::{TensorFolder, TensorSink, TensorSpec};

pub use checkpoint::{Checkpoint, Problem};
pub use config::QuantConfig;
pub use convert::{Conversion, convert};
pub use format::{Fp8Format, Fp8Inputs, Fp8Scales, Group, LayerFormat, Targets};
pub use fp8::{Fp8Layer, Fp8Weight};
pub use leaves::Leaves;
pub use nvfp4_formats::ptq::GlobalScale;
pub use packed::{Arithmetic, PackedWeight};
pub use pre_quant::PreQuantScale;

/// Conventions of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    /// NVIDIA Model Optimizer: for TensorRT-LLM, vLLM and SGLang
    #[value(name = "modelopt")]
    ModelOpt,
    /// compressed-tensors, as llm-compressor writes it: for vLLM and transformers
    CompressedTensors,
}

impl Dialect {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    /// Returns how the tool of the dialect dequantizes codes.
    pub const fn arithmetic(self) -> Arithmetic {
        match self {
            Self::ModelOpt => Arithmetic::ModelOpt,
            Self::CompressedTensors => Arithmetic::CompressedTensors,
        }
    }

    /// Returns the other dialect.
    pub const fn other(self) -> Self {
        match self {
            Self::ModelOpt => Self::CompressedTensors,
            Self::CompressedTensors => Self::ModelOpt,
        }
    }

    /// Reads the weight of the linear layer `module`.
    ///
    /// # Errors
    /// Returns an error that names a missing or wrong tensor.
    pub fn read(self, tensors: &TensorFolder, module: &str) -> Result<PackedWeight> {
        match self {
            Self::ModelOpt => modelopt::read(tensors, module),
            Self::CompressedTensors => compressed_tensors::read(tensors, module),
        }
    }

    /// Adds the tensors of the linear layer `module` to `writer`. Returns how many of its two
    /// global scales changed their dequantization factor by one unit in the last place.
    ///
    /// # Errors
    /// Returns the errors of [`TensorSink::add`].
    pub fn write(
        self,
        writer: &mut dyn TensorSink,
        module: &str,
        weight: &PackedWeight,
    ) -> Result<u32> {
        match self {
            Self::ModelOpt => modelopt::write(writer, module, weight),
            Self::CompressedTensors => compressed_tensors::write(writer, module, weight),
        }
    }

    /// Returns the tensors of the linear layer `module`, whose weight has the shape `shape` and no
    /// input feature scales. Includes the global scale of the input if `has_input`.
    pub fn specs(self, module: &str, shape: [usize; 2], has_input: bool) -> Vec<TensorSpec> {
        let names = (module, self.leaves(), self.scalar_shape());
        tensors::specs(names, shape, has_input)
    }

    /// Returns the name of the FP8 scale of the keys (`'k'`) or values (`'v'`) that the attention
    /// `module` caches.
    pub fn kv_scale(self, module: &str, which: char) -> String {
        match self {
            Self::ModelOpt => modelopt::kv_scale(module, which),
            Self::CompressedTensors => compressed_tensors::kv_scale(module, which),
        }
    }

    /// Returns the shape of a scalar in a file.
    pub const fn scalar_shape(self) -> &'static [usize] {
        match self {
            Self::ModelOpt => modelopt::SCALAR,
            Self::CompressedTensors => compressed_tensors::SCALAR,
        }
    }

    /// Returns the names of the tensors of a quantized linear layer, which follow the module's name
    /// and a dot.
    pub const fn leaves(self) -> Leaves {
        match self {
            Self::ModelOpt => modelopt::LEAVES,
            Self::CompressedTensors => compressed_tensors::LEAVES,
        }
    }
}

/// Quantized operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Scheme {
    /// Weights only
    #[value(name = "w4a16")]
    W4a16,
    /// Weights, and activations with a static global scale
    #[value(name = "w4a4")]
    W4a4,
}

impl Scheme {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::W4a16 => "w4a16",
            Self::W4a4 => "w4a4",
        }
    }

    /// Returns the recipe with the same forward quantization as engines: 1x16 blocks, rounded to
    /// nearest. Its backward uses the quantized values in high precision.
    pub fn recipe(self) -> Nvfp4Recipe {
        match self {
            Self::W4a16 => Nvfp4Recipe::weight_only_qat(),
            Self::W4a4 => Nvfp4Recipe::fwd_nvfp4_bwd_bf16().with_weight_2d(false),
        }
    }
}

#[cfg(test)]
mod mixed_tests;
#[cfg(all(test, feature = "flex"))]
mod pre_quant_tests;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "flex"))]
mod tools;
