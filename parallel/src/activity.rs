//! Current activity of a process, for the watchdog.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Failure, Result};
use crate::meter::Meter;

/// Activity of a rank at one point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Number of collectives begun so far.
    pub sequence: u64,
    /// True if the rank is inside a collective.
    pub inside: bool,
    /// Current collective, or last label.
    pub doing: String,
    /// Time since the activity began.
    pub since: Duration,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    /// Label of the activity between collectives.
    label: String,
    /// Current collective.
    call: Option<String>,
    since: Instant,
}

/// Check that the watchdog runs at each heartbeat.
type Probe = Box<dyn Fn() -> Result<()> + Send>;

#[derive(Default)]
struct Probes(Mutex<Vec<Probe>>);

impl fmt::Debug for Probes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probes")
    }
}

/// Activity of this rank, shared by its groups and its watchdog.
#[derive(Debug, Clone)]
pub(crate) struct Activity {
    state: Arc<Mutex<State>>,
    probes: Arc<Probes>,
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
            probes: Arc::default(),
            meter: Meter::default(),
        }
    }

    /// Returns the meter of the collectives.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let state = self.state.lock();
        change(&mut state.unwrap_or_else(|held| held.into_inner()))
    }

    /// Sets the label of the rank's activity between collectives.
    pub fn label(&self, text: &str) {
        self.with(|state| {
            state.label = text.into();
            state.since = Instant::now();
        });
    }

    /// Registers `probe`, which the watchdog calls at each heartbeat.
    pub fn watch(&self, probe: impl Fn() -> Result<()> + Send + 'static) {
        let probes = self.probes.0.lock();
        let mut probes = probes.unwrap_or_else(|held| held.into_inner());
        probes.push(Box::new(probe));
    }

    /// Calls all probes.
    ///
    /// # Errors
    /// Returns the first error of a probe.
    pub fn probe(&self) -> Result<()> {
        let probes = self.probes.0.lock();
        let probes = probes.unwrap_or_else(|held| held.into_inner());
        probes.iter().try_for_each(|probe| probe())
    }

    /// Enters `call`, over host memory, until the result is dropped.
    pub fn enter(&self, call: String) -> Inside {
        Inside {
            since: Some(self.begin(call)),
            activity: self.clone(),
        }
    }

    /// Enters the queueing of `call` on a device until the result is dropped. This time is not
    /// counted as waiting for other ranks.
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

    /// Returns the failure of this rank, `rank`, in what it is doing; `reason` continues "rank N
    /// failed: ".
    pub fn failure(&self, rank: usize, reason: impl fmt::Display) -> Failure {
        Failure {
            rank,
            doing: self.snapshot().doing,
            reason: format!("failed: {reason}"),
        }
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

/// Guard that ends with the collective.
pub(crate) struct Inside {
    activity: Activity,
    /// Begin, if its time counts.
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
