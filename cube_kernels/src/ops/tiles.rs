//! What the kernels that work on tiles in shared memory have in common.

use cubecl::prelude::*;

use crate::device::is_cpu;

/// Cubes and units for `tiles` tiles, one to a cube at a time, in a kernel that strides over the
/// grid. On the CPU one unit does the work of a cube: barriers between more units than cores are
/// thousands of times slower there.
pub(crate) fn tile_grid(client: &Client, tiles: usize) -> (CubeCount, CubeDim) {
    let hardware = &client.properties().hardware;
    if is_cpu(client) {
        let cores = hardware.num_cpu_cores.unwrap_or(1) as usize;
        return (
            CubeCount::Static(tiles.min(4 * cores) as u32, 1, 1),
            CubeDim::new_1d(1),
        );
    }
    let processors = hardware.num_streaming_multiprocessors.unwrap_or(128) as usize;
    let cubes = tiles.min(processors * CUBES);
    (
        CubeCount::Static(cubes as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
    )
}

/// Units of a cube on a GPU.
const UNITS: usize = 256;

/// Cubes for each multiprocessor. A kernel's preamble (global scales, signs) is a tenth of the work on
/// one tile, so that cubes should have several; and several times more cubes than run at once even out
/// their ends.
const CUBES: usize = 32;
