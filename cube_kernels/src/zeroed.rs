//! Zero-filled words, which kernels raise to an amax or use as counters.
//!
//! A kernel clears them, not a copy from the host, so that a graph can capture it. Between
//! [`begin_step`] and [`end_step`] one launch clears the words of all kernels of the step: a step
//! requests about two hundred buffers of one or two words.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cubecl::{prelude::*, server::Handle};
use cubecl_environment::stream::StreamId;

use crate::{
    launch::{buffer, grid},
    memory::allocate,
};

/// Unit `u` clears the words `u`, `u + units`, and so on.
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel {
    use cubecl::prelude::*;

    #[cube(launch_unchecked, create_dummy_kernel)]
    pub fn zero_kernel(out: &mut [u32], words: usize) {
        let mut i = ABSOLUTE_POS;
        while i < words {
            out[i] = 0u32;
            i += CUBE_COUNT * CUBE_DIM as usize;
        }
    }
}

pub(crate) use kernel::zero_kernel;

/// Size in bytes of the first chunk cleared in a step. Each further chunk of the step is twice as
/// large, up to [`LARGEST_CHUNK`]: a step that requests much has few launches, and one that
/// requests little uses little memory.
const CHUNK: usize = 64 << 10;
/// Largest number of bytes that are cleared together.
const LARGEST_CHUNK: usize = 1 << 20;
/// Alignment of requests in bytes: a sector of the L2 cache, so that atomics of different kernels
/// do not share one.
const SLOT: usize = 32;
/// Smallest ratio of a chunk's length to a request's: longer requests have a separate launch.
const SHARED_BY: usize = 4;

/// A cleared chunk of a step, and the number of its bytes in use.
struct Chunk {
    memory: Handle,
    bytes: usize,
    taken: usize,
}

impl Chunk {
    fn new(client: &Client, bytes: usize) -> Self {
        Self {
            memory: zeros(client, bytes / 4),
            bytes,
            taken: 0,
        }
    }

    /// Takes the next `words` words of the chunk, if it has that many left.
    fn take(&mut self, words: usize) -> Option<Handle> {
        let start = self.taken;
        let end = start + words * 4;
        if end > self.bytes {
            return None;
        }
        self.taken = end.next_multiple_of(SLOT);
        Some(part(&self.memory, start, self.bytes - end))
    }

    fn left(&self) -> usize {
        self.bytes - self.taken
    }
}

/// Returns `memory` without its first and last bytes.
fn part(memory: &Handle, before: usize, behind: usize) -> Handle {
    let memory = memory.clone().offset_start(before as u64);
    memory.offset_end(behind as u64)
}

/// The step of a stream.
struct Step {
    client: Client,
    stream: StreamId,
    /// `None` before the first chunk is made.
    chunk: Option<Chunk>,
    /// Size in bytes of the next chunk.
    next: usize,
}

/// Source of a request's memory.
enum Served {
    /// Part of an existing chunk.
    Taken(Handle),
    /// A new chunk of this many bytes.
    ByChunk(usize),
    /// A separate launch.
    Alone,
}

impl Step {
    fn is_of(&self, client: &Client) -> bool {
        self.client.service_id() == client.service_id() && self.stream == StreamId::current()
    }

    /// Returns the size in bytes of a new chunk, and enlarges the next one.
    fn grow(&mut self) -> usize {
        let bytes = self.next;
        self.next = (2 * bytes).min(LARGEST_CHUNK);
        bytes
    }

    fn serve(&mut self, words: usize) -> Served {
        if let Some(taken) = self.chunk.as_mut().and_then(|chunk| chunk.take(words)) {
            return Served::Taken(taken);
        }
        match self.grow() {
            bytes if bytes >= SHARED_BY * words * 4 => Served::ByChunk(bytes),
            _ => Served::Alone,
        }
    }
}

/// The active steps: one for each device that captures graphs.
static STEPS: Mutex<Vec<Step>> = Mutex::new(Vec::new());

