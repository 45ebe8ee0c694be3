//! Data-parallel training: one rank for each device, with a model and an optimizer of its own.
//!
//! Ranks step together. Each computes the gradients of its part of the batch. [`DataParallel`]
//! averages them over the ranks, and each rank updates its weights by the mean, so that the weights
//! stay equal. Where a rank has parts of parameters, it averages and updates these.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail};
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Device, Int, Tensor};
use burn_nvfp4::DataParallel;
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, SMALLEST_ALONE, Shards, average_expert_gradients,
    average_gradients, average_in_backward, average_replicated_in_backward, fully_shard,
    reduce_gradients,
};
use rand::RngExt;

use crate::capture::{GraphSteps, copy_into};
use crate::checkpoint::parts::{self, Partition};
use crate::config::RunConfig;
use crate::data::Batch;
use crate::groups::ParallelGroups;
use crate::memory::{MemoryBudget, message};
use crate::model::LanguageModel;
use crate::optim::Optimizer;
use crate::random::stream;

/// A model that is trained on one device.
pub(crate) struct Rank<M> {
    /// With autodiff.
    pub device: Device,
    pub optimizer: Optimizer,
    /// None while a step updates it: nobody else holds the weights then, so that the optimizer
    /// writes them in place.
    model: Option<M>,
    /// Losses of steps that are still on the device.
    pending: Vec<Tensor<1>>,
    averaging: Averaging,
    /// What other ranks have the other parts of.
    partition: Option<Partition>,
    /// The steps as a graph, while they are taken so.
    graph: Option<Graph>,
}

/// Where the means of gradients over the ranks come from.
#[derive(Debug, Clone)]
enum Averaging {
    /// There is one rank, or the optimizer averages.
    None,
    /// Threads with a device each.
    Devices(DataParallel),
    /// Processes, which all have the same parameters.
    Ranks(ProcessGroup),
    /// Processes with other experts.
    Experts {
        batch: ProcessGroup,
        experts: Vec<ParamId>,
        data: ProcessGroup,
    },
    /// Processes with parts of the model.
    Sharded(Shards),
}

/// Whether telemetry or a profiler looks on at a step: a replay of a graph shows nothing of what it
/// does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watched {
    No,
    Yes,
}

impl<M: LanguageModel> Rank<M> {
    pub fn new(device: Device, model: M, optimizer: Optimizer) -> Self {
        Self {
            device,
            optimizer,
            model: Some(model),
            pending: Vec::new(),
            averaging: Averaging::None,
            partition: None,
            graph: None,
        }
    }

    /// Becomes a rank of `groups`, whose ranks have the same weights or parts of them, and keeps of
    /// model and optimizer what `config` says. `names` are those of the parameters in the model of
    /// one rank.
    ///
    /// # Errors
    /// When the optimizer's state does not fit.
    pub fn join(
        &mut self,
        groups: &ParallelGroups,
        config: &RunConfig,
        names: BTreeMap<u64, String>,
    ) -> Result<()> {
        let batch = groups.batch();
        if config.fsdp && batch.size() > 1 {
            let state = self.optimizer.to_bytes()?;
            let model = fully_shard(self.model.take().expect(KEPT), batch);
            let shards = Shards::of(&model, batch);
            self.model = Some(model);
            self.shard_optimizer(state, Partition::of_shards(shards.clone(), true))?;
            self.averaging = Averaging::Sharded(shards);
        } else if config.zero1 && batch.size() > 1 {
            let shards = Shards::shardable(self.model(), batch);
            let partition = Partition::of_shards(shards, false);
            let mut optimizer = self.optimizer.sharded(batch)?;
            let state = self.optimizer.to_bytes()?;
            optimizer.load(parts::slice(state, &partition)?, &self.device)?;
            self.optimizer = optimizer;
            self.partition = Some(partition);
        } else {
            if let Some(of) = self.model().partition(groups) {
                let state = self.optimizer.to_bytes()?;
                let model = true;
                self.shard_optimizer(state, Partition { of, model, names })?;
            }
            self.average(groups);
        }
        Ok(())
    }

