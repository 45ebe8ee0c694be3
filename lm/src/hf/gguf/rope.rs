//! The rope scaling of Llama 3, which GGUF files have as a factor for each frequency.

use std::f64::consts::PI;

use anyhow::{Result, bail, ensure};

use crate::hf::{Rope, RopeScaling};

/// The tensor with the factors: a frequency is divided by its own.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// The borders of Llama 3.1 and later between waves that are scaled and those that are not.
const BORDERS: [f64; 2] = [1.0, 4.0];
/// How far a factor may be from that of the scaling that was found: roundings of `f32`.
const TOLERANCE: f64 = 1e-4;

/// The positions whose rope scaling has these `factors`, for heads of size `head`.
///
/// A file has no other trace of the scaling. Its `factor` is the largest one. Frequencies between
/// the borders give the positions of the training, `original`; where there is none between them, any
/// number does that keeps all on their sides.
///
/// # Errors
/// When their number is another than that of the frequencies, or no scaling has them.
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

/// Positions of the training that may have led to `factors`, the likeliest first.
fn originals(factors: &[f32], theta: f64, head: usize) -> Vec<f64> {
    let [low, high] = BORDERS;
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let (mut least, mut most) = (0.0f64, f64::INFINITY);
    let mut between = Vec::new();
    for (index, own) in factors.iter().enumerate() {
        let frequency = theta.powf(-2.0 * index as f64 / head as f64);
        // Positions of `turns` turns.
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
    // A power of two, as all models have, or the least number.
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
        // Falling where a scaling rises.
        let falling = [8.0, 8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0];
        assert!(error(&falling).contains("no rope scaling"));
    }
}
