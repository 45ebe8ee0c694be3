//! Kernels of GELU on vectors, and of SwiGLU on single elements for rows that are not whole
//! vectors.

use cubecl::prelude::*;

use crate::{
    cube::{
        activation::{gelu, gelu_slope, swiglu, swiglu_backward},
        codec::{Conversion, load, store},
        words::{pack, unpack},
    },
    reference::Gelu,
    tensor::FloatKind,
};

/// Comptime choices of [`gelu_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GeluPlan {
    /// Form of GELU.
    pub gelu: Gelu,
    /// True for the gradient.
    pub backward: bool,
    /// True if vectors are four words; otherwise they are one element.
    pub whole: bool,
    /// Element type.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Returns GELU of one number, or `grad` times its derivative.
#[cube]
fn value(x: f32, grad: f32, #[comptime] plan: GeluPlan) -> f32 {
    if comptime!(plan.backward) {
        grad * gelu_slope(x, plan.gelu, plan.conversion)
    } else {
        gelu(x, plan.gelu, plan.conversion)
    }
}

/// Each unit computes every `units`-th of `len` vectors. The forward does not read `grad`, which
/// may be any memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn gelu_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    grad: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    len: usize,
    #[comptime] plan: GeluPlan,
    #[define(F)] _scalar: ElemType,
) {
    let (kind, conversion) = comptime!((plan.kind, plan.conversion));
    let mut item = ABSOLUTE_POS;
    while item < len {
        let mut vector = Vector::<F, N>::empty();
        let from = x[item];
        let mut by = from;
        if comptime!(plan.backward) {
            by = grad[item];
        }
        if comptime!(plan.whole) {
            let unrolled = comptime!(conversion.has_ptx());
            let per_word = comptime!(4 / kind.size());
            let mut words = Array::<u32>::new(4usize);
            let mut grads = Array::<u32>::new(4usize);
            #[unroll]
            for w in 0..4usize {
                words[w] = u32::cast_from(from.extract(w));
                grads[w] = u32::cast_from(by.extract(w));
            }
            #[unroll(unrolled)]
            for w in 0..4usize {
                let mut pair = Array::<f32>::new(2usize);
                #[unroll]
                for half in 0..comptime!(per_word as u32) {
                    let x = unpack(words[w], half, kind);
                    pair[half as usize] = value(x, unpack(grads[w], half, kind), plan);
                }
                words[w] = pack(pair[0], pair[1], kind, conversion);
            }
            #[unroll]
            for w in 0..4usize {
                vector.insert(w, F::cast_from(words[w]));
            }
        } else {
            let x = load::<F>(from.extract(0usize), kind);
            let grad = load::<F>(by.extract(0usize), kind);
            vector.insert(0usize, store::<F>(value(x, grad, plan), kind));
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Comptime choices of [`swiglu_elements_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SwiGluPlan {
    /// True for the gradients.
    pub backward: bool,
    /// Element type.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Each unit computes every `units`-th element of `rows` x `width`, or the gradients of both of its
/// inputs. The forward does not read `grad`, which may be any memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn swiglu_elements_kernel<F: Numeric>(
    gate_up: &[F],
    grad: &[F],
    out: &mut [F],
    rows: usize,
    width: usize,
    #[comptime] plan: SwiGluPlan,
    #[define(F)] _scalar: ElemType,
) {
    let (kind, conversion) = comptime!((plan.kind, plan.conversion));
    let mut item = ABSOLUTE_POS;
    while item < rows * width {
        let row = item / width;
        let index = item + row * width;
        let gate = load::<F>(gate_up[index], kind);
        let up = load::<F>(gate_up[index + width], kind);
        if comptime!(plan.backward) {
            let both = swiglu_backward(load::<F>(grad[item], kind), gate, up, conversion);
            out[index] = store::<F>(both.by_gate, kind);
            out[index + width] = store::<F>(both.by_up, kind);
        } else {
            out[item] = store::<F>(swiglu(gate, up, conversion), kind);
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
