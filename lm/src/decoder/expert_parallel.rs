//! Expert parallelism: experts of the mixtures on several ranks.

use anyhow::{Context, Result, bail};
use burn_nvfp4::nn::{ExpertDispatch, ExpertShard};

use super::Decoder;
use super::feed_forward::{FeedForward, Moe};
use super::names;
use super::projection::Experts;
use crate::groups::ParallelGroups;

impl Decoder {
    /// Keeps this rank's experts of each mixture, and exchanges tokens with the ranks of
    /// `groups.expert()` by `dispatch`. The model is the same on all ranks, and prepared by
    /// [`into_training`](Self::into_training); parameters keep their IDs.
    ///
    /// # Errors
    /// Returns the errors of [`DecoderConfig::check_experts`](crate::hf::DecoderConfig::check_experts),
    /// and an error if experts are packed.
    pub fn into_expert_parallel(
        mut self,
        groups: &ParallelGroups,
        dispatch: ExpertDispatch,
    ) -> Result<Self> {
        self.config.check_experts(groups.expert().size())?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            if let FeedForward::Moe(moe) = &mut layer.feed_forward {
                moe.shard(groups, dispatch)
                    .with_context(|| format!("the experts of {}", names::layer(index)))?;
            }
        }
        Ok(self)
    }

    /// Sets the exchange of tokens with the ranks of their experts.
    pub(crate) fn with_expert_dispatch(mut self, dispatch: ExpertDispatch) -> Self {
        for layer in &mut self.layers {
            if let FeedForward::Moe(moe) = &mut layer.feed_forward {
                moe.dispatch = dispatch;
            }
        }
        self
    }

    /// Gathers the experts of all ranks on every rank: the inverse of
    /// [`into_expert_parallel`](Self::into_expert_parallel). All ranks call this function.
    pub fn gathered_experts(mut self) -> Self {
        for layer in &mut self.layers {
            if let FeedForward::Moe(moe) = &mut layer.feed_forward {
                for experts in [&mut moe.gate_up, &mut moe.down] {
                    if let Experts::Sharded(shard) = experts {
                        *experts = Experts::Grouped(shard.clone().gathered());
                    }
                }
            }
        }
        self
    }
}

impl Moe {
    /// Keeps the experts of this rank.
    fn shard(&mut self, groups: &ParallelGroups, dispatch: ExpertDispatch) -> Result<()> {
        let shard = |experts: &Experts| -> Result<ExpertShard> {
            let Experts::Grouped(layer) = experts else {
                bail!("packed experts are not distributed over ranks");
            };
            Ok(ExpertShard::try_new(layer.clone(), groups.expert())?)
        };
        let (gate_up, down) = (shard(&self.gate_up)?, shard(&self.down)?);
        groups.number_expert_draws([&gate_up.layer, &down.layer])?;
        (self.gate_up, self.down) = (Experts::Sharded(gate_up), Experts::Sharded(down));
        self.dispatch = dispatch;
        Ok(())
    }
}
