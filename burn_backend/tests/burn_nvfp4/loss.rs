//! Cross entropy, with and without the head, and embeddings.

use burn_core::module::{Module, Param};
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::loss::{
    CrossEntropy, Head, KlDivergence, Reduction, cross_entropy, embedding, linear_cross_entropy,
    try_cross_entropy, try_embedding, try_linear_cross_entropy, try_linear_kl_divergence,
};
use burn_nvfp4::nn::{Embedding, LmHead};
use nvfp4_formats::reference;

use crate::support::{Matrix, activation, burn_matmul_error, device, small_only};

fn ints(values: &[i64], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn assert_near(found: &[f32], expected: &[f64], bound: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (*found as f64 - expected).abs() <= bound,
            "{what}: element {i}: {found}, not {expected}"
        );
    }
}

/// Loss of the logits `x w` in `f64`, with its gradients.
struct Exact {
    loss: f64,
    dx: Vec<f64>,
    dw: Vec<f64>,
}

impl Exact {
    fn new(x: &[f32], w: &[f32], targets: &[i64], d: usize, params: &CrossEntropy) -> Self {
        let rows = targets.len();
        let vocab = w.len() / d;
        let counted = targets.iter().filter(|t| **t != params.ignore as i64);
        let scale = match params.reduction {
            Reduction::Mean => 1.0 / (counted.count() as f64).max(1.0),
            Reduction::Sum => 1.0,
        };
        let mut exact = Self {
            loss: 0.0,
            dx: vec![0.0; rows * d],
            dw: vec![0.0; d * vocab],
        };
        let (smoothing, z) = (params.smoothing as f64, params.z_loss as f64);
        for (row, target) in targets.iter().enumerate() {
            if *target == params.ignore as i64 {
                continue;
            }
            let target = *target as usize;
            let x = &x[row * d..][..d];
            let logits: Vec<f64> = (0..vocab)
                .map(|v| (0..d).map(|k| x[k] as f64 * w[k * vocab + v] as f64).sum())
                .collect();
            let max = logits.iter().fold(f64::MIN, |a, b| a.max(*b));
            let lse = max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
            let mean = logits.iter().sum::<f64>() / vocab as f64;
            let nll = (1.0 - smoothing) * (lse - logits[target]) + smoothing * (lse - mean);
            exact.loss += scale * (nll + z * lse * lse);
            for v in 0..vocab {
                let mut slope = (logits[v] - lse).exp() * (1.0 + 2.0 * z * lse);
                slope -= smoothing / vocab as f64;
                if v == target {
                    slope -= 1.0 - smoothing;
                }
                for k in 0..d {
                    exact.dx[row * d + k] += scale * slope * w[k * vocab + v] as f64;
                    exact.dw[k * vocab + v] += scale * slope * x[k] as f64;
                }
            }
        }
        exact
    }
}

const PARAMS: [CrossEntropy; 3] = [
    CrossEntropy {
        ignore: -100,
        smoothing: 0.0,
        z_loss: 0.0,
        reduction: Reduction::Mean,
    },
    CrossEntropy {
        ignore: -100,
        smoothing: 0.1,
        z_loss: 1e-2,
        reduction: Reduction::Mean,
    },
    CrossEntropy {
        ignore: 3,
        smoothing: 0.0,
        z_loss: 0.0,
        reduction: Reduction::Sum,
    },
];

fn targets_of(rows: usize, vocab: usize, params: &CrossEntropy) -> Vec<i64> {
    (0..rows)
        .map(|row| match row % 4 {
            1 => params.ignore as i64,
            _ => ((row * 31) % vocab) as i64,
        })
        .collect()
}

