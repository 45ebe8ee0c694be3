//! The geometry of launches: cubes, units, vectors, words.

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

/// Units of a cube on a GPU.
const UNITS: usize = 256;

/// Set by [`set_units`]; 0 leaves the choice to the device.
static ASKED_UNITS: AtomicUsize = AtomicUsize::new(0);

/// From now on the kernels of [`ops`](crate::quantize) run with this many units in a cube, or as
/// many as the device is given otherwise for 0. On a GPU it is a multiple of 32, at most 256. For
/// tests, in a process of their own: no result depends on it.
#[doc(hidden)]
pub fn set_units(units: usize) {
    ASKED_UNITS.store(units, Ordering::Relaxed);
}

/// Units of a cube: one on the CPU, where barriers between more of them than cores are thousands of
/// times slower.
pub(crate) fn units(client: &Client) -> usize {
    match ASKED_UNITS.load(Ordering::Relaxed) {
        0 if is_cpu(client) => 1,
        0 => UNITS,
        asked => asked,
    }
}

/// Cubes of 256 units that stay on an SM together, where 32 registers a unit suffice.
const RESIDENT_CUBES: usize = 8;

/// Cubes for each SM in kernels that stride over the grid: what a unit computes once is still
/// spread over many items, and there are enough that the hardware evens out what does not fit
/// together. With eight, a kernel of 40 registers, of which six fit, takes a third longer: two wait
/// until the six have ended.
const CUBES_PER_MULTIPROCESSOR: usize = 32;

/// Cubes with a tile of 128 rows in shared memory that fit into an SM of an H100.
const TILES_PER_MULTIPROCESSOR: usize = 4;

/// Cubes and units for `items` independent pieces of work, in a kernel that strides over the grid.
pub(crate) fn grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    strided(client, items, CUBES_PER_MULTIPROCESSOR)
}

/// [`grid`] where each cube ends in atomic operations: no more cubes than run at once.
pub(crate) fn resident_grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    strided(client, items, RESIDENT_CUBES)
}

fn strided(client: &Client, items: usize, per_multiprocessor: usize) -> (CubeCount, CubeDim) {
    spread(client, items.div_ceil(units(client)), per_multiprocessor)
}

/// Cubes and units for `items` pieces of work that a whole cube shares.
pub(crate) fn cubes(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    spread(client, items, RESIDENT_CUBES)
}

/// [`cubes`] that are many and short: what a cube does before its first tile is a tenth of the work
/// on one, so that it should have several, and several times more cubes than run at once even out
/// their ends.
pub(crate) fn tile_grid(client: &Client, tiles: usize) -> (CubeCount, CubeDim) {
    spread(client, tiles, CUBES_PER_MULTIPROCESSOR)
}

fn spread(client: &Client, items: usize, per_multiprocessor: usize) -> (CubeCount, CubeDim) {
    let hardware = &client.properties().hardware;
    let most = if is_cpu(client) {
        // As many cubes as cores have any use for: each costs a call.
        4 * hardware.num_cpu_cores.unwrap_or(1) as usize
    } else {
        per_multiprocessor * multiprocessors(client)
    };
    (
        CubeCount::Static(items.clamp(1, most) as u32, 1, 1),
        CubeDim::new_1d(units(client) as u32),
    )
}

/// SMs of a GPU.
pub(crate) fn multiprocessors(client: &Client) -> usize {
    let hardware = &client.properties().hardware;
    hardware.num_streaming_multiprocessors.unwrap_or(128) as usize
}

/// Units of a GPU that run at once, of `cubes` cubes on each SM.
pub(crate) fn resident_units(client: &Client, cubes: usize) -> usize {
    cubes * multiprocessors(client) * units(client)
}

/// [`cubes`] for tiles in shared memory, of which four fit into an SM: as many cubes as run at
/// once, since what a cube does before its first tile is a good part of a tile's work.
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

/// The same for tiles that are computed while they are loaded, in a kernel that strides over the
/// grid: how many fit depends on the registers that this takes, so cubes are more and shorter.
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

/// Tiles that a cube takes one after another in kernels whose cubes are many and short.
const TILES_PER_CUBE: usize = 4;

/// The same where a cube stays in one row of tiles: along the first axis of the grid the cubes of a
/// row, along the others the rows.
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

/// A number of cubes along the second axis of a grid, which is short, and the third.
pub(crate) fn two_axes(count: usize) -> (u32, u32) {
    let highest = usize::from(u16::MAX);
    let count = count.max(1);
    (count.min(highest) as u32, count.div_ceil(highest) as u32)
}

/// The widest vector of at most 16 bytes that divides `len` elements.
pub(crate) fn vector_size(dtype: FloatKind, len: usize) -> usize {
    let mut size = 16 / dtype.size();
    while !len.is_multiple_of(size) {
        size /= 2;
    }
    size
}

/// How a kernel loads a matrix; see [`cube::words`](crate::cube::words).
pub(crate) struct Words {
    /// Type of one loaded scalar: a word, or an element where rows have no whole words.
    pub elem: ElemType,
    /// Scalars that a load takes.
    pub width: usize,
    /// Scalars in the matrix.
    len: usize,
    handle: Handle,
}

impl Words {
    /// The widest loads of `x` that its row length and its place in memory allow.
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

    /// The same in loads of no more than `most` scalars, a power of two.
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

/// A buffer of `len` items of a kernel's argument type.
///
/// # Safety
/// As `BufferArg::from_raw_parts`: the memory must hold them.
pub(crate) unsafe fn buffer(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the caller's promise.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// Elements of 16 bits in a word, or 1.
pub(crate) const fn per_word(kind: FloatKind) -> usize {
    4 / kind.size()
}
