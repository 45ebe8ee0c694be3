//! Kernels of the microscaling formats compared with the oracle byte for byte, on CubeCL's CPU
//! runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{DeviceElement, assert_bytes, assert_floats, read_matrix, upload};
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use crate::support::quantize;
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, BlockScaling, Format, Hadamard, Origin, QuantizedTensor, Rounding, Usage, reference,
};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Matrix};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const FORMATS: [Format; 2] = [Format::Mxfp8, Format::Mxfp4];

/// Every format in every usage.
fn cases() -> impl Iterator<Item = (Format, Usage)> {
    FORMATS
        .into_iter()
        .flat_map(|format| USAGES.map(|usage| (format, usage)))
}

fn assert_same(client: &Client, found: &DeviceQuantized, expected: &QuantizedTensor, what: &str) {
    let found = found.to_host(client, Origin::default()).unwrap();
    assert_blocks!(found, expected, what);
}

/// Checks both usages of one matrix in every format, and dequantization.
fn check_matrix<T: DeviceElement>(client: &Client, x: &[T], rows: usize, cols: usize, what: &str) {
    let matrix = upload(client, x, rows, cols);
    for (format, usage) in cases() {
        let what = format!("{what} {rows}x{cols} {:?} {format:?} {usage:?}", T::KIND);
        let expected = reference::mx_quantize(x, rows, cols, usage, format).unwrap();
        let found = quantize::mx_quantize(client, &matrix, usage, format).unwrap();
        assert_same(client, &found, &expected, &what);
        let expected = reference::mx_dequantize(&expected);
        let exact = quantize::dequantize(client, &found, FloatKind::F32).unwrap();
        assert_floats(&read_matrix::<f32>(client, &exact), &expected, &what);
        let rounded = quantize::dequantize(client, &found, T::KIND).unwrap();
        assert_floats(
            &read_matrix::<T>(client, &rounded),
            &convert::<T>(&expected),
            &what,
        );
    }
}

const SHAPES: [(usize, usize); 15] = [
    (32, 32),
    (1, 32),
    (1, 1),
    (3, 7),
    (33, 40),
    (31, 20),
    (128, 64),
    (129, 65),
    (127, 72),
    (160, 136),
    (256, 272),
    (304, 304),
    (320, 256),
    (1000, 96),
    (513, 520),
];

matrix_tests!(check_matrix, SHAPES, (79, 72));

