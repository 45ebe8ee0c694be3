//! Options shared by `finetune` and `pretrain`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;
use nvfp4::Nvfp4Recipe;
use nvfp4::recipe::{NamedSchedule, RecipeSchedule};
use nvfp4_lm::config::{Activation, ExpertDispatchName, GradReduce, Preset, RecipeName, RunConfig};
use nvfp4_lm::decoder::FrozenForm;
use nvfp4_lm::interchange::{Dialect, Scheme};

use crate::device::DeviceName;
use crate::options::listed::listed;
use crate::options::recipes::{self, named};
use crate::options::shared::{ConfigOption, DeviceOption, SaveOption, SessionOptions};

/// Default values of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
}

/// Steps of a run without `--steps` and `--epochs`.
pub(super) const STEPS: u64 = 1000;

/// Arguments with which a command starts no new run, so that it needs none of the settings.
pub(crate) const NOT_NEW: [&str; 2] = ["resume", "print_config"];

/// Options that the run's folder records, and that a resumed run therefore must not set.
const SETTINGS: [&str; 28] = [
    "out",
    "data",
    "valid",
    "valid_share",
    "recipe",
    "schedule",
    "qat",
    "high_precision",
    "batch",
    "accumulate",
    "context",
    "lr",
    "warmup",
    "weight_decay",
    "grad_clip",
    "seed",
    "eval_every",
    "eval_rows",
    "log_every",
    "checkpoint_every",
    "activation",
    "recompute",
    "no_graph",
    "fsdp",
    "grad_reduce",
    "save_dtype",
    "export",
    "export_scheme",
];

