//! The mixture of experts, against a loop over experts.

mod activations;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod waits;

use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::activation::{silu, softmax};
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::experts::{MoeRoute, Router, moe_route};
use burn_nvfp4::functions::{linear, swiglu};
use burn_nvfp4::nn::Routing;
use burn_nvfp4::{
    ExpertOffsets, Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig, Nvfp4Moe, Nvfp4MoeConfig,
    Nvfp4Recipe, Nvfp4State,
};

use crate::support::{Matrix, activation, device, skip_where_small_only, small_only, values};

const WIDTH: usize = 32;
const HIDDEN: usize = 48;

fn tokens() -> usize {
    if small_only() { 7 } else { 45 }
}

fn exempt() -> Nvfp4Recipe {
    Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()))
}

fn moe(experts: usize, top_k: usize, recipe: &Nvfp4Recipe, device: &Device) -> Nvfp4Moe {
    let moe = Nvfp4MoeConfig::new(WIDTH, HIDDEN, experts)
        .with_top_k(top_k)
        .with_recipe(recipe.clone())
        .init(device);
    recipe.apply(&moe).unwrap();
    moe
}

/// Returns the largest difference relative to the largest magnitude.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1e-30f32, |m, v| m.max(v.abs()));
    let error = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    error.fold(0f32, f32::max) / scale
}

fn gated(both: Tensor<2>) -> Tensor<2> {
    let gate = silu(both.clone().narrow(1, 0, HIDDEN));
    gate * both.narrow(1, HIDDEN, HIDDEN)
}

/// Computes every expert on every token, weighted by the router, only with tensor operations.
fn dense(moe: &Nvfp4Moe, x: Tensor<2>) -> Tensor<2> {
    let [_, experts] = moe.router.weight.dims();
    let probabilities = softmax(x.clone().matmul(moe.router.weight.val()), 1);
    let [tokens, _] = x.dims();
    let found = values(probabilities.clone());
    let mut mask = vec![0f32; tokens * experts];
    for token in 0..tokens {
        let row = &found[token * experts..][..experts];
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        for &expert in &order[..moe.top_k()] {
            mask[token * experts + expert] = 1.0;
        }
    }
    let mask = Tensor::<2>::from_data(TensorData::new(mask, [tokens, experts]), &x.device());
    let mut weights = probabilities * mask;
    if moe.top_k() > 1 {
        weights = weights.clone() / weights.sum_dim(1);
    }
    (0..experts)
        .map(|expert| {
            let part = |weight: Tensor<3>| {
                let [_, rows, cols] = weight.dims();
                weight.narrow(0, expert, 1).reshape([rows, cols])
            };
            let hidden = gated(x.clone().matmul(part(moe.gate_up.weight.val())));
            let y = hidden.matmul(part(moe.down.weight.val()));
            y * weights.clone().narrow(1, expert, 1)
        })
        .reduce(|a, b| a + b)
        .unwrap()
}

#[test]
fn in_high_precision_it_is_the_dense_loop() {
    skip_where_small_only!();
    let device = device().autodiff();
    for (experts, top_k) in [(4, 1), (4, 2), (5, 3), (1, 1)] {
        let what = format!("{top_k} of {experts}");
        let moe = moe(experts, top_k, &exempt(), &device);
        let x = Matrix::gaussian(tokens(), WIDTH, DType::F32, 5);
        let dy = Matrix::gaussian(tokens(), WIDTH, DType::F32, 6).tensor(&device);
        let run = |forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let leaf = x.tensor(&device).require_grad();
            let y = forward(leaf.clone());
            let grads = (y.clone() * dy.clone()).sum().backward();
            [
                values(y),
                values(leaf.grad(&grads).unwrap()),
                values(moe.router.weight.grad(&grads).unwrap()),
                values(moe.gate_up.weight.grad(&grads).unwrap()),
                values(moe.down.weight.grad(&grads).unwrap()),
            ]
        };
        let found = run(&|x| moe.forward(x).output);
        let expected = run(&|x| dense(&moe, x));
        let names = ["y", "dx", "router", "gate_up", "down"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            if name == "router" && experts == 1 {
                continue; // One probability is 1, and its gradient is only rounding.
            }
            let difference = difference(found, expected);
            assert!(difference < 2e-3, "{what}: {name} differs by {difference}");
        }
    }
}

