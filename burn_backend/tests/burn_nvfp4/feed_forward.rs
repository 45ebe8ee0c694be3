//! The feed-forward as one operation: it equals its three steps bit for bit, with and without
//! recomputation.

use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::functions::swiglu;
use burn_nvfp4::{Nvfp4MoeConfig, Nvfp4Recipe, Nvfp4SwiGlu, Nvfp4SwiGluConfig, RngState};

use crate::support::{Matrix, activation, device, small_only, values};

const WIDTH: usize = 32;
const HIDDEN: usize = 48;

/// Numbers of rows that fill neither a block of 16 nor a transform.
fn tokens() -> usize {
    if small_only() { 24 } else { 45 }
}

fn presets() -> Vec<&'static str> {
    match small_only() {
        true => vec!["nvidia"],
        false => Nvfp4Recipe::preset_names().collect(),
    }
}

fn layer(recipe: &Nvfp4Recipe, bias: bool, device: &Device) -> Nvfp4SwiGlu {
    let layer = Nvfp4SwiGluConfig::new(WIDTH, HIDDEN)
        .with_bias(bias)
        .with_recipe(recipe.clone())
        .init(device);
    recipe.apply(&layer).unwrap();
    layer
}

/// Runs the three steps separately.
fn by_steps(layer: &Nvfp4SwiGlu, x: Tensor<2>) -> Tensor<2> {
    layer.down.forward(swiglu(layer.gate_up.forward(x)))
}

/// Returns the output of `forward`, and the gradients by its input and by the parameters of
/// `layer`, if any, with the random draws of the first step.
fn run(
    layer: &Nvfp4SwiGlu,
    x: &Tensor<2>,
    forward: impl Fn(Tensor<2>) -> Tensor<2>,
) -> Vec<Option<Vec<f32>>> {
    for (number, part) in [&layer.gate_up, &layer.down].into_iter().enumerate() {
        let state = RngState {
            seed: 5,
            layer: number as u64,
            offset: 3,
            rht_signs: 0x1234,
        };
        part.state.set_rng_state(state).unwrap();
    }
    let dy = Matrix::gaussian(tokens(), WIDTH, DType::F32, 6).tensor(&x.device());
    let y = forward(x.clone());
    let mut found = vec![Some(values(y.clone()))];
    if !y.is_tracked() {
        return found;
    }
    let grads = (y.cast(DType::F32) * dy).sum().backward();
    found.push(x.grad(&grads).map(values));
    for part in [&layer.gate_up, &layer.down] {
        found.push(part.weight.grad(&grads).map(values));
        let bias = part.bias.as_ref().and_then(|bias| bias.grad(&grads));
        found.push(bias.map(|bias| values(bias.unsqueeze::<2>())));
    }
    found
}

const NAMES: [&str; 6] = [
    "y",
    "dx",
    "dw of gate_up",
    "its bias",
    "dw of down",
    "its bias",
];

fn assert_equal(what: &str, found: &[Option<Vec<f32>>], expected: &[Option<Vec<f32>>]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((name, found), expected) in NAMES.iter().zip(found).zip(expected) {
        assert_eq!(found.is_some(), expected.is_some(), "{what}: {name}");
        let same = found.iter().flatten().eq(expected.iter().flatten());
        assert!(same, "{what}: {name} differs");
    }
}

fn input(device: &Device) -> Tensor<2> {
    Matrix::gaussian(tokens(), WIDTH, activation(), 4).tensor(device)
}

