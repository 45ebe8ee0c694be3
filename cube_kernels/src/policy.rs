//! The choices that a caller makes, apart from any tensor.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Nvfp4Error;

/// How a scaled value becomes a 4-bit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rounding {
    /// To the nearest E2M1 value, ties to the even code.
    Nearest,
    /// Up with a probability equal to the distance from the lower neighbour, in steps of 1/256.
    Stochastic(RandomStream),
}

/// What a quantized tensor is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// Codes and block scales.
    #[default]
    Packed,
    /// Code times block scale in bf16, which holds it exactly; not yet multiplied by the global
    /// scale. For a GEMM that would dequantize a packed operand to bf16 first.
    Bf16Unscaled,
}

/// Order of the block scales in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum ScaleLayout {
    /// `[outer, blocks]`, row-major, without padding.
    #[default]
    Compact,
    /// The 128x4 tiles that FP4 tensor cores read, padded with zeros; see
    /// [`swizzle`](crate::format::swizzle).
    Swizzled128x4,
}

/// What a GEMM reads of a packed operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedReads {
    /// Codes, and block scales in rows.
    Compact,
    /// Codes, and block scales in 128x4 tiles.
    Swizzled,
    /// Code times block scale in bf16, as [`Storage::Bf16Unscaled`] has it.
    Bf16,
}

/// Elements that share one block scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum BlockShape {
    /// One block along the contraction.
    #[default]
    Block1d,
    /// A 16x16 tile. Its scale is repeated for its 16 stored rows, so that the columnwise tensor
    /// is the transpose of the rowwise one.
    Block2d,
}

/// How many elements share one amax, and so one global scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxGranularity {
    /// The tensor has one amax; with groups, each group of rows has one.
    #[default]
    PerTensor,
    /// Each stored row has one: a row of the source in the rowwise quantized tensor (a token), a
    /// column of each group in the columnwise one.
    #[serde(alias = "per_token")]
    PerRow,
}

/// Where stochastic rounding takes its bits from.
///
/// The bits of one block are a pure function of the first three numbers and of the block's index in
/// the logical output, so they do not depend on tile shapes, launch geometry, runtime, or how the
/// output is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomStream {
    /// Seed of the run.
    pub seed: u64,
    /// Identity of the tensor role: two streams of one seed never share bits. Give every layer and
    /// every copy (rowwise, columnwise) of a tensor its own.
    pub stream: u64,
    /// Position in the stream: advance it by one for each use, so that the next one draws fresh
    /// bits.
    pub offset: u64,
    /// Where the blocks of the quantized tensor stand in the logical output.
    #[serde(default)]
    pub position: BlockPosition,
}

/// Where the blocks of a quantized tensor stand in the logical output of which they are a part,
/// such as the shard of a rank: each block draws the bits of its place there.
///
/// Block `b` of stored row `r` has the index `first + r · row_blocks + b`. The default is a tensor
/// of its own. Tensors in groups have no `row_blocks`: `first` is added to the indices that they
/// have by themselves, where one group follows the other. With [`gaps`](Self::gaps) `r` or `b` is
/// what it is with these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BlockPosition {
    /// The index of the first block. MS-EDEN, which draws for eight blocks at once, needs a
    /// multiple of 8.
    pub first: u64,
    /// The blocks of a stored row of the logical output; `None` for as many as the tensor has. For
    /// MS-EDEN a multiple of 8.
    pub row_blocks: Option<u32>,
    /// What lies between parts of the tensor, which needs `row_blocks`.
    #[serde(default)]
    pub gaps: Gaps,
}

/// What of the logical output lies between parts of a tensor that are neighbours in it: a rank's
/// parts of queries, keys and values are neighbours, and parts of other ranks lie between them in
/// the layer of one device. At most three parts, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Gaps {
    /// Nothing.
    #[default]
    None,
    /// Stored rows.
    Rows([Gap; 2]),
    /// Blocks of each stored row. For MS-EDEN multiples of 8.
    Blocks([Gap; 2]),
}

