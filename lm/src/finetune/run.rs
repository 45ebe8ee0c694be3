//! A run: steps, evaluation, records, checkpoints, resuming.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_nvfp4::loss::{CHUNK_BYTES, Head, KlDivergence, try_linear_kl_divergence};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::{Nvfp4State, set_mode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::config::{FinetuneConfig, Objective};
use super::data::TrainingData;
use super::loss::{SUM, cross_entropy_of, flat, head};
use super::memory::budget;
use super::parameters;
use super::ranks::Ranks;
use super::step::{DeviceBatch, Graph, StepInput, most_documents};
use crate::capture::GraphSteps;
use crate::checkpoint::{self, FORMAT, RunState, Saved, Timing};
use crate::decoder::{Decoder, FrozenForm};
use crate::groups::check_graph;
use crate::hf::config::CONFIG_FILE;
use crate::hf::{DecoderConfig, Dtype, TensorFolder};
use crate::memory::MemoryBudget;
use crate::metrics::{Clock, MetricsLog, Row, is_due};
use crate::optim::{Optimizer, learning_rate};
use crate::random::hash;
use crate::ranks::{agree, any, on_first};
use crate::tokens::{Order, Position, RowBatch, Rows};
use crate::train::{Observer, Outcome};

/// State that decides how a run continues, apart from the parameters and the optimizer state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FinetuneState {
    format: u32,
    config: FinetuneConfig,
    /// Fingerprint of the tokens.
    data: String,
    /// Hashes of the inputs that stay constant during the run; absent in checkpoints of older
    /// versions.
    #[serde(default)]
    frozen: Option<Frozen>,
    step: u64,
    /// Position of the next row.
    position: Position,
    /// Losses of the steps since the last row of `metrics.csv`.
    losses: Vec<f32>,
    /// Position in the random stream of each layer.
    nvfp4: Nvfp4State,
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
            let json: Value = checkpoint::read_json(&folder.join(CONFIG_FILE))?;
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

impl RunState for FinetuneState {
    fn step(&self) -> u64 {
        self.step
    }
}

/// A run: the model, its optimizer, and its progress.
pub struct Finetune<'a> {
    config: &'a FinetuneConfig,
    data: &'a TrainingData,
    /// Device with autodiff.
    device: Device,
    folder: PathBuf,
    /// None while a step updates the model: the optimizer is then the only owner of the weights and
    /// updates them in place.
    model: Option<Decoder>,
    optimizer: Optimizer,
    /// Teacher, on the device without autodiff.
    teacher: Option<Decoder>,
    order: Order,
    step: u64,
    /// Losses since the last row.
    losses: Vec<f32>,
    /// Losses that are still on the device.
    pending: Vec<Tensor<1>>,
    metrics: MetricsLog,
    /// Seconds spent by earlier processes of the run.
    earlier: f64,
    started: Instant,
    /// Step of the last checkpoint.
    saved: Option<u64>,
    /// The steps as a graph, while a graph is used.
    graph: Option<Graph>,
    budget: MemoryBudget,
    ranks: Ranks,
    /// Hashes of the run's inputs.
    frozen: Frozen,
}

/// Reason why a run has its model: a failure between taking it out and putting it back ends the
/// run.
const KEPT: &str = "the run goes on only after a step that was whole";

impl<'a> Finetune<'a> {
    /// Starts the run `config` on `device`, or resumes it if `folder` has a checkpoint of it.
    ///
    /// # Errors
    /// Returns an error if the configuration does not fit the model or the device, a folder cannot
    /// be read, the teacher has another vocabulary, or the checkpoint is corrupt or belongs to
    /// another run. Returns [`OutOfMemory`](crate::memory::OutOfMemory) before anything is loaded
    /// if the device has less memory than a step needs at the least, or later if it runs out of
    /// memory.
    pub fn open(
        config: &'a FinetuneConfig,
        data: &'a TrainingData,
        device: &Device,
        folder: &Path,
    ) -> Result<Self> {
        Self::open_rank(config, data, device, folder, ProcessGroup::single())
    }

