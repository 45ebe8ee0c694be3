//! Whole models with packed weights: against the oracle, against their own high-precision form, as
//! records, and beside a training model.

use burn_core as burn;

use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::activation::relu;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nn::conv::{Conv2d, Conv2dConfig};
use burn_nn::{Linear, LinearConfig, transformer as burn_transformer};
use burn_nvfp4::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn_nvfp4::nn::{self, Activations, RopeCacheConfig};
use burn_nvfp4::quantize::{Kept, KeptParameter, PackedLayer, dequantize};
use burn_nvfp4::{
    Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4TransformerBlockConfig,
    QuantizeConfig, QuantizeReport, Rounding, Usage, quantize, quantize_calibrated,
};
use nvfp4_formats::{Amax, BlockScaling, QuantParams, reference};

use crate::module::saved;
use crate::support::{Matrix, burn_matmul_error, device, skip_where_small_only, sqnr, values};

const D: usize = 32;
const HIDDEN: usize = 48;

/// Two layers, of burn-nn or of this crate.
#[derive(Module, Debug)]
struct Mlp<L: Module> {
    up: L,
    down: L,
}

fn burns(device: &Device) -> Mlp<Linear> {
    Mlp {
        up: LinearConfig::new(D, HIDDEN).init(device),
        down: LinearConfig::new(HIDDEN, 10).init(device),
    }
}

fn ours(device: &Device) -> Mlp<Nvfp4Linear> {
    Mlp {
        up: Nvfp4LinearConfig::new(D, HIDDEN).init(device),
        down: Nvfp4LinearConfig::new(HIDDEN, D).init(device),
    }
}

impl Mlp<Nvfp4Linear> {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(relu(self.up.forward(x)))
    }
}

fn input(rows: usize, seed: u64) -> Tensor<2> {
    Matrix::gaussian(rows, D, DType::F32, seed).tensor(&device())
}

fn config(activations: Activations) -> QuantizeConfig {
    QuantizeConfig::new().with_activations(activations)
}

/// Quantizes and dequantizes rows of `k` values by the oracle. With a static `scale`, values beyond
/// it saturate.
fn rounded(x: &[f32], k: usize, scale: Option<f32>) -> Vec<f32> {
    let (scaling, amax) = match scale {
        Some(scale) => (BlockScaling::Static, scale),
        None => (BlockScaling::Standard, reference::amax(x)),
    };
    let params = QuantParams {
        scaling,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    let amax = Amax::Tensor(amax);
    let made = reference::quantize(x, x.len() / k, k, Usage::Rowwise, &amax, &params, 0);
    reference::dequantize(&made.unwrap())
}

/// Returns the values of a weight `[d_in, d_out]` after quantization, transposed.
fn packed_values(weight: Tensor<2>) -> Vec<f32> {
    let d_in = weight.dims()[0];
    rounded(&values(weight.transpose()), d_in, None)
}

/// Computes `x wᵀ + bias`.
fn product(x: &[f32], w: &[f32], k: usize, bias: &[f32]) -> Vec<f32> {
    let rows = x.chunks(k).flat_map(|x| {
        w.chunks(k).zip(bias).map(move |(w, bias)| {
            let sum: f64 = x
                .iter()
                .zip(w)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum();
            (sum + f64::from(*bias)) as f32
        })
    });
    rows.collect()
}

#[track_caller]
fn near(found: &[f32], expected: &[f32], bound: f32) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= bound * largest, "[{i}]: {a}, not {b}");
    }
}

