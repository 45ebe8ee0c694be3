//! Panels: rows of an operand that are decoded together, so that a large operand is never decoded
//! as a whole.

use std::ops::Range;

/// Largest number of bytes of a panel in `f32`, unless that is fewer than [`PANEL_ROWS`] rows.
const PANEL_BYTES: usize = 32 << 20;

/// Number of rows that a panel may always have.
///
/// A GEMM with fewer rows could use another summation order than the whole one: GEMMs choose their
/// loops by shape, and those of small M or N differ from all others. Panels of one operand have
/// equal sizes up to one row, so that none has fewer than half of this.
const PANEL_ROWS: usize = 640;

/// Splits `outer` rows of `depth` elements into panels: in order, as few as possible, of equal size
/// up to one row, and none larger than 32 MiB in `f32` or 640 rows, whichever is more. Returns one
/// empty panel if there are no rows.
pub fn panels(outer: usize, depth: usize) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let most = (PANEL_BYTES / (4 * depth.max(1))).max(PANEL_ROWS);
    let count = outer.div_ceil(most).max(1);
    (0..count).map(move |i| outer * i / count..outer * (i + 1) / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_the_rows_within_the_bound() {
        for outer in [0, 1, 7, 640, 641, 1281, 4096, 14336, 100_003] {
            for depth in [0, 16, 48, 4096, 14336, 65536, 1 << 20] {
                let bound = PANEL_BYTES.max(PANEL_ROWS * depth * 4);
                let mut end = 0;
                let parts = panels(outer, depth);
                let count = parts.len();
                for part in parts {
                    assert_eq!(part.start, end, "{outer} x {depth}");
                    assert!(
                        part.len() * depth * 4 <= bound,
                        "{outer} x {depth}: {part:?}"
                    );
                    let least = if count == 1 { outer } else { PANEL_ROWS / 2 };
                    assert!(part.len() >= least, "{outer} x {depth}: {part:?}");
                    end = part.end;
                }
                assert_eq!(end, outer);
            }
        }
        // A Llama-3 8B weight takes 235 MB in `f32`, in seven panels.
        assert_eq!(panels(14336, 4096).len(), 7);
        assert_eq!(panels(640, 1 << 20).len(), 1);
    }
}
