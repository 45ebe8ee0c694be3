//! Order of the rows in training.

use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::random::stream;

/// Position in the order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Number of finished epochs.
    pub epoch: u64,
    /// Number of rows of this epoch already used.
    pub index: usize,
}

/// Iterator over the rows with a new permutation per epoch, which depends only on the seed and the
/// epoch.
#[derive(Debug, Clone)]
pub struct Order {
    seed: u64,
    position: Position,
    permutation: Vec<u32>,
}

impl Order {
    /// Creates the order of `count` rows, starting at the first epoch.
    ///
    /// # Panics
    /// If there is no row, or there are 2^32 or more.
    pub fn new(seed: u64, count: usize) -> Self {
        assert!(count > 0, "there is no row");
        assert!(u32::try_from(count).is_ok(), "{count} rows");
        Self {
            seed,
            position: Position::default(),
            permutation: permutation(seed, 0, count),
        }
    }

    /// Returns the position of the next row.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Continues from `position`.
    ///
    /// # Panics
    /// If the epoch has no such row.
    pub fn seek(&mut self, position: Position) {
        let count = self.permutation.len();
        assert!(position.index < count, "{position:?} of {count} rows");
        if position.epoch != self.position.epoch {
            self.permutation = permutation(self.seed, position.epoch, count);
        }
        self.position = position;
    }

    /// Returns the next `count` rows, across epochs if necessary.
    pub fn take(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| self.next_row()).collect()
    }

    fn next_row(&mut self) -> usize {
        let Position { epoch, index } = self.position;
        let row = self.permutation[index] as usize;
        self.seek(match index + 1 == self.permutation.len() {
            true => Position {
                epoch: epoch + 1,
                index: 0,
            },
            false => Position {
                epoch,
                index: index + 1,
            },
        });
        row
    }
}

/// Returns the permutation of `count` rows in an epoch (Fisher-Yates shuffle).
fn permutation(seed: u64, epoch: u64, count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut stream = stream(seed, "epochs", epoch);
    for last in (1..count).rev() {
        order.swap(last, stream.random_range(0..=last as u64) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_comes_once_in_an_epoch() {
        let mut order = Order::new(3, 50);
        let epochs: Vec<Vec<usize>> = (0..3).map(|_| order.take(50)).collect();
        for epoch in &epochs {
            let mut sorted = epoch.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert_ne!(epochs[0], epochs[1]);
        assert_ne!(epochs[1], epochs[2]);
        assert_ne!(epochs[0], (0..50).collect::<Vec<_>>());
        assert_ne!(Order::new(4, 50).take(50), epochs[0]);
    }

    #[test]
    fn an_order_goes_on_anywhere() {
        let mut whole = Order::new(1, 7);
        let all = whole.take(30);
        for done in 0..30 {
            let mut order = Order::new(1, 7);
            order.take(done);
            let position = order.position();
            assert_eq!(position.epoch as usize * 7 + position.index, done);
            let mut resumed = Order::new(1, 7);
            resumed.seek(position);
            assert_eq!(resumed.take(30 - done), all[done..]);
        }
    }

    #[test]
    fn one_row_comes_again_and_again() {
        assert_eq!(Order::new(0, 1).take(3), [0, 0, 0]);
    }
}
