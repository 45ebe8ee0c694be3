//! The GEMM of small M on Hopper and later, 1 to 8 rows of bf16 `a` (decoding), with a packed `b`.
//!
//! There is one cube a multiprocessor. Bulk copies bring its rows of `b`, one after another, to a
//! ring in shared memory that is as large as lets two kernels of a step be there at the same time.
//! So most of the weights of a layer are on their way, or have come, while the kernels in front of
//! this one still compute `a`: memory is read without pauses between the kernels of a step.
//!
//! A stage has 2048 columns of eight rows of `b`, which are the right operand of `mma.sync`; 16
//! warps take 128 columns each. The order of the contraction inside an instruction is free as long
//! as both operands agree: lane `4 g + c` reads 16 bytes, which are 32 codes, of row `g` at `32 c`.
//! The rows of `a` lie in shared memory in the same order.

use cubecl::{prelude::barrier::Barrier, prelude::*};

use super::small_m_output::{OutputRows, WarpSums, write_rows};
use crate::{
    cube::{
        codec::{decode_e2m1x8_pairs, decode_e4m3x2, interleave_pairs},
        overlap::{let_next_begin, wait_for_previous, written_before},
        ptx::{
            cp_async_bulk, cvta_to_global, cvta_to_shared, ld_shared, ld_shared_v4,
            mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity, mma_m16n8k16_bf16,
            named_barrier_sync,
        },
    },
    gemm::{
        arguments::{PackedMatrix, ProblemShape},
        epilogue::Epilogue,
    },
};

/// Columns of a stage.
const SPAN: usize = 2048;
/// Rows of `b` in a stage.
const STRIP: usize = 8;
/// Warps that multiply. One more lets bulk copies begin.
const WARPS: usize = 16;
/// Units of a cube.
pub const UNITS: u32 = 32 * (WARPS as u32 + 1);
/// Bytes from one row of codes to the next. The 64 behind the row have two rows in different banks.
const CODES_STRIDE: usize = SPAN / 2 + 64;
/// Bytes from one row of scales to the next. The 16 behind the row have all rows in different
/// banks.
const SCALES_STRIDE: usize = SPAN / 16 + 16;
/// Bytes of a stage.
const STAGE: usize = STRIP * (CODES_STRIDE + SCALES_STRIDE);
/// Bytes of shared memory of a cube: those of two cubes, and what the system takes of each, fit on
/// a multiprocessor, and those of three do not, so that the cubes of a kernel are shared out evenly.
const MEMORY: usize = 110 * 1024;
/// Bytes of a unit of room for `a`: two rows of 2048 columns.
const ROOM: usize = 2 * (2 * SPAN + A_PADDING);
/// Bytes behind a row of `a`, so that two rows are in different banks.
const A_PADDING: usize = 64;
/// Most units of [`ROOM`].
const MOST_ROOM: usize = 4;

/// What the kernel is specialized for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90SmallMShape {
    /// Most rows of `a`: a power of two up to 8.
    pub lines: usize,
    /// Units of room for `a`, see [`Sm90SmallMShape::of`].
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
            && k.is_multiple_of(256)
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
    const fn stages(self) -> usize {
        (MEMORY - self.room * ROOM - self.sums().floats() * 4 - 256) / STAGE
    }
}

/// The rows of `b` of a cube, in strips of eight.
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

