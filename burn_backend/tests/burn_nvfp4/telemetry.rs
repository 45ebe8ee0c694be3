//! What telemetry sees is what the oracle computes.

use burn_core::tensor::DType;
use burn_nvfp4::telemetry::Telemetry;
use burn_nvfp4::{Nvfp4LinearConfig, Nvfp4Recipe, PackedAxis, Rounding};
use nvfp4_kernels::format::e2m1;
use nvfp4_kernels::reference;

use crate::common::{Matrix, activation, device, sqnr, values};

const WIDTHS: [usize; 2] = [64, 48];

/// Normal values, with zeros, and one block so small beside the rest that its scale underflows.
fn input(dtype: DType) -> Matrix {
    let mut x = Matrix::gaussian(20, WIDTHS[0], dtype, 5);
    for (i, value) in x.values.iter_mut().enumerate() {
        match i {
            0..16 => *value = 1e-6,
            16..20 => *value = 0.0,
            _ => {}
        }
    }
    let values = std::mem::take(&mut x.values);
    Matrix::new(values, x.rows, x.cols, dtype)
}

#[test]
fn samples_are_the_oracles() {
    let device = device().autodiff();
    let layer = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).init(&device);
    let x = input(activation());
    let step = || {
        let y = layer.forward(x.tensor(&device).require_grad());
        y.cast(DType::F32).square().sum().backward();
    };
    step();
    let telemetry = Telemetry::start(&layer);
    step();
    let samples = telemetry.finish();
    step();
    let names: Vec<&str> = samples.iter().map(|sample| sample.operand).collect();
    assert_eq!(names, ["fprop.w", "fprop.x", "dgrad.dy"]);
    assert_eq!(
        samples.iter().map(|s| s.stochastic).collect::<Vec<_>>(),
        [false, false, true]
    );

    let packed = x.row(Rounding::Nearest);
    let decoded = reference::dequantize(&packed);
    let found = &samples[1];
    let expected = sqnr(&x.values, &decoded);
    assert!(
        (found.sqnr_db - expected).abs() < 1e-6,
        "{found:?}, {expected}"
    );
    let ratio = 10f64.powf(expected / 20.0);
    assert!((found.signal_to_noise / ratio - 1.0).abs() < 1e-6);
    let pairs = || x.values.iter().zip(&decoded);
    let lost = pairs().filter(|(x, d)| **x != 0.0 && **d == 0.0).count();
    let nonzero = x.values.iter().filter(|x| **x != 0.0).count();
    assert!(lost >= 16);
    assert_eq!(found.zeros, lost as f64 / nonzero as f64);
    let codes = packed
        .codes()
        .iter()
        .flat_map(|byte| [byte & 15, byte >> 4]);
    let largest = codes
        .filter(|code| e2m1::decode(*code).abs() == e2m1::MAX)
        .count();
    assert_eq!(found.saturated, largest as f64 / x.values.len() as f64);
    assert_eq!(found.underflowed_blocks, 1.0 / packed.scales().len() as f64);
    assert_eq!(found.amax, packed.amax().of(0));

    let weight = layer.weight.val().inner();
    let weight = Matrix::new(values(weight), WIDTHS[0], WIDTHS[1], DType::F32);
    let (_, col) = weight.tiles(Default::default());
    assert_eq!(col.axis(), PackedAxis::Rows);
    let expected = sqnr(&weight.values, &reference::dequantize(&col));
    assert!((samples[0].sqnr_db - expected).abs() < 1e-6);
    assert!(samples[2].sqnr_db > 10.0, "{:?}", samples[2]);
    let line = samples[1].csv();
    assert_eq!(
        line.split(',').count(),
        burn_nvfp4::telemetry::CSV_HEADER.split(',').count()
    );
}

#[test]
fn other_formats_are_not_looked_at() {
    let device = device().autodiff();
    for name in ["bf16", "mxfp8"] {
        let recipe = Nvfp4Recipe::preset(name).unwrap();
        let layer = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).with_recipe(recipe);
        let layer = layer.init(&device);
        let telemetry = Telemetry::start(&layer);
        let y = layer.forward(input(activation()).tensor(&device));
        y.cast(DType::F32).sum().backward();
        assert_eq!(telemetry.finish(), []);
    }
}
