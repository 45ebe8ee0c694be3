//! `cargo xtask ci`: everything that a change must pass.
//!
//! All stages run even when one fails, so that one run tells everything. The last line is the one
//! of `cargo xtask test`; that of the tests with burn-train stands before it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::counts::is_counts_line;
use crate::test::FEATURES;
use crate::workspace::TRAIN_TESTS;
use crate::{licenses, workspace};

/// The version that `deny.toml` was written for; another one on PATH is used as it is.
const CARGO_DENY: &str = "0.20.2";

/// Crates that bring a CubeCL runtime or LLVM into a build, by the start of their names.
const RUNTIMES: [&str; 6] = [
    "cubecl-cpu",
    "cubecl-cuda",
    "cubecl-llvm",
    "tracel-llvm",
    "llvm-sys",
    "pliron-llvm",
];

/// Runs all stages; prints how long each took.
pub fn run() -> Result<ExitCode> {
    let (mut counts, mut train_counts) = (None, None);
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

    stage("tests", &mut || tests(&["xtask", "test"], &mut counts));
    stage("tests with burn-train", &mut || {
        tests(&["xtask", "test", "--train"], &mut train_counts)
    });
    stage("format", &mut || {
        cargo(&["fmt", "--all", "--check"])?;
        cargo(&["fmt", "--manifest-path", TRAIN_TESTS, "--check"])
    });
    stage("clippy, all features", &mut || {
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--features",
            FEATURES,
            "--",
            "-D",
            "warnings",
        ])
    });
    stage("clippy, default features", &mut || {
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ])
    });
    // What the workspace's features leave out: that of burn-train.
    stage("clippy, with burn-train", &mut || {
        let clippy = |arguments: &[&str]| {
            let mut command = workspace::cargo();
            command.args(["clippy", "--manifest-path", TRAIN_TESTS]);
            spawn(command.args(arguments).args(["--", "-D", "warnings"]))
        };
        clippy(&["--tests"])?;
        clippy(&["--package", "burn-nvfp4"])
    });
    stage("documentation", &mut || {
        let doc = |arguments: &[&str]| {
            let mut command = workspace::cargo();
            command.args(["doc", "--no-deps"]).args(arguments);
            spawn(command.env("RUSTDOCFLAGS", "-D warnings"))
        };
        doc(&["--workspace", "--features", FEATURES])?;
        doc(&["--manifest-path", TRAIN_TESTS, "--package", "burn-nvfp4"])
    });
    stage("feature boundaries", &mut feature_boundaries);
    stage("licences", &mut licenses::run);
    stage("cargo deny", &mut cargo_deny);

    println!();
    for Stage { name, good, took } in &stages {
        println!("{:>11}  {:<6}  {name}", shown(*took), verdict(*good));
    }
    println!(
        "{:>11}  together",
        shown(stages.iter().map(|stage| stage.took).sum())
    );
    if let Some(counts) = train_counts {
        println!("with burn-train: {counts}");
    }
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
    spawn(workspace::cargo().args(arguments))
}

fn spawn(command: &mut Command) -> Result<()> {
    println!("$ {}", workspace::shown(command));
    let status = command
        .status()
        .with_context(|| workspace::shown(command))?;
    ensure!(
        status.success(),
        "`{}` ended with {status}",
        workspace::shown(command)
    );
    Ok(())
}

/// A test command, as a user types it; keeps its last line.
fn tests(arguments: &[&str], counts: &mut Option<String>) -> Result<()> {
    let mut command = workspace::cargo();
    command.args(arguments).stdout(Stdio::piped());
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

/// Formats and oracle build without CubeCL, and the default features without any LLVM.
fn feature_boundaries() -> Result<()> {
    cargo(&["check", "--package", "nvfp4-kernels"])?;
    absent("nvfp4-kernels", &["cubecl", "tracel-llvm", "llvm-sys"])?;
    absent("nvfp4", &RUNTIMES)
}

/// Fails when a package with its default features depends on a crate with one of these beginnings.
fn absent(package: &str, beginnings: &[&str]) -> Result<()> {
    let mut command = workspace::cargo();
    command.args([
        "tree",
        "--locked",
        "--package",
        package,
        "--edges",
        "normal,build",
    ]);
    command
        .args(["--prefix", "none", "--format", "{p}"])
        .stderr(Stdio::inherit());
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "`{}` failed",
        workspace::shown(&command)
    );
    let tree = String::from_utf8_lossy(&output.stdout);
    // An empty list would pass whatever the package depends on.
    ensure!(
        tree.starts_with(&format!("{package} v")),
        "cargo tree does not list {package}"
    );
    let found: Vec<&str> = tree
        .lines()
        .filter(|line| beginnings.iter().any(|b| line.starts_with(b)))
        .collect();
    if !found.is_empty() {
        bail!(
            "{package} with its default features depends on {}",
            found.join(", ")
        );
    }
    println!("{package}, default features: no {}", beginnings.join(", "));
    Ok(())
}

/// `cargo deny`, installed from crates.io into the target folder where it is not there yet.
///
/// Not being able to install it is no failure: the stage before has checked licences and origin.
fn cargo_deny() -> Result<()> {
    let check = |program: &OsStr| {
        for manifest in workspace::MANIFESTS {
            let mut command = Command::new(program);
            command.args(["--manifest-path", manifest, "--config", "deny.toml"]);
            command.args(["check", "licenses", "bans", "sources"]);
            spawn(command.current_dir(workspace::root()))?;
        }
        Ok(())
    };
    let on_path = Command::new("cargo-deny").arg("--version").output();
    if on_path.is_ok_and(|output| output.status.success()) {
        return check(OsStr::new("cargo-deny"));
    }

    let tools = target_folder()?.join("tools");
    let program = tools
        .join("bin")
        .join(format!("cargo-deny{}", std::env::consts::EXE_SUFFIX));
    if !program.exists() {
        let build: OsString = tools.join("build").into();
        let mut install = workspace::cargo();
        // Unoptimised: it reads two lists, and takes a third of the time to compile.
        install.args([
            "install",
            "--quiet",
            "--debug",
            "--locked",
            "cargo-deny",
            "--version",
            CARGO_DENY,
        ]);
        install
            .arg("--root")
            .arg(&tools)
            .arg("--target-dir")
            .arg(&build);
        let outcome = spawn(&mut install);
        // Hundreds of megabytes that nobody needs again; a rest would only cost disk space.
        let _ = fs::remove_dir_all(&build);
        if let Err(error) = outcome {
            println!("cargo-deny cannot be installed here ({error:#}): left out");
            return Ok(());
        }
    }
    check(program.as_os_str())
}

fn target_folder() -> Result<PathBuf> {
    let mut command = workspace::cargo();
    command.args(["metadata", "--locked", "--format-version", "1", "--no-deps"]);
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "`{}` failed",
        workspace::shown(&command)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    Ok(metadata["target_directory"]
        .as_str()
        .context("no target_directory")?
        .into())
}
