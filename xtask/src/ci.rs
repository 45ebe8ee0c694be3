//! `cargo xtask ci`: runs all checks that a change must pass.
//!
//! All stages run even if one fails, so that one run reports everything. The table of stages is
//! also written to `ci.json` in the target folder. The last line is that of `cargo xtask test`.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::counts::is_counts_line;
use crate::workspace::{self, FEATURES};
use crate::{book, fuzz, imports, packages, results, setup, tools};

/// Total seconds for all fuzz targets.
const FUZZ_SECONDS: u64 = 10;

/// Optimizer steps of the training run whose speed is printed.
const TRAINING_STEPS: &str = "10";

/// Runs all stages and prints the time of each.
pub fn run() -> Result<ExitCode> {
    let machine = Machine::find()?;
    println!("{machine}");
    let mut counts = None;
    let mut stages: Vec<Stage> = Vec::new();
    let mut stage = |name: &'static str, work: &mut dyn FnMut() -> Result<()>| {
        println!("\n=== {name}");
        let start = Instant::now();
        let outcome = work();
        if let Err(error) = &outcome {
            println!("{name} failed: {error:#}");
        }
        let took = start.elapsed();
        println!(
            "=== {name}: {} ({})",
            verdict(outcome.is_ok()),
            shown(took.as_secs_f64())
        );
        stages.push(Stage {
            name,
            good: outcome.is_ok(),
            seconds: took.as_secs_f64(),
        });
    };

    stage("format", &mut || cargo(&["fmt", "--all", "--check"]));
    stage("imports", &mut imports::run);
    stage("set-up", &mut || setup::run(&setup::Args::default()));
    // A separate stage, so that the time of the next one is that of the tests.
    stage("test build", &mut || {
        cargo(&["test", "--no-run", "--workspace", "--features", FEATURES])
    });
    stage("tests", &mut || tests(&mut counts));
    stage("fuzz", &mut || fuzz::run(&fuzz::Args::all(FUZZ_SECONDS)));
    stage("speed of training", &mut training_speed);
    // The packages' own check compiles the default features.
    stage("clippy", &mut clippy);
    stage("documentation", &mut documentation);
    stage("packages", &mut packages::run);
    stage("licences", &mut licences);
    stage("book", &mut || {
        results::run(&results::Args { check: true })?;
        book::run()
    });

    report(&machine, &stages)?;
    if let Some(counts) = counts {
        println!("{counts}");
    }
    let good = stages.iter().all(|stage| stage.good);
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[derive(Serialize)]
struct Stage {
    name: &'static str,
    good: bool,
    seconds: f64,
}

/// Machine and initial state of a CI run.
#[derive(Serialize)]
struct Machine {
    /// Model name of the processor.
    processor: String,
    cores: usize,
    /// True if the target folder held no compiled dependencies.
    cold: bool,
}

impl Machine {
    fn find() -> Result<Self> {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = text.lines().find(|line| line.starts_with("model name"));
        let name = name.and_then(|line| line.split_once(':'));
        // `cargo xtask` has already compiled its own few dependencies.
        let compiled = workspace::target_folder()?.join("debug/deps");
        let is_dependency = |entry: io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("libcubecl"))
        };
        let cold = !fs::read_dir(compiled).is_ok_and(|mut entries| entries.any(is_dependency));
        Ok(Self {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            cold,
        })
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            processor,
            cores,
            cold,
        } = self;
        let state = if *cold { "cold" } else { "warm" };
        write!(f, "{processor}, {cores} cores, {state} target folder")
    }
}

