//! Shared code of the kernels of this folder: arguments, the tile of a CTA, and masks.

use cubecl::prelude::*;

use super::tile::Tile;
use crate::{cube::ptx, tensor::FloatKind};

/// `log2(e)`.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Operation and sizes.
#[derive(CubeType, CubeLaunch)]
pub struct Problem {
    /// Start of each sequence among the tokens of `q`, and the end of the last one. Read only if
    /// the plan has `offsets`.
    pub q_offsets: Box<[u32]>,
    /// Start of each sequence among the tokens of `k` and `v`, and the end of the last one.
    pub k_offsets: Box<[u32]>,
    /// Number of sequences.
    pub sequences: u32,
    /// Number of tokens of `q`.
    pub q_tokens: u32,
    /// Number of tokens of `k` and `v`.
    pub k_tokens: u32,
    /// Heads of `q` that read one head of `k` and `v`.
    pub group: u32,
    /// Factor of the scores.
    pub scale: f32,
    /// Soft cap of scores, if any.
    pub softcap: f32,
    /// Largest number of keys that a query sees, if there is a window.
    pub window: u32,
}

/// Comptime choices of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MmaPlan {
    /// Elements per head.
    pub head: usize,
    /// Type of the operands.
    pub kind: FloatKind,
    /// Strips of 16 rows per warp.
    pub strips: usize,
    /// True if a warp has eight rows: the upper half of its one strip is empty.
    pub half_strip: bool,
    /// Warps per CTA, which share its rows.
    pub warps: usize,
    /// Rows of the other operand that are multiplied at a time.
    pub inner: usize,
    /// True if a query sees no later key.
    pub causal: bool,
    /// True if a query sees no key outside its window.
    pub window: bool,
    /// True if scores have a soft cap.
    pub softcap: bool,
    /// True if one is added to the denominator.
    pub quiet_softmax: bool,
    /// True if sequences start at offsets in device memory.
    pub offsets: bool,
}

impl MmaPlan {
    /// Returns the rows per CTA.
    pub const fn rows(self) -> usize {
        16 * self.strips * self.warps
    }

    /// Returns the rows of which a lane holds elements: `g` of a strip, and `g + 8` if strips are
    /// whole.
    pub const fn lane_rows(self) -> usize {
        if self.half_strip { 1 } else { 2 * self.strips }
    }

    /// Returns the threads per CTA.
    pub const fn units(self) -> usize {
        32 * self.warps
    }

    /// Returns the layout of heads in shared memory.
    pub const fn tile(self) -> Tile {
        Tile { head: self.head }
    }

    /// Returns the size in bytes of a tile of `rows` rows.
    pub const fn tile_bytes(self, rows: usize) -> usize {
        rows * self.tile().pitch()
    }
}

/// Tokens of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Extent {
    /// First token of `q`.
    pub q: u32,
    /// Number of tokens of `q`.
    pub q_len: u32,
    /// First token of `k` and `v`.
    pub k: u32,
    /// Number of tokens of `k` and `v`.
    pub k_len: u32,
}

/// Operand over whose tokens a kernel's CTAs are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The queries.
    Queries,
    /// The keys and values.
    Keys,
}

/// Returns sequence `index`. The index after the last sequence denotes the tokens that belong to no
/// sequence: they have no tokens on the other side.
#[cube]
pub fn extent(
    problem: &Problem,
    index: u32,
    #[comptime] side: Side,
    #[comptime] offsets: bool,
) -> Extent {
    if comptime!(offsets) {
        let last = index == problem.sequences;
        let at = index as usize;
        // Offsets beyond the number of tokens are a caller's error that must not cause an access
        // out of bounds.
        let q = min(problem.q_offsets[at], problem.q_tokens);
        let k = min(problem.k_offsets[at], problem.k_tokens);
        let next = select(last, at, at + 1);
        let mut q_end = min(problem.q_offsets[next], problem.q_tokens);
        let mut k_end = min(problem.k_offsets[next], problem.k_tokens);
        if last {
            if comptime!(side == Side::Queries) {
                q_end = problem.q_tokens;
            } else {
                k_end = problem.k_tokens;
            }
        }
        Extent {
            q,
            q_len: max(q_end, q) - q,
            k,
            k_len: max(k_end, k) - k,
        }
    } else {
        let q_len = problem.q_tokens / problem.sequences;
        let k_len = problem.k_tokens / problem.sequences;
        Extent {
            q: index * q_len,
            q_len,
            k: index * k_len,
            k_len,
        }
    }
}

/// Tile of a CTA.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// Sequence of the tile.
    pub extent: Extent,
    /// First row within the sequence.
    pub row: u32,
    /// True if the tile exists: the grid does not depend on device memory.
    pub exists: bool,
    /// True if the tokens belong to no sequence.
    pub nobody: bool,
}

