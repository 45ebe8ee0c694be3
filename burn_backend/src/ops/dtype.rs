//! Types of elements.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{DType, FloatDType};

/// The float type of a tensor that is known to hold one of the three supported types.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::BF16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// `tensor` as `dtype`; no operation when it is already.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if float_dtype(tensor.dtype()) == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype)
    }
}
