//! Mixture of experts under tensor parallelism.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::moe::BatchRanks;
use super::super::{ExpertDispatch, ExpertParallelMoe, MoeOutput, Nvfp4Moe};
use super::{ExpertRanks, ShardedParameter, TensorParallel, TensorParallelSwiGlu};
use crate::functions::or_panic;

/// [`Nvfp4Moe`] under tensor parallelism: whole experts on each rank, and the shared expert with
/// its hidden features sharded.
///
/// With sequence parallelism each rank has different tokens and sends them to the ranks of their
/// experts, as in data parallelism. These are the ranks of the tensor group, or of several tensor
/// groups ([`TensorParallel::with_experts`]). No expert is split, so its GEMMs have the shapes of
/// one device.
///
/// Input and output are `[..., d_model]`, this rank's tokens. The router is replicated; its
/// gradient is summed over the tensor group.
///
/// # Bits
/// Same as [`ExpertParallelMoe`] with the tokens of all ranks, in rank order. The shared expert
/// behaves like a [`TensorParallelSwiGlu`].
#[derive(Module, Debug)]
pub struct TensorParallelMoe {
    /// Router and this rank's experts.
    pub experts: ExpertParallelMoe,
    /// This rank's shard of the shared expert.
    pub shared: Option<TensorParallelSwiGlu>,
}

impl TensorParallelMoe {
    /// Returns this rank's shard of `moe`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Returns an error if tokens are not sharded ([`TensorParallel::with_sequence_parallel`]),
    /// because all ranks would send the same ones, or if the ranks of experts are not whole tensor
    /// groups. Otherwise same as [`ExpertParallelMoe::try_from_moe`] and
    /// [`TensorParallelSwiGlu::from_swiglu`].
    pub fn from_moe(mut moe: Nvfp4Moe, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        if !parallel.sequence_parallel && parallel.group.size() > 1 {
            return Err(Nvfp4Error::value(
                "sequence_parallel",
                "false",
                "true for a mixture of experts, which every rank sends tokens of its own to",
            ));
        }
        let (group, ExpertRanks { on, batch }) = (&parallel.group, &parallel.experts);
        let of_groups = on.size().is_multiple_of(group.size());
        if !of_groups || on.rank() % group.size() != group.rank() {
            return Err(Nvfp4Error::value(
                "experts",
                format!("rank {} of {} ranks", on.rank(), on.size()),
                format!(
                    "tensor groups of {} ranks one after another, of which this one is rank {}",
                    group.size(),
                    group.rank()
                ),
            ));
        }
        let shared = moe.shared.take();
        let shared = shared.map(|shared| TensorParallelSwiGlu::from_swiglu(shared, parallel));
        let ranks = BatchRanks {
            tensor: group.clone(),
            batch: batch.clone(),
        };
        Ok(Self {
            experts: ExpertParallelMoe::try_from_moe(moe, on)?.with_ranks(ranks),
            shared: shared.transpose()?,
        })
    }

    /// Sets the dispatch mode; all ranks must choose the same.
    pub fn with_dispatch(self, dispatch: ExpertDispatch) -> Self {
        Self {
            experts: self.experts.with_dispatch(dispatch),
            ..self
        }
    }

    /// Checks that shard boundaries, of the hidden features of the shared expert and of the
    /// `tokens` of a rank, are multiples of the recipe's block size.
    ///
    /// # Errors
    /// Same as [`TensorParallelSwiGlu::check_parts`].
    pub fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        let mut shared = self.shared.iter();
        shared.try_for_each(|shared| shared.check_parts(tokens))
    }

    /// Returns the sharded parameters, except [those of experts](crate::nn::expert_parameters).
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        let shared = self.shared.iter();
        shared
            .flat_map(TensorParallelSwiGlu::sharded_parameters)
            .collect()
    }

    /// Applies the mixture. All ranks that hold its experts call it together.
    ///
    /// # Errors
    /// Same as [`ExpertParallelMoe::try_forward`] and [`TensorParallelSwiGlu::try_forward`].
    ///
    /// # Panics
    /// If a group fails.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<MoeOutput<D>, Nvfp4Error> {
        let shared = self.shared.as_ref();
        (self.experts).try_forward_with(x, |x| {
            shared.map(|shared| shared.try_forward(x)).transpose()
        })
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> MoeOutput<D> {
        or_panic("TensorParallelMoe::forward", self.try_forward(x))
    }
}
