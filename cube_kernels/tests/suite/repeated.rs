//! A hundred launches of every kernel give the same bytes: nothing depends on the order of units
//! and cubes.

use crate::support::device;
use crate::support::device::{offsets, upload, upload_bytes};
use crate::support::inputs::{Kind, convert, values};
use crate::support::policies::{
    COMPACT, MAE, NEAREST, PLAIN, Policy, STOCHASTIC, STREAM, SWIZZLED, col_policies,
    per_token_policies, policy, quantize_per_token_both, row_policies, transformed,
};
use crate::support::quantize::{self, AmaxRequest, Prologue, TargetSpec};
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::{AmaxGranularity, BlockScaling, Format, Hadamard, HadamardSize, Usage};
use nvfp4_kernels::{
    moe::{self, GroupOffsets},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const ROWS: usize = 200;
const COLS: usize = 160;
/// Groups that end within tiles, one of them empty; every row belongs to one.
const SIZES: [usize; 4] = [70, 0, 113, 17];
const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];

/// Results: memory, and the number of bytes that are written for any groups.
type Results = Vec<(Handle, usize)>;

fn of_packed(packed: DeviceQuantized) -> Results {
    let (codes, scales) = (packed.code_bytes(), packed.scale_bytes());
    vec![(packed.codes, codes), (packed.scales, scales)]
}

fn of_matrix(matrix: Matrix) -> Results {
    let bytes = matrix.len() * matrix.dtype.size();
    vec![(matrix.handle, bytes)]
}

fn of_two((row, col): (DeviceQuantized, DeviceQuantized)) -> Results {
    of_packed(row).into_iter().chain(of_packed(col)).collect()
}

/// Asserts that `run` gives the same bytes a hundred times.
fn repeat(client: &Client, what: &str, run: impl Fn() -> Results) {
    let read = || -> Vec<Vec<u8>> {
        let results = run().into_iter();
        results
            .map(|(handle, len)| device::read_bytes(client, &handle, len))
            .collect()
    };
    let first = read();
    assert!(
        first
            .iter()
            .any(|bytes| bytes.iter().any(|&byte| byte != 0))
    );
    for launch in 1..100 {
        assert!(read() == first, "{what}, launch {launch}");
    }
}

fn matrix(client: &Client) -> Matrix {
    let x = convert::<bf16>(&values(Kind::Heavy, ROWS * COLS, 8));
    upload(client, &x, ROWS, COLS)
}

/// Returns `count` amax values, as large as that of the data.
fn amax(client: &Client, count: usize) -> Handle {
    upload_bytes(client, bytemuck::cast_slice(&vec![90.0f32; count]))
}

fn request(amax: &Handle, copy: Policy, scope: AmaxGranularity) -> TargetSpec {
    quantize::target(amax, scope, copy)
}

#[test]
fn maxima() {
    let client = client!("maxima");
    let x = matrix(&client);
    for (scope, groups) in [
        (AmaxGranularity::PerTensor, Groups::One),
        (AmaxGranularity::PerRow, Groups::One),
        (AmaxGranularity::PerRow, offsets(&client, &SIZES)),
    ] {
        let request = AmaxRequest {
            rows: Some(scope),
            cols: Some((scope, Some(Hadamard::default()))),
        };
        let [rows, cols] = match scope {
            AmaxGranularity::PerTensor => [groups.count(); 2],
            AmaxGranularity::PerRow => [ROWS, groups.count() * COLS],
        };
        repeat(&client, "maxima", || {
            let found = quantize::amaxes(&client, &x, &groups, &request).unwrap();
            vec![
                (found.rows.unwrap(), rows * 4),
                (found.cols.unwrap(), cols * 4),
            ]
        });
    }
}

#[test]
fn copies_of_every_policy() {
    let client = client!("copies_of_every_policy");
    let x = matrix(&client);
    let amax = amax(&client, ROWS + COLS);
    let one = Groups::One;
    let training = (
        (PLAIN, AmaxGranularity::PerTensor),
        (
            transformed(HadamardSize::H16, STOCHASTIC),
            AmaxGranularity::PerTensor,
        ),
    );
    let pairs = row_policies().into_iter().zip(col_policies());
    for (row, col) in pairs.chain([training]) {
        let [row, col] = [row, col].map(|(copy, scope)| request(&amax, copy, scope));
        repeat(&client, &format!("{row:?} {col:?}"), || {
            of_two(quantize::quantize_both(&client, &x, &one, &row, &col).unwrap())
        });
        repeat(&client, &format!("{row:?}"), || {
            of_packed(quantize::quantize(&client, &x, &one, Usage::Rowwise, &row).unwrap())
        });
    }
}

#[test]
fn tiles() {
    let client = client!("tiles");
    let x = matrix(&client);
    let amax = amax(&client, 1);
    for scaling in [BlockScaling::Standard, MAE] {
        repeat(&client, &format!("tiles {scaling:?}"), || {
            let (one, layouts) = (Groups::One, [COMPACT, SWIZZLED]);
            of_two(
                quantize::quantize_tile_with(&client, &x, &one, &amax, scaling, layouts).unwrap(),
            )
        });
    }
}

#[test]
fn per_token() {
    let client = client!("per_token");
    let x = matrix(&client);
    for copy in per_token_policies() {
        repeat(&client, &format!("per token {copy:?}"), || {
            of_packed(quantize::quantize_per_token(&client, &x, &copy.into()).unwrap())
        });
    }
    let (row, col) = (
        policy(NEAREST, MAE, COMPACT),
        transformed(HadamardSize::H128, STOCHASTIC),
    );
    repeat(&client, "per token, both", || {
        let one = &Groups::One;
        of_two(quantize_per_token_both(&client, &x, one, row, col))
    });
}

