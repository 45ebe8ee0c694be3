//! FP8 weights: quantization compared with the oracle bit for bit, and GEMMs with small M.

use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    format::e4m3,
    reference::{self, Fp8Rows},
};
use nvfp4_kernels::{
    fp8::{self, Fp8Weight},
    tensor::{FloatKind, Matrix},
};

use crate::support::{
    device::{
        DeviceElement, assert_bytes, assert_floats, read_bytes, read_f32s, read_matrix, upload,
        upload_bytes,
    },
    inputs::{Generator, Kind, convert, values},
};

fn check_rows<T: DeviceElement>(client: &Client, x: &Matrix, values: &[T], what: &str) {
    let expected = reference::fp8_quantize_rows(values, x.rows, x.cols);
    let found = fp8::quantize_rows(client, x).unwrap();
    assert_eq!((found.n, found.k), (x.rows, x.cols));
    let scales = read_bytes(client, &found.scales, 4 * x.rows);
    assert_bytes(&scales, bytemuck::cast_slice(&expected.scales), what);
    let codes = read_bytes(client, &found.codes, x.len());
    assert_bytes(&codes, &expected.codes, what);
}

/// Rows whose length is not the number of units of a cube, rows of zeros and of subnormals, and
/// rows with elements that are not finite.
fn check_quantize<T: DeviceElement>(client: &Client) {
    for (i, (rows, cols)) in [(1, 4), (5, 64), (3, 1028), (17, 260)]
        .into_iter()
        .enumerate()
    {
        for kind in [Kind::Normal, Kind::Heavy, Kind::Tiny, Kind::Huge] {
            let mut x = values(kind, rows * cols, 10 + i as u32);
            if rows > 2 {
                x[cols..2 * cols].fill(-0.0);
                x[2 * cols..3 * cols].fill(3.0);
            }
            if rows > 5 {
                x[3 * cols + 7] = f32::NAN;
                x[4 * cols + 200] = f32::NEG_INFINITY;
                x[5 * cols..6 * cols].fill(0.0);
                // The scale is subnormal or zero.
                x[5 * cols + 1] = -1e-44;
            }
            let x: Vec<T> = convert(&x);
            let matrix = upload(client, &x, rows, cols);
            let what = format!("{kind:?} {rows} x {cols} {:?}", T::KIND);
            check_rows(client, &matrix, &x, &what);
        }
    }
    // From an address that is not vector-aligned.
    let (rows, cols) = (3, 12);
    let x: Vec<T> = convert(&values(Kind::Normal, rows * cols + 1, 3));
    let handle = upload_bytes(client, bytemuck::cast_slice(&x));
    let shifted = handle.offset_start(size_of::<T>() as u64);
    let matrix = Matrix::new(shifted, rows, cols, T::KIND).unwrap();
    check_rows(client, &matrix, &x[1..], "shifted");
}

element_tests! {
    check_quantize: rows_are_those_of_the_oracle_f32, rows_are_those_of_the_oracle_bf16,
        rows_are_those_of_the_oracle_f16;
}

/// Uploads codes and scales.
fn upload_weight(client: &Client, b: &Fp8Rows, k: usize) -> Fp8Weight {
    Fp8Weight {
        codes: upload_bytes(client, &b.codes),
        scales: upload_bytes(client, bytemuck::cast_slice(&b.scales)),
        n: b.scales.len(),
        k,
    }
}

/// Returns GEMMs with `a`, in `f32` and rounded to `T`; checks that a second run gives the same
/// bits.
fn products<T: DeviceElement>(
    client: &Client,
    a: &[T],
    b: &Fp8Rows,
    k: usize,
) -> (Vec<f32>, Vec<T>) {
    let a = upload(client, a, a.len() / k, k);
    let weight = upload_weight(client, b, k);
    let run = |dtype| fp8::linear(client, &a, &weight, dtype).unwrap();
    let sums: Vec<f32> = read_matrix(client, &run(FloatKind::F32));
    let again: Vec<f32> = read_matrix(client, &run(FloatKind::F32));
    assert_floats(&sums, &again, "the same product again");
    (sums, read_matrix(client, &run(T::KIND)))
}

