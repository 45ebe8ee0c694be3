//! The bf16 GEMM of Hopper: TMA loads into shared memory, `wgmma`, and a persistent grid.
//!
//! A cube has three warpgroups. One unit of the first is the producer of a multi-stage pipeline;
//! each stage has 64 columns of 128 rows of `a` and of `tile_n` rows of `b`. The other two
//! warpgroups multiply 64 rows of `a` each. The pipeline continues across tiles: while the
//! consumers write one tile, the first stages of the next one are loaded. TMA reads elements
//! outside the operands as zeros; their results are never written.
//!
//! Either operand may be MN-major, stored with K down its columns. Its stages then consist of boxes
//! of 64 stored rows of 64 elements, one per 64 rows of the tile, which the instruction transposes
//! as it reads them. Sums are bit-identical.

use std::fmt;

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use crate::{
    Nvfp4Error, StoredForm,
    capabilities::GemmBackend,
    cube::ptx::{
        Major, cvta_to_shared, mbarrier_arrive_expect_tx, mbarrier_wait_parity,
        sm90_mainloop::{
            PipelineState, mainloop_m64n64, mainloop_m64n128, mainloop_m64n176, mainloop_m64n256,
        },
        wgmma_descriptor,
    },
    gemm::{
        arguments::{GroupedProblem, GroupedProblemLaunch, ProblemShapeLaunch, thread_in_cta},
        epilogue::{Epilogue, STAGING, WarpTile, write_warp_tile},
        heuristics,
        materialize::Materialized,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, UNALIGNED, sms},
        scheduler::{GroupedDim, place},
        tiles::{SM90_BOX, SM90_TILE_K, SM90_TILE_M, Sm90Tile},
    },
    memory::address_type,
    moe::groups::extent,
};

/// One producer and two consumer warpgroups.
pub const UNITS: u32 = 384;

/// Comptime configuration of `sm90_bf16_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Plan {
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// Tile.
    pub tile: Sm90Tile,
    /// Layouts of `a` and `b`.
    pub majors: [Major; 2],
}

/// A K dimension in whole stages, and instructions of 16 columns in one partial stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Depth {
    pub steps: u32,
    pub tail: u32,
}

#[cube]
impl Depth {
    /// Returns the depth of `columns` columns.
    pub fn of(columns: u32) -> Self {
        let instructions = columns.div_ceil(16u32);
        Depth {
            steps: instructions / 4u32,
            tail: instructions % 4u32,
        }
    }

    /// Returns the number of stages, including the partial one.
    pub fn stages(&self) -> u32 {
        self.steps + u32::cast_from(self.tail > 0u32)
    }
}

/// Operands of a consumer warpgroup in every stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct StageOperands {
    /// Descriptor of its rows of `a` in the first stage.
    a: u64,
    /// Descriptor of `b` in the first stage.
    b: u64,
    /// 1 in the unit that signals to the producer that a stage has been read, else 0.
    leader: u32,
}

#[cube]
impl StageOperands {
    /// Returns the operands of this warpgroup.
    pub fn of(shared: SharedAddresses, #[comptime] majors: [Major; 2]) -> Self {
        let consumer = thread_in_cta() / 128u32 - 1u32;
        StageOperands {
            // Its 64 rows, or its box, are 64 times 128 bytes, in units of 16.
            a: wgmma_descriptor(shared.a, comptime!(majors[0])) + u64::cast_from(consumer * 512u32),
            b: wgmma_descriptor(shared.b, comptime!(majors[1])),
            leader: u32::cast_from((UNIT_POS & 127u32) == 0u32),
        }
    }
}

/// Initializes the barriers of a pipeline of `stages` stages for all units and for TMA: the
/// full-stage barriers, at which the producer arrives, then the empty-stage barriers, at which both
/// consumers arrive.
#[cube]
pub(super) fn init_barriers(barriers: &[Barrier], #[comptime] stages: usize) {
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..stages {
            barriers[s].init_manual(1);
            barriers[s + stages].init_manual(2);
        }
    }
    sync_async_proxy_shared();
    sync_cube();
}

