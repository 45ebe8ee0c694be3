//! Attention, forward and backward: the arithmetic of the kernels without matrix instructions, and
//! a reference in `f64` with error bounds for every kernel.
//!
//! [`attention_forward`] and [`attention_backward`] are bit-identical to `attention::scalar` on
//! every device. The order of every sum:
//!
//! - Dot product of two heads: element `d` is added to partial sum `d % W`, with ascending `d`, by
//!   fused multiply-adds; `W` is 4, 8, 16 or 32 for heads of up to 32, 64, 128, 256 elements.
//!   Groups of four partial sums are added as `(s0 + s1) + (s2 + s3)`, then neighbors, then
//!   neighboring pairs, and so on.
//! - For a query: over keys, ascending. For a key: over query heads, and the queries of each,
//!   ascending. Scores that the mask excludes are skipped.
//! - A row keeps its largest score so far, `m`, and the sum `l` of `exp(s - m)`; both, and the
//!   output, are rescaled if the maximum rises.
//!
//! Arithmetic is `f32`; outputs and gradients are rounded once to the type of the operands.

mod decode;
mod exact;
mod math;

use std::ops::Range;

use rayon::prelude::*;

use super::{Element, simd::with_fma};
use crate::AttentionParams;

pub use decode::{
    DECODE_TILE, DecodeShape, HostKv, HostKvMut, HostTables, append, attention_decode,
    decode_slices, decode_splits,
};
pub use exact::{AttentionF64, Bounded, Precision, attention_f64};
pub use math::{
    LN_2_LOWER, LN_2_UPPER, LN_POLYNOMIAL, SQRT_HALF, TANH_SERIES, TANH_SMALL, exp_or_nan, ln, tanh,
};

/// Largest number of elements of a head per lane of four partial sums.
const LANE_ELEMENTS: usize = 32;

/// Returns the number of lanes of four partial sums for a dot product of two heads of `head`
/// elements.
pub const fn lanes(head: usize) -> usize {
    head.div_ceil(LANE_ELEMENTS).next_power_of_two()
}

/// Returns `head` rounded up to a multiple of the partial sums; the padding is zeros.
pub const fn padded(head: usize) -> usize {
    head.next_multiple_of(4 * lanes(head))
}

/// Heads of tokens on the host. The heads of a token are contiguous, and tokens are `row_stride`
/// elements apart, starting at element `offset`.
#[derive(Debug, Clone, Copy)]
pub struct HostHeads<'a, T> {
    /// Elements.
    pub data: &'a [T],
    /// Elements before the first token.
    pub offset: usize,
    /// Elements from one token to the next.
    pub row_stride: usize,
}

impl<'a, T: Element> HostHeads<'a, T> {
    /// Returns the heads of tokens of `width` elements without gaps.
    pub fn contiguous(data: &'a [T], width: usize) -> Self {
        Self {
            data,
            offset: 0,
            row_stride: width,
        }
    }

    /// Returns head `index` of `head` elements, of token `token`.
    pub fn head(&self, token: usize, index: usize, head: usize) -> &'a [T] {
        &self.data[self.offset + token * self.row_stride + index * head..][..head]
    }

    /// Returns head `index` of `tokens` tokens in `f32`, each padded with zeros.
    fn gather(&self, tokens: usize, index: usize, head: usize) -> Vec<f32> {
        let pitch = padded(head);
        let mut out = vec![0f32; tokens * pitch];
        for (token, row) in out.chunks_mut(pitch).enumerate() {
            for (out, value) in row.iter_mut().zip(self.head(token, index, head)) {
                *out = value.to_f32();
            }
        }
        out
    }
}

/// Sizes of attention on the host.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head: usize,
    /// Number of tokens of `q`.
    pub q_tokens: usize,
    /// Number of tokens of `k` and `v`.
    pub k_tokens: usize,
    /// Start of each sequence among the tokens of `q`, ascending from 0, and the end of the last
    /// one.
    pub q_starts: &'a [u32],
    /// Start of each sequence among the tokens of `k` and `v`, and the end of the last one.
    pub k_starts: &'a [u32],
    /// Mapping of scores to weights.
    pub params: AttentionParams,
}

