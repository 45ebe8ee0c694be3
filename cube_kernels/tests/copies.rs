//! Every policy of a copy against the oracle, byte for byte: transforms of all sizes, scalings,
//! per-token maxima, both scale layouts, groups, on CubeCL's CPU runtime or on a GPU.
#![cfg(feature = "cube")]

mod common;
#[path = "common/device.rs"]
mod device;

use common::{ALL_KINDS, Kind, convert, values};
use cubecl::{prelude::*, server::Handle};
use device::{DeviceElement, offsets, upload, upload_bytes};
use half::{bf16, f16};
use nvfp4_kernels::{
    Amax, BlockScaling, CopyPolicy, ErrorNorm, Hadamard, HadamardSize, PackedAxis, PackedTensor,
    RandomStream, Rounding, ScaleLayout,
    cube::{block::BlockPolicy, codec::Conversion, hadamard::SignsLaunch, philox::RandomLaunch},
    device::{AmaxScope, DevicePacked, FloatKind, Groups, Matrix},
    ops::{self, AmaxRequest, CopyRequest, GroupOffsets, kernels::CopyPlan},
    reference::{self, padding, swizzle},
};

const STREAM: RandomStream = RandomStream::new(0x0123_4567_89ab_cdef, 5, 0xffff_ffff);
const NEAREST: Rounding = Rounding::Nearest;
const STOCHASTIC: Rounding = Rounding::Stochastic(STREAM);
const MAE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mae);
const MSE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mse);

fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one(handle.clone()).unwrap().to_vec()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    if let Some(i) = (0..expected.len()).find(|&i| found[i] != expected[i]) {
        panic!(
            "{what}: byte {i} of {}: {:#x} != {:#x}",
            expected.len(),
            found[i],
            expected[i]
        );
    }
}

/// One group of rows, with its maxima on the host.
struct Group<'a, T> {
    x: &'a [T],
    rows: usize,
}

/// The maxima of one axis, for every group, and the same on the device.
fn host_amax<T: DeviceElement>(
    groups: &[Group<'_, T>],
    cols: usize,
    axis: PackedAxis,
    scope: AmaxScope,
    hadamard: Option<&Hadamard>,
) -> Vec<Amax> {
    let amax = |group: &Group<'_, T>| match (scope, axis, hadamard) {
        (AmaxScope::Group, PackedAxis::Rows, Some(hadamard)) => {
            Amax::Tensor(reference::amax_rht(group.x, group.rows, cols, hadamard))
        }
        (AmaxScope::Group, _, _) => Amax::Tensor(reference::amax(group.x)),
        (AmaxScope::Outer, PackedAxis::Cols, _) => {
            Amax::PerOuter(reference::amax_rows(group.x, group.rows, cols))
        }
        (AmaxScope::Outer, PackedAxis::Rows, None) => {
            Amax::PerOuter(reference::amax_cols(group.x, group.rows, cols))
        }
        (AmaxScope::Outer, PackedAxis::Rows, Some(hadamard)) => Amax::PerOuter(
            reference::amax_rht_cols(group.x, group.rows, cols, hadamard),
        ),
    };
    groups.iter().map(amax).collect()
}

fn device_amax(client: &Client, amax: &[Amax]) -> Handle {
    let values: Vec<f32> = amax
        .iter()
        .flat_map(|amax| match amax {
            Amax::Tensor(amax) => vec![*amax],
            Amax::PerOuter(amax) => amax.clone(),
        })
        .collect();
    upload_bytes(client, bytemuck::cast_slice(&values))
}

