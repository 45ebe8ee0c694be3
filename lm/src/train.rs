//! A training run: steps, evaluation, records, checkpoints, resuming.

pub(crate) mod digest;
#[cfg(all(test, feature = "flex"))]
mod parallel_tests;
pub(crate) mod rank;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Tensor};
use burn_nvfp4::parallel::{CommunicationMeter, ExposedCommunication};
use burn_nvfp4::telemetry::{CSV_HEADER, Telemetry};
use burn_nvfp4::{Nvfp4State, set_mode};

use crate::checkpoint::parts::parameter_names;
use crate::checkpoint::{self, Checkpoint, State, Timing};
use crate::config::{ModelConfig, RecipeName, RunConfig};
use crate::data::Corpus;
use crate::groups::ParallelGroups;
use crate::memory::{DeviceMemory, MemoryBudget, MemoryUsed, peak_of};
use crate::metrics::{Clock, MetricsLog, Row, is_due, read_lossy, whole_lines};
use crate::model::LanguageModel;
use crate::optim::{Optimizer, learning_rate};
use crate::ranks::{self, agree};
use rank::{Rank, Watched};

/// File with one line per sampled operand; see [`burn_nvfp4::telemetry`].
pub const TELEMETRY: &str = "telemetry.csv";

/// Interval in steps between measurements of communication, where measuring has a cost.
pub const MEASURED_EVERY: u64 = 50;
/// First measured step: by then kernels are compiled and tuned.
const MEASURED_FIRST: u64 = 10;

/// Step of [`Run::train`], counted from 1, whose memory is measured. The first step creates the
/// optimizer state, and replayed graph steps allocate nothing.
const MEMORY_MEASURED: u64 = 2;

/// Receives the events of a run.
pub trait Observer {
    /// Called after a step.
    fn step(&mut self, _step: u64) {}
    /// Called after a row was recorded.
    fn row(&mut self, _row: &Row) {}
    /// Called after a checkpoint was written.
    fn checkpoint(&mut self, _path: &Path) {}
    /// Returns true if the run should stop after the current step.
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// An observer that ignores all events.
impl Observer for () {}

/// Outcome of [`Run::train`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// The run was told to stop; its checkpoint is written.
    Stopped,
}

/// A run with one recipe: the model, its optimizer, and its progress.
pub struct Run<'a, M> {
    config: &'a RunConfig,
    recipe: RecipeName,
    corpus: &'a Corpus,
    folder: PathBuf,
    rank: Rank<M>,
    /// Process groups of the run.
    groups: ParallelGroups,
    step: u64,
    /// Losses since the last row.
    losses: Vec<f32>,
    metrics: MetricsLog,
    /// Seconds spent by earlier processes of the run.
    earlier: f64,
    started: Instant,
    /// Step of the last checkpoint.
    saved: Option<u64>,
    meter: CommunicationMeter,
    /// Exposed communication, averaged over all ranks.
    communication: ExposedCommunication,
    /// Ordinary steps taken by this process.
    taken: u64,
    /// Memory of the rank with the most, if measured.
    memory: Option<MemoryUsed>,
}

impl<'a, M: LanguageModel> Run<'a, M> {
    /// Starts the run `config` with `recipe` on `device`, or resumes it if `folder` has a
    /// checkpoint of it.
    ///
    /// # Errors
    /// Returns an error if the configuration does not fit the device or the text, or if the
    /// checkpoint is corrupt or belongs to another run.
    pub fn open(
        config: &'a RunConfig,
        recipe: RecipeName,
        corpus: &'a Corpus,
        device: &Device,
        folder: &Path,
    ) -> Result<Self> {
        let groups = ParallelGroups::single();
        Self::open_rank(config, recipe, corpus, device, folder, groups)
    }

    /// Does the same as [`open`](Self::open) on one rank of `groups`. Each rank is a process with
    /// its own device, and all ranks make the same calls. The ranks of the batch group split the
    /// batch evenly. All ranks see the same `folder`; rank 0 writes.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open). Also returns an error if the configuration does
    /// not fit the number of ranks, or if another rank fails.
    pub fn open_rank(
        config: &'a RunConfig,
        recipe: RecipeName,
        corpus: &'a Corpus,
        device: &Device,
        folder: &Path,
        groups: ParallelGroups,
    ) -> Result<Self> {
        let world = groups.world().clone();
        let made = Self::try_open(config, recipe, corpus, device, folder, groups);
        let (mut run, names) = agree(&world, made)?;
        let joined = run.rank.join(&run.groups, config, names);
        agree(&world, joined)?;
        // No rank writes before all ranks have read.
        if run.saved.is_none() {
            run.metrics.write()?;
        }
        Ok(run)
    }

