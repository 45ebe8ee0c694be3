//! Grouped GEMMs compared with a loop over their groups, bit for bit on the same path.
//!
//! `NVFP4_TEST_DEVICE` selects `cpu` (the default) or `cuda`.

use crate::support::device;
use crate::support::device::{DeviceElement, read_f32s, read_matrix};
use crate::support::epilogue::{Epilogue, check_epilogues};
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::inputs::Generator;
use crate::support::packed::{Packed, both_ways, scaled, unscaled};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Elements, Gemm, GroupedDim, Operand, OperandLayout, OutputAmax, Plan, Problem, Scale,
        Target,
        proof::{DequantThenBf16, Sm90Tile, W4a16, W4a16Tile},
    },
    moe::GroupOffsets,
    tensor::{FloatKind, Matrix},
};
use proptest::prelude::*;

/// Returns the paths of the device.
fn paths(client: &Client) -> Vec<GemmBackend> {
    match Capabilities::of(client).gemm {
        GemmBackend::Scalar => vec![GemmBackend::Scalar],
        // cuBLASLt supports no groups. The block-scaled kernel supports neither groups along K nor
        // bf16 operands; its groups of rows have separate tests.
        GemmBackend::Cmma
        | GemmBackend::Sm120BlockScaled
        | GemmBackend::Sm100Tcgen05
        | GemmBackend::CublasLt => {
            vec![GemmBackend::Cmma, GemmBackend::Scalar]
        }
        GemmBackend::Sm90Wgmma => vec![
            GemmBackend::Sm90Wgmma,
            GemmBackend::Cmma,
            GemmBackend::Scalar,
        ],
    }
}

fn read(client: &Client, matrix: &Matrix) -> Vec<f32> {
    assert_eq!(matrix.dtype, FloatKind::F32);
    if matrix.is_empty() {
        return Vec::new();
    }
    let bytes = client.read_one(matrix.handle.clone()).unwrap();
    bytes[..matrix.len() * 4]
        .chunks_exact(4)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

fn floats(client: &Client, x: &[f32], rows: usize) -> Matrix {
    let handle = client.create_from_slice(bytemuck::cast_slice(x));
    Matrix::new(handle, rows, x.len() / rows, FloatKind::F32).unwrap()
}

fn groups(client: &Client, offsets: &[usize]) -> GroupOffsets {
    let offsets32: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
    GroupOffsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&offsets32)),
        count: offsets.len() - 1,
    }
}

fn offsets(sizes: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for size in sizes {
        offsets.push(offsets.last().unwrap() + size);
    }
    offsets
}

/// Computes one group as a separate GEMM, on Hopper with the kernel that the groups use.
fn alone(
    client: &Client,
    path: GemmBackend,
    a: &Packed,
    b: &Packed,
    bias: Option<&Matrix>,
    plan: Plan,
) -> Vec<f32> {
    let (a, b) = (a.device(client), b.device(client));
    let plan = (path == GemmBackend::Sm90Wgmma).then_some(plan);
    let new = Target::New(FloatKind::F32);
    let (a, b) = (Operand::from(&a), Operand::from(&b));
    let found = multiply(
        client,
        Gemm::new(a, b)
            .bias(bias)
            .target(new)
            .backend(path)
            .plan(plan),
    );
    read(client, &found.unwrap())
}

fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(
            found.to_bits(),
            expected.to_bits(),
            "{what}: element {i}: {found} instead of {expected}"
        );
    }
}

/// Returns group sizes smaller and larger than a tile, and zero; many groups; skewed sizes.
fn sizes(large: bool) -> Vec<Vec<usize>> {
    if large {
        let mut random = Generator::new(3);
        vec![
            vec![0, 1, 127, 128, 129, 0, 300],
            vec![256],
            vec![0, 0, 0],
            vec![700, 1, 0, 2, 64],
            (0..256).map(|_| random.next_u32() as usize % 12).collect(),
        ]
    } else {
        vec![vec![0, 3, 1, 0, 5], vec![4], vec![0, 0]]
    }
}

#[test]
fn rows_in_groups_equal_the_loop() {
    let client = client!("rows_in_groups_equal_the_loop");
    for path in paths(&client) {
        let large = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        for sizes in sizes(large) {
            let shapes: &[_] = if large {
                &[(264, 208), (128, 128)]
            } else {
                &[(8, 48)]
            };
            for shape in shapes {
                rows_equal_the_loop(&client, path, &sizes, *shape, 1);
            }
        }
    }
}

