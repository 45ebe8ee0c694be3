//! Partial results of the runs of [`decode_mma_kernel`](super::mma::decode_mma_kernel()), and their
//! sum.

use cubecl::prelude::*;

use super::{
    append::{CacheShape, Extent},
    merge::RowBlock,
    plan::{DecodePlan, MOST_RUNS, WARPS},
};
use crate::{
    attention::mma::problem::LOG2_E,
    cube::{codec::store, ptx::ex2_approx_ftz},
};

/// Runs of which a unit loads four values each before it adds the first one.
const RUNS_AT_ONCE: usize = 20;
/// Runs per lane of the warp that computes the factors of a row.
const LANE_RUNS: usize = MOST_RUNS / 32;

/// Output buffers of a launch.
#[derive(CubeType, CubeLaunch)]
pub struct MmaOutput<F: Numeric> {
    /// Weighted values of the runs, `[sequence, block of rows, run, row, head]`.
    pub parts: Box<[Vector<f32, Const<4>>]>,
    /// Largest score and sum of weights of each run, `[sequence, block of rows, run, row, 2]`.
    pub stats: Box<[f32]>,
    /// Number of finished runs of each block of rows, `[sequence, block of rows]`: zero before and
    /// after the launch.
    pub finished: Box<[u32]>,
    /// Output, `[tokens, heads, head]`.
    pub out: Box<[F]>,
}

/// Sums the warps of each row in order, and writes the result as that of run `run` of all.
#[cube]
pub(super) fn write_part<F: Numeric>(
    output: &mut MmaOutput<F>,
    scratch: &Shared<[f32]>,
    run: usize,
    #[comptime] plan: DecodePlan,
) {
    let part = comptime!(plan.part());
    let vectors = comptime!(plan.head / 4);
    let items = comptime!(plan.rows * plan.head / 4);
    #[unroll]
    for i in 0..comptime!(items.div_ceil(32 * WARPS)) {
        let item = UNIT_POS as usize + comptime!(i * 32 * WARPS);
        let (row, place) = (item / vectors, item % vectors);
        if row < comptime!(plan.rows) {
            let of_row = row * part;
            let mut highest = f32::new(comptime!(f32::MIN));
            #[unroll]
            for warp in 0..WARPS {
                let at = of_row + comptime!(warp * plan.rows * part + plan.head);
                highest = max(highest, scratch[at]);
            }
            let mut vector = Vector::<f32, Const<4>>::new(0.0f32);
            let mut sum = 0.0f32;
            #[unroll]
            for warp in 0..WARPS {
                let at = of_row + comptime!(warp * plan.rows * part);
                let own = scratch[at + comptime!(plan.head)];
                let factor = ex2_approx_ftz((own - highest) * comptime!(LOG2_E));
                #[unroll]
                for e in 0..4usize {
                    let value = scratch[at + 4usize * place + e];
                    vector.insert(e, vector.extract(e) + value * factor);
                }
                sum += scratch[at + comptime!(plan.head + 1)] * factor;
            }
            output.parts[run * items + item] = vector;
            if place == 0usize {
                let at = 2usize * (run * comptime!(plan.rows) + row);
                output.stats[at] = highest;
                output.stats[at + 1usize] = sum;
            }
        }
    }
}