#[test]
fn it_has_the_bits_of_its_three_steps() {
    let device = device().autodiff();
    for preset in presets() {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        for bias in [false, true] {
            let layer = layer(&recipe, bias, &device);
            let again = layer.clone().with_recompute(true);
            assert!(again.recomputes() && !layer.recomputes());
            let x = input(&device).require_grad();
            let expected = run(&layer, &x, |x| by_steps(&layer, x));
            let gradients = if bias { 6 } else { 4 };
            assert_eq!(expected.iter().flatten().count(), gradients, "{preset}");
            assert!(
                expected
                    .iter()
                    .flatten()
                    .all(|x| x.iter().any(|x| *x != 0.0))
            );
            let what = format!("{preset}, bias: {bias}");
            assert_equal(&what, &run(&layer, &x, |x| layer.forward(x)), &expected);
            let found = run(&layer, &x, |x| again.forward(x));
            assert_equal(&format!("{what}, computed again"), &found, &expected);
        }
    }
}

/// A frozen parameter gets no gradient, and changes no other gradient.
#[test]
fn parts_may_be_frozen() {
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let whole = layer(&recipe, true, &device);
    for frozen in 0..8 {
        let [x_frozen, first, second] = [1, 2, 4].map(|bit| frozen & bit != 0);
        let mut layer = whole.clone();
        for (is_frozen, part) in [(first, &mut layer.gate_up), (second, &mut layer.down)] {
            if is_frozen {
                *part = part.clone().no_grad();
            }
        }
        let x = match x_frozen {
            true => input(&device),
            false => input(&device).require_grad(),
        };
        let expected = run(&layer, &x, |x| by_steps(&layer, x));
        for recompute in [false, true] {
            let other = layer.clone().with_recompute(recompute);
            let what = format!("frozen: {frozen:03b}, recompute: {recompute}");
            assert_equal(&what, &run(&layer, &x, |x| other.forward(x)), &expected);
        }
    }
    let inner = whole.clone().valid();
    let x = input(&device.without_autodiff());
    let expected = run(&inner, &x, |x| by_steps(&inner, x));
    assert_equal("valid", &run(&inner, &x, |x| inner.forward(x)), &expected);
}

/// A bias on only one of the layers, which a config never creates.
#[test]
fn one_layer_may_have_a_bias() {
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    for first in [true, false] {
        let mut layer = layer(&recipe, true, &device);
        match first {
            true => layer.down.bias = None,
            false => layer.gate_up.bias = None,
        }
        let x = input(&device).require_grad();
        let expected = run(&layer, &x, |x| by_steps(&layer, x));
        assert_equal(
            "one bias",
            &run(&layer, &x, |x| layer.forward(x)),
            &expected,
        );
    }
}

/// A mixture whose experts recompute gate and up has the bits of one that keeps them.
#[test]
fn experts_may_compute_again() {
    let device = device().autodiff();
    let names = match small_only() {
        true => vec!["nvidia"],
        false => vec!["nvidia", "quartet2", "per_token", "mxfp8", "bf16"],
    };
    for preset in names {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let kept = Nvfp4MoeConfig::new(WIDTH, HIDDEN, 4)
            .with_shared_hidden(Some(16))
            .with_recipe(recipe.clone())
            .init(&device);
        let again = kept.clone().with_recompute(true);
        let run = |moe: &burn_nvfp4::Nvfp4Moe| {
            let shared = moe.shared.as_ref().unwrap();
            let states = [&moe.gate_up.state, &moe.down.state];
            let of_shared = [&shared.gate_up.state, &shared.down.state];
            for state in states.into_iter().chain(of_shared) {
                let offset = 7;
                state
                    .set_rng_state(RngState {
                        offset,
                        ..state.rng_state()
                    })
                    .unwrap();
            }
            let x = input(&device).require_grad();
            let y = moe.forward(x.clone()).output;
            let grads = y.clone().cast(DType::F32).square().sum().backward();
            [
                values(y),
                values(x.grad(&grads).unwrap()),
                values(moe.gate_up.weight.grad(&grads).unwrap()),
                values(moe.down.weight.grad(&grads).unwrap()),
                values(shared.gate_up.weight.grad(&grads).unwrap()),
            ]
        };
        assert!(run(&kept) == run(&again), "{preset}");
    }
}