    /// Does the same as [`open`](Self::open) on one rank of `world`. Each rank is a process with
    /// its own device, and all ranks make the same calls. The ranks split the rows of each forward
    /// pass evenly. All ranks see the same `folder`; rank 0 writes.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open). Also returns an error if the configuration does
    /// not fit the number of ranks, if a graph is used with host collectives, or if another rank
    /// fails.
    pub fn open_rank(
        config: &'a FinetuneConfig,
        data: &'a TrainingData,
        device: &Device,
        folder: &Path,
        world: ProcessGroup,
    ) -> Result<Self> {
        let open = || {
            config.check()?;
            config.check_ranks(world.size())?;
            if config.graph {
                check_graph(&world, world.size())?;
            }
            let budget = budget(config, world.size())?;
            budget.check(device)?;
            let parts = (config, data, device);
            budget.guard(device, || Self::load(parts, budget.clone(), folder, &world))
        };
        let mut run = agree(&world, open())?;
        let device = run.device.clone();
        let joined = (run.budget.clone()).guard(&device, || run.join());
        agree(&world, joined)?;
        // No rank writes before all ranks have read.
        if run.saved.is_none() {
            run.metrics.write()?;
        }
        Ok(run)
    }

    /// Joins the ranks, with this rank's shards of the parameters or with gradients summed over the
    /// ranks.
    fn join(&mut self) -> Result<()> {
        let model = self.model.take().expect(KEPT);
        let (ranks, optimizer) = (&mut self.ranks, &mut self.optimizer);
        self.model = Some(ranks.join(model, optimizer, self.config, &self.device)?);
        Ok(())
    }

