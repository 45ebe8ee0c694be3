//! GEMMs on the path that the device chooses, compared with sums in f64, and paths compared bit for
//! bit with one another.
//!
//! `NVFP4_TEST_DEVICE` selects `cpu` (the default) or `cuda`. Large GEMMs are checked at sampled
//! rows and columns, through [`reference::gemm_f64`] of those rows alone.

use crate::support::device;
use crate::support::epilogue::{Epilogue, check_epilogues};
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::inputs::Generator;
use crate::support::packed::{
    Packed, TE_PRODUCTS, assert_bound, assert_rows_bound, both_ways, scaled, unscaled,
};
use crate::support::quantize;
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::reference;
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Elements, Gemm, Operand, OperandLayout, OutputAmax, Plan, Problem, Scale, Target,
        proof::{DequantThenBf16, Sm90Tile, SmallM, W4a16, W4a16Tile},
    },
    tensor::{DeviceQuantized, FloatKind, Matrix},
};
use proptest::prelude::*;

fn on_gpu(client: &Client) -> bool {
    Capabilities::of(client).gemm != GemmBackend::Scalar
}

fn read<T: bytemuck::Pod>(client: &Client, matrix: &Matrix) -> Vec<T> {
    let bytes = client.read_one(matrix.handle.clone()).unwrap();
    bytes[..matrix.len() * size_of::<T>()]
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

fn upload<T: bytemuck::Pod>(
    client: &Client,
    x: &[T],
    rows: usize,
    cols: usize,
    dtype: FloatKind,
) -> Matrix {
    let handle = client.create_from_slice(bytemuck::cast_slice(x));
    Matrix::new(handle, rows, cols, dtype).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|value| value.to_bits()).collect()
}

/// Asserts equal bits, or NaN on both sides.
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
            "{what}: element {i}: {found:e} instead of {expected:e}"
        );
    }
}

#[test]
fn within_the_bound() {
    let client = client!("within_the_bound");
    let mut shapes = vec![(128, 128, 112), (112, 128, 96), (1, 8, 16), (5, 24, 48)];
    let on_gpu = on_gpu(&client);
    shapes.extend((TE_PRODUCTS.into_iter()).filter(|(m, n, k)| on_gpu || m * n * k <= 1 << 22));
    if on_gpu {
        shapes.extend([
            (4096, 512, 3072),
            (304, 640, 304),
            (1008, 3072, 992),
            (1, 512, 4096),
            (7, 264, 64),
            (9, 1000, 96),
            (16, 2048, 2080),
            (23, 640, 3072),
            (40, 136, 65536),
            (64, 8192, 1024),
            (129, 136, 80),
            (257, 520, 1040),
            (130, 8, 65536),
            (333, 1000, 208),
            (2048, 2056, 4096),
        ]);
    }
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        let (a, b) = (
            Packed::random(m, k, 2 * i as u32),
            Packed::random(n, k, 2 * i as u32 + 1),
        );
        let (left, right) = (a.device(&client), b.device(&client));
        let found = multiply(&client, Gemm::new(&left, &right).out(FloatKind::F32)).unwrap();
        let what = format!("{m} x {n} x {k}");
        assert_bound(&read::<f32>(&client, &found), &a, &b, &what);
    }
}

/// More than 2^31 elements in the result, in `b` or in `a`, on every path: indices beyond 32 bits.
#[test]
fn beyond_two_to_the_31_elements() {
    let client = hopper!("beyond_two_to_the_31_elements");
    let plan = |plan| (Some(GemmBackend::Sm90Wgmma), Some(plan));
    let (wide, long) = ((1 << 15) + 8, 1 << 16);
    for (m, n, k) in [(long + 24, wide, 16), (24, wide, long), (wide, 24, long)] {
        let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
        let (left, right) = (a.device(&client), b.device(&client));
        let mut plans = vec![
            (None, None),
            plan(Plan::from(DequantThenBf16(Sm90Tile::N128, 8))),
            (Some(GemmBackend::Cmma), None),
            (Some(GemmBackend::Scalar), None),
        ];
        // Its copies of `a` have more than 16 elements.
        if k > 16 {
            plans.push(plan(Plan::from(W4a16(W4a16Tile::ALL[0], 8))));
        }
        for (path, plan) in plans {
            let what = format!("{m} x {n} x {k} by {path:?}, {plan:?}");
            let new = Target::New(FloatKind::F32);
            let operands = (Operand::from(&left), Operand::from(&right));
            let found = multiply(
                &client,
                Gemm::new(operands.0, operands.1)
                    .target(new)
                    .backend(path)
                    .plan(plan),
            );
            let found = found.unwrap_or_else(|error| panic!("{what}: {error}"));
            let row = |row: usize| {
                let end = found.handle.size_in_used() - (4 * n * (row + 1)) as u64;
                let part = found.handle.clone().offset_start((4 * n * row) as u64);
                let bytes = client.read_one(part.offset_end(end)).unwrap();
                (bytes.chunks_exact(4))
                    .map(bytemuck::pod_read_unaligned)
                    .collect()
            };
            assert_rows_bound(row, &a, &b, &what);
            drop(found);
            client.memory_cleanup().unwrap();
        }
    }
}

/// Sums of small integers are exact in any order: every path, every tile shape and the oracle
/// agree.
#[test]
fn integers_are_exact() {
    let client = client!("integers_are_exact");
    let shapes: &[_] = if on_gpu(&client) {
        &[
            (33, 24, 64),
            (130, 136, 80),
            (700, 904, 1200),
            (64, 2048, 512),
            (1200, 3080, 320),
        ]
    } else {
        &[(33, 24, 64)]
    };
    for &(m, n, k) in shapes {
        let (a, b) = (Packed::integers(m, k, 3), Packed::integers(n, k, 4));
        let (x, y) = (a.decoded(), b.decoded());
        let found = multiply(
            &client,
            Gemm::new(&a.device(&client), &b.device(&client)).out(FloatKind::F32),
        )
        .unwrap();
        let found = read::<f32>(&client, &found);
        for row in 0..m {
            for col in 0..n {
                let terms = x[row * k..][..k].iter().zip(&y[col * k..][..k]);
                let expected: f32 = terms.map(|(x, y)| x * y).sum();
                let found = found[row * n + col];
                assert_eq!(found, expected, "{m} x {n} x {k}: ({row}, {col})");
            }
        }
    }
}

