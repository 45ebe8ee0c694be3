//! Every PTX string of the crate. `gpu_asm!` exists on the CUDA C++ path only, so each function here
//! may be reached only behind a comptime choice made from the device.
//!
//! A mutable variable reaches a block as a pointer, and so does the result of another block:
//! operands and results go through `reinterpret`, which makes fresh values of them.

use cubecl::prelude::*;

/// Eight values to eight E2M1 codes, element 0 in the lowest nibble: `cvt.rn.satfinite.e2m1x2.f32`.
///
/// PTX ISA 8.6 and later, section "Data Movement and Conversion Instructions: cvt". Targets:
/// sm_100a, sm_101a, sm_103a, sm_120a, sm_121a and their families. The first operand lands in the
/// upper nibble. Compiled and inspected in SASS; never run on hardware by this project.
#[cube]
pub fn cvt_rn_e2m1x8(v: &Array<f32>, #[comptime] first: usize) -> u32 {
    let a0 = v[first];
    let a1 = v[comptime!(first + 1)];
    let a2 = v[comptime!(first + 2)];
    let a3 = v[comptime!(first + 3)];
    let a4 = v[comptime!(first + 4)];
    let a5 = v[comptime!(first + 5)];
    let a6 = v[comptime!(first + 6)];
    let a7 = v[comptime!(first + 7)];
    let word: u32;
    gpu_asm!(
        "{{ .reg .b8 b0, b1, b2, b3; cvt.rn.satfinite.e2m1x2.f32 b0, {}, {}; cvt.rn.satfinite.e2m1x2.f32 b1, {}, {}; cvt.rn.satfinite.e2m1x2.f32 b2, {}, {}; cvt.rn.satfinite.e2m1x2.f32 b3, {}, {}; mov.b32 {}, {{b0, b1, b2, b3}}; }}",
        in(_) a1, in(_) a0, in(_) a3, in(_) a2, in(_) a5, in(_) a4, in(_) a7, in(_) a6,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Eight values to eight E2M1 codes, rounded stochastically by `low` (elements 0 to 3) and `high`
/// (4 to 7): `cvt.rs.satfinite.e2m1x4.f32`.
///
/// PTX ISA 8.7 and later, section "Data Movement and Conversion Instructions: cvt". Targets: sm_100a
/// and sm_103a only (ptxas refuses `.rs` for sm_120a). Operands go from the upper nibble down. Each
/// element gets eight of the 32 random bits, but which eight is not documented for e2m1x4, so the
/// result has the distribution of the software form and not its bits. Compiled and inspected in
/// SASS; never run on hardware by this project.
#[cube]
pub fn cvt_rs_e2m1x8(v: &Array<f32>, #[comptime] first: usize, low: u32, high: u32) -> u32 {
    let a0 = v[first];
    let a1 = v[comptime!(first + 1)];
    let a2 = v[comptime!(first + 2)];
    let a3 = v[comptime!(first + 3)];
    let a4 = v[comptime!(first + 4)];
    let a5 = v[comptime!(first + 5)];
    let a6 = v[comptime!(first + 6)];
    let a7 = v[comptime!(first + 7)];
    let word: u32;
    gpu_asm!(
        "{{ .reg .b16 h0, h1; cvt.rs.satfinite.e2m1x4.f32 h0, {{{}, {}, {}, {}}}, {}; cvt.rs.satfinite.e2m1x4.f32 h1, {{{}, {}, {}, {}}}, {}; mov.b32 {}, {{h0, h1}}; }}",
        in(_) a3, in(_) a2, in(_) a1, in(_) a0, in(_) low,
        in(_) a7, in(_) a6, in(_) a5, in(_) a4, in(_) high,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Four values to four E4M3 elements, element 0 in the lowest byte: `cvt.rn.satfinite.e4m3x2.f32`.
///
/// PTX ISA 7.8 and later (8.1 for sm_89), section "Data Movement and Conversion Instructions: cvt".
/// Targets: sm_89 and later. The first operand lands in the upper byte; NaN becomes 0x7F.
#[cube]
pub fn cvt_rn_e4m3x4(a0: f32, a1: f32, a2: f32, a3: f32) -> u32 {
    let word: u32;
    gpu_asm!(
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {}, {}; cvt.rn.satfinite.e4m3x2.f32 h, {}, {}; mov.b32 {}, {{l, h}}; }}",
        in(_) a1, in(_) a0, in(_) a3, in(_) a2,
        out(_) word,
        options(pure, nomem)
    );
    word
}

/// Two values rounded to bf16, ties to even, `low` in the lower half of the word:
/// `cvt.rn.bf16x2.f32`. NaN becomes 0x7FFF.
///
/// PTX ISA 7.0 and later, section "Data Movement and Conversion Instructions: cvt". Targets: sm_80 and
/// later. The first operand lands in the upper half.
#[cube]
pub fn cvt_rn_bf16x2(low: f32, high: f32) -> u32 {
    let word: u32;
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {}, {}, {};",
        out(_) word,
        in(_) high, in(_) low,
        options(pure, nomem)
    );
    word
}

/// `a + b` that the compiler may not contract with a multiplication before it: `add.rn.f32`.
///
/// PTX ISA 1.0 and later, section "Floating Point Instructions: add": an explicit rounding modifier
/// keeps the instruction out of contraction. All targets.
#[cube]
pub fn add_rn(a: f32, b: f32) -> f32 {
    let a = f32::reinterpret(a);
    let b = f32::reinterpret(b);
    let sum: f32;
    gpu_asm!("add.rn.f32 {}, {}, {};", out(_) sum, in(_) a, in(_) b, options(pure, nomem));
    f32::reinterpret(sum)
}

/// `min(|a|, b)`, `b` where `a` is NaN: `min.f32` of `abs.f32`, one instruction.
///
/// PTX ISA 1.0 and later, section "Floating Point Instructions: min". All targets.
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

/// `max(a, |b|)`, NaN where one of them is: `max.NaN.f32`.
///
/// PTX ISA 7.0 and later, section "Floating Point Instructions: max". Targets: sm_80 and later.
#[cube]
pub fn max_abs_nan(a: f32, b: f32) -> f32 {
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

/// `a · b + c`, rounded once, toward zero: `fma.rz.f32`.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: fma". All targets.
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

/// `a · b + c`, rounded once, to nearest even: `fma.rn.f32`.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: fma". All targets.
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

/// `1 / a`, correctly rounded: `rcp.rn.f32`, the IEEE quotient in fewer instructions than a
/// division.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: rcp". All targets.
#[cube]
pub fn rcp_rn(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("rcp.rn.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}

/// `1 / a` for `a` from 1 to 2, correctly rounded: `rcp.approx.f32` and one step of Newton's. These are the
/// instructions that `rcp.rn.f32` becomes on the devices this is for, but for the branch that looks after
/// exponents at either end; every `a` is tested.
///
/// PTX ISA 1.4 and later, section "Floating Point Instructions: rcp". All targets.
#[cube]
pub fn rcp_of_1_to_2(a: f32) -> f32 {
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

/// The square root of `a`, correctly rounded: `sqrt.rn.f32`.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: sqrt". All targets.
#[cube]
pub fn sqrt_rn(a: f32) -> f32 {
    let a = f32::reinterpret(a);
    let result: f32;
    gpu_asm!("sqrt.rn.f32 {}, {};", out(_) result, in(_) a, options(pure, nomem));
    f32::reinterpret(result)
}

/// The E4M3 byte nearest to `value`, 448 at most, 0x7F for NaN: `cvt.rn.satfinite.e4m3x2.f32`.
///
/// PTX ISA 8.1 and later, section "Data Movement and Conversion Instructions: cvt". Targets: sm_89
/// and later. The second operand lands in the lower byte.
#[cube]
pub fn cvt_e4m3(value: f32) -> u32 {
    let value = f32::reinterpret(value);
    let byte: u32;
    gpu_asm!(
        "{{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, {}; cvt.u32.u16 {}, h; }}",
        in(_) value, out(_) byte,
        options(pure, nomem)
    );
    u32::reinterpret(byte)
}

/// Two values rounded to bf16, `low` in the lower half: `cvt.rn.bf16x2.f32`.
///
/// PTX ISA 7.0 and later, section "Data Movement and Conversion Instructions: cvt". Targets: sm_80
/// and later. NaN becomes 0x7FFF.
#[cube]
pub fn cvt_bf16x2(low: f32, high: f32) -> u32 {
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let word: u32;
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {}, {}, {};",
        out(_) word, in(_) high, in(_) low,
        options(pure, nomem)
    );
    u32::reinterpret(word)
}

/// A word whose lowest byte is the E2M1 code nearest to `value · multiplier`, sign apart, ties to even.
///
/// The code of a magnitude `y` is, before rounding, a sum of three clamped lines,
/// `4 sat(y/2) + 2 sat(y/2 - 1) + sat(y/2 - 2)`: each is a saturating multiply-add, exact where it is
/// not clamped (`y/2` within a factor of two of what is subtracted: Sterbenz), and where one is not
/// clamped those before it are whole, even numbers of codes. So one rounding happens, by the addition
/// to 2²³, whose unit in the last place is one code, ties to even codes. No integer operation: these
/// run at half the rate of floating-point ones on the GPUs this is for. NaN saturates to zero: the
/// caller replaces it.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: fma". All targets.
#[cube]
pub fn code_nearest(value: f32, multiplier: f32) -> u32 {
    let value = f32::reinterpret(value);
    let multiplier = f32::reinterpret(multiplier);
    let bits: u32;
    gpu_asm!(
        "{{ .reg .f32 y, s, t; abs.f32 y, {v}; mul.rn.f32 y, y, {m};",
        "mul.rn.sat.f32 s, y, 0f3F000000; fma.rn.f32 t, s, 0f40800000, 0f4B000000;",
        "fma.rn.sat.f32 s, y, 0f3F000000, 0fBF800000; fma.rn.f32 t, s, 0f40000000, t;",
        "fma.rn.sat.f32 s, y, 0f3F000000, 0fC0000000; add.rn.f32 t, t, s;",
        "mov.b32 {o}, t; }}",
        o = out(_) bits, v = in(_) value, m = in(_) multiplier,
        options(pure, nomem)
    );
    u32::reinterpret(bits)
}

/// [`code_nearest()`] in fewer instructions for products below 7.
///
/// The code of a magnitude `y` is, before rounding, the least of three lines, `2 y`, `y + 2` and
/// `y/2 + 4`. Each is rounded once, by the addition to 2²³, whose unit in the last place is one code,
/// ties to even codes; rounding keeps the order, so the least of the rounded lines is the rounded
/// code. As integers the sums compare as they do as numbers, and three are compared by one instruction.
///
/// PTX ISA 2.0 and later, section "Floating Point Instructions: fma". All targets.
#[cube]
pub fn code_nearest_below_7(value: f32, multiplier: f32) -> u32 {
    let value = f32::reinterpret(value);
    let multiplier = f32::reinterpret(multiplier);
    let bits: u32;
    gpu_asm!(
        "{{ .reg .f32 y, s, t; .reg .b32 a, b; abs.f32 y, {v}; mul.rn.f32 y, y, {m};",
        "fma.rn.f32 s, y, 0f40000000, 0f4B000000; add.rn.f32 t, y, 0f4B000002;",
        "mov.b32 a, s; mov.b32 b, t; min.s32 a, a, b;",
        "fma.rn.f32 s, y, 0f3F000000, 0f4B000004; mov.b32 b, s; min.s32 {o}, a, b; }}",
        o = out(_) bits, v = in(_) value, m = in(_) multiplier,
        options(pure, nomem)
    );
    u32::reinterpret(bits)
}

/// The magnitudes `y` of `low · multiplier` and `high · multiplier` in units of 1/512 of a code, cut
/// off, one in each half of the word; 7 codes at most, NaN too.
///
/// The bits of a magnitude divided by 2¹⁴, as an f16, are that number: below 1 it is an f16 subnormal,
/// as it is one in E2M1, and from 1 on exponent and first mantissa bit are the code. Below a magnitude
/// of 0.5 the specification rounds `y + r/512` to an `f32` before it cuts off: what comes within
/// 2⁻²⁶ of 0.5 from below counts as 0.5. Adding 2⁻²⁶ toward zero does that, and from 0.5 on never
/// reaches the next multiple of 1/512: where such a `y` has a place for 2⁻²⁶ at all, that is its last
/// one. Both cuts go toward zero, so that the first does not disturb the second.
///
/// PTX ISA 7.0 and later, sections "Floating Point Instructions: fma", "Data Movement and Conversion
/// Instructions: cvt" and "Half Precision Floating Point Instructions: min". Targets: sm_80 and later.
#[cube]
pub fn code_units_x2(low: f32, high: f32, multiplier: f32) -> u32 {
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let multiplier = f32::reinterpret(multiplier);
    let units: u32;
    gpu_asm!(
        "{{ .reg .f32 a, b; .reg .b32 h, m; abs.f32 a, {l}; mul.rn.f32 a, a, {m};",
        "abs.f32 b, {h}; mul.rn.f32 b, b, {m};",
        "fma.rz.f32 a, a, 0f38800000, 0f2B800000; fma.rz.f32 b, b, 0f38800000, 0f2B800000;",
        "cvt.rz.f16x2.f32 h, b, a; mov.b32 m, 0x0E000E00; min.f16x2 {o}, h, m; }}",
        o = out(_) units, l = in(_) low, h = in(_) high, m = in(_) multiplier,
        options(pure, nomem)
    );
    u32::reinterpret(units)
}

/// `units` plus twice the bytes of `random` that `mask` keeps: one operation of each of two pipes, where
/// a compiler that sees them makes three of one.
///
/// PTX ISA 1.0 and later, section "Integer Arithmetic Instructions: mad". All targets.
#[cube]
pub fn add_twice(random: u32, #[comptime] mask: u32, units: u32) -> u32 {
    let random = u32::reinterpret(random);
    let units = u32::reinterpret(units);
    let sum: u32;
    gpu_asm!(
        "{{ .reg .b32 t; and.b32 t, {r}, {k}; mad.lo.u32 {o}, t, 2, {u}; }}",
        o = out(_) sum, r = in(_) random, k = in(_) mask, u = in(_) units,
        options(pure, nomem)
    );
    u32::reinterpret(sum)
}

/// Four bytes of `a` (numbers 0 to 3) and `b` (4 to 7), chosen by the nibbles of `selector`, lowest
/// first; bit 3 of a nibble fills the byte with its top bit: `prmt.b32`.
///
/// PTX ISA 2.0 and later, section "Data Movement and Conversion Instructions: prmt". All targets.
#[cube]
pub fn permute(a: u32, b: u32, #[comptime] selector: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let bytes: u32;
    gpu_asm!(
        "prmt.b32 {o}, {a}, {b}, {s};",
        o = out(_) bytes, a = in(_) a, b = in(_) b, s = in(_) selector,
        options(pure, nomem)
    );
    u32::reinterpret(bytes)
}

/// The larger in each half, both bf16; NaN where one of them is: `max.NaN.bf16x2`, two of which make one
/// instruction.
///
/// PTX ISA 7.0 and later, section "Half Precision Floating Point Instructions: max". Targets: sm_80 and
/// later.
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

/// The smaller in each half, both bf16; NaN where one of them is: `min.NaN.bf16x2`.
///
/// PTX ISA 7.0 and later, section "Half Precision Floating Point Instructions: min". Targets: sm_80 and
/// later.
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

/// The larger magnitude in each half, both bf16; NaN where one of them is: `max.NaN.bf16x2`.
///
/// PTX ISA 7.0 and later, section "Half Precision Floating Point Instructions: max". Targets: sm_80 and
/// later.
#[cube]
pub fn max_abs_nan_bf16x2(a: u32, b: u32) -> u32 {
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

/// `value` of the unit of this plane whose number differs by the bits of `mask`: `shfl.sync.bfly.b32` of
/// all 32 units, which must all be here. CubeCL's own shuffle asks which units are active, which costs
/// four times as much.
///
/// PTX ISA 6.0 and later, section "Data Movement and Conversion Instructions: shfl.sync". All targets.
#[cube]
pub fn shuffle_xor(value: f32, #[comptime] mask: u32) -> f32 {
    let value = f32::reinterpret(value);
    let other: f32;
    gpu_asm!(
        "shfl.sync.bfly.b32 {o}, {v}, {m}, 0x1f, 0xffffffff;",
        o = out(_) other, v = in(_) value, m = in(_) mask
    );
    f32::reinterpret(other)
}

/// Starts a copy of 16 bytes, `offset` bytes behind `from`, to address `to` in shared memory (see
/// `ptx_sm90::shared_address`), or writes zeros there: `cp.async.cg`.
///
/// PTX ISA 7.0 and later, section "Data Movement and Conversion Instructions: cp.async". Targets: sm_80
/// and later. Without `valid` nothing is read.
#[cube]
pub fn copy_async_16<T: CubePrimitive>(to: u32, from: *const T, offset: u64, valid: bool) {
    let bytes = select(valid, 16u32, 0u32);
    gpu_asm!(
        "{{ .reg .u64 p; add.u64 p, {f}, {i};",
        "cp.async.cg.shared.global [{t}], [p], 16, {n}; }}",
        t = in(_) to, f = in(_) from, i = in(_) offset, n = in(_) bytes
    );
}

/// Waits for all copies that this unit has started: `cp.async.wait_all`.
///
/// PTX ISA 7.0 and later, section "Data Movement and Conversion Instructions: cp.async.wait_all".
/// Targets: sm_80 and later.
#[cube]
pub fn copy_async_wait() {
    gpu_asm!("cp.async.wait_all;");
}
