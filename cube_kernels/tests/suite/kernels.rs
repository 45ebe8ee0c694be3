//! Compares every kernel with the oracle byte for byte, on CubeCL's CPU runtime or on a GPU.
//!
//! `NVFP4_TEST_DEVICE` selects `cpu` (the default) or `cuda`.

use crate::support::device::{DeviceElement, assert_packed, read_f32, read_matrix, upload};
use crate::support::gemm::multiply;
use crate::support::inputs::{Kind, TestElement, convert, values};
use crate::support::quantize::{self, Quantize, TargetSpec};
use crate::support::{device, inputs};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, BlockScaling, Hadamard, Nvfp4Error, Origin, QuantizedTensor, RandomStream, Rounding,
    reference,
};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::Gemm,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};
use proptest::prelude::*;

fn amax_handle(client: &Client, amax: f32) -> Handle {
    client.create_from_slice(&amax.to_ne_bytes())
}

const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);

fn roundings() -> [Rounding; 2] {
    [Rounding::Nearest, Rounding::Stochastic(STREAM)]
}

/// Checks all quantization kernels on one matrix.
fn check_matrix<T: DeviceElement>(client: &Client, x: &[T], rows: usize, cols: usize, what: &str) {
    check_uploaded(client, &upload(client, x, rows, cols), x, rows, cols, what);
}

/// Computes [`check_matrix`] on a matrix that is on the device already.
fn check_uploaded<T: DeviceElement>(
    client: &Client,
    matrix: &Matrix,
    x: &[T],
    rows: usize,
    cols: usize,
    what: &str,
) {
    let what = format!("{what} {rows}x{cols} {:?}", T::KIND);

    let amax = quantize::amax(client, matrix, None).unwrap();
    let expected = reference::amax(x);
    assert_eq!(
        read_f32(client, &amax).to_bits(),
        expected.to_bits(),
        "{what}: amax"
    );
    let host_amax = Amax::Tensor(expected);
    let hadamard = Hadamard::from_signs(0x5a3c);
    let rht_amax = quantize::amax(client, matrix, Some(hadamard)).unwrap();
    let expected = reference::amax_rht(x, rows, cols, &hadamard);
    assert_eq!(
        read_f32(client, &rht_amax).to_bits(),
        expected.to_bits(),
        "{what}: RHT amax"
    );
    let host_rht_amax = Amax::Tensor(expected);

    for rounding in roundings() {
        let found = quantize::quantize_row(client, matrix, &amax, rounding).unwrap();
        let expected = reference::quantize_row(x, rows, cols, &host_amax, &rounding).unwrap();
        assert_packed(
            client,
            &found,
            &expected,
            &format!("{what}: row, {rounding:?}"),
        );

        let found = quantize::quantize_col(client, matrix, &amax, rounding, None).unwrap();
        let expected = reference::quantize_col(x, rows, cols, &host_amax, &rounding, None).unwrap();
        assert_packed(
            client,
            &found,
            &expected,
            &format!("{what}: col, {rounding:?}"),
        );

        let found =
            quantize::quantize_col(client, matrix, &rht_amax, rounding, Some(hadamard)).unwrap();
        let expected =
            reference::quantize_col(x, rows, cols, &host_rht_amax, &rounding, Some(&hadamard))
                .unwrap();
        assert_packed(
            client,
            &found,
            &expected,
            &format!("{what}: col, RHT, {rounding:?}"),
        );
    }

    let (row, col) = quantize::quantize_tile(client, matrix, &amax).unwrap();
    let (expected_row, expected_col) =
        reference::quantize_tile(x, rows, cols, &host_amax, BlockScaling::Standard).unwrap();
    assert_packed(client, &row, &expected_row, &format!("{what}: tile, row"));
    assert_packed(client, &col, &expected_col, &format!("{what}: tile, col"));

    for (device, host) in [(&row, &expected_row), (&col, &expected_col)] {
        let expected = reference::dequantize(host);
        let found = quantize::dequantize(client, device, FloatKind::F32).unwrap();
        assert_floats(&read_matrix::<f32>(client, &found), &expected, &what);
        let found = quantize::dequantize(client, device, T::KIND).unwrap();
        assert_floats(
            &read_matrix::<T>(client, &found),
            &convert::<T>(&expected),
            &what,
        );
    }
}

