//! The share of a training step in which compute waits for collectives.

use std::time::{Duration, Instant};

use burn_core::tensor::Device;

use super::ProcessGroup;

/// What [`CommunicationMeter`] has measured.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExposedCommunication {
    /// Steps that were measured.
    pub steps: u64,
    /// Seconds of them in which compute waited for collectives.
    pub waited: f64,
    /// Seconds of them.
    pub total: f64,
}

impl ExposedCommunication {
    /// The share of the time in which compute waited, in percent; none if nothing was measured.
    pub fn percent(&self) -> Option<f64> {
        (self.steps > 0 && self.total > 0.0).then(|| 100.0 * self.waited / self.total)
    }
}

/// Measures how much of a step communication takes that compute does not hide, on one rank.
///
/// Where tensors travel through the memory of the host it is the wall clock of the calls; copies to
/// and from a device are not in it. Where a group [is connected](ProcessGroup::connect) it is the
/// time that CubeCL's stream is in a collective, or waits for those of the second stream, by the
/// device's own clock; what is hidden is not in it, nor is a wait of the host for counts.
///
/// Begin and end are marks in the queue of the device, which never waits for them; with connected
/// groups measure few steps, since there are two more marks around each collective.
pub struct CommunicationMeter {
    group: ProcessGroup,
    clock: Clock,
    /// True if a step is being measured.
    is_open: bool,
    found: ExposedCommunication,
}

/// What the time is read from.
enum Clock {
    Host {
        began: Instant,
        /// In collectives until then.
        waited: Duration,
    },
    #[cfg(feature = "cuda")]
    Device(on_device::Steps),
}

impl CommunicationMeter {
    /// For the steps of this rank in `group` and all groups that were made of it, on `device`;
    /// whether tensors travel from device to device.
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

    /// Returns true if it costs nothing to measure each step.
    pub fn is_free(&self) -> bool {
        matches!(self.clock, Clock::Host { .. })
    }

    /// A step begins.
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

    /// It ends. Without a [`begin`](Self::begin) before it, nothing happens.
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

    /// `work`, in which ranks agree on something between two steps, over the memory of the host. It
    /// belongs to the time of the step before it unless tensors travel from device to device: the
    /// device computes meanwhile.
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

    /// What was measured so far; waits for the device, if it has measured.
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
        /// The last one that has begun, and whether it has ended.
        last: Option<Last>,
    }

    struct Last {
        span: StreamSpan,
        has_ended: bool,
    }

    impl Steps {
        /// None on a device that has no such clock.
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

        /// What Burn's fusion holds back belongs before the mark.
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

        /// Adds the last step to `found`, once the device has passed it.
        pub fn read(&mut self, meter: &Meter, found: &mut ExposedCommunication) {
            let Some(last) = self.last.take().filter(|last| last.has_ended) else {
                return;
            };
            let meter = meter.clone();
            // On the device thread, behind those who push spans.
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
