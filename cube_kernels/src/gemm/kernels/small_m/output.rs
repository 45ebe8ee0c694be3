//! Epilogue of the small-M kernels: adds the sums of a cube's warps, finishes and writes them.

use cubecl::prelude::*;

use super::shape::{SmallMLeft, SmallMShape};
use crate::{
    cube::{activation::swiglu, words::unpack},
    gemm::{
        arguments::ProblemShape,
        epilogue::{Addends, Epilogue, apply, pack_pair, rounded_magnitude},
    },
    tensor::FloatKind,
};

/// Output columns of a cube.
#[derive(CubeType, Clone, Copy)]
pub struct OutputColumns {
    /// First column.
    pub first: u32,
    /// Factor of their rows of `b`, if all share one.
    pub tile_factor: f32,
}

/// Two neighbours.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Pair {
    even: f32,
    odd: f32,
}

/// Returns the sums of all warps for two neighbouring rows of `b`, `row` and the next, and row
/// `line` of `a`, with the epilogue applied. `local` is their index within the cube.
#[cube]
fn finish(
    exchange: &[f32],
    line: u32,
    local: u32,
    row: u32,
    n: u32,
    tile_factor: f32,
    epilogue: &Epilogue,
    #[comptime] shape: SmallMShape,
) -> Pair {
    let stride = comptime!(shape.warp_sums().stride() as u32);
    let kind = comptime!(epilogue.kind);
    let mut even = 0.0f32;
    let mut odd = 0.0f32;
    #[unroll]
    for w in 0..comptime!(shape.warps) {
        let base = comptime!((w * shape.warp_sums().floats()) as u32) + line * stride + local;
        even += exchange[base as usize];
        odd += exchange[(base + 1u32) as usize];
    }
    let line_factor = epilogue.a_factor(line, 0u32);
    let pair = line as usize * n as usize + row as usize;
    // Decoded elements are 2^-8 times their value. As a comptime value, the factor takes no
    // register.
    let sum_scale = comptime!(if shape.left == SmallMLeft::Packed {
        65536.0f32
    } else {
        256.0f32
    });
    let even_with = Addends {
        alpha: line_factor * epilogue.b_row_factor(row, tile_factor),
        bias: epilogue.load_bias(row as usize),
        c: epilogue.load_c(pair, 0u32),
    };
    let odd_with = Addends {
        alpha: line_factor * epilogue.b_row_factor(row + 1u32, tile_factor),
        bias: epilogue.load_bias((row + 1u32) as usize),
        c: epilogue.load_c(pair, 1u32),
    };
    Pair {
        even: apply(even * sum_scale, even_with, kind),
        odd: apply(odd * sum_scale, odd_with, kind),
    }
}

/// Rounds both values to `kind`, as a GEMM without activation writes them.
#[cube]
fn rounded(pair: Pair, #[comptime] kind: FloatKind) -> Pair {
    if comptime!(kind == FloatKind::F32) {
        pair
    } else {
        let word = pack_pair(pair.even, pair.odd, kind);
        Pair {
            even: unpack(word, 0u32, kind),
            odd: unpack(word, 1u32, kind),
        }
    }
}

/// Writes two neighbours, the first of which is element `at`.
#[cube]
fn write_pair(pair: Pair, at: usize, out: &mut [u32], #[comptime] kind: FloatKind) {
    if comptime!(kind == FloatKind::F32) {
        out[at] = u32::reinterpret(pair.even);
        out[at + 1usize] = u32::reinterpret(pair.odd);
    } else {
        out[at / 2usize] = pack_pair(pair.even, pair.odd, kind);
    }
}

/// Adds the sums of all warps, applies the epilogue and writes two neighbours at a time.
#[cube]
pub fn write_columns(
    exchange: &[f32],
    problem: &ProblemShape,
    columns: &OutputColumns,
    epilogue: &Epilogue,
    out: &mut [u32],
    #[comptime] shape: SmallMShape,
) {
    let kind = comptime!(epilogue.kind);
    let n = problem.n;
    let width = n / comptime!(shape.inputs() as u32);
    let pairs = comptime!(shape.outputs() as u32 / 2);
    let mut largest = 0u32;
    let mut item = UNIT_POS;
    while item < problem.m * pairs {
        let line = item / pairs;
        let local = (item % pairs) * 2u32;
        let column = columns.first + local;
        if column < width {
            let factor = columns.tile_factor;
            let first = finish(exchange, line, local, column, n, factor, epilogue, shape);
            let at = line as usize * width as usize + column as usize;
            if comptime!(shape.swiglu.is_some()) {
                let conversion = comptime!(shape.swiglu.unwrap());
                let behind = local + comptime!(shape.outputs() as u32);
                let row = column + width;
                let up = finish(exchange, line, behind, row, n, factor, epilogue, shape);
                let (gate, up) = (rounded(first, kind.out), rounded(up, kind.out));
                let pair = Pair {
                    even: swiglu(gate.even, up.even, conversion),
                    odd: swiglu(gate.odd, up.odd, conversion),
                };
                write_pair(pair, at, out, kind.out);
            } else {
                write_pair(first, at, out, kind.out);
                if comptime!(kind.amax.is_some()) {
                    let bits = rounded_magnitude(first.even, first.odd, comptime!(kind.out));
                    largest = max(largest, bits);
                }
            }
        }
        item += CUBE_DIM;
    }
    epilogue.atomic_amax(0u32, largest);
}
