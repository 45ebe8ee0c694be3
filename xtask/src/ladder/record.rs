//! Recorded runs: `results/ladder/NAME.json`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::{Plan, Run};

/// End of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The run completed its last step.
    Finished,
    /// The loss was not a number.
    Diverged,
    /// The run failed for a reason unrelated to its recipe; it is not recorded.
    Crashed,
}

/// A run, in the format of `ladder/run.py`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Name in the plan.
    pub name: String,
    /// Name of the shape.
    pub shape: String,
    /// Name of the recipe.
    pub recipe: String,
    /// Fields of the recipe; none for a preset.
    pub fields: Option<Value>,
    /// Seed of the weights, the row order, and the recipe.
    pub seed: u64,
    /// Number of training tokens.
    pub tokens: u64,
    /// Commit of the program.
    pub commit: String,
    /// Checksums of the tokenizer, of the shards and of the validation tokens.
    pub corpus: Value,
    /// Contents of the model's config.json.
    pub config: Value,
    /// Options of `nvfp4 pretrain`.
    pub options: Vec<String>,
    /// Names of the shards.
    pub data: Vec<String>,
    /// GPU name reported by the driver.
    pub gpu: Option<String>,
    /// Version of the GPU driver.
    pub driver: Option<String>,
    /// End of the run.
    pub status: Status,
    /// Tail of the log of a run that did not finish.
    pub error: Option<String>,
    /// End date: YYYY-MM-DD.
    pub date: String,
    /// Device name reported by `nvfp4`.
    pub device: String,
    /// Wall-clock seconds of all commands.
    pub seconds: f64,
    /// Wall-clock time and last logged step of each command.
    pub commands: Vec<Part>,
    /// Median over the rows of the run's metrics.
    pub tokens_per_s: Option<f64>,
    /// Steps, each with the mean loss since the previous one.
    pub train_loss: Vec<(u64, f64)>,
    /// Steps with their validation losses.
    pub valid_loss: Vec<(u64, f64)>,
}

/// One command of a run, which may take several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Last step in the metrics.
    pub step: u64,
}

impl Record {
    /// Returns the validation loss after the last step.
    pub fn loss(&self) -> Option<f64> {
        match self.status {
            Status::Finished => self.valid_loss.last().map(|(_, loss)| *loss),
            _ => None,
        }
    }

    /// Returns an error unless the record is a complete run of `plan`.
    fn check(&self, plan: &Plan) -> Result<()> {
        let runs = plan.runs()?;
        let run = runs.iter().find(|run| run.name == self.name);
        let run = run.with_context(|| format!("the plan has no run {}", self.name))?;
        let name = &self.name;
        let differs = |what: &str| format!("{what} of run {name} differs from the plan's");
        ensure!(self.shape == run.shape, differs("the shape"));
        ensure!(self.recipe == run.recipe, differs("the recipe"));
        ensure!(self.fields == run.fields, differs("the recipe's file"));
        ensure!(self.seed == run.seed, differs("the seed"));
        ensure!(self.tokens == run.tokens, differs("the number of tokens"));
        ensure!(self.config == run.config, differs("the configuration"));
        ensure!(self.options == run.options, differs("one of the options"));
        ensure!(
            self.gpu.is_some(),
            "run {name} names no GPU: only runs on a GPU are recorded"
        );
        ensure!(!self.commit.is_empty(), "run {name} names no commit");
        match self.status {
            Status::Finished => self.check_losses(plan, run),
            Status::Diverged => {
                let is_empty = self.error.as_deref().is_none_or(str::is_empty);
                ensure!(!is_empty, "run {name} diverged, but its log is empty");
                Ok(())
            }
            Status::Crashed => bail!("run {name} crashed: it is not recorded"),
        }
    }

    /// Returns an error unless every step that should have a loss has a finite one.
    fn check_losses(&self, plan: &Plan, run: &Run) -> Result<()> {
        let name = &self.name;
        let steps = run.option("--steps").context("a run has steps")?;
        let steps: u64 = steps.parse()?;
        let is_due = |step: &u64| step.is_multiple_of(plan.log_every) || *step == steps;
        let expected: Vec<u64> = (1..=steps).filter(is_due).collect();
        let found: Vec<u64> = self.train_loss.iter().map(|(step, _)| *step).collect();
        ensure!(
            found == expected,
            "run {name} has losses of steps {found:?}, but must have those of {expected:?}"
        );
        let last = self.valid_loss.last().map(|(step, _)| *step);
        ensure!(
            last == Some(steps),
            "the last validation of run {name} is that of step {last:?}, but must be that of step \
             {steps}"
        );
        let all = self.train_loss.iter().chain(&self.valid_loss);
        for (step, loss) in all {
            ensure!(
                loss.is_finite() && *loss > 0.0,
                "the loss of run {name} at step {step} is {loss}, but must be a positive number"
            );
        }
        Ok(())
    }
}

/// Reads the recorded runs in `folder`; returns none if the folder does not exist.
///
/// # Errors
/// Returns an error if a file is malformed, or its name differs from the run's.
pub fn read(folder: &Path) -> Result<Vec<Record>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        paths.push(entry?.path());
    }
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "json")
    });
    paths.sort();
    let record = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path)?;
        let record: Record = serde_json::from_str(&text)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        ensure!(stem == record.name, "it holds run {}", record.name);
        Ok(record)
    };
    let named = |path| record(path).with_context(|| path.display().to_string());
    paths.iter().map(named).collect()
}

/// Summary of collecting a machine's results.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Names of new runs.
    pub new: Vec<String>,
    /// Names of runs already recorded with the same contents.
    pub known: Vec<String>,
    /// Names of crashed runs, with the tails of their logs.
    pub crashed: Vec<(String, String)>,
}

/// Writes the runs in `text`, a machine's results.json, to `folder`. Writes nothing if one of them
/// is refused.
///
/// # Errors
/// Returns an error if a run is incomplete or not in `plan`, used another corpus than the recorded
/// runs of its shape, or is already recorded with other contents.
pub fn collect(text: &str, plan: &Plan, folder: &Path) -> Result<Collected> {
    let found: Vec<Value> = serde_json::from_str(text).context("results.json")?;
    let mut recorded = read(folder)?;
    let mut collected = Collected::default();
    let mut new: Vec<Record> = Vec::new();
    for value in found {
        let field = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        if field("status") == "crashed" {
            collected.crashed.push((field("name"), field("error")));
            continue;
        }
        let name = field("name");
        let record: Record =
            serde_json::from_value(value).with_context(|| format!("results.json: run {name}"))?;
        record.check(plan)?;
        match recorded.iter().find(|other| other.name == record.name) {
            Some(other) if *other == record => {
                collected.known.push(record.name);
                continue;
            }
            Some(_) => bail!(
                "run {name} is recorded already with other content: no run is replaced; remove its \
                 file if it must not count, and say why in the commit"
            ),
            None => {}
        }
        if let Some(other) = recorded.iter().find(|other| other.shape == record.shape) {
            ensure!(
                other.corpus == record.corpus,
                "run {name} used another corpus than {}: their losses cannot be compared",
                other.name
            );
        }
        collected.new.push(record.name.clone());
        recorded.push(record.clone());
        new.push(record);
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for record in &new {
        let path = folder.join(format!("{}.json", record.name));
        let text = compact(&serde_json::to_value(record)?);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(collected)
}

/// Formats an object with one line per field.
fn compact(record: &Value) -> String {
    let fields = record.as_object().into_iter().flatten();
    let lines: Vec<String> = fields
        .map(|(name, value)| format!("  {}: {value}", Value::from(name.as_str())))
        .collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}
