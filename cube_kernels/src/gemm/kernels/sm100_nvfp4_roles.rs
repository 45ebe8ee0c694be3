//! The two threads that drive the [`sm100_nvfp4`](super::sm100_nvfp4) kernel: one fills stages, one
//! issues instructions.

use cubecl::{prelude::barrier::Barrier, prelude::*};

use super::{
    sm100_nvfp4_commands::{delay, has_fault, issue_commit, issue_copy, issue_mma},
    sm100_nvfp4_operands::{
        A_CODES, A_SCALES, A_SCALES_AT, ATOM, B_CODES, B_CODES_AT, B_SCALES, B_SCALES_AT, STAGES,
        STEP_K, STEPS, StageAt, TILE_K, mma_operands, scale_copy, steps_of,
    },
    sm100_nvfp4_stage::{CtaState, GroupExtent, Sm100Plan, SwizzledScales},
};
use crate::{
    cube::ptx::{
        cp_async_bulk, cvta_to_global, mbarrier_arrive, mbarrier_arrive_expect_tx,
        mbarrier_wait_parity, nanosleep, tcgen05_fence_after_thread_sync,
    },
    gemm::{
        arguments::GroupedProblem,
        scheduler::{GroupedDim, place},
        tiles::{Fault, SM100_TILE_M, SM100_TILE_N, TensorCore},
    },
};

/// Where the operands of a tile begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct TileSource {
    /// Its first row of `a`.
    a: u32,
    /// Its first row of `b`.
    b: u32,
    /// Its 128 rows of `a` among those of the scales.
    a_tile: u32,
    /// Its first 128 rows of `b` among those of the scales.
    b_tile: u32,
    /// How many times 128 rows of `b` it has: 1 or 2.
    b_tiles: u32,
}

/// What a stage is filled with.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct StageSource {
    /// The tile.
    tile: TileSource,
    /// Columns of the operands.
    k_all: u32,
    /// The group's first column.
    k_first: u32,
    /// Columns of the group.
    k: u32,
    /// Which 256 of them.
    k_tile: u32,
    /// Stages that were filled before.
    used: u32,
}

/// Fills the stages of all tiles of this CTA, one after another. One thread.
#[cube]
pub(super) fn load_tiles(
    a_map: &TensorMap<u32, Tiled>,
    b_map: &TensorMap<u32, Tiled>,
    scales: &SwizzledScales,
    problem: &GroupedProblem,
    operands: &mut [u32],
    barriers: &[Barrier],
    cta: CtaState,
    #[comptime] plan: Sm100Plan,
) {
    let n = problem.shape.n;
    let tiles_n = n.div_ceil(comptime!(SM100_TILE_N as u32));
    // Rows of `b` of a group begin at a tile of scales.
    let n_tiles = n.div_ceil(comptime!(SM100_TILE_M as u32));
    let mut tile = CUBE_POS as u32;
    // The group that is looked at, the tiles and the rows of tiles before it, and the stages that
    // were filled.
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut row_tiles = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let own = GroupExtent::of(problem, group, comptime!(plan.grouped));
        let tiles_m = own.tiles();
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                comptime!(SM100_TILE_M as u32),
                comptime!(SM100_TILE_N as u32),
            );
            // Groups along K have all rows of both operands.
            let mut a = at.row;
            let mut b = at.column;
            let mut a_tile = at.row / comptime!(SM100_TILE_M as u32);
            let mut b_tile = at.column / comptime!(SM100_TILE_M as u32);
            if comptime!(plan.grouped == GroupedDim::M) {
                a += own.first;
                b += group * n;
                a_tile += row_tiles;
                b_tile += group * n_tiles;
            }
            let source = TileSource {
                a,
                b,
                // Groups that overlap could have more tiles than there are.
                a_tile: min(a_tile, scales.a_tiles - 1u32),
                b_tile,
                b_tiles: select(at.column + comptime!(SM100_TILE_M as u32) < n, 2u32, 1u32),
            };
            let k_tiles = own.k.div_ceil(comptime!(TILE_K as u32));
            let mut k_tile = 0u32;
            while k_tile < k_tiles {
                if comptime!(plan.core != TensorCore::Instruction) {
                    delay(cta.seed, used * 2u32 + 1u32);
                }
                fill_stage(
                    a_map,
                    b_map,
                    scales,
                    operands,
                    barriers,
                    cta,
                    StageSource {
                        tile: source,
                        k_all: problem.shape.k,
                        k_first: own.k_first,
                        k: own.k,
                        k_tile,
                        used,
                    },
                    comptime!(plan.core),
                );
                used += 1u32;
                k_tile = opaque(k_tile + 1u32);
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            row_tiles += tiles_m;
            group += 1u32;
        }
    }
}

/// `value`, of which the compiler knows nothing more. Unrolled, the loop over K tiles took 64
/// registers instead of 40, and spilled.
#[cube]
fn opaque(value: u32) -> u32 {
    let same: u32;
    gpu_asm!(
        "mov.b32 {s}, {v};",
        s = out(_) same, v = in(_) value,
        options(nomem)
    );
    u32::reinterpret(same)
}

