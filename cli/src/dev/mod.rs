//! `nvfp4 dev`: commands for developers of recipes and kernels.

mod cost;
mod decode_cost;
mod finetune_cost;
mod measure;
mod name;
mod oracle;
mod study;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::ranks;
pub(crate) use name::NAME;

#[derive(Args)]
pub(crate) struct Dev {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Benchmark a training step per recipe: throughput, memory and kernel times
    ///
    /// With --telemetry-every N, also measure steps that sample telemetry, and the mean overhead of
    /// sampling one step in N.
    Cost(Box<cost::CostOfSteps>),
    /// Benchmark prefill and decoding with packed weights: time, kernels, share of the memory
    /// bandwidth
    DecodeCost(Box<decode_cost::CostOfDecoding>),
    /// Benchmark a step of finetuning with random weights: time, memory and kernels
    FinetuneCost(Box<finetune_cost::CostOfFinetuning>),
    /// Compare undocumented device behaviour with the CPU oracle
    Oracle(oracle::Oracle),
    /// Train with several recipes and seeds and report the losses; resumes an unfinished study
    Study(study::Study),
}

impl Dev {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let done = |()| ExitCode::SUCCESS;
        match self.task {
            Task::Cost(cost) => alone("cost", || cost.run().map(done)),
            Task::DecodeCost(cost) => alone("decode-cost", || cost.run().map(done)),
            Task::FinetuneCost(cost) => alone("finetune-cost", || cost.run().map(done)),
            Task::Oracle(oracle) => alone("oracle", || oracle.run().map(done)),
            Task::Study(study) => alone("study", || study.run()),
        }
    }
}

/// Runs the command `name` of the group, which runs in one process.
///
/// # Errors
/// Returns an error if a launcher has started several processes, or the error of `run`.
fn alone(name: &str, run: impl FnOnce() -> Result<ExitCode>) -> Result<ExitCode> {
    ranks::refuse(&format!("{NAME} {name}")).and_then(|()| run())
}
