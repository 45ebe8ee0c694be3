//! The kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    arguments::{
        EdenDraw, EdenInputs, EdenOut, EdenScreen, EdenSigns, EdenStored, KeptAmax, atomic_amax,
        write_amax,
    },
    cube_tile::{take_tile, tile_amax},
    plane_result::PlaneBlocks,
    plane_tile::{HeldLines, Reading, plane_amax, take_segments},
    position::{EdenPolicy, EdenTiles, TURNS, is_filled, tile_position},
    result::Blocks,
};
use crate::{
    cube::eden::{TILE, transform_between_segments},
    tensor::FloatKind,
};

/// The number of the first tile of this unit, and the distance to the next: a plane's, or a cube's.
#[derive(CubeType)]
struct Walk {
    first: usize,
    /// In 32 bits also where addresses have 64: a plane has no register to spare.
    step: u32,
}

#[cube]
fn walk(#[comptime] policy: EdenPolicy) -> Walk {
    if comptime!(policy.planes()) {
        let planes = CUBE_DIM as usize / 32usize;
        Walk {
            first: CUBE_POS * planes + UNIT_POS as usize / 32usize,
            step: u32::cast_from(CUBE_COUNT) * (CUBE_DIM / 32u32),
        }
    } else {
        Walk {
            first: CUBE_POS,
            step: u32::cast_from(CUBE_COUNT),
        }
    }
}

/// The amax of the transformed values of a source, or of each of its groups of rows. Of a source
/// that was screened, planes look at few tiles.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_kernel<F: Numeric, N: Size>(
    source: EdenStored<F, N>,
    tiles: EdenTiles,
    screen: EdenScreen,
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
    let tile_walk = walk(policy);
    let mut index = tile_walk.first;
    let count = tiles.row_tiles * shape.tile_cols;
    if comptime!(policy.planes()) {
        let reading = Reading::new(factor, shape.cols, &signs, policy);
        while index < count {
            let at = tile_position(index, &tiles, policy);
            let wanted = if comptime!(policy.screened) {
                screen.may_hold_largest(index)
            } else {
                comptime!(policy.plain()) || is_filled(&at, policy)
            };
            if wanted {
                let bits = plane_amax::<F, N>(&source, &at, reading, policy, kind);
                kept.include(bits, at.part, out, policy);
            }
            index += usize::cast_from(tile_walk.step);
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
            index += usize::cast_from(tile_walk.step);
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
    let random = draw.resolve(policy.device_offset);
    let signs = draw.signs.resolve(policy.redrawn_signs);
    let factor = source.factor();
    let mut kept = write_amax(&from, shape, &mut out, policy);
    let tile_walk = walk(policy);
    let mut index = tile_walk.first;
    let count = tiles.row_tiles * shape.tile_cols;
    if comptime!(policy.planes()) {
        let mut blocks = PlaneBlocks::new(comptime!(policy.tiles_of_cube()), policy.unscaled);
        let reading = Reading::new(factor, shape.cols, &signs, policy);
        while index < count {
            let at = tile_position(index, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                kept.turn_to(at.part, &from, policy);
                let held = HeldLines::new::<F, N>(&source, &at, reading, policy);
                for half in 0..2usize {
                    for turn in 0..comptime!(TURNS / 2) {
                        let turn = half * comptime!(TURNS / 2) + turn;
                        let taken =
                            held.transformed::<F, N>(&source, turn, &at, reading, policy, kind);
                        take_segments(&taken, &mut blocks, &mut out, &at, &kept.scale, policy);
                    }
                    sync_plane();
                    blocks.finish(half, &at, &mut out, &draw, &random, policy);
                    sync_plane();
                }
            }
            index += usize::cast_from(tile_walk.step);
        }
    } else {
        let mut blocks = Blocks::new(policy.unscaled);
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
            index += usize::cast_from(tile_walk.step);
        }
    }
}
