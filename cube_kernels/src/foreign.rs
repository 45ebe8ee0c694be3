//! Queues work of other libraries on CubeCL's own stream, in launch order.
//!
//! CubeCL does not expose its stream, but a task on its device thread may ask the server for it
//! ([`WriteScoped::write_streams`], then `MultiStream::resolve`). The task does the same as a
//! CubeCL launch: it waits for every other stream whose memory is used, records its outcome on the
//! output buffers, keeps memory of other streams alive, and tells a graph under capture which
//! memory it uses.

mod span;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    device::DeviceId,
    device_handle::DeviceHandle,
    server::{BufferBinding, ServerError},
};
use cubecl_environment::{backtrace::BackTrace, stream::StreamId};
use cubecl_server::{
    id::KernelId,
    runtime::Runtime,
    stream::{ExecuteScope, WriteScoped},
};
use cudarc::driver::sys::{
    CUcontext, CUevent, CUevent_flags, CUstream, CUstream_flags, cuCtxSetCurrent, cuEventCreate,
    cuEventDestroy_v2, cuEventRecord, cuStreamCreate, cuStreamDestroy_v2, cuStreamGetCtx,
    cuStreamWaitEvent,
};

pub use span::{StreamSpan, mark};

/// Server of a CUDA client; only this alias names its type.
pub(crate) type CudaServer = <CudaRuntime as Runtime>::Server;

/// Memory that foreign work uses.
#[derive(Debug, Default)]
pub struct ForeignMemory {
    /// Buffers read.
    pub reads: Vec<BufferBinding>,
    /// Buffers written. A buffer that is both read and written is in both lists.
    pub writes: Vec<BufferBinding>,
    /// Scratch buffers, whose contents nothing reads before or after the work.
    pub scratch: Vec<BufferBinding>,
}

impl ForeignMemory {
    fn all(&self) -> impl Iterator<Item = &BufferBinding> + Clone {
        let lists = [&self.reads, &self.writes, &self.scratch];
        lists.into_iter().flatten()
    }
}

/// Stream and addresses for queueing foreign work.
#[derive(Debug)]
pub struct ForeignPlace {
    /// The device; its context is current.
    pub device: DeviceId,
    /// The stream, a `CUstream`.
    pub stream: *mut c_void,
    /// Device addresses of the buffers read, the buffers written and the scratch buffers, in this
    /// order.
    pub addresses: Vec<u64>,
    /// True if a graph is being captured on the stream.
    pub is_captured: bool,
}

/// True if `client` belongs to a CUDA device, as [`submit`] requires.
pub fn is_cuda(client: &Client) -> bool {
    client.service_id().service == std::any::TypeId::of::<CudaServer>()
}

/// Runs `work` on the device thread of `client`, in the context of the device, and waits for it.
///
/// # Errors
/// Returns an error if the client does not belong to a CUDA device, its thread is gone, or `work`
/// fails.
pub fn run<T: Send + 'static>(
    client: &Client,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    if !is_cuda(client) {
        return Err("not a CUDA device".into());
    }
    let device = client.service_id().device;
    DeviceHandle::<CudaServer>::new(device)
        .submit_blocking(move |server| {
            let mut streams = (server.write_streams())
                .resolve(StreamId::current(), std::iter::empty())
                .map_err(|error| error.to_string())?;
            make_current(streams.current().sys)?;
            drop(streams);
            work()
        })
        .unwrap_or_else(|error| Err(format!("{error:?}")))
}

/// A second stream of a device, on which foreign work runs concurrently with CubeCL's launches.
///
/// [`fork`](Self::fork) makes it wait for all earlier launches, [`join`](Self::join) makes CubeCL's
/// stream wait for all work queued on it, and [`wait_for`](Self::wait_for) for the work queued
/// before a [`point`](Self::point). A graph captured across a fork and its join contains both.
/// CubeCL does not know this stream: the caller of `fork` must keep all memory that the work reads
/// or writes alive until a wait for the work is queued.
#[derive(Debug)]
pub struct SideStream {
    stream: CUstream,
    /// Number of forks so far.
    forks: AtomicU64,
    /// Number of leading forks for which a stream waits already.
    waited: AtomicU64,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for SideStream {}
// SAFETY: as above; the driver serialises what it is told.
unsafe impl Sync for SideStream {}

impl SideStream {
    /// Creates a stream of the current context. Call it through [`run`].
    ///
    /// # Errors
    /// Returns an error if the driver cannot create a stream.
    pub fn new() -> Result<Self, String> {
        let mut stream: CUstream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the result is written to a local.
        unsafe { cuStreamCreate(&mut stream, flags) }
            .result()
            .map_err(|error| error.to_string())?;
        Ok(Self {
            stream,
            forks: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        })
    }

