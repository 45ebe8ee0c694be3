//! Choices of the caller that do not belong to a tensor.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Nvfp4Error, format::swizzle::TILE_INNER};

/// Number of elements that share one correction factor of MS-EDEN.
pub const EDEN_GROUP: usize = 128;

/// Rounding of a scaled value to a 4-bit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rounding {
    /// To the nearest E2M1 value, ties to the even code.
    Nearest,
    /// Up with a probability equal to the distance from the lower neighbor, in steps of 1/256.
    Stochastic(RandomStream),
}

/// Form in which a quantized operand is stored, and in which a GEMM reads it. It affects only the
/// number of passes before a GEMM, never the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredForm {
    /// Codes, and block scales `[outer, blocks]`, row-major, without padding.
    Rows,
    /// Codes, and block scales in the 128x4 tiles that FP4 tensor cores read, padded with zeros;
    /// see [`swizzle`](crate::format::swizzle). Tiles begin anew at each matrix of a stack, and at
    /// each group of rows of a row-wise tensor. A column-wise tensor of grouped tokens, which must
    /// be MXFP8, has the tiles of one matrix.
    Tiles,
    /// Column-wise NVFP4 tensor of tokens, with block scales in 128x4 tiles: padded with zero
    /// tokens to a multiple of 64, and each group of tokens too, so that the scales of all groups
    /// are one matrix.
    WholeTiles,
    /// Code times block scale in bf16, which represents the product exactly; not yet multiplied by
    /// the global scale. For one matrix only, and a GEMM that would otherwise dequantize a packed
    /// operand to bf16 first.
    Bf16Unscaled,
}

impl StoredForm {
    /// Returns true for codes and block scales.
    pub const fn is_packed(self) -> bool {
        !matches!(self, Self::Bf16Unscaled)
    }

    /// Returns the form of the buffers of a tensor that is already padded.
    pub const fn of_padded(self) -> Self {
        match self {
            Self::WholeTiles => Self::Tiles,
            Self::Rows | Self::Tiles | Self::Bf16Unscaled => self,
        }
    }

    /// Returns true if the block scales are in 128x4 tiles.
    pub const fn has_tiles(self) -> bool {
        matches!(self, Self::Tiles | Self::WholeTiles)
    }

    /// Returns this form, or rows if it is not packed: that of a tensor which is also kept for
    /// another use.
    pub const fn packed(self) -> Self {
        if self.is_packed() { self } else { Self::Rows }
    }

    /// Returns the unit to whose multiple a column-wise tensor of tokens is padded; at least
    /// `unit`.
    pub fn unit(self, unit: usize) -> usize {
        match self {
            Self::WholeTiles => unit.max(TILE_INNER),
            Self::Rows | Self::Tiles | Self::Bf16Unscaled => unit,
        }
    }
}

/// Elements that share one block scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum BlockShape {
    /// One block along the contraction.
    #[default]
    Block1d,
    /// A 16x16 tile. Its scale is repeated for its 16 stored rows, so that the columnwise tensor is
    /// the transpose of the rowwise one.
    Block2d,
}

/// Granularity of the amax: the elements that share one amax, and so one global scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxGranularity {
    /// One amax per tensor; with groups, one per group of rows.
    #[default]
    PerTensor,
    /// One amax per stored row: per row of the source in the rowwise quantized tensor (a token),
    /// per column of each group in the columnwise one.
    #[serde(alias = "per_token")]
    PerRow,
}

/// Source of the bits for stochastic rounding.
///
/// The bits of one block are a pure function of the first three numbers and of the block's index in
/// the logical output, so they do not depend on tile shapes, launch geometry, runtime, or sharding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomStream {
    /// Seed of the run.
    pub seed: u64,
    /// Identity of the tensor role: two streams of one seed never share bits. Every layer and every
    /// copy (rowwise, columnwise) of a tensor needs its own.
    pub stream: u64,
    /// Position in the stream: advance it by one for each use, so that the next use draws fresh
    /// bits.
    pub offset: u64,
    /// Position of the quantized tensor's blocks in the logical output.
    #[serde(default)]
    pub position: BlockPosition,
}

