//! Layers with the norm before them, sharded, compared with one device.

use burn_core::module::Param;
use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::Nvfp4Linear;
use burn_nvfp4::nn::tensor_parallel::{TensorParallelLayerNormLinear, TensorParallelLayerNormMlp};
use burn_nvfp4::nn::{
    InputNorm, LayerNormLinear, LayerNormLinearConfig, LayerNormMlp, LayerNormMlpConfig,
    MlpActivation, NormKind,
};

use super::super::on_ranks;
use super::model::{fixed, matrix, parallel, runs, tokens};
use super::{bits, distance, own};
use crate::support::{activation, device};

const TOKENS: usize = 64;
const WIDTH: usize = 64;
const HIDDEN: usize = 128;

/// Returns a parameter that is the same on all ranks.
fn vector(width: usize, seed: u64) -> Param<Tensor<1>> {
    let values = matrix(1, width, DType::F32, seed).reshape([width]);
    Param::from_tensor(values.detach().require_grad())
}

fn norm(norm: &mut InputNorm) {
    norm.gamma = vector(WIDTH, 21);
    norm.beta = norm.beta.take().map(|_| vector(WIDTH, 22));
}

fn linear_of(linear: &mut Nvfp4Linear, id: u64) {
    fixed(linear, id);
    let [_, d_out] = linear.weight.dims();
    linear.bias = Some(vector(d_out, 30 + id));
}

fn mlp(of: MlpActivation) -> LayerNormMlp {
    let mut mlp = LayerNormMlpConfig::new(WIDTH, HIDDEN)
        .with_zero_centered_gamma(true)
        .with_activation(of)
        .init(&device().autodiff());
    norm(&mut mlp.norm);
    linear_of(&mut mlp.linear_inner, 1);
    linear_of(&mut mlp.linear_outer, 2);
    mlp
}

fn linear() -> LayerNormLinear {
    let mut layer = LayerNormLinearConfig::new(WIDTH, 3 * HIDDEN)
        .with_normalization(NormKind::RmsNorm)
        .init(&device().autodiff());
    norm(&mut layer.norm);
    linear_of(&mut layer.linear, 3);
    layer
}

/// Outputs of a layer and of its norm, and the gradients of its input, of γ and of β.
struct Pass {
    y: Tensor<2>,
    normed: Tensor<2>,
    dx: Tensor<2>,
    factors: Vec<Tensor<1>>,
}

fn pass(
    x: Tensor<2>,
    dy: Tensor<2>,
    norm: &InputNorm,
    forward: impl Fn(Tensor<2>) -> (Tensor<2>, Tensor<2>),
) -> Pass {
    let x = x.detach().require_grad();
    let (y, normed) = forward(x.clone());
    let grads = (y.clone() * dy).sum().backward();
    let factors = [Some(&norm.gamma), norm.beta.as_ref()];
    let factors = factors.into_iter().flatten();
    Pass {
        y: y.inner(),
        normed: normed.inner(),
        dx: x.grad(&grads).unwrap(),
        factors: factors.map(|factor| factor.grad(&grads).unwrap()).collect(),
    }
}

/// Returns the gradients of γ and β of a rank and of one device, whose sums have another order.
fn assert_near(what: &str, found: Vec<Tensor<1>>, expected: Vec<Tensor<1>>) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.into_iter().zip(expected) {
        let distance = distance(found, expected);
        assert!(distance < 2e-6, "{what}: {distance}");
    }
}

#[test]
fn a_mlp_has_the_bits_of_one_device() {
    for (index, &(size, by_tokens)) in runs().iter().enumerate() {
        let of = [
            MlpActivation::SwiGlu,
            MlpActivation::SRelu,
            MlpActivation::GeGlu,
            MlpActivation::Gelu,
        ][index];
        on_ranks(size, |group| {
            let parallel = parallel(group, by_tokens);
            let [x, dy] = [3, 4].map(|seed| matrix(TOKENS, WIDTH, activation(), seed));
            let whole = mlp(of);
            let expected = pass(x.clone(), dy.clone(), &whole.norm, |x| {
                whole.try_forward_with_layernorm_output(x).unwrap()
            });
            let layer = TensorParallelLayerNormMlp::from_layer_norm_mlp(mlp(of), &parallel);
            let layer = layer.unwrap();
            let (own_x, own_dy) = (tokens(x, &parallel), tokens(dy, &parallel));
            let found = pass(own_x, own_dy, &layer.norm, |x| {
                layer.try_forward_with_layernorm_output(x).unwrap()
            });
            let what = format!("{of:?}, {size} ranks, by tokens: {by_tokens}");
            let own = |x| bits(tokens(x, &parallel));
            assert!(bits(found.y) == own(expected.y), "{what}: y");
            assert!(bits(found.normed) == own(expected.normed), "{what}: normed");
            assert!(bits(found.dx) == own(expected.dx), "{what}: dx");
            assert_near(&what, found.factors, expected.factors);
            assert_eq!(layer.sharded_parameters().len(), 3, "{what}");
            let back = layer.into_layer_norm_mlp();
            let weights = [&back, &whole].map(|mlp| bits(mlp.linear_inner.weight.val()));
            assert!(weights[0] == weights[1], "{what}");
        });
    }
}

#[test]
fn a_linear_layer_has_the_bits_of_one_device() {
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
            let x = matrix(TOKENS, WIDTH, activation(), 3);
            let dy = matrix(TOKENS, 3 * HIDDEN, activation(), 4);
            let whole = linear();
            let expected = pass(x.clone(), dy.clone(), &whole.norm, |x| {
                whole.try_forward_with_layernorm_output(x).unwrap()
            });
            let widths = [HIDDEN; 3];
            let layer = TensorParallelLayerNormLinear::from_segments(linear(), &widths, &parallel);
            let layer = layer.unwrap();
            // A rank has its columns of each of the three parts.
            let columns = |x: Tensor<2>| {
                let parts = x.chunk(3, 1).into_iter();
                Tensor::cat(parts.map(|part| own(part, 1, rank, size)).collect(), 1)
            };
            let found = pass(tokens(x, &parallel), columns(dy), &layer.norm, |x| {
                layer.try_forward_with_layernorm_output(x).unwrap()
            });
            let what = format!("{size} ranks, by tokens: {by_tokens}");
            assert!(bits(found.y) == bits(columns(expected.y)), "{what}: y");
            let own = |x| bits(tokens(x, &parallel));
            assert!(bits(found.normed) == own(expected.normed), "{what}: normed");
            assert!(bits(found.dx) == own(expected.dx), "{what}: dx");
            assert_near(&what, found.factors, expected.factors);
            let back = layer.into_layer_norm_linear();
            let weights = [&back, &whole].map(|layer| bits(layer.linear.weight.val()));
            assert!(weights[0] == weights[1], "{what}");
        });
    }
}
