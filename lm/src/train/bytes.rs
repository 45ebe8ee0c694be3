//! The task of `nvfp4 train`: a language model over bytes, trained on text files.

use std::marker::PhantomData;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor};
use burn_nvfp4::parallel::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::task::{LossReduction, Settings, Sharding, StepInput, Task};
use crate::checkpoint::{Saved, differences};
use crate::config::{ModelConfig, RecipeName, RunConfig};
use crate::data::{self, Corpus, Fingerprint};
use crate::groups::ParallelGroups;
use crate::memory::bytes::budget;
use crate::model::{LanguageModel, ModelPartition};
use crate::optim::Optimizer;
use crate::ranks::in_turns;

/// Training of the model `M` of a run with one of its recipes.
pub struct ByteTask<'a, M> {
    config: &'a RunConfig,
    recipe: RecipeName,
    corpus: &'a Corpus,
    model: PhantomData<M>,
}

/// Configuration and data of a run, as a checkpoint stores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ByteRun {
    /// Configuration of the run.
    pub config: RunConfig,
    /// Recipe of the checkpoint; one of the run's.
    pub recipe: RecipeName,
    /// Fingerprint of the training text.
    pub corpus: Fingerprint,
}

/// A checkpoint of `nvfp4 train`.
pub type Checkpoint = Saved<ByteRun>;

/// Inputs and targets of a forward pass, both `[batch, time]`.
pub(crate) type Batch = (Tensor<2, Int>, Tensor<2, Int>);

impl<'a, M> ByteTask<'a, M> {
    /// Creates the task of the run `config` with `recipe` on `corpus`.
    pub fn new(config: &'a RunConfig, recipe: RecipeName, corpus: &'a Corpus) -> Self {
        Self {
            config,
            recipe,
            corpus,
            model: PhantomData,
        }
    }
}

/// Returns the input of a step on `device`, with a forward pass for each of `batches`.
pub(crate) fn step_input(
    batches: impl IntoIterator<Item = data::Batch>,
    device: &Device,
) -> StepInput<Batch> {
    let batches = batches.into_iter().map(|batch| batch.tensors(device));
    StepInput {
        batches: batches.collect(),
        counted: None,
    }
}

/// Returns the training objective of a batch.
pub(crate) fn loss<M: LanguageModel>(
    model: &M,
    (inputs, targets): &Batch,
    _scale: Option<&Tensor<1>>,
) -> Result<Tensor<1>> {
    Ok(model.training_loss(inputs.clone(), targets.clone()))
}

