//! The two producer threads of the [`sm100_block_scaled`](super) kernel: one
//! fills stages, one issues instructions.

use cubecl::{prelude::barrier::Barrier, prelude::*};

use super::{
    commands::{CommandRing, arrive_at_each, delay, issue_commit, issue_copy, issue_mma},
    operands::{
        A_CODES, ATOM, STEPS, Sm100Plan, StageAt, atoms_of, cta_share, mma_operands, scale_copy,
        scales_of_part, steps_of,
    },
    stage::{CtaState, GroupExtent, SwizzledScales, wait},
    tile::{Fault, TensorCore},
};
use crate::{
    cube::ptx::{
        cp_async_bulk, cp_async_bulk_tensor_2d_pair, cvta_to_global, fence_acq_rel_cluster, mapa,
        mbarrier_arrive_expect_tx, mbarrier_complete_tx_cluster, mbarrier_wait_parity, nanosleep,
        tcgen05_fence_after_thread_sync,
    },
    gemm::{
        arguments::GroupedProblem,
        scheduler::{GroupedDim, place},
    },
};

/// Start of a tile in the instruction's operands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct TileSource {
    /// First row of `a`.
    a: u32,
    /// First row of `b`.
    b: u32,
    /// Index of its 128 rows of `a` in the scales.
    a_tile: u32,
    /// Index of its first 128 rows of `b` in the scales.
    b_tile: u32,
    /// Number of 128-row tiles of `b`: 1 or 2.
    b_tiles: u32,
}

/// Source of a stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct StageSource {
    /// Tile.
    tile: TileSource,
    /// Columns of the operands.
    k_all: u32,
    /// First column of the group.
    k_first: u32,
    /// Columns of the group.
    k: u32,
    /// K tile index within the group.
    k_tile: u32,
    /// Number of stages filled before.
    used: u32,
}

#[cube]
impl StageSource {
    /// Returns the index of the first word of codes in a row.
    fn word(&self, #[comptime] plan: Sm100Plan) -> i32 {
        let format = comptime!(plan.format);
        // Columns per word.
        let per_word = comptime!(32 / format.format().code_bits() as u32);
        let words = comptime!(format.tile_k() as u32 / per_word);
        (self.k_first / per_word + self.k_tile * words) as i32
    }

    /// Returns the number of 128x4 tiles of scales of 128 rows of an operand.
    fn atoms_of_row(&self, #[comptime] plan: Sm100Plan) -> u32 {
        self.k_all.div_ceil(comptime!(plan.format.atom_k() as u32))
    }

    /// Returns the index of the first of these tiles for this K tile.
    fn atom(&self, #[comptime] plan: Sm100Plan) -> u32 {
        let atom_k = comptime!(plan.format.atom_k() as u32);
        self.k_first / atom_k + self.k_tile * comptime!(plan.atoms() as u32)
    }
}

/// Fills the stages of all tiles of this CTA in sequence. Runs on one thread.
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
    // The rows of a group of the GEMM's `b` begin at a tile of scales.
    let n_tiles = n.div_ceil(128u32);
    let mut tile = cta.first_tile(plan);
    // Current group, number of tiles and of tiles of scales before it, and number of filled stages.
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
            // Overlapping groups could have more tiles than there are.
            let left_tile = min(left_tile, scales.m_tiles - 1u32);
            let source = if comptime!(plan.swaps_ab()) {
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
                    // The CTAs of a pair use different delays.
                    delay(cta.seed, used * 2u32 + 1u32 + (cta.rank << 16u32));
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
            tile += cta.tile_step(plan);
        } else {
            passed += tiles_m * tiles_n;
            scale_tiles += own.scale_tiles();
            group += 1u32;
        }
    }
    if comptime!(plan.ctas() > 1) {
        // The even CTA's commits still arrive at the odd CTA, so it must stay alive until then.
        for _ in 0..comptime!(plan.stages() as u32) {
            wait_empty(cta, used, plan);
            used += 1u32;
        }
    }
}

/// Waits until the stage of fill number `used` is empty.
#[cube]
fn wait_empty(cta: CtaState, used: u32, #[comptime] plan: Sm100Plan) {
    let stages = comptime!(plan.stages() as u32);
    let parity = ((used / stages) & 1u32) ^ 1u32;
    wait(cta.empty(used % stages, plan), parity, plan);
}

/// Returns `value`, hidden from the optimizer. Unrolled, the loop over K tiles took 64 registers
/// instead of 40, and spilled.
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

