//! Cube: launches of the CubeCL kernels.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use nvfp4_kernels::fp8::{self, Fp8Weight};

use super::super::cube::tensors::{Source, launched, new_tensor, result};
use super::super::trace_op;
use super::{Fp8Ops, Fp8Tensors};

impl Fp8Ops for CubeBackend {
    fn nvfp4_fp8_quantize(w: FloatTensor<Self>) -> Fp8Tensors<Self> {
        let w = Source::new(w);
        let (n, k) = w.shape();
        trace_op("quantize", "fp8", n, k);
        let made = launched(fp8::quantize_rows(&w.tensor.client, &w.matrix));
        let tensor = |handle, shape, dtype| new_tensor(&w.tensor, handle, shape, dtype);
        Fp8Tensors {
            codes: tensor(made.codes, Shape::new([n, k / 4]), DType::U32),
            scales: tensor(made.scales, Shape::new([n]), DType::F32),
        }
    }

    fn nvfp4_fp8_linear(x: FloatTensor<Self>, w: Fp8Tensors<Self>) -> FloatTensor<Self> {
        let x = Source::new(x);
        let (rows, k) = x.shape();
        let (codes, scales) = (into_contiguous(w.codes), into_contiguous(w.scales));
        let n = scales.meta.shape()[0];
        trace_op("fp8_linear", "", rows, n);
        let weight = Fp8Weight {
            codes: codes.handle,
            scales: scales.handle,
            n,
            k,
        };
        let dtype = x.matrix.dtype;
        let out = fp8::linear(&x.tensor.client, &x.matrix, &weight, dtype);
        result(&x.tensor, launched(out))
    }
}
