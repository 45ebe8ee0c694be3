//! The loop of a run: steps, evaluation, records, checkpoints, resuming.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::tensor::Device;
use burn_nvfp4::Nvfp4State;
use burn_nvfp4::parallel::{CommunicationMeter, ExposedCommunication, ProcessGroup};
use burn_nvfp4::recipe::RecipePhase;
use burn_nvfp4::telemetry::Telemetry;

use super::rank::{Rank, Watched};
use super::task::{Settings, Task};
use super::telemetry::TelemetryLog;
use crate::checkpoint::parts::parameter_names;
use crate::checkpoint::{self, Saved, State, Timing};
use crate::groups::ParallelGroups;
use crate::memory::{DeviceMemory, MemoryUsed, peak_of};
use crate::metrics::{Clock, MetricsLog, Row};
use crate::ranks::{agree, any, gathered_bytes, means};
use crate::tensorboard::EventLog;

/// Interval in steps between measurements of communication, where measuring has a cost.
pub const MEASURED_EVERY: u64 = 50;
/// First measured step: by then kernels are compiled and tuned.
const MEASURED_FIRST: u64 = 10;

/// Step of [`Trainer::train`], counted from 1, whose memory is measured. The first step creates the
/// optimizer state, and replayed graph steps allocate nothing.
const MEMORY_MEASURED: u64 = 2;

/// Receives the events of a run.
pub trait Observer {
    /// Called after a step.
    fn step(&mut self, _step: u64) {}
    /// Called before step `step` (from 0), the first of phase `index` (from 0) that this process
    /// takes, if an earlier step was in another phase.
    fn phase(&mut self, _step: u64, _index: usize, _phase: &RecipePhase) {}
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

/// Outcome of [`Trainer::train`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// The run was told to stop; its checkpoint is written.
    Stopped,
}

/// The training of a [`Task`]: its model, its optimizer, and its progress.
pub struct Trainer<T: Task> {
    task: T,
    settings: Settings,
    folder: PathBuf,
    pub(super) rank: Rank<T::Model, T::Batch>,
    /// Process groups of the run.
    groups: ParallelGroups,
    step: u64,
    /// Index of the phase that the layers follow, once it was applied.
    phase: Option<usize>,
    /// Losses since the last row.
    losses: Vec<f32>,
    metrics: MetricsLog,
    /// The rows for TensorBoard, if they are written.
    events: Option<EventLog>,
    /// Samples of telemetry, on the rank that writes them (rank 0).
    telemetry: Option<TelemetryLog>,
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

impl<T: Task> Trainer<T> {
    /// Starts the run of `task` on `device`, or resumes it if `folder` has a checkpoint of it.
    ///
    /// # Errors
    /// Returns an error if the configuration does not fit the model, the data or the device, a file
    /// cannot be read, or the checkpoint is corrupt or belongs to another run. Returns
    /// [`OutOfMemory`](crate::memory::OutOfMemory) before anything is loaded if the device has less
    /// memory than a step needs at the least, or later if it runs out of memory.
    pub fn open(task: T, device: &Device, folder: &Path) -> Result<Self> {
        Self::open_rank(task, device, folder, ParallelGroups::single())
    }

    /// Does the same as [`open`](Self::open) on one rank of `groups`. Each rank is a process with
    /// its own device, and all ranks make the same calls. The ranks of the batch group split each
    /// batch evenly. All ranks see the same `folder`; rank 0 writes.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open). Also returns an error if the configuration does
    /// not fit the number of ranks, or if another rank fails.
    pub fn open_rank(
        task: T,
        device: &Device,
        folder: &Path,
        groups: ParallelGroups,
    ) -> Result<Self> {
        let world = groups.world().clone();
        let loaded = Self::load(task, device, folder, groups);
        let (mut trainer, names) = agree(&world, loaded)?;
        let joined = trainer.guarded(|trainer| {
            let splits = trainer
                .task
                .partitions(trainer.rank.model(), &trainer.groups);
            (trainer.rank).join(&trainer.groups, &trainer.settings, splits, names)
        });
        agree(&world, joined)?;
        trainer.enter_phase(trainer.step.saturating_sub(1))?;
        // No rank writes before all ranks have read.
        if trainer.saved.is_none() {
            trainer.metrics.write()?;
        }
        Ok(trainer)
    }

