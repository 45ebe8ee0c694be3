//! A tile of a plane, in registers. Eight neighbouring units share two lines at a time and
//! transform them by the exchanges of [`plane_exchange`](super::plane_exchange).
//!
//! Across a packed source, a unit's word of codes covers eight lines. The unit loads the words of
//! its 16 rows once for all turns, and takes two of their lines in each turn.

use cubecl::prelude::*;

use super::{
    super::{
        packed_source::{PackedRows, SourcePlan},
        tile::Grouping,
    },
    arguments::{EdenOut, EdenStored, EdenStoredExpand},
    packed::mask_block,
    plane_exchange::{Exchange, Segments},
    plane_result::PlaneBlocks,
    position::{EdenPolicy, Position, TURNS, slot_of_line},
};
use crate::{
    HadamardSize,
    cube::{
        block::pairs_amax,
        codec::{BlockFactors, decode_e4m3, load as load_element},
        eden::{EdenScale, LINES, quantize_pairs, round_pairs, segment_signs},
        hadamard::{Signs, round_normalized},
        ptx,
        words::unpack,
    },
    tensor::FloatKind,
};

/// Lines per unit at a time.
pub(super) const OWN: usize = 2;
/// Lines per plane at a time.
const LINES_AT_A_TIME: usize = 8;

/// Parameters with which a plane reads all its tiles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Reading {
    /// Factor of a packed source with one amax.
    factor: f32,
    /// Columns of a matrix.
    cols: usize,
    /// Signs of this unit's segment, arranged for its loads.
    signs: SegmentSigns,
    /// Role of the unit in the transform.
    exchange: Exchange,
}

#[cube]
impl Reading {
    pub fn new(factor: f32, cols: usize, signs: &Signs, #[comptime] policy: EdenPolicy) -> Reading {
        let own = segment_signs(signs, UNIT_POS_PLANE as usize % 8usize) & 0xFFFFu32;
        Reading {
            factor,
            cols,
            signs: SegmentSigns::new(own, policy),
            exchange: Exchange::new(),
        }
    }
}

/// Signs of 16 positions, arranged for the loaded data:
///
/// - Words of two elements of one line: bit `j` of either half is the sign of that element of word
///   `j`.
/// - Words of one element of two lines: both halves have all signs.
/// - Codes of a block: the sign bits of its two words.
/// - Otherwise: the signs, in the lower half.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SegmentSigns {
    word: u32,
    /// Sign bits of the second word of codes.
    next: u32,
}

#[cube]
impl SegmentSigns {
    /// Arranges the signs in the lower half of `signs`.
    fn new(signs: u32, #[comptime] policy: EdenPolicy) -> SegmentSigns {
        let mut word = signs;
        let mut next = 0u32;
        if comptime!(policy.packed && !policy.across) {
            word = 0u32;
            #[unroll]
            for i in 0..8u32 {
                word |= ((signs >> i) & 1u32) << comptime!(4 * i + 3);
                next |= ((signs >> comptime!(8 + i)) & 1u32) << comptime!(4 * i + 3);
            }
        } else if comptime!(policy.words && !policy.across) {
            word = 0u32;
            #[unroll]
            for i in 0..8u32 {
                word |= ((signs >> comptime!(2 * i)) & 1u32) << i;
                word |= ((signs >> comptime!(2 * i + 1)) & 1u32) << comptime!(16 + i);
            }
        } else if comptime!(policy.words) {
            word |= signs << 16u32;
        }
        SegmentSigns { word, next }
    }

    /// Returns word `i` of two elements, with their signs.
    fn of_word(&self, word: u32, #[comptime] i: usize) -> u32 {
        word ^ ((self.word << comptime!(15 - i as u32)) & 0x8000_8000u32)
    }

    /// Returns element `i`, with its sign.
    fn of_element(&self, value: f32, #[comptime] i: usize) -> f32 {
        let sign = (self.word << comptime!(31 - i as u32)) & 0x8000_0000u32;
        f32::reinterpret(u32::reinterpret(value) ^ sign)
    }

    /// Returns the codes of row `k` of a segment across rows, with its sign.
    fn of_codes_across(&self, codes: u32, #[comptime] k: usize) -> u32 {
        codes ^ (((self.word >> comptime!(k as u32)) & 1u32) * 0x8888_8888u32)
    }
}

