//! Collective operations on a tensor, as data.

use std::fmt;

use burn_core::tensor::{DType, FloatDType, Shape};
#[cfg(feature = "cuda")]
use nvfp4_parallel as parallel;
use nvfp4_parallel::{Collective, Reduction};

use super::link::{Fork, Link};

/// Dtype in which ranks exchange the gradients of parameters for reduction: Megatron's
/// `grad_reduce_in_fp32`, and PyTorch FSDP's `reduce_dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceDtype {
    /// Dtype of the gradient.
    #[default]
    Own,
    /// `bf16`, half the bytes of `f32`: each gradient is rounded to nearest even once before the
    /// exchange, and the result is converted back to the gradient's dtype.
    Bf16,
}

impl ReduceDtype {
    /// Returns the dtype, if it differs from that of the gradient.
    fn float(self) -> Option<FloatDType> {
        match self {
            Self::Own => None,
            Self::Bf16 => Some(FloatDType::BF16),
        }
    }

    /// Returns the dtype in which wgrad writes the gradient of a weight of dtype `own`: the dtype
    /// of the exchange, if activations have it too, because then the device supports it. A separate
    /// pass over the output of wgrad would round to the same values.
    pub(crate) fn of_wgrad(self, activations: FloatDType, own: FloatDType) -> FloatDType {
        match self.float() {
            Some(dtype) if dtype == activations => dtype,
            _ => own,
        }
    }
}

/// Collective operation of the ranks of a group. Shards are along the first axis, in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// No exchange.
    Identity,
    /// All-reduce of tensors of one shape.
    AllReduce(Reduction),
    /// All-gather: all ranks get the concatenation of all tensors.
    AllGather,
    /// Reduce-scatter: rank `r` gets shard `r` of the reduction. The first axis must be a multiple
    /// of the number of ranks.
    ReduceScatter(Reduction),
    /// Rank `r` keeps its shard `r`. The first axis must be a multiple of the number of ranks.
    Slice,
    /// All-to-all: rank `r` gets `send[r]` rows of the tensor. The received rows are concatenated
    /// in rank order.
    AllToAll {
        /// Number of rows to each rank.
        send: Vec<usize>,
        /// Number of rows from each rank.
        receive: Vec<usize>,
    },
    /// Broadcast: all ranks get the tensor of rank `root`. The input must have its shape on all
    /// ranks.
    Broadcast {
        /// Rank whose tensor is broadcast.
        root: usize,
    },
}

impl Step {
    /// Returns the shape of the result on each rank of a group of `size` ranks.
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

/// Step of a group, with the step for its gradient.
#[derive(Clone)]
pub struct Exchange {
    /// Ranks of the group.
    pub group: Link,
    /// Operation on the tensor.
    pub forward: Step,
    /// Operation on the gradient; it inverts the shape change of `forward`.
    pub backward: Step,
    /// Id of the parameter whose value this is, if its gradient is to [wait](super::Waiting)
    /// instead of being passed on: its step then overlaps with the rest of the backward.
    pub beside: Option<u64>,
    /// Overlap of this step with kernels, if any.
    /// [`CollectiveOps::nvfp4_join`](super::CollectiveOps::nvfp4_join) must be called before its
    /// result is read.
    pub fork: Option<Fork>,
    /// Dtype in which reduced floats are exchanged, if it differs from that of the tensor: each is
    /// rounded to nearest even once, and the result is converted back to the dtype of the tensor.
    pub reduce_dtype: Option<FloatDType>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.forward, self.group)
    }
}

impl Exchange {
    /// Creates the exchange `forward`, whose gradient takes the step `backward`.
    pub(crate) fn new(group: Link, forward: Step, backward: Step) -> Self {
        Self {
            group,
            forward,
            backward,
            beside: None,
            fork: None,
            reduce_dtype: None,
        }
    }

    /// Sets the dtype of the reductions in forward and backward.
    pub(crate) fn reducing_in(self, dtype: ReduceDtype) -> Self {
        Self {
            reduce_dtype: dtype.float(),
            ..self
        }
    }