/// Several chunks, one chunk, and a partial chunk, in `f32` and in the dtype of activations.
#[test]
fn a_head_and_its_loss_are_those_of_f64() {
    let device = device().autodiff();
    // At other sizes, Burn's matmul requests more shared memory than CubeCL's CPU runtime has.
    let (d, vocab, sizes, params) = match small_only() {
        true => (16, 40, &[20][..], &PARAMS[1..2]),
        false => (32, 48, &[1, 100, 300][..], &PARAMS[..]),
    };
    for dtype in [DType::F32, activation()] {
        for &rows in sizes {
            for params in params {
                let x = Matrix::gaussian(rows, d, dtype, 3)
                    .tensor(&device)
                    .require_grad();
                let w = Matrix::gaussian(d, vocab, DType::F32, 4);
                let w = w.tensor(&device).mul_scalar(0.3).require_grad();
                let targets = targets_of(rows, vocab, params);
                let on_device = ints(&targets, &device);
                // 128 rows per chunk.
                let loss =
                    try_linear_cross_entropy(x.clone(), w.clone(), on_device, *params, 1).unwrap();
                let rounded = w.clone().cast(FloatDType::from(dtype));
                let exact = Exact::new(&floats(x.clone()), &floats(rounded), &targets, d, params);
                let what = format!("{dtype:?}, {rows} rows, {params:?}");
                assert_eq!(loss.dtype(), DType::F32);
                // bf16 logits, of magnitude about 8, have a relative error of up to 2^-9. In f32
                // Burn multiplies.
                let unit = match dtype {
                    DType::F32 => f64::from(burn_matmul_error(1e-5)),
                    _ => 2e-2,
                };
                let size = match params.reduction {
                    Reduction::Mean => 1.0,
                    Reduction::Sum => rows as f64,
                };
                assert_near(&floats(loss.clone()), &[exact.loss], unit * size, &what);
                let grads = loss.backward();
                let (dx, dw) = (x.grad(&grads).unwrap(), w.grad(&grads).unwrap());
                assert_eq!((dx.dtype(), dw.dtype()), (dtype, DType::F32), "{what}");
                let largest = exact.dx.iter().fold(0f64, |a, b| a.max(b.abs()));
                assert_near(&floats(dx), &exact.dx, unit * largest.max(1e-3), &what);
                let largest = exact.dw.iter().fold(0f64, |a, b| a.max(b.abs()));
                assert_near(&floats(dw), &exact.dw, unit * largest.max(1e-3), &what);
            }
        }
    }
}

/// The upstream gradient is a factor; an ignored row gets no gradient, and nothing is NaN if all
/// rows are ignored.
#[test]
fn upstream_gradients_and_rows_without_a_target() {
    let device = device().autodiff();
    let (rows, d, vocab) = (20, 16, 32);
    let params = CrossEntropy::default();
    let gradients = |targets: &[i64], factor: Option<f32>| {
        let x = Matrix::gaussian(rows, d, DType::F32, 3)
            .tensor(&device)
            .require_grad();
        let w = Matrix::gaussian(d, vocab, DType::F32, 4)
            .tensor(&device)
            .require_grad();
        let loss = linear_cross_entropy(x.clone(), w.clone(), ints(targets, &device), params);
        let value = floats(loss.clone())[0];
        let loss = match factor {
            Some(factor) => loss.mul_scalar(factor),
            None => loss,
        };
        let grads = loss.backward();
        (
            value,
            floats(x.grad(&grads).unwrap()),
            floats(w.grad(&grads).unwrap()),
        )
    };
    let targets = targets_of(rows, vocab, &params);
    let (loss, dx, dw) = gradients(&targets, None);
    assert!(loss > 0.0 && dx[..d].iter().any(|v| *v != 0.0));
    assert!(dx[d..2 * d].iter().all(|v| *v == 0.0));
    let (_, dx_of_half, dw_of_half) = gradients(&targets, Some(0.5));
    let half = |values: &[f32]| values.iter().map(|v| v * 0.5).collect::<Vec<_>>();
    assert_eq!((dx_of_half, dw_of_half), (half(&dx), half(&dw)));
    let (loss, dx, dw) = gradients(&vec![-100; rows], None);
    assert_eq!(loss, 0.0);
    assert!(dx.iter().chain(&dw).all(|v| *v == 0.0));
    // A target that is no class.
    let mut wrong = targets;
    wrong[2] = vocab as i64;
    let (loss, dx, _) = gradients(&wrong, None);
    assert!(loss.is_nan());
    assert!(dx[..2 * d].iter().all(|v| v.is_finite()));
    assert!(dx[2 * d..3 * d].iter().all(|v| v.is_nan()));
}

