//! Stages of the [`sm120_block_scaled`](super::kernel) kernel: the layout of codes and
//! block scales of both operands in shared memory, and their `cp.async` copies.

use cubecl::prelude::*;

use super::tile::{SM120_TILE_N, Sm120Tile};
use crate::{
    cube::ptx::{BlockScaled, cp_async_zfill, cvta_to_global, st_shared, st_shared_v2},
    gemm::arguments::PackedMatrix,
};

/// Bytes of codes per row of a stage, two instructions: 128 columns of NVFP4, 64 of MXFP8.
pub(super) const ROW: usize = 64;
/// Bytes of codes per row that an instruction reads.
pub(super) const STEP: usize = 32;
/// Number of pipeline stages.
pub(super) const STAGES: usize = 4;
/// Units per cube.
pub(super) const UNITS: usize = 256;

/// Returns the bytes of codes of a block, which has one scale.
const fn block_bytes(format: BlockScaled) -> usize {
    format.format().block() * format.format().code_bits() / 8
}

/// Bytes of a row copied at a time. They depend on the row length in memory and on the starts of
/// groups along K.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// Bytes of codes: 16, or 8 if NVFP4 rows are no multiple of 32 elements.
    pub codes: u32,
    /// Bytes of scales. NVFP4: 8, 4 if rows are no multiple of 128 elements, or 1 if they are no
    /// multiple of 64. MXFP8, which has two scales per row of a stage: 1. Single bytes are loaded
    /// and stored instead of copied.
    pub scales: u32,
}

impl Pieces {
    /// Returns the sizes for rows whose length, and the first column of each group along them, is a
    /// multiple of `unit` elements, itself a multiple of a block.
    pub const fn of(format: BlockScaled, unit: usize) -> Self {
        match format {
            BlockScaled::Nvfp4 => Self {
                codes: if unit.is_multiple_of(32) { 16 } else { 8 },
                scales: match unit {
                    unit if unit.is_multiple_of(128) => 8,
                    unit if unit.is_multiple_of(64) => 4,
                    _ => 1,
                },
            },
            BlockScaled::Mxfp8 => Self {
                codes: 16,
                scales: 1,
            },
        }
    }
}

impl Sm120Tile {
    /// Returns the scales per row of a stage: 8 of NVFP4, 2 of MXFP8.
    const fn row_scales(self) -> usize {
        ROW / block_bytes(self.format)
    }

    /// Returns the pitch of the rows of scales of a stage, in bytes: whole words.
    pub(super) const fn scale_pitch(self) -> usize {
        self.row_scales().next_multiple_of(4)
    }

    /// Returns the bytes of a stage: codes of `a` and of `b`, scales of `a` and of `b`.
    pub(super) const fn stage(self) -> usize {
        (self.tile_m() + SM120_TILE_N) * (ROW + self.scale_pitch())
    }

    /// Returns the offset of the codes of `b` in a stage; scales of `a` and of `b` follow.
    pub(super) const fn b_codes(self) -> u32 {
        (self.tile_m() * ROW) as u32
    }

    pub(super) const fn a_scales(self) -> u32 {
        ((self.tile_m() + SM120_TILE_N) * ROW) as u32
    }

    pub(super) const fn b_scales(self) -> u32 {
        self.a_scales() + (self.tile_m() * self.scale_pitch()) as u32
    }
}

/// Stored rows of an operand that go to a stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct StagePart {
    /// Destination in shared memory.
    target: u32,
    /// First row.
    row0: u32,
    /// End row of the group (exclusive).
    row_end: u32,
    /// First byte of codes in each row.
    from: u32,
    /// Bytes of codes up to the end of the group's columns.
    end: u32,
    /// Bytes of codes per row.
    pitch: u32,
}

/// Queues the copies of the codes of `rows` rows to a stage.
#[cube]
fn copy_codes(codes: &[u32], part: StagePart, #[comptime] rows: usize, #[comptime] piece: u32) {
    let address = cvta_to_global::<u32>(codes.as_ptr());
    let parts = comptime!(ROW as u32 / piece);
    #[unroll]
    for i in 0..comptime!(rows * parts as usize / UNITS) {
        let item = UNIT_POS + comptime!((i * UNITS) as u32);
        let row = item / parts;
        let place = item % parts * piece;
        let byte = part.from + place;
        let inside = part.row0 + row < part.row_end && byte < part.end;
        // Out-of-bounds elements are not read; their address is that of the first byte.
        let at =
            u64::cast_from(part.row0 + row) * u64::cast_from(part.pitch) + u64::cast_from(byte);
        cp_async_zfill(
            part.target
                + row * comptime!(ROW as u32)
                + swizzled(row, place / 16u32)
                + place % 16u32,
            address + select(inside, at, 0u64),
            select(inside, piece, 0u32),
            piece,
        );
    }
}

/// Returns the swizzled index of 16-byte chunk `chunk` in row `row` of a stage.
#[cube]
pub(super) fn swizzled(row: u32, chunk: u32) -> u32 {
    (chunk ^ ((row / 2u32) % 4u32)) * 16u32
}

