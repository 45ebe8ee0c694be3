//! Dequantization: from codes back to values.

use std::{borrow::Cow, ops::Range};

use rayon::prelude::*;

use crate::{
    BLOCK, QuantizedTensor, Usage,
    format::{e2m1, e4m3, swizzle},
    reference::simd::{self, Isa, Task},
};

/// Dequantizes `packed` to a matrix `[rows, cols]` in the orientation of the source:
/// `fl(fl(e2m1 · e4m3) · fl(amax / range))`, with the range of
/// [`BlockScaling::range`](crate::BlockScaling::range). A tensor made with the Hadamard transform
/// stays transformed, and its padding is dropped.
pub fn dequantize(packed: &QuantizedTensor) -> Vec<f32> {
    let (rows, cols, width) = (packed.rows(), packed.cols(), packed.blocks() * BLOCK);
    let mut stored = decode_blocks(packed);
    stored
        .par_chunks_mut(width.max(1))
        .enumerate()
        .for_each(|(outer, row)| {
            let factor = packed.amax().of(outer) / packed.range();
            row.iter_mut().for_each(|value| *value *= factor);
        });
    match packed.usage() {
        Usage::Rowwise if width == cols => stored,
        Usage::Rowwise => {
            let rows = stored.chunks_exact(width.max(1));
            rows.flat_map(|row| &row[..cols]).copied().collect()
        }
        Usage::Columnwise => {
            let mut out = transpose(&stored, cols, width);
            out.truncate(rows * cols);
            out
        }
    }
}

/// Decodes the operand that a GEMM multiplies, `[outer, blocks * 16]` in stored orientation:
/// `e2m1 · e4m3` without the global scale. Every value is exact in bf16.
pub fn decode_blocks(packed: &QuantizedTensor) -> Vec<f32> {
    decode_rows(packed, &compact_scales(packed), 0..packed.outer())
}

/// Returns the block scales in block order.
pub(super) fn compact_scales(packed: &QuantizedTensor) -> Cow<'_, [u8]> {
    match packed.layout().form.has_tiles() {
        false => Cow::Borrowed(packed.scales()),
        true => Cow::Owned(swizzle::unswizzle(
            packed.scales(),
            packed.outer(),
            packed.blocks(),
        )),
    }
}

/// Decodes some stored rows of [`decode_blocks`], from the [`compact_scales`] of all rows.
pub(super) fn decode_rows(packed: &QuantizedTensor, scales: &[u8], rows: Range<usize>) -> Vec<f32> {
    let blocks = rows.start * packed.blocks()..rows.end * packed.blocks();
    let mut out = vec![0f32; blocks.len() * BLOCK];
    let codes = &packed.codes()[8 * blocks.start..8 * blocks.end];
    decode_blocks_into(codes, &scales[blocks], &mut out);
    out
}

/// Computes [`decode_blocks`] on plain buffers: 8 bytes of codes and one compact scale per 16
/// values of `out`.
///
/// # Panics
/// Panics if the lengths do not match.
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
        .for_each(|((out, codes), scales)| simd::run(Decode { codes, scales, out }));
}

/// Consecutive blocks that one task decodes.
struct Decode<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    out: &'a mut [f32],
}

impl Task for Decode<'_> {
    #[inline(always)]
    fn compute<I: Isa>(self, _: I) {
        // Half a block at a time: eight codes per word.
        let codes = self.codes.as_chunks::<4>().0;
        let out = self.out.as_chunks_mut::<8>().0;
        for (i, (out, codes)) in out.iter_mut().zip(codes).enumerate() {
            let scale = e4m3::decode(self.scales[i / 2]);
            let word = u32::from_le_bytes(*codes);
            for (i, out) in out.iter_mut().enumerate() {
                *out = e2m1::decode_wide(word >> (4 * i)) * scale;
            }
        }
    }
}

/// Transposes `[rows, cols]` to `[cols, rows]`, in tiles that stay in the cache.
pub(super) fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    const TILE: usize = 32;
    let mut out = vec![0f32; rows * cols];
    out.par_chunks_mut((TILE * rows).max(1))
        .enumerate()
        .for_each(|(chunk, out)| {
            let col0 = chunk * TILE;
            for row0 in (0..rows).step_by(TILE) {
                for row in row0..rows.min(row0 + TILE) {
                    for (c, &value) in x[row * cols + col0..][..TILE.min(cols - col0)]
                        .iter()
                        .enumerate()
                    {
                        out[c * rows + row] = value;
                    }
                }
            }
        });
    out
}
