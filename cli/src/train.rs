//! `nvfp4 train`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::Args;
use nvfp4::parallel::ExposedCommunication;
use nvfp4_lm::checkpoint::{CONFIG, write_json};
use nvfp4_lm::config::{Preset, RecipeName, RunConfig};
use nvfp4_lm::data::Corpus;
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::groups::ParallelGroups;
use nvfp4_lm::memory::{MemoryUsed, bytes};
use nvfp4_lm::metrics::Row;
use nvfp4_lm::model::{LanguageModel, ParallelTransformer, Transformer};
use nvfp4_lm::ranks::{agree, on_first, text_of_first};
use nvfp4_lm::train::ByteTask;
use serde::Serialize;

use crate::device::{DeviceName, hardware, install_decorator};
use crate::kernels;
use crate::options::shared::{ConfigOption, SessionOptions};
use crate::options::{Options, steps_of};
use crate::plot;
use crate::ranks::Ranks;
use crate::session::{Session, absolute, check_new, read_config};
use crate::shell::{program, quoted};
use crate::terminal::note;

/// Parent folder for runs without `--out`.
const DEFAULT_OUT: &str = "nvfp4-out";

#[derive(Args)]
pub(crate) struct Train {
    /// Write the output to this folder; it must hold no run [default: nvfp4-out/PRESET-N]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    out: Option<PathBuf>,
    /// Resume the run in this folder
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    #[command(flatten)]
    file: ConfigOption,
    #[command(flatten)]
    session: SessionOptions,
    #[command(flatten)]
    options: Options,
}

/// Contents of `summary.json`. Losses are in nats per byte.
#[derive(Debug, Serialize)]
struct Summary {
    recipe: RecipeName,
    final_valid_loss: f64,
    baseline_recipe: Option<RecipeName>,
    baseline_valid_loss: Option<f64>,
    /// Difference between the loss and the baseline's, in percent of the baseline's.
    gap_percent: Option<f64>,
    /// Results of every trained recipe.
    results: Vec<RecipeResult>,
    /// Loss of the best model that uses no context.
    unigram_entropy: f64,
    preset: Preset,
    parameters: usize,
    steps: u64,
    /// Bytes of training text.
    tokens: u64,
    /// Seconds of the run with `recipe`, including evaluations and checkpoints.
    seconds: f64,
    baseline_seconds: Option<f64>,
    /// Median over the rows of metrics.csv.
    tokens_per_s: Option<f64>,
    baseline_tokens_per_s: Option<f64>,
    /// Percentage of the time of multi-rank steps with `recipe` in which compute waits for
    /// collectives; none if not measured.
    exposed_communication_percent: Option<f64>,
    /// Peak bytes of device memory held by tensors in a step with `recipe`, on the rank with the
    /// most; none if not measured.
    peak_tensor_bytes: Option<u64>,
    /// Bytes held by the memory pools at the end.
    pool_bytes: Option<u64>,
    /// Device of rank 0.
    device: String,
    /// Name of the hardware.
    hardware: Option<String>,
    train_bytes: usize,
    valid_bytes: usize,
}

/// Contents of `summary.json` for each recipe.
#[derive(Debug, Serialize)]
struct RecipeResult {
    recipe: RecipeName,
    final_valid_loss: f64,
    gap_percent: Option<f64>,
    seconds: f64,
    tokens_per_s: Option<f64>,
    exposed_communication_percent: Option<f64>,
    /// Number of steps in which this was measured.
    exposed_communication_steps: u64,
    peak_tensor_bytes: Option<u64>,
    pool_bytes: Option<u64>,
}

/// Returns the difference between a loss and the baseline's, in percent of the baseline's.
pub(crate) fn gap(loss: f64, baseline: f64) -> f64 {
    100.0 * (loss - baseline) / baseline
}

/// Returns the median of the speeds measured in `rows`.
pub(crate) fn median_speed(rows: &[Row]) -> Option<f64> {
    let mut speeds: Vec<f64> = rows.iter().filter_map(|row| row.tokens_per_s).collect();
    speeds.sort_by(f64::total_cmp);
    speeds.get(speeds.len() / 2).copied()
}

/// Result of the run of one recipe.
struct Trained {
    recipe: RecipeName,
    rows: Vec<Row>,
    seconds: f64,
    communication: ExposedCommunication,
    memory: Option<MemoryUsed>,
    /// Descriptions of both.
    measured: [Option<String>; 2],
}