/// The copy of each group by the oracle; block indices go on from group to group.
fn expected_copies<T: DeviceElement>(
    groups: &[Group<'_, T>],
    cols: usize,
    axis: PackedAxis,
    amax: &[Amax],
    policy: &CopyPolicy,
) -> Vec<PackedTensor> {
    let mut first = 0;
    groups
        .iter()
        .zip(amax)
        .map(|(group, amax)| {
            let packed =
                reference::quantize(group.x, group.rows, cols, axis, amax, policy, first).unwrap();
            first += (packed.codes().len() / 8) as u64;
            packed
        })
        .collect()
}

fn assert_copies(client: &Client, found: &DevicePacked, expected: &[PackedTensor], what: &str) {
    let codes: Vec<u8> = expected
        .iter()
        .flat_map(|packed| packed.codes().to_vec())
        .collect();
    let scales: Vec<u8> = expected
        .iter()
        .flat_map(|packed| packed.scales().to_vec())
        .collect();
    assert_bytes(
        &read(client, &found.scales),
        &scales,
        &format!("{what}: scales"),
    );
    assert_bytes(
        &read(client, &found.codes),
        &codes,
        &format!("{what}: codes"),
    );
}

fn split<'a, T>(x: &'a [T], sizes: &[usize], cols: usize) -> Vec<Group<'a, T>> {
    let mut start = 0;
    sizes
        .iter()
        .map(|&rows| {
            let group = Group {
                x: &x[start * cols..][..rows * cols],
                rows,
            };
            start += rows;
            group
        })
        .collect()
}

/// Two copies of one matrix (or only one), in one read, against the oracle.
fn check<T: DeviceElement>(
    client: &Client,
    x: &[T],
    (rows, cols): (usize, usize),
    sizes: &[usize],
    groups: &Groups,
    row: Option<(CopyPolicy, AmaxScope)>,
    col: Option<(CopyPolicy, AmaxScope)>,
) {
    let what = format!(
        "{rows}x{cols} {:?} groups {sizes:?} row {row:?} col {col:?}",
        T::KIND
    );
    let matrix = upload(client, x, rows, cols);
    let parts = split(x, sizes, cols);
    let prepare = |axis, copy: Option<(CopyPolicy, AmaxScope)>| {
        copy.map(|(policy, scope)| {
            let hadamard = (axis == PackedAxis::Rows)
                .then_some(policy.hadamard)
                .flatten();
            let amax = host_amax(&parts, cols, axis, scope, hadamard.as_ref());
            let handle = device_amax(client, &amax);
            let expected = expected_copies(&parts, cols, axis, &amax, &policy);
            (policy, scope, handle, expected)
        })
    };
    let row = prepare(PackedAxis::Cols, row);
    let col = prepare(PackedAxis::Rows, col);
    fn request(copy: &(CopyPolicy, AmaxScope, Handle, Vec<PackedTensor>)) -> CopyRequest<'_> {
        CopyRequest {
            amax: &copy.2,
            scope: copy.1,
            copy: copy.0.into(),
        }
    }
    let (found_row, found_col) = match (&row, &col) {
        (Some(row), Some(col)) => {
            let (row, col) =
                ops::quantize_both(client, &matrix, groups, &request(row), &request(col)).unwrap();
            (Some(row), Some(col))
        }
        (Some(row), None) => (
            Some(ops::quantize(client, &matrix, groups, PackedAxis::Cols, &request(row)).unwrap()),
            None,
        ),
        (None, Some(col)) => (
            None,
            Some(ops::quantize(client, &matrix, groups, PackedAxis::Rows, &request(col)).unwrap()),
        ),
        (None, None) => unreachable!(),
    };
    for (name, found, copy) in [("row", &found_row, &row), ("col", &found_col, &col)] {
        if let (Some(found), Some(copy)) = (found, copy) {
            assert_copies(client, found, &copy.3, &format!("{what}: {name}"));
        }
    }
}

fn policy(rounding: Rounding, scaling: BlockScaling, layout: ScaleLayout) -> CopyPolicy {
    CopyPolicy {
        scaling,
        layout,
        ..CopyPolicy::new(rounding)
    }
}

fn transformed(size: HadamardSize, rounding: Rounding) -> CopyPolicy {
    CopyPolicy {
        hadamard: Some(Hadamard::seeded_with_size(size, 11)),
        ..CopyPolicy::new(rounding)
    }
}

const COMPACT: ScaleLayout = ScaleLayout::Compact;
const SWIZZLED: ScaleLayout = ScaleLayout::Swizzled128x4;

