//! Parameters of which each rank has a part.

use std::collections::BTreeSet;

use burn_core::module::{
    Content, Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn_core::tensor::Tensor;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;
use super::functions::gather_beside;
use super::shards::{ExpertGroups, Shards};
use crate::ops::LinearSpec;
use crate::ops::sharding::{GatheredWeight, WeightPart};
use crate::parameterless::{Parameterless, parameterless_module};

/// Of a parameter: the value that it holds is this rank's part of it, and the parts of all ranks
/// are gathered each time that it is used. Burn's traversals see the part.
///
/// [`fully_shard`] makes parameters so.
#[derive(Clone, Debug)]
pub struct Sharded {
    group: ProcessGroup,
    /// The parameter's id, under which its gradient waits.
    id: u64,
    reduction: Reduction,
}

impl Parameterless for Sharded {
    fn show(&self, content: Content) -> Option<Content> {
        content
            .add_formatted(&format!("{:?}", self.group))
            .optional()
    }
}

parameterless_module!(Sharded);

impl Reparameterization for Sharded {
    const NAME: &'static str = "sharded";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        gather_beside(base, &self.group, (self.id, self.reduction))
    }
}

impl Sharded {
    /// The ranks.
    pub(super) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// How quantized operands of the parameter, a weight of which this rank has `part`, are
    /// gathered for `spec`; none if they cannot be. `is_alone` says whether the weight of the layer
    /// is this parameter and nothing else.
    pub(crate) fn operands(
        &self,
        is_alone: bool,
        part: WeightPart,
        spec: &LinearSpec,
    ) -> Option<GatheredWeight> {
        let parameter = is_alone.then_some(self.id);
        GatheredWeight::new(&self.group, (parameter, self.reduction), part, spec)
    }
}

/// Returns true if the parameter is gathered each time that it is used.
pub(crate) fn is_sharded<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    param.reparameterization::<Sharded>().is_some()
}

/// The shape of a parameter for those who use it: that of the whole, where it is sharded. Its value
/// is not asked for.
pub(crate) fn whole_dims<const D: usize>(param: &Param<Tensor<D>>) -> [usize; D] {
    let mut dims = param.lazy_shape().dims::<D>();
    if let Some(sharded) = param.reparameterization::<Sharded>() {
        dims[0] *= sharded.group.size();
    }
    dims
}

/// Shards the parameters of `module` over `group` (FSDP, ZeRO-3): each rank keeps part `rank` along
/// the first axis of each of them, and all that follows from them, gradients and optimizer state,
/// is of that part. Parameters whose first axis is no multiple of the number of ranks stay whole.
///
/// A forward gathers a parameter when it uses it and frees it afterwards:
///
/// - An [`Nvfp4Linear`], by itself or in a feed-forward, quantizes this rank's part, with the amax
///   of all ranks', and gathers codes and block scales, in the forward and again in the backward:
///   bit for bit those of the whole, if a part has a multiple of 16 rows (of the recipe's blocks
///   and rotations).
/// - An [`Nvfp4GroupedLinear`], by itself or in a mixture, has a part of whole experts, each with
///   global scales of its own. It quantizes them, and gathers codes, block scales and amax values
///   in the same way, whatever their rows.
/// - In high precision both gather values in the type of the activations.
/// - Other layers gather the parameter in its type, and keep it. So do these two while telemetry is
///   on, and where the recipe rotates the values of weights by MS-EDEN, for which each rank draws
///   signs of its own.
///
/// The gradient of a parameter is this rank's part of the mean over the ranks, which have a part of
/// the batch each. The mean is taken beside the rest of the backward:
/// [`reduce_gradients`](super::reduce_gradients) has to follow each backward, waits for it, and
/// averages the gradients of parameters that stay whole. All ranks call `module` at the same points
/// of their program.
///
/// Modules need not know of it, burn-nn's neither: [`Param::val`] gathers. What reads the shape of
/// a parameter itself sees that of the part. [`gather`] and `Module::materialize` give the whole
/// back.
///
/// [`Nvfp4Linear`]: crate::Nvfp4Linear
/// [`Nvfp4GroupedLinear`]: crate::Nvfp4GroupedLinear
///
/// All ranks begin with the same values: [`broadcast`](super::broadcast) makes them so.
pub fn fully_shard<M: Module>(module: M, group: &ProcessGroup) -> M {
    fully_shard_experts(module, ExpertGroups::none(group))
}

/// [`fully_shard`] of a model with experts on several ranks: shards the parameters of experts over
/// the ranks with the same ones, [`data`](ExpertGroups::data), and all others over
/// [`batch`](ExpertGroups::batch).
/// [`reduce_expert_gradients`](super::reduce_expert_gradients) has to follow each backward.
///
/// A stack of experts is sharded by whole experts, as many on each rank, which travel as operands
/// as [`fully_shard`] says.
pub fn fully_shard_experts<M: Module>(module: M, groups: ExpertGroups<'_>) -> M {
    if groups.batch.size() == 1 {
        return module;
    }
    module.apply_reparameterization(Shard { groups })
}

/// Takes the part of a rank.
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
        if !is_shardable(&param.lazy_shape().dims::<D>(), &group) {
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

/// Returns true if a parameter of this shape is sharded over `group`.
pub(crate) fn is_shardable(dims: &[usize], group: &ProcessGroup) -> bool {
    group.size() > 1 && dims[0] > 0 && dims[0].is_multiple_of(group.size())
}

/// Part `rank` of `whole`, in memory of its own: a view would keep the whole.
pub(crate) fn part<const D: usize>(whole: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let rows = whole.dims()[0] / group.size();
    let whole = whole.detach().set_require_grad(false);
    whole.narrow(0, group.rank() * rows, rows).add_scalar(0.0)
}

/// `tensor`, which requires a gradient if `model` does.
fn like<const D: usize>(model: &Tensor<D>, tensor: Tensor<D>) -> Tensor<D> {
    tensor.set_require_grad(model.is_require_grad())
}

/// `module` with whole parameters, the same on all ranks, which all call this.
pub fn gather<M: Module>(module: M) -> M {
    module.materialize()
}

impl Shards {
    /// Those of `module`, made by [`fully_shard`] with `group`.
    pub fn of<M: Module>(module: &M, group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            ids: sharded_ids(module),
        }
    }

    /// Those of `module`, made by [`fully_shard_experts`] with `groups`: of experts, and of all
    /// other parameters.
    pub fn of_experts<M: Module>(module: &M, groups: ExpertGroups<'_>) -> Vec<Self> {
        groups.shards(sharded_ids(module))
    }

    /// Those of `module`, whose parameters are whole, that [`fully_shard`] or
    /// [`ZeroAdamW`](crate::optim::ZeroAdamW) would shard.
    pub fn shardable<M: Module>(module: &M, group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            ids: shardable_ids(module, ExpertGroups::none(group)),
        }
    }

    /// Those of `module` that [`fully_shard_experts`] would shard: of experts, and of all other
    /// parameters.
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
        if is_shardable(&param.lazy_shape().dims::<D>(), self.groups.of(param.id)) {
            self.ids.insert(param.id.val());
        }
    }
}

fn sharded_ids<M: Module>(module: &M) -> BTreeSet<u64> {
    let mut find = FindSharded::default();
    module.visit(&mut find);
    find.ids
}

/// Burn visits the reparameterization behind the parameter that has it.
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