impl Trained {
    fn valid_loss(&self) -> Result<f64> {
        let loss = self.rows.iter().rev().find_map(|row| row.valid_loss);
        loss.context("the run has no validation loss")
    }

    fn tokens_per_s(&self) -> Option<f64> {
        median_speed(&self.rows)
    }
}

impl Train {
    pub(crate) fn run(self) -> Result<ExitCode> {
        if self.file.print_config {
            let (config, ..) = self.configuration()?;
            println!("{}", serde_json::to_string_pretty(&config)?);
            return Ok(ExitCode::SUCCESS);
        }
        Ranks::run(|ranks| self.run_rank(ranks))
    }

    fn run_rank(self, ranks: &Ranks) -> Result<ExitCode> {
        let group = ranks.group();
        let (mut config, name, folder) = agree(group, self.place(ranks))?;
        let folder = PathBuf::from(text_of_first(group, &folder.to_string_lossy())?);
        if config.decorate.is_some() {
            install_decorator()?;
        }
        let groups = |world: &_| ParallelGroups::new(world, &config);
        let session = Session::open(ranks, name, groups, "train", &folder, &self.session)?;
        let corpus = session.read("reading the text", || self.prepare(&mut config, &session))?;
        if ranks.is_first() {
            describe(&config, &corpus, &folder);
        }
        let results = match config.decorate {
            Some(_) => train_all::<EncoderModel>(&session, &config, &corpus)?,
            None if config.tp > 1 => train_all::<ParallelTransformer>(&session, &config, &corpus)?,
            None => train_all::<Transformer>(&session, &config, &corpus)?,
        };
        let is_finished = |result: &Trained| {
            let last = result.rows.last();
            last.is_some_and(|row| row.step == config.steps)
        };
        if results.len() < config.all_recipes().count() || !results.iter().all(is_finished) {
            return Ok(session.stopped());
        }
        on_first(group, || {
            report(&config, &corpus, &folder, &results, &session.device)
        })?;
        Ok(ExitCode::SUCCESS)
    }

    /// Reads the text. A new run also checks the models, and writes its configuration. An extended
    /// run writes its steps.
    fn prepare(&self, config: &mut RunConfig, session: &Session<'_>) -> Result<Corpus> {
        let is_first = session.ranks.is_first();
        if is_first {
            note!("reading text ...");
        }
        let corpus = Corpus::load(&config.data, config.data_bytes)?;
        corpus.check(config.model.context)?;
        if self.resume.is_none() {
            check_models(config, &session.device, &session.groups)?;
            absolute(&mut config.data)?;
            if is_first {
                let folder = &session.folder;
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("out {} cannot be made", folder.display()))?;
                write_json(&folder.join(CONFIG), config)?;
            }
        } else if is_first && (self.options.has("steps") || self.options.has("epochs")) {
            let (path, mut written): (_, RunConfig) = read_config(&session.folder, CONFIG)?;
            written.steps = config.steps;
            write_json(&path, &written)?;
        }
        Ok(corpus)
    }

    /// Returns the configuration on these ranks, its device, and the folder of the run. Only rank 0
    /// chooses the folder; it is empty on other ranks.
    fn place(&self, ranks: &Ranks) -> Result<(RunConfig, DeviceName, PathBuf)> {
        let size = ranks.group().size();
        let (mut config, device, extended) = self.configuration()?;
        if let (Some(extended), true) = (extended, ranks.is_first()) {
            note!("{extended}");
        }
        if self.resume.is_some() {
            // A run may be resumed on a different number of ranks.
            config.dp = None;
        }
        config.check_ranks(size)?;
        config.dp = (size > 1).then(|| config.data_ranks(size));
        let device = ranks.device(device);
        config.device = device.to_string();
        let folder = match ranks.is_first() {
            true => self.folder(config.preset)?,
            false => PathBuf::new(),
        };
        Ok((config, device, folder))
    }

    /// Returns the configuration of the resumed run or of a new one, its device, and a description
    /// of the extension, if the run gets more steps.
    fn configuration(&self) -> Result<(RunConfig, DeviceName, Option<String>)> {
        if let Some(folder) = &self.resume {
            let mut extended = None;
            let (path, mut config): (_, RunConfig) = read_config(folder, CONFIG)?;
            let given = self.options.clone().of_resumed()?;
            if let Some(device) = given.device {
                config.device = device.to_string();
            }
            config.tp = given.tp.unwrap_or(config.tp);
            config.ep = given.ep.unwrap_or(config.ep);
            config.ep_dispatch = given.ep_dispatch.or(config.ep_dispatch);
            let steps = match given.epochs {
                Some(epochs) => Some(steps_of(&config, epochs)?),
                None => given.steps,
            };
            if let Some(steps) = steps {
                extended = config.extend(steps)?;
            }
            config.check().with_context(|| path.display().to_string())?;
            let device = DeviceName::of_config(&path, &config.device)?;
            return Ok((config, device, extended));
        }
        let file = match &self.file.config {
            Some(path) => Options::read(path)?,
            None => Options::default(),
        };
        let (config, device) = self.options.clone().over(file).resolve()?;
        Ok((config, device, None))
    }

    /// Returns the folder of the run. The folder of a new run must not hold a run, and need not
    /// exist: a run that fails to start leaves nothing on disk.
    fn folder(&self, preset: Preset) -> Result<PathBuf> {
        if let Some(folder) = &self.resume {
            return Ok(folder.clone());
        }
        let folder = match &self.out {
            Some(folder) => folder.clone(),
            None => unused_folder(preset)?,
        };
        check_new(&folder, CONFIG)?;
        Ok(folder)
    }
}

