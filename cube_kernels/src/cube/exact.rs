//! Operations that are rounded once on every device, independent of how its compiler treats plain
//! ones.

use cubecl::prelude::*;

use super::{codec::Conversion, ptx};

/// Returns `a · b + c`, rounded once, to nearest even.
///
/// Without PTX it uses `f64`, which the device must support: CubeCL's own `fma` may be two
/// operations on its CPU runtime.
#[cube]
pub fn fma(a: f32, b: f32, c: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::fma_rn(a, b, c)
    } else {
        fma_by_f64(a, b, c)
    }
}

/// Returns `a · b`, rounded to nearest even, independent of later additions: compilers contract a
/// plain product and a sum to one operation.
#[cube]
pub fn product(a: f32, b: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::mul_rn(a, b)
    } else {
        // Exact in `f64`.
        f32::cast_from(f64::cast_from(a) * f64::cast_from(b))
    }
}

/// Returns `a · b` in `f64`, rounded to nearest even, independent of later additions; see
/// [`product`](fn@product).
///
/// Without PTX, the bits of the product go through an integer minimum, which changes no number and
/// which the compiler cannot contract.
#[cube]
pub fn product_f64(a: f64, b: f64, #[comptime] conversion: Conversion) -> f64 {
    if comptime!(conversion.has_ptx()) {
        ptx::mul_rn_f64(a, b)
    } else {
        f64::reinterpret(min(u64::reinterpret(a * b), 0xFFFF_FFFF_FFFF_FFFEu64))
    }
}

/// Returns `a · b + c` for factors whose product is exact in `f64`, such as those of two `f32`.
#[cube]
pub fn add_exact_product(a: f64, b: f64, c: f64, #[comptime] conversion: Conversion) -> f64 {
    if comptime!(conversion.has_ptx()) {
        ptx::fma_rn_f64(a, b, c)
    } else {
        a * b + c
    }
}

/// Returns `a / b`, correctly rounded.
#[cube]
pub fn quotient(a: f32, b: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::div_rn(a, b)
    } else {
        a / b
    }
}

/// The product of two `f32` is exact in `f64`. The sum is rounded to odd: if it is inexact and its
/// last bit even, it moves to the neighbour in the direction of the rounding error (Knuth's
/// two-sum). Rounding that to `f32`, with more than two bits less, gives the nearest `f32` of the
/// exact sum (Boldo and Melquiond, 2008).
#[cube]
fn fma_by_f64(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::cast_from(a) * f64::cast_from(b);
    let addend = f64::cast_from(c);
    let sum = product + addend;
    let back = sum - product;
    let lost = (product - (sum - back)) + (addend - back);
    let bits = u64::reinterpret(sum);
    let zero = f64::cast_from(0.0f32);
    let away = (lost > zero && sum > zero) || (lost < zero && sum < zero);
    let toward = (lost > zero && sum < zero) || (lost < zero && sum > zero);
    let even = bits & 1u64 == 0u64;
    let odd = bits + u64::cast_from(away && even) - u64::cast_from(toward && even);
    f32::cast_from(f64::reinterpret(odd))
}

/// Returns the square root, correctly rounded.
#[cube]
pub fn sqrt(value: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::sqrt_rn(value)
    } else {
        value.sqrt()
    }
}

/// Returns `1 / value`, correctly rounded.
#[cube]
pub fn reciprocal(value: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::rcp_rn(value)
    } else {
        1.0f32 / value
    }
}

/// Returns `1 / value` for a value from 1 to 2, correctly rounded, without the branch of a general
/// reciprocal.
#[cube]
pub fn reciprocal_of_1_to_2(value: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        rcp_of_ordinary(value)
    } else {
        1.0f32 / value
    }
}

/// Returns `1 / a` for `a` from 2⁻¹²⁶ to below 2¹²⁶, correctly rounded: `rcp.approx.f32` and one
/// Newton step. `rcp.rn.f32` compiles to these instructions on the target devices, plus a branch
/// for exponents at either end. Every `a` from 1 to 2 is tested, which covers the others: nothing
/// here over- or underflows, so exponents do not affect the digits.
///
/// NaN for zero, for subnormals, which count as zero, and for infinity. Requires PTX.
#[cube]
pub fn rcp_of_ordinary(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!(
        "{{ .reg .f32 y, n, e; rcp.approx.ftz.f32 y, {a}; neg.f32 n, {a};",
        "fma.rn.f32 e, n, y, 0f3F800000; fma.rn.f32 {o}, y, e, y; }}",
        o = out(_) result, a = in(_) a,
        options(pure, nomem)
    );
    f32::reinterpret(result)
}