impl AttentionShape<'_> {
    /// Returns the number of heads of queries that read one head of keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the query tokens and the key tokens of each sequence.
    fn sequences(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let range = |pair: &[u32]| pair[0] as usize..pair[1] as usize;
        let q = self.q_starts.windows(2).map(range);
        q.zip(self.k_starts.windows(2).map(range))
    }
}

/// Output and log-sum-exp.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionForward<T> {
    /// Output `[q_tokens, heads, head]`.
    pub out: Vec<T>,
    /// Log-sum-exp `[heads, q_tokens]`.
    pub lse: Vec<f32>,
}

/// Gradients of the operands.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionBackward<T> {
    /// Gradient of `q`, `[q_tokens, heads, head]`.
    pub dq: Vec<T>,
    /// Gradient of `k`, `[k_tokens, kv_heads, head]`.
    pub dk: Vec<T>,
    /// Gradient of `v`, `[k_tokens, kv_heads, head]`.
    pub dv: Vec<T>,
}

/// Computes attention, see [`AttentionParams`]. Rows that see no keys have output 0 and log-sum-exp
/// `-inf`, or 0 with a quiet softmax; tokens of no sequence have output 0 and `-inf`.
///
/// # Panics
/// Panics if an operand does not contain its heads.
pub fn attention_forward<T: Element>(
    q: HostHeads<'_, T>,
    k: HostHeads<'_, T>,
    v: HostHeads<'_, T>,
    shape: &AttentionShape<'_>,
) -> AttentionForward<T> {
    let rows: Vec<(Vec<f32>, Vec<f32>)> = (0..shape.heads)
        .into_par_iter()
        .map(|h| forward_rows(&HeadOperands::new(q, k, v, shape, h)))
        .collect();
    let (out, lse): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    AttentionForward {
        out: interleave(&out, shape.q_tokens, shape.head),
        lse: lse.concat(),
    }
}

/// Returns the sum of `dout · out` of each row, `[heads, q_tokens]`. Every eight elements are
/// summed by fused multiply-adds; then neighboring eights are added, then neighboring pairs of
/// these, and so on, padded with zeros at the end.
///
/// # Panics
/// Panics if an operand does not contain its heads.
fn attention_delta<T: Element>(
    out: HostHeads<'_, T>,
    dout: HostHeads<'_, T>,
    shape: &AttentionShape<'_>,
) -> Vec<f32> {
    let head = shape.head;
    let row =
        |h: usize, token: usize| delta_row(out.head(token, h, head), dout.head(token, h, head));
    (0..shape.heads)
        .into_par_iter()
        .flat_map_iter(|h| (0..shape.q_tokens).map(move |token| row(h, token)))
        .collect()
}

with_fma!(fn delta_row[T: Element](out: &[T], dout: &[T]) -> f32 = delta_row_body);

#[inline(always)]
fn delta_row_body<T: Element>(out: &[T], dout: &[T]) -> f32 {
    let mut sums = vec![0f32; out.len().div_ceil(8).next_power_of_two()];
    for (sum, (out, dout)) in sums.iter_mut().zip(out.chunks(8).zip(dout.chunks(8))) {
        for (out, dout) in out.iter().zip(dout) {
            *sum = dout.to_f32().mul_add(out.to_f32(), *sum);
        }
    }
    tree(&mut sums)
}

