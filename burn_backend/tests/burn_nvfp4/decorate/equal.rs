//! A decorated model computes the same as a model of explicit layers, bit for bit.

use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::decorate::GemmFormat;
use burn_nvfp4::telemetry::{OperandSample, Telemetry};
use burn_nvfp4::{Nvfp4Recipe, Nvfp4State, decorate};
use burn_optim::{GradientsAccumulator, GradientsParams, SgdConfig};

use crate::support::own_process::own_process;

use super::models::{
    Plain, assert_same_step, bits, device, explicit_grads, pair, plain_grads, small_only, tensor,
};

/// Runs `steps` of training on inputs of `shape`; every number of both models must be the same.
fn assert_equal<const D: usize>(
    what: &str,
    shape: [usize; D],
    tracked: bool,
    biases: bool,
    dtype: DType,
    steps: usize,
    device: &Device,
) {
    let plain = Plain::new(biases, device).typed(dtype);
    let (mut decorated, mut explicit) = pair(plain, &Nvfp4Recipe::new().with_seed(3));
    let (mut one, mut other) = (SgdConfig::new().init(), SgdConfig::new().init());
    for step in 0..steps {
        let what = format!("{what}, step {step}");
        let x = tensor(shape, 10 + step as u64, dtype, device);
        let (g1, g2) = assert_same_step(&what, &decorated, &explicit, x, tracked);
        assert!(plain_grads(&decorated, &g1).iter().all(Option::is_some));
        let g1 = GradientsParams::from_grads(g1, &decorated);
        let g2 = GradientsParams::from_grads(g2, &explicit);
        decorated = one.step(0.05, decorated, g1);
        explicit = other.step(0.05, explicit, g2);
    }
    let report = decorate::report(&decorated).unwrap();
    eprintln!("{what}\n{report}");
    report.check().unwrap();
    assert!(report.is_all(GemmFormat::Nvfp4), "{what}: {report}");
    let steps = steps as u64;
    for layer in ["first", "second"] {
        let ran = &report.layers[layer];
        assert_eq!(ran.forward.nvfp4, steps, "{what}: {layer}");
        assert_eq!(ran.wgrad.nvfp4, steps, "{what}: {layer}");
        assert_eq!(ran.wgrad_wasted, 0, "{what}: {layer}");
        assert_eq!(ran.bias_after, 0, "{what}: {layer}");
        let dgrads = if tracked || layer == "second" {
            steps
        } else {
            0
        };
        assert_eq!(ran.dgrad.nvfp4, dgrads, "{what}: {layer}");
    }
    assert_eq!(
        Nvfp4State::collect(&decorated),
        Nvfp4State::collect(&explicit),
        "{what}"
    );
}

fn dtypes() -> Vec<DType> {
    if small_only() {
        vec![DType::F32]
    } else {
        vec![DType::F32, DType::BF16]
    }
}

fn steps() -> usize {
    if small_only() { 2 } else { 5 }
}

#[test]
fn matrices() {
    own_process!("decorate");
    let device = device().autodiff();
    for dtype in dtypes() {
        assert_equal("2-D", [32, 32], true, true, dtype, steps(), &device);
    }
}

#[test]
fn constant_inputs() {
    own_process!("decorate");
    let device = device().autodiff();
    for dtype in dtypes() {
        assert_equal(
            "constant input",
            [32, 32],
            false,
            true,
            dtype,
            steps(),
            &device,
        );
    }
}

#[test]
fn batches_that_burn_folds() {
    own_process!("decorate");
    let device = device().autodiff();
    for dtype in dtypes() {
        assert_equal(
            "3-D, folded",
            [4, 6, 32],
            true,
            true,
            dtype,
            steps(),
            &device,
        );
    }
}

/// With a multiple of 32 tokens Burn keeps the batch axis: the weight's gradient is a batch of
/// GEMMs and their sum.
#[test]
fn batches_that_burn_keeps() {
    own_process!("decorate");
    let device = device().autodiff();
    for dtype in dtypes() {
        assert_equal(
            "3-D, kept",
            [2, 32, 32],
            true,
            true,
            dtype,
            steps(),
            &device,
        );
        assert_equal(
            "3-D, kept, constant",
            [2, 32, 32],
            false,
            false,
            dtype,
            1,
            &device,
        );
    }
}

#[test]
fn four_axes_without_biases() {
    own_process!("decorate");
    let device = device().autodiff();
    assert_equal(
        "4-D",
        [2, 1, 32, 32],
        true,
        false,
        DType::F32,
        steps(),
        &device,
    );
}

/// Gradient checkpointing recomputes activations; the numbers are the same, and no offset is drawn
/// twice.
#[test]
fn gradient_checkpointing() {
    own_process!("decorate");
    let device = device().autodiff().gradient_checkpointing();
    let plain = Plain::new(true, &device);
    let (decorated, explicit) = pair(plain, &Nvfp4Recipe::new());
    let x = tensor([4, 6, 32], 1, DType::F32, &device).require_grad();
    let (y1, y2) = (decorated.forward(x.clone()), explicit.forward(x));
    assert_eq!(bits(y1.clone().inner()), bits(y2.clone().inner()));
    let (g1, g2) = (y1.sum().backward(), y2.sum().backward());
    assert_eq!(plain_grads(&decorated, &g1), explicit_grads(&explicit, &g2));
    let report = decorate::report(&decorated).unwrap();
    eprintln!("{report}");
    report.check().unwrap();
    assert_eq!(
        Nvfp4State::collect(&decorated),
        Nvfp4State::collect(&explicit)
    );
}

