//! `nvfp4 dev study`: trains the same model with several recipes and seeds, and reports the losses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::Args;
use nvfp4::recipe::RecipePhase;
use nvfp4_lm::checkpoint::{self, CONFIG, write_json};
use nvfp4_lm::config::{HealingOption, RunConfig};
use nvfp4_lm::data::Corpus;
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::metrics::{METRICS, Row, read_metrics};
use nvfp4_lm::model::{LanguageModel, Transformer};
use nvfp4_lm::train::{ByteTask, Checkpoint, Observer, Outcome, Trainer};
use serde::{Deserialize, Serialize};

use crate::device::{DeviceName, install_decorator};
use crate::options::Options;
use crate::options::listed::listed;
use crate::plot;
use crate::progress::phase_begins;
use crate::terminal::note;
use crate::train::{gap, median_speed};

#[derive(Args)]
pub(crate) struct Study {
    /// Read the study from this JSON file: `options` as in a --config file of `train`, and `runs`,
    /// each with a `recipe`, `seeds` and `healing`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write the output to this folder; an unfinished study in it is resumed
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run on this device [default: the file's `device`]
    #[arg(long, value_name = "DEVICE", value_parser = listed::<DeviceName>(DeviceName::values))]
    device: Option<DeviceName>,
    /// Train part I of N of the runs, so that several processes can share a study
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    part: Part,
    /// Stop after this many seconds, with checkpoints to resume [default: never]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Write the report of the finished runs without training
    #[arg(long)]
    report: bool,
}

/// Share of the runs that this process does: every `of`-th, starting with number `index`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Part {
    index: usize,
    of: usize,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("part is {text:?}, but it must be I/N with I from 1 to N");
        let (index, of) = text.split_once('/').ok_or_else(error)?;
        let number = |text: &str| text.parse::<usize>().map_err(|_| error());
        let (index, of) = (number(index)?, number(of)?);
        if index == 0 || index > of {
            return Err(error());
        }
        Ok(Self {
            index: index - 1,
            of,
        })
    }
}

/// Contents of a study's file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    /// Options shared by all runs.
    options: Options,
    runs: Vec<PlannedRuns>,
}

/// Runs of one recipe.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlannedRuns {
    recipe: String,
    #[serde(default = "one_seed")]
    seeds: Vec<u64>,
    /// Runs that share the first part of the plain run and then stop quantizing.
    #[serde(default)]
    healing: Vec<HealingOption>,
}

fn one_seed() -> Vec<u64> {
    vec![0]
}

/// A plain run, and the runs that branch off it.
struct Job {
    plain: Planned,
    healed: Vec<Planned>,
}

/// One run.
#[derive(Clone)]
struct Planned {
    /// Name of the run's folder.
    name: String,
    /// Group for comparison: the recipe with its healing.
    group: String,
    config: RunConfig,
}

impl Planned {
    fn new(config: RunConfig) -> Self {
        let healing = config.healing.map(|healing| {
            let text = healing.to_string().replace(':', "-");
            format!("+healing-{text}")
        });
        let group = format!("{}{}", config.recipe, healing.unwrap_or_default());
        Self {
            name: format!("{group}-seed{}", config.seed),
            group,
            config,
        }
    }

    /// Returns the first step that is not quantized.
    fn heals_at(&self) -> u64 {
        let steps = self.config.steps;
        let share = self
            .config
            .healing
            .map_or(1.0, |healing| healing.0.at_fraction);
        (share * steps as f64).ceil() as u64
    }
}

/// State shared by the runs of one process.
struct Session<'a> {
    out: &'a Path,
    corpus: &'a Corpus,
    device: &'a Device,
    until: Option<Instant>,
    interrupt: &'a AtomicBool,
}

