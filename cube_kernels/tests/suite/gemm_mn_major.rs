//! GEMMs with a packed MN-major `b`, whose stored rows are the K dimension, compared bit for bit
//! with GEMMs of its transposed elements in bf16 on the same path, which have the same summation
//! order.
//!
//! `NVFP4_TEST_DEVICE` selects `cpu` (the default) or `cuda`.

use crate::support::quantize;
use crate::support::{
    device,
    device::read_matrix,
    epilogue::{Epilogue, check_epilogues},
    gemm::{multiply, multiply_amax},
    inputs::Generator,
    packed::{Packed, both_ways, scaled, unscaled},
};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_formats::{Layout, QuantParams, Rounding, StoredForm, Usage, reference};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Elements, Gemm, GemmShape, GroupedDim, Operand, OperandLayout, OutputAmax, Plan,
        Problem, Scale,
        proof::{DequantThenBf16, Sm90Tile, W4a16MnMajor, W4a16MnTile},
    },
    moe::GroupOffsets,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

/// Returns the paths of the device, each with the kernel that reads a packed MN-major `b` and the
/// one that sums its bf16 elements in the same order.
fn paths(client: &Client) -> Vec<(GemmBackend, Option<(Plan, Plan)>)> {
    let scalar = (GemmBackend::Scalar, None);
    let cmma = (GemmBackend::Cmma, None);
    match Capabilities::of(client).gemm {
        GemmBackend::Scalar => vec![scalar],
        GemmBackend::Sm90Wgmma => {
            let of_bf16 = Plan::from(DequantThenBf16(Sm90Tile::N128, 4));
            let tiles = W4a16MnTile::ALL.map(|tile| {
                let plans = (Plan::from(W4a16MnMajor(tile, 3)), of_bf16);
                (GemmBackend::Sm90Wgmma, Some(plans))
            });
            tiles.into_iter().chain([cmma, scalar]).collect()
        }
        _ => vec![cmma, scalar],
    }
}

fn is_large(client: &Client) -> bool {
    Capabilities::of(client).gemm != GemmBackend::Scalar
}

/// Returns the elements of `stack` vertically stacked matrices, each transposed and rounded to
/// bf16, without the global scale: exact.
fn transposed(client: &Client, b: &Packed, stack: usize) -> Matrix {
    let (n, k) = (b.blocks * 16, b.rows / stack);
    let x = b.decoded();
    let values: Vec<bf16> = (0..stack * n * k)
        .map(|i| {
            let (matrix, column, depth) = (i / (n * k), i / k % n, i % k);
            bf16::from_f32(x[(matrix * k + depth) * n + column])
        })
        .collect();
    let handle = client.create_from_slice(bytemuck::cast_slice(&values));
    Matrix::new(handle, stack * n, k, FloatKind::Bf16).unwrap()
}

fn read(client: &Client, matrix: &Matrix) -> Vec<f32> {
    match matrix.is_empty() {
        true => Vec::new(),
        false => read_matrix(client, matrix),
    }
}

fn groups(client: &Client, sizes: &[usize]) -> (GroupOffsets, Vec<usize>) {
    let mut offsets = vec![0];
    for size in sizes {
        offsets.push(offsets.last().unwrap() + size);
    }
    let words: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
    let groups = GroupOffsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&words)),
        count: sizes.len(),
    };
    (groups, offsets)
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

/// Shapes as `(m, n, k)` with tails in all dimensions. On Hopper, shapes that its kernel does not
/// support use other kernels.
fn shapes(large: bool) -> &'static [(usize, usize, usize)] {
    match large {
        true => &[
            (1, 32, 8),
            (33, 96, 72),
            (64, 256, 64),
            (127, 288, 200),
            (128, 512, 128),
            (129, 256, 1000),
            (300, 544, 1120),
            (65, 2080, 520),
            (257, 4096, 2048),
        ],
        false => &[(1, 16, 1), (3, 32, 8), (5, 48, 23), (2, 16, 40)],
    }
}

