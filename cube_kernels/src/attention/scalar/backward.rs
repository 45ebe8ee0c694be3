//! Backward in two passes: over the keys of a query for `dq`, and over the queries of a key for
//! `dk` and `dv`. Each pass recomputes the weights, so that every sum has a fixed order.

use cubecl::prelude::*;

use super::{
    math::exp_or_nan,
    problem::{
        Four, HeadsView, Problem, ScalarPlan, add_scaled, keys_of, load_row, place, queries_of,
        row_product, scale_row, score, stage, store_row, zero_row,
    },
};

/// Number of keys that are multiplied at a time: elements read for their products stay in registers
/// for their sums.
const KEYS_AT_ONCE: usize = 2;
/// Number of queries that are multiplied at a time; see [`KEYS_AT_ONCE`].
const QUERIES_AT_ONCE: usize = 1;

/// Operands of the backward.
#[derive(CubeType, CubeLaunch)]
pub struct Operands<F: Numeric> {
    /// Queries.
    pub q: HeadsView<F>,
    /// Keys.
    pub k: HeadsView<F>,
    /// Values.
    pub v: HeadsView<F>,
    /// Gradient of the output.
    pub dout: HeadsView<F>,
    /// Log-sum-exp of each row, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// Sum of `dout · out` of each row, `[heads, tokens]`.
    pub delta: Box<[f32]>,
}

/// A weight, and the gradient of its score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Weight {
    value: f32,
    by_score: f32,
}

/// Computes both from `q · k` and from the product of the output's gradient and a value.
#[cube]
fn weight(
    dot: f32,
    by_weight: f32,
    lse: f32,
    delta: f32,
    problem: &Problem,
    #[comptime] plan: ScalarPlan,
) -> Weight {
    let score = score(dot, problem, plan);
    let e = exp_or_nan(score.value - lse, plan.conversion);
    let value = select(lse == f32::NEG_INFINITY, 0.0f32, e);
    let mut by_score = value * (by_weight - delta);
    if comptime!(plan.softcap) {
        by_score *= score.slope;
    }
    Weight { value, by_score }
}

/// Computes `dq = scale · ds k`. Cubes stride over tiles of queries times heads.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_dq_kernel<F: Numeric>(
    operands: Operands<F>,
    problem: Problem,
    mut dq: HeadsView<F>,
    #[comptime] plan: ScalarPlan,
    #[define(F)] _storage: ElemType,
) {
    let rows = comptime!(plan.rows() as u32);
    let tile = comptime!(plan.tile() as u32);
    let head = problem.head;
    let mut k_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let mut v_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let at = place(plan);
    let row_tiles = problem.q_tokens.div_ceil(rows) as usize;
    let mut item = CUBE_POS;
    while item < row_tiles * problem.heads as usize {
        let index = (item / row_tiles) as u32;
        let first_row = (item % row_tiles) as u32 * rows;
        let last_row = min(first_row + rows, problem.q_tokens) - 1u32;
        let token = min(first_row + at.row, last_row);
        let none = first_row + at.row > last_row;
        let seen = keys_of(&problem, token);
        let begin = keys_of(&problem, first_row).start;
        let end = keys_of(&problem, last_row).end;
        let query = load_row::<F>(&operands.q, token, index, head, at.lane, none, plan);
        let dout = load_row::<F>(&operands.dout, token, index, head, at.lane, none, plan);
        let row = index as usize * problem.q_tokens as usize + token as usize;
        let lse = operands.lse[row];
        let delta = operands.delta[row];
        let mut sums = zero_row(plan);
        let mut first = begin;
        while first < end {
            sync_cube();
            let kv_index = index / problem.group;
            stage::<F>(&operands.k, &mut k_tile, first, end, kv_index, head, plan);
            stage::<F>(&operands.v, &mut v_tile, first, end, kv_index, head, plan);
            sync_cube();
            let count = min(tile, end - first);
            let mut key = 0u32;
            while key < count {
                let mut scores = Array::<f32>::new(KEYS_AT_ONCE);
                let mut by_weights = Array::<f32>::new(KEYS_AT_ONCE);
                #[unroll]
                for i in 0..KEYS_AT_ONCE {
                    let this = key + comptime!(i as u32);
                    scores[i] = row_product(&query, &k_tile, this, at.lane, plan);
                    by_weights[i] = row_product(&dout, &v_tile, this, at.lane, plan);
                }
                #[unroll]
                for i in 0..KEYS_AT_ONCE {
                    let this = key + comptime!(i as u32);
                    if first + this >= seen.start && first + this < seen.end {
                        let found = weight(scores[i], by_weights[i], lse, delta, &problem, plan);
                        add_scaled(&mut sums, found.by_score, &k_tile, this, at.lane, plan);
                    }
                }
                key += comptime!(KEYS_AT_ONCE as u32);
            }
            first += tile;
        }
        scale_row(&mut sums, problem.scale, plan);
        if !none {
            store_row::<F>(&mut dq, &sums, token, index, head, at.lane, plan);
        }
        item += CUBE_COUNT;
    }
}

