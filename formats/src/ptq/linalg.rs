//! Dense f64 linear algebra for GPTQ, on all cores: second moments, Cholesky factors, triangular
//! inverses.
//!
//! An element of a factor or an inverse is one chain of subtractions in ascending order of the
//! summed index. Each product is rounded before it is subtracted. Results therefore depend neither
//! on the blocking nor on the number of threads, and kernels have the same bits.

use std::array;
use std::ops::Range;

use rayon::prelude::*;

use crate::{Nvfp4Error, with_fma};

/// Number of tokens whose products are added in one pass over the sums.
const TOKENS: usize = 8;
/// Number of rows whose products are subtracted in one pass over the results.
const ROWS: usize = 8;
/// Number of rows that are eliminated together.
const PANEL: usize = 64;
/// Number of columns of a panel that a task reads at a time: they fit in the caches.
const TILE: usize = 256;
/// Number of rows per task.
const TASK_ROWS: usize = 16;

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
    /// Subtracts `factors[m]` times row `m` of `rows` from `out`, one row after another. Rows are
    /// `stride` elements apart.
    pub(super) fn subtract_products(
        out: &mut [f64],
        factors: &[f64],
        rows: &[f64],
        stride: usize,
    ) = subtract_products_body
);

#[inline(always)]
fn subtract_products_body(out: &mut [f64], factors: &[f64], rows: &[f64], stride: usize) {
    let len = out.len();
    let row = |m: usize| &rows[m * stride..][..len];
    let (groups, rest) = factors.as_chunks::<ROWS>();
    for (group, factors) in groups.iter().enumerate() {
        let rows: [&[f64]; ROWS] = std::array::from_fn(|m| row(group * ROWS + m));
        for (j, out) in out.iter_mut().enumerate() {
            for m in 0..ROWS {
                *out -= factors[m] * rows[m][j];
            }
        }
    }
    for (m, factor) in rest.iter().enumerate() {
        let row = row(groups.len() * ROWS + m);
        out.iter_mut()
            .zip(row)
            .for_each(|(out, x)| *out -= factor * x);
    }
}

/// Computes the upper triangular R with `a` = Rᵀ R of size `k` in the upper triangle of `a`, which
/// is symmetric and positive definite. Does not use the lower triangle.
///
/// # Errors
/// Returns an error if a pivot is not positive, because the matrix is then not positive definite.
pub fn upper_factor(a: &mut [f64], k: usize) -> Result<(), Nvfp4Error> {
    for start in (0..k).step_by(PANEL) {
        let end = (start + PANEL).min(k);
        for m in start..end {
            let (above, below) = a.split_at_mut(m * k);
            let panel = &above[start * k..];
            let factors: Vec<f64> = (start..m).map(|i| above[i * k + m]).collect();
            let row = &mut below[m..k];
            let pivot = factors.iter().fold(row[0], |pivot, x| pivot - x * x);
            check_pivot(pivot, m, k)?;
            let diagonal = pivot.sqrt();
            solve_row(
                row,
                &factors,
                panel.get(m..).unwrap_or_default(),
                k,
                diagonal,
            );
            row[0] = diagonal;
        }
        let (above, below) = a.split_at_mut(end * k);
        let panel = &above[start * k..];
        subtract_panel(below, panel, k, |row| (panel, end + row, end + row..k));
    }
    Ok(())
}

/// Returns an error unless the pivot of row `row` is positive and finite.
///
/// # Errors
/// Returns an error that names the row.
pub fn check_pivot(pivot: f64, row: usize, k: usize) -> Result<(), Nvfp4Error> {
    if pivot > 0.0 && pivot.is_finite() {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "Hessian",
        format!("pivot {row} of {k} is {pivot:e}"),
        "a positive definite matrix",
    ))
}

/// Computes the lower triangular inverse of the transposed `upper` of size `k`.
pub fn inverse_of_transposed(upper: &[f64], k: usize) -> Vec<f64> {
    let mut inverse = vec![0.0; k * k];
    for i in 0..k {
        inverse[i * k + i] = 1.0;
    }
    for start in (0..k).step_by(PANEL) {
        let end = (start + PANEL).min(k);
        for m in start..end {
            let (above, below) = inverse.split_at_mut(m * k);
            let factors: Vec<f64> = (start..m).map(|i| upper[i * k + m]).collect();
            let row = &mut below[..=m];
            solve_row(row, &factors, &above[start * k..], k, upper[m * k + m]);
        }
        let (above, below) = inverse.split_at_mut(end * k);
        let factors = &upper[start * k..end * k];
        subtract_panel(below, &above[start * k..], k, |row| {
            (factors, end + row, 0..end)
        });
    }
    inverse
}

