//! The differentiable linear layer: forward and all three gradients.

use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::{AmaxGranularity, BackwardSource, LinearSpec, OperandSpec, QuantParams};
use burn_nvfp4::state::RngState;
use burn_nvfp4::{Hadamard, Nvfp4LinearConfig, Nvfp4Recipe, RandomStream, Rounding, Usage};
use nvfp4_formats::HadamardSize;

use crate::support::{
    Matrix, activation, assert_operands, device, one_by_16, skip_where_small_only, small_only,
    spec, sqnr, values,
};

/// Results of one training step of one layer.
struct Step {
    y: Tensor<2>,
    dx: Tensor<2>,
    dw: Tensor<2>,
    db: Option<Tensor<1>>,
}

/// Computes `y = x w + bias`, and the gradients of `sum(y * dy)`, whose gradient by `y` is exactly
/// `dy`.
fn step(
    x: &Matrix,
    w: &Matrix,
    bias: Option<&Matrix>,
    dy: &Matrix,
    spec: LinearSpec,
    device: &Device,
) -> Step {
    let x = x.tensor(device).require_grad();
    let w = w.tensor(device).require_grad();
    let bias = bias.map(|bias| {
        let data = TensorData::new(bias.values.clone(), [bias.cols]);
        Tensor::<1>::from_data(data, (device, bias.dtype)).require_grad()
    });
    let y = linear(x.clone(), w.clone(), bias.clone(), spec);
    let grads = (y.clone() * dy.tensor(device)).sum().backward();
    Step {
        y: y.inner(),
        dx: x.grad(&grads).expect("a gradient for x"),
        dw: w.grad(&grads).expect("a gradient for w"),
        db: bias.map(|bias| bias.grad(&grads).expect("a gradient for the bias")),
    }
}

/// Asserts that the four results are those of the oracle's composition, in the expected dtypes.
fn assert_oracle(
    (m, k, n): (usize, usize, usize),
    (x_dtype, w_dtype, b_dtype): (DType, DType, DType),
    spec: LinearSpec,
    device: &Device,
) {
    let x = Matrix::gaussian(m, k, x_dtype, 21);
    let w = Matrix::gaussian(k, n, w_dtype, 22);
    let bias = Matrix::gaussian(1, n, b_dtype, 23);
    let dy = Matrix::gaussian(m, n, x_dtype, 24);
    let found = step(&x, &w, Some(&bias), &dy, spec, device);

    assert_eq!(found.y.dtype(), x_dtype, "type of y");
    assert_eq!(found.dx.dtype(), x_dtype, "type of dx");
    assert_eq!(found.dw.dtype(), w_dtype, "type of dw");
    let db = found.db.expect("a bias was given");
    assert_eq!(db.dtype(), b_dtype, "type of db");

    let (rows, cols) = (Usage::Columnwise, Usage::Rowwise);
    let fprop_x = x.operand(&spec.fprop_x, cols, x_dtype);
    let fprop_w = w.operand(&spec.fprop_w, rows, x_dtype);
    let (wgrad_x, dgrad_w) = match spec.source {
        BackwardSource::Original => (
            x.operand(&spec.wgrad_x, rows, x_dtype),
            w.operand(&spec.dgrad_w, cols, x_dtype),
        ),
        BackwardSource::Forward => (
            fprop_x.again(&spec.wgrad_x, rows, x_dtype),
            fprop_w.again(&spec.dgrad_w, cols, x_dtype),
        ),
    };
    let dgrad_dy = dy.operand(&spec.dgrad_dy, cols, x_dtype);
    let wgrad_dy = dy.operand(&spec.wgrad_dy, rows, x_dtype);
    let bias = Some(&bias.values[..]);
    let (y, dx, dw) = (values(found.y), values(found.dx), values(found.dw));
    assert_operands("y", &y, &fprop_x, &fprop_w, bias, x_dtype);
    assert_operands("dx", &dx, &dgrad_dy, &dgrad_w, None, x_dtype);
    assert_operands("dw", &dw, &wgrad_x, &wgrad_dy, None, w_dtype);
    for (col, found) in values(db).into_iter().enumerate() {
        let column = (0..m).map(|row| f64::from(dy.values[row * n + col]));
        let (sum, magnitude) = column.fold((0.0, 0.0), |(s, a), v| (s + v, a + v.abs()));
        let narrow = if b_dtype == DType::F32 {
            0.0
        } else {
            2f64.powi(-8) * sum.abs()
        };
        let bound = m as f64 * 2f64.powi(-24) * magnitude + narrow;
        assert!(
            (f64::from(found) - sum).abs() <= bound,
            "db[{col}]: {found}, expected {sum}"
        );
    }
}

