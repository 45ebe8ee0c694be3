//! Gradient of the queries. A CTA has a tile of queries of one head and iterates over the keys that
//! they see, in ascending order. The weights are recomputed from the log-sum-exps.

use cubecl::prelude::*;

use super::{
    dkdv::{Operands, slopes_of},
    forward::cap_all,
    gradient::{
        BackwardPlan, GradientView, Saved, WarpRows, cap_derivative, exponent_offset, weight,
        write_gradient,
    },
    multiply::{multiply_add, multiply_rows, pack_left, zeros},
    problem::{MmaPlan, Problem, Side, Visible, exponent_scale, place},
    tile::{copy_rows, fragment_columns, fragment_rows},
};
use crate::{
    cube::ptx::{cp_async_commit_group, cp_async_wait_group, cvta_to_shared},
    gemm::arguments::thread_in_cta,
};

/// Values of a lane's rows: two rows per strip, `g` and `g + 8`.
#[derive(CubeType)]
pub struct RowValues {
    /// Log-sum-exps, as powers of two.
    lse: Array<f32>,
    /// Deltas.
    delta: Array<f32>,
}

/// Computes `dq = scale · ds k` for one tile of queries and one head. The grid is tiles times
/// heads.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mma_dq_kernel(
    operands: Operands,
    saved: Saved,
    problem: Problem,
    mut dq: GradientView,
    #[comptime] backward: BackwardPlan,
) {
    let plan = comptime!(backward.plan);
    let tile = comptime!(plan.tile());
    let inner = comptime!(plan.inner as u32);
    let own_bytes = comptime!(plan.tile_bytes(plan.rows()) as u32);
    let inner_bytes = comptime!(plan.tile_bytes(plan.inner) as u32);
    let memory: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!((2 * plan.tile_bytes(plan.rows()) + 4 * plan.tile_bytes(plan.inner)) / 16),
        128usize,
    );
    let q_at = cvta_to_shared::<Vector<u32, Const<4>>>(memory.as_slice().as_ptr());
    let dout_at = q_at + own_bytes;
    let stages_at = dout_at + own_bytes;
    let at = place(
        &problem,
        CUBE_POS_X,
        comptime!(plan.rows()),
        Side::Queries,
        comptime!(plan.offsets),
        comptime!(plan.causal),
    );
    if at.exists {
        let head = CUBE_POS_Y;
        let extent = at.extent;
        let visible = Visible::of(&problem, extent, plan);
        let own = (thread_in_cta() / 32u32) * comptime!(16 * plan.strips as u32);
        let k_source = operands.k.source(head / problem.group, extent.k, tile);
        let v_source = operands.v.source(head / problem.group, extent.k, tile);
        let q_source = operands.q.source(head, extent.q, tile);
        let dout_source = saved.dout.source(head, extent.q, tile);
        let (units, height) = comptime!((plan.units(), plan.rows()));
        copy_rows(q_source, q_at, at.row, extent.q_len, height, units, tile);
        copy_rows(
            dout_source,
            dout_at,
            at.row,
            extent.q_len,
            height,
            units,
            tile,
        );
        let last = min(at.row + comptime!(plan.rows() as u32), extent.q_len) - 1u32;
        let first = u32::cast_from(visible.first(i32::cast_from(at.row))) / inner;
        let end = u32::cast_from(visible.end(i32::cast_from(last)));
        let blocks = max(end.div_ceil(inner), first) - first;
        if blocks > 0u32 {
            let from = first * inner;
            copy_rows(
                k_source,
                stages_at,
                from,
                extent.k_len,
                plan.inner,
                units,
                tile,
            );
            let v_at = stages_at + inner_bytes;
            copy_rows(v_source, v_at, from, extent.k_len, plan.inner, units, tile);
        }
        cp_async_commit_group();
        let rows = row_values(
            &saved.lse,
            &saved.delta,
            head as usize * problem.q_tokens as usize + extent.q as usize,
            at.row + own,
            extent.q_len,
            plan,
        );
        let q_rows = fragment_rows(q_at, own, tile);
        let dout_rows = fragment_rows(dout_at, own, tile);
        let mut sums = zeros(comptime!(plan.strips * plan.head / 8));
        for step in 0..blocks {
            // This stage has arrived, and all warps have read the other one.
            cp_async_wait_group(0u32);
            sync_cube();
            let next = step + 1u32;
            if next < blocks {
                let stage = stages_at + (next & 1u32) * (2u32 * inner_bytes);
                let from = (first + next) * inner;
                copy_rows(k_source, stage, from, extent.k_len, plan.inner, units, tile);
                let v_at = stage + inner_bytes;
                copy_rows(v_source, v_at, from, extent.k_len, plan.inner, units, tile);
            }
            cp_async_commit_group();
            let k_at = stages_at + (step & 1u32) * (2u32 * inner_bytes);
            let v_at = k_at + inner_bytes;
            let k_columns = fragment_columns(k_at, 0u32.runtime(), tile);
            let mut scores =
                multiply_rows(q_rows, k_columns, plan.strips, plan.inner, tile, plan.kind);
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
            let v_columns = fragment_columns(v_at, 0u32.runtime(), tile);
            let gradients = multiply_rows(
                dout_rows,
                v_columns,
                plan.strips,
                plan.inner,
                tile,
                plan.kind,
            );
            let scale = exponent_scale(&problem, plan);
            score_gradients(&mut scores, &gradients, &slopes, &rows, scale, plan);
            mask_gradients(
                &mut scores,
                visible,
                at.row + own,
                (first + step) * inner,
                plan,
            );
            let left = pack_left(&scores, plan.strips, plan.inner, plan.kind);
            let k_rows = fragment_rows(k_at, 0u32.runtime(), tile);
            multiply_add(
                &mut sums,
                &left,
                k_rows,
                plan.strips,
                plan.inner,
                tile,
                plan.kind,
            );
        }
        // Only this warp reads its queries, so its gradients can overwrite them.
        cp_async_wait_group(0u32);
        sync_cube();
        let rows = WarpRows {
            tile_at: q_at,
            own,
            row: at.row,
            len: extent.q_len,
            token: extent.q,
            head,
        };
        let rotate = comptime!(backward.rope);
        write_gradient(&mut dq, &sums, &saved, rows, problem.scale, rotate, plan);
    }
}