#[track_caller]
fn refused<T>(result: Result<(T, QuantizeReport), Nvfp4Error>, parts: &[&str]) {
    let Err(error) = result else {
        panic!("not refused");
    };
    let error = error.to_string();
    for part in parts {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn burns_layers_multiply_by_the_packed_values() {
    let model = burns(&device());
    let (packed, report) = quantize(model.clone(), &QuantizeConfig::new()).unwrap();
    assert_eq!(report.layers.len(), 2);
    assert!(report.kept.is_empty());
    let layers = [(&model.up, &packed.up), (&model.down, &packed.down)];
    for ((high, low), row) in layers.into_iter().zip(&report.layers) {
        assert_eq!(low.weight.id, high.weight.id);
        let [k, n] = high.weight.dims();
        assert_eq!(low.weight.base().dims(), [k, 1], "the weight is freed");
        let w = packed_values(high.weight.val());
        assert!(values(low.weight.val().transpose()) == w);
        let x = Matrix::gaussian(5, k, DType::F32, 2).tensor(&device());
        let bias = values(high.bias.as_ref().unwrap().val());
        let expected = product(&values(x.clone()), &w, k, &bias);
        near(&values(low.forward(x)), &expected, burn_matmul_error(1e-6));

        assert_eq!((&row.shape[..], row.format()), (&[k, n][..], "W4A16"));
        assert_eq!(row.bytes_before, 4 * k * n);
        assert_eq!(row.bytes, k * n / 2 + k * n / 16 + 4);
        let exact = values(high.weight.val().transpose());
        assert_eq!(row.amax, reference::amax(&exact));
        assert!((row.sqnr_db - sqnr(&exact, &w)).abs() < 1e-3);
    }
    assert_eq!(report.layers[1].path, "down");
    let text = report.to_string();
    assert!(
        text.contains("W4A16") && text.contains("[48, 10]"),
        "{text}"
    );
}

#[test]
fn own_layers_quantize_their_inputs() {
    for bias in [true, false] {
        let layer = Nvfp4LinearConfig::new(D, HIDDEN)
            .with_bias(bias)
            .init(&device());
        let w = packed_values(layer.weight.val());
        let bias = layer.bias.as_ref().map(|bias| values(bias.val()));
        let bias = bias.unwrap_or(vec![0.0; HIDDEN]);
        let x = input(7, 3);
        let exact = values(x.clone());
        let check_within = |model: Vec<Nvfp4Linear>, x_values: &[f32], bound: f32| {
            let expected = product(x_values, &w, D, &bias);
            near(&values(model[0].forward(x.clone())), &expected, bound);
        };
        let check = |model, x_values: &[f32]| check_within(model, x_values, 1e-6);
        let model = vec![layer];
        let (packed, _) = quantize(model.clone(), &QuantizeConfig::new()).unwrap();
        check_within(packed, &exact, burn_matmul_error(1e-6));
        let dynamic = config(Activations::DYNAMIC);
        let (packed, report) = quantize(model.clone(), &dynamic).unwrap();
        assert_eq!(report.layers[0].format(), "W4A4");
        check(packed, &rounded(&exact, D, None));

        // The largest of all batches counts, and values beyond it saturate.
        let batches = [input(4, 8) * 0.25, input(6, 9) * 0.5, input(2, 10) * 0.125];
        let amax = batches
            .iter()
            .map(|batch| reference::amax(&values(batch.clone())));
        let amax = amax.fold(0f32, f32::max);
        assert!(amax < reference::amax(&exact));
        let run = |model: &Vec<Nvfp4Linear>| {
            for batch in &batches {
                model[0].forward(batch.clone());
            }
        };
        let fixed = config(Activations::Static);
        let (packed, report) = quantize_calibrated(model, &fixed, run).unwrap();
        assert_eq!(report.layers[0].format(), "W4A4 static");
        check(packed, &rounded(&exact, D, Some(amax / 2688.0)));
    }
}

/// Modules that fuse their layers compute with packed weights what they compute in high precision
/// with the same values.
#[test]
fn modules_of_this_crate_multiply_by_the_packed_values() {
    skip_where_small_only!();
    let device = device();
    let recipe = Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()));
    let x = Matrix::gaussian(12, 64, DType::F32, 4).tensor(&device);
    let x = x.reshape([2, 6, 64]);
    let positions = RopeCacheConfig::new(6, 16).init(&device);
    let block = Nvfp4TransformerBlockConfig::new(64, 4, 96).with_recipe(recipe.clone());
    let moe = block
        .clone()
        .with_experts(Some(4))
        .with_shared_hidden(Some(32));
    for (config, layers) in [(block, 4), (moe, 6)] {
        let block = config.init(&device);
        recipe.apply(&block).unwrap();
        let (packed, report) = quantize(block, &QuantizeConfig::new()).unwrap();
        assert_eq!(report.layers.len(), layers, "{report}");
        let found = packed.forward(x.clone(), &positions).output;
        let expected = dequantize(packed.clone());
        let expected = expected.forward(x.clone(), &positions).output;
        near(&values(found), &values(expected), burn_matmul_error(1e-5));
    }
    let swiglu = nn::SwiGluConfig::new(64, 32)
        .with_recipe(recipe.clone())
        .init(&device);
    recipe.apply(&swiglu).unwrap();
    let (packed, _) = quantize(swiglu, &QuantizeConfig::new()).unwrap();
    let expected = dequantize(packed.clone()).forward(x.clone());
    near(&values(packed.forward(x)), &values(expected), 1e-5);
}