impl Session<'_> {
    /// Returns true if training must stop.
    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
            || self.interrupt.load(Ordering::Relaxed)
    }

    /// Starts or resumes a run, to its end or to step `stop_at`. Prints the report of a decorated
    /// model.
    fn train<M: LanguageModel>(&self, planned: &Planned, stop_at: Option<u64>) -> Result<Outcome> {
        let Planned { name, config, .. } = planned;
        let folder = self.out.join(name);
        let recipe = config.recipe.clone();
        let task = ByteTask::<M>::new(config, recipe, self.corpus);
        let mut run = Trainer::open(task, self.device, &folder)?;
        write_json(&folder.join(CONFIG), config)?;
        let mut watch = Watch {
            name,
            steps: config.steps,
            session: self,
        };
        let outcome = run.train(stop_at, &mut watch)?;
        if let Some(report) = run.model().report()? {
            println!("{name}: GEMMs by backend\n{report}");
        }
        Ok(outcome)
    }
}

/// Stops a run when its time is over or at Ctrl-C, and prints its progress.
struct Watch<'a> {
    name: &'a str,
    steps: u64,
    session: &'a Session<'a>,
}

impl Observer for Watch<'_> {
    fn phase(&mut self, step: u64, index: usize, phase: &RecipePhase) {
        note!("{}: {}", self.name, phase_begins(step, index, phase));
    }

    fn row(&mut self, row: &Row) {
        if let Some(loss) = row.valid_loss {
            let speed = row.tokens_per_s.unwrap_or_default();
            note!(
                "{} step {}/{}: validation loss {loss:.4}, {speed:.0} tokens/s",
                self.name,
                row.step,
                self.steps
            );
        }
    }

    fn interrupted(&mut self) -> bool {
        self.session.is_over()
    }
}

