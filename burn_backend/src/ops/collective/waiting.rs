//! Gradients whose reduction overlaps with the rest of the backward.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::DType;

/// Gradients of a group's parameters whose collectives were queued during a backward and may not
/// have run yet. Clones are the same value.
#[derive(Clone, Default)]
pub struct Waiting {
    entries: Arc<Mutex<Entries>>,
}

/// By parameter id, one entry per use: the dtype of the gradient, and a `FloatTensor` of the
/// backend of the backward with the result of the collective, in the dtype of the exchange. The
/// result is written until it is joined. The input of the collective is kept where it is queued,
/// only as long as needed: a rank holds few unsharded gradients at a time.
type Entries = BTreeMap<u64, Vec<(DType, Box<dyn Any + Send>)>>;

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} gradients", self.entries().len())
    }
}

impl Waiting {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a gradient of the parameter `id` waits.
    pub fn has(&self, id: u64) -> bool {
        self.entries().contains_key(&id)
    }

    /// Adds the reduced gradient, of dtype `dtype`, of a use of the parameter `id`.
    pub(super) fn push<B: Backend>(&self, (id, dtype): (u64, DType), reduced: FloatTensor<B>) {
        let mut entries = self.entries();
        let uses = entries.entry(id).or_default();
        uses.push((dtype, Box::new(reduced)));
    }

    /// Returns the sum over all uses of the parameter `id`, each after `wait`, which makes later
    /// work wait for its collective and converts it to the dtype of the gradient.
    ///
    /// # Panics
    /// If no gradient waits, or one is of another backend.
    pub(super) fn join<B: Backend>(
        &self,
        id: u64,
        wait: impl Fn(FloatTensor<B>, DType) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let own = self.entries().remove(&id);
        let joined = own.unwrap_or_default().into_iter().map(|(dtype, reduced)| {
            let Ok(reduced) = reduced.downcast::<FloatTensor<B>>() else {
                panic!("the gradient of {id:x} is of another device");
            };
            wait(*reduced, dtype)
        });
        joined
            .reduce(B::float_add)
            .unwrap_or_else(|| panic!("no gradient of {id:x} waits"))
    }
}
