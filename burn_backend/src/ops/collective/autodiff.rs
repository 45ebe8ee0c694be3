//! Differentiable collectives.
//!
//! An overlapped exchange begins, kernels that do not need its result are queued, and it ends. The
//! backward is the mirror image: the exchange of the gradient begins where the forward exchange
//! ended, and ends where it began. Autodiff visits operations level by level, and the level of an
//! operation is one above the highest of its operands. Therefore `end` takes the result of the
//! overlapped work as an operand, and that work takes the pending result as an operand, through
//! `behind`: its whole backward lies between the two. The gradient of the result is complete when
//! its exchange begins, because only `end` passes a gradient to the pending result.

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

/// Exchange: parents `[x]`. State: the forward exchange, and the dtype of `x`, in which the
/// gradient of a parameter is joined; that gradient [may have](super::ReduceDtype::of_wgrad)
/// another dtype.
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

/// Beginning of an exchange: parents `[x]`, state: the exchange.
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

/// End of an exchange: parents `[pending, beside]`, state: the exchange.
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

/// Input of overlapped work: parents `[pending, x]`.
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
            // No gradient flows back through this, even if `beside` is tracked.
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
            // There are not two gradients to order.
            return x;
        }
        let (x, node) = x.into_parts();
        let (_, pending_node) = pending.into_parts();
        let step = BehindStep.prepare::<C>([pending_node, node]);
        step.compute_bound().stateless(x)
    }
}