/// Rows in groups of these sizes, `n` rows of `b` per group, with a bias.
fn rows_equal_the_loop(
    client: &Client,
    path: GemmBackend,
    sizes: &[usize],
    (n, k): (usize, usize),
    seed: u32,
) {
    let what = format!(
        "{path:?}, {} groups {:?}.., n {n}, k {k}",
        sizes.len(),
        &sizes[..sizes.len().min(8)]
    );
    let offsets = offsets(sizes);
    let (m, count) = (*offsets.last().unwrap(), sizes.len());
    let (a, b) = (
        Packed::random(m, k, seed),
        Packed::random(count * n, k, !seed),
    );
    let mut random = Generator::new(seed ^ 5);
    let bias: Vec<f32> = (0..count * n).map(|_| random.normal()).collect();
    let (left, right) = (a.device(client), b.device(client));
    let groups = groups(client, &offsets);
    let problem = Problem::new([OperandLayout::Packed; 2], (m, n, k)).grouped(GroupedDim::M, count);
    let plan = gemm::choose(client, &problem).unwrap().plan;
    let found = multiply(
        client,
        Gemm::new(&left, &right)
            .bias(Some(&floats(client, &bias, count)))
            .out(FloatKind::F32)
            .m_grouped(&groups)
            .backend(path),
    );
    let found = read(client, &found.unwrap());
    for g in 0..count {
        let rows = offsets[g]..offsets[g + 1];
        if rows.is_empty() {
            continue;
        }
        let bias = floats(client, &bias[g * n..][..n], 1);
        let expected = alone(
            client,
            path,
            &a.rows(rows.clone()),
            &b.rows(g * n..(g + 1) * n),
            Some(&bias),
            plan,
        );
        let found = &found[rows.start * n..rows.end * n];
        assert_same(found, &expected, &format!("{what}: group {g}"));
    }
}

#[test]
fn contractions_in_groups_equal_the_loop() {
    let client = client!("contractions_in_groups_equal_the_loop");
    for path in paths(&client) {
        let large = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        let mut sizes = sizes(large);
        if large {
            // 65536 columns in total.
            sizes.push(vec![40000, 16, 25520]);
        }
        for sizes in sizes {
            let shape = match (large, sizes[0] > 10000) {
                (true, false) => (136, 264),
                (true, true) => (40, 72),
                (false, _) => (5, 8),
            };
            contractions_equal_the_loop(&client, path, &sizes, shape, 1);
        }
    }
}

/// Groups along K of these sizes, which begin at multiples of 16 columns, most of them inside a
/// pipeline stage: with new outputs, and with accumulation.
fn contractions_equal_the_loop(
    client: &Client,
    path: GemmBackend,
    sizes: &[usize],
    (m, n): (usize, usize),
    seed: u32,
) {
    let blocks: Vec<usize> = sizes.iter().map(|size| size.div_ceil(16)).collect();
    let starts = offsets(&blocks);
    let (k, count) = (16 * starts.last().unwrap(), sizes.len());
    let what = format!(
        "{path:?}, {count} groups {:?}.., {m} x {n}",
        &blocks[..blocks.len().min(8)]
    );
    let (a, b) = (Packed::random(m, k, seed), Packed::random(n, k, !seed));
    let (left, right) = (a.device(client), b.device(client));
    let columns: Vec<usize> = starts.iter().map(|start| 16 * start).collect();
    let held = vec![0.5f32; count * m * n];
    let run = |target| {
        let groups = groups(client, &columns);
        let (a, b) = (Operand::from(&left), Operand::from(&right));
        let found = multiply(
            client,
            Gemm::new(a, b)
                .target(target)
                .k_grouped(&groups)
                .backend(path),
        );
        read(client, &found.unwrap())
    };
    let found = run(Target::New(FloatKind::F32));
    let sum = run(Target::Accumulate(&floats(client, &held, count * m)));
    for g in 0..count {
        let part = starts[g]..starts[g + 1];
        let expected = if part.is_empty() {
            vec![0.0; m * n]
        } else {
            let (a, b) = (a.columns(part.clone()), b.columns(part));
            alone(
                client,
                path,
                &a,
                &b,
                None,
                Plan::from(DequantThenBf16(Sm90Tile::N128, 8)),
            )
        };
        let what = format!("{what}: group {g}");
        assert_same(&found[g * m * n..][..m * n], &expected, &what);
        let expected: Vec<f32> = expected.iter().map(|value| value + 0.5).collect();
        let what = format!("{what}, added");
        assert_same(&sum[g * m * n..][..m * n], &expected, &what);
    }
}

