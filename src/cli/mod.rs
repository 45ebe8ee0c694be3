//! The command line.

mod code_paths;
mod cost;
mod device;
mod doctor;
mod options;
mod oracle;
mod plot;
mod progress;
mod sample;
mod study;
mod train;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// NVFP4 training and inference for Burn models.
#[derive(Parser)]
#[command(name = "nvfp4", version, propagate_version = true)]
pub(crate) struct Command {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Train a language model on text, in NVFP4 and in high precision, and report the gap.
    ///
    /// Without options: a model that trains in minutes on two CPU cores, on the Rust sources that
    /// cargo has downloaded.
    Train(Box<train::Train>),
    /// Train with several recipes and seeds as one experiment that can be gone on with, and report.
    Study(study::Study),
    /// Measure what training steps cost with each recipe: bytes a second, memory, and which kernels take
    /// the time.
    ///
    /// With --telemetry-every N also what a step costs that telemetry samples, and what sampling one step in
    /// N adds to the mean step.
    Cost(Box<cost::CostOfSteps>),
    /// Ask a device what it does where documents do not say, beside what the oracle says.
    Oracle(oracle::Oracle),
    /// Generate text with a trained model.
    Sample(sample::Sample),
    /// Say which devices there are, what they support, and which code path operations take.
    Doctor(doctor::Doctor),
}

/// How this program was called, as the first word of a command to paste into a shell.
fn program() -> String {
    let name = std::env::args_os().next();
    quoted(&name.map_or_else(
        || "nvfp4".into(),
        |name| name.to_string_lossy().into_owned(),
    ))
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/\\._-:+=,@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        match self.task {
            Task::Train(train) => train.run(),
            Task::Study(study) => study.run(),
            Task::Cost(cost) => cost.run(),
            Task::Oracle(oracle) => oracle.run().map(|()| ExitCode::SUCCESS),
            Task::Sample(sample) => sample.run().map(|()| ExitCode::SUCCESS),
            Task::Doctor(doctor) => doctor.run().map(|()| ExitCode::SUCCESS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_of_a_shell_are_quoted_where_they_must_be() {
        for (text, expected) in [
            ("target/release/nvfp4", "target/release/nvfp4"),
            ("my runs/tiny-1", "'my runs/tiny-1'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }
}