    /// Opens the run with the state of its checkpoint, if any; also returns the parameter names of
    /// the checkpoint.
    fn try_open(
        config: &'a RunConfig,
        recipe: RecipeName,
        corpus: &'a Corpus,
        device: &Device,
        folder: &Path,
        groups: ParallelGroups,
    ) -> Result<(Self, BTreeMap<u64, String>)> {
        config.check()?;
        config.check_ranks(groups.world().size())?;
        if config.graph {
            groups.check_graph()?;
        }
        corpus.check(config.model.context)?;
        let budget = MemoryBudget::new(config, &recipe);
        budget.check(device)?;
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let device = device.clone().autodiff();
        let mut model = M::build(config, &recipe, &device)?;
        let mut optimizer = Optimizer::new(config)?;
        let mut resumed = None;
        if let Some(path) = checkpoint::latest(folder)? {
            let context = || format!("cannot resume from {}", path.display());
            let checkpoint = Checkpoint::load(&path)?;
            check_resumed(&checkpoint.state, config, &recipe, corpus).with_context(context)?;
            let Checkpoint {
                state,
                timing,
                model: record,
                optimizer: moments,
            } = checkpoint;
            let restore = || -> Result<M::Whole> {
                let model = model.try_load_record(ModuleRecord::from_bytes(record)?)?;
                state.nvfp4.apply(&model)?;
                optimizer.load(moments, &device)?;
                Ok(model)
            };
            model = restore().with_context(context)?;
            resumed = Some((state, timing));
        }
        let names = parameter_names(&model);
        let model = M::part_of(model, config, &groups)?;
        let meter = CommunicationMeter::new(groups.world(), &device, groups.is_connected());
        let mut run = Self {
            config,
            recipe,
            corpus,
            rank: Rank::new(device, model, optimizer),
            folder: folder.into(),
            step: 0,
            losses: Vec::new(),
            metrics: MetricsLog::of_rank(groups.world().rank(), folder),
            groups,
            earlier: 0.0,
            started: Instant::now(),
            saved: None,
            meter,
            communication: ExposedCommunication::default(),
            taken: 0,
            memory: None,
        };
        if let Some((state, timing)) = resumed {
            run.resume(state, timing)
                .with_context(|| format!("cannot resume the run in {}", folder.display()))?;
        }
        Ok((run, names))
    }

    /// Continues from `state`, whose parameters are already in the model.
    fn resume(&mut self, state: State, timing: Timing) -> Result<()> {
        let config = self.config;
        self.metrics
            .resume(state.step, |step| has_row(config, step))?;
        self.trim_telemetry(state.step)?;
        self.step = state.step;
        self.losses = state.losses;
        self.earlier = timing.seconds;
        self.saved = Some(state.step);
        Ok(())
    }

    /// Removes the samples of step `step` and later from [`TELEMETRY`].
    fn trim_telemetry(&self, step: u64) -> Result<()> {
        let path = self.folder.join(TELEMETRY);
        if !path.exists() || !self.is_first() {
            return Ok(());
        }
        let text = read_lossy(&path)?;
        let mut lines = whole_lines(&text);
        let mut kept = String::new();
        let header = lines.next();
        for line in header.into_iter().chain(lines.take_while(|line| {
            let sampled = line.split(',').next().and_then(|field| field.parse().ok());
            sampled.is_some_and(|sampled: u64| sampled < step)
        })) {
            let _ = writeln!(kept, "{line}");
        }
        checkpoint::replace(&path, kept.as_bytes())
    }

    /// Returns the number of finished steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the recorded rows.
    pub fn rows(&self) -> &[Row] {
        self.metrics.rows()
    }

    /// Returns the model.
    pub fn model(&self) -> &M {
        self.rank.model()
    }

    /// Returns the seconds spent so far, in all processes that worked on the run.
    pub fn seconds(&self) -> f64 {
        self.earlier + self.started.elapsed().as_secs_f64()
    }

