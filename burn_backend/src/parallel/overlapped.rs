//! Gradients that are averaged from within the backward.

use burn_core::module::{Content, Module, Param, Reparameterization, Reparameterizer};
use burn_core::tensor::Tensor;
use nvfp4_parallel::Reduction;

use super::functions::copy_beside;
use super::sharded::Sharded;
use super::{ExpertGroups, ProcessGroup};
use crate::ops::collective::ReduceDtype;
use crate::parameterless::{Parameterless, parameterless_module};

/// Elements from which on a gradient travels by itself between GPUs of a machine: a collective of
/// fewer takes as long as an empty one.
pub const SMALLEST_ALONE: usize = 1 << 16;

/// Of a parameter that all ranks have: its gradient is averaged over them as soon as the backward
/// has it. [`average_in_backward`] makes parameters so.
#[derive(Clone, Debug)]
pub struct Averaged {
    group: ProcessGroup,
    /// The parameter's id, under which its gradient waits.
    id: u64,
    reduction: Reduction,
}

impl Parameterless for Averaged {
    fn show(&self, content: Content) -> Option<Content> {
        content
            .add_formatted(&format!("{:?}", self.group))
            .optional()
    }
}

parameterless_module!(Averaged);

impl Reparameterization for Averaged {
    const NAME: &'static str = "averaged";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        copy_beside(base, &self.group, (self.id, self.reduction))
    }
}

/// The type in which ranks exchange the gradient of `param`, if they do so within the backward.
pub(crate) fn reduce_dtype_of<const D: usize>(param: &Param<Tensor<D>>) -> ReduceDtype {
    let averaged = param.reparameterization::<Averaged>();
    let averaged = averaged.map(|averaged| averaged.group.reduce_dtype());
    let sharded = param.reparameterization::<Sharded>();
    let sharded = sharded.map(|sharded| sharded.group().reduce_dtype());
    averaged.or(sharded).unwrap_or_default()
}

/// `module`, which all ranks have, with gradients that are handed over as soon as the backward has
/// them. Where `group` [is connected](ProcessGroup::connect), they travel between the kernels of the
/// backward, many at once and without copies into buckets, or beside them. Parameters of fewer than `smallest` elements
/// ([`SMALLEST_ALONE`]) are left to the buckets of
/// [`average_gradients`](super::average_gradients).
///
/// [`average_gradients`](super::average_gradients) has to follow each backward, or several whose
/// gradients add up: gradients of such parameters are with `group` until then, and not among those
/// that autodiff returns. Its means have the bits that it has without this.
///
/// Modules need not know of it. All ranks call `module` at the same points of their program.
pub fn average_in_backward<M: Module>(module: M, group: &ProcessGroup, smallest: usize) -> M {
    average_replicated_in_backward(module, ExpertGroups::none(group), smallest)
}

/// [`average_in_backward`] of a model with experts on several ranks, over
/// [`batch`](ExpertGroups::batch): of the parameters that all of its ranks have.
/// [`average_expert_gradients`](super::average_expert_gradients) has to follow each backward.
pub fn average_replicated_in_backward<M: Module>(
    module: M,
    groups: ExpertGroups<'_>,
    smallest: usize,
) -> M {
    if groups.batch.size() == 1 {
        return module;
    }
    module.apply_reparameterization(Average { groups, smallest })
}

/// Marks the parameters that are large enough.
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
