//! A rank of a run, with its model and optimizer.
//!
//! Ranks step together. Each computes the gradients of its share of the batch. The gradients are
//! averaged over the ranks, and each rank updates its weights by the mean, so that the weights stay
//! equal. A rank that holds shards of parameters averages and updates only these.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Device, Int, Tensor};
use burn_nvfp4::nn::expert_parameters;
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, SMALLEST_ALONE, Shards, SplitParameters,
    average_expert_gradients, average_replicated_in_backward, fully_shard_experts,
    reduce_expert_gradients,
};

use super::digest::check_equal;
use crate::capture::{GraphSteps, copy_into};
use crate::checkpoint::parts::{self, Level, Partition};
use crate::config::RunConfig;
use crate::data::Batch;
use crate::groups::ParallelGroups;
use crate::model::{LanguageModel, ModelPartition};
use crate::optim::Optimizer;

/// A model that is trained on one device.
pub(crate) struct Rank<M> {
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
    graph: Option<Graph>,
}

/// Source of the gradient means over the ranks.
#[derive(Debug, Clone)]
enum Averaging {
    /// Only one rank has this part of the parameters.
    None,
    /// The optimizer averages them (ZeRO-1).
    Optimizer(Replicas),
    /// Ranks with identical parameters, except for experts.
    Ranks(Replicas),
    /// Ranks with shards of these parameters (FSDP).
    Sharded(Replicas, BTreeSet<u64>),
}

impl Averaging {
    /// Returns the ranks, if there are several.
    fn replicas(&self) -> Option<&Replicas> {
        match self {
            Self::None => None,
            Self::Optimizer(replicas) | Self::Ranks(replicas) | Self::Sharded(replicas, _) => {
                Some(replicas)
            }
        }
    }
}

/// Ranks with different shares of the batch and the same parameters.
#[derive(Debug, Clone)]
struct Replicas {
    batch: ProcessGroup,
    /// Expert parameters, shared only by the ranks of `data`.
    experts: Vec<ParamId>,
    data: ProcessGroup,
}

impl Replicas {
    /// Returns the replicas in `groups` of the parameters of `model`.
    fn new<M: LanguageModel>(groups: &ParallelGroups, model: &M) -> Self {
        Self {
            batch: groups.batch().clone(),
            experts: expert_parameters(model),
            data: groups.data().clone(),
        }
    }