/// Part of a tile that a unit has at a time.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Part {
    /// Index of its segment in both lines.
    segment: usize,
    /// Line that the unit keeps.
    kept: usize,
    /// Line that the unit sends.
    sent: usize,
}

/// Returns this unit's part in turn `turn`. Its two lines are neighbours if they are neighbours in
/// the source, and otherwise four apart, so that a plane reads neighbouring lines together.
#[cube]
fn part_of(turn: usize, reading: Reading, #[comptime] policy: EdenPolicy) -> Part {
    let unit = UNIT_POS_PLANE as usize;
    let own = unit / 8usize;
    let first = if comptime!(policy.held_turns() > 1) {
        own * comptime!(OWN * TURNS) + turn * OWN
    } else if comptime!(policy.across) {
        turn * LINES_AT_A_TIME + own * OWN
    } else {
        turn * LINES_AT_A_TIME + own
    };
    let step = comptime!(if policy.across {
        1
    } else {
        LINES_AT_A_TIME / OWN
    });
    let kept = reading.exchange.line();
    Part {
        segment: unit % 8usize,
        kept: first + kept * step,
        sent: first + (1usize - kept) * step,
    }
}

/// Returns the index of the first of a part's lines, if they are neighbours.
#[cube]
fn first_line(part: Part) -> usize {
    min(part.kept, part.sent)
}

/// A unit's data of a packed source across its blocks, for all turns: for each of 16 rows the codes
/// of eight lines, with their signs and factors.
#[derive(CubeType)]
pub(super) struct HeldLines {
    codes: Array<u32>,
    /// Block scales, as pairs of bf16.
    scales: Array<u32>,
    /// Tensor factors: of each row, or of all.
    tensors: Array<f32>,
}

/// Returns the rows that a unit holds: none, unless it holds them for all turns.
fn held_rows(policy: EdenPolicy) -> usize {
    if policy.held_turns() > 1 { 16 } else { 1 }
}

/// Returns true if one factor applies to all rows. If that factor is infinite, positions outside
/// the source become NaN instead of zero, like nearly all of such a tensor.
fn has_one_factor(plan: SourcePlan) -> bool {
    plan.grouping == Grouping::One && !plan.per_row
}

#[cube]
impl HeldLines {
    /// Loads this unit's data of a tile of `source` for all turns.
    pub fn new<F: Numeric, N: Size>(
        source: &EdenStored<F, N>,
        at: &Position,
        reading: Reading,
        #[comptime] policy: EdenPolicy,
    ) -> HeldLines {
        let mut held = HeldLines {
            codes: Array::new(comptime!(held_rows(policy))),
            scales: Array::new(comptime!(held_rows(policy).div_ceil(2))),
            tensors: Array::new(comptime!(match has_one_factor(policy.source) {
                true => 1,
                false => held_rows(policy),
            })),
        };
        source.hold(&mut held, at, reading, policy);
        held
    }

    /// Returns the lines of turn `turn`, transformed without the final factors. All units of the
    /// plane must call it.
    pub fn transformed<F: Numeric, N: Size>(
        &self,
        source: &EdenStored<F, N>,
        turn: usize,
        at: &Position,
        reading: Reading,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) -> Taken {
        let part = part_of(turn, reading, policy);
        let mut segments = source.load_part(self, part, at, reading, policy, kind);
        reading.exchange.transform(&mut segments);
        Taken {
            segments,
            line: part.kept,
            exchange: reading.exchange,
        }
    }

    /// Loads this unit's rows in a tile of `source`, whose factor is `own`.
    fn load(
        &mut self,
        source: &PackedRows,
        at: &Position,
        own: f32,
        signs: SegmentSigns,
        #[comptime] plan: SourcePlan,
    ) {
        if comptime!(plan.grouping == Grouping::One) {
            if is_whole(at) {
                self.load_rows(source, at, own, signs, plan, false);
            } else {
                self.load_rows(source, at, own, signs, plan, true);
            }
        } else {
            self.load_rows(source, at, own, signs, plan, true);
        }
    }