#[test]
fn elements_are_those_of_bf16() {
    let client = client!("gemm_mn_major::elements_are_those_of_bf16");
    let large = is_large(&client);
    for &(m, n, k) in shapes(large) {
        let (_, a, a_columns) = both_ways(&client, m, k, 3);
        let b = Packed::random(k, n, 4);
        let (device, dense) = (b.device(&client), transposed(&client, &b, 1));
        let own = Operand::packed_mn_major(&device);
        for (path, plans) in paths(&client) {
            if path == GemmBackend::Scalar && m * n * k > 1 << 24 {
                continue;
            }
            let (plan, of_bf16) = plans.unzip();
            let what = format!("{m} x {n} x {k}, {path:?}, {plan:?}");
            let run = |b, plan, kind| {
                let request = Gemm::new(&a, b).out(kind).backend(path);
                multiply(&client, request.plan(plan)).unwrap()
            };
            let as_bf16 = scaled(Elements::Bf16(&dense), own.scale);
            let expected = read(&client, &run(as_bf16, of_bf16, FloatKind::F32));
            assert!(expected.iter().any(|x| *x != 0.0), "{what}");
            let found = read(&client, &run(own, plan, FloatKind::F32));
            assert_same(&found, &expected, &what);
            let found: Vec<bf16> = read_matrix(&client, &run(own, plan, FloatKind::Bf16));
            let rounded: Vec<bf16> = expected.iter().map(|&x| bf16::from_f32(x)).collect();
            assert!(found == rounded, "{what}, bf16");
            // An MN-major `a` is transposed first.
            let columns = Operand::mn_major(&a_columns);
            let request = Gemm::new(columns, own).out(FloatKind::F32).backend(path);
            let found = multiply(&client, request.plan(plan)).unwrap();
            assert_same(
                &read(&client, &found),
                &expected,
                &format!("{what}, MN-major a"),
            );
        }
    }
}

/// Integers are exact in any order: every path, and the chosen one, gives the bits of the scalar
/// path.
#[test]
fn integers_are_exact() {
    let client = client!("gemm_mn_major::integers_are_exact");
    let shapes: &[(usize, usize, usize)] = match is_large(&client) {
        true => &[(7, 32, 16), (130, 288, 264), (64, 48, 40), (260, 1056, 776)],
        false => &[(3, 32, 24)],
    };
    for &(m, n, k) in shapes {
        let (a, b) = (
            Packed::integers(m, k.next_multiple_of(16), 1),
            Packed::integers(k, n, 2),
        );
        let x: Vec<f32> = a.decoded();
        let width = a.blocks * 16;
        let x: Vec<f32> = (0..m * k).map(|i| x[i / k * width + i % k]).collect();
        let y = b.decoded();
        let mut expected = vec![0f32; m * n];
        for (i, out) in expected.iter_mut().enumerate() {
            let (row, column) = (i / n, i % n);
            *out = (0..k)
                .map(|depth| x[row * k + depth] * y[depth * n + column])
                .sum();
        }
        let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let handle = client.create_from_slice(bytemuck::cast_slice(&half));
        let a = Matrix::new(handle, m, k, FloatKind::Bf16).unwrap();
        let device = b.device(&client);
        let own = Operand::packed_mn_major(&device);
        let request = Gemm::new(&a, own).out(FloatKind::F32);
        let chosen = read(&client, &multiply(&client, request).unwrap());
        assert_same(&chosen, &expected, &format!("{m} x {n} x {k}, chosen"));
        for (path, _) in paths(&client) {
            if path == GemmBackend::Sm90Wgmma && !n.is_multiple_of(32) {
                continue;
            }
            let found = multiply(&client, request.backend(path)).unwrap();
            let what = format!("{m} x {n} x {k}, {path:?}");
            assert_same(&read(&client, &found), &expected, &what);
        }
    }
}