/// Row `i` of the left operand selects element `picked(i)` of every row of the right one, exactly:
/// every position along K is read correctly.
#[test]
fn one_hot_rows_pick_elements() {
    let client = client!("one_hot_rows_pick_elements");
    for (m, n, k) in [(48, 40, 48), (208, 72, 208)] {
        if m > 100 && !on_gpu(&client) {
            continue;
        }
        let mut a = Packed::random(m, k, 1);
        a.codes.fill(0);
        a.scales.fill(0x38);
        a.amax = 2688.0;
        let picked = |row: usize| (row * 7 + 3) % k;
        for row in 0..m {
            // Code 2 is 1.
            a.codes[row * k / 2 + picked(row) / 2] = 2 << (4 * (picked(row) % 2));
        }
        let mut b = Packed::random(n, k, 2);
        b.amax = 2688.0;
        let y = b.decoded();
        let found = multiply(
            &client,
            Gemm::new(&a.device(&client), &b.device(&client)).out(FloatKind::F32),
        )
        .unwrap();
        let found = read::<f32>(&client, &found);
        for row in 0..m {
            for col in 0..n {
                assert_eq!(
                    found[row * n + col],
                    y[col * k + picked(row)],
                    "{m} x {n} x {k}: ({row}, {col})"
                );
            }
        }
    }
}

/// A nonzero code in any block that is NaN, and an infinite factor.
#[test]
fn nan_and_infinity_propagate() {
    let client = client!("nan_and_infinity_propagate");
    let (m, n, k) = (72, 80, 96);
    let b = Packed::random(n, k, 2);
    let mut a = Packed::random(m, k, 1);
    a.scales[5 * a.blocks + 3] = 0x7f;
    let run = |a: &Packed| {
        let (a, b) = (a.device(&client), b.device(&client));
        let found = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
        read::<f32>(&client, &found)
    };
    for (i, value) in run(&a).iter().enumerate() {
        assert_eq!(value.is_nan(), i / n == 5, "element {i}: {value}");
    }
    for amax in [f32::NAN, f32::INFINITY] {
        let mut a = Packed::random(m, k, 1);
        a.amax = amax;
        assert!(run(&a).iter().all(|value| !value.is_finite()), "{amax}");
    }
}

#[test]
fn repeated_products_are_identical() {
    let client = client!("repeated_products_are_identical");
    let (m, n, k) = if on_gpu(&client) {
        (1111, 1304, 2048)
    } else {
        (17, 24, 64)
    };
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    let (a, b) = (a.device(&client), b.device(&client));
    let run = || {
        let found = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
        bits(&read::<f32>(&client, &found))
    };
    let first = run();
    for _ in 0..20 {
        assert!(run() == first);
    }
}

/// The bf16 instance gives the same sums, with either operand packed or not.
#[test]
fn packed_and_bf16_operands_agree() {
    let client = hopper!("packed_and_bf16_operands_agree");
    for (m, n, k) in [
        (1, 8, 16),
        (30, 256, 512),
        (200, 264, 336),
        (513, 1000, 1024),
    ] {
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let (left, right) = (a.device(&client), b.device(&client));
        let dense = |packed: &Packed| {
            let x: Vec<bf16> = packed.decoded().into_iter().map(bf16::from_f32).collect();
            upload(&client, &x, packed.rows, k, FloatKind::Bf16)
        };
        let (x, y) = (dense(&a), dense(&b));
        // The kernel that decodes `b` in registers has another summation order.
        let plan = (m > 64).then_some(Plan::from(DequantThenBf16(Sm90Tile::N128, 8)));
        let one = |operand: &DeviceQuantized| {
            let operand = operand.clone();
            move |client: &Client, other: &Operand, packed_is_left: bool| {
                let operand = Operand {
                    elements: Elements::Quantized(&operand),
                    scale: Scale::One,
                };
                let (a, b) = if packed_is_left {
                    (&operand, other)
                } else {
                    (other, &operand)
                };
                let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(FloatKind::F32));
                let out = multiply(client, Gemm::new(a, b).target(new).backend(path).plan(plan));
                read::<f32>(client, &out.unwrap())
            }
        };
        let expected = multiply(
            &client,
            Gemm::new(&x, &y)
                .out(FloatKind::F32)
                .backend(GemmBackend::Sm90Wgmma),
        );
        let expected = read::<f32>(&client, &expected.unwrap());
        assert!(expected.iter().any(|value| *value != 0.0));
        let what = format!("{m} x {n} x {k}");
        assert_same(
            &one(&left)(&client, &Operand::from(&y), true),
            &expected,
            &what,
        );
        if m > 64 {
            assert_same(
                &one(&right)(&client, &Operand::from(&x), false),
                &expected,
                &what,
            );
        }
        // A packed right operand at small M uses a separate kernel, whether the left one is packed
        // or not.
        if m <= 64 {
            let few = one(&right)(&client, &Operand::from(&x), false);
            let alike = Packed {
                amax: 2688.0,
                scales: a.scales.clone(),
                codes: a.codes.clone(),
                ..a
            };
            let unit = Packed {
                amax: 2688.0,
                scales: b.scales.clone(),
                codes: b.codes.clone(),
                ..b
            };
            assert_bound(&few, &alike, &unit, &what);
            let left = Operand {
                elements: Elements::Quantized(&left),
                scale: Scale::One,
            };
            assert_same(&one(&right)(&client, &left, false), &few, &what);
            continue;
        }
        // Factors of both amax values, in the order of the specification.
        let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(FloatKind::F32));
        let operands = (Operand::from(&left), Operand::from(&right));
        let both = multiply(
            &client,
            Gemm::new(operands.0, operands.1)
                .target(new)
                .backend(path)
                .plan(plan),
        );
        let alpha = reference::alpha(a.amax, b.amax);
        let scaled: Vec<f32> = expected.iter().map(|sum| sum * alpha).collect();
        assert_same(&read::<f32>(&client, &both.unwrap()), &scaled, &what);
    }
}