#[test]
fn the_default_recipe_is_the_oracles_composition() {
    let device = device().autodiff();
    let shape = if small_only() {
        (24, 32, 32)
    } else {
        (72, 64, 96)
    };
    assert_oracle(
        shape,
        (activation(), DType::F32, DType::F32),
        spec(5, 3),
        &device,
    );
}

#[test]
fn every_switch_and_type_is_the_oracles_composition() {
    skip_where_small_only!();
    let device = device().autodiff();
    let on = spec(1, 0);
    let stochastic = |role| Rounding::Stochastic(RandomStream::new(3, role, 1));
    let (signs, nearest) = (Some(Hadamard::seeded(8)), Rounding::Nearest);
    let specs = [
        one_by_16(on),
        LinearSpec::nvidia(None, stochastic(0), stochastic(1)),
        LinearSpec::nvidia(signs, stochastic(0), stochastic(1)),
        LinearSpec::nvidia(Some(Hadamard::default()), nearest, nearest),
    ];
    for spec in specs {
        assert_oracle(
            (48, 32, 64),
            (DType::F32, DType::F32, DType::F32),
            spec,
            &device,
        );
    }
    for dtypes in [
        (DType::F32, DType::F32, DType::F32),
        (DType::F16, DType::F32, DType::F32),
        (DType::BF16, DType::BF16, DType::BF16),
    ] {
        assert_oracle((33, 64, 32), dtypes, on, &device);
    }
}

/// fprop, dgrad and wgrad of every preset are GEMMs of the oracle's operands: with 33 tokens, so
/// that blocks of 16 and 32 and groups of 128 are all padded.
#[test]
fn every_preset_is_the_oracles_composition() {
    let device = device().autodiff();
    let randomness = RngState {
        seed: 5,
        layer: 3,
        offset: 9,
        rht_signs: Hadamard::DEFAULT_SIGNS,
    };
    let shape = if small_only() {
        (20, 32, 32)
    } else {
        (33, 64, 96)
    };
    for name in Nvfp4Recipe::preset_names() {
        eprintln!("{name}");
        let spec = Nvfp4Recipe::preset(name).unwrap().spec(&randomness);
        let dtypes = (activation(), DType::F32, DType::F32);
        assert_oracle(shape, dtypes, spec, &device);
        if !small_only() {
            assert_oracle(shape, (DType::F32, DType::F32, DType::F32), spec, &device);
        }
    }
}

/// Backwards by MS-EDEN and in MXFP8 from the dequantized operands of a forward with a global scale
/// per stored row.
#[test]
fn backwards_of_per_token_forwards_are_the_oracles_composition() {
    skip_where_small_only!();
    let device = device().autodiff();
    let rows = OperandSpec::Quantized(QuantParams {
        amax: AmaxGranularity::PerRow,
        ..QuantParams::nvfp4(Rounding::Nearest)
    });
    for name in ["quartet2", "fwd_nvfp4_bwd_mxfp8_dequantized"] {
        let spec = LinearSpec {
            fprop_x: rows,
            fprop_w: rows,
            ..Nvfp4Recipe::preset(name).unwrap().spec(&RngState {
                seed: 5,
                layer: 3,
                offset: 9,
                rht_signs: Hadamard::DEFAULT_SIGNS,
            })
        };
        for dtype in [DType::F32, DType::BF16] {
            assert_oracle((33, 64, 96), (dtype, DType::F32, DType::F32), spec, &device);
        }
    }
}

