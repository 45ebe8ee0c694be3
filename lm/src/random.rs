//! Random numbers on the host, from libraries with stable output: ChaCha8, the ziggurat of
//! `rand_distr`, and FNV-1a. Their versions are pinned, because a resumed run must draw the same
//! values.

use chacha20::ChaCha8Rng;
use chacha20::rand_core::SeedableRng;
use fnv::FnvHasher;
use rand_distr::{Distribution, Normal};
use rayon::prelude::*;
use std::hash::Hasher;

/// Number of variates per stream in [`normal`].
const CHUNK: usize = 1 << 14;

/// Hashes bytes, for the ID of a path or the checksum of a file. It protects against corruption,
/// not against attacks.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    hash_all(&[bytes])
}

/// Returns the [`hash`] of the concatenation of `parts`.
pub(crate) fn hash_all(parts: &[&[u8]]) -> u64 {
    let mut hasher = FnvHasher::default();
    parts.iter().for_each(|part| hasher.write(part));
    hasher.finish()
}

/// Returns stream `number` of `seed` and `name`. Streams are independent.
pub(crate) fn stream(seed: u64, name: &str, number: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&hash(name.as_bytes()).to_le_bytes());
    let mut stream = ChaCha8Rng::from_seed(key);
    stream.set_stream(number);
    stream
}

/// Draws `count` normal variates with mean zero and the given standard deviation, from `seed` and
/// `name`.
pub(crate) fn normal(seed: u64, name: &str, count: usize, deviation: f64) -> Vec<f32> {
    let normal = Normal::new(0.0, deviation).expect("deviations are finite");
    let mut values = vec![0.0; count];
    let chunks = values.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(number, values)| {
        let mut stream = stream(seed, name, number as u64);
        for value in values {
            *value = normal.sample(&mut stream) as f32;
        }
    });
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;

    #[test]
    fn normal_has_its_moments() {
        let values = normal(1, "a", 100_000, 0.5);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        let square =
            values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
        // Tolerance of six standard errors for each.
        assert!(mean.abs() < 6.0 * 0.5 / (1e5f64).sqrt(), "mean {mean}");
        assert!(
            (square - 0.25).abs() < 6.0 * 0.25 * (2.0 / 1e5f64).sqrt(),
            "variance {square}"
        );
        // A longer draw begins with the shorter one, across chunks and threads.
        assert_eq!(normal(1, "a", 40_001, 0.5), values[..40_001]);
    }

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, name, number| stream(seed, name, number).random::<u64>();
        assert_eq!(first(3, "a", 5), first(3, "a", 5));
        for other in [first(4, "a", 5), first(3, "b", 5), first(3, "a", 6)] {
            assert_ne!(first(3, "a", 5), other);
        }
    }

    /// A library release that draws other values would change resumed runs.
    #[test]
    fn values_are_those_of_every_release() {
        assert_eq!(hash(b"batches"), 0xf95f_3484_b590_c08b);
        assert_eq!(
            stream(1, "batches", 2).random::<u64>(),
            0xac5d_64d2_6afe_c882
        );
        assert_eq!(stream(1, "batches", 2).random_range(0..1000u64), 673);
        assert_eq!(
            normal(1, "batches", 3, 1.0),
            [0.394_281_33, -0.245_728_78, -0.723_936_4]
        );
    }
}
