//! Per-step numbers of the optimizer in device memory.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, Int, Tensor};
use nvfp4_formats::reference::{AdamWParams, AdamWSchedule};

use crate::ops::optimizer::OptimizerOps;

/// Number of words of an [`AdamWSchedule`].
const WORDS: usize = 4;

/// Buffer of the schedule, at a constant address: a kernel writes the numbers of each step there,
/// so that the kernels of a captured graph read those of the step of their replay.
#[derive(Debug, Clone, Default)]
pub(super) struct Schedule {
    buffer: Option<(Device, Tensor<1, Int>)>,
    /// True if the buffer holds the numbers of the next step.
    begun: bool,
}

impl Schedule {
    /// Writes and returns the schedule of step `time`, counted from 1, on `device`: `u32[4]`.
    pub(super) fn at(
        &mut self,
        params: &AdamWParams,
        lr: f64,
        time: u64,
        device: &Device,
    ) -> Tensor<1, Int> {
        let words = AdamWSchedule::new(params, lr, time).words();
        let buffer = match self.buffer.take() {
            Some((of, buffer)) if of == *device => buffer,
            _ => Tensor::zeros([WORDS], (device, DType::U32)),
        };
        let buffer = Dispatch::nvfp4_set_words(buffer.into_dispatch(), words);
        let buffer = Tensor::from_dispatch(buffer);
        self.buffer = Some((device.clone(), buffer.clone()));
        buffer
    }

    /// Writes the numbers of step `time` now, for a later call of [`begun`](Self::begun).
    pub(super) fn begin(&mut self, params: &AdamWParams, lr: f64, time: u64, device: &Device) {
        self.at(params, lr, time, device);
        self.begun = true;
    }

    /// Returns the numbers that [`begin`](Self::begin) wrote, if it was called since the last step,
    /// on `device`.
    pub(super) fn begun(&mut self, device: &Device) -> Option<Tensor<1, Int>> {
        let (of, buffer) = self.buffer.as_ref()?;
        (std::mem::take(&mut self.begun) && of == device).then(|| buffer.clone())
    }
}