#[derive(Args)]
pub(crate) struct TrainingOptions {
    /// Read these files and folders: tokens (.tokens), JSON lines (.jsonl), lists of JSON rows
    /// (.json) and plain text
    ///
    /// A row of JSON is {"text": TEXT}, {"prompt": TEXT, "completion": TEXT} (only the completion
    /// counts in the loss), {"messages": [{"role": ROLE, "content": TEXT}, ..]} or ShareGPT's
    /// {"conversations": [{"from": ROLE, "value": TEXT}, ..]} (only the assistant's text counts;
    /// uses the chat template of the tokenizer's folder), or Alpaca's {"instruction": TEXT,
    /// "input": TEXT, "output": TEXT} (only the output counts; uses the chat template, or Alpaca's
    /// prompt if there is none).
    #[arg(long, value_name = "PATH", num_args = 1.., required_unless_present_any = NOT_NEW)]
    pub(crate) data: Vec<PathBuf>,
    /// Evaluate on these files and folders [default: a share of the documents of --data, or the end
    /// of the only document]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) valid: Vec<PathBuf>,
    /// Hold out this share of the documents for evaluation
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.05,
        conflicts_with = "valid"
    )]
    pub(crate) valid_share: f64,
    /// Write the output to this folder: the run and the trained model. It must hold no run
    #[arg(long, value_name = "DIR", required_unless_present_any = NOT_NEW)]
    pub(crate) out: Option<PathBuf>,
    /// Resume the run in this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = SETTINGS)]
    pub(crate) resume: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) file: ConfigOption,
    #[command(flatten)]
    pub(crate) session: SessionOptions,
    /// Train with this recipe [default: nvidia; bf16 with --lora]
    #[arg(
        long,
        value_name = "RECIPE",
        value_parser = listed::<String>(recipes::values),
        conflicts_with = "qat"
    )]
    pub(crate) recipe: Option<String>,
    /// Change the recipe at shares of the steps: `nvidia,0.85=mxfp8` begins with nvidia and ends
    /// with mxfp8; the modes :fwd_bf16, :bwd_bf16 and :bf16 after a recipe compute the forward, the
    /// backward or both in high precision [default: one recipe]
    #[arg(long, value_name = "PHASES", conflicts_with_all = ["recipe", "qat"])]
    pub(crate) schedule: Option<NamedSchedule>,
    /// Train for serving in NVFP4: the forward pass quantizes weights (w4a16) or weights and
    /// activations (w4a4), rounded to nearest; the backward pass is in high precision
    #[arg(long, value_name = "SCHEME")]
    pub(crate) qat: Option<Scheme>,
    /// Keep projections whose path matches this regular expression in high precision; may be given
    /// several times, for example 'layers\.0\.' [default: the recipe's]
    #[arg(long, value_name = "REGEX")]
    pub(crate) high_precision: Vec<String>,
    /// Train for this many optimizer steps; with --resume, extend the run to them [default: 1000]
    #[arg(long, value_name = "STEPS", conflicts_with = "epochs")]
    pub(crate) steps: Option<u64>,
    /// Train for this many passes over the training data, instead of --steps; parts of a pass are
    /// allowed, and the steps are rounded up
    #[arg(long, value_name = "N")]
    pub(crate) epochs: Option<f64>,
    /// Use a batch of this many sequences; the ranks divide it evenly
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) batch: usize,
    /// Accumulate the gradients of this many batches per step
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) accumulate: usize,
    /// Use sequences of this length: tokens of a row into which documents are packed; longer
    /// documents are cut [default: 1024, or the model's maximum context]
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,
    /// Set the peak learning rate [default: 1e-5; 2e-4 with --lora; 3e-4 for pretrain]
    #[arg(long, value_name = "RATE")]
    pub(crate) lr: Option<f64>,
    /// Warm up the learning rate over this many steps; it then decays to a tenth along a cosine
    /// [default: a tenth of the steps, at most 100]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warmup: Option<u64>,
    /// Set the decoupled weight decay of the matrices [default: 0; 0.1 for pretrain]
    #[arg(long, value_name = "DECAY")]
    pub(crate) weight_decay: Option<f64>,
    /// Clip gradients to this global norm
    #[arg(long, value_name = "NORM", default_value_t = 1.0)]
    pub(crate) grad_clip: f64,
    /// Seed the random numbers: row order and stochastic rounding
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Evaluate every N steps
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    pub(crate) eval_every: u64,
    /// Evaluate on at most this many rows
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) eval_rows: usize,
    /// Write a row of metrics.csv and a log line every N steps
    #[arg(long, value_name = "STEPS", default_value_t = 10)]
    pub(crate) log_every: u64,
    /// Write a checkpoint every N steps
    #[arg(long, value_name = "STEPS", default_value_t = 500)]
    pub(crate) checkpoint_every: u64,
    /// Compute activations in this type [default: bf16 on a GPU, else f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) activation: Option<Activation>,
    /// Recompute the activation inputs of the feed-forward in the backward pass of this many layers
    /// instead of saving them: less memory, more time, identical bits
    #[arg(long, value_name = "LAYERS", default_value_t = 0)]
    pub(crate) recompute: usize,
    /// Launch the kernels of a step one by one on a GPU, instead of as a CUDA graph
    #[arg(long)]
    pub(crate) no_graph: bool,
    /// Shard parameters, gradients and optimizer state over the data-parallel ranks instead of
    /// replicating them (FSDP)
    #[arg(long)]
    pub(crate) fsdp: bool,
    /// Distribute the experts of each block over this many neighbouring ranks (expert parallelism)
    /// [default: 1]
    #[arg(long, value_name = "RANKS")]
    pub(crate) ep: Option<usize>,
    /// Choose the exchange of tokens with the ranks of their experts, with --ep [default:
    /// all-gather if steps run as a CUDA graph, or if --ep is at most the number of experts of a
    /// token; else all-to-all]
    #[arg(long, value_name = "HOW")]
    pub(crate) ep_dispatch: Option<ExpertDispatchName>,
    /// Exchange gradients between ranks in this type; bf16 halves the traffic and rounds each
    /// gradient once before the exchange
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub(crate) grad_reduce: GradReduce,
    #[command(flatten)]
    pub(crate) saved: SaveOption,
    /// Also write the model quantized to NVFP4, in this dialect
    #[arg(long, value_name = "DIALECT")]
    pub(crate) export: Option<Dialect>,
    /// Quantize weights only or activations too in the output of --export [default: that of --qat,
    /// else w4a16]
    #[arg(long, value_name = "SCHEME", requires = "export")]
    pub(crate) export_scheme: Option<Scheme>,
    #[command(flatten)]
    pub(crate) device: DeviceOption,
}