/// Columns that end within a block, whose padding is not a column of the output: for a columnwise
/// tensor, whose stored rows are its columns.
#[test]
fn columns_of_part_of_a_block() {
    let client = client!("gemm_mn_major::columns_of_part_of_a_block");
    let (m, n, k) = (5, 20, 24);
    let (a, _, _) = both_ways(&client, m, k, 1);
    let left = client.create_from_slice(bytemuck::cast_slice(&a));
    let left = Matrix::new(left, m, k, FloatKind::Bf16).unwrap();
    let mut random = Generator::new(9);
    let w: Vec<f32> = (0..k * n).map(|_| random.normal()).collect();
    let amax = nvfp4_formats::Amax::Tensor(reference::amax(&w));
    let policy = QuantParams::nvfp4(Rounding::Nearest);
    let packed = reference::quantize(&w, n, k, Usage::Columnwise, &amax, &policy, 0).unwrap();
    let y = reference::decode_blocks(&packed);
    let device = DeviceQuantized::from_host(&client, &packed);
    let operand = Operand {
        scale: Scale::One,
        ..Operand::packed_mn_major(&device)
    };
    for (path, _) in paths(&client) {
        if path == GemmBackend::Sm90Wgmma {
            continue;
        }
        let request = Gemm::new(&left, operand).out(FloatKind::F32);
        let found = multiply(&client, request.backend(path)).unwrap();
        assert_eq!((found.rows, found.cols), (m, n));
        for (i, found) in read(&client, &found).iter().enumerate() {
            let terms = (0..k).map(|depth| {
                let (x, y) = (a[i / n * k + depth].to_f64(), y[depth * 32 + i % n] as f64);
                (x * y, (x * y).abs())
            });
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), (x, y)| (sum + x, all + y));
            let bound = 2.0 * (k as f64 + 2.0) * f32::EPSILON as f64 * magnitude;
            assert!(
                (*found as f64 - sum).abs() <= bound,
                "{path:?}: {found} instead of {sum}"
            );
        }
    }
}

/// A packed `a`, and block scales of `b` in 128x4 tiles, give the bits of the equivalent operands.
#[test]
fn other_forms_of_operands() {
    let client = client!("gemm_mn_major::other_forms_of_operands");
    let (m, n, k) = if is_large(&client) {
        (140, 288, 208)
    } else {
        (3, 32, 48)
    };
    let (a, b) = (Packed::random(m, k, 5), Packed::random(k, n, 6));
    let (left, right) = (a.device(&client), b.device(&client));
    let half: Vec<bf16> = a.decoded().into_iter().map(bf16::from_f32).collect();
    let half = client.create_from_slice(bytemuck::cast_slice(&half));
    let half = Matrix::new(half, m, k, FloatKind::Bf16).unwrap();
    let tiles = quantize::swizzle(&client, &right.scales, k, n / 16).unwrap();
    let tiled = DeviceQuantized {
        layout: Layout {
            form: StoredForm::Tiles,
            ..right.layout
        },
        scales: tiles,
        ..b.device(&client)
    };
    let scale = Operand::from(&left).scale;
    for (path, plans) in paths(&client) {
        let run = |a, b| {
            let request = Gemm::new(a, b).out(FloatKind::F32).backend(path);
            let request = request.plan(plans.map(|(plan, _)| plan));
            read(&client, &multiply(&client, request).unwrap())
        };
        let own = Operand::packed_mn_major(&right);
        let expected = run(scaled(Elements::Bf16(&half), scale), own);
        let found = run(scaled(Elements::Quantized(&left), scale), own);
        assert_same(&found, &expected, &format!("{path:?}, packed a"));
        let as_bf16 = scaled(Elements::Bf16(&half), scale);
        let found = run(as_bf16, Operand::packed_mn_major(&tiled));
        assert_same(&found, &expected, &format!("{path:?}, tiles of scales"));
    }
}

