//! Gradients that are reduced beside the rest of the backward.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::DType;

/// Gradients of a group's parameters whose collectives were queued beside a backward, and may not
/// have run. Clones are the same.
#[derive(Clone, Default)]
pub struct Waiting {
    entries: Arc<Mutex<Entries>>,
}

/// By the parameter's id, the type of the gradient and a `FloatTensor` of the backend of the
/// backward for each of its uses: the result of the collective, in the type in which it travelled,
/// which is written until it is joined. What the collective reads is kept where it is queued, and no
/// longer than it takes: a rank has few whole gradients at a time.
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

    /// Adds the reduced gradient, of type `dtype`, of a use of the parameter `id`.
    pub(super) fn push<B: Backend>(&self, (id, dtype): (u64, DType), reduced: FloatTensor<B>) {
        let mut entries = self.entries();
        let uses = entries.entry(id).or_default();
        uses.push((dtype, Box::new(reduced)));
    }

    /// The sum over all uses of the parameter `id`, each behind `wait`, which has what follows wait
    /// for its collective, and gives it the type of the gradient.
    ///
    /// # Panics
    /// If none waits, or one is of another backend.
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
