//! What ranks do with a tensor together, as data.

use std::fmt;

use burn_core::tensor::{DType, FloatDType, Shape};
#[cfg(feature = "cuda")]
use nvfp4_parallel as parallel;
use nvfp4_parallel::{Collective, Reduction};

use super::link::{Fork, Link};

/// The type in which ranks exchange the gradients of parameters to reduce them: Megatron's
/// `grad_reduce_in_fp32`, and PyTorch FSDP's `reduce_dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceDtype {
    /// That of the gradient.
    #[default]
    Own,
    /// `bf16`, half the bytes of `f32`: each gradient is rounded to nearest even once before it
    /// travels, and the reduction comes back in the gradient's type.
    Bf16,
}

impl ReduceDtype {
    /// The type, if it is not that of the gradient.
    fn float(self) -> Option<FloatDType> {
        match self {
            Self::Own => None,
            Self::Bf16 => Some(FloatDType::BF16),
        }
    }

    /// The type in which wgrad writes the gradient of a weight of type `own`: that in which it
    /// travels, where activations have it too, so that the device has it. A pass over what wgrad
    /// writes would round it to the same.
    pub(crate) fn of_wgrad(self, activations: FloatDType, own: FloatDType) -> FloatDType {
        match self.float() {
            Some(dtype) if dtype == activations => dtype,
            _ => own,
        }
    }
}

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
    /// Rank `r` gets part `r` of the reduction. The first axis is a multiple of the number of
    /// ranks.
    ReduceScatter(Reduction),
    /// Rank `r` keeps its part `r`. The first axis is a multiple of the number of ranks.
    Slice,
    /// Rank `r` gets `send[r]` rows of the tensor. Rows that come from each rank stand one after
    /// the other.
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
    pub group: Link,
    /// What happens to the tensor.
    pub forward: Step,
    /// What happens to its gradient; it undoes the shape of `forward`.
    pub backward: Step,
    /// The id of the parameter whose value this is, if its gradient is to [wait](super::Waiting)
    /// instead of going to it: then its step is taken beside the rest of the backward.
    pub beside: Option<u64>,
    /// How this step runs beside kernels, if it does;
    /// [`CollectiveOps::nvfp4_join`](super::CollectiveOps::nvfp4_join) comes before its result is
    /// read.
    pub fork: Option<Fork>,
    /// The type in which floats that are reduced travel, if it is not their own: each is rounded to
    /// nearest even once, and the reduction comes back in the type of the tensor.
    pub reduce_dtype: Option<FloatDType>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.forward, self.group)
    }
}

impl Exchange {
    /// `forward`, whose gradient takes the step `backward`.
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

    /// The same, whose reductions, in the forward and in the backward, take the type `dtype`.
    pub(crate) fn reducing_in(self, dtype: ReduceDtype) -> Self {
        Self {
            reduce_dtype: dtype.float(),
            ..self
        }
    }

    /// `forward` of what has no gradient.
    pub(crate) fn constant(group: Link, forward: Step) -> Self {
        Self::new(group, forward, Step::Identity)
    }

    /// Returns true if the tensor stays as it is.
    pub(super) fn is_local(&self) -> bool {
        // An exchange with oneself is one too: rows for this rank come back in their order.
        self.group.host.size() == 1 || self.forward == Step::Identity
    }

    /// The exchange of the gradient.
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

    /// Reports to `tracing`, at level trace, that a tensor of this shape is exchanged, in type
    /// `dtype`, and the bytes of it that this rank has before.
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

    /// Reports in the same way that kernels wait from here on for an exchange that ran beside them.
    pub(super) fn report_join(&self) {
        let (rank, ranks) = (self.group.host.rank(), self.group.host.size());
        tracing::trace!(target: "burn_nvfp4::collective", step = "join", rank, ranks);
    }

    /// The type in which floats of type `dtype` travel.
    pub(super) fn travels_in(&self, dtype: DType) -> DType {
        match self.forward {
            Step::AllReduce(_) | Step::ReduceScatter(_) => {
                self.reduce_dtype.map_or(dtype, DType::from)
            }
            _ => dtype,
        }
    }
}

/// On the device.
#[cfg(feature = "cuda")]
impl Exchange {
    /// Returns true if a tensor that travels in type `dtype` is exchanged on the device.
    pub(super) fn is_queued(&self, dtype: DType) -> bool {
        self.group.device.is_some() && !self.is_local() && self.forward.is_queued(dtype)
    }
}

#[cfg(not(feature = "cuda"))]
impl Exchange {
    /// No group is connected.
    pub(super) fn is_queued(&self, _dtype: DType) -> bool {
        false
    }
}

#[cfg(feature = "cuda")]
impl Step {
    /// Returns true if NCCL takes this step for a tensor of type `dtype`.
    fn is_queued(&self, dtype: DType) -> bool {
        match self {
            // A part of one's own tensor travels nowhere; the host copies it as well.
            Self::Identity | Self::Slice => false,
            Self::AllReduce(_) | Self::ReduceScatter(_) => reduced_type(dtype).is_some(),
            Self::AllGather | Self::AllToAll { .. } | Self::Broadcast { .. } => true,
        }
    }
}

/// NCCL's name of a type that is added up, as far as this crate's collectives have it.
#[cfg(feature = "cuda")]
pub(super) fn reduced_type(dtype: DType) -> Option<parallel::DType> {
    match dtype {
        DType::F32 => Some(parallel::DType::F32),
        DType::BF16 => Some(parallel::DType::Bf16),
        DType::U32 => Some(parallel::DType::U32),
        _ => None,
    }
}
