//! What an operation does beyond its shapes: policies with every random choice already made.

#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_kernels::reference::EDEN_GROUP;
use nvfp4_kernels::{
    AmaxGranularity, BlockScaling, Hadamard, HadamardSize, MX_BLOCK, Nvfp4Error, RandomStream,
    Rounding, Usage,
};

use serde::{Deserialize, Serialize};

#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use super::packed::PackedLayout;
use super::packed::unit_of;

/// How one packed copy of a matrix is made, whichever axis it is packed along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopySpec {
    /// How elements round.
    pub rounding: Rounding,
    /// The transform applied along the packed axis first; only for [`Usage::Columnwise`].
    pub hadamard: Option<Hadamard>,
    /// How block scales are found. Four over six rounds to nearest only.
    pub scaling: BlockScaling,
    /// What one global scale stands for.
    pub global: AmaxGranularity,
}

impl CopySpec {
    /// Rounding by `rounding`, and everything else plain: no transform, standard block scales, one
    /// global scale.
    pub const fn new(rounding: Rounding) -> Self {
        Self {
            rounding,
            hadamard: None,
            scaling: BlockScaling::Standard,
            global: AmaxGranularity::PerTensor,
        }
    }

    /// The copies of 16x16 tiles are made so, but for the shape of their blocks.
    pub(crate) const fn of_tiles(scaling: BlockScaling) -> Self {
        Self {
            scaling,
            ..Self::new(Rounding::Nearest)
        }
    }

    /// The layout of the copy of a `rows` x `cols` matrix along `usage`.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(crate) fn layout(&self, rows: usize, cols: usize, usage: Usage) -> PackedLayout {
        PackedLayout {
            rows,
            cols,
            usage,
            hadamard: self.hadamard,
            scaling: self.scaling,
            global: self.global,
        }
    }
}

/// How to make one packed copy of a matrix, in 1x16 blocks along `usage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeSpec {
    /// The axis along which the blocks lie: along rows ([`Usage::Rowwise`]), or along columns
    /// ([`Usage::Columnwise`], stored transposed).
    pub usage: Usage,
    /// How the copy is made.
    pub copy: CopySpec,
}

impl QuantizeSpec {
    /// A plain copy along `usage`.
    pub const fn new(usage: Usage, rounding: Rounding) -> Self {
        Self {
            usage,
            copy: CopySpec::new(rounding),
        }
    }
}

/// How to make the row-wise and the column-wise copy of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairSpec {
    /// One scale for each 16x16 tile, rounded to nearest: the two copies are exact transposes.
    Tile(BlockScaling),
    /// 1x16 blocks in each copy.
    Blocks {
        /// The row-wise copy.
        row: CopySpec,
        /// The column-wise copy.
        col: CopySpec,
    },
}

impl PairSpec {
    /// What each copy is: row-wise, column-wise.
    #[cfg(feature = "cubecl-backend")]
    pub(crate) fn copies(&self) -> [CopySpec; 2] {
        match *self {
            Self::Tile(scaling) => [CopySpec::of_tiles(scaling); 2],
            Self::Blocks { row, col } => [row, col],
        }
    }
}

/// How to quantize by MS-EDEN along `usage`: a transform of 128, rounding to nearest, and block scales
/// that are corrected and rounded stochastically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdenSpec {
    /// The contraction.
    pub usage: Usage,
    /// The transform, of 128; the same for both operands of a product.
    pub hadamard: Hadamard,
    /// Where the scales take their bits from.
    pub stream: RandomStream,
}

impl EdenSpec {
    /// The layout of a `rows` x `cols` matrix after it: that of the transformed matrix, padded along
    /// the contraction.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(crate) fn layout(&self, rows: usize, cols: usize) -> PackedLayout {
        let (rows, cols) = match self.usage {
            Usage::Rowwise => (rows, cols.next_multiple_of(EDEN_GROUP)),
            Usage::Columnwise => (rows.next_multiple_of(EDEN_GROUP), cols),
        };
        PackedLayout {
            hadamard: Some(self.hadamard),
            ..PackedLayout::plain(rows, cols, self.usage)
        }
    }
}

/// How one operand of a product is represented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandSpec {
    /// As it is, in the type of the activations.
    HighPrecision,
    /// MXFP8.
    Mxfp8,
    /// NVFP4 in 1x16 blocks along the contraction.
    Blocks(CopySpec),
    /// NVFP4 in 16x16 tiles, rounded to nearest.
    Tiles(BlockScaling),
    /// NVFP4 by MS-EDEN.
    Eden {
        /// The transform, of 128; the same for both operands of a product.
        hadamard: Hadamard,
        /// Where the scales take their bits from.
        stream: RandomStream,
    },
}

impl OperandSpec {
    /// NVFP4 in plain 1x16 blocks.
    pub const fn blocks(rounding: Rounding) -> Self {
        Self::Blocks(CopySpec::new(rounding))
    }

    /// Whether it is 4-bit codes.
    pub(crate) fn is_nvfp4(&self) -> bool {
        !matches!(self, Self::HighPrecision | Self::Mxfp8)
    }

    /// Elements to whose multiple the contraction is padded.
    pub(super) fn unit(&self) -> usize {
        match self {
            Self::HighPrecision => 1,
            Self::Mxfp8 => MX_BLOCK,
            _ => unit_of(self.hadamard()),
        }
    }

