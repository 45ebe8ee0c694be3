//! `cargo xtask soak`: launches many multi-rank runs, kills ranks in some of them, and compares the
//! results.

mod output;
mod process;
mod report;

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace;
use output::{METRICS, RunOutput, rows_in};
use process::{End, Launched};
use report::{KilledRun, Outcome, Report, UndisturbedRun};

/// Seconds within which all processes must end after a rank was killed.
const END_LIMIT: u64 = 30;
/// Options of `train` that the soak sets itself.
const OWN_OPTIONS: [&str; 6] = [
    "--out",
    "--resume",
    "--steps",
    "--log-every",
    "--eval-every",
    "--checkpoint-every",
];
const NO_COMPARE: &str = "--no-compare";

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub struct Args {
    /// Start this many ranks, each with one GPU
    #[arg(
        long,
        visible_alias = "ranks",
        value_name = "RANKS",
        default_value_t = 2
    )]
    gpus: usize,
    /// Launch this many undisturbed runs; all runs are compared with the first one
    #[arg(long, value_name = "N", default_value_t = 100)]
    runs: usize,
    /// Kill a rank in this many further runs, at a step drawn from --seed, and resume them
    #[arg(long, value_name = "N", default_value_t = 20)]
    kills: usize,
    /// Train for this many optimizer steps: those of each run
    #[arg(long, value_name = "STEPS", default_value_t = 50)]
    steps: u64,
    /// Count a launch that takes longer than this many seconds as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    limit: u64,
    /// Seed the random numbers: ranks and times of the kills
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Write the output to this folder: runs, logs and soak.json. It must hold no soak; folders of
    /// runs that match the first are removed
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run this program [default: nvfp4, built with optimizations and the features cpu and cuda]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// `train` and its options, after `--`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Launches the runs, kills ranks, and writes and prints the report. The exit code is that of
/// [`Report::code`].
///
/// # Errors
/// Returns an error if an option is not valid, if the first run fails, or if too few kills come
/// before the end of their runs.
pub fn run(args: &Args) -> Result<ExitCode> {
    args.check()?;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("out {} cannot be made", args.out.display()))?;
    let text = |part: &OsString| part.to_string_lossy().into_owned();
    let report = Report {
        command: args.command.iter().map(text).collect(),
        gpus: args.gpus,
        steps: args.steps,
        seed: args.seed,
        limit: args.limit,
        end_limit: END_LIMIT,
        runs: Vec::new(),
        kills: Vec::new(),
    };
    let mut session = Session {
        options: args,
        program: args.program()?,
        first: None,
        report,
    };
    for number in 0..args.runs {
        session.undisturbed(number)?;
    }
    // A kill that comes after the end of the run is tried again.
    for attempt in 0..2 * args.kills {
        if session.report.kills.len() < args.kills {
            session.killed(attempt)?;
        }
    }
    let kills = session.report.kills.len();
    ensure!(
        kills == args.kills,
        "{kills} of {} kills came before the end of their runs: give more --steps",
        args.kills
    );
    let lines = session.report.lines();
    lines.iter().for_each(|line| println!("{line}"));
    println!("wrote {}", args.report_path().display());
    Ok(ExitCode::from(session.report.code()))
}

impl Args {
    /// Returns the program to launch; builds it if none is given.
    fn program(&self) -> Result<PathBuf> {
        if let Some(program) = &self.program {
            return Ok(program.clone());
        }
        let mut build = workspace::cargo();
        build.args(["build", "--release", "--package", "nvfp4-cli"]);
        workspace::spawn(build.args(["--features", workspace::FEATURES]))?;
        Ok(workspace::target_folder()?.join("release/nvfp4"))
    }

    fn report_path(&self) -> PathBuf {
        self.out.join("soak.json")
    }

