//! What the kernels of this folder share: their arguments, which tile a CTA has, and which scores
//! are visible.

use cubecl::prelude::*;

use super::tile::Tile;
use crate::{cube::ptx, tensor::FloatKind};

/// `log2(e)`.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// What is computed, and of what size.
#[derive(CubeType, CubeLaunch)]
pub struct Problem {
    /// Where sequences begin among the tokens of `q`, and the last one ends. Read only where the
    /// plan has `offsets`.
    pub q_offsets: Box<[u32]>,
    /// The same among the tokens of `k` and `v`.
    pub k_offsets: Box<[u32]>,
    /// Number of sequences.
    pub sequences: u32,
    /// Tokens of `q`.
    pub q_tokens: u32,
    /// Tokens of `k` and `v`.
    pub k_tokens: u32,
    /// Heads of `q` that read one head of `k` and `v`.
    pub group: u32,
    /// What scores are multiplied by.
    pub scale: f32,
    /// The bound of scores, if there is one.
    pub softcap: f32,
    /// Keys that a query sees at most, if there is a window.
    pub window: u32,
}

/// The comptime choices of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MmaPlan {
    /// Elements of a head.
    pub head: usize,
    /// Type of the operands.
    pub kind: FloatKind,
    /// Strips of 16 rows of a warp.
    pub strips: usize,
    /// A warp has eight rows: the upper half of its one strip is empty.
    pub half_strip: bool,
    /// Warps of a CTA, which share its rows.
    pub warps: usize,
    /// Rows of the other side that are multiplied at a time.
    pub inner: usize,
    /// A query sees no later key.
    pub causal: bool,
    /// It sees no key outside its window.
    pub window: bool,
    /// Scores are bounded.
    pub softcap: bool,
    /// One is added to the denominator.
    pub quiet_softmax: bool,
    /// Sequences begin at offsets in device memory.
    pub offsets: bool,
}

impl MmaPlan {
    /// Rows of a CTA.
    pub const fn rows(self) -> usize {
        16 * self.strips * self.warps
    }

    /// Rows that a lane has a part of: `g` of a strip, and `g + 8` where strips are whole.
    pub const fn lane_rows(self) -> usize {
        if self.half_strip { 1 } else { 2 * self.strips }
    }

    /// Threads of a CTA.
    pub const fn units(self) -> usize {
        32 * self.warps
    }

    /// How heads lie in shared memory.
    pub const fn tile(self) -> Tile {
        Tile { head: self.head }
    }

    /// Bytes of a tile of `rows` rows.
    pub const fn tile_bytes(self, rows: usize) -> usize {
        rows * self.tile().pitch()
    }
}

/// The tokens of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Extent {
    /// Its first token of `q`.
    pub q: u32,
    /// How many it has of these.
    pub q_len: u32,
    /// Its first token of `k` and `v`.
    pub k: u32,
    /// How many it has of these.
    pub k_len: u32,
}

/// Which side a kernel's CTAs divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The queries.
    Queries,
    /// The keys and values.
    Keys,
}

/// Sequence number `index`. The one behind the last are the tokens that belong to none: they have
/// nothing on the other side.
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
        // Offsets beyond the tokens are a caller's mistake that must not become an access.
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

/// The tile of a CTA.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// Its sequence.
    pub extent: Extent,
    /// Its first row within the sequence.
    pub row: u32,
    /// Whether there is one: a grid does not depend on what is in device memory.
    pub exists: bool,
    /// Whether its tokens belong to no sequence.
    pub nobody: bool,
}

/// Tile number `tile` of `rows` rows. Of a sequence the last comes first where `backwards`: with a
/// causal mask the last queries see the most keys.
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

/// Tiles of sequence number `index`.
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

/// Its tokens of one side.
#[cube]
pub fn own_len(extent: Extent, #[comptime] side: Side) -> u32 {
    if comptime!(side == Side::Queries) {
        extent.q_len
    } else {
        extent.k_len
    }
}

/// Which keys query `i` of a sequence sees: those from `first(i)` to below `end(i)`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Visible {
    /// Keys of the sequence.
    k_len: i32,
    /// How much later the last key is than the last query.
    shift: i32,
    /// Keys that a query sees at most.
    window: i32,
    #[cube(comptime)]
    causal: bool,
    #[cube(comptime)]
    windowed: bool,
}

#[cube]
impl Visible {
    /// Of the sequence `extent`.
    pub fn of(problem: &Problem, extent: Extent, #[comptime] plan: MmaPlan) -> Visible {
        Visible {
            k_len: i32::cast_from(extent.k_len),
            shift: i32::cast_from(extent.k_len) - i32::cast_from(extent.q_len),
            window: i32::cast_from(problem.window),
            causal: comptime!(plan.causal),
            windowed: comptime!(plan.window),
        }
    }

    /// The first key that query `i` sees.
    pub fn first(&self, i: i32) -> i32 {
        if comptime!(self.windowed) {
            max(i + self.shift + 1i32 - self.window, 0i32)
        } else {
            0i32.runtime()
        }
    }

    /// The key behind the last that query `i` sees, at least 0.
    pub fn end(&self, i: i32) -> i32 {
        if comptime!(self.causal) {
            max(min(i + self.shift + 1i32, self.k_len), 0i32)
        } else {
            self.k_len
        }
    }

    /// The first query that sees key `j`, or a later key.
    pub fn first_query(&self, j: i32) -> i32 {
        if comptime!(self.causal) {
            max(j - self.shift, 0i32)
        } else {
            0i32.runtime()
        }
    }

    /// The query behind the last of `q_len` that sees key `j`, or an earlier key.
    pub fn end_query(&self, j: i32, q_len: i32) -> i32 {
        if comptime!(self.windowed) {
            max(min(j - self.shift + self.window, q_len), 0i32)
        } else {
            q_len
        }
    }
}

/// `softcap · tanh(scale · s / softcap)`.
#[cube]
pub fn cap(problem: &Problem, s: f32) -> f32 {
    let x = s * problem.scale / problem.softcap;
    // tanh(x) = 1 - 2 / (1 + e^(2 x)), which is exact at both ends.
    let power = ptx::ex2_approx_ftz(x * comptime!(2.0 * LOG2_E));
    problem.softcap * (1.0f32 - 2.0f32 * ptx::rcp_approx_ftz(1.0f32 + power))
}

/// The factor that turns a score, capped or not, into an exponent of two.
#[cube]
pub fn exponent_scale(problem: &Problem, #[comptime] plan: MmaPlan) -> f32 {
    if comptime!(plan.softcap) {
        comptime!(LOG2_E).runtime()
    } else {
        problem.scale * comptime!(LOG2_E)
    }
}