    /// Returns `place` on this stream, which waits for the work launched at `place` so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&self, place: &ForeignPlace) -> Result<ForeignPlace, String> {
        wait(self.stream, place.stream.cast())?;
        self.forks.fetch_add(1, Ordering::Relaxed);
        Ok(ForeignPlace {
            device: place.device,
            stream: self.stream.cast(),
            addresses: place.addresses.clone(),
            is_captured: place.is_captured,
        })
    }

    /// True if work was queued that no stream waits for yet.
    pub fn is_forked(&self) -> bool {
        self.waited.load(Ordering::Relaxed) < self.forks.load(Ordering::Relaxed)
    }

    /// Makes the stream of `place` wait for the work queued on this one, unless a stream waits for
    /// all of it already. (A stream outside a capture must not be waited for inside one.)
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&self, place: &ForeignPlace) -> Result<(), String> {
        if !self.is_forked() {
            return Ok(());
        }
        let forks = self.forks.load(Ordering::Relaxed);
        self.waited.fetch_max(forks, Ordering::Relaxed);
        wait(place.stream.cast(), self.stream)
    }
}

/// The work queued on a [`SideStream`] up to some moment.
#[derive(Debug)]
pub struct SidePoint {
    event: CUevent,
    /// Number of forks before it.
    forks: u64,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for SidePoint {}

impl SideStream {
    /// Returns a point after all work queued on this stream so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn point(&self) -> Result<SidePoint, String> {
        let point = SidePoint {
            event: new_event()?,
            forks: self.forks.load(Ordering::Relaxed),
        };
        // SAFETY: stream and event are alive.
        let recorded = unsafe { cuEventRecord(point.event, self.stream) }.result();
        recorded.map_err(|error| error.to_string())?;
        Ok(point)
    }

