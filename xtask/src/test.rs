//! `cargo xtask test`: runs setup and every test, and sums the counts.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::counts::{Outcome, Reader};
use crate::runner::{Slot, Times, Timing};
use crate::skips::{self, Expected};
use crate::workspace::FEATURES;
use crate::{interop, runner, setup, workspace};

/// Environment variable that makes the tests leave nothing out.
const FULL: &str = "NVFP4_TEST_FULL";

/// Environment variable with the device for tests of kernels and layers.
const DEVICE: &str = "NVFP4_TEST_DEVICE";

/// Package with Burn's layers, and name of their test binary.
const LAYERS: &str = "burn-nvfp4";
const LAYERS_SUITE: &str = "burn_nvfp4";

/// Tests of that binary that are not run again on CubeCL's CPU runtime, by the start of their names.
const NOT_ON_CPU_RUNTIME: [&str; 5] = [
    // Select it themselves.
    "decorate::",
    "decorate_limits::",
    "ops::linear::plan::",
    // Exchanges between ranks in the memory of the host, the same on both devices. `moe` and
    // `grouped` run the kernels of experts there.
    "parallel::experts::",
    "parallel::reduce_dtype::",
];

/// Number of longest processes to print.
const SHOWN_TIMINGS: usize = 15;

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Test optimized builds
    #[arg(long)]
    release: bool,
    /// Test only this package; may be given several times [default: the workspace]
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
    /// Also compile the kernels for the architectures that CI leaves out; sets NVFP4_TEST_FULL=1
    #[arg(long)]
    full: bool,
    /// Instead, check that transformers, compressed-tensors, ModelOpt and PEFT read the output of
    /// nvfp4 like nvfp4 does; installs them into the target folder (5.5 GB)
    #[arg(long, conflicts_with_all = ["package", "full", "release", "rest"])]
    interop: bool,
    /// Pass these arguments to the test binaries, for example a part of a test's name
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Runs the tests; prints the skipped tests, their number by reason, and finally the counts.
///
/// Fails if a test failed, compilation failed, no test ran at all, or a test skipped itself against
/// the policy of [`skips`].
pub fn run(args: &Args) -> Result<ExitCode> {
    setup::run(&setup::Args::default())?;
    if args.interop {
        interop::run()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut reader = Reader::new();
    let mut broken = if args.rest.is_empty() {
        run_all(args, &mut reader)?
    } else {
        run_selected(args, &mut reader)?
    };
    let outcome = reader.finish();
    let counts = outcome.counts;
    let mut problems = outcome.failures.clone();
    if counts.passed + counts.failed == 0 {
        problems.push("no test ran".to_owned());
    }
    if counts.failed == 0 {
        problems.append(&mut broken);
    }
    problems.append(&mut against_policy(args, &outcome)?);

    println!();
    for line in &outcome.printed {
        println!("{line}");
    }
    for skip in &outcome.skips {
        println!("{skip}");
    }
    println!("{:>6} left to the run on another device", outcome.elsewhere);
    print!("{}", skips::table(&outcome.reasons));
    for problem in &problems {
        println!("FAILED: {problem}");
    }
    println!("{counts}");
    Ok(if problems.is_empty() && counts.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns violations of the policy for tests that did not run. Every run accepts only listed
/// reasons. Runs of whole packages on the default devices must run every test somewhere. The
/// numbers apply to the whole workspace.
fn against_policy(args: &Args, outcome: &Outcome) -> Result<Vec<String>> {
    let expected = Expected::read()?;
    let mut problems = expected.unlisted(&outcome.reasons);
    let is_default_device = env::var_os(DEVICE).is_none();
    if is_default_device && args.rest.is_empty() {
        let nowhere = outcome.nowhere.iter();
        problems.extend(nowhere.map(|test| format!("{test}: runs on no device")));
        if args.package.is_empty() && !args.full {
            let (grown, fewer) = expected.changed(&outcome.reasons, skips::is_installed);
            problems.extend(grown);
            for note in fewer {
                println!("note: {note}");
            }
        }
    }
    Ok(problems)
}

/// Runs every test of the chosen packages, several binaries at a time, then the examples of the
/// documentation. Returns the commands that failed.
fn run_all(args: &Args, reader: &mut Reader) -> Result<Vec<String>> {
    let mut build = workspace::cargo();
    build.args(["test", "--no-run"]);
    select_packages(&mut build, &args.package)?;
    if args.release {
        build.arg("--release");
    }
    let mut build = runner::build(&mut build)?;
    if args.full {
        build.set(FULL, "1");
    }
    let mut jobs = build.jobs(None, |_| true, |_| true)?;
    // The layers run on Flex by default. Modules whose code differs on CubeCL's CPU runtime, and
    // that are small enough for it, also run there.
    if env::var_os(DEVICE).is_none() {
        jobs.extend(build.jobs(
            Some("cpu"),
            |binary| binary.package == LAYERS && binary.target == LAYERS_SUITE,
            |test| !NOT_ON_CPU_RUNTIME.iter().any(|it| test.starts_with(it)),
        )?);
    }
    let times = Times::of(workspace::target_folder()?.join("test-times.json"));
    build.longest_first(&mut jobs, &times);
    let timings = build.run(&jobs, &slots(args.full), reader)?;
    times.write(&timings)?;
    let total: Duration = timings.iter().map(|timing| timing.took).sum();
    println!(
        "\nThe longest of {} processes, {:.0} s in all:",
        timings.len(),
        total.as_secs_f64()
    );
    for Timing { name, tests, took } in timings.iter().take(SHOWN_TIMINGS) {
        println!("{:>8.1} s  {tests:>4} tests  {name}", took.as_secs_f64());
    }

    let mut examples = workspace::cargo();
    examples.args(["test", "--no-fail-fast", "--doc"]);
    if !select_libraries(&mut examples, &args.package)? {
        return Ok(Vec::new());
    }
    if args.release {
        examples.arg("--release");
    }
    examples.args(["--", "--show-output"]);
    let status = read(&mut examples, reader)?;
    Ok(broken(&examples, status).into_iter().collect())
}

/// Runs the tests that the user's arguments select, like `cargo test`. Returns the commands that
/// failed.
fn run_selected(args: &Args, reader: &mut Reader) -> Result<Vec<String>> {
    let mut command = workspace::cargo();
    command.args(["test", "--no-fail-fast"]);
    select_packages(&mut command, &args.package)?;
    if args.release {
        command.arg("--release");
    }
    if args.full {
        command.env(FULL, "1");
    }
    command.args(["--", "--show-output"]).args(&args.rest);
    let status = read(&mut command, reader)?;
    Ok(broken(&command, status).into_iter().collect())
}

/// Returns a message about a command that failed.
fn broken(command: &Command, status: ExitStatus) -> Option<String> {
    (!status.success()).then(|| format!("`{}` ended with {status}", workspace::shown(command)))
}

/// Returns one slot on a GPU, otherwise one per core. Runs with `--full` leave the choice of cores to
/// the system, so that kernels of CubeCL's CPU runtime run on several workers there.
fn slots(full: bool) -> Vec<Slot> {
    let mut slots = Slot::of_cores();
    match env::var(DEVICE).as_deref() {
        Ok("cuda") => slots.truncate(1),
        _ if !full => return slots,
        _ => {}
    }
    slots.fill(Slot::Anywhere);
    slots
}

/// Runs `command` and copies its output to `reader`.
fn read(command: &mut Command, reader: &mut Reader) -> Result<ExitStatus> {
    command.stdout(Stdio::piped());
    println!("$ {}", workspace::shown(command));
    let mut child = command.spawn().context("cannot start cargo")?;
    let mut output = BufReader::new(child.stdout.take().context("cargo's output is not piped")?);
    let mut bytes = Vec::new();
    // Reads bytes instead of `lines()`, because a test may print invalid UTF-8.
    while output.read_until(b'\n', &mut bytes)? > 0 {
        io::stdout().write_all(&bytes)?;
        reader.line(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']));
        bytes.clear();
    }
    Ok(child.wait()?)
}

/// Selects the packages to test, or all of them, with their features.
fn select_packages(command: &mut Command, packages: &[String]) -> Result<()> {
    if packages.is_empty() {
        command.args(["--workspace", "--features", FEATURES]);
        return Ok(());
    }
    for package in packages {
        command.args(["--package", package]);
    }
    // cargo refuses features that no selected package has.
    for member in workspace::members()? {
        if packages.contains(&member.name) && !member.features.is_empty() {
            command.args(["--features", &member.features]);
        }
    }
    Ok(())
}

/// Selects the chosen packages that have a library; returns false if none has.
fn select_libraries(command: &mut Command, packages: &[String]) -> Result<bool> {
    if packages.is_empty() {
        select_packages(command, packages)?;
        return Ok(true);
    }
    let members = workspace::members()?;
    let libraries: Vec<String> = (packages.iter())
        .filter(|name| {
            members
                .iter()
                .any(|member| member.has_library && member.name == **name)
        })
        .cloned()
        .collect();
    if libraries.is_empty() {
        return Ok(false);
    }
    select_packages(command, &libraries)?;
    Ok(true)
}
