//! Quantized matrices and groups of rows, on the device and by the oracle.

use super::quantize::{self, AmaxRequest, TargetSpec};
use super::{
    device::{DeviceElement, upload, upload_bytes},
    inputs::{Kind, convert, values},
};
use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::{
    Amax, AmaxGranularity, BlockScaling, ErrorNorm, Hadamard, HadamardSize, QuantParams,
    QuantizedTensor, RandomStream, Rounding, StoredForm, Usage, reference,
};
use nvfp4_kernels::tensor::{DeviceQuantized, Groups, Matrix};

/// Parameters of a tensor, and the form in which it is stored.
pub type Policy = (QuantParams, StoredForm);

pub const STREAM: RandomStream = RandomStream::new(0x0123_4567_89ab_cdef, 5, 0xffff_ffff);
pub const NEAREST: Rounding = Rounding::Nearest;
pub const STOCHASTIC: Rounding = Rounding::Stochastic(STREAM);
pub const MAE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mae);
pub const MSE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mse);

pub fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one(handle.clone()).unwrap().to_vec()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

pub fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    if let Some(i) = (0..expected.len()).find(|&i| found[i] != expected[i]) {
        panic!(
            "{what}: byte {i} of {}: {:#x} != {:#x}",
            expected.len(),
            found[i],
            expected[i]
        );
    }
}

/// One group of rows, with its amax values on the host.
pub struct Group<'a, T> {
    pub x: &'a [T],
    pub rows: usize,
}

/// Returns the amax values of one axis for every group, on the host and on the device.
pub fn host_amax<T: DeviceElement>(
    groups: &[Group<'_, T>],
    cols: usize,
    usage: Usage,
    scope: AmaxGranularity,
    hadamard: Option<&Hadamard>,
) -> Vec<Amax> {
    let amax = |group: &Group<'_, T>| match (scope, usage, hadamard) {
        (AmaxGranularity::PerTensor, Usage::Columnwise, Some(hadamard)) => {
            Amax::Tensor(reference::amax_rht(group.x, group.rows, cols, hadamard))
        }
        (AmaxGranularity::PerTensor, _, _) => Amax::Tensor(reference::amax(group.x)),
        (AmaxGranularity::PerRow, Usage::Rowwise, _) => {
            Amax::PerRow(reference::amax_rows(group.x, group.rows, cols))
        }
        (AmaxGranularity::PerRow, Usage::Columnwise, None) => {
            Amax::PerRow(reference::amax_cols(group.x, group.rows, cols))
        }
        (AmaxGranularity::PerRow, Usage::Columnwise, Some(hadamard)) => Amax::PerRow(
            reference::amax_rht_cols(group.x, group.rows, cols, hadamard),
        ),
    };
    groups.iter().map(amax).collect()
}

pub fn device_amax(client: &Client, amax: &[Amax]) -> Handle {
    let values: Vec<f32> = amax
        .iter()
        .flat_map(|amax| amax.values().to_vec())
        .collect();
    upload_bytes(client, bytemuck::cast_slice(&values))
}