/// Waits until the next stage is empty and fills it by TMA.
#[cube]
fn fill_stage(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    scales: &SwizzledScales,
    operands: &mut [u32],
    barriers: &[Barrier],
    cta: CtaState,
    source: StageSource,
    #[comptime] plan: Sm100Plan,
) {
    wait_empty(cta, source.used, plan);
    if comptime!(plan.core.has_fault(Fault::NoFullWait)) {
        nanosleep(50_000u32.runtime());
    }
    if comptime!(plan.ctas() == 1) {
        fill_whole(a, b, scales, operands, barriers, cta, source, plan);
    } else {
        fill_share(a, b, scales, operands, barriers, cta, source, plan);
    }
}

/// Fills a stage with a tile: codes through the maps, with zeros for elements out of bounds, and
/// the existing scales.
#[cube]
fn fill_whole(
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
    let stage = used % comptime!(plan.stages() as u32);
    let bytes = atoms_of(k_tile, k, format) * comptime!(ATOM as u32);
    let full = cta.full + stage * 8u32;
    let codes = comptime!((A_CODES + plan.b_codes()) as u32);
    mbarrier_arrive_expect_tx(full, codes + bytes * (1u32 + source.b_tiles));
    let s = stage as usize;
    let ready = &barriers[s];
    let word = stage_source.word(plan);
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
    let row = u64::cast_from(stage_source.atoms_of_row(plan));
    let within = u64::cast_from(stage_source.atom(plan));
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

/// A box of a matrix and its destination.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct BoxCopy {
    /// First row.
    row: i32,
    /// First column.
    column: i32,
    /// Stage that it belongs to.
    stage: u32,
    /// Destination, in bytes from the start of the stages.
    offset: u32,
}

/// Copies a box by TMA. Its bytes arrive at the full barrier of the stage in the even CTA, or at
/// this CTA's "arrived" barrier.
#[cube]
fn load_box(
    map: &TensorMap<u32, Tiled>,
    operands: &mut [u32],
    barriers: &[Barrier],
    cta: CtaState,
    copy: BoxCopy,
    #[comptime] plan: Sm100Plan,
) {
    if comptime!(plan.has_arrived()) {
        let arrived = &barriers[comptime!(plan.arrived_at()) + copy.stage as usize];
        let first = copy.offset as usize / 4usize;
        let target = &mut operands[first..first + comptime!(ATOM / 4)];
        arrived.tma_load_2d(map, target, copy.row, copy.column);
    } else {
        let full = mapa(cta.full + copy.stage * 8u32, 0u32.runtime());
        let target = cta.operands + copy.offset;
        cp_async_bulk_tensor_2d_pair(target, map, copy.column, copy.row, full);
    }
}

/// Fills a stage with this CTA's share of a tile of a pair. Boxes are always whole, so that each
/// CTA loads the same number of bytes in every stage: elements out of bounds are zeros, and scales
/// after the last column are loaded but not used.
#[cube]
fn fill_share(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    scales: &SwizzledScales,
    operands: &mut [u32],
    barriers: &[Barrier],
    cta: CtaState,
    source: StageSource,
    #[comptime] plan: Sm100Plan,
) {
    let tile = source.tile;
    let share = cta_share(cta.rank, plan);
    let stage = source.used % comptime!(plan.stages() as u32);
    expect_share(cta, stage, plan);
    let column = source.word(plan);
    let copy = BoxCopy {
        row: (tile.a + share.a) as i32,
        column,
        stage,
        offset: stage * comptime!(A_CODES as u32),
    };
    load_box(a, operands, barriers, cta, copy, plan);
    let copy = BoxCopy {
        row: (tile.b + share.b) as i32,
        column,
        stage,
        offset: comptime!(plan.b_codes_at() as u32) + stage * comptime!(plan.b_codes() as u32),
    };
    load_box(b, operands, barriers, cta, copy, plan);
    let maps = scales.maps.as_ref().unwrap();
    let (atoms, atom) = (source.atoms_of_row(plan), source.atom(plan));
    let column = 0i32.runtime();
    let a_bytes = comptime!(plan.a_scales() as u32);
    let copy = BoxCopy {
        row: ((tile.a_tile + share.a_tile) * atoms + atom) as i32,
        column,
        stage,
        offset: comptime!(plan.a_scales_at() as u32) + stage * a_bytes,
    };
    load_box(&maps.a, operands, barriers, cta, copy, plan);
    #[unroll]
    for part in 0..comptime!(plan.b_tiles()) {
        let rows = tile.b_tile + scales_of_part(cta.rank, part, plan);
        let first = comptime!((plan.b_scales_at() + part * plan.a_scales()) as u32);
        let copy = BoxCopy {
            row: (rows * atoms + atom) as i32,
            column,
            stage,
            offset: first + stage * comptime!(plan.b_scales() as u32),
        };
        load_box(&maps.b, operands, barriers, cta, copy, plan);
    }
    forward_share(cta, source.used, plan);
}

