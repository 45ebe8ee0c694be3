//! The counters of one decorated layer.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::ops::OperandSpec;

/// Adds one to `counter`.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The formats of the two operands of a GEMM that ran by its recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmFormat {
    /// Both in NVFP4.
    Nvfp4,
    /// One in NVFP4, the other in the type of the activations: the forward of `weight_only_qat`.
    Nvfp4Mixed,
    /// Both in MXFP8.
    Mxfp8,
    /// Both in the type of the activations: by a recipe of bf16, or by a [`LayerMode`].
    ///
    /// [`LayerMode`]: crate::LayerMode
    HighPrecision,
}

impl GemmFormat {
    /// All formats, in the order of the variants.
    pub const ALL: [Self; 4] = [
        Self::Nvfp4,
        Self::Nvfp4Mixed,
        Self::Mxfp8,
        Self::HighPrecision,
    ];

    /// The format of a GEMM of two operands.
    pub(super) fn of(operands: [OperandSpec; 2]) -> Self {
        match operands.map(|operand| operand.is_nvfp4()) {
            [true, true] => Self::Nvfp4,
            [true, false] | [false, true] => Self::Nvfp4Mixed,
            [false, false] if operands.iter().any(|operand| operand.params().is_some()) => {
                Self::Mxfp8
            }
            [false, false] => Self::HighPrecision,
        }
    }
}

impl fmt::Display for GemmFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "NVFP4",
            Self::Nvfp4Mixed => "NVFP4 x high precision",
            Self::Mxfp8 => "MXFP8",
            Self::HighPrecision => "high precision",
        })
    }
}

/// How often the GEMM of one role ran in one layer.
#[derive(Debug, Default)]
pub(super) struct RoleCounters {
    ran: [AtomicU64; GemmFormat::ALL.len()],
    missed: AtomicU64,
}

impl RoleCounters {
    /// A GEMM of `operands` ran by its recipe.
    pub fn routed(&self, operands: [OperandSpec; 2]) {
        count(&self.ran[GemmFormat::of(operands) as usize]);
    }

    /// A GEMM was missed.
    pub fn missed(&self) {
        count(&self.missed);
    }

    /// GEMMs that ran with operands in `format`.
    pub fn ran(&self, format: GemmFormat) -> u64 {
        self.ran[format as usize].load(Ordering::Relaxed)
    }

    /// GEMMs that were missed.
    pub fn missed_count(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

/// How often each thing happened in one layer.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub forward: RoleCounters,
    pub dgrad: RoleCounters,
    pub wgrad: RoleCounters,
    pub wgrad_wasted: AtomicU64,
    pub bias_after: AtomicU64,
}
