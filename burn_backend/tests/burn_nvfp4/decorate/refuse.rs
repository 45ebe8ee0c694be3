//! Models that cannot be decorated, and the error messages.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_core as burn;

use burn_core::module::{Module, Param, ParamGroup};
use burn_core::tensor::{DType, Device, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::parallel::fully_shard;
use burn_nvfp4::{Decorator, Nvfp4Recipe, decorate};

use crate::parallel::on_ranks;
use crate::support::own_process::own_process;

use super::models::{Plain, bits, device, tensor};

#[track_caller]
fn refused<M: Module>(result: Result<M, burn_nvfp4::Nvfp4Error>, parts: &[&str]) {
    let Err(error) = result else {
        panic!("not refused");
    };
    let error = error.to_string();
    for part in parts {
        assert!(error.contains(part), "{error}");
    }
}

#[cfg(feature = "flex")]
#[test]
fn other_devices() {
    own_process!("decorate");
    let _ = device();
    let model = Plain::new(true, &Device::flex().autodiff());
    refused(
        decorate(model, &Nvfp4Recipe::new()),
        &["`model`", "flex", "CubeCL CPU or CUDA"],
    );
}

/// A decorated model that is moved to another device returns an error when it is used.
#[cfg(feature = "flex")]
#[test]
fn a_move_to_another_device() {
    own_process!("decorate");
    let model = decorate(Plain::new(true, &device()), &Nvfp4Recipe::new()).unwrap();
    let flex = Device::flex();
    let model = model.to_device(&flex);
    let x = Tensor::<2>::zeros([16, 32], &flex);
    let panic = catch_unwind(AssertUnwindSafe(|| model.forward(x))).unwrap_err();
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains("flex"), "{text}");
}

#[test]
fn models_twice_or_without_layers() {
    own_process!("decorate");
    let device = device();
    let model = decorate(Plain::new(true, &device), &Nvfp4Recipe::new()).unwrap();
    refused(
        decorate(model, &Nvfp4Recipe::new()),
        &["reparameterization at `first.weight`"],
    );
    let norm = burn_nn::LayerNormConfig::new(32).init(&device);
    refused(decorate(norm, &Nvfp4Recipe::new()), &["no linear layer"]);
}

/// A mark needs the exchange of its parameter, so it comes first.
#[test]
fn sharded_models() {
    own_process!("decorate");
    on_ranks(2, |group| {
        let model = fully_shard(Plain::new(true, &device()), &group);
        refused(
            decorate(model, &Nvfp4Recipe::new()),
            &["reparameterization at `first.weight`", "sharded"],
        );
    });
}

#[test]
fn shapes_and_groups() {
    own_process!("decorate");
    let device = device();
    let odd = || Plain {
        first: LinearConfig::new(32, 40).init(&device),
        second: LinearConfig::new(32, 16).init(&device),
    };
    refused(
        decorate(odd(), &Nvfp4Recipe::new()),
        &["layer `first`", "[32, 40]", "multiples of 16"],
    );
    let recipe = |regex: &str| {
        Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::from_regex(regex).unwrap()))
    };
    decorate(odd(), &recipe("first")).unwrap();
    refused(
        decorate(odd(), &recipe("third")),
        &["high_precision", "first.weight"],
    );
    let include =
        Decorator::new(&Nvfp4Recipe::new()).include(ParamGroup::from_regex("nowhere").unwrap());
    refused(include.decorate(odd()), &["include"]);
    let exclude =
        |regex| Decorator::new(&Nvfp4Recipe::new()).exclude(ParamGroup::from_regex(regex).unwrap());
    exclude("^first").decorate(odd()).unwrap();
    refused(exclude("nowhere").decorate(odd()), &["exclude"]);
}

/// A user-defined layer.
#[derive(Module, Debug)]
struct Own {
    weight: Param<Tensor<2>>,
    head: Linear,
}