/// burn-nn's encoder and its replacement have the same packed weights.
#[test]
fn encoders_agree() {
    skip_where_small_only!();
    let device = device();
    let burns = burn_transformer::TransformerEncoderConfig::new(D, HIDDEN, 2, 2).with_dropout(0.0);
    let burns = burns.init(&device);
    let ours = TransformerEncoderConfig::new(D, HIDDEN, 2, 2).with_dropout(0.0);
    let ours = ours.init(&device).load_record(saved(burns.clone()));
    let (burns, report) = quantize(burns, &QuantizeConfig::new()).unwrap();
    assert_eq!(report.layers.len(), 2 * 6, "{report}");
    let (ours, same) = quantize(ours, &QuantizeConfig::new()).unwrap();
    for (burns, ours) in report.layers.iter().zip(&same.layers) {
        assert!(!ours.dequantizes);
        let dequantizes = burns.dequantizes;
        let ours = ours.clone();
        assert_eq!(
            *burns,
            PackedLayer {
                dequantizes,
                ..ours
            }
        );
    }
    assert_eq!((same.layers.len(), &same.kept), (12, &report.kept));
    let x = input(10, 5).reshape([2, 5, D]);
    let expected = burn_transformer::TransformerEncoderInput::new(x.clone());
    let expected = values(burns.forward(expected));
    let found = values(ours.forward(TransformerEncoderInput::new(x)));
    near(&found, &expected, burn_matmul_error(1e-5));
}

#[derive(Module, Debug)]
struct Vision {
    stem: Conv2d,
    narrow: Linear,
    body: Linear,
    head: Linear,
}

fn vision() -> Vision {
    let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).init(&device());
    Vision {
        stem: Conv2dConfig::new([3, 16], [2, 2]).init(&device()),
        narrow: linear(20, 16),
        body: linear(32, 48),
        head: linear(48, 16),
    }
}

#[test]
fn what_is_kept_has_a_reason() {
    let model = vision();
    let (packed, report) = quantize(model.clone(), &QuantizeConfig::new()).unwrap();
    let kept: Vec<_> = (report.kept.iter())
        .map(|kept| (&*kept.path, kept.reason, kept.bytes))
        .collect();
    let expected = [
        ("stem.weight", Kept::NotLinear, 4 * 16 * 3 * 4),
        ("narrow", Kept::Width, 4 * 20 * 16),
        ("head", Kept::HeadOrRouter, 4 * 48 * 16),
    ];
    assert_eq!(kept, expected);
    assert_eq!(report.layers.len(), 1);
    assert!(report.to_string().contains("multiple of 16"), "{report}");
    assert!(values(packed.stem.weight.val()) == values(model.stem.weight.val()));
    assert!(values(packed.head.weight.val()) == values(model.head.weight.val()));

    let all = QuantizeConfig::new()
        .include(ParamGroup::from_path("head.weight"))
        .exclude(ParamGroup::from_path("body.weight"));
    let (_, report) = quantize(model, &all).unwrap();
    assert_eq!(report.layers[0].path, "head");
    let excluded = |kept: &KeptParameter| kept.path == "body" && kept.reason == Kept::Excluded;
    assert!(report.kept.iter().any(excluded), "{report}");
}

