//! Recovers the rope scaling of Llama 3, which GGUF files store as a factor per frequency.

use std::f64::consts::PI;

use anyhow::{Result, bail, ensure};

use crate::hf::{Rope, RopeScaling};

/// Tensor with the factors; each frequency is divided by its factor.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// `low` and `high` of Llama 3.1 and later, the limits between scaled and unscaled wavelengths.
const BORDERS: [f64; 2] = [1.0, 4.0];
/// Maximum relative difference between a stored factor and the recovered one, due to `f32`
/// rounding.
const TOLERANCE: f64 = 1e-4;

/// Returns the rope whose scaling gives these `factors`, for heads of dimension `head`.
///
/// The file has no other information about the scaling. Its `factor` is the largest one.
/// Frequencies between the limits determine the original context length, `original`. If there are
/// none, any value fits that keeps all frequencies on their sides of the limits.
///
/// # Errors
/// Returns an error if the number of factors differs from that of the frequencies, or if no scaling
/// gives these factors.
pub(super) fn of_factors(factors: &[f32], theta: f64, head: usize) -> Result<Rope> {
    ensure!(
        factors.len() == head / 2,
        "it has {} factors, but heads of {head} have {} frequencies",
        factors.len(),
        head / 2
    );
    ensure!(
        factors
            .iter()
            .all(|factor| f64::from(*factor) >= 1.0 - TOLERANCE),
        "a factor is less than 1"
    );
    let largest = factors.iter().copied().fold(1.0, f32::max);
    let smallest = factors.iter().copied().fold(f32::MAX, f32::min);
    let factor = f64::from(largest);
    let rope = |scaling| Rope { theta, scaling };
    if largest == 1.0 {
        return Ok(rope(RopeScaling::Default));
    }
    let candidates = match smallest == largest {
        true => vec![rope(RopeScaling::Linear { factor })],
        false => originals(factors, theta, head)
            .into_iter()
            .map(|original| {
                let [low, high] = BORDERS;
                rope(RopeScaling::Llama3 {
                    factor,
                    low,
                    high,
                    original,
                })
            })
            .collect(),
    };
    let plain = rope(RopeScaling::Default).frequencies(head, 1)?;
    for candidate in candidates {
        let scaled = candidate.frequencies(head, 1)?;
        let found = plain
            .iter()
            .zip(&scaled)
            .map(|(plain, scaled)| plain / scaled);
        let is_near = |(found, factor): (f32, &f32)| {
            f64::from((found - factor).abs()) <= TOLERANCE * f64::from(*factor)
        };
        if found.zip(factors).all(is_near) {
            return Ok(candidate);
        }
    }
    bail!(
        "its factors, from {smallest} to {largest}, are those of no rope scaling that config.json can \
         say"
    )
}

/// Returns candidates for the original context length, most likely first.
fn originals(factors: &[f32], theta: f64, head: usize) -> Vec<f64> {
    let [low, high] = BORDERS;
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let (mut least, mut most) = (0.0f64, f64::INFINITY);
    let mut between = Vec::new();
    for (index, own) in factors.iter().enumerate() {
        let frequency = theta.powf(-2.0 * index as f64 / head as f64);
        // Number of positions in `turns` turns.
        let positions = |turns: f64| 2.0 * PI * turns / frequency;
        let own = f64::from(*own);
        if own <= 1.0 + TOLERANCE {
            least = least.max(positions(high));
        } else if own >= factor * (1.0 - TOLERANCE) {
            most = most.min(positions(low));
        } else {
            let smooth = (1.0 / own - 1.0 / factor) / (1.0 - 1.0 / factor);
            between.push(positions(low + smooth * (high - low)));
        }
    }
    if !between.is_empty() {
        let mean = between.iter().sum::<f64>() / between.len() as f64;
        return vec![mean.round(), mean];
    }
    // A power of two, as in all known models, or the smallest possible value.
    let power = 2f64.powf(least.max(1.0).log2().ceil());
    match power <= most {
        true => vec![power, least.ceil()],
        false => vec![least.ceil(), (least + most.min(1e12)) / 2.0],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(scaling: &RopeScaling, theta: f64, head: usize) -> Vec<f32> {
        let frequencies = |scaling: RopeScaling| {
            let rope = Rope { theta, scaling };
            rope.frequencies(head, 1).unwrap()
        };
        let plain = frequencies(RopeScaling::Default);
        let scaled = frequencies(scaling.clone());
        plain.iter().zip(scaled).map(|(a, b)| a / b).collect()
    }

    #[test]
    fn factors_give_back_the_scaling() {
        let llama3 = |factor, original| RopeScaling::Llama3 {
            factor,
            low: 1.0,
            high: 4.0,
            original,
        };
        for (scaling, theta, head) in [
            (llama3(8.0, 8192.0), 5e5, 128),
            (llama3(32.0, 8192.0), 5e5, 64),
            (llama3(8.0, 32.0), 5e5, 16),
            (RopeScaling::Linear { factor: 4.0 }, 1e4, 64),
            (RopeScaling::Default, 1e4, 64),
        ] {
            let found = of_factors(&factors(&scaling, theta, head), theta, head);
            assert_eq!(found.unwrap().scaling, scaling);
        }
    }

    #[test]
    fn factors_of_no_scaling_are_refused() {
        let error = |factors: &[f32]| of_factors(factors, 5e5, 16).unwrap_err().to_string();
        assert!(error(&[1.0; 7]).contains("7 factors"));
        assert!(error(&[0.5; 8]).contains("less than 1"));
        // Decreasing, where a scaling increases.
        let falling = [8.0, 8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0];
        assert!(error(&falling).contains("no rope scaling"));
    }
}
