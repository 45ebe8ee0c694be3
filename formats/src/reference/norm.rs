//! RMSNorm and LayerNorm of rows, with an optional residual added first, and their gradients.
//!
//! Sums along a row in the forward: block `b` of 16 elements is added to partial sum `b % 256`,
//! element after element, and the partial sums are added in a tree, neighbors first, then
//! neighboring pairs, and so on. Sums over rows (the gradients of gain and bias) are split into
//! parts. Their number depends only on the number of rows, see [`norm_parts`], and so do their
//! starts, see [`norm_parts_are_strips`]. No order depends on the launch geometry, so that kernels
//! have identical bits on every device.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    Element,
    simd::{rows_per_task, with_fma},
};
use crate::BLOCK;

/// Kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// `x / sqrt(mean(x²) + ε) · gain`.
    Rms,
    /// `(x - mean(x)) / sqrt(mean((x - mean(x))²) + ε) · gain + bias`.
    Layer,
}

/// Largest number of parts of sums over rows: the CTAs that run at once on a GPU of 132 SMs, two
/// per SM.
const MOST_PARTS: usize = 264;
/// Smallest number of rows of a part, if there are that many.
const LEAST_ROWS: usize = 8;
/// Partial sums over which the parts are distributed in turn, before these are added in a tree.
pub const PART_LANES: usize = 16;
/// Elements per task of an addition.
const CHUNK: usize = 8192;
/// Partial sums along a row in the forward.
pub const SUM_LANES: usize = 256;
/// Partial sums along a row in the backward, which needs more registers per element.
pub const GRAD_SUM_LANES: usize = 2 * SUM_LANES;

/// Returns the number of parts of `rows` rows.
pub fn norm_parts(rows: usize) -> usize {
    rows.div_ceil(LEAST_ROWS).min(MOST_PARTS)
}

/// True if the parts of `rows` rows start at multiples of 16 rows. This requires at least one block
/// of 16 rows per part, and that the longest part becomes at most an eighth longer.
pub fn norm_parts_are_strips(rows: usize) -> bool {
    let (strips, parts) = (rows.div_ceil(BLOCK), norm_parts(rows));
    let longest = |units: usize| units.div_ceil(parts.max(1));
    strips >= parts && 8 * BLOCK * longest(strips) <= 9 * longest(rows)
}

/// Returns the rows of part `part` of `parts`.
fn part_rows(part: usize, parts: usize, rows: usize) -> Range<usize> {
    let start = |part: usize| match norm_parts_are_strips(rows) {
        true => (part * rows.div_ceil(BLOCK) / parts * BLOCK).min(rows),
        false => part * rows / parts,
    };
    start(part)..start(part + 1)
}

/// Returns the number of partial sums over which the rows of a part are distributed in turn, first
/// row first; these are then added in a tree, neighbors first. It is the number of rows of `cols`
/// elements that fit in 256 units with 16 elements each, 1 to 8.
pub fn norm_part_lanes(cols: usize) -> usize {
    SUM_LANES / 32 / norm_planes(cols, SUM_LANES / 32)
}

/// Returns the planes of 32 units that share a row of `cols` elements, 16 elements per unit, at
/// most `most`.
pub fn norm_planes(cols: usize, most: usize) -> usize {
    (cols.div_ceil(32 * BLOCK))
        .clamp(1, most)
        .next_power_of_two()
}

/// Result of a norm.
#[derive(Debug, Clone)]
pub struct NormForward<T> {
    /// `x + residual`, rounded to their type, which is the input of the normalization; `None`
    /// without a residual.
    pub sum: Option<Vec<T>>,
    /// Normalized rows.
    pub normed: Vec<T>,
    /// Reciprocal of the standard deviation of each row, or of its root mean square; for
    /// [`Norm::Layer`] followed by the mean of each row.
    pub stats: Vec<f32>,
}