    fn load(
        (config, data, device): (&'a FinetuneConfig, &'a TrainingData, &Device),
        budget: MemoryBudget,
        folder: &Path,
        world: &ProcessGroup,
    ) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let plain = device.clone().without_autodiff();
        let device = plain.clone().autodiff();
        let activation = config.activation.into();
        let masters = match config.lora {
            None => FloatDType::F32,
            Some(_) => activation,
        };
        let model = Decoder::load_frozen(&config.model, &device, masters, config.frozen)?;
        model.config().check_length("context", config.context)?;
        let model = match config.frozen {
            FrozenForm::High => model.into_training(&config.recipe, activation)?,
            FrozenForm::W4a16 | FrozenForm::W4a4 => model.into_frozen(activation)?,
        };
        let model = match &config.lora {
            None => model,
            Some(lora) => model.into_lora(lora, config.seed)?,
        };
        let model = model.with_recompute(config.recompute)?;
        let teacher = match &config.objective {
            Objective::CrossEntropy => None,
            Objective::Distillation { teacher, form, .. } => {
                let loaded = Decoder::load_frozen(teacher, &plain, activation, *form)?;
                let (found, own) = (loaded.config().vocab, model.config().vocab);
                ensure!(
                    found == own,
                    "teacher {} has {found} tokens, but the model has {own}",
                    teacher.display()
                );
                Some(loaded)
            }
        };
        let mut run = Self {
            config,
            data,
            device,
            model: Some(model),
            optimizer: Optimizer::adamw(config.weight_decay, config.grad_clip)?,
            teacher,
            order: Order::new(config.seed, data.train.len()),
            step: 0,
            losses: Vec::new(),
            pending: Vec::new(),
            metrics: MetricsLog::of_rank(world.rank(), folder),
            earlier: 0.0,
            started: Instant::now(),
            saved: None,
            graph: None,
            budget,
            folder: folder.into(),
            ranks: Ranks::new(world.clone().with_reduce_dtype(config.grad_reduce.into())),
            frozen: Frozen::read(config)?,
        };
        if let Some(path) = checkpoint::latest(folder)? {
            let saved = Saved::load(&path)?;
            run.restore(saved)
                .with_context(|| format!("cannot resume from {}", path.display()))?;
        }
        Ok(run)
    }

    fn restore(&mut self, saved: Saved<FinetuneState>) -> Result<()> {
        let state = saved.state;
        // A run may be resumed on another device, with other launch options, and on other ranks.
        let config = FinetuneConfig {
            device: self.config.device.clone(),
            graph: self.config.graph,
            ..state.config
        };
        ensure!(
            config == *self.config,
            "it belongs to a run with another configuration"
        );
        ensure!(
            state.data == self.data.fingerprint,
            "the tokens have changed since: they were {} and are {}",
            state.data,
            self.data.fingerprint
        );
        if let Some(saved) = &state.frozen {
            self.frozen.check(saved, self.config)?;
        }
        let model = self.model.take().expect(KEPT);
        let model = parameters::load(model, saved.model)?;
        state.nvfp4.apply(&model)?;
        self.model = Some(model);
        self.optimizer.load(saved.optimizer, &self.device)?;
        self.metrics
            .resume(state.step, |step| has_row(&config, step))?;
        self.order.seek(state.position);
        self.step = state.step;
        self.losses = state.losses;
        self.earlier = saved.timing.seconds;
        self.saved = Some(state.step);
        Ok(())
    }

    /// Returns the number of finished steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the recorded rows.
    pub fn rows(&self) -> &[Row] {
        self.metrics.rows()
    }

    /// Returns the configuration of the run.
    pub fn config(&self) -> &FinetuneConfig {
        self.config
    }

    /// Returns the group of all ranks of the run.
    pub(super) fn world(&self) -> &ProcessGroup {
        self.ranks.world()
    }

    /// Returns true on the rank that writes shared files (rank 0).
    pub(super) fn is_first(&self) -> bool {
        self.ranks.is_first()
    }

    /// Returns the rows of evaluations.
    pub fn valid_rows(&self) -> &Rows {
        &self.data.valid
    }

    /// Returns the model after the last step.
    pub fn model(&self) -> &Decoder {
        self.model.as_ref().expect(KEPT)
    }

    /// Returns the seconds spent so far, in all processes that worked on the run.
    pub fn seconds(&self) -> f64 {
        self.earlier + self.started.elapsed().as_secs_f64()
    }

    /// Trains to the last step, to step `stop_at` if that comes first, or until the observer stops
    /// the run. Always writes a checkpoint at the end. All ranks stop after the same step.
    ///
    /// # Errors
    /// Returns an error if the loss is no longer finite, the device runs out of memory, the weights
    /// of the ranks differ at a checkpoint, or a file cannot be written.
    pub fn train(&mut self, stop_at: Option<u64>, observer: &mut impl Observer) -> Result<Outcome> {
        let (budget, device) = (self.budget.clone(), self.device.clone());
        budget.guard(&device, || {
            let outcome = self.train_steps(stop_at, observer);
            self.graph = None;
            outcome
        })
    }

    fn train_steps(
        &mut self,
        stop_at: Option<u64>,
        observer: &mut impl Observer,
    ) -> Result<Outcome> {
        let &FinetuneConfig {
            steps,
            warmup,
            lr: highest,
            eval_every,
            checkpoint_every,
            ..
        } = self.config;
        let end = stop_at.unwrap_or(steps).min(steps);
        if self.step == 0 && self.metrics.rows().is_empty() {
            let row = Row {
                step: 0,
                tokens: 0,
                train_loss: None,
                valid_loss: Some(self.evaluate()?),
                lr: learning_rate(0, steps, warmup, highest),
                tokens_per_s: None,
            };
            self.record(row, observer)?;
        }
        let mut clock = Clock::start();
        let (mut interrupted, mut mode) = (false, None);
        while self.step < end && !interrupted {
            let lr = learning_rate(self.step, steps, warmup, highest);
            if let Some(healing) = self.config.recipe.healing {
                let next = healing.mode(self.step, steps);
                set_mode(self.model(), next);
                // A captured graph keeps its mode.
                if mode.replace(next) != Some(next) {
                    self.graph = None;
                }
            }
            if self.config.graph && self.graph.is_none() {
                self.begin_graph()?;
            }
            self.train_step(lr)?;
            clock.steps += 1;
            observer.step(self.step);
            if has_row(self.config, self.step) {
                self.read_losses()?;
                let speed = clock.speed(self.tokens_per_step());
                clock.pause();
                let valid_loss = match is_due(eval_every, self.step, steps) {
                    true => Some(self.evaluate()?),
                    false => None,
                };
                let losses = std::mem::take(&mut self.losses);
                let sum: f64 = losses.iter().map(|loss| f64::from(*loss)).sum();
                let row = Row {
                    step: self.step,
                    tokens: self.step * self.tokens_per_step(),
                    train_loss: Some(sum / losses.len() as f64),
                    valid_loss,
                    lr,
                    tokens_per_s: Some(speed),
                };
                self.record(row, observer)?;
                clock = Clock::start();
            }
            interrupted = match self.ranks.world().size() {
                1 => observer.interrupted(),
                _ => any(self.ranks.world(), observer.interrupted())?,
            };
            if is_due(checkpoint_every, self.step, steps) && !interrupted {
                clock.pause();
                self.save(observer)?;
                clock.resume();
            }
        }
        if self.saved != Some(self.step) {
            self.save(observer)?;
        }
        Ok(match self.step == steps {
            true => Outcome::Finished,
            false => Outcome::Stopped,
        })
    }

    /// Returns the number of tokens per step, including padding.
    fn tokens_per_step(&self) -> u64 {
        (self.config.rows_per_step() * self.config.context) as u64
    }

    /// Returns the rows per forward pass on each rank.
    fn rows_of_rank(&self) -> usize {
        self.config.batch / self.ranks.world().size()
    }

    fn train_step(&mut self, lr: f64) -> Result<()> {
        let rows = self.order.take(self.config.rows_per_step());
        // The shares of the first forward pass, one per rank, then those of the next one.
        let parts = rows.chunks(self.rows_of_rank());
        let parts: Vec<RowBatch> = parts
            .map(|rows| self.data.train.batch(rows))
            .collect::<Result<_>>()?;
        let counted = parts.iter().map(RowBatch::counted).sum();
        let (rank, ranks) = (self.ranks.world().rank(), self.ranks.world().size());
        let own = parts.into_iter().skip(rank).step_by(ranks);
        let own: Vec<RowBatch> = own.collect();
        let documents = self.graph.as_ref().map(|graph| graph.documents);
        let input = StepInput::new(&own, counted, documents, &self.device)?;
        let loss = match self.graph.take() {
            None => {
                let (loss, gradients) = self.gradients(&input)?;
                let model = self.model.take().expect(KEPT);
                self.model = Some(self.optimizer.step(lr, model, gradients));
                loss
            }
            Some(mut graph) => {
                graph.load(input)?;
                self.optimizer.begin_step(lr, &self.device)?;
                let loss = self.graph_step(&mut graph)?;
                self.graph = Some(graph);
                loss
            }
        };
        self.pending.push(loss);
        self.step += 1;
        Ok(())
    }

    /// From here on, launches each step as a graph of this model and optimizer, after three
    /// ordinary steps.
    fn begin_graph(&mut self) -> Result<()> {
        let context = self.config.context;
        for (name, model) in [
            ("model", self.model.as_ref()),
            ("teacher", self.teacher.as_ref()),
        ] {
            ensure!(
                model.is_none_or(|model| model.has_fixed_positions(context)),
                "graph is true, but the rotary positions of the {name} depend on the length of a \
                 text up to context ({context}), and a graph has those of its capture"
            );
        }
        let steps = GraphSteps::begin(self.model(), &self.device)?;
        let documents = most_documents(&self.data.train, self.rows_of_rank());
        self.graph = Some(Graph::new(steps, documents));
        Ok(())
    }

    /// Runs a step of `graph`, whose input and learning rate are on the device, and returns its
    /// loss.
    fn graph_step(&mut self, graph: &mut Graph) -> Result<Tensor<1>> {
        let Graph {
            steps, input, loss, ..
        } = graph;
        let input = input.as_ref().expect("`load` has put it there");
        let mut made = None;
        steps.step(|| made = Some(self.begun_step(input)))?;
        // A replay returns no new loss tensor: it overwrites the one from the capture.
        if let Some(made) = made {
            *loss = Some(made?);
        }
        let of_step = loss.clone().expect("a step has been taken");
        // Copy, because the next replay overwrites the same memory.
        Ok(of_step.mul_scalar(1.0))
    }

    /// Runs the step that the optimizer has begun, kernel by kernel.
    fn begun_step(&mut self, input: &StepInput) -> Result<Tensor<1>> {
        let (loss, gradients) = self.gradients(input)?;
        let model = self.model.take().expect(KEPT);
        self.model = Some(self.optimizer.step_begun(model, gradients));
        Ok(loss)
    }

    /// Returns this rank's share of the mean loss over all targets of a step, without autodiff, and
    /// the gradients of all parameters of that mean. The distribution of targets over forward
    /// passes does not matter.
    fn gradients(&self, input: &StepInput) -> Result<(Tensor<1>, GradientsParams)> {
        let scale = input.scale();
        let mut accumulator = GradientsAccumulator::new();
        let mut losses = Vec::new();
        for batch in &input.batches {
            let (loss, gradients) = self.gradients_of(batch, &scale)?;
            accumulator.accumulate(self.model(), gradients);
            losses.push(loss);
        }
        let mut gradients = accumulator.grads();
        self.ranks.reduce(self.model(), &mut gradients);
        Ok((Tensor::cat(losses, 0).sum(), gradients))
    }

    /// Returns the contribution of a batch to the loss, the sum over its targets times `scale`, and
    /// the gradients of all parameters.
    fn gradients_of(
        &self,
        batch: &DeviceBatch,
        scale: &Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams)> {
        let model = self.model();
        let (inputs, targets) = (batch.inputs.clone(), batch.targets.clone());
        let features = flat(model.features_packed(inputs, &batch.rows)?);
        let loss = match (&self.config.objective, &self.teacher) {
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
                let scale = Tensor::from_inner(scale.clone());
                try_linear_kl_divergence(student, teacher, targets, scale, params, CHUNK_BYTES)?
            }
            _ => {
                let sum = model.cross_entropy(features, targets, SUM)?;
                sum * Tensor::from_inner(scale.clone())
            }
        };
        let gradients = GradientsParams::from_grads(loss.clone().backward(), model);
        Ok((loss.without_autodiff(), gradients))
    }

    /// Reads the losses that are still on the device; waits for the device.
    fn read_losses(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let losses = Tensor::cat(std::mem::take(&mut self.pending), 0).into_data();
        let losses = self.ranks.losses(losses.iter::<f32>().collect())?;
        let first = self.step + 1 - losses.len() as u64;
        for (step, loss) in (first..).zip(&losses) {
            ensure!(
                loss.is_finite(),
                "the {} loss of step {step} is {loss}: try a lower --lr, or a longer --warmup",
                self.config.recipe_name
            );
        }
        self.losses.extend(losses);
        Ok(())
    }

    /// Returns the cross entropy of the validation rows, in nats per target that counts.
    ///
    /// # Errors
    /// Returns an error if it is not finite.
    pub fn evaluate(&self) -> Result<f64> {
        let model = self.model().valid();
        let device = self.device.clone().without_autodiff();
        let &FinetuneConfig {
            batch, eval_rows, ..
        } = self.config;
        let (rows, sizes) = (&self.data.valid, [batch, eval_rows]);
        let loss = cross_entropy_of(&model, rows, sizes, &device, self.ranks.world())?;
        ensure!(
            loss.is_finite(),
            "the {} validation loss at step {} is {loss}",
            self.config.recipe_name,
            self.step
        );
        Ok(loss)
    }

    /// Calls `write` with the whole model, without autodiff, on rank 0; other ranks return none.
    /// All ranks call this function.
    ///
    /// # Errors
    /// Returns the errors of `write`, on all ranks.
    pub(super) fn with_model<T>(
        &self,
        write: impl FnOnce(Decoder) -> Result<T>,
    ) -> Result<Option<T>> {
        let model = self.ranks.whole(self.model());
        on_first(self.ranks.world(), || write(model))
    }

    /// Writes the model to the new folder `out`, with tensors of type `dtype` and adapters merged.
    /// All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if the folder has files or a file cannot be written.
    pub fn save_model(&self, out: &Path, dtype: Dtype) -> Result<()> {
        let save = |model: Decoder| model.save(out, dtype, Some(&self.config.model));
        self.with_model(save).map(drop)
    }

    /// Writes the adapters to the new folder `out`, in PEFT's format. All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if there are no adapters, the folder has files, or a file cannot be
    /// written.
    pub fn save_adapter(&self, out: &Path) -> Result<()> {
        let lora = self.config.lora.as_ref();
        let lora = lora.context("the run trains all parameters: there is no adapter")?;
        let save = |model: Decoder| model.save_adapter(out, lora, &self.config.model);
        self.with_model(save).map(drop)
    }

    fn record(&mut self, row: Row, observer: &mut impl Observer) -> Result<()> {
        self.metrics.record(row)?;
        observer.row(&row);
        Ok(())
    }

    fn save(&mut self, observer: &mut impl Observer) -> Result<()> {
        self.read_losses()?;
        // Rows must reach the disk before the checkpoint that refers to them.
        self.metrics.write()?;
        let world = self.ranks.world();
        let model = parameters::to_bytes(self.model())?;
        agree(world, self.ranks.check_equal(&model, self.step))?;
        let saved = Saved {
            state: FinetuneState {
                format: FORMAT,
                config: self.config.clone(),
                data: self.data.fingerprint.clone(),
                frozen: Some(self.frozen.clone()),
                step: self.step,
                position: self.order.position(),
                losses: self.losses.clone(),
                nvfp4: Nvfp4State::collect(self.model()),
            },
            timing: Timing {
                seconds: self.seconds(),
            },
            model,
            optimizer: self.optimizer.to_bytes()?,
        };
        let path = saved.save_of_ranks(&self.folder, world, self.ranks.partition())?;
        self.saved = Some(self.step);
        observer.checkpoint(&path);
        Ok(())
    }
}

/// Returns true if `metrics.csv` has a row for step `step`.
fn has_row(config: &FinetuneConfig, step: u64) -> bool {
    [config.eval_every, config.log_every]
        .into_iter()
        .any(|every| is_due(every, step, config.steps))
}