/// Scales at both ends of E4M3, zeros and NaN: a NaN affects the sixteen columns of its block and
/// nothing else, also at the end of K.
#[test]
fn extreme_scales() {
    let client = client!("gemm_mn_major::extreme_scales");
    let (m, n, k) = if is_large(&client) {
        (140, 544, 200)
    } else {
        (3, 48, 24)
    };
    let (_, a, _) = both_ways(&client, m, k, 1);
    let mut b = Packed::random(k, n, 2);
    let mut random = Generator::new(3);
    for (i, scale) in b.scales.iter_mut().enumerate() {
        // 0 to 2^-6 in the even rows, 224 to 448 in the odd ones; none in the second block.
        let any = random.next_u32() as u8;
        *scale = match (i % b.blocks, i / b.blocks % 2) {
            (1, _) => 0,
            (_, 0) => any % 9,
            _ => 0x76 + any % 9,
        };
    }
    let mut with_nan = Packed::random(k, n, 2);
    with_nan.scales[3 * b.blocks + 2] = 0x7f;
    with_nan.scales[k * b.blocks - 1] = 0x7f;
    let (device, nan) = (b.device(&client), with_nan.device(&client));
    let dense = transposed(&client, &b, 1);
    for (path, plans) in paths(&client) {
        let (plan, of_bf16) = plans.unzip();
        let what = format!("{path:?}, {plan:?}");
        let run = |b, plan| {
            let request = Gemm::new(&a, b).out(FloatKind::F32).backend(path);
            read(&client, &multiply(&client, request.plan(plan)).unwrap())
        };
        let own = Operand::packed_mn_major(&device);
        let found = run(own, plan);
        let expected = run(scaled(Elements::Bf16(&dense), own.scale), of_bf16);
        assert_same(&found, &expected, &what);
        assert!(found.iter().any(|x| *x != 0.0), "{what}");
        for (i, found) in found.iter().enumerate() {
            assert!((i % n / 16 != 1) || *found == 0.0, "{what}");
        }
        let of_nan = run(Operand::packed_mn_major(&nan), plan);
        for (i, found) in of_nan.iter().enumerate() {
            let block = i % n / 16;
            let expected = block == 2 || block == n / 16 - 1;
            assert_eq!(found.is_nan(), expected, "{what}: element {i}");
        }
    }
}

