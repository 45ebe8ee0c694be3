//! Burn's own transformer layers, unmodified.

use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn_nvfp4::{Nvfp4Recipe, decorate};
use burn_optim::{GradientsParams, SgdConfig};

use crate::support::own_process::own_process;

use super::models::{bits, device, small_only, tensor};

/// Checks every GEMM of every layer, in every role, on every step.
#[test]
fn encoder_attention_and_feed_forward() {
    own_process!("decorate");
    let device = device().autodiff();
    let (width, tokens, layers, steps) = if small_only() {
        (16, 8, 2, 2)
    } else {
        (64, 32, 2, 6)
    };
    let model = TransformerEncoderConfig::new(width, 2 * width, 2, layers)
        .with_dropout(0.0)
        .init(&device);
    let x: Tensor<3> = tensor([2, tokens, width], 1, DType::F32, &device);
    let target: Tensor<3> = tensor([2, tokens, width], 2, DType::F32, &device);
    let exact = model.forward(TransformerEncoderInput::new(x.clone()));
    let mut model = decorate(model, &Nvfp4Recipe::new()).unwrap();
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..steps {
        let y = model.forward(TransformerEncoderInput::new(x.clone()));
        if step == 0 {
            let noise: f32 = (y.clone() - exact.clone())
                .powi_scalar(2)
                .mean()
                .into_scalar();
            let power: f32 = exact.clone().powi_scalar(2).mean().into_scalar();
            assert!(
                noise > 0.0 && noise < 0.1 * power,
                "noise {noise}, power {power}"
            );
        }
        let loss = (y - target.clone()).powi_scalar(2).mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.1, model, grads);
    }
    eprintln!("losses {losses:?}");
    let report = decorate::report(&model).unwrap();
    eprintln!("{report}");
    report.check().unwrap();
    assert_eq!(report.layers.len(), 6 * layers);
    for (path, layer) in &report.layers {
        assert_eq!(layer.forward.nvfp4, steps as u64, "{path}");
        assert_eq!(layer.wgrad.nvfp4, steps as u64, "{path}");
        // Three projections of one constant input: the tracker cannot tell their gradients apart.
        let shared_constant = layer.dgrad.nvfp4 == 0;
        assert!(layer.wgrad_wasted == 0 || shared_constant, "{path}");
        assert_eq!(
            shared_constant,
            ["key", "query", "value"]
                .map(|name| format!("layers.0.mha.{name}"))
                .contains(path),
            "{path}"
        );
    }
    if steps > 1 {
        assert!(losses[steps - 1] < losses[0], "{losses:?}");
    }
    model
        .valid()
        .forward(TransformerEncoderInput::new(x.inner()));
    decorate::report(&model).unwrap().check().unwrap();
}

#[test]
fn feed_forward() {
    own_process!("decorate");
    let device = device().autodiff();
    let model = PositionWiseFeedForwardConfig::new(16, 32)
        .with_dropout(0.0)
        .init(&device);
    let model = decorate(model, &Nvfp4Recipe::new()).unwrap();
    let x: Tensor<3> = tensor([2, 8, 16], 1, DType::F32, &device).require_grad();
    let grads = model.forward(x.clone()).sum().backward();
    bits(x.grad(&grads).unwrap());
    let report = decorate::report(&model).unwrap();
    eprintln!("{report}");
    report.check().unwrap();
    let layer = report.layers["linear_inner"];
    assert_eq!(layer.roles().map(|role| role.nvfp4), [1; 3]);
}