/// In NVFP4 it equals the loop of the plain layer, with the same SwiGLU, over the sorted tokens of
/// each expert: bit for bit if the same loop computes both.
#[test]
fn in_nvfp4_it_is_the_loop_of_plain_layers() {
    let device = device().autodiff();
    let presets = match small_only() {
        true => vec![("nvidia", 2)],
        false => vec![
            ("nvidia", 1),
            ("nvidia", 2),
            ("per_token", 2),
            ("fwd_nvfp4_bwd_bf16", 2),
            ("fwd_nvfp4_bwd_mxfp8", 2),
            ("fwd_nvfp4_bwd_mxfp8_dequantized", 2),
            ("mxfp8", 2),
            ("mxfp4", 2),
        ],
    };
    for (preset, top_k) in presets {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let recipe = recipe.with_stochastic_rounding(false);
        let experts = 4;
        let moe = moe(experts, top_k, &recipe, &device);
        let x = Matrix::gaussian(tokens(), WIDTH, DType::F32, 5);
        let dy = Matrix::gaussian(tokens(), WIDTH, DType::F32, 6).tensor(&device);
        let spec = recipe.spec(&moe.gate_up.state.rng_state());
        let looped = |x: Tensor<2>| {
            let logits = x.clone().matmul(moe.router.weight.val());
            let router = Router {
                experts,
                top_k,
                normalize: true,
            };
            let MoeRoute {
                chosen, weights, ..
            } = moe_route(logits, router);
            let routing = Routing::try_new(chosen, experts).unwrap();
            let sorted = routing.dispatch(x);
            let counts: Vec<i64> = routing.counts().clone().into_data().iter().collect();
            let mut start = 0;
            let mut parts = Vec::new();
            for (expert, count) in counts.into_iter().enumerate() {
                let count = count as usize;
                let part = |weight: Tensor<3>| {
                    let [_, rows, cols] = weight.dims();
                    weight.narrow(0, expert, 1).reshape([rows, cols])
                };
                if count > 0 {
                    let own = sorted.clone().narrow(0, start, count);
                    let hidden = swiglu(linear(own, part(moe.gate_up.weight.val()), None, spec));
                    parts.push(linear(hidden, part(moe.down.weight.val()), None, spec));
                }
                start += count;
            }
            routing.combine(Tensor::cat(parts, 0), weights)
        };
        let run = |forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let leaf = x.tensor(&device).require_grad();
            let y = forward(leaf.clone());
            let grads = (y.clone() * dy.clone()).sum().backward();
            [
                values(y),
                values(leaf.grad(&grads).unwrap()),
                values(moe.router.weight.grad(&grads).unwrap()),
                values(moe.gate_up.weight.grad(&grads).unwrap()),
                values(moe.down.weight.grad(&grads).unwrap()),
            ]
        };
        let found = run(&|x| moe.forward(x).output);
        let expected = run(&looped);
        let exact = std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda");
        let names = ["y", "dx", "router", "gate_up", "down"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            if exact && name != "router" && name != "dx" {
                assert_eq!(found, expected, "{preset}, top {top_k}: {name}");
            } else if exact {
                // The router's branch adds to the gradient of x in another order.
                let difference = difference(found, expected);
                assert!(
                    difference < 1e-5,
                    "{preset}, top {top_k}: {name}: {difference}"
                );
            } else {
                // Another order of summation can take a value to the next code.
                let noise = crate::support::sqnr(expected, found);
                assert!(noise > 25.0, "{preset}, top {top_k}: {name}: {noise} dB");
            }
        }
    }
}

