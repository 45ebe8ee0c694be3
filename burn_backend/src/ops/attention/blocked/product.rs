//! Small banded GEMMs: each row uses a range of the K dimension.
//!
//! Each element is summed from its first to its last term by fused multiply-adds, independent of
//! the tiling: omitting zero terms, or sharing a tile with other rows, changes no bit.

use std::ops::Range;

/// Rows per tile.
const ROWS: usize = 4;
/// Columns per tile.
pub const COLUMNS: usize = 16;

/// Left operand: element `(row, k)` is at `row * row_stride + k * step`.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub values: &'a [f32],
    pub row_stride: usize,
    pub step: usize,
}

/// Row-major matrix whose rows begin `pitch` elements apart.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub values: &'a [f32],
    pub pitch: usize,
}

/// Adds `Σ a(first + r, k) · b(k, column..column + COLUMNS)` over `ks` to the sums of `R` rows.
#[inline(always)]
fn add_tile<const R: usize>(
    mut sums: [[f32; COLUMNS]; R],
    a: Left<'_>,
    first: usize,
    b: Rows<'_>,
    column: usize,
    ks: Range<usize>,
) -> [[f32; COLUMNS]; R] {
    let Some(last) = ks.clone().next_back() else {
        return sums;
    };
    assert!((first + R - 1) * a.row_stride + last * a.step < a.values.len());
    assert!(last * b.pitch + column + COLUMNS <= b.values.len());
    for k in ks {
        // SAFETY: `k` is at most `last`, for which the right operand was checked to hold the
        // elements.
        let b: &[f32; COLUMNS] = unsafe { &*b.values.as_ptr().add(k * b.pitch + column).cast() };
        for (r, sums) in sums.iter_mut().enumerate() {
            let at = (first + r) * a.row_stride + k * a.step;
            // SAFETY: neither `r` nor `k` exceeds the values for which the left operand was checked
            // to hold the element.
            let a = unsafe { *a.values.get_unchecked(at) };
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(*b, *sum);
            }
        }
    }
    sums
}

/// Writes `a · b` to `out`, with `count` rows and `depth` terms per element. At least the columns
/// `needed` of each row are written; the bounds of these ranges ascend from row to row. `b` and
/// `out` consist of whole tiles of columns.
#[inline(always)]
pub fn set(
    out: &mut [f32],
    pitch: usize,
    count: usize,
    a: Left<'_>,
    b: Rows<'_>,
    depth: usize,
    needed: impl Fn(usize) -> Range<usize>,
) {
    let tiles = |columns: Range<usize>| {
        let first = columns.start / COLUMNS * COLUMNS;
        (first..columns.end).step_by(COLUMNS)
    };
    let mut row = 0;
    while row + ROWS <= count {
        for column in tiles(needed(row).start..needed(row + ROWS - 1).end) {
            let sums = add_tile([[0.0; COLUMNS]; ROWS], a, row, b, column, 0..depth);
            for (r, sums) in sums.iter().enumerate() {
                out[(row + r) * pitch + column..][..COLUMNS].copy_from_slice(sums);
            }
        }
        row += ROWS;
    }
    for row in row..count {
        for column in tiles(needed(row)) {
            let [sums] = add_tile([[0.0; COLUMNS]; 1], a, row, b, column, 0..depth);
            out[row * pitch + column..][..COLUMNS].copy_from_slice(&sums);
        }
    }
}

/// Adds `a · b` to `out`, with `count` rows of `pitch` elements, a multiple of [`COLUMNS`]. Row `r`
/// uses the terms `terms(r)`; the bounds of these ranges ascend from row to row.
#[inline(always)]
pub fn add(
    out: &mut [f32],
    pitch: usize,
    count: usize,
    a: Left<'_>,
    b: Rows<'_>,
    terms: impl Fn(usize) -> Range<usize>,
) {
    let mut row = 0;
    while row + ROWS <= count {
        let (first, last) = (terms(row), terms(row + ROWS - 1));
        let common = last.start..first.end;
        if common.is_empty() {
            for row in row..row + ROWS {
                add_rows::<1>(out, pitch, row, a, b, terms(row));
            }
        } else {
            for row in row..row + ROWS {
                add_rows::<1>(out, pitch, row, a, b, terms(row).start..common.start);
            }
            add_rows::<ROWS>(out, pitch, row, a, b, common.clone());
            for row in row..row + ROWS {
                add_rows::<1>(out, pitch, row, a, b, common.end..terms(row).end);
            }
        }
        row += ROWS;
    }
    for row in row..count {
        add_rows::<1>(out, pitch, row, a, b, terms(row));
    }
}

/// Adds the terms `ks` to `R` rows beginning at `row`.
#[inline(always)]
fn add_rows<const R: usize>(
    out: &mut [f32],
    pitch: usize,
    row: usize,
    a: Left<'_>,
    b: Rows<'_>,
    ks: Range<usize>,
) {
    if ks.is_empty() {
        return;
    }
    let out = &mut out[row * pitch..][..R * pitch];
    for column in (0..pitch).step_by(COLUMNS) {
        let mut sums = [[0.0; COLUMNS]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&out[r * pitch + column..][..COLUMNS]);
        }
        let sums = add_tile(sums, a, row, b, column, ks.clone());
        for (r, sums) in sums.iter().enumerate() {
            out[r * pitch + column..][..COLUMNS].copy_from_slice(sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(next).take(len).collect()
    }

    /// Covers bands of every shape, with the left operand by rows and by columns.
    #[test]
    fn bands_are_sums_term_after_term() {
        let (depth, columns) = (23, 2 * COLUMNS);
        for count in [1, 4, 7, 12] {
            for (ahead, width) in [(0, 3), (2, 40), (9, 6), (30, 1)] {
                let terms = |r: usize| {
                    let end = (r + ahead).min(depth);
                    end.saturating_sub(width)..end
                };
                let b = values(depth * columns, 2);
                let before = values(count * columns, 3);
                for (row_stride, step) in [(depth, 1), (1, count)] {
                    let a = values(count * depth, 1);
                    let a = Left {
                        values: &a,
                        row_stride,
                        step,
                    };
                    let mut found = before.clone();
                    let right = Rows {
                        values: &b,
                        pitch: columns,
                    };
                    add(&mut found, columns, count, a, right, terms);
                    let mut expected = before.clone();
                    for (r, row) in expected.chunks_mut(columns).enumerate() {
                        for k in terms(r) {
                            let a = a.values[r * row_stride + k * step];
                            for (sum, b) in row.iter_mut().zip(&b[k * columns..]) {
                                *sum = a.mul_add(*b, *sum);
                            }
                        }
                    }
                    assert_eq!(found, expected, "{count} rows, {ahead}, {width}, {step}");
                }
            }
        }
    }

    #[test]
    fn needed_columns_are_written() {
        let (count, depth, columns) = (7, 5, 4 * COLUMNS);
        let (a, b) = (values(count * depth, 1), values(depth * columns, 2));
        let needed = |r: usize| 7 * r..7 * r + 20;
        let mut found = vec![f32::NAN; count * columns];
        let left = Left {
            values: &a,
            row_stride: depth,
            step: 1,
        };
        let right = Rows {
            values: &b,
            pitch: columns,
        };
        set(&mut found, columns, count, left, right, depth, needed);
        for r in 0..count {
            for column in needed(r) {
                let terms = (0..depth).map(|k| (a[r * depth + k], b[k * columns + column]));
                let expected = terms.fold(0f32, |sum, (a, b)| a.mul_add(b, sum));
                assert_eq!(found[r * columns + column], expected, "{r}, {column}");
            }
        }
    }
}
