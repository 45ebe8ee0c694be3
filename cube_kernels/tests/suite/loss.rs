//! The cross entropy on a device against the oracle: bit for bit where the exponential is the same,
//! else within what CUDA's own exponential differs by.

use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_kernels::{CrossEntropy, Nvfp4Error, Reduction, loss, reference, tensor::FloatKind};

use crate::support::{
    device::{
        DeviceElement, assert_floats, is_brief, read_f32, read_f32s, read_matrix, upload,
        upload_bytes,
    },
    inputs::{Generator, Kind, convert, values},
};

/// Whether the device has the oracle's exponential.
fn is_exact(client: &Client) -> bool {
    client.name() != "cuda"
}

/// `found` differs from `expected` by its last bits alone: an exponential's relative error of 4e-6,
/// of terms of `size`, and one rounding to `T`.
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

/// Loss, losses of rows and gradient of `logits` against the oracle; and the loss alone.
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
    let cpu = is_brief(client);
    let small = 1..=300usize;
    // The CPU runtime takes a while for each.
    let small = small.filter(|vocab| !cpu || *vocab < 35 || *vocab % 37 == 0 || *vocab == 256);
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
                if vocab == 16 || !is_brief(&client) {
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

/// The bits do not change from call to call, nor with what other rows hold.
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
