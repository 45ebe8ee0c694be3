//! Shared code of the kernels of this folder: arguments, masks, and the layout of rows in shared
//! memory.

use cubecl::prelude::*;

use super::math::{product, tanh};
use crate::{
    cube::{
        codec::{Conversion, load},
        exact::fma,
        ptx,
    },
    moe::groups::find_group,
    tensor::FloatKind,
};

/// Four elements of a head.
pub type Four = Vector<f32, Const<4>>;

/// Comptime choices of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarPlan {
    /// Elements per head, rounded up to whole fours for all lanes.
    pub padded: usize,
    /// Lanes that share a row: fours are distributed over them in turn.
    pub lanes: usize,
    /// Units per cube.
    pub units: usize,
    /// True if the lanes of a row are units of a plane; otherwise one unit has all of them.
    pub planes: bool,
    /// True if scores have a soft cap.
    pub softcap: bool,
    /// Type of the operands.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Largest number of floats of the two tiles in shared memory: 32 KiB.
const TILE_FLOATS: usize = 8192;
/// Largest number of rows of a tile.
const MAX_TILE: usize = 64;

impl ScalarPlan {
    /// Returns the fours per row.
    pub const fn fours(self) -> usize {
        self.padded / 4
    }

    /// Returns the lanes per unit.
    pub const fn own_lanes(self) -> usize {
        if self.planes { 1 } else { self.lanes }
    }

    /// Returns the fours of a row per unit.
    pub const fn own_fours(self) -> usize {
        self.fours() / self.lanes * self.own_lanes()
    }

    /// Returns the rows per cube.
    pub const fn rows(self) -> usize {
        self.units * self.own_lanes() / self.lanes
    }

    /// Returns the rows of the other side that are in shared memory at a time.
    pub const fn tile(self) -> usize {
        let fitting = TILE_FLOATS / 2 / self.padded;
        let most = if self.planes { MAX_TILE } else { 16 };
        (if fitting < most { fitting } else { most }) / AT_ONCE * AT_ONCE
    }
}

/// Dot products of a row that the forward computes at a time, for instruction-level parallelism.
/// The rows of a tile are a multiple of it.
pub const AT_ONCE: usize = 4;

/// Heads in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct HeadsView<F: Numeric> {
    /// Memory of the heads.
    pub data: Box<[F]>,
    /// Elements before the first head.
    pub offset: usize,
    /// Elements from one token to the next.
    pub stride: usize,
}

/// Operation and sizes.
#[derive(CubeType, CubeLaunch)]
pub struct Problem {
    /// Start of each sequence among the tokens of `q`, and the end of the last one. Read only with
    /// `offsets`.
    pub q_starts: Box<[u32]>,
    /// Start of each sequence among the tokens of `k` and `v`, and the end of the last one.
    pub k_starts: Box<[u32]>,
    /// Number of sequences.
    pub sequences: u32,
    /// 1 if sequences start at offsets, 0 if their lengths are equal.
    pub offsets: u32,
    /// Number of tokens of `q`.
    pub q_tokens: u32,
    /// Number of tokens of `k` and `v`.
    pub k_tokens: u32,
    /// Number of heads of `q`.
    pub heads: u32,
    /// Heads of `q` that read one head of `k` and `v`.
    pub group: u32,
    /// Elements per head.
    pub head: u32,
    /// 1 if a query sees no later key.
    pub causal: u32,
    /// Largest number of keys that a query sees, 0 for any number.
    pub window: u32,
    /// 1 if one is added to the denominator.
    pub quiet: u32,
    /// Factor of the scores `q · k`.
    pub scale: f32,
    /// Soft cap of scores, if any.
    pub softcap: f32,
    /// Reciprocal of the soft cap.
    pub inverse_cap: f32,
}

/// First token and number of tokens of a sequence, for `q` and for `k`.
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

/// Visible tokens of the other side.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Seen {
    /// First token.
    pub start: u32,
    /// End of the tokens (exclusive).
    pub end: u32,
}

/// Side to which tokens belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Tokens of `q`.
    Queries,
    /// Tokens of `k` and `v`.
    Keys,
}

/// Returns `a - b`, or 0 if that is negative.
#[cube]
fn less(a: u32, b: u32) -> u32 {
    select(a > b, a, b) - b
}

