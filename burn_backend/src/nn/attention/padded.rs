//! Attention with padding, by the kernels.

use burn_core::tensor::{Bool, DType, Int, Tensor};
use nvfp4_formats::Nvfp4Error;

use crate::attention::Sequences;
use crate::experts::{MAX_EXPERTS, SortedChoices, sort_choices, try_moe_permute};

/// Keys in an order in which the padding of each sequence is after its other keys, and these keys
/// as sequences of the kernels.
///
/// The device sorts the keys. The host does not read the mask.
#[derive(Debug)]
pub(super) struct PackedKeys {
    /// Key at each position, `i32[batch * keys]`.
    keys: Tensor<1, Int>,
    /// Position of each key, `i32[batch * keys]`.
    places: Tensor<1, Int>,
    /// Two sequences per row of the batch: keys that are not padding, and padding.
    pub sequences: Sequences,
}

impl PackedKeys {
    /// True if [`try_new`](Self::try_new) accepts these sizes.
    pub fn supports([batch, queries, keys]: [usize; 3]) -> bool {
        (1..=MAX_EXPERTS / 2).contains(&batch) && queries > 0 && keys > 0
    }

    /// Sorts the keys of `padding`, `[batch, keys]`, of which either may be 1.
    ///
    /// The queries of a causal attention are packed like the keys: those that are not padding see
    /// the earlier keys that are not padding, and padding sees earlier padding. Otherwise all
    /// queries see all keys that are not padding, in any order.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, or the sizes are not
    /// [supported](Self::supports).
    pub fn try_new(
        padding: Tensor<2, Bool>,
        [batch, queries, keys]: [usize; 3],
        causal: bool,
    ) -> Result<Self, Nvfp4Error> {
        let device = padding.device();
        let numbers = |range| Tensor::<1, Int>::arange(range, &device);
        let first = numbers(0..batch as i64)
            .mul_scalar(2)
            .reshape([batch, 1])
            .expand([batch, keys]);
        let part = first + padding.expand([batch, keys]).int();
        let SortedChoices {
            experts,
            places,
            choices,
            ..
        } = sort_choices(part.reshape([batch * keys, 1]), 2 * batch)?;
        let k = experts.offsets().clone();
        let q = match causal {
            true => k.clone(),
            // 0, n, n, 2n, 2n and so on for n queries: no query is with the padding.
            false => numbers(1..2 * batch as i64 + 2)
                .div_scalar(2)
                .mul_scalar(queries as i64)
                .cast(DType::U32),
        };
        Ok(Self {
            keys: choices,
            places,
            sequences: Sequences::Offsets { q, k },
        })
    }

    /// Sorts the rows of `x`, `[batch * keys, width]`. Differentiable.
    ///
    /// # Errors
    /// Returns an error if the shape or device of `x` does not fit.
    pub fn pack(&self, x: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
        try_moe_permute(x, self.keys.clone(), column(&self.places))
    }

    /// Inverse of [`pack`](Self::pack).
    ///
    /// # Errors
    /// Same as [`pack`](Self::pack).
    pub fn unpack(&self, x: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
        try_moe_permute(x, self.places.clone(), column(&self.keys))
    }
}

fn column(numbers: &Tensor<1, Int>) -> Tensor<2, Int> {
    let [count] = numbers.dims();
    numbers.clone().reshape([count, 1])
}
