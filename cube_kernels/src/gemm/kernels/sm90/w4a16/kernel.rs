//! The W4A16 GEMM of Hopper: a packed `b` is dequantized in registers. Memory holds no bf16 copy of
//! `b`, and its codes and scales are read once per tile along the rows of `a`.
//!
//! `wgmma` takes its left operand from registers, so the GEMM is computed as `outᵀ = b · aᵀ`. Each
//! of two consumer warpgroups decodes 64 rows of `b` (or two or four share 64 rows and alternate
//! along K) and multiplies them with the rows of `a`, which are in shared memory as bf16. The
//! columns of `a` are in the order in which lanes hold the codes of `b`
//! (`cube::w4a16_order`). A separate pass rearranges them
//! (`arrange::arrange`).
//!
//! The first warp issues the TMA copies of codes and `a`; the next three warps copy block scales,
//! which the consumers decode. All tiles have the same height, but the instructions of a tile at
//! the end of a group (or of `a`) are only as wide as its rows.

use std::fmt;

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::super::bf16::check_sm90;
use super::{
    arrange::arrange,
    output::{Part, TilePlace, write_tile},
};
use crate::{
    Nvfp4Error,
    capabilities::GemmBackend,
    cube::{
        ptx::{
            Major, cp_async, cp_async_mbarrier_arrive_noinc, cvta_to_global, cvta_to_shared,
            mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity, setmaxnreg_dec,
            setmaxnreg_inc,
            sm90_mainloop::PipelineState,
            sm90_mainloop_w4a16::{
                PackedStage, Ring, w4a16_mainloop_n32, w4a16_mainloop_n64, w4a16_mainloop_n96,
                w4a16_mainloop_n112, w4a16_mainloop_n128, w4a16_mainloop_n192, w4a16_mainloop_n256,
            },
            st_shared_v2, wgmma_descriptor,
        },
        w4a16_order::SPAN,
    },
    gemm::{
        arguments::{ProblemShape, ProblemShapeLaunch, thread_in_cta},
        epilogue::Epilogue,
        heuristics,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, sms},
        scheduler::{GroupedDim, Schedule, place},
        tiles::{W4A16_STRIP, W4a16Tile},
    },
    memory::address_type,
};

/// Columns of half a stage: the 128 bytes of bf16 that the swizzle spans.
const HALF: usize = 64;
/// Units that copy scales.
const CARRIERS: usize = 96;
/// Words of codes per row of a stage.
const ROW_WORDS: usize = SPAN / 8;
/// Bytes of scales per row of a stage.
const ROW_SCALES: usize = SPAN / 16;

impl W4a16Tile {
    /// Returns the 16-byte vectors of `a` in half a stage.
    const fn a_half(self) -> usize {
        self.rows_a * 8
    }

    /// Returns the 16-byte vectors of codes in a stage.
    const fn codes_stage(self) -> usize {
        self.rows_b() * ROW_WORDS / 4
    }
}

/// Returns the instruction width for `rows` rows of `a`: the first of the ascending `widths` that
/// holds them, or the last.
#[cube]
pub(in crate::gemm::kernels::sm90) fn width_of(
    rows: u32,
    #[comptime] widths: &'static [usize],
) -> u32 {
    let count = comptime!(widths.len());
    let mut width = comptime!(widths[count - 1] as u32).runtime();
    #[unroll]
    for i in 1..count {
        let narrower = comptime!(widths[count - 1 - i] as u32);
        if rows <= narrower {
            width = narrower.runtime();
        }
    }
    width
}

/// Returns the scales of one row in stage `step`, four bytes per word. Scales after the end are
/// zeros, because the codes there are zeros too and no scale may be NaN. `pairs` holds the scales
/// in pairs.
#[cube]
fn load_scales(pairs: &[u16], row: u32, step: u32, k: u32) -> Vector<u32, Const<2>> {
    let width = k / 32u32;
    let first = row as usize * width as usize;
    let mut words = Vector::<u32, Const<2>>::new(0u32);
    #[unroll]
    for i in 0..2usize {
        let at = step * 4u32 + comptime!(2 * i as u32);
        let mut word = 0u32;
        if at < width {
            word = u32::cast_from(pairs[first + at as usize]);
        }
        if at + 1u32 < width {
            word |= u32::cast_from(pairs[first + at as usize + 1usize]) << 16u32;
        }
        words.insert(i, word);
    }
    words
}

