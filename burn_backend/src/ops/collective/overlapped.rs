//! An exchange that runs beside kernels.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::Exchange;
use super::link::Fork;

/// An exchange that runs beside kernels, and so does that of its gradient.
///
/// Who has it begin has it end. The result is nobody's to read between.
#[derive(Clone, Debug)]
pub struct OverlappedExchange {
    /// The exchange, without the beginning.
    pub(super) exchange: Exchange,
    /// The number that it is joined by, and that of the gradient's.
    numbers: [u64; 2],
}

impl OverlappedExchange {
    /// `exchange`, beside kernels.
    pub(crate) fn new(exchange: Exchange) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let first = NEXT.fetch_add(2, Ordering::Relaxed);
        Self {
            exchange,
            numbers: [first, first + 1],
        }
    }

    /// That of the gradient.
    pub(super) fn reversed(self) -> Self {
        let [own, other] = self.numbers;
        Self {
            exchange: self.exchange.reversed(),
            numbers: [other, own],
        }
    }

    /// What it is to those who join it.
    pub(super) fn fork(&self) -> Fork {
        let [own, _] = self.numbers;
        Fork::Own(own)
    }

    /// The exchange that begins.
    pub(super) fn forked(self) -> Exchange {
        Exchange {
            fork: Some(self.fork()),
            ..self.exchange
        }
    }
}