impl<M: LanguageModel> Task for ByteTask<'_, M> {
    type Whole = M::Whole;
    type Model = M;
    type Batch = Batch;
    type Run = ByteRun;

    fn settings(&self, groups: &ParallelGroups) -> Result<Settings> {
        self.config.check()?;
        self.config.check_ranks(groups.world().size())?;
        self.corpus.check(self.config.model.context)?;
        let (config, recipe) = (self.config, &self.recipe);
        Ok(Settings {
            recipe: recipe.clone(),
            schedule: config.step_schedule(),
            recipes: config.recipe_schedule(recipe)?,
            tokens_per_step: config.tokens_per_step() as u64,
            steps_per_epoch: config.steps_per_epoch(self.corpus.fingerprint().train_bytes),
            optimizer: Optimizer::new(config)?,
            sharding: match (config.fsdp, config.zero1) {
                (true, _) => Sharding::Full,
                (false, true) => Sharding::Optimizer,
                (false, false) => Sharding::None,
            },
            loss: LossReduction::Mean,
            // Accumulated gradients are exchanged once, after the last pass.
            reduces_in_backward: config.accumulate == 1,
            budget: budget(config, recipe),
            uncaptured: config.uncaptured(),
        })
    }

    fn build(&mut self, device: &Device) -> Result<M::Whole> {
        M::build(self.config, &self.recipe, device)
    }

    fn part_of(&self, whole: M::Whole, groups: &ParallelGroups) -> Result<M> {
        M::part_of(whole, self.config, groups)
    }

    fn partitions(&self, model: &M, groups: &ParallelGroups) -> Vec<ModelPartition> {
        model.partitions(groups)
    }

    fn record(&self, model: &M) -> Result<Bytes> {
        Ok(model.valid().into_record().into_bytes()?)
    }

    fn load(&self, whole: M::Whole, record: Bytes) -> Result<M::Whole> {
        Ok(whole.try_load_record(ModuleRecord::from_bytes(record)?)?)
    }

    fn run(&self) -> ByteRun {
        ByteRun {
            config: self.config.clone(),
            recipe: self.recipe.clone(),
            corpus: self.corpus.fingerprint().clone(),
        }
    }

    fn resume(&mut self, run: ByteRun) -> Result<()> {
        let config = self.config;
        // A run may be resumed on another device, with other launch options, on other ranks, and
        // with more steps.
        let resumed = RunConfig {
            steps: config.steps.max(run.config.steps),
            device: config.device.clone(),
            no_graph: config.no_graph,
            dp: config.dp,
            tp: config.tp,
            ep: config.ep,
            ep_dispatch: config.ep_dispatch,
            fsdp: config.fsdp,
            zero1: config.zero1,
            ..run.config
        };
        ensure!(
            resumed == *config && run.recipe == self.recipe,
            "it belongs to a run with another configuration{}",
            differences(&resumed, config)?
        );
        let origin = match config.data.is_empty() {
            true => ", which for the default text is that of the build that began the run",
            false => "",
        };
        ensure!(
            run.corpus == *self.corpus.fingerprint(),
            "data has changed since the checkpoint: it was {}, and is {}; a run resumes only with \
             the same text{origin}",
            run.corpus,
            self.corpus.fingerprint()
        );
        Ok(())
    }

    fn batches(
        &mut self,
        step: u64,
        device: &Device,
        groups: &ParallelGroups,
    ) -> Result<StepInput<Batch>> {
        let config = self.config;
        let (rows, context) = (config.rows_per_step(), config.model.context);
        let batch = (self.corpus).train_batch(config.seed, step, rows, context);
        let group = groups.batch();
        // The shares of the first forward pass, one per rank, then those of the next one.
        let parts = batch.split(group.size() * config.accumulate).into_iter();
        let own = parts.skip(group.rank()).step_by(group.size());
        Ok(step_input(own, device))
    }

    /// Returns this batch's contribution to the mean over the forward passes of a step.
    fn loss(&self, model: &M, batch: &Batch, scale: Option<&Tensor<1>>) -> Result<Tensor<1>> {
        let loss = loss(model, batch, scale)?;
        Ok(match self.config.accumulate {
            1 => loss,
            passes => loss.div_scalar(passes as f64),
        })
    }

    /// Returns the mean loss, in nats per byte.
    fn evaluate(&self, model: &M, device: &Device, group: &ProcessGroup) -> Result<f64> {
        let &RunConfig {
            eval_batches,
            batch,
            model: ModelConfig { context, .. },
            ..
        } = self.config;
        // The ranks take the batches round-robin. All ranks run the same number of forward passes,
        // as sharded models require; surplus passes are not counted.
        let (rank, size) = (group.rank(), group.size());
        let losses = (0..eval_batches.div_ceil(size))
            .map(|round| {
                let index = (round * size + rank).min(eval_batches - 1);
                let batch = (self.corpus).valid_batch(index, eval_batches, batch, context);
                let (inputs, targets) = batch.tensors(device);
                model.loss(inputs, targets)
            })
            .collect();
        let losses = Tensor::cat(losses, 0).into_data();
        let losses: Vec<f32> = losses.iter::<f32>().collect();
        let losses = in_turns(group, &losses, eval_batches)?;
        let sum: f64 = losses.into_iter().map(f64::from).sum();
        Ok(sum / eval_batches as f64)
    }
}
