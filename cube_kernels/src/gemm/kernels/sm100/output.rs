//! Epilogue of the [`sm100_block_scaled`](super) kernel. Each thread has one
//! lane of tensor memory. The lane is a row of the output, of which the thread writes 16 bytes at a
//! time, or a column if operands are swapped. Neighbouring lanes then first exchange their sums, so
//! that each has 16 bytes of a row. Two of these fill a memory sector, so no staging through shared
//! memory is needed.

use cubecl::prelude::*;

use super::{
    commands::{SoftwareTensorCore, load_accumulators},
    engine::Memory,
    tile::{SM100_SWAP_AB_N, SM100_TILE_N, TensorCore},
};
use crate::{
    gemm::epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
    tensor::FloatKind,
};

/// Columns loaded from tensor memory at a time.
const CHUNK: usize = 16;

/// Portion of the output that a tile covers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct OutputTile {
    /// First row of the tile.
    pub row: u32,
    /// End row of the group (exclusive).
    pub end: u32,
    /// First column of the tile.
    pub column: u32,
    /// Columns of the output.
    pub n: u32,
    /// Group index.
    pub group: u32,
    /// Address of the accumulators of this warp's lanes.
    pub accumulators: u32,
    /// True if all sums are zero, regardless of the accumulators.
    pub is_empty: bool,
}

/// 16 bytes of a row of the output.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct OutputVector {
    /// Row.
    row: u32,
    /// First column.
    column: u32,
    /// Factor of the row of `a`.
    a: f32,
    /// Factor of `b`, if the tile has a single one.
    b: f32,
}

/// Applies the epilogue to the tile's accumulators, with a row of the output in each lane, and
/// writes the rows and columns within bounds. `out` is in units of 16 bytes.
#[cube]
pub(super) fn write_tile(
    model: &mut SoftwareTensorCore,
    memory: Memory,
    tile: OutputTile,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] core: TensorCore,
) {
    let width = comptime!(16 / epilogue.kind.out.size());
    let own = tile.row + UNIT_POS;
    let is_row = own < tile.end;
    // Out-of-bounds rows read the factor of row 0, and are not written.
    let row = select(is_row, own, 0u32);
    let a = epilogue.a_factor(row, tile.group);
    let b = epilogue.b_tile_factor(tile.group);
    let mut largest = 0u32;
    for chunk in 0..comptime!((SM100_TILE_N / CHUNK) as u32) {
        let first = chunk * comptime!(CHUNK as u32);
        // Uniform across the threads of a warp, which load together.
        if tile.column + first < tile.n {
            // Reconverges threads with rows in and out of bounds.
            sync_plane();
            let sums = load_accumulators(model, memory, tile.accumulators + first, core);
            #[unroll]
            for i in 0..comptime!(CHUNK / width) {
                let column = tile.column + first + comptime!((i * width) as u32);
                if is_row && column < tile.n {
                    let at = OutputVector { row, column, a, b };
                    let found = write_vector(sums, at, tile, epilogue, out, comptime!(i * width));
                    largest = max(largest, found);
                }
            }
        }
    }
    epilogue.atomic_amax(tile.group, largest);
}

/// [`write_tile()`] with a column of the output in each lane and its rows in sequence.
#[cube]
pub(super) fn write_transposed(
    model: &mut SoftwareTensorCore,
    memory: Memory,
    tile: OutputTile,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] core: TensorCore,
) {
    let width = comptime!(16 / epilogue.kind.out.size());
    let lane = UNIT_POS % comptime!(width as u32);
    // First of the columns of these lanes.
    let column = tile.column + UNIT_POS - lane;
    let b = epilogue.b_tile_factor(tile.group);
    let mut largest = 0u32;
    for chunk in 0..comptime!((SM100_SWAP_AB_N / CHUNK) as u32) {
        let first = chunk * comptime!(CHUNK as u32);
        // Uniform across the threads of a warp, which load together.
        if tile.row + first < tile.end {
            // Reconverges threads with columns in and out of bounds.
            sync_plane();
            let sums = load_accumulators(model, memory, tile.accumulators + first, core);
            let sums = transpose_lanes(sums, lane, width);
            #[unroll]
            for i in 0..comptime!(CHUNK / width) {
                let row = tile.row + first + comptime!((i * width) as u32) + lane;
                if row < tile.end && column < tile.n {
                    let a = epilogue.a_factor(row, tile.group);
                    let at = OutputVector { row, column, a, b };
                    let found = write_vector(sums, at, tile, epilogue, out, comptime!(i * width));
                    largest = max(largest, found);
                }
            }
        }
    }
    epilogue.atomic_amax(tile.group, largest);
}