/// Returns the sequence of token `token` of a side. The extent of a token of no sequence is empty
/// on both sides and starts after the last sequence.
#[cube]
fn extent(problem: &Problem, token: u32, #[comptime] side: Side) -> Extent {
    let mut found = Extent {
        q: 0u32.runtime(),
        q_len: 0u32.runtime(),
        k: 0u32.runtime(),
        k_len: 0u32.runtime(),
    };
    if problem.offsets == 1u32 {
        let count = problem.sequences as usize;
        let index = if comptime!(side == Side::Queries) {
            find_group(&problem.q_starts, count, token as usize)
        } else {
            find_group(&problem.k_starts, count, token as usize)
        };
        // Offsets beyond the number of tokens are a caller's error that must not cause an access
        // out of bounds.
        let q = min(problem.q_starts[index], problem.q_tokens);
        let k = min(problem.k_starts[index], problem.k_tokens);
        let q_end = max(min(problem.q_starts[index + 1usize], problem.q_tokens), q);
        let k_end = max(min(problem.k_starts[index + 1usize], problem.k_tokens), k);
        let own = if comptime!(side == Side::Queries) {
            token >= q && token < q_end
        } else {
            token >= k && token < k_end
        };
        found.q = select(own, q, q_end);
        found.q_len = select(own, q_end - q, 0u32);
        found.k = select(own, k, k_end);
        found.k_len = select(own, k_end - k, 0u32);
    } else {
        found.q_len = problem.q_tokens / problem.sequences;
        found.k_len = problem.k_tokens / problem.sequences;
        let index = if comptime!(side == Side::Queries) {
            token / found.q_len
        } else {
            token / found.k_len
        };
        found.q = index * found.q_len;
        found.k = index * found.k_len;
    }
    found
}

/// Returns the keys that query `token` sees. Both ends are monotonic in `token`.
#[cube]
pub fn keys_of(problem: &Problem, token: u32) -> Seen {
    let own = extent(problem, token, Side::Queries);
    let mut seen = Seen {
        start: own.k,
        end: own.k + own.k_len,
    };
    if problem.causal == 1u32 && own.q_len > 0u32 {
        let reach = token - own.q + 1u32 + own.k_len;
        seen.end = own.k + min(less(reach, own.q_len), own.k_len);
        if problem.window > 0u32 {
            seen.start = min(own.k + less(reach, own.q_len + problem.window), seen.end);
        }
    }
    seen
}

/// Returns the queries that see key `token`. Both ends are monotonic in `token`.
#[cube]
pub fn queries_of(problem: &Problem, token: u32) -> Seen {
    let own = extent(problem, token, Side::Keys);
    let mut seen = Seen {
        start: own.q,
        end: own.q + own.q_len,
    };
    if problem.causal == 1u32 && own.k_len > 0u32 {
        let reach = token - own.k + own.q_len;
        let first = min(less(reach, own.k_len), own.q_len);
        seen.start = own.q + first;
        if problem.window > 0u32 {
            let last = min(less(reach + problem.window, own.k_len), own.q_len);
            seen.end = own.q + max(last, first);
        }
    }
    seen
}

/// Position of a unit.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// Row in the cube.
    pub row: u32,
    /// Lane in the row; the first lane if the unit has all of them.
    pub lane: u32,
}

/// Returns the position of this unit.
#[cube]
pub fn place(#[comptime] plan: ScalarPlan) -> Place {
    let unit = crate::gemm::arguments::thread_in_cta();
    let shared = comptime!((plan.lanes / plan.own_lanes()) as u32);
    Place {
        row: unit / shared,
        lane: unit % shared,
    }
}

/// Loads four elements of a head from element `first` on, with zeros past its end.
#[cube]
fn load_four<F: Numeric>(
    data: &[F],
    at: usize,
    first: u32,
    head: u32,
    #[comptime] kind: FloatKind,
) -> Four {
    let mut four = Four::new(0.0f32);
    #[unroll]
    for e in 0..4usize {
        let element = first + comptime!(e as u32);
        if element < head {
            four.insert(e, load::<F>(data[at + element as usize], kind));
        }
    }
    four
}

/// Loads this unit's fours of head `index` of token `token`; zeros if `none` is set.
#[cube]
pub fn load_row<F: Numeric>(
    view: &HeadsView<F>,
    token: u32,
    index: u32,
    head: u32,
    lane: u32,
    none: bool,
    #[comptime] plan: ScalarPlan,
) -> Array<Four> {
    let own = comptime!(plan.own_lanes());
    let count = comptime!(plan.own_fours());
    let mut row = Array::<Four>::new(count);
    let at = view.offset + token as usize * view.stride + index as usize * head as usize;
    #[unroll(plan.planes)]
    for i in 0..count {
        let step = i / own;
        let four = (step * comptime!(plan.lanes) + (i - step * own)) as u32 + lane;
        // With `none`, no element is below the end.
        let end = select(none, 0u32, head);
        row[i] = load_four::<F>(&view.data, at, four * 4u32, end, plan.kind);
    }
    row
}

/// Copies head `index` of the tokens from `first` on, up to `end`, to `tile`, one row after
/// another, followed by zeros.
#[cube]
pub fn stage<F: Numeric>(
    view: &HeadsView<F>,
    tile: &mut Shared<[Four]>,
    first: u32,
    end: u32,
    index: u32,
    head: u32,
    #[comptime] plan: ScalarPlan,
) {
    let fours = comptime!(plan.fours() as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.tile() * plan.fours()) as u32) {
        let row = item / fours;
        let four = item - row * fours;
        let token = first + row;
        let elements = select(token < end, head, 0u32);
        let at = view.offset + token as usize * view.stride + index as usize * head as usize;
        tile[item as usize] = load_four::<F>(&view.data, at, four * 4u32, elements, plan.kind);
        item += CUBE_DIM;
    }
}

