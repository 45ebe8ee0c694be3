//! The W4A16 GEMM of Hopper for a packed `b` that is MN-major, the gradient by the input (dgrad) of
//! a layer whose weight is stored as its forward reads it: `b` is dequantized in registers. No bf16
//! copy of it is in memory.
//!
//! As in [`sm90_w4a16`](super::sm90_w4a16), `wgmma` takes its left operand from registers, and the
//! GEMM is computed as `outᵀ = bᵀ · aᵀ`. Here the stored rows of `b` are the contraction, so that
//! neighbouring codes are neighbouring columns of the output: `a` is read as it is, and a lane has
//! four neighbouring columns of each of its rows of the output, which it writes from its registers.
//!
//! The first warp issues the TMA copies of codes and `a`. The three next ones take turns to bring
//! the block scales of a stage, as pairs of bf16: a scale is then decoded once for a tile. Two
//! consumer warpgroups have 128 columns each. Tiles have the same height, but the instructions of a
//! tile at the end of a group (or of `a`) are only as wide as its rows.

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::{
    sm90_bf16::{check_sm90, operand_map},
    sm90_w4a16_output::TilePlace,
};
use crate::{
    Nvfp4Error, PackedReads,
    capabilities::GemmBackend,
    cube::{
        codec::decode_e4m3_pair,
        ptx::{
            Major, cvta_to_global, cvta_to_shared, ld_global_no_allocate_v4, mbarrier_arrive,
            mbarrier_arrive_expect_tx, mbarrier_wait_parity, prmt, setmaxnreg_dec, setmaxnreg_inc,
            sm90_mainloop::PipelineState,
            sm90_mainloop_w4a16_mn_major::{
                MnMajorStage, STAGE_CODES, STAGE_K, STAGE_SCALES, STEP_SCALES,
                mn_major_mainloop_n32, mn_major_mainloop_n64, mn_major_mainloop_n128,
            },
            st_shared, wgmma_descriptor,
        },
    },
    gemm::{
        arguments::{GroupedProblem, GroupedProblemLaunch, ProblemShapeLaunch, thread_in_cta},
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
        heuristics,
        materialize::Reads,
        operand::OperandLayout,
        problem::{
            Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, misfit, sms,
        },
        scheduler::{GroupedDim, place},
        tiles::{W4A16_MN_TILE_N, W4a16MnTile},
    },
    memory::address_type,
    moe::groups::extent,
    tensor::FloatKind,
};

/// One warpgroup of producers and two of consumers.
pub const UNITS: u32 = 384;
/// Warps that bring scales.
const CARRIERS: u32 = 3;
/// Rows of `a` that one TMA instruction brings: they divide all widths.
const ROWS_OF_COPY: usize = 32;
/// Words of eight codes of a tile at one place of the contraction.
const ROW_WORDS: usize = W4A16_MN_TILE_N / 8;
/// Columns of the output that a lane has in each of its rows.
const LANE_COLUMNS: usize = 4;

impl W4a16MnTile {
    /// Vectors of 16 bytes of `a` in a stage: eight to a row.
    const fn a_stage(self) -> usize {
        self.rows_a() * 8
    }
}