/// Position of a quantized tensor's blocks in the logical output to which it belongs, such as the
/// position of a rank's shard. Each block draws the random bits of its position in the logical
/// output.
///
/// Block `b` of stored row `r` has the index `first + r · row_blocks + b`. The default is that of a
/// tensor which is the whole logical output. Grouped tensors have no `row_blocks`: `first` is added
/// to their own indices, which continue from one group to the next. [`gaps`](Self::gaps) shift `r`
/// or `b` before the index is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BlockPosition {
    /// Index of the first block. MS-EDEN, which draws for eight blocks at once, needs a multiple of
    /// 8.
    pub first: u64,
    /// Blocks per stored row of the logical output; `None` if the tensor has whole rows. A multiple
    /// of 8 for MS-EDEN.
    pub row_blocks: Option<u32>,
    /// Gaps between adjacent sections of the tensor; requires `row_blocks`.
    #[serde(default)]
    pub gaps: Gaps,
}

/// Rows or blocks of the logical output that lie between adjacent sections of the tensor. Example:
/// a rank's shards of queries, keys and values are adjacent in its tensor, but the unsharded layer
/// has other ranks' shards between them. At most three sections, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Gaps {
    /// No gaps.
    #[default]
    None,
    /// Gaps in stored rows.
    Rows([Gap; 2]),
    /// Gaps in blocks of each stored row. Multiples of 8 for MS-EDEN.
    Blocks([Gap; 2]),
}

/// A gap; the default is an empty one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// First stored row, or block of a row, of the tensor after the gap.
    pub at: u32,
    /// Length of the gap.
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
    /// Maps index `index` of the tensor to the logical output.
    fn shifted(gaps: &[Self; 2], index: u64) -> u64 {
        let before = gaps.iter().filter(|gap| u64::from(gap.at) <= index);
        index + before.map(|gap| u64::from(gap.len)).sum::<u64>()
    }
}

impl BlockPosition {
    /// Returns the index of block `block` of stored row `row`, for a tensor with `blocks` blocks
    /// per row.
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

    /// True if the tensor is the whole logical output.
    pub fn is_own(&self) -> bool {
        *self == Self::default()
    }
}

impl RandomStream {
    /// Returns the stream `stream` of `seed`, at `offset`.
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

    /// Returns the stream for a tensor whose blocks are at `position`.
    pub const fn at(self, position: BlockPosition) -> Self {
        Self { position, ..self }
    }

    /// Returns the Philox key: the seed mixed with the stream id.
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

/// Applies the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits.
const fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Random Hadamard transform of 16, 32, 64 or 128 elements: `R = diag(s) · H · 1/√size`, where `H`
/// is Sylvester's matrix.
///
/// Both operands of one GEMM must use the same transform along the contraction, on every rank;
/// otherwise it does not cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hadamard {
    size: HadamardSize,
    /// Signs of elements 0..64 and 64..128; bits beyond the size are zero.
    signs: [u64; 2],
}

