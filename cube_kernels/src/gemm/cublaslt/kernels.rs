//! The small kernels around a product of the library: the factors of a sum, and what the library
//! does not add as it should be added.

use cubecl::prelude::*;

use super::super::epilogue::{Factor, factor};
use crate::{
    cube::codec::{load, store},
    tensor::FloatKind,
};

/// `fl(fl(amax_a / range_a) · fl(amax_b / range_b))`, and `before` behind it.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn factors_kernel(
    a_amax: &[f32],
    b_amax: &[f32],
    out: &mut [f32],
    a_range: f32,
    b_range: f32,
    before: f32,
    #[comptime] a: Factor,
    #[comptime] b: Factor,
) {
    if ABSOLUTE_POS == 0usize {
        let left = factor(a_amax, 0u32, 0u32, a_range, a);
        let right = factor(b_amax, 0u32, 0u32, b_range, b);
        out[0] = left * right;
        out[1] = before;
    }
}

/// Element `i` of `out` becomes element `i` modulo `period` of `rows`, added to what it holds or not,
/// rounded once to `kind`: a bias in each row, or the sum of two matrices.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn add_rows_kernel<F: Numeric>(
    rows: &[f32],
    out: &mut [F],
    elements: usize,
    period: usize,
    #[comptime] add: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut item = ABSOLUTE_POS;
    while item < elements {
        let mut value = rows[item % period];
        if comptime!(add) {
            value += load::<F>(out[item], kind);
        }
        out[item] = store::<F>(value, kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
