//! `cargo xtask test`: set-up, every test, the summed counts.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::counts::Reader;
use crate::{setup, workspace};

/// The features that the tests are built with: all backends in one binary.
pub const FEATURES: &str = "cpu,cuda";

/// The tests with burn-train, from the root: see there why they are a workspace of their own.
pub const TRAIN_TESTS: &str = "train_tests/Cargo.toml";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Test optimised builds
    #[arg(long)]
    release: bool,
    /// Test only this package (may be given several times; default: all of the workspace)
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
    /// Test burn-train's loops in place of the workspace: `train_tests`, a workspace of its own
    #[arg(long, conflicts_with = "package")]
    train: bool,
    /// Arguments for the test binaries, for example a part of a test's name
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Runs the tests; prints the counts last.
///
/// Fails when a test failed, when something did not compile, and when no test ran at all.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut command = workspace::cargo();
    command.args(["test", "--no-fail-fast"]);
    if args.train {
        // On Flex, which needs none of what set-up brings.
        command.args(["--manifest-path", TRAIN_TESTS]);
    } else {
        setup::run(&setup::Args::default())?;
        select_packages(&mut command, &args.package);
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
