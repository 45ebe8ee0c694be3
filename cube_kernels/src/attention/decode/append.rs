//! New tokens: location in memory, rotation, and writes to the cache.

use cubecl::prelude::*;

use super::plan::{CacheKind, DecodePlan};
use crate::{
    attention::scalar::{math::product, problem::HeadsView},
    cube::{
        codec::{decode_e4m3_element, encode_e4m3_element, load, store},
        exact::fma,
    },
    reference::attention::DECODE_TILE,
};

/// Queries, keys and values of the new tokens, `time` per sequence.
#[derive(CubeType, CubeLaunch)]
pub struct NewTokens<F: Numeric> {
    /// Queries.
    pub q: HeadsView<F>,
    /// Keys.
    pub k: HeadsView<F>,
    /// Values.
    pub v: HeadsView<F>,
    /// Number of tokens in the cache of each sequence.
    pub starts: Box<[u32]>,
    /// Number of new tokens of each sequence without padding.
    pub counts: Box<[u32]>,
    /// Number of new tokens per sequence, including padding.
    pub time: u32,
    /// Number of new tokens of all sequences.
    pub tokens: u32,
    /// Cosines, `[positions, head / 2]`. Read only with rotary positions.
    pub cos: Box<[f32]>,
    /// Sines, `[positions, head / 2]`. Read only with rotary positions.
    pub sin: Box<[f32]>,
    /// Number of positions.
    pub positions: u32,
}

/// Sizes of a cache, `[batch, capacity, kv_heads, head]`, and the mapping of scores to weights.
#[derive(CubeType, CubeLaunch)]
pub struct CacheShape {
    /// Largest number of tokens of a sequence.
    pub capacity: u32,
    /// Number of heads of keys and values.
    pub kv_heads: u32,
    /// Heads of queries that read one head of keys.
    pub group: u32,
    /// Largest number of runs of tiles.
    pub splits: u32,
    /// Largest number of keys that a query sees, 0 for any number.
    pub window: u32,
    /// Factor of the scores `q · k`.
    pub scale: f32,
    /// Soft cap of scores, if any.
    pub softcap: f32,
    /// Reciprocal of the soft cap.
    pub inverse_cap: f32,
    /// Scale of the keys' elements.
    pub k_scale: f32,
    /// Reciprocal of `k_scale`.
    pub k_inverse: f32,
    /// Scale of the values' elements.
    pub v_scale: f32,
    /// Reciprocal of `v_scale`.
    pub v_inverse: f32,
}

/// Tokens of a sequence, and the partition of its keys into runs (split-KV).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Extent {
    /// Number of tokens before the new ones.
    pub start: u32,
    /// Number of tokens including the new ones.
    pub end: u32,
    /// First key that a new token sees.
    pub first: u32,
    /// Keys per run.
    pub per: u32,
    /// Number of runs.
    pub runs: u32,
}

/// Returns the extent of sequence `sequence`. Tokens beyond the capacity are ignored.
#[cube]
pub(super) fn extent(
    starts: &[u32],
    counts: &[u32],
    time: u32,
    shape: &CacheShape,
    sequence: u32,
) -> Extent {
    let start = min(starts[sequence as usize], shape.capacity);
    let count = min(counts[sequence as usize], time);
    let end = min(start + count, shape.capacity);
    let before = select(
        shape.window > 0u32,
        min(start + 1u32, shape.window),
        start + 1u32,
    );
    let first = start + 1u32 - before;
    let keys = select(end > start, end - min(first, end), 0u32);
    let tile = comptime!(DECODE_TILE as u32);
    let per = max(keys.div_ceil(tile).div_ceil(shape.splits), 1u32) * tile;
    Extent {
        start,
        end,
        first,
        per,
        runs: keys.div_ceil(per),
    }
}

/// Keys that a query sees: from `first` up to `end` (exclusive).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Seen {
    pub first: u32,
    pub end: u32,
}

