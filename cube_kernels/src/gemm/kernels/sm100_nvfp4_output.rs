//! The epilogue of the [`sm100_nvfp4`](super::sm100_nvfp4) kernel: a thread has one row of the
//! tile, a lane of tensor memory, and writes it 16 bytes at a time. Two of these fill a sector of
//! memory, so that nothing goes through shared memory.

use cubecl::prelude::*;

use super::{
    sm100_nvfp4_commands::{SoftwareTensorCore, load_accumulators},
    sm100_nvfp4_engine::Memory,
};
use crate::{
    gemm::{
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
        tiles::{SM100_TILE_N, TensorCore},
    },
    tensor::FloatKind,
};

/// Columns that are loaded from tensor memory at a time.
const CHUNK: usize = 16;

/// The part of the output that a tile covers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct OutputTile {
    /// The row of this thread.
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

/// What of a tile does not depend on the column.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct RowFactors {
    /// The factor of the row of `a`.
    a: f32,
    /// The factor of `b`, if one holds for the tile.
    b: f32,
    /// Whether sums are zero.
    is_empty: bool,
}

/// Applies the epilogue to the tile's accumulators and writes the rows and columns that exist.
/// `out` is in units of 16 bytes.
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
    let is_row = tile.row < tile.end;
    // Rows outside read the factor of row 0, and are not written.
    let row = select(is_row, tile.row, 0u32);
    let factors = RowFactors {
        a: epilogue.a_factor(row, tile.group),
        b: epilogue.b_tile_factor(tile.group),
        is_empty: tile.is_empty,
    };
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
                    let from = comptime!(i * width);
                    let at = row as usize * tile.n as usize + column as usize;
                    let own = tile.group * tile.n + column;
                    let mut words = Vector::<u32, Const<4>>::new(0u32);
                    #[unroll]
                    for pair in 0..comptime!(width / 2) {
                        let j = comptime!(2 * pair as u32);
                        let even = finish(
                            sums.extract(comptime!(from + 2 * pair)),
                            (own + j) as usize,
                            at + comptime!(2 * pair),
                            factors,
                            epilogue,
                            0u32,
                        );
                        let odd = finish(
                            sums.extract(comptime!(from + 2 * pair + 1)),
                            (own + comptime!(j + 1)) as usize,
                            at + comptime!(2 * pair),
                            factors,
                            epilogue,
                            1u32,
                        );
                        let out = comptime!(epilogue.kind.out);
                        if comptime!(out == FloatKind::F32) {
                            words.insert(comptime!(2 * pair), u32::reinterpret(even));
                            words.insert(comptime!(2 * pair + 1), u32::reinterpret(odd));
                        } else {
                            words.insert(pair, pack_pair(even, odd, out));
                        }
                        if comptime!(epilogue.kind.amax.is_some()) {
                            largest = max(largest, rounded_magnitude(even, odd, out));
                        }
                    }
                    out[at / width] = words;
                }
            }
        }
    }
    epilogue.atomic_amax(tile.group, largest);
}

/// The value of one element: `own` is where `b`'s factors and the bias have its column, `pair` the
/// even element of its pair in the output, `odd` which of the two it is.
#[cube]
fn finish(
    sum: f32,
    own: usize,
    pair: usize,
    factors: RowFactors,
    epilogue: &Epilogue,
    #[comptime] odd: u32,
) -> f32 {
    let with = Addends {
        alpha: factors.a * epilogue.b_row_factor(own as u32, factors.b),
        bias: epilogue.load_bias(own),
        c: epilogue.load_c(pair, odd),
    };
    let sum = select(factors.is_empty, 0.0f32, sum);
    apply(sum, with, comptime!(epilogue.kind))
}