/// Asserts equal bits, or NaN on both sides.
fn assert_floats<T: TestElement>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (a, b) = (found.to_f32(), expected.to_f32());
        assert!(
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            "{what}: element {i}: {a:e} != {b:e}"
        );
    }
}

const SHAPES: [(usize, usize); 13] = [
    (16, 16),
    (1, 16),
    (1, 48),
    (3, 32),
    (17, 32),
    (33, 48),
    (48, 80),
    (128, 128),
    (320, 256),
    (256, 272),
    (304, 304),
    (1008, 96),
    (1024, 1024),
];

matrix_tests!(check_matrix, SHAPES, (47, 64));

/// Every E2M1 threshold and grid point, with both neighbors and both signs, at an exact scale.
#[test]
fn every_threshold() {
    let client = client!("every_threshold");
    let points = [
        0.25f32, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 0.0,
    ];
    let mut x = Vec::new();
    for point in points {
        // A separate block: 6 fixes the block scale, so that values are not scaled.
        let bits = point.to_bits() as i32;
        let around = (-3..=3).map(|d| f32::from_bits((bits + d).max(0) as u32).min(6.0));
        let around: Vec<f32> = around.collect();
        x.push(6.0);
        x.extend(&around);
        x.extend(around.iter().map(|value| -value));
        x.push(-point);
    }
    check_matrix(&client, &x, points.len(), 16, "thresholds");
}

/// Block amax values that put the scale byte on every midpoint between E4M3 neighbors, and near it.
#[test]
fn every_scale_byte_boundary() {
    let client = client!("every_scale_byte_boundary");
    let mut x = Vec::new();
    for byte in 0..0x7eu8 {
        let decode = nvfp4_formats::format::e4m3::decode;
        let middle = 0.5 * (decode(byte) + decode(byte + 1)) * 6.0;
        for delta in [-2i32, -1, 0, 1, 2] {
            let mut block = [0.3 * middle; 16];
            block[5] = f32::from_bits((middle.to_bits() as i32 + delta) as u32);
            x.extend(block);
        }
    }
    // An amax of 2688 makes S exactly 1.
    x.extend([2688.0; 16]);
    check_matrix(&client, &x, x.len() / 16, 16, "scale bytes");
}

#[test]
fn empty() {
    let client = client!("empty");
    check_matrix::<bf16>(&client, &[], 0, 32, "empty");
    let row = Matrix::empty(&client, 0, 32, FloatKind::F32);
    let amax = quantize::amax(&client, &row, None).unwrap();
    assert_eq!(read_f32(&client, &amax), 0.0);
    let a = quantize::quantize_row(&client, &row, &amax, Rounding::Nearest).unwrap();
    let out = multiply(&client, Gemm::new(&a, &a).out(FloatKind::F32)).unwrap();
    assert_eq!((out.rows, out.cols), (0, 0));
    // No tokens: the weight gradient has K of zero, and must be zeros.
    let x = Matrix::empty(&client, 0, 48, FloatKind::F32);
    let a = quantize::quantize_col(&client, &x, &amax, Rounding::Nearest, None).unwrap();
    let out = multiply(&client, Gemm::new(&a, &a).out(FloatKind::F32)).unwrap();
    assert_eq!(read_matrix::<f32>(&client, &out), vec![0.0; 48 * 48]);
}

/// The offset may be in device memory, partly or wholly, and carries into its high word.
#[test]
fn device_offset_equals_plain_offset() {
    let client = client!("device_offset_equals_plain_offset");
    let (rows, cols) = (33, 64);
    let x = values(Kind::Normal, rows * cols, 5);
    let matrix = upload(&client, &x, rows, cols);
    let amax = quantize::amax(&client, &matrix, None).unwrap();
    for (plain, on_device) in [
        (0u64, 7u64),
        (5, 0xffff_ffff),
        (1 << 40, 3),
        (0xffff_ffff, 1 << 35),
    ] {
        let offset = client.create_from_slice(bytemuck::cast_slice(&[
            on_device as u32,
            (on_device >> 32) as u32,
        ]));
        let stream = RandomStream::new(9, 1, plain);
        let target = TargetSpec::new(Rounding::Stochastic(stream)).offset(&offset);
        let request = Quantize::new(&matrix).rowwise(target.amax(&amax));
        let found = request.launch(&client).unwrap().into_one();
        let total = RandomStream::new(9, 1, plain + on_device);
        let host_amax = Amax::Tensor(reference::amax(&x));
        let expected =
            reference::quantize_row(&x, rows, cols, &host_amax, &Rounding::Stochastic(total));
        assert_packed(&client, &found, &expected.unwrap(), "device offset");
    }
}

