//! `nvfp4 launch`.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser};
use nvfp4_parallel::launch::{Launch, Show};

use crate::device::cuda_count;
use crate::options::line::parsed;
use crate::terminal::{self, is_quiet};

/// Time that the other ranks have to exit after one has failed.
const GRACE: Duration = Duration::from_secs(12);

#[derive(Args)]
pub(crate) struct LaunchRanks {
    /// Start this many ranks, each with one GPU [default: all GPUs of this machine]
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    gpus: Option<usize>,
    /// Show the output of all ranks, each line prefixed with its rank [default: output of rank 0
    /// only]
    #[arg(long)]
    all_output: bool,
    /// The nvfp4 command that each rank runs, after `--`, with its options
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Returns an error, before any rank starts, for a command line that each rank would refuse. `C` is
/// the parser of command lines.
fn check<C: Parser>(command: &[OsString]) -> Result<()> {
    let name = OsString::from("nvfp4");
    match parsed::<C>([name].into_iter().chain(command.iter().cloned()).collect()) {
        Ok(_) => Ok(()),
        Err(error) => match error.downcast::<clap::Error>() {
            // A request for help needs one process only.
            Ok(error) if !error.use_stderr() => error.exit(),
            Ok(error) => bail!("the command of the ranks is refused: {}", error.render()),
            Err(error) => Err(error),
        },
    }
}

/// Returns the command line of each rank: `program` with the arguments `command`, which are quiet
/// if the launcher is.
fn of_rank(program: OsString, quiet: bool, command: Vec<OsString>) -> Vec<OsString> {
    let quiet = quiet.then(|| OsString::from("--quiet"));
    [program].into_iter().chain(quiet).chain(command).collect()
}

impl LaunchRanks {
    /// Launches the ranks. `C` is the parser of their command lines.
    pub(crate) fn run<C: Parser>(self) -> Result<ExitCode> {
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
        check::<C>(&self.command)?;
        let program = std::env::current_exe().context("the path of this program")?;
        let command = of_rank(program.into(), is_quiet(), self.command);
        let ended = Launch {
            processes,
            command,
            show: match self.all_output {
                true => Show::All,
                false => Show::First,
            },
            grace: GRACE,
        }
        .run()?;
        if let Some(problem) = ended.problem {
            terminal::error(problem);
        }
        Ok(ExitCode::from(ended.code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_quiet_launcher_are_quiet() {
        let of_rank = |quiet| of_rank("nvfp4".into(), quiet, vec!["train".into()]);
        assert_eq!(of_rank(true), ["nvfp4", "--quiet", "train"]);
        assert_eq!(of_rank(false), ["nvfp4", "train"]);
    }

    #[test]
    fn commands_that_ranks_would_refuse_start_none() {
        let found = |command: &[&str]| {
            let command: Vec<OsString> = command.iter().map(OsString::from).collect();
            check::<crate::command::Command>(&command).map_err(|error| error.to_string())
        };
        found(&["train", "--steps", "10"]).unwrap();
        for (command, says) in [
            (&["train", "--steps", "1", "--steps", "2"][..], "--steps"),
            (&["train", "--stepz", "1"], "--stepz"),
            (&["finetune"], "MODEL"),
            (&["trian"], "trian"),
        ] {
            let error = found(command).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
