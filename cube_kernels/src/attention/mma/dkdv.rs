//! Gradients of keys and values. A CTA has a tile of keys of one head and iterates over the queries
//! that see them, of all heads that read it, in ascending order. There are no atomics, so results
//! repeat.
//!
//! Scores are computed transposed, keys by queries. The weights and their gradients, once rounded,
//! are then directly the left operands of `dv += pᵀ dout` and `dk += dsᵀ q`. Queries and gradients
//! of the output are double-buffered: one stage is multiplied while the other is copied.

use cubecl::prelude::*;

use super::{
    forward::cap_all,
    gradient::{
        BackwardPlan, GradientView, Saved, WarpRows, cap_derivative, exponent_offset, weight,
        write_gradient,
    },
    multiply::{multiply_add, multiply_rows, pack_left, zeros},
    problem::{MmaPlan, Problem, Side, Visible, exponent_scale, place},
    tile::{HeadsView, Source, copy_rows, fragment_columns, fragment_rows},
};
use crate::{
    cube::ptx::{
        cp_async_commit_group, cp_async_wait_group, cvta_to_shared, ld_shared_v2, st_shared,
    },
    gemm::arguments::thread_in_cta,
};

/// Operands of a CTA of keys.
#[derive(CubeType, CubeLaunch)]
pub struct Operands {
    /// Queries.
    pub q: HeadsView,
    /// Keys.
    pub k: HeadsView,
    /// Values.
    pub v: HeadsView,
}

/// Destination and rows of a pipeline stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Stage {
    /// Address of the stage's queries, which are followed by the gradients of the output.
    at: u32,
    /// Address of the stage's log-sum-exps, which are followed by the deltas.
    rows_at: u32,
    /// First query, within the sequence.
    row: u32,
    /// Number of queries of the sequence.
    len: u32,
}

/// Starts the copies of a stage, and stores the per-row values.
#[cube]
fn fill(
    q: Source,
    dout: Source,
    saved: &Saved,
    stage: Stage,
    row_values: usize,
    #[comptime] plan: MmaPlan,
) {
    let tile = comptime!(plan.tile());
    let (rows, units) = comptime!((plan.inner, plan.units()));
    copy_rows(q, stage.at, stage.row, stage.len, rows, units, tile);
    let dout_at = stage.at + comptime!(plan.tile_bytes(plan.inner) as u32);
    copy_rows(dout, dout_at, stage.row, stage.len, rows, units, tile);
    if UNIT_POS < comptime!(plan.inner as u32) {
        let row = stage.row + UNIT_POS;
        let mut lse = f32::INFINITY.runtime();
        let mut delta = 0.0f32;
        if row < stage.len {
            lse = exponent_offset(saved.lse[row_values + row as usize]);
            delta = saved.delta[row_values + row as usize];
        }
        let at = stage.rows_at + UNIT_POS * 4u32;
        st_shared(at, u32::reinterpret(lse));
        st_shared(
            at + comptime!(4 * plan.inner as u32),
            u32::reinterpret(delta),
        );
    }
}

