//! A thread's `wgmma` accumulators in groups of four: two columns of each of its two rows, for each
//! eight columns of the output. Also converts them to the left operand of the next GEMM.

use cubecl::prelude::*;

use crate::attention::mma::{multiply::pack, problem::MmaPlan};

/// Returns group `j` of four.
#[cube]
pub(super) fn four_of<N: Size>(
    sums: Vector<f32, N>,
    #[comptime] j: usize,
) -> Vector<f32, Const<4>> {
    let mut four = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for e in 0..4usize {
        four.insert(e, sums.extract(comptime!(4 * j + e)));
    }
    four
}

/// Returns the first `count` groups.
#[cube]
pub(super) fn fours<N: Size>(
    sums: Vector<f32, N>,
    #[comptime] count: usize,
) -> Array<Vector<f32, Const<4>>> {
    let mut all = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for j in 0..count {
        all[j] = four_of::<N>(sums, j);
    }
    all
}

/// Packs the left operand of the next GEMM, whose K dimension is the `plan.inner` columns.
#[cube]
pub(super) fn left<A: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    #[comptime] plan: MmaPlan,
) -> Vector<u32, A> {
    let mut words = Vector::<u32, A>::new(0u32);
    #[unroll]
    for j in 0..comptime!(plan.inner / 8) {
        let four = sums[j];
        let low = pack(four.extract(0usize), four.extract(1usize), plan.kind);
        let high = pack(four.extract(2usize), four.extract(3usize), plan.kind);
        words.insert(comptime!(2 * j), low);
        words.insert(comptime!(2 * j + 1), high);
    }
    words
}
