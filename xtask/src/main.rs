//! `cargo xtask`: set-up, tests and checks of the workspace.
//!
//! | command | what it does |
//! | --- | --- |
//! | `cargo xtask setup` | makes sure of LLVM for CubeCL and of the CUDA compiler for the Blackwell test |
//! | `cargo xtask test` | `setup`, then every test of the workspace, then the summed counts |
//! | `cargo xtask test --train` | the tests with burn-train, which build Burn once more (5 minutes) |
//! | `cargo xtask sanitize` | the tests of the kernels under compute-sanitizer, on a GPU |
//! | `cargo xtask licenses` | checks licences and origin of all dependencies against `deny.toml` |
//! | `cargo xtask results` | writes the tables of the performance page from `results/*.json` |
//! | `cargo xtask ci` | everything that a change must pass, with the time each stage took |

mod ci;
mod counts;
mod licenses;
mod results;
mod sanitize;
mod setup;
mod spdx;
mod test;
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
    /// Make sure that the features `cpu` and `cuda` can be built (LLVM) and that kernels can be
    /// compiled for Blackwell without a GPU (NVRTC and disassembler)
    Setup(setup::Args),
    /// Set up, then run every test: oracle, Flex, kernels on CubeCL's CPU runtime, Blackwell
    /// compilation; the last line is `N passed, N failed, N skipped`
    Test(test::Args),
    /// Run the tests of the kernels on a GPU under compute-sanitizer (memcheck, racecheck, initcheck);
    /// prints a table of errors, and fails if there is one
    Sanitize(sanitize::Args),
    /// Check the licence and the origin of every dependency against deny.toml
    Licenses,
    /// Write the tables of the performance page (docs/src/performance.md) from results/*.json
    Results(results::Args),
    /// Run everything that a change must pass
    Ci,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Test(args) => test::run(&args),
        Command::Sanitize(args) => sanitize::run(&args),
        Command::Licenses => licenses::run().map(|()| ExitCode::SUCCESS),
        Command::Results(args) => results::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Ci => ci::run(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
