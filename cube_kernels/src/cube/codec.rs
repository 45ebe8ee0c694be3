//! The two codecs in software: E2M1 elements and E4M3 scales.

use cubecl::prelude::*;

use crate::device::FloatKind;

/// All bits of an `f32` but the sign.
const MAGNITUDE: u32 = 0x7FFF_FFFF;
/// Bits of +infinity; magnitudes above are NaN.
const INFINITY: u32 = 0x7F80_0000;
/// Bits of the canonical quiet NaN.
const QUIET_NAN: u32 = 0x7FC0_0000;
/// Bits of 448.
const E4M3_MAX: u32 = 0x43E0_0000;
/// Bits of 2⁻⁶, the smallest normal E4M3 value.
const E4M3_MIN_NORMAL: u32 = 121 << 23;

/// The code nearest to `value`; see [`reference::round_nearest`](crate::reference::round_nearest).
#[cube]
pub fn round_nearest(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    // Magnitudes compare as integers, so NaN clears every midpoint and becomes 6.
    let magnitude = bits & MAGNITUDE;
    let mut code = u32::cast_from(magnitude > 0x3E80_0000u32); // 0.25
    code += u32::cast_from(magnitude >= 0x3F40_0000u32); // 0.75
    code += u32::cast_from(magnitude > 0x3FA0_0000u32); // 1.25
    code += u32::cast_from(magnitude >= 0x3FE0_0000u32); // 1.75
    code += u32::cast_from(magnitude > 0x4020_0000u32); // 2.5
    code += u32::cast_from(magnitude >= 0x4060_0000u32); // 3.5
    code += u32::cast_from(magnitude > 0x40A0_0000u32); // 5
    code | sign_unless_nan(bits)
}

/// `value` rounded by eight random bits; see
/// [`reference::round_stochastic`](crate::reference::round_stochastic).
#[cube]
pub fn round_stochastic(value: f32, random: u32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = f32::reinterpret(bits & MAGNITUDE);
    let step = select(
        magnitude >= 4.0f32,
        2.0f32,
        select(magnitude >= 2.0f32, 1.0f32, 0.5f32),
    );
    // The product is exact, so whether the compiler contracts this sum does not matter.
    let dithered = f32::cast_from(random) * 0.00390625f32 * step + magnitude;
    // Down to the grid of the range that `dithered` lies in. Both factors are powers of two.
    let low = dithered < 2.0f32;
    let high = dithered >= 4.0f32;
    let per_step = select(high, 0.5f32, select(low, 2.0f32, 1.0f32));
    let width = select(high, 2.0f32, select(low, 0.5f32, 1.0f32));
    let rounded = u32::reinterpret(f32::floor(dithered * per_step) * width);
    // Counting the grid values reached is exact; NaN, above everything as an integer, becomes 6.
    let mut code = u32::cast_from(rounded >= 0x3F00_0000u32); // 0.5
    code += u32::cast_from(rounded >= 0x3F80_0000u32); // 1
    code += u32::cast_from(rounded >= 0x3FC0_0000u32); // 1.5
    code += u32::cast_from(rounded >= 0x4000_0000u32); // 2
    code += u32::cast_from(rounded >= 0x4040_0000u32); // 3
    code += u32::cast_from(rounded >= 0x4080_0000u32); // 4
    code += u32::cast_from(rounded >= 0x40C0_0000u32); // 6
    code | sign_unless_nan(bits)
}

#[cube]
fn sign_unless_nan(bits: u32) -> u32 {
    select((bits & MAGNITUDE) > INFINITY, 0u32, (bits >> 28u32) & 8u32)
}

/// The value of the code in the low nibble of `code`.
#[cube]
pub fn decode_e2m1(code: u32) -> f32 {
    let magnitude = code & 7u32;
    // Exponent and mantissa are the upper bits of an f32 already, up to the bias of 126; the two
    // codes without an exponent are 0 and 0.5, the bias itself.
    let normal = (magnitude << 22u32) + (126u32 << 23u32);
    let bits = select(magnitude > 1u32, normal, magnitude * (126u32 << 23u32));
    f32::reinterpret(bits | ((code & 8u32) << 28u32))
}