/// Returns operands of a GEMM, on host and device.
fn operands(
    client: &Client,
    (m, n, k): (usize, usize, usize),
    kind: Kind,
) -> [(DeviceQuantized, QuantizedTensor); 2] {
    [(m, 1), (n, 2)].map(|(rows, seed)| {
        let x = values(kind, rows * k, seed);
        let amax = reference::amax(&x);
        let host = reference::quantize_row(&x, rows, k, &Amax::Tensor(amax), &Rounding::Nearest);
        let host = host.unwrap();
        (DeviceQuantized::from_host(client, &host), host)
    })
}

/// On the scalar path `k` ascends as in the oracle: the bits are the same.
#[test]
fn scalar_gemm_equals_the_oracle() {
    let client = client!("scalar_gemm_equals_the_oracle");
    for shape in [(1, 1, 16), (3, 5, 32), (17, 33, 48), (64, 48, 256)] {
        let [(a, host_a), (b, host_b)] = operands(&client, shape, Kind::Normal);
        let bias: Vec<f32> = values(Kind::Normal, shape.1, 3);
        let bias_matrix = upload(&client, &bias, 1, shape.1);
        for bias in [None, Some((&bias[..], &bias_matrix))] {
            let expected = reference::gemm_f32(&host_a, &host_b, bias.map(|b| b.0)).unwrap();
            let run = |out| {
                let bias = bias.map(|b| b.1);
                multiply(
                    &client,
                    Gemm::new(&a, &b)
                        .bias(bias)
                        .out(out)
                        .backend(GemmBackend::Scalar),
                )
                .unwrap()
            };
            let what = format!("gemm {shape:?}");
            let found = run(FloatKind::F32);
            assert_floats(&read_matrix::<f32>(&client, &found), &expected, &what);
            let found = run(FloatKind::Bf16);
            assert_floats(
                &read_matrix::<bf16>(&client, &found),
                &convert(&expected),
                &what,
            );
        }
    }
}

/// The default path compared with the f64 oracle, within the bound of f32 accumulation in any
/// order: `2 k eps · alpha · Σ |a b|`.
#[test]
fn gemm_is_within_the_bound_of_any_order() {
    let client = client!("gemm_is_within_the_bound_of_any_order");
    let on_gpu = Capabilities::of(&client).gemm != GemmBackend::Scalar;
    let mut shapes = vec![
        (1, 8, 16),
        (128, 128, 128),
        (112, 128, 96),
        (304, 64, 304),
        (128, 128, 112),
    ];
    if on_gpu {
        shapes.extend([
            (257, 129, 48),
            (1008, 3072, 992),
            (512, 512, 4096),
            (304, 640, 304),
        ]);
    }
    for shape in shapes {
        let [(a, host_a), (b, host_b)] = operands(&client, shape, Kind::Heavy);
        let found = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
        let found = read_matrix::<f32>(&client, &found);
        let expected = reference::gemm_f64(&host_a, &host_b, None).unwrap();
        let (left, right) = (
            reference::decode_blocks(&host_a),
            reference::decode_blocks(&host_b),
        );
        let (_, n, k) = shape;
        let alpha = match (host_a.amax(), host_b.amax()) {
            (Amax::Tensor(a), Amax::Tensor(b)) => reference::alpha(*a, *b) as f64,
            _ => unreachable!(),
        };
        for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
            let terms = left[i / n * k..][..k].iter().zip(&right[i % n * k..][..k]);
            let magnitude: f64 = terms.map(|(a, b)| (a * b).abs() as f64).sum();
            let bound = 2.0 * (k as f64 + 2.0) * f32::EPSILON as f64 * alpha * magnitude;
            assert!(
                (found as f64 - expected).abs() <= bound,
                "{shape:?}, element {i}: {found} instead of {expected}, bound {bound:e}"
            );
        }
    }
}