/// Groups of rows, including empty ones, give the bits of their separate GEMMs for any scales of
/// the adjacent matrices.
#[test]
fn groups_equal_the_loop() {
    let client = client!("gemm_mn_major::groups_equal_the_loop");
    let large = is_large(&client);
    let all: &[(&[usize], (usize, usize))] = match large {
        true => &[
            (&[0, 1, 127, 128, 129, 0, 300], (288, 200)),
            (&[64, 63, 65, 0, 31, 33, 0], (256, 72)),
            (&[5, 0, 0, 9], (544, 512)),
            (&[0, 0, 0], (64, 64)),
        ],
        false => &[(&[0, 3, 1, 0, 2], (32, 8)), (&[0, 0], (16, 8))],
    };
    for &(sizes, (n, k)) in all {
        let (groups, offsets) = groups(&client, sizes);
        let (count, m) = (sizes.len(), *offsets.last().unwrap());
        let (values, a, _) = both_ways(&client, m, k, 1);
        let mut stack = Packed::random(count * k, n, 2);
        // The matrices of empty groups are NaN: data before and after the K range of an adjacent
        // group is not multiplied.
        for (g, _) in sizes.iter().enumerate().filter(|(_, size)| **size == 0) {
            stack.scales[g * k * n / 16..(g + 1) * k * n / 16].fill(0x7f);
        }
        let device = stack.device(&client);
        let amax: Vec<f32> = (0..count).map(|g| 700.0 + 90.0 * g as f32).collect();
        let factors = client.create_from_slice(bytemuck::cast_slice(&amax));
        let bias: Vec<f32> = (0..count * n).map(|i| (i % 37) as f32 - 18.0).collect();
        let matrix = |x: &[f32], rows: usize| {
            let handle = client.create_from_slice(bytemuck::cast_slice(x));
            Matrix::new(handle, rows, x.len() / rows, FloatKind::F32).unwrap()
        };
        let all_bias = matrix(&bias, count);
        for (path, plans) in paths(&client) {
            let plan = plans.map(|(plan, _)| plan);
            let b = Operand {
                scale: Scale::PerGroup(&factors, 2688.0),
                ..Operand::packed_mn_major(&device)
            };
            let request = Gemm::new(&a, b).out(FloatKind::F32).m_grouped(&groups);
            let request = request.bias(&all_bias).backend(path).plan(plan);
            let found = read(&client, &multiply(&client, request).unwrap());
            for (g, rows) in offsets.windows(2).map(|two| two[0]..two[1]).enumerate() {
                if rows.is_empty() {
                    continue;
                }
                let own = &values[rows.start * k..rows.end * k];
                let own = client.create_from_slice(bytemuck::cast_slice(own));
                let own = Matrix::new(own, rows.len(), k, FloatKind::Bf16).unwrap();
                let part = stack.rows(g * k..(g + 1) * k).device(&client);
                let factor = client.create_from_slice(bytemuck::cast_slice(&amax[g..=g]));
                let b = Operand {
                    scale: Scale::Tensor(&factor, 2688.0),
                    ..Operand::packed_mn_major(&part)
                };
                let own_bias = matrix(&bias[g * n..(g + 1) * n], 1);
                let request = Gemm::new(&own, b).out(FloatKind::F32).bias(&own_bias);
                let request = request.backend(path).plan(plan);
                let expected = read(&client, &multiply(&client, request).unwrap());
                assert!(expected.iter().all(|x| x.is_finite()), "group {g}");
                let what = format!("{path:?}, {plan:?}, {n} x {k}, group {g} of {sizes:?}");
                assert_same(&found[rows.start * n..rows.end * n], &expected, &what);
            }
        }
    }
}

#[test]
fn epilogues() {
    let client = client!("gemm_mn_major::epilogues");
    let (m, n, k) = if is_large(&client) {
        (200, 288, 72)
    } else {
        (4, 32, 16)
    };
    let (_, a, _) = both_ways(&client, m, k, 5);
    let b = Packed::random(k, n, 6).device(&client);
    // Stored rows are not columns of the output.
    let all = Epilogue::all().into_iter().filter(|it| !it.by_column);
    let all: Vec<_> = all.collect();
    for (path, plans) in paths(&client) {
        let plan = plans.map(|(plan, _)| plan);
        let what = format!("{path:?}, {plan:?}");
        check_epilogues(
            &client,
            n,
            &vec![0; m],
            &all,
            &what,
            &|a_scale, b_scale, bias, target| {
                let a = scaled(Elements::Bf16(&a), a_scale);
                let b = scaled(Elements::PackedMnMajor(&b), b_scale);
                let request = Gemm::new(a, b).bias(bias).target(target).backend(path);
                multiply(&client, request.plan(plan)).unwrap()
            },
        );
    }
}

#[test]
fn maximum_of_the_output() {
    let client = client!("gemm_mn_major::maximum_of_the_output");
    let (m, n, k) = if is_large(&client) {
        (200, 288, 72)
    } else {
        (4, 32, 16)
    };
    let (_, a, _) = both_ways(&client, m, k, 5);
    let b = Packed::random(k, n, 6).device(&client);
    for (path, plans) in paths(&client) {
        let request = Gemm::new(&a, Operand::packed_mn_major(&b)).out(FloatKind::Bf16);
        let request = request.amax(OutputAmax::Whole).backend(path);
        let request = request.plan(plans.map(|(plan, _)| plan));
        let (out, amax) = multiply_amax(&client, request).unwrap();
        let out: Vec<bf16> = read_matrix(&client, &out);
        let expected = out.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        let found = device::read_f32s(&client, &amax, 1);
        assert!(
            expected > 0.0 && found == [expected],
            "{path:?}: {found:?}, {expected}"
        );
    }
}

