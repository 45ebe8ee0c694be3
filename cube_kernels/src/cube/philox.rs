//! Philox4x32-10; see [`reference::philox`](crate::reference::philox).

use cubecl::prelude::*;

use crate::reference::philox::{MULTIPLIERS, ROUNDS, WEYL};

/// Where a kernel takes its random bits from: the key of the stream, and the offset, which is added
/// to the one in device memory where there is one.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Random {
    /// Low word of the key.
    pub key_low: u32,
    /// High word of the key.
    pub key_high: u32,
    /// Low word of the offset.
    pub offset_low: u32,
    /// High word of the offset.
    pub offset_high: u32,
}

/// The four random words of block `index`: byte `i` of them, little-endian, rounds element `i`.
#[cube]
pub fn block_words(index: u64, random: &Random) -> Array<u32> {
    let mut c0 = u32::cast_from(index & 0xFFFF_FFFFu64);
    let mut c1 = u32::cast_from(index >> 32u64);
    let mut c2 = random.offset_low;
    let mut c3 = random.offset_high;
    let mut k0 = random.key_low;
    let mut k1 = random.key_high;
    #[unroll]
    for _ in 0..ROUNDS {
        let high0 = c0.mul_hi(MULTIPLIERS[0]);
        let low0 = c0 * MULTIPLIERS[0];
        let high1 = c2.mul_hi(MULTIPLIERS[1]);
        let low1 = c2 * MULTIPLIERS[1];
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += WEYL[0];
        k1 += WEYL[1];
    }
    let mut words = Array::<u32>::new(4usize);
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}
