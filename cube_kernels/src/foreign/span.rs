//! Time spans of a stream, measured by the device's clock.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cubecl::client::Client;
use cudarc::driver::result::event;
use cudarc::driver::sys::{
    CUevent, CUevent_flags, cuEventCreate, cuEventDestroy_v2, cuEventRecord, cuEventSynchronize,
};

use super::{ForeignPlace, visit};

/// A point of a stream, reached when the device has finished the work queued before it.
struct Point(CUevent);

// SAFETY: an event may be used from any thread.
unsafe impl Send for Point {}

impl Point {
    /// Records a point on the stream of `place`.
    fn record(place: &ForeignPlace) -> Result<Self, String> {
        let mut event: CUevent = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the result is written to a local; the stream is alive.
        unsafe {
            let made = cuEventCreate(&mut event, flags).result();
            made.map_err(|error| error.to_string())?;
            let point = Self(event);
            let recorded = cuEventRecord(point.0, place.stream.cast()).result();
            recorded.map_err(|error| error.to_string())?;
            Ok(point)
        }
    }

    /// Returns the seconds from this point to `end`, a later point, for which it waits.
    fn seconds_to(&self, end: &Self) -> Result<f64, String> {
        // SAFETY: both events are alive, and have been recorded with their times.
        let milliseconds = unsafe {
            let passed = cuEventSynchronize(end.0).result();
            passed.and_then(|()| event::elapsed(self.0, end.0))
        };
        let milliseconds = milliseconds.map_err(|error| error.to_string())?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // SAFETY: nobody else has the event.
        let destroyed = unsafe { cuEventDestroy_v2(self.0) }.result();
        if let Err(error) = destroyed {
            tracing::warn!("an event could not be destroyed: {error}");
        }
    }
}

/// Time span of a stream between two points. Clones are the same span.
#[derive(Clone, Default)]
pub struct StreamSpan(Arc<Mutex<Points>>);

#[derive(Default)]
struct Points {
    begin: Option<Point>,
    end: Option<Point>,
}

impl StreamSpan {
    fn points(&self) -> MutexGuard<'_, Points> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the span at `place`, after the work queued there so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn begin(&self, place: &ForeignPlace) -> Result<(), String> {
        self.points().begin = Some(Point::record(place)?);
        Ok(())
    }

    /// Ends the span at `place`, after the work queued there so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn end(&self, place: &ForeignPlace) -> Result<(), String> {
        self.points().end = Some(Point::record(place)?);
        Ok(())
    }

    /// Returns the length in seconds; waits until the device has passed the end. Call it on the
    /// device thread, through [`run`](super::run).
    ///
    /// # Errors
    /// Returns an error if the span has not begun and ended, or a driver call fails.
    pub fn seconds(&self) -> Result<f64, String> {
        let points = self.points();
        match (&points.begin, &points.end) {
            (Some(begin), Some(end)) => begin.seconds_to(end),
            _ => Err("a span of a stream has not begun and ended".into()),
        }
    }
}

/// Calls `mark`, which is [`StreamSpan::begin`] or [`StreamSpan::end`], with the stream of the
/// calling thread, after the thread's earlier launches. Does nothing while a graph is captured, in
/// which a point has no time.
pub fn mark(
    client: &Client,
    mark: impl FnOnce(&ForeignPlace) -> Result<(), String> + Send + 'static,
) {
    visit(client, |place| match place.is_captured {
        true => Ok(()),
        false => mark(place),
    });
}
