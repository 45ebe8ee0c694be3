//! Forward of attention. A CTA has a tile of queries of one head and iterates over the keys and
//! values that they see, from the last to the first.
//!
//! A warp has `16 · strips` queries. The values of a block of keys are copied while its scores are
//! computed, and the next block of keys is copied while these values are multiplied. The running
//! maximum of a row and its sum of exponentials are kept with its output, which is rescaled if the
//! maximum rises (online softmax).

use cubecl::prelude::*;

use super::{
    multiply::{multiply_add, multiply_rows, pack, pack_left, zeros},
    problem::{LOG2_E, MmaPlan, Place, Problem, Side, Visible, cap, exponent_scale, place},
    tile::{HeadsView, copy_rows, fragment_columns, fragment_rows, load_chunk, store_pair},
};
use crate::{
    cube::ptx::{
        cp_async_commit_group, cp_async_wait_group, cvta_to_shared, ex2_approx_ftz, fma_rn,
    },
    gemm::arguments::thread_in_cta,
};

/// State of a warp's rows: each lane has two rows per strip, `g` and `g + 8`.
#[derive(CubeType)]
pub struct Rows {
    /// Largest score so far.
    pub highest: Array<f32>,
    /// Sum of exponentials in this lane's columns.
    pub sum: Array<f32>,
    /// Output so far, not divided by the sum.
    pub out: Array<Vector<f32, Const<4>>>,
}

/// Computes `out = softmax(mask(scale · q kᵀ)) v` and the log-sum-exp of the rows, for one head and
/// tile of queries. The grid is tiles times heads. `out` is `[tokens, heads, head]`, in vectors of
/// 16 bytes; `lse` is `[heads, tokens]`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mma_forward_kernel(
    q: HeadsView,
    k: HeadsView,
    v: HeadsView,
    problem: Problem,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    #[comptime] plan: MmaPlan,
) {
    let tile = comptime!(plan.tile());
    let inner = comptime!(plan.inner as u32);
    let memory: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!((plan.tile_bytes(plan.rows()) + 2 * plan.tile_bytes(plan.inner)) / 16),
        128usize,
    );
    let q_at = cvta_to_shared::<Vector<u32, Const<4>>>(memory.as_slice().as_ptr());
    let k_at = q_at + comptime!(plan.tile_bytes(plan.rows()) as u32);
    let v_at = k_at + comptime!(plan.tile_bytes(plan.inner) as u32);
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
        let q_source = q.source(head, extent.q, tile);
        let k_source = k.source(head / problem.group, extent.k, tile);
        let v_source = v.source(head / problem.group, extent.k, tile);
        // First row of the warp in the tile.
        let own = (thread_in_cta() / 32u32) * comptime!(16 * plan.strips as u32);
        let last = min(at.row + comptime!(plan.rows() as u32), extent.q_len) - 1u32;
        let first_block = u32::cast_from(visible.first(i32::cast_from(at.row))) / inner;
        let end = u32::cast_from(visible.end(i32::cast_from(last)));
        let mut block = end.div_ceil(inner);
        let mut rows = Rows {
            highest: Array::<f32>::new(comptime!(2 * plan.strips)),
            sum: Array::<f32>::new(comptime!(2 * plan.strips)),
            out: zeros(comptime!(plan.strips * plan.head / 8)),
        };
        #[unroll]
        for i in 0..comptime!(2 * plan.strips) {
            rows.highest[i] = first_highest(plan);
            rows.sum[i] = first_sum(plan);
        }
        let (units, height) = comptime!((plan.units(), plan.rows()));
        copy_rows(q_source, q_at, at.row, extent.q_len, height, units, tile);
        if block > first_block {
            let next = (block - 1u32) * inner;
            copy_rows(k_source, k_at, next, extent.k_len, plan.inner, units, tile);
        }
        cp_async_commit_group();
        let q_rows = fragment_rows(q_at, own, tile);
        let k_columns = fragment_columns(k_at, 0u32.runtime(), tile);
        let v_rows = fragment_rows(v_at, 0u32.runtime(), tile);
        while block > first_block {
            block -= 1u32;
            // The keys have arrived, and all warps have read the previous values.
            cp_async_wait_group(0u32);
            sync_cube();
            let from = block * inner;
            copy_rows(v_source, v_at, from, extent.k_len, plan.inner, units, tile);
            cp_async_commit_group();
            let mut scores =
                multiply_rows(q_rows, k_columns, plan.strips, plan.inner, tile, plan.kind);
            if comptime!(plan.softcap) {
                #[unroll]
                for i in 0..comptime!(plan.strips * plan.inner / 8) {
                    scores[i] = cap_all(&problem, scores[i]);
                }
            }
            mask(&mut scores, visible, at.row + own, from, plan);
            online_softmax(&mut scores, &mut rows, exponent_scale(&problem, plan), plan);
            let weights = pack_left(&scores, plan.strips, plan.inner, plan.kind);
            // The values have arrived, and all warps have read the keys.
            cp_async_wait_group(0u32);
            sync_cube();
            if block > first_block {
                let next = (block - 1u32) * inner;
                copy_rows(k_source, k_at, next, extent.k_len, plan.inner, units, tile);
            }
            cp_async_commit_group();
            multiply_add(
                &mut rows.out,
                &weights,
                v_rows,
                plan.strips,
                plan.inner,
                tile,
                plan.kind,
            );
        }
        // Only this warp reads its queries, so its output can overwrite them.
        cp_async_wait_group(0u32);
        sync_cube();
        finish(&problem, &rows, lse, q_at, own, at, head, plan);
        sync_plane();
        write(out, q_at, own, at, head, plan);
    }
}

