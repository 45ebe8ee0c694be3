//! Messages that have come for a rank and wait to be taken, by sender and group.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use crate::error::Failure;

/// Bytes of one sender that wait; more are left with the sender.
const MOST_WAITING: usize = 256 << 20;

/// How a rank sends to the others and receives from them. Messages of one sender in one group
/// arrive in their order.
pub(crate) trait Transport: Send + Sync {
    /// Sends `message` to rank `to` of the world, which is not this one.
    fn send(&self, to: usize, group: u64, message: Vec<u8>) -> Result<(), Absent>;

    /// What came for this rank.
    fn inbox(&self) -> &Inbox;

    /// Ends the calls of all ranks, this one included, with `failure`.
    fn abort(&self, failure: &Failure);
}

/// Why no message is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Absent {
    /// The time is over.
    Late,
    /// The sender is gone.
    Lost(String),
    /// The run was ended.
    Aborted(Failure),
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<(usize, u64), VecDeque<Vec<u8>>>,
    waiting: HashMap<usize, usize>,
    lost: HashMap<usize, String>,
    failure: Option<Failure>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|held| held.into_inner())
    }

    /// Adds a message, as soon as fewer than [`MOST_WAITING`] bytes of its sender wait.
    pub fn push(&self, from: usize, group: u64, message: Vec<u8>) {
        let mut state = self.lock();
        while state.failure.is_none()
            && state
                .waiting
                .get(&from)
                .is_some_and(|bytes| *bytes > MOST_WAITING)
        {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(|held| held.into_inner());
        }
        *state.waiting.entry(from).or_default() += message.len();
        state
            .queues
            .entry((from, group))
            .or_default()
            .push_back(message);
        self.changed.notify_all();
    }

    /// No more messages come from `from`.
    pub fn lose(&self, from: usize, reason: String) {
        self.lock().lost.entry(from).or_insert(reason);
        self.changed.notify_all();
    }

    /// Every call of this rank ends with `failure` from now on; the first one counts.
    pub fn abort(&self, failure: &Failure) {
        self.lock().failure.get_or_insert_with(|| failure.clone());
        self.changed.notify_all();
    }

    /// Why the run was ended, if it was.
    pub fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// The next message of `from` in `group`.
    pub fn pop(&self, from: usize, group: u64, deadline: Instant) -> Result<Vec<u8>, Absent> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(Absent::Aborted(failure.clone()));
            }
            let queue = state.queues.get_mut(&(from, group));
            if let Some(message) = queue.and_then(VecDeque::pop_front) {
                *state.waiting.entry(from).or_default() -= message.len();
                self.changed.notify_all();
                return Ok(message);
            }
            if let Some(reason) = state.lost.get(&from) {
                return Err(Absent::Lost(reason.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Absent::Late);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|held| held.into_inner()).0;
        }
    }
}
