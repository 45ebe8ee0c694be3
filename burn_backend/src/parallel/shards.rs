//! Which parameters ranks have parts of, and which ranks have the same ones.

use std::collections::BTreeSet;

use burn_core::module::ParamId;

use nvfp4_parallel::Reduction;

use super::ProcessGroup;

/// Parameters of which ranks have a part each, and the ranks that together have a whole one. The
/// norm of all gradients, to which optimizers clip, adds up all parts, and each whole gradient once.
#[derive(Clone, Debug)]
pub struct Shards {
    /// The ranks.
    pub group: ProcessGroup,
    /// The parameters.
    pub ids: BTreeSet<u64>,
}

impl Shards {
    /// The sets of parameters of which ranks have parts, where some were [split](SplitParameters)
    /// before others, or the same, were `sharded`. No parameter is in two of them, nor in two of
    /// `splits`.
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

/// Parameters of which ranks have parts before anything is sharded: matrices in tensor parallelism,
/// stacks of experts in expert parallelism. Ranks with the same parts may shard those.
#[derive(Clone, Debug)]
pub struct SplitParameters {
    /// The parameters, and the ranks with the other parts.
    pub shards: Shards,
    /// All ranks, which have the parts of a parameter that is sharded, too.
    pub all: ProcessGroup,
}

/// The loss that each rank differentiates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RankLoss {
    /// The mean over its own tokens: gradients of what all ranks have are averaged. Those of experts
    /// are of the tokens of all ranks already, and are divided in a pass of their own.
    #[default]
    Mean,
    /// That, divided by the number of ranks with a part of the batch: all gradients are sums, and
    /// nothing is divided. Where that number is a power of two, they have the bits of
    /// [`Mean`](Self::Mean), as long as no value is too small for its type.
    Share,
}

/// The ranks that the gradients of a model with experts on several ranks are reduced over.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups<'a> {
    /// All ranks with a part of the batch. They have the same parameters, but for `experts`.
    pub batch: &'a ProcessGroup,
    /// Ids of the parameters of experts; see [`expert_parameters`](crate::nn::expert_parameters).
    pub experts: &'a [ParamId],
    /// The ranks of `batch` with the same experts as this one: those of data parallelism alone.
    pub data: &'a ProcessGroup,
    /// What each rank differentiates.
    pub loss: RankLoss,
}

impl<'a> ExpertGroups<'a> {
    /// Those of a model without such experts, on the ranks of `group`.
    pub fn none(group: &'a ProcessGroup) -> Self {
        Self {
            batch: group,
            experts: &[],
            data: group,
            loss: RankLoss::Mean,
        }
    }

    /// How the gradients of ranks with the same parameter become one.
    pub(crate) fn reduction(&self) -> Reduction {
        match self.loss {
            RankLoss::Mean => Reduction::Avg,
            RankLoss::Share => Reduction::Sum,
        }
    }

    /// By what the gradients of experts, so reduced over [`data`](Self::data), are to be divided.
    pub(crate) fn expert_divisor(&self) -> usize {
        match self.loss {
            RankLoss::Mean => self.batch.size() / self.data.size(),
            RankLoss::Share => 1,
        }
    }

    /// The ranks with the parameter `id`.
    pub fn of(&self, id: ParamId) -> &'a ProcessGroup {
        match self.experts.contains(&id) {
            true => self.data,
            false => self.batch,
        }
    }

    /// The parameters `ids`, which are sharded, with the ranks that they are sharded over: experts,
    /// and all others.
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

    /// A parameter is in one set, with all ranks that have parts of it.
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