/// Computes `dk = scale · dsᵀ q` and `dv = pᵀ dout`, summed over the query heads that read a head
/// of keys. Cubes stride over tiles of keys times their heads.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_dkdv_kernel<F: Numeric>(
    operands: Operands<F>,
    problem: Problem,
    mut dk: HeadsView<F>,
    mut dv: HeadsView<F>,
    #[comptime] plan: ScalarPlan,
    #[define(F)] _storage: ElemType,
) {
    let rows = comptime!(plan.rows() as u32);
    let tile = comptime!(plan.tile() as u32);
    let head = problem.head;
    let mut q_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let mut dout_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let mut lse_tile = Shared::<[f32]>::new_slice(comptime!(plan.tile()));
    let mut delta_tile = Shared::<[f32]>::new_slice(comptime!(plan.tile()));
    let at = place(plan);
    let row_tiles = problem.k_tokens.div_ceil(rows) as usize;
    let mut item = CUBE_POS;
    while item < row_tiles * (problem.heads / problem.group) as usize {
        let kv_index = (item / row_tiles) as u32;
        let first_row = (item % row_tiles) as u32 * rows;
        let last_row = min(first_row + rows, problem.k_tokens) - 1u32;
        let token = min(first_row + at.row, last_row);
        let none = first_row + at.row > last_row;
        let seen = queries_of(&problem, token);
        let begin = queries_of(&problem, first_row).start;
        let end = queries_of(&problem, last_row).end;
        let key = load_row::<F>(&operands.k, token, kv_index, head, at.lane, none, plan);
        let value = load_row::<F>(&operands.v, token, kv_index, head, at.lane, none, plan);
        let mut dk_sums = zero_row(plan);
        let mut dv_sums = zero_row(plan);
        for member in 0..problem.group {
            let index = kv_index * problem.group + member;
            let mut first = begin;
            while first < end {
                sync_cube();
                stage::<F>(&operands.q, &mut q_tile, first, end, index, head, plan);
                stage::<F>(
                    &operands.dout,
                    &mut dout_tile,
                    first,
                    end,
                    index,
                    head,
                    plan,
                );
                let count = min(tile, end - first);
                let mut staged = UNIT_POS;
                while staged < tile {
                    let row = index as usize * problem.q_tokens as usize
                        + (first + min(staged, count - 1u32)) as usize;
                    lse_tile[staged as usize] = operands.lse[row];
                    delta_tile[staged as usize] = operands.delta[row];
                    staged += CUBE_DIM;
                }
                sync_cube();
                let mut query = 0u32;
                while query < count {
                    let mut scores = Array::<f32>::new(QUERIES_AT_ONCE);
                    let mut by_weights = Array::<f32>::new(QUERIES_AT_ONCE);
                    #[unroll]
                    for i in 0..QUERIES_AT_ONCE {
                        let this = query + comptime!(i as u32);
                        scores[i] = row_product(&key, &q_tile, this, at.lane, plan);
                        by_weights[i] = row_product(&value, &dout_tile, this, at.lane, plan);
                    }
                    #[unroll]
                    for i in 0..QUERIES_AT_ONCE {
                        let this = query + comptime!(i as u32);
                        if first + this >= seen.start && first + this < seen.end {
                            let found = weight(
                                scores[i],
                                by_weights[i],
                                lse_tile[this as usize],
                                delta_tile[this as usize],
                                &problem,
                                plan,
                            );
                            let lane = at.lane;
                            add_scaled(&mut dv_sums, found.value, &dout_tile, this, lane, plan);
                            add_scaled(&mut dk_sums, found.by_score, &q_tile, this, lane, plan);
                        }
                    }
                    query += comptime!(QUERIES_AT_ONCE as u32);
                }
                first += tile;
            }
        }
        scale_row(&mut dk_sums, problem.scale, plan);
        if !none {
            store_row::<F>(&mut dk, &dk_sums, token, kv_index, head, at.lane, plan);
            store_row::<F>(&mut dv, &dv_sums, token, kv_index, head, at.lane, plan);
        }
        item += CUBE_COUNT;
    }
}
