//! E4M3 (the "fn" variant), the block scale: bias 7, largest value 448, smallest subnormal 2⁻⁹, NaN
//! `0x7F`, no infinity. Scales are never negative, so only the seven low bits are used.

/// Largest finite value.
pub const MAX: f32 = 448.0;

/// Byte of [`MAX`].
pub const MAX_BYTE: u8 = 0x7E;

/// Byte of NaN.
pub const NAN_BYTE: u8 = 0x7F;

/// Bits of 2⁻⁶, the smallest normal value.
const MIN_NORMAL_BITS: u32 = (127 - 6) << 23;

/// Returns the byte nearest to `value`, ties to even, saturating at 448. NaN gives [`NAN_BYTE`].
///
/// `value` is a scale: non-negative (zero included) or NaN. The sign bit is ignored.
#[inline(always)]
pub fn encode(value: f32) -> u8 {
    encode_wide(value) as u8
}

/// Computes [`encode`] in the width of its argument, without a branch.
#[inline(always)]
pub(crate) fn encode_wide(value: f32) -> u32 {
    let bits = (value.to_bits() & 0x7FFF_FFFF) as i32;
    // Normal numbers: keep three mantissa bits and round half to even; a carry propagates into the
    // exponent. Results beyond 448 (inputs of 464 and more, infinity) saturate.
    let rounded = bits.wrapping_add(0x0007_FFFF + (bits >> 20 & 1));
    let normal = (rounded >> 20).wrapping_sub(120 << 3).min(MAX_BYTE as i32);
    // Subnormals are multiples of 2⁻⁹. Adding 2¹⁴, whose ulp is 2⁻⁹, rounds to such a multiple,
    // ties to even. Eight units give the byte of the first normal value, as required.
    let sum = f32::from_bits(bits as u32) + 16384.0;
    let subnormal = (sum.to_bits() as i32).wrapping_sub(16384f32.to_bits() as i32);
    let byte = if bits < MIN_NORMAL_BITS as i32 {
        subnormal
    } else {
        normal
    };
    let nan = bits > f32::INFINITY.to_bits() as i32;
    (if nan { NAN_BYTE as i32 } else { byte }) as u32
}

/// Returns the value of `byte`; the sign bit is ignored.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    decode_wide(byte as u32)
}

/// Computes [`decode`] in the width of its result, without a branch or a table.
#[inline(always)]
pub(crate) fn decode_wide(byte: u32) -> f32 {
    let byte = (byte & 0x7F) as i32;
    // Exponent and mantissa are those of an `f32`, except that the bias is 7, not 127.
    let normal = f32::from_bits((byte << 20).wrapping_add(120 << 23) as u32);
    let subnormal = byte as f32 * (1.0 / 512.0);
    let value = if byte < 8 { subnormal } else { normal };
    if byte == NAN_BYTE as i32 {
        f32::NAN
    } else {
        value
    }
}

/// Returns the byte nearest to `value` for E4M3 as an element, which has a sign (MXFP8): ties to
/// even, saturating at 448, with the sign of a zero kept. NaN gives [`NAN_BYTE`] without its sign,
/// as `cvt.rn.satfinite.e4m3x2.f32` computes it.
#[inline(always)]
pub fn encode_element(value: f32) -> u8 {
    let sign = if value.is_nan() {
        0
    } else {
        (value.to_bits() >> 24) as u8 & 0x80
    };
    encode(value) | sign
}

/// Returns the value of an element with its sign.
#[inline(always)]
pub fn decode_element(byte: u8) -> f32 {
    let magnitude = decode(byte);
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the value by the definition of the format.
    fn value(byte: u8) -> f32 {
        let (exponent, mantissa) = ((byte >> 3) as i32, (byte & 7) as f32);
        match exponent {
            0 => mantissa / 512.0,
            _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
        }
    }

    #[test]
    fn bytes_decode_by_definition() {
        for byte in 0..=MAX_BYTE {
            assert_eq!(decode(byte), value(byte), "byte {byte:#x}");
            assert_eq!(
                decode(byte | 0x80),
                value(byte),
                "byte {byte:#x} with a sign"
            );
        }
        assert!(decode(NAN_BYTE).is_nan() && decode(0xFF).is_nan());
    }

    #[test]
    fn every_pattern_encodes_to_the_nearest_byte() {
        let mut bits = 1u32;
        for i in 0..2_000_000u32 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Every second value is near the range of the format.
            let exponent = if i % 2 == 0 {
                112 + (bits >> 27)
            } else {
                bits >> 23 & 0xFF
            };
            let found = f32::from_bits(bits & 0x007F_FFFF | exponent << 23);
            let byte = encode(found);
            if found.is_nan() {
                assert_eq!(byte, NAN_BYTE);
                continue;
            }
            let capped = (found as f64).min(MAX as f64);
            let error = |byte: u8| (value(byte) as f64 - capped).abs();
            for neighbour in [byte.saturating_sub(1), (byte + 1).min(MAX_BYTE)] {
                assert!(error(byte) <= error(neighbour), "{found:e} -> {byte:#x}");
            }
        }
    }

    #[test]
    fn every_byte_survives_a_round_trip() {
        for byte in 0..=MAX_BYTE {
            assert_eq!(encode(decode(byte)), byte, "byte {byte:#x}");
        }
        assert_eq!(encode(decode(NAN_BYTE)), NAN_BYTE);
    }

    #[test]
    fn midpoints_go_to_the_even_byte_and_their_neighbours_do_not() {
        for byte in 0..MAX_BYTE {
            let middle = 0.5 * (decode(byte) + decode(byte + 1));
            let even = byte + (byte & 1);
            assert_eq!(encode(middle), even, "between {byte:#x} and its successor");
            assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), byte);
            assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), byte + 1);
        }
    }

    #[test]
    fn elements_keep_their_sign() {
        for byte in 0..=u8::MAX {
            let value = decode_element(byte);
            if byte & 0x7F == NAN_BYTE {
                assert!(value.is_nan());
                assert_eq!(encode_element(value), NAN_BYTE);
            } else {
                assert_eq!(encode_element(value), byte);
                assert_eq!(value.is_sign_negative(), byte & 0x80 != 0);
            }
        }
        assert_eq!(encode_element(-1e-30), 0x80);
        assert_eq!(encode_element(f32::NEG_INFINITY), 0xFE);
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for value in [448.0, 449.0, 464.0, 480.0, 1e30, f32::INFINITY] {
            assert_eq!(encode(value), MAX_BYTE);
        }
        assert_eq!(encode(f32::NAN), NAN_BYTE);
        assert_eq!(encode(f32::from_bits(1)), 0);
    }
}
