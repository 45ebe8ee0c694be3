//! Steps of a quantization: the kernels that a request launches, in order.

use std::fmt;

use super::{amax::AmaxRequest, source::Source};
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

/// One step of a quantization: one kernel, besides small ones that find the groups of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizeStep {
    /// Writes the activation of the source, or its gradient.
    Activation,
    /// Writes the activation of the source, or its gradient, and computes amax values in the same
    /// pass.
    ActivationWithAmax(AmaxRequest, Usages),
    /// Computes one amax of a whole matrix.
    AmaxOfMatrix(Usages),
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

impl fmt::Display for QuantizeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Activation => "activation",
            Self::ActivationWithAmax(..) => "activation and amax",
            Self::AmaxOfMatrix(_) | Self::Amax(..) => "amax",
            Self::MsEdenAmax(_) => "rotated amax",
            Self::MsEdenAmaxPair => "both rotated amax values",
            Self::PerToken => "rows and their amax in one read",
            Self::Rows => "rows",
            Self::RowsInBothStorages => "rows, packed and bf16",
            Self::Blocks(_) | Self::BlocksSideBySide(_) => "1x16 blocks in shared memory",
            Self::Tiles(_) => "16x16 blocks",
            Self::MsEden(_) => "MS-EDEN",
            Self::Mx(_) => "MX blocks",
            Self::MxRequantize(_) => "MX blocks from codes",
        })
    }
}

impl QuantizeStep {
    /// Returns the operation of a step that writes an activation or a quantized tensor of `source`.
    pub(super) fn operation(self, source: &Source<'_>) -> Option<Operation> {
        let along = |usage| match usage {
            Usage::Rowwise => "rowwise",
            Usage::Columnwise => "columnwise",
        };
        let (name, of) = match self {
            Self::Activation | Self::ActivationWithAmax(..) => {
                let Source::Activation { x, grad, .. } = source else {
                    unreachable!("planned for an activation");
                };
                return Some(Operation {
                    name: "activation",
                    of: match grad {
                        None => "forward",
                        Some(_) => "backward",
                    },
                    shape: (x.rows, x.cols),
                });
            }
            Self::AmaxOfMatrix(..)
            | Self::Amax(..)
            | Self::MsEdenAmax(_)
            | Self::MsEdenAmaxPair => {
                return None;
            }
            Self::PerToken | Self::Rows | Self::RowsInBothStorages => ("quantize", "rowwise"),
            Self::Blocks(of) | Self::BlocksSideBySide(of) | Self::Tiles(of) => match of {
                Usages::Rowwise => ("quantize", "rowwise"),
                Usages::Columnwise => ("quantize", "columnwise"),
                Usages::Both => ("quantize", "pair"),
            },
            Self::MsEden(usage) => ("ms_eden", along(usage)),
            Self::Mx(usage) => ("mx_quantize", along(usage)),
            Self::MxRequantize(usage) => ("mx_requantize", along(usage)),
        };
        let shape = source.shape();
        Some(Operation { name, of, shape })
    }
}

/// Operation that a request launched, as traces name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Name, for example `quantize`.
    pub name: &'static str,
    /// Tensors that it wrote: `rowwise`, `columnwise`, or a `pair` of them. The direction of an
    /// activation: `forward` or `backward`.
    pub of: &'static str,
    /// Rows and columns of the source, or of the input of an activation.
    pub shape: (usize, usize),
}
