//! `nvfp4 dev cost`.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::Args;
use clap::builder::PossibleValue;
use nvfp4::Nvfp4Recipe;
use nvfp4_lm::config::{RecipeName, RunConfig};
use nvfp4_lm::cost::{Cost, DeviceLock, Effort, KernelClass, measure, release};
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::model::Transformer;
use serde::Serialize;

use super::measure::{StepOptions, note_start};
use crate::device::{hardware, install_decorator};
use crate::options::listed::listed;
use crate::options::{Options, recipes};
use crate::terminal::note;

/// Name for the high-precision model built from Burn's own layers.
const BURN: &str = "burn";

#[derive(Args)]
pub(crate) struct CostOfSteps {
    /// Measure these recipes [default: burn, the baseline, and every preset that quantizes]
    #[arg(
        long,
        value_name = "RECIPE,..",
        value_delimiter = ',',
        value_parser = listed::<String>(values)
    )]
    recipes: Vec<String>,
    #[command(flatten)]
    steps: StepOptions,
    /// Lock this file: commands that share it warm up together and measure one at a time [default:
    /// none]
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

/// Contents of the file given by `--out`.
#[derive(Serialize)]
struct Figures {
    config: RunConfig,
    hardware: Option<String>,
    results: Vec<Figure>,
}

/// Measurements of one recipe.
#[derive(Serialize)]
struct Figure {
    recipe: String,
    /// Number of active weights, without the head.
    weights: usize,
    #[serde(flatten)]
    cost: Cost,
}

impl Figure {
    /// TFLOP/s of the linear layers, forward and backward: six operations per weight per token
    /// (byte).
    fn tera(&self) -> f64 {
        6.0 * self.weights as f64 * self.cost.tokens_per_s() / 1e12
    }
}

impl CostOfSteps {
    pub(crate) fn run(self) -> Result<()> {
        ensure!(
            self.options.recipe_is_unset(),
            "recipe, compare and schedule are of `nvfp4 train`: name what to measure with --recipes"
        );
        let (config, name) = self.options.clone().resolve()?;
        if config.decorate.is_some() {
            install_decorator()?;
        }
        let device = name.open()?;
        let recipes = self.chosen(&config);
        let hardware = hardware(&device);
        note!(
            "{} blocks of width {}, {} bytes a step, on {}{}",
            config.model.layers,
            config.model.width,
            config.batch * config.model.context,
            config.device,
            hardware
                .as_ref()
                .map_or(String::new(), |name| format!(" ({name})"))
        );
        let effort = self.steps.effort();
        let mut results = Vec::new();
        let every = config.telemetry_every;
        println!("{}", header(every));
        for recipe in recipes {
            let figure = figure(&config, recipe, &device, effort, |how| self.lock(how))?;
            note_start(&figure.recipe, &figure.cost);
            println!("{}", line(&figure, config.model.layers, every));
            results.push(figure);
            release(&device);
        }
        for figure in &results {
            let label = format!("{:<32} ", figure.recipe);
            (self.steps.measure).print_kernels(&label, &figure.cost.kernels);
        }
        self.steps.measure.write(&Figures {
            config,
            hardware,
            results,
        })
    }

    /// Locks the file given by `--lock`; waits for commands that hold a conflicting lock.
    fn lock(&self, how: DeviceLock) -> Result<Option<File>> {
        let Some(path) = &self.lock else {
            return Ok(None);
        };
        let open = || -> io::Result<File> {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            match how {
                DeviceLock::Shared => file.lock_shared()?,
                DeviceLock::Exclusive => file.lock()?,
            }
            Ok(file)
        };
        let file = open()
            .with_context(|| format!("lock is {}, but it cannot be locked", path.display()))?;
        Ok(Some(file))
    }

    /// Returns the recipes to measure.
    fn chosen(&self, config: &RunConfig) -> Vec<String> {
        if !self.recipes.is_empty() {
            return self.recipes.clone();
        }
        let mut names = vec![config.baseline().to_string()];
        // Burn has no experts, and a decorated model would be compared with itself.
        if config.model.experts.is_none() && config.decorate.is_none() {
            names.insert(0, BURN.into());
        }
        let presets = Nvfp4Recipe::preset_names().filter(|name| *name != RecipeName::bf16().name());
        names.extend(presets.map(String::from));
        names
    }
}

/// Returns the values of `--recipes` that `--help` lists.
fn values() -> Vec<PossibleValue> {
    let names = recipes::values().into_iter();
    let names = names.filter(|value| value.get_name() != recipes::FILE);
    let burn = PossibleValue::new(BURN).help("The high-precision model of Burn's own layers");
    std::iter::once(burn).chain(names).collect()
}

/// Measures one recipe; `lock` takes the device lock.
fn figure<T>(
    config: &RunConfig,
    name: String,
    device: &Device,
    effort: Effort,
    lock: impl Fn(DeviceLock) -> Result<T>,
) -> Result<Figure> {
    let is_burn = name == BURN;
    let recipe = match is_burn {
        true => config.baseline(),
        false => name
            .parse()
            .map_err(|error| anyhow::anyhow!("recipes has {name}, but {error}"))?,
    };
    let model = &config.model;
    let (weights, cost) = if is_burn || config.decorate.is_some() {
        let cost = measure::<EncoderModel, _>(config, &recipe, device, effort, lock)?;
        (model.encoder_active_weights(), cost)
    } else {
        let cost = measure::<Transformer, _>(config, &recipe, device, effort, lock)?;
        (model.active_weights(), cost)
    };
    Ok(Figure {
        recipe: name,
        weights,
        cost,
    })
}

/// Returns the header of the table. Includes the telemetry columns if `every` is not 0.
fn header(every: u64) -> String {
    let mut text = format!(
        "{:<32} {:>9} {:>9} {:>7} {:>8} {:>9} {:>10} {:>8}",
        "recipe", "tokens/s", "ms/step", "TFLOP/s", "peak MB", "pools MB", "MB a block", "kernels"
    );
    for class in KernelClass::ALL {
        text += &format!(" {:>14}", class.name());
    }
    if every > 0 {
        text += &format!(" {:>14} {:>14}", "sampled ms", format!("1 in {every}"));
    }
    text
}

fn line(figure: &Figure, layers: usize, every: u64) -> String {
    let cost = &figure.cost;
    let megabytes = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.0}", bytes as f64 / 1e6),
        None => "-".into(),
    };
    let of = |seconds: f64| match cost.kernels.is_empty() {
        true => "-".to_string(),
        false => format!("{:.3}", 1e3 * seconds),
    };
    let all: f64 = KernelClass::ALL.map(|class| cost.of(class)).iter().sum();
    let mut text = format!(
        "{:<32} {:>9.0} {:>9.3} {:>7.1} {:>8} {:>9} {:>10} {:>8}",
        figure.recipe,
        cost.tokens_per_s(),
        1e3 * cost.median(),
        figure.tera(),
        megabytes(cost.memory.map(|memory| memory.peak)),
        megabytes(cost.memory.map(|memory| memory.reserved)),
        megabytes(cost.memory.map(|memory| memory.kept / layers as u64)),
        of(all),
    );
    for class in KernelClass::ALL {
        text += &format!(" {:>14}", of(cost.of(class)));
    }
    if let Some((sampled, share)) = cost.median_sampled().zip(cost.telemetry_share(every)) {
        let share = format!("{:+.2} %", 100.0 * share);
        text += &format!(" {:>14.3} {share:>14}", 1e3 * sampled);
    }
    text
}