/// Checks that the model of every recipe, of all phases, can be built and split over the ranks,
/// before the first one is trained. A recipe may name layers that the model does not have.
fn check_models(config: &RunConfig, device: &Device, groups: &ParallelGroups) -> Result<()> {
    let check = match config.decorate {
        Some(_) => EncoderModel::check,
        None if config.tp > 1 => ParallelTransformer::check,
        None => Transformer::check,
    };
    for recipe in config.all_recipes() {
        for of_phase in config.phase_recipes(recipe)? {
            bytes::budget(config, &of_phase).check(device)?;
            check(config, &of_phase, device, groups)?;
        }
    }
    Ok(())
}

/// Trains a model with each recipe, one after the other, until the session stops.
fn train_all<M: LanguageModel>(
    session: &Session<'_>,
    config: &RunConfig,
    corpus: &Corpus,
) -> Result<Vec<Trained>> {
    let mut results = Vec::new();
    for recipe in config.all_recipes() {
        let task = ByteTask::<M>::new(config, recipe.clone(), corpus);
        let mut trainer = session.start(task, &session.folder.join(recipe.name()))?;
        let is_done = session.train(&mut trainer)?;
        if let Some(report) = trainer.model().report()? {
            println!("{recipe}: GEMMs by backend\n{report}");
        }
        if !is_done {
            break;
        }
        results.push(Trained {
            recipe: recipe.clone(),
            rows: trainer.rows().to_vec(),
            seconds: trainer.seconds(),
            communication: trainer.communication(),
            memory: trainer.memory(),
            measured: session.measured(&trainer),
        });
    }
    Ok(results)
}

fn unused_folder(preset: Preset) -> Result<PathBuf> {
    (1..10_000)
        .map(|number| Path::new(DEFAULT_OUT).join(format!("{preset}-{number}")))
        .find(|path| !path.exists())
        .with_context(|| format!("{DEFAULT_OUT} is full: choose a folder with --out"))
}

fn describe(config: &RunConfig, corpus: &Corpus, folder: &Path) {
    let text = corpus.fingerprint();
    let source = match config.data.is_empty() {
        true => "Rust sources of crates",
        false => "text",
    };
    let skipped = match corpus.skipped() {
        0 => String::new(),
        count => format!(", {count} files left out that are empty or not UTF-8 text"),
    };
    note!(
        "data    {source}: {:.1} MB in {} files to train, {:.1} MB in {} to validate{skipped}",
        text.train_bytes as f64 / 1e6,
        text.train_files,
        text.valid_bytes as f64 / 1e6,
        text.valid_files
    );
    note!(
        "model   {}: {:.2} M parameters, {} blocks of width {}{}, context {}",
        config.preset,
        config.parameters() as f64 / 1e6,
        config.model.layers,
        config.model.width,
        match (config.model.experts, config.decorate) {
            (Some(experts), _) =>
                format!(" with {experts} experts, {} for a byte", config.model.top_k),
            (None, Some(_)) => " of Burn's own layers".into(),
            (None, None) => String::new(),
        },
        config.model.context
    );
    let others: Vec<&str> = config.compare.iter().map(RecipeName::name).collect();
    let baseline = match others.is_empty() {
        true => String::new(),
        false => format!(", then {} to compare", others.join(", ")),
    };
    note!(
        "run     {}{baseline}: {} steps of {} bytes, {:.2} epochs, on {}, into {}",
        config.recipe,
        config.steps,
        config.tokens_per_step(),
        config.steps as f64 / config.steps_per_epoch(text.train_bytes),
        config.device,
        folder.display()
    );
    if config.device.contains("cuda") {
        note!("kernels {}", kernels::place());
    }
}

