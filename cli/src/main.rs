//! The command `nvfp4`: train language models in NVFP4, generate text, and look at the machine.

mod command;
mod convert;
mod cost;
mod decode_cost;
mod device;
mod dispatch;
mod doctor;
mod eval;
mod finetune;
mod generate;
mod import;
mod inspect;
mod kernels;
mod launch;
mod layers;
mod options;
mod oracle;
mod plot;
mod pretrain;
mod progress;
mod quantize;
mod ranks;
mod shell;
mod soak;
mod study;
mod table;
mod tokenize;
mod train;
mod wrap;

use std::process::ExitCode;

use clap::Parser;

/// What is logged where `RUST_LOG` says nothing. CubeCL warns of every allocation that it tries
/// again, and of every kernel that the failed one takes with it: one error says all of it
/// (`nvfp4_lm::memory`).
const LOG_FILTER: &str = "warn,cubecl_server::command=error,cubecl_runtime::logging=error";

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(LOG_FILTER));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .finish();
    // Not by `init`, which would take the logger of the crate `log`: `kernels` counts by it.
    tracing::subscriber::set_global_default(subscriber).expect("a process has one `main`");
    nvfp4_lm::memory::mute_memory_panics();
    match command::Command::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