/// A gap; the default is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// The first stored row, or block of a row, of the tensor that is behind it.
    pub at: u32,
    /// How many lie in it.
    pub len: u32,
}

impl Default for Gap {
    fn default() -> Self {
        Self {
            at: u32::MAX,
            len: 0,
        }
    }
}

impl Gap {
    /// Number `index` of the tensor, in the logical output.
    fn shifted(gaps: &[Self; 2], index: u64) -> u64 {
        let before = gaps.iter().filter(|gap| u64::from(gap.at) <= index);
        index + before.map(|gap| u64::from(gap.len)).sum::<u64>()
    }
}

impl BlockPosition {
    /// The index of block `block` of stored row `row`, of which the tensor has `blocks`.
    #[inline(always)]
    pub(crate) fn index(&self, row: u64, block: u64, blocks: u64) -> u64 {
        let (row, block) = match &self.gaps {
            Gaps::None => (row, block),
            Gaps::Rows(gaps) => (Gap::shifted(gaps, row), block),
            Gaps::Blocks(gaps) => (row, Gap::shifted(gaps, block)),
        };
        let row_blocks = self.row_blocks.map_or(blocks, u64::from);
        let first = self.first.wrapping_add(row.wrapping_mul(row_blocks));
        first.wrapping_add(block)
    }

    /// Whether it is that of a tensor of its own.
    pub fn is_own(&self) -> bool {
        *self == Self::default()
    }
}

impl RandomStream {
    /// The stream `stream` of `seed`, at `offset`.
    pub const fn new(seed: u64, stream: u64, offset: u64) -> Self {
        Self {
            seed,
            stream,
            offset,
            position: BlockPosition {
                first: 0,
                row_blocks: None,
                gaps: Gaps::None,
            },
        }
    }

    /// The same for a tensor whose blocks stand at `position`.
    pub const fn at(self, position: BlockPosition) -> Self {
        Self { position, ..self }
    }

    /// The Philox key: the seed mixed with the stream id.
    ///
    /// For a fixed seed this is a bijection of the stream id (an odd multiplication, an addition
    /// and the SplitMix64 finaliser, each invertible), so two streams never share a key.
    pub const fn key(&self) -> [u32; 2] {
        let mixed = splitmix64(
            self.seed
                .wrapping_add(self.stream.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        );
        [mixed as u32, (mixed >> 32) as u32]
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits.
const fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The random Hadamard transform of 16, 32, 64 or 128 elements: `R = diag(s) · H · 1/√size`, `H`
/// Sylvester's matrix.
///
/// Both operands of one GEMM must use the same transform along the contraction, on every rank,
/// or it does not cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hadamard {
    size: HadamardSize,
    /// Signs of elements 0..64 and 64..128; bits beyond the size are zero.
    signs: [u64; 2],
}

/// Elements that one transform mixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HadamardSize {
    /// One block: TransformerEngine's choice and the default.
    H16,
    /// Two blocks.
    H32,
    /// Four blocks.
    H64,
    /// Eight blocks: Quartet II's choice.
    H128,
}

impl HadamardSize {
    /// All of them, ascending.
    pub const ALL: [Self; 4] = [Self::H16, Self::H32, Self::H64, Self::H128];

    /// Elements.
    pub const fn elements(self) -> usize {
        match self {
            Self::H16 => 16,
            Self::H32 => 32,
            Self::H64 => 64,
            Self::H128 => 128,
        }
    }

    /// The `f32` nearest to `1/√size`, by which the butterfly is multiplied.
    pub const fn factor(self) -> f32 {
        match self {
            Self::H16 => 0.25,
            Self::H32 => 0.176_776_69,
            Self::H64 => 0.125,
            Self::H128 => 0.088_388_346,
        }
    }
}

impl Hadamard {
    /// TransformerEngine's fixed signs.
    pub const DEFAULT_SIGNS: u16 = 0xD7E8;