/// Computes `a · b + c` of each element.
#[cube]
fn fma_fours(a: Four, b: Four, c: Four, #[comptime] conversion: Conversion) -> Four {
    let mut sum = Four::new(0.0f32);
    #[unroll]
    for e in 0..4usize {
        sum.insert(e, fma(a.extract(e), b.extract(e), c.extract(e), conversion));
    }
    sum
}

/// Returns the dot product of this unit's row and row `row` of `tile` to all lanes of the row, all
/// of which must participate.
#[cube]
pub fn row_product(
    own: &Array<Four>,
    tile: &Shared<[Four]>,
    row: u32,
    lane: u32,
    #[comptime] plan: ScalarPlan,
) -> f32 {
    let lanes = comptime!(plan.own_lanes());
    let steps = comptime!(plan.own_fours() / plan.own_lanes());
    let at = (row * comptime!(plan.fours() as u32) + lane) as usize;
    let mut sums = Array::<f32>::new(lanes);
    #[unroll(plan.planes)]
    for l in 0..lanes {
        let mut sum = Four::new(0.0f32);
        #[unroll(plan.planes)]
        for step in 0..steps {
            let other = tile[at + step * comptime!(plan.lanes) + l];
            sum = fma_fours(own[step * lanes + l], other, sum, plan.conversion);
        }
        let low = sum.extract(0usize) + sum.extract(1usize);
        let high = sum.extract(2usize) + sum.extract(3usize);
        sums[l] = low + high;
    }
    if comptime!(plan.planes) {
        let mut sum = sums[0];
        #[unroll]
        for stage in 0..comptime!(plan.lanes.ilog2()) {
            let distance = comptime!(1u32 << stage);
            sum += if comptime!(plan.conversion.has_ptx()) {
                ptx::shfl_sync_bfly(sum, distance)
            } else {
                plane_shuffle_xor(sum, distance)
            };
        }
        sum
    } else {
        let mut len = comptime!(plan.lanes / 2).runtime();
        while len > 0usize {
            for i in 0..len {
                let sum = sums[2usize * i] + sums[2usize * i + 1usize];
                sums[i] = sum;
            }
            len /= 2usize;
        }
        sums[0]
    }
}

/// Computes `sums += factor · row` for row `row` of `tile`.
#[cube]
pub fn add_scaled(
    sums: &mut Array<Four>,
    factor: f32,
    tile: &Shared<[Four]>,
    row: u32,
    lane: u32,
    #[comptime] plan: ScalarPlan,
) {
    let own = comptime!(plan.own_lanes());
    let at = (row * comptime!(plan.fours() as u32) + lane) as usize;
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own_fours()) {
        let step = i / own;
        let other = tile[at + step * comptime!(plan.lanes) + (i - step * own)];
        sums[i] = fma_fours(Four::new(factor), other, sums[i], plan.conversion);
    }
}

/// Multiplies a row by `factor`.
#[cube]
pub fn scale_row(sums: &mut Array<Four>, factor: f32, #[comptime] plan: ScalarPlan) {
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own_fours()) {
        sums[i] *= Four::new(factor);
    }
}

/// Returns a row of zeros.
#[cube]
pub fn zero_row(#[comptime] plan: ScalarPlan) -> Array<Four> {
    let mut row = Array::<Four>::new(comptime!(plan.own_fours()));
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own_fours()) {
        row[i] = Four::new(0.0f32);
    }
    row
}

/// Writes this unit's fours of head `index` of token `token`, rounded.
#[cube]
pub fn store_row<F: Numeric>(
    view: &mut HeadsView<F>,
    row: &Array<Four>,
    token: u32,
    index: u32,
    head: u32,
    lane: u32,
    #[comptime] plan: ScalarPlan,
) {
    let own = comptime!(plan.own_lanes());
    let at = view.offset + token as usize * view.stride + index as usize * head as usize;
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own_fours()) {
        let step = i / own;
        let four = (step * comptime!(plan.lanes) + (i - step * own)) as u32 + lane;
        let values = row[i];
        #[unroll]
        for e in 0..4usize {
            let element = four * 4u32 + comptime!(e as u32);
            if element < head {
                view.data[at + element as usize] =
                    crate::cube::codec::store::<F>(values.extract(e), plan.kind);
            }
        }
    }
}

/// A score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Score {
    /// Score after scale and soft cap.
    pub value: f32,
    /// Derivative of the soft cap, by which the score's gradient is multiplied.
    pub slope: f32,
}

/// Returns the score for `dot`, a product of a query and a key.
#[cube]
pub fn score(dot: f32, problem: &Problem, #[comptime] plan: ScalarPlan) -> Score {
    let conversion = comptime!(plan.conversion);
    let scaled = product(dot, problem.scale, conversion);
    if comptime!(plan.softcap) {
        let t = tanh(scaled * problem.inverse_cap, conversion);
        Score {
            value: product(problem.softcap, t, conversion),
            slope: fma(-t, t, 1.0f32, conversion),
        }
    } else {
        Score {
            value: scaled,
            slope: 1.0f32.runtime(),
        }
    }
}
