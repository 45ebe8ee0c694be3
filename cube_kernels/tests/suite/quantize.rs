//! Compares every quantization policy with the oracle byte for byte: transforms of all sizes,
//! scalings, per-token amax, both scale layouts, groups, on CubeCL's CPU runtime or on a GPU.

use crate::support::device::{DeviceElement, is_brief, offsets, upload, upload_bytes};
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use crate::support::policies::{
    COMPACT, MAE, MSE, NEAREST, PLAIN, Policy, STOCHASTIC, STREAM, SWIZZLED, assert_bytes,
    assert_copies, check, check_per_token, check_policies, check_tiles, col_policies, device_amax,
    expected_copies, floats, host_amax, per_token_policies, policy, quantize_per_token_both, read,
    row_policies, split, transformed,
};
use crate::support::quantize::{
    self, AmaxRequest, TargetSpec,
    proof::{
        DrawLaunch, PackedOutLaunch, QuantOutArgs, QuantPlan, QuantTargetLaunch, RowGroupsLaunch,
        RowPlan,
    },
};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, AmaxGranularity, BlockScaling, Hadamard, HadamardSize, QuantParams, StoredForm, Usage,
    reference::{self, padding, swizzle},
};
use nvfp4_kernels::{
    moe::GroupOffsets,
    proof::{
        block::BlockPlan,
        codec::Conversion,
        hadamard::SignsLaunch,
        philox::{Numbering, PositionLaunch, RandomLaunch},
    },
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const SCALINGS: [BlockScaling; 4] = [BlockScaling::Standard, BlockScaling::Headroom, MAE, MSE];

const SHAPES: [(usize, usize); 6] = [
    (1, 16),
    (3, 48),
    (33, 80),
    (130, 64),
    (257, 144),
    (128, 128),
];

#[test]
fn every_policy_f32() {
    check_policies::<f32>(&client!("every_policy_f32"), &SHAPES[1..4]);
}

#[test]
fn every_policy_bf16() {
    check_policies::<bf16>(&client!("every_policy_bf16"), &SHAPES);
}

#[test]
fn every_policy_f16() {
    check_policies::<f16>(&client!("every_policy_f16"), &SHAPES[2..3]);
}

/// Special values, in every scaling.
fn check_special_values<T: DeviceElement>(client: &Client) {
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        let (rows, cols) = (47, 64);
        let x = convert::<T>(&values(kind, rows * cols, 50 + i as u32));
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            let (shape, one) = ((rows, cols), Groups::One);
            check(client, &x, shape, &[rows], &one, Some(row), Some(col));
        }
    }
}

element_tests! {
    check_special_values: special_values_f32, special_values_bf16, special_values_f16;
}

/// Columnwise tensors of matrices whose rows are not multiples of a word or of a wide load.
#[test]
fn odd_columns() {
    let client = client!("odd_columns");
    for cols in [1, 3, 6, 20, 67] {
        let rows = 37;
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, cols as u32));
        for col in [
            (
                policy(STOCHASTIC, BlockScaling::Standard, SWIZZLED),
                AmaxGranularity::PerTensor,
            ),
            (
                transformed(HadamardSize::H16, NEAREST),
                AmaxGranularity::PerRow,
            ),
        ] {
            check(
                &client,
                &x,
                (rows, cols),
                &[rows],
                &Groups::One,
                None,
                Some(col),
            );
        }
    }
}

/// Groups of any size, empty ones at the start, in the middle and at the end, and 3-D batches; rows
/// of one block, too.
fn check_groups<T: DeviceElement>(client: &Client, cols: usize, cases: &[&[usize]]) {
    for (i, sizes) in cases.iter().enumerate() {
        let rows = sizes.iter().sum::<usize>();
        let x = convert::<T>(&values(Kind::Normal, rows * cols, i as u32));
        let groups = offsets(client, sizes);
        let shape = (rows, cols);
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            check(client, &x, shape, sizes, &groups, Some(row), Some(col));
        }
        let row = Some(row_policies()[0]);
        check(client, &x, shape, sizes, &groups, row, None);
    }
}

