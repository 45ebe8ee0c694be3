//! Sorting tokens by expert, on the device.

use burn_core::tensor::{Int, Tensor};
use nvfp4_kernels::Nvfp4Error;

use crate::experts::{ExpertOffsets, SortedChoices, moe_permute, moe_unpermute, sort_choices};

/// The expert of each choice of each token, sorted by expert: dispatch and combine.
///
/// Every token is sent to each expert that it chose, however many chose the same (no capacity, no
/// token dropped). The sort is stable, and never waits for the device.
#[derive(Clone, Debug)]
pub struct Routing {
    experts: ExpertOffsets,
    counts: Tensor<1, Int>,
    /// The sorted place of each choice, `i32[tokens, top_k]`.
    places: Tensor<2, Int>,
    /// The choice at each sorted place, `i32[tokens * top_k]`.
    choices: Tensor<1, Int>,
}

impl Routing {
    /// Sort the choices `chosen` (`[tokens, top_k]`, numbers of experts below `experts`, any
    /// integer type).
    ///
    /// # Errors
    /// When the device has no implementation, there is no token or no choice or 2^31 or more, or
    /// `experts` is not 1 to 512.
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

    /// The offsets of each expert's tokens among the sorted ones.
    pub fn experts(&self) -> &ExpertOffsets {
        &self.experts
    }

    /// Number of choices that went to each expert, `i32[experts]`.
    pub fn counts(&self) -> &Tensor<1, Int> {
        &self.counts
    }

    /// The sorted place of each choice, `i32[tokens, top_k]`.
    pub fn places(&self) -> &Tensor<2, Int> {
        &self.places
    }

    /// The tokens `x` (`[tokens, width]`), once for each choice, sorted by expert:
    /// `[tokens * top_k, width]`. Differentiable.
    pub fn dispatch(&self, x: Tensor<2>) -> Tensor<2> {
        let [_, top_k] = self.places.dims();
        let token = if top_k == 1 {
            self.choices.clone()
        } else {
            self.choices.clone().div_scalar(top_k as i64)
        };
        moe_permute(x, token, self.places.clone())
    }

    /// The results `y` (`[tokens * top_k, width]`, sorted by expert) of each token, added up with
    /// the weights of its choices (`f32[tokens, top_k]`): `[tokens, width]`, in the type of `y`,
    /// computed in `f32`. Differentiable in both.
    pub fn combine(&self, y: Tensor<2>, weights: Tensor<2>) -> Tensor<2> {
        moe_unpermute(y, weights, self.places.clone(), self.choices.clone())
    }
}