/// Policies of a row-wise copy.
fn row_policies() -> Vec<(CopyPolicy, AmaxScope)> {
    use AmaxScope::{Group, Outer};
    vec![
        (policy(NEAREST, BlockScaling::Standard, SWIZZLED), Group),
        (policy(STOCHASTIC, BlockScaling::Headroom, COMPACT), Group),
        (policy(NEAREST, MAE, COMPACT), Group),
        (policy(NEAREST, MSE, SWIZZLED), Outer),
        (policy(STOCHASTIC, BlockScaling::Standard, COMPACT), Outer),
        (transformed(HadamardSize::H16, STOCHASTIC), Group),
    ]
}

/// Policies of a column-wise copy.
fn col_policies() -> Vec<(CopyPolicy, AmaxScope)> {
    use AmaxScope::{Group, Outer};
    let swizzled = |copy: CopyPolicy| CopyPolicy {
        layout: SWIZZLED,
        ..copy
    };
    vec![
        (policy(NEAREST, BlockScaling::Standard, SWIZZLED), Group),
        (policy(STOCHASTIC, BlockScaling::Headroom, COMPACT), Outer),
        (policy(NEAREST, MAE, COMPACT), Group),
        (policy(NEAREST, MSE, SWIZZLED), Outer),
        (swizzled(transformed(HadamardSize::H16, STOCHASTIC)), Group),
        (transformed(HadamardSize::H32, NEAREST), Outer),
        (swizzled(transformed(HadamardSize::H64, STOCHASTIC)), Group),
        (transformed(HadamardSize::H128, STOCHASTIC), Group),
    ]
}

const SHAPES: [(usize, usize); 6] = [
    (1, 16),
    (3, 48),
    (33, 80),
    (130, 64),
    (257, 144),
    (128, 128),
];

fn check_policies<T: DeviceElement>(client: &Client, shapes: &[(usize, usize)]) {
    for (i, &(rows, cols)) in shapes.iter().enumerate() {
        let x = convert::<T>(&values(Kind::Heavy, rows * cols, i as u32));
        let one = Groups::One;
        for row in row_policies() {
            check(client, &x, (rows, cols), &[rows], &one, Some(row), None);
        }
        for col in col_policies() {
            check(client, &x, (rows, cols), &[rows], &one, None, Some(col));
        }
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            check(
                client,
                &x,
                (rows, cols),
                &[rows],
                &one,
                Some(row),
                Some(col),
            );
        }
    }
}

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
#[test]
fn special_values() {
    let client = client!("special_values");
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        let (rows, cols) = (47, 64);
        let x = values(kind, rows * cols, 50 + i as u32);
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            let one = Groups::One;
            check(
                &client,
                &x,
                (rows, cols),
                &[rows],
                &one,
                Some(row),
                Some(col),
            );
        }
    }
}

/// Column-wise copies of matrices whose rows are no multiples of a word or of a wide load.
#[test]
fn odd_columns() {
    let client = client!("odd_columns");
    for cols in [1, 3, 6, 20, 67] {
        let rows = 37;
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, cols as u32));
        for col in [
            (
                policy(STOCHASTIC, BlockScaling::Standard, SWIZZLED),
                AmaxScope::Group,
            ),
            (transformed(HadamardSize::H16, NEAREST), AmaxScope::Outer),
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

/// Groups of any sizes, empty ones at the start, in the middle and at the end, and 3-D batches.
#[test]
fn groups_are_matrices_of_their_own() {
    let client = client!("groups_are_matrices_of_their_own");
    let cases: [&[usize]; 5] = [
        &[0, 5, 128, 0, 129, 0],
        &[64],
        &[1, 1, 1],
        &[0, 0, 0],
        &[16, 32, 48, 64],
    ];
    for (i, sizes) in cases.into_iter().enumerate() {
        let (rows, cols) = (sizes.iter().sum::<usize>(), 80);
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, i as u32));
        let groups = offsets(&client, sizes);
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            check(
                &client,
                &x,
                (rows, cols),
                sizes,
                &groups,
                Some(row),
                Some(col),
            );
        }
        check(
            &client,
            &x,
            (rows, cols),
            sizes,
            &groups,
            Some(row_policies()[0]),
            None,
        );
    }
    for (count, each) in [(3, 16), (2, 33), (4, 130)] {
        let (rows, cols) = (count * each, 64);
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, each as u32));
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            let (sizes, groups) = (vec![each; count], Groups::Batch(count));
            check(
                &client,
                &x,
                (rows, cols),
                &sizes,
                &groups,
                Some(row),
                Some(col),
            );
        }
    }
}