impl TrainingOptions {
    /// Returns the recipe, its name, and the schedule if one is given. With adapters, the form of
    /// the frozen weights is `frozen`; frozen weights in high precision are quantized in each step
    /// only if that is asked for.
    pub(super) fn recipe(
        &self,
        activation: Activation,
        device: DeviceName,
        frozen: Option<FrozenForm>,
    ) -> Result<(RecipeName, Nvfp4Recipe, Option<RecipeSchedule>)> {
        if let Some(packed) = frozen.filter(|form| *form != FrozenForm::High) {
            self.refuse_recipes(packed)?;
        }
        let mut recipes = BTreeMap::new();
        let schedule = self.schedule.clone().map(|schedule| {
            schedule.renamed(|name| {
                let found = named(name, "schedule", &mut recipes)?;
                anyhow::Ok(found.name().to_owned())
            })
        });
        let schedule = schedule.transpose()?;
        let name = match (&schedule, self.qat) {
            (Some(schedule), _) => named(&schedule.phases()[0].recipe, "schedule", &mut recipes)?,
            (None, None) => {
                let default = if frozen.is_some() { "bf16" } else { "nvidia" };
                let name = self.recipe.as_deref().unwrap_or(default);
                named(name, "recipe", &mut recipes)?
            }
            (None, Some(scheme)) => {
                let name = format!("qat_{}", scheme.name());
                recipes.insert(name.clone(), scheme.recipe());
                named(&name, "qat", &mut recipes)?
            }
        };
        let mut config = RunConfig::preset(Preset::default(), &device.to_string());
        config.recipe = name.clone();
        config.recipes = recipes;
        config.schedule = schedule;
        config.activation = activation;
        config.seed = self.seed;
        config.high_precision.clone_from(&self.high_precision);
        ensure!(
            self.high_precision.is_empty() || config.is_quantized(&name)?,
            "high-precision is given, but recipe {name} quantizes nothing"
        );
        let phases = config.recipe_schedule(&name)?;
        let schedule = self.schedule.is_some().then_some(phases);
        Ok((name.clone(), config.nvfp4_recipe(&name)?, schedule))
    }

    /// Refuses recipes with packed weights: these are quantized already, and a recipe would be
    /// ignored silently.
    fn refuse_recipes(&self, frozen: FrozenForm) -> Result<()> {
        let recipe = self.recipe.as_deref();
        let given = match (recipe, self.qat, &self.schedule) {
            (_, _, Some(schedule)) => format!("schedule is {schedule}"),
            (None | Some("bf16" | "f32"), None, _) => match self.high_precision.is_empty() {
                true => return Ok(()),
                false => "high-precision is given".to_owned(),
            },
            (Some(recipe), _, _) => format!("recipe is {recipe}"),
            (None, Some(qat), _) => format!("qat is {}", qat.name()),
        };
        bail!(
            "{given}, but frozen is {0}: the weights beside the adapters are packed already. Leave \
             it out, or keep them in high precision (--frozen high)",
            frozen.name()
        )
    }

    /// Returns the type of activations under the recipe.
    pub(super) fn activation(&self, device: DeviceName) -> Activation {
        let first = (self.schedule.as_ref()).map(|schedule| &*schedule.phases()[0].recipe);
        match (self.activation, self.recipe.as_deref().or(first), device) {
            (Some(activation), _, _) => activation,
            (None, Some("f32"), _) => Activation::F32,
            (None, _, DeviceName::Cuda(_)) => Activation::Bf16,
            (None, _, _) => Activation::F32,
        }
    }
}
