//! Steps, learning rate and intervals of a run.

use anyhow::{Result, ensure};

/// Final learning rate of the cosine, as a share of the peak.
const FINAL_SHARE: f64 = 0.1;

/// Steps, learning rate, regularization and intervals of a run.
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

    /// Returns the learning rate of step `step`, counted from 0: linear warm-up, then a cosine decay
    /// to a tenth.
    pub(crate) fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let progress = (step - self.warmup) as f64 / (self.steps - self.warmup).max(1) as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos());
        self.lr * (FINAL_SHARE + (1.0 - FINAL_SHARE) * cosine)
    }

    /// Returns true if an action that occurs every `every` steps is due after step `step`. The last
    /// step always counts.
    pub(crate) fn is_due(&self, every: u64, step: u64) -> bool {
        step.is_multiple_of(every) || step == self.steps
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

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(steps: u64, warmup: u64) -> Schedule {
        Schedule {
            steps,
            warmup,
            lr: 2.0,
            grad_clip: 1.0,
            weight_decay: 0.0,
            eval_every: 1,
            log_every: 1,
            checkpoint_every: 1,
            telemetry_every: 0,
        }
    }

    #[test]
    fn the_learning_rate_rises_and_falls() {
        let schedule_of_100 = schedule(100, 10);
        let at = |step| schedule_of_100.learning_rate(step);
        assert!((at(0) - 2.0 / 11.0).abs() < 1e-12);
        assert!((at(10) - 2.0).abs() < 1e-12);
        assert!((1..=10).all(|step| at(step) > at(step - 1)));
        assert!((11..100).all(|step| at(step) < at(step - 1)));
        assert!(at(99) > 0.2 && at(99) < 0.21);
        assert!((schedule(1, 0).learning_rate(0) - 2.0).abs() < 1e-12);
    }
}
