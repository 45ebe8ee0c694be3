//! `cargo xtask ci`: everything that a change must pass.
//!
//! All stages run even when one fails, so that one run tells everything. The last line is the one
//! of `cargo xtask test`.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::counts::is_counts_line;
use crate::workspace::{self, FEATURES};
use crate::{book, fuzz, imports, packages, results, setup, tools, unified};

/// Seconds that the fuzz targets have together.
const FUZZ_SECONDS: u64 = 20;

/// Runs all stages; prints how long each took.
pub fn run() -> Result<ExitCode> {
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
        println!("=== {name}: {} ({})", verdict(outcome.is_ok()), shown(took));
        stages.push(Stage {
            name,
            good: outcome.is_ok(),
            took,
        });
    };

    stage("format", &mut || cargo(&["fmt", "--all", "--check"]));
    stage("circles of imports", &mut imports::run);
    stage("set-up", &mut || setup::run(&setup::Args::default()));
    // Of its own, so that the time of the tests is theirs.
    stage("test build", &mut || {
        cargo(&["test", "--no-run", "--workspace", "--features", FEATURES])
    });
    stage("tests", &mut || tests(&mut counts));
    stage("fuzz", &mut || fuzz::run(&fuzz::Args::all(FUZZ_SECONDS)));
    stage("unified features", &mut unified::run);
    stage("clippy", &mut || clippy(&["--features", FEATURES]));
    stage("documentation", &mut || {
        let mut command = workspace::cargo();
        command.args(["doc", "--no-deps", "--workspace", "--features", FEATURES]);
        workspace::spawn(command.env("RUSTDOCFLAGS", "-D warnings"))
    });
    stage("clippy, default features", &mut || clippy(&[]));
    stage("packages", &mut packages::run);
    stage("licences", &mut licences);
    stage("book", &mut || {
        results::run(&results::Args { check: true })?;
        book::run()
    });

    println!();
    for Stage { name, good, took } in &stages {
        println!("{:>11}  {:<6}  {name}", shown(*took), verdict(*good));
    }
    println!(
        "{:>11}  together",
        shown(stages.iter().map(|stage| stage.took).sum())
    );
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

struct Stage {
    name: &'static str,
    good: bool,
    took: Duration,
}

fn verdict(good: bool) -> &'static str {
    if good { "ok" } else { "FAILED" }
}

fn shown(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{} min {:02} s", seconds / 60, seconds % 60)
}

fn cargo(arguments: &[&str]) -> Result<()> {
    workspace::spawn(workspace::cargo().args(arguments))
}

fn clippy(features: &[&str]) -> Result<()> {
    let mut command = workspace::cargo();
    command
        .args(["clippy", "--workspace", "--all-targets"])
        .args(features);
    workspace::spawn(command.args(["--", "-D", "warnings"]))
}

/// The test command, as a user types it; keeps its last line.
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

/// Licences and origin of every dependency, all features and all targets of `deny.toml`.
pub fn licences() -> Result<()> {
    let mut command = std::process::Command::new(tools::cargo_deny()?);
    command.args(["check", "licenses", "bans", "sources"]);
    workspace::spawn(command.current_dir(workspace::root()))
}
