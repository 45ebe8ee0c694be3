//! Layers and training on several ranks, as threads with loopback groups.

pub mod data;
mod experts;
mod functions;
mod gathered_experts;
mod gathered_weights;
#[cfg(feature = "cuda")]
mod nccl;
mod reduce_dtype;
mod tensor_parallel;

use std::thread;
use std::time::Duration;

use burn_nvfp4::parallel::ProcessGroup;

/// Runs `body` on each of `size` ranks in a separate thread; returns the results in rank order.
pub fn on_ranks<T: Send>(size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let groups = ProcessGroup::loopback(size, Duration::from_secs(120)).into_iter();
        let threads = groups.map(|group| scope.spawn(move || body(group)));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
