//! Segments of an axis of a tensor.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::Slice;

/// Returns the offset and the length of each of several concatenated lengths.
pub(super) fn offsets(lens: &[usize]) -> Vec<(usize, usize)> {
    let mut first = 0;
    let offsets = lens.iter().map(|&len| {
        first += len;
        (first - len, len)
    });
    offsets.collect()
}

/// Slices a tensor of `shape` to `len` elements of axis `dim`, beginning at `first`.
pub(super) fn slices(shape: &[usize], dim: usize, first: usize, len: usize) -> Vec<Slice> {
    let axes = shape
        .iter()
        .enumerate()
        .map(|(axis, &all)| match axis == dim {
            true => Slice::from(first..first + len),
            false => Slice::from(0..all),
        });
    axes.collect()
}

pub(super) fn narrow<B: Backend>(
    x: FloatTensor<B>,
    dim: usize,
    first: usize,
    len: usize,
) -> FloatTensor<B> {
    let slices = slices(&x.shape().to_vec(), dim, first, len);
    B::float_slice(x, &slices)
}
