//! Cross entropy on a device compared with the oracle: bit for bit if the exponential is the same,
//! otherwise within the error of CUDA's exponential.

use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{CrossEntropy, KlDivergence, Nvfp4Error, Reduction, reference};
use nvfp4_kernels::{loss, tensor::FloatKind};

use crate::support::{
    device::{
        DeviceElement, assert_floats, is_brief, read_f32, read_f32s, read_matrix, upload,
        upload_bytes,
    },
    inputs::{Generator, Kind, convert, values},
};

/// True if the device has the oracle's exponential.
fn is_exact(client: &Client) -> bool {
    client.name() != "cuda"
}

/// Asserts that `found` differs from `expected` by at most an exponential's relative error of 4e-6,
/// for terms of magnitude `size`, and one rounding to `T`.
fn assert_close<T: DeviceElement>(found: &[T], expected: &[T], size: f32, what: &str) {
    let (unit, least) = match T::KIND {
        FloatKind::F32 => (0.0, 0.0),
        FloatKind::Bf16 => (2f32.powi(-7), 0.0),
        FloatKind::F16 => (2f32.powi(-10), 6e-8),
    };
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (a, b) = (found.to_f32(), expected.to_f32());
        let bound = 4e-6 * (b.abs() + size) + unit * b.abs() + least;
        let both = a.is_nan() && b.is_nan();
        assert!(
            both || a == b || (a - b).abs() <= bound,
            "{what}: element {i}: {a:e}, not {b:e}"
        );
    }
}

fn targets_of(rows: usize, vocab: usize, seed: u32) -> Vec<i32> {
    let mut random = Generator::new(seed);
    (0..rows)
        .map(|row| match row % 5 {
            3 => -100,
            0 => vocab as i32 - 1,
            _ => (random.next_u32() as usize % vocab) as i32,
        })
        .collect()
}

/// Checks loss, losses of rows and gradient of `logits` against the oracle; also the loss alone.
fn check<T: DeviceElement>(
    client: &Client,
    logits: &[T],
    targets: &[i32],
    vocab: usize,
    params: &CrossEntropy,
    what: &str,
) {
    let what = &format!(
        "{what}: {} x {vocab} {:?} {params:?}",
        targets.len(),
        T::KIND
    );
    let rows = targets.len();
    let expected = reference::cross_entropy(logits, targets, vocab, params);
    let matrix = upload(client, logits, rows, vocab);
    let on_device = upload_bytes(client, bytemuck::cast_slice(targets));
    let losses = upload_bytes(client, bytemuck::cast_slice(&vec![7f32; rows]));
    let scale = loss::target_scale(client, &on_device, rows, params).unwrap();
    assert_eq!(
        read_f32(client, &scale),
        reference::target_scale(targets, params),
        "{what}"
    );
    loss::cross_entropy_rows(client, &matrix, &on_device, &losses, None, params).unwrap();
    let alone = read_f32s(client, &losses, rows);
    assert_floats(
        &read_matrix::<T>(client, &matrix),
        logits,
        &format!("{what}: the loss alone writes no gradient"),
    );
    loss::cross_entropy_rows(client, &matrix, &on_device, &losses, Some(&scale), params).unwrap();
    let found_rows = read_f32s(client, &losses, rows);
    assert_floats(
        &alone,
        &found_rows,
        &format!("{what}: with and without a gradient"),
    );
    let total = loss::sum_losses(client, &losses, rows, &scale).unwrap();
    assert_floats(
        &[read_f32(client, &total)],
        &[reference::sum_losses(&found_rows, read_f32(client, &scale))],
        &format!("{what}: sum"),
    );
    let gradient = read_matrix::<T>(client, &matrix);
    if is_exact(client) {
        assert_floats(&found_rows, &expected.rows, &format!("{what}: losses"));
        assert_floats(&gradient, &expected.gradient, &format!("{what}: gradient"));
        return;
    }
    let largest = logits.iter().fold(1f32, |m, x| {
        let x = x.to_f32().abs();
        if x.is_finite() { m.max(x) } else { m }
    });
    assert_close::<f32>(
        &found_rows,
        &expected.rows,
        largest,
        &format!("{what}: losses"),
    );
    let size = read_f32(client, &scale) * (1.0 + params.z_loss * 2.0 * largest);
    assert_close(
        &gradient,
        &expected.gradient,
        size,
        &format!("{what}: gradient"),
    );
}

