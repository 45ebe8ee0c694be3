//! Reads memory and launches from CubeCL.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use nvfp4_kernels::cubecl::future::block_on;
use nvfp4_kernels::cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};

use super::{Kernel, KernelClass};
use crate::memory::{client, peak_of, usage};

pub(crate) fn release(device: &Device) {
    if let Some(client) = client(device) {
        // Memory that stays reserved after an error is only released later.
        let _ = device.sync();
        let _ = client.memory_cleanup();
    }
}

/// Measures the peak of all tensors, in bytes, in one step, and the kernels of another.
pub(crate) fn step(device: &Device, mut step: impl FnMut()) -> (Option<u64>, Vec<Kernel>) {
    if client(device).is_none() {
        return (None, Vec::new());
    }
    let ((), peak) = peak_of(device, &mut step);
    let watch = Arc::new(Watch::default());
    let observation = LaunchObservation::new(watch.clone());
    step();
    drop(observation);
    (peak, watch.kernels())
}

/// Returns the bytes that the memory pools hold.
pub(crate) fn reserved(device: &Device) -> Option<u64> {
    let client = client(device)?;
    Some(usage(&client).bytes_reserved)
}

/// Measures the memory that the result of `make` keeps in use.
pub(crate) fn kept<T>(device: &Device, make: impl FnOnce() -> T) -> Option<u64> {
    let client = client(device)?;
    let in_use = || {
        let _ = device.sync();
        usage(&client).bytes_in_use
    };
    let before = in_use();
    let _made = make();
    Some(in_use().saturating_sub(before))
}

/// Stores the profile of every launch without reading it, so that kernels run undisturbed.
#[derive(Default)]
struct Watch {
    unread: Mutex<Vec<(&'static str, ProfileDuration)>>,
    /// Profiles that an enabled profiling logger has already read.
    read: Mutex<Vec<(&'static str, Duration)>>,
}

impl LaunchObserver for Watch {
    fn launched(&self, _kernel: &'static str) {}

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        let mut unread = self.unread.lock().expect("no panic while it is held");
        unread.push((kernel, profile));
    }

    fn timed(&self, kernel: &'static str, duration: Duration, _method: TimingMethod) {
        let mut read = self.read.lock().expect("no panic while it is held");
        read.push((kernel, duration));
    }
}

impl Watch {
    /// Returns the measured kernels, most expensive first. Waits for the device.
    fn kernels(&self) -> Vec<Kernel> {
        let unread = std::mem::take(&mut *self.unread.lock().expect("nobody panics"));
        let read = std::mem::take(&mut *self.read.lock().expect("nobody panics"));
        let resolved = unread.into_iter().filter_map(|(kernel, profile)| {
            let ticks = block_on(profile.resolve())?;
            Some((kernel, ticks.duration()))
        });
        let mut all: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for (kernel, duration) in resolved.chain(read) {
            let (launches, seconds) = all.entry(kernel).or_default();
            *launches += 1;
            *seconds += duration.as_secs_f64();
        }
        let mut kernels: Vec<Kernel> = all
            .into_iter()
            .map(|(name, (launches, seconds))| Kernel {
                name: name.into(),
                class: KernelClass::of(name),
                launches,
                seconds,
            })
            .collect();
        kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        kernels
    }
}
