//! Tasks of the trainer: model, data, loss, and contents of checkpoints, in which runs differ.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Bytes, DType, Device, Int, Tensor};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::recipe::RecipeSchedule;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::capture::copy_into;
use crate::config::{RecipeName, Schedule, Uncaptured};
use crate::groups::ParallelGroups;
use crate::memory::MemoryBudget;
use crate::model::ModelPartition;
use crate::optim::Optimizer;
use crate::ranks::{means, sums};

/// A task that a [`Trainer`](super::Trainer) trains a model for. All ranks of a run make the same
/// calls.
pub trait Task {
    /// Model on a single rank; checkpoints hold its parameters.
    type Whole: Module;
    /// A rank's part of the model.
    type Model: Module;
    /// Tensors of one forward pass.
    type Batch: GraphInput;
    /// Configuration and data of a run, as a checkpoint stores them.
    type Run: Serialize + DeserializeOwned;

    /// Checks the configuration for the ranks of `groups`, and returns the settings of the trainer.
    /// Loads nothing.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    fn settings(&self, groups: &ParallelGroups) -> Result<Settings>;

    /// Builds the model before its first step on `device`, an autodiff device.
    ///
    /// # Errors
    /// Returns an error if the model does not fit the configuration or the device, or if a file
    /// cannot be read.
    fn build(&mut self, device: &Device) -> Result<Self::Whole>;

    /// Returns why steps of `model` are not captured as a CUDA graph, besides the reason in the
    /// [settings](Settings::uncaptured).
    fn uncaptured(&self, model: &Self::Whole) -> Option<Uncaptured> {
        let _ = model;
        None
    }

    /// Takes this rank's part of `whole`, which is the same on all ranks. Parameters keep their
    /// IDs.
    ///
    /// # Errors
    /// Returns an error if the model cannot be split over the ranks.
    fn part_of(&self, whole: Self::Whole, groups: &ParallelGroups) -> Result<Self::Model>;

    /// Returns the parameters that are split over ranks, grouped by the ranks that hold the other
    /// shards.
    fn partitions(&self, model: &Self::Model, groups: &ParallelGroups) -> Vec<ModelPartition> {
        let _ = (model, groups);
        Vec::new()
    }

    /// Serializes the trained parameters of `model` as a burnpack container.
    ///
    /// # Errors
    /// Returns an error if the container cannot be made.
    fn record(&self, model: &Self::Model) -> Result<Bytes>;

    /// Loads parameters from [`record`](Self::record) into `whole`.
    ///
    /// # Errors
    /// Returns an error if the container does not match the model.
    fn load(&self, whole: Self::Whole, record: Bytes) -> Result<Self::Whole>;

    /// Returns the contents of a checkpoint after the batches taken so far.
    fn run(&self) -> Self::Run;

    /// Continues from the checkpoint of `run`.
    ///
    /// # Errors
    /// Returns an error if it is the checkpoint of another run.
    fn resume(&mut self, run: Self::Run) -> Result<()>;

    /// Returns this rank's input of step `step`, the next one, on `device`.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read.
    fn batches(
        &mut self,
        step: u64,
        device: &Device,
        groups: &ParallelGroups,
    ) -> Result<StepInput<Self::Batch>>;

    /// Returns the loss of a batch, which the step differentiates. `scale` is that of the
    /// [input](StepInput::scale).
    ///
    /// # Errors
    /// Returns an error if a type or shape does not match.
    fn loss(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        scale: Option<&Tensor<1>>,
    ) -> Result<Tensor<1>>;

    /// Returns the loss of `model`, which is without autodiff, on the validation data. The ranks of
    /// `group` share the batches.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read, or if the group fails.
    fn evaluate(&self, model: &Self::Model, device: &Device, group: &ProcessGroup) -> Result<f64>;
}

/// Tensors that the steps of a graph read.
pub trait GraphInput: Sized {
    /// Copies `from` into the memory of this input.
    ///
    /// # Errors
    /// Returns an error if the device has no graphs, or the shapes differ.
    fn filled(self, from: Self) -> Result<Self>;
}

/// Inputs and targets.
impl GraphInput for (Tensor<2, Int>, Tensor<2, Int>) {
    fn filled(self, from: Self) -> Result<Self> {
        Ok((copy_into(self.0, from.0)?, copy_into(self.1, from.1)?))
    }
}

/// Settings of a [`Trainer`](super::Trainer).
pub struct Settings {
    /// Name of the recipe; with several phases, that of the first one.
    pub recipe: RecipeName,
    /// Recipes over the steps.
    pub recipes: RecipeSchedule,
    /// Steps, learning rate and intervals.
    pub schedule: Schedule,
    /// Tokens per step on all ranks, including padding.
    pub tokens_per_step: u64,
    /// Steps per pass over the training data (epoch).
    pub steps_per_epoch: f64,
    /// Optimizer before its first step.
    pub optimizer: Optimizer,
    /// State that the ranks with other shares of the batch shard.
    pub sharding: Sharding,
    /// Relation of the losses of ranks to that of the run.
    pub loss: LossReduction,
    /// True if ranks exchange gradients during the backward.
    pub reduces_in_backward: bool,
    /// Memory of a step.
    pub budget: MemoryBudget,
    /// Reason for launching the kernels of a step one by one; `None` if steps run as a CUDA graph.
    pub uncaptured: Option<Uncaptured>,
}

/// State that is sharded over ranks instead of replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// None.
    None,
    /// Optimizer state (ZeRO-1).
    Optimizer,
    /// Parameters, gradients and optimizer state (FSDP).
    Full,
}

/// Relation of the loss of a run to those that its ranks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossReduction {
    /// The mean: each rank has the mean loss of its own tokens.
    Mean,
    /// The sum: each rank has its tokens' share of the mean loss.
    Sum,
}

impl LossReduction {
    /// Returns the losses of steps, given those of this rank of `group`.
    ///
    /// # Errors
    /// Returns an error if the group fails.
    pub(super) fn reduced(self, group: &ProcessGroup, own: Vec<f32>) -> Result<Vec<f32>> {
        match (group.size(), self) {
            (1, _) => Ok(own),
            (_, Self::Mean) => means(group, own),
            (_, Self::Sum) => sums(group, own),
        }
    }
}

/// Input of a step on the device.
pub struct StepInput<B> {
    /// Inputs of the forward passes, whose gradients are accumulated.
    pub batches: Vec<B>,
    /// Number of targets of the step that count on all ranks, `i32[1]`, if the loss is a sum over
    /// targets.
    pub counted: Option<Tensor<1, Int>>,
}

impl<B: GraphInput> StepInput<B> {
    /// Returns the factor for sums over targets: 1 / (number of targets that count), `f32[1]`
    /// without autodiff. It is computed on the device, so that a graph uses the value of its step.
    pub fn scale(&self) -> Option<Tensor<1>> {
        let counted = self.counted.clone()?;
        Some(counted.float().cast(DType::F32).recip())
    }
}

impl<B: GraphInput> GraphInput for StepInput<B> {
    fn filled(self, from: Self) -> Result<Self> {
        let pairs = self.batches.into_iter().zip(from.batches);
        let batches = pairs.map(|(out, from)| out.filled(from));
        Ok(Self {
            batches: batches.collect::<Result<_>>()?,
            counted: match (self.counted, from.counted) {
                (Some(out), Some(from)) => Some(copy_into(out, from)?),
                _ => None,
            },
        })
    }
}
