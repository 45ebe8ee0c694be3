//! Philox4x32-10, the counter-based generator of Random123 (Salmon et al., SC 2011).

use crate::RandomStream;

/// Multipliers of the two lanes.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];

/// Weyl increments of the key.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Number of rounds.
pub const ROUNDS: usize = 10;

/// Computes ten rounds of Philox4x32: 128 random bits, a pure function of counter and key.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox4x32_lanes(counter.map(|word| [word]), key).map(|[word]| word)
}

/// Computes [`philox4x32`] of `L` counters at once: the outer index is the word, the inner one the
/// counter.
#[inline(always)]
pub(super) fn philox4x32_lanes<const L: usize>(
    counter: [[u32; L]; 4],
    key: [u32; 2],
) -> [[u32; L]; 4] {
    // Words are in the low halves of 64 bits. The high halves contain remainders of the last
    // products and are never read: this is how vector units multiply 32 bits by 32.
    let [mut c0, mut c1, mut c2, mut c3] = counter.map(|word| word.map(|word| word as u64));
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        for lane in 0..L {
            let p0 = (c0[lane] & u32::MAX as u64) * MULTIPLIERS[0] as u64;
            let p1 = (c2[lane] & u32::MAX as u64) * MULTIPLIERS[1] as u64;
            c0[lane] = (p1 >> 32) ^ c1[lane] ^ k0 as u64;
            c1[lane] = p1;
            c2[lane] = (p0 >> 32) ^ c3[lane] ^ k1 as u64;
            c3[lane] = p0;
        }
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3].map(|word| word.map(|word| word as u32))
}

/// Returns the random words of `L` blocks (numerics, section 3): byte `i` of a block, little-endian
/// within its words, rounds element `i`.
///
/// The counter is (block low, block high, offset low, offset high); the key is that of the stream.
#[inline(always)]
pub(super) fn block_words<const L: usize>(
    offset: u64,
    key: [u32; 2],
    blocks: &[u64; L],
) -> [[u32; L]; 4] {
    let counter = [
        blocks.map(|block| block as u32),
        blocks.map(|block| (block >> 32) as u32),
        [offset as u32; L],
        [(offset >> 32) as u32; L],
    ];
    philox4x32_lanes(counter, key)
}

/// Returns the 16 random bytes of block `block`: byte `i` rounds element `i`.
#[inline]
pub fn block_bytes(stream: &RandomStream, block: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    let words = block_words(stream.offset, stream.key(), &[block]);
    for (chunk, [word]) in bytes.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the known answers that Random123 publishes for philox4x32-10.
    #[test]
    fn known_answers() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }
}
