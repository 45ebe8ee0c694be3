//! E2M1, the 4-bit element: `s eem`, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7, bit 3
//! the sign. Two codes share a byte, the earlier element in the low nibble.

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// The value of each of the 16 codes.
pub const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The value of `code`; bits above the low nibble are ignored.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 0xF) as usize]
}

/// The two values of a packed byte, in element order.
#[inline(always)]
pub fn decode_byte(byte: u8) -> [f32; 2] {
    [decode(byte), decode(byte >> 4)]
}
