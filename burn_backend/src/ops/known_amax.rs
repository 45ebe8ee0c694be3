//! Amax values of weights that the optimizer computed while it wrote them.
//!
//! A weight is quantized from its amax. The optimizer has every element of the new weight in
//! registers, so the next forward needs no separate amax pass.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_core::backend::{Backend, tensor::FloatTensor};

use super::collective::Link;
use super::context::WeightIdentity;

/// Location of a weight's amax: an entry of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct KnownAmax<B: Backend> {
    /// Amax values of several weights, `f32`. The optimizer's next step of these weights writes to
    /// them in place.
    pub(crate) maxima: FloatTensor<B>,
    /// Entry of this weight.
    pub(crate) entry: usize,
    /// For a sharded weight: amax over all shards.
    pub(crate) of_group: Option<GroupAmax<B>>,
}

/// Location of the amax over the shards of a weight on the ranks of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupAmax<B: Backend> {
    /// Ranks of the group.
    pub(crate) group: Link,
    /// Amax values, see [`KnownAmax::maxima`].
    pub(crate) maxima: FloatTensor<B>,
    /// Entry, see [`KnownAmax::entry`].
    pub(crate) entry: usize,
}

/// By the autodiff node of a weight, its [`KnownAmax`] of the inner backend.
type Known = BTreeMap<u64, Box<dyn Any + Send>>;

static KNOWN: Mutex<Known> = Mutex::new(Known::new());

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Weights of an optimizer whose amax is known, until the next step or the optimizer is dropped.
#[derive(Debug, Default)]
pub(crate) struct KnownWeights(Vec<u64>);

impl KnownWeights {
    /// Adds the weight with this autodiff node, which was passed to [`remember`].
    pub(crate) fn push(&mut self, node: u64) {
        self.0.push(node);
    }

    /// Forgets all of them.
    pub(crate) fn forget(&mut self) {
        let mut known = known();
        for node in self.0.drain(..) {
            known.remove(&node);
        }
    }
}

/// Returns an empty set: the weights belong to the optimizer that updated them.
impl Clone for KnownWeights {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Drop for KnownWeights {
    fn drop(&mut self) {
        self.forget();
    }
}

/// Registers the amax of the weight with this autodiff node.
pub(super) fn remember<B: Backend>(node: u64, amax: KnownAmax<B>) {
    known().insert(node, Box::new(amax));
}

/// Registers the amax over the ranks of a group for the shard with this autodiff node, whose own
/// amax is known.
pub(super) fn remember_of_group<B: Backend>(node: u64, amax: GroupAmax<B>) {
    let mut known = known();
    let own = known.get_mut(&node);
    if let Some(own) = own.and_then(|own| own.downcast_mut::<KnownAmax<B>>()) {
        own.of_group = Some(amax);
    }
}

/// Returns the amax of a weight, if it is known.
pub(super) fn find<B: Backend>(weight: &WeightIdentity) -> Option<KnownAmax<B>> {
    let node = weight.node()?;
    known().get(&node)?.downcast_ref().cloned()
}

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::module::Param;
    use burn_core::tensor::{DType, Device, Tensor, TensorData};
    use burn_optim::GradientsParams;

    use super::super::context::tests::device;
    use super::*;
    use crate::ops::optimizer::OptimizerOps;
    use crate::optim::{AdamW, AdamWConfig};
    use crate::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};

    fn optimizer(amax: bool) -> AdamW {
        AdamWConfig {
            amax,
            ..AdamWConfig::default()
        }
        .init()
    }

    /// Fixed numbers: other tests draw from the device's generator.
    fn matrix(rows: usize, cols: usize, device: &Device) -> Tensor<2> {
        let values = (0..rows * cols).map(|i| (i as f32 * 12.9898).sin());
        let data = TensorData::new(values.collect::<Vec<f32>>(), [rows, cols]);
        Tensor::from_data(data, (device, DType::F32))
    }

    fn layer(recipe: &str, device: &Device) -> Nvfp4Linear {
        let recipe = Nvfp4Recipe::preset(recipe).expect("a preset");
        let config = Nvfp4LinearConfig::new(48, 64).with_recipe(recipe);
        let mut layer = config.with_layer(Some(1)).with_bias(false).init(device);
        layer.weight = Param::from_tensor(matrix(48, 64, device));
        layer
    }

    fn node(layer: &Nvfp4Linear) -> u64 {
        let weight = WeightIdentity::of([&layer.weight.val()]).expect("autodiff knows it");
        weight.node().expect("one tensor")
    }

    fn bits(tensor: &Tensor<2>) -> Vec<u8> {
        tensor.clone().into_data().as_bytes().to_vec()
    }

    struct Run {
        x: Tensor<2>,
        layer: Nvfp4Linear,
        optimizer: AdamW,
    }

    impl Run {
        /// Returns the output and the input gradient of a step.
        fn step(&mut self) -> [Vec<u8>; 2] {
            let x = self.x.clone().require_grad();
            let y = self.layer.forward(x.clone());
            let grads = y.clone().powi_scalar(2).sum().backward();
            let dx = x.grad(&grads).expect("a gradient");
            let grads = GradientsParams::from_grads(grads, &self.layer);
            self.layer = self.optimizer.step(0.05, self.layer.clone(), grads);
            [bits(&y.inner()), bits(&dx)]
        }
    }

    fn run(recipe: &str, amax: bool) -> Run {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        Run {
            x: matrix(32, 48, &device).cast(dtype).detach(),
            layer: layer(recipe, &device),
            optimizer: optimizer(amax),
        }
    }

    /// Weights in 16x16 blocks, in 1x16 blocks quantized once and twice, per row, and by MS-EDEN.
    #[test]
    fn steps_have_the_bits_of_those_that_look_for_it() {
        for recipe in [
            "nvidia",
            "nvidia_4over6",
            "weight_only_qat",
            "per_token",
            "quartet2",
        ] {
            let (mut with, mut without) = (run(recipe, true), run(recipe, false));
            for step in 0..4 {
                assert!(with.step() == without.step(), "{recipe}, step {step}");
            }
        }
    }

    /// A wrong amax changes the quantized values.
    #[test]
    fn the_next_forward_quantizes_from_it() {
        let after_step = |wrong: bool| {
            let mut run = run("nvidia", true);
            run.step();
            if wrong {
                let amax = Tensor::<1>::from_data([0.0f32, 64.0], &run.x.device().inner());
                Dispatch::nvfp4_remember_amax(amax.into_dispatch(), 1, node(&run.layer));
            }
            bits(&run.layer.forward(run.x.clone()).inner())
        };
        assert!(after_step(false) == after_step(false));
        assert!(after_step(true) != after_step(false));
    }

    /// The amax is known only for the tensor that the optimizer wrote.
    #[test]
    fn another_weight_has_none() {
        let mut run = run("nvidia", true);
        run.step();
        let first = node(&run.layer);
        assert!(known().contains_key(&first));
        let other = run.layer.weight.clone().map(|weight| weight * 2.0);
        let other = WeightIdentity::of([&other.val()]).expect("autodiff knows it");
        assert!(!known().contains_key(&other.node().expect("one tensor")));
        run.step();
        let second = node(&run.layer);
        assert!(!known().contains_key(&first) && known().contains_key(&second));
        drop(run.optimizer);
        assert!(!known().contains_key(&second));
    }
}
