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
    /// Train a language model in NVFP4 and compare it with high precision or other recipes
    ///
    /// Without options it trains a small model on the Rust sources of crates that cargo has
    /// downloaded for this command, which takes minutes on two CPU cores.
    Train(Box<train::Train>),
    /// Start `train`, `finetune` or `pretrain` on several ranks, one process per GPU
    ///
    /// All ranks end when one fails. Example: `nvfp4 launch --gpus 2 -- train --fsdp`, or --tp 2
    /// instead of --fsdp. On a cluster, start the ranks with torchrun (--no-python), Slurm, MPI or
    /// Kubernetes, and set MASTER_ADDR, MASTER_PORT and NVFP4_TOKEN.
    Launch(launch::LaunchRanks),
    /// Launch many short multi-rank runs, kill ranks in some of them, and compare the results
    ///
    /// Example: `nvfp4 soak --gpus 2 --out soak -- train --preset 10m --fsdp`. Exit codes: 3 if a
    /// launch hung, 4 if one failed, 5 if the bytes of a run differ from those of the first, 0
    /// otherwise.
    Soak(soak::Soak),
    /// Train with several recipes and seeds and report the losses; resumes an unfinished study
    Study(study::Study),
    /// Benchmark a training step per recipe: throughput, memory and kernel times
    ///
    /// With --telemetry-every N, also measure steps that sample telemetry, and the mean overhead of
    /// sampling one step in N.
    Cost(Box<cost::CostOfSteps>),
    /// Benchmark prefill and decoding with packed weights: time, kernels, share of the memory
    /// bandwidth
    DecodeCost(Box<decode_cost::CostOfDecoding>),
    /// Compare undocumented device behaviour with the CPU oracle
    Oracle(oracle::Oracle),
    /// Fine-tune a Hugging Face model, in NVFP4 or high precision
    ///
    /// Trains all parameters by default. With --qat, trains for serving in NVFP4; with --distill,
    /// stays close to the original model.
    Finetune(Box<finetune::Finetune>),
    /// Pre-train a decoder from random weights
    Pretrain(Box<pretrain::Pretrain>),
    /// Tokenize texts into a file that `finetune` and `pretrain` read
    Tokenize(tokenize::Tokenize),
    /// Quantize a model to NVFP4 for vLLM, SGLang, TensorRT-LLM or transformers
    ///
    /// Works without a device, and holds one layer in memory at a time.
    Quantize(quantize::Quantize),
    /// List the tensors of a model, their quantization, and any problems
    Inspect(inspect::Inspect),
    /// Convert a quantized model between the ModelOpt and compressed-tensors dialects
    Convert(convert::Convert),
    /// Generate text with a Hugging Face model, or with one trained by `train`
    Generate(Box<generate::Generate>),
    /// Convert a GGUF file to a model folder
    Import(import::Import),
    /// Report perplexity on texts, and accuracy on multiple-choice questions
    Eval(eval::Eval),
    /// List devices, their element types, and the kernel selected for each operation
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
