//! Embedding lookup, and the gradient of the table.

use rayon::prelude::*;

use super::Element;

/// Number of tokens that are added sequentially: positions `32 k` to `32 k + 31` of the tokens
/// sorted by id.
pub const EMBEDDING_RUN: usize = 32;

/// Shard of the rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TablePart {
    /// First row of the shard.
    pub first: usize,
    /// Number of rows of the whole table.
    pub of: usize,
}

impl TablePart {
    /// Returns the shard that is the whole table of `rows` rows.
    pub const fn whole(rows: usize) -> Self {
        Self { first: 0, of: rows }
    }
}

/// Returns row `ids[i]` of the table for each `i`. `rows` (`rows` x `cols`) is the shard `part`:
/// other rows of the table give zeros, ids outside the table NaN.
///
/// # Panics
/// Panics if `rows` is not whole rows of `cols` elements.
pub fn embedding<T: Element>(rows: &[T], part: TablePart, ids: &[u32], cols: usize) -> Vec<T> {
    assert!(cols == 0 || rows.len().is_multiple_of(cols), "whole rows");
    let value = |id: u32, column: usize| {
        let own = (id as usize).wrapping_sub(part.first);
        match rows.get(own.saturating_mul(cols).saturating_add(column)) {
            Some(value) => *value,
            None if (id as usize) < part.of => T::from_f32(0.0),
            None => T::from_f32(f32::NAN),
        }
    };
    let row = |id: &u32| {
        let id = *id;
        (0..cols).map(move |column| value(id, column))
    };
    ids.iter().flat_map(row).collect()
}

/// Computes the gradient of a table of `vocab` rows from `grad` (`ids.len()` x `cols`), the
/// gradient of the rows looked up: the sum over the tokens of each id, in `f32`. Ids that are not a
/// row are ignored.
///
/// Tokens are sorted by id, stably. The tokens of an id in the same [32 positions](EMBEDDING_RUN)
/// are added one after another, starting from 0, and these sums are added in order.
///
/// # Panics
/// Panics if `grad` does not have `ids.len() * cols` elements.
pub fn embedding_gradient<T: Element>(
    grad: &[T],
    ids: &[u32],
    vocab: usize,
    cols: usize,
) -> Vec<f32> {
    assert_eq!(grad.len(), ids.len() * cols, "`grad` must hold ids * cols");
    let mut out = vec![0f32; vocab * cols];
    if cols == 0 {
        return out;
    }
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|token| ids[*token as usize]);
    let mut starts = vec![0usize; vocab + 1];
    for id in ids.iter().filter(|id| (**id as usize) < vocab) {
        starts[*id as usize + 1] += 1;
    }
    for id in 0..vocab {
        starts[id + 1] += starts[id];
    }
    out.par_chunks_mut(cols).enumerate().for_each(|(id, sums)| {
        let (mut position, end) = (starts[id], starts[id + 1]);
        let mut first = true;
        let mut run = vec![0f32; cols];
        while position < end {
            let stop = (position / EMBEDDING_RUN + 1) * EMBEDDING_RUN;
            run.fill(0.0);
            for token in &order[position..stop.min(end)] {
                let row = &grad[*token as usize * cols..][..cols];
                for (sum, value) in run.iter_mut().zip(row) {
                    *sum += value.to_f32();
                }
            }
            for (sum, run) in sums.iter_mut().zip(&run) {
                *sum = if first { *run } else { *sum + run };
            }
            first = false;
            position = stop.min(end);
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_adds_up_what_was_looked_up() {
        let ids: Vec<u32> = (0..500).map(|i| (i * i * 7 + i) % 11).collect();
        let cols = 3;
        let grad: Vec<f32> = (0..ids.len() * cols).map(|i| (i % 17) as f32).collect();
        let found = embedding_gradient(&grad, &ids, 10, cols);
        let mut expected = vec![0f32; 10 * cols];
        for (token, id) in ids.iter().enumerate().filter(|(_, id)| **id < 10) {
            for c in 0..cols {
                expected[*id as usize * cols + c] += grad[token * cols + c];
            }
        }
        // Integers: no sum is rounded.
        assert_eq!(found, expected);
        let rows = embedding(&found, TablePart::whole(10), &[3, 10], cols);
        assert_eq!(rows[..3], expected[9..12]);
        assert!(rows[3..].iter().all(|value| value.is_nan()));
    }
}
