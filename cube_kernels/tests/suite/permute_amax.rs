//! Rows of tokens gathered for experts, with amax values from the same pass, compared with a gather
//! and the oracle bit for bit; on CubeCL's CPU runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{
    DeviceElement, assert_floats, is_brief, offsets, read_f32s, read_matrix, upload, upload_bytes,
};
use crate::support::inputs::{Kind, convert, values};
use crate::support::quantize::{AmaxRequest, Amaxes, amaxes};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    AmaxGranularity, Hadamard, HadamardSize,
    reference::{self, Element},
};
use nvfp4_kernels::{
    moe::{moe_permute, moe_permute_with_amaxes},
    tensor::Groups,
};

const WHOLE: AmaxGranularity = AmaxGranularity::PerTensor;
const EACH: AmaxGranularity = AmaxGranularity::PerRow;

/// Returns requests for row and column amax values of both granularities, with transforms of 16
/// rows and more.
fn requests() -> Vec<AmaxRequest> {
    let seeded = |size| Some(Hadamard::seeded_with_size(size, 9));
    let request = |rows, cols| AmaxRequest {
        rows: Some(rows),
        cols,
    };
    vec![
        AmaxRequest::default(),
        request(WHOLE, None),
        request(EACH, None),
        request(WHOLE, Some((WHOLE, Some(Hadamard::default())))),
        request(EACH, Some((EACH, Some(Hadamard::default())))),
        request(EACH, Some((EACH, None))),
        request(WHOLE, Some((WHOLE, seeded(HadamardSize::H64)))),
    ]
}

/// Returns the oracle's amax values of the groups `sizes` of `x`, those of rows for all groups.
fn expected<T: Element>(
    x: &[T],
    (sizes, cols): (&[usize], usize),
    request: &AmaxRequest,
) -> [Option<Vec<f32>>; 2] {
    let mut first = 0;
    let mut found: [Vec<f32>; 2] = [vec![], vec![]];
    for &rows in sizes {
        let group = &x[first * cols..][..rows * cols];
        match request.rows {
            Some(AmaxGranularity::PerTensor) => found[0].push(reference::amax(group)),
            _ => found[0].extend(reference::amax_rows(group, rows, cols)),
        }
        match request.cols {
            None => {}
            Some((AmaxGranularity::PerTensor, Some(hadamard))) => {
                found[1].push(reference::amax_rht(group, rows, cols, &hadamard));
            }
            Some((AmaxGranularity::PerTensor, None)) => found[1].push(reference::amax(group)),
            Some((AmaxGranularity::PerRow, Some(hadamard))) => {
                found[1].extend(reference::amax_rht_cols(group, rows, cols, &hadamard));
            }
            Some((AmaxGranularity::PerRow, None)) => {
                found[1].extend(reference::amax_cols(group, rows, cols));
            }
        }
        first += rows;
    }
    let [rows, cols] = found;
    [request.rows.map(|_| rows), request.cols.map(|_| cols)]
}

/// Groups of any size, empty ones too; rows after the last group; tokens that are sent to no
/// expert, to one and to several; rows without whole vectors, for which a separate pass computes
/// the values.
fn check<T: DeviceElement>(client: &Client) {
    let cases: [(usize, &[usize], usize, usize); 5] = [
        (40, &[0, 5, 128, 0, 29], 0, 80),
        (9, &[16, 33, 7], 9, 16),
        (3, &[1, 1, 1], 2, 144),
        (21, &[40], 0, 28),
        (5, &[0, 0], 3, 32),
    ];
    let kinds = match is_brief(client) {
        true => vec![Kind::Normal],
        false => vec![Kind::Normal, Kind::Nan, Kind::Tiny],
    };
    for (case, (tokens, sizes, rest, cols)) in cases.into_iter().enumerate() {
        for kind in &kinds {
            let x = convert::<T>(&values(*kind, tokens * cols, case as u32));
            let rows: usize = sizes.iter().sum::<usize>() + rest;
            let named = rows - rest;
            // Those of other devices name no row.
            let number = |row: usize| match row < named {
                true => (row * 7 + row / 3) % tokens,
                false => tokens,
            };
            let numbers: Vec<u32> = (0..rows).map(|row| number(row) as u32).collect();
            let there = upload(client, &x, tokens, cols);
            let numbers_there = upload_bytes(client, bytemuck::cast_slice(&numbers));
            let picked = |row: usize| &x[number(row) * cols..][..cols];
            let gathered: Vec<T> = (0..named).flat_map(picked).copied().collect();
            let groups = offsets(client, sizes);
            let all = (&numbers_there, rows);
            let plain = moe_permute(client, &there, &numbers_there, rows).unwrap();
            let plain = read_matrix::<T>(client, &plain);
            for request in requests() {
                let what = format!("{sizes:?} x {cols}, {kind:?}, {request:?}");
                let (out, found) =
                    moe_permute_with_amaxes(client, &there, all, &groups, &request).unwrap();
                let out_here = read_matrix::<T>(client, &out);
                assert_eq!((out.rows, out.cols), (rows, cols), "{what}");
                assert_floats(&out_here[..named * cols], &plain[..named * cols], &what);
                assert_floats(&out_here[..named * cols], &gathered, &what);
                let passed = amaxes(client, &out, &groups, &request).unwrap();
                let expected = expected(&gathered, (sizes, cols), &request);
                for (how, Amaxes { rows, cols }) in [("pass", passed), ("gather", found)] {
                    // There is a buffer for each value that was requested, and no other.
                    let pairs = [(rows, &expected[0]), (cols, &expected[1])];
                    for (handle, expected) in pairs {
                        let Some(expected) = expected else {
                            assert!(how == "pass" || handle.is_none(), "{what}, {how}");
                            continue;
                        };
                        let found = read_f32s(client, &handle.unwrap(), expected.len());
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&found), bits(expected), "{what}, {how}");
                    }
                }
            }
        }
    }
}

element_tests! {
    check: gathered_f32, gathered_bf16, gathered_f16;
}

#[test]
fn bad_arguments_are_named() {
    let client = client!("bad_arguments_are_named");
    let x = upload(&client, &vec![0f32; 4 * 32], 4, 32);
    let numbers = upload_bytes(&client, bytemuck::cast_slice(&[0u32; 6]));
    let request = requests().remove(1);
    let refused = |rows, groups: &Groups| {
        let made = moe_permute_with_amaxes(&client, &x, (&numbers, rows), groups, &request);
        made.unwrap_err().to_string()
    };
    assert!(refused(7, &Groups::One).contains("`numbers`"));
    assert!(refused(5, &Groups::Batch(2)).contains("2"));
}
