//! The devices of a run: one rank for each, with a model and an optimizer of its own.
//!
//! Ranks take their steps together. Each computes the gradients of its part of the batch; the mean over
//! the ranks is made while they go backward (`burn::tensor::distributed`), so that all of them update the
//! same weights by the same gradients, and stay equal.

use std::any::Any;
use std::hash::{DefaultHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, ensure};
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::distributed::{DistributedConfig, DistributedContext, ReduceOperation};
use burn::tensor::{Bytes, Device, Tensor};

use super::data::Batch;
use super::model::LanguageModel;
use super::optim::AdamW;

/// A model that is trained on one device.
pub(super) struct Rank<M> {
    /// With autodiff.
    pub device: Device,
    pub model: M,
    pub optimizer: AdamW,
    /// Losses of steps that are still on the device.
    pending: Vec<Tensor<1>>,
    /// Where all ranks meet behind each backward. Burn 0.22.1 counts the devices that begin and end one,
    /// and forgets a device that begins the next before the last has ended this one: all would wait
    /// for ever.
    backward_ended: Option<Arc<Barrier>>,
}

impl<M: LanguageModel> Rank<M> {
    pub fn new(device: Device, model: M, optimizer: AdamW) -> Self {
        Self {
            device,
            model,
            optimizer,
            pending: Vec::new(),
            backward_ended: None,
        }
    }

    /// One step. Nothing is read back from the device.
    pub fn step(&mut self, batch: Batch, lr: f64) {
        let (inputs, targets) = batch.tensors(&self.device);
        let loss = self.model.training_loss(inputs, targets);
        self.pending.push(loss.clone().without_autodiff());
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        if let Some(barrier) = &self.backward_ended {
            barrier.wait();
        }
        self.model = self.optimizer.step(lr, self.model.clone(), gradients);
    }

    /// The losses of the steps since the last call; waits for the device.
    pub fn losses(&mut self) -> Vec<f32> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let losses = Tensor::cat(std::mem::take(&mut self.pending), 0).into_data();
        losses.iter::<f32>().collect()
    }

    /// A digest of the bits of all weights.
    fn digest(&self) -> u64 {
        let mut digest = Digest(DefaultHasher::new());
        self.model.visit(&mut digest);
        digest.0.finish()
    }

    /// The copy of this rank for data-parallel training on `device`: it has the same weights, draws
    /// random bits of its own, and averages its gradients with the other ranks.
    fn fork(&self, device: &Device, optimizer: AdamW, barrier: &Arc<Barrier>) -> Self {
        let model = self.model.clone().fork(device).map(&mut Distributed);
        Self {
            backward_ended: Some(barrier.clone()),
            ..Self::new(device.clone(), model, optimizer)
        }
    }
}

/// Marks parameters, so that the gradient of each is averaged over the ranks.
struct Distributed;

impl ModuleMapper for Distributed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}

/// Hashes weights.
struct Digest(DefaultHasher);

impl ModuleVisitor for Digest {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0
            .write(param.val().without_autodiff().into_data().bytes());
    }
}

/// What the first rank asks of another.
enum Job {
    Step { batch: Batch, lr: f64 },
    Losses(Sender<Vec<f32>>),
    Digest(Sender<u64>),
}

/// A rank in a thread of its own.
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

/// The other ranks of a run, beside the first one. They end with it.
pub(super) struct Others {
    workers: Vec<Worker>,
    /// Tears the communication down when it is dropped.
    _context: DistributedContext,
}

impl Others {
    /// Start training `first` on `devices`, the first of which is its own. It becomes a rank among
    /// them, and each other device gets a copy of it.
    ///
    /// # Errors
    /// When the optimizer's state cannot be copied or a thread cannot be started.
    pub fn start<M: LanguageModel>(first: &mut Rank<M>, devices: &[Device]) -> Result<Self> {
        let config = DistributedConfig {
            all_reduce_op: ReduceOperation::Mean,
        };
        let context = DistributedContext::init(devices.to_vec(), config);
        let state = first.optimizer.to_bytes()?;
        let barrier = Arc::new(Barrier::new(devices.len()));
        let workers = devices[1..]
            .iter()
            .map(|device| {
                let mut optimizer = first.optimizer.fresh();
                optimizer.load(Bytes::from_bytes_vec(state.to_vec()), device)?;
                worker(first.fork(device, optimizer, &barrier))
            })
            .collect::<Result<_>>()?;
        let device = first.device.clone();
        let optimizer = std::mem::replace(&mut first.optimizer, AdamW::new(0.0, 1.0));
        *first = first.fork(&device, optimizer, &barrier);
        Ok(Self {
            workers,
            _context: context,
        })
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

    /// Fail unless all ranks have the weights of `first`, bit for bit. Waits for all devices.
    ///
    /// # Errors
    /// When one has others: its gradients were not averaged with the others' at some step.
    pub fn check<M: LanguageModel>(&self, first: &Rank<M>, step: u64) -> Result<()> {
        let expected = first.digest();
        for (worker, rank) in self.workers.iter().zip(1..) {
            ensure!(
                worker.ask(Job::Digest) == expected,
                "at step {step} the weights of rank {rank} are not those of rank 0, but gradients \
                 that are averaged keep all ranks equal: train on one device"
            );
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

/// Why a worker is there: it ends the process if it fails.
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
fn worker<M: LanguageModel>(mut rank: Rank<M>) -> Result<Worker> {
    let (jobs, received) = channel();
    let body = move || {
        for job in received {
            match job {
                Job::Step { batch, lr } => rank.step(batch, lr),
                // The first rank has gone if no one listens.
                Job::Losses(reply) => drop(reply.send(rank.losses())),
                Job::Digest(reply) => drop(reply.send(rank.digest())),
            }
        }
    };
    let thread = thread::Builder::new()
        .name("rank".into())
        .spawn(move || {
            if let Err(cause) = catch_unwind(AssertUnwindSafe(body)) {
                // The other ranks wait for this one's gradients, and would do so for ever.
                eprintln!("error: a rank of the run failed: {}", message(&*cause));
                std::process::exit(1);
            }
        })
        .context("starting the thread of a rank")?;
    Ok(Worker { jobs, thread })
}

/// What a panic said.
fn message(cause: &(dyn Any + Send)) -> &str {
    cause
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| cause.downcast_ref::<&str>().copied())
        .unwrap_or("for a reason that it did not say")
}
