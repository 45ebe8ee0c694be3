//! Data-parallel training: one rank for each device, with a copy of the model, and gradients that
//! are averaged over all ranks.
//!
//! Burn can average gradients while the backward still runs (`Tensor::set_distributed`, which
//! burn-train's `ExecutionStrategy::ddp` uses). In Burn 0.22.1 such training deadlocks sooner or
//! later; docs/src/data-parallel.md has the reasons. [`DataParallel`] averages after the backward,
//! in the thread that computed the gradients, which avoids both deadlocks. It works inside
//! burn-train's strategy as well.

use std::sync::{Arc, Barrier, Once};

use burn_core::backend::DispatchDevice;
use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::tensor::distributed::{CollectiveTensor, ReduceOperation, all_reduce};
use burn_core::tensor::{Device, Tensor};
use burn_optim::GradientsParams;
use nvfp4_kernels::Nvfp4Error;

use super::buckets::Buckets;

/// The process group of a data-parallel run: the devices of its ranks, and their barrier. Clones
/// belong to the same group.
///
/// Each rank is a thread with a copy of the model on its device (`Module::fork`). All ranks take
/// their steps together; a rank that does not reach the barrier keeps the others waiting.
///
/// With burn-train, a model carries it beside its layers:
///
/// ```
/// # use burn_core as burn;
/// use burn::module::Module;
/// use burn::tensor::Tensor;
/// use burn_nvfp4::{DataParallel, Nvfp4Linear};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     layer: Nvfp4Linear,
///     #[module(skip)]
///     parallel: DataParallel,
/// }
///
/// # struct TrainOutput<T> { grads: burn_optim::GradientsParams, item: T }
/// # trait TrainStep {
/// #     type Input;
/// #     type Output;
/// #     fn step(&self, x: Self::Input) -> TrainOutput<Self::Output>;
/// # }
/// impl TrainStep for Model {
/// #   type Input = Tensor<2>;
/// #   type Output = Tensor<1>;
///     fn step(&self, x: Tensor<2>) -> TrainOutput<Tensor<1>> {
///         let (grads, item) = self.parallel.step(self, |model| {
///             let loss = model.layer.forward(x).powi_scalar(2).mean();
///             (loss.clone(), loss)
///         });
///         TrainOutput { grads, item }
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct DataParallel {
    /// Without autodiff.
    devices: Vec<Device>,
    barrier: Arc<Barrier>,
}

impl DataParallel {
    /// The process group of a run on `devices`, one rank for each.
    ///
    /// # Errors
    /// When `devices` is empty, when a device occurs twice, or when several devices are not CUDA
    /// devices: Burn's all-reduce supports no others.
    pub fn new(devices: &[Device]) -> Result<Self, Nvfp4Error> {
        let devices: Vec<_> = devices
            .iter()
            .cloned()
            .map(Device::without_autodiff)
            .collect();
        let distinct = (1..devices.len()).all(|end| !devices[..end].contains(&devices[end]));
        let average =
            devices.len() == 1 || devices.iter().all(|d| supports_all_reduce(d.as_dispatch()));
        if devices.is_empty() || !distinct || !average {
            return Err(Nvfp4Error::Device {
                argument: "devices",
                found: format!("{devices:?}"),
                expected: "one device, or several different CUDA devices".into(),
            });
        }
        Ok(Self {
            barrier: Arc::new(Barrier::new(devices.len())),
            devices,
        })
    }

    /// The devices, without autodiff.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Runs forward and backward and averages the gradients over all ranks, every one of which has
    /// to call this. `forward` returns the loss and an output; the result is the mean gradients of
    /// `model`'s parameters and that output.
    ///
    /// `forward` gets a copy of `model` whose gradients Burn does not average within the backward,
    /// whether or not `model` is marked as distributed, as burn-train marks it.
    ///
    /// # Panics
    /// When the loss is on a device that belongs to no rank.
    pub fn step<M: Module, T>(
        &self,
        model: &M,
        forward: impl FnOnce(&M) -> (Tensor<1>, T),
    ) -> (GradientsParams, T) {
        let model = model.clone().map(&mut ClearDistributed);
        let (loss, output) = forward(&model);
        let device = loss.device();
        self.check(&device);
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.average(&model, &mut gradients, &device);
        (gradients, output)
    }

