//! Quantization of GEMM operands: format, blocks, scale factors, rounding, transform.

use nvfp4_formats::{
    AmaxGranularity, BlockScaling, BlockShape, ErrorNorm, Format, Hadamard, HadamardSize,
    Nvfp4Error, RandomStream, Rounding,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::ops::{EdenDraw, OperandSpec, QuantParams, QuantRounding};

/// Format of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperandFormat {
    /// Dtype of the activations (bf16, f16 or f32).
    HighPrecision,
    /// NVFP4.
    Nvfp4,
    /// NVFP4 by MS-EDEN: RHT of size 128 with signs drawn at each step, elements rounded to
    /// nearest, block scales corrected and rounded stochastically. For both operands of a backward
    /// GEMM.
    MsEden,
    /// MXFP8: blocks of 32 with E4M3 elements and power-of-two scales.
    Mxfp8,
    /// MXFP4: blocks of 32 with E2M1 elements and power-of-two scales, no global scale.
    Mxfp4,
}

/// Rounding of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundingMode {
    /// Round to nearest, ties to even.
    #[default]
    Nearest,
    /// Stochastic rounding: unbiased, for gradients.
    Stochastic,
}

/// Quantization of one operand of one GEMM. Each step adds its random draws, which gives
/// [`QuantParams`].
///
/// In a file every field except `format` is optional. The other fields apply to NVFP4 only; the
/// defaults are 1x16 blocks, one amax per tensor, rounding to nearest, no transform, and standard
/// block scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantSpec {
    /// Format.
    pub format: OperandFormat,
    /// Block shape, the elements that share one block scale: `1x16` along the K dimension, or
    /// `16x16`, for weights, with which the row-wise and column-wise tensors are each other's
    /// transpose.
    #[serde(default, with = "BlockShapeName", skip_serializing_if = "is_default")]
    pub block: BlockShape,
    /// Granularity of the amax, and so of the global scale: one per tensor, or one per stored row
    /// (each token of a row-wise operand, each feature of a column-wise one).
    #[serde(default, alias = "global", skip_serializing_if = "is_default")]
    pub amax: AmaxGranularity,
    /// Rounding of elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rounding: RoundingMode,
    /// Size of the random Hadamard transform along the K dimension: 16, 32, 64 or 128 elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rht: Option<usize>,
    /// Rule for block scales from the amax of a block: `standard`, `headroom`, `four_over_six_mae`
    /// or `four_over_six_mse`.
    #[serde(default, with = "scaling_name", skip_serializing_if = "is_default")]
    pub scale: BlockScaling,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Names of block shapes in files.
#[derive(Serialize, Deserialize)]
#[serde(remote = "BlockShape")]
enum BlockShapeName {
    #[serde(rename = "1x16")]
    Block1d,
    #[serde(rename = "16x16")]
    Block2d,
}

/// Names of block scalings in files.
mod scaling_name {
    use super::*;

    const NAMES: [(&str, BlockScaling); 4] = [
        ("standard", BlockScaling::Standard),
        ("headroom", BlockScaling::Headroom),
        (
            "four_over_six_mae",
            BlockScaling::FourOverSix(ErrorNorm::Mae),
        ),
        (
            "four_over_six_mse",
            BlockScaling::FourOverSix(ErrorNorm::Mse),
        ),
    ];

    pub fn serialize<S: Serializer>(
        scaling: &BlockScaling,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let named = NAMES.iter().find(|(_, named)| named == scaling);
        let named = named.ok_or_else(|| {
            serde::ser::Error::custom(format!("scale {scaling:?}: recipes derive global scales"))
        })?;
        serializer.serialize_str(named.0)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BlockScaling, D::Error> {
        let found = String::deserialize(deserializer)?;
        let named = NAMES.iter().find(|(name, _)| *name == found);
        named.map(|(_, scaling)| *scaling).ok_or_else(|| {
            let names = NAMES.map(|(name, _)| name).join(", ");
            D::Error::custom(format!("scale `{found}`: expected one of {names}"))
        })
    }
}

impl QuantSpec {
    /// Dtype of the activations.
    pub const HIGH_PRECISION: Self = Self::new(OperandFormat::HighPrecision);
    /// NVFP4 in 1x16 blocks, rounded to nearest.
    pub const NVFP4: Self = Self::new(OperandFormat::Nvfp4);
    /// NVFP4 in 16x16 blocks, rounded to nearest.
    pub const NVFP4_2D: Self = Self {
        block: BlockShape::Block2d,
        ..Self::NVFP4
    };
    /// NVFP4 by MS-EDEN.
    pub const MS_EDEN: Self = Self::new(OperandFormat::MsEden);
    /// MXFP8.
    pub const MXFP8: Self = Self::new(OperandFormat::Mxfp8);
    /// MXFP4.
    pub const MXFP4: Self = Self::new(OperandFormat::Mxfp4);

