//! Norms and activations: against Burn's operations, value by value and gradient by gradient, and
//! against the oracle, bit for bit.

use burn_core::module::{Module, Param};
use burn_core::tensor::activation::{gelu as burn_gelu, gelu_approximate, silu};
use burn_core::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_nn::LayerNormConfig;
use burn_nvfp4::Nvfp4TransformerBlockConfig;
use burn_nvfp4::functions::{self, Gelu};
use burn_nvfp4::nn::{LayerNorm, ResidualStream, RmsNormConfig, RopeCacheConfig, SwiGluActivation};
use nvfp4_formats::reference::{self, Norm};

use crate::support::{Matrix, activation, device, gaussian, skip_where_small_only, values};

const EPSILON: f64 = 1e-5;

fn tensor<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let data = TensorData::new(gaussian(shape.iter().product(), seed), shape);
    let tensor = Tensor::<D>::from_data(data, device);
    match device.is_autodiff() {
        true => tensor.require_grad(),
        false => tensor,
    }
}

/// Returns the same values without a gradient; detaching alone keeps the gradient requirement.
fn constant<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    x.clone().inner().autodiff()
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1f32, |m, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() < 1e-5 * scale, "{what}[{i}]: {f}, not {e}");
    }
}

/// Asserts that outputs and gradients of `found` are those of `expected`, for the same leaves.
fn assert_same(
    what: &str,
    leaves: &[Tensor<2>],
    found: impl Fn(&[Tensor<2>]) -> Vec<Tensor<2>>,
    expected: impl Fn(&[Tensor<2>]) -> Vec<Tensor<2>>,
) {
    let run = |f: &dyn Fn(&[Tensor<2>]) -> Vec<Tensor<2>>| {
        let outputs = f(leaves);
        let loss = outputs.iter().enumerate().map(|(i, output)| {
            let weights = gaussian(output.dims().iter().product(), 90 + i as u64);
            let weights = TensorData::new(weights, output.dims());
            let weights = Tensor::<2>::from_data(weights, &output.device());
            (output.clone() * weights).sum()
        });
        let grads = loss.reduce(|a, b| a + b).unwrap().backward();
        let grads: Vec<Vec<f32>> = (leaves.iter())
            .map(|leaf| values(leaf.grad(&grads).expect("a gradient")))
            .collect();
        let outputs: Vec<Vec<f32>> = outputs.into_iter().map(values).collect();
        (outputs, grads)
    };
    let ((out, grads), (expected_out, expected_grads)) = (run(&found), run(&expected));
    for (i, (found, expected)) in out.iter().zip(&expected_out).enumerate() {
        assert_close(&format!("{what}: output {i}"), found, expected);
    }
    for (i, (found, expected)) in grads.iter().zip(&expected_grads).enumerate() {
        assert_close(&format!("{what}: gradient {i}"), found, expected);
    }
}

fn plain_rms(x: Tensor<2>, gain: Tensor<2>) -> Tensor<2> {
    let mean_square = x.clone().square().mean_dim(1);
    x / mean_square.add_scalar(EPSILON).sqrt() * gain
}

fn vector(x: &Tensor<2>) -> Tensor<1> {
    let [_, width] = x.dims();
    x.clone().reshape([width])
}

