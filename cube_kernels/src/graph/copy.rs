//! Copies words from one buffer to another.

use cubecl::{prelude::*, server::Handle};

use crate::launch::{buffer, grid};
use crate::{Nvfp4Error, memory::check_memory};

/// Copies `words` words of 4 bytes from `from` to `out`, after the kernels queued before.
///
/// # Errors
/// Returns an error if one of the buffers is smaller.
pub fn copy_words(
    client: &Client,
    from: &Handle,
    out: &Handle,
    words: usize,
) -> Result<(), Nvfp4Error> {
    check_memory("from", from, 4 * words)?;
    check_memory("out", out, 4 * words)?;
    if words == 0 {
        return Ok(());
    }
    let (count, dim) = grid(client, words);
    // SAFETY: both were checked to hold as many words, and no unit goes further.
    unsafe {
        copy_words_kernel::launch_unchecked(
            client,
            count,
            dim,
            buffer(from, words),
            buffer(out, words),
            words as u32,
        );
    }
    Ok(())
}

/// Each unit copies every `units`-th word.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn copy_words_kernel(from: &[u32], out: &mut [u32], words: u32) {
    let mut word = ABSOLUTE_POS as u32;
    while word < words {
        out[word as usize] = from[word as usize];
        word += (CUBE_COUNT * CUBE_DIM as usize) as u32;
    }
}