#[test]
fn records_hold_packed_weights() {
    let x = input(3, 6);
    let run = |model: &Mlp<Nvfp4Linear>| {
        model.forward(input(4, 7));
    };
    let fixed = config(Activations::Static);
    let (source, report) = quantize_calibrated(ours(&device()), &fixed, run).unwrap();
    let expected = values(source.forward(x.clone()));
    let bytes = source.clone().into_record().into_bytes().unwrap().len();
    assert!(bytes < report.bytes_before() / 2, "{bytes}");
    // Codes, two kinds of scales, the scale of the input, the place of the weight, and the bias.
    assert_eq!(saved(source.clone()).len(), 2 * 6);

    let (empty, _) = quantize(ours(&device()), &fixed).unwrap();
    assert!(values(empty.forward(x.clone())).iter().all(|y| y.is_nan()));
    let loaded = empty.clone().load_record(saved(source.clone()));
    assert!(values(loaded.forward(x.clone())) == expected);
    let path = std::env::temp_dir().join(format!("nvfp4-quantize-{}.bpk", std::process::id()));
    source.clone().save_file(&path).unwrap();
    let loaded = empty.clone().load_file(&path);
    assert!(values(loaded.forward(x)) == expected);
    // Tensors read the file when they are used.
    std::fs::remove_file(&path).unwrap();

    let fails = |model: Mlp<Nvfp4Linear>, record, part: &str| {
        let error = model.try_load_record(record).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    let (weight_only, _) = quantize(ours(&device()), &QuantizeConfig::new()).unwrap();
    fails(weight_only, saved(source.clone()), "up.weight.nvfp4.input");
    fails(ours(&device()), saved(source.clone()), "up.weight");
    fails(empty, saved(ours(&device())), "up.weight");
    let mut wider = ours(&device());
    wider.up = Nvfp4LinearConfig::new(2 * D, HIDDEN).init(&device());
    let (wider, _) = quantize(wider, &fixed).unwrap();
    fails(wider, saved(source), "up.weight.nvfp4.packed.codes");
}

/// Evaluation with packed weights between two training steps.
#[test]
fn a_training_model_is_not_touched() {
    skip_where_small_only!();
    let autodiff = device().autodiff();
    let model = ours(&autodiff);
    let weights =
        |model: &Mlp<Nvfp4Linear>| [&model.up, &model.down].map(|l| values(l.weight.val()));
    let before = weights(&model);
    let gradient = |model: &Mlp<Nvfp4Linear>| {
        let x = Tensor::from_inner(input(16, 11));
        let grads = model.forward(x).square().sum().backward();
        values(model.up.weight.grad(&grads).expect("tracked"))
    };
    let (packed, _) = quantize(model.valid(), &config(Activations::DYNAMIC)).unwrap();
    let y = packed.forward(input(3, 12));
    assert!(!y.is_autodiff());
    assert!(values(packed.down.weight.val()) != before[1]);
    assert!(weights(&model) == before);
    assert!(gradient(&model).iter().all(|dx| dx.is_finite()));

    // On the device of the training, packed weights have no gradient, and inputs do.
    let (packed, _) = quantize(model, &config(Activations::DYNAMIC)).unwrap();
    let x = Tensor::from_inner(input(3, 12)).require_grad();
    let tracked = packed.forward(x.clone());
    assert!(values(tracked.clone().inner()) == values(y.clone()));
    let grads = tracked.sum().backward();
    assert_eq!(x.grad(&grads).expect("tracked").dims(), [3, D]);
    assert!(values(packed.valid().forward(x.inner())) == values(y));
}

#[test]
fn wrong_arguments_are_named() {
    let device = device();
    let weight_only = QuantizeConfig::new();
    let conv = || vec![Conv2dConfig::new([1, 1], [1, 1]).init(&device)];
    refused(
        quantize(conv(), &weight_only),
        &["`model`", "no linear layer"],
    );
    let narrow = vec![LinearConfig::new(20, 16).init(&device)];
    refused(
        quantize(narrow, &weight_only),
        &["`model`", "0 [20, 16]", "16"],
    );
    let nothing = || ParamGroup::from_path("nothing");
    let include = weight_only.clone().include(nothing());
    refused(quantize(vision(), &include), &["`include`", "nothing"]);
    let exclude = weight_only.clone().exclude(nothing());
    refused(quantize(vision(), &exclude), &["`exclude`", "nothing"]);
    let (packed, _) = quantize(vision(), &weight_only).unwrap();
    refused(quantize(packed, &weight_only), &["`model`", "body.weight"]);

    let [dynamic, fixed] = [Activations::DYNAMIC, Activations::Static].map(config);
    for config in [&dynamic, &fixed] {
        refused(quantize(burns(&device), config), &["`config`", "`up`"]);
    }
    let never = |_: &Mlp<Nvfp4Linear>| unreachable!("the configuration is refused first");
    refused(
        quantize_calibrated(ours(&device), &dynamic, never),
        &["`config`", "Static"],
    );
    let half = |model: &Mlp<Nvfp4Linear>| {
        model.up.forward(input(1, 1));
        model.down.forward(Tensor::<2>::zeros([0, HIDDEN], &device));
    };
    refused(
        quantize_calibrated(ours(&device), &fixed, half),
        &["`run`", "no batch in down,"],
    );
    let broken = |model: &Mlp<Nvfp4Linear>| {
        model.forward(input(1, 1) * f32::NAN);
    };
    refused(
        quantize_calibrated(ours(&device), &fixed, broken),
        &["`run`", "not finite in up"],
    );
}
