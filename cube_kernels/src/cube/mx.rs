//! One block of MXFP8; see [`format::ue8m0`](crate::format::ue8m0) and
//! [`reference::mx_quantize`](crate::reference::mx_quantize).

use cubecl::prelude::*;

use super::{codec::encode_e4m3_element, ptx};

/// The UE8M0 byte of `value`, which is not negative, rounded up.
#[cube]
pub fn encode_ue8m0_up(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let exponent = bits >> 23u32;
    let mantissa = bits & 0x007F_FFFFu32;
    // Any mantissa bit of a normal value, more than 2^22 of a subnormal.
    let up = mantissa > select(exponent == 0u32, 0x0040_0000u32, 0u32);
    let byte = min(exponent + u32::cast_from(up), 254u32);
    select(bits > 0x7F80_0000u32, 255u32, byte)
}

/// `2^(byte - 127)`, or NaN.
#[cube]
pub fn decode_ue8m0(byte: u32) -> f32 {
    let bits = select(byte == 0u32, 0x0040_0000u32, byte << 23u32);
    f32::reinterpret(select(byte == 255u32, 0x7FC0_0000u32, bits))
}

/// `2^(127 - byte)`, or NaN.
#[cube]
pub fn decode_ue8m0_reciprocal(byte: u32) -> f32 {
    let bits = select(byte == 254u32, 0x0040_0000u32, (254u32 - byte) << 23u32);
    f32::reinterpret(select(byte == 255u32, 0x7FC0_0000u32, bits))
}

/// The scale byte of a block whose largest magnitude has the bits `amax`.
#[cube]
pub fn mx_scale(amax: u32) -> u32 {
    encode_ue8m0_up(f32::reinterpret(amax) * comptime!(1.0f32 / 448.0f32))
}

/// Four scaled elements from `first` on, element 0 in the lowest byte.
#[cube]
pub fn encode_e4m3x4(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    #[comptime] hardware: bool,
) -> u32 {
    let a0 = values[first] * multiplier;
    let a1 = values[comptime!(first + 1)] * multiplier;
    let a2 = values[comptime!(first + 2)] * multiplier;
    let a3 = values[comptime!(first + 3)] * multiplier;
    if comptime!(hardware) {
        ptx::cvt_rn_e4m3x4(a0, a1, a2, a3)
    } else {
        encode_e4m3_element(a0)
            | (encode_e4m3_element(a1) << 8u32)
            | (encode_e4m3_element(a2) << 16u32)
            | (encode_e4m3_element(a3) << 24u32)
    }
}