/// Comptime configuration of `sm90_w4a16_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16Plan {
    /// Grouped dimension: none, or M.
    pub grouped: GroupedDim,
    /// Tile.
    pub tile: W4a16Tile,
}

/// A GEMM whose rows of tiles, if grouped, follow a schedule.
#[derive(CubeType, CubeLaunch)]
pub struct ScheduledProblem {
    /// Size.
    pub shape: ProblemShape,
    /// Schedule written by [`schedule_groups`](crate::gemm::scheduler::schedule_groups).
    pub schedule: Box<[Vector<u32, Const<4>>]>,
    /// Tiles along `m` that run at the same time.
    pub band: u32,
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group of rows.
///
/// `a` is in the order of `cube::w4a16_order`, `b` is a map of words of eight codes, and `b_scales`
/// holds its scales in pairs. A cube takes every `CUBE_COUNT`th tile.
/// Dequantized elements, of `b` alone or of both operands, are 2^-8 times their value; the
/// epilogue's `sum_scale` compensates. `out` is in units of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_w4a16_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    b_scales: &[u16],
    problem: ScheduledProblem,
    epilogue: Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: W4a16Plan,
) {
    let tile = comptime!(plan.tile);
    let stages = comptime!(plan.tile.stages());
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(2 * tile.stages() * tile.a_half()), 1024usize);
    let mut code_tiles: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * tile.codes_stage()), 128usize);
    let scale_tiles: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(tile.stages() * tile.rows_b() * ROW_SCALES / 16),
        128usize,
    );
    let staging: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(tile.consumers() * tile.staging() / 4), 128usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(4 * tile.stages()), 8usize);
    // Two barriers per stage, one per half of `a`; codes and scales arrive with the first.
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let shared = SharedAddresses {
        full,
        empty: full + comptime!(16 * tile.stages() as u32),
        a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr()),
        codes: cvta_to_shared::<Vector<u32, Const<4>>>(code_tiles.as_slice().as_ptr()),
        scales: cvta_to_shared::<Vector<u32, Const<4>>>(scale_tiles.as_slice().as_ptr()),
        staging: cvta_to_shared::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr()),
    };
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..comptime!(2 * stages) {
            // Arrivals: TMA and each unit that copies scales; then the units that consume a stage.
            barriers[s].init_manual(comptime!(if s % 2 == 0 { 1 + CARRIERS as u32 } else { 1 }));
            barriers[s + comptime!(2 * stages)].init_manual(comptime!(if tile.ways == 1 {
                256
            } else {
                128
            }));
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    if UNIT_POS < 32u32 {
        // Sums and fragments take more registers than an equal share.
        if comptime!(tile.consumers() == 2) {
            setmaxnreg_dec(56u32);
        }
        if UNIT_POS == 0u32 {
            produce(
                a,
                b,
                &problem,
                &mut a_tiles,
                &mut code_tiles,
                &barriers,
                shared,
                plan,
            );
        }
    } else if UNIT_POS < 128u32 {
        if comptime!(tile.consumers() == 2) {
            setmaxnreg_dec(56u32);
        }
        copy_scales(b_scales, &problem, shared, plan);
    } else {
        if comptime!(tile.consumers() == 2) {
            setmaxnreg_inc(224u32);
        }
        consume(&problem, &epilogue, out, shared, plan);
    }
}

/// Addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SharedAddresses {
    full: u32,
    empty: u32,
    a: u32,
    codes: u32,
    scales: u32,
    staging: u32,
}

