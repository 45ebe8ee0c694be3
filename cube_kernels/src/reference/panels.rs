//! Rows of an operand that are decoded together, so that no decoded copy of a large one is ever
//! whole.

use std::ops::Range;

/// Bytes of `f32` that a panel may have, where that is no fewer than [`PANEL_ROWS`] rows.
const PANEL_BYTES: usize = 32 << 20;

/// Rows that a panel may have at least.
///
/// A GEMM of fewer rows could be summed in another order than the whole one: GEMMs choose their
/// loops by shape, those of small M or N apart from all others. Panels of one operand are of the
/// same size but for one row, so that none has fewer than half of this.
const PANEL_ROWS: usize = 640;

/// `outer` rows of `depth` elements in panels: in order, as few as there can be, of equal size but
/// for one row, and none larger than 32 MiB in `f32` or 640 rows, whichever is more. One, of
/// nothing, where there are no rows.
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
