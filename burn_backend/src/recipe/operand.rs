//! The operands of the three products: format, blocks, scales, rounding, transform.

use nvfp4_kernels::{
    BlockScaling, ErrorNorm, Hadamard, HadamardSize, Nvfp4Error, RandomStream, Rounding,
};
use serde::{Deserialize, Serialize};

use crate::ops::{AmaxGranularity, CopySpec, OperandSpec};

/// Which elements share a block scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum BlockShape {
    /// Sixteen elements along the contraction.
    #[default]
    #[serde(rename = "1x16")]
    OneBy16,
    /// A tile of 16 by 16: the copies for two products are exact transposes. For weights.
    #[serde(rename = "16x16")]
    Tile16,
}

/// How elements are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundingMode {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Stochastically, so that the mean over draws is the value. For gradients.
    Stochastic,
}

/// How the scale of a block follows from its largest magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockScale {
    /// The maximum maps to 6.
    #[default]
    Standard,
    /// The maximum, times 17/16, maps to 6, so that nothing clips and stochastic rounding is
    /// unbiased.
    Headroom,
    /// The maximum maps to 6 or to 4, whichever has the smaller sum of absolute errors.
    FourOverSixMae,
    /// The maximum maps to 6 or to 4, whichever has the smaller sum of squared errors.
    FourOverSixMse,
}

impl BlockScale {
    fn kernel(self) -> BlockScaling {
        match self {
            Self::Standard => BlockScaling::Standard,
            Self::Headroom => BlockScaling::Headroom,
            Self::FourOverSixMae => BlockScaling::FourOverSix(ErrorNorm::Mae),
            Self::FourOverSixMse => BlockScaling::FourOverSix(ErrorNorm::Mse),
        }
    }
}

/// How one operand is quantized to NVFP4.
///
/// In a file every field may be left out; the defaults are 1x16 blocks, one global scale, rounding to
/// nearest, no transform, standard block scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvfp4Format {
    /// Which elements share a block scale.
    pub block: BlockShape,
    /// One global scale for the matrix, or one for each stored row: each token of a row-wise operand,
    /// each feature of a column-wise one.
    pub global: AmaxGranularity,
    /// How elements are rounded.
    pub rounding: RoundingMode,
    /// Elements that the random Hadamard transform along the contraction mixes: 16, 32, 64 or 128.
    pub rht: Option<usize>,
    /// How block scales are found.
    pub scale: BlockScale,
}

/// How one operand of one product is represented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "format", rename_all = "snake_case")]
pub enum OperandRecipe {
    /// In the type of the activations (bf16, f16 or f32).
    HighPrecision,
    /// MXFP8: blocks of 32 with E4M3 elements and power-of-two scales.
    Mxfp8,
    /// NVFP4.
    Nvfp4(Nvfp4Format),
    /// NVFP4 by MS-EDEN: a transform of 128 with signs drawn for each step, elements to nearest,
    /// block scales corrected and rounded stochastically. For both operands of a backward product.
    MsEden,
}

impl OperandRecipe {
    /// NVFP4 in plain 1x16 blocks, to nearest.
    pub const PLAIN: Self = Self::Nvfp4(Nvfp4Format {
        block: BlockShape::OneBy16,
        global: AmaxGranularity::PerTensor,
        rounding: RoundingMode::Nearest,
        rht: None,
        scale: BlockScale::Standard,
    });

    /// NVFP4 in plain 16x16 tiles, to nearest.
    pub const TILES: Self = Self::Nvfp4(Nvfp4Format {
        block: BlockShape::Tile16,
        global: AmaxGranularity::PerTensor,
        rounding: RoundingMode::Nearest,
        rht: None,
        scale: BlockScale::Standard,
    });

    /// The same with its NVFP4 format changed by `change`; other formats as they are.
    pub fn map(self, change: impl FnOnce(&mut Nvfp4Format)) -> Self {
        match self {
            Self::Nvfp4(mut format) => {
                change(&mut format);
                Self::Nvfp4(format)
            }
            other => other,
        }
    }

    /// Rounded stochastically.
    pub fn stochastic(self) -> Self {
        self.map(|format| format.rounding = RoundingMode::Stochastic)
    }

    /// After the transform of `size`.
    pub fn rht(self, size: usize) -> Self {
        self.map(|format| format.rht = Some(size))
    }

    /// With block scales by `scale`.
    pub fn scale(self, scale: BlockScale) -> Self {
        self.map(|format| format.scale = scale)
    }

    /// With one global scale for each stored row.
    pub fn per_token(self) -> Self {
        self.map(|format| format.global = AmaxGranularity::PerRow)
    }

    pub(super) fn is_quantized(&self) -> bool {
        *self != Self::HighPrecision
    }
}