    /// Creates a specification of `format` with the default options.
    pub const fn new(format: OperandFormat) -> Self {
        Self {
            format,
            block: BlockShape::Block1d,
            amax: AmaxGranularity::PerTensor,
            rounding: RoundingMode::Nearest,
            rht: None,
            scale: BlockScaling::Standard,
        }
    }

    /// Changes options of NVFP4 by `change`; leaves other formats unchanged.
    pub fn map(mut self, change: impl FnOnce(&mut Self)) -> Self {
        if self.format == OperandFormat::Nvfp4 {
            change(&mut self);
        }
        self
    }

    /// Enables stochastic rounding.
    pub fn stochastic(self) -> Self {
        self.map(|spec| spec.rounding = RoundingMode::Stochastic)
    }

    /// Enables the RHT of `size` elements.
    pub fn rht(self, size: usize) -> Self {
        self.map(|spec| spec.rht = Some(size))
    }

    /// Sets the rule for block scales.
    pub fn scale(self, scale: BlockScaling) -> Self {
        self.map(|spec| spec.scale = scale)
    }

    /// Sets one amax per stored row.
    pub fn per_row(self) -> Self {
        self.map(|spec| spec.amax = AmaxGranularity::PerRow)
    }

    pub(super) fn is_quantized(&self) -> bool {
        self.format != OperandFormat::HighPrecision
    }
}

/// The two operands of one GEMM, and their names in messages.
pub(super) struct GemmOperands {
    pub gemm: &'static str,
    pub operands: [(&'static str, QuantSpec); 2],
}

impl GemmOperands {
    fn error(&self, operand: usize, found: &str, expected: &str) -> Nvfp4Error {
        Nvfp4Error::value(
            self.gemm,
            format!("{} {found}", self.operands[operand].0),
            expected,
        )
    }

    /// Returns an error if no kernel computes this GEMM.
    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        let wgrad = self.gemm == "wgrad";
        for (index, (name, operand)) in self.operands.iter().enumerate() {
            if operand.format != OperandFormat::Nvfp4 {
                if *operand != QuantSpec::new(operand.format) {
                    let expected = "the format alone: the options are those of nvfp4";
                    return Err(self.error(index, "with options of nvfp4", expected));
                }
                continue;
            }
            let tile = operand.block == BlockShape::Block2d;
            let four = matches!(operand.scale, BlockScaling::FourOverSix(_));
            let stochastic = operand.rounding == RoundingMode::Stochastic;
            let (found, expected) = if tile && *name != "w" {
                (
                    "in 16x16 tiles",
                    "1x16 blocks: tiles are for weights, whose two tensors they keep equal",
                )
            } else if tile && stochastic {
                (
                    "in 16x16 tiles, rounded stochastically",
                    "rounding to nearest: both tensors of a tile must be transposes of each other",
                )
            } else if tile && operand.rht.is_some() {
                (
                    "in 16x16 tiles after a transform",
                    "1x16 blocks with it: a transform mixes one axis, a tile spans both",
                )
            } else if operand.scale == BlockScaling::Static {
                (
                    "with a static global scale",
                    "one that is derived: training has none beforehand",
                )
            } else if tile && operand.scale == BlockScaling::Headroom {
                (
                    "in 16x16 tiles with headroom",
                    "standard or four-over-six scales: headroom is for stochastic rounding",
                )
            } else if tile && operand.amax == AmaxGranularity::PerRow {
                (
                    "in 16x16 tiles with a global scale for each row",
                    "one global scale: a tile spans 16 rows",
                )
            } else if four && stochastic {
                (
                    "by four over six, rounded stochastically",
                    "rounding to nearest: the choice between 4 and 6 compares errors of nearest",
                )
            } else if four && operand.rht.is_some() {
                (
                    "by four over six after a transform",
                    "one or the other: no published recipe combines them",
                )
            } else if operand.rht.is_some() && !wgrad {
                (
                    "after a transform",
                    "a transform in wgrad only: it runs along the tokens, and in fprop and \
                     dgrad it is known to give nothing",
                )
            } else if !matches!(operand.rht, None | Some(16 | 32 | 64 | 128)) {
                (
                    "after a transform of another size",
                    "a transform of 16, 32, 64 or 128",
                )
            } else {
                continue;
            };
            return Err(self.error(index, found, expected));
        }
        use OperandFormat::{HighPrecision, MsEden, Nvfp4};
        let [(_, left), (_, right)] = self.operands;
        match (left.format, right.format) {
            (Nvfp4, Nvfp4) if left.rht != right.rht => Err(self.error(
                0,
                &format!(
                    "{}, the other {}",
                    transformed(left.rht),
                    transformed(right.rht)
                ),
                "the same transform of both operands: otherwise it does not cancel",
            )),
            (MsEden, MsEden) if self.gemm == "fprop" => Err(self.error(
                0,
                "by MS-EDEN",
                "it in dgrad and wgrad: it is noisier than rounding to nearest, and unbiased, \
                 which a forward does not need",
            )),
            (one, other) if one == other => Ok(()),
            (HighPrecision, Nvfp4) | (Nvfp4, HighPrecision)
                if !wgrad && left.rht.is_none() && right.rht.is_none() =>
            {
                Ok(())
            }
            (HighPrecision, Nvfp4) | (Nvfp4, HighPrecision) => Err(self.error(
                0,
                "and the other operand of different formats",
                "one format for both operands of wgrad, whose contraction is padded to its blocks",
            )),
            _ => Err(self.error(
                0,
                "and the other operand of different formats",
                "both in one MX format, both by MS-EDEN, or NVFP4 and high precision",
            )),
        }
    }
}

/// Returns a description of an operand after a transform of `size`.
fn transformed(size: Option<usize>) -> String {
    size.map_or("without a transform".into(), |size| {
        format!("after a transform of {size}")
    })
}

/// Random draw of an operand.
pub(super) struct Draw {
    /// Random bits for the elements, or for the block scales of MS-EDEN.
    pub stream: RandomStream,
    /// Transform of the requested size, the same for both operands of a GEMM.
    pub transform: Hadamard,
    /// Seed of the signs of MS-EDEN's transform, the same for both operands of a GEMM.
    pub signs: u64,
}

impl QuantSpec {
    /// Resolves the operand with the random draw `draw`.
    pub(super) fn resolve(&self, draw: impl FnOnce(Option<HadamardSize>) -> Draw) -> OperandSpec {
        let size = self.rht.map(hadamard_size);
        OperandSpec::Quantized(match self.format {
            OperandFormat::HighPrecision => return OperandSpec::HighPrecision,
            OperandFormat::Mxfp8 => QuantParams::mxfp8(),
            OperandFormat::Mxfp4 => QuantParams::mxfp4(),
            OperandFormat::MsEden => {
                let Draw { stream, signs, .. } = draw(None);
                let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, signs);
                let signs = Some(signs);
                QuantParams {
                    rounding: QuantRounding::MsEden(EdenDraw { stream, signs }),
                    ..QuantParams::ms_eden(hadamard, stream)
                }
            }
            OperandFormat::Nvfp4 => {
                let Draw {
                    stream, transform, ..
                } = draw(size);
                let rounding = match self.rounding {
                    RoundingMode::Nearest => Rounding::Nearest,
                    RoundingMode::Stochastic => Rounding::Stochastic(stream),
                };
                QuantParams {
                    format: Format::Nvfp4,
                    block: self.block,
                    amax: self.amax,
                    rounding: QuantRounding::Elements(rounding),
                    hadamard: size.map(|_| transform),
                    scaling: self.scale,
                    offset_in_memory: false,
                }
            }
        })
    }
}

/// Converts a size that passed [`GemmOperands::check`].
fn hadamard_size(elements: usize) -> HadamardSize {
    HadamardSize::ALL
        .into_iter()
        .find(|size| size.elements() == elements)
        .expect("a checked recipe")
}
