//! The GEMM of small M on Hopper, 1 to 8 rows of bf16 `a` (decoding), with a packed `b`.
//!
//! There is one cube a multiprocessor. Asynchronous copies bring its rows of `b`, one strip after
//! another, to a ring in shared memory that is as large as lets two kernels of a step be there at
//! the same time. So most of the weights of a layer are on their way, or have come, while the
//! kernels in front of this one still compute `a`: memory is read without pauses between the kernels
//! of a step.
//!
//! A stage has 2048 columns of 16 rows of `b`, which are the left operand of `mma.sync`; 16 warps
//! take 128 columns each. The order of the contraction inside an instruction is free as long as both
//! operands agree: lane `4 g + c` takes 32 codes at `32 c` of the rows `g` and `g + 8`, and copies
//! them itself, so that no unit waits for another before sums are added. The rows of `a` lie in
//! shared memory in the same order.

use cubecl::prelude::*;

use super::small_m_output::{OutputRows, WarpSums, write_rows};
use crate::{
    cube::{
        codec::{decode_e2m1x8_pairs, decode_e4m3x2, interleave_pairs},
        overlap::{let_next_begin, wait_for_previous, written_before},
        ptx::{
            cp_async, cp_async_commit_group, cp_async_wait_group, cvta_to_global, cvta_to_shared,
            ld_shared, ld_shared_v4, mma_m16n8k16_bf16,
        },
    },
    gemm::{
        arguments::{PackedMatrix, ProblemShape},
        epilogue::Epilogue,
    },
};

/// Columns of a warp in a stage.
const CHUNK: usize = 128;
/// Warps of a cube.
const WARPS: usize = 16;
/// Units of a cube.
pub const UNITS: u32 = 32 * WARPS as u32;
/// Columns of a stage.
const SPAN: usize = CHUNK * WARPS;
/// Rows of `b` in a stage, two of each unit.
const STRIP: usize = 16;
/// Bytes of the codes of a row for each unit.
const CODES: usize = 16 * UNITS as usize;
/// Bytes of the words with two block scales of a row for each unit.
const SCALES: usize = 4 * UNITS as usize;
/// Bytes of a stage: the codes of both rows, then their scales.
const STAGE: usize = 2 * (CODES + SCALES);
/// Bytes of shared memory of a cube: those of two cubes, and what the system takes of each, fit on
/// a multiprocessor, and those of three do not, so that the cubes of a kernel are shared out evenly.
const MEMORY: usize = 110 * 1024;
/// Bytes behind a row of `a`, so that two rows are in different banks.
const A_PADDING: usize = 64;
/// Bytes of a unit of room for `a`: two rows of 2048 columns.
const ROOM: usize = 2 * (2 * SPAN + A_PADDING);
/// Most units of [`ROOM`].
const MOST_ROOM: usize = 4;

/// What the kernel is specialized for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90SmallMShape {
    /// Most rows of `a`: a power of two up to 8.
    pub lines: usize,
    /// Units of room for `a`.
    pub room: usize,
    /// Whether the kernel can begin before the one in front of it has ended.
    pub overlaps: bool,
}

impl Sm90SmallMShape {
    /// The shape for `m` rows of `a`, `n` of `b`, and `k` columns of both; none for sizes that the
    /// kernel does not take.
    pub fn of((m, n, k): (usize, usize, usize), overlaps: bool) -> Option<Self> {
        let room = (m * (2 * k + A_PADDING)).div_ceil(ROOM).next_power_of_two();
        let takes = (1..=8).contains(&m)
            && k > 0
            && k.is_multiple_of(CHUNK)
            && n.is_multiple_of(STRIP)
            && room <= MOST_ROOM;
        takes.then(|| Self {
            lines: m.next_power_of_two(),
            room,
            overlaps,
        })
    }

    /// The sums that warps exchange at a time.
    const fn sums(self) -> WarpSums {
        WarpSums {
            warps: WARPS,
            lines: self.lines,
            rows: 128 / self.lines,
        }
    }

