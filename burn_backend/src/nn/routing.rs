//! Sorting tokens by expert, on the device.

use burn_core::tensor::{DType, IndexingUpdateOp, Int, Tensor};
use nvfp4_kernels::Nvfp4Error;

use crate::experts::{ExpertOffsets, check_experts, moe_permute, moe_unpermute};

/// The sums of each column of `x` (`[rows, columns]`) up to and with each row.
///
/// Burn's scan reads, for each element, all elements before it. This one scans short pieces, and
/// then the sums of the pieces in the same way.
fn running_sums(x: Tensor<2, Int>) -> Tensor<2, Int> {
    /// Rows of a piece.
    const PIECE: usize = 32;
    let [rows, columns] = x.dims();
    if rows <= 2 * PIECE {
        return x.cumsum(0);
    }
    let pieces = rows.div_ceil(PIECE);
    let padding = pieces * PIECE - rows;
    let x = match padding {
        0 => x,
        _ => {
            let zeros = Tensor::zeros([padding, columns], (&x.device(), x.dtype()));
            Tensor::cat(vec![x, zeros], 0)
        }
    };
    let within: Tensor<3, Int> = x.reshape([pieces, PIECE, columns]).cumsum(1);
    let totals: Tensor<2, Int> = within
        .clone()
        .narrow(1, PIECE - 1, 1)
        .reshape([pieces, columns]);
    let before = running_sums(totals.clone()) - totals;
    let before = before.reshape([pieces, 1, columns]);
    (within + before.expand([pieces, PIECE, columns]))
        .reshape([pieces * PIECE, columns])
        .narrow(0, 0, rows)
}

/// The `count` experts of each token with the largest probabilities (`[tokens, experts]`), the
/// largest first: `[tokens, count]`. All of them come in their own order.
///
/// It computes only the indices: for the values, or under autodiff, Burn reads the probabilities
/// back and sorts them on the host, and the device waits. Burn's kernel leaves out at least one
/// expert.
pub fn most_probable(probabilities: Tensor<2>, count: usize) -> Tensor<2, Int> {
    let [tokens, experts] = probabilities.dims();
    if count == experts {
        let all = Tensor::<1, Int>::arange(0..experts as i64, &probabilities.device());
        return all.reshape([1, experts]).expand([tokens, experts]);
    }
    probabilities.detach().argtopk(count, 1)
}

/// The expert of each choice of each token, sorted by expert: dispatch and combine.
///
/// Every token is sent to each expert that it chose, however many chose the same (no capacity, no
/// token dropped). The sort is a counting sort, stable, made of tensor operations that never wait
/// for the device.
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
    /// When there is no token or no choice, or `experts` is not 1 to 512.
    pub fn try_new(chosen: Tensor<2, Int>, experts: usize) -> Result<Self, Nvfp4Error> {
        check_experts("experts", experts)?;
        let [tokens, top_k] = chosen.dims();
        let slots = tokens * top_k;
        if slots == 0 {
            return Err(Nvfp4Error::shape(
                "chosen",
                format!("[{tokens}, {top_k}]"),
                "at least one token and one choice",
            ));
        }
        let device = chosen.device();
        let options = (&device, DType::I32);
        let shape = [slots, experts];
        let numbers = Tensor::<1, Int>::arange(0..experts as i64, options);
        let is_chosen = chosen
            .cast(DType::I32)
            .reshape([slots, 1])
            .expand(shape)
            .equal(numbers.reshape([1, experts]).expand(shape))
            .int()
            .cast(DType::I32);
        // Up to and with each choice, how many went to each expert.
        let running = running_sums(is_chosen.clone());
        let counts: Tensor<1, Int> = running.clone().narrow(0, slots - 1, 1).reshape([experts]);
        let starts = counts.clone().cumsum(0) - counts.clone();
        let place = (running + starts.reshape([1, experts]).expand(shape)).sub_scalar(1);
        let places: Tensor<1, Int> = (place * is_chosen).sum_dim(1).reshape([slots]);
        let choices = Tensor::<1, Int>::zeros([slots], options).scatter_nd::<2, 1>(
            places.clone().reshape([slots, 1]),
            Tensor::<1, Int>::arange(0..slots as i64, options),
            IndexingUpdateOp::Assign,
        );
        Ok(Self {
            experts: ExpertOffsets::try_from_counts(counts.clone(), slots)?,
            counts,
            places: places.reshape([tokens, top_k]),
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