    /// Loads this unit's rows; if `checked`, elements outside the source are zero.
    fn load_rows(
        &mut self,
        source: &PackedRows,
        at: &Position,
        own: f32,
        signs: SegmentSigns,
        #[comptime] plan: SourcePlan,
        #[comptime] checked: bool,
    ) {
        let unit = UNIT_POS_PLANE as usize;
        let eight = unit / 8usize;
        let column = at.line0 + eight * 8usize;
        let first = at.start + unit % 8usize * 16usize;
        let mut mask = 0xFFFF_FFFFu32.runtime();
        if comptime!(checked) {
            // The padding of the last block is not part of the matrix, and is nonzero if that copy
            // was transformed.
            let lines = min(at.lines - min(column, at.lines), 8usize);
            if lines < 8usize {
                mask = (1u32 << (u32::cast_from(lines) * 4u32)) - 1u32;
            }
        }
        #[unroll]
        for k in 0..16usize {
            if comptime!(k == 8) {
                // All loads at once would take too many registers.
                sync_plane();
            }
            let row = first + k;
            let mut inside = true.runtime();
            if comptime!(checked) {
                inside = row < at.end && column < at.lines;
            }
            let block = source.load(row, row + at.padding, column / 16usize, own, inside, plan);
            let low = block.words.extract(0usize);
            let high = block.words.extract(1usize);
            let codes = select(eight % 2usize == 1usize, high, low) & mask;
            self.codes[k] = signs.of_codes_across(codes, k);
            // The scale has four bits of mantissa, so the upper half of the `f32` is exact.
            let scale = u32::reinterpret(block.factors.scale);
            if comptime!(k % 2 == 0) {
                self.scales[comptime!(k / 2)] = scale >> 16u32;
            } else {
                self.scales[comptime!(k / 2)] |= scale;
            }
            if comptime!(!has_one_factor(plan)) {
                self.tensors[k] = block.factors.tensor;
            }
        }
        if comptime!(has_one_factor(plan)) {
            self.tensors[0] = BlockFactors::new(0u32, own).tensor;
        }
    }

    /// Returns the values of a part's lines.
    fn values(&self, part: Part, #[comptime] plan: SourcePlan) -> Segments {
        let mut segments = Segments::new();
        let kept = u32::cast_from(part.kept % 8usize) * 4u32;
        let sent = u32::cast_from(part.sent % 8usize) * 4u32;
        #[unroll]
        for k in 0..16usize {
            let factors = BlockFactors {
                scale: unpack(
                    self.scales[comptime!(k / 2)],
                    comptime!(k as u32 % 2),
                    FloatKind::Bf16,
                ),
                tensor: self.tensors[comptime!(if has_one_factor(plan) { 0 } else { k })],
            };
            segments.kept[k] = factors.decode_term(self.codes[k] >> kept);
            segments.sent[k] = factors.decode_term(self.codes[k] >> sent);
        }
        segments
    }
}

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// Loads a unit's data for all turns.
    fn hold(
        &self,
        held: &mut HeldLines,
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
                    held.load(rows, at, own, reading.signs, policy.source);
                }
            }
        }
    }

    /// Returns the values of a part, with the signs of the transform; zeros outside the source.
    fn load_part(
        &self,
        held: &HeldLines,
        part: Part,
        at: &Position,
        reading: Reading,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) -> Segments {
        #[comptime]
        match self {
            EdenStored::Matrix(x) => matrix_part::<F, N>(x, part, at, reading, policy, kind),
            EdenStored::Packed(rows) => {
                if comptime!(policy.across) {
                    held.values(part, policy.source)
                } else {
                    packed_along(rows, part, at, reading, policy.source)
                }
            }
        }
    }
}

/// Returns true if the whole tile is within the source.
#[cube]
fn is_whole(at: &Position) -> bool {
    at.start + 128usize <= at.end && at.line0 + LINES <= at.lines
}

/// Returns the values of a part of a matrix. If the whole tile is within the matrix, one test
/// covers all loads: a separate test costs more than a load of two elements.
#[cube]
fn matrix_part<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
) -> Segments {
    let mut segments = Segments::new();
    if comptime!(policy.across || policy.words) {
        if is_whole(at) {
            fill::<F, N>(&mut segments, x, part, at, reading, policy, kind, false);
        } else {
            fill::<F, N>(&mut segments, x, part, at, reading, policy, kind, true);
        }
    } else {
        fill::<F, N>(&mut segments, x, part, at, reading, policy, kind, true);
    }
    segments
}

/// Loads a part of a matrix; if `checked`, elements outside are zeros.
#[cube]
fn fill<F: Numeric, N: Size>(
    segments: &mut Segments,
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[comptime] checked: bool,
) {
    if comptime!(policy.across) {
        fill_across::<F, N>(segments, x, part, at, reading, policy, kind, checked);
    } else {
        let load = comptime!(LineLoad {
            kind,
            words: policy.words,
            checked,
        });
        let (kept, sent) = (part.kept, part.sent);
        let segment = part.segment;
        fill_line::<F, N>(&mut segments.kept, x, kept, segment, at, reading, load);
        fill_line::<F, N>(&mut segments.sent, x, sent, segment, at, reading, load);
    }
}

