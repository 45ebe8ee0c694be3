//! Counters of one decorated layer.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use nvfp4_formats::Format;
use serde::{Deserialize, Serialize};

use crate::ops::OperandSpec;

/// Adds one to `counter`.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Formats of the two operands of a GEMM that ran by its recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmFormat {
    /// Both operands in NVFP4.
    Nvfp4,
    /// One operand in NVFP4, the other in the dtype of the activations: the forward of
    /// `weight_only_qat`.
    Nvfp4Mixed,
    /// Both operands in MXFP8.
    Mxfp8,
    /// Both operands in MXFP4.
    Mxfp4,
    /// Both operands in the dtype of the activations: by a recipe of bf16, or by a [`LayerMode`].
    ///
    /// [`LayerMode`]: crate::LayerMode
    HighPrecision,
}

impl GemmFormat {
    /// All formats, in the order of the variants.
    pub const ALL: [Self; 5] = [
        Self::Nvfp4,
        Self::Nvfp4Mixed,
        Self::Mxfp8,
        Self::Mxfp4,
        Self::HighPrecision,
    ];

    /// Returns the format of a GEMM with these operands.
    pub(super) fn of(operands: [OperandSpec; 2]) -> Self {
        let format = |operand: &OperandSpec| operand.params().map(|params| params.format);
        match (format(&operands[0]), format(&operands[1])) {
            (Some(Format::Nvfp4), Some(Format::Nvfp4)) => Self::Nvfp4,
            (Some(Format::Nvfp4), _) | (_, Some(Format::Nvfp4)) => Self::Nvfp4Mixed,
            (Some(Format::Mxfp8), _) | (_, Some(Format::Mxfp8)) => Self::Mxfp8,
            (Some(Format::Mxfp4), _) | (_, Some(Format::Mxfp4)) => Self::Mxfp4,
            (None, None) => Self::HighPrecision,
        }
    }
}

impl fmt::Display for GemmFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "NVFP4",
            Self::Nvfp4Mixed => "NVFP4 x high precision",
            Self::Mxfp8 => "MXFP8",
            Self::Mxfp4 => "MXFP4",
            Self::HighPrecision => "high precision",
        })
    }
}

/// GEMM counts of one layer in one role.
#[derive(Debug, Default)]
pub(super) struct RoleCounters {
    ran: [AtomicU64; GemmFormat::ALL.len()],
    missed: AtomicU64,
}

impl RoleCounters {
    /// Counts a GEMM of `operands` that ran by its recipe.
    pub fn routed(&self, operands: [OperandSpec; 2]) {
        count(&self.ran[GemmFormat::of(operands) as usize]);
    }

    /// Counts a missed GEMM.
    pub fn missed(&self) {
        count(&self.missed);
    }

    /// Number of GEMMs that ran with operands in `format`.
    pub fn ran(&self, format: GemmFormat) -> u64 {
        self.ran[format as usize].load(Ordering::Relaxed)
    }

    /// Number of missed GEMMs.
    pub fn missed_count(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

/// Counters of one layer.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub forward: RoleCounters,
    pub dgrad: RoleCounters,
    pub wgrad: RoleCounters,
    pub wgrad_wasted: AtomicU64,
    pub bias_after: AtomicU64,
}