const EMPTY_AND_ODD: &[usize] = &[0, 5, 128, 0, 129, 0];

#[test]
fn groups_are_matrices_of_their_own() {
    let client = client!("groups_are_matrices_of_their_own");
    let cases: [&[usize]; 5] = [
        EMPTY_AND_ODD,
        &[64],
        &[1, 1, 1],
        &[0, 0, 0],
        &[16, 32, 48, 64],
    ];
    check_groups::<bf16>(&client, 80, &cases);
    check_groups::<bf16>(&client, 16, &cases[..1]);
    for (count, each) in [(3, 16), (2, 33), (4, 130)] {
        let (rows, cols) = (count * each, 64);
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, each as u32));
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            let (sizes, groups) = (vec![each; count], Groups::Batch(count));
            let shape = (rows, cols);
            check(&client, &x, shape, &sizes, &groups, Some(row), Some(col));
        }
    }
}

#[test]
fn groups_are_matrices_of_their_own_f32() {
    let client = client!("groups_are_matrices_of_their_own_f32");
    check_groups::<f32>(&client, 80, &[EMPTY_AND_ODD]);
    check_groups::<f32>(&client, 16, &[EMPTY_AND_ODD]);
}

/// Groups joined along the stored rows contain the blocks of the consecutive tensors, each at the
/// right position.
#[test]
fn groups_lie_side_by_side() {
    let client = client!("groups_lie_side_by_side");
    let cols = 80;
    for (i, sizes) in [
        vec![0, 5, 128, 0, 129, 0],
        vec![64],
        vec![0, 0, 0],
        vec![16, 32, 48, 33],
    ]
    .iter()
    .enumerate()
    {
        let rows = sizes.iter().sum::<usize>();
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, i as u32));
        let matrix = upload(&client, &x, rows, cols);
        let groups = offsets(&client, sizes);
        let Groups::Offsets { offsets, count } = &groups else {
            unreachable!()
        };
        let ends = GroupOffsets::new(offsets.clone(), *count).unwrap();
        let maxima: Vec<f32> = (0..*count).map(|g| 4.0 + g as f32).collect();
        let amax = upload_bytes(&client, bytemuck::cast_slice(&maxima));
        let copies = [
            policy(STOCHASTIC, BlockScaling::Headroom, COMPACT),
            transformed(HadamardSize::H128, STOCHASTIC),
            policy(NEAREST, MAE, COMPACT),
            transformed(HadamardSize::H16, STOCHASTIC),
        ];
        // Without --full, the CPU runtime compiles one policy without a transform and one with.
        let policies = if is_brief(&client) { 2 } else { copies.len() };
        for copy in copies.into_iter().take(policies) {
            let what = format!("{sizes:?}, {copy:?}");
            let request = |hadamard| {
                quantize::target(
                    &amax,
                    AmaxGranularity::PerTensor,
                    (QuantParams { hadamard, ..copy.0 }, copy.1),
                )
            };
            let (row, col) = (request(None), request(copy.0.hadamard));
            let (expected_row, expected) =
                quantize::quantize_both(&client, &matrix, &groups, &row, &col).unwrap();
            let (found_row, found) =
                quantize::quantize_side_by_side(&client, &matrix, &ends, Some(&row), Some(&col))
                    .unwrap();
            let (found_row, found) = (found_row.unwrap(), found.unwrap());
            let (_, alone) =
                quantize::quantize_side_by_side(&client, &matrix, &ends, None, Some(&col)).unwrap();
            let bytes = |packed: &DeviceQuantized, len: usize| {
                (
                    read(&client, &packed.codes)[..len * 8].to_vec(),
                    read(&client, &packed.scales)[..len].to_vec(),
                )
            };
            let len = rows * cols / 16;
            assert_eq!(bytes(&found_row, len), bytes(&expected_row, len), "{what}");
            let unit = found.unit();
            let total: usize = sizes.iter().map(|size| size.div_ceil(unit)).sum();
            let total = total * unit / 16;
            let (codes, scales) = bytes(&expected, total * cols);
            let pitch = found.blocks();
            assert_eq!(
                pitch * 16,
                padding::padded_bound(rows, *count, unit),
                "{what}"
            );
            for found in [&found, &alone.unwrap()] {
                let (found_codes, found_scales) = bytes(found, pitch * cols);
                let mut start = 0;
                for size in sizes {
                    let blocks = size.div_ceil(unit) * unit / 16;
                    for column in 0..cols {
                        let (to, from) = (column * pitch + start, start * cols + column * blocks);
                        assert_bytes(
                            &found_codes[to * 8..][..blocks * 8],
                            &codes[from * 8..][..blocks * 8],
                            &what,
                        );
                        assert_bytes(
                            &found_scales[to..][..blocks],
                            &scales[from..][..blocks],
                            &what,
                        );
                    }
                    start += blocks;
                }
            }
        }
    }
}

