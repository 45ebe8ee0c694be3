//! What a process is doing, for the watchdog.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a rank does at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Collectives that it has begun so far.
    pub sequence: u64,
    /// Whether it is inside of one.
    pub inside: bool,
    /// The one that it is in, or what it said last.
    pub doing: String,
    /// For how long.
    pub since: Duration,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    /// What it does between collectives.
    label: String,
    /// The collective that it is in.
    call: Option<String>,
    since: Instant,
}

/// What this rank does, shared between the groups that it belongs to and its watchdog.
#[derive(Debug, Clone)]
pub(crate) struct Activity(Arc<Mutex<State>>);

impl Activity {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            sequence: 0,
            label: "starting".into(),
            call: None,
            since: Instant::now(),
        })))
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(|held| held.into_inner()))
    }

    /// Says what the rank does until its next collective and after it.
    pub fn label(&self, text: &str) {
        self.with(|state| {
            state.label = text.into();
            state.since = Instant::now();
        });
    }

    /// The rank is in `call` until the result is dropped.
    pub fn enter(&self, call: String) -> Inside {
        self.with(|state| {
            state.sequence += 1;
            state.call = Some(call);
            state.since = Instant::now();
        });
        Inside(self.clone())
    }

    pub fn snapshot(&self) -> Snapshot {
        self.with(|state| Snapshot {
            sequence: state.sequence,
            inside: state.call.is_some(),
            doing: match &state.call {
                Some(call) => format!("{call}, collective {}", state.sequence),
                None => state.label.clone(),
            },
            since: state.since.elapsed(),
        })
    }
}

/// Ends with the collective.
pub(crate) struct Inside(Activity);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.with(|state| {
            state.call = None;
            state.since = Instant::now();
        });
    }
}