    /// Loads the run with the state of its checkpoint, if any; also returns the parameter names of
    /// the model on a single rank.
    fn load(
        task: T,
        device: &Device,
        folder: &Path,
        groups: ParallelGroups,
    ) -> Result<(Self, BTreeMap<u64, String>)> {
        let mut settings = task.settings(&groups)?;
        settings.uncaptured = settings.uncaptured.or(groups.uncaptured());
        let budget = settings.budget.clone();
        budget.check(device)?;
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let device = device.clone().autodiff();
        budget.guard(&device, || {
            Self::load_unguarded(task, settings, &device, folder, groups)
        })
    }

    fn load_unguarded(
        mut task: T,
        mut settings: Settings,
        device: &Device,
        folder: &Path,
        groups: ParallelGroups,
    ) -> Result<(Self, BTreeMap<u64, String>)> {
        let rank = groups.world().rank();
        let telemetry = (rank == 0).then(|| TelemetryLog::new(folder));
        let (recipes, steps) = (&settings.recipes, settings.schedule.steps);
        let mut metrics = MetricsLog::of_rank(rank, folder).with_phases(recipes, steps);
        let mut whole = task.build(device)?;
        settings.uncaptured = settings.uncaptured.or(task.uncaptured(&whole));
        let mut optimizer = settings.optimizer.clone();
        let (mut step, mut losses, mut earlier, mut saved) = (0, Vec::new(), 0.0, None);
        if let Some(path) = checkpoint::latest(folder)? {
            let Saved {
                state,
                timing,
                model,
                optimizer: moments,
            } = Saved::<T::Run>::load(&path)?;
            let resume = || -> Result<T::Whole> {
                task.resume(state.run)?;
                let whole = task.load(whole, model)?;
                state.nvfp4.apply(&whole)?;
                optimizer.load(moments, device)?;
                metrics.resume(state.step, |step| settings.schedule.has_row(step))?;
                if let Some(telemetry) = &telemetry {
                    telemetry.resume(state.step)?;
                }
                Ok(whole)
            };
            whole = resume().with_context(|| format!("cannot resume from {}", path.display()))?;
            (step, losses, earlier) = (state.step, state.losses, timing.seconds);
            saved = Some(step);
        }
        let names = parameter_names(&whole);
        let model = task.part_of(whole, &groups)?;
        let trainer = Self {
            rank: Rank::new(device.clone(), model, optimizer),
            meter: CommunicationMeter::new(groups.world(), device, groups.is_connected()),
            task,
            settings,
            folder: folder.into(),
            groups,
            step,
            phase: None,
            losses,
            metrics,
            events: None,
            telemetry,
            earlier,
            started: Instant::now(),
            saved,
            communication: ExposedCommunication::default(),
            taken: 0,
            memory: None,
        };
        Ok((trainer, names))
    }

    /// Runs `work`, and returns an error that describes the run if the device runs out of memory.
    fn guarded<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let (budget, device) = (self.settings.budget.clone(), self.rank.device.clone());
        budget.guard(&device, || work(self))
    }

    /// Returns the task.
    pub fn task(&self) -> &T {
        &self.task
    }

