//! Dense f64 linear algebra for GPTQ, on all cores: second moments, Cholesky factors, triangular
//! inverses.

use rayon::prelude::*;

use crate::{Nvfp4Error, with_fma};

/// Number of tokens whose products are added in one pass over the sums.
const TOKENS: usize = 8;

/// Adds `x xᵀ` of each row of `x` `[tokens, k]`, in order, to the lower triangle of `sums` `[k, k]`.
pub fn add_products(sums: &mut [f64], x: &[f32], k: usize) {
    let rows = sums.par_chunks_mut(k).enumerate();
    rows.for_each(|(i, sums)| add_row(&mut sums[..=i], x, k));
}

with_fma!(fn add_row(sums: &mut [f64], x: &[f32], k: usize) = add_row_body);

/// Adds the products of the last feature of `sums` with those up to it.
#[inline(always)]
fn add_row_body(sums: &mut [f64], x: &[f32], k: usize) {
    let len = sums.len();
    let groups = x.chunks_exact(TOKENS * k);
    let rest = groups.remainder();
    for group in groups {
        let rows: [&[f32]; TOKENS] = std::array::from_fn(|t| &group[t * k..][..len]);
        let last: [f64; TOKENS] = std::array::from_fn(|t| f64::from(rows[t][len - 1]));
        for (j, sum) in sums.iter_mut().enumerate() {
            for t in 0..TOKENS {
                *sum += last[t] * f64::from(rows[t][j]);
            }
        }
    }
    for row in rest.chunks_exact(k) {
        let last = f64::from(row[len - 1]);
        for (sum, &x) in sums.iter_mut().zip(row) {
            *sum += last * f64::from(x);
        }
    }
}

with_fma!(
    /// Computes `Σ a_i b_i` in eight partial sums, with the same result on every machine and with
    /// any number of threads.
    fn dot(a: &[f64], b: &[f64]) -> f64 = dot_body
);

#[inline(always)]
fn dot_body(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (&a[..a.len().min(b.len())], &b[..a.len().min(b.len())]);
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = (a8.remainder().iter().zip(b8.remainder()))
        .map(|(x, y)| x * y)
        .sum();
    for (x, y) in a8.zip(b8) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    rest + sums.iter().sum::<f64>()
}

/// Computes the lower factor L of a symmetric positive definite `a` = L Lᵀ of size `k`, row-major,
/// with zeros above the diagonal. Reads only the lower triangle of `a`.
///
/// # Errors
/// Returns an error if a pivot is not positive, because the matrix is then not positive definite.
pub fn cholesky(mut a: Vec<f64>, k: usize) -> Result<Vec<f64>, Nvfp4Error> {
    for j in 0..k {
        let (above, below) = a.split_at_mut((j + 1) * k);
        let row = &mut above[j * k..];
        let pivot = row[j] - dot(&row[..j], &row[..j]);
        if !(pivot > 0.0 && pivot.is_finite()) {
            return Err(Nvfp4Error::value(
                "Hessian",
                format!("pivot {j} of {k} is {pivot:e}"),
                "a positive definite matrix",
            ));
        }
        let diagonal = pivot.sqrt();
        row[j] = diagonal;
        row[j + 1..].fill(0.0);
        let row = &row[..j];
        let update = |other: &mut [f64]| other[j] = (other[j] - dot(row, &other[..j])) / diagonal;
        // Below this, starting threads costs more than the sums.
        if (k - j) * j < 1 << 14 {
            below.chunks_mut(k).for_each(update);
        } else {
            below.par_chunks_mut(k).for_each(update);
        }
    }
    Ok(a)
}

/// Computes the transposed inverse of the lower triangular `l` of size `k`: row `j` is column `j`
/// of L⁻¹.
pub fn invert_lower_transposed(l: &[f64], k: usize) -> Vec<f64> {
    let mut inverse = vec![0.0; k * k];
    inverse.par_chunks_mut(k).enumerate().for_each(|(j, row)| {
        row[j] = 1.0 / l[j * k + j];
        for i in j + 1..k {
            row[i] = -dot(&l[i * k + j..i * k + i], &row[j..i]) / l[i * k + i];
        }
    });
    inverse
}

/// Computes the upper triangular U with H⁻¹ = Uᵀ U, which GPTQ reads row by row.
///
/// With P the reversal of the order, P H P = L Lᵀ gives H⁻¹ = (P L⁻¹ P)ᵀ (P L⁻¹ P), and P L⁻¹ P is
/// upper triangular. This needs one factorization and one triangular inverse, and never forms H⁻¹.
///
/// # Errors
/// Returns an error if `h` is not positive definite.
pub fn inverse_upper_factor(h: &[f64], k: usize) -> Result<Vec<f64>, Nvfp4Error> {
    let reversed = h.iter().rev().copied().collect();
    let inverse = invert_lower_transposed(&cholesky(reversed, k)?, k);
    let mut upper = vec![0.0; k * k];
    upper.par_chunks_mut(k).enumerate().for_each(|(a, row)| {
        for (b, value) in row.iter_mut().enumerate().skip(a) {
            *value = inverse[(k - 1 - b) * k + (k - 1 - a)];
        }
    });
    Ok(upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_added_in_the_order_of_the_tokens() {
        let (tokens, k) = (21, 5);
        let x: Vec<f32> = (0..tokens * k).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut sums = vec![0.5; k * k];
        add_products(&mut sums, &x, k);
        for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
            let mut expected = 0.5;
            for row in x.chunks_exact(k).filter(|_| j <= i) {
                expected += f64::from(row[i]) * f64::from(row[j]);
            }
            assert_eq!(sums[i * k + j], expected, "{i}, {j}");
        }
    }

    #[test]
    fn the_factor_of_the_inverse_inverts() {
        for k in [1, 7, 40, 160] {
            // B Bᵀ + I of a fixed B is positive definite.
            let b: Vec<f64> = (0..k * k).map(|i| (i as f64 * 1.7).sin()).collect();
            let mut h = vec![0.0; k * k];
            for i in 0..k {
                for j in 0..k {
                    let product = dot(&b[i * k..(i + 1) * k], &b[j * k..(j + 1) * k]);
                    h[i * k + j] = product + f64::from(u8::from(i == j));
                }
            }
            let u = inverse_upper_factor(&h, k).unwrap();
            // H Uᵀ U is the identity.
            for i in 0..k {
                for j in 0..k {
                    let mut sum = 0.0;
                    for m in 0..k {
                        let inverse: f64 = (0..k).map(|r| u[r * k + m] * u[r * k + j]).sum();
                        sum += h[i * k + m] * inverse;
                    }
                    let expected = f64::from(u8::from(i == j));
                    assert!((sum - expected).abs() < 1e-8, "{k}: {i}, {j}: {sum}");
                    assert!(j >= i || u[i * k + j] == 0.0);
                }
            }
            if k == 40 {
                let l = cholesky(h.clone(), k).unwrap();
                let product = dot(&l[3 * k..4 * k], &l[2 * k..3 * k]);
                assert!((product - h[3 * k + 2]).abs() < 1e-9);
            }
        }
        assert!(cholesky(vec![1.0, 2.0, 2.0, 1.0], 2).is_err());
        assert!(cholesky(vec![f64::NAN], 1).is_err());
    }
}