    /// The optimizer keeps this rank's parts of its `state`.
    fn shard_optimizer(&mut self, state: Bytes, partition: Partition) -> Result<()> {
        let mut optimizer = self.optimizer.fresh();
        optimizer.load(parts::slice(state, &partition)?, &self.device)?;
        optimizer.set_shards(partition.of.shards.clone())?;
        self.optimizer = optimizer;
        self.partition = Some(partition);
        Ok(())
    }

    /// Has gradients averaged over the ranks with other parts of the batch.
    fn average(&mut self, groups: &ParallelGroups) {
        let batch = groups.batch();
        if batch.size() == 1 {
            return;
        }
        let model = self.model.take().expect(KEPT);
        let (model, averaging) = match &self.partition {
            Some(partition) if groups.expert().size() > 1 => {
                let ids = partition.of.shards.ids.iter();
                let experts: Vec<ParamId> = ids.map(|id| ParamId::from(*id)).collect();
                let data = groups.data();
                let of = ExpertGroups {
                    batch,
                    experts: &experts,
                    data,
                };
                let model = average_replicated_in_backward(model, of, SMALLEST_ALONE);
                let averaging = Averaging::Experts {
                    batch: batch.clone(),
                    data: data.clone(),
                    experts,
                };
                (model, averaging)
            }
            _ => {
                let model = average_in_backward(model, batch, SMALLEST_ALONE);
                (model, Averaging::Ranks(batch.clone()))
            }
        };
        self.model = Some(model);
        self.averaging = averaging;
    }

    /// What other ranks have the other parts of.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// The model of the last step.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect(KEPT)
    }

    /// From here on, each step is one launch of a graph of this model and optimizer, after three
    /// ordinary steps.
    ///
    /// # Errors
    /// When the device has no graphs, or another graph.
    pub fn begin_graph(&mut self) -> Result<()> {
        let steps = GraphSteps::begin(self.model(), &self.device)?;
        self.graph = Some(Graph::new(steps));
        Ok(())
    }

    /// Whether steps are those of a graph.
    pub fn has_graph(&self) -> bool {
        self.graph.is_some()
    }

    /// Steps are ordinary again.
    pub fn end_graph(&mut self) {
        self.graph = None;
    }

    /// One step. Nothing is read back from the device. Where somebody [looks on](Watched), its
    /// kernels are launched one by one even if it was captured.
    ///
    /// # Errors
    /// With a graph: when the device cannot capture what the step does, or replay it, or the
    /// optimizer cannot be in a graph.
    pub fn step(&mut self, batch: Batch, lr: f64, watched: Watched) -> Result<()> {
        let (inputs, targets) = batch.tensors(&self.device);
        let loss = match self.graph.take() {
            None => {
                let (loss, gradients) = self.gradients(inputs, targets);
                let model = self.model.take().expect(KEPT);
                self.model = Some(self.optimizer.step(lr, model, gradients));
                loss
            }
            Some(mut graph) => {
                graph.load(inputs, targets)?;
                self.optimizer.begin_step(lr, &self.device)?;
                let loss = self.graph_step(&mut graph, watched)?;
                self.graph = Some(graph);
                loss
            }
        };
        self.pending.push(loss);
        Ok(())
    }

    /// The loss of a step of `graph`, whose batch and learning rate are on the device.
    fn graph_step(&mut self, graph: &mut Graph, watched: Watched) -> Result<Tensor<1>> {
        let Graph { steps, batch, loss } = graph;
        let (inputs, targets) = batch.as_ref().expect("`load` has put it there");
        let mut made = None;
        let step = || {
            let (inputs, targets) = (inputs.clone(), targets.clone());
            let (of_step, gradients) = self.gradients(inputs, targets);
            made = Some(of_step);
            let model = self.model.take().expect(KEPT);
            self.model = Some(self.optimizer.step_begun(model, gradients));
        };
        let of_step = match watched {
            Watched::Yes => {
                steps.launch(step)?;
                made
            }
            Watched::No => {
                steps.step(step)?;
                // A replay makes none: it writes that of the capture.
                *loss = made.or(loss.take());
                loss.clone()
            }
        };
        // The next replay writes another loss to the same memory.
        Ok(of_step.expect("a step has been taken").mul_scalar(1.0))
    }

    /// The loss of a batch, without autodiff, and the gradients of all parameters, averaged over
    /// the ranks.
    fn gradients(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, GradientsParams) {
        let model = self.model();
        let loss = model.training_loss(inputs, targets);
        let kept = loss.clone().without_autodiff();
        let mut gradients = GradientsParams::from_grads(loss.backward(), model);
        match &self.averaging {
            Averaging::None => {}
            Averaging::Devices(group) => group.average(model, &mut gradients, &self.device),
            Averaging::Ranks(group) => average_gradients(model, &mut gradients, group),
            Averaging::Experts {
                batch,
                experts,
                data,
            } => {
                let groups = ExpertGroups {
                    batch,
                    experts,
                    data,
                };
                average_expert_gradients(model, &mut gradients, groups);
            }
            Averaging::Sharded(shards) => reduce_gradients(model, &mut gradients, shards),
        }
        (kept, gradients)
    }

    /// The losses of the steps since the last call; waits for the device.
    pub fn losses(&mut self) -> Vec<f32> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let losses = Tensor::cat(std::mem::take(&mut self.pending), 0).into_data();
        losses.iter::<f32>().collect()
    }

    /// What [`Others::check`] compares of each parameter.
    fn digest(&self) -> Vec<Digest> {
        let mut digests = Digests(Vec::new());
        self.model().visit(&mut digests);
        digests.0
    }

    /// The copy of this rank for data-parallel training on `device`, one of those of `group`: it
    /// has the same weights, draws random bits of its own, and averages its gradients with the
    /// other ranks.
    fn fork(&self, device: &Device, optimizer: Optimizer, group: DataParallel) -> Self {
        let model = self.model().clone().fork(device);
        // The copy travels by a collective of both devices.
        for device in [&self.device, device] {
            device
                .sync()
                .expect("a device that trains takes its work: operations on it fail before");
        }
        Self {
            averaging: Averaging::Devices(group),
            ..Self::new(device.clone(), model, optimizer)
        }
    }
}

