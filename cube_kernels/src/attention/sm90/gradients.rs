//! Consumer warpgroup of the [backward](super::backward): computes the gradients of its rows, and
//! writes them.

use cubecl::prelude::*;

use super::accumulators::{fours, left};
use super::backward_problem::{
    BackwardProblem, Blocks, Memory, Rows, Sm90BackwardPlan, Stage, stage_of,
};
use super::tiles::{Tile, clear_behind, first_token, reaches_behind, show_cleared};
use crate::{
    attention::mma::{
        dkdv::{mask_weights, score_gradients, slopes_of, weigh},
        dq::{mask_gradients, row_values, score_gradients as query_gradients},
        forward::cap_all,
        gradient::{GradientView, cap_derivative, position},
        multiply::pack,
        problem::{MmaPlan, Problem, Side, Visible, exponent_scale},
    },
    cube::ptx::{
        BlockEnd, ld_shared_v4, mbarrier_arrive, mbarrier_wait_parity, st_shared, wgmma_operand,
        wgmma_registers, wgmma_shared_queued, wgmma_wait,
    },
    gemm::arguments::thread_in_cta,
};

/// Gradients of a warpgroup's keys and values, not scaled.
#[derive(CubeType)]
pub(super) struct Sums {
    /// Gradients of the keys.
    pub a: Array<Vector<f32, Const<4>>>,
    /// Gradients of the values.
    pub b: Array<Vector<f32, Const<4>>>,
}

/// Applies the soft cap to scores, and keeps its derivative.
#[cube]
fn bound(
    problem: &Problem,
    scores: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] plan: MmaPlan,
) -> Array<Vector<f32, Const<4>>> {
    let mut slopes = Array::<Vector<f32, Const<4>>>::new(comptime!(slopes_of(plan)));
    if comptime!(plan.softcap) {
        #[unroll]
        for i in 0..comptime!(plan.inner / 8) {
            let capped = cap_all(problem, scores[i]);
            scores[i] = capped;
            let mut slope = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                slope.insert(e, cap_derivative(problem, capped.extract(e)));
            }
            slopes[i] = slope;
        }
    }
    slopes
}

/// A range of blocks of the other side.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Range {
    first: u32,
    end: u32,
}

/// Returns the blocks of keys that one of a warpgroup's 64 queries from `row` on, of `len`, sees.
#[cube]
fn blocks_seen(visible: Visible, row: u32, len: u32, #[comptime] plan: Sm90BackwardPlan) -> Range {
    let inner = comptime!(plan.plan.inner as u32);
    let last = min(row + 63u32, len - 1u32);
    let first = u32::cast_from(visible.first(i32::cast_from(row))) / inner;
    let end = u32::cast_from(visible.end(i32::cast_from(last))).div_ceil(inner);
    Range {
        first,
        end: select(row < len, end, 0u32),
    }
}

/// Releases blocks `from..to` of a tile, which this warpgroup does not see, as they arrive.
#[cube]
fn pass_over(memory: Memory, used: u32, from: u32, to: u32, #[comptime] plan: Sm90BackwardPlan) {
    for step in from..to {
        let stage = stage_of(memory, used + step, plan);
        mbarrier_wait_parity(memory.barriers.full(stage.number), stage.parity);
        if UNIT_POS & 31u32 == 0u32 {
            mbarrier_arrive(memory.barriers.empty(stage.number));
        }
    }
}

/// Overwrites the rows past the end of the tile's sequence in the block of `step`, if sequences
/// start at offsets: queries and gradients of the output, or keys. Values are kept: they are not a
/// factor in any sum of a gradient, and the gradients of scores that they give are masked.
#[cube]
fn clear_block(
    stage: Stage,
    tile: Tile,
    blocks: Blocks,
    step: u32,
    #[comptime] plan: Sm90BackwardPlan,
) {
    if comptime!(plan.plan.offsets) {
        let (inner, boxes) = comptime!((plan.plan.inner, plan.boxes()));
        let first = (blocks.first + step % blocks.count) * comptime!(inner as u32);
        let len = if comptime!(plan.is_keys()) {
            tile.extent.q_len
        } else {
            tile.extent.k_len
        };
        if reaches_behind(first, len, inner) {
            clear_behind(stage.a, first, len, inner, boxes);
            if comptime!(plan.is_keys()) {
                clear_behind(stage.b, first, len, inner, boxes);
            }
            show_cleared();
        }
    }
}

