//! GEMMs in the order of CubeCL's launches: see "Order" in the [module above](super).

use std::{
    any::TypeId,
    collections::HashMap,
    ffi::c_void,
    ptr,
    sync::{LazyLock, Mutex},
};

use cubecl::{
    client::Client,
    cuda::CudaRuntime,
    device::DeviceId,
    device_handle::DeviceHandle,
    dry_run::launch_mode,
    server::{BufferBinding, Handle, ServerError},
};
use cubecl_environment::{backtrace::BackTrace, stream::StreamId};
use cubecl_server::{
    id::KernelId,
    runtime::Runtime,
    stream::{ExecuteScope, WriteScoped},
};
use cudarc::driver::sys::{
    CUcontext, CUevent, CUevent_flags, CUstream, cuCtxSetCurrent, cuEventCreate, cuEventDestroy_v2,
    cuEventRecord, cuStreamGetCtx, cuStreamWaitEvent,
};

use super::{
    CublasLtGemm, CublasLtProblem,
    library::{Addresses, Algorithm, Answer, Library},
};
use crate::{Nvfp4Error, memory::allocate};

/// The service behind a CUDA client, which alone names its type.
type CudaServer = <CudaRuntime as Runtime>::Server;

/// What CubeCL's reports call a GEMM of the library.
struct CublasLtMatmul;

/// The most answers that are kept; all are asked for again beyond, since shapes that vary without
/// end (numbers of tokens) would fill the memory.
const MOST_ANSWERS: usize = 4096;

/// The algorithm for `problem`, asked for once.
pub fn plan(client: &Client, problem: &CublasLtProblem) -> Result<Algorithm, Nvfp4Error> {
    type Answers = HashMap<(DeviceId, CublasLtProblem), Answer>;
    static ANSWERS: LazyLock<Mutex<Answers>> = LazyLock::new(Mutex::default);
    let service = client.service_id();
    if service.service != TypeId::of::<CudaServer>() {
        return Err(refused(client, problem, "not a CUDA device".into()));
    }
    let key = (service.device, *problem);
    let answers = || ANSWERS.lock().unwrap_or_else(|held| held.into_inner());
    let known = answers().get(&key).cloned();
    let answer = match known {
        Some(answer) => answer,
        None => {
            let (device, problem) = key;
            // On the device's own thread, whose context is the device's.
            let asked = DeviceHandle::<CudaServer>::new(device)
                .submit_blocking(move |_| Library::get()?.plan(device, &problem))
                .unwrap_or_else(|error| Err(format!("{error:?}")));
            let answer = asked.map_err(|reason| refused(client, &problem, reason))?;
            let mut answers = answers();
            if answers.len() >= MOST_ANSWERS {
                answers.clear();
            }
            answers.insert(key, answer.clone());
            answer
        }
    };
    answer.map_err(|reason| refused(client, problem, reason))
}

fn refused(client: &Client, problem: &CublasLtProblem, reason: String) -> Nvfp4Error {
    Nvfp4Error::Unsupported {
        library: "cuBLASLt",
        problem: format!("{problem} on {}", client.properties().identity.name),
        reason,
    }
}

/// Submits a GEMM whose buffers were checked.
pub fn submit(client: &Client, gemm: &CublasLtGemm) -> Result<(), Nvfp4Error> {
    let problem = gemm.problem();
    let algorithm = plan(client, &problem)?;
    // A run that only compiles does not run the library either.
    if launch_mode().is_skipped() {
        return Ok(());
    }
    let workspace = allocate(client, algorithm.workspace);
    // Fresh memory belongs to the client's stream, which nothing else tells.
    let stream = workspace.stream;
    let unread = || workspace.clone().binding();
    let binding = |handle: Option<&Handle>| match handle {
        Some(handle) => handle.clone().binding(),
        None => unread(),
    };
    let buffers = Buffers {
        reads: [
            binding(Some(gemm.a.data)),
            binding(Some(gemm.b.data)),
            binding(gemm.a.scale),
            binding(gemm.b.scale),
            binding(gemm.alpha),
            binding(gemm.bias.map(|bias| &bias.handle)),
        ],
        out: binding(Some(&gemm.out.handle)),
        workspace: unread(),
    };
    let device = client.service_id().device;
    DeviceHandle::<CudaServer>::new(device).submit(move |server| {
        let mut written = server.write_set();
        written.push(buffers.out.clone());
        let before = problem.accumulate.then_some(&buffers.out);
        let reads = buffers.reads.iter().chain(before);
        let kernel = KernelId::new::<CublasLtMatmul>();
        // How it ends is noted on the output, where a read finds it.
        ExecuteScope::launching(server, kernel, stream, reads, written).execute(|server| {
            let queued = buffers.queue(server, stream, device, &problem, &algorithm);
            queued.map_err(|reason| ServerError::Generic {
                reason: format!("cuBLASLt, {problem}: {reason}"),
                backtrace: BackTrace::capture(),
            })
        });
    });
    Ok(())
}

