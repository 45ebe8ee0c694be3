//! The choices that a caller makes for one operand, apart from any tensor.

use serde::{Deserialize, Serialize};

/// How a scaled value becomes a 4-bit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rounding {
    /// To the nearest E2M1 value, ties to the even code.
    Nearest,
    /// Up with a probability equal to the distance from the lower neighbour, in steps of 1/256.
    Stochastic(RandomStream),
}

/// Where stochastic rounding takes its bits from.
///
/// The bits of one block are a pure function of these three numbers and of the block's index in
/// the logical output, so they do not depend on tile shapes, launch geometry or runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomStream {
    /// Seed of the run.
    pub seed: u64,
    /// Identity of the tensor role: two streams of one seed never share bits. Give every layer and
    /// every copy (row-wise, column-wise) of a tensor its own.
    pub stream: u64,
    /// Position in the stream: advance it by one for each use, so that the next one draws fresh
    /// bits.
    pub offset: u64,
}

impl RandomStream {
    /// The stream `stream` of `seed`, at `offset`.
    pub const fn new(seed: u64, stream: u64, offset: u64) -> Self {
        Self {
            seed,
            stream,
            offset,
        }
    }

    /// The Philox key: the seed mixed with the stream id.
    ///
    /// For a fixed seed this is a bijection of the stream id (an odd multiplication, an addition
    /// and the SplitMix64 finaliser, each invertible), so two streams never share a key.
    pub const fn key(&self) -> [u32; 2] {
        let mixed = splitmix64(
            self.seed
                .wrapping_add(self.stream.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        );
        [mixed as u32, (mixed >> 32) as u32]
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits.
const fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The random Hadamard transform of 16 elements: `R = diag(s) · H16 · 0.25`.
///
/// Both operands of one product must use the same signs along the contraction, on every rank, or
/// the transform does not cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hadamard {
    signs: u16,
}

impl Hadamard {
    /// TransformerEngine's fixed signs.
    pub const DEFAULT_SIGNS: u16 = 0xD7E8;

    /// A transform with the given signs: bit `i` set means that element `i` is negated.
    pub const fn from_signs(signs: u16) -> Self {
        Self { signs }
    }

    /// A transform whose signs are drawn from `seed`: the same on every machine.
    pub const fn seeded(seed: u64) -> Self {
        Self {
            signs: splitmix64(seed) as u16,
        }
    }

    /// The signs: bit `i` set means that element `i` is negated.
    pub const fn signs(&self) -> u16 {
        self.signs
    }
}

impl Default for Hadamard {
    fn default() -> Self {
        Self::from_signs(Self::DEFAULT_SIGNS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_signs_are_transformer_engines() {
        let expected = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
        let signs = Hadamard::default().signs();
        let unpacked: Vec<i32> = (0..16)
            .map(|i| if signs >> i & 1 == 1 { -1 } else { 1 })
            .collect();
        assert_eq!(unpacked, expected);
    }

    #[test]
    fn streams_of_one_seed_have_distinct_keys() {
        let keys: std::collections::HashSet<_> = (0..10_000)
            .map(|stream| RandomStream::new(7, stream, 0).key())
            .collect();
        assert_eq!(keys.len(), 10_000);
    }
}
