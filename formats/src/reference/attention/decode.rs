//! Attention of a few new tokens over cached keys and values, bit-identical to `attention::decode`.
//!
//! The keys that the new tokens of a sequence see are split into tiles of [`DECODE_TILE`], and the
//! tiles into at most [`decode_splits`] runs. The order of every sum:
//!
//! - Dot product of two heads: element `d` is added to partial sum `d % 4`, with ascending `d`, by
//!   fused multiply-adds; the four are added as `(s0 + s1) + (s2 + s3)`.
//! - In a tile, key `j` belongs to slice `j % s` of [`decode_slices`]; keys of a slice are added in
//!   ascending order, then the slices in order. Weights are relative to the largest score of the
//!   tile, and a weight of 0 adds nothing.
//! - A run adds its tiles in order, rescaled to the largest score so far; the runs of a row are
//!   added in order, rescaled to the largest score of all.

use rayon::prelude::*;

use super::super::{Element, simd::with_fma};
use super::{exp_or_nan, math};
use crate::AttentionParams;
use crate::format::e4m3;

/// Number of keys that share one softmax maximum.
pub const DECODE_TILE: usize = 128;

/// Returns the largest number of runs into which the keys of a sequence are split, with `kv_heads`
/// heads of keys. It does not depend on the batch or the capacity of the cache, so that a sequence
/// has the same bits in any batch.
pub const fn decode_splits(kv_heads: usize) -> usize {
    let heads = if kv_heads == 0 { 1 } else { kv_heads };
    let splits = 256 / heads;
    if splits < 4 {
        4
    } else if splits > 64 {
        64
    } else {
        splits
    }
}

/// Returns the number of slices of a tile's keys whose values are summed separately, for heads of
/// `head` elements.
pub const fn decode_slices(head: usize) -> usize {
    let slices = 1024 / head;
    if slices > DECODE_TILE {
        DECODE_TILE
    } else {
        slices
    }
}

/// Cached keys or values, `[batch, capacity, kv_heads, head]`.
#[derive(Debug, Clone, Copy)]
pub enum HostKv<'a, T> {
    /// Elements in the type of the activations.
    Float(&'a [T]),
    /// E4M3 elements and their scale.
    E4m3(&'a [u8], f32),
}

impl<T: Element> HostKv<'_, T> {
    /// Returns element `index`.
    #[inline(always)]
    pub fn get(&self, index: usize) -> f32 {
        match self {
            Self::Float(values) => values[index].to_f32(),
            Self::E4m3(codes, scale) => e4m3::decode_element(codes[index]) * scale,
        }
    }
}

/// Writable cache of keys or values.
#[derive(Debug)]
pub enum HostKvMut<'a, T> {
    /// Elements in the type of the activations.
    Float(&'a mut [T]),
    /// E4M3 elements and their scale.
    E4m3(&'a mut [u8], f32),
}

impl<T: Element> HostKvMut<'_, T> {
    /// Writes element `index`; for E4M3, rounds `value` times the reciprocal of the scale.
    pub fn set(&mut self, index: usize, value: T) {
        match self {
            Self::Float(values) => values[index] = value,
            Self::E4m3(codes, scale) => {
                codes[index] = e4m3::encode_element(value.to_f32() * (1.0 / *scale));
            }
        }
    }
}

/// Sizes of a cache, and of its new tokens.
#[derive(Debug, Clone, Copy)]
pub struct DecodeShape<'a> {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values.
    pub kv_heads: usize,
    /// Elements per head, a multiple of 8.
    pub head: usize,
    /// Number of new tokens per sequence, including padding.
    pub time: usize,
    /// Largest number of tokens per sequence.
    pub capacity: usize,
    /// Number of tokens in the cache of each sequence.
    pub starts: &'a [u32],
    /// Number of new tokens of each sequence without padding.
    pub counts: &'a [u32],
}

impl DecodeShape<'_> {
    /// Returns the number of tokens of a sequence without and with the new ones. Tokens beyond the
    /// capacity are ignored.
    pub fn extent(&self, sequence: usize) -> (usize, usize) {
        let start = (self.starts[sequence] as usize).min(self.capacity);
        let count = (self.counts[sequence] as usize).min(self.time);
        (start, (start + count).min(self.capacity))
    }
}

