//! A rank of a run, with its model and optimizer.
//!
//! Ranks step together. Each computes the gradients of its share of the batch. The gradients are
//! averaged over the ranks, and each rank updates its weights by the mean, so that the weights stay
//! equal. A rank that holds shards of parameters averages and updates only these.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Bytes, Device, Tensor};
use burn_nvfp4::nn::expert_parameters;
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, SMALLEST_ALONE, Shards, SplitParameters,
    average_replicated_in_backward, fully_shard_experts, gather, reduce_expert_gradients,
};

use super::digest::check_equal;
use super::task::{GraphInput, LossReduction, Settings, Sharding, StepInput};
use crate::capture::GraphSteps;
use crate::checkpoint::parts::{self, Level, Partition};
use crate::groups::ParallelGroups;
use crate::model::ModelPartition;
use crate::optim::Optimizer;

/// A model that is trained on one device, on batches of type `B`.
pub(crate) struct Rank<M, B> {
    /// Device with autodiff.
    pub device: Device,
    pub optimizer: Optimizer,
    /// None while a step updates the model: the optimizer is then the only owner of the weights and
    /// updates them in place.
    model: Option<M>,
    /// Losses of steps that are still on the device.
    pending: Vec<Tensor<1>>,
    averaging: Averaging,
    /// Split of the parameters over ranks, if they are split.
    partition: Option<Partition>,
    /// The steps as a graph, while a graph is used.
    graph: Option<Graph<B>>,
}

/// Source of the gradient means over the ranks.
#[derive(Debug, Clone)]
enum Averaging {
    /// Only one rank has this part of the parameters.
    None,
    /// The optimizer averages them (ZeRO-1).
    Optimizer(Replicas),
    /// Ranks with identical parameters, except for experts and shards of these parameters (FSDP).
    Ranks(Replicas, BTreeSet<u64>),
}

/// Ranks with different shares of the batch and the same parameters.
#[derive(Debug, Clone)]
struct Replicas {
    batch: ProcessGroup,
    /// Expert parameters, shared only by the ranks of `data`.
    experts: Vec<ParamId>,
    data: ProcessGroup,
    /// Loss that a rank differentiates.
    loss: RankLoss,
    /// Divisor of the loss of a batch that gives that loss, if it is another one.
    divisor: Option<f64>,
}

impl Replicas {
    /// Returns the replicas in `groups` of the parameters of `model`, whose loss is reduced by
    /// `loss`. With experts on several ranks, a rank differentiates its share of the loss, so that
    /// expert gradients need no division.
    fn new<M: Module>(groups: &ParallelGroups, model: &M, loss: LossReduction) -> Self {
        let experts = expert_parameters(model);
        let (loss, divisor) = match loss {
            LossReduction::Sum => (RankLoss::Share, None),
            LossReduction::Mean if experts.is_empty() => (RankLoss::Mean, None),
            LossReduction::Mean => (RankLoss::Share, Some(groups.batch().size() as f64)),
        };
        Self {
            batch: groups.batch().clone(),
            experts,
            data: groups.data().clone(),
            loss,
            divisor,
        }
    }

    fn groups(&self) -> ExpertGroups<'_> {
        ExpertGroups {
            batch: &self.batch,
            experts: &self.experts,
            data: &self.data,
            loss: self.loss,
        }
    }

    /// Returns the level at which `shards`, over these ranks, split the tensors of the ranks of
    /// `groups`.
    fn level(&self, groups: &ParallelGroups, shards: &Shards, model: bool) -> Level {
        let is_of_experts =
            (shards.ids.first()).is_some_and(|id| self.experts.contains(&ParamId::from(*id)));
        Level {
            ranks: shards.group.size(),
            stride: match is_of_experts {
                true => groups.expert().size(),
                false => groups.tensor().size(),
            },
            model,
            sharded: shards.ids.clone(),
            parameters: BTreeMap::new(),
        }
    }
}

/// States whether telemetry or a profiler observes a step. A replayed graph cannot be observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watched {
    No,
    Yes,
}

impl<M: Module, B: GraphInput> Rank<M, B> {
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

