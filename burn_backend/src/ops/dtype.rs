//! Element dtypes.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{DType, FloatDType};
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::tensor::FloatKind;

/// Returns the float dtype of a tensor that is known to have one of the three supported dtypes.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::BF16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Returns the dtype as the kernels name it.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) fn float_kind(dtype: FloatDType) -> FloatKind {
    match dtype {
        FloatDType::F32 => FloatKind::F32,
        FloatDType::F16 => FloatKind::F16,
        FloatDType::BF16 => FloatKind::Bf16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Casts `tensor` to `dtype`; no operation if it has that dtype.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if float_dtype(tensor.dtype()) == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype)
    }
}