/// Computes the gradients of [`attention_forward`] from its result `saved` and the gradient of its
/// output.
///
/// # Panics
/// Panics if an operand does not contain its heads.
pub fn attention_backward<T: Element>(
    (q, k, v): (HostHeads<'_, T>, HostHeads<'_, T>, HostHeads<'_, T>),
    (out, lse): (HostHeads<'_, T>, &[f32]),
    dout: HostHeads<'_, T>,
    shape: &AttentionShape<'_>,
) -> AttentionBackward<T> {
    let delta = attention_delta(out, dout, shape);
    let of_head =
        |values: &[f32], h: usize| values[h * shape.q_tokens..][..shape.q_tokens].to_vec();
    let row = |h: usize| HeadGradient {
        operands: HeadOperands::new(q, k, v, shape, h),
        dout: dout.gather(shape.q_tokens, h, shape.head),
        lse: of_head(lse, h),
        delta: of_head(&delta, h),
    };
    let dq: Vec<Vec<f32>> = (0..shape.heads)
        .into_par_iter()
        .map(|h| query_gradients(&row(h)))
        .collect();
    let group = shape.group();
    let (dk, dv): (Vec<_>, Vec<_>) = (0..shape.kv_heads)
        .into_par_iter()
        .map(|kv| {
            let heads: Vec<_> = (kv * group..(kv + 1) * group).map(row).collect();
            key_gradients(&heads)
        })
        .unzip();
    AttentionBackward {
        dq: interleave(&dq, shape.q_tokens, shape.head),
        dk: interleave(&dk, shape.k_tokens, shape.head),
        dv: interleave(&dv, shape.k_tokens, shape.head),
    }
}

/// Rotates the pairs of each head of `x`, elements `i` and `i + head / 2`, by the position of its
/// token in its sequence (`starts`), or back if `inverse` is set: `fma(-b, sin, a cos)` and
/// `fma(a, sin, b cos)`. `cos` and `sin` are `[positions, head / 2]`. Later positions are rotated
/// like the last one, and tokens of no sequence like those of the last sequence.
///
/// # Panics
/// Panics if `x` does not contain the heads of whole tokens.
pub fn rope<T: Element>(
    x: &[T],
    (heads, head): (usize, usize),
    starts: &[u32],
    tables: (&[f32], &[f32]),
    inverse: bool,
) -> Vec<T> {
    let mut out = x.to_vec();
    rope_rows(
        &mut out,
        heads * head,
        (heads, head),
        starts,
        tables,
        inverse,
    );
    out
}

/// Computes [`rope`] in place, for the first `heads` heads of tokens that are `row_stride` elements
/// apart.
///
/// # Panics
/// Panics if a token does not contain its heads.
pub fn rope_rows<T: Element>(
    x: &mut [T],
    row_stride: usize,
    (heads, head): (usize, usize),
    starts: &[u32],
    (cos, sin): (&[f32], &[f32]),
    inverse: bool,
) {
    assert!(x.len().is_multiple_of(row_stride.max(1)), "whole tokens");
    let half = head / 2;
    let positions = cos.len() / half.max(1);
    x.par_chunks_mut(row_stride.max(1))
        .enumerate()
        .for_each(|(token, row)| {
            let sequence = starts[..starts.len() - 1].partition_point(|&s| s as usize <= token);
            let start = starts[sequence.saturating_sub(1)] as usize;
            let position = (token - start.min(token)).min(positions - 1);
            let angles = position * half..(position + 1) * half;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            turn_heads(&mut row[..heads * head], head, cos, sin, inverse);
        });
}

with_fma!(
    fn turn_heads[T: Element](x: &mut [T], head: usize, cos: &[f32], sin: &[f32], inverse: bool)
        = turn_heads_body
);

/// Rotates the heads of one token.
#[inline(always)]
fn turn_heads_body<T: Element>(x: &mut [T], head: usize, cos: &[f32], sin: &[f32], inverse: bool) {
    for head in x.chunks_mut(head) {
        let (first, second) = head.split_at_mut(head.len() / 2);
        let pairs = first.iter_mut().zip(second);
        for ((a, b), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
            let (x, y) = (a.to_f32(), b.to_f32());
            let sin = if inverse { -sin } else { *sin };
            *a = T::from_f32((-y).mul_add(sin, x * cos));
            *b = T::from_f32(x.mul_add(sin, y * cos));
        }
    }
}

/// Interleaves padded matrices, one per head, to `[tokens, heads, head]`.
fn interleave<T: Element>(heads: &[Vec<f32>], tokens: usize, head: usize) -> Vec<T> {
    let pitch = padded(head);
    let mut out = Vec::with_capacity(tokens * heads.len() * head);
    for token in 0..tokens {
        for values in heads {
            let row = &values[token * pitch..][..head];
            out.extend(row.iter().map(|&value| T::from_f32(value)));
        }
    }
    out
}

/// Sums a power of two of values in a tree: neighbors, then neighboring pairs, and so on.
#[inline(always)]
fn tree(sums: &mut [f32]) -> f32 {
    let mut len = sums.len();
    while len > 1 {
        len /= 2;
        for i in 0..len {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}

/// Returns the dot product of two padded heads.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    #[inline(always)]
    fn sums<const W: usize>(a: &[f32], b: &[f32]) -> f32 {
        let mut sums = [0f32; W];
        for (a, b) in a.chunks_exact(W).zip(b.chunks_exact(W)) {
            for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
                *sum = a.mul_add(*b, *sum);
            }
        }
        tree(&mut sums)
    }
    match a.len() {
        0..=32 => sums::<4>(a, b),
        33..=64 => sums::<8>(a, b),
        65..=128 => sums::<16>(a, b),
        _ => sums::<32>(a, b),
    }
}

/// Computes `sums += factor · values`.
#[inline(always)]
fn add_scaled(sums: &mut [f32], factor: f32, values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = factor.mul_add(*value, *sum);
    }
}

/// Returns a score, and the derivative of the soft cap, by which its gradient is multiplied.
#[inline(always)]
fn score(product: f32, params: &AttentionParams) -> (f32, f32) {
    let scaled = product.mul_add(params.scale, 0.0);
    match params.softcap {
        None => (scaled, 1.0),
        Some(cap) => {
            let t = tanh(scaled * (1.0 / cap));
            (cap.mul_add(t, 0.0), (-t).mul_add(t, 1.0))
        }
    }
}

/// Padded operands of one head of queries.
struct HeadOperands<'a> {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    pitch: usize,
    shape: &'a AttentionShape<'a>,
}

