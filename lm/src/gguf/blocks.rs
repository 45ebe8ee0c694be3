//! Tensor types of GGUF and their dequantization, as `ggml-quants.c` of ggml defines them.
//!
//! A tensor is a sequence of blocks. All arithmetic is `f32`, with one rounding per operation, in
//! the order of ggml's reference code.

use half::{bf16, f16};
use nvfp4_formats::format::{e2m1, e4m3};

/// Elements per block of the older types, and of MXFP4.
const BLOCK: usize = 32;
/// Elements per block of the types with `K` in their names.
const SUPER_BLOCK: usize = 256;
/// Elements per scale of NVFP4.
const NVFP4_BLOCK: usize = 16;
/// Elements per block of NVFP4: four scales, then four times 16 codes.
const NVFP4_SUPER_BLOCK: usize = 64;

/// Supported tensor type, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "the names of ggml")]
pub enum GgufType {
    /// 0
    F32,
    /// 1
    F16,
    /// 2: an `f16` scale, and 32 codes of 4 bits, minus 8.
    Q4_0,
    /// 3: a scale and a minimum, `f16` each, and 32 codes of 4 bits.
    Q4_1,
    /// 6: an `f16` scale, and 32 codes of 5 bits, minus 16.
    Q5_0,
    /// 7: a scale and a minimum, `f16` each, and 32 codes of 5 bits.
    Q5_1,
    /// 8: an `f16` scale, and 32 codes of 8 bits.
    Q8_0,
    /// 10: 16 times 16 codes of 2 bits with a scale and a minimum of 4 bits.
    Q2_K,
    /// 11: 16 times 16 codes of 3 bits, minus 4, with a scale of 6 bits.
    Q3_K,
    /// 12: 8 times 32 codes of 4 bits with a scale and a minimum of 6 bits.
    Q4_K,
    /// 13: 8 times 32 codes of 5 bits with a scale and a minimum of 6 bits.
    Q5_K,
    /// 14: 16 times 16 codes of 6 bits, minus 32, with a scale of 8 bits.
    Q6_K,
    /// 30
    BF16,
    /// 39: a power-of-two scale, and 32 E2M1 codes.
    MXFP4,
    /// 40: four E4M3 scales, and four times 16 E2M1 codes.
    NVFP4,
}

impl GgufType {
    /// Supported types, with their numbers.
    pub const ALL: [(u32, Self); 15] = [
        (0, Self::F32),
        (1, Self::F16),
        (2, Self::Q4_0),
        (3, Self::Q4_1),
        (6, Self::Q5_0),
        (7, Self::Q5_1),
        (8, Self::Q8_0),
        (10, Self::Q2_K),
        (11, Self::Q3_K),
        (12, Self::Q4_K),
        (13, Self::Q5_K),
        (14, Self::Q6_K),
        (30, Self::BF16),
        (39, Self::MXFP4),
        (40, Self::NVFP4),
    ];

    /// Returns the type with this number, if it is supported.
    pub fn from_number(number: u32) -> Option<Self> {
        let found = Self::ALL.iter().find(|(own, _)| *own == number);
        found.map(|(_, kind)| *kind)
    }

    /// Returns the elements and the bytes per block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (BLOCK, 18),
            Self::Q4_1 => (BLOCK, 20),
            Self::Q5_0 => (BLOCK, 22),
            Self::Q5_1 => (BLOCK, 24),
            Self::Q8_0 => (BLOCK, 34),
            Self::Q2_K => (SUPER_BLOCK, 84),
            Self::Q3_K => (SUPER_BLOCK, 110),
            Self::Q4_K => (SUPER_BLOCK, 144),
            Self::Q5_K => (SUPER_BLOCK, 176),
            Self::Q6_K => (SUPER_BLOCK, 210),
            Self::MXFP4 => (BLOCK, 17),
            Self::NVFP4 => (NVFP4_SUPER_BLOCK, 36),
        }
    }

    /// Dequantizes whole blocks.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        let (elements, size) = self.block();
        let blocks = bytes.chunks_exact(size);
        let mut values = Vec::with_capacity(blocks.len() * elements);
        for block in blocks {
            self.dequantize(block, &mut values);
        }
        values
    }

    /// Appends the values of one block.
    fn dequantize(self, block: &[u8], values: &mut Vec<f32>) {
        match self {
            Self::F32 => values.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
            Self::F16 => values.push(half_at(block, 0)),
            Self::BF16 => values.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
            Self::Q4_0 => {
                let scale = half_at(block, 0);
                values.extend(nibbles(&block[2..]).map(|code| scale * (f32::from(code) - 8.0)));
            }
            Self::Q4_1 => {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                values.extend(nibbles(&block[4..]).map(|code| scale * f32::from(code) + least));
            }
            Self::Q5_0 => {
                let scale = half_at(block, 0);
                let codes = with_fifth_bits(&block[2..6], &block[6..]);
                values.extend(codes.map(|code| scale * (f32::from(code) - 16.0)));
            }
            Self::Q5_1 => {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                let codes = with_fifth_bits(&block[4..8], &block[8..]);
                values.extend(codes.map(|code| scale * f32::from(code) + least));
            }
            Self::Q8_0 => {
                let scale = half_at(block, 0);
                values.extend(block[2..].iter().map(|byte| scale * f32::from(*byte as i8)));
            }
            Self::Q2_K => q2_k(block, values),
            Self::Q3_K => q3_k(block, values),
            Self::Q4_K | Self::Q5_K => q4_k_or_q5_k(block, values),
            Self::Q6_K => q6_k(block, values),
            Self::MXFP4 => {
                // 2^(e - 127) of the value of a code; ggml computes it as 2^(e - 128) of twice the
                // value, so that e = 0 is the subnormal 2^-128 and e = 255 is 2^127.
                let scale = half_power(block[0]);
                let codes = nibbles(&block[1..]);
                values.extend(codes.map(|code| scale * (2.0 * e2m1::decode(code))));
            }
            Self::NVFP4 => {
                let (scales, codes) = block.split_at(NVFP4_SUPER_BLOCK / NVFP4_BLOCK);
                for (scale, codes) in scales.iter().zip(codes.chunks_exact(NVFP4_BLOCK / 2)) {
                    // A sign, which no scale has, makes the values invalid, like the byte of NaN.
                    let scale = match scale {
                        0x80.. => f32::NAN,
                        byte => e4m3::decode(*byte),
                    };
                    values.extend(nibbles(codes).map(|code| scale * e2m1::decode(code)));
                }
            }
        }
    }
}

