//! The kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    arguments::{
        EdenDraw, EdenInputs, EdenOut, EdenSigns, EdenStored, KeptAmax, atomic_amax, write_amax,
    },
    cube_tile::{take_tile, tile_amax},
    plane_tile::{Reading, plane_amax, take_plane},
    position::{EdenPolicy, EdenTiles, is_filled, tile_position},
    result::{Blocks, Team},
};
use crate::{
    cube::{
        eden::{TILE, segment_signs, transform_between_segments},
        hadamard::Signs,
    },
    tensor::FloatKind,
};

/// The units that work on this unit's tile: its plane, or its cube.
#[cube]
fn team(#[comptime] policy: EdenPolicy) -> Team {
    if comptime!(policy.planes()) {
        Team {
            tile: UNIT_POS as usize / 32usize,
            unit: UNIT_POS_PLANE as usize,
            units: 32usize.runtime(),
        }
    } else {
        Team {
            tile: 0usize.runtime(),
            unit: UNIT_POS as usize,
            units: CUBE_DIM as usize,
        }
    }
}

/// Tiles that a cube works on at a time.
#[cube]
fn tiles_of_cube(#[comptime] policy: EdenPolicy) -> usize {
    if comptime!(policy.planes()) {
        CUBE_DIM as usize / 32usize
    } else {
        1usize.runtime()
    }
}

/// The signs of this unit's segment of a plane's tile.
#[cube]
fn own_signs(signs: &Signs) -> u32 {
    segment_signs(signs, UNIT_POS_PLANE as usize % 8usize)
}

/// The amax of the transformed values of a source, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_kernel<F: Numeric, N: Size>(
    source: EdenStored<F, N>,
    tiles: EdenTiles,
    out: &mut [Atomic<u32>],
    signs: EdenSigns,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let shape = &tiles.shape;
    let factor = source.factor();
    let signs = signs.resolve(policy.redrawn_signs);
    let mut kept = KeptAmax {
        bits: 0u32,
        part: 0usize,
    };
    let mut index = CUBE_POS * tiles_of_cube(policy) + team(policy).tile;
    let count = tiles.row_tiles * shape.tile_cols;
    if comptime!(policy.planes()) {
        let reading = Reading {
            factor,
            cols: shape.cols,
            signs: own_signs(&signs),
        };
        while index < count {
            let at = tile_position(index, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                let bits = plane_amax::<F, N>(&source, &at, reading, policy, kind);
                kept.include(bits, at.part, out, policy);
            }
            index += CUBE_COUNT * tiles_of_cube(policy);
        }
    } else {
        let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
        while index < count {
            let at = tile_position(index, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                source.load_tile(&mut tile, &at, &signs, factor, shape.cols, policy, kind);
                transform_between_segments(&mut tile, across, policy.conversion.has_ptx());
                sync_cube();
                kept.include(tile_amax(&tile, across), at.part, out, policy);
                sync_cube();
            }
            index += CUBE_COUNT;
        }
    }
    atomic_amax(out, kept.part, kept.bits, policy);
}

/// MS-EDEN of a source, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_kernel<F: Numeric, N: Size>(
    source: EdenStored<F, N>,
    tiles: EdenTiles,
    from: EdenInputs,
    mut out: EdenOut,
    draw: EdenDraw,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let shape = &tiles.shape;
    let mut blocks = Blocks::new(
        team(policy),
        comptime!(policy.tiles_of_cube()),
        policy.unscaled,
    );
    let random = draw.resolve(policy.device_offset);
    let signs = draw.signs.resolve(policy.redrawn_signs);
    let factor = source.factor();
    let mut kept = write_amax(&from, shape, &mut out, policy);
    let mut index = CUBE_POS * tiles_of_cube(policy) + team(policy).tile;
    let count = tiles.row_tiles * shape.tile_cols;
    if comptime!(policy.planes()) {
        let reading = Reading {
            factor,
            cols: shape.cols,
            signs: own_signs(&signs),
        };
        while index < count {
            let at = tile_position(index, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                kept.turn_to(at.part, &from, policy);
                take_plane::<F, N>(
                    &source,
                    &mut blocks,
                    &mut out,
                    &at,
                    &kept.scale,
                    reading,
                    policy,
                    kind,
                );
                sync_plane();
                blocks.finish(&at, &mut out, &draw, &random, policy);
                sync_plane();
            }
            index += CUBE_COUNT * tiles_of_cube(policy);
        }
    } else {
        let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
        while index < count {
            let at = tile_position(index, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                source.load_tile(&mut tile, &at, &signs, factor, shape.cols, policy, kind);
                transform_between_segments(&mut tile, across, policy.conversion.has_ptx());
                sync_cube();
                kept.turn_to(at.part, &from, policy);
                take_tile(&tile, &mut blocks, &mut out, &at, &kept.scale, policy);
                sync_cube();
                blocks.finish(&at, &mut out, &draw, &random, policy);
                sync_cube();
            }
            index += CUBE_COUNT;
        }
    }
}
