//! Pads groups of rows to an alignment.
//!
//! Rows `offsets[g]..offsets[g + 1]` of a matrix are group `g`; groups may be empty. Offsets
//! ascend, and the last one may be less than the number of rows: the remaining rows belong to no
//! group.

/// Returns the largest number of rows that `rows` rows in `groups` groups can take if each group is
/// padded to a multiple of `alignment`: `alignment · (n + (rows - n) / alignment)` with
/// `n = min(rows, groups)`, reached if all groups but one have a single row. It does not depend on
/// the offsets, so memory for the padded rows can be allocated without reading them.
pub const fn padded_bound(rows: usize, groups: usize, alignment: usize) -> usize {
    let single = if rows < groups { rows } else { groups };
    alignment * (single + (rows - single) / alignment)
}

/// Returns the start of each group after padding to a multiple of `alignment`, and the end of the
/// last group.
///
/// # Panics
/// Panics if there is no offset, or the offsets are not ascending up to `rows`.
pub fn padded_offsets(offsets: &[u32], rows: usize, alignment: usize) -> Vec<u32> {
    assert!(
        offsets.is_sorted() && offsets.last().is_some_and(|&end| end as usize <= rows),
        "`offsets` must ascend up to {rows}"
    );
    let mut padded = vec![0];
    let mut end = 0;
    for group in offsets.windows(2) {
        end += (group[1] - group[0]).next_multiple_of(alignment as u32);
        padded.push(end);
    }
    padded
}

/// Returns the rows of `x` with each group padded by zero rows, and the [`padded_offsets`]. The
/// result has [`padded_bound`] rows; those after the last group are zero.
///
/// # Panics
/// Panics if `x` does not have `rows * cols` elements, or like [`padded_offsets`].
pub fn pad_groups<T: Copy + Default>(
    x: &[T],
    rows: usize,
    cols: usize,
    offsets: &[u32],
    alignment: usize,
) -> (Vec<T>, Vec<u32>) {
    assert_eq!(x.len(), rows * cols, "`x` must hold rows * cols elements");
    let padded = padded_offsets(offsets, rows, alignment);
    let bound = padded_bound(rows, offsets.len() - 1, alignment);
    let mut out = vec![T::default(); bound * cols];
    for (group, &start) in offsets.windows(2).zip(&padded) {
        let source = &x[group[0] as usize * cols..group[1] as usize * cols];
        out[start as usize * cols..][..source.len()].copy_from_slice(source);
    }
    (out, padded)
}

/// Inverts [`pad_groups`]: returns `rows` rows, in which rows of no group are zero.
///
/// # Panics
/// Panics if `padded` does not have [`padded_bound`] rows, or like [`padded_offsets`].
pub fn unpad_groups<T: Copy + Default>(
    padded: &[T],
    rows: usize,
    cols: usize,
    offsets: &[u32],
    alignment: usize,
) -> Vec<T> {
    assert_eq!(
        padded.len(),
        padded_bound(rows, offsets.len() - 1, alignment) * cols,
        "`padded` must hold the padded rows"
    );
    let mut out = vec![T::default(); rows * cols];
    let starts = padded_offsets(offsets, rows, alignment);
    for (group, start) in offsets.windows(2).zip(starts) {
        let target = &mut out[group[0] as usize * cols..group[1] as usize * cols];
        target.copy_from_slice(&padded[start as usize * cols..][..target.len()]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_reached_and_never_passed() {
        for alignment in [1usize, 4, 16, 128] {
            for rows in [0usize, 1, 3, 15, 16, 17, 200, 1000] {
                for groups in [1usize, 2, 5, 40] {
                    let bound = padded_bound(rows, groups, alignment);
                    // All groups but the last have one row.
                    let mut offsets: Vec<u32> = (0..groups).map(|g| g.min(rows) as u32).collect();
                    offsets.push(rows as u32);
                    let padded = padded_offsets(&offsets, rows, alignment);
                    assert_eq!(
                        *padded.last().unwrap() as usize,
                        bound,
                        "{rows} rows, {groups} groups"
                    );
                    // Any other split needs at most as many rows.
                    for seed in 0..20u32 {
                        let mut offsets: Vec<u32> = (0..=groups as u32)
                            .map(|g| g.wrapping_mul(2_654_435_761u32.wrapping_mul(seed + 1)) >> 7)
                            .map(|value| value % (rows as u32 + 1))
                            .collect();
                        offsets.sort();
                        let padded = padded_offsets(&offsets, rows, alignment);
                        assert!(*padded.last().unwrap() as usize <= bound);
                    }
                }
            }
        }
    }

    #[test]
    fn round_trip_with_empty_groups() {
        let x: Vec<u16> = (1..=60).collect();
        let offsets = [0, 0, 3, 3, 20, 20];
        let (padded, starts) = pad_groups(&x, 20, 3, &offsets, 16);
        assert_eq!(starts, [0, 0, 16, 16, 48, 48]);
        assert_eq!(padded[..9], x[..9]);
        assert!(padded[9..48].iter().all(|&value| value == 0));
        assert_eq!(padded[48..99], x[9..]);
        assert_eq!(unpad_groups(&padded, 20, 3, &offsets, 16), x);
    }
}
