//! The random Hadamard transform `R = diag(s) · H16 · 0.25` on 16 elements.

use half::bf16;
use rayon::prelude::*;

use super::{Element, block::load_column_tile};
use crate::{BLOCK, Hadamard};

/// `x R`, in `f32` and rounded to bf16, which is how operands are transformed before their amax is
/// taken and before they are quantized.
///
/// The butterfly combines neighbours at distances 1, 2, 4 and 8, in this order.
#[inline(always)]
pub fn transform(block: &mut [f32; BLOCK], hadamard: &Hadamard) {
    let signs = hadamard.signs();
    for (i, value) in block.iter_mut().enumerate() {
        // Flipping a sign is exact for every value, NaN included.
        *value = f32::from_bits(value.to_bits() ^ ((signs as u32 >> i & 1) << 31));
    }
    butterfly(block);
    for value in block.iter_mut() {
        *value = bf16::from_f32(*value * 0.25).to_f32();
    }
}

/// `x R^T`, the inverse of [`transform`], in `f32` and without rounding to bf16.
pub fn inverse_transform(block: &mut [f32; BLOCK], hadamard: &Hadamard) {
    // H16 is symmetric, so R^T = 0.25 · H16 · diag(s).
    butterfly(block);
    let signs = hadamard.signs();
    for (i, value) in block.iter_mut().enumerate() {
        let scaled = *value * 0.25;
        *value = if signs >> i & 1 == 1 { -scaled } else { scaled };
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
                let tile = load_column_tile(x, rows, cols, row0, chunk * BLOCK);
                for (column, mut block) in tile.into_iter().take(out.len() / padded).enumerate() {
                    transform(&mut block, hadamard);
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
    fn equals_its_definition() {
        let hadamard = Hadamard::default();
        for (i, row) in matrix(&hadamard).iter().enumerate() {
            for (j, &value) in row.iter().enumerate() {
                let sign = (i & j).count_ones() + (hadamard.signs() >> i & 1) as u32;
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
