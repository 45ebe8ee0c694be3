//! Forward of attention. A row of queries iterates over the keys that it sees, and keeps its
//! largest score, the sum of exponentials, and the output; these are rescaled if the maximum rises.

use cubecl::prelude::*;

use super::{
    math::{exp_or_nan, ln, weight_of_highest},
    problem::{
        AT_ONCE, Four, HeadsView, Problem, ScalarPlan, add_scaled, keys_of, load_row, place,
        row_product, scale_row, score, stage, store_row, zero_row,
    },
};
use crate::cube::exact::{fma, reciprocal};

/// State of a row over the keys so far.
#[derive(CubeType)]
struct RowState {
    /// Largest score.
    highest: f32,
    /// Sum of the exponentials of the scores minus `highest`.
    sum: f32,
    /// Sum of the values weighted by these exponentials.
    out: Array<Four>,
}

/// Computes `out = softmax(mask(scale · q kᵀ)) v` and the log-sum-exp of the rows,
/// `[heads, tokens]`. Cubes stride over tiles of queries times heads.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_forward_kernel<F: Numeric>(
    q: HeadsView<F>,
    k: HeadsView<F>,
    v: HeadsView<F>,
    problem: Problem,
    mut out: HeadsView<F>,
    lse: &mut [f32],
    #[comptime] plan: ScalarPlan,
    #[define(F)] _storage: ElemType,
) {
    let rows = comptime!(plan.rows() as u32);
    let tile = comptime!(plan.tile() as u32);
    let mut k_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let mut v_tile = Shared::<[Four]>::new_slice(comptime!(plan.tile() * plan.fours()));
    let at = place(plan);
    let conversion = comptime!(plan.conversion);
    let row_tiles = problem.q_tokens.div_ceil(rows) as usize;
    let mut item = CUBE_POS;
    while item < row_tiles * problem.heads as usize {
        let index = (item / row_tiles) as u32;
        let first_row = (item % row_tiles) as u32 * rows;
        let last_row = min(first_row + rows, problem.q_tokens) - 1u32;
        let token = min(first_row + at.row, last_row);
        let none = first_row + at.row > last_row;
        let seen = keys_of(&problem, token);
        // The keys that the cube's rows see lie between those of its first and of its last row.
        let begin = keys_of(&problem, first_row).start;
        let end = keys_of(&problem, last_row).end;
        let query = load_row::<F>(&q, token, index, problem.head, at.lane, none, plan);
        let quiet = problem.quiet == 1u32;
        let mut state = RowState {
            highest: select(quiet, 0.0f32, f32::MIN),
            sum: select(quiet, 1.0f32, 0.0f32),
            out: zero_row(plan),
        };
        let mut first = begin;
        while first < end {
            sync_cube();
            let kv_index = index / problem.group;
            stage::<F>(&k, &mut k_tile, first, end, kv_index, problem.head, plan);
            stage::<F>(&v, &mut v_tile, first, end, kv_index, problem.head, plan);
            sync_cube();
            let count = min(tile, end - first);
            let mut key = 0u32;
            while key < count {
                let mut products = Array::<f32>::new(AT_ONCE);
                #[unroll]
                for i in 0..AT_ONCE {
                    let this = key + comptime!(i as u32);
                    products[i] = row_product(&query, &k_tile, this, at.lane, plan);
                }
                #[unroll]
                for i in 0..AT_ONCE {
                    let this = key + comptime!(i as u32);
                    if first + this >= seen.start && first + this < seen.end {
                        let s = score(products[i], &problem, plan).value;
                        let above = s - state.highest;
                        let e = exp_or_nan(-above.abs(), conversion);
                        let mut weight = e;
                        let mut factor = 1.0f32;
                        if above > 0.0f32 {
                            weight = weight_of_highest(s);
                            factor = e;
                            state.highest = s;
                            scale_row(&mut state.out, e, plan);
                        }
                        state.sum = fma(state.sum, factor, weight, conversion);
                        add_scaled(&mut state.out, weight, &v_tile, this, at.lane, plan);
                    }
                }
                key += comptime!(AT_ONCE as u32);
            }
            first += tile;
        }
        let nothing = state.sum == 0.0f32;
        let inverse = reciprocal(select(nothing, 1.0f32, state.sum), conversion);
        scale_row(&mut state.out, select(nothing, 0.0f32, inverse), plan);
        if !none {
            store_row::<F>(
                &mut out,
                &state.out,
                token,
                index,
                problem.head,
                at.lane,
                plan,
            );
            if at.lane == 0u32 {
                let value = state.highest + ln(state.sum, conversion);
                let row = index as usize * problem.q_tokens as usize + token as usize;
                lse[row] = select(nothing || behind(&problem, token), f32::NEG_INFINITY, value);
            }
        }
        item += CUBE_COUNT;
    }
}

/// True if a token of `q` belongs to no sequence.
#[cube]
fn behind(problem: &Problem, token: u32) -> bool {
    problem.offsets == 1u32 && token >= problem.q_starts[problem.sequences as usize]
}
