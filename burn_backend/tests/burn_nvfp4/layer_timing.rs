//! What a linear layer takes beside Burn's own, on a GPU; `--ignored --nocapture` prints it. The
//! variable `NVFP4_ONLY` names the presets to time, with commas between them; without it all are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn_core::tensor::{DType, Device, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe};
use nvfp4_kernels::cubecl::logging::{LaunchObservation, LaunchObserver};

use crate::support::skip::skip;
use crate::support::{Matrix, activation, device, small_only};

/// Milliseconds of a step, after warm-up: the smallest of three means.
fn time(device: &Device, mut step: impl FnMut()) -> f64 {
    let mut run = |steps: usize| {
        device.sync().unwrap();
        let start = Instant::now();
        (0..steps).for_each(|_| step());
        device.sync().unwrap();
        start.elapsed().as_secs_f64() * 1e3 / steps as f64
    };
    run(5);
    (0..3).map(|_| run(10)).fold(f64::INFINITY, f64::min)
}

/// Forward and backward by way of a sum; its own time is measured beside it.
fn backward(x: &Tensor<2>, layer: impl Fn(Tensor<2>) -> Tensor<2>) {
    drop(layer(x.clone()).sum_dim(1).sum().backward());
}

/// The kernels that were launched, and how often.
#[derive(Default)]
struct Launched(Mutex<BTreeMap<&'static str, usize>>);

impl LaunchObserver for Launched {
    fn launched(&self, kernel: &'static str) {
        *self.0.lock().unwrap().entry(kernel).or_default() += 1;
    }
}

/// The kernels of a step. Of a kernel's name, what lies between the last `::` and its parameters.
fn kernels(device: &Device, step: impl FnOnce()) -> String {
    let launched = Arc::new(Launched::default());
    let observation = LaunchObservation::new(launched.clone());
    step();
    device.sync().unwrap();
    drop(observation);
    let launched = launched.0.lock().unwrap();
    let names = launched.iter().map(|(name, count)| {
        let path = name.split('<').next().unwrap();
        format!("{count} {}", path.rsplit("::").next().unwrap())
    });
    names.collect::<Vec<_>>().join(", ")
}

/// Forward and backward of a layer: 8192 tokens, 4096 inputs, 4096 and 14336 outputs.
#[test]
#[ignore = "a measurement, for a GPU"]
fn layer_beside_burns() {
    if small_only() {
        skip!("a measurement for a GPU");
    }
    let only = std::env::var("NVFP4_ONLY").ok();
    let is_wanted = |preset: &str| match &only {
        Some(only) => only.split(',').any(|name| name == preset),
        None => true,
    };
    let device = device().autodiff();
    let (tokens, inputs) = (8192, 4096);
    println!("milliseconds of forward and backward, {tokens} tokens, {inputs} inputs");
    for outputs in [4096, 14336] {
        let x = Matrix::gaussian(tokens, inputs, activation(), 1)
            .tensor(&device)
            .require_grad();
        let y = Matrix::gaussian(tokens, outputs, activation(), 2)
            .tensor(&device)
            .require_grad();
        let linear = || -> Linear {
            let linear = LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .init(&device);
            Linear {
                weight: linear.weight.map(|weight| {
                    // A parameter is a leaf: the cast must not be part of its graph.
                    weight.cast(DType::BF16).detach().require_grad()
                }),
                bias: None,
            }
        };
        let print = |name: &str, time: f64| println!("{outputs:6} outputs, {name}: {time:.3}");
        print("the sum alone", time(&device, || backward(&y, |y| y)));
        let plain = linear();
        let burns = time(&device, || backward(&x, |x| plain.forward(x)));
        print("Burn's Linear in bf16", burns);
        for preset in Nvfp4Recipe::preset_names().filter(|preset| is_wanted(preset)) {
            let recipe = Nvfp4Recipe::preset(preset).unwrap();
            let layer = Nvfp4Linear::from_linear(linear(), &recipe).unwrap();
            let step = || backward(&x, |x| layer.forward(x));
            print(preset, time(&device, step));
            println!("    {}", kernels(&device, step));
        }
    }
}