/// Every tile of the fused kernel, for groups smaller and larger than the tile.
#[test]
fn fused_tiles_in_groups_equal_the_loop() {
    let client = hopper!("fused_tiles_in_groups_equal_the_loop");
    for tile in W4a16Tile::ALL {
        let rows = tile.rows_a;
        let sizes = [0, 1, rows - 1, rows, rows + 1, 0, 2 * rows + 3];
        let offsets = offsets(&sizes);
        for (n, k) in [(136, 224), (264, 640)] {
            let (m, count) = (*offsets.last().unwrap(), sizes.len());
            let (a, b) = (Packed::random(m, k, 1), Packed::random(count * n, k, 2));
            let (left, right) = (a.device(&client), b.device(&client));
            let groups = groups(&client, &offsets);
            let plan = Plan::from(W4a16(tile, 8));
            let new = Target::New(FloatKind::F32);
            let (x, y) = (Operand::from(&left), Operand::from(&right));
            let found = multiply(
                &client,
                Gemm::new(x, y).target(new).m_grouped(&groups).plan(plan),
            );
            let found = read(&client, &found.unwrap());
            for g in 0..count {
                let part = offsets[g]..offsets[g + 1];
                if part.is_empty() {
                    continue;
                }
                let (a, b) = (a.rows(part.clone()), b.rows(g * n..(g + 1) * n));
                let expected = alone(&client, GemmBackend::Sm90Wgmma, &a, &b, None, plan);
                let found = &found[part.start * n..part.end * n];
                assert_same(
                    found,
                    &expected,
                    &format!("{tile:?}, n {n}, k {k}: group {g}"),
                );
            }
        }
    }
}

/// MN-major bf16 operands give the bits of K-major ones: groups along K, each followed by zeros up
/// to a multiple of 16, and groups of rows.
#[test]
fn columns_equal_rows_in_groups() {
    let client = client!("columns_equal_rows_in_groups");
    for path in paths(&client) {
        let large = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        for sizes in sizes(large) {
            let (m, n) = if large { (136, 264) } else { (6, 8) };
            let new = Target::New(FloatKind::F32);
            let name = format!("{path:?}, {:?}..", &sizes[..sizes.len().min(8)]);
            let blocks: Vec<usize> = sizes.iter().map(|size| size.div_ceil(16)).collect();
            let columns: Vec<usize> = offsets(&blocks).iter().map(|start| 16 * start).collect();
            let k = *columns.last().unwrap();
            let (_, a, a_columns) = both_ways(&client, m, k, 1);
            let (_, b, b_columns) = both_ways(&client, n, k, 2);
            let depth = |a, b| {
                let (a, b) = (unscaled(a), unscaled(b));
                let groups = groups(&client, &columns);
                let found = multiply(
                    &client,
                    Gemm::new(a, b).target(new).k_grouped(&groups).backend(path),
                );
                read(&client, &found.unwrap())
            };
            let (x, y) = (Elements::Bf16(&a), Elements::Bf16(&b));
            let x_columns = Elements::Bf16MnMajor(&a_columns);
            let y_columns = Elements::Bf16MnMajor(&b_columns);
            let expected = depth(x, y);
            for (a, b) in [(x_columns, y), (x, y_columns), (x_columns, y_columns)] {
                assert_same(&depth(a, b), &expected, &format!("{name}, depth"));
            }

            let rows = offsets(&sizes);
            // K of whole pipeline stages, of a partial one, and a length for which an instruction
            // would multiply rows of the next matrix.
            for k in [128, 48, 40] {
                rows_either_way(&client, &rows, (n, k), path, &format!("{name}, k {k}"));
            }
        }
    }
}