    /// Stages of the ring.
    pub const fn stages(self) -> usize {
        (MEMORY - self.room * ROOM - self.sums().floats() * 4) / STAGE
    }
}

/// The rows of `b` of a cube, in strips of 16.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Strips {
    first: u32,
    end: u32,
    /// Stages of a strip.
    parts: u32,
}

#[cube]
impl Strips {
    /// Those of this cube: as many as other cubes have, or one more.
    fn of_cube(problem: &ProblemShape) -> Strips {
        let all = problem.n / comptime!(STRIP as u32);
        let cubes = CUBE_COUNT as u32;
        let cube = CUBE_POS as u32;
        Strips {
            first: cube * all / cubes,
            end: (cube + 1u32) * all / cubes,
            parts: problem.k.div_ceil(comptime!(SPAN as u32)),
        }
    }
}

/// The copies of a unit: a stage after another, strip by strip.
#[derive(CubeType)]
struct Copies {
    /// Address of the unit's codes of its first row in the next stage.
    codes: u64,
    /// Address of the word with their scales.
    scales: u64,
    /// The strip of the next stage, and its part of that strip.
    strip: u32,
    part: u32,
    /// The place of the next stage in the ring.
    slot: u32,
    /// Where the unit's codes of the first stage lie in shared memory, and its scales.
    codes_to: u32,
    scales_to: u32,
}

#[cube]
impl Copies {
    fn new(b: &PackedMatrix<u32>, problem: &ProblemShape, strips: Strips, ring: u32) -> Copies {
        let lane = UNIT_POS % 32u32;
        let row = strips.first * comptime!(STRIP as u32) + lane / 4u32;
        let column = UNIT_POS / 32u32 * comptime!(CHUNK as u32) + lane % 4u32 * 32u32;
        let at = u64::cast_from(row) * u64::cast_from(problem.k) + u64::cast_from(column);
        // Two lanes take one word of scales.
        let word = at / 64u64 * 4u64;
        Copies {
            codes: cvta_to_global::<u32>(b.codes.as_ptr()) + at / 2u64,
            scales: cvta_to_global::<u8>(b.scales.as_ptr()) + word,
            strip: strips.first,
            part: 0u32,
            slot: 0u32,
            codes_to: ring + UNIT_POS * 16u32,
            scales_to: ring + comptime!(2 * CODES as u32) + UNIT_POS * 4u32,
        }
    }

