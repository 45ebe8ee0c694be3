//! AdamW with sharded state (ZeRO-1).

use std::collections::BTreeSet;

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::Tensor;
use burn_optim::GradientsParams;
use nvfp4_formats::Nvfp4Error;

use super::adamw::AdamW;
use super::config::AdamWConfig;
use crate::functions::or_panic;
use crate::ops::collective::Step;
use crate::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, Shards, SplitParameters, average_expert_gradients,
    is_shardable, part,
};

/// AdamW for a model that is replicated on all ranks, each with a shard of the batch (ZeRO-1). Each
/// rank keeps the moments and the `f32` master weights of its shard of each parameter along the
/// first axis, and updates that shard. Parameters whose first axis is not a multiple of the number
/// of ranks are updated redundantly by all ranks.
///
/// A step averages the gradients by reduce-scatter and all-gathers the updated shards. The weights
/// have the bits of [`AdamW`] with averaged gradients, except with clipping: the sum of the
/// gradient norm has another order.
#[derive(Debug, Clone)]
pub struct ZeroAdamW {
    adamw: AdamW,
    group: ProcessGroup,
    /// Parameters of experts, and the ranks with the same experts.
    experts: Vec<ParamId>,
    data: ProcessGroup,
    loss: RankLoss,
    splits: Vec<SplitParameters>,
}

impl ZeroAdamW {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn try_new(config: AdamWConfig, group: &ProcessGroup) -> Result<Self, Nvfp4Error> {
        Ok(Self {
            adamw: config.try_init()?,
            group: group.clone(),
            experts: Vec::new(),
            data: group.clone(),
            loss: RankLoss::Mean,
            splits: Vec::new(),
        })
    }

    /// Sets the parameters of `experts` that differ between ranks: their state is sharded over
    /// `data`, the ranks with the same experts, and their gradients are reduced as by
    /// [`average_expert_gradients`].
    pub fn with_experts(self, experts: &[ParamId], data: &ProcessGroup) -> Self {
        Self {
            experts: experts.into(),
            data: data.clone(),
            ..self
        }
    }

    /// Sets the loss that ranks differentiate.
    pub fn with_loss(self, loss: RankLoss) -> Self {
        Self { loss, ..self }
    }

    /// Sets the parameters that are split before sharding, each in one of `splits`: the gradient
    /// norm covers the shards of all ranks.
    pub fn with_splits(self, splits: Vec<SplitParameters>) -> Self {
        Self { splits, ..self }
    }

    /// Returns the ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the optimizer of this rank's shards; its state is saved like that of any AdamW.
    pub fn adamw(&self) -> &AdamW {
        &self.adamw
    }

    /// Returns the optimizer of this rank's shards, to restore its state.
    pub fn adamw_mut(&mut self) -> &mut AdamW {
        &mut self.adamw
    }

    /// Updates all parameters that have a gradient, by the mean of the gradients of all ranks. All
    /// ranks call it together.
    ///
    /// # Errors
    /// Same as [`AdamW::try_step`].
    ///
    /// # Panics
    /// If the group fails.
    pub fn try_step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        mut gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        let groups = ExpertGroups {
            batch: &self.group,
            experts: &self.experts,
            data: &self.data,
            loss: self.loss,
        };
        let mut scatter = Scatter {
            groups,
            gradients: &mut gradients,
            parts: GradientsParams::new(),
            ids: BTreeSet::new(),
        };
        model.visit(&mut scatter);
        let Scatter { parts, ids, .. } = scatter;
        // The remaining gradients belong to the parameters that are not sharded.
        average_expert_gradients(&model, &mut gradients, groups);
        let mut all = Join {
            from: parts,
            to: gradients,
        };
        model.visit(&mut all);
        let sharded = Sharded { groups, ids: &ids };
        let parts = model.map(&mut TakeParts(sharded));
        let sets = Shards::with_splits(groups.shards(ids.clone()), &self.splits);
        self.adamw.set_shards(sets);
        let parts = self.adamw.try_step(lr, parts, all.to)?;
        Ok(parts.map(&mut GatherParts(sharded)))
    }

    /// Panicking version of [`try_step`](Self::try_step).
    ///
    /// # Panics
    /// If [`try_step`](Self::try_step) returns an error.
    #[track_caller]
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        or_panic("ZeroAdamW", self.try_step(lr, model, gradients))
    }
}

/// Takes the gradients of sharded parameters, and leaves the others.
struct Scatter<'a> {
    groups: ExpertGroups<'a>,
    gradients: &'a mut GradientsParams,
    /// This rank's shards of the mean gradients.
    parts: GradientsParams,
    ids: BTreeSet<u64>,
}

impl ModuleVisitor for Scatter<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let group = self.groups.of(param.id);
        if !is_shardable(&param.lazy_shape().dims::<D>(), group) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.ids.insert(param.id.val());
            let step = Step::ReduceScatter(self.groups.reduction());
            let reduced = group.reduce_gradient(gradient, step);
            // The gradient of an expert already covers the tokens of all ranks that the experts are
            // on.
            let divisor = match self.groups.experts.contains(&param.id) {
                true => self.groups.expert_divisor(),
                false => 1,
            };
            let reduced = match divisor {
                1 => reduced,
                ranks => reduced.div_scalar(ranks as f64),
            };
            self.parts.register(param.id, reduced);
        }
    }
}

/// Visitor that joins two sets of gradients.
struct Join {
    from: GradientsParams,
    to: GradientsParams,
}

impl ModuleVisitor for Join {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove::<D>(param.id) {
            self.to.register(param.id, gradient);
        }
    }
}

/// Sharded parameters, and the ranks that they are sharded over.
#[derive(Clone, Copy)]
struct Sharded<'a> {
    groups: ExpertGroups<'a>,
    ids: &'a BTreeSet<u64>,
}

impl Sharded<'_> {
    /// Maps `param`, if it is sharded, to the value that `map` computes from its value and the
    /// ranks.
    fn map<const D: usize>(
        &self,
        param: Param<Tensor<D>>,
        map: impl FnOnce(Tensor<D>, &ProcessGroup) -> Tensor<D>,
    ) -> Param<Tensor<D>> {
        if !self.ids.contains(&param.id.val()) {
            return param;
        }
        let group = self.groups.of(param.id);
        param.map(|own| {
            let requires = own.is_require_grad();
            map(own, group).set_require_grad(requires)
        })
    }
}

/// Replaces parameters by this rank's shards.
struct TakeParts<'a>(Sharded<'a>);

impl ModuleMapper for TakeParts<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.map(param, part)
    }
}

/// Gathers the full parameters.
struct GatherParts<'a>(Sharded<'a>);

impl ModuleMapper for GatherParts<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.map(param, |part, group| group.all_gather(part, 0))
    }
}
