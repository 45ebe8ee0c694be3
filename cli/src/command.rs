//! The command line.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::{cost, doctor, oracle, sample, study, train};

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
