//! The task of `nvfp4 finetune` and `nvfp4 pretrain`: decoders, trained on packed rows of tokens.

use std::path::Path;

use anyhow::{Result, ensure};
use burn::tensor::{Bytes, Device, FloatDType, Tensor};
use burn_nvfp4::loss::{CHUNK_BYTES, Head, KlDivergence, try_linear_kl_divergence};
use burn_nvfp4::nn::ExpertDispatch;
use burn_nvfp4::parallel::ProcessGroup;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::{FinetuneConfig, Objective};
use super::data::TrainingData;
use super::loss::{SUM, cross_entropy_of, flat, head};
use super::memory::budget;
use super::parameters;
use super::step::{DeviceBatch, step_input};
use crate::checkpoint::{differences, read_json};
use crate::config::Uncaptured;
use crate::decoder::{Decoder, FrozenForm};
use crate::groups::ParallelGroups;
use crate::hf::config::CONFIG_FILE;
use crate::hf::{DecoderConfig, TensorFolder};
use crate::model::ModelPartition;
use crate::optim::Optimizer;
use crate::random::hash;
use crate::tokens::{Order, Position, RowBatch};
use crate::train::{LossReduction, Settings, Sharding, StepInput, Task};

/// Training of a decoder from a Hugging Face folder.
pub struct FinetuneTask<'a> {
    config: &'a FinetuneConfig,
    data: &'a TrainingData,
    order: Order,
    /// Maximum number of documents in a row, its padding included, if steps run as a graph: their
    /// tensors have the same shapes.
    documents: Option<usize>,
    /// Teacher, on the device without autodiff, once the model is built.
    teacher: Option<Decoder>,
    /// Hashes of the inputs that stay constant during the run, once the model is built.
    frozen: Option<Frozen>,
}

/// Configuration and data of a run, as a checkpoint stores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinetuneRun {
    config: FinetuneConfig,
    /// Fingerprint of the tokens.
    data: String,
    /// Hashes of the inputs that stay constant during the run; absent in checkpoints of older
    /// versions.
    #[serde(default)]
    frozen: Option<Frozen>,
    /// Position of the next row.
    position: Position,
}

/// Hashes of the run's inputs other than its trained parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Frozen {
    /// Architecture of the model.
    architecture: String,
    /// Tensors of the model, if they are frozen.
    base: Option<String>,
    /// Architecture and tensors of the teacher.
    teacher: Option<[String; 2]>,
}

impl Frozen {
    /// Hashes the inputs of the run `config`.
    fn read(config: &FinetuneConfig) -> Result<Self> {
        let architecture = |folder: &Path| -> Result<String> {
            let config = DecoderConfig::read(folder)?;
            let json: Value = read_json(&folder.join(CONFIG_FILE))?;
            let text = format!("{config:?}{}", json["quantization_config"]);
            Ok(format!("{:016x}", hash(text.as_bytes())))
        };
        let tensors = |folder: &Path| -> Result<String> {
            Ok(format!("{:016x}", TensorFolder::open(folder)?.hash()))
        };
        Ok(Self {
            architecture: architecture(&config.model)?,
            base: (config.lora.as_ref())
                .map(|_| tensors(&config.model))
                .transpose()?,
            teacher: match &config.objective {
                Objective::CrossEntropy => None,
                Objective::Distillation { teacher, .. } => {
                    Some([architecture(teacher)?, tensors(teacher)?])
                }
            },
        })
    }

    /// Returns an error unless the run can continue from `saved` with the current inputs.
    fn check(&self, saved: &Self, config: &FinetuneConfig) -> Result<()> {
        let model = config.model.display();
        ensure!(
            self.architecture == saved.architecture,
            "config.json of {model} is not that of the checkpoint: it has changed since"
        );
        ensure!(
            self.base == saved.base,
            "the weights of {model} are not those of the checkpoint: they have changed since, and \
             its adapters were trained beside others"
        );
        if let Objective::Distillation { teacher, .. } = &config.objective {
            ensure!(
                self.teacher == saved.teacher,
                "the teacher {} is not that of the checkpoint: it has changed since",
                teacher.display()
            );
        }
        Ok(())
    }
}

impl<'a> FinetuneTask<'a> {
    /// Creates the task of the run `config` on `data`.
    pub fn new(config: &'a FinetuneConfig, data: &'a TrainingData) -> Self {
        Self {
            config,
            data,
            order: Order::new(config.seed, data.train.len()),
            documents: (config.uncaptured().is_none()).then(|| data.train.most_documents() + 1),
            teacher: None,
            frozen: None,
        }
    }