/// Gradients of a norm.
#[derive(Debug, Clone)]
pub struct NormBackward<T> {
    /// Gradient of `x`, and of the residual.
    pub x: Vec<T>,
    /// Gradient of the gain.
    pub gain: Vec<f32>,
    /// Gradient of the bias; empty for [`Norm::Rms`].
    pub bias: Vec<f32>,
}

/// Sums over the blocks of a row; `add` adds the term of an element to a partial sum.
#[inline(always)]
fn row_sum<const LANES: usize>(cols: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    let blocks = cols.div_ceil(BLOCK);
    for block in 0..blocks {
        let sum = &mut sums[block % LANES];
        for column in block * BLOCK..((block + 1) * BLOCK).min(cols) {
            *sum = add(*sum, column);
        }
    }
    // The other sums are zeros, and none of these is a negative zero, which adding zeros would
    // change.
    tree(&mut sums[..blocks.next_power_of_two().min(LANES)])
}

/// Sums a power of two of sums in a tree: neighbors, then neighboring pairs, and so on.
#[inline(always)]
fn tree(sums: &mut [f32]) -> f32 {
    let mut len = sums.len();
    while len > 1 {
        len /= 2;
        for i in 0..len {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}

/// Returns the reciprocal standard deviation from the mean of squares.
fn rstd(mean_square: f32, epsilon: f32) -> f32 {
    1.0 / (mean_square + epsilon).sqrt()
}

/// Normalizes each row of `x` (`[rows, cols]`), or of `x + residual` rounded to their type. `gain`
/// has one factor per column; `bias`, added to the result, is only for [`Norm::Layer`].
///
/// # Panics
/// Panics if a matrix does not have `rows * gain.len()` elements.
pub fn norm_forward<T: Element>(
    norm: Norm,
    x: &[T],
    residual: Option<&[T]>,
    (gain, bias): (&[f32], Option<&[f32]>),
    rows: usize,
    epsilon: f32,
) -> NormForward<T> {
    let cols = gain.len();
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let sum: Option<Vec<T>> = residual.map(|residual| {
        assert_eq!(
            residual.len(),
            x.len(),
            "`residual` must have the size of `x`"
        );
        let mut sum = x.to_vec();
        let pairs = sum.par_chunks_mut(CHUNK).zip(residual.par_chunks(CHUNK));
        pairs.for_each(|(sum, residual)| add_residual(sum, residual));
        sum
    });
    let x = sum.as_deref().unwrap_or(x);
    let (run, width) = (rows_per_task(cols), cols.max(1));
    let mut normed = x.to_vec();
    // Rows without columns are in no chunk.
    let mut stats = vec![row_stats::<T>(norm, &[], epsilon); rows];
    normed
        .par_chunks_mut(run * width)
        .zip(stats.par_chunks_mut(run))
        .for_each(|(rows, stats)| norm_rows(norm, rows, stats, (gain, bias), epsilon));
    let mut found: Vec<f32> = stats.iter().map(|stats| stats[0]).collect();
    if norm == Norm::Layer {
        found.extend(stats.iter().map(|stats| stats[1]));
    }
    NormForward {
        sum,
        normed,
        stats: found,
    }
}

with_fma!(fn add_residual[T: Element](x: &mut [T], residual: &[T]) = add_residual_body);

#[inline(always)]
fn add_residual_body<T: Element>(x: &mut [T], residual: &[T]) {
    for (x, residual) in x.iter_mut().zip(residual) {
        *x = T::from_f32(x.to_f32() + residual.to_f32());
    }
}

with_fma!(
    fn norm_rows[T: Element](
        norm: Norm,
        rows: &mut [T],
        stats: &mut [[f32; 2]],
        factors: (&[f32], Option<&[f32]>),
        epsilon: f32,
    ) = norm_rows_body
);

/// Normalizes rows in place.
#[inline(always)]
fn norm_rows_body<T: Element>(
    norm: Norm,
    rows: &mut [T],
    stats: &mut [[f32; 2]],
    (gain, bias): (&[f32], Option<&[f32]>),
    epsilon: f32,
) {
    for (row, stats) in rows.chunks_exact_mut(gain.len()).zip(stats) {
        *stats = row_stats(norm, row, epsilon);
        norm_row(norm, row, *stats, gain, bias);
    }
}

/// Normalizes a row in place.
#[inline(always)]
fn norm_row<T: Element>(
    norm: Norm,
    row: &mut [T],
    [rstd, mean]: [f32; 2],
    gain: &[f32],
    bias: Option<&[f32]>,
) {
    let columns = row.iter_mut().zip(gain);
    match (norm, bias) {
        (Norm::Rms, _) => {
            for (x, gain) in columns {
                *x = T::from_f32(x.to_f32() * rstd * gain);
            }
        }
        (Norm::Layer, None) => {
            for (x, gain) in columns {
                *x = T::from_f32((x.to_f32() - mean) * rstd * gain);
            }
        }
        (Norm::Layer, Some(bias)) => {
            for ((x, gain), bias) in columns.zip(bias) {
                let normed = (x.to_f32() - mean) * rstd;
                *x = T::from_f32(normed.mul_add(*gain, *bias));
            }
        }
    }
}

/// Returns the rstd and the mean of a row.
#[inline(always)]
fn row_stats<T: Element>(norm: Norm, row: &[T], epsilon: f32) -> [f32; 2] {
    let cols = row.len() as f32;
    let mean = match norm {
        Norm::Rms => 0.0,
        Norm::Layer => row_sum::<SUM_LANES>(row.len(), |sum, i| sum + row[i].to_f32()) / cols,
    };
    let squares = row_sum::<SUM_LANES>(row.len(), |sum, i| {
        let x = match norm {
            Norm::Rms => row[i].to_f32(),
            Norm::Layer => row[i].to_f32() - mean,
        };
        x.mul_add(x, sum)
    });
    [rstd(squares / cols, epsilon), mean]
}

/// Computes the gradients of [`norm_forward`] from `grad`, the gradient of its output, and
/// `sum_grad`, the gradient that the sum receives from its other uses. `x` is the input of the
/// normalization (the sum, if there is a residual), and `stats` are those of the forward.
///
/// Let `n` be the normalized row before gain and bias, and `t = grad · gain`. The gradient of `x`
/// is `rstd · (t - mean(t) - n · mean(t · n)) + sum_grad`, without `mean(t)` for [`Norm::Rms`]. The
/// gradient of the gain is the sum of `grad · n` over the rows, and that of the bias the sum of
/// `grad`.
///
/// # Panics
/// Panics if a matrix does not have `rows * gain.len()` elements, or `stats` does not match the
/// rows.
pub fn norm_backward<T: Element>(
    norm: Norm,
    grad: &[T],
    sum_grad: Option<&[T]>,
    x: &[T],
    stats: &[f32],
    gain: &[f32],
) -> NormBackward<T> {
    let cols = gain.len();
    let rows = match norm {
        Norm::Rms => stats.len(),
        Norm::Layer => stats.len() / 2,
    };
    for matrix in [Some(grad), sum_grad, Some(x)].into_iter().flatten() {
        assert_eq!(
            matrix.len(),
            rows * cols,
            "a matrix must hold rows * cols elements"
        );
    }
    let operands = BackwardOperands {
        norm,
        grad,
        sum_grad,
        x,
        stats,
        gain,
    };
    let (run, width) = (rows_per_task(cols), cols.max(1));
    let mut by_x = grad.to_vec();
    by_x.par_chunks_mut(run * width)
        .enumerate()
        .for_each(|(task, by_x)| gradients_by_x(&operands, task * run, by_x));
    let parts = norm_parts(rows);
    let lanes = norm_part_lanes(cols);
    let biased = norm == Norm::Layer;
    let partial: Vec<[Vec<f32>; 2]> = (0..parts)
        .into_par_iter()
        .map(|part| {
            let mut gain = vec![0f32; lanes * cols];
            let mut bias = vec![0f32; if biased { lanes * cols } else { 0 }];
            let rows = part_rows(part, parts, rows);
            add_by_factors(&operands, rows, &mut gain, &mut bias);
            [gain, bias].map(|sums| add_lanes(sums, cols))
        })
        .collect();
    let [gain, bias] = [0, 1].map(|which| {
        let len = if which == 0 || biased { cols } else { 0 };
        let column = |column| sum_parts(partial.iter().map(|part| part[which][column]));
        (0..len).map(column).collect()
    });
    NormBackward {
        x: by_x,
        gain,
        bias,
    }
}

/// Sums the rows of a matrix with a power of two of rows, in a tree, neighbors first.
fn add_lanes(mut sums: Vec<f32>, cols: usize) -> Vec<f32> {
    while sums.len() > cols {
        let pairs = sums.chunks_exact(2 * cols);
        sums = pairs
            .flat_map(|pair| {
                let (first, second) = pair.split_at(cols);
                first.iter().zip(second).map(|(a, b)| a + b)
            })
            .collect();
    }
    sums
}

/// Sums the parts of one column: part `p` is added to sum `p % 16`, and the sums are added in a
/// tree.
fn sum_parts(parts: impl Iterator<Item = f32>) -> f32 {
    let mut sums = [0f32; PART_LANES];
    for (part, value) in parts.enumerate() {
        sums[part % PART_LANES] += value;
    }
    tree(&mut sums)
}

/// Matrices of the backward, and the factors of rows and columns.
struct BackwardOperands<'a, T> {
    norm: Norm,
    grad: &'a [T],
    sum_grad: Option<&'a [T]>,
    x: &'a [T],
    stats: &'a [f32],
    gain: &'a [f32],
}

impl<'a, T> BackwardOperands<'a, T> {
    #[inline(always)]
    fn row(&self, row: usize) -> Row<'a, T> {
        let cols = self.gain.len();
        let at = row * cols..(row + 1) * cols;
        Row {
            norm: self.norm,
            grad: &self.grad[at.clone()],
            sum_grad: self.sum_grad.map(|grad| &grad[at.clone()]),
            x: &self.x[at],
            rstd: self.stats[row],
            mean: match self.norm {
                Norm::Rms => 0.0,
                Norm::Layer => self.stats[self.stats.len() / 2 + row],
            },
            gain: self.gain,
        }
    }
}