/// Shapes `[m, n, k]` with several groups of 16 rows, tails of rows of the weight, and fewer chunks
/// than warps; a smaller selection on the CPU runtime.
fn shapes(client: &Client) -> Vec<[usize; 3]> {
    let is_cpu = client.name() == "cpu";
    let sizes: &[(usize, usize)] = match is_cpu {
        true => &[(34, 64), (33, 192)],
        false => &[
            (34, 64),
            (288, 192),
            (1000, 1024),
            (33, 576),
            (288, 2048),
            (4096, 4096),
        ],
    };
    let rows: &[usize] = match is_cpu {
        true => &[1, 3, 33],
        false => &[1, 3, 8, 9, 16, 33],
    };
    let of_size = |(n, k): &(usize, usize)| rows.iter().map(|m| [*m, *n, *k]).collect::<Vec<_>>();
    sizes.iter().flat_map(of_size).collect()
}

/// GEMMs of integers of at most four bits: every sum is exact in any order.
fn check_integers<T: DeviceElement>(client: &Client) {
    for [m, n, k] in shapes(client) {
        let mut random = Generator::new((m * n + k) as u32);
        let mut integer = || (random.next_u32() % 17) as i32 - 8;
        let a: Vec<i32> = (0..m * k).map(|_| integer()).collect();
        let w: Vec<i32> = (0..n * k).map(|_| integer()).collect();
        let b = Fp8Rows {
            codes: w
                .iter()
                .map(|value| e4m3::encode_element(*value as f32))
                .collect(),
            scales: (0..n).map(|row| 2f32.powi(row as i32 % 9 - 4)).collect(),
        };
        let sum = |at: usize| {
            let (line, row) = (at / n, at % n);
            let pairs = a[line * k..][..k].iter().zip(&w[row * k..][..k]);
            pairs.map(|(a, b)| a * b).sum::<i32>() as f32 * b.scales[row]
        };
        let expected: Vec<f32> = (0..m * n).map(sum).collect();
        let left: Vec<f32> = a.iter().map(|value| *value as f32).collect();
        let (sums, rounded) = products::<T>(client, &convert(&left), &b, k);
        let what = format!("{m} x {n} x {k} {:?}", T::KIND);
        assert_floats(&sums, &expected, &what);
        assert_floats(&rounded, &convert::<T>(&expected), &what);
        assert!(expected.iter().any(|sum| *sum != 0.0));
    }
}

element_tests! {
    check_integers: integers_are_exact_f32, integers_are_exact_bf16, integers_are_exact_f16;
}

/// Random weights, and activations with outliers, within the bound of `f32` accumulation in any
/// order, `2 (k + 2) eps Σ |a b|`, plus one rounding to the type of the output.
fn check_bound<T: DeviceElement>(client: &Client) {
    for [m, n, k] in shapes(client) {
        let a: Vec<T> = convert(&values(Kind::Heavy, m * k, (m + k) as u32));
        let w = values(Kind::Normal, n * k, n as u32);
        let b = reference::fp8_quantize_rows(&w, n, k);
        let (sums, rounded) = products::<T>(client, &a, &b, k);
        assert_floats(&rounded, &convert::<T>(&sums), "rounded once");
        let a: Vec<f64> = a.iter().map(|value| f64::from(value.to_f32())).collect();
        let w: Vec<f64> = (b.codes.iter().enumerate())
            .map(|(at, code)| f64::from(e4m3::decode_element(*code)) * f64::from(b.scales[at / k]))
            .collect();
        for (at, found) in sums.iter().enumerate() {
            let (line, row) = (at / n, at % n);
            let pairs = a[line * k..][..k].iter().zip(&w[row * k..][..k]);
            let terms = pairs.map(|(a, b)| a * b);
            let (exact, magnitude) = terms.fold((0.0, 0.0), |(sum, most), term| {
                (sum + term, most + term.abs())
            });
            let bound = 2.0 * (k as f64 + 2.0) * f64::from(f32::EPSILON) * magnitude;
            let error = (f64::from(*found) - exact).abs();
            assert!(
                error <= bound,
                "{m} x {n} x {k}: {line}, {row}: {found} {exact}"
            );
        }
    }
}

element_tests! {
    check_bound: sums_are_within_the_bound_f32, sums_are_within_the_bound_bf16,
        sums_are_within_the_bound_f16;
}

