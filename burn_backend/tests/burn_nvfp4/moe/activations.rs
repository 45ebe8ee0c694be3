//! Activations of the experts.

use burn_core::tensor::activation::relu;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::experts::{Router, moe_route};
use burn_nvfp4::functions::{Gelu, gelu, swiglu};
use burn_nvfp4::nn::{MlpActivation, Routing};
use burn_nvfp4::{Nvfp4Linear, Nvfp4Moe, Nvfp4MoeConfig, Nvfp4Recipe, RngState};

use super::{HIDDEN, WIDTH, difference, tokens};
use crate::attention::argument;
use crate::support::{Matrix, device, small_only, values};

const EXPERTS: usize = 4;

fn config(of: MlpActivation, preset: &str) -> Nvfp4MoeConfig {
    Nvfp4MoeConfig::new(WIDTH, HIDDEN, EXPERTS)
        .with_shared_hidden(Some(64))
        .with_activation(of)
        .with_recipe(Nvfp4Recipe::preset(preset).unwrap())
}

/// Sets the random streams of all layers to those of a first step.
fn first_step(moe: &Nvfp4Moe) {
    let shared = moe.shared.as_ref().unwrap();
    let states = [
        &moe.gate_up.state,
        &moe.down.state,
        &shared.gate_up.state,
        &shared.down.state,
    ];
    for (layer, state) in states.into_iter().enumerate() {
        let state_of_step = RngState {
            seed: 5,
            layer: layer as u64,
            offset: 3,
            rht_signs: 0x1234,
        };
        state.set_rng_state(state_of_step).unwrap();
    }
}

/// Applies an activation by operations on plain tensors.
fn activated(of: MlpActivation, x: Tensor<2>) -> Tensor<2> {
    let halves = |x: Tensor<2>| -> [Tensor<2>; 2] { x.chunk(2, 1).try_into().unwrap() };
    match of {
        MlpActivation::Gelu => gelu(x, Gelu::Tanh),
        MlpActivation::GeluExact => gelu(x, Gelu::Erf),
        MlpActivation::SwiGlu => swiglu(x),
        MlpActivation::Relu => relu(x),
        MlpActivation::SRelu => relu(x.clone()) * relu(x),
        MlpActivation::GeGlu => {
            let [gate, factor] = halves(x);
            gelu(gate, Gelu::Tanh) * factor
        }
        MlpActivation::ReGlu => {
            let [gate, factor] = halves(x);
            relu(gate) * factor
        }
    }
}

/// Returns the output for `x` and the gradients of `x` and all weights, in the first step.
fn results(
    moe: &Nvfp4Moe,
    forward: impl Fn(Tensor<2>) -> Tensor<2>,
    device: &Device,
) -> Vec<Vec<f32>> {
    first_step(moe);
    let x = Matrix::gaussian(tokens(), WIDTH, DType::F32, 5).tensor(device);
    let x = x.require_grad();
    let dy = Matrix::gaussian(tokens(), WIDTH, DType::F32, 6).tensor(device);
    let y = forward(x.clone());
    let grads = (y.clone() * dy).sum().backward();
    let shared = moe.shared.as_ref().unwrap();
    let of_linear = |layer: &Nvfp4Linear| values(layer.weight.grad(&grads).unwrap());
    vec![
        values(y),
        values(x.grad(&grads).unwrap()),
        values(moe.router.weight.grad(&grads).unwrap()),
        values(moe.gate_up.weight.grad(&grads).unwrap()),
        values(moe.down.weight.grad(&grads).unwrap()),
        of_linear(&shared.gate_up),
        of_linear(&shared.down),
    ]
}

/// The mixture has the bits of its parts: router, sorted tokens, two grouped layers with the
/// activation between them, weighted sums, and the shared expert.
#[test]
fn each_is_between_two_layers() {
    let device = device().autodiff();
    let presets = match small_only() {
        true => vec!["nvidia"],
        false => vec!["nvidia", "per_token", "quartet2", "mxfp8"],
    };
    for preset in presets {
        for (name, of) in MlpActivation::NAMES {
            if small_only() && !matches!(of, MlpActivation::SRelu | MlpActivation::ReGlu) {
                continue;
            }
            let moe = config(of, preset).init(&device);
            assert_eq!(moe.activation(), of);
            let d_inner = of.inputs() * HIDDEN;
            assert_eq!(moe.gate_up.weight.dims(), [EXPERTS, WIDTH, d_inner]);
            let found = results(&moe, |x| moe.forward(x).output, &device);
            let by_parts = |x: Tensor<2>| {
                let router = Router {
                    experts: EXPERTS,
                    top_k: moe.top_k(),
                    normalize: true,
                };
                let route = moe_route(x.clone().matmul(moe.router.weight.val()), router);
                let routing = Routing::try_new(route.chosen, EXPERTS).unwrap();
                let sorted = routing.dispatch(x.clone());
                let experts = routing.experts();
                let hidden = moe.gate_up.forward(sorted, experts);
                let results = moe.down.forward(activated(of, hidden), experts);
                let shared = moe.shared.as_ref().unwrap();
                let hidden = activated(of, shared.gate_up.forward(x));
                routing.combine(results, route.weights) + shared.down.forward(hidden)
            };
            let expected = results(&moe, by_parts, &device);
            let parts = [
                "y",
                "dx",
                "router",
                "gate_up",
                "down",
                "shared up",
                "shared down",
            ];
            for ((part, found), expected) in parts.into_iter().zip(&found).zip(&expected) {
                let what = format!("{name}, {preset}: {part}");
                assert!(found.iter().any(|x| *x != 0.0), "{what}");
                if matches!(part, "dx" | "router") {
                    // The gradients of tokens are added in another order.
                    let difference = difference(found, expected);
                    assert!(difference < 1e-5, "{what} differs by {difference}");
                } else {
                    assert!(found == expected, "{what}");
                }
            }
        }
    }
}

/// Only activations that are one operation with the quantization of their output are recomputed.
#[test]
fn recomputation_is_checked_by_name() {
    let device = device();
    let x = Matrix::gaussian(3, WIDTH, DType::F32, 5).tensor(&device);
    for (name, of) in MlpActivation::NAMES {
        let is_fused = matches!(name, "gelu" | "gelu_exact" | "swiglu");
        let config = config(of, "nvidia");
        let made = config.clone().with_recompute(true).try_init(&device);
        match is_fused {
            true => assert!(made.is_ok(), "{name}"),
            false => assert_eq!(argument(made), "recompute", "{name}"),
        }
        let moe = config.init(&device).with_recompute(true);
        match is_fused {
            true => assert!(moe.try_forward(x.clone()).is_ok(), "{name}"),
            false => assert_eq!(argument(moe.try_forward(x.clone())), "recompute", "{name}"),
        }
    }
    let mut unlike = config(MlpActivation::SRelu, "nvidia").init(&device);
    let wider = Nvfp4MoeConfig::new(WIDTH, 64, EXPERTS);
    unlike.down = wider.init(&device).down;
    assert_eq!(argument(unlike.try_forward(x)), "down.weight");
    let error = "relu6".parse::<MlpActivation>();
    assert_eq!(argument(error), "activation");
}
