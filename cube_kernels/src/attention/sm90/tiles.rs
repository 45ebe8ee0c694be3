//! The tiles of 128 rows that the CTAs of a grid share: in which order they are taken, and of which
//! sequence each is.
//!
//! With a causal mask tiles have work of very different amounts. So a CTA takes its first tile by
//! its number, and draws each further one when it begins with the one before: a thread counts in
//! device memory, and tells the others through shared memory. Tiles of sequences at offsets, which
//! are short more often than not, are taken in turn. Which CTA has a tile changes no bit.
//!
//! Where sequences lie at offsets in device memory, kernels before this one write a table of the
//! tiles (`super::table`). Tiles begin with their sequence as those of equal sequences do: a
//! sequence has the same blocks, and so the same bits, alone and in any company.

use cubecl::prelude::*;

use crate::{
    attention::mma::problem::{Extent, MmaPlan, Problem, Side, Visible},
    cube::ptx::{atom_relaxed_gpu_inc, cvta_to_global, named_barrier_sync, st_shared_v2},
    gemm::arguments::thread_in_cta,
};

/// Words of an entry of the table of tiles. Before the first entry is one that begins with how many
/// tiles there are.
///
/// An entry is the [`Extent`] of the tile's sequence, the tile's first row in it, and 1 where its
/// tokens belong to no sequence.
pub const ENTRY: usize = 8;

/// In which order the tiles of all sequences and heads are taken.
#[derive(CubeType, CubeLaunch)]
pub struct Schedule {
    /// Heads of the rows that a CTA holds.
    pub heads: u32,
    /// Tiles of a sequence. Not read where the plan has offsets.
    pub blocks: u32,
    /// Pairs of a sequence and a head whose tiles are interleaved: what they pass over stays in the
    /// L2 cache.
    pub section: u32,
    /// The table of the tiles. Where the plan has no offsets, any memory.
    pub tiles: Box<[u32]>,
    /// A word that is zero before and behind a launch, in which CTAs count tiles that they draw.
    pub drawn: Box<[u32]>,
}

/// The comptime choices of the tiles of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// Rows of a tile.
    pub rows: usize,
    /// Of a pair the last tile comes first: with a causal mask the last queries see the most keys.
    pub backwards: bool,
    /// Sequences begin at offsets in device memory: maps have one sequence, of all tokens.
    pub offsets: bool,
}

impl TilePlan {
    /// Whether CTAs draw their tiles, and do not take them in turn.
    ///
    /// Measured (H100, 16 heads of 128, forward / backward): 4 sequences of 4096 tokens 0.49 / 1.71
    /// ms drawn, 0.56 / 1.87 in turn; documents of 9 to 911 tokens 174 / 551 µs drawn, and on
    /// another H100 157 / 492 in turn.
    pub const fn draws(self) -> bool {
        !self.offsets
    }
}

/// A tile of the rows that a CTA holds.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tile {
    /// The sequence in the maps.
    pub sequence: u32,
    /// The head.
    pub head: u32,
    /// The first row in its sequence.
    pub row: u32,
    /// The tokens of its sequence. Of equal sequences the lengths alone count.
    pub extent: Extent,
    /// Whether its tokens belong to no sequence.
    pub nobody: bool,
}

/// What the tiles of a kernel have in common.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tiles {
    /// Tiles of a pair of a sequence in the maps and a head.
    count: u32,
    /// Such pairs.
    pairs: u32,
    /// The tokens of a sequence, where all are of one length.
    equal: Extent,
    /// What is visible in such a sequence.
    in_equal: Visible,
}

#[cube]
impl Tiles {
    pub fn of(problem: &Problem, schedule: &Schedule, #[comptime] plan: MmaPlan) -> Tiles {
        let count = if comptime!(plan.offsets) {
            schedule.tiles[0usize]
        } else {
            schedule.blocks
        };
        let pairs = problem.sequences * schedule.heads;
        let equal = Extent {
            q: 0u32,
            q_len: problem.q_tokens / problem.sequences,
            k: 0u32,
            k_len: problem.k_tokens / problem.sequences,
        };
        Tiles {
            count,
            pairs,
            equal,
            in_equal: Visible::of(problem, equal, plan),
        }
    }

    /// How many there are of all pairs.
    pub fn all(&self) -> u32 {
        self.pairs * self.count
    }

    /// What is visible in the sequence of `tile`.
    pub fn visible_in(&self, problem: &Problem, tile: Tile, #[comptime] plan: MmaPlan) -> Visible {
        if comptime!(plan.offsets) {
            Visible::of(problem, tile.extent, plan)
        } else {
            self.in_equal
        }
    }
}