/// Loads the values of this lane's rows. The warp's first row is `row` of `len`; the values of the
/// sequence start at `values`.
#[cube]
pub fn row_values(
    lse: &[f32],
    delta: &[f32],
    values: usize,
    row: u32,
    len: u32,
    #[comptime] plan: MmaPlan,
) -> RowValues {
    let mut rows = RowValues {
        lse: Array::<f32>::new(comptime!(2 * plan.strips)),
        delta: Array::<f32>::new(comptime!(2 * plan.strips)),
    };
    #[unroll]
    for i in 0..comptime!(2 * plan.strips) {
        let this = row + comptime!((16 * (i / 2) + 8 * (i % 2)) as u32) + (UNIT_POS % 32u32) / 4u32;
        let mut row_lse = f32::INFINITY.runtime();
        let mut row_delta = 0.0f32;
        if this < len {
            row_lse = exponent_offset(lse[values + this as usize]);
            row_delta = delta[values + this as usize];
        }
        rows.lse[i] = row_lse;
        rows.delta[i] = row_delta;
    }
    rows
}

/// Replaces the scores by `p · (dp - delta)`, times the slopes of the soft cap, if any.
#[cube]
pub fn score_gradients(
    scores: &mut Array<Vector<f32, Const<4>>>,
    gradients: &Array<Vector<f32, Const<4>>>,
    slopes: &Array<Vector<f32, Const<4>>>,
    rows: &RowValues,
    scale: f32,
    #[comptime] plan: MmaPlan,
) {
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll]
        for j in 0..comptime!(plan.inner / 8) {
            let at = comptime!(strip * plan.inner / 8 + j);
            let s = scores[at];
            let dp = gradients[at];
            let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                let row = comptime!(2 * strip + e / 2);
                let p = weight(s.extract(e), scale, rows.lse[row]);
                let mut value = p * (dp.extract(e) - rows.delta[row]);
                if comptime!(plan.softcap) {
                    value *= slopes[at].extract(e);
                }
                ds.insert(e, value);
            }
            scores[at] = ds;
        }
    }
}

/// Sets the gradients of scores that a query does not see to zero. Queries start at `row` and
/// belong to a warp; keys start at `from`.
#[cube]
pub fn mask_gradients(
    gradients: &mut Array<Vector<f32, Const<4>>>,
    visible: Visible,
    row: u32,
    from: u32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    let row = i32::cast_from(row);
    let from = i32::cast_from(from);
    let last = row + comptime!(16 * plan.strips as i32 - 1);
    let partial =
        visible.end(row) < from + comptime!(plan.inner as i32) || visible.first(last) > from;
    if partial {
        #[unroll]
        for i in 0..comptime!(2 * plan.strips) {
            let query =
                row + comptime!((16 * (i / 2) + 8 * (i % 2)) as i32) + i32::cast_from(lane / 4u32);
            let first = visible.first(query);
            let end = visible.end(query);
            #[unroll]
            for j in 0..comptime!(plan.inner / 8) {
                let at = comptime!((i / 2) * plan.inner / 8 + j);
                let key = from + comptime!(8 * j as i32) + i32::cast_from((lane % 4u32) * 2u32);
                let mut four = gradients[at];
                #[unroll]
                for e in 0..2usize {
                    let part = comptime!(2 * (i % 2) + e);
                    let this = key + comptime!(e as i32);
                    let seen = this >= first && this < end;
                    four.insert(part, select(seen, four.extract(part), 0.0f32));
                }
                gradients[at] = four;
            }
        }
    }
}