/// Computes the gradients of a warpgroup's keys and values. The GEMM of a block's gradients of
/// weights runs while its scores become weights, and the GEMM of the gradients of values while the
/// gradients of the scores are computed.
#[cube]
pub(super) fn keys_and_values(
    problem: &BackwardProblem,
    visible: Visible,
    tile: Tile,
    blocks: Blocks,
    memory: Memory,
    used: u32,
    #[comptime] plan: Sm90BackwardPlan,
) -> Sums {
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let leads = UNIT_POS & 31u32 == 0u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let (scores_of, gradients_of) = comptime!((plan.scores(), plan.gradients()));
    let keys = wgmma_operand(memory.own_a + consumer * 8192u32, scores_of.a);
    let values = wgmma_operand(memory.own_b + consumer * 8192u32, scores_of.a);
    let size!(S) = comptime!(plan.scores().accumulators());
    let size!(O) = comptime!(plan.gradients().accumulators());
    let size!(A) = comptime!(plan.gradients().fragments());
    let (columns, count) = comptime!((plan.plan.inner / 8, plan.plan.head / 8));
    let scale = exponent_scale(&problem.problem, comptime!(plan.plan));
    let mut dk = Vector::<f32, O>::new(0.0f32);
    let mut dv = Vector::<f32, O>::new(0.0f32);
    for step in 0..blocks.count * blocks.heads {
        let stage = stage_of(memory, used + step, plan);
        mbarrier_wait_parity(memory.barriers.full(stage.number), stage.parity);
        clear_block(stage, tile, blocks, step, plan);
        let queries = wgmma_operand(stage.a, scores_of.b);
        let found = wgmma_shared_queued::<S>(keys, queries, scores_of);
        let dout = wgmma_operand(stage.b, scores_of.b);
        let weight_gradients = wgmma_shared_queued::<S>(values, dout, scores_of);
        let found = wgmma_wait::<S>(found, scores_of, 1usize);
        let mut scores = fours::<S>(found, columns);
        let slopes = bound(&problem.problem, &mut scores, comptime!(plan.plan));
        weigh(&mut scores, stage.rows, scale, comptime!(plan.plan));
        let query = (blocks.first + step % blocks.count) * comptime!(plan.plan.inner as u32);
        mask_weights(
            &mut scores,
            visible,
            tile.row + warp_row,
            query,
            comptime!(plan.plan),
        );
        let weights = left::<A>(&scores, comptime!(plan.plan));
        let dout = wgmma_operand(stage.b, gradients_of.b);
        dv = wgmma_registers::<O, A>(
            Vector::<f32, O>::reinterpret(dv),
            weights,
            dout,
            gradients_of,
            BlockEnd::Runs,
        );
        let found = wgmma_wait::<S>(weight_gradients, scores_of, 1usize);
        let found = fours::<S>(found, columns);
        score_gradients(
            &mut scores,
            &found,
            &slopes,
            stage.rows,
            comptime!(plan.plan),
        );
        let gradients = left::<A>(&scores, comptime!(plan.plan));
        let queries = wgmma_operand(stage.a, gradients_of.b);
        // Waits for all GEMMs: the sums of the values are complete, too.
        dk = wgmma_registers::<O, A>(
            Vector::<f32, O>::reinterpret(dk),
            gradients,
            queries,
            gradients_of,
            BlockEnd::Waits,
        );
        if leads {
            mbarrier_arrive(memory.barriers.empty(stage.number));
        }
    }
    Sums {
        a: fours::<O>(Vector::<f32, O>::reinterpret(dk), count),
        b: fours::<O>(Vector::<f32, O>::reinterpret(dv), count),
    }
}