    /// Whether two uses of one matrix give the same operand: nothing is drawn.
    pub(crate) fn is_deterministic(&self) -> bool {
        match self {
            Self::HighPrecision | Self::Mxfp8 | Self::Tiles(_) => true,
            Self::Blocks(copy) => copy.rounding == Rounding::Nearest,
            Self::Eden { .. } => false,
        }
    }
}

/// From which values the backward's operands of `x` and `w` are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackwardSource {
    /// From the matrices that the forward was given.
    #[default]
    Original,
    /// From the values that the forward multiplied: dequantized forward operands.
    Forward,
}

/// What [`Nvfp4Ops::nvfp4_linear`](super::Nvfp4Ops::nvfp4_linear) does beyond its shapes: the six
/// operands of its three products.
///
/// `y = x w`: `x` along its columns, `w` along its rows. `dx = dy wᵀ`: both along their columns.
/// `dw = xᵀ dy`: both along their rows, the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearSpec {
    /// `x` in fprop.
    pub fprop_x: OperandSpec,
    /// `w` in fprop.
    pub fprop_w: OperandSpec,
    /// `dy` in dgrad.
    pub dgrad_dy: OperandSpec,
    /// `w` in dgrad.
    pub dgrad_w: OperandSpec,
    /// `x` in wgrad.
    pub wgrad_x: OperandSpec,
    /// `dy` in wgrad.
    pub wgrad_dy: OperandSpec,
    /// From what `dgrad_w` and `wgrad_x` are made.
    pub source: BackwardSource,
}

impl LinearSpec {
    /// TransformerEngine's default recipe: `x` in 1x16 blocks to nearest, `w` in 16x16 tiles, `dy`
    /// rounded by `dgrad` and `wgrad`, `hadamard` on both operands of wgrad.
    pub fn nvidia(hadamard: Option<Hadamard>, dgrad: Rounding, wgrad: Rounding) -> Self {
        let transformed = |rounding| {
            OperandSpec::Blocks(CopySpec {
                hadamard,
                ..CopySpec::new(rounding)
            })
        };
        let w = OperandSpec::Tiles(BlockScaling::Standard);
        Self {
            fprop_x: OperandSpec::blocks(Rounding::Nearest),
            fprop_w: w,
            dgrad_dy: OperandSpec::blocks(dgrad),
            dgrad_w: w,
            wgrad_x: transformed(Rounding::Nearest),
            wgrad_dy: transformed(wgrad),
            source: BackwardSource::Original,
        }
    }

    /// Everything in the type of the activations.
    pub const fn high_precision() -> Self {
        let plain = OperandSpec::HighPrecision;
        Self {
            fprop_x: plain,
            fprop_w: plain,
            dgrad_dy: plain,
            dgrad_w: plain,
            wgrad_x: plain,
            wgrad_dy: plain,
            source: BackwardSource::Original,
        }
    }
}

impl LinearSpec {
    /// Fail unless a kernel makes every operand and multiplies every pair.
    pub(crate) fn check(&self) -> Result<(), Nvfp4Error> {
        let products = [
            ("fprop", [("x", self.fprop_x), ("w", self.fprop_w)]),
            ("dgrad", [("dy", self.dgrad_dy), ("w", self.dgrad_w)]),
            ("wgrad", [("x", self.wgrad_x), ("dy", self.wgrad_dy)]),
        ];
        for (gemm, operands) in products {
            let error = |found: String, expected: &str| {
                let [(left, _), (right, _)] = operands;
                Nvfp4Error::value(
                    "spec",
                    format!("{gemm} of {left} and {right}: {found}"),
                    expected,
                )
            };
            for (name, operand) in operands {
                let refused = match operand {
                    OperandSpec::Tiles(_) if name != "w" => "1x16 blocks: tiles are for weights",
                    OperandSpec::Tiles(BlockScaling::Headroom) => "standard or four-over-six tiles",
                    OperandSpec::Blocks(copy) if copy.hadamard.is_some() && gemm != "wgrad" => {
                        "no transform: it runs along the tokens, in wgrad"
                    }
                    OperandSpec::Blocks(CopySpec {
                        rounding: Rounding::Stochastic(_),
                        scaling: BlockScaling::FourOverSix(_),
                        ..
                    }) => "four over six with rounding to nearest",
                    OperandSpec::Eden { hadamard, .. }
                        if hadamard.size() != HadamardSize::H128 || gemm == "fprop" =>
                    {
                        "MS-EDEN with a transform of 128, in dgrad and wgrad"
                    }
                    _ => continue,
                };
                return Err(error(format!("{name} is {operand:?}"), refused));
            }
            use OperandSpec::{Eden, HighPrecision, Mxfp8};
            let [(_, left), (_, right)] = operands;
            let fits = match (left, right) {
                (HighPrecision, HighPrecision) | (Mxfp8, Mxfp8) => true,
                (Eden { hadamard: a, .. }, Eden { hadamard: b, .. }) => a == b,
                (Eden { .. } | Mxfp8, _) | (_, Eden { .. } | Mxfp8) => false,
                (HighPrecision, _) | (_, HighPrecision) => gemm != "wgrad",
                (left, right) => left.hadamard() == right.hadamard(),
            };
            if !fits {
                return Err(error(
                    format!("{left:?} and {right:?}"),
                    "operands of one format and transform, or NVFP4 and high precision in fprop \
                     and dgrad",
                ));
            }
        }
        Ok(())
    }
}

impl OperandSpec {
    fn hadamard(&self) -> Option<Hadamard> {
        match self {
            Self::Blocks(copy) => copy.hadamard,
            Self::Eden { hadamard, .. } => Some(*hadamard),
            _ => None,
        }
    }
}