/// Without autodiff only the loss is computed, with the same value.
#[test]
fn the_loss_alone_is_the_same() {
    let device = device();
    let (rows, d, vocab) = (70, 16, 40);
    let params = PARAMS[1];
    let targets = targets_of(rows, vocab, &params);
    let loss = |device: &Device| {
        let x = Matrix::gaussian(rows, d, DType::F32, 3).tensor(device);
        let w = Matrix::gaussian(d, vocab, DType::F32, 4).tensor(device);
        let (x, w) = match device.is_autodiff() {
            true => (x.require_grad(), w.require_grad()),
            false => (x, w),
        };
        floats(linear_cross_entropy(x, w, ints(&targets, device), params))
    };
    assert_eq!(loss(&device), loss(&device.clone().autodiff()));
}

/// The logits are not changed if others hold them.
#[test]
fn cross_entropy_is_the_oracles() {
    let device = device().autodiff();
    let (rows, vocab) = (9, 37);
    for params in &PARAMS {
        let logits = Matrix::gaussian(rows, vocab, DType::F32, 5)
            .tensor(&device)
            .require_grad();
        let before = floats(logits.clone());
        let targets = targets_of(rows, vocab, params);
        let loss = cross_entropy(logits.clone(), ints(&targets, &device), *params);
        let narrow: Vec<i32> = targets.iter().map(|t| *t as i32).collect();
        let expected = reference::cross_entropy(&before, &narrow, vocab, params);
        let near = |values: &[f32]| values.iter().map(|v| *v as f64).collect::<Vec<f64>>();
        assert_near(&floats(loss.clone()), &near(&[expected.loss]), 2e-5, "loss");
        let grads = loss.backward();
        let gradient = floats(logits.grad(&grads).unwrap());
        assert_near(&gradient, &near(&expected.gradient), 2e-6, "gradient");
        assert_eq!(floats(logits), before, "the logits changed");
    }
}

#[test]
fn embeddings_and_their_gradient() {
    let device = device().autodiff();
    let (vocab, d) = (11, 24);
    for dtype in [DType::F32, activation()] {
        for ids in [
            vec![3i64; 70],
            (0..100).map(|i| i * i % 11).collect(),
            Vec::new(),
        ] {
            let table = Matrix::gaussian(vocab, d, DType::F32, 6)
                .tensor(&device)
                .require_grad();
            let rows = embedding(table.clone(), ints(&ids, &device), dtype.into());
            assert_eq!((rows.dims(), rows.dtype()), ([ids.len(), d], dtype));
            let values = floats(table.clone().cast(FloatDType::from(dtype)));
            let expected: Vec<f32> = ids
                .iter()
                .flat_map(|id| values[*id as usize * d..][..d].to_vec())
                .collect();
            assert_eq!(floats(rows.clone()), expected);
            if ids.is_empty() {
                continue;
            }
            let weights = Matrix::gaussian(ids.len(), d, dtype, 7).tensor(&device);
            let grads = (rows * weights.clone()).sum().backward();
            let gradient = table.grad(&grads).unwrap();
            assert_eq!(gradient.dtype(), DType::F32);
            let narrow: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
            let expected = reference::embedding_gradient(&floats(weights), &narrow, vocab, d);
            assert_eq!(floats(gradient), expected, "{dtype:?}, {} ids", ids.len());
        }
    }
}