    fn check(&self) -> Result<()> {
        ensure!(self.gpus > 0, "gpus is 0, but it must be at least 1");
        ensure!(
            self.runs > 0,
            "runs is 0, but it must be at least 1: the others are compared with the first run"
        );
        ensure!(
            self.steps > 1,
            "steps is {}, but it must be at least 2",
            self.steps
        );
        ensure!(
            self.command.first().is_some_and(|name| name == "train"),
            "the command is {:?}, but it must be train",
            self.command.first().map(|name| name.to_string_lossy())
        );
        for given in &self.command {
            let given = given.to_string_lossy();
            let name = given.split('=').next().unwrap_or_default();
            ensure!(
                !OWN_OPTIONS.contains(&name),
                "the command has {name}, which the soak sets itself: leave it out"
            );
        }
        ensure!(
            !self.report_path().exists(),
            "out {} already holds a soak: choose another folder",
            self.out.display()
        );
        Ok(())
    }

    /// Returns the number of steps between two rows of metrics, which time the kill.
    fn log_every(&self) -> u64 {
        (self.steps / 10).max(1)
    }

    /// Returns the command that trains into `folder`.
    fn train(&self, folder: &Path) -> Vec<OsString> {
        let numbers = [
            ("--steps", self.steps),
            ("--log-every", self.log_every()),
            ("--eval-every", self.steps),
            ("--checkpoint-every", (self.steps / 5).max(1)),
        ];
        let mut command = self.command.clone();
        for (name, number) in numbers {
            command.extend([name.into(), number.to_string().into()]);
        }
        if !command.iter().any(|given| given == NO_COMPARE) {
            command.push(NO_COMPARE.into());
        }
        command.extend(["--out".into(), folder.into()]);
        command
    }

    /// Draws one of `choices` for kill number `attempt`.
    fn draw(&self, what: &str, attempt: usize, choices: u64) -> u64 {
        // This hasher mixes well, which FNV does not, and is deterministic within one binary.
        let mut hasher = DefaultHasher::new();
        (what, self.seed, attempt).hash(&mut hasher);
        hasher.finish() % choices
    }
}

/// A soak in progress.
struct Session<'a> {
    options: &'a Args,
    /// Program that launches the ranks.
    program: PathBuf,
    /// Result of the first run, once it has finished.
    first: Option<RunOutput>,
    report: Report,
}