fn steps() -> MutexGuard<'static, Vec<Step>> {
    STEPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a step on the current stream of `client`, until [`end_step`]. Amax values found during
/// the step belong to it: if the step is captured, each replay clears them at its beginning.
pub fn begin_step(client: &Client) {
    end_step(client);
    steps().push(Step {
        client: client.clone(),
        stream: StreamId::current(),
        chunk: None,
        next: CHUNK,
    });
}

/// Ends the step of the current stream of `client`, if any.
pub fn end_step(client: &Client) {
    steps().retain(|step| !step.is_of(client));
}

/// Clears as many words as the kernels of two or three layers request, if a step of the current
/// stream of `client` is active.
pub(crate) fn make_ready(client: &Client) {
    const READY: usize = CHUNK / 4;
    let mine = |step: &&mut Step| step.is_of(client);
    let bytes = match steps().iter_mut().find(mine) {
        Some(step) if step.chunk.as_ref().map_or(0, Chunk::left) < READY => step.grow(),
        _ => return,
    };
    // The lock is not held while a chunk is made, because that launches a kernel.
    keep_chunk(client, Chunk::new(client, bytes));
}

/// Makes further requests of the step of the current stream of `client` take from `chunk`.
fn keep_chunk(client: &Client, chunk: Chunk) {
    if let Some(step) = steps().iter_mut().find(|step| step.is_of(client)) {
        step.chunk = Some(chunk);
    }
}

/// Returns `count` words of zeros.
pub(crate) fn zeros(client: &Client, count: usize) -> Handle {
    let out = allocate(client, count * 4);
    clear(client, &out, count);
    out
}

/// Clears the first `count` words of `out`, which must have that many.
pub(crate) fn clear(client: &Client, out: &Handle, count: usize) {
    if count > 0 {
        let (cubes, dim) = grid(client, count);
        // SAFETY: the kernel stays below the number of words.
        unsafe {
            zero_kernel::launch_unchecked(client, cubes, dim, buffer(out, count), count);
        }
    }
}

/// Returns `count` words of zeros that no later step reads.
pub(crate) fn zeros_of_step(client: &Client, count: usize) -> Handle {
    let mine = |step: &&mut Step| step.is_of(client);
    let served = match steps().iter_mut().find(mine) {
        Some(step) if count > 0 => step.serve(count),
        _ => Served::Alone,
    };
    match served {
        Served::Taken(words) => words,
        Served::ByChunk(bytes) => {
            let mut chunk = Chunk::new(client, bytes);
            let words = chunk.take(count).expect("a chunk is for several requests");
            keep_chunk(client, chunk);
            words
        }
        Served::Alone => zeros(client, count),
    }
}

/// Counters of a stream, which kernels leave at zero.
struct Counters {
    client: Client,
    stream: StreamId,
    memory: Handle,
    words: usize,
}

/// Counters of the streams that requested some most recently, the latest at the end.
static COUNTERS: Mutex<Vec<Counters>> = Mutex::new(Vec::new());
/// Number of streams whose counters are kept. A graph keeps its own counters alive.
const COUNTING_STREAMS: usize = 64;
/// Smallest number of counters of a stream.
const LEAST_COUNTERS: usize = 1024;

/// Returns `count` counters, zero before and after each launch. One launch clears them for all
/// later kernels on the current stream of `client`, which share them.
pub(crate) fn counters(client: &Client, count: usize) -> Handle {
    let stream = StreamId::current();
    let service = client.service_id();
    let all = || COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
    let is_mine = |of: &Counters| of.stream == stream && of.client.service_id() == service;
    let found = (all().iter().find(|of| is_mine(of) && of.words >= count))
        .map(|of| part(&of.memory, 0, (of.words - count) * 4));
    if let Some(found) = found {
        return found;
    }
    if is_recording(client) {
        // The clearing kernel runs only in replays, so these counters belong to the graph.
        return zeros(client, count);
    }
    let words = count.max(LEAST_COUNTERS);
    let memory = zeros(client, words);
    let own = part(&memory, 0, (words - count) * 4);
    let mut all = all();
    all.retain(|of| !is_mine(of));
    if all.len() == COUNTING_STREAMS {
        all.remove(0);
    }
    all.push(Counters {
        client: client.clone(),
        stream,
        memory,
        words,
    });
    own
}