/// Returns the paths that support bf16 operands here.
fn bf16_paths(client: &Client) -> Vec<GemmBackend> {
    match Capabilities::of(client).gemm {
        GemmBackend::Scalar => vec![GemmBackend::Scalar],
        GemmBackend::Sm90Wgmma => vec![
            GemmBackend::Sm90Wgmma,
            GemmBackend::Cmma,
            GemmBackend::Scalar,
        ],
        _ => vec![GemmBackend::Cmma, GemmBackend::Scalar],
    }
}

/// Tails of `m`, `n` and K, and rows that TMA cannot read (`m` or K not a multiple of 8), which are
/// transposed first or use another path.
#[test]
fn columns_equal_rows() {
    let client = client!("columns_equal_rows");
    let shapes: &[_] = if on_gpu(&client) {
        &[
            (64, 64, 64),
            (8, 8, 16),
            (200, 264, 336),
            (1, 8, 24),
            (129, 520, 40),
            (72, 264, 67),
        ]
    } else {
        &[(5, 24, 48), (67, 9, 70), (8, 16, 16)]
    };
    columns_equal_rows_for(&client, shapes);
}

#[test]
fn columns_equal_rows_of_large_products() {
    let client = hopper!("columns_equal_rows_of_large_products");
    let shapes = [
        (128, 256, 128),
        (520, 1000, 1024),
        (72, 136, 8),
        (136, 72, 65),
        (64, 200, 333),
        (3001, 1544, 88),
        (24, 2112, 520),
    ];
    columns_equal_rows_for(&client, &shapes);
}

/// MN-major operands, either or both, give the bits of the GEMM of the same operands K-major, on
/// every path and with every tile.
fn columns_equal_rows_for(client: &Client, shapes: &[(usize, usize, usize)]) {
    for &(m, n, k) in shapes {
        let (x, a, a_columns) = both_ways(client, m, k, 11);
        let (y, b, b_columns) = both_ways(client, n, k, 12);
        let (a, b) = (Elements::Bf16(&a), Elements::Bf16(&b));
        let (a_columns, b_columns) = (
            Elements::Bf16MnMajor(&a_columns),
            Elements::Bf16MnMajor(&b_columns),
        );
        for path in bf16_paths(client) {
            let hopper = path == GemmBackend::Sm90Wgmma;
            let run = |a: Elements, b: Elements, plan| {
                let (a, b) = (unscaled(a), unscaled(b));
                let new = Target::New(FloatKind::F32);
                let out = multiply(client, Gemm::new(a, b).target(new).backend(path).plan(plan));
                read::<f32>(client, &out.unwrap())
            };
            let capabilities = Capabilities::of(client);
            let backend_of = |layout| {
                let problem = Problem::new([layout; 2], (m, n, k));
                gemm::proof::backend_of(capabilities, &problem)
            };
            let reads_rows = !hopper || backend_of(OperandLayout::KMajor) == path;
            if !reads_rows && backend_of(OperandLayout::MnMajor) != path {
                continue;
            }
            let expected = if reads_rows {
                run(a, b, None)
            } else {
                // Zeros at the end of K change nothing.
                let width = k.next_multiple_of(8);
                let [a, b] = [&x, &y].map(|x| {
                    let rows = x
                        .chunks(k)
                        .map(|row| [row, &vec![bf16::ZERO; width - k]].concat());
                    let padded: Vec<bf16> = rows.flatten().collect();
                    upload(client, &padded, x.len() / k, width, FloatKind::Bf16)
                });
                run(Elements::Bf16(&a), Elements::Bf16(&b), None)
            };
            assert!(expected.iter().any(|value| *value != 0.0));
            let mut plans = vec![None];
            if hopper {
                plans.extend(Sm90Tile::ALL.map(|tile| Some(Plan::from(DequantThenBf16(tile, 4)))));
            }
            for plan in plans {
                for (left, right) in [(a_columns, b), (a, b_columns), (a_columns, b_columns)] {
                    let tile = plan.and_then(Plan::get::<DequantThenBf16>);
                    let narrow = tile.is_some_and(|plan| plan.0 == Sm90Tile::N176);
                    if narrow && matches!(right, Elements::Bf16MnMajor(_)) {
                        continue;
                    }
                    let one_in_rows =
                        matches!(left, Elements::Bf16(_)) || matches!(right, Elements::Bf16(_));
                    if one_in_rows && !reads_rows {
                        continue;
                    }
                    let what = format!("{path:?}, {plan:?}, {m} x {n} x {k}, {left:?} {right:?}");
                    assert_same(&run(left, right, plan), &expected, &what);
                }
            }
            // The results are also correct.
            for (row, col) in [(0, 0), (m - 1, n - 1), (m / 2, n / 3), (m / 3, n - 1)] {
                let terms = x[row * k..][..k].iter().zip(&y[col * k..][..k]);
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, magnitude), (x, y)| {
                    let term = x.to_f64() * y.to_f64();
                    (sum + term, magnitude + term.abs())
                });
                let bound = 2.0 * (k as f64 + 2.0) * f32::EPSILON as f64 * magnitude;
                let found = expected[row * n + col] as f64;
                assert!(
                    (found - sum).abs() <= bound,
                    "{path:?}, {m} x {n} x {k}: ({row}, {col}): {found} instead of {sum}"
                );
            }
        }
    }
}

