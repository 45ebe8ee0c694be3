//! Router losses for the tokens of several ranks.

use burn_core::backend::Dispatch;
use burn_core::tensor::{Int, Tensor};
use nvfp4_formats::reference::{BatchPart, Router};

use crate::ops::routing::RoutingOps;
use crate::parallel::{ProcessGroup, functions};

/// Ranks that share the tokens of a batch.
#[derive(Clone, Debug)]
pub(in crate::nn) struct BatchRanks {
    /// Ranks with the other tokens of this rank's loss (sequence parallelism).
    pub tensor: ProcessGroup,
    /// Ranks that each compute a loss.
    pub batch: ProcessGroup,
}

impl BatchRanks {
    /// Creates the group of ranks that each compute a loss.
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

    /// Sums the choices per expert over all ranks.
    pub fn sum_counts(&self, counts: Tensor<1, Int>) -> Tensor<1, Int> {
        sum_counts(sum_counts(counts, &self.tensor), &self.batch)
    }

    /// Sums `x` over all ranks. Differentiable: the gradient of each rank is that of the sum of all
    /// losses, counting one loss per tensor group.
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

/// Computes the balance loss and the z-loss of the tokens of all `ranks`. `logits` are those of
/// this rank's tokens (`f32[tokens, experts]`), `of` is the number of tokens of all ranks, and
/// `counts` are the choices per expert on all ranks (`i32[experts]`); see
/// [`MoeOutput`](super::MoeOutput).
///
/// Differentiable: the gradient by the logits is that of the sum of the final losses of all ranks,
/// counted once per tensor group.
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
    // Both losses are sums over tokens once the choices of all ranks are known.
    let (logits, counts) = (logits.into_dispatch(), counts.into_dispatch());
    let losses = Dispatch::nvfp4_router_losses(logits, counts, part, router);
    let losses = ranks.sum(Tensor::from_dispatch(losses));
    [0, 1].map(|loss| losses.clone().narrow(0, loss, 1))
}