/// The path of each shape: none dequantizes the whole of `b`.
#[test]
fn paths_of_shapes() {
    let client = client!("gemm_mn_major::paths_of_shapes");
    let own = Capabilities::of(&client);
    let of = |gemm, (m, n, k): (usize, usize, usize), groups: usize| {
        let capabilities = Capabilities {
            gemm,
            compute_capability: Some(90),
            ..own.clone()
        };
        let layouts = [OperandLayout::KMajor, OperandLayout::PackedMnMajor];
        let problem = Problem::new(layouts, GemmShape { m, n, k });
        let problem = match groups {
            0 => problem,
            _ => problem.grouped(GroupedDim::M, groups),
        };
        gemm::proof::backend_of(&capabilities, &problem)
    };
    use GemmBackend::{Cmma, CublasLt, Scalar, Sm90Wgmma, Sm100Tcgen05, Sm120BlockScaled};
    for groups in [0, 8] {
        for (shape, expected) in [
            ((1, 32, 8), Sm90Wgmma),
            ((4096, 4096, 14336), Sm90Wgmma),
            ((4096, 4096, 14344), Sm90Wgmma),
            ((64, 48, 64), Cmma),
            ((64, 64, 20), Cmma),
            ((64, 64, 0), Cmma),
        ] {
            assert_eq!(of(Sm90Wgmma, shape, groups), expected, "{shape:?}");
        }
        for gemm in [Cmma, CublasLt, Sm100Tcgen05, Sm120BlockScaled] {
            assert_eq!(of(gemm, (4096, 4096, 4096), groups), Cmma, "{gemm:?}");
        }
        assert_eq!(of(Scalar, (64, 64, 64), groups), Scalar);
    }
}

#[test]
fn empty_products() {
    let client = client!("gemm_mn_major::empty_products");
    let a = Matrix::empty(&client, 0, 16, FloatKind::Bf16);
    let b = Packed::random(16, 32, 2).device(&client);
    let out = multiply(&client, Gemm::new(&a, Operand::packed_mn_major(&b))).unwrap();
    assert_eq!((out.rows, out.cols), (0, 32));
    let (a, b) = (
        Matrix::empty(&client, 3, 0, FloatKind::Bf16),
        Packed::random(0, 32, 2),
    );
    let b = b.device(&client);
    let request = Gemm::new(&a, Operand::packed_mn_major(&b)).out(FloatKind::F32);
    let out = multiply(&client, request).unwrap();
    assert_eq!(read(&client, &out), vec![0.0; 3 * 32]);
}

#[test]
fn arguments_are_named() {
    let client = client!("gemm_mn_major::arguments_are_named");
    let (_, a, _) = both_ways(&client, 4, 32, 1);
    let b = Packed::random(32, 48, 2).device(&client);
    let own = Operand::packed_mn_major(&b);
    let fails = |request: Gemm, argument: &str, what: &str| {
        let error = multiply(&client, request).unwrap_err().to_string();
        assert!(error.contains(argument) && error.contains(what), "{error}");
    };
    fails(Gemm::new(own, &a), "`a`", "MN-major");
    let shorter = Packed::random(16, 48, 2).device(&client);
    fails(
        Gemm::new(&a, Operand::packed_mn_major(&shorter)),
        "`b`",
        "contraction",
    );
    let amax = client.create_from_slice(&[0; 4 * 64]);
    let per_row = scaled(own.elements, Scale::PerRow(&amax, 2688.0));
    fails(Gemm::new(&a, per_row), "`b`", "stored row");
    let (groups, _) = groups(&client, &[2, 1, 1]);
    fails(Gemm::new(&a, own).m_grouped(&groups), "`b`", "groups");
    fails(
        Gemm::new(&a, unscaled(own.elements)).k_grouped(&groups),
        "`b`",
        "groups along K",
    );
}
