//! Compares two models on the same windows of text.
//!
//! The difference of two losses has a smaller error than each of them, because both models find the
//! same tokens hard. Its error is that of the differences of the windows.

use anyhow::{Result, ensure};
use burn::tensor::{Tensor, activation::log_softmax};

use super::{CHUNK, CrossEntropy, WindowLoss, Windows, features, nats, over_windows, targets};
use crate::decoder::Decoder;

/// Losses of two models on the tokens that a window counts, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComparedWindow {
    /// Index of the text.
    pub text: usize,
    /// Number of counted tokens.
    pub tokens: usize,
    /// Sum of the losses of the model.
    pub nats: f64,
    /// Sum of the losses of the baseline.
    pub baseline_nats: f64,
    /// Sum of the KL divergences of the model from the baseline: Σ p (ln p − ln q) over the
    /// vocabulary, with p of the baseline and q of the model.
    pub divergence: f64,
}

impl ComparedWindow {
    /// Returns the loss of the model.
    pub fn model(&self) -> WindowLoss {
        let Self {
            text, tokens, nats, ..
        } = *self;
        WindowLoss { text, tokens, nats }
    }

    /// Returns the loss of the baseline.
    pub fn baseline(&self) -> WindowLoss {
        let nats = self.baseline_nats;
        WindowLoss {
            nats,
            ..self.model()
        }
    }
}

/// Comparison of a model with a baseline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Cross entropy of the model.
    pub model: CrossEntropy,
    /// Cross entropy of the baseline.
    pub baseline: CrossEntropy,
    /// Cross entropy of the model minus that of the baseline, paired by window.
    pub difference: Estimate,
    /// KL divergence of the model from the baseline.
    pub divergence: Estimate,
}

/// A mean over tokens, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean, with windows as clusters. Infinite for a single window.
    pub error: f64,
}

impl Estimate {
    /// Summarizes the token count and the sum of each window.
    fn of(windows: &[(usize, f64)]) -> Self {
        let CrossEntropy { mean, error, .. } = CrossEntropy::of(windows);
        Self { mean, error }
    }

    /// Returns the cross entropy of `model` minus that of `baseline`, both over the same windows,
    /// one or more.
    pub fn difference(model: &[WindowLoss], baseline: &[WindowLoss]) -> Self {
        let pairs = model.iter().zip(baseline);
        let differences = pairs.map(|(own, other)| (own.tokens, own.nats - other.nats));
        Self::of(&differences.collect::<Vec<_>>())
    }
}

impl Comparison {
    /// Summarizes `windows`, one or more.
    pub fn over(windows: &[ComparedWindow]) -> Self {
        let model: Vec<WindowLoss> = windows.iter().map(ComparedWindow::model).collect();
        let baseline: Vec<WindowLoss> = windows.iter().map(ComparedWindow::baseline).collect();
        let divergences = windows.iter().map(|it| (it.tokens, it.divergence));
        Self {
            model: CrossEntropy::over(&model),
            baseline: CrossEntropy::over(&baseline),
            difference: Estimate::difference(&model, &baseline),
            divergence: Estimate::of(&divergences.collect::<Vec<_>>()),
        }
    }
}

/// Compares `model` with `baseline` on each window over `texts`. Both have the same vocabulary and
/// are on the same device.
///
/// # Errors
/// Returns an error if the vocabularies differ in size. Also returns the errors of
/// [`window_losses`](super::window_losses), for both models.
pub fn compare(
    model: &Decoder,
    baseline: &Decoder,
    texts: &[Vec<u32>],
    windows: Windows,
) -> Result<Vec<ComparedWindow>> {
    let [own, other] = [model, baseline].map(|model| model.config().vocab);
    ensure!(
        own == other,
        "the model has {own} tokens, but the baseline has {other}"
    );
    let models = [model, baseline];
    over_windows(&models, texts, windows, |text, tokens, first| {
        let [own, other] = [features(model, tokens)?, features(baseline, tokens)?];
        let count = tokens.len() - 1;
        let mut found: [Vec<f32>; 3] = Default::default();
        for begin in (0..count).step_by(CHUNK) {
            let rows = CHUNK.min(count - begin);
            let logs = |model: &Decoder, features: &Tensor<2>| {
                log_softmax(model.logits(features.clone().narrow(0, begin, rows)), 1)
            };
            let (q, p) = (logs(model, &own), logs(baseline, &other));
            let targets = targets(model, &tokens[begin + 1..][..rows]);
            let divergence = (p.clone().exp() * (p.clone() - q.clone())).sum_dim(1);
            let [q, p] = [q, p].map(|logs| logs.gather(1, targets.clone()));
            for (all, part) in found.iter_mut().zip([q, p, divergence]) {
                all.extend(part.into_data().iter::<f32>());
            }
        }
        let [model, baseline, divergence] = found.map(|values| values[first - 1..].to_vec());
        Ok(ComparedWindow {
            text,
            tokens: model.len(),
            nats: nats(&model)?,
            baseline_nats: nats(&baseline)?,
            // Not `-nats`, which is -0 for equal models.
            divergence: 0.0 - nats(&divergence)?,
        })
    })
}
