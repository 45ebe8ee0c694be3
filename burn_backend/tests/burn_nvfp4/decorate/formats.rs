//! Recipes and modes through the decorator: the numbers are those of explicit layers, and the
//! report gives the formats of their GEMMs.

use burn_core::module::Module;
use burn_core::tensor::DType;
use burn_nvfp4::decorate::{GemmFormat, LayerReport};
use burn_nvfp4::recipe::RecipeSchedule;
use burn_nvfp4::{LayerMode, Nvfp4Recipe, decorate, set_mode};

use crate::support::own_process::own_process;

use super::models::{Plain, assert_same_step, bits, device, pair, tensor};

use GemmFormat::{HighPrecision, Mxfp4, Mxfp8, Nvfp4, Nvfp4Mixed};

/// Asserts that the GEMMs of `layer` ran once in each role, in these formats.
fn assert_ran(what: &str, layer: &LayerReport, formats: [GemmFormat; 3]) {
    for (role, format) in layer.roles().into_iter().zip(formats) {
        assert_eq!(
            (role.of(format), role.routed()),
            (1, 1),
            "{what}: {layer:?}"
        );
    }
}

/// Runs a step with a preset; checks the formats of its forward, input gradient and weight
/// gradient.
fn preset(name: &str, formats: [GemmFormat; 3]) {
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::preset(name).unwrap().with_seed(9);
    let (decorated, explicit) = pair(Plain::new(true, &device), &recipe);
    // The number of tokens fills neither a block nor a transform.
    let x = tensor([3, 20, 32], 4, DType::F32, &device);
    assert_same_step(name, &decorated, &explicit, x, true);
    let report = decorate::report(&decorated).unwrap();
    eprintln!("{name}\n{report}");
    report.check().unwrap();
    for path in ["first", "second"] {
        assert_ran(name, &report.layers[path], formats);
    }
    assert_eq!(report.is_all(Nvfp4), formats == [Nvfp4; 3], "{name}");
    for format in formats {
        assert!(report.to_string().contains(&format!("1 {format}")));
    }
}

/// Creates a test per preset, and one that checks that no preset is missing.
macro_rules! presets {
    ($($name:ident: $formats:expr,)*) => {
        mod presets {
            use super::*;

            $(#[test]
            fn $name() {
                own_process!("decorate");
                preset(stringify!($name), $formats);
            })*

            #[test]
            fn every_preset_is_here() {
                assert!(Nvfp4Recipe::preset_names().eq([$(stringify!($name)),*]));
            }
        }
    };
}

presets! {
    nvidia: [Nvfp4; 3],
    nvidia_4over6: [Nvfp4; 3],
    nvidia_headroom: [Nvfp4; 3],
    quartet2: [Nvfp4; 3],
    per_token: [Nvfp4; 3],
    fwd_nvfp4_bwd_mxfp8: [Nvfp4, Mxfp8, Mxfp8],
    fwd_nvfp4_bwd_mxfp8_dequantized: [Nvfp4, Mxfp8, Mxfp8],
    fwd_nvfp4_bwd_bf16: [Nvfp4, HighPrecision, HighPrecision],
    weight_only_qat: [Nvfp4Mixed, HighPrecision, HighPrecision],
    mxfp8: [Mxfp8; 3],
    mxfp4: [Mxfp4; 3],
    bf16: [HighPrecision; 3],
}

/// Runs one step in every mode: the numbers are those of explicit layers in that mode, the report
/// counts each GEMM by its format, and layers switched to high precision are not certified as
/// NVFP4.
#[test]
fn modes_switch_between_steps() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let modes = [
        LayerMode::Recipe,
        LayerMode::HighPrecisionForward,
        LayerMode::HighPrecisionBackward,
        LayerMode::HighPrecision,
        LayerMode::Recipe,
    ];
    for (step, mode) in modes.into_iter().enumerate() {
        set_mode(&decorated, mode);
        set_mode(&explicit, mode);
        let x = tensor([32, 32], step as u64, DType::F32, &device);
        assert_same_step(&format!("{mode:?}"), &decorated, &explicit, x, true);
    }
    let report = decorate::report(&decorated).unwrap();
    eprintln!("{report}");
    report.check().unwrap();
    assert!(!report.is_all(Nvfp4));
    for layer in report.layers.values() {
        assert!(!layer.high_precision, "the recipe keeps none");
        assert_eq!(layer.roles().map(|role| role.nvfp4), [3; 3]);
        assert_eq!(layer.roles().map(|role| role.high_precision), [2; 3]);
    }
    assert!(report.to_string().contains("3 NVFP4 + 2 high precision"));
}