with_fma!(
    fn gradients_by_x[T: Element](operands: &BackwardOperands<'_, T>, first: usize, by_x: &mut [T])
        = gradients_by_x_body
);

/// Writes the gradients of `x` for the rows from `first` on.
#[inline(always)]
fn gradients_by_x_body<T: Element>(
    operands: &BackwardOperands<'_, T>,
    first: usize,
    by_x: &mut [T],
) {
    let rows = by_x.chunks_exact_mut(operands.gain.len());
    for (i, by_x) in rows.enumerate() {
        operands.row(first + i).by_x(by_x);
    }
}

with_fma!(
    fn add_by_factors[T: Element](
        operands: &BackwardOperands<'_, T>,
        rows: Range<usize>,
        gain: &mut [f32],
        bias: &mut [f32],
    ) = add_by_factors_body
);

/// Adds the gradients of gain and bias to the lanes, over which `rows` are distributed in turn.
/// Without a bias its sums are empty.
#[inline(always)]
fn add_by_factors_body<T: Element>(
    operands: &BackwardOperands<'_, T>,
    rows: Range<usize>,
    gain: &mut [f32],
    bias: &mut [f32],
) {
    let cols = operands.gain.len();
    let lanes = norm_part_lanes(cols);
    for (i, row) in rows.enumerate() {
        let (row, at) = (operands.row(row), i % lanes * cols);
        row.add_by_gain(&mut gain[at..][..cols]);
        if !bias.is_empty() {
            for (grad, sum) in row.grad.iter().zip(&mut bias[at..][..cols]) {
                *sum += grad.to_f32();
            }
        }
    }
}

/// A row of the backward.
struct Row<'a, T> {
    norm: Norm,
    grad: &'a [T],
    sum_grad: Option<&'a [T]>,
    x: &'a [T],
    rstd: f32,
    mean: f32,
    gain: &'a [f32],
}