/// [`decode_e2m1()`] by a multiplication instead of a choice, for kernels that are bound by
/// instructions: exponent and mantissa of the code, moved to the lowest bits of those of an `f32`, are
/// the value divided by 2^126, the subnormal 0.5 included. Exact; subnormals must not be flushed.
#[cube]
pub fn decode_e2m1_product(code: u32) -> f32 {
    let bits = ((code & 7u32) << 22u32) | ((code & 8u32) << 28u32);
    f32::reinterpret(bits) * comptime!(f32::from_bits(0x7E80_0000))
}

/// The E4M3 byte nearest to the non-negative `value`; see
/// [`format::e4m3::encode`](crate::format::e4m3::encode). Integers only, so that no contraction can
/// touch the product that `value` comes from.
#[cube]
pub fn encode_e4m3(value: f32) -> u32 {
    let bits = u32::reinterpret(value) & MAGNITUDE;
    // Normal: keep three mantissa bits, half to even.
    let rounded = (bits + 0x0007_FFFFu32 + ((bits >> 20u32) & 1u32)) >> 20u32;
    let normal = min(rounded - select(rounded > 960u32, 960u32, 0u32), 0x7Eu32);
    // Subnormal: units of 2⁻⁹ from the significand, half to even. Beyond 25 places nothing is left.
    let exponent = bits >> 23u32;
    let significand = (bits & 0x007F_FFFFu32) | 0x0080_0000u32;
    let shift = min(141u32 - min(exponent, 120u32), 25u32);
    let units = significand >> shift;
    let rest = significand & ((1u32 << shift) - 1u32);
    let half = 1u32 << (shift - 1u32);
    let up = (rest > half) || (rest == half && (units & 1u32) == 1u32);
    let subnormal = units + u32::cast_from(up);
    let finite = select(bits < E4M3_MIN_NORMAL, subnormal, normal);
    let saturated = select(bits >= E4M3_MAX, 0x7Eu32, finite);
    select(bits > INFINITY, 0x7Fu32, saturated)
}

/// The value of an E4M3 byte.
#[cube]
pub fn decode_e4m3(byte: u32) -> f32 {
    let byte = byte & 0x7Fu32;
    let subnormal = f32::cast_from(byte) * 0.001953125f32;
    let normal = f32::reinterpret((byte << 20u32) + (120u32 << 23u32));
    let value = select(byte < 8u32, subnormal, normal);
    select(byte == 0x7Fu32, f32::reinterpret(QUIET_NAN), value)
}

/// The E4M3 element nearest to `value`, with its sign; see
/// [`format::e4m3::encode_element`](crate::format::e4m3::encode_element).
#[cube]
pub fn encode_e4m3_element(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = (bits >> 24u32) & 0x80u32;
    encode_e4m3(value) | select((bits & MAGNITUDE) > INFINITY, 0u32, sign)
}

/// The value of an E4M3 element in the low byte of `byte`, with its sign.
#[cube]
pub fn decode_e4m3_element(byte: u32) -> f32 {
    let magnitude = u32::reinterpret(decode_e4m3(byte));
    f32::reinterpret(magnitude | ((byte & 0x80u32) << 24u32))
}

/// The magnitude of a value as integer bits, in which NaN compares above infinity.
#[cube]
pub fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & MAGNITUDE
}

/// Magnitude bits with every NaN replaced by the canonical one.
#[cube]
pub fn canonical(bits: u32) -> u32 {
    select(bits > INFINITY, QUIET_NAN, bits)
}

/// A stored element as `f32`, exactly. `F` is the storage type of `kind`.
#[cube]
pub fn load<F: Numeric>(stored: F, #[comptime] kind: FloatKind) -> f32 {
    if comptime!(kind == FloatKind::Bf16) {
        f32::reinterpret(u32::cast_from(stored) << 16u32)
    } else {
        f32::cast_from(stored)
    }
}

/// `value` rounded to nearest even, as a stored element.
#[cube]
pub fn store<F: Numeric>(value: f32, #[comptime] kind: FloatKind) -> F {
    if comptime!(kind == FloatKind::Bf16) {
        F::cast_from(bf16_bits(value))
    } else {
        F::cast_from(value)
    }
}

/// `value` rounded to bf16, ties to even.
#[cube]
pub fn round_to_bf16(value: f32) -> f32 {
    f32::reinterpret(bf16_bits(value) << 16u32)
}

#[cube]
fn bf16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    // A NaN must not round to infinity: keep its upper half and make it quiet.
    let nan = (bits >> 16u32) | 0x40u32;
    select((bits & MAGNITUDE) > INFINITY, nan, rounded)
}