/// The 128x4 tiling restarts at every group: tiling across groups is invisible where there is one
/// group of 128 rows and 128 columns.
/// The copies of groups side by side hold the blocks of the copies one after another, each in its
/// place.
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
        for copy in [
            policy(STOCHASTIC, BlockScaling::Headroom, COMPACT),
            policy(NEAREST, MAE, COMPACT),
            transformed(HadamardSize::H16, STOCHASTIC),
            transformed(HadamardSize::H128, STOCHASTIC),
        ] {
            let what = format!("{sizes:?}, {copy:?}");
            let request = |hadamard| CopyRequest {
                amax: &amax,
                scope: AmaxScope::Group,
                copy: CopyPolicy { hadamard, ..copy }.into(),
            };
            let (row, col) = (request(None), request(copy.hadamard));
            let (expected_row, expected) =
                ops::quantize_both(&client, &matrix, &groups, &row, &col).unwrap();
            let (found_row, found) =
                ops::quantize_side_by_side(&client, &matrix, &ends, Some(&row), Some(&col))
                    .unwrap();
            let (found_row, found) = (found_row.unwrap(), found.unwrap());
            let (_, alone) =
                ops::quantize_side_by_side(&client, &matrix, &ends, None, Some(&col)).unwrap();
            let bytes = |packed: &DevicePacked, len: usize| {
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

#[test]
fn swizzle_tiling_restarts_at_groups() {
    let client = client!("swizzle_tiling_restarts_at_groups");
    let (sizes, cols) = ([100, 60], 192);
    let x = values(Kind::Normal, 160 * cols, 1);
    let groups = offsets(&client, &sizes);
    let plain = policy(NEAREST, BlockScaling::Standard, SWIZZLED);
    let amax = device_amax(&client, &[Amax::Tensor(4.0), Amax::Tensor(5.0)]);
    let request = CopyRequest {
        amax: &amax,
        scope: AmaxScope::Group,
        copy: plain.into(),
    };
    let matrix = upload(&client, &x, 160, cols);
    let found = ops::quantize(&client, &matrix, &groups, PackedAxis::Cols, &request).unwrap();
    let found = read(&client, &found.scales);
    let compact = policy(NEAREST, BlockScaling::Standard, COMPACT);
    let second = reference::quantize(
        &x[100 * cols..],
        60,
        cols,
        PackedAxis::Cols,
        &Amax::Tensor(5.0),
        &compact,
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

/// 16x16 tiles: both copies, every scaling and layout, groups.
#[test]
fn tiles_of_every_scaling() {
    let client = client!("tiles_of_every_scaling");
    for scaling in [BlockScaling::Standard, BlockScaling::Headroom, MAE, MSE] {
        for (i, (rows, cols)) in [(1, 16), (47, 64), (130, 144)].into_iter().enumerate() {
            for kind in [Kind::Heavy, Kind::Thresholds, Kind::Nan, Kind::Tiny] {
                let x = convert::<bf16>(&values(kind, rows * cols, i as u32));
                let amax = Amax::Tensor(reference::amax(&x));
                let handle = device_amax(&client, std::slice::from_ref(&amax));
                let matrix = upload(&client, &x, rows, cols);
                let layouts = [COMPACT, SWIZZLED];
                let (row, col) = ops::quantize_tile_with(
                    &client,
                    &matrix,
                    &Groups::One,
                    &handle,
                    scaling,
                    layouts,
                )
                .unwrap();
                let (expected_row, expected_col) =
                    reference::quantize_tile(&x, rows, cols, &amax, scaling, layouts).unwrap();
                let what = format!("{rows}x{cols} {kind:?} {scaling:?}");
                assert_copies(&client, &row, &[expected_row], &format!("{what}: row"));
                assert_copies(&client, &col, &[expected_col], &format!("{what}: col"));
            }
        }
    }
    let (count, each, cols) = (3, 48, 64);
    let x = values(Kind::Heavy, count * each * cols, 9);
    let parts = split(&x, &[each; 3], cols);
    let amax: Vec<Amax> = parts
        .iter()
        .map(|part| Amax::Tensor(reference::amax(part.x)))
        .collect();
    let handle = device_amax(&client, &amax);
    let matrix = upload(&client, &x, count * each, cols);
    let (groups, layouts) = (Groups::Batch(count), [COMPACT; 2]);
    let (row, col) =
        ops::quantize_tile_with(&client, &matrix, &groups, &handle, MAE, layouts).unwrap();
    let expected = |axis: usize| -> Vec<PackedTensor> {
        let parts = parts.iter().zip(&amax);
        parts
            .map(|(part, amax)| {
                let (row, col) =
                    reference::quantize_tile(part.x, each, cols, amax, MAE, layouts).unwrap();
                if axis == 0 { row } else { col }
            })
            .collect()
    };
    assert_copies(&client, &row, &expected(0), "experts: row");
    assert_copies(&client, &col, &expected(1), "experts: col");
}

/// All maxima that one read can give.
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
            let sizes_of_transforms = HadamardSize::ALL.map(Some);
            for size in sizes_of_transforms.into_iter().chain([None]) {
                let hadamard = size.map(|size| Hadamard::seeded_with_size(size, 3));
                for (row_scope, col_scope) in [
                    (AmaxScope::Group, AmaxScope::Outer),
                    (AmaxScope::Outer, AmaxScope::Group),
                ] {
                    let request = AmaxRequest {
                        rows: Some(row_scope),
                        cols: Some((col_scope, hadamard)),
                    };
                    let found = ops::amaxes(&client, &matrix, &groups, &request).unwrap();
                    let what = format!("{sizes:?} {kind:?} {size:?} {row_scope:?} {col_scope:?}");
                    for (handle, axis, scope, hadamard) in [
                        (found.rows, PackedAxis::Cols, row_scope, None),
                        (found.cols, PackedAxis::Rows, col_scope, hadamard),
                    ] {
                        let expected: Vec<f32> =
                            host_amax(&parts, cols, axis, scope, hadamard.as_ref())
                                .into_iter()
                                .flat_map(|amax| match amax {
                                    Amax::Tensor(amax) => vec![amax],
                                    Amax::PerOuter(amax) => amax,
                                })
                                .collect();
                        let found = floats(&read(&client, &handle.unwrap()));
                        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                            let same = found.to_bits() == expected.to_bits();
                            assert!(same, "{what} {axis:?} {i}: {found:e} != {expected:e}");
                        }
                        assert!(found.len() >= expected.len());
                    }
                }
            }
        }
    }
}

