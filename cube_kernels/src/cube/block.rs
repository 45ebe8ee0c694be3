//! One block of 16: loading it, and turning it into codes.

use cubecl::prelude::*;

use crate::device::FloatKind;

use super::{
    codec::{load, magnitude_bits, round_nearest, round_stochastic},
    philox::{Random, block_words},
    ptx,
};

/// Who converts scaled values to codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// Arithmetic on bit patterns: every device.
    Software,
    /// `cvt.rn.satfinite.e2m1x2`, with stochastic rounding in software: sm_120 and sm_121.
    HardwareNearest,
    /// `cvt.rn` and `cvt.rs.satfinite.e2m1x4`: sm_100a and sm_103a.
    Hardware,
}

/// The comptime choices of a quantize kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockPolicy {
    /// Round stochastically.
    pub stochastic: bool,
    /// The random offset has a part in device memory.
    pub device_offset: bool,
    /// Transform each block first.
    pub hadamard: bool,
    /// Who converts.
    pub conversion: Conversion,
}

/// The random source with the device-resident part of its offset added, if there is one.
#[cube]
pub fn resolve_offset(random: &Random, offset: &[u32], #[comptime] policy: BlockPolicy) -> Random {
    let mut low = random.offset_low;
    let mut high = random.offset_high;
    if comptime!(policy.stochastic && policy.device_offset) {
        low += offset[0];
        // Unsigned addition wrapped exactly when the sum is below a summand.
        high += offset[1] + u32::cast_from(low < random.offset_low);
    }
    Random {
        key_low: random.key_low,
        key_high: random.key_high,
        offset_low: low,
        offset_high: high,
    }
}

/// The largest magnitude of a block; NaN if there is one.
#[cube]
pub fn block_amax(block: &Array<f32>) -> f32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..16usize {
        bits = max(bits, magnitude_bits(block[i]));
    }
    f32::reinterpret(bits)
}

/// The 16 codes of a block, two words, lowest nibble first. `index` is the logical index of the block in the stored matrix.
#[cube]
pub fn encode_block(
    block: &Array<f32>,
    multiplier: f32,
    index: u64,
    random: &Random,
    #[comptime] policy: BlockPolicy,
) -> Vector<u32, Const<2>> {
    let mut scaled = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        scaled[i] = block[i] * multiplier;
    }
    let mut codes = Vector::<u32, Const<2>>::empty();
    if comptime!(policy.stochastic) {
        let words = block_words(index, random);
        #[unroll]
        for half in 0..2usize {
            let first = comptime!(half * 8);
            if comptime!(policy.conversion == Conversion::Hardware) {
                let low = words[comptime!(half * 2)];
                let high = words[comptime!(half * 2 + 1)];
                codes.insert(half, ptx::cvt_rs_e2m1x8(&scaled, first, low, high));
            } else {
                let mut word = 0u32;
                #[unroll]
                for i in 0..8usize {
                    let random = words[comptime!((first + i) / 4)];
                    let byte = (random >> comptime!(8 * (i as u32 % 4))) & 0xFFu32;
                    let code = round_stochastic(scaled[comptime!(first + i)], byte);
                    word |= code << comptime!(4 * i as u32);
                }
                codes.insert(half, word);
            }
        }
    } else {
        #[unroll]
        for half in 0..2usize {
            let first = comptime!(half * 8);
            if comptime!(policy.conversion != Conversion::Software) {
                codes.insert(half, ptx::cvt_rn_e2m1x8(&scaled, first));
            } else {
                let mut word = 0u32;
                #[unroll]
                for i in 0..8usize {
                    word |= round_nearest(scaled[comptime!(first + i)]) << comptime!(4 * i as u32);
                }
                codes.insert(half, word);
            }
        }
    }
    codes
}

/// Loads 16 consecutive values, as `16 / N` vectors from vector `first` on.
#[cube]
pub fn load_row_block<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    first: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let width = N::value();
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for v in 0..comptime!(16 / width) {
        let vector = x[first + v];
        #[unroll]
        for i in 0..width {
            block[comptime!(v * width + i)] = load::<F>(vector.extract(i), kind);
        }
    }
    block
}

/// Loads 16 values down column `col` from row `row0` on; zero below the last row.
#[cube]
pub fn load_col_block<F: Numeric>(
    x: &[F],
    row0: usize,
    col: usize,
    rows: usize,
    cols: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        let mut value = 0.0f32;
        if row0 + i < rows {
            value = load::<F>(x[(row0 + i) * cols + col], kind);
        }
        block[i] = value;
    }
    block
}
