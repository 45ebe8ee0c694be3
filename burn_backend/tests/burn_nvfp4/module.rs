//! The layer as a Burn module: checkpoints, modes, and the parameters that it shares with
//! `nn::Linear`.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::store::ModuleRecord;
use burn_core::tensor::{DType, Device, Int, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, nn};

use crate::support::{Matrix, device, flex_only, skip_where_small_only, small_only, values};

#[derive(Module, Debug)]
struct Plain {
    first: Linear,
    rest: Vec<Linear>,
}

#[derive(Module, Debug)]
struct Quantized {
    first: Nvfp4Linear,
    rest: Vec<Nvfp4Linear>,
}

fn plain(device: &Device) -> Plain {
    Plain {
        first: LinearConfig::new(32, 48).init(device),
        rest: vec![LinearConfig::new(48, 16).with_bias(false).init(device)],
    }
}

fn quantized(device: &Device) -> Quantized {
    Quantized {
        first: Nvfp4LinearConfig::new(32, 48).init(device),
        rest: vec![Nvfp4LinearConfig::new(48, 16).with_bias(false).init(device)],
    }
}

/// Converts through bytes, like a file.
fn saved<M: Module>(model: M) -> ModuleRecord {
    ModuleRecord::from_bytes(model.into_record().into_bytes().unwrap()).unwrap()
}

#[test]
fn checkpoints_move_both_ways_with_ids_and_bytes() {
    flex_only!();
    let device = device();
    let source = plain(&device);
    let bytes = |model: Plain| model.into_record().into_bytes().unwrap().to_vec();

    let loaded = quantized(&device).load_record(saved(source.clone()));
    assert_eq!(loaded.first.weight.id, source.first.weight.id);
    assert_eq!(
        loaded.first.bias.as_ref().unwrap().id,
        source.first.bias.as_ref().unwrap().id
    );
    assert_eq!(loaded.rest[0].weight.id, source.rest[0].weight.id);
    assert_eq!(
        values(loaded.first.weight.val()),
        values(source.first.weight.val())
    );

    let record = saved(loaded.clone());
    assert_eq!(record.len(), 3, "two weights and a bias, nothing else");
    let back = plain(&device).load_record(record);
    assert_eq!(
        bytes(back),
        bytes(source.clone()),
        "the same record, byte for byte"
    );
    assert_eq!(
        loaded.into_record().into_bytes().unwrap().to_vec(),
        bytes(source)
    );
}

/// Asserts that `ours` and `burns` have the same record, and that each loads that of the other.
fn assert_same_record<A: Module, B: Module>(ours: A, burns: B) {
    let bytes = |record: ModuleRecord| record.into_bytes().unwrap().to_vec();
    let ours_of_burns = ours.clone().load_record(saved(burns.clone()));
    let expected = bytes(burns.clone().into_record());
    assert_eq!(bytes(ours_of_burns.into_record()), expected);
    let burns_of_ours = burns.load_record(saved(ours.clone()));
    let expected = bytes(ours.into_record());
    assert_eq!(bytes(burns_of_ours.into_record()), expected);
}

/// Norms and embeddings: the same configuration, record and values as burn-nn's modules.
#[test]
fn norms_and_embeddings_replace_burn_nns() {
    flex_only!();
    let device = device();
    let x = Matrix::gaussian(6, 32, DType::F32, 3).tensor(&device);
    let close = |found: Tensor<2>, expected: Tensor<2>| {
        let distance = (found - expected).abs().max().into_scalar::<f32>();
        assert!(distance < 2e-6, "{distance}");
    };

    let ours = nn::RmsNormConfig::new(32).init(&device);
    let burns = burn_nn::RmsNormConfig::new(32).init(&device);
    assert_eq!(ours.epsilon, burns.epsilon);
    close(ours.forward(x.clone()), burns.forward(x.clone()));
    assert_same_record(ours, burns);
    for bias in [true, false] {
        let ours = nn::LayerNormConfig::new(32).with_bias(bias).init(&device);
        let config = burn_nn::LayerNormConfig::new(32).with_bias(bias);
        let burns = config.init(&device);
        close(ours.forward(x.clone()), burns.forward(x.clone()));
        assert_same_record(ours, burns);
    }
    let burns = burn_nn::EmbeddingConfig::new(7, 32).init(&device);
    let ours = nn::EmbeddingConfig::new(7, 32).init(&device);
    let ours = ours.load_record(saved(burns.clone()));
    let ids = Tensor::<2, Int>::from_data([[6, 0, 3]], &device);
    let [found, expected] = [ours.forward(ids.clone()), burns.forward(ids)];
    assert_eq!(values(found), values(expected));
    assert_same_record(ours, burns);
}