/// Options for loading a line of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LineLoad {
    kind: FloatKind,
    /// True to load words of two elements.
    words: bool,
    /// True to zero elements outside the matrix.
    checked: bool,
}

/// Loads a segment of line `line` of a tile along the rows of a matrix.
#[cube]
fn fill_line<F: Numeric, N: Size>(
    values: &mut Array<f32>,
    x: &[Vector<F, N>],
    line: usize,
    segment: usize,
    at: &Position,
    reading: Reading,
    #[comptime] load: LineLoad,
) {
    let items = N::value();
    let width = comptime!(if load.words { 2 * items } else { items });
    let vectors = reading.cols / width;
    let row = at.line0 + line;
    let start = at.start + segment * 16usize;
    #[unroll]
    for v in 0..comptime!(16 / width) {
        let col = start + comptime!(v * width);
        let mut vector = Vector::<F, N>::new(F::from_int(0));
        if comptime!(load.checked) {
            if row < at.lines && col < at.end {
                vector = x[row * vectors + col / width];
            }
        } else {
            vector = x[row * vectors + col / width];
        }
        #[unroll]
        for i in 0..items {
            let item = comptime!(v * items + i);
            if comptime!(load.words) {
                let word = u32::cast_from(vector.extract(i));
                let word = reading.signs.of_word(word, item);
                values[comptime!(2 * item)] = unpack(word, 0u32, load.kind);
                values[comptime!(2 * item + 1)] = unpack(word, 1u32, load.kind);
            } else {
                let value = load_element::<F>(vector.extract(i), load.kind);
                values[item] = reading.signs.of_element(value, item);
            }
        }
    }
}

/// Loads a part of two neighbouring columns of a matrix; if `checked`, elements outside are zeros.
#[cube]
fn fill_across<F: Numeric, N: Size>(
    segments: &mut Segments,
    x: &[Vector<F, N>],
    part: Part,
    at: &Position,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[comptime] checked: bool,
) {
    let items = N::value();
    let width = comptime!(if policy.words { 2 * items } else { items });
    let vectors = reading.cols / width;
    let first = at.line0 + first_line(part);
    let keeps_second = part.kept > part.sent;
    #[unroll]
    for k in 0..16usize {
        let row = at.start + part.segment * 16usize + k;
        // Two values, or two words of which the first has both.
        let mut pair = Array::<f32>::new(2usize);
        #[unroll]
        for v in 0..comptime!(OWN / width) {
            let col = first + comptime!(v * width);
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if comptime!(checked) {
                if row < at.end && col < at.lines {
                    vector = x[row * vectors + col / width];
                }
            } else {
                vector = x[row * vectors + col / width];
            }
            if comptime!(policy.words) {
                let word = reading
                    .signs
                    .of_word(u32::cast_from(vector.extract(0usize)), k);
                segments.kept[k] = half_of(word, keeps_second, kind);
                segments.sent[k] = half_of(word, !keeps_second, kind);
            } else {
                #[unroll]
                for i in 0..items {
                    let value = load_element::<F>(vector.extract(i), kind);
                    pair[comptime!(v * items + i)] = reading.signs.of_element(value, k);
                }
            }
        }
        if comptime!(!policy.words) {
            segments.kept[k] = select(keeps_second, pair[1], pair[0]);
            segments.sent[k] = select(keeps_second, pair[0], pair[1]);
        }
    }
}

/// Returns the `second` element of a word, or the first.
#[cube]
fn half_of(word: u32, second: bool, #[comptime] kind: FloatKind) -> f32 {
    if comptime!(kind == FloatKind::Bf16) {
        let selector = select(second, 0x3244u32, 0x1044u32);
        f32::reinterpret(ptx::prmt(word, 0u32, selector))
    } else {
        let selector = select(second, 0x4432u32, 0x4410u32);
        unpack(ptx::prmt(word, 0u32, selector), 0u32, kind)
    }
}

#[cube]
fn packed_along(
    source: &PackedRows,
    part: Part,
    at: &Position,
    reading: Reading,
    #[comptime] plan: SourcePlan,
) -> Segments {
    let own = source.factor_of(at.part, reading.factor, plan);
    let kept = packed_line(source, own, part.kept, part.segment, at, reading, plan);
    let sent = packed_line(source, own, part.sent, part.segment, at, reading, plan);
    Segments { kept, sent }
}

