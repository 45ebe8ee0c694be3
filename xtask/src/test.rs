//! `cargo xtask test`: set-up, every test, the summed counts.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::counts::Reader;
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

/// Runs the tests; prints the counts last.
///
/// Fails when a test failed, when something did not compile, and when no test ran at all.
pub fn run(args: &Args) -> Result<ExitCode> {
    setup::run(&setup::Args::default())?;
    if args.interop {
        interop::run()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut reader = Reader::new();
    let mut broken = Vec::new();
    for (mut command, options) in commands(args) {
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
    let (counts, skips, failures) = reader.finish();

    println!();
    for skip in &skips {
        println!("{skip}");
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    let nothing_ran = counts.passed + counts.failed == 0;
    if nothing_ran {
        println!("FAILED: no test ran");
    }
    if counts.failed == 0 {
        for command in &broken {
            println!("FAILED: {command}");
        }
    }
    println!("{counts}");
    let good = broken.is_empty() && counts.failed == 0 && !nothing_ran;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What is run, one after another, with options for the test binaries.
fn commands(args: &Args) -> Vec<(Command, Vec<&'static str>)> {
    let test = || {
        let mut command = workspace::cargo();
        command.args(["test", "--no-fail-fast"]);
        command
    };
    let mut all = test();
    select_packages(&mut all, &args.package);
    let mut commands = vec![(all, Vec::new())];
    if args.package.is_empty() || args.package.iter().any(|package| package == LAYERS) {
        // Without this variable the layers run on Flex. The second run has the tests that are small
        // enough for CubeCL's CPU runtime.
        let mut cube = test();
        select_packages(&mut cube, &args.package);
        cube.args(["--test", "burn_nvfp4"]);
        cube.env("NVFP4_TEST_DEVICE", "cpu");
        // Those of the decorator are on that runtime in the first run.
        let skip = ["--skip=decorate::", "--skip=decorate_limits::"];
        commands.push((cube, skip.to_vec()));
    }
    commands
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
fn select_packages(command: &mut Command, packages: &[String]) {
    if packages.is_empty() {
        command.arg("--workspace");
    }
    for package in packages {
        command.args(["--package", package]);
    }
    // xtask alone has no such features, and cargo refuses features that no selected package has.
    if packages.iter().any(|package| package != "xtask") || packages.is_empty() {
        command.args(["--features", FEATURES]);
    }
}
