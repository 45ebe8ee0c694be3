//! Process groups of a run, by kind of parallelism.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Device;
use burn_nvfp4::nn::Nvfp4GroupedLinear;
use burn_nvfp4::parallel::{Overlap, ProcessGroup, ReduceDtype};
use burn_nvfp4::state::set_rank;
use nvfp4_parallel::{Axis, Layout};

use crate::config::{RunConfig, Uncaptured};

/// Process groups of this rank.
///
/// Ranks of a tensor group are adjacent: rank `b · tp + t` has shard `t` of each matrix and share
/// `b` of the batch. `ep` adjacent ranks hold the experts of one mixture. These are ranks with
/// different shares of the batch, or whole tensor groups, whose ranks then route different tokens.
#[derive(Debug, Clone)]
pub struct ParallelGroups {
    world: ProcessGroup,
    tensor: ProcessGroup,
    expert: ProcessGroup,
    batch: ProcessGroup,
    data: ProcessGroup,
}

impl ParallelGroups {
    /// Returns the groups of a single-rank run.
    pub fn single() -> Self {
        let single = ProcessGroup::single();
        Self {
            world: single.clone(),
            tensor: single.clone(),
            expert: single.clone(),
            batch: single.clone(),
            data: single,
        }
    }

    /// Creates the groups of the run `config` on the ranks of `world`. All ranks call this
    /// function.
    ///
    /// # Errors
    /// Returns the errors of [`RunConfig::check_ranks`].
    pub fn new(world: &ProcessGroup, config: &RunConfig) -> Result<Self> {
        config.check_ranks(world.size())?;
        Self::split(world, [config.tp, config.ep], config.grad_reduce.into())
    }

    /// Creates the groups of the ranks of `world`, of which `tp` split each matrix and `ep` the
    /// experts of each mixture. They exchange gradients in `dtype`. All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if the ranks cannot be divided in this way.
    pub fn split(world: &ProcessGroup, [tp, ep]: [usize; 2], dtype: ReduceDtype) -> Result<Self> {
        let world = world.clone().with_reduce_dtype(dtype);
        // Experts are distributed over whole tensor groups.
        let tensor_groups = (ep / tp).max(1);
        let layout = Layout::new(world.size(), tp, tensor_groups, 1)?;
        let along = |axes: &[Axis]| -> Result<ProcessGroup> {
            let members = layout.group(world.rank(), axes)?;
            Ok(match members.len() == world.size() {
                true => world.clone(),
                false => world.subgroup(&members)?,
            })
        };
        let tensor = along(&[Axis::Tensor])?;
        let batch = along(&[Axis::Expert, Axis::Data])?;
        Ok(Self {
            expert: match ep {
                _ if ep == tp => tensor.clone(),
                1 => ProcessGroup::single(),
                _ => along(&[Axis::Tensor, Axis::Expert])?,
            },
            data: match tensor_groups {
                1 => batch.clone(),
                _ => along(&[Axis::Data])?,
            },
            tensor,
            batch,
            world,
        })
    }

