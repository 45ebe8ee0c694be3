//! Compiled kernels: keeps them for the next start, and counts them while the first step waits for
//! them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn::tensor::Device;

/// Environment variable with the folder of compiled kernels; if empty, none are kept.
#[cfg(feature = "cuda")]
const FOLDER: &str = "NVFP4_KERNEL_CACHE";

/// Interval between reports of [`Waiting`].
const EVERY: Duration = Duration::from_secs(5);

/// File of compiled kernels, if they are kept.
static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Number of kernels that this process has compiled.
static COMPILED: AtomicUsize = AtomicUsize::new(0);

/// Keeps and counts compiled kernels. Call it before the first device is opened.
#[cfg(feature = "cuda")]
pub(crate) fn keep() {
    use nvfp4::kernels::kernel_cache::{configure, default_folder};

    let folder = match std::env::var_os(FOLDER) {
        Some(folder) if folder.is_empty() => None,
        Some(folder) => Some(PathBuf::from(folder)),
        None => Some(default_folder()),
    };
    let logger = Counter(tracing_log::LogTracer::new());
    log::set_boxed_logger(Box::new(logger)).expect(NO_LOGGER);
    log::set_max_level(log::LevelFilter::Info);
    let file = configure(folder.as_deref()).unwrap_or_else(|error| {
        tracing::warn!("compiled kernels are not kept: {error}");
        None
    });
    let _ = FILE.set(file);
}

/// Forwards messages of the crate `log` to `tracing`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn keep() {
    tracing_log::LogTracer::init().expect(NO_LOGGER);
}

/// Reason why setting a logger cannot fail.
const NO_LOGGER: &str = "`main` has set no logger";

/// Returns the file of compiled kernels, if they are kept.
fn file() -> Option<&'static Path> {
    FILE.get()?.as_deref()
}

/// Returns the number of kernels that this process has compiled.
pub(crate) fn compiled() -> usize {
    COMPILED.load(Ordering::Relaxed)
}

/// Describes where compiled kernels are kept.
pub(crate) fn place() -> String {
    match file() {
        Some(file) => format!("kept in {}", file.display()),
        None => "compiled again by each start".into(),
    }
}

/// Counts the kernels that CubeCL compiles, from CubeCL's messages to the crate `log`, and forwards
/// all other messages to `tracing`.
#[cfg(feature = "cuda")]
struct Counter(tracing_log::LogTracer);

#[cfg(feature = "cuda")]
impl log::Log for Counter {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        match record.target() == nvfp4::kernels::kernel_cache::COMPILATION_TARGET {
            true => _ = COMPILED.fetch_add(1, Ordering::Relaxed),
            false => self.0.log(record),
        }
    }

    fn flush(&self) {}
}

/// The wait for the first step, during which kernels are compiled. Reports their number every few
/// seconds.
pub(crate) struct Waiting {
    device: Device,
    started: Instant,
    before: usize,
    /// Dropping the sender ends the reports.
    reports: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Waiting {
    /// Starts waiting for `device`; `report` shows the number of compiled kernels.
    pub(crate) fn new(device: &Device, report: impl Fn(usize) + Send + 'static) -> Self {
        let before = compiled();
        let (sender, receiver) = channel::<()>();
        let thread = thread::spawn(move || {
            while receiver.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                report(compiled() - before);
            }
        });
        Self {
            device: device.clone(),
            started: Instant::now(),
            before,
            reports: Some((sender, thread)),
        }
    }

    /// Waits until the device has finished the first step. Returns a description of what took the
    /// time.
    pub(crate) fn finish(mut self) -> String {
        // An error is reported where the loss is read.
        let _ = self.device.sync();
        self.stop();
        let place = place();
        let seconds = self.started.elapsed().as_secs_f64();
        match compiled() - self.before {
            0 => format!("first step after {seconds:.1} s; no kernel was compiled ({place})"),
            count => format!("first step after {seconds:.1} s; {count} kernels compiled ({place})"),
        }
    }

    fn stop(&mut self) {
        if let Some((sender, thread)) = self.reports.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_ends_with_what_was_compiled() {
        let waiting = Waiting::new(&Device::flex(), |_| {});
        COMPILED.fetch_add(2, Ordering::Relaxed);
        let text = waiting.finish();
        assert!(text.contains("2 kernels compiled"), "{text}");
        assert!(text.contains("compiled again by each start"), "{text}");
    }
}
