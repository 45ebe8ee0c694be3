//! Exchanges of a parameter with other ranks, as reparameterizations that Burn applies at each use.

use burn_core::module::{Content, Reparameterization};
use burn_core::tensor::Tensor;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;
use super::functions::{copy_beside, gather_beside};
use crate::ops::LinearSpec;
use crate::ops::sharding::{GatheredWeight, WeightPart};
use crate::parameterless::{Parameterless, parameterless_module};

/// Reparameterization of a replicated parameter: its gradient is averaged over the ranks as soon as
/// the backward has computed it. Created by
/// [`average_in_backward`](super::average_in_backward).
#[derive(Clone, Debug)]
pub struct Averaged {
    pub(super) group: ProcessGroup,
    /// Id of the parameter, the key of its pending gradient.
    pub(super) id: u64,
    pub(super) reduction: Reduction,
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

/// Reparameterization of a sharded parameter: the parameter holds this rank's shard, and the shards
/// of all ranks are gathered at each use. Burn's traversals see the shard.
///
/// Created by [`fully_shard`](super::fully_shard).
#[derive(Clone, Debug)]
pub struct Sharded {
    pub(super) group: ProcessGroup,
    /// Id of the parameter, the key of its pending gradient.
    pub(super) id: u64,
    pub(super) reduction: Reduction,
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
    /// Returns the ranks.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the gather of the quantized operands of the parameter for `spec`, given this rank's
    /// shard `part` of the weight; `None` if operands cannot be gathered. `is_alone` is true if the
    /// weight of the layer is this parameter and nothing else.
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
