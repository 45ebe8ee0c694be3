//! Clipping of gradients to a global norm, on the device.

use burn_core::backend::{Dispatch, DispatchTensor, tensor::FloatTensor};
use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Device, Tensor};
use burn_optim::GradientsParams;
use nvfp4_formats::Nvfp4Error;

use super::config::positive;
use crate::ops::optimizer::{BATCH, GradientBatch, OptimizerOps};
use crate::parallel::Shards;
use crate::validate;

/// Scales the gradients of `model` so that their global norm is at most `max_norm`. Returns the
/// gradients and their norm before scaling, `f32[1]`, on the device. Nothing is read back. Without
/// gradients the norm is `None`.
///
/// For optimizers that see one gradient at a time, like those of a Burn `ModuleOptimizer`.
/// [`AdamW`](super::AdamW) clips itself, without writing gradients; a clipped `f32` gradient has
/// the same bits as in that computation.
///
/// # Errors
/// Returns an error if `max_norm` is not a finite number above 0, gradients are on several devices,
/// or a gradient is on a device or of a dtype that has no implementation.
pub fn clip_grad_norm<M: Module>(
    model: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> Result<(GradientsParams, Option<Tensor<1>>), Nvfp4Error> {
    positive("max_norm", max_norm)?;
    let mut collect = Collect {
        gradients: &gradients,
        found: Vec::new(),
        device: None,
        failure: None,
    };
    model.visit(&mut collect);
    let Collect { found, failure, .. } = collect;
    if let Some(error) = failure {
        return Err(error);
    }
    if found.is_empty() {
        return Ok((gradients, None));
    }
    let made = Tensor::<1>::from_dispatch(clip_factor(max_norm, found, &[]));
    let norm = made.clone().narrow(0, 0, 1);
    let mut scale = Scale {
        gradients,
        factor: made.narrow(0, 1, 1),
    };
    model.visit(&mut scale);
    Ok((scale.gradients, Some(norm)))
}

/// Computes the norm of all gradients and the factor that scales them down to `max_norm`, `f32[2]`.
/// Gradients in `shards` are sharded over ranks.
pub(super) fn clip_factor(
    max_norm: f64,
    gradients: impl IntoIterator<Item = (ParamId, DispatchTensor)>,
    shards: &[Shards],
) -> FloatTensor<Dispatch> {
    let mut whole = Vec::new();
    let mut parts = vec![Vec::new(); shards.len()];
    for (id, gradient) in gradients {
        let set = shards.iter().position(|shards| shards.contains(id));
        let own = set.map_or(&mut whole, |set| &mut parts[set]);
        own.push((id, gradient));
    }
    let mut sums = square_sums(&whole);
    for (shards, parts) in shards.iter().zip(&parts) {
        let parts = square_sums(parts).into_iter();
        sums.extend(parts.map(|part| shards.group.all_gather(part, 0)));
    }
    let sums = match <[_; 1]>::try_from(sums) {
        Ok([sums]) => sums,
        Err(sums) => Tensor::cat(sums, 0),
    };
    Dispatch::nvfp4_clip_factor(sums.into_dispatch(), max_norm as f32)
}

/// Partial sums of the squares of all elements, for each batch of `gradients`.
fn square_sums(gradients: &[(ParamId, DispatchTensor)]) -> Vec<Tensor<1>> {
    let sums = gradients.chunks(BATCH).map(|batch| {
        let batch = batch.iter().map(|(_, gradient)| gradient.clone());
        let batch = GradientBatch::<Dispatch>::new(batch);
        Tensor::<1>::from_dispatch(Dispatch::nvfp4_square_sums(batch))
    });
    sums.collect()
}

/// Collects the gradients of a module.
struct Collect<'a> {
    gradients: &'a GradientsParams,
    found: Vec<(ParamId, DispatchTensor)>,
    device: Option<Device>,
    failure: Option<Nvfp4Error>,
}

impl Collect<'_> {
    fn check<const D: usize>(&mut self, gradient: &Tensor<D>) -> Result<(), Nvfp4Error> {
        validate::operand("gradient", gradient)?;
        let device = gradient.device();
        let first = self.device.get_or_insert_with(|| device.clone());
        validate::same_device(("the first gradient", first), ("gradient", &device))
    }
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.failure.is_none()
            && let Some(gradient) = self.gradients.get::<D>(param.id)
        {
            self.failure = self.check(&gradient).err();
            self.found.push((param.id, gradient.into_dispatch()));
        }
    }
}

/// Scales the gradients of a module.
struct Scale {
    gradients: GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let factor = self.factor.clone().cast(gradient.dtype());
            let factor = factor.reshape([1; D]);
            self.gradients.register(param.id, gradient * factor);
        }
    }
}
