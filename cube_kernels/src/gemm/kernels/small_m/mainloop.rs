//! Mainloop of a warp of the small-M kernels: codes of `b` in registers, decoded, times fragments
//! of `a`.

use cubecl::prelude::*;

use super::shape::{SmallMLeft, SmallMShape};
use crate::cube::{
    codec::{decode_e2m1x8_pairs, decode_e4m3x2, decode_e4m3x2_sm80, interleave_pairs},
    ptx::{
        cvta_to_global, ld_global_no_allocate_v2, ld_global_no_allocate_v4, ld_global_u8,
        ld_global_u16, mma_m16n8k16_bf16,
    },
};

/// A packed matrix in device memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Source {
    /// Address of the codes.
    codes: u64,
    /// Address of the scales.
    scales: u64,
    /// Blocks per row.
    blocks: u32,
}

#[cube]
impl Source {
    /// Creates a source whose rows have `blocks` blocks.
    pub fn new(codes: &[u32], scales: &[u8], blocks: u32) -> Source {
        Source {
            codes: cvta_to_global::<u32>(codes.as_ptr()),
            scales: cvta_to_global::<u8>(scales.as_ptr()),
            blocks,
        }
    }

    /// Loads vector number `index` of the codes of a row whose first block is number `first` of the
    /// matrix. If rows end in half a vector, the last block is loaded in place of the missing one.
    fn load_codes(
        &self,
        first: usize,
        index: u32,
        #[comptime] halves: bool,
    ) -> Vector<u32, Const<4>> {
        let block = first + 2usize * index as usize;
        let address = self.codes + u64::cast_from(block) * 8u64;
        if comptime!(halves) {
            let second = first + min(2u32 * index + 1u32, self.blocks - 1u32) as usize;
            let low = ld_global_no_allocate_v2(address);
            let high = ld_global_no_allocate_v2(self.codes + u64::cast_from(second) * 8u64);
            let mut words = Vector::<u32, Const<4>>::new(0u32);
            words.insert(0usize, low.extract(0usize));
            words.insert(1usize, low.extract(1usize));
            words.insert(2usize, high.extract(0usize));
            words.insert(3usize, high.extract(1usize));
            words
        } else {
            ld_global_no_allocate_v4(address)
        }
    }

    /// Loads the two scales of the vector of [`load_codes`](Self::load_codes).
    fn load_scales(&self, first: usize, index: u32, #[comptime] halves: bool) -> u32 {
        let block = first + 2usize * index as usize;
        let address = self.scales + u64::cast_from(block);
        if comptime!(halves) {
            let second = first + min(2u32 * index + 1u32, self.blocks - 1u32) as usize;
            let high = ld_global_u8(self.scales + u64::cast_from(second));
            ld_global_u8(address) | (high << 8u32)
        } else {
            ld_global_u16(address)
        }
    }
}

/// Rows of one operand that a lane has, with the chunks of them in flight.
#[derive(CubeType)]
pub struct Rows {
    /// Index of the first block of each row.
    first: Array<usize>,
    /// Vectors of codes, row after row for each set of chunks.
    words: Array<Vector<u32, Const<4>>>,
    /// Scales of the vectors, two per vector.
    scales: Array<u32>,
}

#[cube]
impl Rows {
    /// Returns `count` rows, eight apart: half of them from `row0` on, the other half from `row1`
    /// on. Rows after `last` read row `last`, and are not written.
    fn new(
        row0: u32,
        row1: u32,
        last: u32,
        blocks: u32,
        #[comptime] count: usize,
        #[comptime] ahead: usize,
    ) -> Rows {
        let group = (UNIT_POS % 32u32) / 4u32;
        let half = comptime!(count.div_ceil(2));
        let mut first = Array::<usize>::new(count);
        #[unroll]
        for i in 0..count {
            let from = if comptime!(i < half) { row0 } else { row1 };
            let row = from + comptime!((i % half) as u32 * 8) + group;
            first[i] = (min(row, last) * blocks) as usize;
        }
        Rows {
            first,
            words: Array::<Vector<u32, Const<4>>>::new(comptime!(ahead * count)),
            scales: Array::<u32>::new(comptime!(ahead * count)),
        }
    }

