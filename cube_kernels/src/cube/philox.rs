//! Philox4x32-10; see [`reference::philox`](crate::reference::philox).

use cubecl::prelude::*;

use crate::reference::philox::{MULTIPLIERS, ROUNDS, WEYL};
use crate::{BlockPosition, Gap, Gaps};

/// Where a kernel takes its random bits from: the key of the stream, and the offset, which is added
/// to the one in device memory where there is one.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Random {
    /// Low word of the key.
    pub key_low: u32,
    /// High word of the key.
    pub key_high: u32,
    /// Low word of the offset.
    pub offset_low: u32,
    /// High word of the offset.
    pub offset_high: u32,
}

/// How a kernel numbers the blocks for which it draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// As they lie in their own tensor.
    Own,
    /// From a first number on.
    Shifted,
    /// Behind those of earlier groups of rows, which are counted in device memory.
    Behind,
    /// As they lie in a larger tensor, with a row length of its own.
    Part,
    /// The same, with rows of the larger tensor between rows.
    RowGaps,
    /// The same, with blocks of the larger tensor between blocks of a row.
    BlockGaps,
}

impl Numbering {
    pub(crate) fn of(position: &BlockPosition) -> Self {
        match position {
            BlockPosition {
                row_blocks: Some(_),
                gaps,
                ..
            } => match gaps {
                Gaps::None => Self::Part,
                Gaps::Rows(_) => Self::RowGaps,
                Gaps::Blocks(_) => Self::BlockGaps,
            },
            BlockPosition { first: 0, .. } => Self::Own,
            BlockPosition { .. } => Self::Shifted,
        }
    }
}

/// Where the blocks of a tensor stand in the larger one of which it is a part; see
/// [`BlockPosition`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Position {
    /// Low word of the first number.
    pub first_low: u32,
    /// High word of the first number.
    pub first_high: u32,
    /// Blocks of a stored row of the larger tensor; with [`Numbering::Behind`] those of a unit that
    /// is counted in device memory.
    pub row_blocks: u32,
    /// Where the first gap is.
    pub first_gap: u32,
    /// What lies in it.
    pub first_gap_len: u32,
    /// Where the second gap is.
    pub second_gap: u32,
    /// What lies in it.
    pub second_gap_len: u32,
}

impl From<BlockPosition> for PositionLaunch {
    fn from(position: BlockPosition) -> Self {
        let BlockPosition {
            first,
            row_blocks,
            gaps,
        } = position;
        let [one, two] = match gaps {
            Gaps::None => [Gap::default(); 2],
            Gaps::Rows(gaps) | Gaps::Blocks(gaps) => gaps,
        };
        Self::new(
            first as u32,
            (first >> 32) as u32,
            row_blocks.unwrap_or(0),
            one.at,
            one.len,
            two.at,
            two.len,
        )
    }
}

#[cube]
impl Position {
    /// The number of block `index` of a tensor whose stored rows have `row_blocks`; `earlier` are
    /// the units of earlier groups, a word that is read with [`Numbering::Behind`] alone.
    pub fn number(
        &self,
        index: usize,
        row_blocks: usize,
        earlier: &[u32],
        #[comptime] numbering: Numbering,
    ) -> u64 {
        if comptime!(numbering == Numbering::Own) {
            u64::cast_from(index)
        } else if comptime!(numbering == Numbering::Behind) {
            u64::cast_from(earlier[0]) * u64::cast_from(self.row_blocks) + u64::cast_from(index)
        } else if comptime!(numbering == Numbering::Shifted) {
            self.first() + u64::cast_from(index)
        } else {
            let mut row = index / row_blocks;
            let mut block = index - row * row_blocks;
            if comptime!(numbering == Numbering::RowGaps) {
                row = self.behind_gaps(row);
            }
            if comptime!(numbering == Numbering::BlockGaps) {
                block = self.behind_gaps(block);
            }
            self.first()
                + u64::cast_from(row) * u64::cast_from(self.row_blocks)
                + u64::cast_from(block)
        }
    }

    /// Number `index` in the larger tensor.
    fn behind_gaps(&self, index: usize) -> usize {
        let one = select(index < self.first_gap as usize, 0u32, self.first_gap_len);
        let two = select(index < self.second_gap as usize, 0u32, self.second_gap_len);
        index + (one + two) as usize
    }

    fn first(&self) -> u64 {
        u64::cast_from(self.first_low) | (u64::cast_from(self.first_high) << 32u64)
    }
}

/// The four random words of block `index`: byte `i` of them, little-endian, rounds element `i`.
#[cube]
pub fn block_words(index: u64, random: &Random) -> Array<u32> {
    let mut c0 = u32::cast_from(index & 0xFFFF_FFFFu64);
    let mut c1 = u32::cast_from(index >> 32u64);
    let mut c2 = random.offset_low;
    let mut c3 = random.offset_high;
    let mut k0 = random.key_low;
    let mut k1 = random.key_high;
    #[unroll]
    for _ in 0..ROUNDS {
        let high0 = c0.mul_hi(MULTIPLIERS[0]);
        let low0 = c0 * MULTIPLIERS[0];
        let high1 = c2.mul_hi(MULTIPLIERS[1]);
        let low1 = c2 * MULTIPLIERS[1];
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += WEYL[0];
        k1 += WEYL[1];
    }
    let mut words = Array::<u32>::new(4usize);
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}
