//! Formats of quantized weights.

use serde::{Deserialize, Serialize};

/// Format that quantization gives the weight of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    /// NVFP4.
    Nvfp4,
    /// FP8 (E4M3).
    Fp8,
    /// That of the model.
    High,
}

impl WeightFormat {
    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::Fp8 => "fp8",
            Self::High => "high",
        }
    }
}