/// Where the parts of shared memory begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SharedAddresses {
    ring: u32,
    a: u32,
    full: u32,
    empty: u32,
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
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * shape.stages()), 8usize);
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let shared = SharedAddresses {
        ring: cvta_to_shared::<Vector<u32, Const<4>>>(ring.as_slice().as_ptr()),
        a: cvta_to_shared::<Vector<u32, Const<4>>>(a_rows.as_slice().as_ptr()),
        full,
        empty: full + comptime!(8 * shape.stages() as u32),
    };
    let_next_begin(shape.overlaps);
    written_before(a, shape.overlaps);
    written_before(&epilogue.a_amax, shape.overlaps);
    written_before(&epilogue.c, shape.overlaps);
    // A weight's as well: it is here before the sums are.
    written_before(&epilogue.b_amax, shape.overlaps);
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..comptime!(shape.stages()) {
            barriers[s].init_manual(1);
            barriers[s + comptime!(shape.stages())].init_manual(comptime!(WARPS as u32));
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    let strips = Strips::of_cube(&problem);
    if UNIT_POS >= comptime!(32 * WARPS as u32) {
        produce(&b, &problem, strips, shared, shape);
    } else {
        let tile_factor = epilogue.b_tile_factor(0u32);
        // A weight is written long before; what else is read may be the output of the last kernel.
        wait_for_previous(shape.overlaps);
        bring_a(a, &problem, &mut a_rows);
        consumers_sync();
        let pass = comptime!(shape.sums().rows as u32 / STRIP as u32);
        let mut used = 0u32;
        let mut largest = 0u32;
        let mut first = strips.first;
        while first < strips.end {
            let end = min(first + pass, strips.end);
            for strip in first..end {
                let sum = multiply_strip(&problem, strips, used, shared, shape);
                stage_sums(sum, strip - first, &problem, &mut exchange, shape);
                used += strips.parts;
            }
            consumers_sync();
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
                consumers_sync();
            }
        }
        epilogue.atomic_amax(0u32, largest);
    }
}

/// Waits for the warps that multiply.
#[cube]
fn consumers_sync() {
    named_barrier_sync(1u32, comptime!(32 * WARPS as u32));
}

/// The last warp: lets bulk copies fill stages, as long as there are free ones. It does not wait for
/// kernels in front: they do not write weights. Eight lanes copy a row of codes each, the next eight
/// one of scales.
#[cube]
fn produce(
    b: &PackedMatrix<u32>,
    problem: &ProblemShape,
    strips: Strips,
    shared: SharedAddresses,
    #[comptime] shape: Sm90SmallMShape,
) {
    let lane = UNIT_POS % 32u32;
    let is_codes = lane < comptime!(STRIP as u32);
    let row = lane % comptime!(STRIP as u32);
    let codes_from = cvta_to_global::<u32>(b.codes.as_ptr());
    let scales_from = cvta_to_global::<u8>(b.scales.as_ptr());
    let stages = comptime!(shape.stages() as u32);
    let k = problem.k;
    // Stages used so far: producer and consumers count alike, so the ring needs no other state.
    let mut used = 0u32;
    for strip in strips.first..strips.end {
        let first = u64::cast_from(strip * comptime!(STRIP as u32) + row) * u64::cast_from(k);
        for part in 0..strips.parts {
            let stage = used % stages;
            let barrier = shared.full + stage * 8u32;
            let to = shared.ring + stage * comptime!(STAGE as u32);
            let column = part * comptime!(SPAN as u32);
            let columns = min(k - column, comptime!(SPAN as u32));
            let at = first + u64::cast_from(column);
            mbarrier_wait_parity(shared.empty + stage * 8u32, ((used / stages) & 1u32) ^ 1u32);
            if lane == 0u32 {
                let bytes = columns / 2u32 + columns / 16u32;
                mbarrier_arrive_expect_tx(barrier, bytes * comptime!(STRIP as u32));
            }
            sync_plane();
            if is_codes {
                let to = to + row * comptime!(CODES_STRIDE as u32);
                cp_async_bulk(to, codes_from + at / 2u64, columns / 2u32, barrier);
            } else if lane < comptime!(2 * STRIP as u32) {
                let to = to
                    + comptime!((STRIP * CODES_STRIDE) as u32)
                    + row * comptime!(SCALES_STRIDE as u32);
                cp_async_bulk(to, scales_from + at / 16u64, columns / 16u32, barrier);
            }
            used += 1u32;
        }
    }
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
    let mut item = UNIT_POS;
    while item < problem.m * width {
        let line = item / width;
        let vector = item % width;
        let lane = (vector / 4u32) % 4u32;
        let word = vector % 4u32;
        let to = line * (width + comptime!((A_PADDING / 16) as u32))
            + vector / 16u32 * 16u32
            + word * 4u32
            + lane;
        a_rows[to as usize] = interleave_pairs(a[item as usize]);
        item += comptime!(32 * WARPS as u32);
    }
}

