//! Largest magnitudes.

use rayon::prelude::*;

use super::{
    Element,
    block::{load_row_tile, magnitude_bits},
    hadamard::transform_tile,
};
use crate::{BLOCK, Hadamard};

/// Elements that one task handles before it is worth waking another core.
const GRAIN: usize = 1 << 15;

/// The largest magnitude in `x`, 0 for an empty slice. NaN and infinity survive; NaN is returned as
/// the canonical quiet NaN.
///
/// Magnitudes are compared as integers, an order that is total and does not depend on the order of
/// the elements, so every device gets the same answer.
pub fn amax<T: Element>(x: &[T]) -> f32 {
    let bits = x
        .par_chunks(GRAIN)
        .map(|chunk| {
            chunk.iter().fold(0u32, |max, value| {
                max.max(value.to_f32().to_bits() & 0x7FFF_FFFF)
            })
        })
        .max()
        .unwrap_or(0);
    canonical(bits)
}

/// The largest magnitude of each row of a `rows` x `cols` matrix.
pub fn amax_rows<T: Element>(x: &[T], rows: usize, cols: usize) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    (0..rows)
        .into_par_iter()
        .map(|row| amax(&x[row * cols..][..cols]))
        .collect()
}

/// The largest magnitude of each column of a `rows` x `cols` matrix.
pub fn amax_cols<T: Element>(x: &[T], rows: usize, cols: usize) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let mut bits = vec![0u32; cols];
    for row in x.chunks_exact(cols.max(1)) {
        for (max, value) in bits.iter_mut().zip(row) {
            *max = (*max).max(value.to_f32().to_bits() & 0x7FFF_FFFF);
        }
    }
    bits.into_iter().map(canonical).collect()
}

/// The largest magnitude of the column-wise transformed matrix (16 rows at a time, the last group
/// padded with zeros).
pub fn amax_rht<T: Element>(x: &[T], rows: usize, cols: usize, hadamard: &Hadamard) -> f32 {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let bits = (0..rows.div_ceil(BLOCK))
        .into_par_iter()
        .map(|group| {
            let mut max = 0;
            for col0 in (0..cols).step_by(BLOCK) {
                let mut tile = load_row_tile(x, rows, cols, group * BLOCK, col0);
                transform_tile(&mut tile, hadamard);
                // Columns beyond the matrix are zeros, and stay zeros.
                max = tile.iter().map(magnitude_bits).fold(max, u32::max);
            }
            max
        })
        .max()
        .unwrap_or(0);
    canonical(bits)
}

fn canonical(bits: u32) -> f32 {
    if bits > f32::INFINITY.to_bits() {
        f32::NAN
    } else {
        f32::from_bits(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_infinity_survive() {
        let mut x = vec![1.0f32; 100_000];
        assert_eq!(amax(&x), 1.0);
        x[77_777] = f32::NEG_INFINITY;
        assert_eq!(amax(&x), f32::INFINITY);
        x[5] = -f32::NAN;
        assert!(amax(&x).is_nan());
        assert!(amax_rows(&x, 1000, 100)[0].is_nan());
        assert_eq!(amax_cols(&x, 1000, 100)[77], f32::INFINITY);
        assert!(amax_rht(&x, 1000, 100, &Hadamard::default()).is_nan());
    }

    #[test]
    fn empty_is_zero() {
        assert_eq!(amax::<f32>(&[]), 0.0);
        assert_eq!(amax_rht::<f32>(&[], 0, 16, &Hadamard::default()), 0.0);
    }
}
