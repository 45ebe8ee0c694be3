//! Tensor types of GGUF and their dequantization.

use half::{bf16, f16};

/// Elements per block.
const BLOCK: usize = 32;

/// Supported tensor type, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// 0
    F32,
    /// 1
    F16,
    /// 3: a scale and a minimum, `f16` each, and 32 codes of 4 bits.
    Q4_1,
    /// 8: an `f16` scale, and 32 codes of 8 bits.
    Q8_0,
    /// 30
    BF16,
}

impl GgufType {
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// Returns the elements and the bytes per block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_1 => (BLOCK, 20),
            Self::Q8_0 => (BLOCK, 34),
        }
    }

    /// Dequantizes whole blocks.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        let (elements, size) = self.block();
        let blocks = bytes.chunks_exact(size);
        let mut values = Vec::with_capacity(blocks.len() * elements);
        for block in blocks {
            match self {
                Self::F32 => {
                    values.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]]))
                }
                Self::F16 => values.push(half_at(block, 0)),
                Self::BF16 => values.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Self::Q4_1 => {
                    let (scale, least) = (half_at(block, 0), half_at(block, 2));
                    let value = |code: u8| scale * f32::from(code) + least;
                    // The low nibbles hold the first half of the block, the high nibbles the
                    // second.
                    values.extend(block[4..].iter().map(|byte| value(byte & 15)));
                    values.extend(block[4..].iter().map(|byte| value(byte >> 4)));
                }
                Self::Q8_0 => {
                    let scale = half_at(block, 0);
                    values.extend(block[2..].iter().map(|byte| scale * f32::from(*byte as i8)));
                }
            }
        }
        values
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