/// Returns tile `tile` of `rows` rows. With `backwards`, a sequence's last tile comes first: with a
/// causal mask, the last queries see the most keys.
#[cube]
pub fn place(
    problem: &Problem,
    tile: u32,
    #[comptime] rows: usize,
    #[comptime] side: Side,
    #[comptime] offsets: bool,
    #[comptime] backwards: bool,
) -> Place {
    let height = comptime!(rows as u32);
    let mut index = 0u32;
    let mut within = tile;
    let mut count = tiles_of(problem, 0u32.runtime(), height, side, offsets);
    if comptime!(offsets) {
        while within >= count && index < problem.sequences {
            within -= count;
            index += 1u32;
            count = tiles_of(problem, u32::reinterpret(index), height, side, offsets);
        }
    } else {
        index = tile / max(count, 1u32);
        within = tile - index * count;
    }
    let exists = if comptime!(offsets) {
        within < count
    } else {
        index < problem.sequences && count > 0u32
    };
    if comptime!(backwards) {
        within = select(exists, count - 1u32 - within, within);
    }
    Place {
        extent: extent(problem, index, side, offsets),
        row: within * height,
        exists,
        nobody: index == problem.sequences,
    }
}

/// Returns the number of tiles of sequence `index`.
#[cube]
fn tiles_of(
    problem: &Problem,
    index: u32,
    height: u32,
    #[comptime] side: Side,
    #[comptime] offsets: bool,
) -> u32 {
    own_len(extent(problem, index, side, offsets), side).div_ceil(height)
}

/// Returns the number of tokens on one side.
#[cube]
pub fn own_len(extent: Extent, #[comptime] side: Side) -> u32 {
    if comptime!(side == Side::Queries) {
        extent.q_len
    } else {
        extent.k_len
    }
}

/// Keys that query `i` of a sequence sees: from `first(i)` up to `end(i)` (exclusive).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Visible {
    /// Number of keys of the sequence.
    k_len: i32,
    /// Position of the last key minus that of the last query.
    shift: i32,
    /// Largest number of keys that a query sees.
    window: i32,
    #[cube(comptime)]
    causal: bool,
    #[cube(comptime)]
    windowed: bool,
}

#[cube]
impl Visible {
    /// Returns the visible keys of the sequence `extent`.
    pub fn of(problem: &Problem, extent: Extent, #[comptime] plan: MmaPlan) -> Visible {
        Visible {
            k_len: i32::cast_from(extent.k_len),
            shift: i32::cast_from(extent.k_len) - i32::cast_from(extent.q_len),
            window: i32::cast_from(problem.window),
            causal: comptime!(plan.causal),
            windowed: comptime!(plan.window),
        }
    }

    /// Returns the first key that query `i` sees.
    pub fn first(&self, i: i32) -> i32 {
        if comptime!(self.windowed) {
            max(i + self.shift + 1i32 - self.window, 0i32)
        } else {
            0i32.runtime()
        }
    }

    /// Returns the end of the keys that query `i` sees, at least 0.
    pub fn end(&self, i: i32) -> i32 {
        if comptime!(self.causal) {
            max(min(i + self.shift + 1i32, self.k_len), 0i32)
        } else {
            self.k_len
        }
    }

    /// Returns the first query that sees key `j`, or a later key.
    pub fn first_query(&self, j: i32) -> i32 {
        if comptime!(self.causal) {
            max(j - self.shift, 0i32)
        } else {
            0i32.runtime()
        }
    }

    /// Returns the end of the queries, of `q_len`, that see key `j`, or an earlier key.
    pub fn end_query(&self, j: i32, q_len: i32) -> i32 {
        if comptime!(self.windowed) {
            max(min(j - self.shift + self.window, q_len), 0i32)
        } else {
            q_len
        }
    }
}

/// Returns `softcap · tanh(scale · s / softcap)`.
#[cube]
pub fn cap(problem: &Problem, s: f32) -> f32 {
    let x = s * problem.scale / problem.softcap;
    // tanh(x) = 1 - 2 / (1 + e^(2 x)), which is exact at both ends.
    let power = ptx::ex2_approx_ftz(x * comptime!(2.0 * LOG2_E));
    problem.softcap * (1.0f32 - 2.0f32 * ptx::rcp_approx_ftz(1.0f32 + power))
}

/// Returns the factor that turns a score, capped or not, into an exponent of two.
#[cube]
pub fn exponent_scale(problem: &Problem, #[comptime] plan: MmaPlan) -> f32 {
    if comptime!(plan.softcap) {
        comptime!(LOG2_E).runtime()
    } else {
        problem.scale * comptime!(LOG2_E)
    }
}
