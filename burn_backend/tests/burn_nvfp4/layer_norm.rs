//! `LayerNormLinear` and `LayerNormMlp`: the bits of the separate modules, forward and backward,
//! and the records of burn-nn's modules.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::activation::relu;
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::experts::ExpertOffsets;
use burn_nvfp4::functions::{self, Gelu};
use burn_nvfp4::nn::{
    InputNorm, LayerNormConfig, LayerNormLinear, LayerNormLinearConfig, LayerNormMlp,
    LayerNormMlpConfig, MlpActivation, NormKind, RmsNormConfig, try_feed_forward_of_experts,
};
use burn_nvfp4::{Nvfp4GroupedLinearConfig, Nvfp4Linear, Nvfp4Recipe, RngState};

use crate::attention::argument;
use crate::module::assert_same_record;
use crate::support::{
    Matrix, activation, device, flex_only, gaussian, skip_where_small_only, small_only, values,
};

const WIDTH: usize = 32;
const HIDDEN: usize = 48;
const EPSILON: f64 = 1e-3;

/// Number of rows that fills neither a block of 16 nor a transform.
const TOKENS: usize = 21;

fn presets() -> Vec<&'static str> {
    match small_only() {
        true => vec!["nvidia"],
        false => Nvfp4Recipe::preset_names().collect(),
    }
}

/// Norms: the kind, and true for a zero-centered γ.
const NORMS: [(NormKind, bool); 4] = [
    (NormKind::LayerNorm, false),
    (NormKind::RmsNorm, false),
    (NormKind::LayerNorm, true),
    (NormKind::RmsNorm, true),
];

fn vector(seed: u64, device: &Device) -> Param<Tensor<1>> {
    let data = TensorData::new(gaussian(WIDTH, seed), [WIDTH]);
    Param::from_tensor(Tensor::from_data(data, device))
}

/// Gives the norm other factors than the initial ones, after their check.
fn filled(norm: &mut InputNorm, (kind, zero_centered): (NormKind, bool), device: &Device) {
    assert_eq!(norm.has_zero_centered_gamma(), zero_centered);
    assert_eq!(norm.beta.is_some(), kind == NormKind::LayerNorm);
    let first = if zero_centered { 0.0 } else { 1.0 };
    assert!(values(norm.gamma.val()).iter().all(|x| *x == first));
    norm.gamma = vector(31, device);
    norm.beta = norm.beta.take().map(|_| vector(32, device));
}

fn mlp(recipe: &Nvfp4Recipe, activation: MlpActivation, norm: (NormKind, bool)) -> LayerNormMlp {
    let device = device().autodiff();
    let mut mlp = LayerNormMlpConfig::new(WIDTH, HIDDEN)
        .with_normalization(norm.0)
        .with_zero_centered_gamma(norm.1)
        .with_epsilon(EPSILON)
        .with_activation(activation)
        .with_recipe(recipe.clone())
        .init(&device);
    recipe.apply(&mlp).unwrap();
    filled(&mut mlp.norm, norm, &device);
    mlp
}

/// Normalizes by the function on plain tensors.
fn separate_norm(
    norm: &InputNorm,
    (kind, zero_centered): (NormKind, bool),
    x: Tensor<2>,
) -> Tensor<2> {
    let gamma = norm.gamma.val();
    let gamma = if zero_centered { gamma + 1.0 } else { gamma };
    let beta = norm.beta.as_ref().map(|beta| beta.val());
    match kind {
        NormKind::LayerNorm => functions::layer_norm(x, gamma, beta, EPSILON),
        NormKind::RmsNorm => functions::rms_norm(x, gamma, EPSILON),
    }
}

fn separate_activation(activation: MlpActivation, x: Tensor<2>) -> Tensor<2> {
    let halves = |x: Tensor<2>| -> [Tensor<2>; 2] { x.chunk(2, 1).try_into().unwrap() };
    match activation {
        MlpActivation::Gelu => functions::gelu(x, Gelu::Tanh),
        MlpActivation::GeluExact => functions::gelu(x, Gelu::Erf),
        MlpActivation::SwiGlu => functions::swiglu(x),
        MlpActivation::Relu => relu(x),
        MlpActivation::SRelu => relu(x.clone()) * relu(x),
        MlpActivation::GeGlu => {
            let [gate, factor] = halves(x);
            functions::gelu(gate, Gelu::Tanh) * factor
        }
        MlpActivation::ReGlu => {
            let [gate, factor] = halves(x);
            relu(gate) * factor
        }
    }
}