    /// Returns the configuration of the run.
    pub fn config(&self) -> &'a FinetuneConfig {
        self.config
    }

    /// Returns the rows of the run.
    pub fn data(&self) -> &'a TrainingData {
        self.data
    }

    /// Loads the teacher of `model` on the device `plain`, if there is one.
    fn load_teacher(&self, model: &Decoder, plain: &Device) -> Result<Option<Decoder>> {
        let Objective::Distillation { teacher, form, .. } = &self.config.objective else {
            return Ok(None);
        };
        let loaded = Decoder::load_frozen(teacher, plain, self.config.activation.into(), *form)?;
        let (found, own) = (loaded.config().vocab, model.config().vocab);
        ensure!(
            found == own,
            "teacher {} has {found} tokens, but the model has {own}",
            teacher.display()
        );
        for (name, cap) in [
            ("teacher", loaded.config().logit_cap),
            ("model", model.config().logit_cap),
        ] {
            ensure!(
                cap.is_none(),
                "the {name} has a soft cap of its logits (`final_logit_softcapping`), with which \
                 distillation is not supported"
            );
        }
        Ok(Some(loaded))
    }
}

impl Task for FinetuneTask<'_> {
    type Whole = Decoder;
    type Model = Decoder;
    type Batch = DeviceBatch;
    type Run = FinetuneRun;

    fn settings(&self, groups: &ParallelGroups) -> Result<Settings> {
        let (config, ranks) = (self.config, groups.world().size());
        config.check()?;
        config.check_ranks(ranks)?;
        Ok(Settings {
            recipe: config.recipe_name.clone(),
            recipes: config.recipes()?,
            schedule: config.step_schedule(),
            tokens_per_step: (config.rows_per_step() * config.context) as u64,
            steps_per_epoch: config.steps_per_epoch(self.data.train.len()),
            optimizer: Optimizer::adamw(config.weight_decay, config.grad_clip)?,
            sharding: match config.fsdp {
                true => Sharding::Full,
                false => Sharding::None,
            },
            // The loss of a step is the sum over its targets divided by their number on all ranks.
            loss: LossReduction::Sum,
            // Gradients accumulated over several forward passes are exchanged once, after the last.
            reduces_in_backward: config.accumulate == 1,
            budget: budget(config, ranks)?,
            uncaptured: config.uncaptured(),
        })
    }

    fn uncaptured(&self, model: &Decoder) -> Option<Uncaptured> {
        let mut models = [Some(model), self.teacher.as_ref()].into_iter().flatten();
        let is_fixed = models.all(|model| model.has_fixed_positions(self.config.context));
        (!is_fixed).then_some(Uncaptured::Positions)
    }

    fn build(&mut self, device: &Device) -> Result<Decoder> {
        let config = self.config;
        let masters = masters(config);
        let model = Decoder::load_frozen(&config.model, device, masters, config.frozen)?;
        let model = prepared(model, config)?;
        self.teacher = self.load_teacher(&model, &device.clone().without_autodiff())?;
        self.frozen = Some(Frozen::read(config)?);
        Ok(model)
    }

    /// Keeps the experts of this rank.
    fn part_of(&self, whole: Decoder, groups: &ParallelGroups) -> Result<Decoder> {
        groups.number_draws(&whole)?;
        if groups.expert().size() == 1 {
            return Ok(whole);
        }
        let top_k = whole.config().most_experts_of_token();
        whole.into_expert_parallel(groups, self.config.expert_dispatch(top_k).into())
    }

    fn partitions(&self, model: &Decoder, groups: &ParallelGroups) -> Vec<ModelPartition> {
        Vec::from_iter(ModelPartition::of_experts(model, groups))
    }

    fn record(&self, model: &Decoder) -> Result<Bytes> {
        parameters::to_bytes(model)
    }

    fn load(&self, whole: Decoder, record: Bytes) -> Result<Decoder> {
        parameters::load(whole, record)
    }

    fn run(&self) -> FinetuneRun {
        FinetuneRun {
            config: self.config.clone(),
            data: self.data.fingerprint.clone(),
            frozen: self.frozen.clone(),
            position: self.order.position(),
        }
    }

    fn resume(&mut self, run: FinetuneRun) -> Result<()> {
        // A run may be resumed on another device, with other launch options, on other ranks, and
        // with more steps.
        let config = FinetuneConfig {
            steps: self.config.steps.max(run.config.steps),
            device: self.config.device.clone(),
            no_graph: self.config.no_graph,
            ep: self.config.ep,
            ep_dispatch: self.config.ep_dispatch,
            ..run.config
        };
        let [saved, own] = [&config, self.config].map(FinetuneConfig::recipes);
        let [saved, own] = [saved?.to_string(), own?.to_string()];
        ensure!(
            saved == own,
            "its schedule of recipes is {saved}, but that of this run is {own}"
        );
        ensure!(
            config == *self.config,
            "it belongs to a run with another configuration{}",
            differences(&config, self.config)?
        );
        ensure!(
            run.data == self.data.fingerprint,
            "the tokens have changed since: they were {} and are {}",
            run.data,
            self.data.fingerprint
        );
        if let (Some(own), Some(saved)) = (&self.frozen, &run.frozen) {
            own.check(saved, self.config)?;
        }
        self.order.seek(run.position);
        Ok(())
    }

    fn batches(
        &mut self,
        _step: u64,
        device: &Device,
        groups: &ParallelGroups,
    ) -> Result<StepInput<DeviceBatch>> {
        let (config, group) = (self.config, groups.batch());
        let rows_of_rank = config.batch / group.size();
        let rows = self.order.take(config.rows_per_step());
        // The shares of the first forward pass, one per rank, then those of the next one.
        let parts = rows.chunks(rows_of_rank);
        let parts: Vec<RowBatch> = parts
            .map(|rows| self.data.train.batch(rows))
            .collect::<Result<_>>()?;
        let counted = parts.iter().map(RowBatch::counted).sum();
        let own = parts.into_iter().skip(group.rank()).step_by(group.size());
        let own: Vec<RowBatch> = own.collect();
        let documents = self.documents.map(|of_row| rows_of_rank * of_row);
        step_input(&own, counted, documents, device)
    }

    /// Returns this batch's contribution to the mean loss over all targets of a step: the sum over
    /// its targets times `scale`. The distribution of targets over forward passes does not matter.
    fn loss(
        &self,
        model: &Decoder,
        batch: &DeviceBatch,
        scale: Option<&Tensor<1>>,
    ) -> Result<Tensor<1>> {
        loss_of(
            &self.config.objective,
            self.teacher.as_ref(),
            model,
            batch,
            scale,
        )
    }

    /// Returns the cross entropy, in nats per target that counts.
    fn evaluate(&self, model: &Decoder, device: &Device, group: &ProcessGroup) -> Result<f64> {
        let &FinetuneConfig {
            batch, eval_rows, ..
        } = self.config;
        // The last batch has fewer rows than those of the other ranks, and an all-gather needs as
        // many.
        let model = &model.clone().with_expert_dispatch(ExpertDispatch::AllToAll);
        cross_entropy_of(model, &self.data.valid, [batch, eval_rows], device, group)
    }
}

