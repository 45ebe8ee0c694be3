//! The command `nvfp4`: trains language models in NVFP4, generates text, and reports on the
//! machine.

mod adapter;
mod chat;
mod command;
mod convert;
mod dev;
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
mod manual;
mod merge;
mod options;
mod perplexity;
mod plot;
mod pretrain;
mod progress;
mod quantize;
mod ranks;
mod session;
mod shell;
mod table;
mod terminal;
mod tokenize;
mod train;
#[cfg(test)]
mod vocabulary;
mod work;
mod wrap;

use std::process::ExitCode;

use options::line;

/// Log filter used if `RUST_LOG` is not set. CubeCL warns about each allocation that it retries and
/// about each kernel that a failed allocation takes down; one error reports all of it
/// (`nvfp4_lm::memory`).
const LOG_FILTER: &str = "warn,cubecl_server::command=error,cubecl_runtime::logging=error";

fn main() -> ExitCode {
    end_with_the_pipe();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(LOG_FILTER));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(terminal::has_colors())
        .finish();
    // `init` would take the logger of the crate `log`, which `kernels` uses to count.
    tracing::subscriber::set_global_default(subscriber).expect("a process has one `main`");
    nvfp4_lm::memory::mute_memory_panics();
    let arguments: Vec<_> = std::env::args_os().collect();
    let parsed = line::parsed::<command::Command>(arguments.clone());
    match parsed.and_then(command::Command::run) {
        Ok(code) => code,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(refused) => refused.exit(),
            Err(error) => {
                let error = format!("{error:#}");
                terminal::error(line::dashed::<command::Command>(&error, &arguments));
                ExitCode::FAILURE
            }
        },
    }
}

/// Ends the process if the reader of its output does, as in `nvfp4 inspect DIR | head`. Rust ignores
/// the signal otherwise, and printing panics. Sockets are not affected: Rust writes to them without
/// signals.
fn end_with_the_pipe() {
    #[cfg(unix)]
    // SAFETY: no other thread runs yet, and no handler is replaced.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
