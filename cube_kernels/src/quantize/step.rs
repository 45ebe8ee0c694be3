//! Steps of a quantization: the kernels that a request launches, in order.

use std::{fmt, slice};

use super::amax::AmaxRequest;
use crate::Usage;

/// Tensors of a source that a step serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Usages {
    /// The rowwise tensor.
    Rowwise,
    /// The columnwise tensor.
    Columnwise,
    /// Both tensors.
    Both,
}

impl Usages {
    /// Returns true if `usage` is among these.
    pub fn has(self, usage: Usage) -> bool {
        match self {
            Self::Rowwise => usage == Usage::Rowwise,
            Self::Columnwise => usage == Usage::Columnwise,
            Self::Both => true,
        }
    }
}

impl From<Usage> for Usages {
    fn from(usage: Usage) -> Self {
        match usage {
            Usage::Rowwise => Self::Rowwise,
            Usage::Columnwise => Self::Columnwise,
        }
    }
}

impl fmt::Display for Usages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rowwise => "rowwise",
            Self::Columnwise => "columnwise",
            Self::Both => "rowwise and columnwise",
        })
    }
}

/// One step of a quantization: one kernel, besides small ones that find the groups of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizeStep {
    /// Writes the activation of the source, or its gradient.
    Activation,
    /// Writes the activation of the source, or its gradient, and computes amax values in the same
    /// pass.
    ActivationWithAmax(AmaxRequest, Usages),
    /// Computes one amax of a whole matrix.
    AmaxOfMatrix(AmaxRequest, Usages),
    /// Computes amax values of groups, of rows, or of transformed or original columns, in one read.
    Amax(AmaxRequest, Usages),
    /// Computes the amax of the values that MS-EDEN rotates.
    MsEdenAmax(Usage),
    /// Computes these amax values along and across the rows of a matrix, in one read: one kernel
    /// rules out most tiles, a second one computes both amax values in the remaining tiles.
    MsEdenAmaxPair,
    /// Quantizes each row with its own amax, which is computed in the same read.
    PerToken,
    /// Quantizes blocks along rows, directly from memory to memory.
    Rows,
    /// Quantizes blocks along rows, and also writes code times block scale in bf16.
    RowsInBothStorages,
    /// Quantizes blocks along one axis or both, by tiles in shared memory.
    Blocks(Usages),
    /// Like [`Self::Blocks`]; the columnwise tensors of the groups share stored rows.
    BlocksSideBySide(Usages),
    /// Quantizes 16x16 tiles.
    Tiles(Usages),
    /// Rotates and quantizes by MS-EDEN.
    MsEden(Usage),
    /// Quantizes to a microscaling format.
    Mx(Usage),
    /// Quantizes an NVFP4 tensor to a microscaling format.
    MxRequantize(Usage),
}

impl QuantizeStep {
    /// Returns true if the step writes an activation.
    pub fn is_activation(&self) -> bool {
        matches!(self, Self::Activation | Self::ActivationWithAmax(..))
    }

    /// Returns the operation of a step that quantizes, and the tensors that it writes, as traces
    /// name them.
    pub fn operation(&self) -> Option<(&'static str, &'static str)> {
        let name = |usage| match usage {
            Usage::Rowwise => "rowwise",
            Usage::Columnwise => "columnwise",
        };
        Some(match *self {
            Self::Activation
            | Self::ActivationWithAmax(..)
            | Self::AmaxOfMatrix(..)
            | Self::Amax(..)
            | Self::MsEdenAmax(_)
            | Self::MsEdenAmaxPair => return None,
            Self::PerToken | Self::Rows | Self::RowsInBothStorages => ("quantize", "rowwise"),
            Self::Blocks(of) | Self::BlocksSideBySide(of) | Self::Tiles(of) => match of {
                Usages::Rowwise => ("quantize", "rowwise"),
                Usages::Columnwise => ("quantize", "columnwise"),
                Usages::Both => ("quantize", "pair"),
            },
            Self::MsEden(usage) => ("ms_eden", name(usage)),
            Self::Mx(usage) => ("mx_quantize", name(usage)),
            Self::MxRequantize(usage) => ("mx_requantize", name(usage)),
        })
    }
}

impl fmt::Display for QuantizeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usage = |usage: &Usage| Usages::from(*usage);
        match self {
            Self::Activation => f.write_str("activation"),
            Self::ActivationWithAmax(_, of) => write!(f, "activation with amax, {of}"),
            Self::AmaxOfMatrix(_, of) => write!(f, "amax of the matrix, {of}"),
            Self::Amax(_, of) => write!(f, "amax, {of}"),
            Self::MsEdenAmax(of) => write!(f, "MS-EDEN amax, {}", usage(of)),
            Self::MsEdenAmaxPair => f.write_str("MS-EDEN amax, rowwise and columnwise in one read"),
            Self::PerToken => f.write_str("rows with their amax"),
            Self::Rows => f.write_str("rows"),
            Self::RowsInBothStorages => f.write_str("rows in both storages"),
            Self::Blocks(of) => write!(f, "blocks, {of}"),
            Self::BlocksSideBySide(of) => write!(f, "blocks of groups side by side, {of}"),
            Self::Tiles(of) => write!(f, "16x16 tiles, {of}"),
            Self::MsEden(of) => write!(f, "MS-EDEN, {}", usage(of)),
            Self::Mx(of) => write!(f, "microscaling, {}", usage(of)),
            Self::MxRequantize(of) => write!(f, "microscaling from NVFP4, {}", usage(of)),
        }
    }
}

/// Kernels of a request, in the order in which they are launched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizePlan {
    steps: Vec<QuantizeStep>,
}

impl QuantizePlan {
    /// Returns the steps.
    pub fn steps(&self) -> &[QuantizeStep] {
        &self.steps
    }

    /// Appends a step.
    pub(super) fn push(&mut self, step: QuantizeStep) {
        self.steps.push(step);
    }
}

impl<'a> IntoIterator for &'a QuantizePlan {
    type Item = &'a QuantizeStep;
    type IntoIter = slice::Iter<'a, QuantizeStep>;

    fn into_iter(self) -> Self::IntoIter {
        self.steps.iter()
    }
}

impl fmt::Display for QuantizePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.steps.iter().enumerate() {
            let separator = if i == 0 { "" } else { " -> " };
            write!(f, "{separator}{step}")?;
        }
        Ok(())
    }
}