    fn groups(&self) -> ExpertGroups<'_> {
        ExpertGroups {
            batch: &self.batch,
            experts: &self.experts,
            data: &self.data,
            loss: self.loss(),
        }
    }

    /// Returns the loss that a rank differentiates. With experts on several ranks it is the rank's
    /// share of the loss, so that expert gradients need no division.
    fn loss(&self) -> RankLoss {
        match self.experts.is_empty() {
            true => RankLoss::Mean,
            false => RankLoss::Share,
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

    /// Joins `groups`, whose ranks have the same weights or shards of them, and keeps the parts of
    /// model and optimizer that `config` assigns to this rank. `names` are the parameter names in
    /// the single-rank model.
    ///
    /// # Errors
    /// Returns an error if the optimizer state does not match.
    pub fn join(
        &mut self,
        groups: &ParallelGroups,
        config: &RunConfig,
        names: BTreeMap<u64, String>,
    ) -> Result<()> {
        let splits = self.model().partitions(groups);
        let replicas = Replicas::new(groups, self.model());
        let is_sharded = (config.fsdp || config.zero1) && groups.batch().size() > 1;
        if splits.is_empty() && !is_sharded {
            self.average(replicas, config.decorate.is_some());
            return Ok(());
        }
        let state = self.optimizer.to_bytes()?;
        let mut sharded = Vec::new();
        if is_sharded && config.fsdp {
            let model = self.model.take().expect(KEPT);
            let model = fully_shard_experts(model, replicas.groups());
            sharded = Shards::of_experts(&model, replicas.groups());
            self.model = Some(model);
        } else if is_sharded {
            sharded = Shards::shardable_experts(self.model(), replicas.groups());
        }
        let partition = Partition {
            levels: (splits.iter().map(split_level))
                .chain(
                    sharded
                        .iter()
                        .map(|shards| replicas.level(groups, shards, config.fsdp)),
                )
                .collect(),
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
        let ids = sharded
            .iter()
            .flat_map(|shards| &shards.ids)
            .copied()
            .collect();
        if is_sharded && config.zero1 {
            self.optimizer = self.optimizer.sharded(replicas.groups(), splits)?;
            self.averaging = Averaging::Optimizer(replicas);
        } else {
            self.optimizer = self.optimizer.fresh();
            let sets = Shards::with_splits(sharded, &splits);
            self.optimizer.set_shards(sets)?;
            match is_sharded {
                true => self.averaging = Averaging::Sharded(replicas, ids),
                false => self.average(replicas, config.decorate.is_some()),
            }
        }
        self.optimizer.load(state, &self.device)
    }

    /// Enables averaging of gradients over the ranks with other shares of the batch. Decorated
    /// layers find their weights by the parameters' tensors, which averaging in the backward would
    /// replace. Their gradients are therefore averaged after the backward.
    fn average(&mut self, replicas: Replicas, is_decorated: bool) {
        if replicas.batch.size() == 1 {
            return;
        }
        if !is_decorated {
            let model = self.model.take().expect(KEPT);
            let groups = replicas.groups();
            let model = average_replicated_in_backward(model, groups, SMALLEST_ALONE);
            self.model = Some(model);
        }
        self.averaging = Averaging::Ranks(replicas);
    }

    /// Returns the split of the parameters over ranks, if they are split.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// Returns the model after the last step.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect(KEPT)
    }

    /// From here on, launches each step as a graph of this model and optimizer, after three
    /// ordinary steps.
    ///
    /// # Errors
    /// Returns an error if the device does not support graphs, or already has one.
    pub fn begin_graph(&mut self) -> Result<()> {
        let steps = GraphSteps::begin(self.model(), &self.device)?;
        self.graph = Some(Graph::new(steps));
        Ok(())
    }

    /// Returns true if steps run as a graph.
    pub fn has_graph(&self) -> bool {
        self.graph.is_some()
    }

    /// Returns true if the next step is the last ordinary one before the capture.
    pub fn is_before_capture(&self) -> bool {
        (self.graph.as_ref()).is_some_and(|graph| graph.steps.is_before_capture())
    }

    /// Returns to ordinary steps.
    pub fn end_graph(&mut self) {
        self.graph = None;
    }

    /// Runs one step without synchronizing with the device. If the step is [watched](Watched), its
    /// kernels are launched one by one even if a graph was captured.
    ///
    /// # Errors
    /// With a graph, returns an error if the device cannot capture or replay the step, or if the
    /// optimizer cannot run in a graph.
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

    /// Runs a step of `graph`, whose batch and learning rate are on the device, and returns its
    /// loss.
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
                // A replay returns no new loss tensor: it overwrites the one from the capture.
                *loss = made.or(loss.take());
                loss.clone()
            }
        };
        // Copy, because the next replay overwrites the same memory.
        Ok(of_step.expect("a step has been taken").mul_scalar(1.0))
    }

    /// Returns the loss of a batch, without autodiff, and the gradients of all parameters, averaged
    /// over the ranks.
    fn gradients(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, GradientsParams) {
        let model = self.model();
        let loss = model.training_loss(inputs, targets);
        let kept = loss.clone().without_autodiff();
        let loss = match self.averaging.replicas() {
            Some(replicas) if replicas.loss() == RankLoss::Share => {
                loss.div_scalar(replicas.batch.size() as f64)
            }
            _ => loss,
        };
        let mut gradients = GradientsParams::from_grads(loss.backward(), model);
        match &self.averaging {
            Averaging::None | Averaging::Optimizer(_) => {}
            Averaging::Ranks(replicas) => {
                average_expert_gradients(model, &mut gradients, replicas.groups());
            }
            Averaging::Sharded(replicas, ids) => {
                reduce_expert_gradients(model, &mut gradients, replicas.groups(), ids);
            }
        }
        (kept, gradients)
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
        match &self.averaging {
            Averaging::None | Averaging::Sharded(..) => Ok(()),
            Averaging::Optimizer(replicas) | Averaging::Ranks(replicas) => {
                let is_expert = |id| replicas.experts.contains(&ParamId::from(id));
                check_equal(record, &replicas.batch, step, |id| !is_expert(id))?;
                check_equal(record, &replicas.data, step, is_expert)
            }
        }
    }
}

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
struct Graph {
    steps: GraphSteps,
    /// Input and target buffers that the graph reads.
    batch: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    /// Loss of the last step, in the buffer that the graph writes.
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

    /// Copies a batch into the graph's input buffers.
    fn load(&mut self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Result<()> {
        self.batch = Some(match self.batch.take() {
            None => (inputs, targets),
            Some(before) => (copy_into(before.0, inputs)?, copy_into(before.1, targets)?),
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
        use crate::model::Transformer;

        let (device, name, steps) = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cuda")]
            Ok("cuda") => (Device::cuda(0), "cuda:0", 200),
            #[cfg(feature = "cpu")]
            _ => (Device::cpu(), "cpu", 2),
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
            // One step in between is watched.
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
        assert_eq!(values(captured.model()), values(ordinary.model()));
        assert_eq!(captured.optimizer.time(), steps);
    }
}