/// The steps of a rank as a CUDA graph.
struct Graph {
    steps: GraphSteps,
    /// Inputs and targets, where the graph reads them.
    batch: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    /// Of the last step, where the graph writes it.
    loss: Option<Tensor<1>>,
}

impl Graph {
    fn new(steps: GraphSteps) -> Self {
        Self {
            steps,
            batch: None,
            loss: None,
        }
    }

    /// Puts a batch where the graph reads it.
    fn load(&mut self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Result<()> {
        self.batch = Some(match self.batch.take() {
            None => (inputs, targets),
            Some(before) => (copy_into(before.0, inputs)?, copy_into(before.1, targets)?),
        });
        Ok(())
    }
}

/// Why a rank has its model: what fails between taking it out and putting it back ends the run.
const KEPT: &str = "the run goes on only after a step that was whole";

/// One parameter: the sum of its elements with signs that change irregularly, and its norm.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Digest {
    projection: f64,
    norm: f64,
}

impl Digest {
    fn of(values: impl Iterator<Item = f32>) -> Self {
        let (mut projection, mut squares) = (0.0, 0.0);
        let mut signs = stream(0, "signs", 0);
        for value in values.map(f64::from) {
            projection += match signs.random::<bool>() {
                true => value,
                false => -value,
            };
            squares += value * value;
        }
        Self {
            projection,
            norm: squares.sqrt(),
        }
    }

    /// Whether two parameters may differ by rounding alone. Elements that differ by `d` at random
    /// differ in projection by the norm of `d`. A thousandth is less than a step or two of separate
    /// training makes.
    fn is_near(self, other: Self) -> bool {
        let allowed = 1e-3 * self.norm.max(other.norm);
        (self.projection - other.projection).abs() <= allowed
            && (self.norm - other.norm).abs() <= allowed
    }
}

/// Visits weights.
struct Digests(Vec<Digest>);

impl ModuleVisitor for Digests {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().without_autodiff().into_data();
        self.0.push(Digest::of(data.iter::<f32>()));
    }
}

