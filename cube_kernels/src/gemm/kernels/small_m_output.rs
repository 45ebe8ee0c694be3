//! The output of GEMMs of few rows, from sums that the warps of a cube exchange.

use cubecl::prelude::*;

use crate::{
    gemm::{
        arguments::ProblemShape,
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
    },
    tensor::FloatKind,
};

/// The sums that the warps of a cube exchange in shared memory: of each warp, line after line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct WarpSums {
    /// Warps that have sums of the same elements.
    pub warps: usize,
    /// Rows of `a`.
    pub lines: usize,
    /// Rows of `b`, which are columns of the output.
    pub rows: usize,
}

impl WarpSums {
    /// Floats from one line to the next: four more than there are, so that the lanes of a warp
    /// write to different banks.
    pub const fn stride(self) -> usize {
        self.rows + 4
    }

    /// Floats of one warp.
    pub const fn of_warp(self) -> usize {
        self.lines * self.stride()
    }

    /// All floats.
    pub const fn floats(self) -> usize {
        self.warps * self.of_warp()
    }
}

/// The rows of `b` that are written.
#[derive(CubeType, Clone, Copy)]
pub(super) struct OutputRows {
    /// The first of them.
    pub first: u32,
    /// The row behind the last.
    pub end: u32,
    /// Their factor, where all have one.
    pub tile_factor: f32,
}

/// Adds the sums of all warps, multiplies them by `sum_scale`, applies the epilogue and writes two
/// neighbours at a time, by the first `32 * sums.warps` units. Returns the largest magnitude that
/// the unit has written, where it is asked for.
#[cube]
pub(super) fn write_rows(
    exchange: &[f32],
    problem: &ProblemShape,
    rows: &OutputRows,
    epilogue: &Epilogue,
    out: &mut [u32],
    #[comptime] sum_scale: f32,
    #[comptime] sums: WarpSums,
) -> u32 {
    let kind = comptime!(epilogue.kind);
    let stride = comptime!(sums.stride() as u32);
    let n = problem.n;
    let pairs = comptime!(sums.rows as u32 / 2);
    let mut largest = 0u32;
    let mut item = UNIT_POS;
    while item < problem.m * pairs {
        let line = item / pairs;
        let local = (item % pairs) * 2u32;
        let column = rows.first + local;
        if column < rows.end {
            let mut even = 0.0f32;
            let mut odd = 0.0f32;
            #[unroll]
            for w in 0..comptime!(sums.warps) {
                let base = comptime!((w * sums.of_warp()) as u32) + line * stride + local;
                even += exchange[base as usize];
                odd += exchange[(base + 1u32) as usize];
            }
            let line_factor = epilogue.a_factor(line, 0u32);
            let pair = line as usize * n as usize + column as usize;
            let even_with = Addends {
                alpha: line_factor * epilogue.b_row_factor(column, rows.tile_factor),
                bias: epilogue.load_bias(column as usize),
                c: epilogue.load_c(pair, 0u32),
            };
            let odd_with = Addends {
                alpha: line_factor * epilogue.b_row_factor(column + 1u32, rows.tile_factor),
                bias: epilogue.load_bias((column + 1u32) as usize),
                c: epilogue.load_c(pair, 1u32),
            };
            let even = apply(even * sum_scale, even_with, kind);
            let odd = apply(odd * sum_scale, odd_with, kind);
            if comptime!(kind.out == FloatKind::F32) {
                out[pair] = u32::reinterpret(even);
                out[pair + 1usize] = u32::reinterpret(odd);
            } else {
                out[pair / 2usize] = pack_pair(even, odd, comptime!(kind.out));
            }
            if comptime!(kind.amax.is_some()) {
                largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
            }
        }
        item += comptime!(32 * sums.warps as u32);
    }
    largest
}
