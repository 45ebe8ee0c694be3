//! Shared code of both backward kernels: arguments, weights and their gradients from scores, and
//! the inverse rotation and writing of gradients.

use cubecl::prelude::*;

use super::{
    multiply::pack,
    problem::{LOG2_E, MmaPlan, Problem},
    tile::{HeadsView, load_chunk, store_pair},
};
use crate::cube::ptx::ex2_approx_ftz;

/// Inputs of the backward besides the operands.
#[derive(CubeType, CubeLaunch)]
pub struct Saved {
    /// Gradient of the output.
    pub dout: HeadsView,
    /// Log-sum-exp of each row, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// Sum of `dout · out` of each row, `[heads, tokens]`.
    pub delta: Box<[f32]>,
    /// Cosines of the rotation of each position, `[positions, head / 2]`. Read only if gradients
    /// are rotated back.
    pub cos: Box<[f32]>,
    /// Sines, `[positions, head / 2]`.
    pub sin: Box<[f32]>,
}

/// Destination of a gradient: the head of token `t` starts `offset + t * stride` vectors of 16
/// bytes after the start of the memory.
#[derive(CubeType, CubeLaunch)]
pub struct GradientView {
    /// Memory of the gradient.
    pub data: Box<[Vector<u32, Const<4>>]>,
    /// Vectors before the first token's first head.
    pub offset: u32,
    /// Vectors from one token to the next.
    pub stride: u32,
}

/// Comptime choices of a backward kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackwardPlan {
    /// Choices shared with the forward.
    pub plan: MmaPlan,
    /// True if gradients of `q` and `k` are rotated back.
    pub rope: bool,
    /// Gradients that a CTA of keys computes.
    pub part: Part,
}

/// Gradients that a CTA of keys computes. For wide heads, the accumulators of both do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Gradients of keys and of values.
    Both,
    /// Gradients of keys.
    Keys,
    /// Gradients of values.
    Values,
}

impl Part {
    /// True if the gradient of the keys is computed.
    pub const fn has_keys(self) -> bool {
        !matches!(self, Self::Values)
    }

    /// True if the gradient of the values is computed.
    pub const fn has_values(self) -> bool {
        !matches!(self, Self::Keys)
    }
}

/// Returns `2^(scale · s - lse)`; `lse` is in powers of two, and `+inf` for rows without weights.
#[cube]
pub fn weight(s: f32, scale: f32, lse: f32) -> f32 {
    ex2_approx_ftz(crate::cube::ptx::fma_rn(s, scale, -lse))
}

/// Converts the log-sum-exp of a row to the form that [`weight()`] takes.
#[cube]
pub fn exponent_offset(lse: f32) -> f32 {
    select(
        lse == f32::NEG_INFINITY,
        f32::INFINITY,
        lse * comptime!(LOG2_E),
    )
}

/// Returns the factor of the gradient of a capped score: the derivative of the soft cap, as a
/// function of the capped score.
#[cube]
pub fn cap_derivative(problem: &Problem, capped: f32) -> f32 {
    let t = capped / problem.softcap;
    1.0f32 - t * t
}

/// Returns the position of row `row` of a sequence whose last row is `last`, clamped to the table
/// `cos`. Rows past the end of the sequence have no position; their results are not written.
#[cube]
pub fn position(row: u32, last: u32, cos: &[f32], #[comptime] plan: MmaPlan) -> u32 {
    let position = min(row, last);
    if comptime!(plan.offsets) {
        // Lengths in device memory may exceed the table. Tokens further on are rotated like its
        // last position.
        let positions = cos.len() / comptime!(plan.head / 2);
        min(position, positions as u32 - 1u32)
    } else {
        position
    }
}

/// Destination of a warp's rows of a gradient.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct WarpRows {
    /// Tile in shared memory, of which this warp reads only its own rows.
    pub tile_at: u32,
    /// First row of the warp in the tile.
    pub own: u32,
    /// First row of the tile in its sequence.
    pub row: u32,
    /// Number of rows of the sequence.
    pub len: u32,
    /// First token of the sequence.
    pub token: u32,
    /// Head.
    pub head: u32,
}

/// Scales `sums` by `scale`, rotates the rows back if `rotate` is set, rounds them and writes them
/// to `view`, through the warp's rows of a tile.
#[cube]
pub fn write_gradient(
    view: &mut GradientView,
    sums: &Array<Vector<f32, Const<4>>>,
    saved: &Saved,
    rows: WarpRows,
    scale: f32,
    #[comptime] rotate: bool,
    #[comptime] plan: MmaPlan,
) {
    let tile = comptime!(plan.tile());
    let lane = UNIT_POS % 32u32;
    let half_columns = comptime!(plan.head / 16);
    #[unroll]
    for i in 0..comptime!(2 * plan.strips) {
        let half = comptime!(2 * (i % 2));
        let row = rows.own + comptime!((16 * (i / 2) + 8 * (i % 2)) as u32) + lane / 4u32;
        let first = comptime!((i / 2) * plan.head / 8);
        if comptime!(rotate) {
            let last = max(rows.len, 1u32) - 1u32;
            let position = position(rows.row + row, last, &saved.cos, plan);
            let table =
                position as usize * comptime!(plan.head / 2) + (lane % 4u32 * 2u32) as usize;
            #[unroll]
            for j in 0..half_columns {
                let near = sums[comptime!(first + j)];
                let far = sums[comptime!(first + half_columns + j)];
                let at = table + comptime!(8 * j);
                let (cos0, cos1) = (saved.cos[at], saved.cos[at + 1]);
                let (sin0, sin1) = (saved.sin[at], saved.sin[at + 1]);
                let (x0, x1) = (
                    near.extract(half) * scale,
                    near.extract(comptime!(half + 1)) * scale,
                );
                let (y0, y1) = (
                    far.extract(half) * scale,
                    far.extract(comptime!(half + 1)) * scale,
                );
                let word = pack(x0 * cos0 + y0 * sin0, x1 * cos1 + y1 * sin1, plan.kind);
                store_pair(rows.tile_at, row, j, lane % 4u32, word, tile);
                let word = pack(y0 * cos0 - x0 * sin0, y1 * cos1 - x1 * sin1, plan.kind);
                let there = comptime!(half_columns + j);
                store_pair(rows.tile_at, row, there, lane % 4u32, word, tile);
            }
        } else {
            #[unroll]
            for j in 0..comptime!(plan.head / 8) {
                let four = sums[comptime!(first + j)];
                let low = four.extract(half) * scale;
                let high = four.extract(comptime!(half + 1)) * scale;
                let word = pack(low, high, plan.kind);
                store_pair(rows.tile_at, row, j, lane % 4u32, word, tile);
            }
        }
    }
    sync_plane();
    let chunks = comptime!(tile.chunks() as u32);
    #[unroll]
    for i in 0..comptime!(plan.strips * plan.head / 16) {
        let item = lane + comptime!(32 * i as u32);
        let row = rows.own + item / chunks;
        let chunk = item % chunks;
        if rows.row + row < rows.len {
            let token = (rows.token + rows.row + row) as usize;
            let index = view.offset as usize
                + token * view.stride as usize
                + rows.head as usize * comptime!(plan.tile().chunks())
                + chunk as usize;
            view.data[index] = load_chunk(rows.tile_at, row, chunk, tile);
        }
    }
    sync_plane();
}
