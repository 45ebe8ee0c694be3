//! Group of threads of one process, on which every parallel algorithm is tested without a network
//! or a GPU.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::activity::Activity;
use crate::collective::HostGroup;
use crate::error::{Failure, Result};
use crate::inbox::{Absent, Inbox, Transport};

/// Messages of one rank. When it is dropped, the others learn that it is gone.
struct Loopback {
    rank: usize,
    inboxes: Arc<[Inbox]>,
    /// Delay of each message.
    delay: Duration,
}

impl Transport for Loopback {
    fn send(&self, to: usize, group: u64, message: Vec<u8>) -> std::result::Result<(), Absent> {
        if let Some(failure) = self.inbox().failure() {
            return Err(Absent::Aborted(failure));
        }
        if !self.delay.is_zero() {
            thread::sleep(self.delay);
        }
        self.inboxes[to].push(self.rank, group, message);
        Ok(())
    }

    fn inbox(&self) -> &Inbox {
        &self.inboxes[self.rank]
    }

    fn abort(&self, failure: &Failure) {
        self.inboxes.iter().for_each(|inbox| inbox.abort(failure));
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        for inbox in self.inboxes.iter() {
            inbox.lose(self.rank, "its thread ended".into());
        }
    }
}

/// Creates the groups of `size` ranks, each for a separate thread. A call waits for another rank
/// for at most `timeout`.
///
/// # Panics
/// If `size` is zero.
pub fn groups(size: usize, timeout: Duration) -> Vec<HostGroup> {
    slow_groups(size, timeout, Duration::ZERO)
}

/// Version of [`groups`] in which each message takes `delay`, to simulate a slow connection.
///
/// # Panics
/// If `size` is zero.
pub fn slow_groups(size: usize, timeout: Duration, delay: Duration) -> Vec<HostGroup> {
    assert!(size > 0, "size is 0, but a group has a rank");
    let inboxes: Arc<[Inbox]> = (0..size).map(|_| Inbox::default()).collect();
    let group = |rank| {
        let inboxes = inboxes.clone();
        let transport = Arc::new(Loopback {
            rank,
            inboxes,
            delay,
        });
        HostGroup::world(transport, (rank, size), timeout, Activity::new())
    };
    (0..size).map(group).collect()
}

/// Runs `body` on each rank in a separate thread; returns the results in rank order.
///
/// # Panics
/// If `body` panics; after all threads have ended.
pub fn run<T: Send>(
    groups: Vec<HostGroup>,
    body: impl Fn(HostGroup) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let body = &body;
    thread::scope(|scope| {
        let threads = groups
            .into_iter()
            .map(|group| scope.spawn(move || body(group)));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