/// An MN-major operand with a packed one, and every epilogue operation.
#[test]
fn columns_with_packed_operands_and_epilogues() {
    let client = client!("columns_with_packed_operands_and_epilogues");
    let shapes: &[_] = if on_gpu(&client) {
        &[(200, 72, 64), (1000, 904, 96)]
    } else {
        &[(8, 24, 48)]
    };
    for &(m, n, k) in shapes {
        let mut random = Generator::new(7);
        let mut floats = |len: usize| -> Vec<f32> { (0..len).map(|_| random.normal()).collect() };
        let (rows, cols, bias, held) = (floats(m), floats(n), floats(n), floats(m * n));
        let handle = |x: &[f32]| client.create_from_slice(bytemuck::cast_slice(x));
        let (rows, cols) = (handle(&rows), handle(&cols));
        let bias = upload(&client, &bias, 1, n, FloatKind::F32);
        let (_, a, a_columns) = both_ways(&client, m, k, 21);
        let (_, b, b_columns) = both_ways(&client, n, k, 22);
        let packed_a = Packed::random(m, k, 5).device(&client);
        let packed_b = Packed::random(n, k, 6).device(&client);
        // The kernel that decodes a packed `b` in registers has another summation order.
        let hopper = Capabilities::of(&client).gemm == GemmBackend::Sm90Wgmma;
        let plan = hopper.then_some(Plan::from(DequantThenBf16(Sm90Tile::N128, 8)));
        for (name, [left, right], [in_rows_left, in_rows_right]) in [
            (
                "both",
                [
                    Elements::Bf16MnMajor(&a_columns),
                    Elements::Bf16MnMajor(&b_columns),
                ],
                [Elements::Bf16(&a), Elements::Bf16(&b)],
            ),
            (
                "packed left",
                [
                    Elements::Quantized(&packed_a),
                    Elements::Bf16MnMajor(&b_columns),
                ],
                [Elements::Quantized(&packed_a), Elements::Bf16(&b)],
            ),
            (
                "packed right",
                [
                    Elements::Bf16MnMajor(&a_columns),
                    Elements::Quantized(&packed_b),
                ],
                [Elements::Bf16(&a), Elements::Quantized(&packed_b)],
            ),
        ] {
            let run = |left, right, out, plan| {
                let a = Operand {
                    elements: left,
                    scale: Scale::PerRow(&rows, 2688.0),
                };
                let b = Operand {
                    elements: right,
                    scale: Scale::PerRow(&cols, 1536.0),
                };
                let fresh = upload(&client, &held, m, n, FloatKind::F32);
                let target = match out {
                    Some(out) => Target::New(out),
                    None => Target::Accumulate(&fresh),
                };
                let out = multiply(
                    &client,
                    Gemm::new(a, b).bias(Some(&bias)).target(target).plan(plan),
                )
                .unwrap();
                let bytes = client.read_one(out.handle.clone()).unwrap();
                bytes[..out.len() * out.dtype.size()].to_vec()
            };
            let what = format!("{name}, {m} x {n} x {k}");
            let new = Some(FloatKind::F32);
            let expected = run(in_rows_left, in_rows_right, new, plan);
            assert!(run(left, right, new, plan) == expected, "{what}");
            if name != "both" {
                continue;
            }
            for out in [new, Some(FloatKind::Bf16), Some(FloatKind::F16), None] {
                let expected = run(in_rows_left, in_rows_right, out, None);
                assert!(run(left, right, out, None) == expected, "{what}, {out:?}");
            }
        }
    }
}

/// Returns `packed` in bf16, with its columns in the summation order of the kernel that decodes `b`
/// in registers. In each 128 columns, with zeros beyond the end, four lanes have 32 consecutive
/// columns each. An instruction takes two pairs of these; the columns of a pair are four apart.
fn in_order_of_sums(client: &Client, packed: &Packed) -> Matrix {
    let (x, k) = (packed.decoded(), packed.blocks * 16);
    let width = k.next_multiple_of(128);
    let column = |position: usize| {
        let (instruction, within) = (position % 128 / 16, position % 16);
        let (lane, pair, odd) = (within % 8 / 2, within / 8, within % 2);
        let code = 2 * (instruction % 2) + pair + 4 * odd;
        position / 128 * 128 + 32 * lane + instruction / 2 * 8 + code
    };
    let ordered: Vec<bf16> = (0..packed.rows * width)
        .map(|i| {
            let (row, column) = (i / width, column(i % width));
            let value = if column < k { x[row * k + column] } else { 0.0 };
            bf16::from_f32(value)
        })
        .collect();
    upload(client, &ordered, packed.rows, width, FloatKind::Bf16)
}

/// Every tile of the kernel that reads bf16, with tails in all dimensions and both sizes of output
/// elements: the tile width changes no bit.
#[test]
fn decoded_tiles() {
    let client = hopper!("decoded_tiles");
    for (m, n, k) in [
        (1, 8, 32),
        (130, 200, 96),
        (300, 2112, 160),
        (64, 536, 1120),
    ] {
        let (a, b) = (Packed::random(m, k, 7), Packed::random(n, k, 8));
        let (left, right) = (a.device(&client), b.device(&client));
        let run = |tile, kind| {
            let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(kind));
            let plan = Some(Plan::from(DequantThenBf16(tile, 4)));
            let (x, y) = (Operand::from(&left), Operand::from(&right));
            multiply(
                &client,
                Gemm::new(x, y).target(new).backend(path).plan(plan),
            )
            .unwrap()
        };
        let expected = read::<f32>(&client, &run(Sm90Tile::N128, FloatKind::F32));
        assert_bound(&expected, &a, &b, &format!("{m} x {n} x {k}"));
        for tile in Sm90Tile::ALL {
            let what = format!("{tile:?}, {m} x {n} x {k}");
            let found = read::<f32>(&client, &run(tile, FloatKind::F32));
            assert_same(&found, &expected, &what);
            let found = read::<bf16>(&client, &run(tile, FloatKind::Bf16));
            let rounded: Vec<bf16> = expected.iter().map(|&x| bf16::from_f32(x)).collect();
            assert!(found == rounded, "{what}, bf16");
        }
    }
}

