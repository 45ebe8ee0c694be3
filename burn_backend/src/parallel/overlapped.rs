//! Gradients that are averaged during the backward.

use burn_core::module::{Module, Param, Reparameterizer};
use burn_core::tensor::Tensor;

use super::reparameterizations::{Averaged, Sharded};
use super::{ExpertGroups, ProcessGroup};
use crate::decorate;
use crate::ops::collective::ReduceDtype;

/// Number of elements from which a gradient is exchanged separately between GPUs of a machine: a
/// collective of fewer elements takes as long as an empty one.
pub const SMALLEST_ALONE: usize = 1 << 16;

/// Returns the dtype in which ranks exchange the gradient of `param`, if they do so during the
/// backward.
pub(crate) fn reduce_dtype_of<const D: usize>(param: &Param<Tensor<D>>) -> ReduceDtype {
    let averaged = param.reparameterization::<Averaged>();
    let averaged = averaged.map(|averaged| averaged.group.reduce_dtype());
    let sharded = param.reparameterization::<Sharded>();
    let sharded = sharded.map(|sharded| sharded.group().reduce_dtype());
    averaged.or(sharded).unwrap_or_default()
}

/// Marks the replicated parameters of `module` so that their gradients are exchanged as soon as the
/// backward has computed them. If `group` [is connected](ProcessGroup::connect), they are exchanged
/// between the kernels of the backward or concurrently with them, many at once and without copies
/// into buckets. Parameters of fewer than `smallest` elements ([`SMALLEST_ALONE`]) are left to the
/// buckets of [`average_gradients`](super::average_gradients).
///
/// Call [`average_gradients`](super::average_gradients) after each backward, or after several whose
/// gradients add up: until then `group` holds the gradients of such parameters, and autodiff does
/// not return them. The means have the same bits as without this function.
///
/// Modules need no change. All ranks must call `module` at the same points of their program.
pub fn average_in_backward<M: Module>(module: M, group: &ProcessGroup, smallest: usize) -> M {
    average_replicated_in_backward(module, ExpertGroups::none(group), smallest)
}

/// Version of [`average_in_backward`] for a model with experts sharded over ranks: averages the
/// parameters that are replicated on all ranks of [`batch`](ExpertGroups::batch). Call
/// [`average_expert_gradients`](super::average_expert_gradients) after each backward.
pub fn average_replicated_in_backward<M: Module>(
    module: M,
    groups: ExpertGroups<'_>,
    smallest: usize,
) -> M {
    if groups.batch.size() == 1 {
        return module;
    }
    decorate::reparameterize(module, Average { groups, smallest })
}

/// Mapper that marks the parameters that are large enough.
struct Average<'a> {
    groups: ExpertGroups<'a>,
    smallest: usize,
}

impl Reparameterizer for Average<'_> {
    type Reparam = Averaged;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Averaged>) {
        let is_small = param.lazy_shape().num_elements() < self.smallest;
        if is_small || self.groups.experts.contains(&param.id) {
            return (param, None);
        }
        let averaged = Averaged {
            group: self.groups.batch.clone(),
            id: param.id.val(),
            reduction: self.groups.reduction(),
        };
        (param, Some(averaged))
    }
}
