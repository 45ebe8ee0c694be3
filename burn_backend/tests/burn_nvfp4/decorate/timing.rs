//! What decorating costs and saves, on a GPU; `--ignored --nocapture` prints it.

use std::time::Instant;

use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe, decorate};

use super::models::{device, leaf, noise, small_only};
use crate::support::skip::skip;

/// Milliseconds of a step, after warm-up; the smallest of three.
fn time(device: &Device, mut step: impl FnMut()) -> f64 {
    const STEPS: usize = 20;
    let mut run = |steps| {
        device.sync().unwrap();
        let start = Instant::now();
        (0..steps).for_each(|_| step());
        device.sync().unwrap();
        start.elapsed().as_secs_f64() * 1e3 / steps as f64
    };
    run(5);
    (0..3).map(|_| run(STEPS)).fold(f64::INFINITY, f64::min)
}

/// Forward and backward of four square layers.
#[test]
#[ignore = "a measurement, for a GPU"]
fn four_layers() {
    if small_only() {
        skip!("a measurement for a GPU");
    }
    let device = device().autodiff();
    println!("four layers of width x width, 3-D input; milliseconds of forward and backward");
    println!(
        "{:>6} {:>6} {:>9} {:>9} {:>9}",
        "width", "tokens", "bf16", "explicit", "decorated"
    );
    for (width, batch, length) in [(1024, 8, 512), (2048, 8, 1024), (4096, 4, 2048)] {
        let linear = || -> Linear {
            let linear = LinearConfig::new(width, width)
                .with_bias(false)
                .init(&device);
            Linear {
                weight: linear.weight.map(|weight| leaf(weight, DType::BF16)),
                bias: None,
            }
        };
        let plain: Vec<Linear> = (0..4).map(|_| linear()).collect();
        let explicit: Vec<Nvfp4Linear> = plain
            .iter()
            .map(|layer| Nvfp4Linear::from_linear(layer.clone(), &Nvfp4Recipe::new()).unwrap())
            .collect();
        let decorated = decorate(plain.clone(), &Nvfp4Recipe::new()).unwrap();
        let values = TensorData::new(noise(batch * length * width, 1), [batch, length, width]);
        let x = Tensor::<3>::from_data(values.convert_dtype(DType::BF16), (&device, DType::BF16));
        let x = x.require_grad();
        let linear = |layers: &[Linear]| {
            let y = layers.iter().fold(x.clone(), |x, layer| layer.forward(x));
            drop(y.sum().backward());
        };
        let bf16 = time(&device, || linear(&plain));
        let modules = time(&device, || {
            let y = explicit.iter().fold(x.clone(), |x, layer| layer.forward(x));
            drop(y.sum().backward());
        });
        let marked = time(&device, || linear(&decorated));
        println!(
            "{width:6} {:6} {bf16:9.2} {modules:9.2} {marked:9.2}",
            batch * length
        );
        let report = decorate::report(&decorated).unwrap();
        println!("{report}");
        assert!(report.failures.is_empty());
        let _ = decorated.num_params();
    }
}
