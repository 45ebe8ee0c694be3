//! Bounded queue of entries that hold memory.

use std::collections::VecDeque;

/// Entries that hold memory until something was queued, oldest first, with their sizes in bytes.
#[derive(Debug)]
pub(super) struct Window<T> {
    /// Maximum number of bytes.
    most: usize,
    entries: VecDeque<(usize, T)>,
}

impl<T> Window<T> {
    /// Creates an empty queue of at most `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            entries: VecDeque::new(),
        }
    }

    /// Adds an entry that holds `bytes` bytes.
    pub(super) fn push(&mut self, bytes: usize, entry: T) {
        self.entries.push_back((bytes, entry));
    }

    /// Number of bytes held.
    fn bytes(&self) -> usize {
        self.entries.iter().map(|(bytes, _)| bytes).sum()
    }

    /// Returns true if the maximum is exceeded.
    pub(super) fn is_full(&self) -> bool {
        self.bytes() > self.most
    }

    /// Removes the oldest entries while the maximum is exceeded; never the newest one, which has
    /// just begun.
    pub(super) fn take_excess(&mut self) -> Vec<T> {
        let mut bytes = self.bytes();
        let mut taken = Vec::new();
        while bytes > self.most && self.entries.len() > 1 {
            let (own, entry) = self.entries.pop_front().expect("there are two");
            bytes -= own;
            taken.push(entry);
        }
        taken
    }

    /// Removes the newest entry that `is_it` accepts and all older ones; nothing if there is none.
    pub(super) fn take_through(&mut self, is_it: impl Fn(&T) -> bool) -> Vec<T> {
        let last = self.entries.iter().rposition(|(_, entry)| is_it(entry));
        let count = last.map_or(0, |last| last + 1);
        let taken = self.entries.drain(..count);
        taken.map(|(_, entry)| entry).collect()
    }

    /// Removes all entries.
    pub(super) fn take(&mut self) -> Vec<T> {
        self.entries.drain(..).map(|(_, entry)| entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_leave_first() {
        let mut window = Window::new(10);
        window.push(4, 'a');
        window.push(6, 'b');
        assert!(!window.is_full());
        assert!(window.take_excess().is_empty());
        window.push(5, 'c');
        assert!(window.is_full());
        assert_eq!(window.take_excess(), ['a', 'b']);
        // A large entry is alone.
        window.push(20, 'd');
        assert_eq!(window.take_excess(), ['c']);
        assert!(window.is_full());
        assert_eq!(window.take(), ['d']);
        assert!(!window.is_full() && window.take().is_empty());
    }

    #[test]
    fn one_leaves_with_all_that_are_older() {
        let mut window = Window::new(10);
        for entry in ['a', 'b', 'c'] {
            window.push(1, entry);
        }
        assert!(window.take_through(|entry| *entry == 'd').is_empty());
        assert_eq!(window.take_through(|entry| *entry == 'b'), ['a', 'b']);
        assert!(window.take_through(|entry| *entry == 'b').is_empty());
        assert_eq!(window.take(), ['c']);
    }
}