/// Number of elements that one transform mixes.
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
    /// All sizes, in ascending order.
    pub const ALL: [Self; 4] = [Self::H16, Self::H32, Self::H64, Self::H128];

    /// Returns the number of elements.
    pub const fn elements(self) -> usize {
        match self {
            Self::H16 => 16,
            Self::H32 => 32,
            Self::H64 => 64,
            Self::H128 => 128,
        }
    }

    /// Returns the `f32` nearest to `1/√size`, by which the butterfly is multiplied.
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

    /// Returns a transform of 16 elements with the given signs: if bit `i` is set, element `i` is
    /// negated.
    pub const fn from_signs(signs: u16) -> Self {
        Self::new(HadamardSize::H16, [signs as u64, 0])
    }

    /// Returns a transform of `size` elements: if bit `i % 64` of word `i / 64` is set, element `i`
    /// is negated. Bits beyond the size are ignored.
    pub const fn new(size: HadamardSize, signs: [u64; 2]) -> Self {
        let signs = match size {
            HadamardSize::H128 => signs,
            HadamardSize::H64 => [signs[0], 0],
            _ => [signs[0] & ((1 << size.elements()) - 1), 0],
        };
        Self { size, signs }
    }

    /// Returns a transform of 16 elements with signs drawn from `seed`, identical on every machine.
    pub const fn seeded(seed: u64) -> Self {
        Self::seeded_with_size(HadamardSize::H16, seed)
    }

    /// Increment of the seed per step, for signs that change with every step.
    pub const SEED_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// Returns a transform with signs drawn from `seed`, identical on every machine.
    pub const fn seeded_with_size(size: HadamardSize, seed: u64) -> Self {
        Self::new(size, [splitmix64(seed), splitmix64(!seed)])
    }

    /// Returns the number of elements that the transform mixes.
    pub const fn size(&self) -> HadamardSize {
        self.size
    }

    /// Returns the signs, 32 elements per word: if bit `i % 32` of word `i / 32` is set, element
    /// `i` is negated.
    pub const fn sign_words(&self) -> [u32; 4] {
        [
            self.signs[0] as u32,
            (self.signs[0] >> 32) as u32,
            self.signs[1] as u32,
            (self.signs[1] >> 32) as u32,
        ]
    }

    /// True if element `i` is negated.
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

/// Norm of the error of a candidate scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorNorm {
    /// Sum of absolute differences.
    Mae,
    /// Sum of squared differences.
    Mse,
}

/// Rule that derives the scale byte of a block from its amax.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum BlockScaling {
    /// The block amax maps to 6, up to the rounding of the scale byte.
    #[default]
    Standard,
    /// The block amax is multiplied by 17/16 first, so that no value clips and stochastic rounding
    /// is unbiased (numerics, section 8).
    Headroom,
    /// Each block (or tile) chooses between scales that map its amax to 6 or to 4, whichever has
    /// the smaller error with rounding to nearest (numerics, section 7).
    FourOverSix(ErrorNorm),
    /// As [`Self::Standard`], with a given global scale, as in checkpoints: the amax of the tensor
    /// is unknown, and its field contains the dequantization factor instead. Values beyond the
    /// range of the given scale saturate.
    ///
    /// One `f32` in seven is not `fl(amax / 2688)` for any amax, so such a factor may have no amax.
    Static,
}

impl BlockScaling {
    /// Returns the E4M3 bound of the global scale: 448, or 256 if the block scale needs room to be
    /// half as large again.
    pub const fn bound(self) -> u16 {
        match self {
            Self::Standard | Self::Headroom | Self::Static => 448,
            Self::FourOverSix(_) => 256,
        }
    }

    /// Returns 6 times [`Self::bound`]: the numerator of the global scale, and the denominator for
    /// decoding with an amax. 1 if the amax field contains the global scale itself.
    pub const fn range(self) -> f32 {
        match self {
            Self::Static => 1.0,
            _ => 6.0 * self.bound() as f32,
        }
    }
}

/// Mapping of attention scores to weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AttentionParams {
    /// Factor of the scores `q · k`.
    pub scale: f32,
    /// If true, query `i` of `sq` sees key `j` of `sk` only if `j <= i + sk - sq`: the last query
    /// sees all keys.
    pub causal: bool,
    /// Maximal number of keys that a query sees, including its own: `j > i + sk - sq - window`.
    /// Requires `causal`.
    pub window: Option<usize>,
    /// Soft cap on scores: `softcap · tanh(s / softcap)`, applied after `scale`.
    pub softcap: Option<f32>,
    /// If true, adds one to the denominator of the softmax, like an extra score 0 without a value:
    /// the weights of a row may sum to less than 1. The log-sum-exp includes this term and is 0 for
    /// a row that sees no key.
    pub quiet_softmax: bool,
}

