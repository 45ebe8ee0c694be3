//! Philox4x32-10; see [`reference::philox`](crate::reference::philox).

use cubecl::prelude::*;

use crate::reference::philox::{MULTIPLIERS, ROUNDS, WEYL};
use crate::{BlockPosition, Gap, Gaps};

/// Random source of a kernel: the key of the stream, and the offset, which is added to the one in
/// device memory, if any.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Random {
    /// Low words of the keys of all rounds.
    pub key_low: RoundKeys,
    /// High words of the keys of all rounds.
    pub key_high: RoundKeys,
    /// Low word of the offset.
    pub offset_low: u32,
    /// High word of the offset.
    pub offset_high: u32,
}

impl RandomLaunch {
    /// Returns the stream of `key` at `offset`.
    pub fn of(key: [u32; 2], offset: u64) -> Self {
        let [low, high] = [0, 1].map(|word| RoundKeysLaunch::of(key[word], WEYL[word]));
        Self::new(low, high, offset as u32, (offset >> 32) as u32)
    }
}

/// One word of the key of each round. As kernel arguments they are direct operands of the
/// instructions; computing them in the kernel takes two more instructions per round.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RoundKeys {
    /// Round 0.
    pub round0: u32,
    /// Round 1.
    pub round1: u32,
    /// Round 2.
    pub round2: u32,
    /// Round 3.
    pub round3: u32,
    /// Round 4.
    pub round4: u32,
    /// Round 5.
    pub round5: u32,
    /// Round 6.
    pub round6: u32,
    /// Round 7.
    pub round7: u32,
    /// Round 8.
    pub round8: u32,
    /// Round 9.
    pub round9: u32,
}

impl RoundKeysLaunch {
    fn of(first: u32, step: u32) -> Self {
        let word = |round: u32| first.wrapping_add(step.wrapping_mul(round));
        Self::new(
            word(0),
            word(1),
            word(2),
            word(3),
            word(4),
            word(5),
            word(6),
            word(7),
            word(8),
            word(9),
        )
    }
}

#[cube]
impl RoundKeys {
    /// Returns the round keys of a stream whose key has the word `first`; `step` is that of
    /// [`WEYL`].
    pub fn of(first: u32, #[comptime] step: u32) -> RoundKeys {
        RoundKeys {
            round0: first + comptime!(step.wrapping_mul(0)),
            round1: first + comptime!(step.wrapping_mul(1)),
            round2: first + comptime!(step.wrapping_mul(2)),
            round3: first + comptime!(step.wrapping_mul(3)),
            round4: first + comptime!(step.wrapping_mul(4)),
            round5: first + comptime!(step.wrapping_mul(5)),
            round6: first + comptime!(step.wrapping_mul(6)),
            round7: first + comptime!(step.wrapping_mul(7)),
            round8: first + comptime!(step.wrapping_mul(8)),
            round9: first + comptime!(step.wrapping_mul(9)),
        }
    }

    fn of_round(&self, #[comptime] round: usize) -> u32 {
        match comptime!(round) {
            0usize => self.round0,
            1usize => self.round1,
            2usize => self.round2,
            3usize => self.round3,
            4usize => self.round4,
            5usize => self.round5,
            6usize => self.round6,
            7usize => self.round7,
            8usize => self.round8,
            _ => self.round9,
        }
    }
}

/// Numbering of the blocks for which a kernel draws random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// By position in the tensor itself.
    Own,
    /// By position in the tensor itself, from a first number on.
    Shifted,
    /// After the blocks of earlier groups of rows, which are counted in device memory.
    Behind,
    /// By position in a larger tensor with a different row length.
    Part,
    /// By position in a larger tensor, which has additional rows between the rows.
    RowGaps,
    /// By position in a larger tensor, which has additional blocks between the blocks of a row.
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

/// Position of the blocks of a tensor in a larger tensor that it is part of; see [`BlockPosition`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Position {
    /// Low word of the first number.
    pub first_low: u32,
    /// High word of the first number.
    pub first_high: u32,
    /// Blocks per stored row of the larger tensor; with [`Numbering::Behind`] the blocks per unit
    /// that is counted in device memory.
    pub row_blocks: u32,
    /// Position of the first gap.
    pub first_gap: u32,
    /// Length of the first gap.
    pub first_gap_len: u32,
    /// Position of the second gap.
    pub second_gap: u32,
    /// Length of the second gap.
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
    /// Returns the number of block `index` in a tensor whose stored rows have `row_blocks` blocks.
    /// `earlier` holds the units of earlier groups, one word, which is only read with
    /// [`Numbering::Behind`].
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

    /// Maps number `index` to the larger tensor, skipping the gaps.
    fn behind_gaps(&self, index: usize) -> usize {
        let one = select(index < self.first_gap as usize, 0u32, self.first_gap_len);
        let two = select(index < self.second_gap as usize, 0u32, self.second_gap_len);
        index + (one + two) as usize
    }

    fn first(&self) -> u64 {
        u64::cast_from(self.first_low) | (u64::cast_from(self.first_high) << 32u64)
    }
}

/// Returns the four random words of block `index`: byte `i` of them, little-endian, rounds element
/// `i`.
#[cube]
pub fn block_words(index: u64, random: &Random) -> Array<u32> {
    let mut c0 = u32::cast_from(index & 0xFFFF_FFFFu64);
    let mut c1 = u32::cast_from(index >> 32u64);
    let mut c2 = random.offset_low;
    let mut c3 = random.offset_high;
    #[unroll]
    for round in 0..comptime!(ROUNDS) {
        let k0 = random.key_low.of_round(round);
        let k1 = random.key_high.of_round(round);
        let high0 = c0.mul_hi(MULTIPLIERS[0]);
        let low0 = c0 * MULTIPLIERS[0];
        let high1 = c2.mul_hi(MULTIPLIERS[1]);
        let low1 = c2 * MULTIPLIERS[1];
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    let mut words = Array::<u32>::new(4usize);
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}