    /// Starts the copies of the next stage, if there is one, as a group.
    fn start(
        &mut self,
        problem: &ProblemShape,
        strips: Strips,
        #[comptime] shape: Sm90SmallMShape,
    ) {
        if self.strip < strips.end {
            let column =
                self.part * comptime!(SPAN as u32) + UNIT_POS / 32u32 * comptime!(CHUNK as u32);
            if column < problem.k {
                let to = self.slot * comptime!(STAGE as u32);
                // Variables reach an asm block as pointers, values do not.
                let (codes, scales) = (self.codes, self.scales);
                let k = u64::cast_from(problem.k);
                let (codes_to, scales_to) = (self.codes_to + to, self.scales_to + to);
                cp_async(codes_to, u64::reinterpret(codes), 16u32);
                cp_async(codes_to + comptime!(CODES as u32), codes + k * 4u64, 16u32);
                cp_async(scales_to, u64::reinterpret(scales), 4u32);
                cp_async(
                    scales_to + comptime!(SCALES as u32),
                    scales + k / 2u64,
                    4u32,
                );
            }
            self.part += 1u32;
            // To the next columns, or from behind the last ones to the next strip.
            let mut columns = comptime!(SPAN as u64).runtime();
            if self.part == strips.parts {
                self.part = 0u32;
                self.strip += 1u32;
                let k = u64::cast_from(problem.k);
                let back = u64::cast_from(strips.parts - 1u32) * comptime!(SPAN as u64);
                columns = k * comptime!(STRIP as u64) - back;
            }
            self.codes += columns / 2u64;
            self.scales += columns / 16u64;
            self.slot += 1u32;
            if self.slot == comptime!(shape.stages() as u32) {
                self.slot = 0u32;
            }
        }
        cp_async_commit_group();
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for the rows of `b` of
/// one cube. `a` is in units of eight elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_small_m_kernel(
    a: &[Vector<u32, Const<4>>],
    b: PackedMatrix<u32>,
    problem: ProblemShape,
    epilogue: Epilogue,
    out: &mut [u32],
    #[comptime] shape: Sm90SmallMShape,
) {
    let ring: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(shape.stages() * STAGE / 16), 128usize);
    let mut a_rows: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(shape.room * ROOM / 16), 128usize);
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.sums().floats()), 16usize);
    let ring = cvta_to_shared::<Vector<u32, Const<4>>>(ring.as_slice().as_ptr());
    let a_at = cvta_to_shared::<Vector<u32, Const<4>>>(a_rows.as_slice().as_ptr());
    let_next_begin(shape.overlaps);
    written_before(a, shape.overlaps);
    written_before(&epilogue.a_amax, shape.overlaps);
    written_before(&epilogue.c, shape.overlaps);
    // A weight's as well: it is here before the sums are.
    written_before(&epilogue.b_amax, shape.overlaps);
    let strips = Strips::of_cube(&problem);
    let mut copies = Copies::new(&b, &problem, strips, ring);
    #[unroll]
    for _ in 0..comptime!(shape.stages()) {
        copies.start(&problem, strips, shape);
    }
    let tile_factor = epilogue.b_tile_factor(0u32);
    // A weight is written long before; what else is read may be the output of the last kernel.
    wait_for_previous(shape.overlaps);
    bring_a(a, &problem, &mut a_rows);
    sync_cube();
    let pass = comptime!(shape.sums().rows as u32 / STRIP as u32);
    let mut largest = 0u32;
    let mut slot = 0u32;
    let mut first = strips.first;
    while first < strips.end {
        let end = min(first + pass, strips.end);
        for strip in first..end {
            let mut sums = Array::<Vector<f32, Const<4>>>::new(2usize);
            sums[0] = Vector::new(0.0f32);
            sums[1] = Vector::new(0.0f32);
            for part in 0..strips.parts {
                cp_async_wait_group(comptime!(shape.stages() as u32 - 1));
                let column =
                    part * comptime!(SPAN as u32) + UNIT_POS / 32u32 * comptime!(CHUNK as u32);
                if column < problem.k {
                    let stage = ring + slot * comptime!(STAGE as u32);
                    multiply_stage(&problem, stage, a_at, column, &mut sums);
                }
                copies.start(&problem, strips, shape);
                slot += 1u32;
                if slot == comptime!(shape.stages() as u32) {
                    slot = 0u32;
                }
            }
            stage_sums(
                sums[0] + sums[1],
                strip - first,
                &problem,
                &mut exchange,
                shape,
            );
        }
        sync_cube();
        let rows = OutputRows {
            first: first * comptime!(STRIP as u32),
            end: end * comptime!(STRIP as u32),
            tile_factor,
        };
        let sums = comptime!(shape.sums());
        // Decoded elements are 2^-8 times what they stand for.
        let found = write_rows(&exchange, &problem, &rows, &epilogue, out, 256.0f32, sums);
        largest = max(largest, found);
        first = end;
        if first < strips.end {
            sync_cube();
        }
    }
    epilogue.atomic_amax(0u32, largest);
}

