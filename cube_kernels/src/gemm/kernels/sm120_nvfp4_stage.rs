//! Stages of the [`sm120_nvfp4`](super::sm120_nvfp4) kernel: how codes and block scales of both
//! operands lie in shared memory, and how `cp.async` brings them there.

use cubecl::prelude::*;

use crate::{
    BLOCK,
    cube::ptx::{cp_async_zfill, cvta_to_global, st_shared_v2},
    gemm::{
        arguments::PackedMatrix,
        tiles::{SM120_TILE_N, Sm120Tile},
    },
};

/// Columns of both operands in a stage: two instructions.
pub(super) const DEPTH: usize = 128;
/// Bytes of codes in a row of a stage.
pub(super) const ROW: usize = DEPTH / 2;
/// Bytes of scales in a row of a stage.
pub(super) const SCALES: usize = DEPTH / BLOCK;
/// Stages of the ring.
pub(super) const STAGES: usize = 4;
/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// How much of a row is copied at a time, which its length in memory decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// Bytes of codes: 16, or 8 where rows are no multiple of 32 elements.
    pub codes: u32,
    /// Bytes of scales: 8, 4 where rows are no multiple of 128 elements, or 1 where they are no
    /// multiple of 64; single bytes are loaded and stored, not copied.
    pub scales: u32,
}

impl Pieces {
    /// For rows of `k` elements, a multiple of 16.
    pub const fn of(k: usize) -> Self {
        Self {
            codes: if k.is_multiple_of(32) { 16 } else { 8 },
            scales: match k {
                k if k.is_multiple_of(128) => 8,
                k if k.is_multiple_of(64) => 4,
                _ => 1,
            },
        }
    }
}

impl Sm120Tile {
    /// Bytes of a stage: codes of `a` and of `b`, scales of `a` and of `b`.
    pub(super) const fn stage(self) -> usize {
        (self.tile_m() + SM120_TILE_N) * (ROW + SCALES)
    }

    /// Where the other parts of a stage begin: codes of `b`, scales of `a`, scales of `b`.
    pub(super) const fn b_codes(self) -> u32 {
        (self.tile_m() * ROW) as u32
    }

    pub(super) const fn a_scales(self) -> u32 {
        ((self.tile_m() + SM120_TILE_N) * ROW) as u32
    }

    pub(super) const fn b_scales(self) -> u32 {
        self.a_scales() + (self.tile_m() * SCALES) as u32
    }
}

/// Queues copies of the codes of `rows` rows from `row0` on, columns `from` to `from + DEPTH`, into
/// the tile at `target`.
#[cube]
fn copy_codes(
    codes: &[u32],
    target: u32,
    row0: u32,
    end: u32,
    from: u32,
    k: u32,
    #[comptime] rows: usize,
    #[comptime] piece: u32,
) {
    let address = cvta_to_global::<u32>(codes.as_ptr());
    let parts = comptime!(ROW as u32 / piece);
    #[unroll]
    for i in 0..comptime!(rows * parts as usize / UNITS) {
        let item = UNIT_POS + comptime!((i * UNITS) as u32);
        let row = item / parts;
        let part = item % parts;
        let column = from + part * comptime!(2 * piece);
        let inside = row0 + row < end && column < k;
        // What lies outside is not read; its address is that of the first byte.
        let at =
            u64::cast_from(row0 + row) * u64::cast_from(k / 2u32) + u64::cast_from(column / 2u32);
        let chunk = part * piece / 16u32;
        let within = part * piece % 16u32;
        cp_async_zfill(
            target + row * comptime!(ROW as u32) + swizzled(row, chunk) + within,
            address + select(inside, at, 0u64),
            select(inside, piece, 0u32),
            piece,
        );
    }
}

/// Where part `chunk` (of 16 bytes) of row `row` lies in its row of a stage.
#[cube]
pub(super) fn swizzled(row: u32, chunk: u32) -> u32 {
    (chunk ^ ((row / 2u32) % 4u32)) * 16u32
}

