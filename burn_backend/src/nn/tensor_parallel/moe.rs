//! The mixture of experts of a rank.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_kernels::Nvfp4Error;

use super::super::moe::BatchRanks;
use super::super::{ExpertDispatch, ExpertParallelMoe, MoeOutput, Nvfp4Moe};
use super::{ExpertRanks, ShardedParameter, TensorParallel, TensorParallelSwiGlu};
use crate::functions::or_panic;

/// [`Nvfp4Moe`] between layers that are sharded: whole experts on each rank, and a part of the
/// hidden features of the expert of every token.
///
/// With sequence parallelism each rank has tokens of its own, and sends them to the ranks of their
/// experts, as ranks of data parallelism do. These are the ranks of the tensor group, or of several
/// of them ([`TensorParallel::with_experts`]). So no expert is cut, and its GEMMs have the shapes of
/// one device.
///
/// Input and output are `[..., d_model]`, this rank's tokens. The router is on all ranks; its
/// gradient is the sum over the tensor group.
///
/// # Bits
/// As [`ExpertParallelMoe`] with the tokens of all ranks, rank after rank. The shared expert is
/// that of a [`TensorParallelSwiGlu`].
#[derive(Module, Debug)]
pub struct TensorParallelMoe {
    /// The router and this rank's experts.
    pub experts: ExpertParallelMoe,
    /// This rank's part of the expert of every token.
    pub shared: Option<TensorParallelSwiGlu>,
}

impl TensorParallelMoe {
    /// This rank's part of `moe`, of which all ranks have the same, state included.
    ///
    /// # Errors
    /// Returns an error if tokens are not sharded ([`TensorParallel::with_sequence_parallel`]): all
    /// ranks would send the same ones. When the ranks of experts are not those of whole tensor
    /// groups. As [`ExpertParallelMoe::try_from_moe`] and [`TensorParallelSwiGlu::from_swiglu`].
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

    /// The same mixture, whose tokens travel as `dispatch` says; all ranks choose the same.
    pub fn with_dispatch(self, dispatch: ExpertDispatch) -> Self {
        Self {
            experts: self.experts.with_dispatch(dispatch),
            ..self
        }
    }

    /// Fail unless the recipe's blocks end where the parts of ranks do, of the hidden features of
    /// the shared expert and of `tokens` of a rank.
    ///
    /// # Errors
    /// As there.
    pub fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        let mut shared = self.shared.iter();
        shared.try_for_each(|shared| shared.check_parts(tokens))
    }

    /// The parameters of which each rank has a part, but for [those of
    /// experts](crate::nn::expert_parameters).
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        let shared = self.shared.iter();
        shared
            .flat_map(TensorParallelSwiGlu::sharded_parameters)
            .collect()
    }

    /// Applies the mixture. All ranks that its experts are on call it together.
    ///
    /// # Errors
    /// As [`ExpertParallelMoe::try_forward`] and [`TensorParallelSwiGlu::try_forward`].
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
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> MoeOutput<D> {
        or_panic("TensorParallelMoe::forward", self.try_forward(x))
    }
}
