//! Selects the next token: greedy, or sampled with temperature, top-k, top-p and a repetition
//! penalty.

use anyhow::{Result, ensure};
use chacha20::ChaCha8Rng;
use rand::RngExt;

use crate::hf::GenerationConfig;
use crate::random::stream;

/// Sampling parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingConfig {
    /// Temperature that divides the logits; 0 takes the most probable token.
    pub temperature: f64,
    /// Number of most probable tokens to sample from.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of most probable tokens whose probabilities sum to at least
    /// this value. The set has at least one token.
    pub top_p: f64,
    /// Divides positive logits of tokens that already occur in the text, and multiplies negative
    /// ones (Keskar et al., CTRL); 1 disables it.
    pub repetition_penalty: f64,
    /// Random seed. The same seed gives the same text on the same device.
    pub seed: u64,
}

impl Default for SamplingConfig {
    /// Greedy.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// Takes the parameters from the model's generation configuration; greedy if it does not enable
    /// sampling.
    pub fn of(config: &GenerationConfig, seed: u64) -> Self {
        let temperature = match config.sample {
            Some(true) => config.temperature.unwrap_or(1.0),
            _ => 0.0,
        };
        Self {
            temperature,
            top_k: config.top_k,
            top_p: config.top_p.unwrap_or(1.0),
            repetition_penalty: config.repetition_penalty.unwrap_or(1.0),
            seed,
        }
    }

    /// # Errors
    /// Returns an error if a value is out of range.
    pub fn check(&self) -> Result<()> {
        let Self {
            temperature,
            top_k,
            top_p,
            repetition_penalty,
            ..
        } = self;
        ensure!(
            temperature.is_finite() && *temperature >= 0.0,
            "`temperature` is {temperature}, but must be zero or positive"
        );
        ensure!(*top_k != Some(0), "`top_k` is 0, but must be at least 1");
        ensure!(
            *top_p > 0.0 && *top_p <= 1.0,
            "`top_p` is {top_p}, but must be above 0 and at most 1"
        );
        ensure!(
            repetition_penalty.is_finite() && *repetition_penalty > 0.0,
            "`repetition_penalty` is {repetition_penalty}, but must be positive"
        );
        Ok(())
    }
}

/// Selects the tokens of one text.
pub struct Sampler {
    config: SamplingConfig,
    /// For each token, true if it occurs in the text.
    seen: Vec<bool>,
    draws: ChaCha8Rng,
}

impl Sampler {
    /// Creates the sampler for text `index` of a batch, which starts with `prompt`.
    ///
    /// # Errors
    /// Returns an error if the configuration does not pass its check.
    pub fn new(config: &SamplingConfig, index: u64, prompt: &[u32]) -> Result<Self> {
        config.check()?;
        let mut sampler = Self {
            config: config.clone(),
            seen: Vec::new(),
            draws: stream(config.seed, "generate", index),
        };
        prompt.iter().for_each(|token| sampler.note(*token));
        Ok(sampler)
    }

    fn note(&mut self, token: u32) {
        let token = token as usize;
        if self.seen.len() <= token {
            self.seen.resize(token + 1, false);
        }
        self.seen[token] = true;
    }

    /// Returns the next token. Ties go to the lowest token.
    ///
    /// # Errors
    /// Returns an error if a logit is NaN, or if none is finite.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        let mut logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
        ensure!(
            logits.iter().all(|logit| !logit.is_nan()) && logits.iter().any(|l| l.is_finite()),
            "the model's logits are not numbers: a weight or an activation overflowed"
        );
        let penalty = self.config.repetition_penalty;
        if penalty != 1.0 {
            for (logit, _) in logits.iter_mut().zip(&self.seen).filter(|(_, seen)| **seen) {
                *logit = if *logit > 0.0 {
                    *logit / penalty
                } else {
                    *logit * penalty
                };
            }
        }
        let token = match self.config.temperature {
            0.0 => first_best(&logits),
            _ => {
                let candidates = self.candidates(&logits);
                pick(&candidates, self.draws.random::<f64>())
            }
        };
        self.note(token as u32);
        Ok(token as u32)
    }

    /// Returns the candidate tokens with their weights, most probable first.
    fn candidates(&self, logits: &[f64]) -> Vec<(usize, f64)> {
        let best = logits[first_best(logits)];
        let weigh = |logit: f64| ((logit - best) / self.config.temperature).exp();
        let weights = logits.iter().map(|logit| weigh(*logit));
        let mut candidates: Vec<(usize, f64)> = weights.enumerate().collect();
        // A stable sort keeps equal weights in token order.
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        if let Some(top_k) = self.config.top_k {
            candidates.truncate(top_k);
        }
        if self.config.top_p < 1.0 {
            let enough = self.config.top_p * candidates.iter().map(|c| c.1).sum::<f64>();
            let mut sum = 0.0;
            let kept = candidates.iter().take_while(|(_, weight)| {
                let is_kept = sum < enough;
                sum += weight;
                is_kept
            });
            let kept = kept.count().max(1);
            candidates.truncate(kept);
        }
        candidates
    }
}