/// The comptime choices of `sm90_w4a16_mn_major_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16MnMajorPlan {
    /// What is in groups: nothing, or M.
    pub grouped: GroupedDim,
    /// The tile.
    pub tile: W4a16MnTile,
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[k, n] (+ bias[n]) (+ out[m, n])`, for each group of rows.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid depends
/// on nothing that is in device memory. `b` is a map of words of eight codes, the groups' matrices
/// one below the other, and `b_scales` are its scales in twos. Dequantized elements of `b` are 2^-8
/// times what they stand for: the epilogue's `sum_scale`. `out` is in units of 8 bytes.
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
            // TMA, and the units of the warp that brings scales; all units that consume.
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

/// Where the parts of shared memory begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SharedAddresses {
    full: u32,
    empty: u32,
    a: u32,
    codes: u32,
    scales: u32,
}

/// Rows of tiles of group `group`.
#[cube]
fn tile_rows(problem: &GroupedProblem, group: u32, #[comptime] plan: W4a16MnMajorPlan) -> u32 {
    let mut rows = problem.shape.m;
    if comptime!(plan.grouped == GroupedDim::M) {
        let own = extent(&problem.offsets, group, problem.shape.m);
        rows = own.end - own.start;
    }
    rows.div_ceil(comptime!(plan.tile.rows_a() as u32))
}

/// Columns of tiles.
#[cube]
fn tile_columns(problem: &GroupedProblem) -> u32 {
    problem.shape.n.div_ceil(comptime!(W4A16_MN_TILE_N as u32))
}

/// Where tile `number` of group `group` lies, which has `rows` rows of tiles.
#[cube]
fn place_of(
    problem: &GroupedProblem,
    group: u32,
    number: u32,
    rows: u32,
    #[comptime] plan: W4a16MnMajorPlan,
) -> TilePlace {
    let at = place(
        number,
        rows,
        tile_columns(problem),
        problem.band,
        comptime!(plan.tile.rows_a() as u32),
        comptime!(W4A16_MN_TILE_N as u32),
    );
    let mut first = 0u32;
    let mut end = problem.shape.m;
    if comptime!(plan.grouped == GroupedDim::M) {
        let own = extent(&problem.offsets, group, problem.shape.m);
        first = own.start;
        end = own.end;
    }
    TilePlace {
        group,
        row: first + at.row,
        end,
        column: at.column,
    }
}

/// Stages of a tile.
#[cube]
fn steps_of(problem: &GroupedProblem) -> u32 {
    problem.shape.k.div_ceil(comptime!(STAGE_K as u32))
}

/// The instructions' width for `rows` rows of `a`.
#[cube]
fn width_of(rows: u32, #[comptime] tile: W4a16MnTile) -> u32 {
    let count = comptime!(tile.widths().len());
    let mut width = comptime!(tile.rows_a() as u32).runtime();
    #[unroll]
    for i in 1..count {
        let narrower = comptime!(tile.widths()[count - 1 - i] as u32);
        if rows <= narrower {
            width = narrower.runtime();
        }
    }
    width
}

/// The producer, one unit: lets TMA fill the stages of all tiles of this cube, one after another.
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
    // The group that is looked at, and the tiles before it.
    let mut group = 0u32;
    let mut passed = 0u32;
    // Stages used so far: all units count alike, so the ring needs no other state.
    let mut used = 0u32;
    while group < problem.shape.groups {
        let rows = tile_rows(problem, group, plan);
        let tiles = rows * tile_columns(problem);
        if tile - passed < tiles {
            let at = place_of(problem, group, tile - passed, rows, plan);
            let width = width_of(at.end - at.row, comptime!(plan.tile));
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

/// A warp of those that bring scales: every `CARRIERS`th stage of this cube. A lane has the 16
/// blocks of two neighbouring places of the contraction, which it loads before the stage is empty.
/// Scales outside the matrix are zeros: no scale there may be NaN.
#[cube]
fn bring_scales(
    b_scales: &[u16],
    problem: &GroupedProblem,
    shared: SharedAddresses,
    #[comptime] plan: W4a16MnMajorPlan,
) {
    let stages = comptime!(plan.tile.stages() as u32);
    let steps = steps_of(problem);
    let own = thread_in_cta() / 32u32 - 1u32;
    let lane = UNIT_POS % 32u32;
    let to = shared.scales + place_of_scales(lane);
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let rows = tile_rows(problem, group, plan);
        let tiles = rows * tile_columns(problem);
        if tile - passed < tiles {
            let at = place_of(problem, group, tile - passed, rows, plan);
            for step in 0..steps {
                if used % CARRIERS == own {
                    let stage = used % stages;
                    let parity = ((used / stages) & 1u32) ^ 1u32;
                    let depth = step * comptime!(STAGE_K as u32) + 2u32 * lane;
                    let even = load_scales(b_scales, problem, at, depth);
                    let odd = load_scales(b_scales, problem, at, depth + 1u32);
                    mbarrier_wait_parity(shared.empty + stage * 8u32, parity);
                    let to = to + stage * comptime!(STAGE_SCALES as u32);
                    #[unroll]
                    for word in 0..4usize {
                        let (x, y) = (even.extract(word), odd.extract(word));
                        // Two blocks of both places each.
                        let low = prmt(x, y, 0x5140u32);
                        let high = prmt(x, y, 0x7362u32);
                        let to = to + comptime!(4 * 32 * word as u32);
                        st_shared(to, decode_e4m3_pair(low));
                        st_shared(to + 32u32, decode_e4m3_pair(low >> 16u32));
                        st_shared(to + 64u32, decode_e4m3_pair(high));
                        st_shared(to + 96u32, decode_e4m3_pair(high >> 16u32));
                    }
                    mbarrier_arrive(shared.full + stage * 8u32);
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

/// Where the scales at places `2 lane` and `2 lane + 1` of the contraction lie in a stage, those of
/// the first block: each pair is one word, and a step of 16 places has the order of
/// [`mn_major_mainloop_n128()`].
#[cube]
fn place_of_scales(lane: u32) -> u32 {
    (lane / 8u32) * comptime!(STEP_SCALES as u32)
        + (lane % 4u32) * 8u32
        + ((lane / 4u32) & 1u32) * 4u32
}

/// The scales of the 16 blocks of the tile at `at`, at place `depth` of the contraction of its
/// group: one load where rows of scales are whole ones, or in twos, which they always are.
#[cube]
fn load_scales(
    b_scales: &[u16],
    problem: &GroupedProblem,
    at: TilePlace,
    depth: u32,
) -> Vector<u32, Const<4>> {
    let pairs = problem.shape.n / 32u32;
    let first = at.column / 32u32;
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    if depth < problem.shape.k {
        let row = (at.group * problem.shape.k + depth) as usize * pairs as usize;
        if pairs.is_multiple_of(8u32) {
            let from = cvta_to_global::<u16>(b_scales.as_ptr());
            words = ld_global_no_allocate_v4(from + 2u64 * u64::cast_from(row + first as usize));
        } else {
            #[unroll]
            for word in 0..4usize {
                let pair = first + comptime!(2 * word as u32);
                let mut four = 0u32;
                if pair < pairs {
                    four = u32::cast_from(b_scales[row + pair as usize]);
                }
                if pair + 1u32 < pairs {
                    four |= u32::cast_from(b_scales[row + pair as usize + 1usize]) << 16u32;
                }
                words.insert(word, four);
            }
        }
    }
    words
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
    // Which 32 columns of the tile this warp has: 16 bytes of codes, two blocks.
    let strip = thread_in_cta() / 32u32 - 4u32;
    let lane = UNIT_POS % 32u32;
    let packed = lane_of_stage(shared, strip, lane);
    let a_tile = wgmma_descriptor(shared.a, Major::K);
    // A value: the mainloop would take a variable for a pointer.
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
            let width = width_of(at.end - at.row, comptime!(plan.tile));
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

/// Where a lane of the warp of `strip` reads in stage 0. The swizzle of TMA exchanges the 16 bytes
/// of the strips: those of strip `s` in row `r` are at `s ^ (r % 8)`.
#[cube]
fn lane_of_stage(shared: SharedAddresses, strip: u32, lane: u32) -> MnMajorStage {
    let row = 2u32 * (lane % 4u32);
    let codes = shared.codes + (lane / 4u32) * 2u32;
    MnMajorStage {
        even: codes + row * 128u32 + (strip ^ row) * 16u32,
        odd: codes + (row + 1u32) * 128u32 + (strip ^ (row + 1u32)) * 16u32,
        scales: shared.scales + (strip * 2u32 + lane / 16u32) * 32u32 + (lane % 4u32) * 8u32,
    }
}

/// Applies the epilogue to the sums of a lane and writes them: of `width` rows of `a` from `at` on
/// it has two neighbours in each eight, the first at `2 quad`, and four columns of each from those
/// of `at` on, two of either instruction. A warp writes 32 columns of four rows at a time.
#[cube]
fn write_lane<N: Size>(
    sums: Vector<f32, N>,
    at: TilePlace,
    quad: u32,
    n: u32,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<2>>],
    #[comptime] width: usize,
) {
    let kind = comptime!(epilogue.kind);
    let b_factor = epilogue.b_tile_factor(at.group);
    let mut largest = 0u32;
    #[unroll]
    for part in 0..comptime!(width / 4) {
        let (eight, odd_row) = comptime!((part / 2, part % 2));
        let row = at.row + comptime!((eight * 8 + odd_row) as u32) + 2u32 * quad;
        if row < at.end && at.column < n {
            let alpha = epilogue.a_factor(row, at.group) * b_factor;
            let index = row as usize * n as usize + at.column as usize;
            let own = at.group as usize * n as usize + at.column as usize;
            let mut words = Vector::<u32, Const<2>>::new(0u32);
            #[unroll]
            for half in 0..comptime!(LANE_COLUMNS / 2) {
                // Its upper and its lower row of the fragment are two columns.
                let first = comptime!(half * width / 2 + eight * 4 + odd_row);
                let pair = index + comptime!(2 * half);
                let even = Addends {
                    alpha,
                    bias: epilogue.load_bias(own + comptime!(2 * half)),
                    c: epilogue.load_c(pair, 0u32),
                };
                let even = apply(sums.extract(first) * epilogue.sum_scale, even, kind);
                let odd = Addends {
                    alpha,
                    bias: epilogue.load_bias(own + comptime!(2 * half + 1)),
                    c: epilogue.load_c(pair, 1u32),
                };
                let sum = sums.extract(comptime!(first + 2)) * epilogue.sum_scale;
                let odd = apply(sum, odd, kind);
                if comptime!(kind.out == FloatKind::F32) {
                    words.insert(0usize, u32::reinterpret(even));
                    words.insert(1usize, u32::reinterpret(odd));
                    out[pair / 2usize] = words;
                } else {
                    words.insert(half, pack_pair(even, odd, comptime!(kind.out)));
                }
                if comptime!(kind.amax.is_some()) {
                    largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                }
            }
            if comptime!(kind.out != FloatKind::F32) {
                out[index / LANE_COLUMNS] = words;
            }
        }
    }
    epilogue.atomic_amax(at.group, largest);
}

/// The GEMM of sm_90 with a packed MN-major weight that is dequantized in registers.
pub(crate) struct Sm90W4a16MnMajor;

impl Kernel for Sm90W4a16MnMajor {
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
        // TMA reads rows of whole 16 bytes of codes. A map may not be empty.
        match n.is_multiple_of(32) && k > 0 {
            true => Ok(()),
            false => Err(Refusal::Operands("n is no multiple of 32, or k is 0")),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        let (tile, band) = heuristics::sm90_w4a16_mn_major(device.sms, problem);
        Plan::W4a16MnMajor(tile, band).into()
    }

    fn reads(&self, _plan: Plan) -> Reads {
        Reads {
            // Of `a`: what `b` is, it is for every kernel.
            packed: PackedReads::Bf16,
            mn_major: false,
            mxfp8: false,
        }
    }

    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error> {
        let layouts = [launch.a.layout, launch.b.layout];
        match plan {
            Plan::W4a16MnMajor(tile, band)
                if layouts == [OperandLayout::KMajor, OperandLayout::PackedMnMajor] =>
            {
                queue(launch, tile, band);
                Ok(())
            }
            plan => Err(misfit(plan, launch)),
        }
    }
}

/// Queues the GEMM: `m` rows of `n`. Memory and sizes are those that the kernel takes.
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
        // Each group may end in a tile of its own.
        GroupedDim::M => m.div_ceil(tile.rows_a()) + groups.groups,
        GroupedDim::None | GroupedDim::K => m.div_ceil(tile.rows_a()),
    };
    let tiles = rows * n.div_ceil(W4A16_MN_TILE_N);
    let cubes = tiles.min(sms(client));
    let depth = b.stack * k;
    // SAFETY: the caller checked that the memory holds these words of eight codes.
    let b_tensor = unsafe {
        TensorArg::from_raw_parts(b.codes.clone(), [n / 8, 1].into(), [depth, n / 8].into())
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

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: SharedAddresses = SharedAddresses {
        full: 0,
        empty: 0,
        a: 0,
        codes: 0,
        scales: 1 << 20,
    };

    /// What a lane reads, and where its fragments and the rows of its sums say that it belongs: the
    /// codes as TMA brings them, and the scales as the carriers lay them.
    #[test]
    fn lanes_read_what_their_fragments_want() {
        // The place of the contraction and the first of the four columns of each two bytes, by
        // address: 16 bytes of row `r` are exchanged by `r % 8`.
        let mut codes = vec![None; STAGE_CODES / 2];
        for (row, two) in (0..STAGE_K).flat_map(|row| (0..64).map(move |two| (row, two))) {
            let address = row * 128 + ((two / 8) ^ (row % 8)) * 16 + two % 8 * 2;
            assert!(codes[address / 2].replace((row, 4 * two)).is_none());
        }
        // The same of scales: the first place of a pair, and the block.
        let mut scales = vec![None; STAGE_SCALES / 4];
        for (lane, block) in (0..32u32).flat_map(|lane| (0..16u32).map(move |block| (lane, block)))
        {
            let address = (place_of_scales(lane) + 32 * block) as usize;
            let pair = (2 * lane as usize, block as usize);
            assert!(scales[address / 4].replace(pair).is_none());
        }
        for (warp, lane) in (0..8).flat_map(|warp| (0..32).map(move |lane| (warp, lane))) {
            let packed = lane_of_stage(SHARED, warp, lane);
            let (quad, four) = (lane as usize % 4, lane as usize / 4);
            let columns = warp as usize * 32 + 4 * four;
            for step in 0..STAGE_K / 16 {
                // "Register Fragments for wgmma": k of the registers of either half.
                for (offset, k) in [(0, 2 * quad), (1024, 2 * quad + 8)] {
                    let k = 16 * step + k;
                    for (address, k) in [(packed.even, k), (packed.odd, k + 1)] {
                        let address = address as usize + 2048 * step + offset;
                        assert_eq!(codes[address / 2], Some((k, columns)), "{warp}, {lane}");
                    }
                    let address = (packed.scales - SHARED.scales) as usize + step * STEP_SCALES;
                    let pair = Some((k, columns / 16));
                    assert_eq!(scales[(address + offset / 256) / 4], pair, "{warp}, {lane}");
                }
            }
        }
    }

    /// What a warp reads together is in different banks, and so is what it writes.
    #[test]
    fn no_two_words_share_a_bank() {
        let distinct = |addresses: &mut dyn Iterator<Item = u32>| {
            let mut words: Vec<u32> = addresses.map(|address| address / 4).collect();
            words.sort_unstable();
            words.dedup();
            let mut banks: Vec<u32> = words.iter().map(|word| word % 32).collect();
            banks.sort_unstable();
            banks.windows(2).all(|two| two[0] != two[1])
        };
        for warp in 0..8 {
            let lanes = || (0..32).map(move |lane| lane_of_stage(SHARED, warp, lane));
            assert!(distinct(&mut lanes().map(|lane| lane.even)), "{warp}");
            assert!(distinct(&mut lanes().map(|lane| lane.odd)), "{warp}");
            let scales = lanes().flat_map(|lane| [lane.scales, lane.scales + 4]);
            assert!(distinct(&mut scales.into_iter()), "{warp}");
        }
        assert!(distinct(&mut (0..32).map(place_of_scales)));
    }
}
