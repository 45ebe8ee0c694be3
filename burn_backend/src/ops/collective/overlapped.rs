//! Exchanges that overlap with kernels.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::Exchange;
use super::link::Fork;

/// Exchange that overlaps with kernels, in the forward and in the backward.
///
/// The same owner begins and ends it. The result must not be read in between.
#[derive(Clone, Debug)]
pub struct OverlappedExchange {
    /// Exchange, without its beginning.
    pub(super) exchange: Exchange,
    /// Keys for joining it and the exchange of its gradient.
    numbers: [u64; 2],
}

impl OverlappedExchange {
    /// Makes `exchange` overlap with kernels.
    pub(crate) fn new(exchange: Exchange) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let first = NEXT.fetch_add(2, Ordering::Relaxed);
        Self {
            exchange,
            numbers: [first, first + 1],
        }
    }

    /// Returns the exchange of the gradient.
    pub(super) fn reversed(self) -> Self {
        let [own, other] = self.numbers;
        Self {
            exchange: self.exchange.reversed(),
            numbers: [other, own],
        }
    }

    /// Returns the key for joining it.
    pub(super) fn fork(&self) -> Fork {
        let [own, _] = self.numbers;
        Fork::Own(own)
    }

    /// Returns the exchange to begin.
    pub(super) fn forked(self) -> Exchange {
        Exchange {
            fork: Some(self.fork()),
            ..self.exchange
        }
    }
}