/// Quantizes each group by the oracle; block indices continue from group to group.
pub fn expected_copies<T: DeviceElement>(
    groups: &[Group<'_, T>],
    cols: usize,
    usage: Usage,
    amax: &[Amax],
    (params, form): &Policy,
) -> Vec<QuantizedTensor> {
    let mut first = 0;
    groups
        .iter()
        .zip(amax)
        .map(|(group, amax)| {
            let packed =
                reference::quantize(group.x, group.rows, cols, usage, amax, params, first).unwrap();
            first += (packed.codes().len() / 8) as u64;
            packed.in_form(*form)
        })
        .collect()
}

pub fn assert_copies(
    client: &Client,
    found: &DeviceQuantized,
    expected: &[QuantizedTensor],
    what: &str,
) {
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

pub fn split<'a, T>(x: &'a [T], sizes: &[usize], cols: usize) -> Vec<Group<'a, T>> {
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

/// Checks two quantized tensors of one matrix (or only one), made in one read, against the oracle.
pub fn check<T: DeviceElement>(
    client: &Client,
    x: &[T],
    (rows, cols): (usize, usize),
    sizes: &[usize],
    groups: &Groups,
    row: Option<(Policy, AmaxGranularity)>,
    col: Option<(Policy, AmaxGranularity)>,
) {
    let what = format!(
        "{rows}x{cols} {:?} groups {sizes:?} row {row:?} col {col:?}",
        T::KIND
    );
    let matrix = upload(client, x, rows, cols);
    let parts = split(x, sizes, cols);
    let prepare = |usage, copy: Option<(Policy, AmaxGranularity)>| {
        copy.map(|(policy, scope)| {
            let hadamard = (usage == Usage::Columnwise)
                .then_some(policy.0.hadamard)
                .flatten();
            let amax = host_amax(&parts, cols, usage, scope, hadamard.as_ref());
            let handle = device_amax(client, &amax);
            let expected = expected_copies(&parts, cols, usage, &amax, &policy);
            (policy, scope, handle, expected)
        })
    };
    let row = prepare(Usage::Rowwise, row);
    let col = prepare(Usage::Columnwise, col);
    fn request(copy: &(Policy, AmaxGranularity, Handle, Vec<QuantizedTensor>)) -> TargetSpec {
        quantize::target(&copy.2, copy.1, copy.0)
    }
    let (found_row, found_col) = match (&row, &col) {
        (Some(row), Some(col)) => {
            let (row, col) =
                quantize::quantize_both(client, &matrix, groups, &request(row), &request(col))
                    .unwrap();
            (Some(row), Some(col))
        }
        (Some(row), None) => (
            Some(
                quantize::quantize(client, &matrix, groups, Usage::Rowwise, &request(row)).unwrap(),
            ),
            None,
        ),
        (None, Some(col)) => (
            None,
            Some(
                quantize::quantize(client, &matrix, groups, Usage::Columnwise, &request(col))
                    .unwrap(),
            ),
        ),
        (None, None) => unreachable!(),
    };
    for (name, found, copy) in [("row", &found_row, &row), ("col", &found_col, &col)] {
        if let (Some(found), Some(copy)) = (found, copy) {
            assert_copies(client, found, &copy.3, &format!("{what}: {name}"));
        }
    }
}

pub fn policy(rounding: Rounding, scaling: BlockScaling, layout: StoredForm) -> Policy {
    let params = QuantParams {
        scaling,
        ..QuantParams::nvfp4(rounding)
    };
    (params, layout)
}

pub fn transformed(size: HadamardSize, rounding: Rounding) -> Policy {
    let params = QuantParams {
        hadamard: Some(Hadamard::seeded_with_size(size, 11)),
        ..QuantParams::nvfp4(rounding)
    };
    (params, StoredForm::Rows)
}

/// Rounding to nearest, with standard scales in rows.
pub const PLAIN: Policy = (QuantParams::nvfp4(NEAREST), StoredForm::Rows);

pub const COMPACT: StoredForm = StoredForm::Rows;
pub const SWIZZLED: StoredForm = StoredForm::Tiles;

/// Returns the policies of a rowwise tensor.
pub fn row_policies() -> Vec<(Policy, AmaxGranularity)> {
    use AmaxGranularity::{PerRow, PerTensor};
    vec![
        (policy(NEAREST, BlockScaling::Standard, SWIZZLED), PerTensor),
        (
            policy(STOCHASTIC, BlockScaling::Headroom, COMPACT),
            PerTensor,
        ),
        (policy(NEAREST, MAE, COMPACT), PerTensor),
        (policy(NEAREST, MSE, SWIZZLED), PerRow),
        (policy(STOCHASTIC, BlockScaling::Standard, COMPACT), PerRow),
        (transformed(HadamardSize::H16, STOCHASTIC), PerTensor),
    ]
}

/// Returns the policies of a columnwise tensor.
pub fn col_policies() -> Vec<(Policy, AmaxGranularity)> {
    use AmaxGranularity::{PerRow, PerTensor};
    let swizzled = |(params, _): Policy| (params, StoredForm::Tiles);
    vec![
        (policy(NEAREST, BlockScaling::Standard, SWIZZLED), PerTensor),
        (policy(STOCHASTIC, BlockScaling::Headroom, COMPACT), PerRow),
        (policy(NEAREST, MAE, COMPACT), PerTensor),
        (policy(NEAREST, MSE, SWIZZLED), PerRow),
        (
            swizzled(transformed(HadamardSize::H16, STOCHASTIC)),
            PerTensor,
        ),
        (transformed(HadamardSize::H32, NEAREST), PerRow),
        (
            swizzled(transformed(HadamardSize::H64, STOCHASTIC)),
            PerTensor,
        ),
        (transformed(HadamardSize::H128, STOCHASTIC), PerTensor),
    ]
}

/// Checks every policy of either tensor, and of both, at `shapes`.
pub fn check_policies<T: DeviceElement>(client: &Client, shapes: &[(usize, usize)]) {
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

/// Checks both quantized tensors of each group in 16x16 tiles against the oracle.
pub fn check_tiles<T: DeviceElement>(
    client: &Client,
    x: &[T],
    cols: usize,
    sizes: &[usize],
    groups: &Groups,
    scaling: BlockScaling,
    layouts: [StoredForm; 2],
) {
    let parts = split(x, sizes, cols);
    let amax = host_amax(
        &parts,
        cols,
        Usage::Rowwise,
        AmaxGranularity::PerTensor,
        None,
    );
    let handle = device_amax(client, &amax);
    let matrix = upload(client, x, sizes.iter().sum(), cols);
    let (row, col) =
        quantize::quantize_tile_with(client, &matrix, groups, &handle, scaling, layouts).unwrap();
    let (rows, columns): (Vec<_>, Vec<_>) = (parts.iter().zip(&amax))
        .map(|(part, amax)| {
            let (row, col) =
                reference::quantize_tile(part.x, part.rows, cols, amax, scaling).unwrap();
            (row.in_form(layouts[0]), col.in_form(layouts[1]))
        })
        .unzip();
    let what = format!(
        "tiles of {sizes:?} x {cols} {:?} {scaling:?} {layouts:?}",
        T::KIND
    );
    assert_copies(client, &row, &rows, &format!("{what}: row"));
    assert_copies(client, &col, &columns, &format!("{what}: col"));
    // Only one of the two tensors.
    let axes = [Usage::Rowwise, Usage::Columnwise];
    for ((usage, layout), expected) in axes.into_iter().zip(layouts).zip([&rows, &columns]) {
        let alone =
            quantize::quantize_tile_copy(client, &matrix, groups, usage, &handle, scaling, layout);
        assert_copies(
            client,
            &alone.unwrap(),
            expected,
            &format!("{what}: {usage:?} alone"),
        );
    }
}

/// Checks the rowwise tensor with one amax per row, and the amax values, both from one read.
pub fn check_per_token<T: DeviceElement>(
    client: &Client,
    x: &[T],
    (rows, cols): (usize, usize),
    copy: &Policy,
) {
    let matrix = upload(client, x, rows, cols);
    let maxima = reference::amax_rows(x, rows, cols);
    let amax = Amax::PerRow(maxima.clone());
    let found = quantize::quantize_per_token(client, &matrix, &(*copy).into()).unwrap();
    let part = Group { x, rows };
    let expected = expected_copies(&[part], cols, Usage::Rowwise, &[amax], copy);
    let what = format!("per token {rows}x{cols} {:?} {copy:?}", T::KIND);
    assert_copies(client, &found, &expected, &what);
    let bytes = bytemuck::cast_slice(&maxima);
    assert_bytes(&read(client, &found.amax), bytes, &format!("{what}: amax"));
}

/// Quantizes `x` rowwise and columnwise, with one amax per row, and per column of each group.
pub fn quantize_per_token_both(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: impl Into<TargetSpec>,
    col: impl Into<TargetSpec>,
) -> (DeviceQuantized, DeviceQuantized) {
    let (row, col) = (row.into(), col.into());
    let scope = AmaxGranularity::PerRow;
    let request = AmaxRequest {
        rows: Some(scope),
        cols: Some((scope, col.params.hadamard)),
    };
    let found = quantize::amaxes(client, x, groups, &request).unwrap();
    let [rows, cols] = [found.rows, found.cols].map(Option::unwrap);
    let [row, col] =
        [(&rows, row), (&cols, col)].map(|(amax, copy)| quantize::target(amax, scope, copy));
    quantize::quantize_both(client, x, groups, &row, &col).unwrap()
}

/// Returns the policies of a per-token tensor.
pub fn per_token_policies() -> [Policy; 3] {
    [
        policy(NEAREST, BlockScaling::Standard, COMPACT),
        policy(STOCHASTIC, BlockScaling::Headroom, SWIZZLED),
        policy(NEAREST, MAE, COMPACT),
    ]
}