/// NVFP4 codes and E4M3 scales in the order of checkpoints: `[n, k / 2]` with the even element in
/// the low nibble, and `[n, k / 16]`. Each 16 codes of a file have the first eight elements in the
/// low nibbles, and the other eight in the high ones.
pub fn nvfp4_codes_and_scales(bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (elements, size) = GgufType::NVFP4.block();
    let blocks = bytes.chunks_exact(size);
    let mut all_codes = Vec::with_capacity(blocks.len() * elements / 2);
    let mut all_scales = Vec::with_capacity(blocks.len() * elements / NVFP4_BLOCK);
    for block in blocks {
        let (scales, codes) = block.split_at(NVFP4_SUPER_BLOCK / NVFP4_BLOCK);
        all_scales.extend_from_slice(scales);
        for codes in codes.chunks_exact(NVFP4_BLOCK / 2) {
            let codes: Vec<u8> = nibbles(codes).collect();
            all_codes.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
        }
    }
    (all_codes, all_scales)
}

/// Returns the low nibbles, then the high nibbles.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let low = bytes.iter().map(|byte| byte & 15);
    low.chain(bytes.iter().map(|byte| byte >> 4))
}

/// Returns the nibbles of `low` with the 32 bits of `fifth` as their fifth bits.
fn with_fifth_bits(fifth: &[u8], low: &[u8]) -> impl Iterator<Item = u8> {
    nibbles(low)
        .enumerate()
        .map(|(at, code)| code | (fifth[at / 8] >> (at % 8) & 1) << 4)
}

/// 84 bytes: 16 pairs of scale and minimum, 64 bytes of codes, their two `f16` factors.
fn q2_k(block: &[u8], values: &mut Vec<f32>) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (scale, least) = (half_at(block, 80), half_at(block, 82));
    for at in 0..SUPER_BLOCK {
        let pair = scales[at / 16];
        let code = two_bits(codes, at);
        let (own, minimum) = (f32::from(pair & 15), f32::from(pair >> 4));
        values.push(scale * own * f32::from(code) - least * minimum);
    }
}

/// 110 bytes: the third bits of the codes, inverted sign; their lower bits; 16 scales of 6 bits,
/// plus 32; an `f16` factor.
fn q3_k(block: &[u8], values: &mut Vec<f32>) {
    let (high, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half_at(block, 108);
    for at in 0..SUPER_BLOCK {
        let group = at / 16;
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let own = i32::from(low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4) - 32;
        let third = high[at % 32] >> (at / 32) & 1;
        let code = i32::from(two_bits(codes, at)) - if third == 0 { 4 } else { 0 };
        values.push(scale * own as f32 * code as f32);
    }
}

/// 144 or 176 bytes: two `f16` factors, 8 pairs of scale and minimum of 6 bits; for Q5_K the fifth
/// bits of the codes; their lower bits.
fn q4_k_or_q5_k(block: &[u8], values: &mut Vec<f32>) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let pairs = &block[4..16];
    let (fifth, codes) = block[16..].split_at(block.len() - 16 - SUPER_BLOCK / 2);
    for at in 0..SUPER_BLOCK {
        let (own, minimum) = scale_and_minimum(pairs, at / 32);
        let byte = codes[at / 64 * 32 + at % 32];
        let mut code = byte >> (4 * (at / 32 % 2)) & 15;
        if !fifth.is_empty() {
            code |= (fifth[at % 32] >> (at / 32) & 1) << 4;
        }
        let (own, minimum) = (scale * f32::from(own), least * f32::from(minimum));
        values.push(own * f32::from(code) - minimum);
    }
}

/// Returns scale and minimum number `at` of the 8 pairs in 12 bytes.
fn scale_and_minimum(pairs: &[u8], at: usize) -> (u8, u8) {
    match at {
        0..4 => (pairs[at] & 63, pairs[at + 4] & 63),
        _ => (
            pairs[at + 4] & 15 | pairs[at - 4] >> 6 << 4,
            pairs[at + 4] >> 4 | pairs[at] >> 6 << 4,
        ),
    }
}

/// 210 bytes: the lower four bits of the codes, their upper two, 16 scales, an `f16` factor.
fn q6_k(block: &[u8], values: &mut Vec<f32>) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for at in 0..SUPER_BLOCK {
        let nibble = low[at / 128 * 64 + at % 64] >> (4 * (at / 64 % 2)) & 15;
        let code = i32::from(nibble | two_bits(high, at) << 4) - 32;
        values.push(scale * f32::from(scales[at / 16] as i8) * code as f32);
    }
}

/// Returns code number `at` of 256 codes of 2 bits. Each 32 bytes hold 128 codes: bits 0 and 1 of
/// all bytes first.
fn two_bits(codes: &[u8], at: usize) -> u8 {
    codes[at / 128 * 32 + at % 32] >> (2 * (at / 32 % 4)) & 3
}

/// Returns `2^(exponent - 128)`.
fn half_power(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