/// Transposes values among each `width` neighbouring lanes, of which the thread's is number `lane`:
/// in each `width` values, value `i` becomes value `lane` of neighbour `i`. All threads of a warp
/// must participate.
#[cube]
fn transpose_lanes(
    values: Vector<f32, Const<16>>,
    lane: u32,
    #[comptime] width: usize,
) -> Vector<f32, Const<16>> {
    let mut values = values;
    #[unroll]
    for bit in 0..comptime!(width.ilog2()) {
        let distance = comptime!(1usize << bit);
        let is_upper = (lane >> bit) & 1u32 == 1u32;
        #[unroll]
        for pair in 0..comptime!(CHUNK / 2) {
            // The pair's indices differ in this bit.
            let low = comptime!((pair / distance) * 2 * distance + pair % distance);
            let high = comptime!(low + distance);
            let (first, second) = (values.extract(low), values.extract(high));
            // The lower lane keeps its first value, and the upper one its second.
            let sent = select(is_upper, first, second);
            let received = plane_shuffle_xor(sent, comptime!(distance as u32));
            values.insert(low, select(is_upper, received, first));
            values.insert(high, select(is_upper, second, received));
        }
    }
    values
}

/// Applies the epilogue to the sums from number `from` on, at the position `at`, and writes them.
/// Returns the bits of the largest magnitude if the epilogue computes an amax.
#[cube]
fn write_vector(
    sums: Vector<f32, Const<16>>,
    at: OutputVector,
    tile: OutputTile,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] from: usize,
) -> u32 {
    let kind = comptime!(epilogue.kind.out);
    let width = comptime!(16 / kind.size());
    let first = at.row as usize * tile.n as usize + at.column as usize;
    let own = tile.group * tile.n + at.column;
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    let mut largest = 0u32;
    #[unroll]
    for pair in 0..comptime!(width / 2) {
        let j = comptime!(2 * pair as u32);
        let even = select(
            tile.is_empty,
            0.0f32,
            sums.extract(comptime!(from + 2 * pair)),
        );
        let odd = select(
            tile.is_empty,
            0.0f32,
            sums.extract(comptime!(from + 2 * pair + 1)),
        );
        let place = first + comptime!(2 * pair);
        let even = finish(even, (own + j) as usize, place, at, epilogue, 0u32);
        let odd = finish(
            odd,
            (own + comptime!(j + 1)) as usize,
            place,
            at,
            epilogue,
            1u32,
        );
        if comptime!(kind == FloatKind::F32) {
            words.insert(comptime!(2 * pair), u32::reinterpret(even));
            words.insert(comptime!(2 * pair + 1), u32::reinterpret(odd));
        } else {
            words.insert(pair, pack_pair(even, odd, kind));
        }
        if comptime!(epilogue.kind.amax.is_some()) {
            largest = max(largest, rounded_magnitude(even, odd, kind));
        }
    }
    out[first / width] = words;
    largest
}

/// Returns the value of one element: `own` is the index of its column in `b`'s factors and the
/// bias, `pair` the even element of its pair in the output, `odd` selects one of the two.
#[cube]
fn finish(
    sum: f32,
    own: usize,
    pair: usize,
    at: OutputVector,
    epilogue: &Epilogue,
    #[comptime] odd: u32,
) -> f32 {
    let with = Addends {
        alpha: at.a * epilogue.b_row_factor(own as u32, at.b),
        bias: epilogue.load_bias(own),
        c: epilogue.load_c(pair, odd),
    };
    apply(sum, with, comptime!(epilogue.kind))
}
