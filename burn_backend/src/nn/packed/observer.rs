//! Observer of a layer's inputs during a calibration.

use std::sync::{Arc, Mutex, MutexGuard};

use nvfp4_formats::BlockScaling;

/// Largest magnitude of the inputs of a layer during a calibration. Shared by clones of the layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observer(Arc<Mutex<Option<Observed>>>);

/// Inputs seen since the calibration began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observed {
    /// Number of inputs with at least one element.
    pub inputs: u64,
    /// Largest magnitude; NaN or infinite if an input was.
    pub amax: f32,
}

impl Observer {
    fn lock(&self) -> MutexGuard<'_, Option<Observed>> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Begins to observe.
    pub fn start(&self) {
        *self.lock() = Some(Observed::default());
    }

    /// Ends to observe, and returns the inputs seen.
    pub fn finish(&self) -> Observed {
        self.lock().take().unwrap_or_default()
    }

    /// Returns true between [`start`](Self::start) and [`finish`](Self::finish).
    pub fn is_active(&self) -> bool {
        self.lock().is_some()
    }

    /// Adds an input with this amax.
    pub fn add(&self, amax: f32) {
        if let Some(observed) = self.lock().as_mut() {
            observed.inputs += 1;
            // `f32::max` drops a NaN.
            if !observed.amax.is_nan() && (amax.is_nan() || amax > observed.amax) {
                observed.amax = amax;
            }
        }
    }
}

impl Observed {
    /// Returns the global scale that dequantizes inputs of this amax.
    pub fn scale(&self) -> f32 {
        match self.amax {
            // Any scale quantizes zeros to zeros, except 0.
            0.0 => 1.0,
            amax => amax / BlockScaling::Standard.range(),
        }
    }
}