    /// Connects the groups so that tensors move from device to device; see
    /// [`ProcessGroup::connect`]. All ranks call this function, each with its device.
    ///
    /// # Errors
    /// Returns the errors of [`ProcessGroup::connect`].
    pub fn connect(self, device: &Device, overlap: Overlap) -> Result<Self> {
        let size = self.world.size();
        let others = [&self.tensor, &self.expert, &self.batch, &self.data];
        let is_used = size > 1 && others.iter().any(|group| group.size() == size);
        let world = match is_used {
            true => self.world.connect(device, overlap)?,
            false => self.world,
        };
        // All ranks connect the groups in the same order; each rank is in one group of each kind.
        // If one group contains another and both have the same size, they are equal.
        let connected = |group: ProcessGroup, within: &[&ProcessGroup]| match group.size() {
            1 => Ok(group),
            size => match within.iter().find(|other| other.size() == size) {
                Some(same) => Ok((*same).clone()),
                None => group.connect(device, overlap),
            },
        };
        let tensor = connected(self.tensor, &[&world])?;
        let expert = connected(self.expert, &[&world, &tensor])?;
        let batch = connected(self.batch, &[&world])?;
        let data = connected(self.data, &[&world, &batch])?;
        Ok(Self {
            world,
            tensor,
            expert,
            batch,
            data,
        })
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Returns the ranks with the other shards of the same matrices and the same share of the
    /// batch.
    pub fn tensor(&self) -> &ProcessGroup {
        &self.tensor
    }

    /// Returns the ranks with the other experts of the same mixtures. Contains all ranks of
    /// [`tensor`](Self::tensor) if there are experts on other ranks.
    pub fn expert(&self) -> &ProcessGroup {
        &self.expert
    }

    /// Returns the ranks with other shares of the batch.
    pub fn batch(&self) -> &ProcessGroup {
        &self.batch
    }

    /// Returns the ranks of [`batch`](Self::batch) with the same experts.
    pub fn data(&self) -> &ProcessGroup {
        &self.data
    }

    /// Returns true if tensors move from device to device.
    pub fn is_connected(&self) -> bool {
        let groups = [&self.tensor, &self.expert, &self.batch, &self.data];
        groups.iter().any(|group| group.is_connected())
    }

    /// Returns why the collectives of this run are not captured in a graph, if they are not.
    pub(crate) fn uncaptured(&self) -> Option<Uncaptured> {
        let groups = [&self.tensor, &self.expert, &self.batch, &self.data];
        let is_captured = |group: &&ProcessGroup| group.size() == 1 || group.is_connected();
        (!groups.iter().all(is_captured)).then_some(Uncaptured::HostCollectives)
    }

    /// Selects the random stream of this rank's share of the batch for the layers of `model`.
    ///
    /// # Errors
    /// Returns an error if there are more ranks than random streams.
    pub(crate) fn number_draws<M: Module>(&self, model: &M) -> Result<()> {
        if self.world.size() > 1 {
            set_rank(model, self.batch.rank())?;
        }
        Ok(())
    }

    /// Selects the same random stream for these `layers` of a mixture's experts on all ranks that
    /// share the mixture.
    ///
    /// # Errors
    /// Returns the errors of [`number_draws`](Self::number_draws).
    pub(crate) fn number_expert_draws(&self, layers: [&Nvfp4GroupedLinear; 2]) -> Result<()> {
        for layer in layers {
            set_rank(layer, self.data.rank())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Preset;

    /// Returns rank and size in each group for each of four ranks.
    fn places(tp: usize, ep: usize) -> Vec<[(usize, usize); 4]> {
        let mut config = RunConfig::preset(Preset::Tiny, "flex");
        (config.tp, config.ep) = (tp, ep);
        config.model.experts = (ep > 1).then_some(4);
        let worlds = ProcessGroup::loopback(4, Duration::ZERO);
        let groups = worlds.iter().map(|world| {
            let groups = ParallelGroups::new(world, &config).unwrap();
            let kinds = [&groups.tensor, &groups.expert, &groups.batch, &groups.data];
            kinds.map(|group| (group.rank(), group.size()))
        });
        groups.collect()
    }

    #[test]
    fn neighbours_share_matrices_and_mixtures() {
        let of = |groups: &[[(usize, usize); 4]], kind: usize| -> Vec<(usize, usize)> {
            groups.iter().map(|kinds| kinds[kind]).collect()
        };
        let pairs = vec![(0, 2), (1, 2), (0, 2), (1, 2)];
        let distant = vec![(0, 2), (0, 2), (1, 2), (1, 2)];
        let all: Vec<_> = (0..4).map(|rank| (rank, 4)).collect();
        let tensor = places(2, 1);
        assert_eq!(
            (of(&tensor, 0), of(&tensor, 2)),
            (pairs.clone(), distant.clone())
        );
        let expert = places(1, 2);
        assert_eq!(of(&expert, 1), pairs);
        assert_eq!(
            (of(&expert, 2), of(&expert, 3)),
            (all.clone(), distant.clone())
        );
        assert_eq!(of(&places(1, 1), 2), all);
        // Experts are distributed over whole tensor groups, whose ranks have the same share of the
        // batch.
        let both = places(2, 2);
        assert_eq!((of(&both, 0), of(&both, 1)), (pairs.clone(), pairs));
        assert_eq!(
            (of(&both, 2), of(&both, 3)),
            (distant.clone(), distant.clone())
        );
        let both = places(2, 4);
        assert_eq!((of(&both, 1), of(&both, 2)), (all, distant));
        assert_eq!(of(&both, 3), [(0, 1); 4]);
    }
}