/// Copies `a` to shared memory. Of each 128 columns the first eight of every 32 come first, so that
/// the four lanes which read them read 64 bytes, then the next eight.
#[cube]
fn bring_a(
    a: &[Vector<u32, Const<4>>],
    problem: &ProblemShape,
    a_rows: &mut [Vector<u32, Const<4>>],
) {
    let width = problem.k / 8u32;
    for line in 0..problem.m {
        let from = line * width;
        let to = line * (width + comptime!((A_PADDING / 16) as u32));
        let mut vector = UNIT_POS;
        while vector < width {
            let lane = (vector / 4u32) % 4u32;
            let word = vector % 4u32;
            let place = to + vector / 16u32 * 16u32 + word * 4u32 + lane;
            a_rows[place as usize] = interleave_pairs(a[(from + vector) as usize]);
            vector += UNITS;
        }
    }
}

/// Adds the products of the unit's codes in the `stage` to the sums of a warp, which has 128 columns
/// from `column` on: those of the rows `lane / 4` and 8 below, and the lines `lane % 4 * 2` and the
/// next. There are two sums of each, so that an instruction does not wait for the one before it.
#[cube]
fn multiply_stage(
    problem: &ProblemShape,
    stage: u32,
    a_rows: u32,
    column: u32,
    sums: &mut Array<Vector<f32, Const<4>>>,
) {
    let lane = UNIT_POS % 32u32;
    let quarter = lane % 4u32;
    // A line that does not exist reads the last one: its sums are not written.
    let line = min(lane / 4u32, problem.m - 1u32);
    let a_at = a_rows
        + line * (problem.k * 2u32 + comptime!(A_PADDING as u32))
        + column * 2u32
        + quarter * 16u32;
    let codes = stage + UNIT_POS * 16u32;
    let (low, high) = (
        ld_shared_v4(codes),
        ld_shared_v4(codes + comptime!(CODES as u32)),
    );
    let scales = stage + comptime!(2 * CODES as u32) + UNIT_POS * 4u32;
    let low_scales = scales_of(scales, quarter);
    let high_scales = scales_of(scales + comptime!(SCALES as u32), quarter);
    #[unroll]
    for word in 0..4usize {
        let x = ld_shared_v4(a_at + comptime!(word as u32 * 64));
        let upper = decode_e2m1x8_pairs(
            u32::reinterpret(low.extract(word)),
            u32::reinterpret(low_scales.extract(comptime!(word / 2))),
        );
        let lower = decode_e2m1x8_pairs(
            u32::reinterpret(high.extract(word)),
            u32::reinterpret(high_scales.extract(comptime!(word / 2))),
        );
        #[unroll]
        for half in 0..2usize {
            let first = comptime!(2 * half);
            let second = comptime!(2 * half + 1);
            sums[half] = mma_m16n8k16_bf16(
                sums[half],
                upper.extract(first),
                lower.extract(first),
                upper.extract(second),
                lower.extract(second),
                x.extract(first),
                x.extract(second),
            );
        }
    }
}

/// The two scales of a unit, from the word that it has copied for itself and a neighbour.
#[cube]
fn scales_of(address: u32, quarter: u32) -> Vector<u32, Const<2>> {
    let word = ld_shared(address) >> (quarter % 2u32 * 16u32);
    decode_e4m3x2(u16::cast_from(word & 0xffffu32))
}

/// Stores the sums of a warp for strip number `strip` of those that are exchanged.
#[cube]
fn stage_sums(
    sum: Vector<f32, Const<4>>,
    strip: u32,
    problem: &ProblemShape,
    exchange: &mut [f32],
    #[comptime] shape: Sm90SmallMShape,
) {
    let lane = UNIT_POS % 32u32;
    let stride = comptime!(shape.sums().stride() as u32);
    let line = lane % 4u32 * 2u32;
    let at = UNIT_POS / 32u32 * comptime!(shape.sums().of_warp() as u32)
        + line * stride
        + strip * comptime!(STRIP as u32)
        + lane / 4u32;
    if line < problem.m {
        exchange[at as usize] = sum.extract(0usize);
        exchange[(at + 8u32) as usize] = sum.extract(2usize);
    }
    if line + 1u32 < problem.m {
        exchange[(at + stride) as usize] = sum.extract(1usize);
        exchange[(at + stride + 8u32) as usize] = sum.extract(3usize);
    }
}