fn all_params() -> [CrossEntropy; 4] {
    let plain = CrossEntropy::default();
    [
        plain,
        CrossEntropy {
            smoothing: 0.1,
            z_loss: 1e-4,
            ..plain
        },
        CrossEntropy {
            z_loss: 1e-3,
            reduction: Reduction::Sum,
            ignore: -1,
            ..plain
        },
        CrossEntropy {
            smoothing: 1.0,
            ..plain
        },
    ]
}

fn check_sizes<T: DeviceElement>(client: &Client) {
    let brief = is_brief(client);
    // Each size is a kernel of its own, which the CPU runtime takes long to compile.
    let edges: &[usize] = match T::KIND {
        FloatKind::F32 => &[1, 4, 9, 33, 256],
        _ => &[1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 74, 256, 300],
    };
    let small = (1..=300usize).filter(|vocab| !brief || edges.contains(vocab));
    for vocab in small.chain([2048, 2050, 2056]) {
        let rows = 1 + vocab % 11;
        let x = values(Kind::Normal, rows * vocab, vocab as u32);
        let scaled: Vec<f32> = x.iter().map(|x| 4.0 * x).collect();
        let targets = targets_of(rows, vocab, vocab as u32);
        let params = &all_params()[vocab % 4];
        check::<T>(client, &convert(&scaled), &targets, vocab, params, "sizes");
    }
}

fn check_large<T: DeviceElement>(client: &Client) {
    let rows = if client.name() == "cpu" { 2 } else { 5 };
    for (i, vocab) in [32768, 50257, 65544, 131_072, 262_144]
        .into_iter()
        .enumerate()
    {
        if client.name() == "cpu" && ![32768, 131_072].contains(&vocab) {
            continue;
        }
        let x = values(Kind::Normal, rows * vocab, vocab as u32);
        let targets = targets_of(rows, vocab, vocab as u32);
        let params = &all_params()[i % 4];
        check::<T>(client, &convert(&x), &targets, vocab, params, "large");
    }
}

element_tests! {
    check_sizes: sizes_f32, sizes_bf16, sizes_f16;
    check_large: large_f32, large_bf16, large_f16;
}

#[test]
fn every_kind_of_logits() {
    let client = client!("loss::every_kind_of_logits");
    let (rows, vocab) = (6, 264);
    for (i, kind) in crate::support::inputs::ALL_KINDS.into_iter().enumerate() {
        let x = values(kind, rows * vocab, 50 + i as u32);
        let targets = targets_of(rows, vocab, 3);
        for params in [all_params()[0], all_params()[1]] {
            let what = format!("{kind:?}");
            check::<bf16>(&client, &convert(&x), &targets, vocab, &params, &what);
        }
    }
    // Masked logits, a block of 8 of them and more.
    let mut x = values(Kind::Normal, rows * vocab, 1);
    for (i, x) in x.iter_mut().enumerate() {
        if i % vocab < 100 {
            *x = f32::NEG_INFINITY;
        }
    }
    let targets = vec![200; rows];
    check::<f32>(&client, &x, &targets, vocab, &all_params()[0], "masked");
}

#[test]
fn rows_that_are_ignored_and_targets_that_are_no_class() {
    let client = client!("loss::rows_that_are_ignored_and_targets_that_are_no_class");
    for vocab in [16, 3000] {
        let x = values(Kind::Normal, 4 * vocab, 9);
        for targets in [
            [-100; 4],
            [1, vocab as i32, -1, 2],
            [i32::MAX, 0, i32::MIN, -100],
        ] {
            for params in &all_params()[..2] {
                check::<f32>(&client, &x, &targets, vocab, params, "targets");
                if !is_brief(&client) {
                    let half = convert::<f16>(&x);
                    check::<f16>(&client, &half, &targets, vocab, params, "targets");
                }
            }
        }
    }
    let params = CrossEntropy::default();
    let targets = upload_bytes(&client, bytemuck::cast_slice(&[-100i32; 4]));
    let logits = upload(&client, &values(Kind::Nan, 64, 1), 4, 16);
    let found = loss::cross_entropy(&client, &logits, &targets, true, &params).unwrap();
    assert_eq!(read_f32(&client, &found), 0.0);
    assert_eq!(read_matrix::<f32>(&client, &logits), vec![0f32; 64]);
}

