//! The two kinds of GEMM of a warp in attention: with both operands in shared memory, or with the
//! left one in registers, as the result of an earlier GEMM.
//!
//! Accumulators of 16 rows and 8 columns are a vector of four per lane: lane `4 g + c` holds
//! columns `2 c` and `2 c + 1` of row `g`, then of row `g + 8`. The accumulators of 16 rows and 16
//! columns, rounded to two bytes, are directly the left operand of the next instruction.

use cubecl::prelude::*;

use super::tile::{Tile, along_head};
use crate::{
    cube::ptx::{
        cvt_rn_bf16x2, cvt_rn_f16x2, ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16_bf16,
        mma_m16n8k16_f16,
    },
    tensor::FloatKind,
};

/// Computes `c + a · b`, in the type of the operands.
#[cube]
fn mma(
    c: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b0: u32,
    b1: u32,
    #[comptime] kind: FloatKind,
) -> Vector<f32, Const<4>> {
    let a0 = a.extract(0usize);
    let a1 = a.extract(1usize);
    let a2 = a.extract(2usize);
    let a3 = a.extract(3usize);
    if comptime!(kind == FloatKind::F16) {
        mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1)
    } else {
        mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1)
    }
}

/// Packs two values rounded to the type of the operands, `low` in the lower half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] kind: FloatKind) -> u32 {
    if comptime!(kind == FloatKind::F16) {
        cvt_rn_f16x2(low, high)
    } else {
        cvt_rn_bf16x2(low, high)
    }
}

/// Returns `count` accumulators of zero.
#[cube]
pub fn zeros(#[comptime] count: usize) -> Array<Vector<f32, Const<4>>> {
    let mut sums = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Multiplies `16 · strips` rows of `a` with `columns` rows of `b`, along the head.
///
/// `a` is this lane's address from `fragment_rows`, `b` the one from `fragment_columns`. The result
/// has the accumulators of one strip after those of another.
#[cube]
pub fn multiply_rows(
    a: u32,
    b: u32,
    #[comptime] strips: usize,
    #[comptime] columns: usize,
    #[comptime] tile: Tile,
    #[comptime] kind: FloatKind,
) -> Array<Vector<f32, Const<4>>> {
    let mut sums = zeros(comptime!(strips * columns / 8));
    #[unroll]
    for step in 0..comptime!(tile.head / 16) {
        let mut left = Array::<Vector<u32, Const<4>>>::new(strips);
        let left_at = along_head(a, step, tile);
        #[unroll]
        for strip in 0..strips {
            left[strip] = ldmatrix_x4(left_at + comptime!((strip * 16 * tile.pitch()) as u32));
        }
        let right_at = along_head(b, step, tile);
        #[unroll]
        for pair in 0..comptime!(columns / 16) {
            let right = ldmatrix_x4(right_at + comptime!((pair * 16 * tile.pitch()) as u32));
            #[unroll]
            for strip in 0..strips {
                let at = comptime!(strip * columns / 8 + 2 * pair);
                let next = comptime!(at + 1);
                let (b0, b1) = (right.extract(0usize), right.extract(1usize));
                sums[at] = mma(sums[at], left[strip], b0, b1, kind);
                let (b0, b1) = (right.extract(2usize), right.extract(3usize));
                sums[next] = mma(sums[next], left[strip], b0, b1, kind);
            }
        }
    }
    sums
}

/// Packs the accumulators of `multiply_rows` into left operands of the next GEMM.
#[cube]
pub fn pack_left(
    sums: &Array<Vector<f32, Const<4>>>,
    #[comptime] strips: usize,
    #[comptime] columns: usize,
    #[comptime] kind: FloatKind,
) -> Array<Vector<u32, Const<4>>> {
    let mut left = Array::<Vector<u32, Const<4>>>::new(comptime!(strips * columns / 16));
    #[unroll]
    for i in 0..comptime!(strips * columns / 16) {
        // Strips are consecutive, and so are the pairs of accumulators.
        let first = sums[comptime!(2 * i)];
        let second = sums[comptime!(2 * i + 1)];
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        words.insert(
            0usize,
            pack(first.extract(0usize), first.extract(1usize), kind),
        );
        words.insert(
            1usize,
            pack(first.extract(2usize), first.extract(3usize), kind),
        );
        words.insert(
            2usize,
            pack(second.extract(0usize), second.extract(1usize), kind),
        );
        words.insert(
            3usize,
            pack(second.extract(2usize), second.extract(3usize), kind),
        );
        left[i] = words;
    }
    left
}

/// Adds the product of `left` (`16 · strips` rows, `depth` columns) with `depth` rows of a tile,
/// which are the K dimension. `b` is this lane's address from `fragment_rows`.
#[cube]
pub fn multiply_add(
    sums: &mut Array<Vector<f32, Const<4>>>,
    left: &Array<Vector<u32, Const<4>>>,
    b: u32,
    #[comptime] strips: usize,
    #[comptime] depth: usize,
    #[comptime] tile: Tile,
    #[comptime] kind: FloatKind,
) {
    #[unroll]
    for step in 0..comptime!(depth / 16) {
        let right_at = b + comptime!((step * 16 * tile.pitch()) as u32);
        #[unroll]
        for pair in 0..comptime!(tile.head / 16) {
            let right = ldmatrix_x4_trans(along_head(right_at, pair, tile));
            #[unroll]
            for strip in 0..strips {
                let at = comptime!(strip * tile.head / 8 + 2 * pair);
                let next = comptime!(at + 1);
                let words = left[comptime!(strip * depth / 16 + step)];
                let (b0, b1) = (right.extract(0usize), right.extract(1usize));
                sums[at] = mma(sums[at], words, b0, b1, kind);
                let (b0, b1) = (right.extract(2usize), right.extract(3usize));
                sums[next] = mma(sums[next], words, b0, b1, kind);
            }
        }
    }
}
