//! Which tile a CTA computes next: the order of tiles in the L2 cache, and where the tiles of a
//! grouped GEMM lie.

use cubecl::{prelude::*, server::Handle};

use super::tiles::W4a16Tile;
use crate::moe::groups::extent;

/// The dimension of a GEMM that is in groups. Offsets, one more than groups, say where groups
/// begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupedDim {
    /// None: one GEMM.
    None,
    /// Rows of `a`; each group has its own `n` rows of `b`.
    M,
    /// The contraction; each group has its own `m` x `n` output.
    K,
}

/// The groups of a GEMM, in device memory.
pub(crate) struct GroupArgs {
    pub grouping: GroupedDim,
    /// `groups + 1` offsets; any memory for a dense GEMM.
    pub offsets: Handle,
    pub groups: usize,
}

/// Where a tile lies.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub row: u32,
    pub column: u32,
}

/// Sm90Tile number `tile`, columns of `band` tiles first, so that the tiles that run at the same
/// time share rows of both operands in the L2 cache.
#[cube]
pub(crate) fn place(
    tile: u32,
    tiles_m: u32,
    tiles_n: u32,
    band: u32,
    #[comptime] tile_m: u32,
    #[comptime] tile_n: u32,
) -> Place {
    let per_band = band * tiles_n;
    let first = (tile / per_band) * band;
    let rows = min(band, tiles_m - first);
    let within = tile % per_band;
    Place {
        row: (first + within % rows) * tile_m,
        column: (within / rows) * tile_n,
    }
}

/// The class of a tile with `rows` rows of `a`: in an order by width, how many widths are wider
/// than they need.
#[cube]
fn class_of(rows: u32, #[comptime] order: Schedule) -> u32 {
    let last = comptime!(order.classes() - 1);
    let mut class = 0u32;
    #[unroll]
    for i in 1..comptime!(last + 1) {
        if rows <= comptime!(order.tile.widths()[last - i] as u32) {
            class = comptime!(i as u32).runtime();
        }
    }
    class
}

/// The order of the rows of tiles of a grouped GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Their shape.
    pub tile: W4a16Tile,
    /// Those with the widest instructions first, instead of group after group. Tiles of unequal
    /// groups take unequal times, and cubes take every `CUBE_COUNT`th: in this order those that run
    /// at the same time take equally long, and what is left at the end is short.
    pub by_width: bool,
}

impl Schedule {
    /// The order for `rows` rows in `groups` groups. Where groups are small, wide tiles are bound
    /// by operations and narrow ones by bytes, and run better beside each other.
    ///
    /// Measured (H100, 8192 rows x 4096 x 7168, microseconds by width / by group, skewed groups):
    /// 32 groups 866 / 931, 64 998 / 1111, 128 1207 / 1154.
    pub(crate) fn of(tile: W4a16Tile, rows: usize, groups: usize) -> Self {
        Self {
            tile,
            by_width: rows >= 128 * groups,
        }
    }

    /// Classes of rows of tiles that follow each other.
    pub(crate) const fn classes(self) -> usize {
        if self.by_width {
            self.tile.widths().len()
        } else {
            1
        }
    }

    /// Entries of a schedule of `rows` rows in `groups` groups: each group may end in a tile of its
    /// own.
    pub(crate) const fn rows_of_tiles(self, rows: usize, groups: usize) -> usize {
        rows.div_ceil(self.tile.rows_a) + groups
    }
}

/// Writes the rows of tiles of all groups, `rows` rows of `a` in all, in the order of `order`:
/// group, first row, and the row behind the last of the group, from entry 1 on; entry 0 has their
/// number. Groups that overlap, as those of offsets that do not ascend may, could need more entries
/// than there are: what does not fit is left out.
#[cube]
pub(crate) fn schedule_groups(
    offsets: &[u32],
    schedule: &mut [Vector<u32, Const<4>>],
    groups: u32,
    rows: u32,
    #[comptime] order: Schedule,
) {
    let classes = comptime!(order.classes());
    let rows_a = comptime!(order.tile.rows_a as u32);
    let entries = rows.div_ceil(rows_a) + groups;
    // The first cube does it.
    let mut group = select(CUBE_POS == 0, UNIT_POS, groups);
    while group < groups {
        // Rows of tiles in each class: of all groups, and of those before this one.
        let mut all = Array::<u32>::new(classes);
        let mut next = Array::<u32>::new(classes);
        #[unroll]
        for c in 0..classes {
            all[c] = 0u32;
            next[c] = 0u32;
        }
        for other in 0..groups {
            let own = extent(offsets, other, rows);
            let size = own.end - own.start;
            let rest = size % rows_a;
            let class = class_of(rest, order);
            #[unroll]
            for c in 0..classes {
                let mut count = u32::cast_from(rest > 0u32 && class == comptime!(c as u32));
                if comptime!(c == 0) {
                    count += size / rows_a;
                }
                all[c] += count;
                if other < group {
                    next[c] += count;
                }
            }
        }
        let mut begin = 1u32;
        #[unroll]
        for c in 0..classes {
            next[c] += begin;
            begin += all[c];
        }
        let own = extent(offsets, group, rows);
        let end = own.end;
        let mut row = own.start;
        let mut entry = Vector::<u32, Const<4>>::new(0u32);
        entry.insert(0usize, group);
        entry.insert(2usize, end);
        let mut at = next[0usize];
        while end - row >= rows_a {
            entry.insert(1usize, row);
            if at <= entries {
                schedule[at as usize] = entry;
            }
            at += 1u32;
            row += rows_a;
        }
        if row < end {
            let class = class_of(end - row, order);
            #[unroll]
            for c in 1..classes {
                if class == comptime!(c as u32) {
                    at = next[c];
                }
            }
            entry.insert(1usize, row);
            if at <= entries {
                schedule[at as usize] = entry;
            }
        }
        if group == 0u32 {
            let mut head = Vector::<u32, Const<4>>::new(0u32);
            head.insert(0usize, min(begin - 1u32, entries));
            schedule[0] = head;
        }
        group += CUBE_DIM;
    }
}
