//! Configuration of a run, and its checks.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::recipe::{RecipePhase, RecipeSchedule};
use serde::{Deserialize, Serialize};

use crate::config::{
    Activation, ExpertDispatchName, GradReduce, RecipeName, Schedule, Uncaptured, check_counts,
    extension, steps_of,
};
use crate::decoder::{FrozenForm, LoraConfig};
use crate::groups::ParallelGroups;
use crate::hf::folder::FINETUNING;

/// Configuration file in the folder of a run.
pub const CONFIG: &str = FINETUNING;

/// Training objective.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Objective {
    /// Cross entropy of the targets.
    CrossEntropy,
    /// KL divergence to a frozen teacher, at the targets that count.
    Distillation {
        /// Folder of the teacher.
        teacher: PathBuf,
        /// Form of the teacher's weights.
        #[serde(default)]
        form: FrozenForm,
        /// Temperature that divides the logits of both models.
        temperature: f64,
    },
}

/// All settings of a run; the contents of `finetune.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinetuneConfig {
    /// Folder of the initial model.
    pub model: PathBuf,
    /// Shards of training tokens.
    pub data: Vec<PathBuf>,
    /// Shards of validation tokens; if none, a share of the documents of `data` is used.
    pub valid: Vec<PathBuf>,
    /// Share of the documents held out for validation.
    pub valid_share: f64,
    /// Name of the recipe.
    pub recipe_name: RecipeName,
    /// Recipe of the layers' projections; with a schedule, that of the first phase.
    pub recipe: Nvfp4Recipe,
    /// Recipes over the steps of the run; if none, those of `recipe` and its healing.
    #[serde(default)]
    pub schedule: Option<RecipeSchedule>,
    /// Adapters; if none, all parameters are trained.
    pub lora: Option<LoraConfig>,
    /// Form of the frozen weights under adapters.
    #[serde(default)]
    pub frozen: FrozenForm,
    /// Training objective.
    pub objective: Objective,
    /// Type of the activations and of frozen weights; trained weights and the optimizer state are
    /// f32.
    pub activation: Activation,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Rows per forward pass.
    pub batch: usize,
    /// Number of forward passes whose gradients are accumulated per step.
    pub accumulate: usize,
    /// Tokens per row.
    pub context: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Warm-up steps of the learning rate, which then decays to a tenth along a cosine.
    pub warmup: u64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Global norm to which gradients are clipped.
    pub grad_clip: f64,
    /// Seed of the row order and of stochastic rounding.
    pub seed: u64,
    /// Steps between evaluations.
    pub eval_every: u64,
    /// Maximum number of rows per evaluation.
    pub eval_rows: usize,
    /// Steps between rows of `metrics.csv`.
    pub log_every: u64,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Number of layers whose backward recomputes the inputs of the feed-forward's activation
    /// instead of saving them; identical bits.
    #[serde(default)]
    pub recompute: usize,
    /// True to launch the kernels of a step one by one on a GPU, instead of as a CUDA graph.
    #[serde(default)]
    pub no_graph: bool,
    /// True to shard parameters, gradients and optimizer state over the ranks (FSDP) instead of
    /// replicating them.
    #[serde(default)]
    pub fsdp: bool,
    /// Number of ranks that the experts of each mixture are distributed over.
    #[serde(default = "crate::config::one")]
    pub ep: usize,
    /// Exchange of tokens with the ranks of their experts; if none, the
    /// [default](ExpertDispatchName::default_of).
    #[serde(default)]
    pub ep_dispatch: Option<ExpertDispatchName>,
    /// Type in which ranks exchange gradients.
    #[serde(default)]
    pub grad_reduce: GradReduce,
    /// Device: `flex`, `cpu` or `cuda:N`; a run may be resumed on another.
    pub device: String,
}

