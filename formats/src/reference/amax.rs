//! Amax: largest magnitudes of tensors, rows and columns.

use rayon::prelude::*;

use super::{
    Element, Elements,
    hadamard::{MAX_GROUP, transform_lanes},
    load::load_rows,
    scaling::magnitudes,
    simd::{self, Isa, Task, with_fma},
};
use crate::{BLOCK, Hadamard};

/// Smallest number of elements per task that is worth waking another core.
const GRAIN: usize = 1 << 15;

/// Returns the largest magnitude in `x`, 0 for an empty slice. Infinity is preserved; NaN is
/// returned as the canonical quiet NaN.
///
/// Magnitudes are compared as integers. This order is total, so the result does not depend on the
/// order of the elements and is identical on every device.
pub fn amax<T: Element>(x: &[T]) -> f32 {
    canonical(magnitude(T::elements(x)))
}

/// Returns the bits of the largest magnitude, which is found in parallel.
fn magnitude(x: Elements<'_>) -> u32 {
    let largest = match x {
        Elements::F32(x) => x.par_chunks(GRAIN).map(largest).max(),
        Elements::Bf16(x) => x.par_chunks(GRAIN).map(largest).max(),
        Elements::F16(x) => x.par_chunks(GRAIN).map(largest).max(),
    };
    largest.unwrap_or(0)
}

with_fma!(fn largest[T: Element](x: &[T]) -> u32 = largest_body);

/// Returns the bits of the largest magnitude.
#[inline(always)]
fn largest_body<T: Element>(x: &[T]) -> u32 {
    let mut largest = 0;
    for value in x {
        largest = (value.to_f32().to_bits() & 0x7FFF_FFFF).max(largest);
    }
    largest
}

/// Returns the amax of each row of a `rows` x `cols` matrix.
pub fn amax_rows<T: Element>(x: &[T], rows: usize, cols: usize) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    (0..rows)
        .into_par_iter()
        .map(|row| amax(&x[row * cols..][..cols]))
        .collect()
}

/// Returns the amax of each column of a `rows` x `cols` matrix.
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

/// Returns the amax of the columnwise transformed matrix. The transform mixes as many rows at a
/// time as `hadamard` requires; the last group is padded with zeros (numerics, section 6).
///
/// # Panics
/// Panics if `x` does not have `rows * cols` elements.
pub fn amax_rht<T: Element>(x: &[T], rows: usize, cols: usize, hadamard: &Hadamard) -> f32 {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let bits = rht_magnitudes(T::elements(x), rows, cols, hadamard);
    canonical(bits.into_iter().max().unwrap_or(0))
}

/// Returns the amax of each column of the columnwise transformed matrix, which is used for
/// per-token scaling of a transformed columnwise tensor.
///
/// # Panics
/// Panics like [`amax_rht`].
pub fn amax_rht_cols<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    hadamard: &Hadamard,
) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let bits = rht_magnitudes(T::elements(x), rows, cols, hadamard);
    bits.into_iter().map(canonical).collect()
}

/// Returns the bits of the amax of each transformed column.
fn rht_magnitudes(x: Elements<'_>, rows: usize, cols: usize, hadamard: &Hadamard) -> Vec<u32> {
    let size = hadamard.size().elements();
    (0..rows.div_ceil(size))
        .into_par_iter()
        .fold(
            || vec![0u32; cols],
            |mut bits, index| {
                simd::run(Group {
                    x,
                    shape: (rows, cols),
                    row0: index * size,
                    hadamard,
                    bits: &mut bits,
                });
                bits
            },
        )
        .reduce(
            || vec![0u32; cols],
            |mut left, right| {
                for (max, value) in left.iter_mut().zip(right) {
                    *max = (*max).max(value);
                }
                left
            },
        )
}

/// Rows from `row0` on that are transformed together; their magnitudes raise `bits`.
struct Group<'a> {
    x: Elements<'a>,
    shape: (usize, usize),
    row0: usize,
    hadamard: &'a Hadamard,
    bits: &'a mut [u32],
}

impl Task for Group<'_> {
    #[inline(always)]
    fn compute<I: Isa>(self, isa: I) {
        let mut group = [[0f32; BLOCK]; MAX_GROUP];
        let group = &mut group[..self.hadamard.size().elements()];
        for (chunk, bits) in self.bits.chunks_mut(BLOCK).enumerate() {
            load_rows(isa, self.x, self.shape, (self.row0, chunk * BLOCK), group);
            transform_lanes(group, self.hadamard);
            for tile in group.as_chunks::<BLOCK>().0 {
                for (max, largest) in bits.iter_mut().zip(magnitudes(tile)) {
                    *max = (*max).max(largest as u32);
                }
            }
        }
    }
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
    use crate::{HadamardSize, reference::hadamard::transform_cols};

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
        for size in HadamardSize::ALL {
            let hadamard = Hadamard::seeded_with_size(size, 1);
            assert!(amax_rht(&x, 1000, 100, &hadamard).is_nan());
            // The infinity is alone in its group of column 77, and spreads over it with both signs.
            let cols = amax_rht_cols(&x, 1000, 100, &hadamard);
            assert_eq!(cols[77], f32::INFINITY);
            assert!(cols[5].is_nan() && cols[6].is_finite());
        }
    }

    #[test]
    fn transformed_maxima_are_those_of_the_transformed_matrix() {
        for size in HadamardSize::ALL {
            let hadamard = Hadamard::seeded_with_size(size, 9);
            for (rows, cols) in [(1, 1), (17, 3), (33, 48), (150, 20), (0, 5), (5, 0)] {
                let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.7).sin()).collect();
                let transformed = transform_cols(&x, rows, cols, &hadamard);
                let padded = rows.next_multiple_of(size.elements());
                assert_eq!(
                    amax_rht_cols(&x, rows, cols, &hadamard),
                    amax_rows(&transformed, cols, padded)
                );
                assert_eq!(amax_rht(&x, rows, cols, &hadamard), amax(&transformed));
            }
        }
    }

    #[test]
    fn empty_is_zero() {
        assert_eq!(amax::<f32>(&[]), 0.0);
        assert_eq!(amax_rht::<f32>(&[], 0, 16, &Hadamard::default()), 0.0);
    }
}
