//! Detection of Burn's own data parallelism on a weight.

use std::sync::Once;

use burn_core::tensor::Tensor;

/// Warns once, in a training forward with `weight`, if Burn's own collective averages its gradient
/// (`Tensor::set_distributed`, which burn-train's `ExecutionStrategy::ddp` uses). In Burn 0.22.1
/// such training deadlocks sooner or later; docs/src/parallel.md explains why.
pub(crate) fn warn_of_distributed_weight<const D: usize>(weight: &Tensor<D>) {
    static SAID: Once = Once::new();
    if weight.is_distributed() {
        SAID.call_once(|| {
            tracing::warn!(
                "Burn averages gradients within the backward, where training can deadlock; start a \
                 process for each GPU and use `burn_nvfp4::parallel::average_gradients`"
            );
        });
    }
}

/// Flex does not support the marks.
#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn_core::module::{Module, ModuleMapper, Param};
    use burn_core::tensor::{Device, Tensor};

    use crate::{Nvfp4Linear, Nvfp4LinearConfig};

    /// Marks every parameter, as burn-train does.
    struct Mark;

    impl ModuleMapper for Mark {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
        }
    }

    /// Counts warnings.
    struct Warnings(Arc<AtomicUsize>);

    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.target() == "burn_nvfp4::parallel::distributed"
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
    fn a_layer_warns_once_that_burn_averages_its_gradient() {
        let device = nvfp4_test_support::cpu_runtime(Device::cpu).autodiff();
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
            assert_eq!(warnings(&marked), 1);
            assert_eq!(warnings(&marked), 1);
        });
    }
}
