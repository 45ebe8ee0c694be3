//! Portable kernel with one unit per output element.

use cubecl::prelude::*;

use super::mma::{Fp8Shape, Fp8Weight};
use crate::{
    cube::codec::{decode_e4m3_element, load, store},
    tensor::FloatKind,
};

/// Comptime choices of [`fp8_linear_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8LinearPlan {
    /// Type of `a`.
    pub a: FloatKind,
    /// Type of the output.
    pub out: FloatKind,
}

/// Computes `out[m, n] = (Σₖ a[m, k] · code[n, k]) · scale[n]`, with ascending `k`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fp8_linear_kernel<A: Numeric, F: Numeric>(
    a: &[A],
    b: Fp8Weight,
    out: &mut [F],
    shape: Fp8Shape,
    #[comptime] plan: Fp8LinearPlan,
    #[define(A)] _a_storage: ElemType,
    #[define(F)] _out_storage: ElemType,
) {
    let (n, words) = (shape.n as usize, (shape.k / 4u32) as usize);
    let mut item = ABSOLUTE_POS;
    while item < shape.m as usize * n {
        let line = item / n;
        let row = item - line * n;
        let mut sum = 0.0f32;
        for word in 0..words {
            let codes = b.codes[row * words + word];
            #[unroll]
            for i in 0..4usize {
                let code = codes >> comptime!(8 * i as u32);
                let element = load::<A>(a[(line * words + word) * 4usize + i], plan.a);
                sum += element * decode_e4m3_element(code & 0xFFu32);
            }
        }
        out[item] = store::<F>(sum * b.scales[row], plan.out);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
