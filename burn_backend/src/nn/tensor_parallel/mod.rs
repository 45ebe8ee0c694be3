//! Layers whose weights are sharded over the ranks of a group.
//!
//! [`ColumnParallelLinear`] has a part of the output features on each rank, [`RowParallelLinear`] a
//! part of the input features. Between the two, activations are sharded too, and nothing is
//! exchanged: a block of a transformer exchanges once in front of the first and once behind the
//! second. With sequence parallelism the activations before and behind that pair, on which norms
//! and residuals work, are sharded by tokens.
//!
//! [`TensorParallelSwiGlu`] and [`TensorParallelAttention`] are such pairs, and
//! [`TensorParallelBlock`] has one of each, or a [`TensorParallelMoe`] in place of the former: whole
//! experts on each rank. [`VocabParallelEmbedding`] and [`VocabParallelHead`] are
//! the ends of a language model, and [`SequenceParallelRmsNorm`] stands between them.
//!
//! Every rank makes its layers itself, of the same layers of one device ([`Nvfp4Linear`] and
//! others): clones of a module of another rank would share its state, and its nodes in autodiff.
//! All ranks call the same layers in the same order.
//!
//! # Bits
//! Ranks quantize with the amax of the group, and each block draws the random bits of its place in
//! the operand of one device. So every quantized operand has the bits of one device, as have the
//! GEMMs whose contraction is not sharded. Those whose contraction is sharded (the output of a
//! row-parallel layer, the gradient of the input of a column-parallel one) are added over the
//! ranks, in the type of the activations, in the order of ranks: in another order than one device
//! does. [`TensorParallel::with_deterministic`] gathers their quantized operands instead, so that
//! all outputs and gradients have the bits of one device.
//!
//! [`Nvfp4Linear`]: crate::Nvfp4Linear

mod attention;
mod block;
mod embedding;
mod feed_forward;
mod head;
mod linear;
mod moe;
mod norm;

use burn_core::module::Param;
use burn_core::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::parallel::{ProcessGroup, whole_dims};

pub use attention::TensorParallelAttention;
pub use block::TensorParallelBlock;
pub use embedding::VocabParallelEmbedding;
pub use feed_forward::TensorParallelSwiGlu;
pub use head::VocabParallelHead;
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use moe::TensorParallelMoe;
pub use norm::SequenceParallelRmsNorm;

/// Whose amax an operand that is sharded is quantized with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShardAmax {
    /// That of all ranks: the bits of one device.
    #[default]
    Group,
    /// That of the rank's own part, as in TransformerEngine; operands whose tokens are sharded,
    /// which are gathered, still have that of all ranks.
    Local,
}

/// How layers are sharded, and over which ranks.
#[derive(Debug, Clone)]
pub struct TensorParallel {
    pub(super) group: ProcessGroup,
    pub(super) sequence_parallel: bool,
    pub(super) amax: ShardAmax,
    pub(super) deterministic: bool,
    pub(super) experts: ExpertRanks,
}

/// The ranks that share the experts of mixtures.
#[derive(Debug, Clone)]
pub(super) struct ExpertRanks {
    /// With parts of the experts: whole tensor groups.
    on: ProcessGroup,
    /// With other parts of the batch.
    batch: ProcessGroup,
}

impl TensorParallel {
    /// Over the ranks of `group`; without sequence parallelism, with the amax of the group, adding
    /// partial sums.
    pub fn new(group: ProcessGroup) -> Self {
        Self {
            experts: ExpertRanks {
                on: group.clone(),
                batch: ProcessGroup::single(),
            },
            group,
            sequence_parallel: false,
            amax: ShardAmax::Group,
            deterministic: false,
        }
    }

    /// Returns true if activations outside of the sharded layers are sharded by tokens.
    ///
    /// Ranks have equally many tokens: a multiple of 16, or of 32 in an MX format and of 128 in
    /// MS-EDEN.
    pub fn with_sequence_parallel(self, sequence_parallel: bool) -> Self {
        Self {
            sequence_parallel,
            ..self
        }
    }

    /// Whose amax sharded operands are quantized with; the deterministic mode always takes that of
    /// the group.
    pub fn with_amax(self, amax: ShardAmax) -> Self {
        Self { amax, ..self }
    }

    /// Returns true if all outputs and gradients have the bits of one device.
    ///
    /// Every rank then computes the GEMMs whose contraction is sharded as a whole: use it to check
    /// a run, not to make one faster.
    pub fn with_deterministic(self, deterministic: bool) -> Self {
        Self {
            deterministic,
            ..self
        }
    }

    /// Which ranks the experts of mixtures are `on`, each with an equal part of them: the ranks of
    /// tensor groups, of which this one is among them, one group after another. By default those of
    /// the one group.
    ///
    /// `batch` are the ranks with the same parts of matrices as this one and other parts of the
    /// batch. The losses of routers are of the tokens of all of their tensor groups; by default of
    /// this one's.
    pub fn with_experts(self, on: &ProcessGroup, batch: &ProcessGroup) -> Self {
        let (on, batch) = (on.clone(), batch.clone());
        Self {
            experts: ExpertRanks { on, batch },
            ..self
        }
    }

    /// The ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns true if activations outside of the sharded layers are sharded by tokens.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }
}

/// The part of a parameter that each rank has: an equal part of each segment of one axis. The parts
/// of all segments follow each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardedParameter {
    /// The shape on one device.
    pub shape: Vec<usize>,
    /// The axis that is sharded.
    pub axis: usize,
    /// The lengths of its segments on one device.
    pub segments: Vec<usize>,
}

impl ShardedParameter {
    /// Of `param`, of which each of `ranks` ranks has a part: of each of its segments of these
    /// lengths.
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

    /// Of `param`, which is one segment along `axis`.
    fn of_one<const D: usize>(param: &Param<Tensor<D>>, axis: usize, ranks: usize) -> Self {
        let len = whole_dims(param)[axis];
        Self::of(param, axis, &[len], ranks)
    }
}

/// A parameter with the id of `param` and another value.
fn replaced<const D: usize>(
    param: &Param<Tensor<D>>,
    value: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    // Detaching alone keeps the requirement of a leaf.
    let old = param.val().detach().set_require_grad(false);
    let mut made = Param::from_tensor(value(old));
    made.id = param.id;
    made
}
