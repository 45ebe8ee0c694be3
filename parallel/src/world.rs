//! World: all connections of a process to the others of its run, set up by one call.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::activity::Activity;
use crate::collective::{Collective, HostGroup};
use crate::environment::Environment;
use crate::error::{Failure, ParallelError, Result};
use crate::inbox::Transport;
use crate::store::{Limits, Store, StoreClient};
use crate::tcp::{Mesh, resolve};
use crate::watchdog::Watchdog;

/// Timeouts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Time for all ranks to join: 5 minutes.
    pub join: Duration,
    /// Time in a collective for the slowest rank: 10 minutes. Rank 0 evaluates and saves in
    /// between.
    pub operation: Duration,
    /// Time without a heartbeat: 15 seconds.
    pub silence: Duration,
    /// Time for this process to end by itself after the run has failed: 10 seconds. Then the
    /// watchdog ends it with exit code 1, because a rank may wait for a device forever. `None`: the
    /// watchdog does not end it.
    pub grace: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(300),
            operation: Duration::from_secs(600),
            silence: Duration::from_secs(15),
            grace: Some(Duration::from_secs(10)),
        }
    }
}

/// Connections of a process to the others of its run.
///
/// A rank that is dropped without [`leave`](Self::leave) ends the run, like a rank that dies.
pub struct World {
    environment: Environment,
    settings: Settings,
    group: Arc<HostGroup>,
    client: StoreClient,
    // Dropped before the store, which would see this rank die.
    watchdog: Watchdog,
    /// Store, on rank 0.
    store: Option<OwnStore>,
}

/// Store of rank 0. Before it ends, the others learn why a collective of rank 0 failed.
struct OwnStore {
    store: Store,
    transport: Arc<dyn Transport>,
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        if let Some(failure) = self.transport.inbox().failure() {
            self.store.end(failure);
        }
    }
}

impl World {
    /// Joins the run: starts the store on rank 0, finds the other ranks, and begins heartbeats. All
    /// ranks call it.
    ///
    /// # Errors
    /// Returns an error if rank 0 cannot listen on its address or other ranks cannot reach it, the
    /// token differs, or a rank does not join in time.
    pub fn join(environment: Environment, settings: Settings) -> Result<Self> {
        let Environment {
            rank,
            world,
            ref address,
            port,
            ref token,
            ..
        } = environment;
        let address = resolve(address, port)?;
        let limits = Limits {
            silence: settings.silence,
            operation: settings.operation,
        };
        let store = match rank {
            0 => Some(Store::start(address, token.clone(), world, limits)?),
            _ => None,
        };
        let connect = || StoreClient::connect(address, token, rank, settings.join);
        let client = connect()?;
        let activity = Activity::new();
        let mesh = Mesh::connect(&client, token, (rank, world), settings.join)?;
        let mesh: Arc<dyn Transport> = Arc::new(mesh);
        let store = store.map(|store| OwnStore {
            store,
            transport: mesh.clone(),
        });
        let group = HostGroup::world(
            mesh.clone(),
            (rank, world),
            settings.operation,
            activity.clone(),
        );
        let watchdog = Watchdog::start(connect()?, rank, activity, move |failure| {
            // Peers learn the reason before they see the connection end.
            mesh.abort(failure);
            // The owner of a device's memory may be waiting for the device.
            drop(mesh);
            if let Some(grace) = settings.grace {
                thread::sleep(grace);
                eprintln!("error: rank {rank}: the run was ended: {failure}");
                std::process::exit(1);
            }
        })?;
        Ok(Self {
            environment,
            settings,
            group: Arc::new(group),
            client,
            watchdog,
            store,
        })
    }

    /// Returns the position of this process in the run.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Arc<HostGroup> {
        &self.group
    }

    /// Returns the store, for data other than collectives, such as ids of NCCL communicators.
    pub fn store(&self) -> &StoreClient {
        &self.client
    }

    /// Returns the failure that ended the run, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.watchdog.failure()
    }

    /// Ends the run on all ranks because of this one: `reason` continues "rank N failed: ".
    pub fn fail(&self, reason: &str) {
        let failure = self.group.activity().failure(self.environment.rank, reason);
        // The store notifies ranks that are not in a collective.
        let _ = self.client.abort(failure.clone());
        self.group.transport().abort(&failure);
    }

    /// Waits until all ranks have called this, and leaves the run. Rank 0 leaves last.
    ///
    /// # Errors
    /// Returns an error if the run has failed or a rank does not call it in time.
    pub fn leave(self) -> Result<()> {
        self.group.label("leaving");
        self.group.barrier()?;
        let Self {
            watchdog,
            store,
            group,
            settings,
            environment,
            ..
        } = self;
        watchdog.stop();
        if let Some(store) = store {
            let store = &store.store;
            store.wait_for_leaving(environment.world, settings.silence);
            if let Some(failure) = store.failure() {
                return Err(ParallelError::Aborted(failure));
            }
        }
        drop(group);
        Ok(())
    }
}