/// Applies `cap` to four scores.
#[cube]
pub fn cap_all(problem: &Problem, scores: Vector<f32, Const<4>>) -> Vector<f32, Const<4>> {
    let mut capped = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for e in 0..4usize {
        capped.insert(e, cap(problem, scores.extract(e)));
    }
    capped
}

/// Masks the scores that a query must not see: keys `from..from + inner` for a warp whose first
/// query is `row`.
#[cube]
pub fn mask(
    scores: &mut Array<Vector<f32, Const<4>>>,
    visible: Visible,
    row: u32,
    from: u32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    let row = i32::cast_from(row);
    let from = i32::cast_from(from);
    // True if one of the warp's queries does not see one of the keys.
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
                let mut four = scores[at];
                #[unroll]
                for e in 0..2usize {
                    let part = comptime!(2 * (i % 2) + e);
                    let this = key + comptime!(e as i32);
                    let seen = this >= first && this < end;
                    four.insert(part, select(seen, four.extract(part), f32::NEG_INFINITY));
                }
                scores[at] = four;
            }
        }
    }
}

/// Turns scores into `2^(score - highest)`, and rescales the rows' output so far.
#[cube]
pub fn online_softmax(
    scores: &mut Array<Vector<f32, Const<4>>>,
    rows: &mut Rows,
    scale: f32,
    #[comptime] plan: MmaPlan,
) {
    let factors = weigh(scores, &mut rows.highest, &mut rows.sum, scale, plan);
    #[unroll]
    for at in 0..comptime!(plan.strips * plan.head / 8) {
        let row = comptime!(2 * (at / (plan.head / 8)));
        rows.out[at] = rescaled(rows.out[at], &factors, row, plan);
    }
}

/// Scales four accumulators of strip `row / 2`, two of each row of a lane, by the factors of their
/// rows.
#[cube]
fn rescaled(
    four: Vector<f32, Const<4>>,
    factors: &Array<f32>,
    #[comptime] row: usize,
    #[comptime] plan: MmaPlan,
) -> Vector<f32, Const<4>> {
    let mut scaled = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for e in 0..comptime!(usize::min(4, 2 * plan.lane_rows())) {
        scaled.insert(e, four.extract(e) * factors[comptime!(row + e / 2)]);
    }
    scaled
}

/// Turns scores into `2^(score - highest)`, adds them to the sums, and returns the factors for
/// rescaling the rows' output so far.
#[cube]
pub fn weigh(
    scores: &mut Array<Vector<f32, Const<4>>>,
    highest_so_far: &mut Array<f32>,
    sums: &mut Array<f32>,
    scale: f32,
    #[comptime] plan: MmaPlan,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(comptime!(plan.lane_rows()));
    #[unroll]
    for i in 0..comptime!(plan.lane_rows()) {
        let half = comptime!(2 * (i % 2));
        let before = highest_so_far[i];
        let mut highest = before;
        #[unroll]
        for j in 0..comptime!(plan.inner / 8) {
            let four = scores[comptime!((i / 2) * plan.inner / 8 + j)];
            highest = max(highest, four.extract(half));
            highest = max(highest, four.extract(comptime!(half + 1)));
        }
        // Reduces over the four lanes of a row.
        highest = max(highest, plane_shuffle_xor(highest, 1u32));
        highest = max(highest, plane_shuffle_xor(highest, 2u32));
        highest_so_far[i] = highest;
        // A row that has seen no keys has no maximum.
        let used = select(highest == f32::NEG_INFINITY, 0.0f32, highest) * scale;
        let factor = ex2_approx_ftz(fma_rn(before, scale, -used));
        let mut sum = sums[i] * factor;
        #[unroll]
        for j in 0..comptime!(plan.inner / 8) {
            let at = comptime!((i / 2) * plan.inner / 8 + j);
            let mut four = scores[at];
            #[unroll]
            for e in 0..2usize {
                let part = comptime!(half + e);
                let power = ex2_approx_ftz(fma_rn(four.extract(part), scale, -used));
                sum += power;
                four.insert(part, power);
            }
            scores[at] = four;
        }
        sums[i] = sum;
        factors[i] = factor;
    }
    factors
}

