//! The device, the copy used as a baseline, and the results file.

// Each benchmark uses a part of these.
#[allow(dead_code)]
pub mod b200;
#[allow(dead_code)]
pub mod device;
pub mod results;

use cubecl::{prelude::*, server::Handle};

#[cube(launch_unchecked)]
fn copy_kernel(from: &[Vector<u32, Const<4>>], to: &mut [Vector<u32, Const<4>>]) {
    let i = ABSOLUTE_POS;
    if i < to.len() {
        to[i] = from[i];
    }
}

/// Launches a copy of `bytes` bytes, a multiple of 16, which both buffers must have.
pub fn copy(client: &Client, from: &Handle, to: &Handle, bytes: usize) {
    let vectors = bytes / 16;
    // SAFETY: both buffers hold `vectors` vectors.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            BufferArg::from_raw_parts(from.clone(), vectors),
            BufferArg::from_raw_parts(to.clone(), vectors),
        );
    }
}
