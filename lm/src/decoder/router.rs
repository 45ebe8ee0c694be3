//! Choice of a token's experts, and their weights.

use anyhow::Result;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, IntDType, Tensor};
use burn_nvfp4::experts::{MoeRoute, Router, try_moe_route};

use crate::hf::Scoring;

/// Score of experts that are not in a chosen group; no score with its bias is lower.
const EXCLUDED: f32 = -1e30;

/// Added to the sum of the weights of a sigmoid router before the division by it.
const LEAST_SUM: f32 = 1e-20;

/// Chooses the experts of each token from the router's `logits`, f32 `[tokens, experts]`. Returns
/// them, `[tokens, top_k]`, and their weights; differentiable by the logits. `correction` is added
/// to the scores of a sigmoid router for the choice.
pub(super) fn route(
    logits: Tensor<2>,
    correction: Option<Tensor<1>>,
    router: Router,
    scoring: Scoring,
) -> Result<(Tensor<2, Int>, Tensor<2>)> {
    let Scoring::GroupedSigmoid {
        groups,
        top_groups,
        factor,
    } = scoring
    else {
        let MoeRoute {
            chosen,
            mut weights,
            ..
        } = try_moe_route(logits, router)?;
        if router.normalize && router.top_k == 1 {
            // transformers also normalizes a single weight, which gives 1.
            weights = weights.clone() / weights;
        }
        return Ok((chosen, weights));
    };
    let scores = sigmoid(logits);
    let mut choice = scores.clone().detach();
    if let Some(correction) = correction {
        choice = choice + correction.detach().unsqueeze();
    }
    if top_groups < groups {
        choice = in_groups(choice, groups, top_groups)?;
    }
    let chosen = largest(choice, router.top_k)?;
    let mut weights = scores.gather(1, chosen.clone());
    if router.normalize {
        weights = weights.clone() / (weights.sum_dim(1) + LEAST_SUM);
    }
    Ok((chosen, weights.mul_scalar(factor)))
}

/// Excludes the experts outside of the `top_groups` groups with the largest sums of two scores.
fn in_groups(choice: Tensor<2>, groups: usize, top_groups: usize) -> Result<Tensor<2>> {
    let ([tokens, experts], device) = (choice.dims(), choice.device());
    let size = experts / groups;
    let of_group: Tensor<2> = choice.clone().reshape([tokens * groups, size]);
    let sums = of_group.clone().gather(1, largest(of_group, 2)?).sum_dim(1);
    let chosen = largest(sums.reshape([tokens, groups]), top_groups)?;
    let chosen: Tensor<3, Int> = chosen.reshape([tokens, top_groups, 1]);
    let numbers = Tensor::<1, Int>::arange(0..groups as i64, &device).cast(IntDType::I32);
    let numbers: Tensor<3, Int> = numbers.reshape([1, 1, groups]);
    let is_chosen = chosen
        .expand([tokens, top_groups, groups])
        .equal(numbers.expand([tokens, top_groups, groups]));
    let excluded = is_chosen.any_dim(1).bool_not();
    let excluded = excluded
        .reshape([tokens, groups, 1])
        .expand([tokens, groups, size]);
    Ok(choice.mask_fill(excluded.reshape([tokens, experts]), EXCLUDED))
}

/// Returns the columns of the `count` largest elements of each row, by the kernel of the router.
fn largest(scores: Tensor<2>, count: usize) -> Result<Tensor<2, Int>> {
    let router = Router {
        experts: scores.dims()[1],
        top_k: count,
        normalize: false,
    };
    Ok(try_moe_route(scores, router)?.chosen)
}
