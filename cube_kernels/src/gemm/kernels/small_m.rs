//! The GEMM of small M, 1 to 16 rows of `a` (decoding), with a packed `b`: bound by reading the
//! codes and scales of `b` once. They are expanded in registers, and no bf16 copy of `b` is in
//! memory.
//!
//! `b` is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8 rows).
//! A lane takes 32 codes of a row from each 128: the order of the contraction inside an instruction
//! is free as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g` at `32 c`,
//! and the same columns of `a`. The warps of a cube share its rows and take turns along the
//! contraction; their sums are added in the order of the warps.

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::{decode_e2m1x8_pairs, decode_e4m3x2, decode_e4m3x2_sm80, interleave_pairs},
        overlap::{let_next_begin, wait_for_previous, written_before},
        ptx::{
            cvta_to_global, ld_global_no_allocate_v2, ld_global_no_allocate_v4, ld_global_u8,
            ld_global_u16, mma_m16n8k16_bf16,
        },
    },
    gemm::{
        arguments::{MixedMatrix, PackedMatrix, ProblemShape},
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
    },
    tensor::FloatKind,
};

/// Columns that a warp takes at a time.
pub(super) const CHUNK: usize = 128;
/// Most rows of `a`.
///
/// Measured (H100, N = K = 8192, microseconds, this kernel / tiles of the fused one, before the
/// last version of either): 1 row 19.7 / 33.2, 16 rows 22.6 / 38.0, 32 rows 33.7 / 30.8.
pub const MAX_ROWS: usize = 16;

/// How the rows of `a` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SmallMLeft {
    /// As codes, which every cube decodes for itself. Decoding them once, by a kernel before, was
    /// measured: the second launch and the wider reads cost more.
    Packed,
    /// As bf16.
    Bf16,
}

/// The shape of a cube's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMShape {
    /// Warps of a cube.
    pub warps: usize,
    /// Groups of 16 rows of `b`.
    pub strips: usize,
    /// Groups of 8 rows of `a`.
    pub columns: usize,
    /// Chunks of a warp that are on the way at a time.
    pub ahead: usize,
    /// The contraction is no multiple of `CHUNK`.
    pub tail: bool,
    /// It is an odd number of blocks, so that rows do not begin at multiples of 16 bytes and end in
    /// half a vector.
    pub halves: bool,
    /// How `a` is read.
    pub left: SmallMLeft,
    /// The device has an instruction that converts E4M3.
    pub converts: bool,
    /// The next rows of `a` are loaded behind the products of a chunk instead of ahead of them: see
    /// `loads_a_late`.
    pub late: bool,
    /// Whether the kernel can begin before the one in front of it has ended: `b` is on its way
    /// while it waits.
    pub overlaps: bool,
}

impl SmallMShape {
    /// Rows of `b`.
    pub(super) const fn rows(self) -> usize {
        16 * self.strips
    }

    /// Floats from one row of `a` to the next in the sums that warps exchange: four more than there
    /// are, so that the lanes of a warp write to different banks.
    const fn stride(self) -> usize {
        self.rows() + 4
    }

    /// Floats of the sums of one warp.
    const fn sums(self) -> usize {
        8 * self.columns * self.stride()
    }
}

/// A packed matrix in device memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Source {
    /// Address of its codes.
    codes: u64,
    /// Address of its scales.
    scales: u64,
    /// Blocks of a row.
    blocks: u32,
}

#[cube]
impl Source {
    /// Vector number `index` of the codes of a row, whose first block is number `first` of the
    /// matrix. Where rows end in half a vector, the last block stands for the one behind it.
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

    /// The two scales of [`load_codes`](Self::load_codes)' vector.
    fn load_scales(&self, first: usize, index: u32, #[comptime] halves: bool) -> u16 {
        let block = first + 2usize * index as usize;
        let address = self.scales + u64::cast_from(block);
        if comptime!(halves) {
            let second = first + min(2u32 * index + 1u32, self.blocks - 1u32) as usize;
            let high = ld_global_u8(self.scales + u64::cast_from(second));
            u16::cast_from(ld_global_u8(address) | (high << 8u32))
        } else {
            u16::cast_from(ld_global_u16(address))
        }
    }
}

