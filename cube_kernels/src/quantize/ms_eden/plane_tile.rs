//! A tile of a plane, in registers. Eight neighbouring units share a line, 16 values each, and
//! transform it by shuffles; a unit has two of eight lines at a time.

use cubecl::prelude::*;

use super::{
    super::packed_source::{PackedRows, SourcePlan},
    arguments::{EdenOut, EdenStored, EdenStoredExpand},
    packed::{decode_block, mask_block},
    position::{EdenPolicy, Position},
    result::{BlockPlace, Blocks},
};
use crate::{
    HadamardSize,
    cube::{
        block::{block_amax, pairs_amax},
        codec::load,
        eden::{EdenScale, flip_segment, quantize_pairs},
        hadamard::{normalized_pairs, round_normalized},
    },
    quantize::tile::transform_values,
    tensor::FloatKind,
};

/// Lines that a unit has at a time.
pub(super) const OWN: usize = 2;
/// Lines that a plane has at a time.
const LINES_AT_A_TIME: usize = 8;
/// How often it takes lines of a tile.
const TURNS: usize = 4;

/// What a plane reads all its tiles with.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Reading {
    /// The factor of a packed source with one amax.
    pub factor: f32,
    /// The columns of a matrix.
    pub cols: usize,
    /// The signs of this unit's segments.
    pub signs: u32,
}

/// The part of a tile that a unit has at a time.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Part {
    /// The number of its segment in all of its lines.
    segment: usize,
    /// Its first line.
    line: usize,
}

/// The part of this unit in turn `turn`. Its lines are neighbours where they are in the source,
/// else four apart, so that a plane reads neighbouring lines at once.
#[cube]
fn part_of(turn: usize, #[comptime] across: bool) -> Part {
    let unit = UNIT_POS_PLANE as usize;
    let own = unit / 8usize;
    let line = if comptime!(across) { own * OWN } else { own };
    Part {
        segment: unit % 8usize,
        line: turn * LINES_AT_A_TIME + line,
    }
}

/// The distance from one of a unit's lines to the next.
const fn line_step(across: bool) -> usize {
    if across { 1 } else { LINES_AT_A_TIME / OWN }
}

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// The 32 values of a part, line after line; zeros outside of the source.
    fn load_part(
        &self,
        part: Part,
        at: &Position,
        reading: Reading,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) -> Array<f32> {
        let plan = comptime!(policy.source);
        #[comptime]
        match self {
            EdenStored::Matrix(x) => {
                if comptime!(policy.across) {
                    matrix_across::<F, N>(x, part, at, reading.cols, kind)
                } else {
                    matrix_along::<F, N>(x, part, at, reading.cols, kind)
                }
            }
            EdenStored::Packed(rows) => {
                let own = rows.factor_of(at.part, reading.factor, plan);
                packed_along(rows, part, at, own, plan)
            }
        }
    }
}

#[cube]
fn matrix_along<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    cols: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let width = N::value();
    let vectors = cols / width;
    let mut values = Array::<f32>::new(32usize);
    #[unroll]
    for j in 0..OWN {
        let row = at.line0 + part.line + comptime!(j * line_step(false));
        #[unroll]
        for v in 0..comptime!(16 / width) {
            let col = at.start + part.segment * 16usize + comptime!(v * width);
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if row < at.lines && col < at.end {
                vector = x[row * vectors + col / width];
            }
            #[unroll]
            for i in 0..width {
                values[comptime!(j * 16 + v * width + i)] = load::<F>(vector.extract(i), kind);
            }
        }
    }
    values
}

#[cube]
fn matrix_across<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    cols: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let width = N::value();
    let vectors = cols / width;
    let mut values = Array::<f32>::new(32usize);
    #[unroll]
    for k in 0..16usize {
        let row = at.start + part.segment * 16usize + k;
        #[unroll]
        for v in 0..comptime!(OWN / width) {
            let col = at.line0 + part.line + comptime!(v * width);
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if row < at.end && col < at.lines {
                vector = x[row * vectors + col / width];
            }
            #[unroll]
            for i in 0..width {
                values[comptime!((v * width + i) * 16 + k)] = load::<F>(vector.extract(i), kind);
            }
        }
    }
    values
}

#[cube]
fn packed_along(
    source: &PackedRows,
    part: Part,
    at: &Position,
    own: f32,
    #[comptime] plan: SourcePlan,
) -> Array<f32> {
    let mut values = Array::<f32>::new(32usize);
    let first = at.start + part.segment * 16usize;
    #[unroll]
    for j in 0..OWN {
        let row = at.line0 + part.line + comptime!(j * line_step(false));
        let inside = row < at.lines && first < at.end;
        let mut block = decode_block(source, own, row, first / 16usize, at, inside, plan);
        mask_block(&mut block, first, at.end);
        #[unroll]
        for i in 0..16usize {
            values[comptime!(j * 16 + i)] = block[i];
        }
    }
    values
}

/// Line `j` of a part, transformed but for the factor. All units of the plane must be here.
#[cube]
fn transformed(
    values: &Array<f32>,
    #[comptime] j: usize,
    segment: usize,
    signs: u32,
    #[comptime] policy: EdenPolicy,
) -> Array<f32> {
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        block[i] = values[comptime!(j * 16 + i)];
    }
    flip_segment(&mut block, signs);
    transform_values(&mut block, segment, HadamardSize::H128, policy.conversion);
    block
}

/// The largest magnitude of a tile after the transform, as bits, as each unit sees its part. What
/// lies outside the matrix is zero.
#[cube]
pub(super) fn plane_amax<F: Numeric, N: Size>(
    source: &EdenStored<F, N>,
    at: &Position,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
) -> u32 {
    let mut most = 0u32;
    for turn in 0..TURNS {
        let part = part_of(turn, policy.across);
        let values = source.load_part(part, at, reading, policy, kind);
        #[unroll]
        for j in 0..OWN {
            let block = transformed(&values, j, part.segment, reading.signs, policy);
            let amax = block_amax(&block, 0usize, policy.conversion);
            most = max(most, u32::reinterpret(amax));
        }
    }
    // Multiplication and rounding keep the order of magnitudes.
    u32::reinterpret(round_normalized(f32::reinterpret(most), HadamardSize::H128))
}

/// Takes the blocks of a tile.
#[cube]
pub(super) fn take_plane<F: Numeric, N: Size>(
    source: &EdenStored<F, N>,
    blocks: &mut Blocks,
    out: &mut EdenOut,
    at: &Position,
    global: &EdenScale,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
) {
    for turn in 0..TURNS {
        let part = part_of(turn, policy.across);
        let values = source.load_part(part, at, reading, policy, kind);
        #[unroll]
        for j in 0..OWN {
            let block = transformed(&values, j, part.segment, reading.signs, policy);
            let pairs = normalized_pairs(&block, 16usize, HadamardSize::H128);
            let amax = pairs_amax(&pairs, 0usize);
            let scale = global.block_scale(amax, policy.conversion);
            let multiplier = global.encode_multiplier(scale, policy.conversion);
            let found = quantize_pairs(&pairs, multiplier, policy.conversion);
            let place = BlockPlace {
                line: part.line + comptime!(j * line_step(policy.across)),
                segment: part.segment,
            };
            blocks.take(&found, scale, place, at, out, policy);
        }
    }
}
