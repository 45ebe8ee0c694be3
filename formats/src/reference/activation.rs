//! Inputs of a quantized GEMM: SwiGLU and GELU, with their gradients.
//!
//! Kernels compute these while they read the inputs, and find amax values in the same pass. Every
//! operation here is therefore one with identical bits on every device: IEEE additions,
//! multiplications, divisions and square roots, fused multiply-adds where `mul_add` is written, and
//! an exponential made of those. Each result is rounded once more, to the element type of the
//! inputs, before it is quantized.

use rayon::prelude::*;

use super::exponential::sigmoid;
use super::{
    Element, Gelu, gelu, gelu_backward,
    simd::{rows_per_task, with_fma},
};

/// An activation between two linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `silu(gate) · up` of rows that contain `gate` and `up`, concatenated: half as long as the
    /// input.
    SwiGlu,
    /// GELU of each element.
    Gelu(Gelu),
}

impl Activation {
    /// Returns the number of input columns per output column.
    pub const fn inputs(self) -> usize {
        match self {
            Self::SwiGlu => 2,
            Self::Gelu(_) => 1,
        }
    }
}

/// Applies `activation` to the rows of `x`, `rows` x `cols`.
///
/// # Panics
/// Panics if `x` does not have `rows * cols` elements, or `cols` is odd for SwiGLU.
pub fn activation<T: Element>(activation: Activation, x: &[T], rows: usize, cols: usize) -> Vec<T> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    match activation {
        Activation::SwiGlu => swiglu(x, rows, cols / 2),
        Activation::Gelu(form) => gelu(form, x),
    }
}

/// Computes the gradient of [`activation`] with respect to `x`, `rows` x `cols`, from `grad`, the
/// gradient of its output.
///
/// # Panics
/// Panics if a matrix does not have the required number of elements.
pub fn activation_backward<T: Element>(
    activation: Activation,
    grad: &[T],
    x: &[T],
    rows: usize,
    cols: usize,
) -> Vec<T> {
    match activation {
        Activation::SwiGlu => swiglu_backward(grad, x, rows, cols / 2),
        Activation::Gelu(form) => gelu_backward(form, grad, x),
    }
}

/// Returns `silu(gate) · up`, `rows` x `width`, rounded to the type of `gate_up`, a matrix of
/// `rows` x `2 width` with the gate in the first half of each row. `silu(x) = x · sigmoid(x)`,
/// which is NaN at -∞.
///
/// # Panics
/// Panics if `gate_up` does not have `rows * 2 * width` elements.
pub fn swiglu<T: Element>(gate_up: &[T], rows: usize, width: usize) -> Vec<T> {
    check_halves(gate_up, rows, width);
    let mut out = vec![T::from_f32(0.0); rows * width];
    let (run, width) = (rows_per_task(width), width.max(1));
    out.par_chunks_mut(run * width)
        .zip(gate_up.par_chunks(run * 2 * width))
        .for_each(|(out, gate_up)| swiglu_rows(gate_up, width, out));
    out
}

with_fma!(fn swiglu_rows[T: Element](gate_up: &[T], width: usize, out: &mut [T]) = swiglu_rows_body);

#[inline(always)]
fn swiglu_rows_body<T: Element>(gate_up: &[T], width: usize, out: &mut [T]) {
    let rows = out.chunks_exact_mut(width);
    for (out, gate_up) in rows.zip(gate_up.chunks_exact(2 * width)) {
        let (gate, up) = gate_up.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = gate.to_f32();
            *out = T::from_f32(gate * sigmoid(gate).0 * up.to_f32());
        }
    }
}

/// Computes the gradients of [`swiglu`] with respect to gate and up, concatenated: `rows` x
/// `2 width`. `grad` is the gradient of its output, and `σ` the sigmoid of the gate. The gradient
/// of the gate is `(grad · up) · σ (1 + gate (1 - σ))`, with the sum by a multiply-add, and that of
/// up is `grad · (gate σ)`.
///
/// # Panics
/// Panics if a matrix does not have the required number of elements.
pub fn swiglu_backward<T: Element>(grad: &[T], gate_up: &[T], rows: usize, width: usize) -> Vec<T> {
    assert_eq!(
        grad.len(),
        rows * width,
        "`grad` must hold rows * width elements"
    );
    check_halves(gate_up, rows, width);
    let mut both = vec![T::from_f32(0.0); gate_up.len()];
    let (run, width) = (rows_per_task(width), width.max(1));
    both.par_chunks_mut(run * 2 * width)
        .zip(gate_up.par_chunks(run * 2 * width))
        .zip(grad.par_chunks(run * width))
        .for_each(|((both, gate_up), grad)| swiglu_backward_rows(grad, gate_up, width, both));
    both
}

with_fma!(
    fn swiglu_backward_rows[T: Element](grad: &[T], gate_up: &[T], width: usize, both: &mut [T])
        = swiglu_backward_rows_body
);

/// Writes the gradients of the rows of gate and up.
#[inline(always)]
fn swiglu_backward_rows_body<T: Element>(grad: &[T], gate_up: &[T], width: usize, both: &mut [T]) {
    let rows = both.chunks_exact_mut(2 * width);
    let rows = rows.zip(gate_up.chunks_exact(2 * width));
    for ((both, gate_up), grad) in rows.zip(grad.chunks_exact(width)) {
        let (by_gate, by_up) = both.split_at_mut(width);
        let (gate, up) = gate_up.split_at(width);
        let inputs = gate.iter().zip(up).zip(grad);
        for ((by_gate, by_up), ((gate, up), grad)) in by_gate.iter_mut().zip(by_up).zip(inputs) {
            let (gate, grad) = (gate.to_f32(), grad.to_f32());
            let (value, rest) = sigmoid(gate);
            let slope = value * gate.mul_add(rest, 1.0);
            *by_gate = T::from_f32(grad * up.to_f32() * slope);
            *by_up = T::from_f32(grad * (gate * value));
        }
    }
}

fn check_halves<T>(gate_up: &[T], rows: usize, width: usize) {
    assert_eq!(
        gate_up.len(),
        rows * 2 * width,
        "`gate_up` must hold rows * 2 * width elements"
    );
}