    /// Joins `groups`, whose ranks have the same weights or shards of them, and keeps the parts of
    /// model and optimizer that `settings` assign to this rank. `splits` are the parameters that
    /// are split already, and `names` the parameter names in the single-rank model.
    ///
    /// # Errors
    /// Returns an error if the optimizer state does not match.
    pub fn join(
        &mut self,
        groups: &ParallelGroups,
        settings: &Settings,
        splits: Vec<ModelPartition>,
        names: BTreeMap<u64, String>,
    ) -> Result<()> {
        let replicas = Replicas::new(groups, self.model(), settings.loss);
        let sharding = match groups.batch().size() {
            1 => Sharding::None,
            _ => settings.sharding,
        };
        if splits.is_empty() && sharding == Sharding::None {
            self.average(replicas, settings.reduces_in_backward);
            return Ok(());
        }
        let state = self.optimizer.to_bytes()?;
        let sharded = match sharding {
            Sharding::None => Vec::new(),
            Sharding::Optimizer => Shards::shardable_experts(self.model(), replicas.groups()),
            Sharding::Full => {
                let model = self.model.take().expect(KEPT);
                let model = fully_shard_experts(model, replicas.groups());
                let sharded = Shards::of_experts(&model, replicas.groups());
                self.model = Some(model);
                sharded
            }
        };
        let of_model = sharding == Sharding::Full;
        let levels = sharded.iter();
        let levels = levels.map(|shards| replicas.level(groups, shards, of_model));
        let partition = Partition {
            levels: splits.iter().map(split_level).chain(levels).collect(),
            rank: groups.world().rank(),
            // Sharding alone does not change the names.
            names: match splits.is_empty() {
                true => BTreeMap::new(),
                false => names,
            },
        };
        let splits = splits.into_iter().map(|split| SplitParameters {
            shards: split.shards,
            all: groups.world().clone(),
        });
        let splits: Vec<_> = splits.collect();
        let state = parts::slice(state, &partition)?;
        self.partition = Some(partition);
        if sharding == Sharding::Optimizer {
            self.optimizer = self.optimizer.sharded(replicas.groups(), splits)?;
            self.averaging = Averaging::Optimizer(replicas);
        } else {
            let ids = sharded.iter().flat_map(|shards| &shards.ids).copied();
            let ids: BTreeSet<u64> = ids.collect();
            self.optimizer = self.optimizer.fresh();
            self.optimizer
                .set_shards(Shards::with_splits(sharded, &splits))?;
            match sharding {
                Sharding::Full => self.averaging = Averaging::Ranks(replicas, ids),
                _ => self.average(replicas, settings.reduces_in_backward),
            }
        }
        self.optimizer.load(state, &self.device)
    }

    /// Enables averaging of gradients over the ranks with other shares of the batch, which begins in
    /// the backward if `in_backward`.
    fn average(&mut self, replicas: Replicas, in_backward: bool) {
        if replicas.batch.size() == 1 {
            return;
        }
        if in_backward {
            let model = self.model.take().expect(KEPT);
            let groups = replicas.groups();
            let model = average_replicated_in_backward(model, groups, SMALLEST_ALONE);
            self.model = Some(model);
        }
        self.averaging = Averaging::Ranks(replicas, BTreeSet::new());
    }