/// The 128x4 tiling restarts at every group: tiling across groups makes no difference for one group
/// of 128 rows and 128 columns.
#[test]
fn swizzle_tiling_restarts_at_groups() {
    let client = client!("swizzle_tiling_restarts_at_groups");
    let (sizes, cols) = ([100, 60], 192);
    let x = values(Kind::Normal, 160 * cols, 1);
    let groups = offsets(&client, &sizes);
    let plain = policy(NEAREST, BlockScaling::Standard, SWIZZLED);
    let amax = device_amax(&client, &[Amax::Tensor(4.0), Amax::Tensor(5.0)]);
    let request = quantize::target(&amax, AmaxGranularity::PerTensor, plain);
    let matrix = upload(&client, &x, 160, cols);
    let found = quantize::quantize(&client, &matrix, &groups, Usage::Rowwise, &request).unwrap();
    let found = read(&client, &found.scales);
    let second = reference::quantize(
        &x[100 * cols..],
        60,
        cols,
        Usage::Rowwise,
        &Amax::Tensor(5.0),
        &PLAIN.0,
        0,
    )
    .unwrap();
    let start = swizzle::padded_len(100, cols / 16);
    for row in 0..60 {
        for block in 0..cols / 16 {
            let place = start + swizzle::offset(row, block, cols / 16);
            assert_eq!(found[place], second.scales()[row * (cols / 16) + block]);
        }
    }
}

/// 16x16 tiles: both quantized tensors, every scaling and layout.
#[test]
fn tiles_of_every_scaling() {
    let client = client!("tiles_of_every_scaling");
    for scaling in SCALINGS {
        for (i, (rows, cols)) in [(1, 16), (47, 64), (130, 144)].into_iter().enumerate() {
            for kind in [Kind::Heavy, Kind::Thresholds, Kind::Nan, Kind::Tiny] {
                let x = convert::<bf16>(&values(kind, rows * cols, i as u32));
                let layouts = [COMPACT, SWIZZLED];
                check_tiles(&client, &x, cols, &[rows], &Groups::One, scaling, layouts);
            }
        }
    }
}

/// Tiles of groups: batches, and any sizes, including empty groups and groups that end within a
/// tile.
#[test]
fn tiles_of_groups() {
    let client = client!("tiles_of_groups");
    let cols = 80;
    for scaling in SCALINGS {
        for layouts in [[COMPACT; 2], [SWIZZLED; 2]] {
            // Layouts do not depend on the scaling: without --full, the CPU runtime compiles tiles
            // with one of them.
            if is_brief(&client) && layouts == [SWIZZLED; 2] && scaling != SCALINGS[0] {
                continue;
            }
            let (count, each) = (3, 48);
            let x = values(Kind::Heavy, count * each * cols, 9);
            let (sizes, batch) = ([each; 3], Groups::Batch(count));
            check_tiles(&client, &x, cols, &sizes, &batch, scaling, layouts);
            let x = convert::<bf16>(&x);
            check_tiles(&client, &x, cols, &sizes, &batch, scaling, layouts);
            for sizes in [EMPTY_AND_ODD, &[0, 0, 0], &[16, 32, 64]] {
                let rows = sizes.iter().sum::<usize>();
                let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, rows as u32));
                let groups = offsets(&client, sizes);
                check_tiles(&client, &x, cols, sizes, &groups, scaling, layouts);
            }
        }
    }
}

