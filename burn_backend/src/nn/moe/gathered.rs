//! The exchange of tokens by an all-gather, and of what experts make of them by a reduce-scatter:
//! Megatron's all-gather dispatcher.
//!
//! Each rank has the tokens and the choices of all ranks of the group, rank after rank, as one rank
//! with all of them has. It sorts the choices as that rank does, and keeps the rows of its own
//! experts: no shape depends on how many they are, and the host reads nothing.

use burn_core::tensor::{Int, Tensor};
use nvfp4_kernels::Nvfp4Error;

use crate::experts::{ChoiceWindow, sort_window};
use crate::parallel::functions::{self, Steps};
use crate::parallel::{Pending, ProcessGroup};

/// The exchange of the choices of one forward.
#[derive(Debug)]
pub(super) struct GatheredChoices {
    group: ProcessGroup,
    /// Those of this rank's experts, among the choices of all ranks.
    pub window: ChoiceWindow,
    /// The weights of the choices of all ranks, `f32[tokens of all ranks, top_k]`.
    weights: Tensor<2>,
    /// The first of this rank's experts.
    pub first: usize,
}

impl GatheredChoices {
    /// The exchange of tokens that chose the experts `chosen` (`i32[tokens, top_k]`) of `experts`,
    /// a multiple of the ranks, with these `weights`. All ranks have as many tokens, and call it
    /// together.
    ///
    /// # Errors
    /// When all ranks have 2^31 choices or more.
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

    /// What this rank's experts have made of their tokens, `results` (a row for each choice of all
    /// ranks), as what all ranks' experts have made of this rank's tokens; whether it is exchanged
    /// beside kernels. Differentiable.
    ///
    /// Each rank adds up what its experts add to a token in `f32`, rounds that to the type of
    /// `results`, and the ranks add these.
    pub fn combine(self, results: Tensor<2>, overlaps: bool) -> Pending {
        let parts = self.window.combine(results, self.weights);
        Pending::begin(parts, Steps::reduce_scatter(), &self.group, overlaps)
    }
}

/// The tokens of all ranks, rank after rank, given those of this one; whether they are exchanged
/// beside kernels. Differentiable: the gradient is the sum of those of all ranks.
pub(super) fn gather_tokens(x: Tensor<2>, group: &ProcessGroup, overlaps: bool) -> Pending {
    Pending::begin(x, Steps::gather_sum(), group, overlaps)
}