    /// A transform of 16 elements with the given signs: bit `i` set means that element `i` is
    /// negated.
    pub const fn from_signs(signs: u16) -> Self {
        Self::new(HadamardSize::H16, [signs as u64, 0])
    }

    /// A transform of `size` elements: bit `i % 64` of word `i / 64` set means that element `i` is
    /// negated; bits beyond the size are ignored.
    pub const fn new(size: HadamardSize, signs: [u64; 2]) -> Self {
        let signs = match size {
            HadamardSize::H128 => signs,
            HadamardSize::H64 => [signs[0], 0],
            _ => [signs[0] & ((1 << size.elements()) - 1), 0],
        };
        Self { size, signs }
    }

    /// A transform of 16 elements whose signs are drawn from `seed`: the same on every machine.
    pub const fn seeded(seed: u64) -> Self {
        Self::seeded_with_size(HadamardSize::H16, seed)
    }

    /// What is added to the seed from one step to the next, where each draws signs of its own.
    pub const SEED_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// A transform whose signs are drawn from `seed`: the same on every machine.
    pub const fn seeded_with_size(size: HadamardSize, seed: u64) -> Self {
        Self::new(size, [splitmix64(seed), splitmix64(!seed)])
    }

    /// Elements that it mixes.
    pub const fn size(&self) -> HadamardSize {
        self.size
    }

    /// The signs, 32 elements to a word: bit `i % 32` of word `i / 32` set means that element `i`
    /// is negated.
    pub const fn sign_words(&self) -> [u32; 4] {
        [
            self.signs[0] as u32,
            (self.signs[0] >> 32) as u32,
            self.signs[1] as u32,
            (self.signs[1] >> 32) as u32,
        ]
    }

    /// Whether element `i` is negated.
    #[inline(always)]
    pub const fn negates(&self, i: usize) -> bool {
        self.signs[i / 64] >> (i % 64) & 1 == 1
    }
}

impl Default for Hadamard {
    fn default() -> Self {
        Self::from_signs(Self::DEFAULT_SIGNS)
    }
}

/// How the error of a candidate is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorNorm {
    /// Sum of absolute differences.
    Mae,
    /// Sum of squared differences.
    Mse,
}

/// How the scale byte of a block follows from its largest magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum BlockScaling {
    /// The maximum maps to 6, up to the rounding of the scale byte.
    #[default]
    Standard,
    /// The maximum is multiplied by 17/16 first, so that no value clips and stochastic rounding is
    /// unbiased (numerics, section 8).
    Headroom,
    /// Each block (or tile) chooses between scales that map its maximum to 6 or to 4, by the
    /// smaller error of rounding to nearest (numerics, section 7).
    FourOverSix(ErrorNorm),
    /// As [`Self::Standard`] under a global scale that is given, as checkpoints have it: the amax
    /// of the tensor is unknown, and in its place stands the factor that dequantizes. Larger values
    /// than the scale was made for saturate.
    ///
    /// One `f32` in seven is no `fl(amax / 2688)`, so that such a factor has no amax.
    Static,
}

impl BlockScaling {
    /// The E4M3 bound of the global scale: 448, or 256 where the block scale needs room to be half
    /// as large again.
    pub const fn bound(self) -> u16 {
        match self {
            Self::Standard | Self::Headroom | Self::Static => 448,
            Self::FourOverSix(_) => 256,
        }
    }

    /// 6 times [`Self::bound`]: the numerator of the global scale, and the denominator with which
    /// an amax decodes. 1 where the global scale itself stands in the amax's place.
    pub const fn range(self) -> f32 {
        match self {
            Self::Static => 1.0,
            _ => 6.0 * self.bound() as f32,
        }
    }
}