impl<'a> HeadOperands<'a> {
    fn new<T: Element>(
        q: HostHeads<'_, T>,
        k: HostHeads<'_, T>,
        v: HostHeads<'_, T>,
        shape: &'a AttentionShape<'a>,
        h: usize,
    ) -> Self {
        let (kv, head) = (h / shape.group(), shape.head);
        Self {
            q: q.gather(shape.q_tokens, h, head),
            k: k.gather(shape.k_tokens, kv, head),
            v: v.gather(shape.k_tokens, kv, head),
            pitch: padded(head),
            shape,
        }
    }

    #[inline(always)]
    fn row(values: &[f32], token: usize, pitch: usize) -> &[f32] {
        &values[token * pitch..][..pitch]
    }

    /// Returns padded output rows, and log-sum-exps.
    #[inline(always)]
    fn forward(&self) -> (Vec<f32>, Vec<f32>) {
        let Self { pitch, shape, .. } = *self;
        let params = &shape.params;
        let mut out = vec![0f32; shape.q_tokens * pitch];
        let mut lse = vec![f32::NEG_INFINITY; shape.q_tokens];
        for (q_range, k_range) in shape.sequences() {
            for (i, token) in q_range.clone().enumerate() {
                let q = Self::row(&self.q, token, pitch);
                let out = &mut out[token * pitch..][..pitch];
                let (mut highest, mut sum): (f32, f32) = match params.quiet_softmax {
                    true => (0.0, 1.0),
                    false => (f32::MIN, 0.0),
                };
                for j in params.visible(i, q_range.len(), k_range.len()) {
                    let k = Self::row(&self.k, k_range.start + j, pitch);
                    let (s, _) = score(dot(q, k), params);
                    let above = s - highest;
                    let e = exp_or_nan(-above.abs());
                    let rises = above > 0.0;
                    let mut weight = e;
                    if rises {
                        // exp(s - s), which is NaN at infinity.
                        weight = if s == f32::INFINITY { f32::NAN } else { 1.0 };
                        for value in out.iter_mut() {
                            *value *= e;
                        }
                        highest = s;
                    }
                    sum = sum.mul_add(if rises { e } else { 1.0 }, weight);
                    let v = Self::row(&self.v, k_range.start + j, pitch);
                    add_scaled(out, weight, v);
                }
                if sum == 0.0 {
                    out.fill(0.0);
                } else {
                    let inverse = 1.0 / sum;
                    for value in out.iter_mut() {
                        *value *= inverse;
                    }
                    lse[token] = highest + ln(sum);
                }
            }
        }
        (out, lse)
    }
}

