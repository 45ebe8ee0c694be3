//! E4M3 bytes: block scales, and elements of MXFP8.

use cubecl::prelude::*;

use super::{INFINITY, MAGNITUDE, QUIET_NAN};
use crate::cube::ptx;

/// Bits of 448.
const E4M3_MAX: u32 = 0x43E0_0000;
/// Bits of 2⁻⁶, the smallest normal E4M3 value.
const E4M3_MIN_NORMAL: u32 = 121 << 23;

/// Returns the E4M3 byte nearest to the non-negative `value`; see
/// [`format::e4m3::encode`](crate::format::e4m3::encode). Uses only integer operations, so that no
/// contraction can affect the product from which `value` comes.
#[cube]
pub fn encode_e4m3(value: f32) -> u32 {
    let bits = u32::reinterpret(value) & MAGNITUDE;
    // Normal: keep three mantissa bits, half to even.
    let rounded = (bits + 0x0007_FFFFu32 + ((bits >> 20u32) & 1u32)) >> 20u32;
    let normal = min(rounded - select(rounded > 960u32, 960u32, 0u32), 0x7Eu32);
    // Subnormal: units of 2⁻⁹ from the significand, half to even. With shifts of more than 25 bits
    // nothing is left.
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

/// Returns the value of an E4M3 byte.
#[cube]
pub fn decode_e4m3(byte: u32) -> f32 {
    let byte = byte & 0x7Fu32;
    // As in `decode_e2m1`; the biases differ by 120.
    let value = f32::reinterpret(byte << 20u32) * f32::reinterpret(247u32 << 23u32);
    select(byte == 0x7Fu32, f32::reinterpret(QUIET_NAN), value)
}

/// Returns the E4M3 element nearest to `value`, with its sign; see
/// [`format::e4m3::encode_element`](crate::format::e4m3::encode_element).
#[cube]
pub fn encode_e4m3_element(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = (bits >> 24u32) & 0x80u32;
    encode_e4m3(value) | select((bits & MAGNITUDE) > INFINITY, 0u32, sign)
}

/// Returns four E4M3 elements in a word, the first in its lowest byte; `hardware` means that the
/// device has a conversion instruction.
#[cube]
pub fn encode_e4m3x4(a0: f32, a1: f32, a2: f32, a3: f32, #[comptime] hardware: bool) -> u32 {
    if comptime!(hardware) {
        ptx::cvt_rn_e4m3x4(a0, a1, a2, a3)
    } else {
        encode_e4m3_element(a0)
            | (encode_e4m3_element(a1) << 8u32)
            | (encode_e4m3_element(a2) << 16u32)
            | (encode_e4m3_element(a3) << 24u32)
    }
}

/// Returns the value of an E4M3 element in the low byte of `byte`, with its sign.
#[cube]
pub fn decode_e4m3_element(byte: u32) -> f32 {
    let magnitude = u32::reinterpret(decode_e4m3(byte));
    f32::reinterpret(magnitude | ((byte & 0x80u32) << 24u32))
}