/// Micro-batches draw different bits, and their gradients add up.
#[test]
fn gradient_accumulation() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let (mut one, mut other) = (GradientsAccumulator::new(), GradientsAccumulator::new());
    for seed in 0..2 {
        let x = tensor([32, 32], seed, DType::F32, &device);
        let grads = decorated.forward(x.clone()).sum().backward();
        one.accumulate(&decorated, GradientsParams::from_grads(grads, &decorated));
        let grads = explicit.forward(x).sum().backward();
        other.accumulate(&explicit, GradientsParams::from_grads(grads, &explicit));
    }
    let decorated = SgdConfig::new().init().step(0.1, decorated, one.grads());
    let explicit = SgdConfig::new().init().step(0.1, explicit, other.grads());
    assert_eq!(
        bits(decorated.first.weight.base().inner()),
        bits(explicit.first.weight.val().inner())
    );
    assert_eq!(
        bits(decorated.second.bias.as_ref().unwrap().base().inner()),
        bits(explicit.second.bias.as_ref().unwrap().val().inner())
    );
    decorate::report(&decorated).unwrap().check().unwrap();
}

/// Inference draws nothing and gives the same numbers as a training forward.
#[test]
fn inference() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let x = tensor([6, 32], 1, DType::F32, &device).inner();
    let y = bits(decorated.valid().forward(x.clone()));
    assert_eq!(y, bits(explicit.valid().forward(x)));
    let state = Nvfp4State::collect(&decorated);
    assert!(state.layers.values().all(|layer| layer.offset == 0));
    decorate::report(&decorated).unwrap().check().unwrap();
}

/// High-precision layers remain Burn's own.
#[test]
fn high_precision_layers_are_left_alone() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::new(true, &device);
    let x = tensor([32, 32], 1, DType::F32, &device);
    let hidden = bits(plain.first.forward(x.clone()).inner());
    let recipe =
        Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::from_regex("^first").unwrap()));
    let decorated = decorate(plain, &recipe).unwrap();
    assert_eq!(bits(decorated.first.forward(x.clone()).inner()), hidden);
    decorated.forward(x).sum().backward();
    let report = decorate::report(&decorated).unwrap();
    report.check().unwrap();
    assert!(report.layers["first"].high_precision);
    assert_eq!(report.layers["first"].forward.routed(), 0);
    assert_eq!(report.layers["second"].forward.nvfp4, 1);
}

/// Records are those of the undecorated model, in both directions, and so is the model after
/// `undecorate`.
#[test]
fn records_and_undecorate() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::new(true, &device);
    let bytes = |model: Plain| model.into_record().into_bytes().unwrap().to_vec();
    let before = bytes(plain.clone());
    let decorated = decorate(plain, &Nvfp4Recipe::new()).unwrap();
    assert_eq!(bytes(decorated.clone()), before);
    let loaded = Plain::new(true, &device).load_record(decorated.clone().into_record());
    assert_eq!(bytes(loaded), before);
    let other = decorate(Plain::new(true, &device), &Nvfp4Recipe::new()).unwrap();
    let other = other.load_record(decorated.clone().into_record());
    assert_eq!(bytes(other.clone()), before);

    let x = tensor([32, 32], 1, DType::F32, &device);
    assert_ne!(
        bits(other.forward(x.clone()).inner()),
        bits(decorate::undecorate(decorated.clone()).forward(x).inner())
    );
    let plain = decorate::undecorate(decorated);
    assert!(decorate::report(&plain).is_err());
    assert_eq!(bytes(plain), before);
}

/// Telemetry of a decorated layer equals that of an explicit one.
#[test]
fn telemetry_is_that_of_explicit_layers() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let x = tensor([20, 32], 5, DType::F32, &device);
    let step = |y: Tensor<2>| {
        let grads = y.square().sum().backward();
        drop(grads);
    };
    let telemetry = Telemetry::start(&explicit);
    step(explicit.forward(x.clone().require_grad()));
    let expected = telemetry.finish();
    let telemetry = Telemetry::start(&decorated);
    step(decorated.forward(x.clone().require_grad()));
    let found = telemetry.finish();
    step(decorated.forward(x.require_grad()));
    assert_eq!(found.len(), 10, "{found:?}");
    for (found, expected) in found.into_iter().zip(expected) {
        assert!(
            found.layer.starts_with(&expected.layer),
            "{found:?}, {expected:?}"
        );
        assert!(found.sqnr_db > 10.0, "{found:?}");
        let named = OperandSample {
            layer: expected.layer.clone(),
            ..found
        };
        assert_eq!(named, expected);
    }
}
