//! Blackwell's kernels on other devices: every quantization with each `cvt.rn.e2m1x2` and
//! `cvt.rs.e2m1x4` replaced by a software form with the same operands and random word, compared
//! with the oracle byte for byte.
//!
//! On CUDA devices of sm_89 and later this runs the sm_100a code around these instructions. On
//! CubeCL's CPU runtime every kernel uses the software forms anyway, so only `--full` runs these
//! tests there. The tests run in a separate process, because all kernels of a process convert the
//! same way; `NVFP4_TEST_EMULATED=1` runs all other tests this way.

use crate::support::device;
use crate::support::device::{DeviceElement, assert_packed, offsets, read_f32, upload};
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use crate::support::policies::{
    COMPACT, MAE, MSE, STREAM, SWIZZLED, check, check_per_token, check_policies, check_tiles,
    col_policies, per_token_policies, row_policies,
};
use crate::support::process::ran_in_own_process;
use crate::support::quantize::{self, EdenSource, Quantize};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, BlockScaling, Hadamard, HadamardSize, Rounding, Usage,
    reference::{self, EdenParams},
};
use nvfp4_kernels::{
    capabilities::Capabilities,
    proof::codec::Conversion,
    tensor::{DeviceQuantized, Groups},
};

/// Returns the device under test, with emulated instructions if possible, in a separate process.
fn emulated(test: &str) -> Option<Client> {
    // Devices are asked once, for the first client: in the process of its own, which the variable
    // is set in, that is an emulated one.
    let client = device::client_of_full_run(&format!("emulated::{test}"))?;
    if ran_in_own_process("emulated", test, &[("NVFP4_TEST_EMULATED", "1")]) {
        return None;
    }
    let Capabilities {
        conversion,
        compute_capability,
        ..
    } = Capabilities::of(&client);
    let expected = match compute_capability {
        Some(89..) => Conversion::Emulated,
        Some(_) => Conversion::Sm80,
        None => Conversion::Software,
    };
    assert_eq!(*conversion, expected);
    Some(client)
}

/// Returns the client, or returns early.
macro_rules! emulated {
    ($test:expr) => {
        match emulated($test) {
            Some(client) => client,
            None => return,
        }
    };
}

/// Layouts, roundings, scalings, transforms of all sizes, amax of all granularities; each quantized
/// tensor alone, and both.
#[test]
fn every_policy() {
    let client = emulated!("every_policy");
    check_policies::<bf16>(&client, &[(33, 80), (257, 144)]);
    check_policies::<f32>(&client, &[(33, 80)]);
    check_policies::<f16>(&client, &[(33, 80)]);
}

#[test]
fn special_values() {
    let client = emulated!("special_values");
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        let (rows, cols) = (47, 64);
        let x = convert::<bf16>(&values(kind, rows * cols, i as u32));
        for (row, col) in row_policies().into_iter().zip(col_policies()) {
            let (shape, one) = ((rows, cols), Groups::One);
            check(&client, &x, shape, &[rows], &one, Some(row), Some(col));
        }
        for copy in per_token_policies() {
            check_per_token(&client, &x, (rows, cols), &copy);
        }
        check_eden(&client, &x, (rows, cols));
    }
}

#[test]
fn groups() {
    let client = emulated!("groups");
    let (sizes, cols) = ([0, 5, 128, 0, 129, 0], 80);
    let rows = sizes.iter().sum::<usize>();
    let x = convert::<bf16>(&values(Kind::Normal, rows * cols, 3));
    let groups = offsets(&client, &sizes);
    for (row, col) in row_policies().into_iter().zip(col_policies()) {
        let shape = (rows, cols);
        check(&client, &x, shape, &sizes, &groups, Some(row), Some(col));
    }
    check_tiles(&client, &x, cols, &sizes, &groups, MAE, [SWIZZLED; 2]);
}

#[test]
fn tiles() {
    let client = emulated!("tiles");
    for scaling in [BlockScaling::Standard, BlockScaling::Headroom, MAE, MSE] {
        for kind in [Kind::Heavy, Kind::Thresholds, Kind::Nan, Kind::Tiny] {
            let (rows, cols) = (130, 144);
            let x = convert::<bf16>(&values(kind, rows * cols, 2));
            let layouts = [COMPACT, SWIZZLED];
            check_tiles(&client, &x, cols, &[rows], &Groups::One, scaling, layouts);
        }
    }
}

#[test]
fn per_token() {
    let client = emulated!("per_token");
    for (rows, cols) in [(5, 48), (130, 272), (2, 20_000)] {
        let x = values(Kind::Heavy, rows * cols, rows as u32);
        for copy in per_token_policies() {
            check_per_token(&client, &convert::<bf16>(&x), (rows, cols), &copy);
            check_per_token(&client, &x, (rows, cols), &copy);
        }
    }
}

#[test]
fn ms_eden() {
    let client = emulated!("ms_eden");
    for shape in [(128, 128), (129, 65), (304, 304)] {
        let x = values(Kind::Heavy, shape.0 * shape.1, 6);
        check_eden(&client, &convert::<bf16>(&x), shape);
        check_eden(&client, &x, shape);
    }
}

/// Checks MS-EDEN of a matrix along both axes, and of its packed form.
fn check_eden<T: DeviceElement>(client: &Client, x: &[T], (rows, cols): (usize, usize)) {
    let matrix = upload(client, x, rows, cols);
    eden(client, &matrix.request(), x, (rows, cols));
    let amax = Amax::Tensor(reference::amax(x));
    let nearest = Rounding::Nearest;
    let packed = reference::quantize_col(x, rows, cols, &amax, &nearest, None).unwrap();
    let device = DeviceQuantized::from_host(client, &packed);
    let dequantized = reference::dequantize(&packed);
    eden(client, &device.request(), &dequantized, (rows, cols));
}

fn eden<T: reference::Element>(
    client: &Client,
    source: &Quantize<'_>,
    x: &[T],
    (rows, cols): (usize, usize),
) {
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 7);
    for usage in [Usage::Rowwise, Usage::Columnwise] {
        let found = quantize::ms_eden_amax(client, source, usage, &hadamard).unwrap();
        let amax = read_f32(client, &found);
        let expected = reference::ms_eden(
            x,
            rows,
            cols,
            usage,
            amax,
            &EdenParams {
                hadamard,
                stream: STREAM,
            },
        )
        .unwrap();
        let found = quantize::ms_eden(client, source, usage, &found, &hadamard, STREAM).unwrap();
        assert_packed(
            client,
            &found,
            &expected,
            &format!("{rows}x{cols} {usage:?}"),
        );
    }
}
