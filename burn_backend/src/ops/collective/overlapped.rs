//! Exchanges that run beside kernels, forward and backward.
//!
//! In the forward an exchange begins, kernels that do not need its result are queued, and it ends.
//! The backward has the mirror image: the gradient's exchange begins where the other ended, and ends
//! where it began. Autodiff goes back level by level, and an operation is one level above the
//! highest of its operands. So the end has what was made beside the exchange for an operand, and
//! that has the result for one, by `behind`: its whole backward lies between the two.
//!
//! Who has one begin has it end. The result is nobody's to read between, and nothing is added to its
//! gradient there, as the end alone has it for an operand.

use std::sync::atomic::{AtomicU64, Ordering};

use burn_core::backend::{
    Autodiff, AutodiffBackend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::exchange::{Exchange, Fork};
use super::{CollectiveOps, handed_over};

/// An exchange that runs beside kernels, and so does that of its gradient.
#[derive(Clone, Debug)]
pub struct OverlappedExchange {
    exchange: Exchange,
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
    fn reversed(self) -> Self {
        let [own, other] = self.numbers;
        Self {
            exchange: self.exchange.reversed(),
            numbers: [other, own],
        }
    }

    fn fork(&self) -> Fork {
        let [own, _] = self.numbers;
        Fork::Own(own)
    }
}

/// The result of an exchange of `x` that begins.
pub(super) fn begun<B: CollectiveOps>(
    x: FloatTensor<B>,
    overlapped: &OverlappedExchange,
) -> FloatTensor<B> {
    let exchange = Exchange {
        fork: Some(overlapped.fork()),
        ..overlapped.exchange.clone()
    };
    B::nvfp4_exchange(x, exchange)
}

/// `pending`, the result of an exchange that has begun, behind it.
pub(super) fn ended<B: CollectiveOps>(
    pending: FloatTensor<B>,
    overlapped: &OverlappedExchange,
) -> FloatTensor<B> {
    let exchange = &overlapped.exchange;
    exchange.report_join();
    if !exchange.is_queued(pending.dtype()) {
        // The host has waited for it.
        return pending;
    }
    // What is queued beside it, and held back, comes first: it is not to wait.
    let pending = handed_over::<B, _>(pending);
    B::nvfp4_join(pending, exchange.group.clone(), overlapped.fork())
}

/// The beginning of an exchange: parents `[x]`, state: the exchange.
#[derive(Debug)]
struct BeginStep;

impl<B: CollectiveOps> Backward<B, 1> for BeginStep {
    type State = OverlappedExchange;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let pending = grads.consume::<B>(&ops.node);
        let [node] = ops.parents;
        let grad = ended::<B>(pending, &ops.state.reversed());
        if let Some(node) = node {
            grads.register::<B>(node.id, grad);
        }
    }
}

/// Its end: parents `[pending, beside]`, state: the exchange.
#[derive(Debug)]
struct EndStep;

impl<B: CollectiveOps> Backward<B, 2> for EndStep {
    type State = OverlappedExchange;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [node, _] = ops.parents;
        let Some(node) = node else { return };
        grads.register::<B>(node.id, begun::<B>(grad, &ops.state.reversed()));
    }
}

/// What is made beside it: parents `[pending, x]`.
#[derive(Debug)]
struct BehindStep;

impl<B: CollectiveOps> Backward<B, 2> for BehindStep {
    type State = ();

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [_, node] = ops.parents;
        if let Some(node) = node {
            grads.register::<B>(node.id, grad);
        }
    }
}

/// [`CollectiveOps::nvfp4_begin`] of `Autodiff`.
pub(super) fn begin<B: CollectiveOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    exchange: OverlappedExchange,
) -> FloatTensor<Autodiff<B, C>> {
    let (x, node) = x.into_parts();
    let pending = B::nvfp4_begin(x, exchange.clone());
    match BeginStep.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(exchange, pending),
        OpsKind::UnTracked(prep) => prep.finish(pending),
    }
}

/// [`CollectiveOps::nvfp4_end`] of `Autodiff`.
pub(super) fn end<B: CollectiveOps, C: CheckpointStrategy>(
    pending: FloatTensor<Autodiff<B, C>>,
    beside: FloatTensor<Autodiff<B, C>>,
    exchange: OverlappedExchange,
) -> FloatTensor<Autodiff<B, C>> {
    let is_tracked = pending.is_tracked();
    let (pending, node) = pending.into_parts();
    let (beside, beside_node) = beside.into_parts();
    let out = B::nvfp4_end(pending, beside, exchange.clone());
    if !is_tracked {
        // Whatever `beside` needs: nothing goes back here.
        return Autodiff::<B, C>::from_inner(out);
    }
    let step = EndStep.prepare::<C>([node, beside_node]);
    match step.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(exchange, out),
        OpsKind::UnTracked(_) => unreachable!("pending is tracked"),
    }
}

/// [`CollectiveOps::nvfp4_behind`] of `Autodiff`.
pub(super) fn behind<B: CollectiveOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    pending: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    if !x.is_tracked() || !pending.is_tracked() {
        // No two gradients that would have an order.
        return x;
    }
    let (x, node) = x.into_parts();
    let (_, pending_node) = pending.into_parts();
    let step = BehindStep.prepare::<C>([pending_node, node]);
    step.compute_bound().stateless(x)
}
