//! The MS-EDEN kernels.

use cubecl::prelude::*;

use super::{
    super::amax::atomic_amax as cube_atomic_amax,
    arguments::{
        EdenDraw, EdenInputs, EdenOut, EdenSigns, EdenStored, KeptAmax, atomic_amax, write_amax,
    },
    cube_tile::{take_tile, tile_amax},
    plane_result::PlaneBlocks,
    plane_tile::{HeldLines, Reading, plane_amax, take_segments},
    position::{EdenPolicy, EdenTiles, is_filled, tile_position},
    result::Blocks,
};
use crate::{
    cube::{
        codec::canonical,
        eden::{TILE, transform_between_segments},
    },
    tensor::FloatKind,
};

/// Loop over the pieces of a unit: tiles of a plane or of a cube, or parts of tiles that planes
/// share.
#[derive(CubeType)]
struct Walk {
    /// Index of the first piece.
    first: usize,
    /// End index (exclusive).
    end: usize,
    /// Stride between pieces. It has 32 bits even for 64-bit addresses, because a plane has no
    /// register to spare.
    step: u32,
}

#[cube]
fn walk(tiles: &EdenTiles, #[comptime] policy: EdenPolicy) -> Walk {
    let count = tiles.row_tiles * tiles.shape.tile_cols;
    if comptime!(policy.planes()) {
        let planes = CUBE_DIM as usize / 32usize;
        Walk {
            first: CUBE_POS * planes + UNIT_POS as usize / 32usize,
            end: count * comptime!(policy.planes_of_tile),
            step: u32::cast_from(CUBE_COUNT) * (CUBE_DIM / 32u32),
        }
    } else {
        Walk {
            first: CUBE_POS,
            end: count,
            step: u32::cast_from(CUBE_COUNT),
        }
    }
}

/// A plane's share of a tile.
#[derive(CubeType)]
struct Piece {
    /// Tile index.
    tile: usize,
    /// First turn that the plane takes.
    turn: usize,
}

/// Returns piece number `index`.
#[cube]
fn piece_of(index: usize, #[comptime] policy: EdenPolicy) -> Piece {
    let planes = comptime!(policy.planes_of_tile);
    if comptime!(planes == 1) {
        Piece {
            tile: index,
            turn: 0usize.runtime(),
        }
    } else {
        Piece {
            tile: index / planes,
            turn: index % planes * comptime!(policy.turns()),
        }
    }
}

/// Computes the amax of the transformed values of a source, or of each of its groups of rows.
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
    let tile_walk = walk(&tiles, policy);
    let mut index = tile_walk.first;
    if comptime!(policy.planes()) {
        let reading = Reading::new(factor, shape.cols, &signs, policy);
        while index < tile_walk.end {
            let piece = piece_of(index, policy);
            let at = tile_position(piece.tile, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                let bits = plane_amax::<F, N>(&source, piece.turn, &at, reading, policy, kind);
                kept.include(bits, at.part, out, policy);
            }
            index += usize::cast_from(tile_walk.step);
        }
    } else {
        let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
        while index < tile_walk.end {
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
    if comptime!(policy.planes_of_tile > 1) {
        // All planes end at about the same time.
        cube_atomic_amax(out, 0usize, canonical(kept.bits), true);
    } else {
        atomic_amax(out, kept.part, kept.bits, policy);
    }
}

/// Quantizes a source, or each of its groups of rows, by MS-EDEN.
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
    let tile_walk = walk(&tiles, policy);
    let mut index = tile_walk.first;
    if comptime!(policy.planes()) {
        let mut blocks = PlaneBlocks::new(comptime!(policy.planes_of_cube()), policy.unscaled);
        let reading = Reading::new(factor, shape.cols, &signs, policy);
        let corrected = comptime!(policy.corrected_turns());
        while index < tile_walk.end {
            let piece = piece_of(index, policy);
            let at = tile_position(piece.tile, &tiles, policy);
            if comptime!(policy.plain()) || is_filled(&at, policy) {
                kept.turn_to(at.part, &from, policy);
                let held = HeldLines::new::<F, N>(&source, &at, reading, policy);
                for time in 0..comptime!(policy.turns() / corrected) {
                    let first = piece.turn + time * corrected;
                    for turn in 0..corrected {
                        let turn = first + turn;
                        let taken =
                            held.transformed::<F, N>(&source, turn, &at, reading, policy, kind);
                        take_segments(&taken, &mut blocks, &mut out, &at, &kept.scale, policy);
                    }
                    sync_plane();
                    blocks.finish(first, &at, &mut out, &draw, &random, policy);
                    sync_plane();
                }
            }
            index += usize::cast_from(tile_walk.step);
        }
    } else {
        let mut blocks = Blocks::new(policy.unscaled);
        let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
        while index < tile_walk.end {
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
