//! Options that the benchmarks share.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::checkpoint::write_json;
use nvfp4_lm::cost::{Cost, Effort, Kernel};
use serde::Serialize;

use crate::terminal::note;

#[derive(Args)]
#[group(skip)]
pub(super) struct MeasureOptions {
    /// Measure this many rounds and report the median
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) rounds: usize,
    /// Print this many of the costliest kernels
    #[arg(long, value_name = "N", default_value_t = 0)]
    kernels: usize,
    /// Write the output to this file: all measurements, as JSON [default: none]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl MeasureOptions {
    /// Prints the costliest of `kernels`, which are in that order, a line each after `label`.
    pub(super) fn print_kernels(&self, label: &str, kernels: &[Kernel]) {
        for kernel in kernels.iter().take(self.kernels) {
            println!(
                "{label}{:>9.3} ms {:>5} x {:<14} {}",
                1e3 * kernel.seconds,
                kernel.launches,
                kernel.class.name(),
                kernel.name
            );
        }
    }

    /// Writes `figures` to the file given by `--out`, if any.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(super) fn write(&self, figures: &impl Serialize) -> Result<()> {
        match &self.out {
            Some(path) => write_json(path, figures),
            None => Ok(()),
        }
    }
}

/// Options of benchmarks of training steps.
#[derive(Args)]
#[group(skip)]
pub(super) struct StepOptions {
    /// Take this many steps in a round
    #[arg(long, value_name = "STEPS", default_value_t = 10)]
    round_steps: usize,
    /// Take this many steps before the first round
    #[arg(long, value_name = "STEPS", default_value_t = 5)]
    warm: usize,
    #[command(flatten)]
    pub(super) measure: MeasureOptions,
}

impl StepOptions {
    /// Returns the number of steps and rounds to measure.
    pub(super) fn effort(&self) -> Effort {
        Effort {
            warm: self.warm,
            rounds: self.measure.rounds,
            steps: self.round_steps,
        }
    }
}

/// Notes how long the start of the steps of `recipe` took.
pub(super) fn note_start(recipe: &str, cost: &Cost) {
    note!(
        "{recipe}: built in {:.1} s, warmed up in {:.1} s, most of it to compile kernels",
        cost.built,
        cost.warmed
    );
}
