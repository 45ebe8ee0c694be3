//! Random offsets in device memory.

use cubecl::{prelude::*, server::Handle};

use crate::launch::buffer;
use crate::{Nvfp4Error, memory::check_memory};

/// Advances a random offset in device memory (two `u32`, low word first) by `step`, wrapping at
/// 2^64, after the kernels that were queued before. A captured graph that ends with this kernel
/// draws fresh bits at every replay of its tensors with
/// [this offset](crate::quantize::TargetSpec::offset).
///
/// # Errors
/// Returns an error if `offset` does not hold two words.
pub fn advance_offset(client: &Client, offset: &Handle, step: u32) -> Result<(), Nvfp4Error> {
    check_memory("offset", offset, 8)?;
    // SAFETY: checked to hold two words.
    unsafe {
        advance_offset_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            buffer(offset, 2),
            step,
        );
    }
    Ok(())
}

/// Adds `step` on a single unit.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn advance_offset_kernel(offset: &mut [u32], step: u32) {
    let low = offset[0] + step;
    // The unsigned addition wrapped if and only if the sum is below a summand.
    let carry = u32::cast_from(low < step);
    offset[0] = low;
    offset[1] += carry;
}