    /// Loads vector `at` of row `row` for slot `to`.
    fn load(
        &mut self,
        source: Source,
        at: u32,
        #[comptime] row: usize,
        #[comptime] to: usize,
        #[comptime] halves: bool,
    ) {
        self.words[to] = source.load_codes(self.first[row], at, halves);
        self.scales[to] = source.load_scales(self.first[row], at, halves);
    }
}

/// Decodes two scales for [`decode_e2m1x8_pairs()`].
#[cube]
fn decode_scales(bytes: u32, #[comptime] shape: SmallMShape) -> Vector<u32, Const<2>> {
    if comptime!(shape.converts) {
        decode_e4m3x2(u16::cast_from(bytes))
    } else {
        decode_e4m3x2_sm80(u16::cast_from(bytes))
    }
}

/// A warp's share of `b`.
#[derive(CubeType)]
pub struct Weights {
    source: Source,
    /// Rows of the cube, with the first chunks of the warp in flight.
    rows: Rows,
    /// Decoded elements of the only chunk, `[word, low or high row]`.
    decoded: Array<Vector<u32, Const<4>>>,
}

/// Starts loading the rows of `b` of a cube, beginning with those of the output's column `column`.
#[cube]
pub fn start_weights(
    source: Source,
    column: u32,
    n: u32,
    #[comptime] shape: SmallMShape,
) -> Weights {
    let (sets, count) = comptime!((shape.ahead, 2 * shape.strips));
    // Second half of the rows: `up` with SwiGLU, else the rows after the first half.
    let second = column
        + if comptime!(shape.swiglu.is_some()) {
            n / 2u32
        } else {
            comptime!(8 * shape.strips as u32).runtime()
        };
    let mut rows = Rows::new(column, second, n - 1u32, source.blocks, count, sets);
    let warp = UNIT_POS / 32u32;
    let quarter = UNIT_POS % 4u32;
    let width = source.blocks.div_ceil(2u32);
    #[unroll]
    for set in 0..sets {
        let chunk = warp + comptime!((set * shape.warps) as u32);
        let at = min(chunk * 4u32 + quarter, width - 1u32);
        #[unroll]
        for i in 0..count {
            rows.load(
                source,
                at,
                i,
                comptime!(set * count + i),
                comptime!(shape.halves),
            );
        }
    }
    let decoded =
        Array::<Vector<u32, Const<4>>>::new(comptime!(if shape.early { 8usize } else { 1usize }));
    Weights {
        source,
        rows,
        decoded,
    }
}

#[cube]
impl Weights {
    /// Decodes the warp's chunk if it has only one. Warps without a chunk branch around it. They
    /// need not, but without a branch, compilers move the decoding after the wait for the previous
    /// kernel.
    pub fn decode(&mut self, #[comptime] shape: SmallMShape) {
        // The outer condition is comptime; the kernel only evaluates the inner one.
        #[allow(clippy::collapsible_if)]
        if comptime!(shape.early) {
            if UNIT_POS / 32u32 < self.source.blocks / 8u32 {
                #[unroll]
                for row in 0..2usize {
                    let scales = decode_scales(u32::reinterpret(self.rows.scales[row]), shape);
                    #[unroll]
                    for word in 0..4usize {
                        let codes = self.rows.words[row].extract(word);
                        let scale = scales.extract(comptime!(word / 2));
                        self.decoded[comptime!(2 * word + row)] = decode_e2m1x8_pairs(codes, scale);
                    }
                }
            }
        }
    }
}

