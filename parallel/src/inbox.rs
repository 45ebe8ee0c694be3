//! Queue of received messages, by sender and group.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use crate::error::Failure;

/// Maximum bytes queued per sender; the sender waits with more.
const MOST_WAITING: usize = 256 << 20;

/// Transport of messages between ranks. Messages of one sender in one group arrive in order.
pub(crate) trait Transport: Send + Sync {
    /// Sends `message` to rank `to` of the world, which must not be this one.
    fn send(&self, to: usize, group: u64, message: Vec<u8>) -> Result<(), Absent>;

    /// Returns the messages received by this rank.
    fn inbox(&self) -> &Inbox;

    /// Ends the calls of all ranks, including this one, with `failure`.
    fn abort(&self, failure: &Failure);
}

/// Reason why no message is available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Absent {
    /// The deadline has passed.
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

/// Queue of received messages; see the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|held| held.into_inner())
    }

    /// Adds a message once fewer than [`MOST_WAITING`] bytes of its sender are queued.
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

    /// Registers that no more messages come from `from`.
    pub fn lose(&self, from: usize, reason: String) {
        self.lock().lost.entry(from).or_insert(reason);
        self.changed.notify_all();
    }

    /// Ends every call of this rank with `failure` from now on; the first failure is kept.
    pub fn abort(&self, failure: &Failure) {
        self.lock().failure.get_or_insert_with(|| failure.clone());
        self.changed.notify_all();
    }

    /// Returns the failure that ended the run, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Returns the next message of `from` in `group`.
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
