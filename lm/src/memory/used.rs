//! What tensors and memory pools of a device have.

use burn::tensor::Device;

/// Device memory of a training, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUsed {
    /// The most that tensors had at once in a step: parameters, gradients, the state of the
    /// optimizer, what the forward keeps, and intermediate results. What PyTorch calls
    /// `max_memory_allocated`.
    pub tensors: u64,
    /// What the memory pools hold of the device at the end, PyTorch's `memory_reserved`. The context
    /// of the device and the code of kernels are not in it.
    pub pools: u64,
}

impl MemoryUsed {
    /// The larger of each, of several ranks.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            tensors: self.tensors.max(other.tensors),
            pools: self.pools.max(other.pools),
        }
    }

    /// Both numbers, little-endian.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let numbers = u128::from(self.tensors) | u128::from(self.pools) << 64;
        numbers.to_le_bytes()
    }

    /// Those that [`to_bytes`](Self::to_bytes) gave.
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        let numbers = u128::from_le_bytes(bytes);
        Self {
            tensors: numbers as u64,
            pools: (numbers >> 64) as u64,
        }
    }
}

/// What `work` gives, and the most that tensors on `device` had at once while it ran; none where the
/// runtime does not tell. `work` waits for the device at its end.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
pub(crate) fn peak_of<T>(_: &Device, work: impl FnOnce() -> T) -> (T, Option<u64>) {
    (work(), None)
}

/// What `work` gives, and the most that tensors on `device` had at once while it ran; none where the
/// runtime does not tell. `work` waits for the device at its end.
///
/// A thread polls the runtime, which has tensors in the order of the queue, and interrupts the
/// device's thread for a moment each time.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) fn peak_of<T>(device: &Device, work: impl FnOnce() -> T) -> (T, Option<u64>) {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::{client, usage};

    /// Between two polls.
    const PAUSE: Duration = Duration::from_micros(100);

    let Some(client) = client(&device.clone().without_autodiff()) else {
        return (work(), None);
    };
    /// Ends the polls, whatever `work` does.
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

    /// A tensor that is gone at the end is in the peak.
    #[cfg(feature = "cpu")]
    #[test]
    fn a_tensor_is_in_the_peak_of_the_work_that_has_it() {
        use burn::tensor::Tensor;

        const ELEMENTS: usize = 16 << 20;
        let device = Device::cpu();
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