/// Per token in one read: the maximum of each row and the copy made with it. A row of 1024 blocks and
/// more does not stay in registers.
#[test]
fn per_token_in_one_read() {
    let client = client!("per_token_in_one_read");
    for (rows, cols) in [(1, 16), (5, 48), (130, 272), (3, 5 * 1024), (2, 20_000)] {
        for kind in [Kind::Heavy, Kind::Nan, Kind::Zeros] {
            let x = convert::<bf16>(&values(kind, rows * cols, rows as u32));
            let matrix = upload(&client, &x, rows, cols);
            let amax = Amax::PerOuter(reference::amax_rows(&x, rows, cols));
            for copy in [
                policy(NEAREST, BlockScaling::Standard, COMPACT),
                policy(STOCHASTIC, BlockScaling::Headroom, SWIZZLED),
                policy(NEAREST, MAE, COMPACT),
            ] {
                let found = ops::quantize_per_token(&client, &matrix, &copy.into()).unwrap();
                let expected =
                    reference::quantize(&x, rows, cols, PackedAxis::Cols, &amax, &copy, 0).unwrap();
                let what = format!("{rows}x{cols} {kind:?} {copy:?}");
                assert_copies(&client, &found, &[expected], &what);
                let Amax::PerOuter(expected) = &amax else {
                    unreachable!()
                };
                let expected: Vec<u8> = bytemuck::cast_slice(expected).to_vec();
                assert_bytes(
                    &read(&client, &found.amax),
                    &expected,
                    &format!("{what}: amax"),
                );
            }
        }
    }
}