/// The sums of a warp for the rows of one strip, whose stages begin behind `used` others: of line
/// `lane / 4` the rows `lane % 4 * 2` and the next.
#[cube]
fn multiply_strip(
    problem: &ProblemShape,
    strips: Strips,
    used: u32,
    shared: SharedAddresses,
    #[comptime] shape: Sm90SmallMShape,
) -> Vector<f32, Const<4>> {
    let stages = comptime!(shape.stages() as u32);
    let warp = UNIT_POS / 32u32;
    let lane = UNIT_POS % 32u32;
    let group = lane / 4u32;
    let quarter = lane % 4u32;
    let k = problem.k;
    let a_from = shared.a
        + group * (k * 2u32 + comptime!(A_PADDING as u32))
        + warp * 256u32
        + quarter * 16u32;
    // Where the warp's columns of a stage are.
    let codes_at = group * comptime!(CODES_STRIDE as u32) + warp * 64u32 + quarter * 16u32;
    let scales_at = comptime!((STRIP * CODES_STRIDE) as u32)
        + group * comptime!(SCALES_STRIDE as u32)
        + warp * 8u32
        + quarter / 2u32 * 4u32;
    let mut even = Vector::<f32, Const<4>>::new(0.0f32);
    let mut odd = Vector::<f32, Const<4>>::new(0.0f32);
    for part in 0..strips.parts {
        let number = used + part;
        let stage = number % stages;
        let from = shared.ring + stage * comptime!(STAGE as u32);
        let column = part * comptime!(SPAN as u32) + warp * 128u32;
        mbarrier_wait_parity(shared.full + stage * 8u32, (number / stages) & 1u32);
        if column < k {
            let codes = ld_shared_v4(from + codes_at);
            let pair = ld_shared(from + scales_at) >> (quarter % 2u32 * 16u32);
            let scales = decode_e4m3x2(u16::cast_from(pair & 0xffffu32));
            let a_at = a_from + part * comptime!(SPAN as u32 * 2);
            #[unroll]
            for word in 0..4usize {
                let mut x = Vector::<u32, Const<4>>::new(0u32);
                if group < problem.m {
                    x = ld_shared_v4(a_at + comptime!(word as u32 * 64));
                }
                let w = decode_e2m1x8_pairs(
                    u32::reinterpret(codes.extract(word)),
                    u32::reinterpret(scales.extract(comptime!(word / 2))),
                );
                even = mma_m16n8k16_bf16(
                    even,
                    x.extract(0usize),
                    0u32,
                    x.extract(1usize),
                    0u32,
                    w.extract(0usize),
                    w.extract(1usize),
                );
                odd = mma_m16n8k16_bf16(
                    odd,
                    x.extract(2usize),
                    0u32,
                    x.extract(3usize),
                    0u32,
                    w.extract(2usize),
                    w.extract(3usize),
                );
            }
        }
        sync_plane();
        if lane == 0u32 {
            mbarrier_arrive(shared.empty + stage * 8u32);
        }
    }
    even + odd
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
    let warp = UNIT_POS / 32u32;
    let line = UNIT_POS % 32u32 / 4u32;
    if line < problem.m {
        let at = warp * comptime!(shape.sums().of_warp() as u32)
            + line * comptime!(shape.sums().stride() as u32)
            + strip * comptime!(STRIP as u32)
            + UNIT_POS % 4u32 * 2u32;
        exchange[at as usize] = sum.extract(0usize);
        exchange[(at + 1u32) as usize] = sum.extract(1usize);
    }
}