/// Every tile of the kernel that decodes `b` in registers, with tails in all dimensions, compared
/// with the bound. Tiles in which each warpgroup sums alone equal, bit for bit, the other kernel on
/// columns in the same order.
#[test]
fn fused_tiles() {
    let client = hopper!("fused_tiles");
    for tile in W4a16Tile::ALL {
        let rows = tile.rows_a;
        for (m, n, k) in [
            (1, 8, 32),
            (rows, 128, 128),
            (rows - 3, 200, 96),
            (rows / 2, 136, 256),
            (rows - rows / 3, 72, 160),
            (rows + 5, 264, 352),
            (2 * rows + 1, 328, 1120),
            (rows, 2048, 8192),
        ] {
            let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
            let (left, right) = (a.device(&client), b.device(&client));
            let dense: Vec<bf16> = a.decoded().into_iter().map(bf16::from_f32).collect();
            let dense = upload(&client, &dense, m, k, FloatKind::Bf16);
            let run = |a, b, plan| {
                let a = Operand {
                    elements: a,
                    scale: Scale::Tensor(&left.amax, 2688.0),
                };
                let b = Operand {
                    elements: b,
                    scale: Scale::Tensor(&right.amax, 2688.0),
                };
                let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(FloatKind::F32));
                let found = multiply(
                    &client,
                    Gemm::new(a, b).target(new).backend(path).plan(plan),
                );
                read::<f32>(&client, &found.unwrap())
            };
            let plan = Plan::from(W4a16(tile, 4));
            let what = format!("{tile:?}, {m} x {n} x {k}");
            let packed = Elements::Quantized(&right);
            let found = run(Elements::Quantized(&left), packed, plan);
            assert_bound(&found, &a, &b, &what);
            let from_bf16 = run(Elements::Bf16(&dense), packed, plan);
            assert_same(&from_bf16, &found, &format!("{what}, bf16 left"));
            if tile.ways == 1 {
                let decoded = Plan::from(DequantThenBf16(Sm90Tile::N128, 8));
                let ordered = [&a, &b].map(|packed| in_order_of_sums(&client, packed));
                let [x, y] = ordered.each_ref().map(Elements::Bf16);
                let expected = run(x, y, decoded);
                assert_same(&found, &expected, &format!("{what}, against decoded"));
            }
        }
    }
}

/// Returns every Hopper kernel for packed operands that supports `m` rows.
fn packed_plans(m: usize) -> Vec<Plan> {
    let fused = W4a16Tile::ALL.map(|tile| Plan::from(W4a16(tile, 4)));
    let decoded = Sm90Tile::ALL.map(|tile| Plan::from(DequantThenBf16(tile, 4)));
    let few = (m <= 16).then_some(Plan::from(SmallM));
    few.into_iter().chain(fused).chain(decoded).collect()
}

/// Block scales at both ends of E4M3, including subnormals, zeros, and NaN in either operand.
#[test]
fn extreme_scales() {
    let client = hopper!("extreme_scales");
    let run = |plan, a: &Packed, b: &Packed| {
        let (a, b) = (a.device(&client), b.device(&client));
        let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(FloatKind::F32));
        let (a, b) = (Operand::from(&a), Operand::from(&b));
        read::<f32>(
            &client,
            &multiply(
                &client,
                Gemm::new(a, b).target(new).backend(path).plan(plan),
            )
            .unwrap(),
        )
    };
    for (m, n, k) in [(40, 136, 192), (13, 136, 192), (5, 72, 176)] {
        let mut a = Packed::random(m, k, 1);
        let mut b = Packed::random(n, k, 2);
        let mut random = Generator::new(3);
        for (i, scale) in b.scales.iter_mut().enumerate() {
            // 0 to 2^-6 in the even rows, 224 to 448 in the odd ones.
            let any = random.next_u32() as u8;
            *scale = if (i / b.blocks).is_multiple_of(2) {
                any % 9
            } else {
                0x76 + any % 9
            };
        }
        a.scales[..a.blocks].fill(1);
        a.scales[a.blocks..2 * a.blocks].fill(0x7e);
        a.scales[2 * a.blocks..3 * a.blocks].fill(0);
        // One NaN scale each, also in the last block: it affects its row and its column, and
        // nothing else.
        let (mut x, mut y) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
        x.scales[3 * x.blocks + 5] = 0x7f;
        y.scales[11 * y.blocks + 2] = 0x7f;
        y.scales[14 * y.blocks - 1] = 0x7f;
        for plan in packed_plans(m) {
            if plan.is::<W4a16>() && !k.is_multiple_of(32) {
                continue;
            }
            let what = format!("{plan:?}, {m} x {n} x {k}");
            let found = run(plan, &a, &b);
            assert_bound(&found, &a, &b, &what);
            assert!(
                found[2 * n..3 * n].iter().all(|value| *value == 0.0),
                "{what}"
            );
            assert!(found.iter().any(|value| *value != 0.0), "{what}");
            for (i, value) in run(plan, &x, &y).iter().enumerate() {
                let (row, col) = (i / n, i % n);
                let expected = row == 3 || col == 11 || col == 13;
                assert_eq!(value.is_nan(), expected, "{what}: ({row}, {col})");
            }
        }
    }
}

