//! Memory that branches of graphs use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;

/// The memory that a branch uses: what runs beside it is given none of it. Clones are one list.
#[derive(Clone, Debug, Default)]
pub(super) struct Held(Arc<Mutex<Vec<Handle>>>);

/// The lists of branches that are being queued, each with its stream.
static QUEUED: Mutex<Vec<(StreamId, Held)>> = Mutex::new(Vec::new());

fn queued() -> MutexGuard<'static, Vec<(StreamId, Held)>> {
    QUEUED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The branch that the calling thread is queueing, if there is one, holds `memory` until its join.
pub fn hold_for_branch(memory: &Handle) {
    let stream = StreamId::current();
    if let Some((_, held)) = queued().iter().find(|(of, _)| *of == stream) {
        held.push(memory);
    }
}

impl Held {
    fn memory(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the calling thread allocates from here on is of the branch, and of no other.
    pub(super) fn begin(&self) {
        let stream = StreamId::current();
        let mut queued = queued();
        // One that a panic has left here.
        queued.retain(|(of, _)| *of != stream);
        queued.push((stream, self.clone()));
    }

    /// What it allocates from here on is not.
    pub(super) fn end(&self) {
        queued().retain(|(_, held)| !Arc::ptr_eq(&held.0, &self.0));
    }

    /// Keeps `memory`.
    pub(super) fn push(&self, memory: &Handle) {
        self.memory().push(memory.clone());
    }

    /// Keeps nothing any more.
    pub(super) fn release(&self) {
        self.memory().clear();
    }
}
