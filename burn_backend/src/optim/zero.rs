//! AdamW with sharded state.

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn_core::tensor::Tensor;
use burn_optim::GradientsParams;
use nvfp4_kernels::Nvfp4Error;
use nvfp4_parallel::Reduction;

use super::adamw::AdamW;
use super::config::AdamWConfig;
use crate::functions::or_panic;
use crate::parallel::{ProcessGroup, Shards, average_gradients, is_shardable, part};

/// AdamW for a model that all ranks have whole, each with a part of the batch (ZeRO-1): each rank
/// keeps the moments, and the `f32` copies, of its part of each parameter along the first axis, and
/// updates that part. Parameters whose first axis is no multiple of the number of ranks are updated
/// by all ranks alike.
///
/// A step averages the gradients over the ranks, each rank getting its part, and gathers the
/// updated parts. The weights have the bits of [`AdamW`] with averaged gradients, but for the norm
/// to which gradients are clipped: its sum has another order.
#[derive(Debug, Clone)]
pub struct ZeroAdamW {
    adamw: AdamW,
    group: ProcessGroup,
}

impl ZeroAdamW {
    /// An optimizer that has taken no step.
    ///
    /// # Errors
    /// When a setting is outside of its range.
    pub fn try_new(config: AdamWConfig, group: &ProcessGroup) -> Result<Self, Nvfp4Error> {
        Ok(Self {
            adamw: config.try_init()?,
            group: group.clone(),
        })
    }

    /// The ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The optimizer of this rank's parts, whose state is saved as that of any AdamW.
    pub fn adamw(&self) -> &AdamW {
        &self.adamw
    }

    /// The same, to restore its state.
    pub fn adamw_mut(&mut self) -> &mut AdamW {
        &mut self.adamw
    }

    /// One step of all parameters that have a gradient, by the mean of the gradients of all ranks,
    /// which take their steps together.
    ///
    /// # Errors
    /// As [`AdamW::try_step`].
    ///
    /// # Panics
    /// When the group fails.
    pub fn try_step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        mut gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        let group = self.group.clone();
        let mut scatter = Scatter {
            group: &group,
            gradients: &mut gradients,
            parts: GradientsParams::new(),
            shards: Shards {
                group: group.clone(),
                ids: Default::default(),
            },
        };
        model.visit(&mut scatter);
        let Scatter { parts, shards, .. } = scatter;
        // What is left belongs to the parameters that stay whole.
        average_gradients(&model, &mut gradients, &group);
        let mut all = Join {
            from: parts,
            to: gradients,
        };
        model.visit(&mut all);
        let parts = model.map(&mut TakeParts { shards: &shards });
        self.adamw.set_shards(Some(shards.clone()));
        let parts = self.adamw.try_step(lr, parts, all.to)?;
        Ok(parts.map(&mut GatherParts { shards: &shards }))
    }

    /// [`try_step`](Self::try_step) that panics with its error.
    ///
    /// # Panics
    /// As there.
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        or_panic("ZeroAdamW", self.try_step(lr, model, gradients))
    }
}

/// Takes gradients of parameters that are sharded, and leaves the others.
struct Scatter<'a> {
    group: &'a ProcessGroup,
    gradients: &'a mut GradientsParams,
    /// This rank's parts of their means.
    parts: GradientsParams,
    shards: Shards,
}

impl ModuleVisitor for Scatter<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !is_shardable(&param.lazy_shape().dims::<D>(), self.group) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.shards.ids.insert(param.id.val());
            let mean = self.group.reduce_scatter(gradient, Reduction::Avg);
            self.parts.register(param.id, mean);
        }
    }
}

/// Joins two sets of gradients.
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

/// This rank's parts of the parameters.
struct TakeParts<'a> {
    shards: &'a Shards,
}

impl ModuleMapper for TakeParts<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.shards.contains(param.id) {
            return param;
        }
        param.map(|whole| {
            let requires = whole.is_require_grad();
            part(whole, &self.shards.group).set_require_grad(requires)
        })
    }
}

/// The whole parameters again.
struct GatherParts<'a> {
    shards: &'a Shards,
}

impl ModuleMapper for GatherParts<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.shards.contains(param.id) {
            return param;
        }
        param.map(|part| {
            let requires = part.is_require_grad();
            let whole = self.shards.group.all_gather(part, 0);
            whole.set_require_grad(requires)
        })
    }
}