/// Transforms of every size, with the recipe's signs and with signs drawn from its seed: the GEMMs
/// are those of the oracle's operands, and a layer with such a recipe computes them.
#[test]
fn transforms_of_every_size_are_the_oracles_composition() {
    skip_where_small_only!();
    let device = device().autodiff();
    let (seed, rht_signs) = (5, 0x35C9);
    let (tokens, d_in, d_out) = (40, 64, 96);
    for (size, elements) in [
        (HadamardSize::H16, 16),
        (HadamardSize::H32, 32),
        (HadamardSize::H64, 64),
        (HadamardSize::H128, 128),
    ] {
        for seeded in [false, true] {
            let mut recipe = Nvfp4Recipe::new()
                .with_seed(seed)
                .with_rht_signs(rht_signs)
                .with_rht_seeded(seeded);
            for operand in [&mut recipe.wgrad.x, &mut recipe.wgrad.dy] {
                *operand = operand.rht(elements);
            }
            recipe.check().unwrap();
            let layer = Nvfp4LinearConfig::new(d_in, d_out)
                .with_bias(false)
                .with_recipe(recipe.clone())
                .init(&device);
            let spec = recipe.spec(&layer.state.rng_state());
            let expected = if seeded {
                Hadamard::seeded_with_size(size, seed)
            } else {
                let word = u64::from(rht_signs) * 0x0001_0001_0001_0001;
                Hadamard::new(size, [word; 2])
            };
            for operand in [spec.wgrad_x, spec.wgrad_dy] {
                let params = operand.params().expect("in NVFP4");
                assert_eq!(params.hadamard, Some(expected), "{elements}, {seeded}");
            }
            let f32 = DType::F32;
            assert_oracle((tokens, d_in, d_out), (f32, f32, f32), spec, &device);

            let x = Matrix::gaussian(tokens, d_in, f32, 21);
            let dy = Matrix::gaussian(tokens, d_out, f32, 24);
            let w = Matrix::new(values(layer.weight.val().inner()), d_in, d_out, f32);
            let product = step(&x, &w, None, &dy, spec, &device);
            let y = layer.forward(x.tensor(&device).require_grad());
            let grads = (y.clone() * dy.tensor(&device)).sum().backward();
            let dw = layer.weight.grad(&grads).unwrap();
            assert_eq!(values(y.inner()), values(product.y), "{elements}, {seeded}");
            assert_eq!(values(dw), values(product.dw), "{elements}, {seeded}");
        }
    }
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    skip_where_small_only!();
    let run = |device: Device| {
        let x = Matrix::gaussian(32, 32, DType::F32, 31);
        let w = Matrix::gaussian(32, 48, DType::F32, 32)
            .tensor(&device)
            .require_grad();
        let x = x.tensor(&device).require_grad();
        // A memory-bound operation on each side, which the balanced strategy recomputes.
        let y = linear(x.clone().mul_scalar(0.5).exp(), w.clone(), None, spec(2, 7));
        let grads = (y.clone().sin() * y).sum().backward();
        (
            values(x.grad(&grads).unwrap()),
            values(w.grad(&grads).unwrap()),
        )
    };
    let plain = run(device().autodiff());
    assert!(plain.0.iter().any(|value| *value != 0.0));
    assert_eq!(run(device().autodiff().gradient_checkpointing()), plain);
}

#[test]
fn leading_axes_are_rows() {
    skip_where_small_only!();
    let device = device();
    let x = Matrix::gaussian(24, 32, DType::BF16, 41).tensor(&device);
    let w = Matrix::gaussian(32, 48, DType::F32, 42).tensor(&device);
    let flat = linear(x.clone(), w.clone(), None, spec(0, 0));
    let y = linear(
        x.clone().reshape([2, 3, 4, 32]),
        w.clone(),
        None,
        spec(0, 0),
    );
    assert_eq!(y.dims(), [2, 3, 4, 48]);
    assert_eq!(values(y), values(flat));
    let first: Tensor<1> = x.slice(0..1).reshape([32]);
    let y = linear(first.clone(), w.clone(), None, spec(0, 0));
    assert_eq!(y.dims(), [48]);
    assert_eq!(
        values(y),
        values(linear(first.reshape([1, 32]), w, None, spec(0, 0)))
    );
}

