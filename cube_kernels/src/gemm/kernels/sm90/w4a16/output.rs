//! Epilogue of the Hopper W4A16 kernel: transposes sums through shared memory to rows of the
//! output.

use cubecl::prelude::*;

use crate::{
    cube::ptx::{ld_shared_v4, named_barrier_sync, st_shared},
    gemm::{
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
        tiles::{W4A16_STRIP, W4a16Tile},
    },
    tensor::FloatKind,
};

/// Row pitch of the output in the staging buffer, in floats: padded by four, so that the lanes of a
/// warp write to different banks.
const STAGING_ROW: usize = W4A16_STRIP + 4;

impl W4a16Tile {
    /// Returns the rows of the output that are staged at a time.
    const fn chunk(self) -> usize {
        if self.rows_a.is_multiple_of(32) {
            32
        } else {
            16
        }
    }

    /// Returns the floats that one warpgroup stages.
    pub(super) const fn staging(self) -> usize {
        self.chunk() * STAGING_ROW
    }
}

/// Position of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in crate::gemm::kernels::sm90) struct TilePlace {
    /// Group of its rows of `a`.
    pub group: u32,
    /// First row of `a`.
    pub row: u32,
    /// End row of the group (exclusive).
    pub end: u32,
    /// First row of `b` within the group.
    pub column: u32,
}

/// A consumer warpgroup's share of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Part {
    /// Index of the warpgroup.
    pub consumer: u32,
    /// Index of its 64 rows of `b`.
    pub strip: u32,
    /// Address of the staging buffers of all warpgroups in shared memory.
    pub staging: u32,
}

/// Applies the epilogue to the sums of a tile and writes them. A lane has rows `lane / 4` and
/// `lane / 4 + 8` of the 16 rows of `b` of its warp, for two neighbouring rows of `a` in every
/// eight. Shared memory transposes them to rows of the output, 16 bytes per unit.
#[cube]
pub(super) fn write_tile<N: Size>(
    sums: Vector<f32, N>,
    at: TilePlace,
    part: Part,
    n: u32,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] width: usize,
    #[comptime] tile: W4a16Tile,
) {
    let kind = comptime!(epilogue.kind);
    // Consumers with shared rows of `b` write the tile together; otherwise each writes its own
    // columns.
    let units = comptime!(128 * tile.ways as u32);
    let mut number = 1u32 + part.consumer;
    let mut unit = UNIT_POS % 128u32;
    if comptime!(tile.ways > 1) {
        number = 1u32;
        unit += part.consumer * 128u32;
    }
    let number = u32::reinterpret(number);
    let stage_bytes = comptime!(tile.staging() as u32 * 4);
    let read = part.staging + part.strip * stage_bytes;
    let column0 = at.column + part.strip * comptime!(W4A16_STRIP as u32);
    // Columns per 16-byte vector, and vectors per row.
    let vector = comptime!(16 / kind.out.size() as u32);
    let per_row = comptime!(W4A16_STRIP as u32 / (16 / kind.out.size() as u32));
    let items =
        comptime!(tile.chunk() as u32 * (W4A16_STRIP as u32 / (16 / kind.out.size() as u32)));
    let b_factor = epilogue.b_tile_factor(at.group);
    let mut largest = 0u32;
    #[unroll]
    for chunk in 0..comptime!(width / tile.chunk()) {
        let chunk_row = at.row + comptime!((chunk * tile.chunk()) as u32);
        if chunk_row < at.end {
            // The previous chunk has been read.
            named_barrier_sync(number, units.runtime());
            stage_sums::<N>(
                sums,
                part.staging + part.consumer * stage_bytes,
                chunk,
                tile,
            );
            named_barrier_sync(number, units.runtime());
            #[unroll]
            for round in 0..comptime!(items.div_ceil(units)) {
                let item = unit + comptime!(round * units);
                let line = item / per_row;
                let within = (item % per_row) * vector;
                let row = chunk_row + line;
                let column = column0 + within;
                if item < items && row < at.end && column < n {
                    let line_factor = epilogue.a_factor(row, at.group);
                    let from = read + line * comptime!(STAGING_ROW as u32 * 4) + within * 4u32;
                    let mut words = Vector::<u32, Const<4>>::new(0u32);
                    #[unroll]
                    for four in 0..comptime!(vector as usize / 4) {
                        let values = load_sums(from + comptime!(four as u32 * 16), tile);
                        #[unroll]
                        for pair in 0..2usize {
                            let here = column + comptime!((four * 4 + pair * 2) as u32);
                            let own = at.group * n + here;
                            let index = row as usize * n as usize + here as usize;
                            let even = Addends {
                                alpha: line_factor * epilogue.b_row_factor(own, b_factor),
                                bias: epilogue.load_bias(own as usize),
                                c: epilogue.load_c(index, 0u32),
                            };
                            let sum = values.extract(comptime!(2 * pair)) * epilogue.sum_scale;
                            let even = apply(sum, even, kind);
                            let odd = Addends {
                                alpha: line_factor * epilogue.b_row_factor(own + 1u32, b_factor),
                                bias: epilogue.load_bias((own + 1u32) as usize),
                                c: epilogue.load_c(index, 1u32),
                            };
                            let sum = values.extract(comptime!(2 * pair + 1)) * epilogue.sum_scale;
                            let odd = apply(sum, odd, kind);
                            if comptime!(kind.out == FloatKind::F32) {
                                words.insert(comptime!(2 * pair), u32::reinterpret(even));
                                words.insert(comptime!(2 * pair + 1), u32::reinterpret(odd));
                            } else {
                                words.insert(
                                    comptime!(2 * four + pair),
                                    pack_pair(even, odd, comptime!(kind.out)),
                                );
                            }
                            if comptime!(kind.amax.is_some()) {
                                largest =
                                    max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                            }
                        }
                    }
                    out[(row as usize * n as usize + column as usize)
                        / comptime!(16 / kind.out.size())] = words;
                }
            }
        }
    }
    epilogue.atomic_amax(at.group, largest);
}