    /// Returns the settings of the run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the number of finished steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Makes the layers follow the phase of step `step`; returns its index if they followed another
    /// one before. A captured graph keeps its phase, so it ends.
    fn enter_phase(&mut self, step: u64) -> Result<Option<usize>> {
        let Settings {
            recipes, schedule, ..
        } = &self.settings;
        let index = recipes.index_at(step, schedule.steps);
        if recipes.is_constant() || self.phase == Some(index) {
            return Ok(None);
        }
        self.rank.end_graph();
        recipes.apply(self.rank.model(), step, schedule.steps)?;
        Ok(self.phase.replace(index).map(|_| index))
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Also writes the rows to the folder `events`, in the format of TensorBoard: those so far, and
    /// those of later steps. Rank 0 calls this function.
    ///
    /// # Errors
    /// Returns an error if the folder has the events of another run, or cannot be written.
    pub fn log_events(&mut self, events: &Path) -> Result<()> {
        self.events = Some(EventLog::open(events, self.metrics.rows())?);
        Ok(())
    }

    /// Returns the recorded rows.
    pub fn rows(&self) -> &[Row] {
        self.metrics.rows()
    }

    /// Returns the model after the last step.
    pub fn model(&self) -> &T::Model {
        self.rank.model()
    }

    /// Returns the group of all ranks of the run.
    pub(crate) fn world(&self) -> &ProcessGroup {
        self.groups.world()
    }

    /// Gathers the parameters that are sharded over ranks, and returns the model without autodiff.
    /// All ranks call this function.
    pub(crate) fn gathered_model(&self) -> T::Model {
        self.rank.whole()
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
    /// the run. Always writes a checkpoint at the end. All ranks stop after the same step.
    ///
    /// # Errors
    /// Returns an error if the loss is no longer finite, the device runs out of memory, the weights
    /// of the ranks differ at a checkpoint, or a file cannot be written.
    pub fn train(&mut self, stop_at: Option<u64>, observer: &mut impl Observer) -> Result<Outcome> {
        self.guarded(|trainer| {
            let outcome = trainer.train_steps(stop_at, observer);
            trainer.rank.end_graph();
            outcome
        })
    }

    fn train_steps(
        &mut self,
        stop_at: Option<u64>,
        observer: &mut impl Observer,
    ) -> Result<Outcome> {
        let schedule = self.settings.schedule;
        let steps = schedule.steps;
        let end = stop_at.unwrap_or(steps).min(steps);
        if self.step == 0 && self.metrics.rows().is_empty() {
            let row = Row {
                step: 0,
                tokens: 0,
                train_loss: None,
                valid_loss: Some(self.evaluate()?),
                lr: schedule.learning_rate(0),
                tokens_per_s: None,
            };
            self.record(row, observer)?;
        }
        let mut clock = Clock::start();
        let mut interrupted = false;
        while self.step < end && !interrupted {
            let lr = schedule.learning_rate(self.step);
            if let Some(index) = self.enter_phase(self.step)? {
                let phase = &self.settings.recipes.phases()[index];
                observer.phase(self.step, index, phase);
            }
            if self.settings.uncaptured.is_none() {
                self.rank.begin_graph()?;
            }
            if schedule.is_sampled(self.step) {
                clock.pause();
                self.sampled_step(lr)?;
                clock.resume();
            } else {
                self.plain_step(lr)?;
                clock.steps += 1;
            }
            observer.step(self.step);
            if schedule.has_row(self.step) {
                self.read_losses()?;
                let tokens_per_step = self.settings.tokens_per_step;
                let speed = clock.speed(tokens_per_step);
                clock.pause();
                let valid_loss = match schedule.is_due(schedule.eval_every, self.step) {
                    true => Some(self.evaluate()?),
                    false => None,
                };
                let losses = std::mem::take(&mut self.losses);
                let sum: f64 = losses.iter().map(|loss| f64::from(*loss)).sum();
                let row = Row {
                    step: self.step,
                    tokens: self.step * tokens_per_step,
                    train_loss: Some(sum / losses.len() as f64),
                    valid_loss,
                    lr,
                    tokens_per_s: Some(speed),
                };
                self.record(row, observer)?;
                clock = Clock::start();
            }
            interrupted = observer.interrupted();
            let world = self.groups.world();
            if world.size() > 1 {
                // All ranks stop after the same step.
                interrupted = self.meter.between(|| any(world, interrupted))?;
            }
            if schedule.is_due(schedule.checkpoint_every, self.step) && !interrupted {
                self.read_losses()?;
                clock.pause();
                self.save(observer)?;
                clock.resume();
            }
        }
        if self.saved != Some(self.step) {
            self.save(observer)?;
        }
        self.communication = self.all_communication()?;
        self.memory = self.all_memory()?;
        Ok(match self.step == steps {
            true => Outcome::Finished,
            false => Outcome::Stopped,
        })
    }

    /// Returns true if the communication of the next step is measured; identical on all ranks.
    fn measures(&self) -> bool {
        if self.groups.world().size() == 1 {
            return false;
        }
        match self.settings.uncaptured.is_none() {
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
        let means = means(world, numbers.to_vec())?;
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
        let all = gathered_bytes(self.groups.world(), own.to_bytes())?;
        let all = all.into_iter().map(MemoryUsed::from_bytes);
        let most = all.fold(own, MemoryUsed::max);
        Ok((most != MemoryUsed::default()).then_some(most))
    }

    fn train_step(&mut self, lr: f64, watched: Watched) -> Result<()> {
        let device = &self.rank.device;
        let input = self.task.batches(self.step, device, &self.groups)?;
        let task = &self.task;
        (self.rank).step(input, lr, watched, |model, batch, scale| {
            task.loss(model, batch, scale)
        })?;
        self.step += 1;
        Ok(())
    }

    /// Runs a step without observation.
    fn plain_step(&mut self, lr: f64) -> Result<()> {
        if self.measures() {
            self.meter.begin();
        }
        self.taken += 1;
        let taken = match self.taken {
            MEMORY_MEASURED => {
                let device = self.rank.device.clone();
                let (taken, peak) = peak_of(&device, || {
                    self.train_step(lr, Watched::No)?;
                    Ok(device.sync()?)
                });
                self.memory = peak.map(|tensors| MemoryUsed { tensors, pools: 0 });
                taken
            }
            _ => self.train_step(lr, Watched::No),
        };
        taken?;
        self.meter.end();
        Ok(())
    }

    /// Runs a step that telemetry samples.
    fn sampled_step(&mut self, lr: f64) -> Result<()> {
        let step = self.step;
        let telemetry = Telemetry::start(self.rank.model());
        self.train_step(lr, Watched::Yes)?;
        let mut samples = telemetry.finish();
        let Some(log) = &self.telemetry else {
            return Ok(());
        };
        if let Some(partition) = self.rank.partition() {
            let paths = partition.layer_paths(self.rank.model());
            for sample in &mut samples {
                if let Some(path) = paths.get(&sample.layer) {
                    sample.layer.clone_from(path);
                }
            }
        }
        log.record(step, &samples)
    }

    /// Reads the losses that are still on the device; waits for the device.
    fn read_losses(&mut self) -> Result<()> {
        let own = self.rank.losses();
        if own.is_empty() {
            return Ok(());
        }
        let losses = (self.settings.loss).reduced(self.groups.batch(), own)?;
        let first = self.step + 1 - losses.len() as u64;
        for (step, loss) in (first..).zip(&losses) {
            ensure!(
                loss.is_finite(),
                "the {} loss of step {step} is {loss}: try a lower --lr, or a longer --warmup",
                self.settings.recipe
            );
        }
        self.losses.extend(losses);
        Ok(())
    }

    /// Returns the loss on the validation data, in nats per byte or token.
    ///
    /// # Errors
    /// Returns an error if the loss is not finite.
    pub fn evaluate(&self) -> Result<f64> {
        let model = self.rank.model().valid();
        let device = self.rank.device.clone().without_autodiff();
        let loss = self.task.evaluate(&model, &device, self.groups.batch())?;
        ensure!(
            loss.is_finite(),
            "the {} validation loss at step {} is {loss}",
            self.settings.recipe,
            self.step
        );
        Ok(loss)
    }

    fn record(&mut self, row: Row, observer: &mut impl Observer) -> Result<()> {
        self.metrics.record(row)?;
        if let Some(events) = &self.events {
            events.record(&row)?;
        }
        observer.row(&row);
        Ok(())
    }

    pub(super) fn save(&mut self, observer: &mut impl Observer) -> Result<()> {
        self.read_losses()?;
        // Rows and samples must reach the disk before the checkpoint that refers to them.
        self.metrics.write()?;
        if let Some(telemetry) = &self.telemetry {
            telemetry.sync()?;
        }
        let (world, model) = (self.groups.world(), self.rank.model());
        let mut record = self.task.record(model)?;
        agree(world, self.rank.check_equal(&record, self.step))?;
        let mut nvfp4 = Nvfp4State::collect(model);
        let partition = self.rank.partition();
        if let Some(partition) = partition {
            record = partition.renamed(record)?;
            nvfp4 = partition.renamed_state(nvfp4, model);
        }
        let saved = Saved {
            state: State::new(self.task.run(), self.step, self.losses.clone(), nvfp4),
            timing: Timing {
                seconds: self.seconds(),
            },
            model: record,
            optimizer: self.rank.optimizer.to_bytes()?,
        };
        let path = saved.save_of_ranks(&self.folder, world, partition)?;
        self.saved = Some(self.step);
        observer.checkpoint(&path);
        Ok(())
    }
}
