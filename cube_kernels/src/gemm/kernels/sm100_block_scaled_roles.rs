//! The two threads that drive the [`sm100_block_scaled`](super::sm100_block_scaled) kernel: one fills stages, one
//! issues instructions.

use cubecl::{prelude::barrier::Barrier, prelude::*};

use super::{
    sm100_block_scaled_commands::{CommandRing, delay, issue_commit, issue_copy, issue_mma},
    sm100_block_scaled_operands::{
        A_CODES, ATOM, STEPS, Sm100Plan, StageAt, atoms_of, mma_operands, scale_copy, steps_of,
    },
    sm100_block_scaled_stage::{CtaState, GroupExtent, SwizzledScales},
};
use crate::{
    cube::ptx::{
        cp_async_bulk, cvta_to_global, mbarrier_arrive, mbarrier_arrive_expect_tx,
        mbarrier_wait_parity, nanosleep, tcgen05_fence_after_thread_sync,
    },
    gemm::{
        arguments::GroupedProblem,
        scheduler::{GroupedDim, place},
        tiles::{Fault, TensorCore},
    },
};

/// Where the operands of a tile begin: those of the instruction.
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
    /// Which K tile of these.
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
    let tile_m = comptime!(plan.tile().tile_m() as u32);
    let tile_n = comptime!(plan.tile().tile_n() as u32);
    let tiles_n = n.div_ceil(tile_n);
    // Rows of the GEMM's `b` of a group begin at a tile of scales.
    let n_tiles = n.div_ceil(128u32);
    let mut tile = CUBE_POS as u32;
    // The group that is looked at, the tiles and the tiles of scales before it, and the stages that
    // were filled.
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut scale_tiles = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let own = GroupExtent::of(problem, group, plan);
        let tiles_m = own.tiles(plan);
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                tile_m,
                tile_n,
            );
            // Rows of the GEMM's `a` and `b`; groups along K have all rows of both.
            let mut left = at.row;
            let mut right = at.column;
            let mut left_tile = at.row / 128u32;
            let mut right_tile = at.column / 128u32;
            if comptime!(plan.grouped == GroupedDim::M) {
                left += own.first;
                right += group * n;
                left_tile += scale_tiles;
                right_tile += group * n_tiles;
            }
            // Groups that overlap could have more tiles than there are.
            let left_tile = min(left_tile, scales.m_tiles - 1u32);
            let source = if comptime!(plan.swap_ab) {
                TileSource {
                    a: right,
                    b: left,
                    a_tile: right_tile,
                    b_tile: left_tile,
                    b_tiles: 1u32.runtime(),
                }
            } else {
                TileSource {
                    a: left,
                    b: right,
                    a_tile: left_tile,
                    b_tile: right_tile,
                    b_tiles: select(at.column + 128u32 < n, 2u32, 1u32),
                }
            };
            let k_tiles = own.k.div_ceil(comptime!(plan.format.tile_k() as u32));
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
                    plan,
                );
                used += 1u32;
                k_tile = opaque(k_tile + 1u32);
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            scale_tiles += own.scale_tiles();
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
    #[comptime] plan: Sm100Plan,
) {
    let source = stage_source.tile;
    let (k, k_tile, used) = (stage_source.k, stage_source.k_tile, stage_source.used);
    let format = comptime!(plan.format);
    let stages = comptime!(plan.stages() as u32);
    let stage = used % stages;
    let parity = ((used / stages) & 1u32) ^ 1u32;
    let bytes = atoms_of(k_tile, k, format) * comptime!(ATOM as u32);
    let full = cta.full + stage * 8u32;
    mbarrier_wait_parity(cta.empty(stage, plan), parity);
    if comptime!(plan.core.has_fault(Fault::NoFullWait)) {
        nanosleep(50_000u32.runtime());
    }
    let codes = comptime!((A_CODES + plan.b_codes()) as u32);
    mbarrier_arrive_expect_tx(full, codes + bytes * (1u32 + source.b_tiles));
    let s = stage as usize;
    let ready = &barriers[s];
    // Columns of a word of codes.
    let per_word = comptime!(32 / format.format().code_bits() as u32);
    let words = comptime!(format.tile_k() as u32 / per_word);
    let word = (stage_source.k_first / per_word + k_tile * words) as i32;
    let words = comptime!(A_CODES / 4);
    ready.tma_load_2d(
        a,
        &mut operands[s * words..(s + 1usize) * words],
        source.a as i32,
        word,
    );
    let words = comptime!(plan.b_codes() / 4);
    let first = comptime!(plan.b_codes_at() / 4);
    ready.tma_load_2d(
        b,
        &mut operands[first + s * words..first + (s + 1usize) * words],
        source.b as i32,
        word,
    );
    let atom_k = comptime!(format.atom_k() as u32);
    let row = u64::cast_from(stage_source.k_all.div_ceil(atom_k));
    let atom = stage_source.k_first / atom_k + k_tile * comptime!(plan.atoms() as u32);
    let within = u64::cast_from(atom);
    let a_at = (u64::cast_from(source.a_tile) * row + within) * comptime!(ATOM as u64);
    let b_at = (u64::cast_from(source.b_tile) * row + within) * comptime!(ATOM as u64);
    let a_from = cvta_to_global::<u32>(scales.a.as_ptr()) + a_at;
    let b_from = cvta_to_global::<u32>(scales.b.as_ptr()) + b_at;
    let a_bytes = comptime!(plan.a_scales() as u32);
    let a_to = cta.operands + comptime!(plan.a_scales_at() as u32) + stage * a_bytes;
    let b_to = cta.operands
        + comptime!(plan.b_scales_at() as u32)
        + stage * comptime!(plan.b_scales() as u32);
    cp_async_bulk(a_to, a_from, bytes, full);
    cp_async_bulk(b_to, b_from, bytes, full);
    if source.b_tiles == 2u32 {
        let next = row * comptime!(ATOM as u64);
        cp_async_bulk(b_to + a_bytes, b_from + next, bytes, full);
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
    let tile_m = comptime!(plan.tile().tile_m() as u32);
    let tile_n = comptime!(plan.tile().tile_n() as u32);
    let tiles_n = problem.shape.n.div_ceil(tile_n);
    let stages = comptime!(plan.stages() as u32);
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    let mut done = 0u32;
    let mut queued = 0u32;
    while group < problem.shape.groups {
        let own = GroupExtent::of(problem, group, plan);
        let tiles_m = own.tiles(plan);
        let tiles = tiles_m * tiles_n;
        if tile - passed >= tiles {
            passed += tiles;
            group += 1u32;
        } else if own.is_empty(comptime!(plan.grouped)) {
            // The epilogue writes zeros.
            tile += CUBE_COUNT as u32;
        } else {
            let k_tiles = own.k.div_ceil(comptime!(plan.format.tile_k() as u32));
            let mut n = 0u32;
            let mut b_row = 0u32;
            if comptime!(plan.swap_ab) {
                let at = place(
                    tile - passed,
                    tiles_m,
                    tiles_n,
                    problem.band,
                    tile_m,
                    tile_n,
                );
                // As wide as there are rows.
                let rows = min(own.end - own.first - at.row, tile_m);
                n = rows.div_ceil(8u32) * 8u32;
                b_row = at.row % 128u32;
            }
            // The epilogue has read the accumulators of the tile before.
            mbarrier_wait_parity(cta.accumulators + 8u32, (done & 1u32) ^ 1u32);
            if comptime!(core == TensorCore::Instruction) {
                tcgen05_fence_after_thread_sync();
            }
            for k_tile in 0..k_tiles {
                let stage = used % stages;
                if comptime!(!core.has_fault(Fault::NoFullWait)) {
                    let parity = (used / stages) & 1u32;
                    mbarrier_wait_parity(cta.full + stage * 8u32, parity);
                }
                if comptime!(core == TensorCore::Instruction) {
                    tcgen05_fence_after_thread_sync();
                }
                let at = StageAt {
                    operands: cta.operands,
                    tmem: cta.tmem,
                    stage,
                    k_tile,
                    lead: own.lead,
                    n,
                    b_row,
                };
                queued = issue_stage(ring, at, own.k, queued, plan);
                if comptime!(core.has_fault(Fault::EarlyStageReuse)) {
                    mbarrier_arrive(cta.empty(stage, plan));
                } else {
                    queued = issue_commit(ring, queued, cta.empty(stage, plan), core);
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

/// The instructions of one stage, of a contraction of `k`: the copies of all scales, then the
/// multiplications. Returns how many commands the software model was given, `queued` before.
#[cube]
fn issue_stage(
    ring: CommandRing,
    at: StageAt,
    k: u32,
    queued: u32,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    let core = comptime!(plan.core);
    let format = comptime!(plan.format);
    let mut queued = queued;
    let atoms = atoms_of(at.k_tile, k, format);
    #[unroll]
    for atom in 0..comptime!(plan.atoms()) {
        if comptime!(atom as u32).runtime() < atoms {
            #[unroll]
            for part in 0..comptime!(1 + plan.b_tiles()) {
                let copy = scale_copy(at, atom, part, plan);
                queued = issue_copy(ring, queued, copy.target, copy.source, core);
            }
        }
    }
    let steps = steps_of(at.k_tile, k, format);
    // Columns before a group along K are another one's.
    let mut first = 0u32;
    if comptime!(plan.has_lead()) {
        first = select(at.k_tile == 0u32, at.lead, 0u32);
    }
    #[unroll]
    for step in 0..STEPS {
        let number = comptime!(step as u32).runtime();
        if number < steps && number >= first {
            let operands = mma_operands(at, step, plan);
            queued = issue_mma(ring, queued, operands, plan);
        }
    }
    queued
}
