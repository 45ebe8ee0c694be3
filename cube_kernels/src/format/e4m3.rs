//! E4M3 (the "fn" variant), the block scale: bias 7, largest value 448, smallest subnormal 2⁻⁹, NaN
//! `0x7F`, no infinity. Scales are never negative, so only the seven low bits are used.

/// Largest finite value.
pub const MAX: f32 = 448.0;

/// The byte of [`MAX`].
pub const MAX_BYTE: u8 = 0x7E;

/// The byte that stands for NaN.
pub const NAN_BYTE: u8 = 0x7F;

/// Bits of 2⁻⁶, the smallest normal value.
const MIN_NORMAL_BITS: u32 = (127 - 6) << 23;

/// The byte nearest to `value`, ties to even, saturating at 448. NaN gives [`NAN_BYTE`].
///
/// `value` is a scale: non-negative (zero included) or NaN. The sign bit is ignored.
#[inline(always)]
pub fn encode(value: f32) -> u8 {
    let bits = value.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 {
        NAN_BYTE
    } else if bits >= MAX.to_bits() {
        MAX_BYTE
    } else if bits < MIN_NORMAL_BITS {
        // Subnormals count units of 2⁻⁹. Adding 2¹⁴, whose last place is 2⁻⁹, rounds to that unit,
        // ties to even; eight units are the first normal byte, as they should be.
        let sum = f32::from_bits(bits) + 16384.0;
        (sum.to_bits() - 16384f32.to_bits()) as u8
    } else {
        // Keep three mantissa bits, round half to even; a carry moves into the exponent by itself.
        // 448 itself was handled above, but what rounds beyond it (464 and more) must saturate.
        let rounded = bits + 0x0007_FFFF + ((bits >> 20) & 1);
        let byte = (rounded >> 20) - (120 << 3);
        byte.min(MAX_BYTE as u32) as u8
    }
}

/// The value of `byte`; the sign bit is ignored.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    DECODED[(byte & 0x7F) as usize]
}

/// The byte nearest to `value` where E4M3 is the element and has a sign (MXFP8): to nearest even,
/// saturating at 448, the sign kept on a zero. NaN gives [`NAN_BYTE`], without its sign: what
/// `cvt.rn.satfinite.e4m3x2.f32` computes.
#[inline(always)]
pub fn encode_element(value: f32) -> u8 {
    let sign = if value.is_nan() {
        0
    } else {
        (value.to_bits() >> 24) as u8 & 0x80
    };
    encode(value) | sign
}

/// The value of an element with its sign.
#[inline(always)]
pub fn decode_element(byte: u8) -> f32 {
    let magnitude = decode(byte);
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

static DECODED: [f32; 128] = {
    let mut table = [0f32; 128];
    let mut byte = 0;
    while byte < 128 {
        let (exponent, mantissa) = (byte as u32 >> 3, byte as u32 & 7);
        table[byte] = if byte == NAN_BYTE as usize {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

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