/// Returns the state of consumers that have read `used` stages of a pipeline of `stages` stages.
#[cube]
pub(super) fn pipeline_at(full: u32, used: u32, #[comptime] stages: usize) -> PipelineState {
    PipelineState {
        full,
        empty: full + comptime!(8 * stages as u32),
        stage: used % comptime!(stages as u32),
        parity: (used / comptime!(stages as u32)) & 1u32,
    }
}

/// Returns the sums of 64 rows of a tile over `depth`, from the stage of `pipeline` on.
#[cube]
pub(super) fn multiply<S: Size>(
    pipeline: PipelineState,
    operands: StageOperands,
    depth: Depth,
    #[comptime] form: (Sm90Tile, [Major; 2]),
) -> Vector<f32, S> {
    let (tile, majors) = comptime!(form);
    let (a, b, leader) = (operands.a, operands.b, operands.leader);
    let steps = u32::reinterpret(depth.steps);
    let tail = u32::reinterpret(depth.tail);
    let mut sums = Vector::<f32, S>::new(0.0f32);
    if steps + tail > 0u32 {
        if comptime!(tile == Sm90Tile::N256) {
            sums = Vector::<f32, S>::reinterpret(mainloop_m64n256(
                pipeline, a, b, steps, tail, leader, majors,
            ));
        } else if comptime!(tile == Sm90Tile::N176) {
            sums = Vector::<f32, S>::reinterpret(mainloop_m64n176(
                pipeline, a, b, steps, tail, leader, majors,
            ));
        } else if comptime!(tile == Sm90Tile::N128) {
            sums = Vector::<f32, S>::reinterpret(mainloop_m64n128(
                pipeline, a, b, steps, tail, leader, majors,
            ));
        } else {
            sums = Vector::<f32, S>::reinterpret(mainloop_m64n64(
                pipeline, a, b, steps, tail, leader, majors,
            ));
        }
    }
    sums
}

/// Returns the rows of `a` of group `group`.
#[cube]
fn rows_of(problem: &GroupedProblem, group: u32, #[comptime] grouped: GroupedDim) -> u32 {
    let mut rows = problem.shape.m;
    if comptime!(grouped == GroupedDim::M) {
        let own = extent(&problem.offsets, group, problem.shape.m);
        rows = own.end - own.start;
    }
    rows
}

/// Returns the columns of group `group`.
#[cube]
fn depth_of(problem: &GroupedProblem, group: u32, #[comptime] grouped: GroupedDim) -> Depth {
    let mut columns = problem.shape.k;
    if comptime!(grouped == GroupedDim::K) {
        let own = extent(&problem.offsets, group, problem.shape.k);
        columns = own.end - own.start;
    }
    Depth::of(columns)
}

/// Loads `rows` rows of a tile from `row` on, and 64 columns from `depth` on, to `stage` by TMA,
/// with completion at `ready`: one box of rows, or boxes of 64 columns for an MN-major operand.
#[cube]
fn load_operand(
    operand: &TensorMap<bf16, Tiled>,
    stage: &mut [Vector<bf16, Const<8>>],
    ready: &Barrier,
    row: u32,
    depth: u32,
    #[comptime] rows: usize,
    #[comptime] major: Major,
) {
    if comptime!(major == Major::Mn) {
        #[unroll]
        for i in 0..comptime!(rows / SM90_BOX) {
            ready.tma_load_2d(
                operand,
                &mut stage[comptime!(i * SM90_BOX * 8)..comptime!((i + 1) * SM90_BOX * 8)],
                depth as i32,
                (row + comptime!((i * SM90_BOX) as u32)) as i32,
            );
        }
    } else {
        ready.tma_load_2d(operand, stage, row as i32, depth as i32);
    }
}

/// Source of a stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct StageSource {
    /// First row of `a`.
    pub row: u32,
    /// First row of `b`, a column of the output.
    pub column: u32,
    /// First column of `a`.
    pub depth: u32,
    /// First column of `b`.
    pub b_depth: u32,
    /// Number of stages filled before. All units count alike, so the pipeline needs no other state.
    pub used: u32,
}