impl AttentionParams {
    /// Returns parameters with scale `1 / sqrt(head)`, for heads of `head` elements.
    pub fn new(head: usize) -> Self {
        Self {
            scale: (head as f32).sqrt().recip(),
            causal: false,
            window: None,
            softcap: None,
            quiet_softmax: false,
        }
    }

    /// Returns [`Self::new`] with a causal mask.
    pub fn causal(head: usize) -> Self {
        Self {
            causal: true,
            ..Self::new(head)
        }
    }

    /// Returns the keys that query `i` of `sq` sees among `sk` keys of one sequence.
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

    /// Checks the values.
    ///
    /// # Errors
    /// Returns an error if the scale is not finite, the soft cap is not positive and finite, or the
    /// window is empty or lacks a causal mask.
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
    fn signs_are_the_bits_of_the_words() {
        let signs = [0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210];
        let bits = u128::from(signs[1]) << 64 | u128::from(signs[0]);
        for size in HadamardSize::ALL {
            let hadamard = Hadamard::new(size, signs);
            let words = hadamard.sign_words();
            for i in 0..128 {
                let expected = i < size.elements() && bits >> i & 1 == 1;
                assert_eq!(hadamard.negates(i), expected, "{size:?}, {i}");
                assert_eq!(
                    words[i / 32] >> (i % 32) & 1 == 1,
                    expected,
                    "{size:?}, {i}"
                );
            }
        }
    }

    /// The first outputs of SplitMix64 with seed 0 are published; stream `i` of seed 0 has the
    /// output `i`.
    #[test]
    fn keys_are_outputs_of_splitmix64() {
        let outputs = [
            0xE220_A839_7B1D_CDAF_u64,
            0x6E78_9E6A_A1B9_65F4,
            0x06C4_5D18_8009_454F,
        ];
        for (stream, output) in (0..).zip(outputs) {
            let key = RandomStream::new(0, stream, 0).key();
            assert_eq!(key, [output as u32, (output >> 32) as u32], "{stream}");
        }
    }

    #[test]
    fn streams_of_one_seed_have_distinct_keys() {
        let keys: std::collections::HashSet<_> = (0..10_000)
            .map(|stream| RandomStream::new(7, stream, 0).key())
            .collect();
        assert_eq!(keys.len(), 10_000);
    }

    #[test]
    fn gaps_shift_what_comes_after_them() {
        let gaps = [Gap { at: 2, len: 5 }, Gap { at: 4, len: 1 }];
        let index = |gaps, row, block| {
            let position = BlockPosition {
                first: 100,
                row_blocks: Some(6),
                gaps,
            };
            position.index(row, block, 2)
        };
        for (i, shifted) in (0..).zip([0, 1, 7, 8, 10, 11]) {
            assert_eq!(index(Gaps::Blocks(gaps), 1, i), 106 + shifted, "{i}");
            assert_eq!(index(Gaps::Rows(gaps), i, 3), 103 + 6 * shifted, "{i}");
        }
    }

    #[test]
    fn values_of_attention_are_checked() {
        let causal = AttentionParams::causal(64);
        let with = |window, softcap| AttentionParams {
            window,
            softcap,
            ..causal
        };
        for good in [
            AttentionParams::new(64),
            causal,
            with(Some(1), Some(f32::MIN_POSITIVE)),
            with(Some(1 << 29), Some(f32::MAX)),
        ] {
            good.check().unwrap();
        }
        let scale = f32::NAN;
        let whole = AttentionParams {
            causal: false,
            ..with(Some(1), None)
        };
        for (wrong, argument) in [
            (AttentionParams { scale, ..causal }, "scale"),
            (with(None, Some(0.0)), "softcap"),
            (with(None, Some(-1.0)), "softcap"),
            (with(None, Some(f32::INFINITY)), "softcap"),
            (with(Some(0), None), "window"),
            (with(Some((1 << 29) + 1), None), "window"),
            (whole, "window"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }
}
