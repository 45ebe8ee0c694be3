//! How grouped layers compute.

use nvfp4_kernels::{Nvfp4Error, PackedAxis, Rounding};

use super::super::{
    BackwardSource, CopySpec, GlobalScaling, LinearSpec, OperandSpec, PairSpec, QuantizeSpec,
};

/// How to make both copies of the groups of a matrix, in 1x16 blocks, with one global scale for each
/// group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupPairSpec {
    /// The row-wise copy; without a transform.
    pub row: CopySpec,
    /// The column-wise copy.
    pub col: CopySpec,
}

impl GroupPairSpec {
    /// How to make the row-wise copy alone.
    pub fn row_alone(&self) -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Cols,
            copy: self.row,
        }
    }

    /// How to make the column-wise copy alone.
    pub fn col_alone(&self) -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Rows,
            copy: self.col,
        }
    }
}

/// What a grouped linear product in NVFP4 does beyond its shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedSpec {
    /// How both copies of each expert's weight are made; without a transform.
    pub weight: PairSpec,
    /// How the input is packed: for the forward product, and for wgrad.
    pub input: GroupPairSpec,
    /// How the output's gradient is packed: for dgrad, and for wgrad.
    pub gradient: GroupPairSpec,
}

/// The grouped layer does for each expert what the plain layer does for all tokens.
///
/// # Errors
/// When the grouped kernels have no form of an operand; the message says which, and why.
impl TryFrom<LinearSpec> for GroupedSpec {
    type Error = Nvfp4Error;

    fn try_from(spec: LinearSpec) -> Result<Self, Nvfp4Error> {
        if spec.source != BackwardSource::Original {
            return Err(refused(
                "a backward from the forward's operands",
                "the grouped kernels pack groups of tokens from the original tensors",
            ));
        }
        let input = GroupPairSpec {
            row: nearest("fprop.x", spec.fprop_x)?,
            col: nearest("wgrad.x", spec.wgrad_x)?,
        };
        let gradient = GroupPairSpec {
            row: blocks("dgrad.dy", spec.dgrad_dy)?,
            col: blocks("wgrad.dy", spec.wgrad_dy)?,
        };
        let weight = match (spec.dgrad_w, spec.fprop_w) {
            (OperandSpec::Tiles(row), OperandSpec::Tiles(col)) if row == col => PairSpec::Tile(col),
            (OperandSpec::Tiles(_), _) | (_, OperandSpec::Tiles(_)) => {
                return Err(refused(
                    "w in tiles for one product and not, or scaled otherwise, for the other",
                    "a stack of weights is packed for both products at once",
                ));
            }
            (row, col) => PairSpec::Blocks {
                row: nearest("dgrad.w", row)?,
                col: nearest("fprop.w", col)?,
            },
        };
        Ok(Self {
            weight,
            input,
            gradient,
        })
    }
}

/// How `operand`, called `name`, is packed group by group.
fn blocks(name: &str, operand: OperandSpec) -> Result<CopySpec, Nvfp4Error> {
    let why = match operand {
        OperandSpec::Blocks(copy) if copy.global == GlobalScaling::PerTensor => return Ok(copy),
        OperandSpec::Blocks(_) => "groups of tokens have one global scale for each expert",
        OperandSpec::HighPrecision => "a grouped product takes two packed operands or none",
        OperandSpec::Mxfp8 => "no grouped kernel packs MXFP8",
        OperandSpec::Tiles(_) => "groups of tokens are packed in 1x16 blocks",
        OperandSpec::Eden { .. } => {
            "no grouped kernel transforms the groups of 128 that MS-EDEN needs"
        }
    };
    Err(refused(&format!("{name} = {operand:?}"), why))
}

/// The same for an operand that is not drawn.
fn nearest(name: &str, operand: OperandSpec) -> Result<CopySpec, Nvfp4Error> {
    let copy = blocks(name, operand)?;
    match copy.rounding {
        Rounding::Nearest => Ok(copy),
        drawn => Err(refused(
            &format!("{name} rounded by {drawn:?}"),
            "inputs and weights of experts round to nearest",
        )),
    }
}

fn refused(found: &str, why: &str) -> Nvfp4Error {
    Nvfp4Error::value(
        "recipe",
        format!("{found} in a grouped layer"),
        format!("`nvidia`, `nvidia_4over6`, `nvidia_headroom`, their switches, or `bf16`: {why}"),
    )
}

/// In what a grouped linear product computes.
#[allow(clippy::large_enum_variant)] // One value a call, and `Copy` as all specifications are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupedPrecision {
    /// In NVFP4, forward and backward.
    Nvfp4(GroupedSpec),
    /// In the type of the input, without quantization.
    ///
    /// On CubeCL `bf16` takes the grouped kernels; other types multiply all tokens by every expert
    /// and keep what is each one's own, which costs as many times the work as there are experts.
    Input,
}