/// Subtracts `factors[m]` times row `m` of `above` from `row`, and divides by `divisor`.
fn solve_row(row: &mut [f64], factors: &[f64], above: &[f64], k: usize, divisor: f64) {
    row.par_chunks_mut(TILE)
        .enumerate()
        .for_each(|(tile, out)| {
            if !factors.is_empty() {
                subtract_products(out, factors, &above[tile * TILE..], k);
            }
            out.iter_mut().for_each(|value| *value /= divisor);
        });
}

/// Subtracts products with the rows of `panel` from each of the `rows`. `of_row` returns for a row:
/// the matrix whose column has the factors, that column, and the columns of the row.
fn subtract_panel<'a>(
    rows: &mut [f64],
    panel: &[f64],
    k: usize,
    of_row: impl Fn(usize) -> (&'a [f64], usize, Range<usize>) + Sync,
) {
    let height = panel.len() / k;
    rows.par_chunks_mut(TASK_ROWS * k)
        .enumerate()
        .for_each(|(task, rows)| {
            for tile in (0..k).step_by(TILE) {
                for (i, row) in rows.chunks_exact_mut(k).enumerate() {
                    let (factors, column, columns) = of_row(task * TASK_ROWS + i);
                    let first = columns.start.max(tile);
                    let end = columns.end.min(tile + TILE);
                    if first < end {
                        let factors = &factors[column..];
                        let factors: [f64; PANEL] =
                            array::from_fn(|m| factors.get(m * k).copied().unwrap_or_default());
                        let out = &mut row[first..end];
                        subtract_products(out, &factors[..height], &panel[first..], k);
                    }
                }
            }
        });
}

/// Computes the upper triangular U with H⁻¹ = Uᵀ U of `h` of size `k`, which GPTQ reads row by row.
///
/// With P the reversal of the order, P H P = Rᵀ R gives U = P R⁻ᵀ P. This needs one factorization
/// and one triangular inverse, and never forms H⁻¹.
///
/// # Errors
/// Returns an error if `h` is not positive definite.
pub fn inverse_upper_factor(h: &[f64], k: usize) -> Result<Vec<f64>, Nvfp4Error> {
    let mut reversed: Vec<f64> = h.iter().rev().copied().collect();
    upper_factor(&mut reversed, k)?;
    let mut upper = inverse_of_transposed(&reversed, k);
    upper.reverse();
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
        for k in [1, 7, 40, 160, 300] {
            // B Bᵀ + I of a fixed B is positive definite.
            let b: Vec<f64> = (0..k * k).map(|i| (i as f64 * 1.7).sin()).collect();
            let mut h = vec![0.0; k * k];
            for i in 0..k {
                for j in 0..k {
                    let product: f64 = (0..k).map(|m| b[i * k + m] * b[j * k + m]).sum();
                    h[i * k + j] = product + f64::from(u8::from(i == j));
                }
            }
            let u = inverse_upper_factor(&h, k).unwrap();
            // H Uᵀ U is the identity.
            let product = |a: &[f64], b: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
                let element = |i: usize, j: usize| (0..k).map(|m| a[i * k + m] * b(m, j)).sum();
                (0..k * k).map(|at| element(at / k, at % k)).collect()
            };
            let h_by_u = product(&h, &|m, j| u[j * k + m]);
            let identity = product(&h_by_u, &|m, j| u[m * k + j]);
            for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
                let expected = f64::from(u8::from(i == j));
                let found = identity[i * k + j];
                assert!((found - expected).abs() < 1e-8, "{k}: {i}, {j}: {found}");
                assert!(j >= i || u[i * k + j] == 0.0);
            }
            let mut r = h.clone();
            upper_factor(&mut r, k).unwrap();
            for (i, j) in (0..k).flat_map(|i| (i..k).map(move |j| (i, j))) {
                // One chain of subtractions per element.
                let chain = (0..i).fold(h[i * k + j], |sum, m| sum - r[m * k + i] * r[m * k + j]);
                let expected = match i == j {
                    true => chain.sqrt(),
                    false => chain / r[i * k + i],
                };
                assert_eq!(r[i * k + j], expected, "{k}: {i}, {j}");
            }
        }
        let error = upper_factor(&mut [1.0, 2.0, 2.0, 1.0], 2).unwrap_err();
        assert!(
            error.to_string().contains("pivot 1 of 2 is -3e0"),
            "{error}"
        );
        assert!(upper_factor(&mut [f64::NAN], 1).is_err());
    }
}