/// A matrix may be in memory larger than itself, like Burn's pitched tensors: memory after it has
/// no effect.
#[test]
fn memory_behind_a_matrix_does_not_count() {
    let client = client!("memory_behind_a_matrix_does_not_count");
    for (rows, cols) in [(1, 16), (1, 48), (5, 32)] {
        let x = values(Kind::Normal, rows * cols, 6);
        let mut padded = x.clone();
        padded.extend([1e30; 200]);
        let handle = client.create_from_slice(bytemuck::cast_slice(&padded));
        let matrix = Matrix::new(handle, rows, cols, FloatKind::F32).unwrap();
        check_uploaded(&client, &matrix, &x, rows, cols, "padded memory");
    }
}

/// Sums of small integers are exact in any order, so every path gives the same bits.
#[test]
fn gemm_of_integers_is_exact() {
    let client = client!("gemm_of_integers_is_exact");
    for (m, n, k) in [(33, 24, 64), (130, 136, 80)] {
        let integers = |len: usize, step: usize| -> Vec<f32> {
            (0..len)
                .map(|i| [0.0, 1.0, -2.0, 3.0, 6.0, -4.0, 2.0][(i * step) % 7])
                .collect()
        };
        let pack = |x: &[f32], rows| {
            // amax = 2688 makes the global scale 1; every block contains a 6.
            let mut x = x.to_vec();
            x.chunks_exact_mut(16).for_each(|block| block[3] = 6.0);
            let amax = Amax::Tensor(2688.0);
            reference::quantize_row(&x, rows, k, &amax, &Rounding::Nearest).unwrap()
        };
        let (a, b) = (pack(&integers(m * k, 3), m), pack(&integers(n * k, 5), n));
        let expected: Vec<f32> = reference::gemm_f64(&a, &b, None)
            .unwrap()
            .iter()
            .map(|&value| value as f32)
            .collect();
        let device = |packed| DeviceQuantized::from_host(&client, packed);
        let found = multiply(
            &client,
            Gemm::new(&device(&a), &device(&b)).out(FloatKind::F32),
        )
        .unwrap();
        assert_floats(&read_matrix::<f32>(&client, &found), &expected, "integers");
        assert!(expected.iter().any(|value| *value != 0.0));
    }
}

#[test]
fn nan_reaches_the_output() {
    let client = client!("nan_reaches_the_output");
    let [(a, _), _] = operands(&client, (4, 4, 32), Kind::Nan);
    let [_, (b, _)] = operands(&client, (4, 4, 32), Kind::Normal);
    let out = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
    assert!(
        read_matrix::<f32>(&client, &out)
            .iter()
            .any(|value| value.is_nan())
    );
}

#[test]
fn repeated_launches_are_identical() {
    let client = client!("repeated_launches_are_identical");
    let (rows, cols) = (200, 160);
    let matrix = upload(&client, &values(Kind::Heavy, rows * cols, 8), rows, cols);
    let run = || {
        let amax = quantize::amax(&client, &matrix, Some(Hadamard::default())).unwrap();
        let rounding = Rounding::Stochastic(STREAM);
        let packed =
            quantize::quantize_col(&client, &matrix, &amax, rounding, Some(Hadamard::default()))
                .unwrap();
        let product = multiply(&client, Gemm::new(&packed, &packed).out(FloatKind::F32)).unwrap();
        let origin = Origin::block_1d(Rounding::Stochastic(STREAM));
        let host = packed.to_host(&client, origin).unwrap();
        let bits: Vec<u32> = read_matrix::<f32>(&client, &product)
            .iter()
            .map(|value| value.to_bits())
            .collect();
        (host, bits)
    };
    let first = run();
    // CubeCL's CPU runtime takes two seconds per GEMM.
    let launches = if client.name() == "cuda" { 100 } else { 10 };
    for _ in 0..launches {
        assert!(run() == first);
    }
}

