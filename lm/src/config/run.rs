//! Configuration of a run, and its checks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use burn::module::{ParamGroup, ParamGroupError};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::recipe::{Healing, NamedSchedule, RecipeSchedule};
use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};

use super::choices::{
    Activation, Decoration, ExpertDispatchName, GradReduce, HealingOption, OptimizerName, Preset,
    RecipeName,
};
use super::extend::{extension, steps_of};
use super::model::ModelConfig;
use super::schedule::{Schedule, check_counts};
use super::uncaptured::Uncaptured;

/// Default weight of a block's load-balancing loss in the training loss.
pub const BALANCE_SHARE: f64 = 0.01;

/// Returns the default number of ranks.
pub(crate) fn one() -> usize {
    1
}

fn finite(text: &str) -> std::result::Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    match number.is_finite() {
        true => Ok(number),
        false => Err("it must be finite".into()),
    }
}

/// All settings of a run; the contents of `config.json`.
///
/// The fields without a flag hold looked-up values: names, files and devices that a command
/// resolves.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct RunConfig {
    /// Preset that provided the other values.
    #[arg(skip)]
    pub preset: Preset,
    /// Recipe of the run; with a schedule, that of the first phase.
    #[arg(skip)]
    pub recipe: RecipeName,
    /// Phases of the run with `recipe`, by the names of their recipes.
    #[arg(skip)]
    #[serde(default)]
    pub schedule: Option<NamedSchedule>,
    /// Recipes that the same model is also trained with, on the same batches, for comparison.
    #[arg(skip)]
    pub compare: Vec<RecipeName>,
    /// Recipes that the run defines, by name.
    #[arg(skip)]
    #[serde(default)]
    pub recipes: BTreeMap<String, Nvfp4Recipe>,
    /// If given, trains a model of Burn's own layers instead of this crate's, decorated in this
    /// mode if the recipe quantizes.
    #[arg(skip)]
    #[serde(default)]
    pub decorate: Option<Decoration>,
    /// Device: `flex`, `cpu`, or `cuda:N`.
    #[arg(skip)]
    pub device: String,
    /// Stop quantizing after this share of the steps; with `:forward`, only in the forward pass;
    /// --schedule can also change the recipe [default: the value in the recipe's file]
    #[arg(long, value_name = "SHARE")]
    #[serde(default)]
    pub healing: Option<HealingOption>,
    /// Compute activations in this type [default: bf16 on a GPU, else f32]
    #[arg(long, value_name = "TYPE")]
    pub activation: Activation,
    /// Read these files and folders: text [default: Rust sources of crates, 31 MB]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Stop reading text after the file that reaches this size in bytes, but read at least two
    /// files; 0 for no limit [default: the preset's]
    #[arg(long, value_name = "BYTES")]
    pub data_bytes: u64,
    /// Sizes of the model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelConfig,
    /// Add the load-balancing loss of each block to the training loss with this weight [default:
    /// 0.01]
    #[arg(long, value_name = "SHARE", value_parser = finite)]
    #[serde(default)]
    pub balance_loss: Option<f64>,
    /// Train for this many optimizer steps; with --resume, extend the run to them [default: the
    /// preset's]
    #[arg(long, value_name = "STEPS")]
    pub steps: u64,
    /// Use a batch of this many sequences; the ranks divide it evenly [default: the preset's]
    #[arg(long, value_name = "N")]
    pub batch: usize,
    /// Accumulate the gradients of this many batches per step [default: 1]
    #[arg(long, value_name = "N")]
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Update the parameters with this optimizer [default: adamw]
    #[arg(long, value_name = "OPTIMIZER")]
    #[serde(default)]
    pub optimizer: OptimizerName,
    /// Set the peak learning rate [default: the preset's]
    #[arg(long, value_name = "RATE", value_parser = finite)]
    pub lr: f64,
    /// Warm up the learning rate over this many steps; it then decays to a tenth along a cosine
    /// [default: the preset's, at most a tenth of the steps]
    #[arg(long, value_name = "STEPS")]
    pub warmup: u64,
    /// Set the decoupled weight decay of the matrices [default: 0.1]
    #[arg(long, value_name = "DECAY", value_parser = finite)]
    pub weight_decay: f64,
    /// Clip gradients to this global norm [default: 1]
    #[arg(long, value_name = "NORM", value_parser = finite)]
    pub grad_clip: f64,
    /// Seed the random numbers: weights, batches and stochastic rounding [default: the value in the
    /// recipe's file, else 0]
    #[arg(long, value_name = "SEED")]
    pub seed: u64,
    /// Evaluate every N steps [default: the preset's]
    #[arg(long, value_name = "STEPS")]
    pub eval_every: u64,
    /// Evaluate on this many batches [default: the preset's]
    #[arg(long, value_name = "BATCHES")]
    pub eval_batches: usize,
    /// Write a row of metrics.csv and a log line every N steps [default: 10]
    #[arg(long, value_name = "STEPS")]
    pub log_every: u64,
    /// Write a checkpoint every N steps [default: the preset's]
    #[arg(long, value_name = "STEPS")]
    pub checkpoint_every: u64,
    /// Write per-layer quantization statistics to telemetry.csv every N steps; 0 for never
    /// [default: 0]
    #[arg(long, value_name = "STEPS")]
    #[serde(default)]
    pub telemetry_every: u64,
    /// Recompute the activation inputs of the feed-forward in the backward pass of this many layers
    /// instead of saving them: less memory, more time, identical bits [default: 0]
    #[arg(long, value_name = "LAYERS")]
    #[serde(default)]
    pub recompute: usize,
    /// Launch the kernels of a step one by one on a GPU, instead of as a CUDA graph
    #[arg(long)]
    #[serde(default)]
    pub no_graph: bool,
    /// Expect this many data-parallel ranks, which split each batch evenly [default: the ranks of
    /// the launch, divided by --tp]
    #[arg(long, value_name = "RANKS")]
    #[serde(default)]
    pub dp: Option<usize>,
    /// Split each matrix over this many ranks (tensor parallelism), and the activations between
    /// matrices by tokens (sequence parallelism); experts stay whole and are distributed over --ep
    /// ranks, a multiple of --tp [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(default = "one")]
    pub tp: usize,
    /// Distribute the experts of each block over this many neighbouring ranks (expert parallelism)
    /// [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(default = "one")]
    pub ep: usize,
    /// Choose the exchange of tokens with the ranks of their experts, with --ep [default:
    /// all-gather if steps run as a CUDA graph, or if --ep is at most the number of experts of a
    /// token; else all-to-all]
    #[arg(long, value_name = "HOW")]
    #[serde(default)]
    pub ep_dispatch: Option<ExpertDispatchName>,
    /// Shard parameters, gradients and optimizer state over the data-parallel ranks instead of
    /// replicating them (FSDP)
    #[arg(long)]
    #[serde(default)]
    pub fsdp: bool,
    /// Shard only the optimizer state over the data-parallel ranks (ZeRO-1)
    #[arg(long, conflicts_with = "fsdp")]
    #[serde(default)]
    pub zero1: bool,
    /// Exchange gradients between ranks in this type; bf16 halves the traffic and rounds each
    /// gradient once before the exchange; sums, clipping and the optimizer use f32 [default: f32]
    #[arg(long, value_name = "TYPE")]
    #[serde(default)]
    pub grad_reduce: GradReduce,
    /// Apply a random Hadamard transform to the operands of weight gradients, with recipe nvidia
    /// [default: true]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    pub rht: bool,
    /// Round gradients stochastically, with recipe nvidia [default: true]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    pub stochastic_rounding: bool,
    /// Scale weights per 16x16 tile instead of per 1x16 block, with recipe nvidia [default: true]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    pub weight_2d: bool,
    /// Set the sign bits of the Hadamard transform, 16 bits [default: the recipe's]
    #[arg(long, value_name = "BITS")]
    #[serde(default)]
    pub rht_signs: Option<u16>,
    /// Keep projections whose path matches this regular expression in high precision; may be given
    /// several times, for example 'blocks\.0\.' [default: the recipe's]
    #[arg(long, value_name = "REGEX")]
    pub high_precision: Vec<String>,
}