    /// Returns the communication of [`train`](Self::train) that compute did not hide, averaged over
    /// all ranks. With host collectives all steps are measured, else one in [`MEASURED_EVERY`];
    /// with a graph, the last ordinary step before its capture. Steps sampled by telemetry are not
    /// measured.
    pub fn communication(&self) -> ExposedCommunication {
        self.communication
    }

    /// Returns the device memory of [`train`](Self::train) on the rank with the most: peak of
    /// tensors in its second step, and pools at its end. None if the runtime does not report it, or
    /// if there was no such step.
    pub fn memory(&self) -> Option<MemoryUsed> {
        self.memory
    }

    /// Trains to the last step, to step `stop_at` if that comes first, or until the observer stops
    /// the run. Always writes a checkpoint at the end.
    ///
    /// # Errors
    /// Returns an error if the loss is no longer finite, the device runs out of memory, the weights
    /// of the ranks differ at a checkpoint, or a file cannot be written.
    pub fn train(&mut self, stop_at: Option<u64>, observer: &mut impl Observer) -> Result<Outcome> {
        let budget = MemoryBudget::new(self.config, &self.recipe);
        let device = self.rank.device.clone();
        budget.guard(&device, || {
            let outcome = self.train_ranks(stop_at, observer);
            self.rank.end_graph();
            outcome
        })
    }

