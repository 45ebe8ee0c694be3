//! Functions of one number; see [`reference::attention`](crate::reference::attention).

use cubecl::prelude::*;

use crate::{
    cube::{
        activation::exp_of_negative,
        codec::{Conversion, INFINITY, MAGNITUDE, QUIET_NAN},
        exact::{fma, reciprocal},
    },
    reference::attention::{
        LN_2_LOWER, LN_2_UPPER, LN_POLYNOMIAL, SQRT_HALF, TANH_SERIES, TANH_SMALL,
    },
};

/// True if `x` is NaN, by its bits.
#[cube]
pub fn is_nan(x: f32) -> bool {
    (u32::reinterpret(x) & MAGNITUDE) > INFINITY
}

/// See [`reference::attention::exp_or_nan`](crate::reference::attention::exp_or_nan).
#[cube]
pub fn exp_or_nan(x: f32, #[comptime] conversion: Conversion) -> f32 {
    select(is_nan(x), x, exp_of_negative(x, conversion))
}

/// Returns `exp(s - s)`: 1, or NaN if `s` is infinite.
#[cube]
pub fn weight_of_highest(s: f32) -> f32 {
    let infinite = u32::reinterpret(s) == INFINITY;
    f32::reinterpret(select(infinite, QUIET_NAN, 0x3F80_0000u32))
}

/// Returns the product rounded on its own, so that it is not fused with a later addition.
#[cube]
pub fn product(a: f32, b: f32, #[comptime] conversion: Conversion) -> f32 {
    fma(a, b, 0.0f32, conversion)
}

/// See [`reference::attention::tanh`](crate::reference::attention::tanh).
#[cube]
pub fn tanh(x: f32, #[comptime] conversion: Conversion) -> f32 {
    let a = x.abs();
    let square = product(x, x, conversion);
    let mut series = f32::new(comptime!(TANH_SERIES[3]));
    #[unroll]
    for i in 0..3usize {
        series = fma(series, square, comptime!(TANH_SERIES[2 - i]), conversion);
    }
    let near = fma(series * square, x, x, conversion);
    let e = exp_or_nan(-2.0f32 * a, conversion);
    let far = (1.0f32 - e) * reciprocal(1.0f32 + e, conversion);
    let signed = select(x < 0.0f32, -far, far);
    select(a < TANH_SMALL, near, signed)
}

/// See [`reference::attention::ln`](crate::reference::attention::ln).
#[cube]
pub fn ln(x: f32, #[comptime] conversion: Conversion) -> f32 {
    let shifted = u32::reinterpret(x) + comptime!(0x3F80_0000u32 - SQRT_HALF);
    let exponent = i32::cast_from(shifted >> 23u32) - 127i32;
    let k = f32::cast_from(exponent);
    let f = f32::reinterpret((shifted & 0x007F_FFFFu32) + SQRT_HALF) - 1.0f32;
    let s = f * reciprocal(2.0f32 + f, conversion);
    let z = product(s, s, conversion);
    let w = product(z, z, conversion);
    let outer = fma(
        f32::new(comptime!(LN_POLYNOMIAL[3])),
        w,
        comptime!(LN_POLYNOMIAL[1]),
        conversion,
    );
    let inner = fma(
        f32::new(comptime!(LN_POLYNOMIAL[2])),
        w,
        comptime!(LN_POLYNOMIAL[0]),
        conversion,
    );
    let r = fma(w, outer, z * inner, conversion);
    let half = product(0.5f32 * f, f, conversion);
    let tail = fma(k, LN_2_LOWER, s * (half + r), conversion);
    let value = fma(k, LN_2_UPPER, f + (tail - half), conversion);
    let of_zero = select(x == 0.0f32, f32::NEG_INFINITY, value);
    select(is_nan(x), x, of_zero)
}
