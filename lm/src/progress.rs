//! Progress of long work: loading, checking, writing, tokenizing, calibrating, quantizing and
//! evaluating models.
//!
//! A thread has at most one listener. Work reports to the listener of the thread that it runs on.

use std::cell::RefCell;
use std::sync::Arc;

/// Progress of one work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Name of the work: a verb.
    pub task: &'static str,
    /// Unit of the amounts.
    pub unit: Unit,
    /// Amount done.
    pub done: usize,
    /// Amount of the whole work.
    pub total: usize,
    /// Name of the part in progress, such as a layer; empty if parts have no names.
    pub part: &'a str,
    /// True if the work has ended, also by an error.
    pub has_ended: bool,
}

/// Unit of an amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of tensors or texts.
    Bytes,
    /// Linear layers.
    Layers,
    /// Sequences of tokens.
    Sequences,
    /// Tokens.
    Tokens,
    /// Questions.
    Questions,
}

/// Receiver of progress.
pub type Listener = Arc<dyn Fn(&Progress<'_>) + Send + Sync>;

thread_local! {
    static LISTENER: RefCell<Option<Listener>> = const { RefCell::new(None) };
}

/// Reports the progress of work on this thread to `listener`, which replaces the former one.
pub fn listen(listener: Option<Listener>) {
    LISTENER.set(listener);
}

/// Returns the listener of this thread, if any.
pub fn listener() -> Option<Listener> {
    LISTENER.with_borrow(Clone::clone)
}

/// Work in progress. Its end is reported when it is dropped.
#[derive(Debug)]
pub(crate) struct Work {
    task: &'static str,
    unit: Unit,
    done: usize,
    total: usize,
}

impl Work {
    /// Begins the work `task`, of which `done` of `total` is done already.
    pub(crate) fn begin(task: &'static str, unit: Unit, done: usize, total: usize) -> Self {
        let work = Self {
            task,
            unit,
            done,
            total,
        };
        work.report("", false);
        work
    }

    /// Reports that `amount` more is done.
    pub(crate) fn add(&mut self, amount: usize) {
        self.done += amount;
        self.report("", false);
    }

    /// Reports that work on the part `name` begins.
    pub(crate) fn part(&self, name: &str) {
        self.report(name, false);
    }

    fn report(&self, part: &str, has_ended: bool) {
        let &Self {
            task,
            unit,
            done,
            total,
        } = self;
        if let Some(listener) = listener() {
            listener(&Progress {
                task,
                unit,
                done,
                total,
                part,
                has_ended,
            });
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.report("", true);
    }
}

/// Recorder of progress.
#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Calls `work` and returns its result with the amounts that it reported: done and total. Equal
    /// amounts in a row are one.
    pub(crate) fn told<T>(task: &str, work: impl FnOnce() -> T) -> (T, Vec<(usize, usize)>) {
        let told = Arc::new(Mutex::new(Vec::new()));
        let (record, task) = (told.clone(), task.to_owned());
        listen(Some(Arc::new(move |it: &Progress<'_>| {
            if it.task == task {
                record.lock().unwrap().push((it.done, it.total));
            }
        })));
        let result = work();
        listen(None);
        let mut told = std::mem::take(&mut *told.lock().unwrap());
        told.dedup();
        (result, told)
    }

    #[test]
    fn work_reports_its_parts_and_its_end() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = seen.clone();
        listen(Some(Arc::new(move |it: &Progress<'_>| {
            let one = (it.done, it.part.to_owned(), it.has_ended);
            record.lock().unwrap().push(one);
        })));
        let mut work = Work::begin("quantize", Unit::Layers, 2, 4);
        work.part("q");
        work.add(1);
        drop(work);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let expected = [
            (2, "", false),
            (2, "q", false),
            (3, "", false),
            (3, "", true),
        ];
        let expected = expected.map(|(done, part, ended)| (done, part.to_owned(), ended));
        assert_eq!(seen, expected);
        // Another thread has no listener, and needs none.
        std::thread::spawn(|| drop(Work::begin("load", Unit::Bytes, 0, 1)))
            .join()
            .unwrap();
        listen(None);
        assert!(listener().is_none());
    }
}
