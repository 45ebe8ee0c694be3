//! Fully sharded parameters (FSDP).

use std::collections::BTreeSet;

use burn_core::module::{
    Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn_core::tensor::Tensor;

use super::ProcessGroup;
use super::reparameterizations::Sharded;
use super::shards::{ExpertGroups, Shards};
use crate::decorate;

/// Returns true if the parameter is sharded and gathered at each use.
pub(crate) fn is_sharded<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    param.reparameterization::<Sharded>().is_some()
}

/// Shards the parameters of `module` over `group` (FSDP, ZeRO-3): each rank keeps shard `rank` of
/// each parameter along the first axis, with its gradient and optimizer state. Parameters whose
/// first axis is not a multiple of the number of ranks stay unsharded.
///
/// A forward gathers a parameter when it uses it, and frees it afterwards:
///
/// - An [`Nvfp4Linear`], alone or in a feed-forward, quantizes this rank's shard with the amax over
///   all ranks, and gathers codes and block scales, in the forward and again in the backward. They
///   are bit for bit those of the unsharded weight, if the number of rows of a shard is a multiple
///   of 16 (of the recipe's block and transform sizes).
/// - An [`Nvfp4GroupedLinear`], alone or in a mixture, has a shard of whole experts, each with
///   separate global scales. It quantizes them, and gathers codes, block scales and amax values in
///   the same way, for any number of rows.
/// - In high precision both gather values in the dtype of the activations.
/// - Other layers gather the parameter in its dtype, and keep it. So do these two while telemetry
///   is on, and if the recipe applies MS-EDEN to weights, for which each rank draws different
///   signs.
/// - A layer of a [decorated](crate::decorate()) module gathers the weight in its dtype, and frees
///   it once the forward GEMM has run: it keeps the quantized operands for the backward. In lenient
///   mode, autodiff keeps the weight as well. Decorate the module before it is sharded.
///
/// The gradient of a parameter is this rank's shard of the mean over the ranks, which each have a
/// shard of the batch. The mean is computed concurrently with the rest of the backward: call
/// [`reduce_gradients`](super::reduce_gradients) after each backward to wait for it and to average
/// the gradients of unsharded parameters. All ranks must call `module` at the same points of their
/// program.
///
/// Modules need no change, including those of burn-nn: [`Param::val`] gathers. Code that reads the
/// shape of a parameter itself sees that of the shard; burn-nn's `PositionWiseFeedForward` compares
/// its input with it, and panics. [`gather`] and `Module::materialize` restore the unsharded
/// parameters.
///
/// [`Nvfp4Linear`]: crate::Nvfp4Linear
/// [`Nvfp4GroupedLinear`]: crate::Nvfp4GroupedLinear
///
/// All ranks must begin with the same values; [`broadcast`](super::broadcast) ensures that.
pub fn fully_shard<M: Module>(module: M, group: &ProcessGroup) -> M {
    fully_shard_experts(module, ExpertGroups::none(group))
}

/// Version of [`fully_shard`] for a model with experts sharded over ranks: shards the parameters of
/// experts over the ranks with the same experts, [`data`](ExpertGroups::data), and all others over
/// [`batch`](ExpertGroups::batch). Call [`reduce_expert_gradients`](super::reduce_expert_gradients)
/// after each backward.
///
/// A stack of experts is sharded by whole experts, the same number on each rank; they are gathered
/// as quantized operands, see [`fully_shard`].
pub fn fully_shard_experts<M: Module>(module: M, groups: ExpertGroups<'_>) -> M {
    if groups.batch.size() == 1 {
        return module;
    }
    decorate::reparameterize(module, Shard { groups })
}

/// Mapper that takes the shard of a rank.
struct Shard<'a> {
    groups: ExpertGroups<'a>,
}

impl Reparameterizer for Shard<'_> {
    type Reparam = Sharded;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Sharded>) {
        let group = self.groups.of(param.id).clone();
        if !is_shardable(&param.dims(), &group) {
            return (param, None);
        }
        let id = param.id.val();
        let param = param.map(|whole| like(&whole, part(whole.clone(), &group)));
        let reduction = self.groups.reduction();
        let sharded = Sharded {
            group,
            id,
            reduction,
        };
        (param, Some(sharded))
    }
}

/// Returns true if a parameter of this shape can be sharded over `group`.
pub(crate) fn is_shardable(dims: &[usize], group: &ProcessGroup) -> bool {
    group.size() > 1 && dims[0] > 0 && dims[0].is_multiple_of(group.size())
}

/// Returns shard `rank` of `whole` in separate memory: a view would keep the whole tensor alive.
pub(crate) fn part<const D: usize>(whole: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let rows = whole.dims()[0] / group.size();
    let whole = whole.detach().set_require_grad(false);
    whole.narrow(0, group.rank() * rows, rows).add_scalar(0.0)
}

/// Returns `tensor`, requiring a gradient if `model` does.
fn like<const D: usize>(model: &Tensor<D>, tensor: Tensor<D>) -> Tensor<D> {
    tensor.set_require_grad(model.is_require_grad())
}

/// Gathers the unsharded parameters of `module` on all ranks, which all call this. A decorated
/// module stays decorated.
pub fn gather<M: Module>(module: M) -> M {
    decorate::gathered(module)
}

impl Shards {
    /// Returns the sharded parameters of `module`, as created by [`fully_shard`] with `group`.
    pub fn of<M: Module>(module: &M, group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            ids: sharded_ids(module),
        }
    }

    /// Returns the sharded parameters of `module`, as created by [`fully_shard_experts`] with
    /// `groups`: those of experts, and all others.
    pub fn of_experts<M: Module>(module: &M, groups: ExpertGroups<'_>) -> Vec<Self> {
        groups.shards(sharded_ids(module))
    }

    /// Returns the parameters of `module`, which is not sharded, that [`fully_shard_experts`] would
    /// shard: those of experts, and all others.
    pub fn shardable_experts<M: Module>(module: &M, groups: ExpertGroups<'_>) -> Vec<Self> {
        groups.shards(shardable_ids(module, groups))
    }
}

fn shardable_ids<M: Module>(module: &M, groups: ExpertGroups<'_>) -> BTreeSet<u64> {
    let mut find = FindShardable {
        groups,
        ids: BTreeSet::new(),
    };
    module.visit(&mut find);
    find.ids
}

struct FindShardable<'a> {
    groups: ExpertGroups<'a>,
    ids: BTreeSet<u64>,
}

impl ModuleVisitor for FindShardable<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if is_shardable(&param.dims(), self.groups.of(param.id)) {
            self.ids.insert(param.id.val());
        }
    }
}

fn sharded_ids<M: Module>(module: &M) -> BTreeSet<u64> {
    let mut find = FindSharded::default();
    module.visit(&mut find);
    find.ids
}

/// Visitor that finds sharded parameters. Burn visits the reparameterization after its parameter.
#[derive(Default)]
struct FindSharded {
    last: Option<ParamId>,
    ids: BTreeSet<u64>,
}

impl ModuleVisitor for FindSharded {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if (name, container_type) == (Sharded::NAME, "Reparameterization") {
            self.ids.extend(self.last.map(|id| id.val()));
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = Some(param.id);
    }
}
