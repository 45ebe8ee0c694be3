//! The packed weight of a decorated layer is cached exactly until the weight changes.

use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Nvfp4Recipe, Nvfp4State, RngState, decorate};
use burn_optim::{GradientsParams, SgdConfig};

use super::models::{device, tensor};
use crate::support::counted::{
    Step, collect, is_quantized_once_until_it_changes, quantized, validation_quantizes_once,
};
use crate::support::own_process::own_process;

/// Weight size that no other test of this process uses.
const SIZE: [usize; 2] = [80, 176];

/// Creates a decorated layer, number 5.
fn layer(recipe: Nvfp4Recipe) -> Linear {
    let [d_in, d_out] = SIZE;
    let linear = LinearConfig::new(d_in, d_out).init(&device().autodiff());
    let linear = decorate(linear, &recipe).unwrap();
    let mut state = Nvfp4State::collect(&linear);
    for randomness in state.layers.values_mut() {
        *randomness = RngState {
            layer: 5,
            ..*randomness
        };
    }
    state.apply(&linear).unwrap();
    linear
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

fn step(layer: &Linear, batch: u64) -> Step {
    let x = tensor([24, SIZE[0]], batch, DType::F32, &device().autodiff());
    let y: Tensor<2> = layer.forward(x.require_grad());
    let output = values(y.clone().inner());
    let grads = y.square().sum().backward();
    Step {
        output,
        gradient: values(layer.weight.base().grad(&grads).unwrap()),
        grads,
    }
}

#[test]
fn a_decorated_weight_is_quantized_once_until_it_changes() {
    own_process!("decorate");
    let _alone = collect();
    is_quantized_once_until_it_changes(SIZE, layer, step);
}

#[test]
fn validation_quantizes_a_decorated_weight_once() {
    own_process!("decorate");
    let _alone = collect();
    let forward = |layer: &Linear, batch| {
        let x = tensor([24, SIZE[0]], batch, DType::F32, &device());
        values::<2>(layer.forward(x))
    };
    validation_quantizes_once(SIZE, layer, forward, step);
}

/// Steps that are queued before any of them runs, as in a training loop that reads nothing back:
/// each uses its own weight.
#[test]
fn queued_steps_multiply_the_weight_that_they_were_given() {
    own_process!("decorate");
    let _alone = collect();
    let kept = layer(Nvfp4Recipe::new());
    let plain = layer(Nvfp4Recipe::new().with_cache_weights(false));
    let plain = plain.load_record(kept.clone().into_record());
    let x: Tensor<2> = tensor([24, SIZE[0]], 1, DType::F32, &device().autodiff());
    let run = |mut layer: Linear| {
        let mut optimizer = SgdConfig::new().init();
        let mut outputs = Vec::new();
        for _ in 0..3 {
            let both = [(); 2].map(|()| layer.forward(x.clone()));
            outputs.extend(both.clone().map(Tensor::inner));
            let [one, two] = both;
            let grads = (one + two).square().sum().backward();
            let grads = GradientsParams::from_grads(grads, &layer);
            layer = optimizer.step(0.1, layer, grads);
        }
        outputs
    };
    quantized(SIZE);
    let (found, count) = (values(Tensor::stack::<3>(run(kept), 0)), quantized(SIZE));
    assert_eq!(count, 3);
    let (expected, count) = (values(Tensor::stack::<3>(run(plain), 0)), quantized(SIZE));
    assert_eq!(count, 6);
    assert_eq!(found, expected);
}