/// Groups of rows with operands in either layout: `a` as one matrix, `b` as a stack of matrices.
fn rows_either_way(
    client: &Client,
    rows: &[usize],
    (n, k): (usize, usize),
    path: GemmBackend,
    name: &str,
) {
    let (m, count) = (*rows.last().unwrap(), rows.len() - 1);
    let (_, a, a_columns) = both_ways(client, m, k, 3);
    let (values, b, _) = both_ways(client, count * n, k, 4);
    let stack: Vec<bf16> = (0..count * k * n)
        .map(|i| values[(i / (k * n) * n + i % n) * k + i / n % k])
        .collect();
    let stack = client.create_from_slice(bytemuck::cast_slice(&stack));
    let stack = Matrix::new(stack, count * k, n, FloatKind::Bf16).unwrap();
    let by_rows = |a, b| {
        let (a, b) = (unscaled(a), unscaled(b));
        let groups = groups(client, rows);
        let request = Gemm::new(a, b)
            .out(FloatKind::F32)
            .m_grouped(&groups)
            .backend(path);
        read(client, &multiply(client, request).unwrap())
    };
    let (x, y) = (Elements::Bf16(&a), Elements::Bf16(&b));
    let x_columns = Elements::Bf16MnMajor(&a_columns);
    let y_columns = Elements::Bf16MnMajor(&stack);
    let expected = by_rows(x, y);
    for (a, b) in [(x_columns, y), (x, y_columns), (x_columns, y_columns)] {
        assert_same(&by_rows(a, b), &expected, name);
    }
}

/// A factor per group, and bf16 operands, with integers that every path sums exactly.
#[test]
fn factors_of_groups_and_bf16_operands() {
    let client = client!("factors_of_groups_and_bf16_operands");
    let (sizes, n, k) = ([3, 0, 20, 9], 16, 64);
    let offsets = offsets(&sizes);
    let m = *offsets.last().unwrap();
    let (a, b) = (Packed::integers(m, k, 1), Packed::integers(4 * n, k, 2));
    let (x, y) = (a.decoded(), b.decoded());
    let amax = [2.0f32, 3.0, 5.0, 7.0];
    let b_amax = client.create_from_slice(bytemuck::cast_slice(&amax));
    let (left, right) = (a.device(&client), b.device(&client));
    let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let half = client.create_from_slice(bytemuck::cast_slice(&half));
    let half = Matrix::new(half, m, k, FloatKind::Bf16).unwrap();
    let groups = groups(&client, &offsets);
    for path in paths(&client) {
        for (elements, own) in [
            (Elements::Quantized(&left), true),
            (Elements::Quantized(&left), false),
            (Elements::Bf16(&half), false),
        ] {
            let a = Operand {
                elements,
                scale: if own {
                    Scale::PerGroup(&b_amax, 2.0)
                } else {
                    Scale::One
                },
            };
            let b = Operand {
                elements: Elements::Quantized(&right),
                scale: Scale::PerGroup(&b_amax, 1536.0),
            };
            let new = Target::New(FloatKind::F32);
            let found = multiply(
                &client,
                Gemm::new(a, b).target(new).m_grouped(&groups).backend(path),
            );
            let found = read(&client, &found.unwrap());
            for (g, amax) in amax.iter().enumerate() {
                for row in offsets[g]..offsets[g + 1] {
                    for col in 0..n {
                        let terms = x[row * k..][..k].iter().zip(&y[(g * n + col) * k..][..k]);
                        let sum: f32 = terms.map(|(x, y)| x * y).sum();
                        let own = if own { amax / 2.0 } else { 1.0 };
                        let expected = sum * (own * (amax / 1536.0));
                        assert_eq!(found[row * n + col], expected, "{path:?}, ({row}, {col})");
                    }
                }
            }
        }
    }
}