/// The producer, one unit: fills the stages of all tiles of this cube by TMA, in sequence.
#[cube]
fn produce(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    problem: &ScheduledProblem,
    a_tiles: &mut [Vector<bf16, Const<8>>],
    code_tiles: &mut [Vector<u32, Const<4>>],
    barriers: &[Barrier],
    shared: SharedAddresses,
    #[comptime] plan: W4a16Plan,
) {
    let shape = comptime!(plan.tile);
    let stages = comptime!(plan.tile.stages());
    let a_half = comptime!(plan.tile.a_half());
    let codes_stage = comptime!(plan.tile.codes_stage());
    let tiles = tiles_of(problem, plan);
    let steps = problem.shape.k.div_ceil(comptime!(SPAN as u32));
    let mut tile = CUBE_POS as u32;
    // Stages used so far. All units count alike, so the pipeline needs no other state.
    let mut used = 0u32;
    while tile < tiles.m * tiles.n {
        let at = place_of(problem, tiles, tile, plan);
        let column = at.group * problem.shape.n + at.column;
        let width = width_of(at.end - at.row, comptime!(plan.tile.widths()));
        for step in 0..steps {
            let stage = used % comptime!(stages as u32);
            let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
            #[unroll]
            for half in 0..2usize {
                let number = stage * 2u32 + comptime!(half as u32);
                mbarrier_wait_parity(shared.empty + number * 8u32, parity);
                let codes = comptime!(if half == 0 {
                    shape.rows_b() as u32 * ROW_WORDS as u32 * 4
                } else {
                    0
                });
                mbarrier_arrive_expect_tx(shared.full + number * 8u32, width * 128u32 + codes);
                let s = stage as usize;
                let ready = &barriers[number as usize];
                if comptime!(half == 0) {
                    ready.tma_load_2d(
                        b,
                        &mut code_tiles[s * codes_stage..(s + 1) * codes_stage],
                        column as i32,
                        (step * comptime!(ROW_WORDS as u32)) as i32,
                    );
                }
                #[unroll]
                for copy in 0..comptime!(shape.rows_a / shape.rows_of_copy()) {
                    let rows = comptime!(shape.rows_of_copy());
                    let ahead = comptime!((copy * rows) as u32);
                    if ahead < width {
                        let first = number as usize * a_half + comptime!(copy * rows * 8);
                        ready.tma_load_2d(
                            a,
                            &mut a_tiles[first..first + comptime!(rows * 8)],
                            (at.row + ahead) as i32,
                            (step * comptime!(SPAN as u32) + comptime!((half * HALF) as u32))
                                as i32,
                        );
                    }
                }
            }
            used += 1u32;
        }
        tile += CUBE_COUNT as u32;
    }
}

/// The other warps of the first warpgroup: copy the scales of all tiles of this cube.
#[cube]
fn copy_scales(
    b_scales: &[u16],
    problem: &ScheduledProblem,
    shared: SharedAddresses,
    #[comptime] plan: W4a16Plan,
) {
    let stages = comptime!(plan.tile.stages());
    let rows_b = comptime!(plan.tile.rows_b() as u32);
    let k = problem.shape.k;
    let tiles = tiles_of(problem, plan);
    let steps = k.div_ceil(comptime!(SPAN as u32));
    let carrier = thread_in_cta() - 32u32;
    // The scales of a row in a stage are then aligned.
    let is_whole = k & comptime!(SPAN as u32 - 1) == 0u32;
    let scales_from = cvta_to_global::<u16>(b_scales.as_ptr());
    let mut tile = CUBE_POS as u32;
    let mut used = 0u32;
    while tile < tiles.m * tiles.n {
        let at = place_of(problem, tiles, tile, plan);
        let column = at.group * problem.shape.n + at.column;
        // Out-of-bounds rows read the last one; their results are not written.
        let last_row = problem.shape.groups * problem.shape.n - 1u32;
        for step in 0..steps {
            let stage = used % comptime!(stages as u32);
            let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
            let barrier = shared.full + stage * 16u32;
            mbarrier_wait_parity(shared.empty + stage * 16u32, parity);
            #[unroll]
            for r in 0..comptime!(plan.tile.rows_b().div_ceil(CARRIERS)) {
                let line = carrier + comptime!((r * CARRIERS) as u32);
                if line < rows_b {
                    let row = min(column + line, last_row);
                    let to = shared.scales + (stage * rows_b + line) * 8u32;
                    if is_whole {
                        let at = u64::cast_from(row) * u64::cast_from(k / 16u32)
                            + u64::cast_from(step * 8u32);
                        cp_async(to, scales_from + at, 8u32);
                    } else {
                        let words = load_scales(b_scales, row, step, k);
                        st_shared_v2(to, words.extract(0usize), words.extract(1usize));
                    }
                }
            }
            if is_whole {
                cp_async_mbarrier_arrive_noinc(barrier);
            } else {
                mbarrier_arrive(barrier);
            }
            used += 1u32;
        }
        tile += CUBE_COUNT as u32;
    }
}

