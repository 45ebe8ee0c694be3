//! The ranks of a run, which split the rows of each forward pass.
//!
//! The loss of a step is the sum over its targets divided by their number on all ranks. Each rank
//! therefore differentiates its share of the loss, and gradients are summed over the ranks.

use std::collections::BTreeSet;

use anyhow::Result;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Device};
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, SMALLEST_ALONE, Shards, average_replicated_in_backward,
    fully_shard_experts, gather, reduce_expert_gradients,
};
use burn_nvfp4::state::set_rank;

use super::config::FinetuneConfig;
use crate::checkpoint::parts::{self, Level, Partition};
use crate::decoder::Decoder;
use crate::optim::Optimizer;
use crate::ranks;
use crate::train::digest::check_equal;

/// The ranks of a run, and the parameter shards of this rank.
pub(super) struct Ranks {
    world: ProcessGroup,
    /// Sharded parameters (FSDP).
    sharded: BTreeSet<u64>,
    /// Split of the parameters over ranks, if they are split.
    partition: Option<Partition>,
}

impl Ranks {
    /// Creates the state for the ranks of `world`, with replicated parameters.
    pub fn new(world: ProcessGroup) -> Self {
        Self {
            world,
            sharded: BTreeSet::new(),
            partition: None,
        }
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Returns true on the rank that writes shared files (rank 0).
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Returns the split of the parameters over ranks, if they are split.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// Converts `model`, which is the same on all ranks, to the form that this rank trains with
    /// `optimizer`.
    ///
    /// # Errors
    /// Returns an error if there are more ranks than random streams, or if the optimizer state does
    /// not match.
    pub fn join(
        &mut self,
        model: Decoder,
        optimizer: &mut Optimizer,
        config: &FinetuneConfig,
        device: &Device,
    ) -> Result<Decoder> {
        if self.world.size() == 1 {
            return Ok(model);
        }
        set_rank(&model, self.world.rank())?;
        if !config.fsdp {
            // Gradients accumulated over several forward passes are exchanged once, after the last.
            return Ok(match config.accumulate {
                1 => average_replicated_in_backward(model, self.groups(), SMALLEST_ALONE),
                _ => model,
            });
        }
        let state = optimizer.to_bytes()?;
        let model = fully_shard_experts(model, self.groups());
        let shards = Shards::of(&model, &self.world);
        self.sharded.clone_from(&shards.ids);
        let partition = Partition {
            levels: vec![Level {
                ranks: self.world.size(),
                stride: 1,
                model: true,
                sharded: shards.ids.clone(),
                parameters: Default::default(),
            }],
            rank: self.world.rank(),
            names: Default::default(),
        };
        *optimizer = optimizer.fresh();
        optimizer.set_shards(vec![shards])?;
        optimizer.load(parts::slice(state, &partition)?, device)?;
        self.partition = Some(partition);
        Ok(model)
    }

    fn groups(&self) -> ExpertGroups<'_> {
        ExpertGroups {
            loss: RankLoss::Share,
            ..ExpertGroups::none(&self.world)
        }
    }

    /// Replaces `gradients` by their sums over the ranks; sharded ones are reduce-scattered.
    pub fn reduce(&self, model: &Decoder, gradients: &mut GradientsParams) {
        if self.world.size() > 1 {
            reduce_expert_gradients(model, gradients, self.groups(), &self.sharded);
        }
    }

    /// Returns the losses of steps, given this rank's shares of them.
    ///
    /// # Errors
    /// Returns an error if the group fails.
    pub fn losses(&self, own: Vec<f32>) -> Result<Vec<f32>> {
        match self.world.size() {
            1 => Ok(own),
            _ => ranks::sums(&self.world, own),
        }
    }

    /// Checks that all ranks that update the same parameters have equal values up to rounding;
    /// `record` is that of this rank.
    ///
    /// # Errors
    /// Returns an error that names step, rank and parameter.
    pub fn check_equal(&self, record: &Bytes, step: u64) -> Result<()> {
        check_equal(record, &self.world, step, |id| !self.sharded.contains(&id))
    }

    /// Gathers the full parameters of `model`, without autodiff. All ranks call this function.
    pub fn whole(&self, model: &Decoder) -> Decoder {
        match self.sharded.is_empty() {
            true => model.valid(),
            false => gather(model.valid()),
        }
    }
}
