//! The processes of a run, of which each has a part of the rows of each forward.
//!
//! The loss of a step is the sum over its targets divided by their number on all ranks, so that each
//! rank differentiates its share of it, and gradients are sums over the ranks.

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

/// The ranks of a run, and what this one has of the parameters.
pub(super) struct Ranks {
    world: ProcessGroup,
    /// Parameters of which each rank has a part (FSDP).
    sharded: BTreeSet<u64>,
    /// What the others have the other parts of, if there are such.
    partition: Option<Partition>,
}

impl Ranks {
    /// Those of `world`, with whole parameters.
    pub fn new(world: ProcessGroup) -> Self {
        Self {
            world,
            sharded: BTreeSet::new(),
            partition: None,
        }
    }

    /// All ranks.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Whether this rank writes what ranks share.
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// What the other ranks have the other parts of.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// `model`, which all ranks have, as this rank trains it, by `optimizer`.
    ///
    /// # Errors
    /// When there are more ranks than random streams, or the optimizer's state does not fit.
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
            // Gradients that add up over several forwards travel once, behind the last.
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

    /// Replaces `gradients` by their sums over the ranks, of which each gets its part of those that
    /// are sharded.
    pub fn reduce(&self, model: &Decoder, gradients: &mut GradientsParams) {
        if self.world.size() > 1 {
            reduce_expert_gradients(model, gradients, self.groups(), &self.sharded);
        }
    }

    /// The losses of steps, given this rank's shares of them.
    ///
    /// # Errors
    /// When the group fails.
    pub fn losses(&self, own: Vec<f32>) -> Result<Vec<f32>> {
        match self.world.size() {
            1 => Ok(own),
            _ => ranks::sums(&self.world, own),
        }
    }

    /// Fails unless all ranks that update the same parameters have the same values of them, but for
    /// rounding; `record` is that of this rank.
    ///
    /// # Errors
    /// Names step, rank and parameter.
    pub fn check_equal(&self, record: &Bytes, step: u64) -> Result<()> {
        check_equal(record, &self.world, step, |id| !self.sharded.contains(&id))
    }

    /// `model` with whole parameters, without autodiff. All ranks call it together.
    pub fn whole(&self, model: &Decoder) -> Decoder {
        match self.sharded.is_empty() {
            true => model.valid(),
            false => gather(model.valid()),
        }
    }
}