    /// Returns the split of the parameters over ranks, if they are split.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// Returns the model after the last step.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect(KEPT)
    }

    /// Gathers the parameters that are sharded over ranks, and returns the model without autodiff.
    /// All ranks call this function.
    pub fn whole(&self) -> M {
        match &self.averaging {
            Averaging::Ranks(_, sharded) if !sharded.is_empty() => gather(self.model().valid()),
            _ => self.model().valid(),
        }
    }

    /// From here on, launches each step as a graph of this model and optimizer, after three
    /// ordinary steps. Does nothing if they are launched so already.
    ///
    /// # Errors
    /// Returns an error if the device does not support graphs, or already has one.
    pub fn begin_graph(&mut self) -> Result<()> {
        if self.graph.is_none() {
            self.graph = Some(Graph {
                steps: GraphSteps::begin(self.model(), &self.device)?,
                input: None,
                loss: None,
            });
        }
        Ok(())
    }

    /// Returns true if the next step is the last ordinary one before the capture.
    pub fn is_before_capture(&self) -> bool {
        (self.graph.as_ref()).is_some_and(|graph| graph.steps.is_before_capture())
    }

    /// Returns to ordinary steps.
    pub fn end_graph(&mut self) {
        self.graph = None;
    }

    /// Runs one step on `input` with the losses of its batches, without synchronizing with the
    /// device. If the step is [watched](Watched), its kernels are launched one by one even if a
    /// graph was captured.
    ///
    /// # Errors
    /// Returns the errors of `loss`. With a graph, returns an error if the device cannot capture or
    /// replay the step, or if the optimizer cannot run in a graph.
    pub fn step(
        &mut self,
        input: StepInput<B>,
        lr: f64,
        watched: Watched,
        loss: impl Loss<M, B>,
    ) -> Result<()> {
        let loss = match self.graph.take() {
            None => {
                let (loss, gradients) = self.gradients(&input, &loss)?;
                let model = self.model.take().expect(KEPT);
                self.model = Some(self.optimizer.step(lr, model, gradients));
                loss
            }
            Some(mut graph) => {
                graph.load(input)?;
                self.optimizer.begin_step(lr, &self.device)?;
                let loss = self.graph_step(&mut graph, watched, &loss)?;
                self.graph = Some(graph);
                loss
            }
        };
        self.pending.push(loss);
        Ok(())
    }

    /// Runs a step of `graph`, whose input and learning rate are on the device, and returns its
    /// loss.
    fn graph_step(
        &mut self,
        graph: &mut Graph<B>,
        watched: Watched,
        of_batch: &impl Loss<M, B>,
    ) -> Result<Tensor<1>> {
        let Graph { steps, input, loss } = graph;
        let input = input.as_ref().expect("`load` has put it there");
        let mut made = None;
        let step = || made = Some(self.begun_step(input, of_batch));
        let of_step = match watched {
            Watched::Yes => {
                steps.launch(step)?;
                made.transpose()?
            }
            Watched::No => {
                steps.step(step)?;
                // A replay returns no new loss tensor: it overwrites the one from the capture.
                *loss = made.transpose()?.or(loss.take());
                loss.clone()
            }
        };
        // Copy, because the next replay overwrites the same memory.
        Ok(of_step.expect("a step has been taken").mul_scalar(1.0))
    }

    /// Runs the step that the optimizer has begun, kernel by kernel.
    fn begun_step(&mut self, input: &StepInput<B>, loss: &impl Loss<M, B>) -> Result<Tensor<1>> {
        let (loss, gradients) = self.gradients(input, loss)?;
        let model = self.model.take().expect(KEPT);
        self.model = Some(self.optimizer.step_begun(model, gradients));
        Ok(loss)
    }

    /// Returns this rank's loss of a step, without autodiff, and the gradients of all parameters,
    /// averaged over the ranks.
    fn gradients(
        &self,
        input: &StepInput<B>,
        loss: &impl Loss<M, B>,
    ) -> Result<(Tensor<1>, GradientsParams)> {
        let model = self.model();
        let scale = input.scale();
        let of_batch = |batch: &B| self.gradients_of(batch, scale.as_ref(), loss);
        let (loss, mut gradients) = match &input.batches[..] {
            [batch] => of_batch(batch)?,
            batches => {
                let mut accumulator = GradientsAccumulator::new();
                let mut losses = Vec::new();
                for batch in batches {
                    let (loss, gradients) = of_batch(batch)?;
                    accumulator.accumulate(model, gradients);
                    losses.push(loss);
                }
                (Tensor::cat(losses, 0).sum(), accumulator.grads())
            }
        };
        if let Averaging::Ranks(replicas, sharded) = &self.averaging {
            reduce_expert_gradients(model, &mut gradients, replicas.groups(), sharded);
        }
        Ok((loss, gradients))
    }

    /// Returns the loss of a batch, without autodiff, and the gradients of all parameters on this
    /// rank.
    fn gradients_of(
        &self,
        batch: &B,
        scale: Option<&Tensor<1>>,
        loss: &impl Loss<M, B>,
    ) -> Result<(Tensor<1>, GradientsParams)> {
        let model = self.model();
        let loss = loss(model, batch, scale)?;
        let kept = loss.clone().without_autodiff();
        let loss = match &self.averaging {
            Averaging::Optimizer(replicas) | Averaging::Ranks(replicas, _) => {
                match replicas.divisor {
                    Some(divisor) => loss.div_scalar(divisor),
                    None => loss,
                }
            }
            Averaging::None => loss,
        };
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        Ok((kept, gradients))
    }

    /// Returns the losses of the steps since the last call; waits for the device.
    pub fn losses(&mut self) -> Vec<f32> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let losses = Tensor::cat(std::mem::take(&mut self.pending), 0).into_data();
        losses.iter::<f32>().collect()
    }

    /// Checks that ranks that update the same parameters have equal values up to rounding. `record`
    /// is the record of this rank's model.
    ///
    /// # Errors
    /// Returns an error that names step, rank and parameter.
    pub fn check_equal(&self, record: &Bytes, step: u64) -> Result<()> {
        let none = BTreeSet::new();
        let (replicas, sharded) = match &self.averaging {
            Averaging::None => return Ok(()),
            Averaging::Optimizer(replicas) => (replicas, &none),
            Averaging::Ranks(replicas, sharded) => (replicas, sharded),
        };
        let is_expert = |id: u64| replicas.experts.contains(&ParamId::from(id));
        let is_whole = |id: u64| !sharded.contains(&id);
        check_equal(record, &replicas.batch, step, |id| {
            is_whole(id) && !is_expert(id)
        })?;
        check_equal(record, &replicas.data, step, |id| {
            is_whole(id) && is_expert(id)
        })
    }
}

