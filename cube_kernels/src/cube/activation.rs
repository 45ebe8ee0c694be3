//! Activations; see [`reference::swiglu`](crate::reference::swiglu) and
//! [`reference::gelu`](crate::reference::gelu()).

use cubecl::prelude::*;

use super::{
    codec::Conversion,
    exact::{fma, reciprocal_of_1_to_2},
};
use crate::reference::{
    ERF_POLYNOMIAL, ERF_SPLIT, ERFC_POLYNOMIAL, EXP_CUTOFF, EXP_POLYNOMIAL, Gelu, INV_SQRT_2,
    INV_SQRT_2PI, LN_2_HIGH, LN_2_LOW, LN_POLYNOMIAL, LN2_HIGH, LN2_LOW, LOG2_E, SQRT_HALF,
    TANH_CUBE, TANH_SCALE, TANH_SLOPE, TO_INTEGER,
};

/// See [`reference::exp_of_negative`](crate::reference::exp_of_negative).
#[cube]
pub fn exp_of_negative(x: f32, #[comptime] conversion: Conversion) -> f32 {
    let shifted = fma(x, LOG2_E, TO_INTEGER, conversion);
    let k = shifted - TO_INTEGER;
    let high = fma(k, comptime!(-LN2_HIGH), x, conversion);
    let r = fma(k, comptime!(-LN2_LOW), high, conversion);
    let mut value = f32::new(comptime!(EXP_POLYNOMIAL[4]));
    #[unroll]
    for i in 0..4usize {
        value = fma(value, r, comptime!(EXP_POLYNOMIAL[3 - i]), conversion);
    }
    value = fma(value, r, 1.0f32, conversion);
    value = fma(value, r, 1.0f32, conversion);
    let bits = u32::reinterpret(value) + (u32::reinterpret(shifted) << 23u32);
    select(x < EXP_CUTOFF, 0.0f32, f32::reinterpret(bits))
}

/// See [`reference::ln`](crate::reference::ln).
#[allow(
    clippy::needless_range_loop,
    clippy::eq_op,
    reason = "cube code has no iterators and no is_nan that every runtime has"
)]
#[cube]
pub fn ln(x: f32, #[comptime] conversion: Conversion) -> f32 {
    let bits = u32::reinterpret(x);
    let mantissa = f32::reinterpret((bits & 0x007F_FFFFu32) | 0x3F00_0000u32);
    let small = mantissa < SQRT_HALF;
    let exponent = i32::cast_from(bits >> 23u32) - 126i32 - i32::cast_from(small);
    let exponent = f32::cast_from(exponent);
    let r = select(small, mantissa + mantissa, mantissa) - 1.0f32;
    let square = r * r;
    let mut y = f32::new(comptime!(LN_POLYNOMIAL[0]));
    #[unroll]
    for i in 1..9usize {
        y = fma(y, r, comptime!(LN_POLYNOMIAL[i]), conversion);
    }
    let low = fma(exponent, LN_2_LOW, (y * r) * square, conversion);
    let low = fma(square, comptime!(-0.5f32), low, conversion);
    let value = fma(exponent, LN_2_HIGH, r + low, conversion);
    select(x != x, x, value)
}

/// A sigmoid and its complement.
#[derive(CubeType, Clone, Copy)]
pub struct Sigmoid {
    /// `1 / (1 + e^-x)`.
    pub value: f32,
    /// `1 / (1 + e^x)`.
    pub rest: f32,
}

/// See [`reference::sigmoid`](crate::reference::sigmoid).
#[cube]
pub fn sigmoid(x: f32, #[comptime] conversion: Conversion) -> Sigmoid {
    let e = exp_of_negative(-x.abs(), conversion);
    // `e` is assembled by an integer addition, so this sum has no multiplication to contract with.
    let far = reciprocal_of_1_to_2(1.0f32 + e, conversion);
    let near = e * far;
    let negative = x < 0.0f32;
    Sigmoid {
        value: select(negative, near, far),
        rest: select(negative, far, near),
    }
}