/// NaN and infinities in a bf16 operand affect their whole output row, and nothing else: on every
/// path, with a bf16 and with a packed other operand.
#[test]
fn nan_and_infinity_in_bf16_operands() {
    let client = client!("nan_and_infinity_in_bf16_operands");
    for (m, n, k) in [(13, 40, 96), (16, 24, 80)] {
        let (x, finite, _) = both_ways(&client, m, k, 1);
        let (y, _, _) = both_ways(&client, n, k, 2);
        let poisoned = |mut x: Vec<bf16>| {
            x[3 * k + 37] = bf16::INFINITY;
            x[5 * k + 79] = bf16::NEG_INFINITY;
            x[7 * k + 1] = bf16::NAN;
            let rows = x.len() / k;
            upload(&client, &x, rows, k, FloatKind::Bf16)
        };
        let is_poisoned = |index: usize| matches!(index, 3 | 5 | 7);
        let (a, b) = (poisoned(x), poisoned(y));
        let packed = Packed::random(n, k, 3).device(&client);
        for path in bf16_paths(&client) {
            let hopper = path == GemmBackend::Sm90Wgmma;
            let plans = match hopper {
                true => packed_plans(m).into_iter().map(Some).collect(),
                false => vec![None],
            };
            for plan in plans {
                let what = format!("{path:?}, {plan:?}, {m} x {n} x {k}");
                if plan.is_some_and(Plan::is::<W4a16>) && !k.is_multiple_of(32) {
                    continue;
                }
                let run = |a, b| {
                    let (a, b) = (unscaled(a), unscaled(b));
                    let new = Target::New(FloatKind::F32);
                    let out = multiply(
                        &client,
                        Gemm::new(a, b).target(new).backend(path).plan(plan),
                    );
                    read::<f32>(&client, &out.unwrap())
                };
                let beside = run(Elements::Bf16(&a), Elements::Quantized(&packed));
                let plain = run(Elements::Bf16(&finite), Elements::Quantized(&packed));
                for (i, (value, plain)) in beside.iter().zip(&plain).enumerate() {
                    let (row, col) = (i / n, i % n);
                    let what = format!("{what}, packed right: ({row}, {col})");
                    match is_poisoned(row) {
                        true => assert!(!value.is_finite(), "{what}: {value}"),
                        false => assert_eq!(value.to_bits(), plain.to_bits(), "{what}"),
                    }
                    assert!(row != 7 || value.is_nan(), "{what}: {value}");
                }
                if plan.is_some_and(|plan| plan.is::<W4a16>() || plan.is::<SmallM>()) {
                    continue;
                }
                let both = run(Elements::Bf16(&a), Elements::Bf16(&b));
                for (i, value) in both.iter().enumerate() {
                    let (row, col) = (i / n, i % n);
                    let expected = !is_poisoned(row) && !is_poisoned(col);
                    assert_eq!(
                        value.is_finite(),
                        expected,
                        "{what}: ({row}, {col}): {value}"
                    );
                }
            }
        }
    }
}

/// Several tiles per cube, so that the pipeline continues from one tile to the next and wraps
/// around. Integers, whose sums are exact in any order, give the bits of the portable kernel with
/// every tile.
#[test]
fn tiles_follow_each_other() {
    let client = hopper!("tiles_follow_each_other");
    let (m, n, k) = (2100, 4104, 1184);
    let (a, b) = (Packed::integers(m, k, 3), Packed::integers(n, k, 4));
    let (left, right) = (a.device(&client), b.device(&client));
    let run = |path, plan| {
        let (a, b) = (Operand::from(&left), Operand::from(&right));
        let new = Target::New(FloatKind::F32);
        let found = multiply(
            &client,
            Gemm::new(a, b).target(new).backend(path).plan(plan),
        );
        read::<f32>(&client, &found.unwrap())
    };
    let expected = run(GemmBackend::Cmma, None);
    assert_bound(&expected, &a, &b, "portable");
    for plan in packed_plans(m) {
        let found = run(GemmBackend::Sm90Wgmma, Some(plan));
        assert_same(&found, &expected, &format!("{plan:?}"));
    }
}

/// K of 65536, compared with the oracle, on kernels that such small shapes would not choose.
#[test]
fn long_contractions() {
    let client = hopper!("long_contractions");
    let (m, n, k) = (130, 136, 65536);
    let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
    let (left, right) = (a.device(&client), b.device(&client));
    let tile = |rows_a, ways| Plan::from(W4a16(W4a16Tile { rows_a, ways }, 4));
    let decoded = |tile| Plan::from(DequantThenBf16(tile, 4));
    for plan in [
        decoded(Sm90Tile::N256),
        decoded(Sm90Tile::N64),
        tile(256, 1),
        tile(32, 4),
    ] {
        let (x, y) = (Operand::from(&left), Operand::from(&right));
        let (path, new) = (Some(GemmBackend::Sm90Wgmma), Target::New(FloatKind::F32));
        let found = multiply(
            &client,
            Gemm::new(x, y).target(new).backend(path).plan(plan),
        )
        .unwrap();
        assert_bound(&read::<f32>(&client, &found), &a, &b, &format!("{plan:?}"));
    }
}

/// The amax that a GEMM computes while it writes is that of its output, on every path.
#[test]
fn maximum_of_the_output() {
    let client = client!("maximum_of_the_output");
    let shapes: &[_] = if on_gpu(&client) {
        &[
            (1, 72, 64),
            (5, 520, 256),
            (100, 264, 96),
            (300, 904, 160),
            (2100, 4104, 64),
            (70, 24, 48),
        ]
    } else {
        &[(5, 24, 48)]
    };
    for &(m, n, k) in shapes {
        for out in [FloatKind::F32, FloatKind::Bf16, FloatKind::F16] {
            for poison in [false, true] {
                let mut a = Packed::random(m, k, 5);
                if poison {
                    a.scales[(m - 1) * a.blocks] = 0x7f;
                }
                let (left, right) = (a.device(&client), Packed::random(n, k, 6).device(&client));
                let (x, y) = (Operand::from(&left), Operand::from(&right));
                let new = Target::New(out);
                let (found, amax) =
                    multiply_amax(&client, Gemm::new(x, y).target(new).amax(OutputAmax::Whole))
                        .unwrap();
                let expected = quantize::amax(&client, &found, None).unwrap();
                let bits = |handle: Handle| -> u32 {
                    bytemuck::pod_read_unaligned(&client.read_one(handle).unwrap()[..4])
                };
                let (amax, expected) = (bits(amax), bits(expected));
                assert_eq!(amax, expected, "{m} x {n} x {k}, {out:?}, NaN {poison}");
                assert_eq!(f32::from_bits(amax).is_nan(), poison);
                assert_ne!(amax, 0);
            }
        }
    }
}