/// All amax values that one read can compute.
#[test]
fn maxima_of_rows_columns_and_groups() {
    let client = client!("maxima_of_rows_columns_and_groups");
    for sizes in [vec![77], vec![0, 130, 5, 0]] {
        for kind in [
            Kind::Heavy,
            Kind::Nan,
            Kind::Infinity,
            Kind::Zeros,
            Kind::Tiny,
        ] {
            let (rows, cols) = (sizes.iter().sum::<usize>(), 72);
            let x = convert::<bf16>(&values(kind, rows * cols, 3));
            let matrix = upload(&client, &x, rows, cols);
            let parts = split(&x, &sizes, cols);
            let groups = if sizes.len() == 1 {
                Groups::One
            } else {
                offsets(&client, &sizes)
            };
            // Without --full, the CPU runtime compiles the smallest and the largest transform.
            let is_run = |size: &HadamardSize| {
                !is_brief(&client) || [HadamardSize::H16, HadamardSize::H128].contains(size)
            };
            let transforms = HadamardSize::ALL.into_iter().filter(is_run);
            for size in transforms.map(Some).chain([None]) {
                let hadamard = size.map(|size| Hadamard::seeded_with_size(size, 3));
                for (row_scope, col_scope) in [
                    (AmaxGranularity::PerTensor, AmaxGranularity::PerRow),
                    (AmaxGranularity::PerRow, AmaxGranularity::PerTensor),
                ] {
                    let request = AmaxRequest {
                        rows: Some(row_scope),
                        cols: Some((col_scope, hadamard)),
                    };
                    let found = quantize::amaxes(&client, &matrix, &groups, &request).unwrap();
                    let what = format!("{sizes:?} {kind:?} {size:?} {row_scope:?} {col_scope:?}");
                    for (handle, usage, scope, hadamard) in [
                        (found.rows, Usage::Rowwise, row_scope, None),
                        (found.cols, Usage::Columnwise, col_scope, hadamard),
                    ] {
                        let expected: Vec<f32> =
                            host_amax(&parts, cols, usage, scope, hadamard.as_ref())
                                .into_iter()
                                .flat_map(|amax| amax.values().to_vec())
                                .collect();
                        let found = floats(&read(&client, &handle.unwrap()));
                        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                            let same = found.to_bits() == expected.to_bits();
                            assert!(same, "{what} {usage:?} {i}: {found:e} != {expected:e}");
                        }
                        assert!(found.len() >= expected.len());
                    }
                }
            }
        }
    }
}

/// One amax over rows and one over columns, in one read and alone. Covers strips of 16 rows that
/// end within one, and rows of two-word vectors, of one-word vectors, and without whole words.
fn check_whole_matrices<T: DeviceElement>(client: &Client) {
    let transforms = [None, Some(Hadamard::default()), Some(Hadamard::seeded(5))];
    let whole = Some(AmaxGranularity::PerTensor);
    for (i, (rows, cols)) in [(1, 4), (16, 72), (33, 70), (47, 71), (160, 200), (5, 1)]
        .into_iter()
        .enumerate()
    {
        for kind in ALL_KINDS {
            let x = convert::<T>(&values(kind, rows * cols, i as u32));
            let matrix = upload(client, &x, rows, cols);
            for hadamard in transforms {
                let of_cols = match &hadamard {
                    None => reference::amax(&x),
                    Some(hadamard) => reference::amax_rht(&x, rows, cols, hadamard),
                };
                let along_cols = whole.map(|scope| (scope, hadamard));
                for (rows_scope, cols_scope) in
                    [(whole, along_cols), (whole, None), (None, along_cols)]
                {
                    let request = AmaxRequest {
                        rows: rows_scope,
                        cols: cols_scope,
                    };
                    let found = quantize::amaxes(client, &matrix, &Groups::One, &request).unwrap();
                    let bits = |handle: Option<cubecl::server::Handle>| {
                        handle.map(|handle| floats(&read(client, &handle))[0].to_bits())
                    };
                    let of_rows = rows_scope.map(|_| reference::amax(&x).to_bits());
                    let of_cols = cols_scope.map(|_| of_cols.to_bits());
                    let found = (bits(found.rows), bits(found.cols));
                    let what = format!("{rows}x{cols} {kind:?} {hadamard:?} {request:?}");
                    assert_eq!(found, (of_rows, of_cols), "{what}");
                }
            }
        }
    }
}

