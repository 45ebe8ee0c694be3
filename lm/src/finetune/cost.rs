//! Measures the step of a run with random weights and random tokens: no tensor and no tokenizer is
//! read.

use anyhow::Result;
use burn::tensor::{Device, Tensor};

use super::config::FinetuneConfig;
use super::memory::{SizedModel, budget};
use super::step::{DeviceBatch, step_input};
use super::task::{loss_of, masters, prepared};
use crate::config::RecipeName;
use crate::cost::{Cost, Effort, Training, measure_steps};
use crate::decoder::Decoder;
use crate::hf::DecoderConfig;
use crate::optim::Optimizer;
use crate::tokens::RowBatch;
use crate::train::StepInput;
use crate::train::rank::Rank;

/// Training of the run `config` on rows of one document each.
struct RandomTraining<'a> {
    config: &'a FinetuneConfig,
    model: DecoderConfig,
}

impl Training for RandomTraining<'_> {
    type Model = Decoder;
    type Batch = DeviceBatch;

    fn recipe(&self) -> &RecipeName {
        &self.config.recipe_name
    }

    fn tokens(&self) -> usize {
        self.config.rows_per_step() * self.config.context
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn build(&self, device: &Device) -> Result<Rank<Decoder, DeviceBatch>> {
        let config = self.config;
        let (dtype, form) = (masters(config), config.frozen);
        let model = Decoder::random(&self.model, device, dtype, form, config.seed)?;
        let model = prepared(model, config)?;
        let is_captured =
            config.uncaptured().is_none() && model.has_fixed_positions(config.context);
        let optimizer = Optimizer::adamw(config.weight_decay, config.grad_clip)?;
        let mut rank = Rank::new(device.clone(), model, optimizer);
        if is_captured {
            rank.begin_graph()?;
        }
        Ok(rank)
    }

    fn input(&self, number: u64, device: &Device) -> Result<StepInput<DeviceBatch>> {
        let &FinetuneConfig {
            seed,
            batch,
            accumulate,
            context,
            ..
        } = self.config;
        let vocab = self.model.vocab;
        let parts = (0..accumulate as u64).map(|part| {
            let number = number * accumulate as u64 + part;
            RowBatch::random(seed, number, [batch, context], vocab)
        });
        let parts: Vec<RowBatch> = parts.collect();
        let counted = parts.iter().map(RowBatch::counted).sum();
        // One document per row, and its padding, as for the rows of a run.
        let documents = (self.config.uncaptured().is_none()).then_some(2 * batch);
        step_input(&parts, counted, documents, device)
    }

    fn loss(
        &self,
        model: &Decoder,
        batch: &DeviceBatch,
        scale: Option<&Tensor<1>>,
    ) -> Result<Tensor<1>> {
        loss_of(&self.config.objective, None, model, batch, scale)
    }
}

/// Measures a step of the run `config` on `device`, with random weights of the architecture in
/// `config.json` of its model, and random tokens. The loss is the cross entropy.
///
/// # Errors
/// Returns an error if the configuration is invalid, or a layer of the model differs from Llama's or
/// has experts. Also returns an error if a number of `effort` is zero, or the device does not
/// support the type or runs out of memory.
pub fn measure(config: &FinetuneConfig, device: &Device, effort: Effort) -> Result<Cost> {
    effort.check()?;
    config.check()?;
    let budget = budget(config, 1)?;
    budget.check(device)?;
    let model = SizedModel::read(&config.model)?.config;
    let training = RandomTraining { config, model };
    budget.guard(device, || {
        measure_steps(&training, device, effort, |_| Ok(()))
    })
}