impl FinetuneConfig {
    /// Checks every value that needs neither data nor device.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check(&self) -> Result<()> {
        check_counts(&[
            ("batch", self.batch as u64),
            ("accumulate", self.accumulate as u64),
            ("context", self.context as u64),
            ("eval-rows", self.eval_rows as u64),
            ("ep", self.ep as u64),
        ])?;
        self.step_schedule().check()?;
        let recipes = self.recipes()?;
        if let Some(schedule) = &self.schedule {
            let first = &schedule.phases()[0];
            ensure!(
                (&first.recipe, &*first.name) == (&self.recipe, self.recipe_name.name()),
                "schedule begins with recipe {}, but recipe is {}, and both must be the same",
                first.name,
                self.recipe_name
            );
        }
        ensure!(
            self.valid_share > 0.0 && self.valid_share < 1.0,
            "valid-share is {}, but must be between 0 and 1",
            self.valid_share
        );
        if let Objective::Distillation { temperature, .. } = self.objective {
            ensure!(
                temperature.is_finite() && temperature > 0.0,
                "temperature is {temperature}, but it must be a positive number"
            );
        }
        if self.frozen != FrozenForm::High {
            let form = self.frozen.name();
            ensure!(
                self.lora.is_some(),
                "frozen is {form}, but all weights are trained: only those beside adapters (lora) \
                 are frozen"
            );
            ensure!(
                !recipes.phases().iter().any(RecipePhase::is_quantized),
                "frozen is {form}, but recipe {recipes} quantizes weights in high precision: there \
                 are none beside packed ones"
            );
        }
        ensure!(
            !self.fsdp || self.lora.is_none(),
            "fsdp is true and lora is given, but the weights beside adapters are not sharded: leave \
             out fsdp, each rank then has the frozen weights"
        );
        ensure!(
            self.ep == 1 || self.lora.is_none(),
            "ep is {} and lora is given, but experts beside adapters are not distributed: leave out \
             one of them",
            self.ep
        );
        ensure!(
            !self.data.is_empty(),
            "data is empty, but a run needs tokens"
        );
        Ok(())
    }

    /// Returns the recipes over the steps of the run.
    ///
    /// # Errors
    /// Returns an error if the recipe does not pass its checks.
    pub fn recipes(&self) -> Result<RecipeSchedule> {
        match &self.schedule {
            Some(schedule) => Ok(schedule.clone()),
            None => Ok(self.recipe.schedule(self.recipe_name.name())?),
        }
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
            telemetry_every: 0,
        }
    }

    /// Returns why the kernels of a step are launched one by one; `None` if steps run as a CUDA
    /// graph.
    pub(crate) fn uncaptured(&self) -> Option<Uncaptured> {
        let is_all_to_all = self.ep > 1 && self.ep_dispatch == Some(ExpertDispatchName::AllToAll);
        Uncaptured::of_device(&self.device, self.no_graph)
            .or(is_all_to_all.then_some(Uncaptured::AllToAll))
    }

    /// Returns the exchange of tokens, which have `top_k` experts, with the ranks of these.
    pub(crate) fn expert_dispatch(&self, top_k: usize) -> ExpertDispatchName {
        let is_captured = self.uncaptured().is_none();
        let default = ExpertDispatchName::default_of(is_captured, self.ep, top_k);
        self.ep_dispatch.unwrap_or(default)
    }

    /// Creates the process groups of the run on the ranks of `world`. All ranks call this function.
    ///
    /// # Errors
    /// Returns the errors of [`check_ranks`](Self::check_ranks).
    pub fn groups(&self, world: &ProcessGroup) -> Result<ParallelGroups> {
        self.check_ranks(world.size())?;
        ParallelGroups::split(world, [1, self.ep], self.grad_reduce.into())
    }

    /// Checks that `ranks` ranks, one process each, can split the rows of each forward pass.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        ensure!(
            self.batch.is_multiple_of(ranks),
            "batch is {}, but it must be a multiple of the number of ranks ({ranks}), which take \
             equal parts of its rows",
            self.batch
        );
        ensure!(
            ranks.is_multiple_of(self.ep),
            "ep is {}, but the launch has {ranks} ranks: their number must be a multiple of ep",
            self.ep
        );
        Ok(())
    }

    /// Returns the number of rows per step.
    pub fn rows_per_step(&self) -> usize {
        self.batch * self.accumulate
    }

    /// Returns the number of steps per pass over `rows` rows.
    pub fn steps_per_epoch(&self, rows: usize) -> f64 {
        rows as f64 / self.rows_per_step() as f64
    }

    /// Returns the number of steps in `epochs` passes over `rows` rows, rounded up.
    ///
    /// # Errors
    /// Returns an error if `epochs` is not a positive number.
    pub fn steps_of(&self, epochs: f64, rows: usize) -> Result<u64> {
        steps_of(epochs, self.steps_per_epoch(rows))
    }

    /// Extends the run to `steps` steps. Describes its learning rate; none if it has these steps
    /// already.
    ///
    /// # Errors
    /// Returns an error if the run has more steps, or several phases.
    pub fn extend(&mut self, steps: u64) -> Result<Option<String>> {
        let said = extension(&self.step_schedule(), &[self.recipes()?], steps)?;
        self.steps = steps;
        Ok(said)
    }
}
