//! Constant tensors that stand for marked parameters and for GEMMs that are not computed.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use burn_core::backend::{
    cubecl::dtype_to_storage_type,
    ops::{FloatTensorOps, IntTensorOps},
};
use burn_core::tensor::{DType, Shape, TensorData};
use burn_cubecl::{CubeBackend, CubeDevice, ops::numeric::full_device_dtype, tensor::CubeTensor};
use cubecl::prelude::InputScalar;

use super::call::lock;

/// Returns a tensor of the shape and dtype of `tensor` in which every element is `value`.
pub(super) fn filled_like(tensor: &CubeTensor, value: f32) -> CubeTensor {
    filled(tensor, tensor.meta.shape().clone(), tensor.dtype, value)
}

/// Returns a contiguous tensor of `shape` on the device of `like` in which every element is
/// `value`.
///
/// Tensors of one size share one buffer, which is written once and then only read: the reference
/// held here keeps any tensor from being the only owner, so no operation writes to the buffer in
/// place.
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

/// Returns token offsets for `experts` experts with equal numbers of rows of `x`,
/// `u32[experts + 1]`. Written to the device once per size.
pub(super) fn equal_offsets(x: &CubeTensor, experts: usize) -> CubeTensor {
    type Key = (CubeDevice, usize, usize);
    static OFFSETS: OnceLock<Mutex<HashMap<Key, CubeTensor>>> = OnceLock::new();
    let tokens = x.meta.shape()[0] / experts;
    let key = (x.device.clone(), experts, tokens);
    let mut offsets = lock(OFFSETS.get_or_init(Mutex::default));
    let offsets = offsets.entry(key).or_insert_with(|| {
        let starts: Vec<u32> = (0..=experts)
            .map(|expert| (expert * tokens) as u32)
            .collect();
        let data = TensorData::new(starts, [experts + 1]);
        CubeBackend::int_from_data(data, &x.device)
    });
    offsets.clone()
}

/// Returns the placeholder for the result of a GEMM that is not computed: NaN in `shape`, which is
/// `[..., rows, cols]`. All leading indices read the same matrix.
pub(super) fn placeholder(like: &CubeTensor, shape: &Shape, dtype: DType) -> CubeTensor {
    let rank = shape.num_dims();
    let (rows, cols) = (shape[rank - 2], shape[rank - 1]);
    let matrix = filled(like, Shape::new([rows, cols]), dtype, f32::NAN);
    CubeBackend::float_expand(matrix, shape.clone())
}
