//! quantize, dequantize and matmul, against the oracle.

use burn_core::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_nvfp4::functions::{dequantize, matmul, quantize, quantize_tiles};
use burn_nvfp4::{Hadamard, Nvfp4Tensor, RandomStream, Rounding, Usage};
use nvfp4_formats::{QuantizedTensor, reference};

use crate::support::{Matrix, assert_product, device, gaussian, small_only, values};

/// Asserts that every byte of a packed tensor is the oracle's.
fn assert_same_bytes(what: &str, found: &Nvfp4Tensor, expected: &QuantizedTensor) {
    let layout = found.layout();
    assert_eq!(
        (layout.rows, layout.cols),
        (expected.rows(), expected.cols()),
        "{what}: shape"
    );
    assert_eq!(layout.usage, expected.usage(), "{what}: usage");
    let amax: Vec<f32> = found.amax().clone().into_data().try_to_vec().unwrap();
    assert_eq!(
        amax[0].to_bits(),
        expected.amax().of(0).to_bits(),
        "{what}: amax"
    );
    let scales: Vec<u8> = found.scales().clone().into_data().try_to_vec().unwrap();
    assert_eq!(scales, expected.scales(), "{what}: scales");
    let codes: Vec<u32> = found.codes().clone().into_data().try_to_vec().unwrap();
    let codes: Vec<u8> = codes.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(codes, expected.codes(), "{what}: codes");
}

fn shapes() -> &'static [(usize, usize)] {
    if small_only() {
        &[(17, 32)]
    } else {
        &[(16, 16), (1, 48), (33, 64), (250, 128), (0, 32)]
    }
}

fn dtypes() -> &'static [DType] {
    if small_only() {
        &[DType::BF16]
    } else {
        &[DType::F32, DType::BF16, DType::F16]
    }
}

#[test]
fn quantize_is_the_oracle_byte_for_byte() {
    let device = device();
    let stochastic = Rounding::Stochastic(RandomStream::new(3, 9, 1 << 40 | 5));
    let signs = Hadamard::seeded(4);
    for &(rows, cols) in shapes() {
        for &dtype in dtypes() {
            let matrix = Matrix::gaussian(rows, cols, dtype, (rows * cols) as u64);
            let x = matrix.tensor(&device);
            for rounding in [Rounding::Nearest, stochastic] {
                let what = format!("{rows}x{cols} {dtype:?} {rounding:?}");
                let row = quantize(x.clone(), Usage::Rowwise, rounding, None);
                assert_same_bytes(&format!("{what} row"), &row, &matrix.row(rounding));
                for hadamard in [None, Some(signs)] {
                    let col = quantize(x.clone(), Usage::Columnwise, rounding, hadamard);
                    let expected = matrix.col(rounding, hadamard);
                    assert_same_bytes(&format!("{what} col {hadamard:?}"), &col, &expected);
                }
            }
        }
    }
}

#[test]
fn tiles_are_the_oracle_byte_for_byte() {
    let device = device();
    let shapes: &[(usize, usize)] = if small_only() {
        &[(32, 48)]
    } else {
        &[(16, 16), (64, 48), (256, 128)]
    };
    for &(rows, cols) in shapes {
        for &dtype in dtypes() {
            let matrix = Matrix::gaussian(rows, cols, dtype, 77);
            let (row, col) = quantize_tiles(matrix.tensor(&device));
            let (expected_row, expected_col) = matrix.tiles(nvfp4_formats::BlockScaling::Standard);
            assert_same_bytes("row", &row, &expected_row);
            assert_same_bytes("col", &col, &expected_col);
        }
    }
}

#[test]
fn a_transposed_view_is_quantized_as_what_it_shows() {
    let device = device();
    let matrix = Matrix::gaussian(32, 64, DType::F32, 5);
    let transposed: Vec<f32> = (0..64)
        .flat_map(|c| (0..32).map(move |r| (r, c)))
        .map(|(r, c)| matrix.values[r * 64 + c])
        .collect();
    let expected = Matrix {
        values: transposed,
        rows: 64,
        cols: 32,
        dtype: DType::F32,
    };
    let found = quantize(
        matrix.tensor(&device).transpose(),
        Usage::Rowwise,
        Rounding::Nearest,
        None,
    );
    assert_same_bytes("transposed", &found, &expected.row(Rounding::Nearest));
}

#[test]
fn dequantize_is_the_oracle() {
    let device = device();
    let matrix = Matrix::gaussian(33, 64, DType::F32, 6);
    let row = quantize(
        matrix.tensor(&device),
        Usage::Rowwise,
        Rounding::Nearest,
        None,
    );
    let col = quantize(
        matrix.tensor(&device),
        Usage::Columnwise,
        Rounding::Nearest,
        None,
    );
    let expected_row = reference::dequantize(&matrix.row(Rounding::Nearest));
    let expected_col = reference::dequantize(&matrix.col(Rounding::Nearest, None));
    assert_eq!(
        values(dequantize(row.clone(), FloatDType::F32)),
        expected_row
    );
    assert_eq!(values(dequantize(col, FloatDType::F32)), expected_col);
    let narrow = dequantize(row, FloatDType::BF16);
    assert_eq!(narrow.dtype(), DType::BF16);
    let rounded: Vec<f32> = expected_row
        .iter()
        .map(|value| half::bf16::from_f32(*value).to_f32())
        .collect();
    assert_eq!(values(narrow), rounded);
}

#[test]
fn matmul_is_the_oracle_up_to_the_order_of_its_sum() {
    let device = device();
    let (m, n, k) = if small_only() {
        (17, 32, 32)
    } else {
        (65, 48, 256)
    };
    let (a, b) = (
        Matrix::gaussian(m, k, DType::F32, 7),
        Matrix::gaussian(n, k, DType::F32, 8),
    );
    let bias = gaussian(n, 9);
    let pack = |matrix: &Matrix| {
        quantize(
            matrix.tensor(&device),
            Usage::Rowwise,
            Rounding::Nearest,
            None,
        )
    };
    let bias_tensor = Tensor::<1>::from_data(TensorData::new(bias.clone(), [n]), &device);
    let (packed_a, packed_b) = (a.row(Rounding::Nearest), b.row(Rounding::Nearest));
    for (dtype, float) in [
        (DType::F32, FloatDType::F32),
        (DType::BF16, FloatDType::BF16),
        (DType::F16, FloatDType::F16),
    ] {
        let out = matmul(pack(&a), pack(&b), None, float);
        assert_eq!(out.dtype(), dtype);
        assert_product("plain", &values(out), &packed_a, &packed_b, None, dtype);
        let out = matmul(pack(&a), pack(&b), Some(bias_tensor.clone()), float);
        assert_product(
            "with bias",
            &values(out),
            &packed_a,
            &packed_b,
            Some(&bias),
            dtype,
        );
    }
}