/// The bits depend neither on the call nor on the contents of other rows.
#[test]
fn a_row_is_the_same_among_others() {
    let client = client!("loss::a_row_is_the_same_among_others");
    let vocab = 5000;
    let one = values(Kind::Normal, vocab, 4);
    let params = CrossEntropy {
        reduction: Reduction::Sum,
        ..CrossEntropy::default()
    };
    let gradient = |rows: usize, place: usize| {
        let mut x = values(Kind::Heavy, rows * vocab, 5);
        x[place * vocab..][..vocab].copy_from_slice(&one);
        let logits = upload(&client, &convert::<bf16>(&x), rows, vocab);
        let targets = upload_bytes(&client, bytemuck::cast_slice(&vec![17i32; rows]));
        loss::cross_entropy(&client, &logits, &targets, true, &params).unwrap();
        read_matrix::<bf16>(&client, &logits)[place * vocab..][..vocab].to_vec()
    };
    let alone = gradient(1, 0);
    assert_eq!(alone, gradient(5, 3));
    assert_eq!(alone, gradient(5, 3));
}

#[test]
fn a_factor_of_one_leaves_everything_as_it_is() {
    let client = client!("loss::a_factor_of_one_leaves_everything_as_it_is");
    fn scaled<T: DeviceElement>(client: &Client, len: usize, factor: f32) {
        let x: Vec<T> = convert(&values(Kind::Nan, len, 1));
        let matrix = upload(client, &x, 1, len);
        let on_device = upload_bytes(client, bytemuck::cast_slice(&[factor]));
        loss::scale(client, &matrix, &on_device).unwrap();
        let expected: Vec<T> = x.iter().map(|x| T::from_f32(x.to_f32() * factor)).collect();
        let found = read_matrix::<T>(client, &matrix);
        assert_floats(&found, &expected, &format!("{len} by {factor}"));
    }
    for len in [0, 1, 7, 8, 999, 4096] {
        for factor in [1.0, 0.3] {
            scaled::<f32>(&client, len, factor);
            scaled::<bf16>(&client, len, factor);
            scaled::<f16>(&client, len, factor);
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let client = client!("loss::wrong_arguments_are_refused");
    let logits = upload(&client, &[0f32; 64], 4, 16);
    let targets = upload_bytes(&client, &[0; 16]);
    let refused = |targets: &cubecl::server::Handle, params: CrossEntropy| {
        let error = loss::cross_entropy(&client, &logits, targets, true, &params).unwrap_err();
        match error {
            Nvfp4Error::Shape { argument, .. } | Nvfp4Error::Value { argument, .. } => argument,
            other => panic!("{other}"),
        }
    };
    let params = CrossEntropy::default();
    let short = upload_bytes(&client, &[0; 8]);
    assert_eq!(refused(&short, params), "targets");
    for smoothing in [-0.1, 1.1, f32::NAN] {
        let params = CrossEntropy {
            smoothing,
            ..params
        };
        assert_eq!(refused(&targets, params), "smoothing");
    }
    for z_loss in [-0.1, f32::INFINITY, f32::NAN] {
        let params = CrossEntropy { z_loss, ..params };
        assert_eq!(refused(&targets, params), "z_loss");
    }
    let empty = upload::<f32>(&client, &[], 4, 0);
    let error = loss::cross_entropy(&client, &empty, &targets, true, &params).unwrap_err();
    assert!(error.to_string().contains("logits"), "{error}");
    let none = upload::<f32>(&client, &[], 0, 16);
    let found = loss::cross_entropy(&client, &none, &targets, true, &params).unwrap();
    assert_eq!(read_f32(&client, &found), 0.0);
}

/// Checks losses and gradient of rows against the oracle; also the losses alone.
fn check_kl<T: DeviceElement>(client: &Client, rows: usize, vocab: usize, temperature: f32) {
    let what = &format!("{rows} x {vocab} {:?}, T = {temperature}", T::KIND);
    let logits = |seed| -> Vec<T> {
        let mut logits = convert::<T>(&values(Kind::Normal, rows * vocab, seed));
        // One class that both models mask, and one that only the student masks.
        if vocab > 2 {
            logits[1] = T::from_f32(f32::NEG_INFINITY);
        }
        logits
    };
    let (student, mut teacher) = (logits(1), logits(2));
    if vocab > 4 {
        teacher[3] = T::from_f32(f32::NEG_INFINITY);
    }
    let targets = targets_of(rows, vocab, 3);
    let (params, scale) = (
        KlDivergence {
            temperature,
            ..KlDivergence::default()
        },
        0.125,
    );
    let mut expected = student.clone();
    let expected_rows =
        reference::kl_divergence_rows(&mut expected, &teacher, &targets, &params, Some(scale));
    let [own, other] = [&student, &teacher].map(|x| upload(client, x, rows, vocab));
    let on_device = upload_bytes(client, bytemuck::cast_slice(&targets));
    let losses = upload_bytes(client, bytemuck::cast_slice(&vec![7f32; rows]));
    let scale_on_device = upload_bytes(client, bytemuck::cast_slice(&[scale]));
    let both = [&own, &other];
    loss::kl_divergence_rows(client, both, &on_device, &losses, None, &params).unwrap();
    let alone = read_f32s(client, &losses, rows);
    assert_floats(&read_matrix::<T>(client, &own), &student, what);
    let scaled = Some(&scale_on_device);
    loss::kl_divergence_rows(client, both, &on_device, &losses, scaled, &params).unwrap();
    let found_rows = read_f32s(client, &losses, rows);
    assert_floats(&alone, &found_rows, &format!("{what}: with a gradient"));
    assert_floats(&read_matrix::<T>(client, &other), &teacher, what);
    let gradient = read_matrix::<T>(client, &own);
    if is_exact(client) {
        assert_floats(&found_rows, &expected_rows, &format!("{what}: losses"));
        assert_floats(&gradient, &expected, &format!("{what}: gradient"));
        return;
    }
    // Differences of log-sum-exps, and exponentials of logits divided by the temperature.
    let size = 16.0 * temperature.max(1.0) * temperature.max(1.0);
    assert_close::<f32>(
        &found_rows,
        &expected_rows,
        size,
        &format!("{what}: losses"),
    );
    let size = scale * temperature;
    assert_close(&gradient, &expected, size, &format!("{what}: gradient"));
}

fn check_divergences<T: DeviceElement>(client: &Client) {
    let sizes: &[(usize, usize)] = match (is_brief(client), T::KIND) {
        (true, FloatKind::F32) => &[(5, 77)],
        (true, _) => &[(3, 1), (5, 77), (3, 1024)],
        (false, _) => &[(3, 1), (1, 8), (37, 77), (20, 1024), (9, 5003), (5, 49_152)],
    };
    for &(rows, vocab) in sizes {
        for temperature in [1.0, 2.5] {
            check_kl::<T>(client, rows, vocab, temperature);
        }
    }
}

element_tests! {
    check_divergences: divergences_f32, divergences_bf16, divergences_f16;
}

/// Compares the oracle of rows with the definition, in `f64`.
#[test]
fn the_oracle_of_a_divergence_is_its_definition() {
    let (rows, vocab, temperature, scale) = (4, 100, 1.5f32, 0.5f32);
    let student: Vec<f32> = convert(&values(Kind::Normal, rows * vocab, 5));
    let teacher: Vec<f32> = convert(&values(Kind::Normal, rows * vocab, 6));
    let targets = [0, -100, 7, 9];
    let params = KlDivergence {
        temperature,
        ..KlDivergence::default()
    };
    let mut gradient = student.clone();
    let losses =
        reference::kl_divergence_rows(&mut gradient, &teacher, &targets, &params, Some(scale));
    let t = f64::from(temperature);
    for row in 0..rows {
        let logs = |x: &[f32]| -> Vec<f64> {
            let x = x[row * vocab..][..vocab].iter().map(|x| f64::from(*x) / t);
            let sum: f64 = x.clone().map(f64::exp).sum();
            x.map(|x| x - sum.ln()).collect()
        };
        let (q, p) = (logs(&student), logs(&teacher));
        let counts = f64::from(u8::from(targets[row] != params.ignore));
        let each = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q));
        let loss = counts * t * t * each.sum::<f64>();
        assert!((f64::from(losses[row]) - loss).abs() < 1e-5, "row {row}");
        for class in 0..vocab {
            let d = counts * f64::from(scale) * t * (q[class].exp() - p[class].exp());
            let found = f64::from(gradient[row * vocab + class]);
            assert!(
                (found - d).abs() < 1e-6,
                "row {row}, class {class}: {found}, not {d}"
            );
        }
    }
}

#[test]
fn wrong_arguments_of_a_divergence_are_refused() {
    let client = client!("loss::wrong_arguments_of_a_divergence_are_refused");
    let x = upload(&client, &[0f32; 12], 3, 4);
    let y = upload(&client, &[0f32; 12], 4, 3);
    let words = upload_bytes(&client, &[0; 12]);
    let refused = |teacher, temperature| {
        let params = KlDivergence {
            temperature,
            ..KlDivergence::default()
        };
        let both = [&x, teacher];
        let result = loss::kl_divergence_rows(&client, both, &words, &words, None, &params);
        result.unwrap_err().to_string()
    };
    assert!(refused(&y, 1.0).contains("teacher"));
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(refused(&x, temperature).contains("temperature"));
    }
}
