//! GELU and its gradient, made of operations with identical bits on every device.

use rayon::prelude::*;

use super::{Element, exp_of_negative, sigmoid, simd::with_fma};

/// Form of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x · Φ(x)`, where `Φ` is the cumulative distribution function of the normal distribution.
    Erf,
    /// `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    Tanh,
}

/// Elements per task, enough to be worth starting one.
const CHUNK: usize = 8192;

/// `erf` is a polynomial below this value, and uses the exponential of a polynomial above it.
pub const ERF_SPLIT: f32 = 0.927_734_4;
/// `erf(a) / a - 1` for `|a|` up to [`ERF_SPLIT`], a polynomial in `a²`, constant term first.
pub const ERF_POLYNOMIAL: [f32; 6] = [
    1.283_791_7e-1,
    -3.761_253_4e-1,
    1.128_199_25e-1,
    -2.676_813_5e-2,
    4.991_194_2e-3,
    -5.967_617e-4,
];
/// `ln(1 - erf(t)) / t + 1` for `t` from [`ERF_SPLIT`] on, a polynomial in `t`, constant term
/// first.
pub const ERFC_POLYNOMIAL: [f32; 7] = [
    -1.287_175_1e-1,
    -6.348_467e-1,
    -1.067_778_8e-1,
    2.425_462_2e-2,
    -3.883_964_4e-3,
    3.831_971_3e-4,
    -1.728_534_7e-5,
];
/// `1/√2`, rounded.
pub const INV_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// `1/√(2π)`, rounded.
pub const INV_SQRT_2PI: f32 = 0.398_942_3;
/// `2 √(2/π)`, rounded.
pub const TANH_SCALE: f32 = 1.595_769;
/// Factor of `x³` in the `tanh` form.
pub const TANH_CUBE: f32 = 0.044_715;
/// `3 · TANH_CUBE`, rounded.
pub const TANH_SLOPE: f32 = 0.134_145;

/// Returns `Φ(x)`, with an absolute error of about one ulp of 1, and in the lower tail a relative
/// error of 1e-5.
///
/// `erf` is a polynomial near 0; elsewhere `1 - erf` is the exponential of one (after N. Juffa).
#[inline(always)]
fn normal_distribution(x: f32) -> f32 {
    let a = x * INV_SQRT_2;
    let t = a.abs();
    let s = a * a;
    let [c0, c1, c2, c3, c4, c5] = ERF_POLYNOMIAL;
    let near = c5
        .mul_add(s, c4)
        .mul_add(s, c3)
        .mul_add(s, c2)
        .mul_add(s, c1)
        .mul_add(s, c0);
    let near = near.mul_add(a, a).mul_add(0.5, 0.5);
    let mut tail = ERFC_POLYNOMIAL[6];
    for i in 0..6 {
        tail = tail.mul_add(t, ERFC_POLYNOMIAL[5 - i]);
    }
    let rest = 0.5 * exp_of_negative(tail.mul_add(t, -t));
    if t > ERF_SPLIT {
        if x < 0.0 { rest } else { 1.0 - rest }
    } else {
        near
    }
}

/// Computes GELU of one number.
#[inline(always)]
fn value(gelu: Gelu, x: f32) -> f32 {
    match gelu {
        Gelu::Erf => x * normal_distribution(x),
        Gelu::Tanh => x * sigmoid(tanh_argument(x)).0,
    }
}

/// Returns twice the argument `u` of `tanh`: `(1 + tanh(u)) / 2` is the sigmoid of `2 u`.
#[inline(always)]
fn tanh_argument(x: f32) -> f32 {
    let square = x * x;
    x * (TANH_SCALE * square.mul_add(TANH_CUBE, 1.0))
}

/// Returns the derivative of GELU.
#[inline(always)]
fn slope(gelu: Gelu, x: f32) -> f32 {
    let square = x * x;
    match gelu {
        Gelu::Erf => {
            let density = INV_SQRT_2PI * exp_of_negative(-0.5 * square);
            x.mul_add(density, normal_distribution(x))
        }
        Gelu::Tanh => {
            let (value, rest) = sigmoid(tanh_argument(x));
            let inner = TANH_SCALE * square.mul_add(TANH_SLOPE, 1.0);
            let bell = value * rest;
            // If the square overflows, zero would be multiplied by infinity.
            if bell == 0.0 {
                value
            } else {
                (x * bell).mul_add(inner, value)
            }
        }
    }
}