/// Returns the scales of `count` blocks in a word, from block `first` up to block `end` of a row
/// that begins at `base`.
#[cube]
fn word_of_scales(scales: &[u8], base: usize, first: u32, end: u32, #[comptime] count: u32) -> u32 {
    let mut word = 0u32;
    #[unroll]
    for i in 0..count {
        if first + i < end {
            let byte = u32::cast_from(scales[base + (first + i) as usize]);
            word |= byte << comptime!(8 * i);
        }
    }
    word
}

/// Queues the copies of the scales of a stage, like [`copy_codes()`].
#[cube]
fn copy_scales(
    scales: &[u8],
    part: StagePart,
    #[comptime] rows: usize,
    #[comptime] piece: u32,
    #[comptime] tile: Sm120Tile,
) {
    let per_scale = comptime!(block_bytes(tile.format) as u32);
    let pitch = comptime!(tile.scale_pitch() as u32);
    let count = comptime!(tile.row_scales() as u32);
    let blocks = part.pitch / per_scale;
    let first = part.from / per_scale;
    let end = part.end / per_scale;
    if comptime!(piece == 1) {
        if UNIT_POS < comptime!(rows as u32) {
            let row = part.row0 + UNIT_POS;
            let base = row as usize * blocks as usize;
            // Rows after the last one have no scales.
            let end = select(row < part.row_end, end, 0u32);
            let target = part.target + UNIT_POS * pitch;
            // Reinterpreted: otherwise a variable would reach the instruction as an address.
            if comptime!(count == 8) {
                let low = word_of_scales(scales, base, first, end, 4u32);
                let high = word_of_scales(scales, base, first + 4u32, end, 4u32);
                st_shared_v2(target, u32::reinterpret(low), u32::reinterpret(high));
            } else {
                let word = word_of_scales(scales, base, first, end, count);
                st_shared(target, u32::reinterpret(word));
            }
        }
    } else {
        let address = cvta_to_global::<u8>(scales.as_ptr());
        let parts = comptime!(count / piece);
        let items = comptime!(rows as u32 * count / piece);
        if UNIT_POS < items {
            let row = UNIT_POS / parts;
            let block = first + (UNIT_POS % parts) * piece;
            let inside = part.row0 + row < part.row_end && block < end;
            let at =
                u64::cast_from(part.row0 + row) * u64::cast_from(blocks) + u64::cast_from(block);
            cp_async_zfill(
                part.target + UNIT_POS * piece,
                address + select(inside, at, 0u64),
                select(inside, piece, 0u32),
                piece,
            );
        }
    }
}

/// Returns the offset of stage number `step` of the pipeline.
#[cube]
pub(super) fn stage_offset(step: u32, #[comptime] shape: Sm120Tile) -> u32 {
    (step % comptime!(STAGES as u32)) * comptime!(shape.stage() as u32)
}

/// Stored rows of a tile, and columns of its group.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TileRows {
    /// First row of `a`.
    pub a: u32,
    /// End row of the group in `a` (exclusive).
    pub a_end: u32,
    /// First row of `b`.
    pub b: u32,
    /// End row of the group in `b` (exclusive).
    pub b_end: u32,
    /// Bytes of codes in a row of either operand before the columns of the group.
    pub from: u32,
    /// Bytes of codes up to the end of the group's columns.
    pub end: u32,
    /// Bytes of codes per row.
    pub pitch: u32,
}

#[cube]
impl TileRows {
    /// Returns the number of stages along K.
    pub fn stages(&self) -> u32 {
        (self.end - self.from).div_ceil(comptime!(ROW as u32))
    }
}

/// Queues the copies of stage `step` along K.
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
    let tile_m = comptime!(tile.tile_m());
    let of_a = StagePart {
        target: stage,
        row0: rows.a,
        row_end: rows.a_end,
        from: rows.from + step * comptime!(ROW as u32),
        end: rows.end,
        pitch: rows.pitch,
    };
    let of_b = StagePart {
        target: stage + comptime!(tile.b_codes()),
        row0: rows.b,
        row_end: rows.b_end,
        from: of_a.from,
        end: rows.end,
        pitch: rows.pitch,
    };
    copy_codes(&a.codes, of_a, tile_m, pieces.codes);
    copy_codes(&b.codes, of_b, SM120_TILE_N, pieces.codes);
    let a_scales = StagePart {
        target: stage + comptime!(tile.a_scales()),
        row0: rows.a,
        row_end: rows.a_end,
        from: of_a.from,
        end: rows.end,
        pitch: rows.pitch,
    };
    let b_scales = StagePart {
        target: stage + comptime!(tile.b_scales()),
        row0: rows.b,
        row_end: rows.b_end,
        from: of_a.from,
        end: rows.end,
        pitch: rows.pitch,
    };
    copy_scales(&a.scales, a_scales, tile_m, pieces.scales, tile);
    copy_scales(&b.scales, b_scales, SM120_TILE_N, pieces.scales, tile);
}