/// Returns the sums of one warp: every `shape.warps`th chunk of 128 columns.
#[cube]
pub fn mainloop(
    a_source: Source,
    dense: &[Vector<u32, Const<4>>],
    m: u32,
    b: &mut Weights,
    #[comptime] shape: SmallMShape,
) -> Array<Vector<f32, Const<4>>> {
    let columns = comptime!(shape.columns);
    let warp = UNIT_POS / 32u32;
    let quarter = UNIT_POS % 4u32;
    // Blocks per row, and vectors of two blocks.
    let blocks = b.source.blocks;
    let width = blocks.div_ceil(2u32);
    let (zero, eight) = (0u32.runtime(), 8u32.runtime());
    let mut a_rows = Rows::new(
        zero,
        eight,
        m - 1u32,
        blocks,
        columns,
        comptime!(shape.ahead),
    );
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.strips * columns));
    #[unroll]
    for i in 0..comptime!(shape.strips * columns) {
        sums[i] = Vector::new(0.0f32);
    }
    if comptime!(shape.left == SmallMLeft::Packed) {
        #[unroll]
        for set in 0..comptime!(shape.ahead) {
            let chunk = warp + comptime!((set * shape.warps) as u32);
            let at = min(chunk * 4u32 + quarter, width - 1u32);
            #[unroll]
            for j in 0..columns {
                let to = comptime!(set * columns + j);
                a_rows.load(a_source, at, j, to, comptime!(shape.halves));
            }
        }
    }
    if comptime!(shape.early) {
        if warp < blocks / 8u32 {
            multiply_decoded(dense, &a_rows, &*b, &mut sums, shape);
        }
    } else {
        multiply_chunks(dense, a_source, &mut a_rows, b, &mut sums, shape);
    }
    sums
}

/// Multiplies the only chunk of the warp and adds it to the sums.
#[cube]
fn multiply_decoded(
    dense: &[Vector<u32, Const<4>>],
    a_rows: &Rows,
    b: &Weights,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] shape: SmallMShape,
) {
    let at = UNIT_POS / 32u32 * 4u32 + UNIT_POS % 4u32;
    let (blocks, inside) = (b.source.blocks, true.runtime());
    #[unroll]
    for half in 0..2usize {
        let others = a_fragments(dense, a_rows, at, blocks, inside, 0usize, half, shape);
        #[unroll]
        for part in 0..2usize {
            let word = comptime!(2 * half + part);
            let upper = b.decoded[comptime!(2 * word)];
            let lower = b.decoded[comptime!(2 * word + 1)];
            sums[0usize] = multiply_word(upper, lower, others[part], sums[0usize]);
        }
    }
}