/// True if launches on the current stream of `client` are recorded to a graph and do not run.
fn is_recording(client: &Client) -> bool {
    #[cfg(feature = "cuda")]
    if client.is_capturing() {
        // Otherwise this is the warm-up run.
        return crate::foreign::is_recording(client);
    }
    let _ = client;
    false
}

/// Returns [`zeros_of_step`] for two buffers, in at most one launch.
pub(crate) fn zeros_beside(client: &Client, [first, second]: [usize; 2]) -> [Handle; 2] {
    if first == 0 || second == 0 {
        return [first, second].map(|count| zeros_of_step(client, count));
    }
    let bytes = (first * 4).next_multiple_of(SLOT);
    let both = zeros_of_step(client, bytes / 4 + second);
    [
        part(&both, 0, bytes - first * 4 + second * 4),
        part(&both, bytes, 0),
    ]
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    /// Requests of one stream share their counters, another stream has its own, and a long request
    /// is served too.
    #[test]
    fn counters_are_those_of_a_stream() {
        let client = crate::cpu_client();
        let words = |count: usize| {
            let memory = counters(&client, count);
            client.read_one(memory).expect("they are in memory")
        };
        assert_eq!(words(3)[..], [0; 12]);
        let one = client.create_from_slice(&[1, 0, 0, 0]);
        crate::graph::copy_words(&client, &one, &counters(&client, 2), 1).unwrap();
        assert_eq!(words(3)[..], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let other = StreamId { value: u64::MAX };
        assert_eq!(other.executes(|| words(3))[..], [0; 12]);
        let long = LEAST_COUNTERS + 5;
        assert_eq!(words(long).len(), long * 4);
        assert!(words(long).iter().all(|byte| *byte == 0));
    }

    /// Chunks of a step grow until several requests share one, and requests do not overlap.
    #[test]
    fn chunks_of_a_step_grow() {
        const WORDS: usize = 16384;
        let client = crate::cpu_client();
        let chunk = || {
            let steps = steps();
            let step = steps.iter().find(|step| step.is_of(&client)).unwrap();
            step.chunk.as_ref().map(|chunk| (chunk.bytes, chunk.left()))
        };
        let one = client.create_from_slice(&[1, 0, 0, 0]);
        begin_step(&client);
        let mut chunks = Vec::new();
        let asked: Vec<_> = (0..8)
            .map(|_| {
                let words = zeros_of_step(&client, WORDS);
                chunks.push(chunk());
                words
            })
            .collect();
        let of =
            |bytes: usize, taken: usize| Some((bytes << 10, (bytes << 10) - taken * WORDS * 4));
        let quarter = (1..=4).map(|taken| of(256, taken));
        let alone = [None, None].into_iter();
        let half = (1..=2).map(|taken| of(512, taken));
        assert_eq!(chunks, alone.chain(quarter).chain(half).collect::<Vec<_>>());
        for words in asked {
            let read = client.read_one(words.clone()).expect("they are in memory");
            assert_eq!(read.len(), WORDS * 4);
            assert!(read.iter().all(|byte| *byte == 0));
            for at in [0, WORDS - 1] {
                let word = part(&words, at * 4, (WORDS - 1 - at) * 4);
                crate::graph::copy_words(&client, &one, &word, 1).unwrap();
            }
        }
        // Short requests fill the rest of the chunk.
        let short = zeros_of_step(&client, 1);
        assert_eq!(client.read_one(short).unwrap()[..], [0; 4]);
        assert_eq!(
            chunk(),
            of(512, 2).map(|(bytes, left)| (bytes, left - SLOT))
        );
        end_step(&client);
    }
}