#[test]
fn choices_are_sorted_by_expert() {
    let device = device();
    let check = |tokens: usize, top_k: usize, experts: usize, pick: &dyn Fn(usize) -> i64| {
        let chosen: Vec<i64> = (0..tokens * top_k).map(pick).collect();
        let data = TensorData::new(chosen.clone(), [tokens, top_k]);
        let routing =
            Routing::try_new(Tensor::<2, Int>::from_data(data, &device), experts).unwrap();
        let ints = |t: Tensor<1, Int>| -> Vec<i64> { t.into_data().iter().collect() };
        let counts = ints(routing.counts().clone());
        let expected: Vec<i64> = (0..experts as i64)
            .map(|e| chosen.iter().filter(|&&c| c == e).count() as i64)
            .collect();
        assert_eq!(counts, expected, "{tokens} x {top_k} of {experts}");
        // A stable sort.
        let mut order: Vec<usize> = (0..tokens * top_k).collect();
        order.sort_by_key(|&choice| chosen[choice]);
        let places = ints(routing.places().clone().reshape([tokens * top_k]));
        for (place, choice) in order.iter().enumerate() {
            assert_eq!(
                places[*choice], place as i64,
                "{tokens} x {top_k} of {experts}"
            );
        }
        let x = Matrix::gaussian(tokens, 16, DType::F32, 1);
        let sorted = values(routing.dispatch(x.tensor(&device)));
        for (place, choice) in order.iter().enumerate() {
            let token = choice / top_k;
            assert_eq!(sorted[place * 16..][..16], x.values[token * 16..][..16]);
        }
    };
    check(7, 2, 3, &|i| (i as i64 * 5 + 1) % 3);
    check(5, 1, 4, &|_| 2);
    if !small_only() {
        check(1, 1, 1, &|_| 0);
        check(200, 2, 8, &|i| ((i * i + 3 * i) % 11 % 8) as i64);
        check(64, 4, 512, &|i| (i * 37 % 512) as i64);
        check(1000, 3, 16, &|i| (i / 300) as i64);
    }
    let none = Tensor::<2, Int>::zeros([0, 2], &device);
    let error = Routing::try_new(none, 4).unwrap_err().to_string();
    assert!(error.contains("`chosen`"), "{error}");
}

/// A router that sends everything to one expert, and an indifferent one.
#[test]
fn skewed_and_even_routers() {
    skip_where_small_only!();
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::new();
    let experts = 4;
    let mut skewed = moe(experts, 1, &recipe, &device);
    // All inputs have a positive first feature, to which only expert 2 responds.
    let mut router = vec![0f32; WIDTH * experts];
    router[2] = 50.0;
    skewed.router.weight = skewed.router.weight.map(|weight| {
        Tensor::<2>::from_data(TensorData::new(router, [WIDTH, experts]), &weight.device())
            .require_grad()
    });
    let mut x = Matrix::gaussian(20, WIDTH, DType::F32, 5);
    x.values.iter_mut().step_by(WIDTH).for_each(|v| *v = 1.0);
    let out = skewed.forward(x.tensor(&device));
    let counts: Vec<i64> = out.counts.into_data().iter().collect();
    assert_eq!(counts, [0, 0, 20, 0]);
    let balance = values(out.balance_loss)[0];
    assert!((balance - 4.0).abs() < 1e-4, "{balance}");
    let grads = out.output.square().sum().backward();
    let gradient = values(skewed.down.weight.grad(&grads).unwrap());
    let (per, size) = (HIDDEN * WIDTH, |part: &[f32]| {
        part.iter().fold(0f32, |m, v| m.max(v.abs()))
    });
    for expert in 0..experts {
        let found = size(&gradient[expert * per..][..per]);
        assert_eq!(found > 0.0, expert == 2, "expert {expert}: {found}");
        assert!(found.is_finite());
    }

    let mut even = moe(experts, 2, &recipe, &device);
    even.router.weight = even
        .router
        .weight
        .map(|weight| weight.zeros_like().require_grad());
    let out = even.forward(x.tensor(&device));
    let z = values(out.z_loss.clone())[0];
    assert!((z - (experts as f32).ln().powi(2)).abs() < 1e-4, "{z}");
    let balance = values(out.balance_loss.clone())[0];
    assert!((balance - 1.0).abs() < 1e-5, "{balance}");
}

