//! Launch geometry: cubes, units, vectors, words.

use std::sync::atomic::{AtomicUsize, Ordering};

use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
    server::Handle,
};

use crate::{
    capabilities::is_cpu,
    tensor::{FloatKind, Matrix},
};

/// Units per cube on a GPU.
const UNITS: usize = 256;

/// Units per cube that a test asked for; 0 means that the device decides.
pub(crate) static ASKED_UNITS: AtomicUsize = AtomicUsize::new(0);

/// Returns the units per cube: one on the CPU, where barriers between more units than cores are
/// thousands of times slower.
pub(crate) fn units(client: &Client) -> usize {
    match ASKED_UNITS.load(Ordering::Relaxed) {
        0 if is_cpu(client) => 1,
        0 => UNITS,
        asked => asked,
    }
}

/// Cubes of 256 units that are resident on an SM together, if a unit needs at most 32 registers.
const RESIDENT_CUBES: usize = 8;

/// Cubes per SM in kernels that stride over the grid. Work that a unit does once is still amortized
/// over many items, and there are enough cubes to even out the tail. With eight, a kernel of 40
/// registers, of which six cubes fit, takes a third longer: two cubes wait until the six have
/// ended.
const CUBES_PER_MULTIPROCESSOR: usize = 32;

/// Cubes with a 128-row tile in shared memory that fit on an SM of an H100.
const TILES_PER_MULTIPROCESSOR: usize = 4;

/// Returns cubes and units for `items` independent work items in a kernel that strides over the
/// grid.
pub(crate) fn grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    strided(client, items, CUBES_PER_MULTIPROCESSOR)
}

/// Returns [`grid`] with at most as many cubes as run at once, for cubes that end in atomics.
pub(crate) fn resident_grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    strided(client, items, RESIDENT_CUBES)
}

fn strided(client: &Client, items: usize, per_multiprocessor: usize) -> (CubeCount, CubeDim) {
    spread(client, items.div_ceil(units(client)), per_multiprocessor)
}

/// Returns cubes and units for `items` work items, each processed by a whole cube.
pub(crate) fn cubes(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    spread(client, items, RESIDENT_CUBES)
}

/// Returns [`cubes`] for many short cubes. The setup of a cube costs a tenth of the work on one
/// tile, so a cube should process several tiles; several times more cubes than run at once even out
/// the tail.
pub(crate) fn tile_grid(client: &Client, tiles: usize) -> (CubeCount, CubeDim) {
    spread(client, tiles, CUBES_PER_MULTIPROCESSOR)
}

fn spread(client: &Client, items: usize, per_multiprocessor: usize) -> (CubeCount, CubeDim) {
    let hardware = &client.properties().hardware;
    let most = if is_cpu(client) {
        // No more cubes than the cores can use: each costs a call.
        4 * hardware.num_cpu_cores.unwrap_or(1) as usize
    } else {
        per_multiprocessor * multiprocessors(client)
    };
    (
        CubeCount::Static(items.clamp(1, most) as u32, 1, 1),
        CubeDim::new_1d(units(client) as u32),
    )
}

/// Returns the number of SMs of a GPU.
pub(crate) fn multiprocessors(client: &Client) -> usize {
    let hardware = &client.properties().hardware;
    hardware.num_streaming_multiprocessors.unwrap_or(128) as usize
}

/// Returns the number of units of a GPU that run at once, with `cubes` cubes on each SM.
pub(crate) fn resident_units(client: &Client, cubes: usize) -> usize {
    cubes * multiprocessors(client) * units(client)
}

/// Returns [`cubes`] for tiles in shared memory, of which four fit on an SM. There are as many
/// cubes as run at once, since the setup of a cube costs a substantial fraction of a tile's work.
pub(crate) fn tile_cubes(client: &Client, tiles: usize) -> (CubeCount, CubeDim) {
    let (count, dim) = cubes(client, tiles);
    if is_cpu(client) {
        return (count, dim);
    }
    let resident = TILES_PER_MULTIPROCESSOR * multiprocessors(client);
    (
        CubeCount::Static(tiles.clamp(1, resident) as u32, 1, 1),
        dim,
    )
}