/// Returns the index of the largest value, the first among equals.
pub(crate) fn first_best(values: &[f64]) -> usize {
    let mut best = 0;
    for (place, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = place;
        }
    }
    best
}

/// Returns the candidate at `position`, in `[0, 1)`, of the cumulative weights.
fn pick(candidates: &[(usize, f64)], position: f64) -> usize {
    let mut rest = position * candidates.iter().map(|c| c.1).sum::<f64>();
    for (token, weight) in candidates {
        rest -= weight;
        if rest < 0.0 {
            return *token;
        }
    }
    // Reached only through rounding.
    candidates[0].0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(config: SamplingConfig, logits: &[f32], prompt: &[u32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for index in 0..4000 {
            let mut sampler = Sampler::new(&config, index, prompt).unwrap();
            counts[sampler.next(logits).unwrap() as usize] += 1;
        }
        counts
    }

    fn drawn() -> SamplingConfig {
        SamplingConfig {
            temperature: 1.0,
            seed: 7,
            ..SamplingConfig::default()
        }
    }

    /// Returns logits for the probabilities 0.4, 0.3, 0.2, 0.1.
    fn logits() -> [f32; 4] {
        [0.3f32, 0.1, 0.4, 0.2].map(f32::ln)
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(&SamplingConfig::default(), 0, &[]).unwrap();
        assert_eq!(
            sampler.next(&[1.0, 3.0, 3.0, f32::NEG_INFINITY]).unwrap(),
            1
        );
        assert!(sampler.next(&[1.0, f32::NAN]).is_err());
        assert!(sampler.next(&[f32::NEG_INFINITY; 2]).is_err());
    }

    #[test]
    fn draws_follow_the_distribution() {
        let found = counts(drawn(), &logits(), &[]);
        for (found, expected) in found.into_iter().zip([1200usize, 400, 1600, 800]) {
            // Five standard deviations.
            assert!(found.abs_diff(expected) < 160, "{found}, not {expected}");
        }
        assert_eq!(
            counts(drawn(), &logits(), &[]),
            counts(drawn(), &logits(), &[])
        );
        let other = SamplingConfig { seed: 8, ..drawn() };
        assert_ne!(
            counts(drawn(), &logits(), &[]),
            counts(other, &logits(), &[])
        );
    }

    #[test]
    fn top_k_and_top_p_leave_the_most_probable() {
        let top_k = SamplingConfig {
            top_k: Some(2),
            ..drawn()
        };
        let found = counts(top_k, &logits(), &[]);
        assert!(
            found[1] == 0 && found[3] == 0 && found[0].abs_diff(1714) < 160,
            "{found:?}"
        );
        // 0.4 and 0.3 sum to 0.7, which is below 0.75.
        for (top_p, kept) in [(0.75, 3), (0.65, 2), (0.4, 1), (1e-9, 1)] {
            let config = SamplingConfig { top_p, ..drawn() };
            let found = counts(config, &logits(), &[]);
            assert_eq!(
                found.iter().filter(|n| **n > 0).count(),
                kept,
                "{top_p}: {found:?}"
            );
        }
    }

    #[test]
    fn repetition_makes_tokens_less_probable() {
        let config = SamplingConfig {
            repetition_penalty: 2.0,
            ..SamplingConfig::default()
        };
        let mut sampler = Sampler::new(&config, 0, &[1]).unwrap();
        // First 3 / 2 against 2, then -1 against 2 / 2.
        assert_eq!(sampler.next(&[2.0, 3.0, -1.0]).unwrap(), 0);
        assert_eq!(sampler.next(&[-1.0, -1.0, -1.5]).unwrap(), 2);
    }

    #[test]
    fn values_out_of_range_are_errors() {
        let good = SamplingConfig::default();
        for (config, expected) in [
            (
                SamplingConfig {
                    temperature: -1.0,
                    ..good.clone()
                },
                "`temperature` is -1",
            ),
            (
                SamplingConfig {
                    temperature: f64::NAN,
                    ..good.clone()
                },
                "`temperature` is NaN",
            ),
            (
                SamplingConfig {
                    top_k: Some(0),
                    ..good.clone()
                },
                "`top_k` is 0",
            ),
            (
                SamplingConfig {
                    top_p: 0.0,
                    ..good.clone()
                },
                "`top_p` is 0",
            ),
            (
                SamplingConfig {
                    top_p: 1.5,
                    ..good.clone()
                },
                "`top_p` is 1.5",
            ),
            (
                SamplingConfig {
                    repetition_penalty: 0.0,
                    ..good
                },
                "`repetition_penalty` is 0",
            ),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
