//! Flex: the oracle's arithmetic.

use burn_core::backend::{Flex, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{DType, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::{Fp8Rows, fp8_linear, fp8_quantize_rows};

use super::super::flex::tensors::{bytes_of, matrix, narrow, with_elements};
use super::super::{float_dtype, trace_op};
use super::{Fp8Ops, Fp8Tensors};

impl Fp8Ops for Flex {
    fn nvfp4_fp8_quantize(w: FloatTensor<Self>) -> Fp8Tensors<Self> {
        let (n, k) = matrix(&w);
        trace_op("quantize", "fp8", n, k);
        let made = with_elements!(w, |values| fp8_quantize_rows(values, n, k));
        let (codes, _) = made.codes.as_chunks();
        let codes: Vec<u32> = codes.iter().map(|it| u32::from_le_bytes(*it)).collect();
        Fp8Tensors {
            codes: FlexTensor::from_data(TensorData::new(codes, [n, k / 4])),
            scales: FlexTensor::from_data(TensorData::new(made.scales, [n])),
        }
    }

    fn nvfp4_fp8_linear(x: FloatTensor<Self>, w: Fp8Tensors<Self>) -> FloatTensor<Self> {
        let ((rows, k), dtype) = (matrix(&x), float_dtype(x.dtype()));
        trace_op("fp8_linear", "", rows, w.scales.shape()[0]);
        let w = Fp8Rows {
            codes: bytes_of(w.codes.to_contiguous().storage()),
            scales: w.scales.to_contiguous().storage::<f32>().to_vec(),
        };
        let n = w.scales.len();
        let y = with_elements!(x, |values| fp8_linear(values, &w, k));
        narrow(FlexTensor::from_data(TensorData::new(y, [rows, n])), dtype)
    }
}
