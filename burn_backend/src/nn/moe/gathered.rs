//! Exchange of tokens by an all-gather, and of expert outputs by a reduce-scatter: Megatron's
//! all-gather dispatcher.
//!
//! Each rank has the tokens and choices of all ranks of the group, in rank order, as a single rank
//! with all of them would have. It sorts the choices as that rank does, and keeps the rows of its
//! own experts. No shape depends on the number of those rows, and the host reads nothing.

use burn_core::tensor::{Int, Tensor};
use nvfp4_formats::Nvfp4Error;

use crate::experts::{ChoiceWindow, sort_window};
use crate::parallel::functions::{self, Steps};
use crate::parallel::{Pending, ProcessGroup};

/// Exchange of the choices of one forward.
#[derive(Debug)]
pub(super) struct GatheredChoices {
    group: ProcessGroup,
    /// Choices of this rank's experts, among the choices of all ranks.
    pub window: ChoiceWindow,
    /// Weights of the choices of all ranks, `f32[tokens of all ranks, top_k]`.
    weights: Tensor<2>,
    /// Index of the first expert of this rank.
    pub first: usize,
}

impl GatheredChoices {
    /// Creates the exchange of tokens that chose the experts `chosen` (`i32[tokens, top_k]`) with
    /// these `weights`. `experts` is the number of experts, a multiple of the number of ranks. All
    /// ranks must have the same number of tokens, and call it together.
    ///
    /// # Errors
    /// Returns an error if all ranks together have 2^31 choices or more.
    pub fn try_new(
        chosen: Tensor<2, Int>,
        weights: Tensor<2>,
        experts: usize,
        group: &ProcessGroup,
    ) -> Result<Self, Nvfp4Error> {
        let held = experts / group.size();
        let first = group.rank() * held;
        let chosen = group.all_gather_int(chosen);
        Ok(Self {
            group: group.clone(),
            window: sort_window(chosen, experts, first..first + held)?,
            weights: functions::gather_sum(weights, 0, group),
            first,
        })
    }

    /// Combines the outputs of this rank's experts, `results` (one row per choice of all ranks), to
    /// the outputs of all experts for this rank's tokens. If `overlaps`, the exchange runs
    /// concurrently with kernels. Differentiable.
    ///
    /// Each rank sums the outputs of its experts per token in `f32` and rounds the sum to the dtype
    /// of `results`; the reduce-scatter adds these partial sums.
    pub fn combine(self, results: Tensor<2>, overlaps: bool) -> Pending {
        let parts = self.window.combine(results, self.weights);
        Pending::begin(parts, Steps::reduce_scatter(), &self.group, overlaps)
    }
}

/// Gathers the tokens of all ranks, in rank order. If `overlaps`, the exchange runs concurrently
/// with kernels. Differentiable: the gradient is summed over all ranks.
pub(super) fn gather_tokens(x: Tensor<2>, group: &ProcessGroup, overlaps: bool) -> Pending {
    Pending::begin(x, Steps::gather_sum(), group, overlaps)
}
