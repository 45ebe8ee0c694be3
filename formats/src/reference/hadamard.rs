//! Random Hadamard transform `R = diag(s) · H · 1/√size` on groups of 16, 32, 64 or 128 elements
//! (numerics, section 6).

use crate::{Hadamard, HadamardSize};

/// Size of the largest group, for buffers that hold a group of any size.
pub(super) const MAX_GROUP: usize = HadamardSize::H128.elements();

/// Computes `x R` in `f32` and rounds to bf16. Operands are transformed this way before their amax
/// is computed and before they are quantized.
///
/// The butterfly combines elements at distances 1, 2, 4 and so on, in this order, followed by one
/// multiplication by [`HadamardSize::factor`] and the rounding.
///
/// # Panics
/// Panics if `group` does not have as many elements as `hadamard` mixes.
#[inline]
pub fn transform(group: &mut [f32], hadamard: &Hadamard) {
    transform_lanes(group.as_chunks_mut::<1>().0, hadamard);
}

/// Applies [`transform`] to each of `L` columns, which are given by rows.
///
/// Each step combines whole rows, so that a vector holds many columns and nothing moves between its
/// lanes. Every element undergoes the operations of [`transform`] in the same order.
///
/// # Panics
/// Panics like [`transform`].
#[inline(always)]
pub(super) fn transform_lanes<const L: usize>(rows: &mut [[f32; L]], hadamard: &Hadamard) {
    match hadamard.size() {
        HadamardSize::H16 => rotate::<16, L>(exactly(rows), hadamard),
        HadamardSize::H32 => rotate::<32, L>(exactly(rows), hadamard),
        HadamardSize::H64 => rotate::<64, L>(exactly(rows), hadamard),
        HadamardSize::H128 => rotate::<128, L>(exactly(rows), hadamard),
    }
}

#[inline(always)]
fn exactly<const N: usize, const L: usize>(rows: &mut [[f32; L]]) -> &mut [[f32; L]; N] {
    let found = rows.len();
    rows.try_into()
        .unwrap_or_else(|_| panic!("a group of {found} elements for a transform of {N}"))
}

#[inline(always)]
fn rotate<const N: usize, const L: usize>(rows: &mut [[f32; L]; N], hadamard: &Hadamard) {
    for (i, row) in rows.iter_mut().enumerate() {
        // Flipping a sign is exact for every value, NaN included.
        let flip = (hadamard.negates(i) as u32) << 31;
        for value in row {
            *value = f32::from_bits(value.to_bits() ^ flip);
        }
    }
    butterfly(rows);
    let factor = hadamard.size().factor();
    for value in rows.as_flattened_mut() {
        *value = round_to_bf16(*value * factor);
    }
}

/// Computes `rows H` for a power of two of rows.
#[inline(always)]
fn butterfly<const L: usize>(rows: &mut [[f32; L]]) {
    let mut distance = 1;
    while distance < rows.len() {
        for pair in rows.chunks_exact_mut(2 * distance) {
            let (lower, upper) = pair.split_at_mut(distance);
            for (lower, upper) in lower.iter_mut().zip(upper) {
                for (lower, upper) in lower.iter_mut().zip(upper) {
                    (*lower, *upper) = (*lower + *upper, *lower - *upper);
                }
            }
        }
        distance *= 2;
    }
}

/// Rounds `value` to bf16, to nearest even, like `bf16::from_f32`, but without a branch: the
/// library's version does not vectorize.
#[inline(always)]
fn round_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    // Adding half an ulp (minus one if the last bit is even) carries into the last bit.
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let is_nan = bits & 0x7FFF_FFFF > f32::INFINITY.to_bits();
    f32::from_bits(if is_nan { bits | 0x0040_0000 } else { rounded } & 0xFFFF_0000)
}