/// How one NVFP4 tensor is made from a matrix, whichever usage it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nvfp4Params {
    /// How elements are rounded. Four over six rounds to nearest only.
    pub rounding: Rounding,
    /// The transform along the contraction before quantization, if any.
    pub hadamard: Option<Hadamard>,
    /// How block scales are found.
    pub scaling: BlockScaling,
    /// Order in which the block scales are stored.
    pub layout: ScaleLayout,
}

impl Nvfp4Params {
    /// Rounding by `rounding`, and everything else plain: no transform, standard scales, compact.
    pub const fn new(rounding: Rounding) -> Self {
        Self {
            rounding,
            hadamard: None,
            scaling: BlockScaling::Standard,
            layout: ScaleLayout::Compact,
        }
    }
}

/// How scores become weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AttentionParams {
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// Query `i` of `sq` sees key `j` of `sk` only if `j <= i + sk - sq`: the last query sees all
    /// keys.
    pub causal: bool,
    /// Keys that a query sees at most, its own included: `j > i + sk - sq - window`. Needs
    /// `causal`.
    pub window: Option<usize>,
    /// Bounds scores: `softcap · tanh(s / softcap)`, after `scale`.
    pub softcap: Option<f32>,
    /// One is added to the denominator of the softmax, an additional score 0 without a value: the
    /// weights of a row may be less than 1 together. Its logarithm is in the log-sum-exp, which is
    /// 0 for a row that sees nothing.
    pub quiet_softmax: bool,
}

impl AttentionParams {
    /// Scores of heads of `head` elements, times `1 / sqrt(head)`.
    pub fn new(head: usize) -> Self {
        Self {
            scale: (head as f32).sqrt().recip(),
            causal: false,
            window: None,
            softcap: None,
            quiet_softmax: false,
        }
    }

    /// The same where no query sees a later key.
    pub fn causal(head: usize) -> Self {
        Self {
            causal: true,
            ..Self::new(head)
        }
    }

    /// The keys that query `i` of `sq` sees of `sk`, all of one sequence.
    pub fn visible(&self, i: usize, sq: usize, sk: usize) -> Range<usize> {
        if !self.causal {
            return 0..sk;
        }
        let end = (i + 1 + sk).saturating_sub(sq).min(sk);
        let start = match self.window {
            Some(window) => (i + 1 + sk).saturating_sub(sq + window).min(end),
            None => 0,
        };
        start..end
    }

    /// An error unless the values can be computed with.
    ///
    /// # Errors
    /// When the scale is not finite, the soft cap not positive and finite, the window is empty or
    /// without a causal mask.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        if !self.scale.is_finite() {
            return Err(Nvfp4Error::value(
                "scale",
                self.scale.to_string(),
                "a finite number",
            ));
        }
        if let Some(softcap) = self.softcap
            && !(softcap > 0.0 && softcap.is_finite())
        {
            return Err(Nvfp4Error::value(
                "softcap",
                softcap.to_string(),
                "a positive finite number",
            ));
        }
        match self.window {
            Some(0) => Err(Nvfp4Error::value("window", "0", "at least 1")),
            Some(window) if window > 1 << 29 => Err(Nvfp4Error::value(
                "window",
                window.to_string(),
                format!("at most {}", 1 << 29),
            )),
            Some(_) if !self.causal => Err(Nvfp4Error::value(
                "window",
                "a window without a causal mask",
                "`causal` too",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_signs_are_transformer_engines() {
        let expected = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
        let hadamard = Hadamard::default();
        let unpacked: Vec<i32> = (0..16)
            .map(|i| if hadamard.negates(i) { -1 } else { 1 })
            .collect();
        assert_eq!(unpacked, expected);
    }

    #[test]
    fn streams_of_one_seed_have_distinct_keys() {
        let keys: std::collections::HashSet<_> = (0..10_000)
            .map(|stream| RandomStream::new(7, stream, 0).key())
            .collect();
        assert_eq!(keys.len(), 10_000);
    }
}
