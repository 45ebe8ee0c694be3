//! A tile of a plane, in registers. Eight neighbouring units share a line, 16 values each, and
//! transform it by shuffles; a unit has two of eight lines at a time.
//!
//! Across a packed source a unit's word of codes is of eight lines: it has the words of its 16 rows
//! for all turns, and takes two lines of them in each.

use cubecl::prelude::*;

use super::{
    super::{
        packed_source::{PackedRows, SourcePlan},
        tile::Grouping,
    },
    arguments::{EdenOut, EdenStored, EdenStoredExpand},
    packed::{decode_block, mask_block},
    position::{EdenPolicy, Position, TURNS},
    result::{BlockPlace, Blocks},
};
use crate::{
    HadamardSize,
    cube::{
        block::{block_amax, pairs_amax},
        codec::{BlockFactors, load as load_element},
        eden::{EdenScale, LINES, flip_segment, quantize_pairs},
        hadamard::{normalized_pairs, round_normalized},
        words::unpack,
    },
    quantize::tile::transform_values,
    tensor::FloatKind,
};

/// Lines that a unit has at a time.
pub(super) const OWN: usize = 2;
/// Lines that a plane has at a time.
const LINES_AT_A_TIME: usize = 8;

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
fn part_of(turn: usize, #[comptime] policy: EdenPolicy) -> Part {
    let unit = UNIT_POS_PLANE as usize;
    let own = unit / 8usize;
    let line = if comptime!(policy.held_turns() > 1) {
        own * comptime!(OWN * TURNS) + turn * OWN
    } else if comptime!(policy.across) {
        turn * LINES_AT_A_TIME + own * OWN
    } else {
        turn * LINES_AT_A_TIME + own
    };
    Part {
        segment: unit % 8usize,
        line,
    }
}

/// The distance from one of a unit's lines to the next.
const fn line_step(across: bool) -> usize {
    if across { 1 } else { LINES_AT_A_TIME / OWN }
}

/// What a unit has of a packed source across its blocks for all turns: for each of 16 rows the
/// codes of eight lines, and what multiplies them.
#[derive(CubeType)]
struct Held {
    codes: Array<u32>,
    /// Those of blocks, as pairs of bf16.
    scales: Array<u32>,
    tensors: Array<f32>,
}

/// Rows that a unit holds: none, unless it holds them for all turns.
fn held_rows(policy: EdenPolicy) -> usize {
    if policy.held_turns() > 1 { 16 } else { 1 }
}

#[cube]
impl Held {
    fn new(#[comptime] policy: EdenPolicy) -> Held {
        Held {
            codes: Array::new(comptime!(held_rows(policy))),
            scales: Array::new(comptime!(held_rows(policy).div_ceil(2))),
            tensors: Array::new(comptime!(held_rows(policy))),
        }
    }

    /// The rows of this unit in a tile of `source`, whose factor is `own`.
    fn load(&mut self, source: &PackedRows, at: &Position, own: f32, #[comptime] plan: SourcePlan) {
        if comptime!(plan.grouping == Grouping::One) {
            if is_whole(at) {
                self.load_rows(source, at, own, plan, false);
            } else {
                self.load_rows(source, at, own, plan, true);
            }
        } else {
            self.load_rows(source, at, own, plan, true);
        }
    }

    /// The same; what is not in the source is zero, if that is `checked`.
    fn load_rows(
        &mut self,
        source: &PackedRows,
        at: &Position,
        own: f32,
        #[comptime] plan: SourcePlan,
        #[comptime] checked: bool,
    ) {
        let unit = UNIT_POS_PLANE as usize;
        let eight = unit / 8usize;
        let column = at.line0 + eight * 8usize;
        let first = at.start + unit % 8usize * 16usize;
        let mut mask = 0xFFFF_FFFFu32.runtime();
        if comptime!(checked) {
            // What pads the last block is no part of the matrix, and not zero where that copy was
            // transformed.
            let lines = min(at.lines - min(column, at.lines), 8usize);
            if lines < 8usize {
                mask = (1u32 << (u32::cast_from(lines) * 4u32)) - 1u32;
            }
        }
        #[unroll]
        for k in 0..16usize {
            let row = first + k;
            let mut inside = true.runtime();
            if comptime!(checked) {
                inside = row < at.end && column < at.lines;
            }
            let block = source.load(row, row + at.padding, column / 16usize, own, inside, plan);
            let low = block.words.extract(0usize);
            let high = block.words.extract(1usize);
            self.codes[k] = select(eight % 2usize == 1usize, high, low) & mask;
            // Four bits of mantissa: the upper half of the `f32` is all of it.
            let scale = u32::reinterpret(block.factors.scale);
            if comptime!(k % 2 == 0) {
                self.scales[comptime!(k / 2)] = scale >> 16u32;
            } else {
                self.scales[comptime!(k / 2)] |= scale;
            }
            self.tensors[k] = block.factors.tensor;
        }
    }

