//! The random Hadamard transform `R = diag(s) · H16 · 0.25` on 16 elements.

use rayon::prelude::*;

use super::{
    Element,
    block::{load_row_tile, transpose},
};
use crate::{BLOCK, Hadamard};

/// `x R`, in `f32` and rounded to bf16, which is how operands are transformed before their amax is
/// taken and before they are quantized.
///
/// The butterfly combines neighbours at distances 1, 2, 4 and 8, in this order.
#[inline(always)]
pub fn transform(block: &mut [f32; BLOCK], hadamard: &Hadamard) {
    for (i, value) in block.iter_mut().enumerate() {
        // Flipping a sign is exact for every value, NaN included.
        *value = f32::from_bits(value.to_bits() ^ ((hadamard.negates(i) as u32) << 31));
    }
    butterfly(block);
    for value in block.iter_mut() {
        *value = round_to_bf16(*value * 0.25);
    }
}

/// [`transform`] of each of the 16 columns of a tile, which is given as its 16 rows.
///
/// Each step combines whole rows, so that a vector holds 16 columns and nothing moves between its
/// lanes; every element sees the operations of [`transform`] in the same order.
#[inline]
pub(super) fn transform_tile(rows: &mut [[f32; BLOCK]; BLOCK], hadamard: &Hadamard) {
    for (i, row) in rows.iter_mut().enumerate() {
        let flip = (hadamard.negates(i) as u32) << 31;
        for value in row {
            *value = f32::from_bits(value.to_bits() ^ flip);
        }
    }
    for distance in [1, 2, 4, 8] {
        for i in (0..BLOCK).filter(|i| i & distance == 0) {
            let (lower, upper) = (rows[i], rows[i | distance]);
            for c in 0..BLOCK {
                rows[i][c] = lower[c] + upper[c];
                rows[i | distance][c] = lower[c] - upper[c];
            }
        }
    }
    for value in rows.as_flattened_mut() {
        *value = round_to_bf16(*value * 0.25);
    }
}

/// `value` rounded to bf16, to nearest even, as `bf16::from_f32` does it, but without a branch: the
/// library's version does not vectorise.
#[inline(always)]
fn round_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    // Half a unit in the last place, less one where the last place is even, carries into it.
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let is_nan = bits & 0x7FFF_FFFF > f32::INFINITY.to_bits();
    f32::from_bits(if is_nan { bits | 0x0040_0000 } else { rounded } & 0xFFFF_0000)
}

/// `x R^T`, the inverse of [`transform`], in `f32` and without rounding to bf16.
pub fn inverse_transform(block: &mut [f32; BLOCK], hadamard: &Hadamard) {
    // H16 is symmetric, so R^T = 0.25 · H16 · diag(s).
    butterfly(block);
    for (i, value) in block.iter_mut().enumerate() {
        let scaled = *value * 0.25;
        *value = if hadamard.negates(i) { -scaled } else { scaled };
    }
}

#[inline(always)]
fn butterfly(block: &mut [f32; BLOCK]) {
    for distance in [1, 2, 4, 8] {
        let mut next = [0f32; BLOCK];
        for i in 0..BLOCK {
            let partner = block[i ^ distance];
            next[i] = if i & distance == 0 {
                block[i] + partner
            } else {
                partner - block[i]
            };
        }
        *block = next;
    }
}

/// The column-wise transformed matrix, stored transposed: `[cols, ceil16(rows)]`, where the last
/// block of a column is padded with zeros before its transform.
pub fn transform_cols<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    hadamard: &Hadamard,
) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let padded = rows.div_ceil(BLOCK) * BLOCK;
    let mut out = vec![0f32; cols * padded];
    out.par_chunks_mut((padded * BLOCK).max(1))
        .enumerate()
        .for_each(|(chunk, out)| {
            for row0 in (0..rows).step_by(BLOCK) {
                let mut tile = load_row_tile(x, rows, cols, row0, chunk * BLOCK);
                transform_tile(&mut tile, hadamard);
                let columns = transpose(&tile).into_iter().take(out.len() / padded);
                for (column, block) in columns.enumerate() {
                    out[column * padded + row0..][..BLOCK].copy_from_slice(&block);
                }
            }
        });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(hadamard: &Hadamard) -> [[f32; 16]; 16] {
        let mut matrix = [[0f32; 16]; 16];
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] = 1.0;
            transform(row, hadamard);
        }
        matrix
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
    fn a_tile_is_transformed_column_by_column() {
        let hadamard = Hadamard::seeded(5);
        let special = [f32::NAN, f32::INFINITY, -0.0, 1e-42, f32::MAX];
        let mut rows: [[f32; 16]; 16] = std::array::from_fn(|r| {
            std::array::from_fn(|c| (r as f32 - 7.3).sin() * (c as f32 + 0.7).exp())
        });
        for (i, value) in special.into_iter().enumerate() {
            rows[3 * i][i] = value;
        }
        let mut columns = transpose(&rows);
        transform_tile(&mut rows, &hadamard);
        for column in &mut columns {
            transform(column, &hadamard);
        }
        let bits = |tile: [[f32; 16]; 16]| tile.map(|row| row.map(f32::to_bits));
        assert_eq!(bits(transpose(&rows)), bits(columns));
    }

    #[test]
    fn equals_its_definition() {
        let hadamard = Hadamard::default();
        for (i, row) in matrix(&hadamard).iter().enumerate() {
            for (j, &value) in row.iter().enumerate() {
                let sign = (i & j).count_ones() + hadamard.negates(i) as u32;
                assert_eq!(
                    value,
                    if sign % 2 == 1 { -0.25 } else { 0.25 },
                    "R[{i}][{j}]"
                );
            }
        }
    }

    #[test]
    fn is_orthogonal() {
        let matrix = matrix(&Hadamard::from_signs(0x1234));
        for i in 0..16 {
            for j in 0..16 {
                let dot: f32 = (0..16).map(|k| matrix[i][k] * matrix[j][k]).sum();
                assert_eq!(dot, if i == j { 1.0 } else { 0.0 });
            }
        }
    }

    #[test]
    fn inverse_undoes_it() {
        let hadamard = Hadamard::seeded(3);
        let original: [f32; 16] = std::array::from_fn(|i| i as f32 - 5.0);
        let mut block = original;
        transform(&mut block, &hadamard);
        inverse_transform(&mut block, &hadamard);
        assert_eq!(block, original);
    }

    #[test]
    fn cancels_in_a_product_along_the_contraction() {
        // Small integers: every intermediate is exact, so the identity holds exactly, for a number
        // of rows that is no multiple of 16 too.
        let (rows, n, m) = (37, 3, 5);
        let x: Vec<f32> = (0..rows * n).map(|i| ((i * 7) % 5) as f32 - 2.0).collect();
        let y: Vec<f32> = (0..rows * m).map(|i| ((i * 11) % 7) as f32 - 3.0).collect();
        let hadamard = Hadamard::default();
        let (xr, yr) = (
            transform_cols(&x, rows, n, &hadamard),
            transform_cols(&y, rows, m, &hadamard),
        );
        let padded = rows.div_ceil(16) * 16;
        for i in 0..n {
            for j in 0..m {
                let plain: f32 = (0..rows).map(|r| x[r * n + i] * y[r * m + j]).sum();
                let rotated: f32 = (0..padded)
                    .map(|k| xr[i * padded + k] * yr[j * padded + k])
                    .sum();
                assert_eq!(plain, rotated);
            }
        }
    }
}