/// Loads a segment of line `line` of a tile along the rows of a packed source, whose factor is
/// `own`.
#[cube]
fn packed_line(
    source: &PackedRows,
    own: f32,
    line: usize,
    segment: usize,
    at: &Position,
    reading: Reading,
    #[comptime] plan: SourcePlan,
) -> Array<f32> {
    let first = at.start + segment * 16usize;
    let row = at.line0 + line;
    let inside = row < at.lines && first < at.end;
    let packed = source.load(row, row + at.padding, first / 16usize, own, inside, plan);
    let low = packed.words.extract(0usize) ^ reading.signs.word;
    let high = packed.words.extract(1usize) ^ reading.signs.next;
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..8usize {
        block[i] = packed.factors.decode_term(low >> comptime!(4 * i as u32));
        block[comptime!(8 + i)] = packed.factors.decode_term(high >> comptime!(4 * i as u32));
    }
    mask_block(&mut block, first, at.end);
    block
}

/// Two segments of a line, transformed without the final factors.
#[derive(CubeType)]
pub(super) struct Taken {
    segments: Segments,
    /// Index of the line in the tile.
    line: usize,
    exchange: Exchange,
}

/// Returns the largest magnitude, as bits, of this unit's share of the lines that a plane takes
/// from turn `first` on, after the transform. Elements outside the matrix are zero.
#[cube]
pub(super) fn plane_amax<F: Numeric, N: Size>(
    source: &EdenStored<F, N>,
    first: usize,
    at: &Position,
    reading: Reading,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
) -> u32 {
    let mut most = 0u32;
    let held = HeldLines::new::<F, N>(source, at, reading, policy);
    for turn in 0..comptime!(policy.turns()) {
        let part = part_of(first + turn, reading, policy);
        let mut segments = source.load_part(&held, part, at, reading, policy, kind);
        let largest = reading.exchange.largest(&mut segments);
        most = max(most, u32::reinterpret(largest));
    }
    // Multiplication and rounding are monotonic in the magnitude.
    u32::reinterpret(round_normalized(f32::reinterpret(most), HadamardSize::H128))
}

/// Quantizes the two blocks of a line.
#[cube]
pub(super) fn take_segments(
    taken: &Taken,
    blocks: &mut PlaneBlocks,
    out: &mut EdenOut,
    at: &Position,
    global: &EdenScale,
    #[comptime] policy: EdenPolicy,
) {
    let exchange = taken.exchange;
    let slot = slot_of_line(taken.line, policy);
    let row = at.line0 + taken.line;
    #[unroll]
    for upper in 0..2usize {
        let segment = exchange.segment() + comptime!(upper * 4);
        let pairs = if comptime!(upper == 0) {
            scaled_pairs(&taken.segments.kept, exchange.low)
        } else {
            scaled_pairs(&taken.segments.sent, exchange.high)
        };
        let byte = global.block_scale(pairs_amax(&pairs, 0usize), policy.conversion);
        let multiplier = global.encode_multiplier(byte, policy.conversion);
        let scale = decode_e4m3(byte);
        if comptime!(policy.unscaled) {
            let found = round_pairs(&pairs, multiplier);
            blocks.take_sums(&found.sums, scale, slot, segment);
            blocks.take_values(&found.pairs, slot, segment);
        } else {
            let found = quantize_pairs(&pairs, multiplier, policy.conversion);
            blocks.take_sums(&found.sums, scale, slot, segment);
            if row < at.lines {
                let group = row * at.pitch + at.first;
                out.values
                    .store_codes(found.codes, group * 8usize + segment);
            }
        }
    }
}

/// Returns a segment times `factor`, as bf16 pairs. Zero sums have no sign.
#[cube]
fn scaled_pairs(values: &Array<f32>, factor: f32) -> Array<u32> {
    let mut pairs = Array::<u32>::new(8usize);
    #[unroll]
    for pair in 0..8usize {
        let low = ptx::fma_rn(values[comptime!(2 * pair)], factor, 0.0f32);
        let high = ptx::fma_rn(values[comptime!(2 * pair + 1)], factor, 0.0f32);
        pairs[pair] = ptx::cvt_rn_bf16x2(low, high);
    }
    pairs
}