/// Packed and bf16 operands agree on the scalar path, which supports any combination of operands on
/// every device.
#[test]
fn packed_and_bf16_operands_agree_on_the_scalar_path() {
    let client = client!("packed_and_bf16_operands_agree_on_the_scalar_path");
    let (m, n, k) = (9, 11, 48);
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    let (left, right) = (a.device(&client), b.device(&client));
    let half: Vec<bf16> = a.decoded().into_iter().map(bf16::from_f32).collect();
    let half = upload(&client, &half, m, k, FloatKind::Bf16);
    let (path, new) = (GemmBackend::Scalar, Target::New(FloatKind::F32));
    let dense = Operand {
        elements: Elements::Bf16(&half),
        scale: Scale::Tensor(&left.amax, 2688.0),
    };
    let found = multiply(&client, Gemm::new(dense, &right).target(new).backend(path));
    let expected = multiply(
        &client,
        Gemm::new(&left, &right).out(FloatKind::F32).backend(path),
    );
    let expected = read::<f32>(&client, &expected.unwrap());
    assert_same(
        &read::<f32>(&client, &found.unwrap()),
        &expected,
        "bf16 left",
    );
    assert!(expected.iter().any(|value| *value != 0.0));
}

/// Every epilogue operation, on the kernel that the shape chooses: tiles of each width with tails,
/// small M with one and with two groups of eight rows, and small M with rows that end in half a
/// vector.
#[test]
fn epilogues() {
    let client = client!("epilogues");
    let shapes: &[_] = if on_gpu(&client) {
        &[
            (200, 72, 64),
            (1000, 904, 96),
            (2100, 4104, 64),
            (3, 520, 256),
            (9, 264, 96),
            (13, 264, 112),
            (16, 520, 256),
            (35, 264, 96),
        ]
    } else {
        &[(5, 24, 48)]
    };
    for &shape in shapes {
        check_epilogues_of(&client, shape, None, false, &Epilogue::all());
    }
}

/// Every epilogue operation on the kernel that reads bf16, which large GEMMs use: tiles of one and
/// of several chunks, and one whose last chunk is narrower.
#[test]
fn epilogues_of_decoded_tiles_64() {
    check_decoded_tile(&hopper!("epilogues_of_decoded_tiles_64"), Sm90Tile::N64);
}

#[test]
fn epilogues_of_decoded_tiles_176() {
    check_decoded_tile(&hopper!("epilogues_of_decoded_tiles_176"), Sm90Tile::N176);
}

#[test]
fn epilogues_of_decoded_tiles_256() {
    check_decoded_tile(&hopper!("epilogues_of_decoded_tiles_256"), Sm90Tile::N256);
}

fn check_decoded_tile(client: &Client, tile: Sm90Tile) {
    let plan = Some(Plan::from(DequantThenBf16(tile, 4)));
    check_epilogues_of(client, (200, 72, 64), plan, false, &Epilogue::all());
    check_epilogues_of(client, (300, 2112, 112), plan, true, &Epilogue::all());
}

/// Checks the epilogues of a GEMM of `m` x `n` x `k` with random operands, the left one bf16 or
/// packed.
pub fn check_epilogues_of(
    client: &Client,
    (m, n, k): (usize, usize, usize),
    plan: Option<Plan>,
    bf16_left: bool,
    epilogues: &[Epilogue],
) {
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    let (left, right) = (a.device(client), b.device(client));
    let (_, dense, _) = both_ways(client, m, k, 7);
    let left = match bf16_left {
        true => Elements::Bf16(&dense),
        false => Elements::Quantized(&left),
    };
    let what = format!("{m} x {n} x {k}, {plan:?}, bf16 left {bf16_left}");
    check_epilogues(
        client,
        n,
        &vec![0; m],
        epilogues,
        &what,
        &|a_scale, b_scale, bias, target| {
            let a = scaled(left, a_scale);
            let b = scaled(Elements::Quantized(&right), b_scale);
            multiply(client, Gemm::new(a, b).bias(bias).target(target).plan(plan)).unwrap()
        },
    );
}

/// Memory after the output keeps its contents.
#[test]
fn memory_behind_the_output_is_untouched() {
    let client = client!("memory_behind_the_output_is_untouched");
    for (m, n, k) in [(130, 264, 80), (3, 72, 64)] {
        if m > 100 && !on_gpu(&client) {
            continue;
        }
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let (a, b) = (a.device(&client), b.device(&client));
        let guard = 4096;
        let mut held = vec![0f32; m * n];
        held.extend(vec![12345.0; guard]);
        let memory = client.create_from_slice(bytemuck::cast_slice(&held));
        let matrix = Matrix::new(memory.clone(), m, n, FloatKind::F32).unwrap();
        let target = Target::Accumulate(&matrix);
        multiply(&client, Gemm::new(&a, &b).target(target)).unwrap();
        let whole = Matrix::new(memory, 1, m * n + guard, FloatKind::F32).unwrap();
        let found = read::<f32>(&client, &whole);
        assert!(found[m * n..].iter().all(|value| *value == 12345.0));
        assert!(found[..m * n].iter().any(|value| *value != 0.0));
    }
}

#[test]
fn empty_products() {
    let client = client!("empty_products");
    let a = Packed::random(0, 32, 1).device(&client);
    let b = Packed::random(8, 32, 2).device(&client);
    let out = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
    assert_eq!((out.rows, out.cols), (0, 8));
    // With K of zero the result is zeros, or the unchanged output if it accumulates.
    let a = Packed::random(40, 0, 1).device(&client);
    let b = Packed::random(48, 0, 2).device(&client);
    let out = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
    assert_eq!(read::<f32>(&client, &out), vec![0.0; 40 * 48]);
}