/// One pass over more than 2^31 elements: indices beyond 32 bits.
#[test]
fn beyond_two_to_the_31_elements() {
    let client = on_gpu!("beyond_two_to_the_31_elements", "needs 12 GB of GPU memory");
    let (rows, cols) = ((1 << 17) + 24, 16384);
    // The period divides neither dimension, so that every row differs.
    let period = values(Kind::Normal, 1_000_003, 1);
    let period: Vec<bf16> = convert(&period);
    let x: Vec<bf16> = (0..rows * cols).map(|i| period[i % period.len()]).collect();
    let matrix = upload(&client, &x, rows, cols);
    let amax = quantize::amax(&client, &matrix, None).unwrap();
    let host_amax = Amax::Tensor(reference::amax(&x));
    let rounding = Rounding::Stochastic(STREAM);
    let found = quantize::quantize_row(&client, &matrix, &amax, rounding).unwrap();
    let expected = reference::quantize_row(&x, rows, cols, &host_amax, &rounding).unwrap();
    assert_packed(&client, &found, &expected, "row");
    drop((found, expected));
    let found = quantize::quantize_col(&client, &matrix, &amax, rounding, None).unwrap();
    let expected = reference::quantize_col(&x, rows, cols, &host_amax, &rounding, None).unwrap();
    assert_packed(&client, &found, &expected, "col");
}

#[test]
fn bad_arguments_are_named() {
    let client = client!("bad_arguments_are_named");
    let x = Matrix::empty(&client, 4, 24, FloatKind::F32);
    let amax = amax_handle(&client, 1.0);
    let error = quantize::quantize_row(&client, &x, &amax, Rounding::Nearest).unwrap_err();
    assert!(
        error.to_string().contains("`x`") && error.to_string().contains("16"),
        "{error}"
    );
    assert!(quantize::quantize_tile(&client, &x, &amax).is_err());
    let error = Matrix::new(amax.clone(), 100, 100, FloatKind::Bf16).unwrap_err();
    assert!(
        matches!(
            error,
            Nvfp4Error::Shape {
                argument: "handle",
                ..
            }
        ),
        "{error}"
    );
    let pack = |rows, cols| {
        let x = upload(&client, &vec![0f32; rows * cols], rows, cols);
        quantize::quantize_row(&client, &x, &amax, Rounding::Nearest).unwrap()
    };
    let error = multiply(
        &client,
        Gemm::new(&pack(2, 32), &pack(2, 48)).out(FloatKind::F32),
    )
    .unwrap_err();
    assert!(
        matches!(error, Nvfp4Error::Shape { argument: "b", .. }),
        "{error}"
    );
    let bias = Matrix::empty(&client, 1, 3, FloatKind::F32);
    let error = multiply(
        &client,
        Gemm::new(&pack(2, 32), &pack(2, 32))
            .bias(Some(&bias))
            .out(FloatKind::F32),
    )
    .unwrap_err();
    assert!(
        matches!(
            error,
            Nvfp4Error::Shape {
                argument: "bias",
                ..
            }
        ),
        "{error}"
    );
    let offset = client.create_from_slice(&[0; 4]);
    let target = TargetSpec::new(Rounding::Stochastic(STREAM)).offset(&offset);
    let x = Matrix::empty(&client, 4, 16, FloatKind::F32);
    let request = Quantize::new(&x).rowwise(target.amax(&amax));
    let error = request.launch(&client).unwrap_err();
    assert!(
        matches!(
            error,
            Nvfp4Error::Shape {
                argument: "offset",
                ..
            }
        ),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    /// Any shape, arbitrary bit patterns.
    #[test]
    fn arbitrary_bits(rows in 0usize..70, blocks in 1usize..9, seed: u32, exponent in 0u32..=255) {
        let Some(client) = device::client("arbitrary_bits") else { return Ok(()) };
        let cols = blocks * 16;
        let mut random = inputs::Generator::new(seed);
        // Random mantissas and signs, with exponents within 8 of a random one, so that scales
        // matter.
        let x: Vec<f32> = (0..rows * cols)
            .map(|_| {
                let bits = random.next_u32();
                let exponent = (exponent + (bits >> 23) % 8).min(255);
                f32::from_bits((bits & 0x807f_ffff) | exponent << 23)
            })
            .collect();
        check_matrix(&client, &x, rows, cols, "arbitrary");
        check_matrix(&client, &convert::<bf16>(&x), rows, cols, "arbitrary");
        check_matrix(&client, &convert::<f16>(&x), rows, cols, "arbitrary");
    }
}
