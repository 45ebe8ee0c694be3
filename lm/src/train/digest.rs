//! Checks that ranks that update the same parameters still agree on their values.

use std::fmt;

use anyhow::{Result, bail};
use burn::tensor::{Bytes, TensorData};
use burn_nvfp4::parallel::ProcessGroup;
use burn_pack::Reader;
use rand::RngExt;

use crate::random::stream;
use crate::ranks::gathered;

/// Checks that all ranks of `group` have the same values of `record`, a model record, up to
/// rounding. Compares the parameters whose IDs `holds` accepts.
///
/// # Errors
/// Returns an error if a rank differs: its gradients were not averaged with the others' at some
/// step before `step`. All ranks get the same error.
pub(crate) fn check_equal(
    record: &Bytes,
    group: &ProcessGroup,
    step: u64,
    holds: impl Fn(u64) -> bool,
) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let (mut names, mut own) = (Vec::new(), Vec::new());
    let reader = Reader::from_bytes(Bytes::from_bytes_vec(record.to_vec()))?;
    for tensor in reader.into_tensors()? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        if id.is_some_and(&holds) && dtype.is_float() {
            let data = TensorData::from_bytes(bytes, shape, dtype);
            own.extend(Digest::of(data.iter::<f32>()).bytes());
            names.push(name);
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    let all = gathered(group, &own)?;
    let mut ranks = all.chunks_exact(own.len()).map(Digest::all);
    let first = ranks.next().expect("a group has a rank");
    for (found, rank) in ranks.zip(1..) {
        let far = (first.iter().zip(&found)).position(|(first, found)| !first.is_near(*found));
        if let Some(parameter) = far {
            bail!(
                "at step {step} parameter {} of rank {rank} has {} and that of rank 0 {}, but \
                 gradients that are averaged keep all ranks equal: resume from an earlier \
                 checkpoint, or train on one rank",
                names[parameter],
                found[parameter],
                first[parameter]
            );
        }
    }
    Ok(())
}

/// Digest of one parameter: the sum of its elements with pseudo-random signs, and its norm.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Digest {
    projection: f64,
    norm: f64,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "norm {:e}, signed sum {:e}", self.norm, self.projection)
    }
}

impl Digest {
    const BYTES: usize = 16;

    fn of(values: impl Iterator<Item = f32>) -> Self {
        let (mut projection, mut squares) = (0.0, 0.0);
        let mut signs = stream(0, "signs", 0);
        for value in values.map(f64::from) {
            projection += match signs.random::<bool>() {
                true => value,
                false => -value,
            };
            squares += value * value;
        }
        Self {
            projection,
            norm: squares.sqrt(),
        }
    }

    fn bytes(self) -> [u8; Self::BYTES] {
        let bits = u128::from(self.projection.to_bits()) << 64 | u128::from(self.norm.to_bits());
        bits.to_le_bytes()
    }

    /// Reads the output of [`bytes`](Self::bytes).
    fn all(bytes: &[u8]) -> Vec<Self> {
        let (digests, _) = bytes.as_chunks();
        let digests = digests.iter().map(|bytes| {
            let bits = u128::from_le_bytes(*bytes);
            Self {
                projection: f64::from_bits((bits >> 64) as u64),
                norm: f64::from_bits(bits as u64),
            }
        });
        digests.collect()
    }

    /// Returns true if the difference between two parameters can be due to rounding alone. A random
    /// difference `d` of the elements changes the projection by about the norm of `d`. The
    /// tolerance of a thousandth is below the change from one or two steps of separate training.
    fn is_near(self, other: Self) -> bool {
        let allowed = 1e-3 * self.norm.max(other.norm);
        (self.projection - other.projection).abs() <= allowed
            && (self.norm - other.norm).abs() <= allowed
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    /// Rounding passes; a step of separate training does not.
    #[test]
    fn weights_that_came_apart_are_seen() {
        let weights: Vec<f32> = (0..4096)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3)
            .collect();
        let digest = |change: &dyn Fn(usize, f32) -> f32| {
            Digest::of(weights.iter().enumerate().map(|(i, &w)| change(i, w)))
        };
        let own = digest(&|_, w| w);
        assert!(own.is_near(digest(&|_, w| w)));
        assert_eq!(Digest::all(&[own.bytes(), own.bytes()].concat()), [own; 2]);
        assert!(own.is_near(digest(&|i, w| if i % 7 == 0 {
            w * (1.0 + 1e-4)
        } else {
            w
        })));
        // Each element changes by about the learning rate, as with Adam, in an independent
        // direction.
        let step = |i: usize| {
            if (i * i / 3).is_multiple_of(2) {
                1e-3
            } else {
                -1e-3
            }
        };
        assert!(!own.is_near(digest(&|i, w| w + step(i))));
        assert!(!own.is_near(digest(&|_, w| w * 0.9)));
    }

    /// Every rank names the same differing parameter and rank. Parameters that ranks do not share
    /// may differ.
    #[test]
    fn a_rank_with_other_weights_is_named_by_all() {
        let record = |layer: Linear| layer.into_record().into_bytes().unwrap();
        let layer = LinearConfig::new(8, 8).init(&Device::flex());
        let bias = layer.bias.as_ref().expect("a layer has one").id.val();
        let mut other = layer.clone();
        other.bias = other.bias.map(|bias| bias.map(|values| values + 0.5));
        let (equal, other) = (&record(layer), &record(other));
        let errors: Vec<String> = thread::scope(|scope| {
            let groups = ProcessGroup::loopback(3, Duration::from_secs(20));
            let ranks = groups.into_iter().map(|group| {
                scope.spawn(move || {
                    check_equal(equal, &group, 4, |_| true).unwrap();
                    let own = match group.rank() {
                        2 => other,
                        _ => equal,
                    };
                    check_equal(own, &group, 5, |id| id != bias).unwrap();
                    let found = check_equal(own, &group, 6, |_| true);
                    found.unwrap_err().to_string()
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for error in &errors {
            assert!(error.contains("step 6 parameter bias of rank 2"), "{error}");
        }
    }
}