/// Returns the initial largest score: that of the additional score, if any.
#[cube]
pub fn first_highest(#[comptime] plan: MmaPlan) -> f32 {
    if comptime!(plan.quiet_softmax) {
        0.0f32.runtime()
    } else {
        f32::NEG_INFINITY.runtime()
    }
}

/// Returns the initial sum: one of the four lanes of a row has the additional score.
#[cube]
pub fn first_sum(#[comptime] plan: MmaPlan) -> f32 {
    if comptime!(plan.quiet_softmax) {
        f32::cast_from(u32::cast_from(UNIT_POS & 3u32 == 0u32))
    } else {
        0.0f32.runtime()
    }
}

/// Output factor and log-sum-exp of a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowFactors {
    /// Reciprocal of the sum of exponentials, 0 if the row has seen no keys.
    pub inverse: f32,
    /// Natural logarithm of the sum, `-inf` if the row has seen no keys.
    pub lse: f32,
}

/// Returns the factors of row `i` of a lane's `2 · strips` rows.
#[cube]
pub fn row_factors(
    problem: &Problem,
    rows: &Rows,
    #[comptime] i: usize,
    #[comptime] plan: MmaPlan,
) -> RowFactors {
    let scale = exponent_scale(problem, plan);
    let mut sum = rows.sum[i];
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    let highest = rows.highest[i];
    let used = select(highest == f32::NEG_INFINITY, 0.0f32, highest) * scale;
    let nothing = sum == 0.0f32;
    let value = used / comptime!(LOG2_E) + sum.ln();
    RowFactors {
        inverse: select(nothing, 0.0f32, 1.0f32 / sum),
        lse: select(nothing, f32::NEG_INFINITY, value),
    }
}

/// Divides the rows by their sums, writes their log-sum-exp, and stores them over the queries.
#[cube]
fn finish(
    problem: &Problem,
    rows: &Rows,
    lse: &mut [f32],
    tile_at: u32,
    own: u32,
    at: Place,
    head: u32,
    #[comptime] plan: MmaPlan,
) {
    let lane = UNIT_POS % 32u32;
    #[unroll]
    for i in 0..comptime!(2 * plan.strips) {
        let half = comptime!(2 * (i % 2));
        let row = own + comptime!((16 * (i / 2) + 8 * (i % 2)) as u32) + lane / 4u32;
        let factors = row_factors(problem, rows, i, plan);
        if lane & 3u32 == 0u32 && at.row + row < at.extent.q_len {
            let index =
                head as usize * problem.q_tokens as usize + (at.extent.q + at.row + row) as usize;
            // A token of no sequence has no sum either, with or without an additional score.
            lse[index] = select(at.nobody, f32::NEG_INFINITY, factors.lse);
        }
        #[unroll]
        for j in 0..comptime!(plan.head / 8) {
            let four = rows.out[comptime!((i / 2) * plan.head / 8 + j)];
            let low = four.extract(half) * factors.inverse;
            let high = four.extract(comptime!(half + 1)) * factors.inverse;
            let word = pack(low, high, plan.kind);
            store_pair(tile_at, row, j, lane % 4u32, word, comptime!(plan.tile()));
        }
    }
}

/// Writes a warp's rows of the tile.
#[cube]
fn write(
    out: &mut [Vector<u32, Const<4>>],
    tile_at: u32,
    own: u32,
    at: Place,
    head: u32,
    #[comptime] plan: MmaPlan,
) {
    let tile = comptime!(plan.tile());
    let chunks = comptime!(tile.chunks() as u32);
    #[unroll]
    for i in 0..comptime!(plan.strips * plan.head / 16) {
        let item = UNIT_POS % 32u32 + comptime!(32 * i as u32);
        let row = own + item / chunks;
        let chunk = item % chunks;
        if at.row + row < at.extent.q_len {
            let token = (at.extent.q + at.row + row) as usize;
            let index = (token * CUBE_COUNT_Y as usize + head as usize)
                * comptime!(plan.tile().chunks())
                + chunk as usize;
            out[index] = load_chunk(tile_at, row, chunk, tile);
        }
    }
}