#[test]
fn groups() {
    let client = client!("groups");
    let x = matrix(&client);
    let amax = amax(&client, SIZES.len());
    let groups = offsets(&client, &SIZES);
    let row = request(
        &amax,
        policy(NEAREST, MAE, COMPACT),
        AmaxGranularity::PerTensor,
    );
    let col = request(
        &amax,
        transformed(HadamardSize::H16, STOCHASTIC),
        AmaxGranularity::PerTensor,
    );
    // Blocks that the groups use of a columnwise tensor, which has room for the worst split.
    let blocks: usize = SIZES.iter().map(|rows| rows.div_ceil(16)).sum::<usize>() * COLS;
    let written = |(row, col): (DeviceQuantized, DeviceQuantized)| {
        let mut results = of_packed(row);
        results.extend([(col.codes, blocks * 8), (col.scales, blocks)]);
        results
    };
    repeat(&client, "groups", || {
        written(quantize::quantize_both(&client, &x, &groups, &row, &col).unwrap())
    });
    repeat(&client, "tiles of groups", || {
        let (scaling, layouts) = (BlockScaling::Standard, [COMPACT; 2]);
        written(
            quantize::quantize_tile_with(&client, &x, &groups, &amax, scaling, layouts).unwrap(),
        )
    });
}

/// MXFP8 from values and from NVFP4, and dequantization of both.
#[test]
fn mxfp8_and_values() {
    let client = client!("mxfp8_and_values");
    let x = matrix(&client);
    let amax = amax(&client, 1);
    let plain = request(&amax, PLAIN, AmaxGranularity::PerTensor);
    for usage in USAGES {
        repeat(&client, &format!("MXFP8 {usage:?}"), || {
            of_packed(quantize::mx_quantize(&client, &x, usage, Format::Mxfp8).unwrap())
        });
        let mx = quantize::mx_quantize(&client, &x, usage, Format::Mxfp8).unwrap();
        repeat(&client, &format!("MXFP8 {usage:?} to values"), || {
            of_matrix(quantize::dequantize(&client, &mx, FloatKind::Bf16).unwrap())
        });
        let packed = quantize::quantize(&client, &x, &Groups::One, usage, &plain).unwrap();
        repeat(&client, &format!("NVFP4 {usage:?} to values"), || {
            of_matrix(quantize::dequantize(&client, &packed, FloatKind::Bf16).unwrap())
        });
        for to in USAGES {
            repeat(&client, &format!("NVFP4 {usage:?} to MXFP8 {to:?}"), || {
                of_packed(
                    quantize::mx_requantize(&client, &packed, to, Format::Mxfp8, FloatKind::Bf16)
                        .unwrap(),
                )
            });
        }
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 7);
        repeat(&client, &format!("MS-EDEN of NVFP4 {usage:?}"), || {
            let amax = quantize::ms_eden_amax(&client, &packed, usage, &hadamard).unwrap();
            let found =
                quantize::ms_eden(&client, &packed, usage, &amax, &hadamard, STREAM).unwrap();
            [vec![(amax, 4)], of_packed(found)].concat()
        });
    }
}

/// Scales to 128x4 tiles and back, and padding of rows and back: dense and grouped.
#[test]
fn layouts() {
    let client = client!("layouts");
    let x = matrix(&client);
    let Groups::Offsets { offsets, count } = offsets(&client, &SIZES) else {
        unreachable!()
    };
    let groups = GroupOffsets::new(offsets, count).unwrap();
    let tokens = ROWS;
    let blocks = COLS / 16;
    let bytes: Vec<u8> = (0..8192u32).map(|i| (i * 37 + i / 256) as u8).collect();
    let scales = upload_bytes(&client, &bytes);
    let all = |handle: Handle| {
        let len = handle.size_in_used() as usize;
        vec![(handle, len)]
    };
    let plain = || quantize::swizzle_batch(&client, &scales, 2, ROWS / 2, blocks).unwrap();
    let rows = || {
        quantize::swizzle_row_groups(&client, &scales, tokens, blocks, &groups)
            .unwrap()
            .0
    };
    let padded = || moe::pad_groups(&client, &x, &groups, 32).unwrap().0;
    repeat(&client, "swizzle", || all(plain()));
    repeat(&client, "swizzle of groups of rows", || all(rows()));
    repeat(&client, "padding", || of_matrix(padded()));
    let (plain, rows, padded) = (plain(), rows(), padded());
    repeat(&client, "unswizzle", || {
        all(quantize::unswizzle_batch(&client, &plain, 2, ROWS / 2, blocks).unwrap())
    });
    repeat(&client, "unswizzle of groups of rows", || {
        all(quantize::unswizzle_row_groups(&client, &rows, tokens, blocks, &groups).unwrap())
    });
    repeat(&client, "unpadding", || {
        of_matrix(moe::unpad_groups(&client, &padded, ROWS, &groups, 32).unwrap())
    });
}

#[test]
fn prologues() {
    let client = client!("prologues");
    let x = matrix(&client);
    let source = Prologue::SwiGlu(&x);
    repeat(&client, "SwiGLU", || {
        let maxima = AmaxRequest {
            rows: Some(AmaxGranularity::PerTensor),
            cols: Some((AmaxGranularity::PerTensor, Some(Hadamard::default()))),
        };
        let (written, found) =
            quantize::run_prologue_with_amaxes(&client, source, &Groups::One, &maxima).unwrap();
        let maxima = vec![(found.rows.unwrap(), 4), (found.cols.unwrap(), 4)];
        [of_matrix(written), maxima].concat()
    });
}