/// The two operands of one product, with what they are called, for messages.
pub(super) struct GemmOperands {
    pub gemm: &'static str,
    pub operands: [(&'static str, OperandRecipe); 2],
}

impl GemmOperands {
    fn error(&self, operand: usize, found: &str, expected: &str) -> Nvfp4Error {
        Nvfp4Error::value(
            self.gemm,
            format!("{} {found}", self.operands[operand].0),
            expected,
        )
    }

    /// Fail unless a kernel computes this product.
    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        let wgrad = self.gemm == "wgrad";
        for (index, (name, operand)) in self.operands.iter().enumerate() {
            let OperandRecipe::Nvfp4(format) = operand else {
                continue;
            };
            let tile = format.block == BlockShape::Tile16;
            let four = matches!(
                format.scale,
                BlockScale::FourOverSixMae | BlockScale::FourOverSixMse
            );
            let stochastic = format.rounding == RoundingMode::Stochastic;
            let (found, expected) = if tile && *name != "w" {
                (
                    "in 16x16 tiles",
                    "1x16 blocks: tiles are for weights, whose two copies they keep equal",
                )
            } else if tile && stochastic {
                (
                    "in 16x16 tiles, rounded stochastically",
                    "rounding to nearest: two copies of a tile must be transposes of each other",
                )
            } else if tile && format.rht.is_some() {
                (
                    "in 16x16 tiles after a transform",
                    "1x16 blocks with it: a transform mixes one axis, a tile is the same along both",
                )
            } else if tile && format.scale == BlockScale::Headroom {
                (
                    "in 16x16 tiles with headroom",
                    "standard or four-over-six scales: headroom is for stochastic rounding",
                )
            } else if tile && format.global == AmaxGranularity::PerRow {
                (
                    "in 16x16 tiles with a global scale for each row",
                    "one global scale: a tile spans 16 rows",
                )
            } else if four && stochastic {
                (
                    "by four over six, rounded stochastically",
                    "rounding to nearest: the choice between 4 and 6 compares errors of nearest",
                )
            } else if four && format.rht.is_some() {
                (
                    "by four over six after a transform",
                    "one or the other: no published recipe combines them",
                )
            } else if format.rht.is_some() && !wgrad {
                (
                    "after a transform",
                    "a transform in wgrad only: it runs along the tokens, and in fprop and dgrad it \
                     is known to give nothing",
                )
            } else if !matches!(format.rht, None | Some(16 | 32 | 64 | 128)) {
                (
                    "after a transform of another size",
                    "a transform of 16, 32, 64 or 128",
                )
            } else {
                continue;
            };
            return Err(self.error(index, found, expected));
        }
        use OperandRecipe::{HighPrecision, MsEden, Mxfp8, Nvfp4};
        match (self.operands[0].1, self.operands[1].1) {
            (Nvfp4(left), Nvfp4(right)) if left.rht != right.rht => Err(self.error(
                0,
                &format!("after {:?}, the other after {:?}", left.rht, right.rht),
                "the same transform of both operands: otherwise it does not cancel",
            )),
            (MsEden, MsEden) if self.gemm == "fprop" => Err(self.error(
                0,
                "by MS-EDEN",
                "it in dgrad and wgrad: it is noisier than rounding to nearest, and unbiased, \
                 which a forward does not need",
            )),
            (Nvfp4(_), Nvfp4(_)) | (MsEden, MsEden) | (Mxfp8, Mxfp8) => Ok(()),
            (HighPrecision, HighPrecision) => Ok(()),
            (HighPrecision, Nvfp4(format)) | (Nvfp4(format), HighPrecision)
                if !wgrad && format.rht.is_none() =>
            {
                Ok(())
            }
            (HighPrecision, Nvfp4(_)) | (Nvfp4(_), HighPrecision) => Err(self.error(
                0,
                "and the other operand of different formats",
                "one format for both operands of wgrad, whose contraction is padded to its blocks",
            )),
            _ => Err(self.error(
                0,
                "and the other operand of different formats",
                "both in MXFP8, both by MS-EDEN, or NVFP4 and high precision",
            )),
        }
    }
}

/// Where an operand's random choices come from.
pub(super) struct Draw {
    /// The bits of the elements, or of MS-EDEN's scales.
    pub stream: RandomStream,
    /// The transform of `size`, the same for both operands of a product.
    pub transform: Hadamard,
    /// MS-EDEN's transform, the same for both operands of a product.
    pub eden: Hadamard,
}

impl OperandRecipe {
    /// What the operand does, with the choices of `draw`.
    pub(super) fn spec(&self, draw: impl FnOnce(Option<HadamardSize>) -> Draw) -> OperandSpec {
        match self {
            Self::HighPrecision => OperandSpec::HighPrecision,
            Self::Mxfp8 => OperandSpec::Mxfp8,
            Self::MsEden => {
                let Draw { stream, eden, .. } = draw(None);
                OperandSpec::Eden {
                    hadamard: eden,
                    stream,
                }
            }
            Self::Nvfp4(format) if format.block == BlockShape::Tile16 => {
                OperandSpec::Tiles(format.scale.kernel())
            }
            Self::Nvfp4(format) => {
                let size = format.rht.map(hadamard_size);
                let Draw {
                    stream, transform, ..
                } = draw(size);
                OperandSpec::Blocks(CopySpec {
                    rounding: match format.rounding {
                        RoundingMode::Nearest => Rounding::Nearest,
                        RoundingMode::Stochastic => Rounding::Stochastic(stream),
                    },
                    hadamard: size.map(|_| transform),
                    scaling: format.scale.kernel(),
                    global: format.global,
                })
            }
        }
    }
}

/// A size that [`GemmOperands::check`] let pass.
fn hadamard_size(elements: usize) -> HadamardSize {
    HadamardSize::ALL
        .into_iter()
        .find(|size| size.elements() == elements)
        .expect("a checked recipe")
}