element_tests! {
    check_whole_matrices: maxima_of_whole_matrices_f32, maxima_of_whole_matrices,
        maxima_of_whole_matrices_f16;
}

/// Per token in one read: the amax of each row and the quantized tensor. A row of 1024 blocks or
/// more does not stay in registers.
fn check_per_tokens<T: DeviceElement>(client: &Client) {
    for (rows, cols) in [(1, 16), (5, 48), (130, 272), (3, 5 * 1024), (2, 20_000)] {
        for kind in [Kind::Heavy, Kind::Nan, Kind::Zeros] {
            let x = convert::<T>(&values(kind, rows * cols, rows as u32));
            for copy in per_token_policies() {
                check_per_token(client, &x, (rows, cols), &copy);
            }
        }
    }
}

element_tests! {
    check_per_tokens: per_token_in_one_read_f32, per_token_in_one_read,
        per_token_in_one_read_f16;
}

/// Per token along both axes: amax values in one read, quantized tensors in another.
#[test]
fn per_token_of_columns() {
    let client = client!("per_token_of_columns");
    for (cols, sizes) in [(48, vec![33]), (144, vec![0, 130, 16, 0]), (272, vec![300])] {
        let rows: usize = sizes.iter().sum();
        let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, cols as u32));
        let matrix = upload(&client, &x, rows, cols);
        let groups = if sizes.len() == 1 {
            Groups::One
        } else {
            offsets(&client, &sizes)
        };
        let parts = split(&x, &sizes, cols);
        for col in [
            policy(NEAREST, BlockScaling::Standard, COMPACT),
            (
                QuantParams {
                    hadamard: Some(Hadamard::default()),
                    ..policy(STOCHASTIC, BlockScaling::Headroom, SWIZZLED).0
                },
                StoredForm::Tiles,
            ),
            transformed(HadamardSize::H64, STOCHASTIC),
        ] {
            let row = policy(STOCHASTIC, BlockScaling::Standard, COMPACT);
            let expected = |usage, copy: &Policy| {
                let hadamard = copy.0.hadamard.as_ref();
                let amax = host_amax(&parts, cols, usage, AmaxGranularity::PerRow, hadamard);
                expected_copies(&parts, cols, usage, &amax, copy)
            };
            let what = format!("{rows}x{cols} {sizes:?} {col:?}");
            let expected_col = expected(Usage::Columnwise, &col);
            let (row_found, col_found) =
                quantize_per_token_both(&client, &matrix, &groups, row, col);
            let expected_row = expected(Usage::Rowwise, &row);
            assert_copies(&client, &row_found, &expected_row, &format!("{what}: row"));
            assert_copies(&client, &col_found, &expected_col, &format!("{what}: col"));
        }
    }
}

/// The offset in device memory advances, carries into its high word, and wraps.
#[test]
fn device_offsets_advance() {
    let client = client!("device_offsets_advance");
    for (start, step) in [
        (0u64, 1u32),
        (0xffff_ffff, 1),
        (0x1_ffff_fff0, 0x20),
        (u64::MAX, 3),
    ] {
        let words = [start as u32, (start >> 32) as u32];
        let offset = client.create_from_slice(bytemuck::cast_slice(&words));
        quantize::advance_offset(&client, &offset, step).unwrap();
        let expected = start.wrapping_add(step as u64).to_le_bytes();
        assert_bytes(&read(&client, &offset), &expected, "offset");
    }
}

