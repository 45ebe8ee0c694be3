//! Exposed communication: the fraction of a training step in which compute waits for collectives.

use std::time::{Duration, Instant};

use burn_core::tensor::Device;

use super::ProcessGroup;

/// Result of a [`CommunicationMeter`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExposedCommunication {
    /// Number of measured steps.
    pub steps: u64,
    /// Seconds of the measured steps in which compute waited for collectives.
    pub waited: f64,
    /// Total seconds of the measured steps.
    pub total: f64,
}

impl ExposedCommunication {
    /// Percentage of the time in which compute waited; `None` if nothing was measured.
    pub fn percent(&self) -> Option<f64> {
        (self.steps > 0 && self.total > 0.0).then(|| 100.0 * self.waited / self.total)
    }
}

/// Measures exposed communication on one rank: the part that does not overlap with compute.
///
/// For exchanges through host memory it is the wall-clock time of the calls, without copies to and
/// from a device. For a [connected](ProcessGroup::connect) group it is the time during which
/// CubeCL's stream runs a collective, or waits for the second stream, by the device clock.
/// Overlapped communication and host waits for counts are not included.
///
/// Begin and end are events in the queue of the device, which never waits for them. Measure only a
/// few steps with connected groups, because each collective adds two more events.
pub struct CommunicationMeter {
    group: ProcessGroup,
    clock: Clock,
    /// True while a step is being measured.
    is_open: bool,
    found: ExposedCommunication,
}

/// Source of the time.
enum Clock {
    Host {
        began: Instant,
        /// Accumulated time in collectives at that point.
        waited: Duration,
    },
    #[cfg(feature = "cuda")]
    Device(on_device::Steps),
}

impl CommunicationMeter {
    /// Creates a meter for the steps of this rank in `group` and all groups derived from it, on
    /// `device`. `is_connected` is true if tensors are exchanged from device to device.
    pub fn new(group: &ProcessGroup, device: &Device, is_connected: bool) -> Self {
        let host = Clock::Host {
            began: Instant::now(),
            waited: Duration::ZERO,
        };
        #[cfg(feature = "cuda")]
        let clock = match is_connected {
            true => on_device::Steps::new(device).map_or(host, Clock::Device),
            false => host,
        };
        #[cfg(not(feature = "cuda"))]
        let (clock, _) = (host, (device, is_connected));
        Self {
            group: group.clone(),
            clock,
            is_open: false,
            found: ExposedCommunication::default(),
        }
    }

    /// Returns true if measuring each step has no cost.
    pub fn is_free(&self) -> bool {
        matches!(self.clock, Clock::Host { .. })
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        self.is_open = true;
        let meter = self.group.collective().meter();
        match &mut self.clock {
            Clock::Host { began, waited } => {
                (*began, *waited) = (Instant::now(), meter.host_time());
            }
            #[cfg(feature = "cuda")]
            Clock::Device(steps) => steps.begin(meter, &mut self.found),
        }
    }

    /// Ends the step. Without a preceding [`begin`](Self::begin), it has no effect.
    pub fn end(&mut self) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let meter = self.group.collective().meter();
        match &mut self.clock {
            Clock::Host { began, waited } => {
                self.found.total += began.elapsed().as_secs_f64();
                self.found.waited += (meter.host_time() - *waited).as_secs_f64();
                self.found.steps += 1;
            }
            #[cfg(feature = "cuda")]
            Clock::Device(steps) => steps.end(meter),
        }
    }

    /// Runs `work`, in which ranks agree on something between two steps, over host memory. Its time
    /// counts for the previous step unless tensors are exchanged from device to device: then the
    /// device computes in the meantime.
    pub fn between<T>(&mut self, work: impl FnOnce() -> T) -> T {
        if !self.is_free() {
            return work();
        }
        let steps = self.found.steps;
        self.begin();
        let made = work();
        self.end();
        self.found.steps = steps;
        made
    }

    /// Returns the results so far. Waits for the device if it was measured.
    pub fn measured(&mut self) -> ExposedCommunication {
        #[cfg(feature = "cuda")]
        if let Clock::Device(steps) = &mut self.clock {
            steps.read(self.group.collective().meter(), &mut self.found);
        }
        self.found
    }
}

#[cfg(feature = "cuda")]
mod on_device {
    use burn_core::backend::DispatchDevice;
    use burn_core::tensor::Device;
    use cubecl::client::Client;
    use nvfp4_kernels::foreign::{self, StreamSpan};
    use nvfp4_parallel::Meter;

    use super::ExposedCommunication;

    /// Steps on the stream of a device.
    pub(super) struct Steps {
        device: Device,
        client: Client,
        /// Last step that has begun, with a flag for its end.
        last: Option<Last>,
    }

    struct Last {
        span: StreamSpan,
        has_ended: bool,
    }

    impl Steps {
        /// Returns `None` on a device that has no such clock.
        pub fn new(device: &Device) -> Option<Self> {
            let device = device.clone().without_autodiff();
            let client = match device.as_dispatch() {
                DispatchDevice::Cube(cube) => cube.client(),
                _ => return None,
            };
            let last = None;
            foreign::is_cuda(&client).then_some(Self {
                device,
                client,
                last,
            })
        }

        /// Records an event. Flushes first: operations that Burn's fusion holds back belong before
        /// the event.
        fn mark(&self, span: StreamSpan, begins: bool) {
            if let Err(error) = self.device.flush() {
                tracing::warn!("what a step has queued could not be launched: {error:?}");
            }
            foreign::mark(&self.client, move |place| match begins {
                true => span.begin(place),
                false => span.end(place),
            });
        }

        pub fn begin(&mut self, meter: &Meter, found: &mut ExposedCommunication) {
            self.read(meter, found);
            let span = StreamSpan::default();
            self.mark(span.clone(), true);
            self.last = Some(Last {
                span,
                has_ended: false,
            });
            meter.record(true);
        }

        pub fn end(&mut self, meter: &Meter) {
            meter.record(false);
            if let Some(last) = &mut self.last {
                last.has_ended = true;
                let span = last.span.clone();
                self.mark(span, false);
            }
        }

        /// Adds the last step to `found`, once the device has completed it.
        pub fn read(&mut self, meter: &Meter, found: &mut ExposedCommunication) {
            let Some(last) = self.last.take().filter(|last| last.has_ended) else {
                return;
            };
            let meter = meter.clone();
            // Runs on the device thread, after the threads that push spans.
            let read = foreign::run(&self.client, move || {
                let total = last.span.seconds()?;
                let spans = meter.take();
                let waited = spans.iter().map(|span| span.seconds());
                Ok((total, waited.sum::<Result<f64, String>>()?))
            });
            match read {
                Ok((total, waited)) => {
                    found.steps += 1;
                    found.total += total;
                    found.waited += waited;
                }
                Err(error) => tracing::warn!("a step's communication was not measured: {error}"),
            }
        }
    }
}
