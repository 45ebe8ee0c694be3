//! One block of a microscaling format; see [`format::ue8m0`](crate::format::ue8m0) and
//! [`reference::mx_quantize`](crate::reference::mx_quantize).

use cubecl::prelude::*;

use super::codec::{Conversion, decode_e2m1, decode_e4m3_element, encode_e4m3x4, round_nearest};
use crate::format::block::ElementFormat;

/// Returns the UE8M0 byte of `value`, which is not negative, rounded up.
#[cube]
pub fn encode_ue8m0_up(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let exponent = bits >> 23u32;
    let mantissa = bits & 0x007F_FFFFu32;
    // Any mantissa bit of a normal value, or more than 2^22 for a subnormal.
    let up = mantissa > select(exponent == 0u32, 0x0040_0000u32, 0u32);
    let byte = min(exponent + u32::cast_from(up), 254u32);
    select(bits > 0x7F80_0000u32, 255u32, byte)
}

/// Returns `2^(byte - 127)`, or NaN.
#[cube]
pub fn decode_ue8m0(byte: u32) -> f32 {
    let bits = select(byte == 0u32, 0x0040_0000u32, byte << 23u32);
    f32::reinterpret(select(byte == 255u32, 0x7FC0_0000u32, bits))
}

/// Returns `2^(127 - byte)`, or NaN.
#[cube]
pub fn decode_ue8m0_reciprocal(byte: u32) -> f32 {
    let bits = select(byte == 254u32, 0x0040_0000u32, (254u32 - byte) << 23u32);
    f32::reinterpret(select(byte == 255u32, 0x7FC0_0000u32, bits))
}

/// Returns the scale byte of a block whose largest magnitude has the bits `amax`.
#[cube]
pub fn mx_scale(amax: u32, #[comptime] element: ElementFormat) -> u32 {
    encode_ue8m0_up(f32::reinterpret(amax) * comptime!(1.0f32 / element.max()))
}

/// Encodes as many scaled elements from `first` on as fit into a word, the first in the lowest
/// bits.
#[cube]
pub fn encode_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    #[comptime] element: ElementFormat,
    #[comptime] hardware: bool,
) -> u32 {
    match comptime!(element) {
        ElementFormat::E4m3 => encode_e4m3x4(
            values[first] * multiplier,
            values[comptime!(first + 1)] * multiplier,
            values[comptime!(first + 2)] * multiplier,
            values[comptime!(first + 3)] * multiplier,
            hardware,
        ),
        ElementFormat::E2m1 => encode_e2m1x8(values, first, multiplier),
    }
}

/// Returns the value of the code in the lowest bits of `code`.
#[cube]
pub fn decode_element(code: u32, #[comptime] element: ElementFormat) -> f32 {
    match comptime!(element) {
        ElementFormat::E4m3 => decode_e4m3_element(code),
        ElementFormat::E2m1 => decode_e2m1(code),
    }
}

#[cube]
fn encode_e2m1x8(values: &Array<f32>, #[comptime] first: usize, multiplier: f32) -> u32 {
    let mut word = 0u32;
    #[unroll]
    for i in 0..8usize {
        let code = round_nearest(
            values[comptime!(first + i)] * multiplier,
            Conversion::Software,
        );
        word |= code << comptime!(4 * i as u32);
    }
    word
}
