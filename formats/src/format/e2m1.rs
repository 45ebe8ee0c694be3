//! E2M1, the 4-bit element: `s eem`. Codes 0 to 7 have the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6,
//! and bit 3 is the sign. Two codes share a byte, the earlier element in the low nibble.

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Values of the 16 codes.
pub const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Returns the value of `code`; bits above the low nibble are ignored.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 0xF) as usize]
}

/// Computes [`decode`] without a branch or a table.
#[inline(always)]
pub(crate) fn decode_wide(code: u32) -> f32 {
    let magnitude = (code & 7) as i32;
    // From 1 on, exponent and mantissa are those of an `f32`, except that the bias is 1, not 127.
    let normal = (magnitude << 22).wrapping_add(126 << 23);
    let half = if magnitude == 1 {
        0.5f32.to_bits() as i32
    } else {
        0
    };
    let bits = if magnitude < 2 { half } else { normal };
    f32::from_bits(bits as u32 | (code & 8) << 28)
}

/// Returns the two values of a packed byte, in element order.
#[inline(always)]
pub fn decode_byte(byte: u8) -> [f32; 2] {
    [decode(byte), decode(byte >> 4)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_decoders_agree() {
        for code in 0..=255u8 {
            let found = decode_wide(code as u32);
            assert_eq!(found.to_bits(), decode(code).to_bits(), "code {code}");
        }
    }
}
