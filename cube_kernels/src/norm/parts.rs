//! Sums of a norm's parts, the gradients of its factors.

use cubecl::prelude::*;

use super::plan::PLANES;
use crate::reference::PART_LANES;

/// Sums the parts of each column, in the order of
/// [`reference::norm_backward`](crate::reference::norm_backward).
///
/// If units share memory, each has one partial sum of a column: 16 columns in a cube of 256 units.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn norm_parts_kernel(
    partial: &[f32],
    out: &mut [f32],
    parts: usize,
    cols: usize,
    #[comptime] shared: bool,
) {
    if comptime!(shared) {
        let columns = comptime!(32 * PLANES / PART_LANES);
        let mut scratch = Shared::<[f32]>::new_slice(comptime!(32 * PLANES));
        let mut first = CUBE_POS * columns;
        let lane = UNIT_POS as usize / columns;
        while first < cols {
            let column = first + UNIT_POS as usize % columns;
            // Past the end, the last column is read again and not used.
            let sum = lane_sum(partial, min(column, cols - 1usize), lane, parts, cols);
            scratch[UNIT_POS as usize] = sum;
            sync_cube();
            if lane == 0usize && column < cols {
                let mut sums = Array::<f32>::new(PART_LANES);
                #[unroll]
                for i in 0..PART_LANES {
                    sums[i] = scratch[i * columns + UNIT_POS as usize];
                }
                out[column] = lane_tree(&mut sums);
            }
            sync_cube();
            first += CUBE_COUNT * columns;
        }
    } else {
        let mut column = ABSOLUTE_POS;
        while column < cols {
            let mut sums = Array::<f32>::new(PART_LANES);
            for lane in 0..PART_LANES {
                sums[lane] = lane_sum(partial, column, lane, parts, cols);
            }
            out[column] = lane_tree(&mut sums);
            column += CUBE_COUNT * CUBE_DIM as usize;
        }
    }
}

/// Loads of a sum that are in flight together.
const AHEAD: usize = 6;

/// Returns the sum of every 16th part of a column, from `lane` on.
#[cube]
fn lane_sum(partial: &[f32], column: usize, lane: usize, parts: usize, cols: usize) -> f32 {
    let mut sum = 0.0f32;
    let mut part = lane;
    while part < parts {
        let mut values = Array::<f32>::new(AHEAD);
        #[unroll]
        for i in 0..AHEAD {
            let this = part + comptime!(i * PART_LANES);
            let value = partial[min(this, parts - 1usize) * cols + column];
            // No sum is -0, which adding +0 would change.
            values[i] = select(this < parts, value, 0.0f32);
        }
        #[unroll]
        for i in 0..AHEAD {
            sum += values[i];
        }
        part += comptime!(AHEAD * PART_LANES);
    }
    sum
}

/// Returns the sum of 16 lanes, neighbors first.
#[cube]
fn lane_tree(sums: &mut Array<f32>) -> f32 {
    #[unroll]
    for stage in 0..4u32 {
        let len = comptime!(PART_LANES >> (stage + 1));
        #[unroll]
        for i in 0..len {
            sums[i] = sums[comptime!(2 * i)] + sums[comptime!(2 * i + 1)];
        }
    }
    sums[0]
}
