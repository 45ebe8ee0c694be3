//! Loads 16 columns of a matrix, for blocks along its columns.

use super::{Element, Elements, simd::Isa};
use crate::BLOCK;

/// Fills `tile` with 16 columns of a `rows` x `cols` matrix, from (`row0`, `col0`) on, with zeros
/// beyond the matrix. Prefetches one cache line of each row of the tile below, which is read next.
#[inline(always)]
pub(super) fn load_rows(
    isa: impl Isa,
    x: Elements<'_>,
    shape: (usize, usize),
    at: (usize, usize),
    tile: &mut [[f32; BLOCK]],
) {
    match x {
        Elements::F32(x) => load_rows_of(isa, x, shape, at, tile),
        Elements::Bf16(x) => load_rows_of(isa, x, shape, at, tile),
        Elements::F16(x) => load_rows_of(isa, x, shape, at, tile),
    }
}

#[inline(always)]
fn load_rows_of<T: Element>(
    isa: impl Isa,
    x: &[T],
    (rows, cols): (usize, usize),
    (row0, col0): (usize, usize),
    tile: &mut [[f32; BLOCK]],
) {
    let (height, width) = (tile.len(), BLOCK.min(cols - col0));
    for (r, row) in tile.iter_mut().enumerate() {
        *row = [0f32; BLOCK];
        if row0 + r < rows {
            let at = (row0 + r) * cols + col0;
            for (value, source) in row.iter_mut().zip(&x[at..][..width]) {
                *value = source.to_f32();
            }
            if let Some(below) = x.get(at + height * cols) {
                isa.prefetch(below);
            }
        }
    }
}
