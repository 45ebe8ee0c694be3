//! A bound on what waits for something.

use std::collections::VecDeque;

/// What holds memory until something was queued, the oldest first, with the bytes that it holds.
#[derive(Debug)]
pub(super) struct Window<T> {
    /// Bytes that it may hold.
    most: usize,
    entries: VecDeque<(usize, T)>,
}

impl<T> Window<T> {
    /// An empty one, which may hold `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            entries: VecDeque::new(),
        }
    }

    /// Adds what holds `bytes`.
    pub(super) fn push(&mut self, bytes: usize, entry: T) {
        self.entries.push_back((bytes, entry));
    }

    /// Bytes that it holds.
    fn bytes(&self) -> usize {
        self.entries.iter().map(|(bytes, _)| bytes).sum()
    }

    /// Returns true if it holds more than it may.
    pub(super) fn is_full(&self) -> bool {
        self.bytes() > self.most
    }

    /// Takes the oldest, as long as it holds more than it may; but never what was added last, which
    /// has just begun.
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

    /// Takes the last that `is_it` accepts and all that are older; nothing where there is none.
    pub(super) fn take_through(&mut self, is_it: impl Fn(&T) -> bool) -> Vec<T> {
        let last = self.entries.iter().rposition(|(_, entry)| is_it(entry));
        let count = last.map_or(0, |last| last + 1);
        let taken = self.entries.drain(..count);
        taken.map(|(_, entry)| entry).collect()
    }

    /// Takes all.
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
        // A large one is alone.
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
