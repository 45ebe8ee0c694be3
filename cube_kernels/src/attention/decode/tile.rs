//! Tiles of the cache, and their buffers in shared memory.

use cubecl::prelude::*;

use super::plan::{DecodePlan, WARP_KEYS};
use crate::{
    attention::mma::tile::chunk_offset,
    cube::ptx::{
        cp_async, cp_async_commit_group, cp_async_wait_group, cp_async_zfill, cvta_to_global,
        cvta_to_shared,
    },
};

/// Location of a tile in the caches.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tile {
    /// First vector of the first key.
    pub base: usize,
    /// Vectors from one key to the next.
    pub stride: usize,
    /// Number of keys.
    pub count: u32,
    /// Index of the first key in its sequence.
    pub first: u32,
}

/// The keys of a tile, or its values. If they are not staged, they stay in the cache.
#[derive(CubeType)]
pub(super) struct Staged<C: Numeric, N: Size> {
    /// `[key, column]`, with the columns of a key swizzled.
    vectors: Shared<[Vector<C, N>]>,
}

/// Returns the location of column `column` of key `key` in shared memory. With matrix instructions
/// the layout is that of [`HeadTile`](crate::attention::mma::tile::Tile). A column of eight
/// consecutive keys is in different banks, and so are consecutive columns of a key.
#[cube]
fn place(key: u32, column: u32, #[comptime] plan: DecodePlan) -> usize {
    if comptime!(plan.mma) {
        (chunk_offset(key, column, comptime!(plan.mma_tile())) / 16u32) as usize
    } else {
        let columns = comptime!(plan.columns() as u32);
        let own = if comptime!(plan.columns().is_multiple_of(8)) {
            column ^ (key & 7u32)
        } else {
            column
        };
        (key * columns + own) as usize
    }
}

#[cube]
impl<C: Numeric, N: Size> Staged<C, N> {
    pub fn new(#[comptime] plan: DecodePlan) -> Staged<C, N> {
        let alignment = comptime!(if plan.mma { 128usize } else { 16usize });
        Staged::<C, N> {
            vectors: Shared::new_aligned_slice(comptime!(plan.staged.max(1)), alignment),
        }
    }

    /// Starts this unit's copies of the first `count` keys of a tile of `cache`, as a group, which
    /// may be empty.
    pub fn copy(
        &self,
        cache: &mut [Vector<C, N>],
        tile: &Tile,
        count: u32,
        #[comptime] plan: DecodePlan,
    ) {
        if comptime!(plan.staged > 0) {
            let columns = comptime!(plan.columns() as u32);
            let bytes = comptime!(plan.vector_bytes() as u32);
            let target = cvta_to_shared::<Vector<C, N>>(self.vectors.as_slice().as_ptr());
            let source = cvta_to_global::<Vector<C, N>>(cache.as_ptr());
            let mut item = UNIT_POS;
            while item < count * columns {
                let (key, column) = (item / columns, item % columns);
                let at = tile.base + key as usize * tile.stride + column as usize;
                cp_async(
                    target + place(key, column, plan) as u32 * bytes,
                    source + u64::cast_from(at) * u64::cast_from(bytes),
                    comptime!(plan.vector_bytes() as u32),
                );
                item += CUBE_DIM;
            }
            cp_async_commit_group();
        }
    }

    /// Returns the start address.
    pub fn address(&self) -> u32 {
        cvta_to_shared::<Vector<C, N>>(self.vectors.as_slice().as_ptr())
    }

    /// For matrix instructions: starts copies of this warp's keys of a tile of `cache`, as a group.
    /// Copies keys before `old`, and writes zeros past the tile, since a weight of zero times NaN
    /// is not zero. Copies nothing for a tile without keys.
    pub fn copy_of_warp(
        &self,
        cache: &mut [Vector<C, N>],
        tile: &Tile,
        old: u32,
        #[comptime] plan: DecodePlan,
    ) {
        let columns = comptime!(plan.columns());
        let source = cvta_to_global::<Vector<C, N>>(cache.as_ptr());
        let target = self.address();
        let warp_key = UNIT_POS / 32u32 * comptime!(WARP_KEYS as u32);
        if tile.count > 0u32 {
            #[unroll]
            for i in 0..comptime!(WARP_KEYS * columns / 32) {
                let item = UNIT_POS % 32u32 + comptime!(32 * i as u32);
                let key = warp_key + item / comptime!(columns as u32);
                let column = item % comptime!(columns as u32);
                let inside = key < old;
                if inside || key >= tile.count {
                    let at = tile.base + key as usize * tile.stride + column as usize;
                    cp_async_zfill(
                        target + place(key, column, plan) as u32 * 16u32,
                        source + u64::cast_from(select(inside, at, 0usize)) * 16u64,
                        select(inside, 16u32, 0u32),
                        16u32,
                    );
                }
            }
        }
        cp_async_commit_group();
    }

    /// Stores a vector of a key that was not in the cache.
    pub fn take(
        &mut self,
        vector: Vector<C, N>,
        key: u32,
        column: u32,
        #[comptime] plan: DecodePlan,
    ) {
        if comptime!(plan.staged > 0) {
            self.vectors[place(key, column, plan)] = vector;
        }
    }

    /// Returns a vector of a tile of `cache`, after a barrier.
    pub fn vector(
        &self,
        cache: &mut [Vector<C, N>],
        tile: &Tile,
        key: u32,
        column: u32,
        #[comptime] plan: DecodePlan,
    ) -> Vector<C, N> {
        if comptime!(plan.staged > 0) {
            self.vectors[place(key, column, plan)]
        } else {
            cache[tile.base + key as usize * tile.stride + column as usize]
        }
    }
}

/// Waits for all copy groups of this unit except the last one: keys and values alternate.
#[cube]
pub(super) fn wait_for_tile(#[comptime] plan: DecodePlan) {
    if comptime!(plan.staged > 0) {
        cp_async_wait_group(1u32);
    }
}
