//! Gradients are unbiased: over many draws, the mean of stochastically rounded results converges to
//! the unrounded result.

use burn_core::tensor::{DType, Device, FloatDType, Tensor};
use burn_nvfp4::functions::{dequantize, linear, quantize_tiles};
use burn_nvfp4::ops::OperandSpec;
use burn_nvfp4::recipe::{BlockScaling, DgradRecipe, FpropRecipe, QuantSpec, WgradRecipe};
use burn_nvfp4::state::RngState;
use burn_nvfp4::{Hadamard, Nvfp4Recipe, Usage};
use nvfp4_formats::reference;

use crate::support::{Matrix, device, flex_only, values};

const ROWS: usize = 48;
const D_IN: usize = 64;
const D_OUT: usize = 128;

/// Returns the means of both gradients over the first 64, 256 and 1024 draws.
fn means(recipe: &Nvfp4Recipe, device: &Device) -> [[Vec<f64>; 2]; 3] {
    let x = Matrix::gaussian(ROWS, D_IN, DType::F32, 1);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2);
    let dy = Matrix::gaussian(ROWS, D_OUT, DType::F32, 3).tensor(device);
    let mut sums = [vec![0.0; ROWS * D_IN], vec![0.0; D_IN * D_OUT]];
    let mut found = Vec::new();
    for draw in 1..=1024u64 {
        let spec = recipe.spec(&RngState {
            seed: 17,
            layer: 4,
            offset: draw,
            rht_signs: Hadamard::DEFAULT_SIGNS,
        });
        let x = x.tensor(device).require_grad();
        let w = w.tensor(device).require_grad();
        let y = linear(x.clone(), w.clone(), None, spec);
        let grads = (y * dy.clone()).sum().backward();
        let drawn = [x.grad(&grads).unwrap(), w.grad(&grads).unwrap()];
        for (sum, drawn) in sums.iter_mut().zip(drawn) {
            for (sum, value) in sum.iter_mut().zip(values(drawn)) {
                *sum += f64::from(value);
            }
        }
        if [64, 256, 1024].contains(&draw) {
            let mean = |sum: &Vec<f64>| sum.iter().map(|s| s / draw as f64).collect();
            found.push([mean(&sums[0]), mean(&sums[1])]);
        }
    }
    found.try_into().expect("three")
}

/// Returns the norm of the difference relative to the norm of `exact`.
fn error(mean: &[f64], exact: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut mean.iter().zip(exact).map(|(m, e)| m - f64::from(*e)));
    difference / norm(&mut exact.iter().map(|e| f64::from(*e)))
}

/// Returns the errors of the means of 64, 256 and 1024 draws.
fn errors(means: &[[Vec<f64>; 2]; 3], which: usize, exact: Tensor<2>) -> [f64; 3] {
    let exact = values(exact);
    let errors = [0, 1, 2].map(|n| error(&means[n][which], &exact));
    eprintln!("{errors:.5?}");
    errors
}

/// Asserts that four times the draws halve the error, as for an unbiased mean.
fn assert_converges(what: &str, [first, second, third]: [f64; 3]) {
    for ratio in [second / first, third / second] {
        assert!(
            (0.4..0.6).contains(&ratio),
            "{what}: errors {first}, {second}, {third}"
        );
    }
}

/// `dx` of TransformerEngine's recipe: with headroom it converges to the GEMM of `dy` and the
/// quantized weight; without headroom, the clipped part stays missing.
#[test]
fn headroom_takes_the_bias_of_clipping_out_of_dgrad() {
    flex_only!();
    let device = device();
    let dy = Matrix::gaussian(ROWS, D_OUT, DType::F32, 3).tensor(&device);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2).tensor(&device);
    let (w, _) = quantize_tiles(w);
    let exact = dy.matmul(dequantize(w, FloatDType::F32).transpose());
    let training = device.autodiff();
    let headroom = means(&Nvfp4Recipe::nvidia_headroom(), &training);
    let plain = means(&Nvfp4Recipe::nvidia(), &training);
    let headroom = errors(&headroom, 0, exact.clone());
    assert_converges("dx with headroom", headroom);
    let plain = errors(&plain, 0, exact);
    assert!(
        plain[2] > 0.65 * plain[1] && plain[2] > 1.5 * headroom[2],
        "no bias shows: {plain:?}, with headroom {headroom:?}"
    );
}

/// MS-EDEN's gradients converge to those of the dequantized forward operands: in both GEMMs, with
/// both of their operands drawn.
#[test]
fn ms_eden_gradients_are_unbiased() {
    flex_only!();
    let device = device();
    let recipe = Nvfp4Recipe::quartet2();
    let found = means(&recipe, &device.clone().autodiff());
    let spec = recipe.spec(&RngState {
        seed: 0,
        layer: 0,
        offset: 0,
        rht_signs: 0,
    });
    let forward = |matrix: Matrix, spec: &OperandSpec, usage| {
        let params = spec.params().expect("in NVFP4");
        let (rows, cols) = (matrix.rows, matrix.cols);
        let values = reference::dequantize(&matrix.copy(usage, params));
        Matrix::new(values, rows, cols, DType::F32).tensor(&device)
    };
    let x = Matrix::gaussian(ROWS, D_IN, DType::F32, 1);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2);
    let dy = Matrix::gaussian(ROWS, D_OUT, DType::F32, 3).tensor(&device);
    let x = forward(x, &spec.fprop_x, Usage::Rowwise);
    let w = forward(w, &spec.fprop_w, Usage::Columnwise);
    let dx = dy.clone().matmul(w.transpose());
    let dw = x.transpose().matmul(dy);
    assert_converges("dx", errors(&found, 0, dx));
    assert_converges("dw", errors(&found, 1, dw));
}

/// The claim itself, for recipes that allow it: with all operands without random draws in high
/// precision, both gradients converge to those in high precision. dgrad uses the unquantized
/// weight; wgrad, whose operands have one format, draws both operands, after the transform.
#[test]
fn gradients_converge_to_those_of_high_precision() {
    flex_only!();
    let device = device();
    let high = QuantSpec::HIGH_PRECISION;
    let drawn = QuantSpec::NVFP4.stochastic().scale(BlockScaling::Headroom);
    let recipe = Nvfp4Recipe {
        fprop: FpropRecipe { x: high, w: high },
        dgrad: DgradRecipe { dy: drawn, w: high },
        wgrad: WgradRecipe {
            x: drawn.rht(16),
            dy: drawn.rht(16),
        },
        ..Nvfp4Recipe::new()
    };
    recipe.check().unwrap();
    let found = means(&recipe, &device.clone().autodiff());
    let x = Matrix::gaussian(ROWS, D_IN, DType::F32, 1).tensor(&device);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2).tensor(&device);
    let dy = Matrix::gaussian(ROWS, D_OUT, DType::F32, 3).tensor(&device);
    let dx = dy.clone().matmul(w.transpose());
    assert_converges("dx", errors(&found, 0, dx));
    assert_converges("dw", errors(&found, 1, x.transpose().matmul(dy)));
}
