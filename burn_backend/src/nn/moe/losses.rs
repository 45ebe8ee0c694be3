//! The losses of a router for the tokens of several ranks.

use burn_core::backend::Dispatch;
use burn_core::tensor::{Int, Tensor};
use nvfp4_kernels::reference::{BatchPart, Router};

use crate::ops::routing::RoutingOps;
use crate::parallel::{ProcessGroup, functions};

/// The ranks that have the tokens of a batch.
#[derive(Clone, Debug)]
pub(in crate::nn) struct BatchRanks {
    /// Those with the other tokens of this rank's loss (sequence parallelism).
    pub tensor: ProcessGroup,
    /// Those with losses of their own.
    pub batch: ProcessGroup,
}

impl BatchRanks {
    /// Ranks that have a loss each.
    pub fn new(batch: &ProcessGroup) -> Self {
        Self {
            tensor: ProcessGroup::single(),
            batch: batch.clone(),
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.tensor.size() * self.batch.size()
    }

    /// The choices of each expert on all ranks, given those of this rank.
    pub fn sum_counts(&self, counts: Tensor<1, Int>) -> Tensor<1, Int> {
        sum_counts(sum_counts(counts, &self.tensor), &self.batch)
    }

    /// The sum of all ranks' `x`, given this rank's. Differentiable: the gradient of each is that of
    /// the sum of all losses, of which a tensor group has one.
    fn sum(&self, x: Tensor<1>) -> Tensor<1> {
        functions::all_reduce(functions::reduce(x, &self.tensor), &self.batch)
    }
}

fn sum_counts(counts: Tensor<1, Int>, group: &ProcessGroup) -> Tensor<1, Int> {
    if group.size() == 1 {
        return counts;
    }
    let [experts] = counts.dims();
    let all = group.all_gather_int(counts);
    all.reshape([group.size(), experts])
        .sum_dim(0)
        .reshape([experts])
}

/// The balance loss and the z-loss of the tokens of all `ranks`, given the logits of this
/// rank's tokens (`f32[tokens, experts]`), the number of the tokens of all ranks, `of`, and the
/// choices of each expert on all ranks, `counts` (`i32[experts]`); see
/// [`MoeOutput`](super::MoeOutput).
///
/// Differentiable: the gradient by the logits is that of the sum of what all ranks make of the
/// losses, once of each tensor group.
pub(super) fn batch_losses(
    logits: Tensor<2>,
    (of, counts): (usize, Tensor<1, Int>),
    top_k: usize,
    ranks: &BatchRanks,
) -> [Tensor<1>; 2] {
    let [tokens, experts] = logits.dims();
    let part = BatchPart { tokens, of };
    let router = Router {
        experts,
        top_k,
        normalize: false,
    };
    // Both losses are sums over tokens, once the choices of all ranks are known.
    let (logits, counts) = (logits.into_dispatch(), counts.into_dispatch());
    let losses = Dispatch::nvfp4_router_losses(logits, counts, part, router);
    let losses = ranks.sum(Tensor::from_dispatch(losses));
    [0, 1].map(|loss| losses.clone().narrow(0, loss, 1))
}