/// One parameter as both embedding and head of a model: its gradients add up.
#[test]
fn tied_weights_have_one_gradient() {
    let device = device().autodiff();
    let (vocab, d) = (20, 16);
    let ids = [1i64, 5, 5, 19, 0, 7];
    let targets = ints(&[5, 5, 19, 0, 7, 2], &device);
    // Two parameters of one tensor would be one node of the graph.
    let param = || Param::from_tensor(Matrix::gaussian(vocab, d, DType::F32, 8).tensor(&device));
    let gradient = |tied: bool| {
        let ends = Embedding::new(param());
        let head = match tied {
            true => ends.weight.clone(),
            false => param(),
        };
        let x = ends.forward(ints(&ids, &device).reshape([2, 3]));
        let (x, params) = (x.reshape([6, d]), CrossEntropy::default());
        let loss = linear_cross_entropy(x, head.val().transpose(), targets.clone(), params);
        let grads = loss.backward();
        (
            ends.weight.grad(&grads).map(floats),
            head.grad(&grads).map(floats),
        )
    };
    let (one, _) = gradient(true);
    let (of_table, of_head) = gradient(false);
    let sum: Vec<f64> = of_table
        .unwrap()
        .iter()
        .zip(&of_head.unwrap())
        .map(|(a, b)| (a + b) as f64)
        .collect();
    assert_near(&one.unwrap(), &sum, 1e-6, "tied");
}

#[test]
fn modules_keep_the_parameters_of_burns() {
    let device = device();
    let embedding = burn_nn::EmbeddingConfig::new(7, 16).init(&device);
    let (id, values) = (embedding.weight.id, floats(embedding.weight.val()));
    let ours = Embedding::from_embedding(embedding);
    assert_eq!(ours.num_params(), 7 * 16);
    let rows = ours.forward(ints(&[6, 0], &device).reshape([1, 2]));
    assert_eq!(rows.dims(), [1, 2, 16]);
    assert_eq!(floats(rows)[..16], values[6 * 16..]);
    assert_eq!(ours.into_embedding().weight.id, id);
    let linear = burn_nn::LinearConfig::new(16, 32)
        .with_bias(false)
        .init(&device);
    let id = linear.weight.id;
    let x = Matrix::gaussian(6, 16, DType::F32, 1).tensor(&device);
    let expected = floats(linear.forward(x.clone()));
    let head = LmHead::try_from_linear(linear).unwrap();
    let logits: Tensor<3> = head.logits(x.clone().reshape([2, 3, 16]));
    assert_eq!(logits.dims(), [2, 3, 32]);
    assert_eq!(floats(logits), expected);
    let targets = ints(&[0, 1, 2, 3, 4, 31], &device);
    let loss = floats(head.loss(x, targets))[0];
    assert!(loss.is_finite() && loss > 0.0);
    assert_eq!(head.into_linear().weight.id, id);
    let biased = burn_nn::LinearConfig::new(16, 32).init(&device);
    assert!(LmHead::try_from_linear(biased).is_err());
}

/// Invalid arguments are refused by name.
#[test]
fn wrong_arguments_are_refused_by_name() {
    let device = device();
    let logits = || Tensor::<2>::zeros([4, 8], &device);
    let targets = |n: usize| ints(&vec![0; n], &device);
    let params = CrossEntropy::default();
    let refused = |error: nvfp4_formats::Nvfp4Error, name: &str| {
        let message = error.to_string();
        assert!(message.contains(&format!("`{name}`")), "{name}: {message}");
    };
    refused(
        try_cross_entropy(logits(), targets(3), params).unwrap_err(),
        "targets",
    );
    let none = Tensor::<2>::zeros([4, 0], &device);
    refused(
        try_cross_entropy(none, targets(4), params).unwrap_err(),
        "logits",
    );
    let smoothing = CrossEntropy {
        smoothing: 2.0,
        ..params
    };
    refused(
        try_cross_entropy(logits(), targets(4), smoothing).unwrap_err(),
        "smoothing",
    );
    let z_loss = CrossEntropy {
        z_loss: -1.0,
        ..params
    };
    refused(
        try_cross_entropy(logits(), targets(4), z_loss).unwrap_err(),
        "z_loss",
    );
    let w = Tensor::<2>::zeros([9, 16], &device);
    let found = try_linear_cross_entropy(logits(), w, targets(4), params, 1 << 20);
    refused(found.unwrap_err(), "w");
    let w = || Tensor::<2>::zeros([8, 16], &device);
    let found = try_linear_cross_entropy(logits(), w(), targets(4), params, 0);
    refused(found.unwrap_err(), "chunk_bytes");
    let found = try_linear_cross_entropy(logits(), w(), targets(5), params, 1);
    refused(found.unwrap_err(), "targets");
    let empty = Tensor::<2>::zeros([0, 8], &device);
    refused(
        try_embedding(empty, targets(4), FloatDType::F32).unwrap_err(),
        "table",
    );
    if !small_only() {
        let wide = Tensor::<2>::zeros([4, 8], (&device, DType::F64));
        refused(
            try_cross_entropy(wide, targets(4), params).unwrap_err(),
            "logits",
        );
    }
}

