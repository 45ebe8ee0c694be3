//! Partial results of the runs, and their sum. The cube that finishes the last run of a block of
//! rows writes the block's output.

use cubecl::prelude::*;

use super::{
    append::{CacheShape, Extent, larger},
    plan::{DecodePlan, MOST_RUNS},
};
use crate::{
    attention::scalar::math::{exp_or_nan, product},
    cube::{
        codec::store,
        exact::{fma, reciprocal},
    },
};

/// Runs whose partial results a unit loads before it adds the first one.
const RUNS_AT_ONCE: usize = 32;
/// Output buffers of a launch.
#[derive(CubeType, CubeLaunch)]
pub struct DecodeOutput<F: Numeric> {
    /// Partial results of the runs, `[sequence, block of rows, run, row]`: weighted values, then
    /// the largest score and the sum of weights.
    pub parts: Box<[f32]>,
    /// Number of finished runs of each block of rows, `[sequence, block of rows]`: zero before and
    /// after the launch.
    pub finished: Box<[u32]>,
    /// Output, `[tokens, heads, head]`.
    pub out: Box<[F]>,
}

/// A block of the rows that read a head of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RowBlock {
    pub sequence: u32,
    /// Head of keys.
    pub kv_head: u32,
    /// First row among those of the head.
    pub first_row: u32,
    /// Index among all blocks.
    pub index: usize,
}

#[cube]
impl RowBlock {
    /// Returns the index of the block's first run among those of all blocks.
    pub(super) fn first_run(&self, shape: &CacheShape) -> usize {
        self.index * shape.splits as usize
    }

    /// Returns the offset of the partial results of run `run`.
    pub(super) fn part(&self, shape: &CacheShape, run: u32, #[comptime] plan: DecodePlan) -> usize {
        (self.first_run(shape) + run as usize) * comptime!(plan.rows * plan.part())
    }
}

/// Sums the `own.runs` partial results of each row of `block` in order, relative to the largest
/// score of all, and writes the output: 0 if a query sees no keys. All units of a cube must
/// participate; `memory` is free and has three floats per row and run, for [`MOST_RUNS`] runs.
#[cube]
pub(super) fn merge_runs<F: Numeric>(
    output: &mut DecodeOutput<F>,
    memory: &mut Shared<[f32]>,
    shape: &CacheShape,
    own: &Extent,
    block: RowBlock,
    time: u32,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.rows as u32);
    let head = comptime!(plan.head as u32);
    // `memory` contains the largest scores, the sums of weights and the factors, `[row, run]` each.
    let sums = comptime!(plan.rows * MOST_RUNS);
    let factors = comptime!(2 * plan.rows * MOST_RUNS);
    let first = block.part(shape, 0u32, plan);
    let mut loaded = Array::<f32>::new(RUNS_AT_ONCE);
    // Prefetch the first values of this unit.
    let item = min(UNIT_POS, comptime!((plan.rows * plan.head - 1) as u32));
    let at = first + place_of(item, plan);
    load_runs(&output.parts, at, own.runs, &mut loaded, plan);
    let mut item = UNIT_POS;
    while item < rows * own.runs {
        let (row, run) = ((item % rows) as usize, (item / rows) as usize);
        let at = block.part(shape, run as u32, plan)
            + row * comptime!(plan.part())
            + comptime!(plan.head);
        let place = row * MOST_RUNS + run;
        memory[place] = output.parts[at];
        memory[sums + place] = output.parts[at + 1usize];
        item += CUBE_DIM;
    }
    sync_cube();
    let mut item = UNIT_POS;
    while item < rows * own.runs {
        let (row, run) = ((item % rows) as usize, (item / rows) as usize);
        let mut highest = f32::new(comptime!(f32::MIN));
        for other in 0..own.runs {
            highest = larger(highest, memory[row * MOST_RUNS + other as usize]);
        }
        let place = row * MOST_RUNS + run;
        let factor = exp_or_nan(memory[place] - highest, plan.conversion);
        memory[factors + place] = factor;
        item += CUBE_DIM;
    }
    sync_cube();
    let mut item = UNIT_POS;
    while item < rows * head {
        let row = item / head;
        let mut sum = 0.0f32;
        let mut value = 0.0f32;
        let mut begin = 0u32;
        while begin < own.runs {
            if begin > 0u32 || item >= CUBE_DIM {
                let at = block.part(shape, begin, plan) + place_of(item, plan);
                load_runs(&output.parts, at, own.runs - begin, &mut loaded, plan);
            }
            #[unroll(plan.unroll)]
            for i in 0..RUNS_AT_ONCE {
                let run = begin + i as u32;
                if run < own.runs {
                    let place = row as usize * MOST_RUNS + run as usize;
                    let factor = memory[factors + place];
                    sum = fma(memory[sums + place], factor, sum, plan.conversion);
                    value = fma(loaded[i], factor, value, plan.conversion);
                }
            }
            begin += comptime!(RUNS_AT_ONCE as u32);
        }
        let of_head = block.first_row + row;
        let t = of_head / shape.group;
        if t < time {
            let nothing = sum == 0.0f32 || own.start + t >= own.end;
            let inverse = reciprocal(select(nothing, 1.0f32, sum), plan.conversion);
            let value = product(value, inverse, plan.conversion);
            let heads = shape.group * shape.kv_heads;
            let index = block.kv_head * shape.group + of_head % shape.group;
            let token = block.sequence * time + t;
            let at =
                (token * heads + index) as usize * comptime!(plan.head) + (item % head) as usize;
            output.out[at] = store::<F>(select(nothing, 0.0f32, value), plan.kind);
        }
        item += CUBE_DIM;
    }
}

/// Returns the offset of element `item` of a block's values among the partial results of a run.
#[cube]
fn place_of(item: u32, #[comptime] plan: DecodePlan) -> usize {
    let head = comptime!(plan.head as u32);
    (item / head) as usize * comptime!(plan.part()) + (item % head) as usize
}

/// Loads an element of the partial results of up to [`RUNS_AT_ONCE`] of `count` runs, the first of
/// which is at `at`.
#[cube]
fn load_runs(
    parts: &[f32],
    at: usize,
    count: u32,
    loaded: &mut Array<f32>,
    #[comptime] plan: DecodePlan,
) {
    #[unroll(plan.unroll)]
    for i in 0..RUNS_AT_ONCE {
        if (i as u32) < count {
            loaded[i] = parts[at + i * comptime!(plan.rows * plan.part())];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::attention::decode_splits;

    #[test]
    fn no_head_is_cut_into_more_runs() {
        let most = (0..1000).map(decode_splits).max();
        assert_eq!(most, Some(MOST_RUNS));
    }
}
