//! Gradients that are reduced beside the rest of the backward.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_core::backend::{Backend, tensor::FloatTensor};

/// Gradients of a group's parameters whose collectives were queued beside a backward, and may not
/// have run. Clones are the same.
#[derive(Clone, Default)]
pub struct Waiting {
    entries: Arc<Mutex<Entries>>,
}

/// By the parameter's id, a [`Reduced`] of the backend of the backward for each of its uses.
type Entries = BTreeMap<u64, Vec<Box<dyn Any + Send>>>;

/// A gradient before and after the collective, which reads and writes them until it is joined.
struct Reduced<B: Backend> {
    before: FloatTensor<B>,
    after: FloatTensor<B>,
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} gradients", self.entries().len())
    }
}

impl Waiting {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a gradient of the parameter `id` waits.
    pub fn has(&self, id: u64) -> bool {
        self.entries().contains_key(&id)
    }

    /// Adds the gradient of a use of the parameter `id`.
    pub(super) fn push<B: Backend>(&self, id: u64, before: FloatTensor<B>, after: FloatTensor<B>) {
        let reduced = Reduced::<B> { before, after };
        self.entries()
            .entry(id)
            .or_default()
            .push(Box::new(reduced));
    }

    /// The sum over all uses of the parameter `id`, each behind `wait`, which has what follows wait
    /// for its collective.
    ///
    /// # Panics
    /// When none waits, or one is of another backend.
    pub(super) fn join<B: Backend>(
        &self,
        id: u64,
        wait: impl Fn(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let own = self.entries().remove(&id);
        let joined = own.unwrap_or_default().into_iter().map(|reduced| {
            let Ok(reduced) = reduced.downcast::<Reduced<B>>() else {
                panic!("the gradient of {id:x} is of another device");
            };
            let after = wait(reduced.after);
            // Nothing takes its memory before the wait is queued.
            drop(reduced.before);
            after
        });
        joined
            .reduce(B::float_add)
            .unwrap_or_else(|| panic!("no gradient of {id:x} waits"))
    }
}
