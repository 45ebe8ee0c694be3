//! The barriers of a CTA, and the places in shared memory of the rows of its tiles, through which
//! its roles agree on which tile is next.

use cubecl::prelude::*;

use super::tiles::TilePlan;
use crate::cube::ptx::{ld_shared, mbarrier_arrive, mbarrier_wait_parity, st_shared};

/// Tiles of a CTA whose rows have a place: those of the next one come while this one is computed.
pub(super) const PLACES: usize = 2;

/// The place of the rows of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TilePlace {
    /// The number of its barriers.
    pub number: u32,
    /// The parity of the phase of the full one that ends when this use of it is full.
    pub parity: u32,
}

/// The place of a CTA's tile number `tiles`.
#[cube]
pub(super) fn place_of(tiles: u32) -> TilePlace {
    TilePlace {
        number: tiles % comptime!(PLACES as u32),
        parity: (tiles / comptime!(PLACES as u32)) & 1u32,
    }
}

/// Pairs of barriers: one that completes when its part of shared memory is full, and one when it
/// has been read. Those of the places of tiles are the first.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Barriers {
    /// Where they begin.
    pub start: u32,
    /// Where the numbers of the tiles in the places begin.
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

    /// The number of the CTA's tile number `tiles`: `in_turn`, or what was drawn, when its rows are
    /// there.
    pub fn item(&self, tiles: u32, in_turn: u32, #[comptime] plan: TilePlan) -> u32 {
        if comptime!(plan.draws()) {
            let place = place_of(tiles);
            mbarrier_wait_parity(self.full(place.number), place.parity);
            ld_shared(self.items + place.number * 4u32)
        } else {
            in_turn
        }
    }

    /// Waits for the rows of the CTA's tile number `tiles`, whose number is known.
    pub fn wait_for_rows(&self, tiles: u32, #[comptime] plan: TilePlan) {
        // Who asked for what was drawn has waited.
        if comptime!(!plan.draws()) {
            let place = place_of(tiles);
            mbarrier_wait_parity(self.full(place.number), place.parity);
        }
    }

    /// Waits until the place of the CTA's tile number `tiles` is free, and tells the others that
    /// this is `item`, as soon as it is full.
    pub fn tell_item(&self, tiles: u32, item: u32, #[comptime] plan: TilePlan) {
        let place = place_of(tiles);
        mbarrier_wait_parity(self.empty(place.number), place.parity ^ 1u32);
        if comptime!(plan.draws()) {
            st_shared(self.items + place.number * 4u32, u32::reinterpret(item));
        }
    }

    /// Tells the others that there is no tile number `tiles`: `item` is none's.
    pub fn tell_end(&self, tiles: u32, item: u32, #[comptime] plan: TilePlan) {
        if comptime!(plan.draws()) {
            self.tell_item(tiles, item, plan);
            mbarrier_arrive(self.full(place_of(tiles).number));
        }
    }
}
