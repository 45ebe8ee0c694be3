//! Collectives between ranks as differentiable operations: an extension trait of its own.
//!
//! An operation is queued at the same point of the program on all ranks of its group. The backward
//! visits operations in an order that the graph of the model alone decides, so ranks with the same
//! model meet there too.

mod host;

use burn_core as burn;

use std::fmt;
use std::sync::Arc;

use burn_core::backend::{
    Autodiff, Backend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_parallel::{Collective, HostGroup, Reduction};

/// What the ranks of a group do with a tensor each. Parts are those of the first axis, in the order
/// of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing is exchanged.
    Identity,
    /// All ranks get the reduction of their tensors, which have one shape.
    AllReduce(Reduction),
    /// All ranks get the tensors of all, one after the other.
    AllGather,
    /// Rank `r` gets part `r` of the reduction. The first axis is a multiple of the number of ranks.
    ReduceScatter(Reduction),
    /// Rank `r` keeps its part `r`. The first axis is a multiple of the number of ranks.
    Slice,
    /// Rank `r` gets `send[r]` rows of the tensor. Rows that come from each rank stand one after the
    /// other.
    AllToAll {
        /// Rows for each rank.
        send: Vec<usize>,
        /// Rows from each rank.
        receive: Vec<usize>,
    },
    /// All ranks get the tensor of rank `root`. They have tensors of its shape.
    Broadcast {
        /// The rank whose tensor it is.
        root: usize,
    },
}

impl Step {
    /// The shape of the result on each rank of a group of `size` ranks.
    pub(crate) fn shape(&self, mut shape: Vec<usize>, size: usize) -> Vec<usize> {
        match self {
            Self::Identity | Self::AllReduce(_) | Self::Broadcast { .. } => {}
            Self::AllGather => shape[0] *= size,
            Self::ReduceScatter(_) | Self::Slice => shape[0] /= size,
            Self::AllToAll { receive, .. } => shape[0] = receive.iter().sum(),
        }
        shape
    }
}

/// A step of a group, and the step that its gradient takes.
#[derive(Clone)]
pub struct Exchange {
    /// The ranks.
    pub group: Arc<HostGroup>,
    /// What happens to the tensor.
    pub forward: Step,
    /// What happens to its gradient; it undoes the shape of `forward`.
    pub backward: Step,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = (self.group.rank(), self.group.size());
        write!(f, "{:?} of rank {} of {}", self.forward, rank.0, rank.1)
    }
}

impl Exchange {
    fn reversed(self) -> Self {
        Self {
            group: self.group,
            forward: self.backward,
            backward: self.forward,
        }
    }
}

/// Collectives on the primitives of a backend.
///
/// # Panics
/// Each operation does when the group fails: another rank is gone, late, or does something else.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait CollectiveOps: Backend {
    /// [`Exchange::forward`] of `x` (`f32`, `bf16` or `f16`). Sums are those of
    /// [`Collective`]: in the order of ranks, in `f32`, rounded once.
    ///
    /// It runs in the thread that calls it, also where operations are queued for another one: ranks
    /// that share a device would wait for each other in its only thread.
    #[fusion(default)]
    fn nvfp4_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        host::exchange_floats::<Self>(x, &exchange)
    }

    /// [`Exchange::forward`] of integers of any type; only `u32` can be reduced.
    #[fusion(default)]
    fn nvfp4_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        host::exchange_ints::<Self>(x, &exchange)
    }
}

#[cfg(feature = "flex")]
impl CollectiveOps for burn_core::backend::Flex {}

#[cfg(any(feature = "cpu", feature = "cuda"))]
impl CollectiveOps for burn_cubecl::CubeBackend {}

/// An exchange: parents `[x]`, state: that of the gradient.
#[derive(Debug)]
struct ExchangeStep;

impl<B: CollectiveOps> Backward<B, 1> for ExchangeStep {
    type State = Exchange;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let [node] = ops.parents;
        if let Some(node) = node {
            grads.register::<B>(node.id, B::nvfp4_exchange(grad, ops.state));
        }
    }
}

impl<B: CollectiveOps, C: CheckpointStrategy> CollectiveOps for Autodiff<B, C> {
    fn nvfp4_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let out = B::nvfp4_exchange(x, exchange.clone());
        match ExchangeStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(exchange.reversed(), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn nvfp4_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        B::nvfp4_exchange_int(x, exchange)
    }
}
