//! Tensors that are exchanged concurrently with kernels.

use burn_core::backend::Dispatch;
use burn_core::tensor::Tensor;

use super::ProcessGroup;
use super::functions::{self, Steps};
use crate::ops::collective::{CollectiveOps, OverlappedExchange};

/// Result of an exchange that has begun. It must not be read before the exchange [ends](Self::end).
///
/// In the backward, the exchange of the gradient begins at `end` and ends at `begin`. Operations on
/// the result of [`behind`](Self::behind) whose result is passed to [`end`](Self::end) overlap with
/// the exchange, forward and backward.
#[derive(Debug)]
#[must_use = "an exchange that has begun has to end"]
pub(crate) struct Pending {
    /// Must not be read while `exchange` is set.
    x: Tensor<2>,
    /// Set if the exchange runs concurrently with kernels.
    exchange: Option<OverlappedExchange>,
}

impl Pending {
    /// Begins an exchange of `x` along its first axis with the given `steps` for forward and
    /// backward. If `overlaps`, it runs concurrently with the following kernels, otherwise
    /// serialized with them. The results have the same bits.
    pub fn begin(x: Tensor<2>, steps: Steps, group: &ProcessGroup, overlaps: bool) -> Self {
        if !overlaps || group.size() == 1 {
            let x = functions::exchange(x, group, steps);
            return Self { x, exchange: None };
        }
        let exchange = OverlappedExchange::new(steps.exchange(group));
        let x = Dispatch::nvfp4_begin(x.into_dispatch(), exchange.clone());
        Self {
            x: Tensor::from_dispatch(x),
            exchange: Some(exchange),
        }
    }

    /// Returns `x` for operations that overlap with the exchange, in the backward too.
    pub fn behind(&self, x: Tensor<2>) -> Tensor<2> {
        if self.exchange.is_none() {
            return x;
        }
        let pending = self.x.clone().into_dispatch();
        Tensor::from_dispatch(Dispatch::nvfp4_behind(x.into_dispatch(), pending))
    }

    /// Returns the result, which may be read from now on. `beside`, if given, was computed
    /// concurrently with the exchange: its backward overlaps with the exchange of the gradient.
    /// `beside` gets no gradient from here, so whatever uses the result must use `beside` too.
    pub fn end(self, beside: Option<&Tensor<2>>) -> Tensor<2> {
        let Some(exchange) = self.exchange else {
            return self.x;
        };
        // Without a `beside`, the result itself takes its role, so that nothing overlaps.
        let beside = beside.unwrap_or(&self.x).clone().into_dispatch();
        let ended = Dispatch::nvfp4_end(self.x.into_dispatch(), beside, exchange);
        Tensor::from_dispatch(ended)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::Duration;

    use burn_core::tensor::{Device, Distribution};
    use tracing::field::{Field, Visit};
    use tracing::span;

    use super::*;
    use crate::experts::{Router, try_moe_route};

    /// Records the steps of exchanges, and the events of the router.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);

    /// Step of an exchange, or direction of the router.
    #[derive(Default)]
    struct Line(String);

    impl Visit for Line {
        fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}

        fn record_str(&mut self, field: &Field, value: &str) {
            if matches!(field.name(), "step" | "usage") {
                self.0 = value.into();
            }
        }
    }

    impl tracing::Subscriber for Log {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.target().starts_with("burn_nvfp4::")
        }

        fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

        fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            let mut line = Line::default();
            event.record(&mut line);
            self.0.lock().unwrap().push(line.0);
        }

        fn enter(&self, _span: &span::Id) {}

        fn exit(&self, _span: &span::Id) {}
    }

    /// Returns the events of each rank in a forward and a backward of `layer`.
    fn steps(layer: impl Fn(Tensor<2>, &ProcessGroup) -> Tensor<1> + Sync) -> Vec<Vec<String>> {
        // A listener must exist before the first event: otherwise tracing disables the events.
        let _listener = tracing::Dispatch::new(Log::default());
        let (layer, groups) = (&layer, ProcessGroup::loopback(2, Duration::from_secs(60)));
        thread::scope(|scope| {
            let threads = groups.into_iter().map(|group| {
                scope.spawn(move || {
                    let log = Log::default();
                    tracing::subscriber::with_default(log.clone(), || {
                        let device = Device::flex().autodiff();
                        let x = Tensor::<2>::random([6, 4], Distribution::Default, &device);
                        let x = x.require_grad();
                        let gradients = layer(x.clone(), &group).backward();
                        assert_eq!(x.grad(&gradients).unwrap().dims(), [6, 4]);
                    });
                    let lines = log.0.lock().unwrap();
                    lines.clone()
                })
            });
            let threads: Vec<_> = threads.collect();
            let found = threads.into_iter().map(|thread| thread.join().unwrap());
            found.collect()
        })
    }

    /// Routes tokens: weights of two of four experts per token.
    fn routed(x: Tensor<2>) -> Tensor<2> {
        let router = Router {
            experts: 4,
            top_k: 2,
            normalize: true,
        };
        try_moe_route(x, router).unwrap().weights
    }

    fn begin(x: Tensor<2>, group: &ProcessGroup) -> Pending {
        Pending::begin(x, Steps::gather_sum(), group, true)
    }

    /// A branch of the same tensor overlaps even if it has more operations than the exchange.
    #[test]
    fn longer_branches_run_beside_it() {
        let found = steps(|x, group| {
            let pending = begin(x.clone(), group);
            let beside = routed(x.exp());
            pending.end(Some(&beside)).square().sum() + beside.square().sum()
        });
        let expected = [
            "all_gather",
            "forward",
            "join",
            "reduce_scatter",
            "backward",
            "join",
        ];
        assert_eq!(found, [expected; 2]);
    }

    /// An exchange at the end of a long branch: in the backward, a shorter branch runs long after
    /// it unless it is computed from `behind`.
    #[test]
    fn what_is_behind_it_runs_beside_it() {
        let of = |is_behind: bool| {
            steps(move |x, group| {
                let pending = begin(x.clone().exp().sin().cos().exp().sin().cos(), group);
                let beside = match is_behind {
                    true => routed(pending.behind(x)),
                    false => routed(x),
                };
                pending.end(Some(&beside)).square().sum() + beside.square().sum()
            })
        };
        let forward = ["all_gather", "forward", "join"];
        let backward = ["reduce_scatter", "backward", "join"];
        assert_eq!(
            of(true),
            [[forward, backward].concat(), [forward, backward].concat()]
        );
        let late = ["reduce_scatter", "join", "backward"];
        assert_eq!(
            of(false),
            [[forward, late].concat(), [forward, late].concat()]
        );
    }

    /// A branch without a gradient.
    #[test]
    fn nothing_needs_to_run_beside_it() {
        let found = steps(|x, group| {
            let pending = begin(x.clone(), group);
            let beside = pending.behind(x.detach().set_require_grad(false));
            assert!(!beside.is_tracked());
            pending.end(Some(&routed(beside))).square().sum()
        });
        let expected = ["all_gather", "forward", "join", "reduce_scatter", "join"];
        assert_eq!(found, [expected; 2]);
        let found = steps(|x, group| begin(x, group).end(None).square().sum());
        let expected = ["all_gather", "join", "reduce_scatter", "join"];
        assert_eq!(found, [expected; 2]);
    }

    /// A tensor without a gradient stays so next to one with a gradient.
    #[test]
    fn what_is_not_tracked_stays_so() {
        let found = steps(|x, group| {
            let constant = x.clone().detach().set_require_grad(false);
            let ended = begin(constant, group).end(Some(&x));
            assert!(!ended.is_tracked());
            x.square().sum()
        });
        assert_eq!(found, [["all_gather", "join"]; 2]);
    }
}
