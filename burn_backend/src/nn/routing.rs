//! Sorting of tokens by expert, on the device.

use burn_core::tensor::{Int, Tensor};
use nvfp4_formats::Nvfp4Error;

use super::Nvfp4GroupedLinear;
use crate::experts::{
    ExpertOffsets, SortedChoices, moe_permute, moe_unpermute, permute_to_experts, sort_choices,
};

/// Choices of experts, sorted by expert, for the dispatch and combine of tokens.
///
/// Every token is sent to each expert that it chose, without capacity limits or dropped tokens. The
/// sort is stable and never synchronizes with the device.
#[derive(Clone, Debug)]
pub struct Routing {
    experts: ExpertOffsets,
    counts: Tensor<1, Int>,
    /// Sorted position of each choice, `i32[tokens, top_k]`.
    places: Tensor<2, Int>,
    /// Choice at each sorted position, `i32[tokens * top_k]`.
    choices: Tensor<1, Int>,
}

impl Routing {
    /// Sorts the choices `chosen` (`[tokens, top_k]`, expert indices below `experts`, any integer
    /// dtype).
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, the number of choices is zero or at
    /// least 2^31, or `experts` is not 1 to 512.
    pub fn try_new(chosen: Tensor<2, Int>, experts: usize) -> Result<Self, Nvfp4Error> {
        let dims = chosen.dims();
        let SortedChoices {
            experts,
            counts,
            places,
            choices,
        } = sort_choices(chosen, experts)?;
        Ok(Self {
            experts,
            counts,
            places: places.reshape(dims),
            choices,
        })
    }

    /// Returns the offsets of each expert's tokens in sorted order.
    pub fn experts(&self) -> &ExpertOffsets {
        &self.experts
    }

    /// Number of choices per expert, `i32[experts]`.
    pub fn counts(&self) -> &Tensor<1, Int> {
        &self.counts
    }

    /// Sorted position of each choice, `i32[tokens, top_k]`.
    pub fn places(&self) -> &Tensor<2, Int> {
        &self.places
    }

    /// Dispatches the tokens `x` (`[tokens, width]`): copies each token once per choice, sorted by
    /// expert, to `[tokens * top_k, width]`. Differentiable.
    pub fn dispatch(&self, x: Tensor<2>) -> Tensor<2> {
        moe_permute(x, self.tokens(), self.places.clone())
    }

    /// Version of [`dispatch`](Self::dispatch) before the layer `next`, which quantizes the tokens:
    /// computes the amax values in the same pass. Results have the same bits.
    pub fn dispatch_for(&self, next: &Nvfp4GroupedLinear, x: Tensor<2>) -> Tensor<2> {
        let amax = next.input_amax(x.is_tracked());
        let places = (self.tokens(), self.places.clone());
        permute_to_experts(x, places, &self.experts, amax)
    }

    /// Returns the token at each sorted position.
    fn tokens(&self) -> Tensor<1, Int> {
        let [_, top_k] = self.places.dims();
        match top_k {
            1 => self.choices.clone(),
            _ => self.choices.clone().div_scalar(top_k as i64),
        }
    }

    /// Combines the results `y` (`[tokens * top_k, width]`, sorted by expert): sums those of each
    /// token, weighted by `weights` (`f32[tokens, top_k]`), to `[tokens, width]` in the dtype of
    /// `y`. Computes in `f32`. Differentiable in both.
    pub fn combine(&self, y: Tensor<2>, weights: Tensor<2>) -> Tensor<2> {
        moe_unpermute(y, weights, self.places.clone(), self.choices.clone())
    }
}