#[test]
fn losses_reach_the_router() {
    skip_where_small_only!();
    let device = device().autodiff();
    let moe = moe(4, 2, &Nvfp4Recipe::new(), &device);
    let x = Matrix::gaussian(30, WIDTH, DType::F32, 8).tensor(&device);
    type Loss = fn(burn_nvfp4::nn::MoeOutput<2>) -> Tensor<1>;
    let losses: [(&str, Loss); 3] = [
        ("output", |out| out.output.square().sum()),
        ("balance", |out| out.balance_loss),
        ("z", |out| out.z_loss),
    ];
    for (name, loss) in losses {
        let grads = loss(moe.forward(x.clone())).backward();
        let gradient = values(moe.router.weight.grad(&grads).unwrap());
        assert!(gradient.iter().any(|v| *v != 0.0), "{name}");
        assert!(gradient.iter().all(|v| v.is_finite()), "{name}");
        assert_eq!(moe.gate_up.weight.grad(&grads).is_some(), name == "output");
    }
}

#[test]
fn the_shared_expert_is_added() {
    skip_where_small_only!();
    let device = device();
    let config = Nvfp4MoeConfig::new(WIDTH, HIDDEN, 4).with_shared_hidden(Some(64));
    let mut moe = config.init(&device);
    let x = Matrix::gaussian(9, WIDTH, DType::F32, 8).tensor(&device);
    let with = values(moe.forward(x.clone()).output);
    let shared = values(moe.shared.take().unwrap().forward(x.clone()));
    let without = values(moe.forward(x).output);
    let sum: Vec<f32> = without.iter().zip(&shared).map(|(a, b)| a + b).collect();
    assert_eq!(with, sum);
}

#[test]
fn policy_and_state_cover_grouped_layers() {
    skip_where_small_only!();
    let device = device().autodiff();
    let group = ParamGroup::from_regex("^down.weight$").unwrap();
    let recipe = Nvfp4Recipe::new().with_high_precision(Some(group));
    let moe = Nvfp4MoeConfig::new(WIDTH, HIDDEN, 4)
        .with_recipe(recipe.clone())
        .init(&device);
    assert_eq!(recipe.apply(&moe).unwrap(), 1);
    assert!(moe.down.state.is_high_precision() && !moe.gate_up.state.is_high_precision());
    burn_nvfp4::state::assign_layer_ids(&moe);

    let x = Matrix::gaussian(9, WIDTH, DType::F32, 8).tensor(&device);
    let gradient = |moe: &Nvfp4Moe| {
        let grads = moe.forward(x.clone()).output.square().sum().backward();
        values(moe.gate_up.weight.grad(&grads).unwrap())
    };
    let before = Nvfp4State::collect(&moe);
    assert_eq!(
        before.layers.keys().collect::<Vec<_>>(),
        ["down", "gate_up"]
    );
    let first = gradient(&moe);
    assert_ne!(first, gradient(&moe), "each forward draws its own bits");
    let after = Nvfp4State::collect(&moe);
    assert_eq!(after.layers["gate_up"].offset, 2);
    assert_eq!(
        after.layers["down"].offset, 0,
        "high precision draws nothing"
    );
    before.apply(&moe).unwrap();
    assert_eq!(
        first,
        gradient(&moe),
        "and the same ones from the same state"
    );
}

