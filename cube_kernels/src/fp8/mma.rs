//! `mma.sync` kernel for small M. It is bound by reading the weight's codes once and decodes them
//! in registers.
//!
//! The weight is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8
//! rows). A lane loads 16 codes of a row from each 64: the order of the contraction inside an
//! instruction is free as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g`
//! at `16 c`, and the same columns of `a`. Each word of four codes is a lane's fragment for one
//! instruction, as pairs (0, 2) and (1, 3). The warps of a cube share its rows and alternate along
//! the contraction; their sums are added in warp order.

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::{decode_e4m3x4_pairs, pair_alternate, store},
        overlap::{let_next_begin, wait_for_previous, written_before},
        ptx::{cvta_to_global, ld_global_no_allocate_v4, mma_m16n8k16_bf16},
        warp_sums::{WarpSums, stage_sums},
    },
    reference::FP8_CHUNK,
    tensor::FloatKind,
};

/// Columns that a warp processes at a time.
const CHUNK: usize = FP8_CHUNK;

/// Weight operand of [`fp8_linear_mma_kernel()`] and of the portable kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Fp8Weight {
    /// Codes, four per word, row-major.
    pub codes: Box<[u32]>,
    /// Scale factors, one per row.
    pub scales: Box<[f32]>,
}

/// GEMM shape.
#[derive(CubeType, CubeLaunch)]
pub struct Fp8Shape {
    /// Number of rows of `a`.
    pub m: u32,
    /// Number of rows of the weight.
    pub n: u32,
    /// Number of columns of both.
    pub k: u32,
}

/// Comptime choices of [`fp8_linear_mma_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8MmaPlan {
    /// Warps per cube.
    pub warps: usize,
    /// Groups of 16 rows of the weight per cube.
    pub strips: usize,
    /// Groups of 8 rows of `a` per cube.
    pub columns: usize,
    /// Chunks per warp that are in flight at a time.
    pub ahead: usize,
    /// Type of the output.
    pub out: FloatKind,
    /// True if the kernel can start before the previous one has ended: it loads the weight while it
    /// waits.
    pub overlaps: bool,
}

impl Fp8MmaPlan {
    /// Returns the plan for `m` rows of `a`. One chunk in flight for each of 8 warps takes few
    /// enough registers for four cubes per SM, which keeps 64 KiB of codes in flight.
    pub(super) fn of(m: usize, out: FloatKind, overlaps: bool) -> Self {
        Self {
            warps: 8,
            strips: 2,
            columns: if m <= 8 { 1 } else { 2 },
            ahead: 1,
            out,
            overlaps,
        }
    }

    /// Returns the rows of the weight per cube.
    pub(super) const fn rows(self) -> usize {
        16 * self.strips
    }

    /// Returns the rows of `a` per cube.
    pub(super) const fn lines(self) -> usize {
        8 * self.columns
    }

    /// Returns the shape of each warp's sums.
    const fn warp_sums(self) -> WarpSums {
        WarpSums {
            strips: self.strips,
            columns: self.columns,
        }
    }
}

/// The weight's rows of a lane, and their chunks in flight.
#[derive(CubeType)]
struct Rows {
    /// Address of the codes.
    codes: u64,
    /// Index of the first vector of each row: 32 bits for any address width.
    first: Array<u32>,
    /// Vectors of codes, row after row for each chunk in flight.
    words: Array<Vector<u32, Const<4>>>,
}

#[cube]
impl Rows {
    /// Returns the rows of the cube whose first row is `row0`, and starts loading the warp's first
    /// chunks. Rows past the last one read the last row, and are not written.
    fn start(codes: &[u32], row0: u32, shape: &Fp8Shape, #[comptime] plan: Fp8MmaPlan) -> Rows {
        let count = comptime!(2 * plan.strips);
        let vectors = shape.k / 16u32;
        let lane = UNIT_POS % 32u32;
        let mut first = Array::<u32>::new(count);
        #[unroll]
        for i in 0..count {
            let row = min(row0 + comptime!(8 * i as u32) + lane / 4u32, shape.n - 1u32);
            first[i] = row * vectors;
        }
        let mut rows = Rows {
            codes: cvta_to_global::<u32>(codes.as_ptr()),
            first,
            words: Array::<Vector<u32, Const<4>>>::new(comptime!(plan.ahead * count)),
        };
        let warp = UNIT_POS / 32u32;
        #[unroll]
        for set in 0..plan.ahead {
            let chunk = warp + comptime!((set * plan.warps) as u32);
            // A warp without a chunk reads the last one.
            let at = min(chunk * 4u32 + lane % 4u32, vectors - 1u32);
            #[unroll]
            for i in 0..count {
                rows.load(at, i, comptime!(set * count + i));
            }
        }
        rows
    }

    /// Loads vector `at` of row `row` into slot `to`.
    fn load(&mut self, at: u32, #[comptime] row: usize, #[comptime] to: usize) {
        let vector = self.first[row] + at;
        self.words[to] = ld_global_no_allocate_v4(self.codes + u64::cast_from(vector) * 16u64);
    }
}

