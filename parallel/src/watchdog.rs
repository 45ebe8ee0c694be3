//! Heartbeats of a rank, and termination of its process after the run has failed.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::activity::Activity;
use crate::error::{Failure, ParallelError, Result};
use crate::store::{Request, Response, StoreClient};

/// Interval between heartbeats.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

/// Sends heartbeats over a separate connection, in a separate thread, until it is
/// [stopped](Self::stop). If it is dropped without that, the connection ends, which tells the store
/// that the rank is gone.
pub(crate) struct Watchdog {
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<Mutex<Option<Failure>>>,
}

impl Watchdog {
    /// Starts the thread of `rank`. It calls `on_failure` once: if the run was ended, the store is
    /// gone, or a probe of `activity` fails, which ends the run on all ranks.
    pub fn start(
        client: StoreClient,
        rank: usize,
        activity: Activity,
        on_failure: impl FnOnce(&Failure) + Send + 'static,
    ) -> Result<Self> {
        // The first heartbeat is sent here, so that a rank is watched once it has joined.
        beat(&client, &activity).map_err(ParallelError::Aborted)?;
        let (stop, stopped) = channel();
        let failure = Arc::new(Mutex::new(None));
        let known = failure.clone();
        let body = move || {
            let failure = loop {
                match stopped.recv_timeout(INTERVAL) {
                    Ok(()) => {
                        // The answer is ignored: the store may end first.
                        let _ = client.ask(&Request::Leave);
                        return;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if let Err(failure) = beat(&client, &activity) {
                    break failure;
                }
                if let Err(error) = activity.probe() {
                    let failure = activity.failure(rank, error);
                    // If the store is gone, so is the run.
                    let _ = client.abort(failure.clone());
                    break failure;
                }
            };
            *known.lock().unwrap_or_else(|held| held.into_inner()) = Some(failure.clone());
            on_failure(&failure);
        };
        let thread = thread::Builder::new()
            .name("watchdog".into())
            .spawn(body)
            .map_err(|error| ParallelError::Launch(format!("starting the watchdog: {error}")))?;
        Ok(Self {
            stop,
            thread: Some(thread),
            failure,
        })
    }

    /// Returns the failure that ended the run, if any.
    pub fn failure(&self) -> Option<Failure> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(|held| held.into_inner()).clone()
    }

    /// Tells the store that this rank has finished.
    pub fn stop(mut self) {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends one heartbeat; returns the failure if the run was ended.
fn beat(client: &StoreClient, activity: &Activity) -> std::result::Result<(), Failure> {
    let reason = match client.ask(&Request::Heartbeat(activity.snapshot())) {
        Ok(Response::Done) => return Ok(()),
        Ok(Response::Aborted(failure)) => return Err(failure),
        Ok(other) => format!("answered a heartbeat by {other:?}"),
        Err(error) => format!("is gone, and the store with it: {error}"),
    };
    Err(Failure {
        rank: 0,
        doing: String::new(),
        reason,
    })
}