/// The same for the scales.
#[cube]
fn copy_scales(
    scales: &[u8],
    target: u32,
    row0: u32,
    end: u32,
    from: u32,
    k: u32,
    #[comptime] rows: usize,
    #[comptime] piece: u32,
) {
    let blocks = k / 16u32;
    let first = from / 16u32;
    if comptime!(piece == 1) {
        if UNIT_POS < comptime!(rows as u32) {
            let row = row0 + UNIT_POS;
            let base = row as usize * blocks as usize + first as usize;
            let mut low = 0u32;
            let mut high = 0u32;
            #[unroll]
            for i in 0..4u32 {
                if row < end && first + i < blocks {
                    let byte = u32::cast_from(scales[base + i as usize]);
                    low |= byte << comptime!(8 * i);
                }
                if row < end && first + comptime!(4 + i) < blocks {
                    let byte = u32::cast_from(scales[base + comptime!(4 + i as usize)]);
                    high |= byte << comptime!(8 * i);
                }
            }
            st_shared_v2(
                target + UNIT_POS * comptime!(SCALES as u32),
                u32::reinterpret(low),
                u32::reinterpret(high),
            );
        }
    } else {
        let address = cvta_to_global::<u8>(scales.as_ptr());
        let parts = comptime!(SCALES as u32 / piece);
        let items = comptime!(rows as u32 * SCALES as u32 / piece);
        if UNIT_POS < items {
            let row = UNIT_POS / parts;
            let block = first + (UNIT_POS % parts) * piece;
            let inside = row0 + row < end && block < blocks;
            let at = u64::cast_from(row0 + row) * u64::cast_from(blocks) + u64::cast_from(block);
            cp_async_zfill(
                target + UNIT_POS * piece,
                address + select(inside, at, 0u64),
                select(inside, piece, 0u32),
                piece,
            );
        }
    }
}

/// Where stage number `step` of the ring begins.
#[cube]
pub(super) fn stage_offset(step: u32, #[comptime] shape: Sm120Tile) -> u32 {
    (step % comptime!(STAGES as u32)) * comptime!(shape.stage() as u32)
}

/// The stored rows of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TileRows {
    /// Its first row of `a`.
    pub a: u32,
    /// The row of `a` behind the last of the group.
    pub a_end: u32,
    /// Its first row of `b`.
    pub b: u32,
    /// The row of `b` behind the last of the group.
    pub b_end: u32,
    /// Columns of both.
    pub k: u32,
}

/// Queues the copies of columns `DEPTH * step` and on.
#[cube]
pub(super) fn copy_stage(
    a: &PackedMatrix<u32>,
    b: &PackedMatrix<u32>,
    ring: u32,
    step: u32,
    rows: TileRows,
    #[comptime] tile: Sm120Tile,
    #[comptime] pieces: Pieces,
) {
    let stage = ring + stage_offset(step, tile);
    let from = step * comptime!(DEPTH as u32);
    let tile_m = comptime!(tile.tile_m());
    copy_codes(
        &a.codes,
        stage,
        rows.a,
        rows.a_end,
        from,
        rows.k,
        tile_m,
        pieces.codes,
    );
    let target = stage + comptime!(tile.b_codes());
    copy_codes(
        &b.codes,
        target,
        rows.b,
        rows.b_end,
        from,
        rows.k,
        SM120_TILE_N,
        pieces.codes,
    );
    let target = stage + comptime!(tile.a_scales());
    copy_scales(
        &a.scales,
        target,
        rows.a,
        rows.a_end,
        from,
        rows.k,
        tile_m,
        pieces.scales,
    );
    let target = stage + comptime!(tile.b_scales());
    copy_scales(
        &b.scales,
        target,
        rows.b,
        rows.b_end,
        from,
        rows.k,
        SM120_TILE_N,
        pieces.scales,
    );
}