/// Writes `summary.json` and `loss.svg`, and prints the outcome.
fn report(
    config: &RunConfig,
    corpus: &Corpus,
    folder: &Path,
    results: &[Trained],
    device: &Device,
) -> Result<()> {
    let main = results.first().context("nothing was trained")?;
    // Gaps are relative to high precision if it was trained, else to the last recipe.
    let baseline = results[1..]
        .iter()
        .find(|result| result.recipe.is_high_precision())
        .or(results[1..].last());
    let final_valid_loss = main.valid_loss()?;
    let baseline_valid_loss = baseline.map(Trained::valid_loss).transpose()?;
    let unigram_entropy = corpus.unigram_entropy();
    let summary = Summary {
        recipe: main.recipe.clone(),
        final_valid_loss,
        baseline_recipe: baseline.map(|result| result.recipe.clone()),
        baseline_valid_loss,
        gap_percent: baseline_valid_loss.map(|loss| gap(final_valid_loss, loss)),
        results: results
            .iter()
            .map(|result| {
                let loss = result.valid_loss()?;
                Ok(RecipeResult {
                    recipe: result.recipe.clone(),
                    final_valid_loss: loss,
                    gap_percent: baseline_valid_loss.map(|baseline| gap(loss, baseline)),
                    seconds: result.seconds,
                    tokens_per_s: result.tokens_per_s(),
                    exposed_communication_percent: result.communication.percent(),
                    exposed_communication_steps: result.communication.steps,
                    peak_tensor_bytes: result.memory.map(|memory| memory.tensors),
                    pool_bytes: result.memory.map(|memory| memory.pools),
                })
            })
            .collect::<Result<_>>()?,
        unigram_entropy,
        preset: config.preset,
        parameters: config.parameters(),
        steps: config.steps,
        tokens: main.rows.last().map_or(0, |row| row.tokens),
        seconds: main.seconds,
        baseline_seconds: baseline.map(|result| result.seconds),
        tokens_per_s: main.tokens_per_s(),
        baseline_tokens_per_s: baseline.and_then(Trained::tokens_per_s),
        exposed_communication_percent: main.communication.percent(),
        peak_tensor_bytes: main.memory.map(|memory| memory.tensors),
        pool_bytes: main.memory.map(|memory| memory.pools),
        device: config.device.clone(),
        hardware: hardware(device),
        train_bytes: corpus.fingerprint().train_bytes,
        valid_bytes: corpus.fingerprint().valid_bytes,
    };
    write_json(&folder.join("summary.json"), &summary)?;
    let curves: Vec<(&str, &[Row])> = results
        .iter()
        .map(|result| (result.recipe.name(), &result.rows[..]))
        .collect();
    plot::loss(
        &folder.join("loss.svg"),
        &curves,
        "byte",
        Some(unigram_entropy),
    )?;

    println!("validation loss   tokens/s   seconds  recipe");
    for result in results {
        println!(
            "{:>15.4} {:>10.0} {:>9.1}  {}",
            result.valid_loss()?,
            result.tokens_per_s().unwrap_or_default(),
            result.seconds,
            result.recipe.name(),
        );
    }
    println!("{unigram_entropy:>15.4}   (nats per byte; a model that ignores context)");
    if let Some(baseline) = &summary.baseline_recipe {
        for result in summary.results.iter().filter(|r| r.recipe != *baseline) {
            let gap = result.gap_percent.unwrap_or_default();
            println!("gap of {} to {baseline}: {gap:+.2} %", result.recipe);
        }
    }
    for kind in [0, 1] {
        let lines = results
            .iter()
            .filter_map(|result| result.measured[kind].as_ref());
        lines.for_each(|line| println!("{line}"));
    }
    println!("wrote {0}/summary.json, {0}/loss.svg", folder.display());
    println!(
        "generate text with: {} generate {} --prompt 'pub fn ' --temperature 0.8",
        program(),
        quoted(&folder.to_string_lossy())
    );
    Ok(())
}