    /// Replaces the gradients of `model`, computed on `device`, by their means over the ranks, all
    /// of which have to call this with gradients of the same parameters.
    ///
    /// A collective blocks its device until all other ranks have launched it. So nothing else may
    /// be launched on a device in between: loading a kernel or freeing memory can wait for the
    /// device, and so for ranks that wait for this one. The ranks flush their devices, wait at the
    /// barrier, launch the same few collectives, flush again and wait at the barrier again.
    ///
    /// # Panics
    /// When `device` belongs to no rank.
    pub fn average<M: Module>(&self, model: &M, gradients: &mut GradientsParams, device: &Device) {
        self.check(device);
        if self.devices.len() == 1 {
            return;
        }
        // One for each element type: a collective of many elements costs little more than one of
        // few.
        let buckets = Buckets::new(usize::MAX, |_| true);
        buckets.exchange(model, gradients, |sums| {
            flush(device);
            self.barrier.wait();
            let means = sums
                .into_iter()
                .map(|sum| all_reduce(sum, ReduceOperation::Mean, self.devices.clone()))
                .collect::<Vec<_>>();
            let means = means.into_iter().map(CollectiveTensor::resolve);
            let means = means.collect::<Vec<_>>();
            flush(device);
            self.barrier.wait();
            means
        });
    }

    fn check(&self, device: &Device) {
        assert!(
            self.devices.contains(&device.clone().without_autodiff()),
            "device is {device:?}, but the ranks run on {:?}",
            self.devices
        );
    }
}

/// Whether Burn has an all-reduce for devices of this kind.
fn supports_all_reduce(device: &DispatchDevice) -> bool {
    match device {
        DispatchDevice::Autodiff(device) => supports_all_reduce(device),
        #[cfg(feature = "cuda")]
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(_)) => true,
        _ => false,
    }
}

/// Waits until everything that this thread launched on `device` has been compiled and submitted.
/// The device may not have run it yet.
fn flush(device: &Device) {
    device
        .flush()
        .expect("a device whose operations succeeded so far accepts a flush");
}

/// Warns once, in a training forward with `weight`, that Burn averages its gradient within the
/// backward: it is not trained by [`DataParallel::step`], which clears the mark.
pub(crate) fn warn_of_distributed_weight<const D: usize>(weight: &Tensor<D>) {
    static SAID: Once = Once::new();
    if weight.is_distributed() {
        SAID.call_once(|| {
            tracing::warn!(
                "Burn averages gradients within the backward, where training can deadlock; \
                 `burn_nvfp4::DataParallel` averages them after it"
            );
        });
    }
}

/// Clears the mark on parameters that makes Burn average their gradients within the backward.
struct ClearDistributed;