/// Returns [`tile_cubes`] for tiles that are computed while they are loaded, in a kernel that
/// strides over the grid. The number of resident cubes depends on the registers that this takes, so
/// there are more and shorter cubes.
pub(crate) fn computed_tile_cubes(client: &Client, tiles: usize) -> (CubeCount, CubeDim) {
    let (count, dim) = tile_cubes(client, tiles);
    match count {
        CubeCount::Static(resident, ..) if !is_cpu(client) => {
            let count = tiles.div_ceil(TILES_PER_CUBE).max(resident as usize);
            (CubeCount::Static(count as u32, 1, 1), dim)
        }
        count => (count, dim),
    }
}

/// Tiles that a cube processes one after another in kernels with many short cubes.
const TILES_PER_CUBE: usize = 4;

/// Returns cubes for computed tiles if each cube stays in one row of tiles. The first axis of the
/// grid counts the cubes of a row, the other axes count the rows.
pub(crate) fn tile_runs(
    client: &Client,
    row_tiles: usize,
    tile_cols: usize,
) -> (CubeCount, CubeDim) {
    let along = if is_cpu(client) {
        1
    } else {
        tile_cols.div_ceil(TILES_PER_CUBE)
    };
    let (y, z) = two_axes(row_tiles);
    (
        CubeCount::Static(along as u32, y, z),
        CubeDim::new_1d(units(client) as u32),
    )
}

/// Splits a number of cubes over the second axis of a grid, which is short, and the third.
pub(crate) fn two_axes(count: usize) -> (u32, u32) {
    let highest = usize::from(u16::MAX);
    let count = count.max(1);
    (count.min(highest) as u32, count.div_ceil(highest) as u32)
}

/// Returns the widest vector of at most 16 bytes that divides `len` elements.
pub(crate) fn vector_size(dtype: FloatKind, len: usize) -> usize {
    let mut size = 16 / dtype.size();
    while !len.is_multiple_of(size) {
        size /= 2;
    }
    size
}

/// Load width and buffer of a matrix in a kernel; see [`cube::words`](crate::cube::words).
pub(crate) struct Words {
    /// Type of one loaded scalar: a word, or an element if rows are not whole words.
    pub elem: ElemType,
    /// Scalars per load.
    pub width: usize,
    /// Number of scalars in the matrix.
    len: usize,
    handle: Handle,
}

impl Words {
    /// Returns the widest loads of `x` that its row length and its offset in memory allow.
    pub fn of(x: &Matrix) -> Self {
        let row = x.cols * x.dtype.size();
        let start = x.handle.offset_start.unwrap_or(0) as usize;
        let fits = |bytes: usize| row.is_multiple_of(bytes) && start.is_multiple_of(bytes);
        let (elem, size, width) = match [16usize, 8, 4].into_iter().find(|&bytes| fits(bytes)) {
            Some(bytes) => (ElemType::UInt(UIntKind::U32), 4, bytes / 4),
            None => (ElemType::UInt(UIntKind::U16), 2, 1),
        };
        Self {
            elem,
            width,
            len: x.len() * x.dtype.size() / size,
            handle: x.handle.clone(),
        }
    }

    /// Limits loads to `most` scalars, a power of two.
    pub fn of_at_most(self, most: usize) -> Self {
        Self {
            width: self.width.min(most),
            ..self
        }
    }

    pub fn arg(&self) -> BufferArg {
        // SAFETY: the matrix was checked against its memory.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len / self.width) }
    }
}

/// Returns a buffer of `len` items of a kernel's argument type.
///
/// # Safety
/// As `BufferArg::from_raw_parts`: the memory must hold them.
pub(crate) unsafe fn buffer(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the caller's promise.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// Returns the elements per 32-bit word: 2 for 16-bit types, otherwise 1.
pub(crate) const fn per_word(kind: FloatKind) -> usize {
    4 / kind.size()
}
