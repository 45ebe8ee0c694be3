//! What a process is doing, for the watchdog.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::meter::Meter;

/// What a rank does at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Collectives that it has begun so far.
    pub sequence: u64,
    /// True if it is inside of one.
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
pub(crate) struct Activity {
    state: Arc<Mutex<State>>,
    meter: Meter,
}

impl Activity {
    pub fn new() -> Self {
        Self {
            state: Arc::new(Mutex::new(State {
                sequence: 0,
                label: "starting".into(),
                call: None,
                since: Instant::now(),
            })),
            meter: Meter::default(),
        }
    }

    /// What measures the collectives.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let state = self.state.lock();
        change(&mut state.unwrap_or_else(|held| held.into_inner()))
    }

    /// Says what the rank does until its next collective and after it.
    pub fn label(&self, text: &str) {
        self.with(|state| {
            state.label = text.into();
            state.since = Instant::now();
        });
    }

    /// The rank is in `call`, over the memory of the host, until the result is dropped.
    pub fn enter(&self, call: String) -> Inside {
        Inside {
            since: Some(self.begin(call)),
            activity: self.clone(),
        }
    }

    /// The rank queues `call` on a device until the result is dropped: that is no time in which it
    /// waits for other ranks.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn queue(&self, call: String) -> Inside {
        self.begin(call);
        Inside {
            since: None,
            activity: self.clone(),
        }
    }

    fn begin(&self, call: String) -> Instant {
        let now = Instant::now();
        self.with(|state| {
            state.sequence += 1;
            state.call = Some(call);
            state.since = now;
        });
        now
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
pub(crate) struct Inside {
    activity: Activity,
    /// When it began, if its time counts.
    since: Option<Instant>,
}

impl Drop for Inside {
    fn drop(&mut self) {
        let now = Instant::now();
        if let Some(since) = self.since {
            self.activity.meter.add_host_time(now - since);
        }
        self.activity.with(|state| {
            state.call = None;
            state.since = now;
        });
    }
}