/// Returns the type of the weights that the run `config` loads.
pub(super) fn masters(config: &FinetuneConfig) -> FloatDType {
    match config.lora {
        None => FloatDType::F32,
        Some(_) => config.activation.into(),
    }
}

/// Prepares `model`, with weights of type [`masters`] or packed ones, for the run `config`.
///
/// # Errors
/// Returns an error if the model does not fit the configuration or the device.
pub(super) fn prepared(model: Decoder, config: &FinetuneConfig) -> Result<Decoder> {
    model.config().check_length("context", config.context)?;
    let activation = config.activation.into();
    let model = match config.frozen {
        FrozenForm::High => {
            let recipes = config.recipes()?;
            let model = model.into_scheduled_training(&recipes, activation)?;
            recipes.check_model(&model)?;
            model
        }
        FrozenForm::W4a16 | FrozenForm::W4a4 => model.into_frozen(activation)?,
    };
    let model = match &config.lora {
        None => model,
        Some(lora) => model.into_lora(lora, config.seed)?,
    };
    model.with_recompute(config.recompute)
}

/// Computes [`Task::loss`] of a run with this objective and teacher.
///
/// # Errors
/// Returns an error if a type or shape does not match.
pub(super) fn loss_of(
    objective: &Objective,
    teacher: Option<&Decoder>,
    model: &Decoder,
    batch: &DeviceBatch,
    scale: Option<&Tensor<1>>,
) -> Result<Tensor<1>> {
    let scale = scale.expect("`batches` counts targets").clone();
    let scale = Tensor::from_inner(scale);
    let (inputs, targets) = (batch.inputs.clone(), batch.targets.clone());
    let features = flat(model.features_packed(inputs, &batch.rows)?);
    match (objective, teacher) {
        (Objective::Distillation { temperature, .. }, Some(teacher)) => {
            let student = Head {
                features,
                weight: model.head_weight(),
            };
            let teacher = head(teacher, batch)?;
            let params = KlDivergence {
                temperature: *temperature as f32,
                ..KlDivergence::default()
            };
            let chunk = CHUNK_BYTES;
            let loss = try_linear_kl_divergence(student, teacher, targets, scale, params, chunk)?;
            Ok(loss)
        }
        _ => Ok(model.cross_entropy(features, targets, SUM)? * scale),
    }
}