impl Session<'_> {
    fn launch(&self, command: &[OsString], log: &Path) -> Result<Launched> {
        Launched::start(&self.program, self.options.gpus, command, log)
    }

    fn limit(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.options.limit)
    }

    /// Runs without a kill.
    fn undisturbed(&mut self, number: usize) -> Result<()> {
        let folder = self.options.out.join(format!("run-{number}"));
        let command = self.options.train(&folder);
        let run = self.finish(&command, &folder)?;
        self.say(&format!("run {number}"), &run);
        if self.first.is_none() {
            ensure!(
                run.outcome == Outcome::Same,
                "the first run ended so: {:?}; its log is {}",
                run.outcome,
                log_of(&folder).display()
            );
        }
        self.report.runs.push(run);
        self.write()
    }

    /// Launches `command`, which trains into `folder`, and waits for its end.
    fn finish(&mut self, command: &[OsString], folder: &Path) -> Result<UndisturbedRun> {
        let began = Instant::now();
        let mut launched = self.launch(command, &log_of(folder))?;
        let end = launched.wait(self.limit())?;
        let seconds = began.elapsed().as_secs_f64();
        let outcome = match end {
            End::Hung => Outcome::Hung,
            End::Exited(status) if status.success() => self.compare(folder)?,
            End::Exited(status) => Outcome::Failed(format!("{status}: {}", launched.errors())),
        };
        let folder = match outcome {
            Outcome::Same => {
                fs::remove_dir_all(folder)?;
                fs::remove_file(log_of(folder))?;
                None
            }
            _ => Some(folder.into()),
        };
        Ok(UndisturbedRun {
            outcome,
            seconds,
            folder,
        })
    }

    /// Compares the result in `folder` with that of the first run. The first call records the
    /// result.
    fn compare(&mut self, folder: &Path) -> Result<Outcome> {
        let left = RunOutput::of(folder)?;
        let differences = match &self.first {
            Some(first) => first.differences(&left),
            None => {
                self.first = Some(left);
                Vec::new()
            }
        };
        Ok(match differences.is_empty() {
            true => Outcome::Same,
            false => Outcome::Differs(differences),
        })
    }

    /// Runs, kills a rank, and resumes the run.
    fn killed(&mut self, attempt: usize) -> Result<()> {
        let options = self.options;
        let first = self
            .first
            .as_ref()
            .context("a run comes before the kills")?;
        let folder = options.out.join(format!("kill-{attempt}"));
        let rank = options.draw("rank", attempt, options.gpus as u64) as usize;
        let rows = options.steps.div_ceil(options.log_every());
        let after = options.draw("step", attempt, rows) * options.log_every();
        let share = options.draw("time", attempt, 1000) as f64 / 1000.0;
        let pause = Duration::from_secs_f64(share * first.interval);
        let metrics = folder.join(&first.recipe).join(METRICS);
        let command = options.train(&folder);
        let log = log_of(&folder);
        let mut launched = self.launch(&command, &log)?;
        let deadline = self.limit();
        let last_step = || {
            let rows = rows_in(&metrics).unwrap_or_default();
            rows.last().map(|row| row.step)
        };
        while last_step().is_none_or(|step| step < after) {
            if launched.status()?.is_some() {
                break;
            }
            if Instant::now() > deadline {
                bail!(
                    "a run did not come to step {after} in {} seconds: {}",
                    options.limit,
                    log.display()
                );
            }
            thread::sleep(Duration::from_millis(2));
        }
        thread::sleep(pause);
        let Some(pid) = launched.rank(rank)? else {
            let End::Exited(status) = launched.wait(deadline)? else {
                bail!("a run did not end: {}", log.display());
            };
            ensure!(
                status.success(),
                "a run failed before its rank was killed ({status}): {}",
                log.display()
            );
            println!("kill {attempt}: the run had ended");
            return remove(&folder);
        };
        let step = last_step().unwrap_or_default();
        process::kill(pid);
        let began = Instant::now();
        let end = launched.wait(began + Duration::from_secs(END_LIMIT))?;
        let end_seconds = began.elapsed().as_secs_f64();
        let (late, code) = match end {
            End::Hung => (true, None),
            End::Exited(status) => (false, status.code()),
        };
        if code == Some(0) {
            println!("kill {attempt}: the run had ended");
            return remove(&folder);
        }
        let problem = launched.errors();
        println!(
            "kill {attempt}: rank {rank} after step {step}, all ended {} after {end_seconds:.1} s",
            if late { "not in time" } else { "in time" }
        );
        let resumed = match late {
            true => None,
            false => {
                let command = ["train".into(), "--resume".into(), folder.clone().into()];
                let run = self.finish(&command, &folder)?;
                self.say(&format!("kill {attempt}, resumed"), &run);
                Some(run)
            }
        };
        self.report.kills.push(KilledRun {
            rank,
            step,
            end_seconds,
            late,
            code,
            problem,
            resumed,
        });
        self.write()
    }

    fn say(&self, name: &str, run: &UndisturbedRun) {
        let outcome = match &run.outcome {
            Outcome::Same => "the bytes of the first run".into(),
            Outcome::Differs(files) => format!("other bytes in {}", files.join(", ")),
            Outcome::Failed(said) => format!("failed: {said}"),
            Outcome::Hung => "hung".into(),
        };
        println!("{name}: {outcome}, {:.1} s", run.seconds);
    }

    /// Called after each run, so that an interrupted soak keeps its findings.
    fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.report)? + "\n";
        let path = self.options.report_path();
        fs::write(&path, text).with_context(|| path.display().to_string())
    }
}

/// Returns the log file of the launches that train into `folder`.
fn log_of(folder: &Path) -> PathBuf {
    folder.with_extension("log")
}