/// The rows of one operand that a lane has, eight apart, and what is on the way of each chunk of
/// them.
#[derive(CubeType)]
struct Rows {
    /// Number of the first block of each row.
    first: Array<usize>,
    /// Vectors of codes, row after row for each set of chunks.
    words: Array<Vector<u32, Const<4>>>,
    /// Their scales, two each.
    scales: Array<u16>,
}

#[cube]
impl Rows {
    /// `count` rows from `row0` on. Rows behind `last` read it, and are not written.
    fn new(
        row0: u32,
        last: u32,
        blocks: u32,
        #[comptime] count: usize,
        #[comptime] ahead: usize,
    ) -> Rows {
        let group = (UNIT_POS % 32u32) / 4u32;
        let mut first = Array::<usize>::new(count);
        #[unroll]
        for i in 0..count {
            let row = row0 + comptime!(i as u32 * 8) + group;
            first[i] = (min(row, last) * blocks) as usize;
        }
        Rows {
            first,
            words: Array::<Vector<u32, Const<4>>>::new(comptime!(ahead * count)),
            scales: Array::<u16>::new(comptime!(ahead * count)),
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

/// Two scales as [`decode_e2m1x8_pairs()`] takes them.
#[cube]
fn decode_scales(bytes: u16, #[comptime] shape: SmallMShape) -> Vector<u32, Const<2>> {
    if comptime!(shape.converts) {
        decode_e4m3x2(bytes)
    } else {
        decode_e4m3x2_sm80(bytes)
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])` for the rows of `b` of
/// one cube. `a`, where it is bf16, is in units of eight elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn small_m_kernel(
    a: MixedMatrix<u32, Vector<u32, Const<4>>>,
    b: PackedMatrix<u32>,
    problem: ProblemShape,
    epilogue: Epilogue,
    out: &mut [u32],
    #[comptime] shape: SmallMShape,
) {
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.warps * shape.sums()), 16usize);
    let row0 = CUBE_POS as u32 * comptime!(shape.rows() as u32);
    let_next_begin(shape.overlaps);
    if comptime!(shape.left == SmallMLeft::Bf16) {
        written_before(&a.dense, shape.overlaps);
    }
    written_before(&epilogue.a_amax, shape.overlaps);
    written_before(&epilogue.c, shape.overlaps);
    // A weight's as well: it is here before the sums are.
    written_before(&epilogue.b_amax, shape.overlaps);
    let tile_factor = epilogue.b_tile_factor(0u32);
    let sums = mainloop(&a, &b, &problem, row0, shape);
    stage_sums(&sums, &mut exchange, shape);
    sync_cube();
    let rows = OutputRows {
        first: row0,
        tile_factor,
    };
    write_rows(&exchange, &problem, &rows, &epilogue, out, shape);
}

/// The sums of one warp: every `shape.warps`th chunk of 128 columns.
#[cube]
fn mainloop(
    a: &MixedMatrix<u32, Vector<u32, Const<4>>>,
    b: &PackedMatrix<u32>,
    problem: &ProblemShape,
    row0: u32,
    #[comptime] shape: SmallMShape,
) -> Array<Vector<f32, Const<4>>> {
    let strips = comptime!(shape.strips);
    let columns = comptime!(shape.columns);
    let is_packed = comptime!(shape.left == SmallMLeft::Packed);
    let halves = comptime!(shape.halves);
    let sets = comptime!(shape.ahead);
    let warp = UNIT_POS / 32u32;
    let quarter = UNIT_POS % 4u32;
    // Blocks in a row, and vectors of two of them.
    let blocks = problem.k / 16u32;
    let width = blocks.div_ceil(2u32);
    let chunks = width.div_ceil(4u32);
    let b_count = comptime!(2 * shape.strips);
    let mut b_rows = Rows::new(row0, problem.n - 1u32, blocks, b_count, sets);
    let mut a_rows = Rows::new(0u32.runtime(), problem.m - 1u32, blocks, columns, sets);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.strips * shape.columns));
    #[unroll]
    for i in 0..comptime!(strips * columns) {
        sums[i] = Vector::new(0.0f32);
    }
    let b_source = Source {
        codes: cvta_to_global::<u32>(b.codes.as_ptr()),
        scales: cvta_to_global::<u8>(b.scales.as_ptr()),
        blocks,
    };
    let a_source = Source {
        codes: cvta_to_global::<u32>(a.codes.as_ptr()),
        scales: cvta_to_global::<u8>(a.scales.as_ptr()),
        blocks,
    };
    #[unroll]
    for set in 0..sets {
        let chunk = warp + comptime!((set * shape.warps) as u32);
        let at = min(chunk * 4u32 + quarter, width - 1u32);
        #[unroll]
        for i in 0..comptime!(2 * strips) {
            b_rows.load(b_source, at, i, comptime!(set * 2 * strips + i), halves);
        }
    }
    // A weight is written long before; what else is read may be the output of the last kernel.
    wait_for_previous(shape.overlaps);
    if comptime!(is_packed) {
        #[unroll]
        for set in 0..sets {
            let chunk = warp + comptime!((set * shape.warps) as u32);
            let at = min(chunk * 4u32 + quarter, width - 1u32);
            #[unroll]
            for j in 0..columns {
                a_rows.load(a_source, at, j, comptime!(set * columns + j), halves);
            }
        }
    }
    let mut first = warp;
    while first < chunks {
        #[unroll]
        for set in 0..sets {
            let chunk = first + comptime!((set * shape.warps) as u32);
            if chunk < chunks {
                let at = chunk * 4u32 + quarter;
                let next = chunk + comptime!((shape.ahead * shape.warps) as u32);
                let ahead = min(next * 4u32 + quarter, width - 1u32);
                #[unroll]
                for half in 0..2usize {
                    // Beyond the end nothing is added: zeros on both sides, since one of them may
                    // be infinite.
                    let inside = at * 2u32 + comptime!(half as u32) < blocks;
                    let slot = comptime!(set * columns);
                    let others = a_fragments(a, &a_rows, at, blocks, inside, slot, half, shape);
                    // Two conditions, of which only the inner one is left to the kernel.
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
                        multiply_strip(&b_rows, &others, &mut sums, inside, low, i, half, shape);
                        // What the lane held of these rows is multiplied: the next is under way
                        // while the other strips are.
                        #[allow(clippy::collapsible_if)]
                        if comptime!(half == 1) {
                            if next < chunks {
                                b_rows.load(b_source, ahead, comptime!(2 * i), low, halves);
                                let high = comptime!(low + 1);
                                b_rows.load(b_source, ahead, comptime!(2 * i + 1), high, halves);
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
    sums
}

/// The fragments of `a` of one block of 16, which is two words, for each group of eight rows: block
/// `half` of vector `at`, the codes of which are in slots from `first` on.
#[cube]
fn a_fragments(
    a: &MixedMatrix<u32, Vector<u32, Const<4>>>,
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
                let scales = decode_scales(u16::reinterpret(rows.scales[slot]), shape);
                fragments[to] =
                    decode_e2m1x8_pairs(rows.words[slot].extract(word), scales.extract(half));
            } else {
                // Two to a block; those behind the last block read its last.
                let column = min(at, blocks.div_ceil(2u32) - 1u32);
                let mut vector = column * 4u32 + comptime!(word as u32);
                if comptime!(shape.halves) {
                    vector = min(vector, 2u32 * blocks - 1u32);
                }
                let vector = rows.first[j] * 2usize + vector as usize;
                fragments[to] = interleave_pairs(a.dense[vector]);
            }
            // Two conditions, of which only the inner one is left to the kernel.
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

/// Adds the products of one block of 16 to the sums of strip `strip` of `b`, whose rows are in
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
    let low_factor = decode_scales(u16::reinterpret(rows.scales[low]), shape);
    let high_factor = decode_scales(u16::reinterpret(rows.scales[high]), shape);
    #[unroll]
    for part in 0..2usize {
        let word = comptime!(2 * half + part);
        let mut low_word = rows.words[low].extract(word);
        let mut high_word = rows.words[high].extract(word);
        let mut low_scale = low_factor.extract(half);
        let mut high_scale = high_factor.extract(half);
        // Two conditions, of which only the inner one is left to the kernel.
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
            let sum = mma_m16n8k16_bf16(
                sums[at],
                upper.extract(0usize),
                lower.extract(0usize),
                upper.extract(1usize),
                lower.extract(1usize),
                other.extract(0usize),
                other.extract(1usize),
            );
            sums[at] = mma_m16n8k16_bf16(
                sum,
                upper.extract(2usize),
                lower.extract(2usize),
                upper.extract(3usize),
                lower.extract(3usize),
                other.extract(2usize),
                other.extract(3usize),
            );
        }
    }
}

/// Stores the sums of a warp. A lane has rows `lane / 4` and 8 below of a strip, for two
/// neighbouring rows of `a`.
#[cube]
fn stage_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    exchange: &mut [f32],
    #[comptime] shape: SmallMShape,
) {
    let warp = UNIT_POS / 32u32;
    let group = (UNIT_POS % 32u32) / 4u32;
    let quarter = UNIT_POS % 4u32;
    let stride = comptime!(shape.stride() as u32);
    #[unroll]
    for i in 0..comptime!(shape.strips) {
        #[unroll]
        for j in 0..comptime!(shape.columns) {
            let sum = sums[comptime!(i * shape.columns + j)];
            let base = warp * comptime!(shape.sums() as u32)
                + (comptime!(j as u32 * 8) + quarter * 2u32) * stride
                + comptime!(i as u32 * 16)
                + group;
            exchange[base as usize] = sum.extract(0usize);
            exchange[(base + stride) as usize] = sum.extract(1usize);
            exchange[(base + 8u32) as usize] = sum.extract(2usize);
            exchange[(base + stride + 8u32) as usize] = sum.extract(3usize);
        }
    }
}

/// The rows of `b` that a cube multiplies.
#[derive(CubeType, Clone, Copy)]
struct OutputRows {
    /// The first of them.
    first: u32,
    /// Their factor, where all have one.
    tile_factor: f32,
}

/// Adds the sums of all warps, applies the epilogue and writes two neighbours at a time.
#[cube]
fn write_rows(
    exchange: &[f32],
    problem: &ProblemShape,
    rows: &OutputRows,
    epilogue: &Epilogue,
    out: &mut [u32],
    #[comptime] shape: SmallMShape,
) {
    let kind = comptime!(epilogue.kind);
    let stride = comptime!(shape.stride() as u32);
    let n = problem.n;
    let (row0, tile_factor) = (rows.first, rows.tile_factor);
    let pairs = comptime!(shape.rows() as u32 / 2);
    let mut largest = 0u32;
    let mut item = UNIT_POS;
    while item < problem.m * pairs {
        let line = item / pairs;
        let local = (item % pairs) * 2u32;
        let column = row0 + local;
        if column < n {
            let mut even = 0.0f32;
            let mut odd = 0.0f32;
            #[unroll]
            for w in 0..comptime!(shape.warps) {
                let base = comptime!((w * shape.sums()) as u32) + line * stride + local;
                even += exchange[base as usize];
                odd += exchange[(base + 1u32) as usize];
            }
            let line_factor = epilogue.a_factor(line, 0u32);
            let pair = line as usize * n as usize + column as usize;
            // Decoded elements were 2^-8 times what they stand for. Known here, it takes no
            // register.
            let sum_scale = comptime!(if shape.left == SmallMLeft::Packed {
                65536.0f32
            } else {
                256.0f32
            });
            let even_with = Addends {
                alpha: line_factor * epilogue.b_row_factor(column, tile_factor),
                bias: epilogue.load_bias(column as usize),
                c: epilogue.load_c(pair, 0u32),
            };
            let odd_with = Addends {
                alpha: line_factor * epilogue.b_row_factor(column + 1u32, tile_factor),
                bias: epilogue.load_bias((column + 1u32) as usize),
                c: epilogue.load_c(pair, 1u32),
            };
            let even = apply(even * sum_scale, even_with, kind);
            let odd = apply(odd * sum_scale, odd_with, kind);
            if comptime!(kind.out == FloatKind::F32) {
                out[pair] = u32::reinterpret(even);
                out[pair + 1usize] = u32::reinterpret(odd);
            } else {
                out[pair / 2usize] = pack_pair(even, odd, comptime!(kind.out));
            }
            if comptime!(kind.amax.is_some()) {
                largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
            }
        }
        item += CUBE_DIM;
    }
    epilogue.atomic_amax(0u32, largest);
}