#[test]
#[should_panic(expected = "value of `epsilon`: found 0, expected a positive number")]
fn an_epsilon_is_positive() {
    nn::RmsNormConfig::new(32).with_epsilon(0.0).init(&device());
}

#[test]
fn from_linear_and_into_linear_hand_over_the_parameters() {
    flex_only!();
    let device = device();
    let linear = LinearConfig::new(32, 48).init(&device);
    let (weight, bias) = (linear.weight.id, linear.bias.as_ref().unwrap().id);
    let before = values(linear.weight.val());
    let layer = Nvfp4Linear::from_linear(linear, &Nvfp4Recipe::new()).unwrap();
    assert_eq!(
        (layer.weight.id, layer.bias.as_ref().unwrap().id),
        (weight, bias)
    );
    let linear = layer.into_linear();
    assert_eq!(
        (linear.weight.id, linear.bias.as_ref().unwrap().id),
        (weight, bias)
    );
    assert_eq!(values(linear.weight.val()), before);
    assert_eq!(
        linear.forward(Tensor::<2>::zeros([1, 32], &device)).dims(),
        [1, 48]
    );
}

/// A lazily initialized, column-major `nn::Linear` keeps its layout through both conversions.
#[test]
fn column_major_layers_keep_their_record() {
    flex_only!();
    use burn_nn::LinearLayout;
    let device = device();
    let config = LinearConfig::new(32, 48).with_layout(LinearLayout::Col);
    let linear = config.init(&device);
    let record = linear.clone().into_record().into_bytes().unwrap().to_vec();
    let layer = Nvfp4Linear::from_linear(linear, &Nvfp4Recipe::new()).unwrap();
    assert_eq!(
        layer.forward(Tensor::<2>::zeros([1, 32], &device)).dims(),
        [1, 48]
    );
    assert_eq!(
        layer.clone().into_record().into_bytes().unwrap().to_vec(),
        record
    );
    assert_eq!(
        layer
            .into_linear()
            .into_record()
            .into_bytes()
            .unwrap()
            .to_vec(),
        record
    );
}

#[test]
fn valid_computes_the_same_output_and_draws_nothing() {
    skip_where_small_only!();
    let device = device().autodiff();
    let layer = Nvfp4LinearConfig::new(32, 48).init(&device);
    let x = Matrix::gaussian(24, 32, DType::BF16, 81).tensor(&device);
    let valid = layer.valid();
    let output = valid.forward(x.clone().inner());
    assert!(!output.is_autodiff());
    assert_eq!(
        layer.state.rng_state().offset,
        0,
        "an inference draws nothing"
    );
    let training = layer.forward(x.clone());
    assert!(training.is_tracked());
    assert_eq!(layer.state.rng_state().offset, 1);
    assert_eq!(values(output), values(training.inner()));
    let again = valid.train();
    assert_eq!(again.state.rng_state().offset, 1, "the counter went on");
    let grads = again.forward(x).sum().backward();
    assert!(again.weight.grad(&grads).is_some());
    assert_eq!(layer.state.rng_state().offset, 2, "clones are one layer");
}