impl RunConfig {
    /// Returns the number of trained parameters.
    pub fn parameters(&self) -> usize {
        match self.decorate {
            Some(_) => self.model.encoder_parameters(),
            None => self.model.parameters(),
        }
    }

    /// Returns the number of sequences per step on all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.batch * self.accumulate
    }

    /// Returns the number of tokens per step on all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.rows_per_step() * self.model.context
    }

    /// Returns the number of steps per pass over `bytes` bytes of training text. Steps draw their
    /// sequences at random, so that a pass is an amount of text.
    pub fn steps_per_epoch(&self, bytes: usize) -> f64 {
        bytes as f64 / self.tokens_per_step() as f64
    }

    /// Returns the number of steps in `epochs` passes over `bytes` bytes of training text, rounded
    /// up.
    ///
    /// # Errors
    /// Returns an error if `epochs` is not a positive number.
    pub fn steps_of(&self, epochs: f64, bytes: usize) -> Result<u64> {
        check_counts(&[
            ("batch", self.batch as u64),
            ("accumulate", self.accumulate as u64),
            ("context", self.model.context as u64),
        ])?;
        steps_of(epochs, self.steps_per_epoch(bytes))
    }

    /// Checks every value that does not need the data or the device.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check(&self) -> Result<()> {
        self.model.check()?;
        check_counts(&[
            ("eval-batches", self.eval_batches as u64),
            ("batch", self.batch as u64),
            ("accumulate", self.accumulate as u64),
        ])?;
        self.step_schedule().check()?;
        self.check_schedule()?;
        ensure!(
            self.recompute <= self.model.layers,
            "recompute is {}, but it must be at most the number of blocks ({})",
            self.recompute,
            self.model.layers
        );
        ensure!(
            self.recompute == 0 || self.decorate.is_none(),
            "recompute is {}, but it must be 0 for a decorated model: its layers are Burn's",
            self.recompute
        );
        if let Some(share) = self.balance_loss {
            ensure!(
                share.is_finite() && share >= 0.0,
                "balance-loss is {share}, but it must be zero or a positive number"
            );
            ensure!(
                self.model.experts.is_some(),
                "balance-loss is {share}, but the model has no experts to balance: leave it out, \
                 or give --model moe"
            );
        }
        if self.decorate.is_some() {
            ensure!(
                self.model.experts.is_none(),
                "decorate is given and experts is {}, but Burn has no layer of experts: leave out \
                 one of them",
                self.model.experts.unwrap_or_default()
            );
            ensure!(
                self.device == "cpu" || self.device.starts_with("cuda"),
                "decorate on device {} is not possible: decorated models rest on Burn's fusion, \
                 which cpu and cuda:N have",
                self.device
            );
        }
        self.check_parallel()?;
        self.check_switches()?;
        let all: Vec<&RecipeName> = self.all_recipes().collect();
        for (index, recipe) in all.iter().enumerate() {
            ensure!(
                !all[..index].contains(recipe),
                "compare is {}, but recipe is {} and each may be there once",
                names(&self.compare),
                self.recipe
            );
            // CubeCL's CPU runtime lacks a library function for bf16; its operations then do
            // nothing instead of failing.
            if self.device == "cpu" && self.activation_of(recipe) == Activation::Bf16 {
                bail!(
                    "{} on device cpu is not possible: CubeCL's CPU runtime computes in f32 only; \
                     use --device flex, or f32",
                    if recipe.is_high_precision() {
                        "recipe bf16"
                    } else {
                        "activation bf16"
                    }
                );
            }
            self.recipe_schedule(recipe)?;
        }
        Ok(())
    }

    /// Checks the options and the activations of a schedule of recipes.
    fn check_schedule(&self) -> Result<()> {
        let Some(schedule) = &self.schedule else {
            return Ok(());
        };
        if let Some(healing) = self.healing {
            bail!(
                "healing is {healing} and schedule is {schedule}, but a schedule has all phases: \
                 leave out one of them"
            );
        }
        let recipes = self.phase_recipes(&self.recipe)?;
        ensure!(
            recipes[0] == self.recipe,
            "schedule is {schedule}, but recipe is {}: leave out recipe, the schedule names it",
            self.recipe
        );
        let of_run = self.activation_of(&self.recipe);
        for (phase, recipe) in schedule.phases().iter().zip(&recipes) {
            ensure!(
                self.activation_of(recipe) == of_run,
                "schedule has the phase {phase}, whose activations have another type than those \
                 of phase 1, but activations keep their type: the recipe without quantization in \
                 the type of --activation is {}",
                self.baseline()
            );
        }
        Ok(())
    }

    /// Extends the run to `steps` steps. Describes its learning rate; none if it has these steps
    /// already.
    ///
    /// # Errors
    /// Returns an error if the run has more steps, or if one of its recipes has several phases.
    pub fn extend(&mut self, steps: u64) -> Result<Option<String>> {
        let recipes = self
            .all_recipes()
            .map(|recipe| self.recipe_schedule(recipe));
        let recipes: Vec<_> = recipes.collect::<Result<_>>()?;
        let said = extension(&self.step_schedule(), &recipes, steps)?;
        self.steps = steps;
        Ok(said)
    }

    /// Returns steps, learning rate and intervals.
    pub(crate) fn step_schedule(&self) -> Schedule {
        Schedule {
            steps: self.steps,
            warmup: self.warmup,
            lr: self.lr,
            grad_clip: self.grad_clip,
            weight_decay: self.weight_decay,
            eval_every: self.eval_every,
            log_every: self.log_every,
            checkpoint_every: self.checkpoint_every,
            telemetry_every: self.telemetry_every,
        }
    }

    /// Refuses a switch that a quantized recipe of the run does not have, because it would have no
    /// effect there.
    fn check_switches(&self) -> Result<()> {
        let has_none = |recipe: &&RecipeName| {
            let is_defined = self.recipes.contains_key(recipe.name());
            !recipe.is_high_precision() && (is_defined || !recipe.is_nvidia())
        };
        let mut phases = Vec::new();
        for recipe in self.all_recipes() {
            phases.extend(self.phase_recipes(recipe)?);
        }
        let switches = [
            ("rht", self.rht),
            ("stochastic-rounding", self.stochastic_rounding),
            ("weight-2d", self.weight_2d),
        ];
        let off = switches.into_iter().filter(|(_, on)| !on);
        let off: Vec<&str> = off.map(|(name, _)| name).collect();
        let of_quantized = [
            ("healing", self.healing.is_some()),
            ("high-precision", !self.high_precision.is_empty()),
            ("rht-signs", self.rht_signs.is_some()),
        ];
        let of_quantized = of_quantized.into_iter().filter(|(_, is_given)| *is_given);
        let mut of_quantized = off
            .iter()
            .copied()
            .chain(of_quantized.map(|(name, _)| name));
        if phases.iter().all(RecipeName::is_high_precision)
            && let Some(name) = of_quantized.next()
        {
            bail!("{name} is given, but no recipe of the run quantizes anything: leave it out");
        }
        for name in off {
            if let Some(recipe) = phases.iter().find(has_none) {
                bail!(
                    "{name} is false, but only recipe nvidia (alias nvfp4) has this switch, and \
                     {recipe} is trained too: leave the switch out, or write a recipe file"
                );
            }
        }
        if let Some(signs) = self.rht_signs {
            for recipe in phases.iter().filter(|recipe| !recipe.is_high_precision()) {
                let operands = self.nvfp4_recipe(recipe)?.operands();
                ensure!(
                    operands.iter().any(|operand| operand.rht.is_some()),
                    "rht-signs is {signs}, but recipe {recipe} has no transform with these signs: \
                     leave it out"
                );
            }
        }
        Ok(())
    }

    /// Returns why the kernels of a step are launched one by one; `None` if steps run as a CUDA
    /// graph.
    pub fn uncaptured(&self) -> Option<Uncaptured> {
        let all_to_all = Some(ExpertDispatchName::AllToAll);
        let reasons = [
            (self.optimizer == OptimizerName::Muon, Uncaptured::Muon),
            (self.zero1, Uncaptured::Zero1),
            (
                self.ep > 1 && self.ep_dispatch == all_to_all,
                Uncaptured::AllToAll,
            ),
        ];
        let mut of_run = reasons.into_iter();
        Uncaptured::of_device(&self.device, self.no_graph)
            .or_else(|| of_run.find_map(|(holds, reason)| holds.then_some(reason)))
    }

    /// Returns the recipes that the run trains with, in order.
    pub fn all_recipes(&self) -> impl Iterator<Item = &RecipeName> {
        std::iter::once(&self.recipe).chain(&self.compare)
    }

    /// Returns the recipes of the phases of a run with `recipe`, in order.
    ///
    /// # Errors
    /// Returns an error if the schedule has an invalid name.
    pub fn phase_recipes(&self, recipe: &RecipeName) -> Result<Vec<RecipeName>> {
        match &self.schedule {
            Some(schedule) if *recipe == self.recipe => {
                let names = schedule.phases().iter().map(|phase| {
                    let name = phase.recipe.parse();
                    name.map_err(|error| anyhow::anyhow!("schedule is {schedule}, but {error}"))
                });
                names.collect()
            }
            _ => Ok(vec![recipe.clone()]),
        }
    }

    /// Returns true if a phase of a run with `recipe` is quantized.
    ///
    /// # Errors
    /// Returns an error if the schedule has an invalid name.
    pub fn is_quantized(&self, recipe: &RecipeName) -> Result<bool> {
        let recipes = self.phase_recipes(recipe)?;
        Ok(!recipes.iter().all(RecipeName::is_high_precision))
    }

    /// Returns the recipes of a run with `recipe` over its steps: the phases of the run's schedule,
    /// else those of the recipe and its [healing](Self::healing_of).
    ///
    /// # Errors
    /// Returns the errors of [`nvfp4_recipe`](Self::nvfp4_recipe), with the phase.
    pub fn recipe_schedule(&self, recipe: &RecipeName) -> Result<RecipeSchedule> {
        match &self.schedule {
            Some(schedule) if *recipe == self.recipe => Ok(schedule.resolve(|name| {
                let name = name.parse().map_err(anyhow::Error::msg)?;
                self.nvfp4_recipe(&name)
            })?),
            _ => Ok(self.nvfp4_recipe(recipe)?.schedule(recipe.name())?),
        }
    }

    /// Returns the high-precision recipe that serves as baseline of a quantized one.
    pub fn baseline(&self) -> RecipeName {
        match self.activation {
            Activation::F32 => RecipeName::f32(),
            Activation::Bf16 => RecipeName::bf16(),
        }
    }

    /// Returns the type of the activations under `recipe`.
    pub fn activation_of(&self, recipe: &RecipeName) -> Activation {
        match recipe.name() {
            "bf16" => Activation::Bf16,
            "f32" => Activation::F32,
            _ => self.activation,
        }
    }

    /// Returns when a run with `recipe` stops quantizing: the run's value, else the recipe's.
    pub fn healing_of(&self, recipe: &RecipeName) -> Option<Healing> {
        let own = || self.recipes.get(recipe.name())?.healing;
        self.healing
            .map(|HealingOption(healing)| healing)
            .or_else(own)
            .filter(|_| !recipe.is_high_precision())
    }

    /// Returns the recipe of that name for the blocks' projections, with the overrides of the run.
    ///
    /// # Errors
    /// Returns an error if there is no such recipe, if it does not pass [`Nvfp4Recipe::check`], or
    /// if a pattern of `high_precision` is not a regular expression.
    pub fn nvfp4_recipe(&self, recipe: &RecipeName) -> Result<Nvfp4Recipe> {
        let own = self.recipes.get(recipe.name());
        let found = match (recipe.name(), own) {
            (_, Some(own)) => own.clone(),
            ("f32", None) => Nvfp4Recipe::bf16(),
            ("nvidia" | RecipeName::ALIAS, None) => Nvfp4Recipe::nvidia()
                .with_rht(self.rht)
                .with_stochastic_rounding(self.stochastic_rounding)
                .with_weight_2d(self.weight_2d),
            (name, None) => Nvfp4Recipe::preset(name).with_context(|| {
                format!("recipe is {name}, but it must be f32, a file, or a preset")
            })?,
        };
        let found = match self.rht_signs {
            Some(signs) => found.with_rht_signs(signs).with_rht_seeded(false),
            None => found,
        };
        let found = found
            .with_seed(self.seed)
            .with_healing(self.healing_of(recipe));
        let found = if recipe.is_high_precision() || self.high_precision.is_empty() {
            found
        } else {
            let patterns: Vec<&String> = self.high_precision.iter().collect();
            let group = ParamGroup::from_any_regexes(patterns).map_err(|error| {
                let ParamGroupError::InvalidPatternError(error) = error;
                anyhow::anyhow!(
                    "high-precision is {:?}, but it must be regular expressions: {error}",
                    self.high_precision
                )
            })?;
            found.with_high_precision(Some(group))
        };
        found.check()?;
        Ok(found)
    }
}

/// Formats recipes as the value of `--compare`.
fn names(recipes: &[RecipeName]) -> String {
    let names: Vec<&str> = recipes.iter().map(RecipeName::name).collect();
    names.join(",")
}
