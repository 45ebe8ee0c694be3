//! Epilogue of the W4A16 kernel for an MN-major `b`: writes a tile from registers to rows of the
//! output.

use cubecl::prelude::*;

use super::super::w4a16::TilePlace;
use crate::{
    gemm::epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
    tensor::FloatKind,
};

/// Columns of the output that a lane has in each of its rows.
const LANE_COLUMNS: usize = 4;

/// Applies the epilogue to the sums of a lane and writes them. In every eight of the `width` rows
/// of `a` from `at` on, the lane has two neighbours, the first at `2 quad`. It has four columns of
/// each row, starting at those of `at`, two per instruction. A warp writes 32 columns of four rows
/// at a time.
#[cube]
pub(super) fn write_lane<N: Size>(
    sums: Vector<f32, N>,
    at: TilePlace,
    quad: u32,
    n: u32,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<2>>],
    #[comptime] width: usize,
) {
    let kind = comptime!(epilogue.kind);
    let b_factor = epilogue.b_tile_factor(at.group);
    let mut largest = 0u32;
    #[unroll]
    for part in 0..comptime!(width / 4) {
        let (eight, odd_row) = comptime!((part / 2, part % 2));
        let row = at.row + comptime!((eight * 8 + odd_row) as u32) + 2u32 * quad;
        if row < at.end && at.column < n {
            let alpha = epilogue.a_factor(row, at.group) * b_factor;
            let index = row as usize * n as usize + at.column as usize;
            let own = at.group as usize * n as usize + at.column as usize;
            let mut words = Vector::<u32, Const<2>>::new(0u32);
            #[unroll]
            for half in 0..comptime!(LANE_COLUMNS / 2) {
                // The upper and lower row of the fragment are two columns of the output.
                let first = comptime!(half * width / 2 + eight * 4 + odd_row);
                let pair = index + comptime!(2 * half);
                let even = Addends {
                    alpha,
                    bias: epilogue.load_bias(own + comptime!(2 * half)),
                    c: epilogue.load_c(pair, 0u32),
                };
                let even = apply(sums.extract(first) * epilogue.sum_scale, even, kind);
                let odd = Addends {
                    alpha,
                    bias: epilogue.load_bias(own + comptime!(2 * half + 1)),
                    c: epilogue.load_c(pair, 1u32),
                };
                let sum = sums.extract(comptime!(first + 2)) * epilogue.sum_scale;
                let odd = apply(sum, odd, kind);
                if comptime!(kind.out == FloatKind::F32) {
                    words.insert(0usize, u32::reinterpret(even));
                    words.insert(1usize, u32::reinterpret(odd));
                    out[pair / 2usize] = words;
                } else {
                    words.insert(half, pack_pair(even, odd, comptime!(kind.out)));
                }
                if comptime!(kind.amax.is_some()) {
                    largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                }
            }
            if comptime!(kind.out != FloatKind::F32) {
                out[index / LANE_COLUMNS] = words;
            }
        }
    }
    epilogue.atomic_amax(at.group, largest);
}