impl Study {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let (jobs, device) = self.jobs()?;
        fs::create_dir_all(&self.out)
            .with_context(|| format!("out {} cannot be made", self.out.display()))?;
        let all: Vec<&Planned> = jobs
            .iter()
            .flat_map(|job| std::iter::once(&job.plain).chain(&job.healed))
            .collect();
        if !self.report {
            let interrupt = Arc::new(AtomicBool::new(false));
            let flag = interrupt.clone();
            ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
                .context("cannot watch for Ctrl-C")?;
            let first = &jobs
                .first()
                .context("runs is empty, but a study has some")?
                .plain
                .config;
            if first.decorate.is_some() {
                install_decorator()?;
            }
            let corpus = Corpus::load(&first.data, first.data_bytes)?;
            corpus.check(first.model.context)?;
            let until = self
                .seconds
                .map(|s| Instant::now() + Duration::from_secs(s));
            let device = device.open()?;
            let session = Session {
                out: &self.out,
                corpus: &corpus,
                device: &device,
                until,
                interrupt: &interrupt,
            };
            let is_over = || session.is_over();
            let mine = jobs.iter().skip(self.part.index).step_by(self.part.of);
            for job in mine {
                let train = |planned, stop_at| match first.decorate {
                    Some(_) => session.train::<EncoderModel>(planned, stop_at),
                    None => session.train::<Transformer>(planned, stop_at),
                };
                for healed in &job.healed {
                    if checkpoint::latest(&self.out.join(&healed.name))
                        .ok()
                        .flatten()
                        .is_none()
                    {
                        train(&job.plain, Some(healed.heals_at()))?;
                        if is_over() {
                            break;
                        }
                        self.branch(&job.plain, healed)?;
                    }
                }
                for planned in std::iter::once(&job.plain).chain(&job.healed) {
                    if is_over() {
                        break;
                    }
                    train(planned, None)?;
                }
                if is_over() {
                    note!("stopped; the same command resumes");
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
        if self.part.of == 1 || self.report {
            report(&self.out, &all)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the runs and their device.
    fn jobs(&self) -> Result<(Vec<Job>, DeviceName)> {
        let path = &self.file;
        let context = || format!("study {} is not valid", path.display());
        let text =
            fs::read(path).with_context(|| format!("study {} cannot be read", path.display()))?;
        let Plan { options, runs } = serde_json::from_slice(&text).with_context(context)?;
        let mut jobs = Vec::new();
        let mut device = None;
        for PlannedRuns {
            recipe,
            seeds,
            healing,
        } in runs
        {
            for &seed in &seeds {
                let options = options.clone().for_run(&recipe, seed, self.device);
                let (config, name) = options.resolve().with_context(context)?;
                ensure!(
                    healing.is_empty() || config.healing_of(&config.recipe).is_none(),
                    "healing is given in study {} for recipe {recipe}, whose file has one: leave \
                     out one of them",
                    path.display()
                );
                device = Some(name);
                let healed = |healing| {
                    Planned::new(RunConfig {
                        healing: Some(healing),
                        ..config.clone()
                    })
                };
                jobs.push(Job {
                    healed: healing.iter().copied().map(healed).collect(),
                    plain: Planned::new(config),
                });
            }
        }
        let device = device.context("runs is empty, but a study has some")?;
        let mut names: Vec<&str> = jobs
            .iter()
            .flat_map(|job| std::iter::once(&job.plain).chain(&job.healed))
            .map(|planned| planned.name.as_str())
            .collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            anyhow::bail!("runs has {} twice, but each may be there once", twice[0]);
        }
        Ok((jobs, device))
    }

    /// Copies the state of `plain` as the start of `healed`: the two runs are identical up to the
    /// branch.
    fn branch(&self, plain: &Planned, healed: &Planned) -> Result<()> {
        let (from, to) = (self.out.join(&plain.name), self.out.join(&healed.name));
        let Some(path) = checkpoint::latest(&from)? else {
            return Ok(());
        };
        let mut checkpoint = Checkpoint::load(&path)?;
        if checkpoint.state.step > healed.heals_at() {
            // The plain run is past the branch, so this run starts from scratch.
            return Ok(());
        }
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        fs::copy(from.join(METRICS), to.join(METRICS))
            .with_context(|| format!("cannot write to {}", to.display()))?;
        checkpoint.state.run.config = healed.config.clone();
        checkpoint.state.run.recipe = healed.config.recipe.clone();
        checkpoint.save(&to)?;
        Ok(())
    }
}

/// Result of one run.
#[derive(Debug, Serialize)]
struct Finished {
    name: String,
    group: String,
    seed: u64,
    steps: u64,
    tokens: u64,
    final_valid_loss: f64,
    gap_percent: Option<f64>,
    /// Median over the rows of metrics.csv.
    tokens_per_s: Option<f64>,
}

/// Writes `report.md`, `results.json` and `loss.svg` from the finished runs.
fn report(out: &Path, all: &[&Planned]) -> Result<()> {
    let mut rows: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
    let mut unfinished = Vec::new();
    for planned in all {
        let metrics = out.join(&planned.name).join(METRICS);
        let found = if metrics.exists() {
            read_metrics(&metrics)?
        } else {
            Vec::new()
        };
        let is_finished = found
            .last()
            .is_some_and(|row| row.step == planned.config.steps && row.valid_loss.is_some());
        if is_finished {
            rows.insert(&planned.name, found);
        } else {
            let step = found.last().map_or(0, |row| row.step);
            unfinished.push(format!("{} ({step} steps)", planned.name));
        }
    }
    let loss = |planned: &Planned| {
        let rows = rows.get(planned.name.as_str())?;
        rows.last()?.valid_loss
    };
    // The baseline of a seed is the high-precision run with the same seed, and so the same weights
    // and batches. If there is none, it is the mean of the existing high-precision runs.
    let baselines: Vec<(u64, f64)> = all
        .iter()
        .filter(|planned| planned.config.recipe.is_high_precision())
        .filter_map(|planned| Some((planned.config.seed, loss(planned)?)))
        .collect();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let baseline = |seed: u64| {
        let same = baselines.iter().find(|(other, _)| *other == seed);
        let losses: Vec<f64> = baselines.iter().map(|(_, loss)| *loss).collect();
        same.map(|(_, loss)| *loss)
            .or_else(|| (!losses.is_empty()).then(|| mean(&losses)))
    };
    let finished: Vec<Finished> = all
        .iter()
        .filter_map(|planned| {
            let rows = rows.get(planned.name.as_str())?;
            let final_valid_loss = loss(planned)?;
            let seed = planned.config.seed;
            Some(Finished {
                name: planned.name.clone(),
                group: planned.group.clone(),
                seed,
                steps: planned.config.steps,
                tokens: rows.last()?.tokens,
                final_valid_loss,
                gap_percent: baseline(seed).map(|baseline| gap(final_valid_loss, baseline)),
                tokens_per_s: median_speed(rows),
            })
        })
        .collect();
    ensure!(
        !finished.is_empty(),
        "{} has no finished run to report",
        out.display()
    );
    write_json(&out.join("results.json"), &finished)?;
    let curves: Vec<(&str, &[Row])> = finished
        .iter()
        .map(|run| (run.name.as_str(), &rows[run.name.as_str()][..]))
        .collect();
    plot::validation(&out.join("loss.svg"), &curves)?;

    let config = &all[0].config;
    let mut text = format!(
        "# Study\n\n{:.2} M parameters ({} blocks{} of width {}), context {}, {} steps of {} \
         bytes: {:.1} bytes for each parameter. Losses are in nats per byte of validation text; a \
         gap is to the high-precision run with the same seed, weights and batches.\n\n",
        config.parameters() as f64 / 1e6,
        config.model.layers,
        config.decorate.map_or("", |_| " of Burn's own layers"),
        config.model.width,
        config.model.context,
        config.steps,
        config.tokens_per_step(),
        (config.steps as usize * config.tokens_per_step()) as f64 / config.parameters() as f64,
    );
    text.push_str("| recipe | seeds | validation loss | gap | tokens/s |\n|---|---|---|---|---|\n");
    let mut groups: Vec<&str> = Vec::new();
    for run in &finished {
        if !groups.contains(&run.group.as_str()) {
            groups.push(&run.group);
        }
    }
    let mut lines: Vec<(f64, String)> = groups
        .iter()
        .map(|group| {
            let runs: Vec<&Finished> = finished.iter().filter(|r| r.group == *group).collect();
            let losses: Vec<f64> = runs.iter().map(|run| run.final_valid_loss).collect();
            let gaps: Vec<f64> = runs.iter().filter_map(|run| run.gap_percent).collect();
            let speeds: Vec<f64> = runs.iter().filter_map(|run| run.tokens_per_s).collect();
            let list = |values: &[f64], digits: usize, sign: bool| {
                let texts: Vec<String> = values
                    .iter()
                    .map(|value| match sign {
                        true => format!("{value:+.digits$}"),
                        false => format!("{value:.digits$}"),
                    })
                    .collect();
                texts.join(", ")
            };
            let gap = match gaps.is_empty() {
                true => "—".into(),
                false => format!("{} %", list(&gaps, 2, true)),
            };
            let line = format!(
                "| `{group}` | {} | {} | {gap} | {:.0} |\n",
                runs.len(),
                list(&losses, 4, false),
                if speeds.is_empty() {
                    0.0
                } else {
                    mean(&speeds)
                },
            );
            (mean(&losses), line)
        })
        .collect();
    lines.sort_by(|a, b| a.0.total_cmp(&b.0));
    lines.iter().for_each(|(_, line)| text.push_str(line));
    if baselines.len() > 1 {
        let losses: Vec<f64> = baselines.iter().map(|(_, loss)| *loss).collect();
        let spread = losses.iter().copied().fold(f64::MIN, f64::max)
            - losses.iter().copied().fold(f64::MAX, f64::min);
        let _ = writeln!(
            text,
            "\nSeeds alone move the high-precision loss by {:.2} %.",
            100.0 * spread / mean(&losses)
        );
    }
    if !unfinished.is_empty() {
        let _ = writeln!(text, "\nNot finished: {}.", unfinished.join(", "));
    }
    text.push_str("\n![Validation losses](loss.svg)\n");
    checkpoint::replace(&out.join("report.md"), text.as_bytes())?;
    print!("{text}");
    println!(
        "\nwrote {0}/report.md, {0}/results.json, {0}/loss.svg",
        out.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_from_one() {
        assert_eq!("2/3".parse(), Ok(Part { index: 1, of: 3 }));
        for text in ["0/3", "4/3", "3", "a/b", "1/0"] {
            assert!(text.parse::<Part>().unwrap_err().contains(text));
        }
    }
}
