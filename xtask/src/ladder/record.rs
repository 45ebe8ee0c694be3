//! Recorded runs: `results/ladder/NAME.json`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::{Plan, Run};

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// After its last step.
    Finished,
    /// With a loss that is no number.
    Diverged,
    /// For a reason that says nothing of its recipe; it is not recorded.
    Crashed,
}

/// One run, as `ladder/run.py` writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// As the plan names it.
    pub name: String,
    /// The name of its shape.
    pub shape: String,
    /// The name of its recipe.
    pub recipe: String,
    /// The fields of the recipe; none of a preset.
    pub fields: Option<Value>,
    /// Of the weights, the order of rows, and the recipe.
    pub seed: u64,
    /// Tokens that it trained on.
    pub tokens: u64,
    /// What was built.
    pub commit: String,
    /// Check sums of the tokenizer, of the shards and of the validation.
    pub corpus: Value,
    /// The model's config.json.
    pub config: Value,
    /// Options of `nvfp4 pretrain`.
    pub options: Vec<String>,
    /// Names of its shards.
    pub data: Vec<String>,
    /// As its driver names it.
    pub gpu: Option<String>,
    /// The version of the GPU's driver.
    pub driver: Option<String>,
    /// How it ended.
    pub status: Status,
    /// The end of the log of a run that did not finish.
    pub error: Option<String>,
    /// The day of its end: YYYY-MM-DD.
    pub date: String,
    /// As `nvfp4` names it.
    pub device: String,
    /// Wall time of all its commands.
    pub seconds: f64,
    /// Wall time and last logged step of each of them.
    pub commands: Vec<Part>,
    /// Median over the rows of its metrics.
    pub tokens_per_s: Option<f64>,
    /// Steps, and mean losses since the step before.
    pub train_loss: Vec<(u64, f64)>,
    /// Steps, and losses of the validation.
    pub valid_loss: Vec<(u64, f64)>,
}

/// One command of a run that may have taken several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Wall time.
    pub seconds: f64,
    /// The last step of its metrics.
    pub step: u64,
}

impl Record {
    /// The loss of the validation after the last step.
    pub fn loss(&self) -> Option<f64> {
        match self.status {
            Status::Finished => self.valid_loss.last().map(|(_, loss)| *loss),
            _ => None,
        }
    }

    /// Fails unless it is a whole run of `plan`.
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

    /// Fails unless there is a finite loss at each step that has one.
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

/// The recorded runs in `folder`; none where there is no folder.
///
/// # Errors
/// Returns an error if a file is malformed, or is not named after its run.
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

/// What became of the results of a machine.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Names of runs that are new.
    pub new: Vec<String>,
    /// Names of runs that were recorded before, with the same content.
    pub known: Vec<String>,
    /// Names of runs that crashed, and what their logs end with.
    pub crashed: Vec<(String, String)>,
}

/// Writes the runs of `text`, the results.json of a machine, to `folder`. Nothing is written if one
/// of them is refused.
///
/// # Errors
/// Returns an error if a run is not whole or not of `plan`, used another corpus than the recorded
/// ones of its shape, or is recorded with other content.
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

/// An object with a line for each of its fields.
fn compact(record: &Value) -> String {
    let fields = record.as_object().into_iter().flatten();
    let lines: Vec<String> = fields
        .map(|(name, value)| format!("  {}: {value}", Value::from(name.as_str())))
        .collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}