/// What the first rank asks of another.
enum Job {
    Step { batch: Batch, lr: f64 },
    Losses(Sender<Vec<f32>>),
    Digest(Sender<Vec<Digest>>),
}

/// A rank in its own thread.
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

/// The other ranks of a run, beside the first one. They end with it.
pub(crate) struct Others {
    workers: Vec<Worker>,
}

impl Others {
    /// Start training `first` on `devices`, the first of which is its own. It becomes a rank among
    /// them, and each other device gets a copy of it.
    ///
    /// # Errors
    /// When gradients cannot be averaged over `devices`, the optimizer's state cannot be copied or
    /// a thread cannot be started.
    pub fn start<M: LanguageModel>(
        first: &mut Rank<M>,
        devices: &[Device],
        budget: &MemoryBudget,
    ) -> Result<Self> {
        let group = DataParallel::new(devices)?;
        let state = first.optimizer.to_bytes()?;
        let workers = devices[1..]
            .iter()
            .map(|device| {
                let mut optimizer = first.optimizer.fresh();
                optimizer.load(Bytes::from_bytes_vec(state.to_vec()), device)?;
                worker(first.fork(device, optimizer, group.clone()), budget.clone())
            })
            .collect::<Result<_>>()?;
        let device = first.device.clone();
        let fresh = first.optimizer.fresh();
        let optimizer = std::mem::replace(&mut first.optimizer, fresh);
        *first = first.fork(&device, optimizer, group);
        Ok(Self { workers })
    }

    /// Have each of the others do its part of a step; the first rank has to do its own now.
    pub fn step(&self, batches: impl Iterator<Item = Batch>, lr: f64) {
        for (worker, batch) in self.workers.iter().zip(batches) {
            worker.send(Job::Step { batch, lr });
        }
    }

    /// The mean over all ranks of the losses of each step, `first` being those of the first one.
    pub fn mean_losses(&self, first: Vec<f32>) -> Vec<f32> {
        let mut sums = first;
        for worker in &self.workers {
            let losses = worker.ask(Job::Losses);
            sums.iter_mut()
                .zip(losses)
                .for_each(|(sum, loss)| *sum += loss);
        }
        let count = (self.workers.len() + 1) as f32;
        sums.into_iter().map(|sum| sum / count).collect()
    }

    /// Fail unless all ranks have the weights of `first`, but for rounding. Waits for all devices.
    ///
    /// # Errors
    /// When one has others: its gradients were not averaged with the others' at some step.
    pub fn check<M: LanguageModel>(&self, first: &Rank<M>, step: u64) -> Result<()> {
        let expected = first.digest();
        for (worker, rank) in self.workers.iter().zip(1..) {
            let found = worker.ask(Job::Digest);
            let far = expected
                .iter()
                .zip(&found)
                .position(|(expected, found)| !expected.is_near(*found));
            if let Some(parameter) = far {
                bail!(
                    "at step {step} parameter {parameter} of rank {rank} is {:?} and that of rank \
                     0 {:?}, but gradients that are averaged keep all ranks equal: train on one \
                     device",
                    found[parameter],
                    expected[parameter]
                );
            }
        }
        Ok(())
    }

    /// Wait for the other ranks to end.
    pub fn stop(self) {
        for Worker { jobs, thread } in self.workers {
            drop(jobs);
            thread.join().expect(RUNNING);
        }
    }
}

/// Why a worker exists: it ends the process if it fails.
const RUNNING: &str = "a rank runs as long as the first one";

impl Worker {
    fn send(&self, job: Job) {
        self.jobs.send(job).expect(RUNNING);
    }

    /// What the rank answers to `job`.
    fn ask<T>(&self, job: impl FnOnce(Sender<T>) -> Job) -> T {
        let (reply, answer) = channel();
        self.send(job(reply));
        answer.recv().expect(RUNNING)
    }
}

