//! A rank of a run, with a model and an optimizer of its own.
//!
//! Ranks step together. Each computes the gradients of its part of the batch. They are averaged
//! over the ranks, and each rank updates its weights by the mean, so that the weights stay equal.
//! Where a rank has parts of parameters, it averages and updates these.

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
    /// There is one rank with this part of the parameters.
    None,
    /// The optimizer averages them (ZeRO-1).
    Optimizer(Replicas),
    /// Ranks that all have the same parameters, but for experts.
    Ranks(Replicas),
    /// Ranks with parts of these parameters (FSDP).
    Sharded(Replicas, BTreeSet<u64>),
}

impl Averaging {
    /// The ranks, if there are several.
    fn replicas(&self) -> Option<&Replicas> {
        match self {
            Self::None => None,
            Self::Optimizer(replicas) | Self::Ranks(replicas) | Self::Sharded(replicas, _) => {
                Some(replicas)
            }
        }
    }
}

/// The ranks with other parts of the batch, and the same parameters.
#[derive(Debug, Clone)]
struct Replicas {
    batch: ProcessGroup,
    /// Parameters that only the ranks of `data` have.
    experts: Vec<ParamId>,
    data: ProcessGroup,
}

impl Replicas {
    /// Those of `groups` with `model`.
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

    /// What a rank differentiates: with experts on several ranks its share of the loss, so that
    /// their gradients need no division.
    fn loss(&self) -> RankLoss {
        match self.experts.is_empty() {
            true => RankLoss::Mean,
            false => RankLoss::Share,
        }
    }

    /// How `shards`, over ranks of these, cut what the ranks of `groups` have.
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
            // Sharding alone leaves them as they are.
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

    /// Has gradients averaged over the ranks with other parts of the batch. Layers that are
    /// decorated find their weights by the tensors of the parameters, which averaging in the
    /// backward would replace: theirs are averaged behind it.
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

    /// Whether the next step of a graph is ordinary, and the last one that is.
    pub fn is_before_capture(&self) -> bool {
        (self.graph.as_ref()).is_some_and(|graph| graph.steps.is_before_capture())
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

    /// The losses of the steps since the last call; waits for the device.
    pub fn losses(&mut self) -> Vec<f32> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let losses = Tensor::cat(std::mem::take(&mut self.pending), 0).into_data();
        losses.iter::<f32>().collect()
    }

    /// Fails unless ranks that update the same parameters have the same values of them, but for
    /// rounding. `record` is that of this rank's model.
    ///
    /// # Errors
    /// Names step, rank and parameter.
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

/// How `split` cuts the parameters of the model of one rank. Neighbours have other parts.
fn split_level(split: &ModelPartition) -> Level {
    Level {
        ranks: split.shards.group.size(),
        stride: 1,
        model: true,
        sharded: split.shards.ids.clone(),
        parameters: split.parameters.clone(),
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

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn::module::{Module, ModuleVisitor, Param};

    use super::*;

    /// The bits of all parameters.
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

    /// Steps of a graph have the bits of ordinary ones: losses and weights. CubeCL's CPU runtime
    /// takes the three steps before the capture.
    #[test]
    fn steps_of_a_graph_are_ordinary_ones() {
        use crate::config::{Activation, Preset, RecipeName, RunConfig};
        use crate::model::Transformer;

        let (device, name, steps) = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cuda")]
            Ok("cuda") => (Device::cuda(0), "cuda:0", 200),
            #[cfg(feature = "cpu")]
            _ => (Device::cpu(), "cpu", 3),
            #[cfg(not(feature = "cpu"))]
            _ => {
                let test = "train::rank::tests::steps_of_a_graph_are_ordinary_ones";
                return nvfp4_test_support::Skip::NoGpu.print(test, "");
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
        assert_eq!(values(captured.model()), values(ordinary.model()));
        assert_eq!(captured.optimizer.time(), steps);
    }
}