/// Waits until the next stage is empty and lets TMA fill it: codes through the maps, with zeros for
/// what lies outside, and the scales that there are.
#[cube]
fn fill_stage(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    scales: &SwizzledScales,
    operands: &mut [u32],
    barriers: &[Barrier],
    cta: CtaState,
    stage_source: StageSource,
    #[comptime] core: TensorCore,
) {
    let source = stage_source.tile;
    let (k, k_tile, used) = (stage_source.k, stage_source.k_tile, stage_source.used);
    let stage = used % comptime!(STAGES as u32);
    let parity = ((used / comptime!(STAGES as u32)) & 1u32) ^ 1u32;
    let steps = steps_of(k_tile, k);
    let bytes = steps * comptime!(ATOM as u32);
    let full = cta.full + stage * 8u32;
    mbarrier_wait_parity(cta.empty(stage), parity);
    if comptime!(has_fault(core, Fault::NoFullWait)) {
        nanosleep(50_000u32.runtime());
    }
    let codes = comptime!((A_CODES + B_CODES) as u32);
    mbarrier_arrive_expect_tx(full, codes + bytes * (1u32 + source.b_tiles));
    let s = stage as usize;
    let ready = &barriers[s];
    let word = (stage_source.k_first / 8u32 + k_tile * comptime!(TILE_K as u32 / 8)) as i32;
    let words = comptime!(A_CODES / 4);
    ready.tma_load_2d(
        a,
        &mut operands[s * words..(s + 1usize) * words],
        source.a as i32,
        word,
    );
    let words = comptime!(B_CODES / 4);
    let first = comptime!(B_CODES_AT / 4);
    ready.tma_load_2d(
        b,
        &mut operands[first + s * words..first + (s + 1usize) * words],
        source.b as i32,
        word,
    );
    let row = u64::cast_from(stage_source.k_all.div_ceil(comptime!(STEP_K as u32)));
    let step = stage_source.k_first / comptime!(STEP_K as u32) + k_tile * comptime!(STEPS as u32);
    let within = u64::cast_from(step);
    let a_at = (u64::cast_from(source.a_tile) * row + within) * comptime!(ATOM as u64);
    let b_at = (u64::cast_from(source.b_tile) * row + within) * comptime!(ATOM as u64);
    let a_from = cvta_to_global::<u32>(scales.a.as_ptr()) + a_at;
    let b_from = cvta_to_global::<u32>(scales.b.as_ptr()) + b_at;
    let a_to = cta.operands + comptime!(A_SCALES_AT as u32) + stage * comptime!(A_SCALES as u32);
    let b_to = cta.operands + comptime!(B_SCALES_AT as u32) + stage * comptime!(B_SCALES as u32);
    cp_async_bulk(a_to, a_from, bytes, full);
    cp_async_bulk(b_to, b_from, bytes, full);
    if source.b_tiles == 2u32 {
        let next = row * comptime!(ATOM as u64);
        cp_async_bulk(
            b_to + comptime!(A_SCALES as u32),
            b_from + next,
            bytes,
            full,
        );
    }
}

/// Issues the instructions of all tiles of this CTA, and returns how many commands the software
/// model was given. One thread, because a commit tracks the instructions of its own.
#[cube]
pub(super) fn issue_tiles(
    problem: &GroupedProblem,
    cta: CtaState,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    let core = comptime!(plan.core);
    let ring = cta.ring;
    let tiles_n = problem.shape.n.div_ceil(comptime!(SM100_TILE_N as u32));
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    let mut done = 0u32;
    let mut queued = 0u32;
    while group < problem.shape.groups {
        let own = GroupExtent::of(problem, group, comptime!(plan.grouped));
        let tiles = own.tiles() * tiles_n;
        if tile - passed >= tiles {
            passed += tiles;
            group += 1u32;
        } else if own.is_empty(comptime!(plan.grouped)) {
            // The epilogue writes zeros.
            tile += CUBE_COUNT as u32;
        } else {
            let k_tiles = own.k.div_ceil(comptime!(TILE_K as u32));
            // The epilogue has read the accumulators of the tile before.
            mbarrier_wait_parity(cta.accumulators + 8u32, (done & 1u32) ^ 1u32);
            if comptime!(core == TensorCore::Instruction) {
                tcgen05_fence_after_thread_sync();
            }
            for k_tile in 0..k_tiles {
                let stage = used % comptime!(STAGES as u32);
                if comptime!(!has_fault(core, Fault::NoFullWait)) {
                    let parity = (used / comptime!(STAGES as u32)) & 1u32;
                    mbarrier_wait_parity(cta.full + stage * 8u32, parity);
                }
                if comptime!(core == TensorCore::Instruction) {
                    tcgen05_fence_after_thread_sync();
                }
                let steps = steps_of(k_tile, own.k);
                queued = issue_stage(cta, stage, steps, k_tile, queued, core);
                if comptime!(has_fault(core, Fault::EarlyStageReuse)) {
                    mbarrier_arrive(cta.empty(stage));
                } else {
                    queued = issue_commit(ring, queued, cta.empty(stage), core);
                }
                used += 1u32;
            }
            queued = issue_commit(ring, queued, u32::reinterpret(cta.accumulators), core);
            done += 1u32;
            tile += CUBE_COUNT as u32;
        }
    }
    queued
}

/// The instructions of one stage: the copies of all scales, then the multiplications. Returns how
/// many commands the software model was given, `queued` before.
#[cube]
fn issue_stage(
    cta: CtaState,
    stage: u32,
    steps: u32,
    k_tile: u32,
    queued: u32,
    #[comptime] core: TensorCore,
) -> u32 {
    let ring = cta.ring;
    let at = StageAt {
        operands: cta.operands,
        tmem: cta.tmem,
        stage,
    };
    let mut queued = queued;
    #[unroll]
    for step in 0..STEPS {
        if comptime!(step as u32).runtime() < steps {
            #[unroll]
            for part in 0..3usize {
                let copy = scale_copy(at, step, part, core);
                queued = issue_copy(ring, queued, copy.target, copy.source, core);
            }
        }
    }
    #[unroll]
    for step in 0..STEPS {
        if comptime!(step as u32).runtime() < steps {
            let operands = mma_operands(at, k_tile, step, core);
            queued = issue_mma(ring, queued, operands, core);
        }
    }
    queued
}