with_fma!(
    fn forward_rows(head: &HeadOperands<'_>) -> (Vec<f32>, Vec<f32>) = HeadOperands::forward
);

/// State of the backward of one head of queries.
struct HeadGradient<'a> {
    operands: HeadOperands<'a>,
    dout: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

impl HeadGradient<'_> {
    /// Returns the weight of key `key` for query `query`, and the gradient of its score.
    #[inline(always)]
    fn weight(&self, query: usize, key: usize) -> (f32, f32) {
        let HeadOperands { q, k, v, pitch, .. } = &self.operands;
        let row = |values, token| HeadOperands::row(values, token, *pitch);
        let params = &self.operands.shape.params;
        let (s, slope) = score(dot(row(q, query), row(k, key)), params);
        let lse = self.lse[query];
        let weight = match lse == f32::NEG_INFINITY {
            true => 0.0,
            false => exp_or_nan(s - lse),
        };
        let by_weight = dot(row(&self.dout, query), row(v, key));
        let mut by_score = weight * (by_weight - self.delta[query]);
        if params.softcap.is_some() {
            by_score *= slope;
        }
        (weight, by_score)
    }

    /// Returns padded rows of the gradient of the queries.
    #[inline(always)]
    fn dq(&self) -> Vec<f32> {
        let HeadOperands {
            k, pitch, shape, ..
        } = &self.operands;
        let mut dq = vec![0f32; shape.q_tokens * pitch];
        for (q_range, k_range) in shape.sequences() {
            for (i, query) in q_range.clone().enumerate() {
                let dq = &mut dq[query * pitch..][..*pitch];
                for j in shape.params.visible(i, q_range.len(), k_range.len()) {
                    let key = k_range.start + j;
                    let (_, by_score) = self.weight(query, key);
                    add_scaled(dq, by_score, HeadOperands::row(k, key, *pitch));
                }
                for value in dq.iter_mut() {
                    *value *= shape.params.scale;
                }
            }
        }
        dq
    }
}

with_fma!(fn query_gradients(head: &HeadGradient<'_>) -> Vec<f32> = HeadGradient::dq);

with_fma!(fn key_gradients(heads: &[HeadGradient<'_>]) -> (Vec<f32>, Vec<f32>) = dkdv);

/// Returns padded rows of the gradients of the keys and values that `heads` read.
#[inline(always)]
fn dkdv(heads: &[HeadGradient<'_>]) -> (Vec<f32>, Vec<f32>) {
    let HeadOperands { pitch, shape, .. } = heads[0].operands;
    let mut dk = vec![0f32; shape.k_tokens * pitch];
    let mut dv = vec![0f32; shape.k_tokens * pitch];
    for (q_range, k_range) in shape.sequences() {
        let (sq, sk) = (q_range.len(), k_range.len());
        for head in heads {
            for (i, query) in q_range.clone().enumerate() {
                let q = HeadOperands::row(&head.operands.q, query, pitch);
                let dout = HeadOperands::row(&head.dout, query, pitch);
                for j in shape.params.visible(i, sq, sk) {
                    let key = k_range.start + j;
                    let (weight, by_score) = head.weight(query, key);
                    add_scaled(&mut dv[key * pitch..][..pitch], weight, dout);
                    add_scaled(&mut dk[key * pitch..][..pitch], by_score, q);
                }
            }
        }
    }
    for value in &mut dk {
        *value *= shape.params.scale;
    }
    (dk, dv)
}
