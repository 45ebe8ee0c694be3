//! From codes back to values.

use rayon::prelude::*;

use crate::{
    BLOCK, PackedAxis, PackedTensor, ScaleLayout,
    format::{e2m1, e4m3},
    reference::swizzle,
};

/// The matrix that `packed` stands for, `[rows, cols]` in the orientation of the source:
/// `fl(fl(e2m1 · e4m3) · fl(amax / range))`, with the range of
/// [`BlockScaling::range`](crate::BlockScaling::range). A copy made with the Hadamard transform
/// stays transformed, and what its padding holds is dropped.
pub fn dequantize(packed: &PackedTensor) -> Vec<f32> {
    let stored = decode_blocks(packed);
    let (rows, cols, width) = (packed.rows(), packed.cols(), packed.blocks() * BLOCK);
    let factor = |outer: usize| packed.amax().of(outer) / packed.origin().scaling.range();
    let mut out = vec![0f32; rows * cols];
    out.par_chunks_mut(cols.max(1))
        .enumerate()
        .for_each(|(row, out)| match packed.axis() {
            PackedAxis::Cols => {
                let factor = factor(row);
                for (value, stored) in out.iter_mut().zip(&stored[row * width..]) {
                    *value = stored * factor;
                }
            }
            PackedAxis::Rows => {
                for (col, value) in out.iter_mut().enumerate() {
                    *value = stored[col * width + row] * factor(col);
                }
            }
        });
    out
}

/// The operand that a GEMM multiplies, `[outer, blocks * 16]` in stored orientation: `e2m1 · e4m3`
/// without the global scale. Every value is exact in bf16.
pub fn decode_blocks(packed: &PackedTensor) -> Vec<f32> {
    let mut out = vec![0f32; packed.outer() * packed.blocks() * BLOCK];
    match packed.scale_layout() {
        ScaleLayout::Compact => decode_blocks_into(packed.codes(), packed.scales(), &mut out),
        ScaleLayout::Swizzled128x4 => {
            let scales = swizzle::unswizzle(packed.scales(), packed.outer(), packed.blocks());
            decode_blocks_into(packed.codes(), &scales, &mut out);
        }
    }
    out
}

/// [`decode_blocks`] on plain buffers: 8 bytes of codes and one compact scale for each 16 values of
/// `out`.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn decode_blocks_into(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    assert_eq!(
        codes.len(),
        scales.len() * 8,
        "`codes` must hold 8 bytes for each scale"
    );
    assert_eq!(
        out.len(),
        scales.len() * BLOCK,
        "`out` must hold 16 values for each scale"
    );
    const TASK: usize = 512;
    out.par_chunks_mut(TASK * BLOCK)
        .zip(codes.par_chunks(TASK * 8))
        .zip(scales.par_chunks(TASK))
        .for_each(|((out, codes), scales)| {
            for ((out, codes), &scale) in out
                .chunks_exact_mut(BLOCK)
                .zip(codes.chunks_exact(8))
                .zip(scales)
            {
                let scale = e4m3::decode(scale);
                for (pair, &byte) in out.chunks_exact_mut(2).zip(codes) {
                    let [low, high] = e2m1::decode_byte(byte);
                    pair[0] = low * scale;
                    pair[1] = high * scale;
                }
            }
        });
}