/// Waits until the next stage is empty and fills it by TMA. `full` is the address of `barriers`.
#[cube]
pub(super) fn fill_stage(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<bf16, Tiled>,
    a_tiles: &mut [Vector<bf16, Const<8>>],
    b_tiles: &mut [Vector<bf16, Const<8>>],
    barriers: &[Barrier],
    full: u32,
    source: StageSource,
    #[comptime] form: (Sm90Tile, [Major; 2]),
) {
    let (tile, majors) = comptime!(form);
    let stages = comptime!(tile.stages());
    let b_stage = comptime!(b_stage(tile));
    let empty = full + comptime!(8 * stages as u32);
    let stage = source.used % comptime!(stages as u32);
    let parity = ((source.used / comptime!(stages as u32)) & 1u32) ^ 1u32;
    mbarrier_wait_parity(empty + stage * 8u32, parity);
    mbarrier_arrive_expect_tx(
        full + stage * 8u32,
        comptime!(((SM90_TILE_M + tile.n()) * SM90_TILE_K * 2) as u32),
    );
    let s = stage as usize;
    let ready = &barriers[s];
    load_operand(
        a,
        &mut a_tiles[s * A_STAGE..(s + 1) * A_STAGE],
        ready,
        source.row,
        source.depth,
        SM90_TILE_M,
        comptime!(majors[0]),
    );
    load_operand(
        b,
        &mut b_tiles[s * b_stage..(s + 1) * b_stage],
        ready,
        source.column,
        source.b_depth,
        comptime!(tile.n()),
        comptime!(majors[1]),
    );
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid does not
/// depend on device memory. The bias has a row per group. `out` is in units of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_bf16_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<bf16, Tiled>,
    problem: GroupedProblem,
    epilogue: Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Sm90Plan,
) {
    let tile = comptime!(plan.tile);
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * A_STAGE), 1024usize);
    let mut b_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * b_stage(tile)), 1024usize);
    let staging: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(8 * STAGING / 16), 128usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * tile.stages()), 8usize);
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    init_barriers(&barriers, comptime!(tile.stages()));
    if UNIT_POS < 128u32 {
        if UNIT_POS == 0u32 {
            produce(
                a,
                b,
                &problem,
                &mut a_tiles,
                &mut b_tiles,
                &barriers,
                full,
                plan,
            );
        }
    } else {
        let shared = SharedAddresses {
            full,
            a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr()),
            b: cvta_to_shared::<Vector<bf16, Const<8>>>(b_tiles.as_slice().as_ptr()),
            staging: cvta_to_shared::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr()),
        };
        consume(&problem, &epilogue, out, shared, plan);
    }
}

/// Addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedAddresses {
    /// First full-stage barrier; the empty-stage barriers follow.
    pub full: u32,
    pub a: u32,
    pub b: u32,
    pub staging: u32,
}

/// 16-byte vectors in a stage of `a`: eight per row.
pub(super) const A_STAGE: usize = SM90_TILE_M * 8;

/// Returns the 16-byte vectors in a stage of `b`.
pub(super) const fn b_stage(tile: Sm90Tile) -> usize {
    tile.n() * 8
}