/// The bytes are independent of the number of cubes and units.
#[test]
fn launch_geometry_does_not_matter() {
    let client = client!("launch_geometry_does_not_matter");
    let (rows, cols) = (50, 96);
    let x = values(Kind::Heavy, rows * cols, 77);
    let matrix = upload(&client, &x, rows, cols);
    let host_amax = Amax::Tensor(reference::amax(&x));
    let amax = device_amax(&client, std::slice::from_ref(&host_amax));
    let policy = QuantParams::nvfp4(STOCHASTIC);
    let expected =
        reference::quantize(&x, rows, cols, Usage::Rowwise, &host_amax, &policy, 0).unwrap();
    let request = quantize::target(
        &amax,
        AmaxGranularity::PerTensor,
        QuantParams::nvfp4(NEAREST),
    );
    let key = STREAM.key();
    for (cubes, units) in [(1, 1), (3, 1), (2, 2), (5, 32), (1, 64), (7, 96)] {
        let found =
            quantize::quantize(&client, &matrix, &Groups::One, Usage::Rowwise, &request).unwrap();
        let blocks = found.code_blocks();
        // SAFETY: the buffers hold what the counts say.
        unsafe {
            quantize::proof::quantize_row_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(units),
                Default::default(),
                4,
                BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len() / 4),
                QuantTargetLaunch::new(
                    BufferArg::from_raw_parts(amax.clone(), 1),
                    DrawLaunch::new(
                        BufferArg::from_raw_parts(amax.clone(), 1),
                        RandomLaunch::of(key, STREAM.offset),
                        PositionLaunch::new(0, 0, 0, 0, 0, 0, 0),
                        BufferArg::from_raw_parts(amax.clone(), 1),
                        SignsLaunch::new(0, 0, 0, 0),
                    ),
                    QuantOutArgs::Packed(PackedOutLaunch::new(
                        BufferArg::from_raw_parts(found.codes.clone(), blocks),
                        BufferArg::from_raw_parts(found.scales.clone(), blocks),
                    )),
                ),
                QuantOutArgs::Absent,
                RowGroupsLaunch::new(BufferArg::from_raw_parts(amax.clone(), 1), 1),
                rows,
                cols / 16,
                RowPlan {
                    across: 1,
                    whole_tiles: false,
                    find_groups: false,
                    with_values: false,
                    kind: FloatKind::F32,
                    quant: QuantPlan {
                        policy: BlockPlan {
                            stochastic: true,
                            device_offset: false,
                            numbering: Numbering::Own,
                            scaling: BlockScaling::Standard,
                            conversion: Conversion::Software,
                        },
                        hadamard: None,
                        default_signs: false,
                        swizzled: false,
                        whole_tiles: false,
                        per_row: false,
                        unscaled: false,
                    },
                },
            );
        }
        let what = format!("{cubes} cubes of {units} units");
        assert_copies(&client, &found, std::slice::from_ref(&expected), &what);
    }
}

#[test]
fn bad_requests_are_named() {
    let client = client!("bad_requests_are_named");
    let matrix = Matrix::empty(&client, 6, 32, FloatKind::Bf16);
    let amax = device_amax(&client, &[Amax::Tensor(1.0)]);
    let request = |copy: Policy, scope| quantize::target(&amax, scope, copy);
    let quantize = |groups: Groups, usage, request: TargetSpec| {
        quantize::quantize(&client, &matrix, &groups, usage, &request)
            .unwrap_err()
            .to_string()
    };
    let error = quantize(
        Groups::One,
        Usage::Rowwise,
        request(policy(STOCHASTIC, MAE, COMPACT), AmaxGranularity::PerTensor),
    );
    assert!(
        error.contains("rounding") && error.contains("four over six"),
        "{error}"
    );
    let error = quantize(
        Groups::One,
        Usage::Rowwise,
        request(PLAIN, AmaxGranularity::PerRow),
    );
    assert!(error.contains("amax"), "{error}");
    let error = quantize(
        Groups::Batch(4),
        Usage::Columnwise,
        request(PLAIN, AmaxGranularity::PerTensor),
    );
    assert!(error.contains("groups"), "{error}");
    let error = quantize(
        Groups::One,
        Usage::Rowwise,
        request(
            transformed(HadamardSize::H32, NEAREST),
            AmaxGranularity::PerTensor,
        ),
    );
    assert!(error.contains("hadamard"), "{error}");
}