/// Stores the sums of one chunk of rows of `a`, from `own` on.
#[cube]
fn stage_sums<N: Size>(
    sums: Vector<f32, N>,
    own: u32,
    #[comptime] chunk: usize,
    #[comptime] tile: W4a16Tile,
) {
    let lane = UNIT_POS % 32u32;
    let warp = (UNIT_POS % 128u32) / 32u32;
    #[unroll]
    for j in 0..comptime!(tile.chunk() / 8) {
        let first = comptime!((chunk * tile.chunk() / 8 + j) * 4);
        let at = own
            + ((lane % 4u32) * 2u32 + comptime!(j as u32 * 8)) * comptime!(STAGING_ROW as u32 * 4)
            + (warp * 16u32 + lane / 4u32) * 4u32;
        let below = at + comptime!(STAGING_ROW as u32 * 4);
        st_shared(at, u32::reinterpret(sums.extract(first)));
        st_shared(below, u32::reinterpret(sums.extract(comptime!(first + 1))));
        st_shared(
            at + 32u32,
            u32::reinterpret(sums.extract(comptime!(first + 2))),
        );
        st_shared(
            below + 32u32,
            u32::reinterpret(sums.extract(comptime!(first + 3))),
        );
    }
}

/// Returns four staged sums, added over the warpgroups that share the rows of `b`.
#[cube]
fn load_sums(from: u32, #[comptime] tile: W4a16Tile) -> Vector<f32, Const<4>> {
    let mut values = Vector::<f32, Const<4>>::reinterpret(ld_shared_v4(from));
    #[unroll]
    for way in 1..comptime!(tile.ways) {
        values += Vector::<f32, Const<4>>::reinterpret(ld_shared_v4(
            from + comptime!(way as u32 * tile.staging() as u32 * 4),
        ));
    }
    values
}
