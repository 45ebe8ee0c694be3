//! `cargo xtask test`: set-up, every test, the summed counts.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::counts::Reader;
use crate::{setup, workspace};

/// The features that the tests are built with: all backends in one binary.
pub const FEATURES: &str = "cpu,cuda";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Test optimised builds
    #[arg(long)]
    release: bool,
    /// Test only this package (may be given several times; default: all of the workspace)
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
    /// Arguments for the test binaries, for example a part of a test's name
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Runs the tests; prints the counts last.
///
/// Fails when a test failed, when something did not compile, and when no test ran at all.
pub fn run(args: &Args) -> Result<ExitCode> {
    setup::run(&setup::Args::default())?;

    let mut command = workspace::cargo();
    command.args(["test", "--no-fail-fast"]);
    if args.package.is_empty() {
        command.arg("--workspace");
    }
    for package in &args.package {
        command.args(["--package", package]);
    }
    // xtask alone has no such features, and cargo refuses features that no selected package has.
    if args.package.iter().any(|package| package != "xtask") || args.package.is_empty() {
        command.args(["--features", FEATURES]);
    }
    if args.release {
        command.arg("--release");
    }
    command.args(["--", "--show-output"]).args(&args.rest);
    command.stdout(Stdio::piped());

    println!("$ {}", workspace::shown(&command));
    let mut child = command.spawn().context("cannot start cargo")?;
    let mut reader = Reader::new();
    let mut output = BufReader::new(child.stdout.take().context("cargo's output is not piped")?);
    let mut bytes = Vec::new();
    // Whole bytes, not `lines()`: a test may print what is not UTF-8.
    while output.read_until(b'\n', &mut bytes)? > 0 {
        io::stdout().write_all(&bytes)?;
        reader.line(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']));
        bytes.clear();
    }
    let status = child.wait()?;
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
    if !status.success() && counts.failed == 0 {
        println!("FAILED: cargo test ended with {status}");
    }
    println!("{counts}");
    let good = status.success() && counts.failed == 0 && !nothing_ran;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