/// The producer, one unit: fills the stages of all tiles of this cube in sequence.
#[cube]
fn produce(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<bf16, Tiled>,
    problem: &GroupedProblem,
    a_tiles: &mut [Vector<bf16, Const<8>>],
    b_tiles: &mut [Vector<bf16, Const<8>>],
    barriers: &[Barrier],
    full: u32,
    #[comptime] plan: Sm90Plan,
) {
    let tile_n = comptime!(plan.tile.n());
    let grouped = comptime!(plan.grouped);
    let tiles_n = problem.shape.n.div_ceil(comptime!(tile_n as u32));
    let mut tile = CUBE_POS as u32;
    // Current group, and number of tiles before it.
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let tiles_m = rows_of(problem, group, grouped).div_ceil(comptime!(SM90_TILE_M as u32));
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                comptime!(SM90_TILE_M as u32),
                comptime!(tile_n as u32),
            );
            let mut row = at.row;
            let mut column = at.column;
            let mut from = 0u32;
            let mut b_from = 0u32;
            if comptime!(grouped == GroupedDim::M) {
                row += extent(&problem.offsets, group, problem.shape.m).start;
                if comptime!(plan.majors[1] == Major::Mn) {
                    b_from = group * problem.shape.k;
                } else {
                    column += group * problem.shape.n;
                }
            }
            if comptime!(grouped == GroupedDim::K) {
                from = extent(&problem.offsets, group, problem.shape.k).start;
                b_from = from;
            }
            let depth = depth_of(problem, group, grouped);
            for step in 0..depth.stages() {
                let within = step * comptime!(SM90_TILE_K as u32);
                let source = StageSource {
                    row,
                    column,
                    depth: from + within,
                    b_depth: b_from + within,
                    used,
                };
                fill_stage(
                    a,
                    b,
                    a_tiles,
                    b_tiles,
                    barriers,
                    full,
                    source,
                    comptime!((plan.tile, plan.majors)),
                );
                used += 1u32;
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            group += 1u32;
        }
    }
}

/// A consumer warpgroup: multiplies 64 rows of every tile of this cube and writes them.
#[cube]
fn consume(
    problem: &GroupedProblem,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    shared: SharedAddresses,
    #[comptime] plan: Sm90Plan,
) {
    let tile_n = comptime!(plan.tile.n());
    let grouped = comptime!(plan.grouped);
    let majors = comptime!(plan.majors);
    let operands = StageOperands::of(shared, majors);
    let warp = (thread_in_cta() - 128u32) / 32u32;
    let staging = shared.staging + warp * comptime!(STAGING as u32);
    let tiles_n = problem.shape.n.div_ceil(comptime!(tile_n as u32));
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let tiles_m = rows_of(problem, group, grouped).div_ceil(comptime!(SM90_TILE_M as u32));
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                comptime!(SM90_TILE_M as u32),
                comptime!(tile_n as u32),
            );
            let mut first = 0u32;
            let mut end = problem.shape.m;
            if comptime!(grouped == GroupedDim::M) {
                let own = extent(&problem.offsets, group, problem.shape.m);
                first = own.start;
                end = own.end;
            }
            if comptime!(grouped == GroupedDim::K) {
                first = group * problem.shape.m;
                end = first + problem.shape.m;
            }
            let pipeline = pipeline_at(shared.full, used, comptime!(plan.tile.stages()));
            let depth = depth_of(problem, group, grouped);
            let size!(S) = comptime!(plan.tile.accumulators());
            let sums = multiply::<S>(pipeline, operands, depth, comptime!((plan.tile, majors)));
            let own = WarpTile {
                row: first + at.row + warp * 16u32,
                end,
                column: at.column,
                n: problem.shape.n,
                group,
                staging,
            };
            write_warp_tile::<S>(sums, own, epilogue, out, tile_n);
            used += depth.stages();
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            group += 1u32;
        }
    }
}

/// The bf16 GEMM of sm_90.
pub(crate) struct Sm90Bf16;

/// Checks that the sm_90 kernels support the sizes and memory: they write 16 bytes at a time, and
/// TMA reads stored rows of a multiple of 16 bytes that begin at multiples of 16.
///
/// # Errors
/// Returns the reason if they do not.
pub(crate) fn check_sm90(device: &Device, problem: &Problem) -> Result<(), Refusal> {
    let GemmShape { n, k, .. } = problem.shape;
    if device.capabilities.gemm != GemmBackend::Sm90Wgmma {
        return Err(Refusal::Device(
            "the device is not of compute capability 9.0",
        ));
    }
    if !n.is_multiple_of(8) {
        return Err(Refusal::Operands("n is no multiple of 8"));
    }
    // No stored row runs along K if both operands are MN-major.
    let no_rows = [problem.a, problem.b] == [OperandLayout::MnMajor; 2];
    if !no_rows && !k.is_multiple_of(8) {
        return Err(Refusal::Operands("k is no multiple of 8"));
    }
    if !problem.aligned {
        return Err(Refusal::Operands(UNALIGNED));
    }
    Ok(())
}