#[test]
fn own_layers_are_included_on_request() {
    own_process!("decorate");
    let device = device().autodiff();
    let linear = LinearConfig::new(32, 32).with_bias(false).init(&device);
    let own = Own {
        weight: linear.weight,
        head: LinearConfig::new(32, 16).init(&device),
    };
    let model = Decorator::new(&Nvfp4Recipe::new())
        .include(ParamGroup::from_regex("^(weight|head)").unwrap())
        .decorate(own)
        .unwrap();
    let x = tensor::<2>([32, 32], 1, DType::F32, &device);
    let y = model.head.forward(x.matmul(model.weight.val()));
    let grads = y.sum().backward();
    bits(model.weight.base().grad(&grads).unwrap());
    let report = decorate::report(&model).unwrap();
    report.check().unwrap();
    assert_eq!(report.layers[""].forward.nvfp4, 1);
    assert_eq!(report.layers[""].wgrad.nvfp4, 1);
    assert_eq!(report.layers["head"].dgrad.nvfp4, 1);
}

#[test]
fn excluded_layers_are_not_decorated() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::new(true, &device);
    let x = tensor::<2>([32, 32], 1, DType::F32, &device);
    let model = Decorator::new(&Nvfp4Recipe::new())
        .exclude(ParamGroup::from_regex("^second").unwrap())
        .decorate(plain.clone())
        .unwrap();
    let hidden = tensor::<2>([32, 48], 2, DType::F32, &device);
    assert_eq!(
        bits(model.second.forward(hidden.clone())),
        bits(plain.second.forward(hidden)),
    );
    bits(model.forward(x));
    let report = decorate::report(&model).unwrap();
    report.check().unwrap();
    let layers: Vec<&str> = report.layers.keys().map(String::as_str).collect();
    assert_eq!(layers, ["first"]);
    assert_eq!(report.left_alone, ["second"]);
}

/// One expert, with the gate of a SwiGLU.
#[derive(Module, Debug)]
struct Expert {
    gate: Linear,
    up: Linear,
}

/// A mixture of experts whose router is recognized by its name, and has an odd size.
#[derive(Module, Debug)]
struct Mixture {
    gate: Linear,
    experts: Vec<Expert>,
}

#[derive(Module, Debug)]
struct Headed {
    mixture: Mixture,
    router: Linear,
    lm_head: Linear,
}

/// Heads and routers remain Burn's own unless they are included; the gates of SwiGLUs are not
/// routers.
#[test]
fn heads_and_routers_stay_in_high_precision() {
    own_process!("decorate");
    let device = device().autodiff();
    let linear = |d_out| LinearConfig::new(32, d_out).init(&device);
    let model = Headed {
        mixture: Mixture {
            gate: linear(5),
            experts: (0..2)
                .map(|_| Expert {
                    gate: linear(16),
                    up: linear(16),
                })
                .collect(),
        },
        router: linear(5),
        lm_head: linear(48),
    };
    let x = tensor::<2>([32, 32], 1, DType::F32, &device);
    let logits = bits(model.lm_head.forward(x.clone()));

    let decorated = decorate(model.clone(), &Nvfp4Recipe::new()).unwrap();
    assert_eq!(bits(decorated.lm_head.forward(x.clone())), logits);
    bits(decorated.mixture.experts[0].gate.forward(x.clone()));
    let report = decorate::report(&decorated).unwrap();
    report.check().unwrap();
    assert_eq!(report.left_alone, ["mixture.gate", "router", "lm_head"]);
    let paths: Vec<&str> = report.layers.keys().map(String::as_str).collect();
    let experts = [0, 1].map(|i| ["gate", "up"].map(|name| format!("mixture.experts.{i}.{name}")));
    assert_eq!(paths, experts.concat());
    assert_eq!(report.layers["mixture.experts.0.gate"].forward.nvfp4, 1);
    let text = report.to_string();
    let line = text.lines().find(|line| line.starts_with("lm_head"));
    assert!(line.unwrap().contains("not decorated"), "{text}");

    let head = ParamGroup::from_regex("^lm_head").unwrap();
    let asked = Decorator::new(&Nvfp4Recipe::new())
        .include(head)
        .decorate(model.clone())
        .unwrap();
    assert_ne!(bits(asked.lm_head.forward(x)), logits);
    let report = decorate::report(&asked).unwrap();
    assert_eq!(report.layers["lm_head"].forward.nvfp4, 1);
    assert_eq!(report.left_alone, ["mixture.gate", "router"]);
}

#[derive(Module, Debug)]
struct OnlyHead {
    head: Linear,
}

#[test]
fn a_model_of_heads_alone_is_refused() {
    own_process!("decorate");
    let head = LinearConfig::new(32, 16).init(&device());
    refused(
        decorate(OnlyHead { head }, &Nvfp4Recipe::new()),
        &["no linear layer to decorate besides head", "include"],
    );
}
