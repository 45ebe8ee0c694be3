//! Memory that branches of graphs use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;

/// Memory that a branch uses, which concurrent work must not receive. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub(super) struct Held(Arc<Mutex<Vec<Handle>>>);

/// The branches being queued, each with its stream.
static QUEUED: Mutex<Vec<(StreamId, Held)>> = Mutex::new(Vec::new());

fn queued() -> MutexGuard<'static, Vec<(StreamId, Held)>> {
    QUEUED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the branch that the calling thread is queueing, if any, hold `memory` until its join.
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

    /// Assigns the calling thread's allocations from here on to this branch, and to no other.
    pub(super) fn begin(&self) {
        let stream = StreamId::current();
        let mut queued = queued();
        // A panic may have left an entry here.
        queued.retain(|(of, _)| *of != stream);
        queued.push((stream, self.clone()));
    }

    /// Stops assigning the calling thread's allocations to this branch.
    pub(super) fn end(&self) {
        queued().retain(|(_, held)| !Arc::ptr_eq(&held.0, &self.0));
    }

    /// Holds `memory`.
    pub(super) fn push(&self, memory: &Handle) {
        self.memory().push(memory.clone());
    }

    /// Releases all memory.
    pub(super) fn release(&self) {
        self.memory().clear();
    }
}
