//! UE8M0, the block scale of MXFP8: the byte `e` stands for `2^(e - 127)`, 255 for NaN. There is no
//! zero; the smallest value, 2⁻¹²⁷, is a subnormal `f32`.

/// Byte of NaN.
pub const NAN_BYTE: u8 = 255;

/// Returns the byte of the smallest power of two that is not below `value`: rounded up, like
/// `cvt.rp.satfinite.ue8m0x2.f32`. Zero and everything up to 2⁻¹²⁷ give 0, infinity saturates to
/// 254, NaN gives [`NAN_BYTE`]. The sign is ignored.
#[inline(always)]
pub fn encode_up(value: f32) -> u8 {
    let bits = value.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 {
        return NAN_BYTE;
    }
    // Any mantissa bit rounds up. A subnormal is m · 2⁻¹⁴⁹: at most 2⁻¹²⁷ up to m = 2²², at most
    // 2⁻¹²⁶ above.
    let (exponent, mantissa) = (bits >> 23, bits & 0x007F_FFFF);
    let up = if exponent == 0 {
        mantissa > 0x0040_0000
    } else {
        mantissa != 0
    };
    (exponent + up as u32).min(254) as u8
}

/// Returns `2^(e - 127)`, or NaN.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    match byte {
        NAN_BYTE => f32::NAN,
        0 => f32::from_bits(0x0040_0000),
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Returns `2^(127 - e)`, the factor that scales elements into range, or NaN: exact for every byte.
#[inline(always)]
pub fn decode_reciprocal(byte: u8) -> f32 {
    match byte {
        NAN_BYTE => f32::NAN,
        _ => decode(254 - byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_to_the_next_power_of_two() {
        for byte in 0..=254u8 {
            let value = decode(byte);
            assert_eq!(encode_up(value), byte);
            assert_eq!(encode_up(-value), byte);
            let above = f32::from_bits(value.to_bits() + 1);
            assert_eq!(encode_up(above), (byte + 1).min(254), "{above:e}");
            let below = f32::from_bits(value.to_bits() - 1);
            assert_eq!(encode_up(below), byte, "{below:e}");
        }
    }

    #[test]
    fn reciprocals_are_exact() {
        for byte in 0..=254u8 {
            assert_eq!(decode(byte) as f64 * decode_reciprocal(byte) as f64, 1.0);
        }
        assert!(decode_reciprocal(NAN_BYTE).is_nan() && decode(NAN_BYTE).is_nan());
    }

    #[test]
    fn special_values() {
        assert_eq!(encode_up(0.0), 0);
        assert_eq!(encode_up(f32::from_bits(1)), 0);
        assert_eq!(encode_up(f32::MAX), 254);
        assert_eq!(encode_up(f32::INFINITY), 254);
        assert_eq!(encode_up(f32::NAN), NAN_BYTE);
    }
}
