//! One launch that clears the words of many amax values: in a captured graph, whose kernels follow
//! each other without the host, the launches that clear a word each are a part of its time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cubecl::{prelude::Client, server::Handle};

use super::launch::zero;
use crate::memory::allocate;

/// Words that a capture has. Those that ask for more than [`MOST`] at a time, or after the last,
/// are cleared by a launch of their own.
const WORDS: usize = 1 << 14;

/// Words that are handed out at a time.
const MOST: usize = 64;

/// The words of a capture, and how many of them have been handed out.
struct Shared {
    words: Handle,
    used: usize,
}

static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

fn shared() -> MutexGuard<'static, Vec<Shared>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where it `begins`, in a capture, clears words for the amax values of all launches until it ends,
/// or the capture does. Elsewhere it does nothing: words that nobody clears again may be handed out
/// once.
///
/// Whoever begins ends, within the capture: words of one graph are not cleared by another.
pub fn share_zeros(client: &Client, begins: bool) {
    let service = client.service_id();
    let mut all = shared();
    all.retain(|one| one.words.service != service);
    if begins && client.is_capturing() {
        let words = allocate(client, WORDS * 4);
        zero(client, [(&words, WORDS), (&words, 0)]);
        all.push(Shared { words, used: 0 });
    }
}

/// `count` of the words that were cleared for this capture, if it has them.
pub(super) fn take(client: &Client, count: usize) -> Option<Handle> {
    if count > MOST || !client.is_capturing() {
        return None;
    }
    let service = client.service_id();
    let mut all = shared();
    let one = all.iter_mut().find(|one| one.words.service == service)?;
    let (first, last) = (one.used, one.used + count);
    if last > WORDS {
        return None;
    }
    one.used = last;
    let words = one.words.clone().offset_start(4 * first as u64);
    Some(words.offset_end(4 * (WORDS - last) as u64))
}