#[test]
fn norms_are_their_formulas() {
    skip_where_small_only!();
    let device = device().autodiff();
    for (rows, cols) in [(13, 48), (3, 7), (1, 1)] {
        let x = tensor([rows, cols], 1, &device);
        let y = tensor([rows, cols], 2, &device);
        let (gain, bias) = (tensor([1, cols], 3, &device), tensor([1, cols], 4, &device));
        assert_same(
            "rms_norm",
            &[x.clone(), gain.clone()],
            |of| vec![functions::rms_norm(of[0].clone(), vector(&of[1]), EPSILON)],
            |of| vec![plain_rms(of[0].clone(), of[1].clone())],
        );
        assert_same(
            "add_rms_norm",
            &[x.clone(), y.clone(), gain.clone()],
            |of| {
                let gain = vector(&of[2]);
                let (sum, normed) =
                    functions::add_rms_norm(of[0].clone(), of[1].clone(), gain, EPSILON);
                // The sum is used twice, once before its norm.
                vec![sum.clone().tanh(), normed, sum]
            },
            |of| {
                let sum = of[0].clone() + of[1].clone();
                vec![
                    sum.clone().tanh(),
                    plain_rms(sum.clone(), of[2].clone()),
                    sum,
                ]
            },
        );
        assert_same(
            "layer_norm",
            &[x.clone(), gain.clone(), bias],
            |of| {
                let factors = [1, 2].map(|i: usize| vector(&of[i]));
                let [gain, bias] = factors;
                vec![functions::layer_norm(
                    of[0].clone(),
                    gain,
                    Some(bias),
                    EPSILON,
                )]
            },
            |of| {
                let centered = of[0].clone() - of[0].clone().mean_dim(1);
                let variance = centered.clone().square().mean_dim(1);
                let normed = centered / variance.add_scalar(EPSILON).sqrt();
                vec![normed * of[1].clone() + of[2].clone()]
            },
        );
    }
}

/// A result of the fused addition may be unused, and either input may be a constant.
#[test]
fn results_and_gradients_may_be_left() {
    skip_where_small_only!();
    let device = device().autodiff();
    let (x, y) = (tensor([5, 32], 1, &device), tensor([5, 32], 2, &device));
    let gain = tensor([1, 32], 3, &device);
    let both = |of: &[Tensor<2>]| {
        functions::add_rms_norm(
            of[0].clone(),
            constant(&y),
            vector(&constant(&gain)),
            EPSILON,
        )
    };
    let sum = |of: &[Tensor<2>]| of[0].clone() + constant(&y);
    let leaves = [x.clone()];
    assert_same(
        "the sum alone",
        &leaves,
        |of| vec![both(of).0],
        |of| vec![sum(of)],
    );
    let normed = |of: &[Tensor<2>]| vec![plain_rms(sum(of), constant(&gain))];
    assert_same("the norm alone", &leaves, |of| vec![both(of).1], normed);
    let nothing = functions::add_rms_norm(
        constant(&x),
        constant(&y),
        vector(&constant(&gain)),
        EPSILON,
    );
    assert!(!nothing.0.is_tracked() && !nothing.1.is_tracked());
}

#[test]
fn activations_are_their_formulas() {
    skip_where_small_only!();
    let device = device().autodiff();
    for (rows, cols) in [(5, 64), (3, 10)] {
        let leaves = [tensor([rows, cols], 1, &device)];
        assert_same(
            "swiglu",
            &leaves,
            |of| vec![SwiGluActivation::new().forward(of[0].clone())],
            |of| {
                let half = cols / 2;
                let gate = silu(of[0].clone().narrow(1, 0, half));
                vec![gate * of[0].clone().narrow(1, half, half)]
            },
        );
        assert_same(
            "gelu by tanh",
            &leaves,
            |of| vec![functions::gelu(of[0].clone(), Gelu::Tanh)],
            |of| vec![gelu_approximate(of[0].clone())],
        );
        // Burn's gradient is that of the other form.
        let x = constant(&leaves[0]);
        let found = values(functions::gelu(x.clone(), Gelu::Erf));
        assert_close("gelu", &found, &values(burn_gelu(x)));
    }
}

/// Every backend gives the bits of the oracle, in the dtype of its input.
#[test]
fn bits_are_the_oracles() {
    let device = device();
    let (rows, cols) = (9, 80);
    for dtype in [activation(), DType::F32] {
        let [x, y] = [1, 2].map(|seed| Matrix::gaussian(rows, cols, dtype, seed));
        let gain = gaussian(cols, 3);
        let on_device = Tensor::<1>::from_data(TensorData::new(gain.clone(), [cols]), &device);
        let (sum, normed) =
            functions::add_rms_norm(x.tensor(&device), y.tensor(&device), on_device, EPSILON);
        assert_eq!((sum.dtype(), normed.dtype()), (dtype, dtype));
        let epsilon = EPSILON as f32;
        let rounded = |values: Vec<f32>| Matrix::new(values, rows, cols, dtype).values;
        let summed = x.values.iter().zip(&y.values).map(|(x, y)| x + y).collect();
        let summed = rounded(summed);
        let made = reference::norm_forward(Norm::Rms, &summed, None, (&gain, None), rows, epsilon);
        assert_eq!(values(sum.cast(FloatDType::F32)), summed, "{dtype:?}");
        assert_eq!(
            values(normed.cast(FloatDType::F32)),
            rounded(made.normed),
            "{dtype:?}"
        );
    }
}