/// Computes `dk = scale · dsᵀ q` and `dv = pᵀ dout` for one tile of keys and one head of keys. The
/// grid is tiles times heads.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mma_dkdv_kernel(
    operands: Operands,
    saved: Saved,
    problem: Problem,
    mut dk: GradientView,
    mut dv: GradientView,
    #[comptime] backward: BackwardPlan,
) {
    let plan = comptime!(backward.plan);
    let tile = comptime!(plan.tile());
    let inner = comptime!(plan.inner as u32);
    let own_bytes = comptime!(plan.tile_bytes(plan.rows()) as u32);
    let stage_bytes = comptime!(2 * plan.tile_bytes(plan.inner) as u32);
    let row_bytes = comptime!(8 * plan.inner as u32);
    let memory: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!((2 * plan.tile_bytes(plan.rows()) + 4 * plan.tile_bytes(plan.inner)) / 16),
        128usize,
    );
    let row_memory: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(plan.inner), 16usize);
    let k_at = cvta_to_shared::<Vector<u32, Const<4>>>(memory.as_slice().as_ptr());
    let v_at = k_at + own_bytes;
    let stages_at = v_at + own_bytes;
    let rows_at = cvta_to_shared::<Vector<u32, Const<4>>>(row_memory.as_slice().as_ptr());
    let at = place(
        &problem,
        CUBE_POS_X,
        comptime!(plan.rows()),
        Side::Keys,
        comptime!(plan.offsets),
        false,
    );
    if at.exists {
        let kv_head = CUBE_POS_Y;
        let extent = at.extent;
        let visible = Visible::of(&problem, extent, plan);
        let own = (thread_in_cta() / 32u32) * comptime!(16 * plan.strips as u32);
        let k_source = operands.k.source(kv_head, extent.k, tile);
        let v_source = operands.v.source(kv_head, extent.k, tile);
        let (units, height) = comptime!((plan.units(), plan.rows()));
        copy_rows(k_source, k_at, at.row, extent.k_len, height, units, tile);
        copy_rows(v_source, v_at, at.row, extent.k_len, height, units, tile);
        // Blocks of queries that see one of the keys, in each of the heads.
        let last_key = min(at.row + comptime!(plan.rows() as u32), extent.k_len) - 1u32;
        let q_len = i32::cast_from(extent.q_len);
        let first = u32::cast_from(visible.first_query(i32::cast_from(at.row))) / inner;
        let end = u32::cast_from(visible.end_query(i32::cast_from(last_key), q_len));
        let blocks = max(end.div_ceil(inner), first) - first;
        let steps = blocks * problem.group;
        let first_head = kv_head * problem.group;
        if steps > 0u32 {
            fill(
                operands.q.source(first_head, extent.q, tile),
                saved.dout.source(first_head, extent.q, tile),
                &saved,
                Stage {
                    at: stages_at,
                    rows_at,
                    row: first * inner,
                    len: extent.q_len,
                },
                first_head as usize * problem.q_tokens as usize + extent.q as usize,
                plan,
            );
        }
        cp_async_commit_group();
        let k_rows = fragment_rows(k_at, own, tile);
        let v_rows = fragment_rows(v_at, own, tile);
        let mut dk_sums = zeros(comptime!(plan.strips * plan.head / 8));
        let mut dv_sums = zeros(comptime!(plan.strips * plan.head / 8));
        for step in 0..steps {
            // This stage has arrived, and all warps have read the other one.
            cp_async_wait_group(0u32);
            sync_cube();
            let next = step + 1u32;
            if next < steps {
                let head = first_head + next / blocks;
                fill(
                    operands.q.source(head, extent.q, tile),
                    saved.dout.source(head, extent.q, tile),
                    &saved,
                    Stage {
                        at: stages_at + (next & 1u32) * stage_bytes,
                        rows_at: rows_at + (next & 1u32) * row_bytes,
                        row: (first + next % blocks) * inner,
                        len: extent.q_len,
                    },
                    head as usize * problem.q_tokens as usize + extent.q as usize,
                    plan,
                );
            }
            cp_async_commit_group();
            let q_at = stages_at + (step & 1u32) * stage_bytes;
            let dout_at = q_at + comptime!(plan.tile_bytes(plan.inner) as u32);
            let here = rows_at + (step & 1u32) * row_bytes;
            let q_columns = fragment_columns(q_at, 0u32.runtime(), tile);
            let mut scores =
                multiply_rows(k_rows, q_columns, plan.strips, plan.inner, tile, plan.kind);
            // Derivative of the soft cap, if any.
            let mut slopes = zeros(comptime!(slopes_of(plan)));
            if comptime!(plan.softcap) {
                #[unroll]
                for i in 0..comptime!(plan.strips * plan.inner / 8) {
                    let capped = cap_all(&problem, scores[i]);
                    scores[i] = capped;
                    let mut slope = Vector::<f32, Const<4>>::new(0.0f32);
                    #[unroll]
                    for e in 0..4usize {
                        slope.insert(e, cap_derivative(&problem, capped.extract(e)));
                    }
                    slopes[i] = slope;
                }
            }
            weigh(&mut scores, here, exponent_scale(&problem, plan), plan);
            let query = (first + step % blocks) * inner;
            mask_weights(&mut scores, visible, at.row + own, query, plan);
            if comptime!(backward.part.has_values()) {
                let weights = pack_left(&scores, plan.strips, plan.inner, plan.kind);
                let dout_rows = fragment_rows(dout_at, 0u32.runtime(), tile);
                multiply_add(
                    &mut dv_sums,
                    &weights,
                    dout_rows,
                    plan.strips,
                    plan.inner,
                    tile,
                    plan.kind,
                );
            }
            if comptime!(backward.part.has_keys()) {
                let dout_columns = fragment_columns(dout_at, 0u32.runtime(), tile);
                let gradients = multiply_rows(
                    v_rows,
                    dout_columns,
                    plan.strips,
                    plan.inner,
                    tile,
                    plan.kind,
                );
                score_gradients(&mut scores, &gradients, &slopes, here, plan);
                let left = pack_left(&scores, plan.strips, plan.inner, plan.kind);
                let q_rows = fragment_rows(q_at, 0u32.runtime(), tile);
                multiply_add(
                    &mut dk_sums,
                    &left,
                    q_rows,
                    plan.strips,
                    plan.inner,
                    tile,
                    plan.kind,
                );
            }
        }
        // Only this warp reads its keys and values, so its gradients can overwrite them.
        cp_async_wait_group(0u32);
        sync_cube();
        let rows = WarpRows {
            tile_at: k_at,
            own,
            row: at.row,
            len: extent.k_len,
            token: extent.k,
            head: kv_head,
        };
        if comptime!(backward.part.has_keys()) {
            let rotate = comptime!(backward.rope);
            write_gradient(&mut dk, &dk_sums, &saved, rows, problem.scale, rotate, plan);
        }
        if comptime!(backward.part.has_values()) {
            let one = 1.0f32.runtime();
            write_gradient(&mut dv, &dv_sums, &saved, rows, one, false, plan);
        }
    }
}

