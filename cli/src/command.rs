//! The command line.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::{
    convert, dev, doctor, eval, finetune, generate, import, inspect, kernels, launch, manual,
    merge, pretrain, quantize, terminal, tokenize, train, work,
};

/// NVFP4 training for Burn models.
#[derive(Parser)]
#[command(name = "nvfp4", version, propagate_version = true)]
pub(crate) struct Command {
    /// Print no notes and no progress bars; print results, warnings and errors
    #[arg(short, long, global = true)]
    quiet: bool,
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
    /// Fine-tune a Hugging Face model, in NVFP4 or high precision
    ///
    /// Trains all parameters by default. With --qat, trains for serving in NVFP4; with --distill,
    /// stays close to the original model.
    Finetune(Box<finetune::Finetune>),
    /// Merge LoRA adapters into their model
    ///
    /// Writes the model in high precision, or with --export quantized to NVFP4. Works without a
    /// device, and holds the whole model in memory, in f32 where it is not packed.
    Merge(merge::Merge),
    /// Pre-train a decoder from random weights
    Pretrain(Box<pretrain::Pretrain>),
    /// Tokenize texts into a file that `finetune` and `pretrain` read
    Tokenize(tokenize::Tokenize),
    /// Quantize a model to NVFP4 for vLLM, SGLang, TensorRT-LLM or transformers
    ///
    /// Works without a GPU, and faster with one. Holds one layer in memory at a time; the whole model
    /// with --bits or --eval.
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
    /// Print a script that completes the commands and options of nvfp4 in a shell
    Completions(manual::Completions),
    /// Write the man pages of nvfp4 and its commands
    Man(manual::Man),
    /// Benchmark, check devices and run studies: commands for developers of recipes and kernels
    #[command(name = dev::NAME)]
    Dev(dev::Dev),
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        terminal::set_quiet(self.quiet);
        work::show();
        kernels::keep();
        match self.task {
            Task::Train(train) => train.run(),
            Task::Launch(launch) => launch.run::<Self>(),
            Task::Finetune(finetune) => finetune.run(),
            Task::Merge(merge) => merge.run().map(|()| ExitCode::SUCCESS),
            Task::Pretrain(pretrain) => pretrain.run(),
            Task::Tokenize(tokenize) => tokenize.run().map(|()| ExitCode::SUCCESS),
            Task::Quantize(quantize) => quantize.run().map(|()| ExitCode::SUCCESS),
            Task::Inspect(inspect) => inspect.run().map(|()| ExitCode::SUCCESS),
            Task::Convert(convert) => convert.run().map(|()| ExitCode::SUCCESS),
            Task::Generate(generate) => generate.run().map(|()| ExitCode::SUCCESS),
            Task::Import(import) => import.run().map(|()| ExitCode::SUCCESS),
            Task::Eval(eval) => eval.run().map(|()| ExitCode::SUCCESS),
            Task::Doctor(doctor) => doctor.run().map(|()| ExitCode::SUCCESS),
            Task::Completions(completions) => completions.run::<Self>().map(|()| ExitCode::SUCCESS),
            Task::Man(man) => man.run::<Self>().map(|()| ExitCode::SUCCESS),
            Task::Dev(dev) => dev.run(),
        }
    }
}
