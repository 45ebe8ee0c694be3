//! What the launches share: geometry, vector widths, random arguments.

use cubecl::{prelude::*, server::Handle};

use crate::{
    Hadamard,
    cube::{block::BlockPolicy, philox::RandomLaunch},
    device::{Capabilities, DeviceRounding, FloatKind, is_cpu},
};

/// Cubes and units for `items` independent pieces of work, in a kernel that strides over the grid.
pub(crate) fn grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    if is_cpu(client) {
        // One unit a cube, and as many cubes as cores have any use for: each costs a call.
        let cores = client.properties().hardware.num_cpu_cores.unwrap_or(1) as usize;
        return (
            CubeCount::Static(items.min(4 * cores) as u32, 1, 1),
            CubeDim::new_1d(1),
        );
    }
    const UNITS: usize = 256;
    // More cubes than the grid may hold are made up for by the stride.
    let cubes = items
        .div_ceil(UNITS)
        .min(client.properties().hardware.max_cube_count.0 as usize);
    (
        CubeCount::Static(cubes as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
    )
}

/// The widest vector of at most 16 bytes that divides `len` elements.
pub(crate) fn vector_size(dtype: FloatKind, len: usize) -> usize {
    let mut size = 16 / dtype.size();
    while !len.is_multiple_of(size) {
        size /= 2;
    }
    size
}

/// The comptime and the run-time half of a block policy.
pub(crate) struct BlockArgs {
    pub policy: BlockPolicy,
    key: [u32; 2],
    offset: u64,
    device_offset: Option<Handle>,
    pub signs: u32,
}

impl BlockArgs {
    pub fn new(client: &Client, rounding: &DeviceRounding, hadamard: Option<Hadamard>) -> Self {
        let (stream, device_offset) = match rounding {
            DeviceRounding::Nearest => (None, None),
            DeviceRounding::Stochastic(stream) => (Some(*stream), None),
            DeviceRounding::StochasticAt(stream, offset) => (Some(*stream), Some(offset.clone())),
        };
        Self {
            policy: BlockPolicy {
                stochastic: stream.is_some(),
                device_offset: device_offset.is_some(),
                hadamard: hadamard.is_some(),
                conversion: Capabilities::of(client).conversion,
            },
            key: stream.map_or([0; 2], |stream| stream.key()),
            offset: stream.map_or(0, |stream| stream.offset),
            device_offset,
            signs: hadamard.map_or(0, |hadamard| hadamard.sign_words()[0]),
        }
    }

    pub fn random(&self) -> RandomLaunch {
        RandomLaunch::new(
            self.key[0],
            self.key[1],
            self.offset as u32,
            (self.offset >> 32) as u32,
        )
    }

    /// The offset in device memory; `placeholder`, which the kernel does not read, where there is
    /// none.
    pub fn offset(&self, placeholder: &Handle) -> BufferArg {
        match &self.device_offset {
            // SAFETY: checked to hold two words when the operation was called.
            Some(handle) => unsafe { BufferArg::from_raw_parts(handle.clone(), 2) },
            // SAFETY: any tensor's maximum holds one word.
            None => unsafe { BufferArg::from_raw_parts(placeholder.clone(), 1) },
        }
    }
}
