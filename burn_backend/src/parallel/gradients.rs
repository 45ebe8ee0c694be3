//! Means of gradients over the ranks of a model.

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::Tensor;
use burn_optim::GradientsParams;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;

/// Parameters of which ranks have others, and the ranks that gradients are reduced over. Each rank
/// has a part of the batch.
#[derive(Clone, Copy, Debug)]
pub struct GradientGroups<'a> {
    /// All ranks with a part of the batch. They have the same parameters, but for `experts`.
    pub batch: &'a ProcessGroup,
    /// Ids of the parameters of experts; see [`expert_parameters`](crate::nn::expert_parameters).
    pub experts: &'a [ParamId],
    /// The ranks of `batch` with the same experts as this one: those of data parallelism alone.
    pub expert_data: &'a ProcessGroup,
}

/// Replaces the gradients of `model` by those of the mean of the losses of all ranks of
/// [`batch`](GradientGroups::batch), as data parallelism needs them. All ranks call it together, with
/// gradients of the same parameters in the order of the model.
///
/// The gradient of a parameter that all ranks have is the mean over them. The gradient of an expert
/// has the tokens of all ranks that send tokens to it already: it is summed over
/// [`expert_data`](GradientGroups::expert_data), and divided by the number of ranks of `batch`.
///
/// # Panics
/// When a group fails.
pub fn average_gradients<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    groups: GradientGroups<'_>,
) {
    model.visit(&mut Average { gradients, groups });
}

struct Average<'a> {
    gradients: &'a mut GradientsParams,
    groups: GradientGroups<'a>,
}

impl ModuleVisitor for Average<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            return;
        };
        let groups = self.groups;
        let mean = if groups.experts.contains(&param.id) {
            let sum = groups.expert_data.all_reduce(gradient, Reduction::Sum);
            sum.div_scalar(groups.batch.size() as f64)
        } else {
            groups.batch.all_reduce(gradient, Reduction::Avg)
        };
        self.gradients.register(param.id, mean);
    }
}