fn remove(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder)?;
    fs::remove_file(log_of(folder))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use nvfp4_test_support::Scratch;
    use serde_json::{Value, json};

    use super::*;

    /// Stand-in for `nvfp4 launch` on two ranks. Run 1 leaves other bytes than all others.
    #[cfg(target_os = "linux")]
    const PROGRAM: &str = r#"#!/bin/sh
for word; do
    case $before in
    --out | --resume) folder=$word ;;
    esac
    before=$word
done
recipe="$folder/f32"
mkdir -p "$recipe/checkpoint-30"
echo "step,tokens,train_loss,valid_loss,lr,tokens_per_s" > "$recipe/metrics.csv"
for step in 3 6 9 12 15 18 21 24 27 30; do
    echo "$step,${step}00,4.0,,1e-3,9000.0" >> "$recipe/metrics.csv"
done
for rank in 0 1; do
    RANK=$rank setsid sleep 0.4 &
    ranks="$ranks $!"
done
for rank in $ranks; do
    wait "$rank" || { code=$?; echo "error: a rank failed"; exit $code; }
done
case $folder in
*run-1) echo other ;;
*) echo weights ;;
esac > "$recipe/checkpoint-30/model.bpk"
"#;

    #[test]
    #[cfg(target_os = "linux")]
    fn runs_are_compared_and_ranks_are_killed() {
        let folder = Scratch::new("soak");
        let program = folder.join("nvfp4");
        fs::write(&program, PROGRAM).unwrap();
        crate::setup::staging::make_executable(&program).unwrap();
        let args = |command: &str| Args {
            gpus: 2,
            runs: 3,
            kills: 2,
            steps: 30,
            limit: 60,
            seed: 1,
            out: folder.join("out"),
            program: Some(program.clone()),
            command: command.split(' ').map(OsString::from).collect(),
        };
        for (command, part) in [("study", "study"), ("train --steps 4", "--steps")] {
            let error = run(&args(command)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        run(&args("train --fsdp")).unwrap();
        let report = fs::read(folder.join("out/soak.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        let outcomes: Vec<&Value> = (0..3).map(|run| &report["runs"][run]["outcome"]).collect();
        assert_eq!(
            json!(outcomes),
            json!(["same", {"differs": ["model.bpk"]}, "same"])
        );
        for kill in report["kills"].as_array().unwrap() {
            assert_eq!((&kill["late"], &kill["code"]), (&json!(false), &json!(137)));
            assert_eq!(kill["problem"], "a rank failed");
            assert_eq!(kill["resumed"]["outcome"], "same");
        }
        assert_eq!(report["kills"].as_array().unwrap().len(), 2);
        // Only the folders of runs that differ are kept.
        let kept = fs::read_dir(folder.join("out")).unwrap();
        let mut kept: Vec<_> = kept.map(|file| file.unwrap().file_name()).collect();
        kept.sort();
        assert_eq!(kept, ["run-1", "run-1.log", "soak.json"]);
        let again = run(&args("train")).unwrap_err().to_string();
        assert!(again.contains("already holds a soak"), "{again}");
    }

    /// Different seeds choose different ranks and steps, and over many seeds all of them.
    #[test]
    fn kills_are_drawn_by_the_seed() {
        let draws = |seed| {
            let soak = Args {
                gpus: 4,
                runs: 1,
                kills: 40,
                steps: 50,
                limit: 600,
                seed,
                out: PathBuf::new(),
                program: None,
                command: Vec::new(),
            };
            let draws =
                (0..40).map(|attempt| ["rank", "step"].map(|what| soak.draw(what, attempt, 4)));
            draws.collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        for what in 0..2 {
            let ranks: Vec<u64> = draws(1).iter().map(|draw| draw[what]).collect();
            assert!((0..4).all(|rank| ranks.contains(&rank)), "{ranks:?}");
            assert_ne!(ranks[..4], ranks[4..8]);
        }
    }
}