/// Returns `silu(gate) · up`.
#[cube]
pub fn swiglu(gate: f32, up: f32, #[comptime] conversion: Conversion) -> f32 {
    gate * sigmoid(gate, conversion).value * up
}

/// Gradients of a gated activation.
#[derive(CubeType, Clone, Copy)]
pub struct Gradients {
    /// Gradient with respect to the gate.
    pub by_gate: f32,
    /// Gradient with respect to the factor of the activated gate (up).
    pub by_up: f32,
}

/// See [`reference::swiglu_backward`](crate::reference::swiglu_backward).
#[cube]
pub fn swiglu_backward(
    grad: f32,
    gate: f32,
    up: f32,
    #[comptime] conversion: Conversion,
) -> Gradients {
    let sigmoid = sigmoid(gate, conversion);
    let slope = sigmoid.value * fma(gate, sigmoid.rest, 1.0f32, conversion);
    Gradients {
        by_gate: grad * up * slope,
        by_up: grad * (gate * sigmoid.value),
    }
}

/// Returns the cumulative distribution function of the normal distribution, as in
/// [`reference::gelu`](crate::reference::gelu).
#[cube]
fn normal_distribution(x: f32, #[comptime] conversion: Conversion) -> f32 {
    let a = x * INV_SQRT_2;
    let t = a.abs();
    let s = a * a;
    let mut near = f32::new(comptime!(ERF_POLYNOMIAL[5]));
    #[unroll]
    for i in 0..5usize {
        near = fma(near, s, comptime!(ERF_POLYNOMIAL[4 - i]), conversion);
    }
    near = fma(near, a, a, conversion);
    near = fma(near, 0.5f32, 0.5f32, conversion);
    let mut tail = f32::new(comptime!(ERFC_POLYNOMIAL[6]));
    #[unroll]
    for i in 0..6usize {
        tail = fma(tail, t, comptime!(ERFC_POLYNOMIAL[5 - i]), conversion);
    }
    tail = fma(tail, t, -t, conversion);
    // Halving is exact: the difference is rounded once, contracted or not.
    let rest = 0.5f32 * exp_of_negative(tail, conversion);
    let far = select(x < 0.0f32, rest, 1.0f32 - rest);
    select(t > ERF_SPLIT, far, near)
}

/// Returns twice the argument of `tanh`.
#[cube]
fn tanh_argument(x: f32, square: f32, #[comptime] conversion: Conversion) -> f32 {
    x * (TANH_SCALE * fma(square, TANH_CUBE, 1.0f32, conversion))
}

/// See [`reference::gelu`](crate::reference::gelu).
#[cube]
pub fn gelu(x: f32, #[comptime] gelu: Gelu, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(gelu == Gelu::Erf) {
        x * normal_distribution(x, conversion)
    } else {
        x * sigmoid(tanh_argument(x, x * x, conversion), conversion).value
    }
}

/// Returns the slope of GELU; see [`reference::gelu_backward`](crate::reference::gelu_backward).
#[cube]
pub fn gelu_slope(x: f32, #[comptime] gelu: Gelu, #[comptime] conversion: Conversion) -> f32 {
    let square = x * x;
    if comptime!(gelu == Gelu::Erf) {
        let density = INV_SQRT_2PI * exp_of_negative(-0.5f32 * square, conversion);
        fma(x, density, normal_distribution(x, conversion), conversion)
    } else {
        let sigmoid = sigmoid(tanh_argument(x, square, conversion), conversion);
        let inner = TANH_SCALE * fma(square, TANH_SLOPE, 1.0f32, conversion);
        let bell = sigmoid.value * sigmoid.rest;
        let slope = fma(x * bell, inner, sigmoid.value, conversion);
        // For NaN the exponential may be a number, and the bell curve 0.
        let is_number = x <= 0.0f32 || x > 0.0f32;
        select(bell == 0.0f32 && is_number, sigmoid.value, slope)
    }
}