/// Loss and gradients against the formulas in f64, with ignored rows, in one chunk and in unequal
/// ones. f32 sums of a few hundred terms: the bound is 1e-5 of the largest value.
#[test]
fn the_divergence_is_the_formula() {
    let (rows, vocab, widths) = (300, 29, [5, 8]);
    let plain = device();
    let device = plain.clone().autodiff();
    let made = |seed: usize, count: usize| -> Vec<f64> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f64 / 252.25 - 2.0;
        (0..count).map(|i| f64::from(value(i) as f32)).collect()
    };
    let [x, w] = [made(1, rows * widths[0]), made(2, widths[0] * vocab)];
    let [y, v] = [made(3, rows * widths[1]), made(4, widths[1] * vocab)];
    let targets: Vec<i32> = (0..rows as i32)
        .map(|i| if i % 3 == 1 { -100 } else { i })
        .collect();
    let (temperature, scale) = (1.7, 0.25);

    let logits = |x: &[f64], w: &[f64], width: usize, row: usize| -> Vec<f64> {
        let dot = |class: usize| -> f64 {
            (0..width)
                .map(|i| x[row * width + i] * w[i * vocab + class])
                .sum::<f64>()
        };
        (0..vocab).map(|class| dot(class) / temperature).collect()
    };
    let log_softmax = |logits: Vec<f64>| -> Vec<f64> {
        let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
        logits.iter().map(|logit| logit - sum.ln()).collect()
    };
    let mut loss = 0.0;
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    for row in (0..rows).filter(|row| targets[*row] >= 0) {
        let ln_q = log_softmax(logits(&x, &w, widths[0], row));
        let ln_p = log_softmax(logits(&y, &v, widths[1], row));
        for class in 0..vocab {
            let p = ln_p[class].exp();
            loss += scale * temperature * temperature * p * (ln_p[class] - ln_q[class]);
            let d = scale * temperature * (ln_q[class].exp() - p);
            for i in 0..widths[0] {
                dx[row * widths[0] + i] += d * w[i * vocab + class];
                dw[i * vocab + class] += d * x[row * widths[0] + i];
            }
        }
    }

    let tensor = |values: &[f64], shape: [usize; 2]| {
        let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
        Tensor::<2>::from_data(TensorData::new(values, shape), (&device, DType::F32))
    };
    let bound = f64::from(burn_matmul_error(1e-5));
    for chunk_bytes in [1, 1 << 20] {
        let student = Head {
            features: tensor(&x, [rows, widths[0]]).require_grad(),
            weight: tensor(&w, [widths[0], vocab]).require_grad(),
        };
        let teacher = Head {
            features: tensor(&y, [rows, widths[1]]),
            weight: tensor(&v, [widths[1], vocab]),
        };
        let targets = Tensor::from_data(TensorData::new(targets.clone(), [rows]), &device);
        let scale = Tensor::<1>::from_data([scale as f32], (&device, DType::F32));
        let params = KlDivergence {
            temperature: temperature as f32,
            ..KlDivergence::default()
        };
        let own = student.clone();
        let found =
            try_linear_kl_divergence(own, teacher, targets, scale, params, chunk_bytes).unwrap();
        let gradients = found.clone().backward();
        assert_near(&floats(found), &[loss], bound * loss, "loss");
        for (found, expected) in [
            (student.features.grad(&gradients).unwrap(), &dx),
            (student.weight.grad(&gradients).unwrap(), &dw),
        ] {
            let largest = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
            assert_near(&floats(found), expected, bound * largest, "gradient");
        }
    }
}

