//! The run of a cube: its queries, its keys, and the writes of its new keys and values.

use cubecl::prelude::*;

use super::{
    append::{CacheShape, Extent, NewTokens, NewVector, extent, write_new},
    merge::RowBlock,
    plan::DecodePlan,
    tile::{Staged, Tile},
};
use crate::reference::attention::DECODE_TILE;

/// The run of a cube of the grid `[run, block of rows of a head of keys, sequence]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Run {
    /// Queries.
    pub block: RowBlock,
    /// Extent of the sequence.
    pub own: Extent,
    /// Index among the runs of the sequence. The run exists if it is below `own.runs`; otherwise
    /// the following fields are undefined.
    pub index: u32,
    /// First key.
    pub first: u32,
    /// End of the keys (exclusive).
    pub last: u32,
    /// First new key.
    pub new: u32,
}

#[cube]
impl Run {
    pub(super) fn new<F: Numeric>(
        new: &NewTokens<F>,
        shape: &CacheShape,
        #[comptime] plan: DecodePlan,
    ) -> Run {
        let index = CUBE_POS_X;
        let sequence = CUBE_POS_Z;
        let blocks = (shape.group * new.time).div_ceil(comptime!(plan.rows as u32));
        let kv_head = CUBE_POS_Y / blocks;
        let first_row = (CUBE_POS_Y - kv_head * blocks) * comptime!(plan.rows as u32);
        let own = extent(&new.starts, &new.counts, new.time, shape, sequence);
        let first = own.first + index * own.per;
        Run {
            block: RowBlock {
                sequence,
                kv_head,
                first_row,
                index: (sequence * CUBE_COUNT_Y + CUBE_POS_Y) as usize,
            },
            own,
            index,
            first,
            last: min(first + own.per, own.end),
            new: max(first, own.start),
        }
    }

    /// Returns the first tile of the run.
    pub(super) fn first_tile(&self, shape: &CacheShape, #[comptime] plan: DecodePlan) -> Tile {
        let row = self.block.sequence as usize * shape.capacity as usize + self.first as usize;
        let head = row * shape.kv_heads as usize + self.block.kv_head as usize;
        Tile {
            base: head * comptime!(plan.columns()),
            stride: shape.kv_heads as usize * comptime!(plan.columns()),
            count: min(comptime!(DECODE_TILE as u32), self.last - self.first),
            first: self.first,
        }
    }

    /// Returns the tile after `tile`; it has no keys past the end of the run.
    pub(super) fn next_tile(&self, tile: &Tile) -> Tile {
        let keys = comptime!(DECODE_TILE as u32);
        let first = tile.first + keys;
        Tile {
            base: tile.base + keys as usize * tile.stride,
            stride: tile.stride,
            count: min(keys, self.last - min(first, self.last)),
            first,
        }
    }

    /// Returns how many keys of the first tile were in the cache before the launch.
    pub(super) fn old(&self, tile: &Tile) -> u32 {
        min(self.new, self.first + tile.count) - self.first
    }

    /// Writes the run's new keys and values to the caches, and those of its first tile to the
    /// tile's buffer as well. The upper half of the units begins.
    pub(super) fn write_new<F: Numeric, C: Numeric, N: Size>(
        &self,
        new: &NewTokens<F>,
        k_cache: &mut [Vector<C, N>],
        v_cache: &mut [Vector<C, N>],
        shape: &CacheShape,
        keys: &mut Staged<C, N>,
        values: &mut Staged<C, N>,
        #[comptime] plan: DecodePlan,
    ) {
        let columns = comptime!(plan.columns() as u32);
        let mut item = (UNIT_POS + CUBE_DIM / 2u32) % CUBE_DIM;
        while self.new < self.last && item < (self.last - self.new) * columns {
            let key = self.new + item / columns;
            let column = item % columns;
            let vector = NewVector {
                sequence: self.block.sequence,
                t: key - self.own.start,
                position: key,
                place: self.block.kv_head * columns + column,
            };
            let written = write_new::<F, C, N>(new, k_cache, v_cache, shape, vector, plan);
            if key - self.first < comptime!(DECODE_TILE as u32) {
                keys.take(written.key, key - self.first, column, plan);
                values.take(written.value, key - self.first, column, plan);
            }
            item += CUBE_DIM;
        }
    }
}
