//! Tensors that ranks exchange beside kernels.

use burn_core::backend::Dispatch;
use burn_core::tensor::Tensor;

use super::ProcessGroup;
use super::functions::Steps;
use crate::ops::collective::{CollectiveOps, Exchange, OverlappedExchange};

/// The result of an exchange that has begun. It may be read once the exchange [ends](Self::end).
///
/// The gradient's exchange begins in the backward of the end, and ends in the backward of the
/// beginning. What is made of [`behind`](Self::behind) and given to [`end`](Self::end) runs beside
/// the exchange, forward and backward.
#[derive(Debug)]
#[must_use = "an exchange that has begun has to end"]
pub(crate) struct Pending {
    /// Not to be read while there is an `exchange`.
    x: Tensor<2>,
    /// Where it runs beside kernels.
    exchange: Option<OverlappedExchange>,
}

impl Pending {
    /// Begins an exchange of `x` along its first axis, whose steps forward and backward are `steps`:
    /// beside the kernels that follow if it `overlaps`, and else in line with them. The results have
    /// the same bits.
    pub fn begin(x: Tensor<2>, steps: Steps, group: &ProcessGroup, overlaps: bool) -> Self {
        if group.size() == 1 {
            return Self { x, exchange: None };
        }
        let [forward, backward] = steps.0;
        let exchange = Exchange::new(group.link(), forward, backward);
        let x = x.into_dispatch();
        if !overlaps {
            let x = Tensor::from_dispatch(Dispatch::nvfp4_exchange(x, exchange));
            return Self { x, exchange: None };
        }
        let exchange = OverlappedExchange::new(exchange);
        let x = Dispatch::nvfp4_begin(x, exchange.clone());
        Self {
            x: Tensor::from_dispatch(x),
            exchange: Some(exchange),
        }
    }

    /// `x`, of which something is made beside the exchange: in the backward too.
    pub fn behind(&self, x: Tensor<2>) -> Tensor<2> {
        if self.exchange.is_none() {
            return x;
        }
        let pending = self.x.clone().into_dispatch();
        Tensor::from_dispatch(Dispatch::nvfp4_behind(x.into_dispatch(), pending))
    }

    /// The result, to be read from here on. `beside`, if there is something, was made beside the
    /// exchange: its backward runs beside the exchange of the gradient. It has no gradient of this, so
    /// what is made of the result has to be made of it too.
    pub fn end(self, beside: Option<&Tensor<2>>) -> Tensor<2> {
        let Some(exchange) = self.exchange else {
            return self.x;
        };
        // Nothing lies between the result and itself.
        let beside = beside.unwrap_or(&self.x).clone().into_dispatch();
        let ended = Dispatch::nvfp4_end(self.x.into_dispatch(), beside, exchange);
        Tensor::from_dispatch(ended)
    }
}
