//! A tile of a cube, as `f32` in shared memory: for devices without planes of 32 units.

use cubecl::prelude::*;

use super::{
    super::packed_source::{PackedRows, SourcePlan},
    arguments::{EdenOut, EdenStored, EdenStoredExpand},
    packed::{decode_block, mask_block},
    position::{EdenPolicy, Position},
    result::{BlockPlace, Blocks},
};
use crate::{
    cube::{
        codec::load,
        eden::{
            EdenScale, LINES, TASKS, line_of, load_segment, quantize_block, segment_amax,
            segment_of, slot, store_segment, transform_segment,
        },
        hadamard::Signs,
    },
    tensor::FloatKind,
};

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// Loads a tile and transforms its segments; ends with a barrier. `factor` is that of the
    /// source. If the source is a matrix, `cols` are its columns and `kind` is its type.
    pub(super) fn load_tile(
        &self,
        tile: &mut [f32],
        at: &Position,
        signs: &Signs,
        factor: f32,
        cols: usize,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) {
        let (across, plan) = comptime!((policy.across, policy.source));
        #[comptime]
        match self {
            EdenStored::Matrix(x) => load_matrix::<F, N>(x, tile, at, signs, cols, across, kind),
            EdenStored::Packed(rows) => {
                let own = rows.factor_of(at.part, factor, plan);
                load_packed(rows, own, tile, at, signs, across, plan);
            }
        }
    }
}

/// Loads a tile of a matrix and transforms its segments; ends with a barrier.
#[cube]
fn load_matrix<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    tile: &mut [f32],
    at: &Position,
    signs: &Signs,
    cols: usize,
    #[comptime] across: bool,
    #[comptime] kind: FloatKind,
) {
    let width = N::value();
    let vectors = cols / width;
    if comptime!(across) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(LINES * 128 / width) {
            let k = item / comptime!(LINES / width);
            let line = (item % comptime!(LINES / width)) * width;
            let row = at.start + k;
            let col = at.line0 + line;
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if row < at.end && col < at.lines {
                vector = x[row * vectors + col / width];
            }
            let base = slot(k, line, across);
            #[unroll]
            for i in 0..width {
                tile[base + i] = load::<F>(vector.extract(i), kind);
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        transform_segments(tile, signs, across);
    } else {
        let mut task = UNIT_POS as usize;
        while task < comptime!(TASKS) {
            let segment = segment_of(task);
            let line = line_of(task);
            let row = at.line0 + line;
            let first = at.start + segment * 16usize;
            let mut block = Array::<f32>::new(16usize);
            #[unroll]
            for v in 0..comptime!(16 / width) {
                let col = first + comptime!(v * width);
                let mut vector = Vector::<F, N>::new(F::from_int(0));
                if row < at.lines && col < at.end {
                    vector = x[row * vectors + col / width];
                }
                #[unroll]
                for i in 0..width {
                    block[comptime!(v * width + i)] = load::<F>(vector.extract(i), kind);
                }
            }
            transform_segment(&mut block, signs, segment);
            store_segment(&block, tile, segment, line, across);
            task += CUBE_DIM as usize;
        }
    }
    sync_cube();
}

/// Loads a tile of an NVFP4 matrix, whose factor is `own`, and transforms its segments; ends with a
/// barrier.
#[cube]
fn load_packed(
    source: &PackedRows,
    own: f32,
    tile: &mut [f32],
    at: &Position,
    signs: &Signs,
    #[comptime] across: bool,
    #[comptime] plan: SourcePlan,
) {
    if comptime!(across) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(TASKS) {
            let k = item / 2usize;
            let line = (item % 2usize) * 16usize;
            let row = at.start + k;
            let col = at.line0 + line;
            let inside = row < at.end && col < at.lines;
            let mut block = decode_block(source, own, row, col / 16usize, at, inside, plan);
            mask_block(&mut block, col, at.lines);
            let base = slot(k, line, across);
            #[unroll]
            for i in 0..16usize {
                tile[base + i] = block[i];
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        transform_segments(tile, signs, across);
    } else {
        let mut task = UNIT_POS as usize;
        while task < comptime!(TASKS) {
            let segment = segment_of(task);
            let line = line_of(task);
            let row = at.line0 + line;
            let first = at.start + segment * 16usize;
            let inside = row < at.lines && first < at.end;
            let mut block = decode_block(source, own, row, first / 16usize, at, inside, plan);
            mask_block(&mut block, first, at.end);
            transform_segment(&mut block, signs, segment);
            store_segment(&block, tile, segment, line, across);
            task += CUBE_DIM as usize;
        }
    }
    sync_cube();
}

#[cube]
fn transform_segments(tile: &mut [f32], signs: &Signs, #[comptime] across: bool) {
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let mut block = load_segment(&*tile, segment_of(task), line_of(task), across);
        transform_segment(&mut block, signs, segment_of(task));
        store_segment(&block, tile, segment_of(task), line_of(task), across);
        task += CUBE_DIM as usize;
    }
}

/// Returns the largest magnitude of this unit's share of a transformed tile. Elements outside the
/// matrix are zero.
#[cube]
pub(super) fn tile_amax(tile: &[f32], #[comptime] across: bool) -> u32 {
    let mut bits = 0u32;
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let block = load_segment(tile, segment_of(task), line_of(task), across);
        bits = max(bits, segment_amax(&block));
        task += CUBE_DIM as usize;
    }
    bits
}

/// Quantizes the blocks of a transformed tile.
#[cube]
pub(super) fn take_tile(
    tile: &[f32],
    blocks: &mut Blocks,
    out: &mut EdenOut,
    at: &Position,
    global: &EdenScale,
    #[comptime] policy: EdenPolicy,
) {
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let place = BlockPlace {
            line: line_of(task),
            segment: segment_of(task),
        };
        let block = load_segment(tile, place.segment, place.line, policy.across);
        let amax = f32::reinterpret(segment_amax(&block));
        let scale = global.block_scale(amax, policy.conversion);
        let multiplier = global.encode_multiplier(scale, policy.conversion);
        let found = quantize_block(&block, multiplier, policy.conversion);
        blocks.take(&found, scale, place, at, out, policy);
        task += CUBE_DIM as usize;
    }
}