/// Tables of rotary positions, `[positions, head / 2]`: cosines and sines.
pub type HostTables<'a> = (&'a [f32], &'a [f32]);

/// Rotates element `d` of `row`, a head at `position`, see [`rope`](super::rope).
fn turned<T: Element>(row: &[T], d: usize, position: usize, tables: Option<HostTables<'_>>) -> T {
    let Some((cos, sin)) = tables else {
        return row[d];
    };
    let half = row.len() / 2;
    let position = position.min((cos.len() / half).saturating_sub(1));
    let (i, other) = match d < half {
        true => (d, -row[d + half].to_f32()),
        false => (d - half, row[d - half].to_f32()),
    };
    let angle = position * half + i;
    T::from_f32(other.mul_add(sin[angle], row[d].to_f32() * cos[angle]))
}

/// Returns the queries rotated by their positions, `[batch * time, heads, head]`, and appends the
/// rotated new keys and the new values to the cache. Rows of `qkv` have `heads + 2 kv_heads` heads.
///
/// # Panics
/// Panics if an operand does not contain its heads.
pub fn append<T: Element>(
    qkv: &[T],
    cache: [&mut HostKvMut<'_, T>; 2],
    shape: &DecodeShape<'_>,
    tables: Option<HostTables<'_>>,
) -> Vec<T> {
    let [k_cache, v_cache] = cache;
    let DecodeShape {
        heads,
        kv_heads,
        head,
        time,
        capacity,
        ..
    } = *shape;
    let mut queries = Vec::with_capacity(qkv.len());
    for (token, row) in qkv.chunks((heads + 2 * kv_heads) * head).enumerate() {
        let (sequence, t) = (token / time, token % time);
        let (start, end) = shape.extent(sequence);
        let position = start + t;
        for q in row[..heads * head].chunks(head) {
            queries.extend((0..head).map(|d| turned(q, d, position, tables)));
        }
        if position >= end {
            continue;
        }
        let (k, v) = row[heads * head..].split_at(kv_heads * head);
        let first = (sequence * capacity + position) * kv_heads * head;
        for (index, k) in k.chunks(head).enumerate() {
            for d in 0..head {
                k_cache.set(first + index * head + d, turned(k, d, position, tables));
            }
        }
        for (i, v) in v.iter().enumerate() {
            v_cache.set(first + i, *v);
        }
    }
    queries
}

/// Computes attention of the new tokens, whose keys and values are in the cache already:
/// `[batch * time, heads, head]` from rotated queries. 0 for padding.
///
/// # Panics
/// Panics if an operand does not contain its heads.
pub fn attention_decode<T: Element>(
    queries: &[T],
    k: HostKv<'_, T>,
    v: HostKv<'_, T>,
    shape: &DecodeShape<'_>,
    params: &AttentionParams,
) -> Vec<T> {
    let head = shape.head;
    let rows: Vec<Vec<T>> = queries
        .par_chunks(head)
        .enumerate()
        .map(|(index, query)| {
            let (token, of_head) = (index / shape.heads, index % shape.heads);
            let row = Row {
                shape,
                params,
                sequence: token / shape.time,
                t: token % shape.time,
                kv_head: of_head / (shape.heads / shape.kv_heads),
            };
            let query: Vec<f32> = query.iter().map(|x| x.to_f32()).collect();
            let out = attend(&row, &query, &k, &v);
            out.into_iter().map(T::from_f32).collect()
        })
        .collect();
    rows.concat()
}

/// One query.
struct Row<'a> {
    shape: &'a DecodeShape<'a>,
    params: &'a AttentionParams,
    sequence: usize,
    t: usize,
    kv_head: usize,
}

/// Weighted values relative to a largest score.
struct Partial {
    highest: f32,
    sum: f32,
    out: Vec<f32>,
}