/// Sums the `own.runs` partial results of each row of `block` in order, relative to the largest
/// score of all, and writes the output: 0 if a query sees no keys. All units of a cube must
/// participate; `memory` is free and has one float per row and run, for [`MOST_RUNS`] runs.
#[cube]
pub(super) fn merge_runs<F: Numeric>(
    output: &mut MmaOutput<F>,
    memory: &mut Shared<[f32]>,
    shape: &CacheShape,
    own: &Extent,
    block: RowBlock,
    time: u32,
    #[comptime] plan: DecodePlan,
) {
    let vectors = comptime!(plan.head / 4);
    let items = comptime!(plan.rows * plan.head / 4);
    let first = block.first_run(shape);
    let mut loaded = Array::<Vector<f32, Const<4>>>::new(RUNS_AT_ONCE);
    // The first values of this unit are loaded while the factors are computed.
    let item = min(UNIT_POS as usize, comptime!(items - 1));
    load_runs(
        &output.parts,
        first * items + item,
        own.runs,
        &mut loaded,
        items,
    );
    find_factors(&output.stats, memory, first, own.runs, plan);
    sync_cube();
    #[unroll]
    for i in 0..comptime!(items.div_ceil(32 * WARPS)) {
        let item = UNIT_POS as usize + comptime!(i * 32 * WARPS);
        let row = item / vectors;
        if row < comptime!(plan.rows) {
            let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
            let mut begin = 0u32;
            while begin < own.runs {
                if begin > 0u32 || comptime!(i > 0) {
                    let at = (first + begin as usize) * items + item;
                    load_runs(&output.parts, at, own.runs - begin, &mut loaded, items);
                }
                #[unroll]
                for j in 0..RUNS_AT_ONCE {
                    let run = begin + j as u32;
                    if run < own.runs {
                        let factor = memory[row * MOST_RUNS + run as usize];
                        let vector = loaded[j];
                        #[unroll]
                        for e in 0..4usize {
                            sum.insert(e, sum.extract(e) + vector.extract(e) * factor);
                        }
                    }
                }
                begin += comptime!(RUNS_AT_ONCE as u32);
            }
            let of_head = block.first_row + row as u32;
            let t = of_head / shape.group;
            if t < time {
                let heads = shape.group * shape.kv_heads;
                let index = block.kv_head * shape.group + of_head % shape.group;
                let token = block.sequence * time + t;
                let nothing = own.start + t >= own.end;
                let at = (token * heads + index) as usize * comptime!(plan.head)
                    + 4usize * (item % vectors);
                #[unroll]
                for e in 0..4usize {
                    let value = select(nothing, 0.0f32, sum.extract(e));
                    output.out[at + e] = store::<F>(value, plan.kind);
                }
            }
        }
    }
}

/// Loads up to [`RUNS_AT_ONCE`] of `count` runs of a vector, the first of which is at `at`.
#[cube]
fn load_runs(
    parts: &[Vector<f32, Const<4>>],
    at: usize,
    count: u32,
    loaded: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] items: usize,
) {
    #[unroll]
    for i in 0..RUNS_AT_ONCE {
        if (i as u32) < count {
            loaded[i] = parts[at + comptime!(i * items)];
        }
    }
}

/// Computes the factor of each run's values, into `memory`, `[row, run]`: a warp processes every
/// [`WARPS`]th row, a lane some of its runs.
#[cube]
fn find_factors(
    stats: &[f32],
    memory: &mut Shared<[f32]>,
    first: usize,
    runs: u32,
    #[comptime] plan: DecodePlan,
) {
    let lane = UNIT_POS % 32u32;
    let warp = UNIT_POS / 32u32;
    #[unroll]
    for i in 0..comptime!(plan.rows.div_ceil(WARPS)) {
        let row = warp as usize + comptime!(i * WARPS);
        if row < comptime!(plan.rows) {
            let mut highest = Array::<f32>::new(LANE_RUNS);
            let mut sums = Array::<f32>::new(LANE_RUNS);
            #[unroll]
            for k in 0..LANE_RUNS {
                let run = lane + comptime!(32 * k as u32);
                highest[k] = f32::new(comptime!(f32::MIN));
                sums[k] = 0.0f32;
                if run < runs {
                    let at = 2usize * ((first + run as usize) * comptime!(plan.rows) + row);
                    highest[k] = stats[at];
                    sums[k] = stats[at + 1usize];
                }
            }
            let mut of_all = highest[0usize];
            #[unroll]
            for k in 1..LANE_RUNS {
                of_all = max(of_all, highest[k]);
            }
            let of_all = plane_max(of_all);
            let mut sum = 0.0f32;
            #[unroll]
            for k in 0..LANE_RUNS {
                highest[k] = ex2_approx_ftz((highest[k] - of_all) * comptime!(LOG2_E));
                sum += sums[k] * highest[k];
            }
            let sum = plane_sum(sum);
            let inverse = select(sum == 0.0f32, 0.0f32, 1.0f32 / sum);
            #[unroll]
            for k in 0..LANE_RUNS {
                let run = lane + comptime!(32 * k as u32);
                memory[row * MOST_RUNS + run as usize] = highest[k] * inverse;
            }
        }
    }
}