/// Returns the number of slopes that are kept.
pub const fn slopes_of(plan: MmaPlan) -> usize {
    if plan.softcap {
        plan.strips * plan.inner / 8
    } else {
        1
    }
}

/// Turns transposed scores into weights. The log-sum-exps of the columns are at `rows_at`.
#[cube]
pub fn weigh(
    scores: &mut Array<Vector<f32, Const<4>>>,
    rows_at: u32,
    scale: f32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    #[unroll]
    for j in 0..comptime!(plan.inner / 8) {
        let lse = ld_shared_v2(rows_at + comptime!(32 * j as u32) + (lane % 4u32) * 8u32);
        let low = f32::reinterpret(lse.extract(0usize));
        let high = f32::reinterpret(lse.extract(1usize));
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            let at = comptime!(strip * plan.inner / 8 + j);
            let four = scores[at];
            let mut weights = Vector::<f32, Const<4>>::new(0.0f32);
            weights.insert(0usize, weight(four.extract(0usize), scale, low));
            weights.insert(1usize, weight(four.extract(1usize), scale, high));
            weights.insert(2usize, weight(four.extract(2usize), scale, low));
            weights.insert(3usize, weight(four.extract(3usize), scale, high));
            scores[at] = weights;
        }
    }
}

/// Sets the weights of keys that a query does not see to zero. Keys start at `row` and belong to a
/// warp; queries start at `query`.
#[cube]
pub fn mask_weights(
    weights: &mut Array<Vector<f32, Const<4>>>,
    visible: Visible,
    row: u32,
    query: u32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    let row = i32::cast_from(row);
    let query = i32::cast_from(query);
    let last_key = row + comptime!(16 * plan.strips as i32 - 1);
    let last_query = query + comptime!(plan.inner as i32 - 1);
    let partial = visible.end(query) <= last_key || visible.first(last_query) > row;
    if partial {
        #[unroll]
        for j in 0..comptime!(plan.inner / 8) {
            #[unroll]
            for e in 0..2usize {
                let this =
                    query + comptime!((8 * j + e) as i32) + i32::cast_from((lane % 4u32) * 2u32);
                let first = visible.first(this);
                let end = visible.end(this);
                #[unroll]
                for i in 0..comptime!(2 * plan.strips) {
                    let at = comptime!((i / 2) * plan.inner / 8 + j);
                    let part = comptime!(2 * (i % 2) + e);
                    let key = row
                        + comptime!((16 * (i / 2) + 8 * (i % 2)) as i32)
                        + i32::cast_from(lane / 4u32);
                    let mut four = weights[at];
                    let seen = key >= first && key < end;
                    four.insert(part, select(seen, four.extract(part), 0.0f32));
                    weights[at] = four;
                }
            }
        }
    }
}

/// Replaces the weights by `p · (dp - delta)`, times the slopes of the soft cap, if any. The deltas
/// of the columns follow the log-sum-exps at `rows_at`.
#[cube]
pub fn score_gradients(
    weights: &mut Array<Vector<f32, Const<4>>>,
    gradients: &Array<Vector<f32, Const<4>>>,
    slopes: &Array<Vector<f32, Const<4>>>,
    rows_at: u32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    #[unroll]
    for j in 0..comptime!(plan.inner / 8) {
        let at = rows_at + comptime!((32 * j + 4 * plan.inner) as u32);
        let deltas = ld_shared_v2(at + (lane % 4u32) * 8u32);
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            let at = comptime!(strip * plan.inner / 8 + j);
            let p = weights[at];
            let dp = gradients[at];
            let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                let delta = f32::reinterpret(deltas.extract(comptime!(e % 2)));
                let mut value = p.extract(e) * (dp.extract(e) - delta);
                if comptime!(plan.softcap) {
                    value *= slopes[at].extract(e);
                }
                ds.insert(e, value);
            }
            weights[at] = ds;
        }
    }
}