/// Every E2M1 value and every midpoint between two, with their neighbors, in a block whose scale is
/// one.
#[test]
fn every_boundary_of_e2m1() {
    let client = client!("every_boundary_of_e2m1");
    let decode = nvfp4_formats::format::e2m1::decode;
    let mut x = Vec::new();
    for code in 0..7u8 {
        let middle = 0.5 * (decode(code) + decode(code + 1));
        let mut block = vec![6.0f32, -0.0];
        for point in [decode(code), middle] {
            for delta in [-2i32, -1, 0, 1, 2] {
                let bits = (point.to_bits() as i32 + delta).max(0) as u32;
                block.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
        block.resize(32, f32::from_bits(1));
        x.extend(block);
    }
    check_matrix(&client, &x, x.len() / 32, 32, "boundaries");
}

/// Every E4M3 value and every midpoint between two, with their neighbors, in a block whose scale is
/// one: the instruction and its software form must agree on all of them.
#[test]
fn every_element_boundary() {
    let client = client!("every_element_boundary");
    let decode = nvfp4_formats::format::e4m3::decode;
    let mut x = Vec::new();
    for byte in 0..0x7Eu8 {
        let middle = 0.5 * (decode(byte) + decode(byte + 1));
        let mut block = vec![448.0f32, -0.0];
        for point in [decode(byte), middle] {
            for delta in [-2i32, -1, 0, 1, 2] {
                let bits = (point.to_bits() as i32 + delta).max(0) as u32;
                block.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
        block.resize(32, f32::from_bits(1));
        x.extend(block);
    }
    check_matrix(&client, &x, x.len() / 32, 32, "boundaries");
}

/// Block amax values at each power of two times 448 and times 6, and near them, over the whole
/// range of `f32`.
#[test]
fn every_scale_boundary() {
    let client = client!("every_scale_boundary");
    let mut x = Vec::new();
    for exponent in -149..=127 {
        for factor in [1.0, 1.5, 1.75] {
            let value = 2f64.powi(exponent) * factor;
            for delta in [-2i32, -1, 0, 1, 2] {
                let bits = ((value as f32).to_bits() as i32 + delta).max(0) as u32;
                let mut block = [0.3 * f32::from_bits(bits); 32];
                block[17] = -f32::from_bits(bits);
                x.extend(block);
            }
        }
    }
    check_matrix(&client, &x, x.len() / 32, 32, "scales");
}

#[test]
fn empty() {
    let client = client!("empty");
    for (rows, cols) in [(0, 32), (32, 0), (0, 0)] {
        check_matrix::<bf16>(&client, &[], rows, cols, "empty");
    }
}

/// Checks the bytes of an NVFP4 operand dequantized, rounded to `V`, and quantized to every format.
fn check_requantize<V: DeviceElement>(client: &Client, packed: &QuantizedTensor, what: &str) {
    let device = DeviceQuantized::from_host(client, packed);
    let dequantized = convert::<V>(&reference::dequantize(packed));
    for (format, usage) in cases() {
        let what = format!(
            "{what} {}x{} {:?} to {format:?} {usage:?} via {:?}",
            packed.rows(),
            packed.cols(),
            packed.usage(),
            V::KIND
        );
        let expected =
            reference::mx_quantize(&dequantized, packed.rows(), packed.cols(), usage, format)
                .unwrap();
        let found = quantize::mx_requantize(client, &device, usage, format, V::KIND).unwrap();
        assert_same(client, &found, &expected, &what);
        // The separate kernels give the same result.
        let dense = quantize::dequantize(client, &device, V::KIND).unwrap();
        let found = quantize::mx_quantize(client, &dense, usage, format).unwrap();
        assert_same(client, &found, &expected, &what);
    }
}

fn check_requantized(client: &Client, rows: usize, cols: usize, kind: Kind) {
    let x = values(kind, rows * cols, rows as u32);
    let amax = Amax::Tensor(reference::amax(&x));
    let what = format!("{kind:?}");
    // The padding of a transformed tensor's last block is not zero, and does not belong to the
    // matrix.
    let transform = Hadamard::default();
    let packed_col = |hadamard: Option<&Hadamard>| {
        reference::quantize_col(&x, rows, cols, &amax, &Rounding::Nearest, hadamard).unwrap()
    };
    let mut packed = vec![packed_col(None), packed_col(Some(&transform))];
    if cols.is_multiple_of(16) {
        packed.push(reference::quantize_row(&x, rows, cols, &amax, &Rounding::Nearest).unwrap());
        let (row, col) =
            reference::quantize_tile(&x, rows, cols, &amax, BlockScaling::Standard).unwrap();
        packed.extend([row, col]);
    }
    for packed in &packed {
        check_requantize::<bf16>(client, packed, &what);
        check_requantize::<f32>(client, packed, &what);
        check_requantize::<f16>(client, packed, &what);
    }
}

#[test]
fn requantize_shapes() {
    let client = client!("requantize_shapes");
    for (rows, cols) in [
        (16, 16),
        (1, 16),
        (1, 1),
        (33, 48),
        (70, 21),
        (128, 64),
        (129, 80),
        (256, 272),
        (304, 304),
        (0, 32),
    ] {
        check_requantized(&client, rows, cols, Kind::Heavy);
    }
}

#[test]
fn requantize_kinds() {
    let client = client!("requantize_kinds");
    for kind in ALL_KINDS {
        check_requantized(&client, 77, 64, kind);
    }
}

#[test]
fn repeated_launches_agree() {
    let client = client!("repeated_launches_agree");
    let (rows, cols) = (300, 200);
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 5));
    let matrix = upload(&client, &x, rows, cols);
    let expected =
        reference::mx_quantize(&x, rows, cols, Usage::Columnwise, Format::Mxfp8).unwrap();
    for _ in 0..100 {
        let found =
            quantize::mx_quantize(&client, &matrix, Usage::Columnwise, Format::Mxfp8).unwrap();
        assert_same(&client, &found, &expected, "repeated");
    }
}

/// More than 2^31 elements, on a GPU: the last rows equal those of these rows alone.
#[test]
fn more_elements_than_32_bits_index() {
    let client = on_gpu!(
        "more_elements_than_32_bits_index",
        "a GPU's memory is needed"
    );
    let (rows, cols) = (65_536 + 128, 32_768);
    // Zeros, except in the last 128 rows.
    let tail = convert::<bf16>(&values(Kind::Normal, 128 * cols, 1));
    let mut x = vec![bf16::ZERO; rows * cols];
    x[(rows - 128) * cols..].copy_from_slice(&tail);
    let matrix = upload(&client, &x, rows, cols);
    drop(x);
    let small = upload(&client, &tail, 128, cols);
    for (format, usage) in cases() {
        let large = quantize::mx_quantize(&client, &matrix, usage, format).unwrap();
        let large = large.to_host(&client, Origin::default()).unwrap();
        let small = quantize::mx_quantize(&client, &small, usage, format).unwrap();
        let small = small.to_host(&client, Origin::default()).unwrap();
        // Stored rows of the large matrix end in those of the small one; everything else is zero.
        let (outer, length) = match usage {
            Usage::Rowwise => (1, 128 * cols),
            Usage::Columnwise => (cols, 128),
        };
        for (large, small, length) in [
            (
                large.codes(),
                small.codes(),
                length * format.code_bits() / 8,
            ),
            (large.scales(), small.scales(), length / 32),
        ] {
            let rows = large.chunks(large.len() / outer).zip(small.chunks(length));
            for (row, (large, small)) in rows.enumerate() {
                let (zeros, tail) = large.split_at(large.len() - length);
                assert_bytes(tail, small, &format!("{usage:?}, stored row {row}"));
                assert!(
                    zeros.iter().all(|&byte| byte == 0),
                    "{usage:?}, stored row {row}"
                );
            }
        }
    }
}

#[test]
fn errors_name_the_argument() {
    let client = client!("errors_name_the_argument");
    let error = Matrix::new(client.empty(4), 8, 8, FloatKind::Bf16).unwrap_err();
    assert!(error.to_string().contains("handle"));
    let zeros = upload::<f32>(&client, &[0.0; 128], 4, 32);
    let mut packed = quantize::mx_quantize(&client, &zeros, USAGES[0], Format::Mxfp8).unwrap();
    packed.layout.rows = 5;
    let error = quantize::dequantize(&client, &packed, FloatKind::F32).unwrap_err();
    assert!(error.to_string().contains("packed") && error.to_string().contains("160"));
}