/// Returns the columnwise transformed matrix, stored transposed: `[cols, padded]`. `padded` is
/// `rows` rounded up to a multiple of the transform's size; rows beyond the matrix are zeros.
#[cfg(test)]
pub(super) fn transform_cols(x: &[f32], rows: usize, cols: usize, hadamard: &Hadamard) -> Vec<f32> {
    let size = hadamard.size().elements();
    let padded = rows.next_multiple_of(size);
    let mut out = vec![0f32; cols * padded];
    for (column, out) in out.chunks_exact_mut(padded.max(1)).enumerate() {
        for (row, value) in out[..rows].iter_mut().enumerate() {
            *value = x[row * cols + column];
        }
        for group in out.chunks_exact_mut(size) {
            transform(group, hadamard);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeded(size: HadamardSize) -> Hadamard {
        Hadamard::seeded_with_size(size, 5)
    }

    /// Returns `R`, row by row.
    fn matrix(hadamard: &Hadamard) -> Vec<Vec<f32>> {
        let size = hadamard.size().elements();
        (0..size)
            .map(|i| {
                let mut row = vec![0f32; size];
                row[i] = 1.0;
                transform(&mut row, hadamard);
                row
            })
            .collect()
    }

    #[test]
    fn factors_are_the_nearest_floats() {
        for size in HadamardSize::ALL {
            let exact = 1.0 / (size.elements() as f64).sqrt();
            assert_eq!(size.factor(), exact as f32, "{size:?}");
        }
    }

    #[test]
    fn rounding_to_bf16_is_the_librarys() {
        for high in (0..=u16::MAX).step_by(13) {
            for low in [0u16, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits((high as u32) << 16 | low as u32);
                let expected = half::bf16::from_f32(value).to_f32();
                assert_eq!(
                    round_to_bf16(value).to_bits(),
                    expected.to_bits(),
                    "{value:e}"
                );
            }
        }
    }

    #[test]
    fn lanes_are_transformed_one_by_one() {
        let special = [f32::NAN, f32::INFINITY, -0.0, 1e-42, f32::MAX];
        for size in HadamardSize::ALL {
            let (hadamard, n) = (seeded(size), size.elements());
            let mut rows: Vec<[f32; 16]> = (0..n)
                .map(|r| std::array::from_fn(|c| (r as f32 - 7.3).sin() * (c as f32 + 0.7).exp()))
                .collect();
            for (i, value) in special.into_iter().enumerate() {
                rows[3 * i][i] = value;
            }
            let columns: Vec<Vec<f32>> = (0..16)
                .map(|c| rows.iter().map(|row| row[c]).collect())
                .collect();
            transform_lanes(&mut rows, &hadamard);
            for (c, mut column) in columns.into_iter().enumerate() {
                transform(&mut column, &hadamard);
                for (r, value) in column.into_iter().enumerate() {
                    let found = rows[r][c];
                    assert!(
                        found.to_bits() == value.to_bits() || found.is_nan() && value.is_nan(),
                        "{size:?}, row {r}, lane {c}: {found:e} != {value:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn equals_its_definition() {
        for hadamard in HadamardSize::ALL
            .map(seeded)
            .into_iter()
            .chain([Hadamard::default()])
        {
            let entry = half::bf16::from_f32(hadamard.size().factor()).to_f32();
            for (i, row) in matrix(&hadamard).iter().enumerate() {
                for (j, &value) in row.iter().enumerate() {
                    let sign = (i & j).count_ones() + hadamard.negates(i) as u32;
                    assert_eq!(
                        value,
                        if sign % 2 == 1 { -entry } else { entry },
                        "{hadamard:?}: R[{i}][{j}]"
                    );
                }
            }
        }
    }

    #[test]
    fn is_orthogonal() {
        for size in HadamardSize::ALL {
            let matrix = matrix(&seeded(size));
            for (i, left) in matrix.iter().enumerate() {
                for (j, right) in matrix.iter().enumerate() {
                    let dot: f32 = left.iter().zip(right).map(|(a, b)| a * b).sum();
                    // Entries are bf16: exact for 1/4 and 1/8, otherwise off by up to 2^-9 each.
                    let norm: f32 = if i == j { 1.0 } else { 0.0 };
                    let exact = matches!(size, HadamardSize::H16 | HadamardSize::H64);
                    let bound = if exact || i != j { 0.0 } else { 1.0 / 256.0 };
                    assert!((dot - norm).abs() <= bound, "{size:?}: {i}·{j} = {dot}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a group of 16 elements for a transform of 32")]
    fn a_group_of_another_size_is_refused() {
        transform(&mut [0.0; 16], &seeded(HadamardSize::H32));
    }

    #[test]
    fn cancels_in_a_product_along_the_contraction() {
        // Small integers: with a power-of-two factor every intermediate is exact, so the identity
        // holds exactly, also if the number of rows is not a multiple of the size.
        let (n, m) = (3, 5);
        for size in HadamardSize::ALL {
            for rows in [1, 37, 128, 150] {
                let x: Vec<f32> = (0..rows * n).map(|i| ((i * 7) % 5) as f32 - 2.0).collect();
                let y: Vec<f32> = (0..rows * m).map(|i| ((i * 11) % 7) as f32 - 3.0).collect();
                let hadamard = seeded(size);
                let (xr, yr) = (
                    transform_cols(&x, rows, n, &hadamard),
                    transform_cols(&y, rows, m, &hadamard),
                );
                let padded = rows.div_ceil(size.elements()) * size.elements();
                assert_eq!(xr.len(), n * padded);
                for i in 0..n {
                    for j in 0..m {
                        let plain: f32 = (0..rows).map(|r| x[r * n + i] * y[r * m + j]).sum();
                        let rotated: f32 = (0..padded)
                            .map(|k| xr[i * padded + k] * yr[j * padded + k])
                            .sum();
                        let bound = match size {
                            HadamardSize::H16 | HadamardSize::H64 => 0.0,
                            // 2^-9 for each factor, so 2^-8 of |x| |y|, which is at most 6 per row.
                            _ => 6.0 * rows as f32 / 256.0,
                        };
                        assert!(
                            (plain - rotated).abs() <= bound,
                            "{size:?}, {rows} rows: {plain} became {rotated}"
                        );
                    }
                }
            }
        }
    }
}