/// Every code at every position of a chunk, with rows that have a single nonzero element: each
/// result is the code's value, including subnormals and zeros of both signs.
#[test]
fn every_code_has_its_value() {
    let client = client!("fp8::every_code_has_its_value");
    let (m, n, k) = (64, 256, 64);
    let mut codes: Vec<u8> = (0..n * k)
        .map(|at| (at / k * 7 + at % k * 5) as u8)
        .collect();
    for code in codes
        .iter_mut()
        .filter(|code| **code & 0x7F == e4m3::NAN_BYTE)
    {
        *code ^= 0x11;
    }
    let b = Fp8Rows {
        scales: vec![1.0; n],
        codes,
    };
    let mut a = vec![0f32; m * k];
    (0..m).for_each(|line| a[line * k + line] = 1.0);
    let (sums, _) = products::<bf16>(&client, &convert(&a), &b, k);
    for (at, found) in sums.iter().enumerate() {
        let code = b.codes[at % n * k + at / n];
        // The other elements add zeros.
        assert_eq!(
            *found,
            e4m3::decode_element(code),
            "{code:#x} at {}",
            at / n
        );
    }
}

/// A NaN row gives NaN for any codes, and no other row does.
#[test]
fn nan_stays_in_its_row() {
    let client = client!("fp8::nan_stays_in_its_row");
    let (m, n, k) = (2, 34, 64);
    let mut w = values(Kind::Normal, n * k, 1);
    w[3 * k + 5] = f32::NAN;
    w[33 * k] = f32::INFINITY;
    let w = upload(&client, &w, n, k);
    let weight = fp8::quantize_rows(&client, &w).unwrap();
    for a in [0.0, 1.0] {
        let a = upload(&client, &vec![bf16::from_f32(a); m * k], m, k);
        let out = fp8::linear(&client, &a, &weight, FloatKind::Bf16).unwrap();
        for (at, value) in read_matrix::<bf16>(&client, &out).into_iter().enumerate() {
            assert_eq!(value.is_nan(), [3, 33].contains(&(at % n)), "{at}");
        }
    }
}

/// Activations at an address that is not vector-aligned use the portable kernel.
#[test]
fn activations_may_begin_anywhere() {
    let client = client!("fp8::activations_may_begin_anywhere");
    let (m, n, k) = (3, 34, 64);
    let a: Vec<bf16> = (0..m * k + 1)
        .map(|i| bf16::from_f32((i % 5) as f32))
        .collect();
    let b = Fp8Rows {
        codes: (0..n * k)
            .map(|i| e4m3::encode_element((i % 7) as f32))
            .collect(),
        scales: vec![0.5; n],
    };
    let handle = upload_bytes(&client, bytemuck::cast_slice(&a)).offset_start(2);
    let matrix = Matrix::new(handle, m, k, FloatKind::Bf16).unwrap();
    let weight = upload_weight(&client, &b, k);
    let out = fp8::linear(&client, &matrix, &weight, FloatKind::F32).unwrap();
    let expected = reference::fp8_linear(&a[1..], &b, k);
    let found: Vec<f32> = read_matrix(&client, &out);
    assert_floats(&found, &expected, "exact sums");
}

#[test]
fn what_does_not_fit_is_refused() {
    let client = client!("fp8::what_does_not_fit_is_refused");
    let weight = |n: usize, k: usize, bytes: usize| Fp8Weight {
        codes: client.empty(bytes),
        scales: client.empty(4 * n.max(1)),
        n,
        k,
    };
    let linear = |m: usize, cols: usize, weight: &Fp8Weight| {
        let a = upload(&client, &vec![bf16::ONE; m * cols], m, cols);
        let made = fp8::linear(&client, &a, weight, FloatKind::Bf16);
        made.map(|out| (out.rows, out.cols))
            .map_err(|error| error.to_string())
    };
    assert_eq!(linear(0, 64, &weight(5, 64, 320)), Ok((0, 5)));
    for (a, weight, says) in [
        ((1, 32), weight(4, 32, 128), "`weight`: found [4, 32]"),
        ((1, 64), weight(0, 64, 64), "`weight`: found [0, 64]"),
        (
            (2, 128),
            weight(4, 64, 256),
            "`a`: found [2, 128], expected 64 columns",
        ),
        (
            (1, 64),
            weight(4, 64, 255),
            "`weight.codes`: found 255 bytes",
        ),
    ] {
        let error = linear(a.0, a.1, &weight).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    let odd = upload(&client, &[1f32; 6], 1, 6);
    let error = fp8::quantize_rows(&client, &odd).unwrap_err().to_string();
    assert!(error.contains("`x`: found [1, 6]"), "{error}");
    let none = upload::<f32>(&client, &[], 0, 64);
    let made = fp8::quantize_rows(&client, &none).unwrap();
    assert!(read_f32s(&client, &made.scales, 0).is_empty());
}