/// Computes the gradient of a warpgroup's queries, not scaled. The GEMM of a block's gradients and
/// keys runs while the gradients of the next block are computed.
#[cube]
pub(super) fn queries(
    problem: &BackwardProblem,
    visible: Visible,
    tile: Tile,
    blocks: Blocks,
    memory: Memory,
    used: u32,
    #[comptime] plan: Sm90BackwardPlan,
) -> Array<Vector<f32, Const<4>>> {
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let leads = UNIT_POS & 31u32 == 0u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let (scores_of, gradients_of) = comptime!((plan.scores(), plan.gradients()));
    let q = wgmma_operand(memory.own_a + consumer * 8192u32, scores_of.a);
    let dout = wgmma_operand(memory.own_b + consumer * 8192u32, scores_of.a);
    let size!(S) = comptime!(plan.scores().accumulators());
    let size!(O) = comptime!(plan.gradients().accumulators());
    let size!(A) = comptime!(plan.gradients().fragments());
    let (columns, count) = comptime!((plan.plan.inner / 8, plan.plan.head / 8));
    let scale = exponent_scale(&problem.problem, comptime!(plan.plan));
    let rows = row_values(
        &problem.saved.lse,
        &problem.saved.delta,
        tile.head as usize * problem.problem.q_tokens as usize
            + first_token(tile, Side::Queries, comptime!(plan.plan.offsets)) as usize,
        tile.row + warp_row,
        tile.extent.q_len,
        comptime!(plan.plan),
    );
    let mut dq = Vector::<f32, O>::new(0.0f32);
    let mut left_of = Vector::<u32, A>::new(0u32);
    let seen = blocks_seen(
        visible,
        tile.row + consumer * 64u32,
        tile.extent.q_len,
        plan,
    );
    let first = min(max(seen.first, blocks.first) - blocks.first, blocks.count);
    let end = max(
        min(max(seen.end, blocks.first) - blocks.first, blocks.count),
        first,
    );
    pass_over(memory, used, 0u32.runtime(), first, plan);
    // The first block has no predecessor.
    #[unroll]
    for part in 0..2usize {
        let begin = if comptime!(part == 0) {
            first
        } else {
            first + 1u32
        };
        let end = if comptime!(part == 0) {
            min(end, first + 1u32)
        } else {
            end
        };
        for step in begin..end {
            let stage = stage_of(memory, used + step, plan);
            mbarrier_wait_parity(memory.barriers.full(stage.number), stage.parity);
            clear_block(stage, tile, blocks, step, plan);
            let keys = wgmma_operand(stage.a, scores_of.b);
            let values = wgmma_operand(stage.b, scores_of.b);
            let found = wgmma_shared_queued::<S>(q, keys, scores_of);
            let weight_gradients = wgmma_shared_queued::<S>(dout, values, scores_of);
            if comptime!(part == 1) {
                let before = stage_of(memory, used + step - 1u32, plan);
                dq = wgmma_registers::<O, A>(
                    Vector::<f32, O>::reinterpret(dq),
                    Vector::<u32, A>::reinterpret(left_of),
                    wgmma_operand(before.a, gradients_of.b),
                    gradients_of,
                    BlockEnd::Runs,
                );
            }
            let found = wgmma_wait::<S>(found, scores_of, comptime!(1 + part));
            let mut scores = fours::<S>(found, columns);
            let slopes = bound(&problem.problem, &mut scores, comptime!(plan.plan));
            let found = wgmma_wait::<S>(weight_gradients, scores_of, part);
            let found = fours::<S>(found, columns);
            query_gradients(
                &mut scores,
                &found,
                &slopes,
                &rows,
                scale,
                comptime!(plan.plan),
            );
            let key = (blocks.first + step) * comptime!(plan.plan.inner as u32);
            mask_gradients(
                &mut scores,
                visible,
                tile.row + warp_row,
                key,
                comptime!(plan.plan),
            );
            if comptime!(part == 1) {
                dq = wgmma_wait::<O>(Vector::<f32, O>::reinterpret(dq), gradients_of, 0usize);
                if leads {
                    let before = stage_of(memory, used + step - 1u32, plan);
                    mbarrier_arrive(memory.barriers.empty(before.number));
                }
            }
            left_of = left::<A>(&scores, comptime!(plan.plan));
        }
    }
    if end > first {
        let last = stage_of(memory, used + end - 1u32, plan);
        let keys = wgmma_operand(last.a, gradients_of.b);
        dq = wgmma_registers::<O, A>(
            Vector::<f32, O>::reinterpret(dq),
            Vector::<u32, A>::reinterpret(left_of),
            keys,
            gradients_of,
            BlockEnd::Waits,
        );
        if leads {
            mbarrier_arrive(memory.barriers.empty(last.number));
        }
    }
    pass_over(memory, used, end, blocks.count, plan);
    fours::<O>(Vector::<f32, O>::reinterpret(dq), count)
}