/// Sets the expected bytes of the barriers of stage `stage`; the even CTA's barrier expects the
/// bytes of both.
#[cube]
fn expect_share(cta: CtaState, stage: u32, #[comptime] plan: Sm100Plan) {
    let own = comptime!(plan.stage_bytes() as u32);
    let waits_for = comptime!(match plan.core.has_fault(Fault::NoPeerWait) {
        true => own,
        false => own * plan.ctas() as u32,
    });
    if cta.rank == 0u32 {
        mbarrier_arrive_expect_tx(cta.full + stage * 8u32, waits_for.runtime());
    } else if comptime!(plan.core.has_fault(Fault::NoPeerWait)) {
        nanosleep(50_000u32.runtime());
    }
    if comptime!(plan.has_arrived()) {
        mbarrier_arrive_expect_tx(cta.arrived(stage, plan), own.runtime());
    }
}

/// Without `cta_group::2` TMA only signals barriers of the CTA that it fills. This thread waits for
/// fill number `used` and forwards its bytes to the even CTA.
#[cube]
fn forward_share(cta: CtaState, used: u32, #[comptime] plan: Sm100Plan) {
    if comptime!(plan.has_arrived()) {
        let stages = comptime!(plan.stages() as u32);
        let stage = used % stages;
        mbarrier_wait_parity(cta.arrived(stage, plan), (used / stages) & 1u32);
        let mut forwards = true;
        if comptime!(plan.core.has_fault(Fault::NoPeerWait)) {
            forwards = cta.rank == 0u32;
        }
        if forwards {
            fence_acq_rel_cluster();
            let full = mapa(cta.full + stage * 8u32, 0u32.runtime());
            let own = comptime!(plan.stage_bytes() as u32);
            mbarrier_complete_tx_cluster(full, own.runtime());
        }
    }
}

/// Issues the instructions of all tiles of this CTA, and returns the number of commands issued to
/// the software model. Runs on one thread, because a commit only tracks the instructions of its
/// thread.
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
    let mut tile = cta.first_tile(plan);
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
            tile += cta.tile_step(plan);
        } else {
            let k_tiles = own.k.div_ceil(comptime!(plan.format.tile_k() as u32));
            let mut n = 0u32;
            let mut b_row = 0u32;
            if comptime!(plan.swaps_ab()) {
                let at = place(
                    tile - passed,
                    tiles_m,
                    tiles_n,
                    problem.band,
                    tile_m,
                    tile_n,
                );
                // As wide as the number of rows.
                let rows = min(own.end - own.first - at.row, tile_m);
                n = rows.div_ceil(8u32) * 8u32;
                b_row = at.row % 128u32;
            }
            // Wait until the epilogue has read the accumulators of the previous tile.
            wait(cta.accumulators + 8u32, (done & 1u32) ^ 1u32, plan);
            if comptime!(core == TensorCore::Instruction) {
                tcgen05_fence_after_thread_sync();
            }
            for k_tile in 0..k_tiles {
                let stage = used % stages;
                if comptime!(!core.has_fault(Fault::NoFullWait)) {
                    let parity = (used / stages) & 1u32;
                    wait(cta.full + stage * 8u32, parity, plan);
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
                    arrive_at_each(cta.empty(stage, plan), comptime!(plan.ctas() as u32));
                } else {
                    queued = issue_commit(ring, queued, cta.empty(stage, plan), plan);
                }
                used += 1u32;
            }
            queued = issue_commit(ring, queued, u32::reinterpret(cta.accumulators), plan);
            done += 1u32;
            tile += cta.tile_step(plan);
        }
    }
    queued
}

/// Issues the instructions of one stage, for a K dimension of `k`: the copies of all scales, then
/// the multiplications. Returns the number of commands issued to the software model so far;
/// `queued` is the number before.
#[cube]
fn issue_stage(
    ring: CommandRing,
    at: StageAt,
    k: u32,
    queued: u32,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    let format = comptime!(plan.format);
    let mut queued = queued;
    let atoms = atoms_of(at.k_tile, k, format);
    #[unroll]
    for atom in 0..comptime!(plan.atoms()) {
        if comptime!(atom as u32).runtime() < atoms {
            #[unroll]
            for part in 0..comptime!(1 + plan.b_tiles()) {
                let copy = scale_copy(at, atom, part, plan);
                queued = issue_copy(ring, queued, copy.target, copy.source, plan);
            }
        }
    }
    let steps = steps_of(at.k_tile, k, format);
    // Columns before the start of a group along K belong to the previous group.
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
