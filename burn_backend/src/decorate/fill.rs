//! Constant tensors in the place of marked parameters and of GEMMs that are not computed.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use burn_core::backend::{cubecl::dtype_to_storage_type, ops::FloatTensorOps};
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, CubeDevice, ops::numeric::full_device_dtype, tensor::CubeTensor};
use cubecl::prelude::InputScalar;

use super::call::lock;

/// A tensor of the shape and type of `tensor` in which every element is `value`.
pub(super) fn filled_like(tensor: &CubeTensor, value: f32) -> CubeTensor {
    filled(tensor, tensor.meta.shape().clone(), tensor.dtype, value)
}

/// A contiguous tensor of `shape` in which every element is `value`, on the device of `like`.
///
/// Tensors of one size share one buffer, which is written once and then only read: the reference
/// here keeps any tensor from being its only owner, so no operation computes in place in it.
fn filled(like: &CubeTensor, shape: Shape, dtype: DType, value: f32) -> CubeTensor {
    type Key = (CubeDevice, DType, usize, u32);
    static BUFFERS: OnceLock<Mutex<HashMap<Key, CubeTensor>>> = OnceLock::new();
    let elements = shape.num_elements();
    let key = (like.device.clone(), dtype, elements, value.to_bits());
    let mut buffers = lock(BUFFERS.get_or_init(Mutex::default));
    let buffer = buffers.entry(key).or_insert_with(|| {
        full_device_dtype(
            like.client.clone(),
            Shape::new([elements]),
            like.device.clone(),
            InputScalar::new(value, dtype_to_storage_type(dtype)),
            dtype,
        )
    });
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        buffer.handle.clone(),
        dtype,
    )
}

/// The placeholder for the result of a GEMM that is not computed: NaN, `shape` being
/// `[..., rows, cols]`. All leading indices read the same matrix.
pub(super) fn placeholder(like: &CubeTensor, shape: &Shape, dtype: DType) -> CubeTensor {
    let rank = shape.num_dims();
    let (rows, cols) = (shape[rank - 2], shape[rank - 1]);
    let matrix = filled(like, Shape::new([rows, cols]), dtype, f32::NAN);
    CubeBackend::float_expand(matrix, shape.clone())
}