/// Multiplies the chunks of the warp and adds them to the sums, with the next ones in flight.
#[cube]
fn multiply_chunks(
    dense: &[Vector<u32, Const<4>>],
    a_source: Source,
    a_rows: &mut Rows,
    b: &mut Weights,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] shape: SmallMShape,
) {
    let (strips, columns) = comptime!((shape.strips, shape.columns));
    let is_packed = comptime!(shape.left == SmallMLeft::Packed);
    let halves = comptime!(shape.halves);
    let quarter = UNIT_POS % 4u32;
    let blocks = b.source.blocks;
    let width = blocks.div_ceil(2u32);
    let chunks = width.div_ceil(4u32);
    let mut first = UNIT_POS / 32u32;
    while first < chunks {
        #[unroll]
        for set in 0..comptime!(shape.ahead) {
            let chunk = first + comptime!((set * shape.warps) as u32);
            if chunk < chunks {
                let at = chunk * 4u32 + quarter;
                let next = chunk + comptime!((shape.ahead * shape.warps) as u32);
                let ahead = min(next * 4u32 + quarter, width - 1u32);
                #[unroll]
                for half in 0..2usize {
                    // Nothing is added after the end: both operands are zeroed, since one of them
                    // may be infinite.
                    let inside = at * 2u32 + comptime!(half as u32) < blocks;
                    let slot = comptime!(set * columns);
                    let others =
                        a_fragments(dense, &*a_rows, at, blocks, inside, slot, half, shape);
                    // The outer condition is comptime; the kernel only evaluates the inner one.
                    #[allow(clippy::collapsible_if)]
                    if comptime!(is_packed && half == 1 && !shape.late) {
                        if next < chunks {
                            #[unroll]
                            for j in 0..columns {
                                a_rows.load(a_source, ahead, j, comptime!(slot + j), halves);
                            }
                        }
                    }
                    #[unroll]
                    for i in 0..strips {
                        let low = comptime!(set * 2 * strips + 2 * i);
                        multiply_strip(&b.rows, &others, sums, inside, low, i, half, shape);
                        // The lane's values of these rows have been multiplied: the next ones are
                        // loaded while the other strips are multiplied.
                        #[allow(clippy::collapsible_if)]
                        if comptime!(half == 1) {
                            if next < chunks {
                                let high = comptime!(low + 1);
                                b.rows.load(b.source, ahead, comptime!(2 * i), low, halves);
                                b.rows
                                    .load(b.source, ahead, comptime!(2 * i + 1), high, halves);
                            }
                        }
                    }
                    #[allow(clippy::collapsible_if)]
                    if comptime!(is_packed && half == 1 && shape.late) {
                        if next < chunks {
                            #[unroll]
                            for j in 0..columns {
                                a_rows.load(a_source, ahead, j, comptime!(slot + j), halves);
                            }
                        }
                    }
                }
            }
        }
        first += comptime!((shape.ahead * shape.warps) as u32);
    }
}

/// Returns the index in shared memory of word `word` (eight elements in the order of
/// [`decode_e2m1x8_pairs()`]) of vector `at`, in a row of `blocks` blocks. Neighbouring lanes read
/// neighbouring vectors, so words with the same number are contiguous.
#[cube]
pub fn normed_place(at: u32, blocks: u32, word: u32) -> usize {
    (word * (blocks / 2u32) + at) as usize
}

/// Copies the elements of the one row of `a` that the warp's chunks need to `to`, arranged for the
/// instructions. A warp then waits for them once instead of once per chunk.
#[cube]
pub fn stage_row(
    from: &[Vector<u32, Const<4>>],
    to: &mut [Vector<u32, Const<4>>],
    #[comptime] shape: SmallMShape,
) {
    let blocks = comptime!(shape.left.staged() as u32 / 2);
    let (warp, lane) = (UNIT_POS / 32u32, UNIT_POS % 32u32);
    // Two chunks of 16 vectors at a time.
    let first = warp * 16u32 + (lane / 16u32) * comptime!(16 * shape.warps as u32) + lane % 16u32;
    #[unroll]
    for i in 0..comptime!(shape.left.staged().div_ceil(32 * shape.warps)) {
        let vector = first + comptime!((i * 32 * shape.warps) as u32);
        let place = normed_place(vector / 4u32, blocks, vector % 4u32);
        // The first condition is comptime.
        #[allow(clippy::if_same_then_else)]
        if comptime!((i + 1) * 32 * shape.warps <= shape.left.staged()) {
            to[place] = interleave_pairs(from[vector as usize]);
        } else if vector < 2u32 * blocks {
            to[place] = interleave_pairs(from[vector as usize]);
        }
    }
    sync_plane();
}