/// Per token along both axes: maxima in one read, copies in another; the column-wise copy alone, too.
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
            CopyPolicy {
                rounding: STOCHASTIC,
                hadamard: Some(Hadamard::default()),
                ..policy(NEAREST, BlockScaling::Headroom, SWIZZLED)
            },
            transformed(HadamardSize::H64, STOCHASTIC),
        ] {
            let row = policy(STOCHASTIC, BlockScaling::Standard, COMPACT);
            let expected = |axis, copy: &CopyPolicy| {
                let hadamard = copy.hadamard.as_ref();
                let amax = host_amax(&parts, cols, axis, AmaxScope::Outer, hadamard);
                expected_copies(&parts, cols, axis, &amax, copy)
            };
            let what = format!("{rows}x{cols} {sizes:?} {col:?}");
            let expected_col = expected(PackedAxis::Rows, &col);
            let alone =
                ops::quantize_per_token_cols(&client, &matrix, &groups, &col.into()).unwrap();
            assert_copies(&client, &alone, &expected_col, &format!("{what}: alone"));
            let (row_found, col_found) =
                ops::quantize_per_token_both(&client, &matrix, &groups, &row.into(), &col.into())
                    .unwrap();
            let expected_row = expected(PackedAxis::Cols, &row);
            assert_copies(&client, &row_found, &expected_row, &format!("{what}: row"));
            assert_copies(&client, &col_found, &expected_col, &format!("{what}: col"));
        }
    }
}

/// The shapes of TransformerEngine's quantization tests, with what training asks for: along rows to
/// nearest, down columns transformed and stochastically, in one read.
#[test]
fn shapes_of_transformer_engine() {
    let client = client!("shapes_of_transformer_engine");
    for (rows, cols) in [
        (128, 128),
        (256, 256),
        (256, 272),
        (304, 304),
        (320, 256),
        (1024, 256),
    ] {
        let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, rows as u32));
        let row = policy(NEAREST, BlockScaling::Standard, COMPACT);
        let col = CopyPolicy {
            hadamard: Some(Hadamard::default()),
            ..policy(STOCHASTIC, BlockScaling::Standard, COMPACT)
        };
        let scope = AmaxScope::Group;
        let copies = (Some((row, scope)), Some((col, scope)));
        check(
            &client,
            &x,
            (rows, cols),
            &[rows],
            &Groups::One,
            copies.0,
            copies.1,
        );
    }
}