/// Computes GELU of each element, rounded to the type of `x`.
pub fn gelu<T: Element>(gelu: Gelu, x: &[T]) -> Vec<T> {
    let mut out = x.to_vec();
    out.par_chunks_mut(CHUNK)
        .for_each(|out| apply_values(gelu, out));
    out
}

with_fma!(fn apply_values[T: Element](gelu: Gelu, x: &mut [T]) = apply_values_body);

#[inline(always)]
fn apply_values_body<T: Element>(gelu: Gelu, x: &mut [T]) {
    for x in x {
        *x = T::from_f32(value(gelu, x.to_f32()));
    }
}

/// Computes the gradient of [`gelu`] with respect to `x` from `grad`, the gradient of its output.
///
/// # Panics
/// Panics if `grad` and `x` differ in length.
pub fn gelu_backward<T: Element>(gelu: Gelu, grad: &[T], x: &[T]) -> Vec<T> {
    assert_eq!(grad.len(), x.len(), "`grad` must have the size of `x`");
    let mut out = grad.to_vec();
    let pairs = out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    pairs.for_each(|(out, x)| apply_slopes(gelu, out, x));
    out
}

with_fma!(fn apply_slopes[T: Element](gelu: Gelu, grad: &mut [T], x: &[T]) = apply_slopes_body);

#[inline(always)]
fn apply_slopes_body<T: Element>(gelu: Gelu, grad: &mut [T], x: &[T]) {
    for (grad, x) in grad.iter_mut().zip(x) {
        *grad = T::from_f32(grad.to_f32() * slope(gelu, x.to_f32()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Integrates the density by Simpson's rule.
    fn exact_distribution(x: f64) -> f64 {
        let steps = 4000;
        let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
        let width = x.abs() / steps as f64;
        let sum: f64 = (0..=steps)
            .map(|i| {
                let weight = match i {
                    0 => 1.0,
                    i if i == steps => 1.0,
                    i if i % 2 == 1 => 4.0,
                    _ => 2.0,
                };
                weight * density(i as f64 * width)
            })
            .sum();
        0.5 + x.signum() * sum * width / 3.0
    }

    fn exact(gelu: Gelu, x: f64) -> [f64; 2] {
        match gelu {
            Gelu::Erf => {
                let distribution = exact_distribution(x);
                let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
                [x * distribution, distribution + x * density]
            }
            Gelu::Tanh => {
                let scale = (2.0 / std::f64::consts::PI).sqrt();
                let tanh = (scale * (x + 0.044715 * x * x * x)).tanh();
                let inner = scale * (1.0 + 3.0 * 0.044715 * x * x);
                let slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner;
                [0.5 * x * (1.0 + tanh), slope]
            }
        }
    }

    #[test]
    fn values_and_slopes_are_near_the_real_ones() {
        for gelu in [Gelu::Erf, Gelu::Tanh] {
            for i in -1200..=1200 {
                let x = i as f32 * 0.01 + 0.001;
                let [expected, expected_slope] = exact(gelu, f64::from(x));
                let unit = 1.2e-7 * f64::from(x.abs()).max(1.0);
                let found = f64::from(value(gelu, x));
                assert!(
                    (found - expected).abs() < 2.0 * unit,
                    "{gelu:?} {x}: {found}, {expected}"
                );
                let found = f64::from(slope(gelu, x));
                let near = (found - expected_slope).abs() < 6.0 * unit;
                assert!(near, "slope of {gelu:?} {x}: {found}, not {expected_slope}");
            }
        }
    }

    #[test]
    fn ends_and_nan() {
        for kind in [Gelu::Erf, Gelu::Tanh] {
            assert_eq!(gelu(kind, &[0.0f32, -0.0]), [0.0, 0.0]);
            assert_eq!(gelu(kind, &[f32::INFINITY]), [f32::INFINITY]);
            assert!(gelu(kind, &[f32::NAN])[0].is_nan());
            assert_eq!(
                gelu_backward(kind, &[1.0f32, 1.0], &[40.0, -40.0]),
                [1.0, 0.0]
            );
            assert!(gelu_backward(kind, &[1.0f32], &[f32::NAN])[0].is_nan());
        }
    }
}
