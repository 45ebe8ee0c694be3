//! How grouped layers compute.

use nvfp4_kernels::{Hadamard, PackedAxis, Rounding};

use super::super::{LinearSpec, PairSpec, QuantizeSpec};

/// How to make both copies of the groups of a matrix, in 1x16 blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupPairSpec {
    /// How elements of the row-wise copy round.
    pub row: Rounding,
    /// How elements of the column-wise copy round.
    pub col: Rounding,
    /// The transform along the columns for the column-wise copy.
    pub hadamard: Option<Hadamard>,
}

/// What a grouped linear product in NVFP4 does beyond its shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedSpec {
    /// How both copies of each expert's weight are made; without a transform.
    pub weight: PairSpec,
    /// The transform of both operands of wgrad, along the tokens of each group.
    pub hadamard: Option<Hadamard>,
    /// How the output's gradient rounds in its row-wise copy, for dgrad.
    pub dgrad: Rounding,
    /// How the output's gradient rounds in its column-wise copy, for wgrad.
    pub wgrad: Rounding,
}

/// The grouped layer does for each expert what the plain layer does for all tokens.
impl From<LinearSpec> for GroupedSpec {
    fn from(spec: LinearSpec) -> Self {
        Self {
            weight: spec.weight(),
            hadamard: spec.hadamard,
            dgrad: spec.dgrad,
            wgrad: spec.wgrad,
        }
    }
}

impl GroupedSpec {
    /// How to make the row-wise copy of the input, for the forward product.
    pub(super) fn input_row() -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Cols,
            rounding: Rounding::Nearest,
            hadamard: None,
        }
    }

    /// How to make both copies of the input, for the forward product and for wgrad.
    pub(super) fn input_pair(&self) -> GroupPairSpec {
        GroupPairSpec {
            row: Rounding::Nearest,
            col: Rounding::Nearest,
            hadamard: self.hadamard,
        }
    }

    /// How to make the row-wise copy of the output's gradient.
    pub(super) fn gradient_row(&self) -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Cols,
            rounding: self.dgrad,
            hadamard: None,
        }
    }

    /// How to make the column-wise copy of the output's gradient.
    pub(super) fn gradient_col(&self) -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Rows,
            rounding: self.wgrad,
            hadamard: self.hadamard,
        }
    }

    /// How to make both copies of the output's gradient.
    pub(super) fn gradient_pair(&self) -> GroupPairSpec {
        GroupPairSpec {
            row: self.dgrad,
            col: self.wgrad,
            hadamard: self.hadamard,
        }
    }
}

/// In what a grouped linear product computes.
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
