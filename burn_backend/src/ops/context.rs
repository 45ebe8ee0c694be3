//! What a layer brings to its products beside their operands: it changes when and how often work is
//! done, never a result.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn_core::tensor::FloatDType;
use nvfp4_kernels::Form;

use super::LinearSpec;
use crate::telemetry::Probe;

/// What a layer keeps from one product to the next. The default keeps nothing.
#[derive(Clone, Debug, Default)]
pub struct LinearContext {
    pub(crate) weights: Option<WeightCache>,
    /// Where to leave what is seen of the operands, while someone looks.
    pub(crate) probe: Option<Probe>,
    /// What operands are made as that one product reads and nothing else; where it is open, what that
    /// product takes fastest.
    pub(crate) form: Option<Form>,
}

impl LinearContext {
    /// The form of an operand that one product reads and nothing else, which takes it fastest in the form
    /// `fastest`.
    pub(super) fn form(&self, fastest: impl FnOnce() -> Form) -> Form {
        match (&self.probe, self.form) {
            // Who looks, looks at codes.
            (Some(_), _) => Form::Packed,
            (None, Some(form)) => form,
            (None, None) => fastest(),
        }
    }

    /// The same for a weight that is not kept.
    pub(crate) fn without_weights(self) -> Self {
        Self {
            weights: None,
            ..self
        }
    }
}

/// The packed operands of a layer's weight, kept for as long as the weight stays the same tensor: the
/// micro-batches of gradient accumulation quantize a weight once.
///
/// A weight is told from its successor by the autodiff node of the tensor, which every optimizer
/// step, load and cast replaces. What was kept of the last weight is dropped when the next one is
/// quantized. There is one entry for each device, so that replicas of data-parallel training, which
/// share the cache as they share the rest of a layer's state, do not evict each other's.
#[derive(Clone, Default)]
pub(crate) struct WeightCache {
    entries: Arc<Mutex<Vec<Entry>>>,
}

/// What the operands of a weight were made of, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WeightKey {
    /// Identity of the weight.
    pub node: u64,
    /// Type of the activations, which operands in high precision have too.
    pub dtype: FloatDType,
    /// The recipe, without what does not concern the weight.
    pub spec: LinearSpec,
}

struct Entry {
    key: WeightKey,
    /// The device (`B::Device`), by its text: devices of different backends have different types.
    device: String,
    /// The operands, of a type that only the backend knows.
    operands: Box<dyn Any + Send>,
}

impl WeightCache {
    /// What was kept on `device` for `key`.
    pub(crate) fn get<T: Clone + 'static>(&self, device: &str, key: &WeightKey) -> Option<T> {
        let entries = self.entries.lock().expect("no panic while it is held");
        let entry = entries
            .iter()
            .find(|entry| entry.device == device && entry.key == *key)?;
        entry.operands.downcast_ref().cloned()
    }

    /// Keep `operands` on `device`, in place of what was kept there before.
    pub(crate) fn put<T: Send + 'static>(&self, device: &str, key: WeightKey, operands: T) {
        let mut entries = self.entries.lock().expect("no panic while it is held");
        entries.retain(|entry| entry.device != device);
        entries.push(Entry {
            key,
            device: device.into(),
            operands: Box::new(operands),
        });
    }

    /// Forget everything.
    pub(crate) fn clear(&self) {
        self.entries
            .lock()
            .expect("no panic while it is held")
            .clear();
    }
}

impl fmt::Debug for WeightCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.lock().map_or(0, |entries| entries.len());
        write!(f, "WeightCache({entries} weights)")
    }
}