with_fma!(
    fn attend[T: Element](row: &Row<'_>, query: &[f32], k: &HostKv<'_, T>, v: &HostKv<'_, T>)
        -> Vec<f32> = Row::attend
);

impl Row<'_> {
    #[inline(always)]
    fn attend<T: Element>(&self, query: &[f32], k: &HostKv<'_, T>, v: &HostKv<'_, T>) -> Vec<f32> {
        let head = self.shape.head;
        let (start, end) = self.shape.extent(self.sequence);
        if start + self.t >= end {
            return vec![0.0; head];
        }
        let first = match self.params.window {
            Some(window) => (start + 1).saturating_sub(window),
            None => 0,
        };
        let tiles = (end - first).div_ceil(DECODE_TILE);
        let per = tiles.div_ceil(decode_splits(self.shape.kv_heads)) * DECODE_TILE;
        let runs: Vec<Partial> = (first..end)
            .step_by(per)
            .map(|first| self.run(query, k, v, first..(first + per).min(end)))
            .collect();
        let highest = runs.iter().fold(f32::MIN, |m, run| larger(m, run.highest));
        let (mut sum, mut out) = (0f32, vec![0f32; head]);
        for run in &runs {
            let factor = exp_or_nan(run.highest - highest);
            sum = run.sum.mul_add(factor, sum);
            for (out, value) in out.iter_mut().zip(&run.out) {
                *out = value.mul_add(factor, *out);
            }
        }
        let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        out.iter().map(|out| out * inverse).collect()
    }

    #[inline(always)]
    fn run<T: Element>(
        &self,
        query: &[f32],
        k: &HostKv<'_, T>,
        v: &HostKv<'_, T>,
        keys: std::ops::Range<usize>,
    ) -> Partial {
        let head = self.shape.head;
        let slices = decode_slices(head);
        let mut state = Partial {
            highest: f32::MIN,
            sum: 0.0,
            out: vec![0.0; head],
        };
        for tile in keys.clone().step_by(DECODE_TILE) {
            let last = (tile + DECODE_TILE).min(keys.end);
            let scores: Vec<Option<f32>> = (tile..last)
                .map(|key| self.sees(key).then(|| self.score(query, k, key)))
                .collect();
            let highest = scores.iter().flatten().fold(f32::MIN, |m, s| larger(m, *s));
            let (mut sum, mut out) = (0f32, vec![0f32; head]);
            for slice in 0..slices {
                let (mut of_slice, mut values) = (0f32, vec![0f32; head]);
                for key in (tile + slice..last).step_by(slices) {
                    let weight = scores[key - tile].map_or(0.0, |s| exp_or_nan(s - highest));
                    of_slice += weight;
                    if weight != 0.0 {
                        let at = self.place(key);
                        for (d, value) in values.iter_mut().enumerate() {
                            *value = weight.mul_add(v.get(at + d), *value);
                        }
                    }
                }
                sum += of_slice;
                out.iter_mut().zip(&values).for_each(|(a, b)| *a += b);
            }
            let above = larger(state.highest, highest);
            let old = exp_or_nan(state.highest - above);
            let new = exp_or_nan(highest - above);
            state.sum = sum.mul_add(new, state.sum * old);
            for (all, out) in state.out.iter_mut().zip(&out) {
                *all = out.mul_add(new, *all * old);
            }
            state.highest = above;
        }
        state
    }

    /// True if the query sees key `key`.
    fn sees(&self, key: usize) -> bool {
        let position = self.shape.extent(self.sequence).0 + self.t;
        let window = self.params.window.unwrap_or(0);
        key <= position && (window == 0 || key + window > position)
    }

    /// Returns the offset of the head of a key or value.
    fn place(&self, key: usize) -> usize {
        let row = self.sequence * self.shape.capacity + key;
        (row * self.shape.kv_heads + self.kv_head) * self.shape.head
    }

    #[inline(always)]
    fn score<T: Element>(&self, query: &[f32], k: &HostKv<'_, T>, key: usize) -> f32 {
        let at = self.place(key);
        let mut sums = [0f32; 4];
        for (d, q) in query.iter().enumerate() {
            sums[d % 4] = q.mul_add(k.get(at + d), sums[d % 4]);
        }
        let scaled = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * self.params.scale;
        match self.params.softcap {
            Some(softcap) => softcap * math::tanh(scaled * (1.0 / softcap)),
            None => scaled,
        }
    }
}

/// Returns the larger number; NaN is ignored.
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}
