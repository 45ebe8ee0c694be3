//! The W4A16 GEMM of Hopper for a packed MN-major `b`: the dgrad of a layer whose weight is stored
//! for its forward pass. `b` is dequantized in registers, and memory holds no bf16 copy of it.
//!
//! As in [`sm90_w4a16`](super::super::w4a16), `wgmma` takes its left operand from registers, and the
//! GEMM is computed as `outᵀ = bᵀ · aᵀ`. Here the stored rows of `b` are K, so neighbouring codes
//! are neighbouring columns of the output. `a` is therefore read in its stored order, and a lane
//! has four neighbouring columns of each of its rows of the output, which it writes directly from
//! its registers.
//!
//! The first warp issues the TMA copies of codes and `a`. The next three warps take turns to load
//! the block scales of a stage as pairs of bf16, so that a scale is decoded only once per tile. Two
//! consumer warpgroups have 128 columns each. All tiles have the same height, but the instructions
//! of a tile at the end of a group (or of `a`) are only as wide as its rows.

use std::fmt;

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::super::{
    bf16::{check_sm90, operand_map},
    w4a16::{TilePlace, width_of},
};
use super::{
    output::write_lane,
    stage::{SharedAddresses, bring_scales, lane_of_stage},
    tiles::{W4a16MnMajorPlan, place_of, steps_of, tile_columns, tile_rows},
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::GemmBackend,
    cube::ptx::{
        Major, cvta_to_shared, mbarrier_arrive_expect_tx, mbarrier_wait_parity, setmaxnreg_dec,
        setmaxnreg_inc,
        sm90_mainloop::PipelineState,
        sm90_mainloop_w4a16_mn_major::{
            STAGE_CODES, STAGE_K, STAGE_SCALES, mn_major_mainloop_n32, mn_major_mainloop_n64,
            mn_major_mainloop_n128,
        },
        wgmma_descriptor,
    },
    gemm::{
        arguments::{GroupedProblem, GroupedProblemLaunch, ProblemShapeLaunch, thread_in_cta},
        epilogue::Epilogue,
        heuristics,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, sms},
        scheduler::GroupedDim,
        tiles::{W4A16_MN_TILE_N, W4a16MnTile},
    },
    memory::address_type,
};

/// One warpgroup of producers and two of consumers.
pub const UNITS: u32 = 384;
/// Rows of `a` that one TMA instruction loads: a divisor of all widths.
const ROWS_OF_COPY: usize = 32;
/// Words of eight codes of a tile per stored row of `b`.
const ROW_WORDS: usize = W4A16_MN_TILE_N / 8;

