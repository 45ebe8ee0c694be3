//! `cargo xtask bench`: training and inference on a GPU beside PyTorch, in calls of ten minutes.
//!
//! `bench/plan.json` lists the jobs of each part. `gpu` packs the programs for a machine with a GPU,
//! where `bench/run.py` runs a part. `collect` records its figures in `results/`, from which
//! `cargo xtask results` makes the tables of README and book.

mod collect;
mod part;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::programs::{self, recreate};
use crate::{runner, workspace};

/// Jobs of each part.
const PLAN: &str = include_str!("../../bench/plan.json");
/// Script that runs on the GPU machine.
const SCRIPT: &str = include_str!("../../bench/run.py");
/// PyTorch's scripts, relative to the root.
const PYTORCH: [&str; 2] = ["benches/pytorch_step.py", "benches/pytorch_decode.py"];
/// The program, and the benchmarks of this workspace.
const PROGRAMS: [&str; 4] = ["nvfp4", "layers", "kernels", "gemm"];

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Sub,
}

#[derive(clap::Subcommand)]
enum Sub {
    /// Pack programs and scripts for a GPU machine, and print the command of each part
    Gpu(GpuArgs),
    /// Record the figures of a machine in results/
    Collect {
        /// Folder with the parts' files, such as step.json
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// Options of `cargo xtask bench gpu`.
#[derive(clap::Args)]
struct GpuArgs {
    /// Write the upload folder here [default: bench in the target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Pack the programs of this folder, built from --commit, instead of building them with the
    /// feature cuda
    #[arg(long, value_name = "DIR", requires = "commit")]
    programs: Option<PathBuf>,
    /// Record this commit for --programs
    #[arg(long, value_name = "HASH", requires = "programs")]
    commit: Option<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// Returns an error if something does not compile, or a file is invalid or cannot be written.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Sub::Gpu(args) => gpu(args),
        Sub::Collect { folder } => collect::record(folder, &workspace::root()),
    }
}

fn gpu(args: &GpuArgs) -> Result<()> {
    let out = match &args.out {
        Some(folder) => folder.clone(),
        None => workspace::target_folder()?.join("bench"),
    };
    let (folder, commit) = match (&args.programs, &args.commit) {
        (Some(folder), Some(commit)) => (folder.clone(), commit.clone()),
        _ => built(&out.with_extension("programs"))?,
    };
    let programs = PROGRAMS.map(|name| folder.join(name));
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    programs::pack(&programs, &out.join("programs.tar.xz"))?;
    for script in PYTORCH {
        let from = workspace::root().join(script);
        let name = from.file_name().context("a script has a name")?;
        fs::copy(&from, out.join(name)).with_context(|| script)?;
    }
    let mut plan: Value = serde_json::from_str(PLAN).context("bench/plan.json")?;
    plan["commit"] = json!(commit);
    fs::write(out.join("plan.json"), serde_json::to_string_pretty(&plan)?)?;
    fs::write(out.join("run.py"), SCRIPT)?;

    println!("commands on the machine with the GPU, of at most ten minutes each:");
    for part in plan["parts"].as_array().context("no parts")? {
        let name = part["name"].as_str().context("a part has no name")?;
        println!("  python3 {}/run.py {name} --out $OUT", out.display());
    }
    println!("`cargo xtask bench collect DIR` records what they write to $OUT");
    Ok(())
}

/// Builds the programs from a commit into `folder`; returns the folder and the commit.
fn built(folder: &Path) -> Result<(PathBuf, String)> {
    let commit = programs::commit()?;
    let mut build = workspace::cargo();
    build.args(["build", "--release", "--bins", "--benches", "--features"]);
    build.arg("nvfp4-cli/cuda,burn-nvfp4/cuda,nvfp4-kernels/cuda");
    for package in ["nvfp4-cli", "burn-nvfp4", "nvfp4-kernels"] {
        build.args(["--package", package]);
    }
    let executables = runner::executables(&mut build)?;
    recreate(folder)?;
    for name in PROGRAMS {
        let path = executables.iter().find(|(found, _)| found == name);
        let (_, path) = path.with_context(|| format!("cargo made no program {name}"))?;
        fs::copy(path, folder.join(name)).with_context(|| path.display().to_string())?;
    }
    ensure!(
        commit == programs::commit()?,
        "another commit was checked out during the build"
    );
    Ok((folder.to_owned(), commit))
}
