//! `cargo xtask test`: set-up, every test, the summed counts.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::counts::{Outcome, Reader};
use crate::skips::{self, Expected};
use crate::workspace::FEATURES;
use crate::{interop, setup, workspace};

/// Tells the tests not to leave anything out.
const FULL: &str = "NVFP4_TEST_FULL";

/// The package with Burn's layers.
const LAYERS: &str = "burn-nvfp4";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Test optimised builds
    #[arg(long)]
    release: bool,
    /// Test only this package; may be given several times [default: the workspace]
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
    /// Also compile the kernels for the architectures that CI leaves out; sets NVFP4_TEST_FULL=1
    #[arg(long)]
    full: bool,
    /// Instead, check that transformers, compressed-tensors, ModelOpt and PEFT read what nvfp4
    /// writes as nvfp4 does; installs them into the target folder (5.5 GB)
    #[arg(long, conflicts_with_all = ["package", "full", "release", "rest"])]
    interop: bool,
    /// Pass these arguments to the test binaries, for example a part of a test's name
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Runs the tests; prints skipped tests and their number by reason, and the counts last.
///
/// Fails when a test failed, when something did not compile, when no test ran at all, and when a
/// test skipped itself against the policy of [`skips`].
pub fn run(args: &Args) -> Result<ExitCode> {
    setup::run(&setup::Args::default())?;
    if args.interop {
        interop::run()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut reader = Reader::new();
    let mut broken = Vec::new();
    for (mut command, options) in commands(args)? {
        if args.release {
            command.arg("--release");
        }
        if args.full {
            command.env(FULL, "1");
        }
        command
            .args(["--", "--show-output"])
            .args(options)
            .args(&args.rest);
        let status = read(&mut command, &mut reader)?;
        if !status.success() {
            broken.push(format!(
                "`{}` ended with {status}",
                workspace::shown(&command)
            ));
        }
    }
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

/// Returns what is wrong with the tests that did not run. Any run takes listed reasons alone; those
/// of whole packages on the default devices run every test somewhere, and the numbers are those of
/// the whole workspace.
fn against_policy(args: &Args, outcome: &Outcome) -> Result<Vec<String>> {
    let expected = Expected::read()?;
    let mut problems = expected.unlisted(&outcome.reasons);
    let is_default_device = env::var_os("NVFP4_TEST_DEVICE").is_none();
    if is_default_device && args.rest.is_empty() {
        let nowhere = outcome.nowhere.iter();
        problems.extend(nowhere.map(|test| format!("{test}: runs on no device")));
        if args.package.is_empty() && !args.full {
            problems.extend(expected.changed(&outcome.reasons, skips::is_installed));
        }
    }
    Ok(problems)
}

/// What is run, one after another, with options for the test binaries.
fn commands(args: &Args) -> Result<Vec<(Command, Vec<&'static str>)>> {
    let test = || {
        let mut command = workspace::cargo();
        command.args(["test", "--no-fail-fast"]);
        command
    };
    let mut all = test();
    select_packages(&mut all, &args.package)?;
    let mut commands = vec![(all, Vec::new())];
    if args.package.is_empty() || args.package.iter().any(|package| package == LAYERS) {
        // Without this variable the layers run on Flex. The second run has the tests that are small
        // enough for CubeCL's CPU runtime.
        let mut cube = test();
        select_packages(&mut cube, &args.package)?;
        cube.args(["--test", "burn_nvfp4"]);
        cube.env("NVFP4_TEST_DEVICE", "cpu");
        // Those of the decorator are on that runtime in the first run.
        let skip = ["--skip=decorate::", "--skip=decorate_limits::"];
        commands.push((cube, skip.to_vec()));
    }
    Ok(commands)
}

/// Runs `command`, whose output goes to `reader` too.
fn read(command: &mut Command, reader: &mut Reader) -> Result<ExitStatus> {
    command.stdout(Stdio::piped());
    println!("$ {}", workspace::shown(command));
    let mut child = command.spawn().context("cannot start cargo")?;
    let mut output = BufReader::new(child.stdout.take().context("cargo's output is not piped")?);
    let mut bytes = Vec::new();
    // Whole bytes, not `lines()`: a test may print what is not UTF-8.
    while output.read_until(b'\n', &mut bytes)? > 0 {
        io::stdout().write_all(&bytes)?;
        reader.line(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']));
        bytes.clear();
    }
    Ok(child.wait()?)
}

/// The packages to test, or all of them, with the features that they have.
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