/// Its largest shapes, on a GPU only: some rows and some columns against the oracle.
#[test]
fn large_shapes_by_samples() {
    let client = client!("large_shapes_by_samples");
    if client.name() != "cuda" {
        println!("SKIPPED: large_shapes_by_samples: for a GPU");
        return;
    }
    for (rows, cols) in [(8192usize, 8192usize), (14336, 16384)] {
        let x: Vec<bf16> = (0..rows * cols)
            .map(|i| {
                let hash = (i as u32).wrapping_mul(0x9E37_79B9) ^ (i as u32 >> 7);
                let hash = hash.wrapping_mul(0x85EB_CA6B);
                // Magnitudes from 2^-15 to 2, both signs.
                bf16::from_bits(((hash >> 16) & 0x8000 | (0x3800 + (hash & 0x7ff))) as u16)
            })
            .collect();
        let matrix = upload(&client, &x, rows, cols);
        let row = policy(STOCHASTIC, BlockScaling::Standard, COMPACT);
        let col = CopyPolicy {
            hadamard: Some(Hadamard::default()),
            ..policy(STOCHASTIC, BlockScaling::Standard, COMPACT)
        };
        let request = AmaxRequest {
            rows: Some(AmaxScope::Group),
            cols: Some((AmaxScope::Group, col.hadamard)),
        };
        let maxima = ops::amaxes(&client, &matrix, &Groups::One, &request).unwrap();
        let (row_amax, col_amax) = (maxima.rows.unwrap(), maxima.cols.unwrap());
        let [row_request, col_request] =
            [(&row_amax, row), (&col_amax, col)].map(|(amax, copy)| CopyRequest {
                amax,
                scope: AmaxScope::Group,
                copy: copy.into(),
            });
        let found =
            ops::quantize_both(&client, &matrix, &Groups::One, &row_request, &col_request).unwrap();
        let amaxes = [&row_amax, &col_amax].map(|amax| floats(&read(&client, amax))[0]);
        assert_eq!(amaxes[0], reference::amax(&x));
        assert_eq!(
            amaxes[1],
            reference::amax_rht(&x, rows, cols, &col.hadamard.unwrap())
        );
        let stored = [&found.0, &found.1]
            .map(|copy| (read(&client, &copy.codes), read(&client, &copy.scales)));
        for sample in 0..64 {
            let (r, c) = (sample * (rows - 1) / 63, sample * (cols - 1) / 63);
            let column: Vec<bf16> = (0..rows).map(|r| x[r * cols + c]).collect();
            let along = (&x[r * cols..][..cols], 1, cols, PackedAxis::Cols, r, &row);
            let down = (column.as_slice(), rows, 1, PackedAxis::Rows, c, &col);
            for (i, (x, rows, cols, axis, line, copy)) in [along, down].into_iter().enumerate() {
                let blocks = rows * cols / 16;
                let first = (line * blocks) as u64;
                let amax = Amax::Tensor(amaxes[i]);
                let expected =
                    reference::quantize(x, rows, cols, axis, &amax, copy, first).unwrap();
                let (codes, scales) = &stored[i];
                let what = format!("{axis:?} line {line}");
                assert_bytes(
                    &codes[line * blocks * 8..][..blocks * 8],
                    expected.codes(),
                    &what,
                );
                assert_bytes(&scales[line * blocks..][..blocks], expected.scales(), &what);
            }
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
        ops::advance_offset(&client, &offset, step).unwrap();
        let expected = start.wrapping_add(step as u64).to_le_bytes();
        assert_bytes(&read(&client, &offset), &expected, "offset");
    }
}

/// The same bytes for any number of cubes and units: nothing depends on the launch.
#[test]
fn launch_geometry_does_not_matter() {
    let client = client!("launch_geometry_does_not_matter");
    let (rows, cols) = (50, 96);
    let x = values(Kind::Heavy, rows * cols, 77);
    let matrix = upload(&client, &x, rows, cols);
    let host_amax = Amax::Tensor(reference::amax(&x));
    let amax = device_amax(&client, std::slice::from_ref(&host_amax));
    let policy = CopyPolicy::new(STOCHASTIC);
    let expected =
        reference::quantize(&x, rows, cols, PackedAxis::Cols, &host_amax, &policy, 0).unwrap();
    let request = CopyRequest {
        amax: &amax,
        scope: AmaxScope::Group,
        copy: CopyPolicy::new(NEAREST).into(),
    };
    let key = STREAM.key();
    for (cubes, units) in [(1, 1), (3, 1), (2, 2), (5, 32), (1, 64), (7, 96)] {
        let found =
            ops::quantize(&client, &matrix, &Groups::One, PackedAxis::Cols, &request).unwrap();
        let blocks = found.code_blocks();
        // SAFETY: the buffers hold what the counts say.
        unsafe {
            ops::kernels::quantize_row_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(units),
                Default::default(),
                4,
                2,
                BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len() / 4),
                BufferArg::from_raw_parts(amax.clone(), 1),
                BufferArg::from_raw_parts(found.codes.clone(), blocks),
                BufferArg::from_raw_parts(found.scales.clone(), blocks),
                BufferArg::from_raw_parts(amax.clone(), 1),
                RandomLaunch::new(
                    key[0],
                    key[1],
                    STREAM.offset as u32,
                    (STREAM.offset >> 32) as u32,
                ),
                SignsLaunch::new(0, 0, 0, 0),
                rows,
                cols / 16,
                1,
                false,
                CopyPlan {
                    policy: BlockPolicy {
                        stochastic: true,
                        device_offset: false,
                        scaling: BlockScaling::Standard,
                        conversion: Conversion::Software,
                    },
                    hadamard: None,
                    default_signs: false,
                    swizzled: false,
                    per_outer: false,
                    decoded: false,
                },
                FloatKind::F32,
            );
        }
        let what = format!("{cubes} cubes of {units} units");
        assert_copies(&client, &found, std::slice::from_ref(&expected), &what);
    }
}