/// Operands that stay in bf16 may be transposed views: they give the same bits as a copy.
#[test]
fn transposed_views_are_multiplied_as_what_they_show() {
    skip_where_small_only!();
    let device = device().autodiff();
    let randomness = RngState {
        seed: 5,
        layer: 3,
        offset: 9,
        rht_signs: Hadamard::DEFAULT_SIGNS,
    };
    let spec = Nvfp4Recipe::bf16().spec(&randomness);
    let tensor = |rows, cols, seed| {
        let matrix = Matrix::gaussian(rows, cols, DType::BF16, seed).tensor(&device);
        // Its transpose, in memory.
        let copy = TensorData::new(
            values(matrix.clone().transpose()),
            [matrix.dims()[1], matrix.dims()[0]],
        );
        let copy: Tensor<2> = Tensor::from_data(copy, (&device, DType::BF16));
        (matrix, copy)
    };
    let ((x, x_copy), (w, w_copy)) = (tensor(144, 72, 61), tensor(208, 144, 62));
    let run = |x: Tensor<2>, w: Tensor<2>| {
        let (x, w) = (x.require_grad(), w.require_grad());
        let y = linear(x.clone(), w.clone(), None, spec);
        let grads = (y.clone() * y.clone()).sum().backward();
        let (dx, dw) = (x.grad(&grads).unwrap(), w.grad(&grads).unwrap());
        [values(y), values(dx), values(dw)]
    };
    // 72 x 144 times 144 x 208.
    let expected = run(x_copy.clone(), w_copy.clone());
    assert!(expected.iter().flatten().any(|value| *value != 0.0));
    assert_eq!(run(x.transpose(), w_copy), expected);
    assert_eq!(run(x_copy, w.transpose()), expected);
}

#[test]
fn no_rows_give_no_outputs_and_zero_gradients() {
    skip_where_small_only!();
    let device = device().autodiff();
    let empty = |cols| Matrix {
        values: vec![],
        rows: 0,
        cols,
        dtype: DType::BF16,
    };
    let w = Matrix::gaussian(32, 48, DType::F32, 51);
    let bias = Matrix::gaussian(1, 48, DType::F32, 52);
    let found = step(&empty(32), &w, Some(&bias), &empty(48), spec(0, 0), &device);
    assert_eq!(found.y.dims(), [0, 48]);
    assert_eq!(found.dx.dims(), [0, 32]);
    assert_eq!(values(found.dw), vec![0.0; 32 * 48]);
    assert_eq!(values(found.db.unwrap()), vec![0.0; 48]);
}

#[test]
fn the_offset_and_the_stream_decide_the_bits() {
    skip_where_small_only!();
    let device = device().autodiff();
    let x = Matrix::gaussian(64, 64, DType::F32, 61);
    let w = Matrix::gaussian(64, 64, DType::F32, 62);
    let dy = Matrix::gaussian(64, 64, DType::F32, 63);
    let run = |spec| {
        let found = step(&x, &w, None, &dy, spec, &device);
        (values(found.y), values(found.dx), values(found.dw))
    };
    let (y, dx, dw) = run(spec(4, 9));
    assert_eq!(
        run(spec(4, 9)),
        (y.clone(), dx.clone(), dw.clone()),
        "the same bits again"
    );
    for other in [spec(4, 10), spec(5, 9)] {
        let (other_y, other_dx, other_dw) = run(other);
        assert_eq!(other_y, y, "the forward draws nothing");
        assert_ne!(other_dx, dx);
        assert_ne!(other_dw, dw);
    }
}

#[test]
fn quantization_noise_stays_below_the_stated_floors() {
    skip_where_small_only!();
    let device = device().autodiff();
    let size = 512;
    let x = Matrix::gaussian(size, size, DType::F32, 71);
    let w = Matrix::gaussian(size, size, DType::F32, 72);
    let dy = Matrix::gaussian(size, size, DType::F32, 73);
    let found = step(&x, &w, None, &dy, spec(0, 0), &device);

    let (x, w, dy) = (
        x.tensor(&device).require_grad(),
        w.tensor(&device).require_grad(),
        dy.tensor(&device),
    );
    let y = x.clone().matmul(w.clone());
    let grads = (y.clone() * dy).sum().backward();
    let decibel = |exact: Tensor<2>, found: Tensor<2>| sqnr(&values(exact), &values(found));
    let forward = decibel(y.inner(), found.y);
    let dgrad = decibel(x.grad(&grads).unwrap(), found.dx);
    let wgrad = decibel(w.grad(&grads).unwrap(), found.dw);
    eprintln!(
        "SQNR on Gaussian 512^3: forward {forward:.2}, dgrad {dgrad:.2}, wgrad {wgrad:.2} dB"
    );
    assert!(forward >= 15.0, "forward {forward:.2} dB");
    assert!(dgrad >= 14.0, "dgrad {dgrad:.2} dB");
    assert!(wgrad >= 12.0, "wgrad {wgrad:.2} dB");
}
