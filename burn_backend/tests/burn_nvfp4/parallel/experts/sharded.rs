//! Experts on several ranks behind a router of the caller.

use burn_core::tensor::{DType, Int, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::experts::{MoeRoute, Router, try_moe_route};
use burn_nvfp4::nn::{ExpertShard, MoeOutput, RoutedTokens, ShardedExperts, expert_parameters};
use burn_nvfp4::parallel::ProcessGroup;

use super::{Case, Found, Weights, on_ranks};
use crate::support::{skip_where_small_only, small_only, values};

/// Runs the experts of `case` on one rank of `group`, behind the router of its mixture.
fn on_rank(case: &Case, group: &ProcessGroup) -> Found {
    let device = case.device();
    let moe = case.moe(&device);
    let shard = |layer| ExpertShard::try_new(layer, group).unwrap();
    let (gate_up, down) = (shard(moe.gate_up), shard(moe.down));
    assert_eq!(
        (gate_up.experts(), gate_up.group().size()),
        (case.experts, group.size())
    );
    assert_eq!(expert_parameters(&gate_up), [gate_up.layer.weight.id]);
    let weights = Weights {
        router: moe.router.weight.val(),
        gate_up: gate_up.layer.weight.val(),
        down: down.layer.weight.val(),
        shared: None,
    };
    let router = weights.router.clone();
    case.measure(case.part(group.rank()), group.size(), weights, |x| {
        let [tokens, width] = x.dims();
        // As many GEMMs as the mixture computes its logits with.
        let parts = 1 << tokens.trailing_zeros().min(5);
        let logits: Tensor<3> = x.clone().reshape([parts, tokens / parts, width]);
        let logits = logits.matmul(router.clone().unsqueeze());
        let logits: Tensor<2> = logits.reshape([tokens, case.experts]);
        let router = Router {
            experts: case.experts,
            top_k: case.top_k,
            normalize: true,
        };
        let MoeRoute {
            chosen, weights, ..
        } = try_moe_route(logits, router).unwrap();
        let experts = ShardedExperts {
            gate_up: &gate_up,
            down: &down,
            activation: case.activation,
            recompute: case.recompute,
            dispatch: case.dispatch,
        };
        let tokens = RoutedTokens { x, chosen, weights };
        let output = experts.try_forward(tokens).unwrap();
        let zero = || Tensor::zeros([1], (&output.device(), DType::F32));
        MoeOutput {
            balance_loss: zero(),
            z_loss: zero(),
            counts: Tensor::<1, Int>::zeros([1], &output.device()),
            output,
        }
    })
}

/// Outputs and gradients have the bits of [`ExpertParallelMoe`](super::ExpertParallelMoe).
#[test]
fn sharded_experts_are_those_of_the_mixture() {
    let tokens: &[usize] = if small_only() { &[4, 4] } else { &[24, 24] };
    let recipe = Nvfp4Recipe::new();
    for recompute in [false, true] {
        let case = Case {
            recompute,
            ..Case::new(&recipe, 4, 2, tokens)
        };
        for case in case.dispatches() {
            let found = on_ranks(tokens.len(), |group| on_rank(&case, &group));
            for (rank, (found, expected)) in found.iter().zip(case.on_ranks()).enumerate() {
                let what = format!("{:?}, rank {rank}, {recompute}", case.dispatch);
                for (name, found, expected) in [
                    ("y", &found.y, &expected.y),
                    ("dx", &found.dx, &expected.dx),
                    ("router", &found.router, &expected.router),
                    ("gate_up", &found.gate_up, &expected.gate_up),
                    ("down", &found.down, &expected.down),
                ] {
                    assert!(found == expected, "{what}: {name}");
                }
            }
        }
    }
}

/// The shards of all ranks are the whole layer.
#[test]
fn shards_are_gathered() {
    skip_where_small_only!();
    let case = Case::new(&Nvfp4Recipe::new(), 8, 2, &[4; 4]);
    let expected = values(case.moe(&case.device()).gate_up.weight.val());
    let gathered = on_ranks(4, |group| {
        let moe = case.moe(&case.device());
        let id = moe.gate_up.weight.id;
        let shard = ExpertShard::try_new(moe.gate_up, &group).unwrap();
        assert_eq!(shard.layer.weight.dims()[0], 2);
        let layer = shard.gathered();
        assert_eq!(layer.weight.id, id);
        values(layer.weight.val())
    });
    assert!(gathered.iter().all(|found| *found == expected));
}

#[test]
fn bad_arguments_are_named() {
    let case = Case::new(&Nvfp4Recipe::new(), 4, 2, &[4]);
    let device = case.device();
    let group = ProcessGroup::single();
    let other = Case::new(&Nvfp4Recipe::new(), 8, 2, &[4]);
    let shard = |layer| ExpertShard::try_new(layer, &group).unwrap();
    let (moe, eight) = (case.moe(&device), other.moe(&device));
    let (gate_up, down, of_eight) = (shard(moe.gate_up), shard(moe.down), shard(eight.down));
    let error = |down: &ExpertShard, rows: usize, chosen: [usize; 2]| {
        let experts = ShardedExperts {
            gate_up: &gate_up,
            down,
            activation: case.activation,
            recompute: false,
            dispatch: case.dispatch,
        };
        let tokens = RoutedTokens {
            x: Tensor::zeros([rows, super::WIDTH], &device),
            chosen: Tensor::zeros(chosen, &device),
            weights: Tensor::zeros(chosen, &device),
        };
        experts.try_forward(tokens).unwrap_err().to_string()
    };
    let found = error(&of_eight, 4, [4, 2]);
    assert!(
        found.contains("down") && found.contains("8 experts"),
        "{found}"
    );
    for (rows, chosen) in [(4, [3, 2]), (0, [0, 2])] {
        let found = error(&down, rows, chosen);
        assert!(
            found.contains("chosen") && found.contains(&format!("{chosen:?}")),
            "{found}"
        );
    }
    for group in ProcessGroup::loopback(3, std::time::Duration::ZERO) {
        let layer = case.moe(&device).gate_up;
        let found = ExpertShard::try_new(layer, &group).unwrap_err().to_string();
        assert!(found.contains("experts") && found.contains('3'), "{found}");
    }
}
