//! Queues GEMMs in the order of CubeCL's launches; see "Order" in the [parent module](super).

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex},
};

use cubecl::{
    client::Client, device::DeviceId, device_handle::DeviceHandle, dry_run::launch_mode,
    server::Handle,
};

use super::{
    CublasLtGemm, CublasLtProblem,
    library::{Addresses, Algorithm, Answer, Library},
};
use crate::{
    Nvfp4Error,
    foreign::{self, CudaServer, ForeignMemory, ForeignPlace},
    memory::allocate,
};

/// Name of a library GEMM in CubeCL's reports.
struct CublasLtMatmul;

/// Maximum number of cached answers. Beyond it the cache is cleared, since an unbounded variety of
/// shapes (numbers of tokens) would fill the memory.
const MOST_ANSWERS: usize = 4096;

/// Returns the algorithm for `problem`, asking the library once.
pub fn plan(client: &Client, problem: &CublasLtProblem) -> Result<Algorithm, Nvfp4Error> {
    type Answers = HashMap<(DeviceId, CublasLtProblem), Answer>;
    static ANSWERS: LazyLock<Mutex<Answers>> = LazyLock::new(Mutex::default);
    let service = client.service_id();
    if !foreign::is_cuda(client) {
        return Err(refused(client, problem, "not a CUDA device".into()));
    }
    let key = (service.device, *problem);
    let answers = || ANSWERS.lock().unwrap_or_else(|held| held.into_inner());
    let known = answers().get(&key).cloned();
    let answer = match known {
        Some(answer) => answer,
        None => {
            let (device, problem) = key;
            // Runs on the device's own thread, where its context is current.
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
    // Fresh memory belongs to the client's stream; nothing else tells which one that is.
    let stream = workspace.stream;
    // The workspace stands in for buffers that a problem does not read.
    let binding = |handle: Option<&Handle>| handle.unwrap_or(&workspace).clone().binding();
    let mut memory = ForeignMemory {
        reads: vec![
            binding(Some(gemm.a.data)),
            binding(Some(gemm.b.data)),
            binding(gemm.a.scale),
            binding(gemm.b.scale),
            binding(gemm.alpha),
            binding(gemm.bias.map(|bias| &bias.handle)),
        ],
        writes: vec![binding(Some(&gemm.out.handle))],
        scratch: vec![binding(None)],
    };
    if problem.accumulate {
        memory.reads.push(binding(Some(&gemm.out.handle)));
    }
    let what = format!("cuBLASLt, {problem}");
    foreign::submit::<CublasLtMatmul>(client, stream, memory, what, move |place| {
        queue(place, &problem, &algorithm)
    });
    Ok(())
}

/// Calls the library, on the device thread.
fn queue(
    place: &ForeignPlace,
    problem: &CublasLtProblem,
    algorithm: &Algorithm,
) -> Result<(), String> {
    let addresses = &place.addresses;
    // Index of the output, which follows the inputs.
    let out = addresses.len() - 2;
    let at = Addresses {
        a: addresses[0],
        b: addresses[1],
        a_scale: addresses[2],
        b_scale: addresses[3],
        alpha: addresses[4],
        bias: addresses[5],
        out: addresses[out],
        workspace: addresses[out + 1],
    };
    // SAFETY: the context is that of the stream. Sizes were checked before, and the workspace was
    // allocated for this algorithm. As for kernels, CubeCL's bookkeeping, which provides `place`,
    // keeps the memory alive for as long as work on this stream reads it.
    unsafe { Library::get()?.queue(place.device, problem, algorithm, &at, place.stream) }
}
