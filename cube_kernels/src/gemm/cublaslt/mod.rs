//! GEMMs by NVIDIA's cuBLASLt: the FP4 tensor cores of compute capability 10.0 and 10.3, and bf16
//! and FP8 wherever the library has them.
//!
//! `out[m, n] = alpha · Σ a[m, k] · b[n, k] + bias[n] (+ what out held)`, both operands stored
//! along `k`. The library is column-major: our row-major `out` is its `D = op(A) · op(B)` of `n`
//! rows and `m` columns, its `A` is our `b`, transposed, its `B` our `a`. Both have `k` rows and a
//! leading dimension of `k` ("TN", the only orientation with FP4 and FP8), and the bias runs along
//! the rows of `D`, which are our columns.
//!
//! | [`CublasLtFormat`] | elements | scales | rows of 16 bytes are |
//! |---|---|---|---|
//! | `Bf16` | bf16 | none | 8 elements |
//! | `E4m3` | FP8 E4M3 | one `f32` for each operand, on the device, multiplied | 16 |
//! | `Nvfp4` | E2M1, the lower half of a byte first | an E4M3 byte for each 16 elements, in 128x4 tiles ([`quantize::swizzle`](crate::quantize::swizzle())) | 32 |
//!
//! Three ways through the same code, so that all of it but the FP4 instruction itself is tested on
//! a GPU without FP4: descriptors, epilogue arguments, memory, order. **The FP4 GEMM has never run
//! on hardware**: on compute capability 9.0 the library answers that it does not support it, which
//! [`supports`] turns into [`Nvfp4Error::Unsupported`].
//!
//! # Order
//!
//! The library's kernels are queued on the very stream that CubeCL's launches of the same client
//! are queued on. CubeCL hands out no stream, but a task on its device thread may ask the server
//! for it (`WriteScoped::write_streams`, then `MultiStream::resolve`, both public in
//! `cubecl-server`), and that is what `queue` submits: one task, in the same queue as launches,
//! that does what CubeCL's own launch does, and waits for every other stream whose memory is used.
//! It skips where an input was never written and marks the output when it fails (so that reading
//! the output says why), keeps memory of other streams alive, and tells a graph that is being
//! captured which memory it uses. No host synchronisation, no second stream, no waiting kernel, and
//! a captured graph holds the GEMM like any launch.
//!
//! Measured (H100, host time of a small GEMM): 15 us a call, 51 us between two synchronisations.
//!
//! What was considered instead: a stream of our own, a kernel that sets a flag for
//! `cuStreamWaitValue32`, `cuStreamWriteValue32` back, and a kernel that waits for that. All work
//! would be submitted in the order of its dependencies, so one hardware queue would do; but the
//! waiting kernel holds a slot of an SM while the library's kernels need one, each stream of a
//! process has its own, a kernel that wants all SMs at once would never start, and a captured graph
//! would hold the waiting without the GEMM. It is not needed.
//!
//! # Memory
//!
//! One library handle for each device lives as long as the process. The workspace that an algorithm
//! asks for (at most [`WORKSPACE`] bytes) comes from CubeCL's pool for each call, which reuses it
//! in the order of the stream: GEMMs on two streams never share one.

use cubecl::client::Client;

use crate::Nvfp4Error;

#[cfg(feature = "cuda")]
mod library;
mod problem;
#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod queue;

pub use problem::{CublasLtFormat, CublasLtGemm, CublasLtOperand, CublasLtProblem, WORKSPACE};

/// Whether the library takes `problem` on the device behind `client`. It is asked once for each
/// problem, which waits for the device thread (not for the device).
///
/// # Errors
/// [`Nvfp4Error::Unsupported`] when the library is not there or has no algorithm, and as
/// [`CublasLtProblem::check`].
pub fn supports(client: &Client, problem: &CublasLtProblem) -> Result<(), Nvfp4Error> {
    problem.check()?;
    queue::plan(client, problem).map(drop)
}

/// Queues a GEMM behind everything that was queued through `client` before.
///
/// # Errors
/// As [`supports`] and [`CublasLtGemm::check`]. What goes wrong later is said by a read of the
/// output.
pub fn gemm(client: &Client, gemm: &CublasLtGemm) -> Result<(), Nvfp4Error> {
    gemm.check()?;
    queue::submit(client, gemm)
}