/// Returns both outputs of `forward`, and the gradients of its input and of all parameters, with
/// the random draws of the first step.
fn run(
    norm: &InputNorm,
    linears: &[&Nvfp4Linear],
    forward: impl Fn(Tensor<2>) -> (Tensor<2>, Tensor<2>),
) -> Vec<(&'static str, Vec<f32>)> {
    for (number, linear) in linears.iter().enumerate() {
        let state = RngState {
            seed: 5,
            layer: number as u64,
            offset: 3,
            rht_signs: 0x1234,
        };
        linear.state.set_rng_state(state).unwrap();
    }
    let device = device().autodiff();
    let x = Matrix::gaussian(TOKENS, WIDTH, activation(), 4).tensor(&device);
    let x = x.require_grad();
    let (y, normed) = forward(x.clone());
    assert_eq!((y.dtype(), normed.dtype()), (x.dtype(), x.dtype()));
    let of = |x: Tensor<2>, seed| {
        let [rows, cols] = x.dims();
        let weights = Matrix::gaussian(rows, cols, DType::F32, seed).tensor(&device);
        (x.cast(FloatDType::F32) * weights).sum()
    };
    let grads = (of(y.clone(), 6) + of(normed.clone(), 7)).backward();
    let mut found = vec![
        ("y", values(y)),
        ("normed", values(normed)),
        ("dx", values(x.grad(&grads).unwrap())),
        ("dgamma", values(norm.gamma.grad(&grads).unwrap())),
    ];
    let beta = norm.beta.iter();
    found.extend(beta.map(|beta| ("dbeta", values(beta.grad(&grads).unwrap()))));
    for linear in linears {
        found.push(("dw", values(linear.weight.grad(&grads).unwrap())));
        let bias = linear.bias.as_ref().unwrap();
        found.push(("db", values(bias.grad(&grads).unwrap())));
    }
    found
}

fn assert_equal(
    what: &str,
    found: Vec<(&'static str, Vec<f32>)>,
    expected: Vec<(&'static str, Vec<f32>)>,
) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((name, found), (_, expected)) in found.into_iter().zip(expected) {
        assert!(expected.iter().any(|x| *x != 0.0), "{what}: {name}");
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(found) == bits(expected), "{what}: {name} differs");
    }
}

fn check_mlp(recipe: &Nvfp4Recipe, activation: MlpActivation, norm: (NormKind, bool)) {
    let mut mlp = mlp(recipe, activation, norm);
    let linears = |mlp: &LayerNormMlp| [mlp.linear_inner.clone(), mlp.linear_outer.clone()];
    let [inner, outer] = linears(&mlp);
    let layers = [&inner, &outer];
    let expected = run(&mlp.norm, &layers, |x| {
        let normed = separate_norm(&mlp.norm, norm, x);
        let hidden = separate_activation(activation, inner.forward(normed.clone()));
        (outer.forward(hidden), normed)
    });
    let fused = matches!(
        activation,
        MlpActivation::Gelu | MlpActivation::GeluExact | MlpActivation::SwiGlu
    );
    for recompute in [false, true] {
        if recompute && !fused {
            continue;
        }
        mlp.recompute = recompute;
        let found = run(&mlp.norm, &layers, |x| {
            mlp.try_forward_with_layernorm_output(x).unwrap()
        });
        let what = format!("{activation:?}, {norm:?}, recompute: {recompute}");
        assert_equal(&what, found, expected.clone());
    }
}

#[test]
fn a_mlp_has_the_bits_of_its_parts() {
    for (index, preset) in presets().into_iter().enumerate() {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let (_, activation) = MlpActivation::NAMES[index % 7];
        check_mlp(&recipe, activation, NORMS[index % 4]);
    }
}