    fn train_ranks(
        &mut self,
        stop_at: Option<u64>,
        observer: &mut impl Observer,
    ) -> Result<Outcome> {
        let steps = self.config.steps;
        let end = stop_at.unwrap_or(steps).min(steps);
        if self.step == 0 && self.metrics.rows().is_empty() {
            let lr = learning_rate(0, steps, self.config.warmup, self.config.lr);
            let valid_loss = Some(self.evaluate()?);
            let row = Row {
                step: 0,
                tokens: 0,
                train_loss: None,
                valid_loss,
                lr,
                tokens_per_s: None,
            };
            self.record(row, observer)?;
        }
        let mut mode = None;
        let mut clock = Clock::start();
        let mut interrupted = false;
        while self.step < end && !interrupted {
            let lr = learning_rate(self.step, steps, self.config.warmup, self.config.lr);
            if let Some(healing) = self.config.healing_of(&self.recipe) {
                let next = healing.mode(self.step, steps);
                set_mode(self.rank.model(), next);
                // A captured graph keeps its mode.
                if mode.replace(next) != Some(next) {
                    self.rank.end_graph();
                }
            }
            if self.config.graph && !self.rank.has_graph() {
                self.rank.begin_graph()?;
            }
            let every = self.config.telemetry_every;
            if every > 0 && self.step.is_multiple_of(every) {
                clock.pause();
                self.sampled_step(lr)?;
                clock.resume();
            } else {
                let measures = self.measures();
                if measures {
                    self.meter.begin();
                }
                self.plain_step(lr)?;
                self.meter.end();
                clock.steps += 1;
            }
            observer.step(self.step);
            let evaluates = is_due(self.config.eval_every, self.step, steps);
            let saves = is_due(self.config.checkpoint_every, self.step, steps);
            if has_row(self.config, self.step) {
                self.read_losses()?;
                let speed = clock.speed(self.tokens_per_step());
                clock.pause();
                let valid_loss = if evaluates {
                    Some(self.evaluate()?)
                } else {
                    None
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
            interrupted = observer.interrupted();
            if self.groups.world().size() > 1 {
                // All ranks stop after the same step.
                let world = self.groups.world();
                interrupted = (self.meter).between(|| ranks::any(world, interrupted))?;
            }
            if saves && !interrupted {
                self.read_losses()?;
                clock.pause();
                self.save(observer)?;
                clock.resume();
            }
        }
        if self.saved != Some(self.step) {
            self.read_losses()?;
            self.save(observer)?;
        }
        self.communication = self.all_communication()?;
        self.memory = self.all_memory()?;
        Ok(if self.step == steps {
            Outcome::Finished
        } else {
            Outcome::Stopped
        })
    }

    /// Returns true if the communication of the next step is measured; identical on all ranks.
    fn measures(&self) -> bool {
        if self.groups.world().size() == 1 {
            return false;
        }
        match self.config.graph {
            true => self.rank.is_before_capture(),
            false => self.meter.is_free() || self.step % MEASURED_EVERY == MEASURED_FIRST,
        }
    }

    /// Averages the measurements over all ranks, all of which call this function.
    fn all_communication(&mut self) -> Result<ExposedCommunication> {
        let own = self.meter.measured();
        let world = self.groups.world();
        if world.size() == 1 {
            return Ok(own);
        }
        // A rank whose device could not measure a step has fewer steps.
        let numbers = [own.steps as f32, own.waited as f32, own.total as f32];
        let means = ranks::means(world, numbers.to_vec())?;
        Ok(ExposedCommunication {
            steps: means[0] as u64,
            waited: f64::from(means[1]),
            total: f64::from(means[2]),
        })
    }

    /// Returns the memory of the rank with the most; all ranks call this function.
    fn all_memory(&self) -> Result<Option<MemoryUsed>> {
        let pools = DeviceMemory::of(&self.rank.device).reserved;
        let own = self.memory.zip(pools);
        let own = own.map_or(MemoryUsed::default(), |(own, pools)| MemoryUsed {
            pools,
            ..own
        });
        let all = ranks::gathered_bytes(self.groups.world(), own.to_bytes())?;
        let all = all.into_iter().map(MemoryUsed::from_bytes);
        let most = all.fold(own, MemoryUsed::max);
        Ok((most != MemoryUsed::default()).then_some(most))
    }

    /// Returns true on the rank that writes shared files (rank 0).
    fn is_first(&self) -> bool {
        self.groups.world().rank() == 0
    }

    fn tokens_per_step(&self) -> u64 {
        (self.config.batch * self.config.model.context) as u64
    }

    fn train_step(&mut self, lr: f64, watched: Watched) -> Result<()> {
        let &RunConfig {
            seed,
            batch,
            ref model,
            ..
        } = self.config;
        let batch = self
            .corpus
            .train_batch(seed, self.step, batch, model.context);
        let group = self.groups.batch();
        let own = batch
            .split(group.size())
            .into_iter()
            .nth(group.rank())
            .expect("a part for each rank");
        self.rank.step(own, lr, watched)?;
        self.step += 1;
        Ok(())
    }

    /// Runs a step without observation.
    fn plain_step(&mut self, lr: f64) -> Result<()> {
        self.taken += 1;
        if self.taken != MEMORY_MEASURED {
            return self.train_step(lr, Watched::No);
        }
        let device = self.rank.device.clone();
        let (taken, peak) = peak_of(&device, || {
            self.train_step(lr, Watched::No)?;
            Ok(device.sync()?)
        });
        self.memory = peak.map(|tensors| MemoryUsed { tensors, pools: 0 });
        taken
    }

    /// Runs a step that telemetry samples into [`TELEMETRY`].
    fn sampled_step(&mut self, lr: f64) -> Result<()> {
        use std::io::Write as _;
        let step = self.step;
        let telemetry = Telemetry::start(self.rank.model());
        self.train_step(lr, Watched::Yes)?;
        let mut samples = telemetry.finish();
        if !self.is_first() {
            return Ok(());
        }
        if let Some(partition) = self.rank.partition() {
            let paths = partition.layer_paths(self.rank.model());
            for sample in &mut samples {
                if let Some(path) = paths.get(&sample.layer) {
                    sample.layer.clone_from(path);
                }
            }
        }
        let path = self.folder.join(TELEMETRY);
        let mut text = String::new();
        if step == 0 || !path.exists() {
            let _ = writeln!(text, "step,{CSV_HEADER}");
        }
        for sample in &samples {
            let _ = writeln!(text, "{step},{}", sample.csv());
        }
        let mut options = fs::OpenOptions::new();
        let file = if step == 0 {
            options.write(true).truncate(true).create(true)
        } else {
            options.append(true).create(true)
        };
        file.open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the losses that are still on the device; waits for the device.
    fn read_losses(&mut self) -> Result<()> {
        let losses = self.rank.losses();
        let group = self.groups.batch();
        let losses = match group.size() {
            1 => losses,
            _ => ranks::means(group, losses)?,
        };
        let first = self.step + 1 - losses.len() as u64;
        for (step, loss) in (first..).zip(losses) {
            if !loss.is_finite() {
                bail!(
                    "the {} loss of step {step} is {loss}: try a lower --lr, or a longer --warmup",
                    self.recipe
                );
            }
            self.losses.push(loss);
        }
        Ok(())
    }

    /// Returns the loss on the validation text, in nats per byte.
    ///
    /// # Errors
    /// Returns an error if the loss is not finite.
    pub fn evaluate(&self) -> Result<f64> {
        let &RunConfig {
            eval_batches,
            batch,
            model: ModelConfig { context, .. },
            ..
        } = self.config;
        let model = self.rank.model().valid();
        let device = self.rank.device.clone().without_autodiff();
        // The ranks of the batch group take the batches round-robin. All ranks run the same number
        // of forward passes, as sharded models require; surplus passes are not counted.
        let group = self.groups.batch();
        let (rank, size) = (group.rank(), group.size());
        let losses = (0..eval_batches.div_ceil(size))
            .map(|round| {
                let index = (round * size + rank).min(eval_batches - 1);
                let batch = self.corpus.valid_batch(index, eval_batches, batch, context);
                let (inputs, targets) = batch.tensors(&device);
                model.loss(inputs, targets)
            })
            .collect();
        let losses = Tensor::cat(losses, 0).into_data();
        let losses: Vec<f32> = losses.iter::<f32>().collect();
        let losses = ranks::in_turns(group, &losses, eval_batches)?;
        let sum: f64 = losses.into_iter().map(f64::from).sum();
        let loss = sum / eval_batches as f64;
        ensure!(
            loss.is_finite(),
            "the {} validation loss at step {} is {loss}",
            self.recipe,
            self.step
        );
        Ok(loss)
    }

    fn record(&mut self, row: Row, observer: &mut impl Observer) -> Result<()> {
        self.metrics.record(row)?;
        observer.row(&row);
        Ok(())
    }

    fn sync_telemetry(&self) -> Result<()> {
        let path = self.folder.join(TELEMETRY);
        if !path.exists() {
            return Ok(());
        }
        let open = fs::OpenOptions::new().append(true).open(&path);
        open.and_then(|file| file.sync_all())
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn save(&mut self, observer: &mut impl Observer) -> Result<()> {
        // Rows and samples must reach the disk before the checkpoint that refers to them.
        self.metrics.write()?;
        self.sync_telemetry()?;
        let model = self.rank.model();
        let partition = self.rank.partition();
        let mut record: Bytes = model.valid().into_record().into_bytes()?;
        let equal = self.rank.check_equal(&record, self.step);
        agree(self.groups.world(), equal)?;
        let mut nvfp4 = Nvfp4State::collect(model);
        if let Some(partition) = partition {
            record = partition.renamed(record)?;
            nvfp4 = partition.renamed_state(nvfp4, model);
        }
        let checkpoint = Checkpoint {
            state: State::new(
                self.config.clone(),
                self.recipe.clone(),
                self.corpus.fingerprint().clone(),
                self.step,
                self.losses.clone(),
                nvfp4,
            ),
            timing: Timing {
                seconds: self.seconds(),
            },
            model: record,
            optimizer: self.rank.optimizer.to_bytes()?,
        };
        let world = self.groups.world();
        let path = checkpoint.save_of_ranks(&self.folder, world, partition)?;
        self.saved = Some(self.step);
        observer.checkpoint(&path);
        Ok(())
    }
}

/// Returns an error unless the checkpoint with `state` belongs to this run.
fn check_resumed(
    state: &State,
    config: &RunConfig,
    recipe: &RecipeName,
    corpus: &Corpus,
) -> Result<()> {
    // A run may be resumed on another device, with other launch options, and on other ranks.
    let resumed = RunConfig {
        device: config.device.clone(),
        graph: config.graph,
        dp: config.dp,
        tp: config.tp,
        ep: config.ep,
        ep_dispatch: config.ep_dispatch,
        fsdp: config.fsdp,
        zero1: config.zero1,
        ..state.config.clone()
    };
    ensure!(
        resumed == *config && state.recipe == *recipe,
        "it belongs to a run with another configuration"
    );
    ensure!(
        state.corpus == *corpus.fingerprint(),
        "the text has changed since: it was {:?} and is {:?}",
        state.corpus,
        corpus.fingerprint()
    );
    Ok(())
}

/// Returns true if `metrics.csv` has a row for step `step`.
fn has_row(config: &RunConfig, step: u64) -> bool {
    [config.eval_every, config.log_every]
        .into_iter()
        .any(|every| is_due(every, step, config.steps))
}
