//! Tensor parallelism: layers whose weights are sharded over the ranks of a group.
//!
//! [`ColumnParallelLinear`] shards the output features, [`RowParallelLinear`] the input features.
//! Between the two, activations are sharded too and need no communication: such a pair communicates
//! once before the first and once after the second layer. With sequence parallelism the activations
//! before and after the pair, on which norms and residual additions operate, are sharded by tokens.
//!
//! [`TensorParallelSwiGlu`] and [`TensorParallelAttention`] are such pairs. [`TensorParallelBlock`]
//! has one of each, or a [`TensorParallelMoe`] as its feed-forward, which has whole experts on each
//! rank. [`VocabParallelEmbedding`] and [`VocabParallelHead`] are the first and last layers of a
//! language model; [`SequenceParallelRmsNorm`] is the norm between layers.
//! [`TensorParallelLayerNormLinear`] and [`TensorParallelLayerNormMlp`] have the norm before their
//! layers.
//!
//! Every rank must build its layers from its own identical copy of the unsharded layers
//! ([`Nvfp4Linear`] and others): clones of a module of another rank would share its state and its
//! autodiff nodes. All ranks must call the same layers in the same order.
//!
//! # Bits
//! By default, ranks quantize with the amax of the group, and each block draws the random bits of
//! its position in the unsharded operand. Every quantized operand therefore has the bits of one
//! device, as do the GEMMs whose K dimension is not sharded. GEMMs with a sharded K dimension (the
//! output of a row-parallel layer, the input gradient of a column-parallel one) are summed over the
//! ranks, in the dtype of the activations and in rank order, which differs from the order on one
//! device. [`TensorParallel::with_deterministic`] gathers their quantized operands instead, so that
//! all outputs and gradients have the bits of one device.
//!
//! [`Nvfp4Linear`]: crate::Nvfp4Linear

mod attention;
mod block;
mod embedding;
mod feed_forward;
mod head;
mod layer_norm;
mod linear;
mod moe;
mod norm;

use burn_core::module::Param;
use burn_core::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::parallel::{ProcessGroup, functions};
use crate::whole::whole_dims;

pub use attention::TensorParallelAttention;
pub use block::TensorParallelBlock;
pub use embedding::VocabParallelEmbedding;
pub use feed_forward::TensorParallelSwiGlu;
pub use head::VocabParallelHead;
pub use layer_norm::{TensorParallelLayerNormLinear, TensorParallelLayerNormMlp};
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use moe::TensorParallelMoe;
pub use norm::SequenceParallelRmsNorm;

/// Tensor-parallel configuration: ranks and sharding modes.
#[derive(Debug, Clone)]
pub struct TensorParallel {
    pub(super) group: ProcessGroup,
    pub(super) sequence_parallel: bool,
    pub(super) deterministic: bool,
    pub(super) experts: ExpertRanks,
}

/// Ranks that share the experts of mixtures.
#[derive(Debug, Clone)]
pub(super) struct ExpertRanks {
    /// Ranks that the experts are sharded over: whole tensor groups.
    on: ProcessGroup,
    /// Ranks with the other shards of the batch.
    batch: ProcessGroup,
}

impl TensorParallel {
    /// Shards over the ranks of `group`, without sequence parallelism and with summed partial
    /// results.
    pub fn new(group: ProcessGroup) -> Self {
        Self {
            experts: ExpertRanks {
                on: group.clone(),
                batch: ProcessGroup::single(),
            },
            group,
            sequence_parallel: false,
            deterministic: false,
        }
    }

    /// Sets whether activations outside of the sharded layers are sharded by tokens.
    ///
    /// All ranks must have the same number of tokens: a multiple of 16, or of 32 in an MX format
    /// and of 128 in MS-EDEN.
    pub fn with_sequence_parallel(self, sequence_parallel: bool) -> Self {
        Self {
            sequence_parallel,
            ..self
        }
    }

    /// Sets whether all outputs and gradients have the bits of one device.
    ///
    /// If set, every rank computes the whole GEMM if its K dimension is sharded: use it to check a
    /// run, not to speed one up.
    pub fn with_deterministic(self, deterministic: bool) -> Self {
        Self {
            deterministic,
            ..self
        }
    }

    /// Sets the ranks that the experts of mixtures are `on`, with an equal share each: the ranks of
    /// whole tensor groups, in order, including this rank's group. The default is this rank's
    /// tensor group.
    ///
    /// `batch` are the ranks with the same weight shards as this one and other shards of the batch.
    /// The router losses cover the tokens of all of their tensor groups; by default only those of
    /// this rank's group.
    pub fn with_experts(self, on: &ProcessGroup, batch: &ProcessGroup) -> Self {
        let (on, batch) = (on.clone(), batch.clone());
        Self {
            experts: ExpertRanks { on, batch },
            ..self
        }
    }

    /// Returns the ranks of the tensor group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns true if activations outside of the sharded layers are sharded by tokens.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// Returns the value of a parameter that all ranks have, and use on their tokens. Its gradient
    /// is that of all ranks' tokens.
    fn replicated(&self, value: Tensor<1>) -> Tensor<1> {
        match self.sequence_parallel {
            true => functions::copy_parameter(value, &self.group),
            false => value,
        }
    }
}

/// Sharding of a parameter over ranks: each rank has an equal share of each segment of one axis. A
/// rank's shares of all segments are contiguous.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardedParameter {
    /// Unsharded shape.
    pub shape: Vec<usize>,
    /// Sharded axis.
    pub axis: usize,
    /// Lengths of the unsharded segments.
    pub segments: Vec<usize>,
}

impl ShardedParameter {
    /// Sharding of `param`, whose segments have these lengths, over `ranks` ranks.
    fn of<const D: usize>(
        param: &Param<Tensor<D>>,
        axis: usize,
        segments: &[usize],
        ranks: usize,
    ) -> Self {
        let mut shape = whole_dims(param).to_vec();
        shape[axis] *= ranks;
        Self {
            shape,
            axis,
            segments: segments.iter().map(|len| len * ranks).collect(),
        }
    }

    /// Sharding of `param` as one segment along `axis`.
    fn of_one<const D: usize>(param: &Param<Tensor<D>>, axis: usize, ranks: usize) -> Self {
        let len = whole_dims(param)[axis];
        Self::of(param, axis, &[len], ranks)
    }
}

/// Returns a parameter with the id of `param` and another value.
fn replaced<const D: usize>(
    param: &Param<Tensor<D>>,
    value: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    // Detaching alone keeps the gradient requirement of a leaf.
    let old = param.val().detach().set_require_grad(false);
    let mut made = Param::from_tensor(value(old));
    made.id = param.id;
    made
}
