//! What ranks do with a tensor together, as data.

use std::fmt;

#[cfg(feature = "cuda")]
use burn_core::tensor::DType;
#[cfg(feature = "cuda")]
use nvfp4_parallel as parallel;
use nvfp4_parallel::{Collective, Reduction};

use super::link::Link;

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
    /// Whether this step runs beside kernels; [`CollectiveOps::nvfp4_join`](super::CollectiveOps)
    /// comes before its result is read.
    pub forks: bool,
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
            forks: false,
        }
    }

    /// `forward` of what has no gradient.
    pub(crate) fn constant(group: Link, forward: Step) -> Self {
        Self::new(group, forward, Step::Identity)
    }

    /// Whether the tensor stays as it is.
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
            forks: false,
        }
    }
}

/// On the device.
#[cfg(feature = "cuda")]
impl Exchange {
    /// Whether a tensor of type `dtype` is exchanged on the device.
    pub(super) fn is_queued(&self, dtype: DType) -> bool {
        self.group.device.is_some() && !self.is_local() && self.forward.is_queued(dtype)
    }
}

#[cfg(not(feature = "cuda"))]
impl Exchange {
    /// No group is connected.
    pub(super) fn is_queued(&self, _dtype: burn_core::tensor::DType) -> bool {
        false
    }
}

#[cfg(feature = "cuda")]
impl Step {
    /// Whether NCCL takes this step for a tensor of type `dtype`.
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
