//! `nvfp4 launch`.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_parallel::launch::{Launch, Show};

use crate::device::cuda_count;

/// Ranks have so long to end by themselves once one has failed.
const GRACE: Duration = Duration::from_secs(12);

#[derive(Args)]
pub(crate) struct LaunchRanks {
    /// Start this many ranks, each with a GPU [default: the GPUs of this machine]
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    gpus: Option<usize>,
    /// Show the output of all ranks, with the rank before each line [default: that of rank 0]
    #[arg(long)]
    all_output: bool,
    /// The command of nvfp4 that each rank runs, after `--`, with its options
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchRanks {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let processes = match self.gpus {
            Some(ranks) => ranks,
            None => {
                let count = cuda_count();
                ensure!(
                    count > 0,
                    "this machine has no GPU to count: give --gpus RANKS, which may be on the CPU"
                );
                count
            }
        };
        let program = std::env::current_exe().context("the path of this program")?;
        let command = [program.into_os_string()].into_iter().chain(self.command);
        let ended = Launch {
            processes,
            command: command.collect(),
            show: match self.all_output {
                true => Show::All,
                false => Show::First,
            },
            grace: GRACE,
        }
        .run()?;
        if let Some(problem) = ended.problem {
            eprintln!("error: {problem}");
        }
        Ok(ExitCode::from(ended.code))
    }
}