impl<T: Element> Row<'_, T> {
    /// Returns a normalized element, before the gain.
    #[inline(always)]
    fn normed(&self, x: T) -> f32 {
        match self.norm {
            Norm::Rms => x.to_f32() * self.rstd,
            Norm::Layer => (x.to_f32() - self.mean) * self.rstd,
        }
    }

    /// Adds the gradient of the gain to `sums`.
    #[inline(always)]
    fn add_by_gain(&self, sums: &mut [f32]) {
        for ((grad, x), sum) in self.grad.iter().zip(self.x).zip(sums) {
            *sum = grad.to_f32().mul_add(self.normed(*x), *sum);
        }
    }

    /// Writes the gradient of `x`.
    #[inline(always)]
    fn by_x(&self, by_x: &mut [T]) {
        let cols = by_x.len();
        let (grad, x, gain) = (&self.grad[..cols], &self.x[..cols], &self.gain[..cols]);
        let mean = match self.norm {
            Norm::Rms => 0.0,
            Norm::Layer => {
                let add = |sum, i: usize| grad[i].to_f32().mul_add(gain[i], sum);
                row_sum::<GRAD_SUM_LANES>(cols, add) / cols as f32
            }
        };
        let add = |sum, i: usize| (grad[i].to_f32() * gain[i]).mul_add(self.normed(x[i]), sum);
        let dot = row_sum::<GRAD_SUM_LANES>(cols, add) / cols as f32;
        let centered = |i: usize| {
            let grad = match self.norm {
                Norm::Rms => grad[i].to_f32() * gain[i],
                Norm::Layer => grad[i].to_f32().mul_add(gain[i], -mean),
            };
            (-self.normed(x[i])).mul_add(dot, grad)
        };
        match self.sum_grad {
            Some(sum_grad) => {
                for (i, (by_x, sum_grad)) in by_x.iter_mut().zip(sum_grad).enumerate() {
                    *by_x = T::from_f32(centered(i).mul_add(self.rstd, sum_grad.to_f32()));
                }
            }
            None => {
                for (i, by_x) in by_x.iter_mut().enumerate() {
                    *by_x = T::from_f32(centered(i) * self.rstd);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three tasks share the rows.
    #[test]
    fn rows_do_not_depend_on_their_task() {
        let (rows, cols) = (40_usize, 512);
        assert_eq!(rows.div_ceil(rows_per_task(cols)), 3);
        let value = |i: usize| (i * 37 % 101) as f32 / 25.0 - 2.0;
        let x: Vec<f32> = (0..rows * cols).map(value).collect();
        let grad: Vec<f32> = (0..rows * cols).map(|i| value(3 * i + 1)).collect();
        let gain: Vec<f32> = (0..cols).map(|i| 1.0 + value(i) / 8.0).collect();
        for norm in [Norm::Rms, Norm::Layer] {
            let forward =
                |x: &[f32]| norm_forward(norm, x, None, (&gain, None), x.len() / cols, 1e-5);
            let backward =
                |grad, x, stats: &[f32]| norm_backward(norm, grad, None, x, stats, &gain).x;
            let (normed, stats) = (forward(&x).normed, forward(&x).stats);
            let by_x = backward(&grad, &x, &stats);
            for (row, x) in x.chunks(cols).enumerate() {
                let own = row * cols..(row + 1) * cols;
                let alone = forward(x);
                assert_eq!(normed[own.clone()], alone.normed, "{norm:?}, {row}");
                let alone = backward(&grad[own.clone()], x, &alone.stats);
                assert_eq!(by_x[own], alone, "{norm:?}, {row}");
            }
        }
    }
}
