//! Gradient reduction in data parallelism.

use std::collections::BTreeSet;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::Tensor;
use burn_optim::GradientsParams;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;
use super::buckets::Buckets;
use super::shards::{ExpertGroups, RankLoss, Shards};
use crate::ops::collective::{CollectiveOps, Step};

/// Elements per bucket: with this size a collective reaches the bandwidth of the connection.
const BUCKET: usize = 1 << 23;

/// Broadcasts all parameters of `module` from rank 0. Their shapes must be the same on all ranks.
///
/// # Panics
/// If the group fails.
pub fn broadcast<M: Module>(module: M, group: &ProcessGroup) -> M {
    match group.size() {
        1 => module,
        _ => module.map(&mut Broadcast { group }),
    }
}

struct Broadcast<'a> {
    group: &'a ProcessGroup,
}

impl ModuleMapper for Broadcast<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|own| {
            let requires = own.is_require_grad();
            self.group.broadcast(own, 0).set_require_grad(requires)
        })
    }
}

/// Averages the gradients of `model` over the ranks, which must all call this with gradients of the
/// same parameters. The sums are in rank order, in `f32`; see [`ProcessGroup::with_reduce_dtype`].
/// For a model of [`average_in_backward`](super::average_in_backward), most of the exchange has
/// begun in the backward.
///
/// # Panics
/// If the group fails.
pub fn average_gradients<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    group: &ProcessGroup,
) {
    reduce(model, gradients, (group, Reduction::Avg), |_| true);
    join(model, gradients, group);
}

/// Version of [`average_gradients`] for a model of [`fully_shard`](super::fully_shard): waits for
/// the means that the backward began, and averages the gradients of parameters that are not
/// sharded.
///
/// # Panics
/// If the group fails.
pub fn reduce_gradients<M: Module>(model: &M, gradients: &mut GradientsParams, shards: &Shards) {
    let group = &shards.group;
    let mean = (group, Reduction::Avg);
    reduce(model, gradients, mean, |id| !shards.contains(id));
    join(model, gradients, group);
}

/// Adds the means that were computed concurrently with the backward.
fn join<M: Module>(model: &M, gradients: &mut GradientsParams, group: &ProcessGroup) {
    if group.size() > 1 {
        model.visit(&mut Join { gradients, group });
    }
}

struct Join<'a> {
    gradients: &'a mut GradientsParams,
    group: &'a ProcessGroup,
}

impl ModuleVisitor for Join<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, link) = (param.id.val(), self.group.link());
        if !link.waiting.has(id) {
            return;
        }
        let like = param.base().without_autodiff().into_dispatch();
        let mean = Dispatch::nvfp4_gradient_beside(like, id, link);
        let mean = Tensor::<D>::from_dispatch(mean);
        // Means of the uses of the parameter whose gradient autodiff returned.
        let sum = match self.gradients.remove::<D>(param.id) {
            Some(other) => mean + other,
            None => mean,
        };
        self.gradients.register(param.id, sum);
    }
}

/// Replaces the gradients of `model` by those of the mean of the losses of all ranks of
/// [`batch`](ExpertGroups::batch), which must all call it with gradients of the same parameters.
///
/// The gradient of a replicated parameter is averaged over the ranks. The gradient of an expert
/// already covers the tokens of all ranks that the experts are on: it is summed over
/// [`data`](ExpertGroups::data), and divided by the number of ranks of `batch`. If the ranks have
/// differentiated [their shares](super::RankLoss::Share) of the mean loss, both are plain sums. For
/// a model of [`average_replicated_in_backward`](super::average_replicated_in_backward), most of
/// the exchange has begun in the backward.
///
/// # Panics
/// If a group fails.
pub fn average_expert_gradients<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    groups: ExpertGroups<'_>,
) {
    reduce_expert_gradients(model, gradients, groups, &BTreeSet::new());
}

/// Version of [`average_expert_gradients`] for a model of
/// [`fully_shard_experts`](super::fully_shard_experts), whose parameters `sharded` are shards.
///
/// # Panics
/// If a group fails.
pub fn reduce_expert_gradients<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    groups: ExpertGroups<'_>,
    sharded: &BTreeSet<u64>,
) {
    let is_whole = |id: ParamId| !sharded.contains(&id.val());
    let is_expert = |id: ParamId| groups.experts.contains(&id);
    let of_batch = (groups.batch, groups.reduction());
    reduce(model, gradients, of_batch, |id| {
        is_whole(id) && !is_expert(id)
    });
    join(model, gradients, groups.batch);
    let ranks = groups.batch.size() as f64;
    if ranks == 1.0 || groups.experts.is_empty() {
        return;
    }
    let by = groups.expert_divisor() as f64;
    if groups.data.size() == 1 {
        divide(model, gradients, groups.experts.to_vec(), by);
        return;
    }
    let is_whole_expert = |id| is_expert(id) && is_whole(id);
    Buckets::new(BUCKET, is_whole_expert).exchange(model, gradients, |flat| {
        let sums = flat
            .into_iter()
            .map(|flat| (groups.data).reduce_gradient(flat, Step::AllReduce(Reduction::Sum)));
        match groups.loss {
            RankLoss::Mean => sums.map(|sum| sum.div_scalar(ranks)).collect(),
            RankLoss::Share => sums.collect(),
        }
    });
    let parts = groups.experts.iter().filter(|id| !is_whole(**id));
    let ids: Vec<ParamId> = parts.copied().collect();
    if !ids.is_empty() {
        // These are reduced over the ranks that shard them.
        join(model, gradients, groups.data);
        divide(model, gradients, ids, by);
    }
}

/// Divides the gradients of `ids` by `by` in one pass; no operation if `by` is one.
fn divide<M: Module>(model: &M, gradients: &mut GradientsParams, ids: Vec<ParamId>, by: f64) {
    if by != 1.0 {
        model.visit(&mut Divide { gradients, ids, by });
    }
}

/// Divides gradients of experts.
struct Divide<'a> {
    gradients: &'a mut GradientsParams,
    ids: Vec<ParamId>,
    by: f64,
}

impl ModuleVisitor for Divide<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.contains(&param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            let mean = gradient.div_scalar(self.by);
            self.gradients.register(param.id, mean);
        }
    }
}

fn reduce<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    (group, reduction): (&ProcessGroup, Reduction),
    takes: impl Fn(ParamId) -> bool,
) {
    if group.size() == 1 {
        return;
    }
    Buckets::new(BUCKET, takes).exchange(model, gradients, |flat| {
        let reduced = flat.into_iter();
        reduced
            .map(|flat| group.reduce_gradient(flat, Step::AllReduce(reduction)))
            .collect()
    });
}
