//! Tiles of 128 rows that the CTAs of a grid share: their order, and the sequence of each tile.
//!
//! With a causal mask the work per tile varies widely. A CTA therefore takes its first tile by its
//! own index, and draws each further tile when it begins the previous one: one thread increments a
//! counter in device memory, and publishes the result through shared memory. Tiles of sequences at
//! offsets, which are usually short, are taken in turn. Results do not depend on which CTA
//! processes a tile.
//!
//! If sequences start at offsets in device memory, earlier kernels write a table of the tiles
//! (`super::table`). Every tile is aligned to the start of its sequence, as for equal sequences: a
//! sequence has the same blocks, and so the same bits, in any batch.

use cubecl::prelude::*;

use crate::{
    attention::mma::problem::{Extent, MmaPlan, Problem, Side, Visible},
    cube::ptx::{atom_relaxed_gpu_inc, cvta_to_global, named_barrier_sync, st_shared_v2},
    gemm::arguments::thread_in_cta,
};

/// Words of an entry of the table of tiles. A header entry, whose first word is the number of
/// tiles, precedes the entries.
///
/// An entry contains the [`Extent`] of the tile's sequence, the tile's first row in it, and 1 if
/// its tokens belong to no sequence.
pub const ENTRY: usize = 8;

/// Order in which the tiles of all sequences and heads are processed.
#[derive(CubeType, CubeLaunch)]
pub struct Schedule {
    /// Number of heads of the rows that a CTA holds.
    pub heads: u32,
    /// Tiles per sequence. Not read if the plan has offsets.
    pub blocks: u32,
    /// Pairs of a sequence and a head whose tiles are interleaved: the rows over which they iterate
    /// stay in the L2 cache.
    pub section: u32,
    /// Table of the tiles. May be any memory if the plan has no offsets.
    pub tiles: Box<[u32]>,
    /// Counter of drawn tiles, one word that is zero before and after a launch.
    pub drawn: Box<[u32]>,
}

/// Comptime choices of the tiles of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// Rows per tile.
    pub rows: usize,
    /// True if a pair's last tile comes first: with a causal mask, the last queries see the most
    /// keys.
    pub backwards: bool,
    /// True if sequences start at offsets in device memory: tensor maps have one sequence, of all
    /// tokens.
    pub offsets: bool,
}

impl TilePlan {
    /// True if CTAs draw their tiles instead of taking them in turn.
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
    /// Sequence in the tensor maps.
    pub sequence: u32,
    /// Head.
    pub head: u32,
    /// First row in its sequence.
    pub row: u32,
    /// Tokens of its sequence. For equal sequences only the lengths are valid.
    pub extent: Extent,
    /// True if its tokens belong to no sequence.
    pub nobody: bool,
}

/// Values shared by all tiles of a kernel.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tiles {
    /// Tiles per pair of a sequence in the tensor maps and a head.
    count: u32,
    /// Number of such pairs.
    pairs: u32,
    /// Tokens of a sequence, if all have the same length.
    equal: Extent,
    /// Mask of such a sequence.
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

    /// Returns the number of tiles of all pairs.
    pub fn all(&self) -> u32 {
        self.pairs * self.count
    }

    /// Returns the mask of the sequence of `tile`.
    pub fn visible_in(&self, problem: &Problem, tile: Tile, #[comptime] plan: MmaPlan) -> Visible {
        if comptime!(plan.offsets) {
            Visible::of(problem, tile.extent, plan)
        } else {
            self.in_equal
        }
    }
}

/// Returns tile `item`. Sections follow one another; within each, the tiles with the most work of
/// all pairs come first.
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

/// Returns this CTA's tile after `item`, of `end` tiles: the next one in turn, or the drawn one.
/// After the last tile the index is out of range.
///
/// One thread of a CTA calls this once for each tile that the CTA processes. The total number of
/// calls is the number of tiles, so that the last one to draw resets the counter to zero.
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

/// Returns the first token of the tile's sequence on one side.
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

/// Returns the index of row `row` of the tile's sequence in a tensor map of one side.
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

/// True if a block of `inner` rows from `first` on extends past a sequence of length `len`. A
/// tensor map of all tokens then loads rows of the next sequence.
#[cube]
pub(super) fn reaches_behind(first: u32, len: u32, #[comptime] inner: usize) -> bool {
    first + comptime!(inner as u32) > len
}

/// Overwrites with zeros the rows past a sequence of length `len`, in the block at `at` of `inner`
/// rows from `first` on, which extends past it. The weights of these rows are 0, but 0 times NaN of
/// the next sequence is NaN.
///
/// Each warpgroup that reads the block clears it for itself and then calls [`show_cleared`];
/// another warpgroup's concurrent writes are zeros, too.
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
            // Rows have 128 bytes; a warp writes two rows at a time.
            if step * 1024u32 + own < bytes {
                st_shared_v2(start + step * 1024u32, 0u32, 0u32);
            }
        }
    }
}

/// Makes the cleared rows visible to the `wgmma` of this warpgroup.
#[cube]
pub(super) fn show_cleared() {
    sync_async_proxy_shared();
    // Lanes have cleared different numbers of rows; the barrier requires converged warps.
    sync_plane();
    named_barrier_sync(thread_in_cta() / 128u32, 128u32);
}