/// Start the thread of `rank`.
fn worker<M: LanguageModel>(mut rank: Rank<M>, budget: MemoryBudget) -> Result<Worker> {
    let (jobs, received) = channel();
    let body = move || {
        let device = rank.device.clone();
        budget.guard(&device, || {
            for job in received {
                match job {
                    Job::Step { batch, lr } => (rank.step(batch, lr, Watched::No))
                        .expect("steps without a graph do not fail"),
                    // The first rank has gone if no one listens.
                    Job::Losses(reply) => drop(reply.send(rank.losses())),
                    Job::Digest(reply) => drop(reply.send(rank.digest())),
                }
            }
            Ok(())
        })
    };
    let thread = thread::Builder::new()
        .name("rank".into())
        .spawn(move || {
            // The other ranks wait for this one's gradients, and would do so for ever.
            match catch_unwind(AssertUnwindSafe(body)) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => eprintln!("error: {error:#}"),
                Err(cause) => eprintln!("error: a rank of the run failed: {}", message(&*cause)),
            }
            std::process::exit(1);
        })
        .context("starting the thread of a rank")?;
    Ok(Worker { jobs, thread })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounding passes, a step of training does not.
    #[test]
    fn ranks_that_came_apart_are_seen() {
        let weights: Vec<f32> = (0..4096)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3)
            .collect();
        let digest = |change: &dyn Fn(usize, f32) -> f32| {
            Digest::of(weights.iter().enumerate().map(|(i, &w)| change(i, w)))
        };
        let own = digest(&|_, w| w);
        assert!(own.is_near(digest(&|_, w| w)));
        assert!(own.is_near(digest(&|i, w| if i % 7 == 0 {
            w * (1.0 + 1e-4)
        } else {
            w
        })));
        // Adam's steps are about as large as the learning rate, each element's in a direction of
        // its own.
        let step = |i: usize| {
            if (i * i / 3).is_multiple_of(2) {
                1e-3
            } else {
                -1e-3
            }
        };
        assert!(!own.is_near(digest(&|i, w| w + step(i))));
        assert!(!own.is_near(digest(&|_, w| w * 0.9)));
    }

    /// Steps of a graph have the bits of ordinary ones: losses and weights. CubeCL's CPU runtime
    /// takes the three steps before the capture.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[test]
    fn steps_of_a_graph_are_ordinary_ones() {
        use crate::config::{Activation, Preset, RecipeName, RunConfig};
        use crate::model::Transformer;

        let (device, name, steps) = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cpu")]
            Ok("cpu") => (Device::cpu(), "cpu", 3),
            #[cfg(feature = "cuda")]
            Ok("cuda") => (Device::cuda(0), "cuda:0", 200),
            _ => {
                println!(
                    "SKIPPED: data_parallel::tests::steps_of_a_graph_are_ordinary_ones: \
                     NVFP4_TEST_DEVICE names no device with graphs"
                );
                return;
            }
        };
        let device = device.autodiff();
        let mut config = RunConfig::preset(Preset::Tiny, name);
        if name == "cpu" {
            (config.batch, config.model.context) = (2, 32);
            config.activation = Activation::F32;
        }
        let recipe = RecipeName::nvfp4();
        let rank = || {
            let model = Transformer::build(&config, &recipe, &device).unwrap();
            Rank::new(device.clone(), model, Optimizer::new(&config).unwrap())
        };
        let batch = |step| Batch::random(1, step, config.batch, config.model.context);
        let lr = |step| config.lr * (1.0 + step as f64);
        let mut ordinary = rank();
        for step in 0..steps {
            ordinary.step(batch(step), lr(step), Watched::No).unwrap();
        }
        let mut captured = rank();
        captured.begin_graph().unwrap();
        for step in 0..steps {
            // One is looked at in between.
            let watched = match step {
                20 => Watched::Yes,
                _ => Watched::No,
            };
            captured.step(batch(step), lr(step), watched).unwrap();
        }
        let graph = captured.graph.as_ref().unwrap();
        assert_eq!(graph.steps.is_captured(), name != "cpu");
        let bits = |losses: Vec<f32>| losses.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(captured.losses()), bits(ordinary.losses()));
        assert_eq!(captured.digest(), ordinary.digest());
        assert_eq!(captured.optimizer.time(), steps);
    }
}
