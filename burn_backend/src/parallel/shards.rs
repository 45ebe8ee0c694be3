//! Descriptions of sharded parameters and of their ranks.

use std::collections::BTreeSet;

use burn_core::module::ParamId;

use nvfp4_parallel::Reduction;

use super::ProcessGroup;

/// Sharded parameters, and the ranks that together hold each of them. The gradient norm for
/// clipping sums all shards, and counts each unsharded gradient once.
#[derive(Clone, Debug)]
pub struct Shards {
    /// Ranks that hold the shards.
    pub group: ProcessGroup,
    /// Ids of the parameters.
    pub ids: BTreeSet<u64>,
}

impl Shards {
    /// Returns the sets of sharded parameters if some parameters were [split](SplitParameters)
    /// before others, or the same ones, were `sharded`. No parameter is in two of the sets, nor may
    /// it be in two of `splits`.
    pub fn with_splits(sharded: Vec<Self>, splits: &[SplitParameters]) -> Vec<Self> {
        let ids = sharded.iter().flat_map(|shards| &shards.ids).copied();
        let of_sharded: BTreeSet<u64> = ids.collect();
        let set = |group: &ProcessGroup, ids| Self {
            group: group.clone(),
            ids,
        };
        let of_split = splits.iter().flat_map(|SplitParameters { shards, all }| {
            let both = shards.ids.intersection(&of_sharded).copied().collect();
            let once = shards.ids.difference(&of_sharded).copied().collect();
            [set(all, both), set(&shards.group, once)]
        });
        let mut sets: Vec<Self> = of_split.collect();
        let is_split = |id: &u64| splits.iter().any(|split| split.shards.ids.contains(id));
        let others = sharded.into_iter().map(|shards| Self {
            ids: shards.ids.into_iter().filter(|id| !is_split(id)).collect(),
            ..shards
        });
        sets.extend(others);
        sets.retain(|shards| !shards.ids.is_empty());
        sets
    }

    /// Returns true if the parameter `id` is sharded.
    pub fn contains(&self, id: ParamId) -> bool {
        self.ids.contains(&id.val())
    }
}

/// Parameters that are split before FSDP or ZeRO shards them: matrices in tensor parallelism,
/// stacks of experts in expert parallelism. Ranks with the same shards may shard those again.
#[derive(Clone, Debug)]
pub struct SplitParameters {
    /// Parameters, and the ranks with the other shards.
    pub shards: Shards,
    /// All ranks that hold a shard of a parameter that is sharded again.
    pub all: ProcessGroup,
}

/// Loss that each rank differentiates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RankLoss {
    /// Mean over the rank's own tokens: gradients of replicated parameters are averaged. Gradients
    /// of experts already cover the tokens of all ranks, and are divided in a separate pass.
    #[default]
    Mean,
    /// That mean, divided by the number of ranks with a shard of the batch: all gradients are sums,
    /// and nothing is divided. If that number is a power of two, they have the bits of
    /// [`Mean`](Self::Mean), as long as no value underflows.
    Share,
}

/// Ranks for the gradient reduction of a model with experts sharded over ranks.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups<'a> {
    /// All ranks with a shard of the batch. They have the same parameters, except `experts`.
    pub batch: &'a ProcessGroup,
    /// Ids of the parameters of experts; see [`expert_parameters`](crate::nn::expert_parameters).
    pub experts: &'a [ParamId],
    /// Ranks of `batch` with the same experts as this one: those of data parallelism only.
    pub data: &'a ProcessGroup,
    /// Loss that each rank differentiates.
    pub loss: RankLoss,
}

impl<'a> ExpertGroups<'a> {
    /// Groups of a model without such experts, on the ranks of `group`.
    pub fn none(group: &'a ProcessGroup) -> Self {
        Self {
            batch: group,
            experts: &[],
            data: group,
            loss: RankLoss::Mean,
        }
    }

    /// Returns the reduction of the gradients of ranks with the same parameter.
    pub(crate) fn reduction(&self) -> Reduction {
        match self.loss {
            RankLoss::Mean => Reduction::Avg,
            RankLoss::Share => Reduction::Sum,
        }
    }

    /// Returns the divisor of experts' gradients after that reduction over [`data`](Self::data).
    pub(crate) fn expert_divisor(&self) -> usize {
        match self.loss {
            RankLoss::Mean => self.batch.size() / self.data.size(),
            RankLoss::Share => 1,
        }
    }

    /// Returns the ranks with the parameter `id`.
    pub fn of(&self, id: ParamId) -> &'a ProcessGroup {
        match self.experts.contains(&id) {
            true => self.data,
            false => self.batch,
        }
    }

    /// Returns the sharded parameters `ids` with the ranks that they are sharded over: those of
    /// experts, and all others.
    pub(crate) fn shards(&self, ids: BTreeSet<u64>) -> Vec<Shards> {
        let is_expert = |id: &u64| self.experts.contains(&ParamId::from(*id));
        let (experts, others): (BTreeSet<_>, BTreeSet<_>) = ids.into_iter().partition(is_expert);
        let sets = [(self.batch, others), (self.data, experts)];
        let sets = sets.into_iter().filter(|(_, ids)| !ids.is_empty());
        sets.map(|(group, ids)| Shards {
            group: group.clone(),
            ids,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A parameter is in one set, with all ranks that hold shards of it.
    #[test]
    fn sets_of_parameters_do_not_overlap() {
        let group = |size| ProcessGroup::loopback(size, Duration::ZERO).remove(0);
        let shards = |size, ids: &[u64]| Shards {
            group: group(size),
            ids: ids.iter().copied().collect(),
        };
        let found = |sharded: Vec<Shards>, splits: &[SplitParameters]| -> Vec<_> {
            let sets = Shards::with_splits(sharded, splits).into_iter();
            let sets = sets.map(|set| (set.group.size(), Vec::from_iter(set.ids)));
            sets.collect()
        };
        let split = |size, ids: &[u64]| SplitParameters {
            shards: shards(size, ids),
            all: group(8),
        };
        let matrices = split(2, &[1, 2, 3]);
        let sharded = || vec![shards(4, &[2, 3, 4]), shards(3, &[5])];
        let expected = [(8, vec![2, 3]), (2, vec![1]), (4, vec![4]), (3, vec![5])];
        let one = std::slice::from_ref(&matrices);
        assert_eq!(found(sharded(), one), expected);
        let expected = [(4, vec![2, 3, 4]), (3, vec![5])];
        assert_eq!(found(sharded(), &[]), expected);
        assert_eq!(found(Vec::new(), one), [(2, vec![1, 2, 3])]);
        let both = [matrices, split(6, &[5, 6])];
        let expected = [
            (8, vec![2, 3]),
            (2, vec![1]),
            (8, vec![5]),
            (6, vec![6]),
            (4, vec![4]),
        ];
        assert_eq!(found(sharded(), &both), expected);
    }
}