#[cube]
impl Seen {
    /// Returns the keys that query row `row` of a head of keys sees. Padding sees none.
    pub(super) fn of(own: &Extent, shape: &CacheShape, row: u32) -> Seen {
        let end = own.start + row / shape.group + 1u32;
        let near = end - min(end, shape.window);
        Seen {
            first: select(shape.window == 0u32, 0u32, near),
            end: select(end <= own.end, end, 0u32),
        }
    }
}

/// A head of a token, and its position, clamped to the table of angles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Element {
    pub token: u32,
    pub index: u32,
    pub position: u32,
}

/// Location of consecutive elements of a head, of their rotation partners and of their angles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Turn {
    /// First element in the memory of its heads.
    own: usize,
    /// First element of the partners in the other half of the head.
    other: usize,
    /// First angle in its table.
    angle: usize,
    /// True if the elements are in the upper half.
    upper: bool,
}

#[cube]
impl Turn {
    /// Returns the rotation of the elements from `d` on, which are all in the same half.
    pub fn new<F: Numeric>(
        view: &HeadsView<F>,
        of: Element,
        d: u32,
        #[comptime] plan: DecodePlan,
    ) -> Turn {
        let half = comptime!((plan.head / 2) as u32);
        let upper = d >= half;
        let other = select(upper, d - min(half, d), d + half);
        let at = view.offset
            + of.token as usize * view.stride
            + of.index as usize * comptime!(plan.head);
        Turn {
            own: at + d as usize,
            other: at + other as usize,
            angle: (of.position * half + select(upper, other, d)) as usize,
            upper,
        }
    }

    /// Returns rotated element `e`, in the type of the operands.
    pub fn element<F: Numeric>(
        &self,
        view: &HeadsView<F>,
        cos: &[f32],
        sin: &[f32],
        #[comptime] e: usize,
        #[comptime] plan: DecodePlan,
    ) -> F {
        let stored = view.data[self.own + e];
        if comptime!(plan.rotary) {
            let x = load::<F>(stored, plan.kind);
            let y = load::<F>(view.data[self.other + e], plan.kind);
            let other = select(self.upper, y, -y);
            let angle = self.angle + e;
            store::<F>(
                fma(other, sin[angle], x * cos[angle], plan.conversion),
                plan.kind,
            )
        } else {
            stored
        }
    }
}

/// Returns element `d` of a head, rotated by its position, in the type of the operands.
#[cube]
pub(super) fn turned<F: Numeric>(
    view: &HeadsView<F>,
    cos: &[f32],
    sin: &[f32],
    of: Element,
    d: u32,
    #[comptime] plan: DecodePlan,
) -> F {
    Turn::new::<F>(view, of, d, plan).element::<F>(view, cos, sin, 0usize, plan)
}

/// Returns the larger number; NaN is ignored.
#[cube]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    select(b > a, b, a)
}

/// Converts a new element to the cache's type.
#[cube]
fn cached<F: Numeric, C: Numeric>(value: F, inverse: f32, #[comptime] plan: DecodePlan) -> C {
    if comptime!(plan.cache == CacheKind::E4m3) {
        let value = load::<F>(value, plan.kind);
        C::cast_from(encode_e4m3_element(product(
            value,
            inverse,
            plan.conversion,
        )))
    } else {
        C::cast_from(value)
    }
}

/// Converts an element of the cache to `f32`.
#[cube]
pub(super) fn uncached<C: Numeric>(stored: C, scale: f32, #[comptime] plan: DecodePlan) -> f32 {
    if comptime!(plan.cache == CacheKind::E4m3) {
        let value = decode_e4m3_element(u32::cast_from(stored));
        product(value, scale, plan.conversion)
    } else {
        load::<C>(stored, plan.kind)
    }
}

/// A vector of a new key, and the corresponding vector of its value.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct NewVector {
    /// Sequence.
    pub sequence: u32,
    /// Token index among the new tokens of the sequence.
    pub t: u32,
    /// Token index among all tokens of the sequence.
    pub position: u32,
    /// Vector index within the token's row.
    pub place: u32,
}