impl ModuleMapper for ClearDistributed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        // Detaching would keep the mark.
        let tensor = match tensor.gradient_checkpointing_strategy() {
            Some(strategy) if tensor.is_distributed() => {
                let learns = tensor.is_require_grad();
                let plain = tensor.without_autodiff().autodiff();
                let plain = plain.with_gradient_checkpointing_strategy(strategy);
                plain.set_require_grad(learns)
            }
            _ => tensor,
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_core as burn;

    #[cfg(feature = "cpu")]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn_core::tensor::{Distribution, TensorData};
    use burn_nn::{Linear, LinearConfig};

    use super::*;
    #[cfg(feature = "cpu")]
    use crate::{Nvfp4Linear, Nvfp4LinearConfig};

    #[derive(Module, Debug)]
    struct Two {
        first: Linear,
        frozen: Linear,
    }

    fn two(device: &Device) -> Two {
        let layer = || LinearConfig::new(16, 32).init(device);
        Two {
            first: layer(),
            frozen: layer().no_grad(),
        }
    }

    /// Marks every parameter, as burn-train does.
    #[cfg(feature = "cpu")]
    struct Mark;

    #[cfg(feature = "cpu")]
    impl ModuleMapper for Mark {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
        }
    }

    /// The gradients of `model`, all of whose parameters are unmarked in the forward.
    fn weight_gradient(parallel: &DataParallel, model: &Two, x: &Tensor<2>) -> TensorData {
        let (gradients, seen) = parallel.step(model, |model| {
            assert!(!model.first.weight.val().is_distributed());
            assert!(!model.frozen.weight.val().is_require_grad());
            let y = model.first.forward(x.clone()) * model.frozen.forward(x.clone());
            (y.powi_scalar(2).mean(), 7)
        });
        assert_eq!((seen, gradients.len()), (7, 2));
        let gradient: Tensor<2> = gradients.get(model.first.weight.id).unwrap();
        gradient.into_data()
    }

    #[test]
    fn one_rank_has_its_own_gradients() {
        for device in [
            Device::flex().autodiff(),
            Device::flex().autodiff().gradient_checkpointing(),
        ] {
            let model = two(&device);
            let x = Tensor::random([4, 16], Distribution::Default, &device);
            let parallel = DataParallel::new(&[device]).unwrap();
            let gradient = weight_gradient(&parallel, &model, &x);
            assert!(gradient.iter::<f32>().any(|g| g != 0.0));
        }
    }

    /// Flex has no marks.
    #[test]
    #[cfg(feature = "cpu")]
    fn what_is_marked_is_computed_apart() {
        let plain = Device::cpu().autodiff();
        for device in [plain.clone(), plain.gradient_checkpointing()] {
            let model = two(&device);
            let marked = model.clone().map(&mut Mark);
            assert!(marked.first.weight.val().is_distributed());
            let x = Tensor::random([4, 16], Distribution::Default, &device);
            let parallel = DataParallel::new(&[device]).unwrap();
            let [one, other] = [model, marked].map(|model| weight_gradient(&parallel, &model, &x));
            assert_eq!(one, other);
        }
    }

    /// Counts warnings.
    #[cfg(feature = "cpu")]
    struct Warnings(Arc<AtomicUsize>);

    #[cfg(feature = "cpu")]
    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.target() == "burn_nvfp4::parallel::data"
                && *metadata.level() == tracing::Level::WARN
        }

        fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

        fn event(&self, _event: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _span: &tracing::span::Id) {}

        fn exit(&self, _span: &tracing::span::Id) {}
    }

    #[test]
    #[cfg(feature = "cpu")]
    fn a_layer_warns_once_that_burn_averages_its_gradient() {
        let device = Device::cpu().autodiff();
        let plain = Nvfp4LinearConfig::new(16, 16).init(&device);
        let marked = plain.clone().map(&mut Mark);
        let x = Tensor::<2>::zeros([16, 16], &device);
        let count = Arc::new(AtomicUsize::new(0));
        tracing::subscriber::with_default(Warnings(count.clone()), || {
            let warnings = |layer: &Nvfp4Linear| {
                layer.forward(x.clone());
                count.load(Ordering::Relaxed)
            };
            assert_eq!(warnings(&plain), 0);
            let parallel = DataParallel::new(std::slice::from_ref(&device)).unwrap();
            parallel.step(&marked, |layer| {
                assert_eq!(warnings(layer), 0);
                (layer.forward(x.clone()).sum(), ())
            });
            assert_eq!(warnings(&marked), 1);
            assert_eq!(warnings(&marked), 1);
        });
    }

    #[test]
    fn devices_that_burn_does_not_average_over() {
        let device = Device::flex();
        for devices in [vec![], vec![device.clone(), device]] {
            let error = DataParallel::new(&devices).unwrap_err().to_string();
            assert!(error.contains("devices"), "{error}");
        }
    }
}