#[test]
fn experts_come_from_plain_layers_and_go_back() {
    skip_where_small_only!();
    let device = device();
    let linear = || burn_nn::LinearConfig::new(32, 16).init(&device);
    let linears = vec![linear(), linear(), linear()];
    let weights: Vec<_> = linears.iter().map(|l| values(l.weight.val())).collect();
    let biases: Vec<_> = linears
        .iter()
        .map(|l| values(l.bias.as_ref().unwrap().val()))
        .collect();
    let ids = |linears: &[burn_nn::Linear]| -> Vec<_> {
        let ids = |l: &burn_nn::Linear| (l.weight.id, l.bias.as_ref().unwrap().id);
        linears.iter().map(ids).collect()
    };
    let expert_ids = ids(&linears);
    let recipe = Nvfp4Recipe::new();
    let grouped = Nvfp4GroupedLinear::from_linears(linears, &recipe).unwrap();
    let counts = Tensor::<1, Int>::from_data(TensorData::new(vec![2i64, 0, 3], [3]), &device);
    let x = Matrix::gaussian(5, 32, DType::F32, 1).tensor(&device);
    let y = grouped.forward(x, &ExpertOffsets::from_counts(counts, 5));
    assert_eq!(y.dims(), [5, 16]);
    let back = grouped.into_linears();
    assert_eq!(ids(&back), expert_ids);
    for (i, linear) in back.iter().enumerate() {
        assert_eq!(values(linear.weight.val()), weights[i]);
        assert_eq!(values(linear.bias.as_ref().unwrap().val()), biases[i]);
    }
    let unlike = vec![linear(), burn_nn::LinearConfig::new(32, 32).init(&device)];
    let error = Nvfp4GroupedLinear::from_linears(unlike, &recipe).unwrap_err();
    assert!(error.to_string().contains("number 1"), "{error}");
}

#[test]
fn records_keep_experts() {
    skip_where_small_only!();
    let device = device();
    let config = Nvfp4GroupedLinearConfig::new(3, 32, 16).with_bias(true);
    let (one, other) = (config.init(&device), config.init(&device));
    let expected = values(one.weight.val());
    assert_ne!(expected, values(other.weight.val()));
    let loaded = other.load_record(one.into_record());
    assert_eq!(expected, values(loaded.weight.val()));
}

#[test]
fn configurations_are_checked() {
    let device = device();
    for (argument, config) in [
        ("`top_k`", Nvfp4MoeConfig::new(32, 32, 4).with_top_k(5)),
        ("`top_k`", Nvfp4MoeConfig::new(32, 32, 4).with_top_k(0)),
        ("`experts`", Nvfp4MoeConfig::new(32, 32, 513)),
        ("`d_input`", Nvfp4MoeConfig::new(24, 32, 4)),
    ] {
        let error = config.try_init(&device).unwrap_err().to_string();
        assert!(error.contains(argument), "{argument}: {error}");
    }
    let moe = Nvfp4MoeConfig::new(32, 32, 4).init(&device);
    for shape in [[0, 32], [2, 16]] {
        let error = moe.try_forward(Tensor::<2>::zeros(shape, &device));
        assert!(error.unwrap_err().to_string().contains("`x`"));
    }
}

/// Experts train with every preset: each parameter and the input get gradients that are finite and
/// nonzero. Three tokens that are sent to two experts each leave some of eight experts without
/// tokens.
#[test]
fn every_preset_trains_experts() {
    crate::support::skip_where_small_only!();
    let device = device().autodiff();
    for name in Nvfp4Recipe::preset_names() {
        let recipe = Nvfp4Recipe::preset(name).unwrap();
        let moe = moe(8, 2, &recipe, &device);
        let x = Matrix::gaussian(3, WIDTH, activation(), 8);
        let leaf = x.tensor(&device).require_grad();
        let out = moe.forward(leaf.clone());
        let loss = out.output.cast(DType::F32).square().sum();
        let grads = loss.backward();
        for (what, grad) in [
            ("x", values(leaf.grad(&grads).unwrap())),
            ("router", values(moe.router.weight.grad(&grads).unwrap())),
            ("gate_up", values(moe.gate_up.weight.grad(&grads).unwrap())),
            ("down", values(moe.down.weight.grad(&grads).unwrap())),
        ] {
            assert!(grad.iter().all(|v| v.is_finite()), "{name}: {what}");
            assert!(grad.iter().any(|v| *v != 0.0), "{name}: {what}");
        }
    }
}
