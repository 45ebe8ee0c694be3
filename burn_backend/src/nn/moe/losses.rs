//! The losses of a router for the tokens of several ranks.

use burn_core::backend::Dispatch;
use burn_core::tensor::{Int, Tensor};
use nvfp4_kernels::reference::{BatchPart, Router};

use crate::ops::routing::RoutingOps;
use crate::parallel::{ProcessGroup, functions};

/// The balance loss and the z-loss of the tokens of all ranks of `group`, given the logits of this
/// rank's tokens (`f32[tokens, experts]`), the number of the tokens of all ranks, `of`, and the
/// choices of each expert on all ranks, `counts` (`i32[experts]`); see
/// [`MoeOutput`](super::MoeOutput).
///
/// Differentiable: the gradient by the logits is that of the sum of what all ranks make of the
/// losses.
pub(super) fn batch_losses(
    logits: Tensor<2>,
    (of, counts): (usize, Tensor<1, Int>),
    top_k: usize,
    group: &ProcessGroup,
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
    let losses = functions::all_reduce(Tensor::<1>::from_dispatch(losses), group);
    [0, 1].map(|loss| losses.clone().narrow(0, loss, 1))
}
