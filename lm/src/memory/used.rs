//! Measures the memory of tensors and memory pools on a device.

use burn::tensor::Device;

/// Device memory of a training run, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUsed {
    /// Peak memory of tensors in a step: parameters, gradients, optimizer state, state saved for
    /// backward, and intermediate results. PyTorch's `max_memory_allocated`.
    pub tensors: u64,
    /// Device memory held by the memory pools at the end, PyTorch's `memory_reserved`. Excludes the
    /// device context and kernel code.
    pub pools: u64,
}

impl MemoryUsed {
    /// Returns the larger of each value, to combine several ranks.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            tensors: self.tensors.max(other.tensors),
            pools: self.pools.max(other.pools),
        }
    }

    /// Serializes both numbers, little-endian.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let numbers = u128::from(self.tensors) | u128::from(self.pools) << 64;
        numbers.to_le_bytes()
    }

    /// Reads the output of [`to_bytes`](Self::to_bytes).
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        let numbers = u128::from_le_bytes(bytes);
        Self {
            tensors: numbers as u64,
            pools: (numbers >> 64) as u64,
        }
    }
}

/// Runs `work` and returns its result, with the peak bytes of tensors on `device` meanwhile; none
/// if the runtime does not report them. `work` waits for the device at its end.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
pub(crate) fn peak_of<T>(_: &Device, work: impl FnOnce() -> T) -> (T, Option<u64>) {
    (work(), None)
}

/// Runs `work` and returns its result, with the peak bytes of tensors on `device` meanwhile; none
/// if the runtime does not report them. `work` waits for the device at its end.
///
/// A thread polls the runtime, which counts tensors in queue order. Each poll briefly interrupts
/// the device's thread.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) fn peak_of<T>(device: &Device, work: impl FnOnce() -> T) -> (T, Option<u64>) {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::{client, usage};

    /// Interval between polls.
    const PAUSE: Duration = Duration::from_micros(100);

    let Some(client) = client(&device.clone().without_autodiff()) else {
        return (work(), None);
    };
    /// Ends the polling on drop, even if `work` panics.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let polls = scope.spawn(|| {
            let mut peak = 0;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(usage(&client).bytes_in_use);
                thread::sleep(PAUSE);
            }
            peak
        });
        let made = {
            let _done = Done(&done);
            work()
        };
        (made, Some(polls.join().expect("it only polls")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_travel_as_bytes() {
        let used = MemoryUsed {
            tensors: 80_000_000_001,
            pools: u64::MAX,
        };
        assert_eq!(MemoryUsed::from_bytes(used.to_bytes()), used);
        let other = MemoryUsed {
            tensors: 90_000_000_000,
            pools: 1,
        };
        let largest = MemoryUsed {
            tensors: other.tensors,
            pools: used.pools,
        };
        assert_eq!(used.max(other), largest);
    }

    /// A tensor that is freed before the end counts in the peak.
    #[cfg(feature = "cpu")]
    #[test]
    fn a_tensor_is_in_the_peak_of_the_work_that_has_it() {
        use burn::tensor::Tensor;

        const ELEMENTS: usize = 16 << 20;
        let device = nvfp4_test_support::cpu_runtime(Device::cpu);
        let work = |elements| {
            let (sum, peak) = peak_of(&device, || {
                let made = Tensor::<1>::ones([elements], &device);
                let copy = made.clone() * 2;
                let sum = (made + copy).sum().into_scalar::<f32>();
                std::thread::sleep(std::time::Duration::from_millis(5));
                sum
            });
            assert_eq!(sum, 3.0 * elements as f32);
            peak.expect("CubeCL tells")
        };
        assert!(work(ELEMENTS) >= 4 * ELEMENTS as u64);
    }
}
