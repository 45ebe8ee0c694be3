//! E2M1 codes of eight values at once, with the instructions of sm_80 and later (CUDA C++ only):
//! fewer operations than element by element, and on the pipes with the highest throughput. The
//! results are bit-identical to [`round_nearest()`](super::round_nearest()) and
//! [`round_stochastic()`](super::round_stochastic()).

use cubecl::prelude::*;

use crate::cube::ptx;

/// Returns a word whose lowest byte is the E2M1 code nearest to `value · multiplier`, without the
/// sign, ties to even.
///
/// Before rounding, the code of a magnitude `y` is a sum of three clamped lines, `4 sat(y/2) + 2
/// sat(y/2 - 1) + sat(y/2 - 2)`. Each is a saturating multiply-add, which is exact unless clamped
/// (`y/2` is within a factor of two of the subtrahend: Sterbenz). If one of them is not clamped,
/// those before it are whole, even numbers of codes. So rounding happens only once, in the addition
/// to 2²³, whose unit in the last place is one code, with ties to even codes. It uses no integer
/// operations, which run at half the rate of floating-point ones on the target GPUs. NaN saturates
/// to zero; the caller must replace it.
///
/// Instructions of PTX 2.0, all targets.
#[cube]
pub fn e2m1_rn(value: f32, multiplier: f32) -> u32 {
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

/// [`e2m1_rn()`] in fewer instructions, for products below 7.
///
/// Before rounding, the code of a magnitude `y` is the minimum of three lines, `2 y`, `y + 2` and
/// `y/2 + 4`. Each is rounded once, in the addition to 2²³, whose unit in the last place is one
/// code, with ties to even codes. Rounding is monotonic, so the minimum of the rounded lines is the
/// rounded code. The sums compare as integers like they do as numbers, and one instruction compares
/// three of them.
///
/// Instructions of PTX 2.0, all targets.
#[cube]
pub fn e2m1_rn_below_7(value: f32, multiplier: f32) -> u32 {
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

/// Returns the magnitudes `y` of `low · multiplier` and `high · multiplier` in units of 1/512 of a
/// code, truncated, one in each half of the word; at most 7 codes, also for NaN.
///
/// The bits of a magnitude divided by 2¹⁴, as an f16, are that number: below 1 it is an f16
/// subnormal, as it is in E2M1, and from 1 on, exponent and first mantissa bit are the code. Below
/// a magnitude of 0.5 the specification rounds `y + r/512` to an `f32` before truncation, so values
/// within 2⁻²⁶ below 0.5 count as 0.5. Adding 2⁻²⁶ toward zero has that effect. From 0.5 on, the
/// addition never reaches the next multiple of 1/512: if such a `y` has a bit of weight 2⁻²⁶ at
/// all, it is the last one. Both truncations are toward zero, so the first does not affect the
/// second.
///
/// Instructions of PTX 7.0 (`cvt.rz.f16x2.f32`, `min.f16x2`), sm_80 and later.
#[cube]
pub fn e2m1_sr_units(low: f32, high: f32, multiplier: f32) -> u32 {
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

/// Returns `units` plus twice the bytes of `random` that `mask` keeps, with one operation on each
/// of two pipes. From plain code, compilers generate three operations on one pipe.
#[cube]
fn add_twice(random: u32, #[comptime] mask: u32, units: u32) -> u32 {
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

/// Returns the codes of eight of `values · multiplier` from element `first` on, rounded to nearest,
/// the first in the lowest nibble. `signs` are those of [`sign_nibbles()`]; `below_7` asserts that
/// all products are below 7. Requires PTX; see [`e2m1_rn()`].
#[cube]
pub fn nearest_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    signs: u32,
    #[comptime] below_7: bool,
) -> u32 {
    let mut pairs = Array::<u32>::new(4usize);
    #[unroll]
    for pair in 0..4usize {
        let even = values[comptime!(first + 2 * pair)];
        let odd = values[comptime!(first + 2 * pair + 1)];
        pairs[pair] = if comptime!(below_7) {
            e2m1_rn_below_7(odd, multiplier) * 16u32 + e2m1_rn_below_7(even, multiplier)
        } else {
            e2m1_rn(odd, multiplier) * 16u32 + e2m1_rn(even, multiplier)
        };
    }
    let low = ptx::prmt(pairs[0], pairs[1], 0x40u32);
    let high = ptx::prmt(pairs[2], pairs[3], 0x40u32);
    let magnitudes = ptx::prmt(low, high, 0x5410u32);
    magnitudes | (signs & 0x8888_8888u32)
}

/// Returns the signs of eight values in four bf16 pairs from pair `first` on, each repeated over
/// its nibble. Requires PTX.
#[cube]
pub fn sign_nibbles_of_pairs(pairs: &Array<u32>, #[comptime] first: usize) -> u32 {
    // Elements 0, 2, 1, 3, one byte each.
    let low = ptx::prmt(pairs[first], pairs[comptime!(first + 1)], 0xFBD9u32);
    let high = ptx::prmt(
        pairs[comptime!(first + 2)],
        pairs[comptime!(first + 3)],
        0xFBD9u32,
    );
    let even = ptx::prmt(low, high, 0x5410u32);
    let odd = ptx::prmt(low, high, 0x7632u32);
    (even & 0x0F0F_0F0Fu32) | (odd & 0xF0F0_F0F0u32)
}

/// Returns the sign of each of eight values, repeated over its nibble. Requires PTX.
#[cube]
pub fn sign_nibbles(values: &Array<f32>, #[comptime] first: usize) -> u32 {
    let mut halves = Array::<u32>::new(2usize);
    #[unroll]
    for odd in 0..2usize {
        let mut pairs = Array::<u32>::new(2usize);
        #[unroll]
        for pair in 0..2usize {
            let low = values[comptime!(first + odd + 4 * pair)];
            let high = values[comptime!(first + odd + 4 * pair + 2)];
            pairs[pair] = ptx::prmt(u32::reinterpret(low), u32::reinterpret(high), 0x00FBu32);
        }
        halves[odd] = ptx::prmt(pairs[0], pairs[1], 0x5410u32);
    }
    (halves[0] & 0x0F0F_0F0Fu32) | (halves[1] & 0xF0F0_F0F0u32)
}

/// Returns the codes of eight of `values · multiplier` from element `first` on, rounded
/// stochastically by the bytes of `low` (the first four) and `high`; `signs` are those of
/// [`sign_nibbles()`]. Requires PTX; see [`e2m1_sr_units()`].
#[cube]
pub fn stochastic_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    signs: u32,
    low: u32,
    high: u32,
) -> u32 {
    // Even elements, then odd ones: bits 1 to 3 of each byte are the code.
    let mut halves = Array::<u32>::new(2usize);
    #[unroll]
    for odd in 0..2usize {
        let mut quads = Array::<u32>::new(2usize);
        #[unroll]
        for quad in 0..2usize {
            let element = comptime!(first + 4 * quad + odd);
            let units = e2m1_sr_units(values[element], values[comptime!(element + 2)], multiplier);
            let random = if comptime!(quad == 0) { low } else { high };
            // A random byte counts units of 1/256.
            quads[quad] = if comptime!(odd == 0) {
                add_twice(random, 0x00FF_00FFu32, units)
            } else {
                ptx::prmt(random, 0u32, 0x4341u32) * 2u32 + units
            };
        }
        halves[odd] = ptx::prmt(quads[0], quads[1], 0x7531u32);
    }
    let magnitudes =
        ((halves[0] >> 1u32) & 0x0707_0707u32) | ((halves[1] << 3u32) & 0x7070_7070u32);
    magnitudes | (signs & 0x8888_8888u32)
}