#[test]
fn a_hundred_launches_are_identical() {
    let client = client!("a_hundred_launches_are_identical");
    let (rows, cols) = (200, 160);
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 8));
    let matrix = upload(&client, &x, rows, cols);
    let hadamard = Some(Hadamard::default());
    let run = || {
        let request = AmaxRequest {
            rows: Some(AmaxScope::Group),
            cols: Some((AmaxScope::Group, hadamard)),
        };
        let amax = ops::amaxes(&client, &matrix, &Groups::One, &request).unwrap();
        let (row_amax, col_amax) = (amax.rows.unwrap(), amax.cols.unwrap());
        let request = |amax, copy: CopyPolicy| CopyRequest {
            amax,
            scope: AmaxScope::Group,
            copy: copy.into(),
        };
        let row = request(&row_amax, CopyPolicy::new(NEAREST));
        let transformed = CopyPolicy {
            hadamard,
            ..CopyPolicy::new(STOCHASTIC)
        };
        let col = request(&col_amax, transformed);
        let (row, col) = ops::quantize_both(&client, &matrix, &Groups::One, &row, &col).unwrap();
        [row.codes, row.scales, col.codes, col.scales].map(|handle| read(&client, &handle))
    };
    let first = run();
    for _ in 0..100 {
        assert!(run() == first);
    }
}

#[test]
fn bad_requests_are_named() {
    let client = client!("bad_requests_are_named");
    let matrix = Matrix::empty(&client, 6, 32, FloatKind::Bf16);
    let amax = device_amax(&client, &[Amax::Tensor(1.0)]);
    let request = |copy: CopyPolicy, scope| CopyRequest {
        amax: &amax,
        scope,
        copy: copy.into(),
    };
    let quantize = |groups: Groups, axis, request: CopyRequest<'_>| {
        ops::quantize(&client, &matrix, &groups, axis, &request)
            .unwrap_err()
            .to_string()
    };
    let plain = CopyPolicy::new(NEAREST);
    let error = quantize(
        Groups::One,
        PackedAxis::Cols,
        request(policy(STOCHASTIC, MAE, COMPACT), AmaxScope::Group),
    );
    assert!(
        error.contains("rounding") && error.contains("four over six"),
        "{error}"
    );
    let error = quantize(
        Groups::One,
        PackedAxis::Cols,
        request(plain, AmaxScope::Outer),
    );
    assert!(error.contains("amax"), "{error}");
    let error = quantize(
        Groups::Batch(4),
        PackedAxis::Rows,
        request(plain, AmaxScope::Group),
    );
    assert!(error.contains("groups"), "{error}");
    let error = quantize(
        Groups::One,
        PackedAxis::Cols,
        request(transformed(HadamardSize::H32, NEAREST), AmaxScope::Group),
    );
    assert!(error.contains("hadamard"), "{error}");
}
