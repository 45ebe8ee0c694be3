//! `cargo xtask ladder`: training runs with comparable losses, in short leases of a GPU.
//!
//! `ladder/plan.json` lists the runs in order; `results/ladder` has one file per finished run.
//! `next` packs the files for the next runs into folders and prints the commands for the GPU
//! machine, where `ladder/run.py` trains. `collect` records the results.

mod corpus;
mod pack;
mod plan;
pub mod record;
mod schedule;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{programs, workspace};
use corpus::Corpus;
use plan::{Plan, Run};
use record::{Record, Status};

/// Folder of the recorded runs, relative to the root.
pub const FOLDER: &str = "results/ladder";

/// Bytes per unit of `--limit`.
const MIB: u64 = 1 << 20;

/// Options of `cargo xtask ladder`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Sub,
    /// Use the plan in this file instead of ladder/plan.json
    #[arg(long, value_name = "FILE", global = true)]
    plan: Option<PathBuf>,
    /// Read and write recorded runs in this folder [default: results/ladder]
    #[arg(long, value_name = "DIR", global = true)]
    results: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Sub {
    /// Print the runs of the plan, with the losses of recorded ones and the expected minutes of the
    /// others
    Status,
    /// Pack the next runs for a GPU machine, and print the commands to run there
    Next(NextArgs),
    /// Check and record the runs in a machine's results.json
    Collect(CollectArgs),
}