/// The memory of a GEMM. What a problem does not read is the workspace.
struct Buffers {
    /// `a`, `b`, their scales, `alpha`, bias.
    reads: [BufferBinding; 6],
    out: BufferBinding,
    workspace: BufferBinding,
}

impl Buffers {
    /// On the device thread: finds the stream and the addresses, and calls the library.
    fn queue(
        &self,
        server: &mut CudaServer,
        stream_id: StreamId,
        device: DeviceId,
        problem: &CublasLtProblem,
        algorithm: &Algorithm,
    ) -> Result<(), String> {
        let all = || {
            let written = [&self.out, &self.workspace];
            self.reads.iter().chain(written)
        };
        // Held until the library's kernels are queued: what it keeps alive is released behind them.
        let mut streams = server
            .write_streams()
            .resolve(stream_id, all())
            .map_err(|error| error.to_string())?;
        let stream = streams.current().sys;
        make_current(stream)?;
        if !streams.current().capturing.is_recording() {
            let mut waited = vec![stream];
            for binding in all() {
                let origin = streams.get(&binding.stream).sys;
                if !waited.contains(&origin) {
                    wait(stream, origin)?;
                    waited.push(origin);
                }
            }
        }
        let mut addresses = Vec::with_capacity(8);
        for binding in all() {
            // A graph that is being captured keeps the pages that it was recorded with.
            let location = binding.memory.descriptor().location();
            let capturing = &mut streams.current().capturing;
            capturing.touch(binding.stream, location);
            let memory = &mut streams.get(&binding.stream).memory_management_gpu;
            let (start, end) = (binding.offset_start, binding.offset_end);
            let resource = memory
                .get_resource(binding.memory.clone(), start, end)
                .map_err(|error| error.to_string())?;
            addresses.push(resource.ptr);
        }
        let at = Addresses {
            a: addresses[0],
            b: addresses[1],
            a_scale: addresses[2],
            b_scale: addresses[3],
            alpha: addresses[4],
            bias: addresses[5],
            out: addresses[6],
            workspace: addresses[7],
        };
        // SAFETY: the context is that of the stream. Sizes were checked before, the workspace was
        // allocated for this algorithm, and CubeCL's bookkeeping, to which the scope and `streams`
        // belong, keeps the memory for as long as work on this stream reads it, as it does for
        // kernels.
        unsafe { Library::get()?.queue(device, problem, algorithm, &at, stream.cast::<c_void>()) }
    }
}

/// Makes `stream` wait for what was queued on `origin` until now.
///
/// CubeCL's `resolve` waits for another stream unless it has done so since the buffer was
/// *allocated*: a kernel that writes the buffer later, behind that wait, is missed. A graph that is
/// being captured takes no such wait: it would draw the other stream into the capture.
fn wait(stream: CUstream, origin: CUstream) -> Result<(), String> {
    let mut event: CUevent = ptr::null_mut();
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: both streams are alive. An event may be destroyed as soon as the wait for it is
    // queued.
    unsafe {
        cuEventCreate(&mut event, flags).result().and_then(|()| {
            let waiting = cuEventRecord(event, origin)
                .result()
                .and_then(|()| cuStreamWaitEvent(stream, event, 0).result());
            waiting.and(cuEventDestroy_v2(event).result())
        })
    }
    .map_err(|error| error.to_string())
}

/// Makes the context of a stream the current one, as CubeCL does before each of its own launches.
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
