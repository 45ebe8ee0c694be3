//! Arithmetic with explicit rounding, contraction and NaN handling, independent of the compiler.

use cubecl::prelude::*;

/// Returns `a + b`, which the compiler may not contract with a preceding multiplication:
/// `add.rn.f32`.
///
/// PTX ISA "Floating Point Instructions: add" (an explicit rounding modifier keeps the instruction
/// out of contraction); PTX 1.0, all targets.
#[cube]
pub fn add_rn(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let sum: f32;
    gpu_asm!("add.rn.f32 {}, {}, {};", out(_) sum, in(_) a, in(_) b, options(pure, nomem));
    f32::reinterpret(sum)
}

/// Returns `a · b`, which the compiler may not contract with a following addition: `mul.rn.f32`.
///
/// PTX ISA "Floating Point Instructions: mul"; PTX 1.0, all targets.
#[cube]
pub fn mul_rn(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let product: f32;
    gpu_asm!("mul.rn.f32 {}, {}, {};", out(_) product, in(_) a, in(_) b, options(pure, nomem));
    f32::reinterpret(product)
}

/// Returns `a · b`, which the compiler may not contract with a following addition: `mul.rn.f64`.
///
/// PTX ISA "Floating Point Instructions: mul"; PTX 1.0, all targets.
#[cube]
pub fn mul_rn_f64(a: f64, b: f64) -> f64 {
    let a = f64::reinterpret(a);
    let b = f64::reinterpret(b);
    let product: f64;
    gpu_asm!("mul.rn.f64 {}, {}, {};", out(_) product, in(_) a, in(_) b, options(pure, nomem));
    f64::reinterpret(product)
}

/// Returns `a · b + c`, rounded once, to nearest even: `fma.rn.f64`.
///
/// PTX ISA "Floating Point Instructions: fma"; PTX 1.4, all targets.
#[cube]
pub fn fma_rn_f64(a: f64, b: f64, c: f64) -> f64 {
    let a = f64::reinterpret(a);
    let b = f64::reinterpret(b);
    let c = f64::reinterpret(c);
    let result: f64;
    gpu_asm!(
        "fma.rn.f64 {}, {}, {}, {};",
        out(_) result, in(_) a, in(_) b, in(_) c,
        options(pure, nomem)
    );
    f64::reinterpret(result)
}

/// Returns `a / b`, correctly rounded: `div.rn.f32`.
///
/// PTX ISA "Floating Point Instructions: div"; PTX 1.4, all targets from sm_20 on.
#[cube]
pub fn div_rn(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let quotient: f32;
    gpu_asm!("div.rn.f32 {}, {}, {};", out(_) quotient, in(_) a, in(_) b, options(pure, nomem));
    f32::reinterpret(quotient)
}

/// Returns `a · b + c`, rounded once, to nearest even: `fma.rn.f32`.
///
/// PTX ISA "Floating Point Instructions: fma"; PTX 2.0, all targets.
#[cube]
pub fn fma_rn(a: f32, b: f32, c: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let c = f32::reinterpret(c);
    let result: f32;
    gpu_asm!(
        "fma.rn.f32 {}, {}, {}, {};",
        out(_) result, in(_) a, in(_) b, in(_) c,
        options(pure, nomem)
    );
    f32::reinterpret(result)
}

/// Returns `a · b + c`, rounded once, toward zero: `fma.rz.f32`.
///
/// PTX ISA "Floating Point Instructions: fma"; PTX 2.0, all targets.
#[cube]
pub fn fma_rz(a: f32, b: f32, c: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let c = f32::reinterpret(c);
    let result: f32;
    gpu_asm!(
        "fma.rz.f32 {}, {}, {}, {};",
        out(_) result, in(_) a, in(_) b, in(_) c,
        options(pure, nomem)
    );
    f32::reinterpret(result)
}