/// Options of `cargo xtask ladder next`.
#[derive(clap::Args)]
struct NextArgs {
    /// Train on the corpus in this folder [default: the output folder of `cargo xtask corpus`]
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Write the upload folders to this folder [default: ladder in the target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Select runs expected to end within this many minutes, but at least one
    #[arg(long, value_name = "MINUTES", default_value_t = 25.0)]
    minutes: f64,
    /// Select at most this many runs
    #[arg(long, value_name = "N", default_value_t = 100)]
    runs: usize,
    /// Limit the size of an upload folder to this many MiB
    #[arg(long, value_name = "MIB", default_value_t = 54)]
    limit: u64,
    /// End each command after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 570)]
    seconds: u64,
    /// Pack this program, built from --commit, instead of building one with the feature cuda
    #[arg(long, value_name = "FILE", requires = "commit")]
    binary: Option<PathBuf>,
    /// Record this commit for --binary
    #[arg(long, value_name = "HASH", requires = "binary")]
    commit: Option<String>,
}

/// Options of `cargo xtask ladder collect`.
#[derive(clap::Args)]
struct CollectArgs {
    /// Folder with results.json
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Runs the subcommand.
///
/// # Errors
/// Returns an error if the plan, a record, the corpus or the results of a machine are invalid.
pub fn run(args: &Args) -> Result<()> {
    let text = match &args.plan {
        None => plan::PLAN.to_owned(),
        Some(path) => fs::read_to_string(path).with_context(|| path.display().to_string())?,
    };
    let plan = Plan::parse(&text)?;
    let results = match &args.results {
        Some(folder) => folder.clone(),
        None => workspace::root().join(FOLDER),
    };
    match &args.command {
        Sub::Status => status(&plan, &record::read(&results)?),
        Sub::Next(args) => next(args, &plan, &record::read(&results)?),
        Sub::Collect(args) => collect(args, &plan, &results),
    }
}

fn status(plan: &Plan, records: &[Record]) -> Result<()> {
    let (mut done, mut minutes) = (0, 0.0);
    let runs = plan.runs()?;
    for run in &runs {
        let record = records.iter().find(|record| record.name == run.name);
        let text = match record {
            None => {
                let expected = schedule::seconds(run, records) / 60.0;
                minutes += expected;
                format!("{expected:.0} minutes expected")
            }
            Some(record) => {
                done += 1;
                let loss = record.loss().map(|loss| format!("loss {loss:.4}"));
                let gap = gap(record, records).map(|gap| format!(", {gap:+.2} % to bf16"));
                let loss = loss.unwrap_or_else(|| format!("{:?}", Status::Diverged).to_lowercase());
                let minutes = record.seconds / 60.0;
                format!("{loss}{}, {minutes:.0} minutes", gap.unwrap_or_default())
            }
        };
        println!("{:<40} {text}", run.name);
    }
    println!(
        "{done} of {} runs are recorded; the others take about {minutes:.0} minutes",
        runs.len()
    );
    Ok(())
}

/// Returns the increase of a run's loss over that of bf16 with the same shape, tokens and seed, in
/// percent.
pub fn gap(record: &Record, records: &[Record]) -> Option<f64> {
    let is_baseline = |other: &&Record| {
        other.recipe == "bf16"
            && other.shape == record.shape
            && other.tokens == record.tokens
            && other.seed == record.seed
    };
    let baseline = records.iter().find(is_baseline)?.loss()?;
    (record.recipe != "bf16").then_some((record.loss()? / baseline - 1.0) * 100.0)
}

fn next(args: &NextArgs, plan: &Plan, records: &[Record]) -> Result<()> {
    let corpus = match &args.corpus {
        Some(folder) => folder.clone(),
        None => crate::corpus::default_folder()?,
    };
    let corpus = Corpus::read(&corpus)?;
    let runs = schedule::next(plan, records, &corpus, args.minutes, args.runs)?;
    if runs.is_empty() {
        println!("all runs of the plan are recorded");
        return Ok(());
    }
    let out = match &args.out {
        Some(folder) => folder.clone(),
        None => workspace::target_folder()?.join("ladder"),
    };
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let (binary, commit) = match (&args.binary, &args.commit) {
        (Some(binary), Some(commit)) => (binary.clone(), commit.clone()),
        _ => built()?,
    };
    let queue = runs.iter().map(|run| corpus.queued(run, &commit));
    let queue: Vec<_> = queue.collect::<Result<_>>()?;
    let shards = runs.iter().map(|run| run.shards).max().unwrap_or_default();
    let archive = out.join("nvfp4.tar.xz");
    programs::pack(&[binary], &archive)?;
    let mut files = vec![archive];
    files.extend(corpus.files(shards));
    let folders = pack::folders(&files, &queue, args.limit * MIB, &out)?;
    report(&runs, records, &folders, args.seconds);
    Ok(())
}

/// Builds the program from a commit; returns its path and the commit.
fn built() -> Result<(PathBuf, String)> {
    let commit = programs::commit()?;
    let mut build = workspace::cargo();
    build.args(["build", "--release", "--package", "nvfp4-cli"]);
    workspace::spawn(build.args(["--features", "cuda"]))?;
    Ok((workspace::target_folder()?.join("release/nvfp4"), commit))
}

fn report(runs: &[Run], records: &[Record], folders: &[PathBuf], seconds: u64) {
    println!("runs, with the minutes that they are expected to take:");
    for run in runs {
        println!(
            "  {:<40} {:.0}",
            run.name,
            schedule::seconds(run, records) / 60.0
        );
    }
    println!("commands on the machine with the GPU, one for each upload, of {seconds} s at most:");
    let command = |folder: &Path| {
        let folder = folder.display();
        format!(
            "python3 {folder}/{} {folder} --limit {seconds} --out $OUT",
            pack::SCRIPT_FILE
        )
    };
    for folder in folders {
        let size: u64 = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()))
            .sum();
        let again = match folder.ends_with(pack::QUEUE_FOLDER) {
            true => ", as often as runs are left",
            false => "",
        };
        println!(
            "  {}   # {:.1} MiB{again}",
            command(folder),
            size as f64 / MIB as f64
        );
    }
    println!(
        "the queue goes on where it was while the disk of the machine lasts; results.json in $OUT has \
         all runs that have ended: `cargo xtask ladder collect DIR` records them"
    );
}

fn collect(args: &CollectArgs, plan: &Plan, results: &Path) -> Result<()> {
    let path = args.folder.join("results.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let collected = record::collect(&text, plan, results)?;
    for name in &collected.new {
        println!("recorded {name}");
    }
    for (name, error) in &collected.crashed {
        println!("not recorded: {name} crashed\n{error}");
    }
    println!(
        "{} recorded in {}, {} known before, {} crashed",
        collected.new.len(),
        results.display(),
        collected.known.len(),
        collected.crashed.len()
    );
    Ok(())
}
