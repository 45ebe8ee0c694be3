//! Random numbers of the host: a pure function of a key and a counter.

use std::f64::consts::TAU;

use rayon::prelude::*;

/// Finaliser of SplitMix64: a bijection of 64-bit words that spreads every input bit over the whole
/// output.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// FNV-1a over bytes: an id for a path, a check sum for a file. It guards against damage, not
/// against malice.
#[derive(Clone, Copy)]
pub(crate) struct Fnv(u64);

impl Fnv {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut fnv = Fnv::new();
    fnv.update(bytes);
    fnv.value()
}

/// Random words number 0, 1, 2, … of a key.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    key: u64,
    counter: u64,
}

impl Stream {
    /// The stream of `seed` and `name`; streams with different pairs are unrelated.
    pub(crate) fn new(seed: u64, name: u64) -> Self {
        Self {
            key: mix(mix(seed) ^ name),
            counter: 0,
        }
    }

    /// The same stream from word `counter` on.
    pub(crate) fn at(self, counter: u64) -> Self {
        Self { counter, ..self }
    }

    pub(crate) fn next(&mut self) -> u64 {
        let word = mix(self.key ^ mix(self.counter));
        self.counter += 1;
        word
    }

    /// Uniform in `0..bound`, by multiplication; the bias is below `bound / 2^64`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in `(0, 1)`, both ends excluded.
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// `count` normal variates of mean zero and the given standard deviation (Box-Muller): words `2i` and
    /// `2i + 1` from here on give variates `2i` and `2i + 1`.
    pub(crate) fn normal(&mut self, count: usize, deviation: f64) -> Vec<f32> {
        let mut values = vec![0.0; count];
        let first = self.counter;
        values
            .par_chunks_mut(1 << 14)
            .enumerate()
            .for_each(|(index, values)| {
                let mut own = self.at(first + ((index as u64) << 14));
                for pair in values.chunks_mut(2) {
                    let radius = (-2.0 * own.uniform().ln()).sqrt() * deviation;
                    let (sin, cos) = (TAU * own.uniform()).sin_cos();
                    pair[0] = (radius * cos) as f32;
                    if let Some(second) = pair.get_mut(1) {
                        *second = (radius * sin) as f32;
                    }
                }
            });
        self.counter = first + count.next_multiple_of(2) as u64;
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_variates_go_on() {
        let whole = Stream::new(3, 4).normal(40_001, 1.0);
        let mut parts = Stream::new(3, 4);
        let mut again = parts.normal(20_000, 1.0);
        again.extend(parts.normal(20_001, 1.0));
        assert_eq!(whole, again);
    }

    #[test]
    fn normal_has_its_moments() {
        let values = Stream::new(1, 2).normal(100_000, 0.5);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        let square =
            values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
        // Six standard errors of each.
        assert!(mean.abs() < 6.0 * 0.5 / (1e5f64).sqrt(), "mean {mean}");
        assert!(
            (square - 0.25).abs() < 6.0 * 0.25 * (2.0 / 1e5f64).sqrt(),
            "variance {square}"
        );
    }

    #[test]
    fn streams_differ_and_repeat() {
        let mut first = Stream::new(3, 4);
        let words: Vec<u64> = (0..4).map(|_| first.next()).collect();
        let mut again = Stream::new(3, 4).at(2);
        assert_eq!([again.next(), again.next()], [words[2], words[3]]);
        assert_ne!(Stream::new(4, 3).next(), words[0]);
        assert!((0..1000).all(|i| Stream::new(5, 6).at(i).below(7) < 7));
    }
}
