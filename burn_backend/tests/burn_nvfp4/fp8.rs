//! Layers with FP8 weights: against the oracle, in records, and with invalid arguments.

use burn_core::module::{Module, Param};
use burn_core::store::ModuleRecord;
use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nn::Linear;
use burn_nvfp4::nn::Fp8Linear;
use nvfp4_formats::format::e4m3;
use nvfp4_formats::reference::{self, Fp8Rows};

use crate::support::{Matrix, activation, device, gaussian, values};

const K: usize = 128;
const N: usize = 37;

/// Rows `[N, K]`, including a row of zeros.
fn rows(seed: u64) -> Vec<f32> {
    let mut rows = gaussian(N * K, seed);
    rows[3 * K..4 * K].fill(0.0);
    rows
}

fn layer(seed: u64) -> Fp8Linear {
    let weight = Matrix::new(rows(seed), N, K, DType::F32).tensor(&device());
    Fp8Linear::try_from_weight(weight.transpose()).unwrap()
}

fn parts(layer: &Fp8Linear) -> Fp8Rows {
    let words: Vec<u32> = layer.codes.val().into_data().iter::<u32>().collect();
    Fp8Rows {
        codes: words.into_iter().flat_map(u32::to_le_bytes).collect(),
        scales: values(layer.scales.val()),
    }
}

/// In any memory layout, and in each dtype.
#[test]
fn weights_are_those_of_the_oracle() {
    for dtype in [DType::F32, activation()] {
        let matrix = Matrix::new(rows(1), N, K, dtype);
        let expected = reference::fp8_quantize_rows(&matrix.values, N, K);
        let made = Fp8Linear::try_from_weight(matrix.tensor(&device()).transpose()).unwrap();
        assert_eq!(made.shape(), [N, K]);
        assert_eq!(made.bytes(), N * K + 4 * N);
        assert_eq!(parts(&made), expected, "{dtype:?}");
        let column = |at: usize| matrix.values[at % N * K + at / N];
        let columns = Matrix::new((0..N * K).map(column).collect(), K, N, dtype);
        let linear = Linear {
            weight: Param::from_tensor(columns.tensor(&device())),
            bias: None,
        };
        let made = Fp8Linear::try_from_linear(&linear).unwrap();
        assert_eq!(parts(&made), expected, "{dtype:?}");
    }
}

/// Small M, and more rows than an instruction takes, in each dtype, against sums in `f64`.
#[test]
fn outputs_are_rounded_once() {
    let layer = layer(2);
    let w = parts(&layer);
    for dtype in [DType::F32, activation()] {
        for m in [1, 9, 35] {
            let x = Matrix::gaussian(m, K, dtype, m as u64);
            let y = layer.try_forward(x.tensor(&device())).unwrap();
            assert_eq!((y.dims(), y.dtype()), ([m, N], dtype));
            for (at, found) in values(y).into_iter().enumerate() {
                let (line, row) = (at / N, at % N);
                let codes = w.codes[row * K..][..K].iter();
                let terms = codes.zip(&x.values[line * K..][..K]).map(|(code, x)| {
                    f64::from(e4m3::decode_element(*code) * w.scales[row]) * f64::from(*x)
                });
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, most), term| {
                    (sum + term, most + term.abs())
                });
                let rounding = match dtype {
                    DType::F32 => 0.0,
                    _ => sum.abs() / 256.0,
                };
                let bound = 2.0 * K as f64 * f64::from(f32::EPSILON) * magnitude + rounding;
                let error = (f64::from(found) - sum).abs();
                assert!(
                    error <= bound,
                    "{dtype:?}, {m}: {line}, {row}: {found} {sum}"
                );
            }
        }
    }
}

/// Any number of axes, and zero rows.
#[test]
fn inputs_have_any_axes() {
    let layer = layer(3);
    let x = Matrix::gaussian(6, K, DType::F32, 1).tensor(&device());
    let expected = values(layer.forward(x.clone()));
    let y = layer.forward(x.clone().reshape([2, 3, K]));
    assert_eq!(y.dims(), [2, 3, N]);
    assert_eq!(values(y), expected);
    let none = Tensor::<2>::zeros([0, K], &device());
    assert_eq!(layer.forward(none).dims(), [0, N]);
}

#[test]
fn records_keep_codes_and_scales() {
    let (layer, other) = (layer(4), layer(5));
    assert_ne!(parts(&layer), parts(&other));
    let saved = layer.clone().into_record().into_bytes().unwrap();
    let loaded = other.load_record(ModuleRecord::from_bytes(saved).unwrap());
    assert_eq!(parts(&loaded), parts(&layer));
}

/// The layer's summand gives its input no gradient.
#[test]
fn outputs_are_constants_to_autodiff() {
    let device = device().autodiff();
    let rows = Matrix::new(rows(6), N, K, DType::F32).tensor(&device);
    let weight = rows.transpose().require_grad();
    let layer = Fp8Linear::try_from_weight(weight.clone()).unwrap();
    let x = Matrix::gaussian(2, K, DType::F32, 2)
        .tensor(&device)
        .require_grad();
    let y = layer.forward(x.clone());
    let loss = y.sum() + x.clone().sum() + weight.clone().sum();
    let grads = loss.backward();
    assert_eq!(values(x.grad(&grads).unwrap()), [1.0; 2 * K]);
    assert_eq!(values(weight.grad(&grads).unwrap()), [1.0; N * K]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = device();
    let says = |made: Result<Fp8Linear, _>, what: &str| {
        let error = made
            .map(|_| ())
            .map_err(|error: burn_nvfp4::Nvfp4Error| error.to_string());
        let error = error.unwrap_err();
        assert!(error.contains(what), "{error}");
    };
    let zeros = |shape| Tensor::<2>::zeros(shape, &device);
    says(
        Fp8Linear::try_from_weight(zeros([96, 8])),
        "`weight`: found [96, 8], 8 rows of 96",
    );
    says(
        Fp8Linear::try_from_weight(zeros([64, 0])),
        "`weight`: found [64, 0]",
    );
    let biased = Linear {
        weight: Param::from_tensor(zeros([64, 8])),
        bias: Some(Param::from_tensor(Tensor::zeros([8], &device))),
    };
    says(
        Fp8Linear::try_from_linear(&biased),
        "`linear`: found a bias",
    );
    let codes = |words: usize, dtype| Tensor::<2, Int>::zeros([8, words], (&device, dtype));
    let scales = |len: usize| Tensor::<1>::zeros([len], &device);
    says(
        Fp8Linear::try_from_parts(codes(8, DType::U32), scales(8)),
        "`codes`",
    );
    says(
        Fp8Linear::try_from_parts(codes(16, DType::I32), scales(8)),
        "`codes`: found I32",
    );
    says(
        Fp8Linear::try_from_parts(codes(16, DType::U32), scales(7)),
        "`scales`: found [7]",
    );
    let layer = Fp8Linear::try_from_parts(codes(16, DType::U32), scales(8)).unwrap();
    let error = layer.try_forward(zeros([2, 63])).unwrap_err().to_string();
    assert!(
        error.contains("`x`: found [2, 63], expected a last axis of 64"),
        "{error}"
    );
    let data = TensorData::new(vec![1.0f64; 64], [1, 64]);
    let wide = Tensor::<2>::from_data(data, (&device, DType::F64));
    let error = layer.try_forward(wide).unwrap_err().to_string();
    assert!(error.contains("`x`: found F64"), "{error}");
}
