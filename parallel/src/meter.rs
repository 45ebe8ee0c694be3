//! Time that a rank waits in collectives, for measuring exposed communication.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Span of device time in which the compute stream waits for a collective.
pub trait DeviceSpan: Send {
    /// Returns the length in seconds; waits until the device has passed the end of the span.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn seconds(&self) -> Result<f64, String>;
}

/// Time that one rank spends in the collectives of all of its groups. Clones are the same meter.
///
/// Calls over host memory are always timed, by two clock readings each. Waits of a device's streams
/// are measured only while they are [recorded](Self::record).
#[derive(Clone, Default)]
pub struct Meter(Arc<Times>);

#[derive(Default)]
struct Times {
    host_nanos: AtomicU64,
    records: AtomicBool,
    spans: Mutex<Vec<Box<dyn DeviceSpan>>>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter")
            .field("host_time", &self.host_time())
            .field("is_recording", &self.is_recording())
            .finish_non_exhaustive()
    }
}

impl Meter {
    fn spans(&self) -> MutexGuard<'_, Vec<Box<dyn DeviceSpan>>> {
        self.0.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Total time of all completed calls over host memory: until everything that this rank sends is
    /// on its way, and everything that it receives has arrived.
    pub fn host_time(&self) -> Duration {
        Duration::from_nanos(self.0.host_nanos.load(Ordering::Relaxed))
    }

    /// Adds the time of a call.
    pub(crate) fn add_host_time(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.host_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Sets whether the wait time of the compute stream is measured from now on when collectives
    /// are queued on a device.
    pub fn record(&self, records: bool) {
        self.0.records.store(records, Ordering::Relaxed);
    }

    /// Returns true if the wait time is measured.
    pub fn is_recording(&self) -> bool {
        self.0.records.load(Ordering::Relaxed)
    }

    /// Adds a span; spans of one device must not overlap.
    pub fn push(&self, span: impl DeviceSpan + 'static) {
        self.spans().push(Box::new(span));
    }

    /// Returns the spans since the last call, which the device may not have passed yet.
    pub fn take(&self) -> Vec<Box<dyn DeviceSpan>> {
        std::mem::take(&mut *self.spans())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Seconds(f64);

    impl DeviceSpan for Seconds {
        fn seconds(&self) -> Result<f64, String> {
            Ok(self.0)
        }
    }

    #[test]
    fn clones_share_what_was_measured() {
        let meter = Meter::default();
        let other = meter.clone();
        assert!(!other.is_recording());
        meter.record(true);
        assert!(other.is_recording());
        other.push(Seconds(0.5));
        other.push(Seconds(0.25));
        let taken = meter.take();
        let sum: f64 = taken.iter().map(|span| span.seconds().unwrap()).sum();
        assert_eq!((taken.len(), sum), (2, 0.75));
        assert!(other.take().is_empty());
        other.add_host_time(Duration::from_millis(3));
        other.add_host_time(Duration::from_millis(4));
        assert_eq!(meter.host_time(), Duration::from_millis(7));
    }
}
