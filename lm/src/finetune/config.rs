//! The configuration of a run, and its checks.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_nvfp4::Nvfp4Recipe;
use serde::{Deserialize, Serialize};

use crate::config::{Activation, GradReduce, RecipeName, Schedule, check_counts};
use crate::decoder::{FrozenForm, LoraConfig};

/// The file with the configuration, in the folder of a run.
pub const CONFIG: &str = "finetune.json";

/// What training minimises.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Objective {
    /// The cross entropy of the targets.
    CrossEntropy,
    /// The KL divergence to a frozen model, at the targets that count.
    Distillation {
        /// Its folder.
        teacher: PathBuf,
        /// The form of its weights.
        #[serde(default)]
        form: FrozenForm,
        /// Divides the logits of both.
        temperature: f64,
    },
}

/// Everything that decides a run: what `finetune.json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinetuneConfig {
    /// The folder of the model that training begins with.
    pub model: PathBuf,
    /// Shards of tokens.
    pub data: Vec<PathBuf>,
    /// Those for validation; where there are none, a share of the documents of `data` is.
    pub valid: Vec<PathBuf>,
    /// That share.
    pub valid_share: f64,
    /// The recipe's name.
    pub recipe_name: RecipeName,
    /// The recipe of the layers' projections.
    pub recipe: Nvfp4Recipe,
    /// Adapters; where there are none, all parameters are trained.
    pub lora: Option<LoraConfig>,
    /// The form of the weights beside adapters.
    #[serde(default)]
    pub frozen: FrozenForm,
    /// What is minimised.
    pub objective: Objective,
    /// Type of the activations, and of frozen weights; trained ones and the optimizer are f32.
    pub activation: Activation,
    /// Optimizer steps.
    pub steps: u64,
    /// Rows in a forward.
    pub batch: usize,
    /// Forwards whose gradients are added up for a step.
    pub accumulate: usize,
    /// Tokens of a row.
    pub context: usize,
    /// The highest learning rate.
    pub lr: f64,
    /// Steps over which it rises; it then falls to a tenth along a cosine.
    pub warmup: u64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// Global norm to which gradients are clipped.
    pub grad_clip: f64,
    /// Of the order of rows and of stochastic rounding.
    pub seed: u64,
    /// Steps between evaluations.
    pub eval_every: u64,
    /// Rows of an evaluation at most.
    pub eval_rows: usize,
    /// Steps between rows of `metrics.csv`.
    pub log_every: u64,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Compute the inputs of the feed-forward's activation again in the backward of this many
    /// layers, instead of keeping them: the same bits.
    #[serde(default)]
    pub recompute: usize,
    /// Take the steps as a CUDA graph, captured after three of them: the same bits, without the
    /// launches.
    #[serde(default)]
    pub graph: bool,
    /// Shard parameters, gradients and the optimizer's state over the ranks (FSDP), instead of
    /// having all of them on each.
    #[serde(default)]
    pub fsdp: bool,
    /// The type in which gradients travel between ranks.
    #[serde(default)]
    pub grad_reduce: GradReduce,
    /// `flex`, `cpu` or `cuda:N`; a run may be resumed on another.
    pub device: String,
}

impl FinetuneConfig {
    /// Check every value that needs neither data nor device.
    ///
    /// # Errors
    /// Names the value that is wrong, what it is, and what it may be.
    pub fn check(&self) -> Result<()> {
        check_counts(&[
            ("steps", self.steps),
            ("batch", self.batch as u64),
            ("accumulate", self.accumulate as u64),
            ("context", self.context as u64),
            ("eval-every", self.eval_every),
            ("eval-rows", self.eval_rows as u64),
            ("log-every", self.log_every),
            ("checkpoint-every", self.checkpoint_every),
        ])?;
        Schedule {
            steps: self.steps,
            warmup: self.warmup,
            lr: self.lr,
            grad_clip: self.grad_clip,
            weight_decay: self.weight_decay,
        }
        .check()?;
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
                !self.recipe.is_quantized(),
                "frozen is {form}, but recipe {} quantizes weights in high precision: there are \
                 none beside packed ones",
                self.recipe_name
            );
        }
        ensure!(
            !self.graph || self.device.starts_with("cuda:"),
            "graph is true and device is {}, but only GPUs (cuda:N) have graphs",
            self.device
        );
        ensure!(
            !self.fsdp || self.lora.is_none(),
            "fsdp is true and lora is given, but the weights beside adapters are not sharded: leave \
             out fsdp, each rank then has the frozen weights"
        );
        ensure!(
            !self.data.is_empty(),
            "data is empty, but a run needs tokens"
        );
        Ok(self.recipe.check()?)
    }

    /// Fail unless `ranks` ranks, a process each, can share the rows of each forward.
    ///
    /// # Errors
    /// Names the value that is wrong, what it is, and what it may be.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        ensure!(
            self.batch.is_multiple_of(ranks),
            "batch is {}, but it must be a multiple of the number of ranks ({ranks}), which take \
             equal parts of its rows",
            self.batch
        );
        Ok(())
    }

    /// Rows of a step.
    pub fn rows_per_step(&self) -> usize {
        self.batch * self.accumulate
    }
}
