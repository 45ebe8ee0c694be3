//! The numbers that change from step to step, in device memory.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, Int, Tensor};
use nvfp4_kernels::reference::{AdamWParams, AdamWSchedule};

use crate::ops::optimizer::OptimizerOps;

/// Words of an [`AdamWSchedule`].
const WORDS: usize = 4;

/// The schedule's buffer, which stays where it is from step to step: a kernel writes the numbers of
/// a step, so that kernels of a captured graph read those of the step that it is replayed for.
#[derive(Debug, Clone, Default)]
pub(super) struct Schedule {
    buffer: Option<(Device, Tensor<1, Int>)>,
    /// True if the buffer has the numbers of the step to come.
    begun: bool,
}

impl Schedule {
    /// The schedule of step `time`, counted from 1, on `device`: `u32[4]`.
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

    /// Has the numbers of step `time` written now, for [`begun`](Self::begun).
    pub(super) fn begin(&mut self, params: &AdamWParams, lr: f64, time: u64, device: &Device) {
        self.at(params, lr, time, device);
        self.begun = true;
    }

    /// What [`begin`](Self::begin) wrote, if it was called since the last step and on `device`.
    pub(super) fn begun(&mut self, device: &Device) -> Option<Tensor<1, Int>> {
        let (of, buffer) = self.buffer.as_ref()?;
        (std::mem::take(&mut self.begun) && of == device).then(|| buffer.clone())
    }
}