/// Returns `1 / a`, correctly rounded: `rcp.rn.f32`, the IEEE quotient in fewer instructions than a
/// division.
///
/// PTX ISA "Floating Point Instructions: rcp"; PTX 2.0, all targets.
#[cube]
pub fn rcp_rn(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("rcp.rn.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}

/// Returns the square root of `a`, correctly rounded: `sqrt.rn.f32`.
///
/// PTX ISA "Floating Point Instructions: sqrt"; PTX 2.0, all targets.
#[cube]
pub fn sqrt_rn(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("sqrt.rn.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}

/// Returns `min(|a|, b)`, or `b` if `a` is NaN: `min.f32` of `abs.f32`, which compile to one
/// machine instruction.
///
/// PTX ISA "Floating Point Instructions: min, abs"; PTX 1.0, all targets.
#[cube]
pub fn min_abs(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let result: f32;
    gpu_asm!(
        "{{ .reg .f32 t; abs.f32 t, {}; min.f32 {}, t, {}; }}",
        in(_) a, out(_) result, in(_) b,
        options(pure, nomem)
    );
    f32::reinterpret(result)
}

/// Returns `max(a, |b|)`, or NaN if either is NaN: `max.NaN.f32` of `abs.f32`, which compile to one
/// machine instruction.
///
/// PTX ISA "Floating Point Instructions: max, abs"; PTX 7.0, sm_80 and later.
#[cube]
pub fn max_nan_abs(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let result: f32;
    gpu_asm!(
        "{{ .reg .f32 t; abs.f32 t, {}; max.NaN.f32 {}, {}, t; }}",
        in(_) b, out(_) result, in(_) a,
        options(pure, nomem)
    );
    f32::reinterpret(result)
}

/// Returns the maximum in each bf16 half, NaN if either is NaN: `max.NaN.bf16x2`. ptxas merges two
/// of these into one machine instruction.
///
/// PTX ISA "Half Precision Floating Point Instructions: max"; PTX 7.0, sm_80 and later.
#[cube]
pub fn max_nan_bf16x2(a: u32, b: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let result: u32;
    gpu_asm!(
        "max.NaN.bf16x2 {o}, {a}, {b};",
        o = out(_) result, a = in(_) a, b = in(_) b,
        options(pure, nomem)
    );
    u32::reinterpret(result)
}

/// Returns the minimum in each bf16 half, NaN if either is NaN: `min.NaN.bf16x2`.
///
/// PTX ISA "Half Precision Floating Point Instructions: min"; PTX 7.0, sm_80 and later.
#[cube]
pub fn min_nan_bf16x2(a: u32, b: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let result: u32;
    gpu_asm!(
        "min.NaN.bf16x2 {o}, {a}, {b};",
        o = out(_) result, a = in(_) a, b = in(_) b,
        options(pure, nomem)
    );
    u32::reinterpret(result)
}

/// Returns the larger magnitude in each bf16 half, NaN if either is NaN: `max.NaN.bf16x2` of
/// `abs.bf16x2`.
///
/// PTX ISA "Half Precision Floating Point Instructions: max, abs"; PTX 7.0, sm_80 and later.
#[cube]
pub fn max_nan_abs_bf16x2(a: u32, b: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let result: u32;
    gpu_asm!(
        "{{ .reg .b32 s, t; abs.bf16x2 s, {a}; abs.bf16x2 t, {b}; max.NaN.bf16x2 {o}, s, t; }}",
        o = out(_) result, a = in(_) a, b = in(_) b,
        options(pure, nomem)
    );
    u32::reinterpret(result)
}

/// Returns the products of the bf16 halves, each rounded once: `fma.rn.bf16x2` with -0, which
/// preserves the sign of a zero product.
///
/// PTX ISA "Half Precision Floating Point Instructions: fma"; PTX 7.0, sm_80 and later, whereas
/// `mul.bf16x2` requires sm_90.
#[cube]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let result: u32;
    gpu_asm!(
        "{{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 {o}, {a}, {b}, z; }}",
        o = out(_) result, a = in(_) a, b = in(_) b,
        options(pure, nomem)
    );
    u32::reinterpret(result)
}

/// Returns `2^a` with an error of two units in the last place, or 0 if the result is subnormal:
/// `ex2.approx.ftz.f32`. `2^(-inf)` is 0, and NaN stays NaN.
///
/// PTX ISA "Floating Point Instructions: ex2"; PTX 1.4, all targets.
#[cube]
pub fn ex2_approx_ftz(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}

/// Returns `1 / a` with an error of one unit in the last place: `rcp.approx.ftz.f32`.
///
/// PTX ISA "Floating Point Instructions: rcp"; PTX 1.4, all targets.
#[cube]
pub fn rcp_approx_ftz(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("rcp.approx.ftz.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}