/// A GEMM with groups along K takes a factor per stored row of each group, for either operand.
#[test]
fn factors_of_the_rows_of_contractions() {
    let client = client!("factors_of_the_rows_of_contractions");
    let (columns, m, n) = ([0, 16, 16, 64, 96], 24, 16);
    let (k, count) = (96, 4);
    let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
    let (left, right) = (a.device(&client), b.device(&client));
    let maxima = |len: usize, step: usize| -> Vec<f32> {
        (0..len).map(|i| (1 + i * step % 7) as f32).collect()
    };
    let (a_amax, b_amax) = (maxima(count * m, 3), maxima(count * n, 5));
    let upload = |values: &[f32]| client.create_from_slice(bytemuck::cast_slice(values));
    let (a_handle, b_handle) = (upload(&a_amax), upload(&b_amax));
    let groups = groups(&client, &columns);
    for path in paths(&client) {
        let run = |a_scale, b_scale| {
            let [a, b] = [(&left, a_scale), (&right, b_scale)].map(|(packed, scale)| Operand {
                elements: Elements::Quantized(packed),
                scale,
            });
            let new = Target::New(FloatKind::F32);
            let found = multiply(
                &client,
                Gemm::new(a, b).target(new).k_grouped(&groups).backend(path),
            );
            read(&client, &found.unwrap())
        };
        let sums = run(Scale::One, Scale::One);
        let found = run(Scale::PerRow(&a_handle, 2.0), Scale::PerRow(&b_handle, 3.0));
        assert!(sums.iter().any(|sum| *sum != 0.0));
        for (index, (found, sum)) in found.iter().zip(&sums).enumerate() {
            let (row, column) = (index / n, index % n);
            let own = b_amax[row / m * n + column];
            let expected = sum * ((a_amax[row] / 2.0) * (own / 3.0));
            assert_eq!(*found, expected, "{path:?}, ({row}, {column})");
        }
    }
}

/// Every epilogue operation with groups of rows and with groups along K, by both Hopper kernels for
/// groups of rows, with a NaN row and a zero group.
#[test]
fn epilogues_of_groups() {
    let client = client!("epilogues_of_groups");
    let large = Capabilities::of(&client).gemm != GemmBackend::Scalar;
    let (sizes, n) = if large {
        ([100, 0, 129, 31, 5], 136)
    } else {
        ([3, 0, 4, 2, 1], 8)
    };
    let starts = offsets(&sizes);
    let (m, count) = (*starts.last().unwrap(), sizes.len());
    let group_of = |sizes: &[usize]| -> Vec<usize> {
        let groups = sizes.iter().enumerate();
        groups.flat_map(|(g, &size)| vec![g; size]).collect()
    };
    // Every second one: each operation, and each type.
    let (all, some) = (Epilogue::all(), Epilogue::all().into_iter().step_by(2));
    let some: Vec<Epilogue> = some.collect();
    for (path, k) in paths(&client)
        .into_iter()
        .flat_map(|path| [(path, 64), (path, 48)])
    {
        let epilogues = if k == 64 { &all } else { &some };
        let (mut a, b) = (Packed::random(m, k, 1), Packed::random(count * n, k, 2));
        let row = starts[2] + 1;
        a.scales[row * a.blocks + 2] = 0x7f;
        a.codes[starts[3] * a.blocks * 8..starts[4] * a.blocks * 8].fill(0);
        let (left, right) = (a.device(&client), b.device(&client));
        let by_rows = groups(&client, &starts);
        let what = format!("{path:?}, rows, k {k}");
        check_epilogues(
            &client,
            n,
            &group_of(&sizes),
            epilogues,
            &what,
            &|a_scale, b_scale, bias, target| {
                let a = scaled(Elements::Quantized(&left), a_scale);
                let b = scaled(Elements::Quantized(&right), b_scale);
                multiply(
                    &client,
                    Gemm::new(a, b)
                        .bias(bias)
                        .target(target)
                        .m_grouped(&by_rows)
                        .backend(path),
                )
                .unwrap()
            },
        );

        // Groups of one, zero, four and two blocks.
        let columns = groups(&client, &[0, 16, 16, 80, 112]);
        let m = if large { 72 } else { 5 };
        let (a, b) = (Packed::random(m, 112, 3), Packed::random(n, 112, 4));
        let (left, right) = (a.device(&client), b.device(&client));
        // Groups along K support no bias.
        let mut without_bias = some.clone();
        without_bias
            .iter_mut()
            .for_each(|epilogue| epilogue.bias = false);
        let what = format!("{path:?}, depth");
        check_epilogues(
            &client,
            n,
            &group_of(&[m; 4]),
            &without_bias,
            &what,
            &|a_scale, b_scale, _, target| {
                let a = scaled(Elements::Quantized(&left), a_scale);
                let b = scaled(Elements::Quantized(&right), b_scale);
                multiply(
                    &client,
                    Gemm::new(a, b)
                        .target(target)
                        .k_grouped(&columns)
                        .backend(path),
                )
                .unwrap()
            },
        );
    }
}

