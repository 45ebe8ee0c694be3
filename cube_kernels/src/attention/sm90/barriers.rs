//! Barriers of a CTA and shared-memory buffers for the rows of its tiles, through which the CTA's
//! roles agree on the next tile.

use cubecl::prelude::*;

use super::tiles::TilePlan;
use crate::cube::ptx::{ld_shared, mbarrier_arrive, mbarrier_wait_parity, st_shared};

/// Number of tiles whose rows are buffered: those of the next tile are loaded while this one is
/// computed.
pub(super) const PLACES: usize = 2;

/// Buffer of a tile's rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TilePlace {
    /// Index of its barriers.
    pub number: u32,
    /// Parity of the phase of the full barrier that ends when this use of the buffer is full.
    pub parity: u32,
}

/// Returns the buffer of a CTA's tile number `tiles`.
#[cube]
pub(super) fn place_of(tiles: u32) -> TilePlace {
    TilePlace {
        number: tiles % comptime!(PLACES as u32),
        parity: (tiles / comptime!(PLACES as u32)) & 1u32,
    }
}

/// Pairs of barriers: one that completes when its buffer is full, and one when it has been read.
/// Those of the tile buffers come first.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Barriers {
    /// Start address of the barriers.
    pub start: u32,
    /// Start address of the tile indices of the buffers.
    pub items: u32,
}

#[cube]
impl Barriers {
    pub fn full(&self, number: u32) -> u32 {
        self.start + number * 16u32
    }

    pub fn empty(&self, number: u32) -> u32 {
        self.start + number * 16u32 + 8u32
    }

    /// Returns the index of the CTA's tile number `tiles`: `in_turn`, or the drawn one, once its
    /// rows have arrived.
    pub fn item(&self, tiles: u32, in_turn: u32, #[comptime] plan: TilePlan) -> u32 {
        if comptime!(plan.draws()) {
            let place = place_of(tiles);
            mbarrier_wait_parity(self.full(place.number), place.parity);
            ld_shared(self.items + place.number * 4u32)
        } else {
            in_turn
        }
    }

    /// Waits for the rows of the CTA's tile number `tiles`, whose index is known.
    pub fn wait_for_rows(&self, tiles: u32, #[comptime] plan: TilePlan) {
        // With drawing, the caller has already waited for the index.
        if comptime!(!plan.draws()) {
            let place = place_of(tiles);
            mbarrier_wait_parity(self.full(place.number), place.parity);
        }
    }

    /// Waits until the buffer of the CTA's tile number `tiles` is free, and announces to the other
    /// roles that its tile is `item` as soon as it is full.
    pub fn tell_item(&self, tiles: u32, item: u32, #[comptime] plan: TilePlan) {
        let place = place_of(tiles);
        mbarrier_wait_parity(self.empty(place.number), place.parity ^ 1u32);
        if comptime!(plan.draws()) {
            st_shared(self.items + place.number * 4u32, u32::reinterpret(item));
        }
    }

    /// Announces that there is no tile number `tiles`: `item` is out of range.
    pub fn tell_end(&self, tiles: u32, item: u32, #[comptime] plan: TilePlan) {
        if comptime!(plan.draws()) {
            self.tell_item(tiles, item, plan);
            mbarrier_arrive(self.full(place_of(tiles).number));
        }
    }
}
