//! `nvfp4 dev finetune-cost`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::config::{Activation, GradReduce, Preset, RunConfig};
use nvfp4_lm::cost::{Cost, KernelClass, release};
use nvfp4_lm::decoder::lora::DEFAULT_TARGETS;
use nvfp4_lm::decoder::{FrozenForm, LoraConfig};
use nvfp4_lm::finetune::cost::measure;
use nvfp4_lm::finetune::{FinetuneConfig, Objective};
use serde::Serialize;

use super::measure::{StepOptions, note_start};
use crate::device::{DeviceName, hardware};
use crate::options::listed::listed;
use crate::options::recipes::{self, named};
use crate::options::shared::DeviceOption;

#[derive(Args)]
pub(crate) struct CostOfFinetuning {
    /// Measure models of the architecture in this folder's config.json, with random weights; other
    /// files are not read
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Measure these recipes
    #[arg(
        long,
        value_name = "RECIPE,..",
        value_delimiter = ',',
        value_parser = listed::<String>(recipes::values),
        default_value = "bf16"
    )]
    recipes: Vec<String>,
    /// Freeze the model and train LoRA adapters of this rank on its projections
    #[arg(long, value_name = "RANK")]
    lora: Option<usize>,
    /// Train adapters on modules whose name matches this regular expression [default: all
    /// projections of attention and dense feed-forwards]
    #[arg(long, value_name = "REGEX", requires = "lora")]
    lora_targets: Option<String>,
    /// Keep the frozen weights in this form
    #[arg(long, value_name = "FORM", requires = "lora", default_value = "high")]
    frozen: FrozenForm,
    /// Use a batch of this many sequences
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Accumulate the gradients of this many batches per step
    #[arg(long, value_name = "N", default_value_t = 1)]
    accumulate: usize,
    /// Use sequences of this length
    #[arg(long, value_name = "N", default_value_t = 1024)]
    context: usize,
    /// Compute activations in this type [default: bf16 on a GPU, else f32]
    #[arg(long, value_name = "TYPE")]
    activation: Option<Activation>,
    /// Recompute the activation inputs of the feed-forward in the backward pass of this many layers
    /// instead of saving them
    #[arg(long, value_name = "LAYERS", default_value_t = 0)]
    recompute: usize,
    /// Launch the kernels of a step one by one on a GPU, instead of as a CUDA graph
    #[arg(long)]
    no_graph: bool,
    #[command(flatten)]
    steps: StepOptions,
    #[command(flatten)]
    device: DeviceOption,
}

/// Contents of the file given by `--out`.
#[derive(Serialize)]
struct Figures {
    hardware: Option<String>,
    results: Vec<Figure>,
}

/// Measurements of one recipe.
#[derive(Serialize)]
struct Figure {
    config: FinetuneConfig,
    #[serde(flatten)]
    cost: Cost,
}

impl CostOfFinetuning {
    pub(crate) fn run(self) -> Result<()> {
        let name = self.device.name()?;
        let device = name.open()?.without_autodiff();
        let effort = self.steps.effort();
        let hardware = hardware(&device);
        let mut results = Vec::new();
        for recipe in &self.recipes {
            let config = self.config(recipe, name)?;
            let cost = measure(&config, &device, effort)?;
            note_start(&config.recipe_name.to_string(), &cost);
            print(&config, &cost);
            self.steps.measure.print_kernels("  ", &cost.kernels);
            results.push(Figure { config, cost });
            release(&device);
        }
        self.steps.measure.write(&Figures { hardware, results })
    }

    /// Returns the configuration of a run with `recipe` on the device `name`.
    fn config(&self, recipe: &str, name: DeviceName) -> Result<FinetuneConfig> {
        let activation = match (self.activation, recipe, name) {
            (Some(activation), _, _) => activation,
            (None, "f32", _) => Activation::F32,
            (None, _, DeviceName::Cuda(_)) => Activation::Bf16,
            (None, _, _) => Activation::F32,
        };
        let device = name.to_string();
        let mut recipes = BTreeMap::new();
        let recipe_name = named(recipe, "recipes", &mut recipes)?;
        let run = RunConfig {
            recipe: recipe_name.clone(),
            recipes,
            activation,
            ..RunConfig::preset(Preset::default(), &device)
        };
        Ok(FinetuneConfig {
            model: self.model.clone(),
            // Tokens are random.
            data: vec!["random".into()],
            valid: vec![],
            valid_share: 0.5,
            recipe: run.nvfp4_recipe(&recipe_name)?,
            recipe_name,
            schedule: None,
            lora: self.lora.map(|rank| LoraConfig {
                rank,
                alpha: 2.0 * rank as f64,
                targets: (self.lora_targets.clone()).unwrap_or_else(|| DEFAULT_TARGETS.into()),
            }),
            frozen: self.frozen,
            objective: Objective::CrossEntropy,
            activation,
            steps: 1000,
            batch: self.batch,
            accumulate: self.accumulate,
            context: self.context,
            lr: 1e-5,
            warmup: 0,
            weight_decay: 0.0,
            grad_clip: 1.0,
            seed: 0,
            eval_every: 1000,
            eval_rows: 1,
            log_every: 1000,
            checkpoint_every: 1000,
            recompute: self.recompute,
            no_graph: self.no_graph,
            fsdp: false,
            ep: 1,
            ep_dispatch: None,
            grad_reduce: GradReduce::F32,
            device,
        })
    }
}

/// Prints the measurements of a run.
fn print(config: &FinetuneConfig, cost: &Cost) {
    let trained = match &config.lora {
        None => "all parameters".to_owned(),
        Some(lora) => format!(
            "adapters of rank {} beside {} weights",
            lora.rank,
            config.frozen.name()
        ),
    };
    println!(
        "{}, {trained}, {} x {} tokens: a step {:.3} ms ({:.0} tokens/s)",
        config.recipe_name,
        config.rows_per_step(),
        config.context,
        1e3 * cost.median(),
        cost.tokens_per_s()
    );
    if let Some(memory) = cost.memory {
        println!(
            "  memory: peak {:.0} MB, pools {:.0} MB, saved for the backward {:.0} MB",
            memory.peak as f64 / 1e6,
            memory.reserved as f64 / 1e6,
            memory.kept as f64 / 1e6
        );
    }
    for class in KernelClass::ALL {
        let own = cost.kernels.iter().filter(|kernel| kernel.class == class);
        let launches: usize = own.map(|kernel| kernel.launches).sum();
        if launches > 0 {
            let seconds = cost.of(class);
            println!(
                "  {:>9.3} ms {launches:>5} x {}",
                1e3 * seconds,
                class.name()
            );
        }
    }
}