/// In the dtype of a training step, with the transpose of an embedding as the head: losses and
/// gradients equal those in `f32`, up to rounding to bf16.
#[test]
fn a_divergence_of_activations_is_near_that_in_f32() {
    let device = device().autodiff();
    let (rows, vocab, width) = (150, 272, 32);
    let made = |seed: usize, shape: [usize; 2], dtype: DType| {
        // Small logits, so that rounding changes them only slightly.
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 2018.0 - 0.25;
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
        Tensor::<2>::from_data(TensorData::new(values, shape), (&device, DType::F32)).cast(dtype)
    };
    let run = |dtype: DType| {
        let head = |seed, tracked: bool| {
            let features = made(seed, [rows, width], activation()).cast(dtype);
            let weight = made(seed + 1, [vocab, width], activation()).cast(dtype);
            let [features, weight] = [features, weight].map(|it| match tracked {
                true => it.detach().require_grad(),
                false => it,
            });
            let transposed = weight.clone().transpose();
            let head = Head {
                features: features.clone(),
                weight: transposed,
            };
            (head, [features, weight])
        };
        let (student, tracked) = head(1, true);
        let (teacher, _) = head(3, false);
        let targets = Tensor::<1, Int>::zeros([rows], &device);
        let scale = Tensor::<1>::ones([1], (&device, DType::F32));
        let params = KlDivergence::default();
        let loss =
            try_linear_kl_divergence(student, teacher, targets, scale, params, 1 << 20).unwrap();
        let gradients = loss.clone().backward();
        let [dx, dw] = tracked.map(|it| floats(it.grad(&gradients).unwrap()));
        (floats(loss)[0], dx, dw)
    };
    let (exact, rounded) = (run(DType::F32), run(activation()));
    assert!(
        (exact.0 - rounded.0).abs() < 0.02 * exact.0,
        "{} {}",
        exact.0,
        rounded.0
    );
    for (exact, rounded) in [(&exact.1, &rounded.1), (&exact.2, &rounded.2)] {
        let largest = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (exact, rounded) in exact.iter().zip(rounded) {
            assert!(
                (exact - rounded).abs() < 0.03 * largest,
                "{rounded}, not {exact}"
            );
        }
    }
}

#[test]
fn wrong_arguments_of_a_divergence_are_refused() {
    let device = device();
    let zeros = |shape| Tensor::<2>::zeros(shape, (&device, DType::F32));
    let refused = |teacher: [[usize; 2]; 2], temperature: f32| {
        let student = Head {
            features: zeros([3, 4]),
            weight: zeros([4, 5]),
        };
        let teacher = Head {
            features: zeros(teacher[0]),
            weight: zeros(teacher[1]),
        };
        let targets = Tensor::<1, Int>::zeros([3], &device);
        let scale = Tensor::<1>::ones([1], (&device, DType::F32));
        let params = KlDivergence {
            temperature,
            ..KlDivergence::default()
        };
        let result = try_linear_kl_divergence(student, teacher, targets, scale, params, 1);
        result.unwrap_err().to_string()
    };
    assert!(refused([[2, 4], [4, 5]], 1.0).contains("teacher.features"));
    assert!(refused([[3, 4], [4, 6]], 1.0).contains("teacher.weight"));
    assert!(refused([[3, 4], [4, 5]], 0.0).contains("temperature"));
}
