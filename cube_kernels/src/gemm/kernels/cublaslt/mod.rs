//! GEMMs by NVIDIA's cuBLASLt: the FP4 tensor cores of compute capability 10.0 and 10.3, and bf16
//! and FP8 wherever the library has them.
//!
//! `out[m, n] = alpha · Σ a[m, k] · b[n, k] + bias[n] (+ out[m, n])`, both operands stored
//! along `k`. The library is column-major: our row-major `out` is its `D = op(A) · op(B)` of `n`
//! rows and `m` columns, its `A` is our `b`, transposed, its `B` our `a`. Both have `k` rows and a
//! leading dimension of `k` ("TN", the only orientation with FP4 and FP8), and the bias runs along
//! the rows of `D`, which are our columns.
//!
//! `kernel` offers the library to dispatch, which asks it on compute capability 10.0 and 10.3, with
//! small kernels around it; `library` and `queue` call it.
//!
//! See [`swizzle`](crate::quantize::swizzle()) for 128x4 tiles.
//!
//! | [`CublasLtFormat`] | elements | scales | elements per 16 bytes of a row |
//! |---|---|---|---|
//! | `Bf16` | bf16 | none | 8 |
//! | `E4m3` | FP8 E4M3 | one `f32` per operand, on the device, multiplied | 16 |
//! | `Nvfp4` | E2M1, low nibble first | an E4M3 byte per 16 elements, in 128x4 tiles | 32 |
//!
//! All three formats share the same code, so that descriptors, epilogue arguments, memory and order
//! are tested on GPUs without FP4. **The FP4 GEMM has never run on hardware**: on compute
//! capability 9.0 the library reports that it does not support it, which [`supports`] turns into
//! [`Nvfp4Error::Unsupported`].
//!
//! # Order
//!
//! The library's kernels are queued on the same stream as CubeCL's launches of the same client.
//! CubeCL exposes no stream, but a task on its device thread may ask the server for it
//! (`WriteScoped::write_streams`, then `MultiStream::resolve`, both public in `cubecl-server`).
//! `queue` submits one such task, in the same queue as launches. The task does what CubeCL's own
//! launch does:
//!
//! - It waits for every other stream whose memory is used.
//! - It skips the GEMM if an input was never written, and marks the output when it fails, so that
//!   reading the output reports the error.
//! - It keeps memory of other streams alive.
//! - It tells a graph that is being captured which memory it uses.
//!
//! There is no host synchronization, no second stream and no waiting kernel, and a captured graph
//! holds the GEMM like any launch.
//!
//! Measured (H100, host time of a small GEMM): 15 us per call, 51 us between two synchronizations.
//!
//! Rejected alternative: a separate stream, with a kernel that sets a flag for
//! `cuStreamWaitValue32`, a `cuStreamWriteValue32` back, and a kernel that waits for that. All work
//! would be submitted in the order of its dependencies, so one hardware queue would do. But the
//! waiting kernel occupies a slot of an SM while the library's kernels need one, each stream of a
//! process has its own, a kernel that needs all SMs at once would never start, and a captured graph
//! would hold the waiting without the GEMM.
//!
//! # Memory
//!
//! There is one library handle per device, which lives as long as the process. The workspace that
//! an algorithm needs (at most 32 MiB) is allocated per call from CubeCL's pool, which
//! reuses it in stream order: GEMMs on two streams never share one.

use cubecl::client::Client;

use crate::Nvfp4Error;

#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
pub(in crate::gemm) mod kernel;
#[cfg(feature = "cuda")]
mod library;
mod problem;
#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod queue;

pub(crate) use kernel::CublasLt;
pub use problem::{CublasLtFormat, CublasLtGemm, CublasLtOperand, CublasLtProblem};

/// Checks that the library supports `problem` on the device of `client`. The library is asked once
/// per problem; this waits for the device thread, but not for the device.
///
/// # Errors
/// Returns [`Nvfp4Error::Unsupported`] if the library is missing or has no algorithm, and the
/// errors of [`CublasLtProblem::check`].
pub fn supports(client: &Client, problem: &CublasLtProblem) -> Result<(), Nvfp4Error> {
    problem.check()?;
    queue::plan(client, problem).map(drop)
}

/// Queues a GEMM after all work that was queued through `client` before.
///
/// # Errors
/// See [`supports`] and [`CublasLtGemm::check`]. Later failures are reported when the output is
/// read.
pub fn gemm(client: &Client, gemm: &CublasLtGemm) -> Result<(), Nvfp4Error> {
    gemm.check()?;
    queue::submit(client, gemm)
}