#[test]
fn every_activation_has_the_bits_of_its_parts() {
    skip_where_small_only!();
    for (index, (name, activation)) in MlpActivation::NAMES.into_iter().enumerate() {
        assert_eq!(name.parse::<MlpActivation>().unwrap(), activation);
        let saved = serde_json::to_string(&activation).unwrap();
        assert_eq!(saved, format!("\"{name}\""));
        check_mlp(&Nvfp4Recipe::new(), activation, NORMS[index % 4]);
    }
}

#[test]
fn a_linear_layer_has_the_bits_of_its_parts() {
    let device = device().autodiff();
    for (index, preset) in presets().into_iter().enumerate() {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let norm = NORMS[index % 4];
        let mut layer = LayerNormLinearConfig::new(WIDTH, HIDDEN)
            .with_normalization(norm.0)
            .with_zero_centered_gamma(norm.1)
            .with_epsilon(EPSILON)
            .with_recipe(recipe.clone())
            .init(&device);
        recipe.apply(&layer).unwrap();
        filled(&mut layer.norm, norm, &device);
        let linear = layer.linear.clone();
        let expected = run(&layer.norm, &[&linear], |x| {
            let normed = separate_norm(&layer.norm, norm, x);
            (linear.forward(normed.clone()), normed)
        });
        let found = run(&layer.norm, &[&linear], |x| {
            layer.try_forward_with_layernorm_output(x).unwrap()
        });
        assert_equal(&format!("{preset}, {norm:?}"), found, expected);
    }
}

/// A zero-centered γ of 0 is a γ of 1.
#[test]
fn a_zero_centered_gamma_is_one_less() {
    skip_where_small_only!();
    let device = device();
    let x = Matrix::gaussian(TOKENS, WIDTH, activation(), 4).tensor(&device);
    for kind in [NormKind::LayerNorm, NormKind::RmsNorm] {
        let config = LayerNormLinearConfig::new(WIDTH, HIDDEN).with_normalization(kind);
        let [centered, plain] = [true, false].map(|zero_centered| {
            let layer = config.clone().with_zero_centered_gamma(zero_centered);
            let layer = layer.init(&device);
            values(layer.norm.forward(x.clone()))
        });
        assert_eq!(centered, plain);
    }
}

#[derive(Module, Debug)]
struct BurnLinear {
    norm: burn_nn::LayerNorm,
    linear: burn_nn::Linear,
}

#[derive(Module, Debug)]
struct BurnMlp {
    norm: burn_nn::RmsNorm,
    linear_inner: burn_nn::Linear,
    linear_outer: burn_nn::Linear,
}

#[test]
fn records_are_those_of_burn_nns_modules() {
    flex_only!();
    let device = device();
    let linear = |d_in, d_out| burn_nn::LinearConfig::new(d_in, d_out).init(&device);
    let ours: LayerNormLinear = LayerNormLinearConfig::new(WIDTH, HIDDEN).init(&device);
    let burns = BurnLinear {
        norm: burn_nn::LayerNormConfig::new(WIDTH).init(&device),
        linear: linear(WIDTH, HIDDEN),
    };
    assert_same_record(ours, burns);
    let ours = LayerNormMlpConfig::new(WIDTH, HIDDEN)
        .with_normalization(NormKind::RmsNorm)
        .with_activation(MlpActivation::ReGlu)
        .init(&device);
    let burns = BurnMlp {
        norm: burn_nn::RmsNormConfig::new(WIDTH).init(&device),
        linear_inner: linear(WIDTH, 2 * HIDDEN),
        linear_outer: linear(HIDDEN, WIDTH),
    };
    assert_same_record(ours, burns);
}

/// Norms are taken over with ids and ε.
#[test]
fn norms_are_taken_over() {
    skip_where_small_only!();
    let device = device();
    let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 4).tensor(&device);
    let mut norm = LayerNormConfig::new(WIDTH).with_epsilon(0.5).init(&device);
    norm.gamma = vector(31, &device);
    let taken = InputNorm::from(norm.clone());
    assert_eq!(taken.gamma.id, norm.gamma.id);
    assert_eq!(
        taken.beta.as_ref().unwrap().id,
        norm.beta.as_ref().unwrap().id
    );
    assert_eq!(
        values(taken.forward(x.clone())),
        values(norm.forward(x.clone()))
    );
    let norm = RmsNormConfig::new(WIDTH).with_epsilon(0.5).init(&device);
    let taken = InputNorm::from(norm.clone());
    assert_eq!(taken.gamma.id, norm.gamma.id);
    assert!(taken.beta.is_none());
    assert_eq!(values(taken.forward(x.clone())), values(norm.forward(x)));
}