impl W4a16MnTile {
    /// Returns the 16-byte vectors of `a` in a stage: eight per row.
    const fn a_stage(self) -> usize {
        self.rows_a() * 8
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[k, n] (+ bias[n]) (+ out[m, n])`, for each group of rows.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid does not
/// depend on device memory. `b` is a map of words of eight codes, with the groups' matrices
/// stacked, and `b_scales` holds its scales in pairs. Dequantized elements of `b` are 2^-8 times
/// their value; the epilogue's `sum_scale` compensates. `out` is in units of 8 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_w4a16_mn_major_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    b_scales: &[u16],
    problem: GroupedProblem,
    epilogue: Epilogue,
    out: &mut [Vector<u32, Const<2>>],
    #[comptime] plan: W4a16MnMajorPlan,
) {
    let tile = comptime!(plan.tile);
    let stages = comptime!(plan.tile.stages());
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * tile.a_stage()), 1024usize);
    let mut code_tiles: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * STAGE_CODES / 16), 1024usize);
    let scale_tiles: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * STAGE_SCALES / 16), 128usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * tile.stages()), 8usize);
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let shared = SharedAddresses {
        full,
        empty: full + comptime!(8 * tile.stages() as u32),
        a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr()),
        codes: cvta_to_shared::<Vector<u32, Const<4>>>(code_tiles.as_slice().as_ptr()),
        scales: cvta_to_shared::<Vector<u32, Const<4>>>(scale_tiles.as_slice().as_ptr()),
    };
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..stages {
            // Arrivals: TMA and the units of the warp that loads scales; then all units that
            // consume.
            barriers[s].init_manual(33);
            barriers[s + stages].init_manual(256);
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    if UNIT_POS < 128u32 {
        // Sums and fragments take more registers than an equal share.
        setmaxnreg_dec(56u32);
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
        if UNIT_POS >= 32u32 {
            bring_scales(b_scales, &problem, shared, plan);
        }
    } else {
        setmaxnreg_inc(224u32);
        consume(&problem, &epilogue, out, shared, plan);
    }
}

/// The producer, one unit: fills the stages of all tiles of this cube by TMA, in sequence.
#[cube]
fn produce(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    problem: &GroupedProblem,
    a_tiles: &mut [Vector<bf16, Const<8>>],
    code_tiles: &mut [Vector<u32, Const<4>>],
    barriers: &[Barrier],
    shared: SharedAddresses,
    #[comptime] plan: W4a16MnMajorPlan,
) {
    let stages = comptime!(plan.tile.stages() as u32);
    let a_stage = comptime!(plan.tile.a_stage());
    let steps = steps_of(problem);
    let mut tile = CUBE_POS as u32;
    // Current group, and number of tiles before it.
    let mut group = 0u32;
    let mut passed = 0u32;
    // Stages used so far. All units count alike, so the pipeline needs no other state.
    let mut used = 0u32;
    while group < problem.shape.groups {
        let rows = tile_rows(problem, group, plan);
        let tiles = rows * tile_columns(problem);
        if tile - passed < tiles {
            let at = place_of(problem, group, tile - passed, rows, plan);
            let width = width_of(at.end - at.row, comptime!(plan.tile.widths()));
            for step in 0..steps {
                let depth = step * comptime!(STAGE_K as u32);
                let stage = used % stages;
                let parity = ((used / stages) & 1u32) ^ 1u32;
                mbarrier_wait_parity(shared.empty + stage * 8u32, parity);
                mbarrier_arrive_expect_tx(
                    shared.full + stage * 8u32,
                    width * comptime!(2 * STAGE_K as u32) + comptime!(STAGE_CODES as u32),
                );
                let s = stage as usize;
                let ready = &barriers[s];
                ready.tma_load_2d(
                    b,
                    &mut code_tiles
                        [s * comptime!(STAGE_CODES / 16)..(s + 1) * comptime!(STAGE_CODES / 16)],
                    (group * problem.shape.k + depth) as i32,
                    (at.column / 8u32) as i32,
                );
                #[unroll]
                for copy in 0..comptime!(plan.tile.rows_a() / ROWS_OF_COPY) {
                    let ahead = comptime!((copy * ROWS_OF_COPY) as u32);
                    if ahead < width {
                        let first = s * a_stage + comptime!(copy * ROWS_OF_COPY * 8);
                        ready.tma_load_2d(
                            a,
                            &mut a_tiles[first..first + comptime!(ROWS_OF_COPY * 8)],
                            (at.row + ahead) as i32,
                            depth as i32,
                        );
                    }
                }
                used += 1u32;
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles;
            group += 1u32;
        }
    }
}

/// A consumer warpgroup: multiplies 128 columns of every tile of this cube and writes them.
#[cube]
fn consume(
    problem: &GroupedProblem,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<2>>],
    shared: SharedAddresses,
    #[comptime] plan: W4a16MnMajorPlan,
) {
    let stages = comptime!(plan.tile.stages() as u32);
    let a_stage = comptime!(plan.tile.a_stage() as u32);
    // Index of this warp's 32 columns of the tile: 16 bytes of codes, two blocks.
    let strip = thread_in_cta() / 32u32 - 4u32;
    let lane = UNIT_POS % 32u32;
    let packed = lane_of_stage(shared, strip, lane);
    let a_tile = wgmma_descriptor(shared.a, Major::K);
    // Reinterpreted to a value: the mainloop would take a variable for a pointer.
    let steps = u32::reinterpret(steps_of(problem));
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let rows = tile_rows(problem, group, plan);
        let tiles = rows * tile_columns(problem);
        if tile - passed < tiles {
            let at = place_of(problem, group, tile - passed, rows, plan);
            let width = width_of(at.end - at.row, comptime!(plan.tile.widths()));
            let pipeline = PipelineState {
                full: shared.full,
                empty: shared.empty,
                stage: used % stages,
                parity: (used / stages) & 1u32,
            };
            #[unroll]
            for i in 0..comptime!(plan.tile.widths().len()) {
                let here = comptime!(plan.tile.widths()[i]);
                if width == comptime!(here as u32) {
                    let size!(S) = here;
                    let mut sums = Vector::<f32, S>::new(0.0f32);
                    if steps > 0u32 {
                        if comptime!(here == 128) {
                            sums = Vector::<f32, S>::reinterpret(mn_major_mainloop_n128(
                                pipeline, a_tile, packed, steps, a_stage, stages,
                            ));
                        } else if comptime!(here == 64) {
                            sums = Vector::<f32, S>::reinterpret(mn_major_mainloop_n64(
                                pipeline, a_tile, packed, steps, a_stage, stages,
                            ));
                        } else {
                            sums = Vector::<f32, S>::reinterpret(mn_major_mainloop_n32(
                                pipeline, a_tile, packed, steps, a_stage, stages,
                            ));
                        }
                    }
                    let column = at.column + strip * 32u32 + (lane / 4u32) * 4u32;
                    let own = TilePlace {
                        group: at.group,
                        row: at.row,
                        end: at.end,
                        column,
                    };
                    write_lane::<S>(sums, own, lane % 4u32, problem.shape.n, epilogue, out, here);
                }
            }
            used += steps;
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles;
            group += 1u32;
        }
    }
}

/// The sm_90 GEMM with a packed MN-major weight that is dequantized in registers.
pub(crate) struct Sm90W4a16MnMajor;

impl GemmKernel for Sm90W4a16MnMajor {
    fn name(&self) -> &'static str {
        "sm90_w4a16_mn_major"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm90Wgmma
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        check_sm90(device, problem)?;
        let GemmShape { n, k, .. } = problem.shape;
        match problem.b {
            OperandLayout::PackedMnMajor => {}
            _ => return Err(Refusal::Operands("`b` is not packed and MN-major")),
        }
        // TMA reads rows of a multiple of 16 bytes of codes. A map may not be empty.
        match n.is_multiple_of(32) && k > 0 {
            true => Ok(()),
            false => Err(Refusal::Operands("n is no multiple of 32, or k is 0")),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        let (tile, band) = heuristics::sm90_w4a16_mn_major(device.sms, problem);
        W4a16MnMajor(tile, band).into()
    }
}

/// Plan: an MN-major `b` is dequantized in registers. A tile, and the height of a band of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct W4a16MnMajor(pub W4a16MnTile, pub usize);

impl fmt::Display for W4a16MnMajor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.0.rows_a();
        write!(
            f,
            "wgmma, MN-major `b` dequantized in registers, {m} x {W4A16_MN_TILE_N} tiles"
        )
    }
}

impl GemmPlan for W4a16MnMajor {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm90W4a16MnMajor
    }

    /// Returns the form of `a`; `b` has the same form for every kernel.
    fn reads(&self) -> StoredForm {
        StoredForm::Bf16Unscaled
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let Self(tile, band) = *self;
        let layouts = [launch.a.layout, launch.b.layout];
        if layouts != [OperandLayout::KMajor, OperandLayout::PackedMnMajor] {
            return Err(launch.misfit(self));
        }
        queue(launch, tile, band);
        Ok(())
    }
}

/// Queues the GEMM: `m` rows of `n`. The kernel must support memory and sizes.
fn queue(launch: &Launch, tile: W4a16MnTile, band: usize) {
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
    let rows = match groups.grouping {
        // Each group may end in a partial tile.
        GroupedDim::M => m.div_ceil(tile.rows_a()) + groups.groups,
        GroupedDim::None | GroupedDim::K => m.div_ceil(tile.rows_a()),
    };
    let tiles = rows * n.div_ceil(W4A16_MN_TILE_N);
    let cubes = tiles.min(sms(client));
    let depth = b.stack * k;
    // SAFETY: the caller checked that the memory holds these words of eight codes.
    let b_tensor = unsafe {
        TensorArg::from_raw_parts(b.elements.clone(), [n / 8, 1].into(), [depth, n / 8].into())
    };
    let b_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [STAGE_K, ROW_WORDS].into(),
        },
        b_tensor,
        u32::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256);
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked that the memory holds what the kernel reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let out = &output.matrix().handle;
    let bytes = m * n * epilogue.kind.out.size();
    // SAFETY: the kernel masks what it writes and what it reads of scales by rows and columns, and
    // reads operands through maps.
    unsafe {
        sm90_w4a16_mn_major_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address_type((m * n).max(depth * n / 32)),
            operand_map(a, k, ROWS_OF_COPY),
            b_map,
            memory(&b.scales, depth * n / 32),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                band as u32,
            ),
            epilogue.launch(
                [m, groups.groups * n],
                groups.groups,
                (out, bytes / 4),
                256.0,
            ),
            memory(out, bytes / 8),
            W4a16MnMajorPlan {
                grouped: groups.grouping,
                tile,
            },
        );
    }
}
