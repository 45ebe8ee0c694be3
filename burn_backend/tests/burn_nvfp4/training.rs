//! A few steps of training.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{DType, FloatDType, Tensor, activation::relu};
use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig};
use burn_optim::{GradientsParams, SgdConfig};

use crate::common::{Matrix, activation, device, small_only, values};

#[derive(Module, Debug)]
struct Mlp {
    up: Nvfp4Linear,
    down: Nvfp4Linear,
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(relu(self.up.forward(x)))
    }
}

#[test]
fn sgd_lowers_the_loss() {
    let device = device().autodiff();
    device.seed(5);
    let (width, steps) = if small_only() { (32, 3) } else { (64, 30) };
    let mut model = Mlp {
        up: Nvfp4LinearConfig::new(32, width)
            .with_layer(Some(0))
            .init(&device),
        down: Nvfp4LinearConfig::new(width, 16)
            .with_layer(Some(1))
            .init(&device),
    };
    let teacher = Matrix::gaussian(32, 16, DType::F32, 101)
        .tensor(&device)
        .mul_scalar(0.2);
    let x = Matrix::gaussian(32, 32, DType::F32, 102).tensor(&device);
    let target = x.clone().matmul(teacher).reshape([2, 16, 16]);
    let x: Tensor<3> = x.cast(activation()).reshape([2, 16, 32]);
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..steps {
        let error = model.forward(x.clone()).cast(FloatDType::F32) - target.clone();
        let loss = error.powi_scalar(2).mean();
        losses.push(values(loss.clone().inner())[0]);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.5, model, grads);
    }
    eprintln!("losses {losses:?}");
    let last = losses[losses.len() - 1];
    let goal = if small_only() { 1.0 } else { 0.6 };
    assert!(last < goal * losses[0], "from {} to {last}", losses[0]);
    assert_eq!(model.up.state.rng_state().offset, steps);
}
