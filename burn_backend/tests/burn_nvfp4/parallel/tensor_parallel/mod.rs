//! Layers that are sharded over ranks, compared with those of one device.

mod gather;
mod layer_norm;
mod linear;
mod model;
mod moe;

use burn_core::tensor::{DType, Tensor};

/// Returns the bits of a tensor, as values of `f32`, which differ if the bits do.
pub fn bits<const D: usize>(x: Tensor<D>) -> Vec<u32> {
    let x = x.into_data().convert::<f32>();
    let x: Vec<f32> = x.try_into_vec().expect("f32");
    x.into_iter().map(f32::to_bits).collect()
}

/// Returns shard `rank` of `size` along axis `dim`.
pub fn own<const D: usize>(x: Tensor<D>, dim: usize, rank: usize, size: usize) -> Tensor<D> {
    let len = x.dims()[dim] / size;
    x.narrow(dim, rank * len, len)
}

/// Returns the largest difference relative to the largest magnitude of `expected`.
pub fn distance<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f32 {
    let [found, expected] = [found, expected].map(|x| x.cast(DType::F32));
    let scale: f32 = expected.clone().abs().max().into_scalar();
    let difference: f32 = (found - expected).abs().max().into_scalar();
    difference / scale
}
