//! Steps, learning rate and intervals of a run.

use anyhow::{Result, ensure};
use burn_nvfp4::recipe::Healing;

use crate::metrics::is_due;
use crate::optim::learning_rate;

/// Steps, learning rate, regularization and intervals of a run with one recipe.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    /// Number of optimizer steps.
    pub steps: u64,
    /// Warm-up steps of the learning rate.
    pub warmup: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Global norm to which gradients are clipped.
    pub grad_clip: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Steps between evaluations.
    pub eval_every: u64,
    /// Steps between rows of `metrics.csv`.
    pub log_every: u64,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Steps between samples of telemetry; 0 for never.
    pub telemetry_every: u64,
    /// Point at which the run stops quantizing, if it does.
    pub healing: Option<Healing>,
    /// True to run the steps as a CUDA graph.
    pub graph: bool,
}

impl Schedule {
    /// Checks the values.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub(crate) fn check(&self) -> Result<()> {
        check_counts(&[
            ("steps", self.steps),
            ("eval-every", self.eval_every),
            ("log-every", self.log_every),
            ("checkpoint-every", self.checkpoint_every),
        ])?;
        ensure!(
            self.warmup < self.steps,
            "warmup is {}, but it must be less than steps ({})",
            self.warmup,
            self.steps
        );
        for (name, value) in [("lr", self.lr), ("grad-clip", self.grad_clip)] {
            ensure!(
                value.is_finite() && value > 0.0,
                "{name} is {value}, but it must be a positive number"
            );
        }
        ensure!(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            "weight-decay is {}, but it must be zero or a positive number",
            self.weight_decay
        );
        Ok(())
    }

    /// Returns the learning rate of step `step`, counted from 0.
    pub(crate) fn learning_rate(&self, step: u64) -> f64 {
        learning_rate(step, self.steps, self.warmup, self.lr)
    }

    /// Returns true if an action that occurs every `every` steps is due after step `step`.
    pub(crate) fn is_due(&self, every: u64, step: u64) -> bool {
        is_due(every, step, self.steps)
    }

    /// Returns true if `metrics.csv` has a row for step `step`.
    pub(crate) fn has_row(&self, step: u64) -> bool {
        self.is_due(self.eval_every, step) || self.is_due(self.log_every, step)
    }

    /// Returns true if telemetry samples step `step`.
    pub(crate) fn is_sampled(&self, step: u64) -> bool {
        self.telemetry_every > 0 && step.is_multiple_of(self.telemetry_every)
    }
}

/// Checks that named counts are not 0.
///
/// # Errors
/// Returns an error that names the first count that is 0.
pub(crate) fn check_counts(counts: &[(&str, u64)]) -> Result<()> {
    for (name, value) in counts {
        ensure!(*value > 0, "{name} is 0, but it must be at least 1");
    }
    Ok(())
}