    /// Makes the stream of `place` wait for the work queued on this one before `point`. If more
    /// work was queued since, a join or a wait for a later point must follow.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn wait_for(&self, point: &SidePoint, place: &ForeignPlace) -> Result<(), String> {
        // SAFETY: stream and event are alive.
        let waiting = unsafe { cuStreamWaitEvent(place.stream.cast(), point.event, 0) }.result();
        waiting.map_err(|error| error.to_string())?;
        self.waited.fetch_max(point.forks, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for SidePoint {
    fn drop(&mut self) {
        // SAFETY: nobody else has the event, and those who wait for it have queued that.
        let destroyed = unsafe { cuEventDestroy_v2(self.event) }.result();
        if let Err(error) = destroyed {
            tracing::warn!("an event could not be destroyed: {error}");
        }
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: nobody else has the stream. The driver frees it when its work is done.
        let destroyed = unsafe { cuStreamDestroy_v2(self.stream) }.result();
        if let Err(error) = destroyed {
            tracing::warn!("a stream could not be destroyed: {error}");
        }
    }
}

/// Queues kernels through `work` on the stream `stream` of `client`, after the earlier launches.
/// `N` is the name in CubeCL's reports. If `work` fails, a read of its output returns an error that
/// begins with `what`.
///
/// `work` runs on the device thread. It must queue everything on the stream that it receives, use
/// no memory beyond the addresses that it receives, and not wait for the device.
pub fn submit<N: 'static>(
    client: &Client,
    stream: StreamId,
    memory: ForeignMemory,
    what: String,
    work: impl FnOnce(&ForeignPlace) -> Result<(), String> + Send + 'static,
) {
    let device = client.service_id().device;
    DeviceHandle::<CudaServer>::new(device).submit(move |server| {
        let mut written = server.write_set();
        (memory.writes.iter()).for_each(|binding| written.push(binding.clone()));
        let kernel = KernelId::new::<N>();
        let reads = memory.reads.iter();
        // The outcome is recorded on the output buffers, where a read finds it.
        ExecuteScope::launching(server, kernel, stream, reads, written).execute(|server| {
            queue(server, stream, device, &memory, work).map_err(|reason| ServerError::Generic {
                reason: format!("{what}: {reason}"),
                backtrace: BackTrace::capture(),
            })
        });
    });
}

/// True if a graph is being recorded on the stream of the calling thread, after the thread's
/// earlier launches. Waits for the device thread, not for the device.
pub(crate) fn is_recording(client: &Client) -> bool {
    if !is_cuda(client) {
        return false;
    }
    let device = client.service_id().device;
    let stream_id = StreamId::current();
    DeviceHandle::<CudaServer>::new(device)
        .submit_blocking(move |server| {
            let mut streams = server
                .write_streams()
                .resolve(stream_id, std::iter::empty())
                .ok()?;
            Some(streams.current().capturing.is_recording())
        })
        .is_ok_and(|recording| recording == Some(true))
}

/// Calls `visit` with the stream of the calling thread, after the thread's earlier launches.
/// `visit` must not queue anything that uses memory.
pub(crate) fn visit(
    client: &Client,
    visit: impl FnOnce(&ForeignPlace) -> Result<(), String> + Send + 'static,
) {
    let device = client.service_id().device;
    let stream_id = StreamId::current();
    DeviceHandle::<CudaServer>::new(device).submit(move |server| {
        let visited = || -> Result<(), String> {
            let mut streams = server
                .write_streams()
                .resolve(stream_id, std::iter::empty())
                .map_err(|error| error.to_string())?;
            let is_captured = streams.current().capturing.is_recording();
            let stream = streams.current().sys;
            make_current(stream)?;
            visit(&ForeignPlace {
                device,
                stream: stream.cast(),
                addresses: Vec::new(),
                is_captured,
            })
        };
        if let Err(error) = visited() {
            tracing::warn!("a stream could not be visited: {error}");
        }
    });
}

/// Runs on the device thread: finds the stream and the addresses, then calls `work`.
fn queue(
    server: &mut CudaServer,
    stream_id: StreamId,
    device: DeviceId,
    memory: &ForeignMemory,
    work: impl FnOnce(&ForeignPlace) -> Result<(), String>,
) -> Result<(), String> {
    // Held until the kernels are queued, so that the memory it keeps alive is released after them.
    let mut streams = server
        .write_streams()
        .resolve(stream_id, memory.all())
        .map_err(|error| error.to_string())?;
    let stream = streams.current().sys;
    make_current(stream)?;
    let is_captured = streams.current().capturing.is_recording();
    if !is_captured {
        let mut waited = vec![stream];
        for binding in memory.all() {
            let origin = streams.get(&binding.stream).sys;
            if !waited.contains(&origin) {
                wait(stream, origin)?;
                waited.push(origin);
            }
        }
    }
    let mut addresses = Vec::new();
    for binding in memory.all() {
        // A graph under capture keeps the pages that it was recorded with.
        let location = binding.memory.descriptor().location();
        let capturing = &mut streams.current().capturing;
        capturing.touch(binding.stream, location);
        let pool = &mut streams.get(&binding.stream).memory_management_gpu;
        let (start, end) = (binding.offset_start, binding.offset_end);
        let resource = pool
            .get_resource(binding.memory.clone(), start, end)
            .map_err(|error| error.to_string())?;
        addresses.push(resource.ptr);
    }
    work(&ForeignPlace {
        device,
        stream: stream.cast::<c_void>(),
        addresses,
        is_captured,
    })
}

/// Makes `stream` wait for the work queued on `origin` so far.
///
/// CubeCL's `resolve` waits for another stream unless it has done so since the buffer was
/// *allocated*, so it misses a kernel that writes the buffer after that wait. A graph under capture
/// must not contain such a wait: it would draw the other stream into the capture.
fn wait(stream: CUstream, origin: CUstream) -> Result<(), String> {
    let event = new_event()?;
    // SAFETY: both streams are alive. An event may be destroyed as soon as the wait for it is
    // queued.
    unsafe {
        let waiting = cuEventRecord(event, origin)
            .result()
            .and_then(|()| cuStreamWaitEvent(stream, event, 0).result());
        waiting.and(cuEventDestroy_v2(event).result())
    }
    .map_err(|error| error.to_string())
}

/// Creates an event without timing.
fn new_event() -> Result<CUevent, String> {
    let mut event: CUevent = ptr::null_mut();
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: the result is written to a local.
    unsafe { cuEventCreate(&mut event, flags) }
        .result()
        .map_err(|error| error.to_string())?;
    Ok(event)
}

/// Makes the context of a stream current, as CubeCL does before each launch.
fn make_current(stream: CUstream) -> Result<(), String> {
    let mut context: CUcontext = ptr::null_mut();
    // SAFETY: the stream is alive, and so is its context.
    unsafe {
        cuStreamGetCtx(stream, &mut context)
            .result()
            .and_then(|()| cuCtxSetCurrent(context).result())
    }
    .map_err(|error| error.to_string())
}