/// Loss of a batch, given the model, the batch, and the [scale](StepInput::scale) of the step.
pub(crate) trait Loss<M, B>: Fn(&M, &B, Option<&Tensor<1>>) -> Result<Tensor<1>> {}

impl<M, B, F: Fn(&M, &B, Option<&Tensor<1>>) -> Result<Tensor<1>>> Loss<M, B> for F {}

/// Returns the level at which `split` splits the parameters of the single-rank model. Adjacent
/// ranks have different shards.
fn split_level(split: &ModelPartition) -> Level {
    Level {
        ranks: split.shards.group.size(),
        stride: 1,
        model: true,
        sharded: split.shards.ids.clone(),
        parameters: split.parameters.clone(),
    }
}

/// The steps of a rank, as a CUDA graph.
struct Graph<B> {
    steps: GraphSteps,
    /// Input buffers that the graph reads.
    input: Option<StepInput<B>>,
    /// Loss of the last step, in the buffer that the graph writes.
    loss: Option<Tensor<1>>,
}

impl<B: GraphInput> Graph<B> {
    /// Copies the input of the next step into the graph's buffers.
    fn load(&mut self, input: StepInput<B>) -> Result<()> {
        self.input = Some(match self.input.take() {
            None => input,
            Some(before) => before.filled(input)?,
        });
        Ok(())
    }
}

/// Reason why a rank has its model: a failure between taking it out and putting it back ends the
/// run.
const KEPT: &str = "the run goes on only after a step that was whole";

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn::module::{Module, ModuleVisitor, Param};

    use super::*;

    /// Returns the bits of all parameters.
    fn values<M: Module>(model: &M) -> Vec<u32> {
        struct Values(Vec<u32>);
        impl ModuleVisitor for Values {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let data = param.val().without_autodiff().into_data();
                self.0.extend(data.iter::<f32>().map(f32::to_bits));
            }
        }
        let mut values = Values(Vec::new());
        model.visit(&mut values);
        values.0
    }

    /// Steps of a graph have the same bits as ordinary ones: losses and weights. CubeCL's CPU
    /// runtime runs two of the three steps before the capture, of a smaller model.
    #[test]
    fn steps_of_a_graph_are_ordinary_ones() {
        use crate::config::{Activation, Preset, RecipeName, RunConfig};
        use crate::data::Batch;
        use crate::model::{LanguageModel, Transformer};
        use crate::train::bytes::{loss, step_input};

        let (device, name, steps) = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cuda")]
            Ok("cuda") => (Device::cuda(0), "cuda:0", 200),
            #[cfg(feature = "cpu")]
            _ => (nvfp4_test_support::cpu_runtime(Device::cpu), "cpu", 2),
            #[cfg(not(feature = "cpu"))]
            _ => {
                let test = "train::rank::tests::steps_of_a_graph_are_ordinary_ones";
                return nvfp4_test_support::Skip::NoGpu.print(test, "");
            }
        };
        let device = device.autodiff();
        let mut config = RunConfig::preset(Preset::Tiny, name);
        if name == "cpu" {
            (config.batch, config.model.context) = (1, 16);
            (config.model.layers, config.model.width) = (1, 32);
            (config.model.heads, config.model.hidden) = (1, 64);
            config.activation = Activation::F32;
        }
        let recipe = RecipeName::nvidia();
        let rank = || {
            let model = Transformer::build(&config, &recipe, &device).unwrap();
            Rank::new(device.clone(), model, Optimizer::new(&config).unwrap())
        };
        let batch = |step| Batch::random(1, step, config.batch, config.model.context);
        let lr = |step| config.lr * (1.0 + step as f64);
        let input = |step| step_input([batch(step)], &device);
        let mut ordinary = rank();
        for step in 0..steps {
            let watched = Watched::No;
            ordinary.step(input(step), lr(step), watched, loss).unwrap();
        }
        let mut captured = rank();
        captured.begin_graph().unwrap();
        for step in 0..steps {
            // One step in between is watched.
            let watched = match step {
                20 => Watched::Yes,
                _ => Watched::No,
            };
            captured.step(input(step), lr(step), watched, loss).unwrap();
        }
        let graph = captured.graph.as_ref().unwrap();
        assert_eq!(graph.steps.is_captured(), name != "cpu");
        let bits = |losses: Vec<f32>| losses.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(captured.losses()), bits(ordinary.losses()));
        assert_eq!(values(captured.model()), values(ordinary.model()));
        assert_eq!(captured.optimizer.time(), steps);
    }
}