/// Tile number `item`: sections one after another, in each the tiles with the most work of all
/// pairs first.
#[cube]
pub(super) fn tile_of(
    schedule: &Schedule,
    tiles: Tiles,
    item: u32,
    #[comptime] plan: TilePlan,
) -> Tile {
    let per_section = schedule.section * tiles.count;
    let section = item / per_section;
    let first = section * schedule.section;
    let width = min(schedule.section, tiles.pairs - first);
    let within = item - section * per_section;
    let block = if comptime!(plan.backwards) {
        tiles.count - 1u32 - within / width
    } else {
        within / width
    };
    let pair = first + within % width;
    if comptime!(plan.offsets) {
        let at = (block as usize + 1usize) * ENTRY;
        Tile {
            sequence: 0u32,
            head: pair,
            row: schedule.tiles[at + 4usize],
            extent: Extent {
                q: schedule.tiles[at],
                q_len: schedule.tiles[at + 1usize],
                k: schedule.tiles[at + 2usize],
                k_len: schedule.tiles[at + 3usize],
            },
            nobody: schedule.tiles[at + 5usize] == 1u32,
        }
    } else {
        Tile {
            sequence: pair / schedule.heads,
            head: pair % schedule.heads,
            row: block * comptime!(plan.rows as u32),
            extent: tiles.equal,
            nobody: false,
        }
    }
}

/// The tile behind `item` of this CTA, of `end`: the next in turn, or what it draws. Behind the
/// last one it is a number that is no tile's.
///
/// One thread of a CTA comes here, once for each tile that the CTA takes: as often, in all, as
/// there are tiles, so that the last one that draws sets the word back to zero.
#[cube]
pub(super) fn next_item(
    schedule: &Schedule,
    item: u32,
    end: u32,
    #[comptime] plan: TilePlan,
) -> u32 {
    if comptime!(plan.draws()) {
        let drawn = cvta_to_global::<u32>(schedule.drawn.as_ptr());
        CUBE_COUNT as u32 + atom_relaxed_gpu_inc(drawn, end - 1u32)
    } else {
        item + CUBE_COUNT as u32
    }
}

/// The first token of the tile's sequence on one side.
#[cube]
pub(super) fn first_token(tile: Tile, #[comptime] side: Side, #[comptime] offsets: bool) -> u32 {
    if comptime!(side == Side::Queries) {
        if comptime!(offsets) {
            tile.extent.q
        } else {
            tile.sequence * tile.extent.q_len
        }
    } else if comptime!(offsets) {
        tile.extent.k
    } else {
        tile.sequence * tile.extent.k_len
    }
}

/// Row `row` of the tile's sequence in a map of one side.
#[cube]
pub(super) fn row_in_map(
    tile: Tile,
    row: u32,
    #[comptime] side: Side,
    #[comptime] offsets: bool,
) -> i32 {
    let row = if comptime!(offsets) {
        first_token(tile, side, true) + row
    } else {
        row
    };
    row as i32
}

/// Whether a block of `inner` rows from `first` on reaches behind a sequence of `len`. A map of all
/// tokens then brings rows of the next sequence.
#[cube]
pub(super) fn reaches_behind(first: u32, len: u32, #[comptime] inner: usize) -> bool {
    first + comptime!(inner as u32) > len
}

/// Overwrites the rows behind a sequence of `len` by zeros, in the block at `at` of `inner` rows
/// from `first` on, which reaches there. Their weights are 0, but 0 times NaN of the next sequence
/// is NaN.
///
/// Each warpgroup that reads the block does so for itself, and then [`show_cleared`]; what another
/// one writes meanwhile is zeros, too.
#[cube]
pub(super) fn clear_behind(
    at: u32,
    first: u32,
    len: u32,
    #[comptime] inner: usize,
    #[comptime] boxes: usize,
) {
    let kept = len - first;
    let bytes = (comptime!(inner as u32) - kept) * 128u32;
    let own = (UNIT_POS & 127u32) * 8u32;
    let steps = bytes.div_ceil(1024u32);
    #[unroll]
    for part in 0..boxes {
        let start = at + comptime!((part * inner * 128) as u32) + kept * 128u32 + own;
        for step in 0..steps {
            // Rows have 128 bytes, of which a warp writes two.
            if step * 1024u32 + own < bytes {
                st_shared_v2(start + step * 1024u32, 0u32, 0u32);
            }
        }
    }
}

/// Lets the `wgmma` of this warpgroup see what it cleared.
#[cube]
pub(super) fn show_cleared() {
    sync_async_proxy_shared();
    // Lanes have cleared different numbers of rows; the barrier takes warps as a whole.
    sync_plane();
    named_barrier_sync(thread_in_cta() / 128u32, 128u32);
}