/// A consumer warpgroup: multiplies its share of every tile of this cube and writes it.
#[cube]
fn consume(
    problem: &ScheduledProblem,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    shared: SharedAddresses,
    #[comptime] plan: W4a16Plan,
) {
    let shape = comptime!(plan.tile);
    let stages = comptime!(plan.tile.stages());
    let tiles = tiles_of(problem, plan);
    let steps = problem.shape.k.div_ceil(comptime!(SPAN as u32));
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let lane = UNIT_POS % 32u32;
    let warp = (UNIT_POS % 128u32) / 32u32;
    let mut strip = consumer;
    if comptime!(shape.ways > 1) {
        strip = 0u32;
    }
    // Upper row of this lane in the 64 rows of `b`, and the offset of its codes and scales.
    let local = strip * comptime!(W4A16_STRIP as u32) + warp * 16u32 + lane / 4u32;
    let packed = PackedStage {
        codes: shared.codes + local * 64u32 + (lane % 4u32) * 16u32,
        scales: shared.scales + local * 8u32 + (lane % 4u32) * 2u32,
        rows: comptime!(plan.tile.rows_b() as u32).runtime(),
    };
    let a_tile = wgmma_descriptor(shared.a, Major::K);
    let ring = Ring {
        stages: comptime!(stages as u32).runtime(),
        advance: comptime!(plan.tile.ways as u32).runtime(),
        a_half: comptime!(plan.tile.a_half() as u64).runtime(),
    };
    let part = Part {
        consumer,
        strip,
        staging: shared.staging,
    };
    let mut tile = CUBE_POS as u32;
    let mut used = 0u32;
    while tile < tiles.m * tiles.n {
        let at = place_of(problem, tiles, tile, plan);
        let width = width_of(at.end - at.row, comptime!(plan.tile.widths()));
        let mut begin = used;
        let mut own_steps = steps;
        if comptime!(shape.ways > 1) {
            begin += consumer;
            own_steps = (steps + comptime!(plan.tile.ways as u32 - 1) - consumer)
                / comptime!(plan.tile.ways as u32);
        }
        let pipeline = PipelineState {
            full: shared.full,
            empty: shared.empty,
            stage: begin % comptime!(stages as u32),
            parity: (begin / comptime!(stages as u32)) & 1u32,
        };
        // Reinterpreted to a value: the mainloop would take a variable for a pointer.
        let own_steps = u32::reinterpret(own_steps);
        #[unroll]
        for i in 0..comptime!(shape.widths().len()) {
            let here = comptime!(shape.widths()[i]);
            if width == comptime!(here as u32) {
                // There are no vectors of 48, 56 and 96 values.
                let size!(S) = comptime!((here / 2).next_power_of_two());
                let mut sums = Vector::<f32, S>::new(0.0f32);
                if own_steps > 0u32 {
                    if comptime!(here == 256) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n256(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else if comptime!(here == 192) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n192(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else if comptime!(here == 128) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n128(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else if comptime!(here == 112) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n112(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else if comptime!(here == 96) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n96(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else if comptime!(here == 64) {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n64(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    } else {
                        sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n32(
                            pipeline, ring, a_tile, packed, own_steps,
                        ));
                    }
                }
                write_tile::<S>(sums, at, part, problem.shape.n, epilogue, out, here, shape);
            }
        }
        used += steps;
        tile += CUBE_COUNT as u32;
    }
}

/// Numbers of tiles along each dimension.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct TileCounts {
    m: u32,
    n: u32,
}

#[cube]
fn tiles_of(problem: &ScheduledProblem, #[comptime] plan: W4a16Plan) -> TileCounts {
    let mut m = problem.shape.m.div_ceil(comptime!(plan.tile.rows_a as u32));
    if comptime!(plan.grouped == GroupedDim::M) {
        m = problem.schedule[0].extract(0usize);
    }
    TileCounts {
        m,
        n: problem
            .shape
            .n
            .div_ceil(comptime!(plan.tile.rows_b() as u32)),
    }
}

/// Returns the position of tile number `number`.
#[cube]
fn place_of(
    problem: &ScheduledProblem,
    tiles: TileCounts,
    number: u32,
    #[comptime] plan: W4a16Plan,
) -> TilePlace {
    let rows_b = comptime!(plan.tile.rows_b() as u32);
    let at = place(number, tiles.m, tiles.n, problem.band, 1u32, rows_b);
    if comptime!(plan.grouped == GroupedDim::M) {
        let entry = problem.schedule[at.row as usize + 1usize];
        TilePlace {
            group: entry.extract(0usize),
            row: entry.extract(1usize),
            end: entry.extract(2usize),
            column: at.column,
        }
    } else {
        TilePlace {
            group: 0u32,
            row: at.row * comptime!(plan.tile.rows_a as u32),
            end: problem.shape.m,
            column: at.column,
        }
    }
}

/// The sm_90 GEMM with a packed weight that is dequantized in registers.
pub(crate) struct Sm90W4a16;

impl GemmKernel for Sm90W4a16 {
    fn name(&self) -> &'static str {
        "sm90_w4a16"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm90Wgmma
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        check_sm90(device, problem)?;
        let k = problem.shape.k;
        match problem {
            _ if problem.b != OperandLayout::Packed => {
                Err(Refusal::Operands("`b` is not packed along k"))
            }
            _ if problem.a == OperandLayout::MnMajor => Err(Refusal::Operands("`a` is MN-major")),
            _ if problem.grouped == GroupedDim::K => Err(Refusal::Operands("groups are along K")),
            // TMA reads rows of a multiple of 16 bytes of codes.
            _ if k == 0 || !k.is_multiple_of(32) => {
                Err(Refusal::Operands("k is no multiple of 32"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        if problem.grouped == GroupedDim::M {
            let (tile, band) = heuristics::sm90_w4a16_grouped(problem);
            return W4a16(tile, band).into();
        }
        let (tile, band, estimate) = heuristics::sm90_w4a16(device.sms, problem);
        Candidate {
            plan: W4a16(tile, band).into(),
            estimate: Some(estimate),
        }
    }
}

/// Plan: `b` is dequantized in registers. A tile, and the height of a band of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct W4a16(pub W4a16Tile, pub usize);

impl fmt::Display for W4a16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, n) = (self.0.rows_a, self.0.rows_b());
        write!(f, "wgmma, `b` dequantized in registers, {m} x {n} tiles")
    }
}

impl GemmPlan for W4a16 {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm90W4a16
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let Self(tile, band) = *self;
        if launch.b.layout != OperandLayout::Packed || launch.a.is_mn_major() {
            return Err(launch.misfit(self));
        }
        queue(launch, tile, band);
        Ok(())
    }
}

/// Queues the GEMM: `m` rows of `n`. First converts `a` to bf16 in the order of the kernel.
fn queue(launch: &Launch, tile: W4a16Tile, band: usize) {
    let Launch {
        client,
        a,
        b,
        groups,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let schedule = match groups.grouping {
        GroupedDim::M => Some(Schedule::of(tile, m, groups.groups)),
        GroupedDim::None | GroupedDim::K => None,
    };
    let rows = match schedule {
        Some(schedule) => schedule.rows_of_tiles(m, groups.groups),
        None => m.div_ceil(tile.rows_a),
    };
    let tiles = rows * n.div_ceil(tile.rows_b());
    let cubes = tiles.min(sms(client));
    // One more entry for their number.
    let entries = if schedule.is_some() { rows + 1 } else { 1 };
    let (arranged, schedule) = arrange(client, a, k, groups, entries, schedule);
    let out = &output.matrix().handle;
    let sum_scale = if a.is_packed() { 65536.0 } else { 256.0 };
    let width = k.next_multiple_of(SPAN);
    // SAFETY: the memory has `m` x `width` elements: it was allocated for them, or checked.
    let a_tensor =
        unsafe { TensorArg::from_raw_parts(arranged, [width, 1].into(), [m, width].into()) };
    let a_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_of_copy(), HALF].into(),
        },
        a_tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256);
    // SAFETY: the caller checked that the memory holds these words of eight codes.
    let b_tensor = unsafe {
        TensorArg::from_raw_parts(
            b.elements.clone(),
            [k / 8, 1].into(),
            [b.rows, k / 8].into(),
        )
    };
    let b_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_b(), ROW_WORDS].into(),
        },
        b_tensor,
        u32::elem_type_native(),
    )
    .with_prefetch(TensorMapPrefetch::B256);
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked that the memory holds what the kernel reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let bytes = m * n * epilogue.kind.out.size();
    // SAFETY: the kernel masks what it writes by rows and columns, and clamps what it reads.
    unsafe {
        sm90_w4a16_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(tile.units()),
            address_type((m * n).max(b.rows * k / 32)),
            a_map,
            b_map,
            memory(&b.scales, b.rows * k / 32),
            ScheduledProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&schedule, entries),
                band as u32,
            ),
            epilogue.launch([m, b.rows], groups.groups, (out, bytes / 4), sum_scale),
            memory(out, bytes / 16),
            W4a16Plan {
                grouped: groups.grouping,
                tile,
            },
        );
    }
}