/// The layer norm equals burn-nn's, with the same parameters.
#[test]
fn layer_norm_is_burn_nns() {
    skip_where_small_only!();
    let device = device();
    let mut norm = LayerNormConfig::new(24).with_epsilon(EPSILON).init(&device);
    norm.beta = Some(Param::from_tensor(tensor([24], 5, &device)));
    let ids = (norm.gamma.id, norm.beta.as_ref().unwrap().id);
    let x = tensor([2, 3, 24], 1, &device);
    let expected = values(norm.forward(x.clone()));
    let ours = LayerNorm::from_layer_norm(norm, EPSILON);
    assert_close("layer norm", &values(ours.forward(x.clone())), &expected);
    assert_eq!(ours.num_params(), 48);
    let back = ours.into_layer_norm();
    assert_eq!((back.gamma.id, back.beta.as_ref().unwrap().id), ids);
    assert_close("back", &values(back.forward(x)), &expected);
}

/// A chain of blocks gives the same bits whether each block adds its output or leaves it to the
/// next.
#[test]
fn additions_may_be_left_to_the_next_block() {
    skip_where_small_only!();
    let device = device();
    let config = Nvfp4TransformerBlockConfig::new(32, 2, 48);
    let blocks = [config.init(&device), config.init(&device)];
    let norm = RmsNormConfig::new(32).init(&device);
    let positions = RopeCacheConfig::new(6, 16).init(&device);
    let x = tensor([2, 6, 32], 1, &device).cast(activation());
    let added = blocks
        .iter()
        .fold(x.clone(), |x, block| block.forward(x, &positions).output);
    let left = blocks
        .iter()
        .fold(ResidualStream::from(x), |stream, block| {
            block.forward_stream(stream, &positions).output
        });
    assert!(left.pending.is_some());
    let (sum, normed) = norm.forward_stream(left);
    let values = |x: Tensor<3>| values(x.cast(FloatDType::F32));
    assert_eq!(values(sum), values(added.clone()));
    assert_eq!(values(normed), values(norm.forward(added)));
}

#[test]
fn bad_arguments_are_named() {
    let device = device();
    let x = tensor([2, 16], 1, &device);
    let gain = tensor([16], 2, &device);
    let short = tensor([8], 2, &device);
    let named = |argument: &str, error: Option<burn_nvfp4::Nvfp4Error>| {
        let error = error.expect("an error").to_string();
        assert!(error.contains(argument), "{error}");
    };
    let (norm, add) = (functions::try_rms_norm, functions::try_add_rms_norm);
    named("`gamma`", norm(x.clone(), short.clone(), EPSILON).err());
    named("`epsilon`", norm(x.clone(), gain.clone(), f64::NAN).err());
    let other = tensor([3, 16], 1, &device);
    named(
        "`residual`",
        add(x.clone(), other, gain.clone(), EPSILON).err(),
    );
    let narrow = x.clone().cast(FloatDType::BF16);
    named(
        "`residual`",
        add(x.clone(), narrow, gain.clone(), EPSILON).err(),
    );
    let bias = Some(short);
    named(
        "`beta`",
        functions::try_layer_norm(x.clone(), gain, bias, EPSILON).err(),
    );
    let odd = tensor([2, 3], 1, &device);
    named("`gate_up`", functions::try_swiglu(odd).err());
    let empty = Tensor::<2>::zeros([2, 0], &device);
    named("`x`", functions::try_gelu(empty, Gelu::Erf).err());
}