impl GemmKernel for Sm90Bf16 {
    fn name(&self) -> &'static str {
        "sm90_bf16"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm90Wgmma
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        problem.refuse_packed_mn_major()?;
        check_sm90(device, problem)
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        let (tile, band, estimate) = heuristics::sm90_bf16(device.sms, problem);
        Candidate {
            plan: DequantThenBf16(tile, band).into(),
            estimate: Some(estimate),
        }
    }
}

/// Plan: packed operands are dequantized to bf16 before the GEMM. A tile, and the height of a band
/// of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DequantThenBf16(pub Sm90Tile, pub usize);

impl fmt::Display for DequantThenBf16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0.n();
        write!(f, "wgmma on dequantized bf16, {SM90_TILE_M} x {n} tiles")
    }
}

impl GemmPlan for DequantThenBf16 {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm90Bf16
    }

    fn reads(&self) -> StoredForm {
        StoredForm::Bf16Unscaled
    }

    fn reads_mn_major(&self) -> bool {
        true
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let Self(tile, band) = *self;
        if !tile.takes_mn_major() && launch.b.is_mn_major() {
            return Err(launch.misfit(self));
        }
        queue(launch, tile, band);
        Ok(())
    }
}

/// Returns the order of the stored rows of `operand`.
pub(super) fn major(operand: &Materialized) -> Major {
    match operand.is_mn_major() {
        true => Major::Mn,
        false => Major::K,
    }
}

/// Returns the tensor map of `operand`, stored with `k` columns: boxes of the `rows` rows of a
/// tile, or of 64 rows of an MN-major operand. The memory must hold that many elements of each of
/// its matrices.
pub(super) fn operand_map(operand: &Materialized, k: usize, rows: usize) -> TensorMapArg<Tiled> {
    // A map may not be empty; with K = 0 none of it is read.
    let depth = if k == 0 { SM90_TILE_K } else { k };
    let (shape, tile_size) = if operand.is_mn_major() {
        (
            [operand.stack * depth, operand.rows],
            [SM90_TILE_K, SM90_BOX],
        )
    } else {
        ([operand.rows, depth], [rows, SM90_TILE_K])
    };
    // SAFETY: the caller checked that the memory holds this many elements.
    let tensor = unsafe {
        TensorArg::from_raw_parts(operand.elements.clone(), [shape[1], 1].into(), shape.into())
    };
    TensorMapArg::new(
        TiledArgs {
            tile_size: tile_size.into(),
        },
        tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// Queues the GEMM: `m` rows (all of them, or those of one group's output) of `n`. [`check_sm90`]
/// must accept memory and sizes.
fn queue(launch: &Launch, tile: Sm90Tile, band: usize) {
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
    let out = &output.matrix().handle;
    let rows = match groups.grouping {
        // Each group may end in a partial tile.
        GroupedDim::M => m.div_ceil(SM90_TILE_M) + groups.groups,
        GroupedDim::None | GroupedDim::K => m.div_ceil(SM90_TILE_M) * groups.groups,
    };
    let tiles = rows * n.div_ceil(tile.n());
    let cubes = tiles.min(sms(client));
    let outputs = match groups.grouping {
        GroupedDim::K => groups.groups * m * n,
        GroupedDim::None | GroupedDim::M => m * n,
    };
    // Rows of `b` of all groups, in any layout.
    let b_rows = match groups.grouping {
        GroupedDim::M => groups.groups * n,
        GroupedDim::None | GroupedDim::K => n,
    };
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked that the memory holds what `epilogue.kind` reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let bytes = outputs * epilogue.kind.out.size();
    // SAFETY: the kernel masks what it writes by rows and columns, and reads operands through maps.
    unsafe {
        sm90_bf16_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address_type(outputs),
            operand_map(a, k, SM90_TILE_M),
            operand_map(b, k, tile.n()),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                band as u32,
            ),
            epilogue.launch([m, b_rows], groups.groups, (out, bytes / 4), 1.0),
            memory(out, bytes / 16),
            Sm90Plan {
                grouped: groups.grouping,
                tile,
                majors: [a, b].map(major),
            },
        );
    }
}