    /// The 32 values of two lines from line `line` of the tile on, line after line.
    fn values(&self, line: usize) -> Array<f32> {
        let mut values = Array::<f32>::new(32usize);
        let shift = u32::cast_from(line % 8usize) * 4u32;
        #[unroll]
        for k in 0..16usize {
            let factors = BlockFactors {
                scale: unpack(
                    self.scales[comptime!(k / 2)],
                    comptime!(k as u32 % 2),
                    FloatKind::Bf16,
                ),
                tensor: self.tensors[k],
            };
            let codes = self.codes[k] >> shift;
            #[unroll]
            for j in 0..OWN {
                values[comptime!(j * 16 + k)] = factors.decode(codes >> comptime!(4 * j as u32));
            }
        }
        values
    }
}

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// Loads what a unit has for all turns.
    fn hold(
        &self,
        held: &mut Held,
        at: &Position,
        reading: Reading,
        #[comptime] policy: EdenPolicy,
    ) {
        #[comptime]
        match self {
            EdenStored::Matrix(_) => {}
            EdenStored::Packed(rows) => {
                if comptime!(policy.held_turns() > 1) {
                    let own = rows.factor_of(at.part, reading.factor, policy.source);
                    held.load(rows, at, own, policy.source);
                }
            }
        }
    }

    /// The 32 values of a part, line after line; zeros outside of the source.
    fn load_part(
        &self,
        held: &Held,
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
                let load = comptime!(MatrixLoad {
                    kind,
                    words: policy.words,
                    across: policy.across,
                });
                matrix_part::<F, N>(x, part, at, reading.cols, load)
            }
            EdenStored::Packed(rows) => {
                if comptime!(policy.across) {
                    held.values(part.line)
                } else {
                    let own = rows.factor_of(at.part, reading.factor, plan);
                    packed_along(rows, part, at, own, plan)
                }
            }
        }
    }
}

/// How elements of a matrix are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatrixLoad {
    kind: FloatKind,
    /// Whether in words of two.
    words: bool,
    /// Whether parts lie across the rows.
    across: bool,
}

impl MatrixLoad {
    /// Elements of one that is stored.
    const fn per_item(self) -> usize {
        if self.words { 2 } else { 1 }
    }
}

/// Element `i` of a vector.
#[cube]
fn element<F: Numeric, N: Size>(
    vector: Vector<F, N>,
    #[comptime] i: usize,
    #[comptime] load: MatrixLoad,
) -> f32 {
    if comptime!(load.words) {
        let word = u32::cast_from(vector.extract(comptime!(i / 2)));
        unpack(word, comptime!(i as u32 % 2), load.kind)
    } else {
        load_element::<F>(vector.extract(i), load.kind)
    }
}

/// Whether all of a tile is in the source.
#[cube]
fn is_whole(at: &Position) -> bool {
    at.start + 128usize <= at.end && at.line0 + LINES <= at.lines
}

/// The 32 values of a part of a matrix. Where all of the tile is in the matrix, one test serves all
/// loads: each of its own costs more than a load of two elements.
#[cube]
fn matrix_part<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    cols: usize,
    #[comptime] load: MatrixLoad,
) -> Array<f32> {
    let mut values = Array::<f32>::new(32usize);
    if comptime!(load.across || load.words) {
        if is_whole(at) {
            fill::<F, N>(&mut values, x, part, at, cols, load, false);
        } else {
            fill::<F, N>(&mut values, x, part, at, cols, load, true);
        }
    } else {
        fill::<F, N>(&mut values, x, part, at, cols, load, true);
    }
    values
}

/// Loads a part of a matrix; outside of it are zeros, if that is `checked`.
#[cube]
fn fill<F: Numeric, N: Size>(
    values: &mut Array<f32>,
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    cols: usize,
    #[comptime] load: MatrixLoad,
    #[comptime] checked: bool,
) {
    let items = N::value();
    let width = comptime!(items * load.per_item());
    let vectors = cols / width;
    let across = comptime!(load.across);
    // Along lines these are the rows, across them the columns.
    let line = at.line0 + part.line;
    let start = at.start + part.segment * 16usize;
    let (outer, inner) = comptime!(if across { (16, OWN) } else { (OWN, 16) });
    #[unroll]
    for o in 0..outer {
        #[unroll]
        for v in 0..comptime!(inner / width) {
            let mut row = line + comptime!(o * line_step(false));
            let mut col = start + comptime!(v * width);
            let mut inside = row < at.lines && col < at.end;
            if comptime!(across) {
                row = start + o;
                col = line + comptime!(v * width);
                inside = row < at.end && col < at.lines;
            }
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if comptime!(checked) {
                if inside {
                    vector = x[row * vectors + col / width];
                }
            } else {
                vector = x[row * vectors + col / width];
            }
            #[unroll]
            for i in 0..width {
                let target = comptime!(if across {
                    (v * width + i) * 16 + o
                } else {
                    o * 16 + v * width + i
                });
                values[target] = element::<F, N>(vector, i, load);
            }
        }
    }
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
    let mut held = Held::new(policy);
    source.hold(&mut held, at, reading, policy);
    for turn in 0..TURNS {
        let part = part_of(turn, policy);
        let values = source.load_part(&held, part, at, reading, policy, kind);
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
    let mut held = Held::new(policy);
    source.hold(&mut held, at, reading, policy);
    for turn in 0..TURNS {
        let part = part_of(turn, policy);
        let values = source.load_part(&held, part, at, reading, policy, kind);
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