/// Prints the table of stages and writes it to `ci.json` in the target folder.
fn report(machine: &Machine, stages: &[Stage]) -> Result<()> {
    #[derive(Serialize)]
    struct Report<'a> {
        machine: &'a Machine,
        stages: &'a [Stage],
        seconds: f64,
    }
    println!("\n{machine}");
    for Stage {
        name,
        good,
        seconds,
    } in stages
    {
        println!("{:>11}  {:<6}  {name}", shown(*seconds), verdict(*good));
    }
    let seconds = stages.iter().map(|stage| stage.seconds).sum();
    println!("{:>11}  together", shown(seconds));
    let report = Report {
        machine,
        stages,
        seconds,
    };
    let file = workspace::target_folder()?.join("ci.json");
    fs::write(&file, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| format!("cannot write {}", file.display()))
}

fn verdict(good: bool) -> &'static str {
    if good { "ok" } else { "FAILED" }
}

fn shown(seconds: f64) -> String {
    let seconds = Duration::from_secs_f64(seconds).as_secs();
    format!("{} min {:02} s", seconds / 60, seconds % 60)
}

fn cargo(arguments: &[&str]) -> Result<()> {
    workspace::spawn(workspace::cargo().args(arguments))
}

/// Checks all targets, then the libraries and programs without the feature `proof` of the kernels,
/// which only their own tests enable. A benchmark makes cargo select the features of development
/// dependencies in the second run, too: both have the same dependencies, which are checked once.
fn clippy() -> Result<()> {
    // Twice, because code that only `proof` uses is unused in users' builds, which the second run sees.
    let as_users_build = "--exclude nvfp4-kernels --lib --bins --bench layers";
    for targets in ["--all-targets", as_users_build] {
        let mut command = workspace::cargo();
        command
            .args(["clippy", "--workspace"])
            .args(targets.split(' '));
        command.args(["--features", FEATURES, "--", "-D", "warnings"]);
        workspace::spawn(&mut command)?;
    }
    Ok(())
}

/// Builds the documentation of the libraries. The examples add the features of development
/// dependencies, with which clippy has checked all dependencies.
fn documentation() -> Result<()> {
    let mut command = workspace::cargo();
    command.args(["doc", "--no-deps", "--workspace", "--lib", "--examples"]);
    command.args(["--features", FEATURES]);
    workspace::spawn(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Runs the main workload, `nvfp4 train`, in the test build. Its last lines report the tokens per
/// second.
fn training_speed() -> Result<()> {
    let out = workspace::target_folder()?.join("ci-train");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    // The tests of the command have built it; a build of its own would have other features.
    let mut command = Command::new(workspace::target_folder()?.join("debug/nvfp4"));
    command
        .args(["train", "--device", "flex", "--preset", "tiny"])
        .args(["--no-compare", "--steps", TRAINING_STEPS])
        .arg("--out")
        .arg(&out);
    workspace::spawn(&mut command)
}

/// Runs the test command as a user types it, and keeps its last line.
fn tests(counts: &mut Option<String>) -> Result<()> {
    let mut command = workspace::cargo();
    command.args(["xtask", "test"]).stdout(Stdio::piped());
    println!("$ {}", workspace::shown(&command));
    let mut child = command.spawn().context("cannot start cargo")?;
    let mut output = BufReader::new(child.stdout.take().context("cargo's output is not piped")?);
    let mut bytes = Vec::new();
    while output.read_until(b'\n', &mut bytes)? > 0 {
        io::stdout().write_all(&bytes)?;
        let line = String::from_utf8_lossy(&bytes);
        if is_counts_line(line.trim_end()) {
            *counts = Some(line.trim_end().to_owned());
        }
        bytes.clear();
    }
    let status = child.wait()?;
    let shown = workspace::shown(&command);
    ensure!(status.success(), "`{shown}` ended with {status}");
    ensure!(counts.is_some(), "`{shown}` printed no counts");
    Ok(())
}

/// Checks licences and origin of every dependency, for all features and all targets of `deny.toml`.
pub fn licences() -> Result<()> {
    let mut command = Command::new(tools::cargo_deny()?);
    command.args(["check", "licenses", "bans", "sources"]);
    workspace::spawn(command.current_dir(workspace::root()))
}
