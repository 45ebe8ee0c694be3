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
    /// Train a language model in NVFP4 and in high precision, and report the gap
    ///
    /// Without options it trains a model that takes minutes on two CPU cores, on the Rust sources
    /// that cargo has downloaded.
    Train(Box<train::Train>),
    /// Train with several recipes and seeds as one study that can be resumed, and report
    Study(study::Study),
    /// Measure a training step with each recipe: bytes a second, memory, and time by kernel
    ///
    /// With --telemetry-every N it also measures a step that telemetry samples, and what sampling
    /// one step in N adds to the mean step.
    Cost(Box<cost::CostOfSteps>),
    /// Compare a device's undocumented behaviour with the reference
    Oracle(oracle::Oracle),
    /// Generate text with a trained model
    Sample(sample::Sample),
    /// List the devices, what they support, and which kernel each operation takes
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