/// Destination of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    /// First token of the sequence.
    pub token: u32,
    /// First row of the tile in the sequence.
    pub row: u32,
    /// Number of rows of the sequence.
    pub len: u32,
    /// Head.
    pub head: u32,
}

/// Returns the offset of chunk `chunk` of eight columns of row `row` in the boxes of the CTA's
/// rows.
#[cube]
fn box_offset(row: u32, chunk: u32, #[comptime] plan: Sm90BackwardPlan) -> u32 {
    (chunk / 8u32) * comptime!((plan.rows() * 128) as u32)
        + row * 128u32
        + ((chunk % 8u32) ^ (row & 7u32)) * 16u32
}

/// Scales a warpgroup's rows of a gradient, rotates them back if `rotate` is set, rounds and writes
/// them, through the buffer of the rows at `tile_at`.
#[cube]
pub(super) fn write(
    view: &mut GradientView,
    sums: &Array<Vector<f32, Const<4>>>,
    saved: &Rows,
    place: Place,
    tile_at: u32,
    scale: f32,
    #[comptime] rotate: bool,
    #[comptime] plan: Sm90BackwardPlan,
) {
    let lane = UNIT_POS % 32u32;
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let half_columns = comptime!(plan.plan.head / 16);
    let kind = comptime!(plan.plan.kind);
    #[unroll]
    for i in 0..2usize {
        let half = comptime!(2 * i);
        let row = warp_row + comptime!(8 * i as u32) + lane / 4u32;
        let at = tile_at + (lane % 4u32) * 4u32;
        let last = place.len - 1u32;
        let position = position(place.row + row, last, &saved.cos, comptime!(plan.plan));
        let table =
            position as usize * comptime!(plan.plan.head / 2) + (lane % 4u32 * 2u32) as usize;
        #[unroll]
        for j in 0..half_columns {
            let near = sums[j];
            let far = sums[comptime!(half_columns + j)];
            let mut x0 = near.extract(half) * scale;
            let mut x1 = near.extract(comptime!(half + 1)) * scale;
            let mut y0 = far.extract(half) * scale;
            let mut y1 = far.extract(comptime!(half + 1)) * scale;
            if comptime!(rotate) {
                let entry = table + comptime!(8 * j);
                let (cos0, cos1) = (saved.cos[entry], saved.cos[entry + 1]);
                let (sin0, sin1) = (saved.sin[entry], saved.sin[entry + 1]);
                let (a0, a1) = (x0 * cos0 + y0 * sin0, x1 * cos1 + y1 * sin1);
                y0 = y0 * cos0 - x0 * sin0;
                y1 = y1 * cos1 - x1 * sin1;
                x0 = a0;
                x1 = a1;
            }
            let chunk = comptime!(j as u32).runtime();
            st_shared(at + box_offset(row, chunk, plan), pack(x0, x1, kind));
            let chunk = comptime!((half_columns + j) as u32).runtime();
            st_shared(at + box_offset(row, chunk, plan), pack(y0, y1, kind));
        }
    }
    sync_plane();
    let chunks = comptime!(plan.plan.head as u32 / 8);
    #[unroll]
    for i in 0..comptime!(plan.plan.head / 16) {
        let item = lane + comptime!(32 * i as u32);
        let row = warp_row + item / chunks;
        let chunk = item % chunks;
        if place.row + row < place.len {
            let token = (place.token + place.row + row) as usize;
            let index = view.offset as usize
                + token * view.stride as usize
                + place.head as usize * comptime!(plan.plan.head / 8)
                + chunk as usize;
            view.data[index] = ld_shared_v4(tile_at + box_offset(row, chunk, plan));
        }
    }
}
