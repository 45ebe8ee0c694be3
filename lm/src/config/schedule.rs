//! What every training run says of its steps and its optimizer.

use anyhow::{Result, ensure};

/// Steps, learning rate and regularization of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    pub steps: u64,
    pub warmup: u64,
    pub lr: f64,
    pub grad_clip: f64,
    pub weight_decay: f64,
}

impl Schedule {
    /// Check the values.
    ///
    /// # Errors
    /// Names the value that is wrong, what it is, and what it may be.
    pub fn check(&self) -> Result<()> {
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
}

/// Check values, by name, that count something.
///
/// # Errors
/// Names the first that is 0.
pub(crate) fn check_counts(counts: &[(&str, u64)]) -> Result<()> {
    for (name, value) in counts {
        ensure!(*value > 0, "{name} is 0, but it must be at least 1");
    }
    Ok(())
}