/// TMA cannot read a view that is not aligned to 16 bytes: another path computes it, with the same
/// result for integers.
#[test]
fn views_into_memory() {
    let client = client!("views_into_memory");
    let (m, n, k) = (9, 16, 32);
    let x: Vec<bf16> = (0..(m + n) * k)
        .map(|i| bf16::from_f32((i * 7 % 9) as f32 - 4.0))
        .collect();
    let view = |first: usize, rows: usize| {
        let mut padded = vec![bf16::from_f32(100.0)];
        padded.extend(&x[first * k..][..rows * k]);
        let handle = client.create_from_slice(bytemuck::cast_slice(&padded));
        Matrix::new(handle.offset_start(2), rows, k, FloatKind::Bf16).unwrap()
    };
    let (a, b) = (view(0, m), view(m, n));
    let found = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
    for (i, found) in read::<f32>(&client, &found).iter().enumerate() {
        let (row, col) = (i / n, m + i % n);
        let terms = x[row * k..][..k].iter().zip(&x[col * k..][..k]);
        let expected: f32 = terms.map(|(x, y)| x.to_f32() * y.to_f32()).sum();
        assert_eq!(*found, expected, "({row}, {col})");
    }
}

/// The path of a shape is known without running it.
#[test]
fn paths_of_shapes() {
    let client = client!("paths_of_shapes");
    let hopper = Capabilities {
        gemm: GemmBackend::Sm90Wgmma,
        ..Capabilities::of(&client).clone()
    };
    let of_rows = |capabilities: &Capabilities, n, k| {
        let problem = Problem::new([OperandLayout::KMajor; 2], (8, n, k));
        gemm::proof::backend_of(capabilities, &problem)
    };
    let of_columns = |capabilities: &Capabilities, m, n, k| {
        let problem = Problem::new([OperandLayout::MnMajor; 2], (m, n, k));
        gemm::proof::backend_of(capabilities, &problem)
    };
    for (n, k, path) in [
        (8, 16, GemmBackend::Sm90Wgmma),
        (4104, 65536, GemmBackend::Sm90Wgmma),
        (12, 16, GemmBackend::Cmma),
        (8, 20, GemmBackend::Cmma),
    ] {
        assert_eq!(of_rows(&hopper, n, k), path, "{n} x {k}");
    }
    for (m, n, k, path) in [
        (8, 16, 33, GemmBackend::Sm90Wgmma),
        (8, 16, 0, GemmBackend::Sm90Wgmma),
        (9, 16, 32, GemmBackend::Sm90Wgmma),
        (9, 16, 33, GemmBackend::Cmma),
        (8, 15, 32, GemmBackend::Cmma),
    ] {
        let found = of_columns(&hopper, m, n, k);
        assert_eq!(found, path, "{m} x {n} x {k}");
    }
    let scalar = Capabilities {
        gemm: GemmBackend::Scalar,
        ..hopper
    };
    assert_eq!(of_rows(&scalar, 8, 16), GemmBackend::Scalar);
    assert_eq!(of_columns(&scalar, 8, 16, 33), GemmBackend::Scalar);
}

#[test]
fn arguments_are_named() {
    let client = client!("arguments_are_named");
    let a = Packed::random(8, 32, 1).device(&client);
    let b = Packed::random(8, 48, 2).device(&client);
    let error = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap_err();
    assert!(error.to_string().contains("`b`"), "{error}");
    let x = Matrix::empty(&client, 8, 32, FloatKind::F32);
    let columns = unscaled(Elements::Bf16MnMajor(&x));
    let new = Target::New(FloatKind::F32);
    let error = multiply(&client, Gemm::new(&a, columns).target(new)).unwrap_err();
    assert!(error.to_string().contains("`b`"), "{error}");
    let error = multiply(&client, Gemm::new(&x, &x).out(FloatKind::F32)).unwrap_err();
    assert!(error.to_string().contains("`a`"), "{error}");
    let c = Matrix::empty(&client, 8, 9, FloatKind::F32);
    let target = Target::Accumulate(&c);
    let error = multiply(&client, Gemm::new(&a, &a).target(target)).unwrap_err();
    assert!(error.to_string().contains("`target`"), "{error}");
    let amax = client.create_from_slice(&[0; 4]);
    let operand = Operand {
        elements: Elements::Quantized(&a),
        scale: Scale::PerRow(&amax, 2688.0),
    };
    let new = Target::New(FloatKind::F32);
    let error = multiply(&client, Gemm::new(operand, &a).target(new)).unwrap_err();
    assert!(error.to_string().contains("`a`"), "{error}");
    if Capabilities::of(&client).gemm != GemmBackend::Sm90Wgmma {
        let path = GemmBackend::Sm90Wgmma;
        let error =
            multiply(&client, Gemm::new(&a, &a).out(FloatKind::F32).backend(path)).unwrap_err();
        assert!(error.to_string().contains("9.0"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    /// Any shape.
    #[test]
    fn random_shapes(m in 1usize..1200, n in 1usize..300, blocks in 1usize..130, seed: u32) {
        let Some(client) = device::client("random_shapes") else { return Ok(()) };
        let (m, n, blocks) = match on_gpu(&client) {
            true => (m, 8 * n, blocks),
            false => (m % 20 + 1, n % 20 + 1, blocks % 40 + 1),
        };
        let (a, b) = (Packed::random(m, blocks * 16, seed), Packed::random(n, blocks * 16, !seed));
        let (left, right) = (a.device(&client), b.device(&client));
        let found = multiply(&client, Gemm::new(&left, &right).out(FloatKind::F32)).unwrap();
        assert_bound(&read::<f32>(&client, &found), &a, &b, &format!("{m} x {n}, {blocks} blocks"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..Default::default() })]

    /// Any shape, small M in every second one, with any epilogue, a packed or a bf16 operand, and
    /// any type of output.
    #[test]
    fn random_epilogues(
        m in 1usize..700,
        few: bool,
        n in 1usize..90,
        blocks in 1usize..60,
        bf16_left: bool,
        epilogue in prop::sample::select(Epilogue::all()),
    ) {
        let Some(client) = device::client("random_epilogues") else { return Ok(()) };
        let m = if few { m % 16 + 1 } else { m };
        let (m, n, blocks) = match on_gpu(&client) {
            true => (m, 8 * n, blocks),
            false => (m % 9 + 1, n % 9 + 1, blocks % 5 + 1),
        };
        check_epilogues_of(&client, (m, n, 16 * blocks), None, bf16_left, &[epilogue]);
    }
}
