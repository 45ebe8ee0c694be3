//! The epilogue of the [`sm100_block_scaled`](super::sm100_block_scaled) kernel. A thread has one
//! lane of tensor memory: a row of the output, of which it writes 16 bytes at a time, or, where the
//! operands are exchanged, a column. Then neighbouring lanes exchange their sums first, so that
//! each has 16 bytes of a row. Two of these fill a sector of memory, so that nothing goes through
//! shared memory.

use cubecl::prelude::*;

use super::{
    sm100_block_scaled_commands::{SoftwareTensorCore, load_accumulators},
    sm100_block_scaled_engine::Memory,
};
use crate::{
    gemm::{
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
        tiles::{SM100_SWAP_AB_N, SM100_TILE_N, TensorCore},
    },
    tensor::FloatKind,
};

/// Columns that are loaded from tensor memory at a time.
const CHUNK: usize = 16;

/// The part of the output that a tile covers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct OutputTile {
    /// The tile's first row.
    pub row: u32,
    /// The row behind the last of the group.
    pub end: u32,
    /// The tile's first column.
    pub column: u32,
    /// Columns of the output.
    pub n: u32,
    /// The group.
    pub group: u32,
    /// The address of the accumulators of this warp's lanes.
    pub accumulators: u32,
    /// Whether all sums are zero, whatever the accumulators hold.
    pub is_empty: bool,
}

/// 16 bytes of a row of the output.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct OutputVector {
    /// The row.
    row: u32,
    /// The first column.
    column: u32,
    /// The factor of the row of `a`.
    a: f32,
    /// The factor of `b`, if one holds for the tile.
    b: f32,
}

/// Applies the epilogue to the tile's accumulators, a row of the output in each lane, and writes
/// the rows and columns that exist. `out` is in units of 16 bytes.
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
    // Rows outside read the factor of row 0, and are not written.
    let row = select(is_row, own, 0u32);
    let a = epilogue.a_factor(row, tile.group);
    let b = epilogue.b_tile_factor(tile.group);
    let mut largest = 0u32;
    for chunk in 0..comptime!((SM100_TILE_N / CHUNK) as u32) {
        let first = chunk * comptime!(CHUNK as u32);
        // The same for all threads of a warp, which load together.
        if tile.column + first < tile.n {
            // Rows that exist and rows that do not meet again.
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

/// The same with a column of the output in each lane and its rows one after another.
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
    // The first of the columns of these lanes.
    let column = tile.column + UNIT_POS - lane;
    let b = epilogue.b_tile_factor(tile.group);
    let mut largest = 0u32;
    for chunk in 0..comptime!((SM100_SWAP_AB_N / CHUNK) as u32) {
        let first = chunk * comptime!(CHUNK as u32);
        // The same for all threads of a warp, which load together.
        if tile.row + first < tile.end {
            // Columns that exist and columns that do not meet again.
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

/// Exchanges values among each `width` neighbouring lanes, of which the thread's is number `lane`:
/// of each `width` values, value `i` becomes value `lane` of neighbour `i`. A warp, all of its
/// threads.
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

/// Applies the epilogue to the sums from number `from` on, which are those of `at`, and writes
/// them. Returns the bits of the largest magnitude if the epilogue asks for it.
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

/// The value of one element: `own` is where `b`'s factors and the bias have its column, `pair` the
/// even element of its pair in the output, `odd` which of the two it is.
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
