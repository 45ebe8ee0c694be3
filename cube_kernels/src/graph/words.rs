//! Writes words from the host to a buffer.

use cubecl::{prelude::*, server::Handle};

use crate::launch::buffer;
use crate::{Nvfp4Error, memory::check_memory};

/// Writes `words` to the first four words of `out`, after the kernels queued before. The buffer
/// keeps its address, so that the next replay of a captured graph that reads it uses the new words.
///
/// # Errors
/// Returns an error if `out` has less than four words.
pub fn set_words(client: &Client, out: &Handle, words: [u32; 4]) -> Result<(), Nvfp4Error> {
    check_memory("out", out, 16)?;
    let [w0, w1, w2, w3] = words;
    // SAFETY: checked to hold four words.
    unsafe {
        set_words_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            buffer(out, 4),
            w0,
            w1,
            w2,
            w3,
        );
    }
    Ok(())
}

/// Writes all words, with one unit.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn set_words_kernel(out: &mut [u32], w0: u32, w1: u32, w2: u32, w3: u32) {
    out[0] = w0;
    out[1] = w1;
    out[2] = w2;
    out[3] = w3;
}
