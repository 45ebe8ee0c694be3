//! The command line.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::{
    convert, cost, decode_cost, doctor, eval, finetune, generate, import, inspect, kernels, launch,
    oracle, pretrain, quantize, ranks, soak, study, tokenize, train,
};

/// NVFP4 training for Burn models.
#[derive(Parser)]
#[command(name = "nvfp4", version, propagate_version = true)]
pub(crate) struct Command {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Train a language model in NVFP4, and compare it with high precision or other recipes
    ///
    /// Without options it trains a model that takes minutes on two CPU cores, on the Rust sources
    /// that cargo has downloaded.
    Train(Box<train::Train>),
    /// Start `train`, `finetune` or `pretrain` as several ranks, a process with a GPU each, and end
    /// all when one fails
    ///
    /// For example `nvfp4 launch --gpus 2 -- train --fsdp`, or with --tp 2 in place of --fsdp. On a
    /// cluster torchrun (--no-python), Slurm, MPI or Kubernetes start the ranks, with MASTER_ADDR,
    /// MASTER_PORT and NVFP4_TOKEN.
    Launch(launch::LaunchRanks),
    /// Launch many short runs of several ranks, kill ranks of some, and compare what all leave
    ///
    /// For example `nvfp4 soak --gpus 2 --out soak -- train --preset 10m --fsdp`. The exit code is
    /// 3 where a launch did not end in time, 4 where one failed, 5 where one ended with other bytes
    /// than the first, and 0 otherwise.
    Soak(soak::Soak),
    /// Train with several recipes and seeds, and report the losses; resumes an unfinished study
    Study(study::Study),
    /// Measure training steps with each recipe: bytes a second, memory, and time by kernel
    ///
    /// With --telemetry-every N it also measures steps that telemetry samples, and what sampling
    /// one step in N adds to the mean step.
    Cost(Box<cost::CostOfSteps>),
    /// Measure prefill and decoding with packed weights: time, kernels, the share of memory's speed
    DecodeCost(Box<decode_cost::CostOfDecoding>),
    /// Compare undocumented behaviour of a device with the CPU oracle
    Oracle(oracle::Oracle),
    /// Train a model in a Hugging Face folder further, in NVFP4 or high precision
    ///
    /// All of its parameters; to serve it in NVFP4, with --qat, and with --distill to stay close to
    /// what it was.
    Finetune(Box<finetune::Finetune>),
    /// Train a decoder of random weights on tokens
    Pretrain(Box<pretrain::Pretrain>),
    /// Write the tokens of texts to a file that `finetune` and `pretrain` read
    Tokenize(tokenize::Tokenize),
    /// Quantize a model folder to NVFP4, for vLLM, SGLang, TensorRT-LLM or transformers
    ///
    /// Layer by layer, without a device: memory holds one layer at a time.
    Quantize(quantize::Quantize),
    /// List the tensors of a model folder, how they are quantized, and what is wrong with them
    Inspect(inspect::Inspect),
    /// Convert a quantized model between the dialects of ModelOpt and compressed-tensors
    Convert(convert::Convert),
    /// Generate text with a model in a Hugging Face folder, or one that `train` has trained
    Generate(Box<generate::Generate>),
    /// Make a model folder of a GGUF file
    Import(import::Import),
    /// Give the perplexity of texts, and the share of right answers to questions
    Eval(eval::Eval),
    /// List the devices, their element types, and the kernel of each operation
    Doctor(doctor::Doctor),
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        kernels::keep();
        match self.task {
            Task::Train(train) => train.run(),
            Task::Launch(launch) => launch.run::<Self>(),
            Task::Soak(soak) => ranks::refuse("soak").and_then(|()| soak.run()),
            Task::Study(study) => ranks::refuse("study").and_then(|()| study.run()),
            Task::Cost(cost) => ranks::refuse("cost").and_then(|()| cost.run()),
            Task::DecodeCost(cost) => cost.run().map(|()| ExitCode::SUCCESS),
            Task::Oracle(oracle) => oracle.run().map(|()| ExitCode::SUCCESS),
            Task::Finetune(finetune) => finetune.run(),
            Task::Pretrain(pretrain) => pretrain.run(),
            Task::Tokenize(tokenize) => tokenize.run().map(|()| ExitCode::SUCCESS),
            Task::Quantize(quantize) => quantize.run().map(|()| ExitCode::SUCCESS),
            Task::Inspect(inspect) => inspect.run().map(|()| ExitCode::SUCCESS),
            Task::Convert(convert) => convert.run().map(|()| ExitCode::SUCCESS),
            Task::Generate(generate) => generate.run().map(|()| ExitCode::SUCCESS),
            Task::Import(import) => import.run().map(|()| ExitCode::SUCCESS),
            Task::Eval(eval) => eval.run().map(|()| ExitCode::SUCCESS),
            Task::Doctor(doctor) => doctor.run().map(|()| ExitCode::SUCCESS),
        }
    }
}
