//! How grouped layers compute.

use nvfp4_kernels::{BlockScaling, Hadamard, Nvfp4Error, PackedAxis, Rounding};

use super::super::{BackwardSource, CopySpec, LinearSpec, OperandSpec, PairSpec, QuantizeSpec};

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
///
/// # Errors
/// When the recipe is not of TransformerEngine's kind: NVFP4 everywhere, standard block scales, one global scale for each expert, the input to nearest, the
/// backward from the original tensors.
impl TryFrom<LinearSpec> for GroupedSpec {
    type Error = Nvfp4Error;

    fn try_from(spec: LinearSpec) -> Result<Self, Nvfp4Error> {
        let refused = |operand: &str| {
            Nvfp4Error::value(
                "recipe",
                format!("{operand} in a grouped layer"),
                "NVFP4 everywhere, plain block scales and one global scale for an expert, `x` to \
                 nearest, `w` in tiles or in blocks to nearest, the backward from the original \
                 tensors (`nvidia` and its switches), or `bf16`",
            )
        };
        let rounding = |name: &str, operand: OperandSpec, hadamard: Option<Hadamard>| match operand
        {
            OperandSpec::Blocks(copy)
                if copy
                    == (CopySpec {
                        hadamard,
                        ..CopySpec::new(copy.rounding)
                    }) =>
            {
                Ok(copy.rounding)
            }
            other => Err(refused(&format!("{name} = {other:?}"))),
        };
        let hadamard = match spec.wgrad_x {
            OperandSpec::Blocks(copy) => copy.hadamard,
            _ => None,
        };
        let weight = match (spec.dgrad_w, spec.fprop_w) {
            (OperandSpec::Tiles(a), OperandSpec::Tiles(b))
                if a == b && a == BlockScaling::Standard =>
            {
                PairSpec::Tile(a)
            }
            (row, col) => {
                let plain = |name, operand| match rounding(name, operand, None)? {
                    Rounding::Nearest => Ok(CopySpec::new(Rounding::Nearest)),
                    drawn => Err(refused(&format!("{name} rounded by {drawn:?}"))),
                };
                PairSpec::Blocks {
                    row: plain("dgrad.w", row)?,
                    col: plain("fprop.w", col)?,
                }
            }
        };
        for (name, operand, hadamard) in [
            ("fprop.x", spec.fprop_x, None),
            ("wgrad.x", spec.wgrad_x, hadamard),
        ] {
            if rounding(name, operand, hadamard)? != Rounding::Nearest {
                return Err(refused(&format!("{name} rounded stochastically")));
            }
        }
        if spec.source != BackwardSource::Original {
            return Err(refused("a backward from the forward's operands"));
        }
        Ok(Self {
            weight,
            hadamard,
            dgrad: rounding("dgrad.dy", spec.dgrad_dy, None)?,
            wgrad: rounding("wgrad.dy", spec.wgrad_dy, hadamard)?,
        })
    }
}

impl GroupedSpec {
    /// How to make the row-wise copy of the input, for the forward product.
    pub(super) fn input_row() -> QuantizeSpec {
        QuantizeSpec::new(PackedAxis::Cols, Rounding::Nearest)
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
        QuantizeSpec::new(PackedAxis::Cols, self.dgrad)
    }

    /// How to make the column-wise copy of the output's gradient.
    pub(super) fn gradient_col(&self) -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Rows,
            copy: CopySpec {
                hadamard: self.hadamard,
                ..CopySpec::new(self.wgrad)
            },
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