/// Returns the fragments of `a` of one block of 16, which is two words, for each group of eight
/// rows: block `half` of vector `at`, whose codes are in slots from `first` on.
#[cube]
fn a_fragments(
    dense: &[Vector<u32, Const<4>>],
    rows: &Rows,
    at: u32,
    blocks: u32,
    inside: bool,
    #[comptime] first: usize,
    #[comptime] half: usize,
    #[comptime] shape: SmallMShape,
) -> Array<Vector<u32, Const<4>>> {
    let mut fragments = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * shape.columns));
    #[unroll]
    for j in 0..comptime!(shape.columns) {
        let slot = comptime!(first + j);
        #[unroll]
        for part in 0..2usize {
            let word = comptime!(2 * half + part);
            let to = comptime!(2 * j + part);
            if comptime!(shape.left == SmallMLeft::Packed) {
                let scales = decode_scales(u32::reinterpret(rows.scales[slot]), shape);
                fragments[to] =
                    decode_e2m1x8_pairs(rows.words[slot].extract(word), scales.extract(half));
            } else if comptime!(shape.left == SmallMLeft::Normed || shape.left.staged() > 0) {
                let place = normed_place(at, blocks, comptime!(word as u32).runtime());
                fragments[to] = dense[rows.first[j] * 2usize + place];
            } else {
                // Two per block; those after the last block read the last block.
                let column = min(at, blocks.div_ceil(2u32) - 1u32);
                let mut vector = column * 4u32 + comptime!(word as u32);
                if comptime!(shape.halves) {
                    vector = min(vector, 2u32 * blocks - 1u32);
                }
                let vector = rows.first[j] * 2usize + vector as usize;
                fragments[to] = interleave_pairs(dense[vector]);
            }
            // The outer condition is comptime; the kernel only evaluates the inner one.
            #[allow(clippy::collapsible_if)]
            if comptime!(shape.tail) {
                if !inside {
                    fragments[to] = Vector::new(0u32);
                }
            }
        }
    }
    fragments
}

/// Multiplies one block of 16 and adds it to the sums of strip `strip` of `b`, whose rows are in
/// slots `low` and the next.
#[cube]
fn multiply_strip(
    rows: &Rows,
    others: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    inside: bool,
    #[comptime] low: usize,
    #[comptime] strip: usize,
    #[comptime] half: usize,
    #[comptime] shape: SmallMShape,
) {
    let high = comptime!(low + 1);
    let low_factor = decode_scales(u32::reinterpret(rows.scales[low]), shape);
    let high_factor = decode_scales(u32::reinterpret(rows.scales[high]), shape);
    #[unroll]
    for part in 0..2usize {
        let word = comptime!(2 * half + part);
        let mut low_word = rows.words[low].extract(word);
        let mut high_word = rows.words[high].extract(word);
        let mut low_scale = low_factor.extract(half);
        let mut high_scale = high_factor.extract(half);
        // The outer condition is comptime; the kernel only evaluates the inner one.
        #[allow(clippy::collapsible_if)]
        if comptime!(shape.tail) {
            if !inside {
                low_word = 0u32;
                high_word = 0u32;
                low_scale = 0u32;
                high_scale = 0u32;
            }
        }
        let upper = decode_e2m1x8_pairs(u32::reinterpret(low_word), u32::reinterpret(low_scale));
        let lower = decode_e2m1x8_pairs(u32::reinterpret(high_word), u32::reinterpret(high_scale));
        #[unroll]
        for j in 0..comptime!(shape.columns) {
            let at = comptime!(strip * shape.columns + j);
            let other = others[comptime!(2 * j + part)];
            sums[at] = multiply_word(upper, lower, other, sums[at]);
        }
    }
}

/// Returns `sum` plus the products of eight elements of each row.
#[cube]
fn multiply_word(
    upper: Vector<u32, Const<4>>,
    lower: Vector<u32, Const<4>>,
    other: Vector<u32, Const<4>>,
    sum: Vector<f32, Const<4>>,
) -> Vector<f32, Const<4>> {
    let sum = mma_m16n8k16_bf16(
        sum,
        upper.extract(0usize),
        lower.extract(0usize),
        upper.extract(1usize),
        lower.extract(1usize),
        other.extract(0usize),
        other.extract(1usize),
    );
    mma_m16n8k16_bf16(
        sum,
        upper.extract(2usize),
        lower.extract(2usize),
        upper.extract(3usize),
        lower.extract(3usize),
        other.extract(2usize),
        other.extract(3usize),
    )
}