    /// Creates the exchange `forward` of a tensor without a gradient.
    pub(crate) fn constant(group: Link, forward: Step) -> Self {
        Self::new(group, forward, Step::Identity)
    }

    /// Returns true if the tensor does not change.
    pub(super) fn is_local(&self) -> bool {
        // An all-to-all with one rank is local too: its rows are returned in their order.
        self.group.host.size() == 1 || self.forward == Step::Identity
    }

    /// Returns the exchange of the gradient.
    pub(super) fn reversed(self) -> Self {
        Self {
            group: self.group,
            forward: self.backward,
            backward: self.forward,
            beside: None,
            fork: None,
            reduce_dtype: self.reduce_dtype,
        }
    }

    /// Reports to `tracing`, at level trace, that a tensor of this shape is exchanged in dtype
    /// `dtype`, with the bytes of this rank's input.
    pub(super) fn report(&self, dtype: DType, shape: &Shape) {
        if self.is_local() {
            return;
        }
        let step = match &self.forward {
            Step::Identity => "identity",
            Step::AllReduce(_) => "all_reduce",
            Step::AllGather => "all_gather",
            Step::ReduceScatter(_) => "reduce_scatter",
            Step::Slice => "slice",
            Step::AllToAll { .. } => "all_to_all",
            Step::Broadcast { .. } => "broadcast",
        };
        let bytes = shape.num_elements() * dtype.size();
        let (rank, ranks) = (self.group.host.rank(), self.group.host.size());
        tracing::trace!(
            target: "burn_nvfp4::collective",
            step, rank, ranks, ?dtype, bytes, forks = self.fork.is_some()
        );
    }

    /// Reports to `tracing` that later kernels wait for an overlapped exchange.
    pub(super) fn report_join(&self) {
        let (rank, ranks) = (self.group.host.rank(), self.group.host.size());
        tracing::trace!(target: "burn_nvfp4::collective", step = "join", rank, ranks);
    }

    /// Returns the dtype in which floats of dtype `dtype` are exchanged.
    pub(super) fn travels_in(&self, dtype: DType) -> DType {
        match self.forward {
            Step::AllReduce(_) | Step::ReduceScatter(_) => {
                self.reduce_dtype.map_or(dtype, DType::from)
            }
            _ => dtype,
        }
    }
}

/// Exchanges on the device.
#[cfg(feature = "cuda")]
impl Exchange {
    /// Returns true if a tensor that is exchanged in dtype `dtype` is exchanged on the device.
    pub(super) fn is_queued(&self, dtype: DType) -> bool {
        self.group.device.is_some() && !self.is_local() && self.forward.is_queued(dtype)
    }
}

#[cfg(not(feature = "cuda"))]
impl Exchange {
    /// Returns false: no group is connected.
    pub(super) fn is_queued(&self, _dtype: DType) -> bool {
        false
    }
}

#[cfg(feature = "cuda")]
impl Step {
    /// Returns true if NCCL supports this step for a tensor of dtype `dtype`.
    fn is_queued(&self, dtype: DType) -> bool {
        match self {
            // A shard of the rank's own tensor needs no exchange; the host copies it as well.
            Self::Identity | Self::Slice => false,
            Self::AllReduce(_) | Self::ReduceScatter(_) => reduced_type(dtype).is_some(),
            Self::AllGather | Self::AllToAll { .. } | Self::Broadcast { .. } => true,
        }
    }
}

/// Returns NCCL's name of a dtype that can be reduced, among those of this crate's collectives.
#[cfg(feature = "cuda")]
pub(super) fn reduced_type(dtype: DType) -> Option<parallel::DType> {
    match dtype {
        DType::F32 => Some(parallel::DType::F32),
        DType::BF16 => Some(parallel::DType::Bf16),
        DType::U32 => Some(parallel::DType::U32),
        _ => None,
    }
}
