//! Frozen weights: in high precision, or packed in NVFP4.

use std::path::Path;

use anyhow::Result;
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::Decoder;
use crate::interchange::Scheme;
use crate::interchange::checkpoint::is_quantized;

/// Form of frozen weights: those under adapters, and those of a teacher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FrozenForm {
    /// High precision, in the type of the activations
    #[default]
    High,
    /// NVFP4 weights, high-precision activations
    #[value(name = "w4a16")]
    W4a16,
    /// NVFP4 weights and activations
    #[value(name = "w4a4")]
    W4a4,
}

impl FrozenForm {
    /// Returns the form of the weights in `folder`: packed weights stay packed.
    ///
    /// # Errors
    /// Returns an error if the configuration of the folder cannot be read.
    pub fn of(folder: &Path) -> Result<Self> {
        Ok(match is_quantized(folder)? {
            true => Self::W4a16,
            false => Self::High,
        })
    }

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::W4a16 => Scheme::W4a16.name(),
            Self::W4a4 => Scheme::W4a4.name(),
        }
    }

    /// Returns the quantization scheme if weights are packed.
    pub const fn scheme(self) -> Option<Scheme> {
        match self {
            Self::High => None,
            Self::W4a16 => Some(Scheme::W4a16),
            Self::W4a4 => Some(Scheme::W4a4),
        }
    }
}

impl Decoder {
    /// Loads the model in `folder` with its weights in `form`. Weights of a quantized folder are
    /// kept or dequantized; those of other folders are kept, or quantized one by one at load time.
    /// High-precision weights get type `dtype`.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load), [`load_packed`](Self::load_packed) and
    /// [`load_dequantized`](Self::load_dequantized). Also returns an error if the width of a weight
    /// to be quantized is not a multiple of 16.
    pub fn load_frozen(
        folder: &Path,
        device: &Device,
        dtype: FloatDType,
        form: FrozenForm,
    ) -> Result<Self> {
        match (is_quantized(folder)?, form.scheme()) {
            (false, None) => Self::load(folder, device, dtype),
            (false, Some(scheme)) => Self::load_quantizing(folder, device, dtype, scheme),
            (true, None) => Self::load_dequantized(folder, device, dtype),
            (true, scheme) => Self::load_packed(folder, device, dtype, scheme),
        }
    }
}
