//! Tile scheduler: the order of tiles for L2 reuse, and the location of the tiles of a grouped
//! GEMM.

use cubecl::{prelude::*, server::Handle};

use super::tiles::W4a16Tile;
use crate::moe::groups::extent;

/// Dimension of a GEMM that is split into groups. The offsets of the groups have one more entry
/// than there are groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupedDim {
    /// A dense GEMM.
    None,
    /// Rows of `a`; each group has its own `n` rows of `b`.
    M,
    /// The K dimension; each group has its own `m` x `n` output.
    K,
}

/// Groups of a GEMM, in device memory.
pub(crate) struct GroupArgs {
    pub grouping: GroupedDim,
    /// `groups + 1` offsets; unused for a dense GEMM.
    pub offsets: Handle,
    pub groups: usize,
}

/// Position of a tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub row: u32,
    pub column: u32,
}

/// Returns the position of tile number `tile`. Tiles are ordered along columns of `band` tiles
/// first, so that tiles that run at the same time share rows of both operands in the L2 cache.
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

/// Returns the class of a tile with `rows` rows of `a`: if ordered by width, the number of widths
/// wider than it needs.
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

/// Order of the rows of tiles of a grouped GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Tile shape.
    pub tile: W4a16Tile,
    /// True to schedule tiles with the widest instructions first instead of group by group. Tiles
    /// of unequal groups take unequal times, and cubes take every `CUBE_COUNT`th tile: ordered by
    /// width, the tiles that run at the same time take equally long, and the tail is short.
    pub by_width: bool,
}

impl Schedule {
    /// Returns the order for `rows` rows in `groups` groups. If groups are small, wide tiles are
    /// compute-bound and narrow ones memory-bound, and they run better concurrently.
    ///
    /// Measured (H100, 8192 rows x 4096 x 7168, microseconds by width / by group, skewed groups):
    /// 32 groups 866 / 931, 64 998 / 1111, 128 1207 / 1154.
    pub(crate) fn of(tile: W4a16Tile, rows: usize, groups: usize) -> Self {
        Self {
            tile,
            by_width: rows >= 128 * groups,
        }
    }

    /// Returns the number of classes, which are scheduled one after another.
    pub(crate) const fn classes(self) -> usize {
        if self.by_width {
            self.tile.widths().len()
        } else {
            1
        }
    }

    /// Returns the maximum number of entries of a schedule of `rows` rows in `groups` groups: each
    /// group may end in a partial tile.
    pub(crate) const fn rows_of_tiles(self, rows: usize, groups: usize) -> usize {
        rows.div_ceil(self.tile.rows_a) + groups
    }
}

/// Writes the rows of tiles of all groups, with `rows` rows of `a` in total, in the order of
/// `order`. From entry 1 on, an entry holds the group, the first row and the end row of the group
/// (exclusive); entry 0 holds the number of entries. Overlapping groups, which offsets that do not
/// ascend may produce, could need more entries than there are; excess entries are dropped.
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
    // Only the first cube writes the schedule.
    let mut group = select(CUBE_POS == 0, UNIT_POS, groups);
    while group < groups {
        // Rows of tiles in each class: of all groups, and of the groups before this one.
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