/// The amax values that grouped GEMMs compute while they write are those of their outputs: of all
/// groups, of each group, and zero for a group without rows.
#[test]
fn maxima_of_groups() {
    let client = client!("maxima_of_groups");
    check_maxima::<f32>(&client);
    check_maxima::<bf16>(&client);
    check_maxima::<f16>(&client);
}

fn check_maxima<T: DeviceElement>(client: &Client) {
    let large = Capabilities::of(client).gemm != GemmBackend::Scalar;
    let (sizes, n) = if large {
        ([0, 100, 1, 0, 200], 264)
    } else {
        ([0, 3, 1, 0, 2], 8)
    };
    let starts = offsets(&sizes);
    let (m, count) = (*starts.last().unwrap(), sizes.len());
    // Returns the magnitude bits of the largest element, or of NaN if there is one.
    let largest = |values: &[T]| {
        values.iter().fold(0.0f32, |largest, value| {
            let value = value.to_f32().abs();
            if value.is_nan() || value > largest {
                value
            } else {
                largest
            }
        })
    };
    for (path, k) in paths(client)
        .into_iter()
        .flat_map(|path| [(path, 64), (path, 48)])
    {
        for poison in [false, true] {
            let (mut a, b) = (Packed::random(m, k, 1), Packed::random(count * n, k, 2));
            if poison {
                a.scales[(starts[2] * a.blocks)..][..a.blocks].fill(0x7f);
            }
            let (left, right) = (a.device(client), b.device(client));
            let (x, y): (Operand, Operand) = (Operand::from(&left), Operand::from(&right));
            let rows = groups(client, &starts);
            let blocks: Vec<usize> = sizes.iter().map(|size| 16 * (size % 3)).collect();
            let columns = groups(client, &offsets(&blocks));
            let k = blocks.iter().sum();
            let (a, b) = (Packed::random(9, k, 3), Packed::random(n, k, 4));
            let (tall, wide) = (a.device(client), b.device(client));
            let (u, v): (Operand, Operand) = (Operand::from(&tall), Operand::from(&wide));
            let depth: Vec<usize> = (0..=count).map(|g| 9 * g).collect();
            let (path, new) = (Some(path), Target::New(T::KIND));
            for of in [OutputAmax::Whole, OutputAmax::PerGroup] {
                let by_rows = multiply_amax(
                    client,
                    Gemm::new(x, y)
                        .target(new)
                        .m_grouped(&rows)
                        .amax(of)
                        .backend(path),
                );
                let by_depth = multiply_amax(
                    client,
                    Gemm::new(u, v)
                        .target(new)
                        .k_grouped(&columns)
                        .amax(of)
                        .backend(path),
                );
                for (found, starts) in [(by_rows.unwrap(), &starts), (by_depth.unwrap(), &depth)] {
                    let values: Vec<T> = read_matrix(client, &found.0);
                    let groups = starts.windows(2);
                    let groups = groups.map(|ends| largest(&values[ends[0] * n..ends[1] * n]));
                    let expected: Vec<f32> = match of {
                        OutputAmax::Whole => vec![largest(&values)],
                        OutputAmax::PerGroup => groups.collect(),
                    };
                    let maxima = read_f32s(client, &found.1, expected.len());
                    let what = format!("{path:?}, {of:?}, {:?}, NaN {poison}", T::KIND);
                    device::assert_floats(&maxima, &expected, &what);
                    assert!(maxima.iter().any(|value| *value != 0.0), "{what}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    /// Groups of any size, of rows and along K: on every path the bits of the groups' separate
    /// GEMMs.
    #[test]
    fn random_groups(
        sizes in prop::collection::vec(0usize..200, 1..12),
        n in 1usize..20,
        blocks in 1usize..24,
        seed: u32,
    ) {
        let Some(client) = device::client("random_groups") else { return Ok(()) };
        let large = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        let (sizes, n, blocks) = match large {
            true => (sizes, 8 * n, blocks),
            false => (sizes.iter().map(|size| size % 5).collect(), n % 5 + 1, blocks % 3 + 1),
        };
        for path in paths(&client) {
            rows_equal_the_loop(&client, path, &sizes, (n, 16 * blocks), seed);
            contractions_equal_the_loop(&client, path, &sizes, (blocks + 3, n), seed);
        }
    }
}

/// Offsets beyond the rows or columns are clamped, and groups that end before they start are empty:
/// no access is outside the buffers. K of 64 and of 48 use different kernels.
#[test]
fn offsets_beyond_the_end() {
    let client = client!("offsets_beyond_the_end");
    let (m, n) = (40, 16);
    for (path, k) in paths(&client)
        .into_iter()
        .flat_map(|path| [(path, 64), (path, 48)])
    {
        let (a, b) = (Packed::random(m, k, 1), Packed::random(64 * n, k, 2));
        let run = |offsets: &[usize]| {
            let b = b.rows(0..(offsets.len() - 1) * n);
            let (left, right) = (a.device(&client), b.device(&client));
            // Memory after the output keeps its contents.
            let held = floats(&client, &vec![0.5; (m + 100) * n], m + 100);
            let target = Matrix::new(held.handle.clone(), m, n, FloatKind::F32).unwrap();
            let (a, b, groups) = (
                Operand::from(&left),
                Operand::from(&right),
                groups(&client, offsets),
            );
            let target = Target::Accumulate(&target);
            multiply(
                &client,
                Gemm::new(a, b)
                    .target(target)
                    .m_grouped(&groups)
                    .backend(path),
            )
            .unwrap();
            read(&client, &held)
        };
        let found = run(&[0, 33, 90, 70]);
        let expected = run(&[0, 33, 40, 40]);
        assert_same(&found, &expected, &format!("{path:?}, k {k}: rows"));
        // Overlapping groups, with more rows of tiles than a schedule has room for: the result is
        // unspecified.
        let descending = (0..65).map(|i| if i % 2 == 0 { 0 } else { 40 });
        let descending: Vec<usize> = descending.collect();
        for found in [found, run(&[0, 40, 10, 70]), run(&descending)] {
            assert!(found[m * n..].iter().all(|value| *value == 0.5));
        }

        let k = 64;
        let (a, b) = (Packed::random(9, k, 3), Packed::random(8, k, 4));
        let (left, right) = (a.device(&client), b.device(&client));
        let run = |offsets: &[usize]| {
            let groups = groups(&client, offsets);
            let (a, b) = (Operand::from(&left), Operand::from(&right));
            let new = Target::New(FloatKind::F32);
            let found = multiply(
                &client,
                Gemm::new(a, b).target(new).k_grouped(&groups).backend(path),
            );
            read(&client, &found.unwrap())
        };
        let what = format!("{path:?}: columns");
        assert_same(&run(&[0, 48, 6400, 3200]), &run(&[0, 48, 64, 64]), &what);
    }
}

#[test]
fn arguments_are_named() {
    let client = client!("arguments_are_named");
    let a = Packed::random(8, 32, 1).device(&client);
    let b = Packed::random(9, 32, 2).device(&client);
    let new = Target::New(FloatKind::F32);
    let two = groups(&client, &[0, 4, 8]);
    let run = |a: &Operand, b: &Operand, groups: &GroupOffsets| {
        multiply(&client, Gemm::new(a, b).target(new).m_grouped(groups))
            .unwrap_err()
            .to_string()
    };
    let error = run(&Operand::from(&a), &Operand::from(&b), &two);
    assert!(error.contains("`b`"), "{error}");
    let short = GroupOffsets {
        count: 4,
        ..two.clone()
    };
    let error = run(&Operand::from(&a), &Operand::from(&a), &short);
    assert!(error.contains("`groups`"), "{error}");
    // A stack of two matrices has as many rows as two groups along K.
    let (_, x, columns) = both_ways(&client, 8, 32, 3);
    let error = run(&Operand::from(&x), &Operand::mn_major(&columns), &two);
    assert!(
        error.contains("`b`") && error.contains("for each group"),
        "{error}"
    );
    let rows = Operand {
        elements: Elements::Quantized(&a),
        scale: Scale::PerRow(&a.scales, 2688.0),
    };
    let error = multiply(&client, Gemm::new(rows, &a).target(new).k_grouped(&two));
    assert!(error.unwrap_err().to_string().contains("`a`"));
}