/// A vector of a key, and the corresponding vector of its value.
#[derive(CubeType)]
pub(super) struct Written<C: Numeric, N: Size> {
    pub key: Vector<C, N>,
    pub value: Vector<C, N>,
}

/// Writes a vector of a new key, and the corresponding vector of its value, to the cache.
#[cube]
pub(super) fn write_new<F: Numeric, C: Numeric, N: Size>(
    new: &NewTokens<F>,
    k_cache: &mut [Vector<C, N>],
    v_cache: &mut [Vector<C, N>],
    shape: &CacheShape,
    vector: NewVector,
    #[comptime] plan: DecodePlan,
) -> Written<C, N> {
    let columns = comptime!(plan.columns() as u32);
    let index = vector.place / columns;
    let column = vector.place % columns;
    let token = vector.sequence * new.time + vector.t;
    let of_table = min(vector.position, new.positions - 1u32);
    let own = Element {
        token,
        index,
        position: of_table,
    };
    let mut key = Vector::<C, N>::empty();
    let mut value = Vector::<C, N>::empty();
    // A vector lies in one half of the head.
    let first = column * comptime!(plan.width as u32);
    let turn = Turn::new::<F>(&new.k, own, first, plan);
    let of_value = new.v.offset
        + token as usize * new.v.stride
        + index as usize * comptime!(plan.head)
        + first as usize;
    #[unroll]
    for e in 0..N::value() {
        let k = turn.element::<F>(&new.k, &new.cos, &new.sin, e, plan);
        key.insert(e, cached::<F, C>(k, shape.k_inverse, plan));
        value.insert(
            e,
            cached::<F, C>(new.v.data[of_value + e], shape.v_inverse, plan),
        );
    }
    let row = vector.sequence as usize * shape.capacity as usize + vector.position as usize;
    let at = (row * shape.kv_heads as usize + index as usize) * comptime!(plan.columns())
        + column as usize;
    k_cache[at] = key;
    v_cache[at] = value;
    Written::<C, N> { key, value }
}

/// Each unit writes every `units`-th vector of the new keys and values, and the same share of the
/// rotated queries, `[tokens, heads, head]`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn append_kernel<F: Numeric, C: Numeric, N: Size>(
    new: NewTokens<F>,
    k_cache: &mut [Vector<C, N>],
    v_cache: &mut [Vector<C, N>],
    shape: CacheShape,
    queries: &mut [F],
    #[comptime] plan: DecodePlan,
    #[define(F)] _storage: ElemType,
    #[define(C)] _cached: ElemType,
) {
    let columns = comptime!(plan.columns() as u32);
    let heads = shape.kv_heads * shape.group;
    let of_token = (heads + shape.kv_heads) * columns;
    let mut item = ABSOLUTE_POS;
    while item < new.tokens as usize * of_token as usize {
        let token = (item / of_token as usize) as u32;
        let place = (item - token as usize * of_token as usize) as u32;
        let sequence = token / new.time;
        let t = token - sequence * new.time;
        let own = extent(&new.starts, &new.counts, new.time, &shape, sequence);
        let position = own.start + t;
        if place < heads * columns {
            let index = place / columns;
            let first = (place - index * columns) * comptime!(plan.width as u32);
            let own = Element {
                token,
                index,
                position: min(position, new.positions - 1u32),
            };
            let turn = Turn::new::<F>(&new.q, own, first, plan);
            let at = (token as usize * heads as usize + index as usize) * comptime!(plan.head)
                + first as usize;
            #[unroll]
            for e in 0..N::value() {
                queries[at + e] = turn.element::<F>(&new.q, &new.cos, &new.sin, e, plan);
            }
        } else if position < own.end {
            let place = place - heads * columns;
            let vector = NewVector {
                sequence,
                t,
                position,
                place,
            };
            write_new::<F, C, N>(&new, k_cache, v_cache, &shape, vector, plan);
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
