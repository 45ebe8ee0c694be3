//! Greedy choice of the next token on the device, for decoding in captured graphs: the token is
//! written to the buffer that the next step reads, and no shape or argument depends on the step.

#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel;

use cubecl::{prelude::*, server::Handle};

use crate::{
    Nvfp4Error,
    capabilities::{is_cpu, overlaps_kernels},
    launch::{buffer, units},
    memory::{address_type, allocate, check_memory},
    tensor::Matrix,
    zeroed::counters,
};
use kernel::{CHUNK, ChunksLaunch, GreedyPlan, StepLaunch, UNITS, greedy_kernel};

/// Buffers that a step reads and writes, with one entry per sequence of a batch.
#[derive(Debug, Clone)]
pub struct Greedy {
    /// Next token: `i32[batch]`.
    pub tokens: Handle,
    /// Number of tokens of each sequence so far: `u32[batch]`.
    pub starts: Handle,
    /// Number of tokens that a step adds: `u32[batch]`.
    pub counts: Handle,
    /// Tokens of the last steps: `i32[ring_len, batch]`.
    pub ring: Handle,
    /// Number of rows of `ring`.
    pub ring_len: usize,
    /// Number of steps so far: `u32[batch]`.
    pub step: Handle,
}

/// Writes the argmax of each row of `logits` (the first one among equals) to `tokens` and to row
/// `step % ring_len` of the ring. Then adds `counts` to `starts` and 1 to `step`. A row that
/// contains NaN, or nothing above `-inf`, gives -1.
///
/// # Errors
/// Returns an error if there are no logits or a buffer is too small.
pub fn choose(client: &Client, logits: &Matrix, greedy: &Greedy) -> Result<(), Nvfp4Error> {
    let (batch, vocab) = (logits.rows, logits.cols);
    logits.check("logits")?;
    if batch == 0 || batch > u16::MAX as usize || vocab == 0 || vocab > i32::MAX as usize {
        return Err(Nvfp4Error::shape(
            "logits",
            format!("[{batch}, {vocab}]"),
            format!("1 to {} rows of 1 to {}", u16::MAX, i32::MAX),
        ));
    }
    if greedy.ring_len == 0 || greedy.ring_len > u32::MAX as usize {
        return Err(Nvfp4Error::value(
            "ring_len",
            greedy.ring_len.to_string(),
            format!("1 to {}", u32::MAX),
        ));
    }
    check_memory("tokens", &greedy.tokens, batch * 4)?;
    check_memory("starts", &greedy.starts, batch * 4)?;
    check_memory("counts", &greedy.counts, batch * 4)?;
    check_memory("step", &greedy.step, batch * 4)?;
    check_memory("ring", &greedy.ring, batch * greedy.ring_len * 4)?;
    let chunks = vocab.div_ceil(CHUNK);
    let parts = allocate(client, batch * chunks * 8);
    let finished = counters(client, batch);
    let dim = CubeDim::new_1d(units(client).min(UNITS) as u32);
    let width = if vocab.is_multiple_of(4) { 4 } else { 1 };
    let plan = GreedyPlan {
        kind: logits.dtype,
        concurrent: !is_cpu(client),
        overlaps: overlaps_kernels(client),
    };
    // SAFETY: memory was checked; the kernel stays below rows and columns.
    unsafe {
        greedy_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, batch as u32, 1),
            dim,
            address_type(batch * vocab),
            width,
            buffer(&logits.handle, batch * vocab / width),
            ChunksLaunch::new(
                buffer(&parts, batch * chunks * 2),
                buffer(&finished, batch),
                vocab as u32,
            ),
            StepLaunch::new(
                buffer(&greedy.tokens, batch),
                buffer(&greedy.starts, batch),
                buffer(&greedy.counts, batch),
                buffer(&greedy.ring, batch * greedy.ring_len),
                greedy.ring_len as u32,
                buffer(&greedy.step, batch),
            ),
            plan,
            logits.dtype.storage_type(),
        );
    }
    Ok(())
}