/// Computes `out[m, n] = (Σₖ a[m, k] · code[n, k]) · scale[n]` for a tile of rows of the weight and
/// of `a`. `a` is bf16, in vectors of eight elements. Consecutive cubes share the rows of the
/// weight, so that these are read from memory once.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fp8_linear_mma_kernel<F: Numeric>(
    a: &[Vector<u32, Const<4>>],
    b: Fp8Weight,
    out: &mut [F],
    shape: Fp8Shape,
    #[comptime] plan: Fp8MmaPlan,
    #[define(F)] _out_storage: ElemType,
) {
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(plan.warps * plan.warp_sums().floats()), 16usize);
    let mut factors = Shared::<[f32]>::new_slice(comptime!(plan.rows()));
    let_next_begin(plan.overlaps);
    written_before(a, plan.overlaps);
    let lines = comptime!(plan.lines() as u32);
    let groups = shape.m.div_ceil(lines);
    let row0 = CUBE_POS as u32 / groups * comptime!(plan.rows() as u32);
    let line0 = CUBE_POS as u32 % groups * lines;
    let mut rows = Rows::start(&b.codes, row0, &shape, plan);
    let factor_row = row0 + UNIT_POS % comptime!(plan.rows() as u32);
    let factor = b.scales[min(factor_row, shape.n - 1u32) as usize];
    // The weight is written long before; `a` may be the output of the previous kernel.
    wait_for_previous(plan.overlaps);
    let sums = mainloop(a, line0, &mut rows, &shape, plan);
    if UNIT_POS < comptime!(plan.rows() as u32) {
        factors[UNIT_POS as usize] = factor;
    }
    stage_sums(&sums, &mut exchange, comptime!(plan.warp_sums()));
    sync_cube();
    let count = min(shape.m - line0, lines) * comptime!(plan.rows() as u32);
    let mut item = UNIT_POS;
    while item < count {
        let line = item / comptime!(plan.rows() as u32);
        let local = item % comptime!(plan.rows() as u32);
        if row0 + local < shape.n {
            let mut sum = 0.0f32;
            #[unroll]
            for w in 0..plan.warps {
                let base = comptime!((w * plan.warp_sums().floats()) as u32);
                sum += exchange
                    [(base + line * comptime!(plan.warp_sums().stride() as u32) + local) as usize];
            }
            let at = (line0 + line) as usize * shape.n as usize + (row0 + local) as usize;
            out[at] = store::<F>(sum * factors[local as usize], plan.out);
        }
        item += CUBE_DIM;
    }
}

/// Returns the sums of one warp: every `plan.warps`th chunk.
#[cube]
fn mainloop(
    a: &[Vector<u32, Const<4>>],
    line0: u32,
    rows: &mut Rows,
    shape: &Fp8Shape,
    #[comptime] plan: Fp8MmaPlan,
) -> Array<Vector<f32, Const<4>>> {
    let (strips, columns) = comptime!((plan.strips, plan.columns));
    let lane = UNIT_POS % 32u32;
    let quarter = lane % 4u32;
    let chunks = shape.k / comptime!(CHUNK as u32);
    let mut lines = Array::<u32>::new(columns);
    #[unroll]
    for j in 0..columns {
        let line = min(
            line0 + comptime!(8 * j as u32) + lane / 4u32,
            shape.m - 1u32,
        );
        lines[j] = line * (shape.k / 8u32);
    }
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(strips * columns));
    #[unroll]
    for i in 0..comptime!(strips * columns) {
        sums[i] = Vector::new(0.0f32);
    }
    let mut first = UNIT_POS / 32u32;
    while first < chunks {
        #[unroll]
        for set in 0..plan.ahead {
            let chunk = first + comptime!((set * plan.warps) as u32);
            if chunk < chunks {
                let at = chunk * 4u32 + quarter;
                let next = chunk + comptime!((plan.ahead * plan.warps) as u32);
                // One half after the other: from sm_100 on this keeps the compiler within 64
                // registers.
                #[unroll]
                for half in 0..2usize {
                    let mut others = Array::<Vector<u32, Const<4>>>::new(columns);
                    #[unroll]
                    for j in 0..columns {
                        let vector = lines[j] + at * 2u32 + comptime!(half as u32);
                        others[j] = pair_alternate(a[vector as usize]);
                    }
                    #[unroll]
                    for i in 0..strips {
                        let low = comptime!(2 * (set * strips + i));
                        multiply_strip(&*rows, &others, &mut sums, low, i, half, plan);
                        // The lane's codes of these rows are used up: load the next ones while the
                        // other strips are multiplied.
                        #[allow(clippy::collapsible_if)]
                        if comptime!(half == 1) {
                            if next < chunks {
                                let ahead = next * 4u32 + quarter;
                                rows.load(ahead, comptime!(2 * i), low);
                                rows.load(ahead, comptime!(2 * i + 1), comptime!(low + 1));
                            }
                        }
                    }
                }
            }
        }
        first += comptime!((plan.ahead * plan.warps) as u32);
    }
    sums
}

/// Adds the products of half a vector (two words) to the sums of strip `strip`, whose rows are in
/// slots `low` and `low + 1`.
#[cube]
fn multiply_strip(
    rows: &Rows,
    others: &Array<Vector<u32, Const<4>>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] low: usize,
    #[comptime] strip: usize,
    #[comptime] half: usize,
    #[comptime] plan: Fp8MmaPlan,
) {
    #[unroll]
    for part in 0..2usize {
        let word = comptime!(2 * half + part);
        let upper = decode_e4m3x4_pairs(rows.words[low].extract(word));
        let lower = decode_e4m3x4_pairs(rows.words[comptime!(low + 1)].extract(word));
        #[unroll]
        for j in 0..plan.columns {
            let at = comptime!(strip * plan.columns + j);
            let other = others[j];
            sums[at] = mma_m16n8k16_bf16(
                sums[at],
                upper.extract(0usize),
                lower.extract(0usize),
                upper.extract(1usize),
                lower.extract(1usize),
                other.extract(comptime!(2 * part)),
                other.extract(comptime!(2 * part + 1)),
            );
        }
    }
}