/// `nvidia` with a high-precision backward equals the preset with a high-precision backward.
#[test]
fn a_high_precision_backward_is_that_of_the_preset() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::new(false, &device);
    let switched = decorate(plain.clone(), &Nvfp4Recipe::nvidia()).unwrap();
    set_mode(&switched, LayerMode::HighPrecisionBackward);
    let preset = decorate(plain, &Nvfp4Recipe::fwd_nvfp4_bwd_bf16()).unwrap();
    let x = tensor([32, 32], 1, DType::F32, &device);
    let run = |model: &Plain| {
        let x = x.clone().require_grad();
        let grads = model.forward(x.clone()).square().sum().backward();
        let weight = model.second.weight.base().grad(&grads).unwrap();
        (bits(x.grad(&grads).unwrap()), bits(weight))
    };
    assert_eq!(run(&switched), run(&preset));
    decorate::report(&switched).unwrap().check().unwrap();
}

/// A run that heals from its middle on, with the schedule applied step by step as in a training
/// loop.
#[test]
fn healing() {
    own_process!("decorate");
    let device = device().autodiff();
    for forward_only in [false, true] {
        let healing = burn_nvfp4::recipe::Healing {
            at_fraction: 0.5,
            forward_only,
        };
        let recipe = Nvfp4Recipe::new().with_healing(Some(healing));
        let model = decorate(Plain::new(true, &device), &recipe).unwrap();
        let schedule = recipe.schedule("nvidia").unwrap();
        for step in 0..4 {
            schedule.apply(&model, step, 4).unwrap();
            let x = tensor([32, 32], step, DType::F32, &device).require_grad();
            drop(model.forward(x).sum().backward());
        }
        let report = decorate::report(&model).unwrap();
        report.check().unwrap();
        let backward = if forward_only { [4, 0] } else { [2, 2] };
        for layer in report.layers.values() {
            let ran = layer.roles().map(|role| [role.nvfp4, role.high_precision]);
            assert_eq!(ran, [[2, 2], backward, backward], "{forward_only}");
        }
        assert_eq!(model.num_params(), Plain::new(true, &device).num_params());
    }
}

/// A run whose last half has an MXFP8 backward: each step has the bits of a model decorated with the
/// recipe of its phase, and the report counts the formats.
#[test]
fn a_schedule_changes_the_recipe() {
    own_process!("decorate");
    let device = device().autodiff();
    let schedule: RecipeSchedule = "nvidia,0.5=fwd_nvfp4_bwd_mxfp8".parse().unwrap();
    let plain = Plain::new(false, &device);
    let model = decorate(plain.clone(), &Nvfp4Recipe::nvidia()).unwrap();
    let x = tensor([32, 32], 1, DType::F32, &device);
    let run = |model: &Plain| {
        let x = x.clone().require_grad();
        let grads = model.forward(x.clone()).square().sum().backward();
        let weight = model.second.weight.base().grad(&grads).unwrap();
        (bits(x.grad(&grads).unwrap()), bits(weight))
    };
    schedule.apply(&model, 0, 2).unwrap();
    run(&model);
    schedule.apply(&model, 1, 2).unwrap();
    let preset = decorate(plain, &Nvfp4Recipe::fwd_nvfp4_bwd_mxfp8()).unwrap();
    assert!(run(&model) == run(&preset));
    let report = decorate::report(&model).unwrap();
    report.check().unwrap();
    for layer in report.layers.values() {
        let [forward, dgrad, wgrad] = layer.roles();
        assert_eq!(forward.nvfp4, 2);
        assert_eq!([dgrad.nvfp4, dgrad.mxfp8, wgrad.mxfp8], [1; 3]);
    }
}
