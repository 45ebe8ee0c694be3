//! Steps and optimizer settings shared by all training commands.

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
    /// Checks the values.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
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