#[test]
fn a_forward_that_nothing_differentiates_draws_nothing() {
    skip_where_small_only!();
    let device = device().autodiff();
    let layer = Nvfp4LinearConfig::new(32, 32).init(&device).freeze();
    let x = Matrix::gaussian(16, 32, DType::F32, 82).tensor(&device);
    layer.forward(x.clone());
    assert_eq!(layer.state.rng_state().offset, 0);
    layer.forward(x.require_grad());
    assert_eq!(layer.state.rng_state().offset, 1, "dgrad draws");
}

#[test]
fn display_shows_the_layer() {
    flex_only!();
    let text = Nvfp4LinearConfig::new(32, 48).init(&device()).to_string();
    for part in ["Nvfp4Linear", "d_input: 32", "d_output: 48", "bias: true"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Layers that are computed together equal one layer with concatenated weights, in outputs and
/// gradients.
#[test]
fn layers_together_are_one_layer() {
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::new().with_seed(3);
    let layer = |d_output, bias, number| {
        Nvfp4LinearConfig::new(32, d_output)
            .with_bias(bias)
            .with_recipe(recipe.clone())
            .with_layer(Some(number))
            .init(&device)
    };
    let biases: &[bool] = if small_only() {
        &[true]
    } else {
        &[true, false]
    };
    for &bias in biases {
        let mut parts = [layer(16, bias, 7), layer(32, bias, 8), layer(16, bias, 9)];
        // The largest magnitude is in only one of them.
        parts[1].weight = parts[1]
            .weight
            .clone()
            .map(|w| (w * 8.0).detach().require_grad());
        let mut whole = layer(64, bias, 7);
        let weights = parts.iter().map(|part| part.weight.val()).collect();
        whole.weight = Param::from_tensor(Tensor::cat(weights, 1).detach());
        whole.bias = bias.then(|| {
            let biases = parts.iter().map(|part| part.bias.as_ref().unwrap().val());
            Param::from_tensor(Tensor::cat(biases.collect(), 0).detach())
        });
        let x = Matrix::gaussian(24, 32, DType::F32, 1);
        let dy = Matrix::gaussian(24, 64, DType::F32, 2).tensor(&device);
        for _ in 0..2 {
            let (one, two) = (
                x.tensor(&device).require_grad(),
                x.tensor(&device).require_grad(),
            );
            let [q, k, v] = &parts;
            let outputs = Nvfp4Linear::forward_together(&[q, k, v], one.clone());
            let widths: Vec<usize> = outputs.iter().map(|y| y.dims()[1]).collect();
            assert_eq!(widths, [16, 32, 16]);
            let together = Tensor::cat(outputs, 1);
            let expected = whole.forward(two.clone());
            assert_eq!(values(together.clone()), values(expected.clone()));
            let (one_grads, two_grads) = (
                (together * dy.clone()).sum().backward(),
                (expected * dy.clone()).sum().backward(),
            );
            assert_eq!(
                values(one.grad(&one_grads).unwrap()),
                values(two.grad(&two_grads).unwrap())
            );
            let grads = parts
                .iter()
                .map(|part| part.weight.grad(&one_grads).unwrap());
            assert_eq!(
                values(Tensor::cat(grads.collect(), 1)),
                values(whole.weight.grad(&two_grads).unwrap())
            );
        }
        // The first layer draws for all.
        let offsets = [&parts[0], &parts[1], &whole].map(|layer| layer.state.rng_state().offset);
        assert_eq!(offsets, [2, 0, 2]);
    }
    let refused = |layers: &[&Nvfp4Linear], name: &str| {
        let x = Matrix::gaussian(16, 32, DType::F32, 1).tensor(&device);
        let error = Nvfp4Linear::try_forward_together(layers, x)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`layers`") && error.contains(name),
            "{error}"
        );
    };
    let first = layer(16, false, 0);
    let wide = Nvfp4LinearConfig::new(48, 16)
        .with_bias(false)
        .init(&device);
    let other = Nvfp4LinearConfig::new(32, 16)
        .with_bias(false)
        .init(&device);
    refused(&[], "none");
    refused(&[&first, &wide], "d_input 48");
    refused(&[&first, &layer(16, true, 1)], "a bias: true");
    refused(&[&first, &other], "recipe");
}
