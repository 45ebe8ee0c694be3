//! The losses of a router for the tokens of several ranks.

use burn_core::tensor::{DType, Tensor, TensorData};

use crate::parallel::{ProcessGroup, functions};

/// The balance loss and the z-loss of the tokens of all ranks of `group`, given the logits of this
/// rank's tokens (`f32[tokens, experts]`) and the choices of each expert on all ranks; see
/// [`MoeOutput`](super::MoeOutput).
///
/// Differentiable: the gradient by the logits is that of the sum of what all ranks make of the
/// losses.
pub(super) fn batch_losses(
    logits: Tensor<2>,
    totals: &[usize],
    top_k: usize,
    group: &ProcessGroup,
) -> [Tensor<1>; 2] {
    let experts = totals.len();
    let choices: usize = totals.iter().sum();
    let tokens = choices as f64 / top_k as f64;
    let counts: Vec<f32> = totals.iter().map(|&count| count as f32).collect();
    let counts = TensorData::new(counts, [1, experts]);
    let counts = Tensor::<2>::from_data(counts, (&logits.device(), DType::F32));
    let max = logits.clone().detach().max_dim(1);
    let exponentials = (logits - max.clone()).exp();
    let sum = exponentials.clone().sum_dim(1);
    let probabilities = (exponentials / sum.clone()).sum_dim(0);
    // Both losses are sums over tokens, once the choices of all ranks are known.
    let balance = (probabilities * counts).sum();
    let balance = balance.mul_scalar(experts as f64 / (tokens * choices as f64));
    let z = (sum.log() + max).square().sum().div_scalar(tokens);
    let losses = functions::all_reduce(Tensor::cat(vec![balance, z], 0), group);
    [0, 1].map(|loss| losses.clone().narrow(0, loss, 1))
}