/// Experts with every activation have the bits of their layers.
#[test]
fn experts_have_the_bits_of_their_parts() {
    skip_where_small_only!();
    let device = device().autodiff();
    let counts = Tensor::<1, Int>::from_data([5, 0, 14], &device);
    let experts = ExpertOffsets::from_counts(counts, 19);
    for (name, activation) in MlpActivation::NAMES {
        let linear = |d_in, d_out| Nvfp4GroupedLinearConfig::new(3, d_in, d_out).init(&device);
        let inner = linear(WIDTH, activation.inputs() * HIDDEN);
        let outer = linear(HIDDEN, WIDTH);
        let run = |forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            for (number, layer) in [&inner, &outer].into_iter().enumerate() {
                let old = layer.state.rng_state();
                let layer_id = number as u64;
                let state = RngState {
                    layer: layer_id,
                    offset: 0,
                    ..old
                };
                layer.state.set_rng_state(state).unwrap();
            }
            let x = Matrix::gaussian(19, WIDTH, crate::support::activation(), 4).tensor(&device);
            let x = x.require_grad();
            let y = forward(x.clone());
            let grads = y
                .clone()
                .cast(FloatDType::F32)
                .powi_scalar(2)
                .sum()
                .backward();
            let weights = [&inner, &outer].map(|layer| layer.weight.grad(&grads).unwrap());
            let [first, second] = weights.map(values);
            (values(y), values(x.grad(&grads).unwrap()), first, second)
        };
        let expected = run(&|x| {
            let hidden = separate_activation(activation, inner.forward(x, &experts));
            outer.forward(hidden, &experts)
        });
        let layers = (&inner, &outer);
        let found =
            run(&|x| try_feed_forward_of_experts(layers, activation, x, &experts, false).unwrap());
        assert!(found == expected, "{name}");
    }
}

#[test]
fn bad_arguments_are_named() {
    flex_only!();
    let device = device();
    let error = "silu".parse::<MlpActivation>().unwrap_err().to_string();
    assert!(
        error.contains("`activation`") && error.contains("geglu, swiglu, reglu"),
        "{error}"
    );
    let config = LayerNormMlpConfig::new(WIDTH, HIDDEN);
    let refused = |config: LayerNormMlpConfig| argument(config.try_init(&device));
    assert_eq!(refused(config.clone().with_epsilon(0.0)), "epsilon");
    let relu = config.clone().with_activation(MlpActivation::Relu);
    assert_eq!(refused(relu.with_recompute(true)), "recompute");
    let linear = LayerNormLinearConfig::new(WIDTH, HIDDEN);
    let narrow = LayerNormLinearConfig::new(24, HIDDEN);
    assert_eq!(argument(narrow.try_init(&device)), "d_input");
    assert_eq!(
        argument(linear.clone().with_epsilon(-1.0).try_init(&device)),
        "epsilon"
    );

    let x = |width| Tensor::<2>::zeros([4, width], &device);
    let short = || Param::from_tensor(Tensor::<1>::ones([16], &device));
    let norm = LayerNormConfig::new(WIDTH).init(&device);
    assert_eq!(argument(norm.try_forward(x(16))), "x");
    let mut linear = linear.init(&device);
    assert_eq!(argument(linear.try_forward(x(16))), "x");
    linear.norm.beta = Some(short());
    assert_eq!(argument(linear.try_forward(x(WIDTH))), "norm.beta");
    let mlp = config.init(&device);
    assert_eq!(argument(mlp.try_forward(x(16))), "x");
    let mut other = mlp.clone();
    other.norm.gamma = short();
    assert_eq!(argument(other.try_forward(x(WIDTH))), "norm.gamma");
    let mut other = mlp.clone();
    other.activation = MlpActivation::SwiGlu;
    let found = argument(other.try_forward(x(WIDTH)));
    assert_eq!(found, "linear_outer.weight");
    let mut other = mlp;
    (other.activation, other.recompute) = (MlpActivation::SRelu, true);
    assert_eq!(argument(other.try_forward(x(WIDTH))), "recompute");
}
