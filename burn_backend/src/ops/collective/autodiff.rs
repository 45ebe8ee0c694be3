//! Collectives that autodiff differentiates.
//!
//! An exchange that runs beside kernels begins, kernels that do not need its result are queued, and
//! it ends. The backward has the mirror image: the gradient's exchange begins where the other
//! ended, and ends where it began. Autodiff goes back level by level, and an operation is one level
//! above the highest of its operands. So the end has what was made beside the exchange for an
//! operand, and that has the result for one, by `behind`: its whole backward lies between the two.
//! The gradient of the result is complete where it begins to travel, as the end alone has the
//! result for an operand that is given a gradient.

use burn_core::backend::{
    Autodiff, AutodiffBackend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::DType;

use super::{CollectiveOps, Exchange, Fork, Link, OverlappedExchange, ended, exchange_beside};

/// An exchange: parents `[x]`, state: that of the forward, and the type of `x`, in which the
/// gradient of a parameter is joined that [may have come](super::ReduceDtype::of_wgrad) in another.
#[derive(Debug)]
struct ExchangeStep;

impl<B: CollectiveOps> Backward<B, 1> for ExchangeStep {
    type State = (Exchange, DType);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [node] = ops.parents;
        let Some(node) = node else { return };
        let (exchange, dtype) = ops.state;
        match exchange.beside {
            Some(id) => {
                let dtype = match exchange.reduce_dtype {
                    Some(_) => dtype,
                    None => grad.dtype(),
                };
                exchange_beside::<B>((id, dtype), grad, exchange.reversed());
            }
            None => grads.register::<B>(node.id, B::nvfp4_exchange(grad, exchange.reversed())),
        }
    }
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
        grads.register::<B>(node.id, B::nvfp4_begin(grad, ops.state.reversed()));
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

impl<B: CollectiveOps, C: CheckpointStrategy> CollectiveOps for Autodiff<B, C> {
    fn nvfp4_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let dtype = x.dtype();
        let out = B::nvfp4_exchange(x, exchange.clone());
        match ExchangeStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((exchange, dtype), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn nvfp4_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        B::nvfp4_exchange_int(x, exchange)
    }

    fn nvfp4_queue_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        Self::nvfp4_exchange(x, exchange)
    }

    fn nvfp4_queue_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        B::nvfp4_queue_exchange_int(x, exchange)
    }

    fn nvfp4_gradient_beside(like: FloatTensor<Self>, id: u64, group: Link) -> FloatTensor<Self> {
        let (like, _) = like.into_parts();
        Self::from_inner(B::nvfp4_gradient_beside(like, id, group))
    }

    fn nvfp4_join(x: FloatTensor<Self>, group: Link, fork: Fork) -> FloatTensor<Self> {
        let (x, _) = x.into_parts();
        Self::from_inner(B::nvfp4_join(x, group, fork))
    }

    fn nvfp4_begin(x: FloatTensor<Self>, exchange: OverlappedExchange) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let pending = B::nvfp4_begin(x, exchange.clone());
        match BeginStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(exchange, pending),
            OpsKind::UnTracked(prep) => prep.finish(pending),
        }
    }

    fn nvfp4_end(
        pending: FloatTensor<Self>,
        beside: FloatTensor<Self>,
        exchange: OverlappedExchange,
    ) -> FloatTensor<Self> {
        let is_tracked = pending.is_tracked();
        let (pending, node) = pending.into_parts();
        let (beside, beside_node) = beside.into_parts();
        let out = B::nvfp4_end(pending, beside, exchange.clone());
        if !is_tracked {
            // Whatever `beside` needs: nothing goes back here.
            return Self::from_inner(out);
        }
        let step = EndStep.prepare::<C>([node, beside_node]);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(exchange, out),
            OpsKind::UnTracked(_) => unreachable!("pending is tracked"),
        }
    }

    fn nvfp4_behind(x: FloatTensor<Self>, pending: FloatTensor<Self>) -> FloatTensor<Self> {
        if !x.is_tracked() || !pending.is_tracked() {
            // No two gradients that would have an order.
            return x;
        }
        let (x, node) = x.into_parts();
        let (_, pending_node) = pending.into_parts();
        let step = BehindStep.prepare::<C>([pending_node, node]);
        step.compute_bound().stateless(x)
    }
}
