//! Attention in blocks of queries and keys, for CPUs with vector units.
//!
//! The arithmetic is that of the oracle ([`attention`](nvfp4_formats::reference::attention)) in
//! `f32`; only the order of sums differs:
//!
//! - The dot product of two heads is summed from its first to its last element by fused
//!   multiply-adds, and so are values over keys, and gradients over keys and over queries.
//! - A row is processed in blocks of [`KEYS`] keys, counted from the first key of its sequence. The
//!   running maximum is updated once per block, and weight `j` of a block is added to partial sum
//!   `j % 16` of the softmax denominator.
//! - Gradients of keys and values are summed over queries for each query head, and then over the
//!   heads that read them.
//!
//! The order does not depend on the number of threads, the instruction set of the CPU, or other
//! sequences and heads. Masked scores are excluded.

mod product;
#[cfg(test)]
mod tests;

use std::ops::Range;

use nvfp4_formats::AttentionParams;
use nvfp4_formats::reference::Element;
use nvfp4_formats::reference::attention::{
    AttentionForward, AttentionShape, HostHeads, exp_or_nan, ln, tanh,
};
use nvfp4_formats::with_fma;
use rayon::prelude::*;

use product::{COLUMNS, Left, Rows};

/// Queries per block.
const QUERIES: usize = 64;
/// Keys per block.
const KEYS: usize = 64;

/// Returns output and log-sum-exp, in the layout of
/// [`attention_forward`](nvfp4_formats::reference::attention::attention_forward).
pub fn forward<T: Element>(
    operands: [HostHeads<'_, T>; 3],
    shape: &AttentionShape<'_>,
) -> AttentionForward<T> {
    let heads = PerHead::new(shape);
    let found: Vec<(Vec<f32>, Vec<f32>)> = heads.map(shape.heads, |sequence, h| {
        forward_head(sequence, operands, h, shape)
    });
    let mut lse = vec![f32::NEG_INFINITY; shape.heads * shape.q_tokens];
    for (index, (_, rows)) in found.iter().enumerate() {
        let (sequence, h) = heads.of(index, shape.heads);
        let first = h * shape.q_tokens + sequence.queries.start;
        lse[first..][..rows.len()].copy_from_slice(rows);
    }
    let out: Vec<Vec<f32>> = found.into_iter().map(|(out, _)| out).collect();
    let width = shape.heads * shape.head;
    let mut rows = vec![T::from_f32(0.0); shape.q_tokens * width];
    let to = Columns {
        row_stride: width,
        offset: 0,
    };
    heads.scatter(&out, shape.q_starts, shape.heads, to, &mut rows);
    AttentionForward { out: rows, lse }
}

/// Gradients of each head of each sequence.
pub struct Gradients<'a> {
    heads: PerHead<'a>,
    dq: Vec<Vec<f32>>,
    dk: Vec<Vec<f32>>,
    dv: Vec<Vec<f32>>,
}

/// Columns of the heads of a tensor in a matrix of tokens.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// Row stride in elements.
    pub row_stride: usize,
    /// Offset of the first head in a row, in elements.
    pub offset: usize,
}

impl Gradients<'_> {
    /// Writes the gradients of the queries to their columns. Rows of `out` for tokens of no
    /// sequence are unchanged.
    pub fn write_queries<T: Element>(&self, to: Columns, out: &mut [T]) {
        let shape = self.heads.shape;
        (self.heads).scatter(&self.dq, shape.q_starts, shape.heads, to, out);
    }

    /// Writes the gradients of the keys; see [`write_queries`](Self::write_queries).
    pub fn write_keys<T: Element>(&self, to: Columns, out: &mut [T]) {
        let shape = self.heads.shape;
        (self.heads).scatter(&self.dk, shape.k_starts, shape.kv_heads, to, out);
    }

    /// Writes the gradients of the values; see [`write_queries`](Self::write_queries).
    pub fn write_values<T: Element>(&self, to: Columns, out: &mut [T]) {
        let shape = self.heads.shape;
        (self.heads).scatter(&self.dv, shape.k_starts, shape.kv_heads, to, out);
    }
}

/// Computes the gradients of [`forward`], given its results `saved` (output and log-sum-exp) and
/// the gradient of the output.
pub fn backward<'a, T: Element>(
    operands: [HostHeads<'_, T>; 3],
    saved: (HostHeads<'_, T>, &[f32]),
    dout: HostHeads<'_, T>,
    shape: &'a AttentionShape<'a>,
) -> Gradients<'a> {
    let heads = PerHead::new(shape);
    let group = shape.group();
    let found: Vec<HeadGradients> = heads.map(shape.heads, |sequence, h| {
        backward_head(sequence, operands, saved, dout, h, shape)
    });
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for (index, found) in found.into_iter().enumerate() {
        dq.push(found.dq);
        if index % group == 0 {
            dk.push(found.dk);
            dv.push(found.dv);
            continue;
        }
        for (sums, more) in [(dk.last_mut(), found.dk), (dv.last_mut(), found.dv)] {
            let sums: &mut Vec<f32> = sums.expect("the first head of the group");
            sums.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        }
    }
    Gradients { heads, dq, dk, dv }
}

/// Heads of all sequences, in sequence-major order.
struct PerHead<'a> {
    shape: &'a AttentionShape<'a>,
    sequences: Vec<Sequence>,
}

impl<'a> PerHead<'a> {
    fn new(shape: &'a AttentionShape<'a>) -> Self {
        let range = |pair: &[u32]| pair[0] as usize..pair[1] as usize;
        let pairs = shape.q_starts.windows(2).zip(shape.k_starts.windows(2));
        let sequences = pairs.map(|(queries, keys)| Sequence {
            queries: range(queries),
            keys: range(keys),
            pitch: shape.head.next_multiple_of(COLUMNS),
            params: shape.params,
        });
        Self {
            shape,
            sequences: sequences.collect(),
        }
    }

    /// Returns the sequence and the head with the global index `index`, given `heads` heads per
    /// sequence.
    fn of(&self, index: usize, heads: usize) -> (&Sequence, usize) {
        (&self.sequences[index / heads], index % heads)
    }

    /// Computes each head in parallel.
    fn map<R: Send>(&self, heads: usize, compute: impl Fn(&Sequence, usize) -> R + Sync) -> Vec<R> {
        (0..self.sequences.len() * heads)
            .into_par_iter()
            .map(|index| {
                let (sequence, h) = self.of(index, heads);
                compute(sequence, h)
            })
            .collect()
    }

    /// Rounds the rows of each head and writes them to their tokens. Rows of no sequence are
    /// unchanged.
    fn scatter<T: Element>(
        &self,
        found: &[Vec<f32>],
        starts: &[u32],
        heads: usize,
        to: Columns,
        out: &mut [T],
    ) {
        let head = self.shape.head;
        let pitch = head.next_multiple_of(COLUMNS);
        out.par_chunks_mut(to.row_stride.max(1))
            .enumerate()
            .for_each(|(token, row)| {
                // The last sequence that begins at or before the token; earlier ones that begin
                // there are empty.
                let sequence = starts.partition_point(|start| *start as usize <= token);
                if sequence == 0 || sequence == starts.len() {
                    return;
                }
                let (sequence, first) = (sequence - 1, starts[sequence - 1] as usize);
                let rows = row[to.offset..].chunks_exact_mut(head).take(heads);
                for (h, row) in rows.enumerate() {
                    let found = &found[sequence * heads + h][(token - first) * pitch..];
                    for (out, value) in row.iter_mut().zip(found) {
                        *out = T::from_f32(*value);
                    }
                }
            });
    }
}

/// Tokens of one sequence.
struct Sequence {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Head size in elements, padded with zeros to whole tiles.
    pitch: usize,
    params: AttentionParams,
}

/// Operands of the backward of one head, in padded rows.
struct HeadOperands<'a> {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    lse: &'a [f32],
}

/// Gradients of one query head, in padded rows.
struct HeadGradients {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Block of queries and block of keys, relative to the beginning of the sequence.
#[derive(Clone)]
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

with_fma!(
    fn forward_head[T: Element](
        sequence: &Sequence,
        operands: [HostHeads<'_, T>; 3],
        h: usize,
        shape: &AttentionShape<'_>,
    ) -> (Vec<f32>, Vec<f32>) = forward_head_body
);

/// Computes the padded output rows and log-sum-exps of one query head.
#[inline(always)]
fn forward_head_body<T: Element>(
    sequence: &Sequence,
    [q, k, v]: [HostHeads<'_, T>; 3],
    h: usize,
    shape: &AttentionShape<'_>,
) -> (Vec<f32>, Vec<f32>) {
    let (head, kv) = (shape.head, h / shape.group());
    let queries = sequence.rows(q, sequence.queries.clone(), h, head);
    let keys = sequence.rows(k, sequence.keys.clone(), kv, head);
    let values = sequence.rows(v, sequence.keys.clone(), kv, head);
    sequence.forward(&queries, &sequence.columns(&keys), &values)
}

with_fma!(
    fn backward_head[T: Element](
        sequence: &Sequence,
        operands: [HostHeads<'_, T>; 3],
        saved: (HostHeads<'_, T>, &[f32]),
        dout: HostHeads<'_, T>,
        h: usize,
        shape: &AttentionShape<'_>,
    ) -> HeadGradients = backward_head_body
);

/// Computes the gradients of one query head.
#[inline(always)]
fn backward_head_body<T: Element>(
    sequence: &Sequence,
    [q, k, v]: [HostHeads<'_, T>; 3],
    (out, lse): (HostHeads<'_, T>, &[f32]),
    dout: HostHeads<'_, T>,
    h: usize,
    shape: &AttentionShape<'_>,
) -> HeadGradients {
    let (head, kv) = (shape.head, h / shape.group());
    let (queries, keys) = (sequence.queries.clone(), sequence.keys.clone());
    let first = h * shape.q_tokens + queries.start;
    let operands = HeadOperands {
        q: sequence.rows(q, queries.clone(), h, head),
        k: sequence.rows(k, keys.clone(), kv, head),
        v: sequence.rows(v, keys, kv, head),
        dout: sequence.rows(dout, queries.clone(), h, head),
        lse: &lse[first..][..queries.len()],
    };
    let out = sequence.rows(out, queries, h, head);
    let delta = sequence.delta(&out, &operands.dout);
    sequence.backward(&operands, &delta)
}

impl Sequence {
    /// Copies head `index` of some tokens to padded rows.
    #[inline(always)]
    fn rows<T: Element>(
        &self,
        x: HostHeads<'_, T>,
        tokens: Range<usize>,
        index: usize,
        head: usize,
    ) -> Vec<f32> {
        let mut rows = vec![0f32; tokens.len() * self.pitch];
        for (row, token) in rows.chunks_exact_mut(self.pitch).zip(tokens) {
            for (out, value) in row.iter_mut().zip(x.head(token, index, head)) {
                *out = value.to_f32();
            }
        }
        rows
    }

    /// Transposes rows of keys: `[pitch, KEYS]` for each block of keys, zero-padded.
    #[inline(always)]
    fn columns(&self, rows: &[f32]) -> Vec<f32> {
        let pitch = self.pitch;
        let blocks = self.keys.len().div_ceil(KEYS);
        let mut columns = vec![0f32; blocks * pitch * KEYS];
        let of_blocks = columns.chunks_exact_mut(pitch * KEYS);
        for (columns, rows) in of_blocks.zip(rows.chunks(KEYS * pitch)) {
            for (j, row) in rows.chunks_exact(pitch).enumerate() {
                for (d, value) in row.iter().enumerate() {
                    columns[d * KEYS + j] = *value;
                }
            }
        }
        columns
    }

    /// Keys that query `i` sees.
    #[inline(always)]
    fn visible(&self, i: usize) -> Range<usize> {
        (self.params).visible(i, self.queries.len(), self.keys.len())
    }

    /// Queries that see key `j`.
    #[inline(always)]
    fn seeing(&self, j: usize) -> Range<usize> {
        let (sq, sk) = (self.queries.len(), self.keys.len());
        if !self.params.causal {
            return 0..sq;
        }
        let end = match self.params.window {
            Some(window) => (j + sq).saturating_add(window).saturating_sub(sk).min(sq),
            None => sq,
        };
        (j + sq).saturating_sub(sk).min(end)..end
    }

    /// Blocks of keys that a block of queries sees.
    #[inline(always)]
    fn blocks(&self, queries: Range<usize>) -> impl Iterator<Item = Block> + use<> {
        let keys = self.keys.len();
        let seen = self.visible(queries.start).start..self.visible(queries.end - 1).end;
        let blocks = match seen.is_empty() {
            true => 0..0,
            false => seen.start / KEYS..seen.end.div_ceil(KEYS),
        };
        blocks.map(move |block| Block {
            queries: queries.clone(),
            keys: block * KEYS..((block + 1) * KEYS).min(keys),
        })
    }

    /// Keys of a block that its query `r` sees, relative to the beginning of the block.
    #[inline(always)]
    fn seen(&self, block: &Block, r: usize) -> Range<usize> {
        within(self.visible(block.queries.start + r), &block.keys)
    }

    /// Computes the dot products of the queries of a block (`rows` of a head) with its keys, given
    /// the `columns` of all keys.
    #[inline(always)]
    fn products(&self, out: &mut [f32], rows: &[f32], columns: &[f32], block: &Block) {
        let pitch = self.pitch;
        let a = Left {
            values: &rows[block.queries.start * pitch..],
            row_stride: pitch,
            step: 1,
        };
        let b = Rows {
            values: &columns[block.keys.start * pitch..][..KEYS * pitch],
            pitch: KEYS,
        };
        let needed = |r| self.seen(block, r);
        product::set(out, KEYS, block.queries.len(), a, b, pitch, needed);
    }

    /// Computes padded output rows and log-sum-exps.
    #[inline(always)]
    fn forward(&self, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (pitch, count) = (self.pitch, self.queries.len());
        let mut out = vec![0f32; count * pitch];
        let mut lse = vec![f32::NEG_INFINITY; count];
        let mut weights = [0f32; QUERIES * KEYS];
        let start = match self.params.quiet_softmax {
            true => (0.0, 1.0),
            false => (f32::MIN, 0.0),
        };
        for first in (0..count).step_by(QUERIES) {
            let queries = first..(first + QUERIES).min(count);
            let out = &mut out[first * pitch..queries.end * pitch];
            // Running maximum of each row, and sum of its weights relative to it.
            let mut state = [start; QUERIES];
            for block in self.blocks(queries.clone()) {
                self.products(&mut weights, q, k, &block);
                let rows = out.chunks_exact_mut(pitch).zip(&mut state);
                for (r, ((out, state), weights)) in
                    rows.zip(weights.chunks_exact_mut(KEYS)).enumerate()
                {
                    self.weigh(weights, self.seen(&block, r), state, out);
                }
                let a = Left {
                    values: &weights,
                    row_stride: KEYS,
                    step: 1,
                };
                let b = Rows {
                    values: &v[block.keys.start * pitch..block.keys.end * pitch],
                    pitch,
                };
                let terms = |r| self.seen(&block, r);
                product::add(out, pitch, queries.len(), a, b, terms);
            }
            let rows = out.chunks_exact_mut(pitch).zip(&mut lse[queries]);
            for ((out, lse), (highest, sum)) in rows.zip(&state) {
                if *sum == 0.0 {
                    out.fill(0.0);
                } else {
                    let inverse = 1.0 / sum;
                    out.iter_mut().for_each(|value| *value *= inverse);
                    *lse = highest + ln(*sum);
                }
            }
        }
        (out, lse)
    }

    /// Converts the dot products of one row of a block to weights relative to the running maximum.
    /// Rescales `out` if the maximum rises.
    #[inline(always)]
    fn weigh(
        &self,
        row: &mut [f32],
        seen: Range<usize>,
        (highest, sum): &mut (f32, f32),
        out: &mut [f32],
    ) {
        if seen.is_empty() {
            return;
        }
        // Keys that are not seen get weight 0.
        let tiles = whole_tiles(seen.clone());
        for chunk in row[tiles.clone()].as_chunks_mut::<COLUMNS>().0 {
            for s in chunk {
                *s = score(*s, &self.params).0;
            }
        }
        row[tiles.start..seen.start].fill(f32::NEG_INFINITY);
        row[seen.end..tiles.end].fill(f32::NEG_INFINITY);
        let (chunks, _) = row[tiles].as_chunks_mut::<COLUMNS>();
        let mut maxima = [*highest; COLUMNS];
        for chunk in chunks.iter() {
            for (max, s) in maxima.iter_mut().zip(chunk) {
                *max = if s > max { *s } else { *max };
            }
        }
        let max = maxima
            .iter()
            .fold(*highest, |a, b| if *b > a { *b } else { a });
        if max > *highest {
            let factor = exp_or_nan(*highest - max);
            *sum *= factor;
            out.iter_mut().for_each(|value| *value *= factor);
            *highest = max;
        }
        let mut sums = [0f32; COLUMNS];
        for chunk in chunks {
            for (sum, s) in sums.iter_mut().zip(chunk) {
                *s = exp_or_nan(*s - max);
                *sum += *s;
            }
        }
        *sum += tree(sums);
    }

    /// Computes the sum of `dout · out` of each padded row. The order of summation is that of the
    /// dot products, so that the scores of a query with one key get a gradient of exactly zero.
    #[inline(always)]
    fn delta(&self, out: &[f32], dout: &[f32]) -> Vec<f32> {
        let rows = out.chunks_exact(self.pitch);
        let rows = rows.zip(dout.chunks_exact(self.pitch));
        let rows = rows.take(self.queries.len());
        rows.map(|(out, dout)| {
            let terms = out.iter().zip(dout);
            terms.fold(0f32, |sum, (out, dout)| dout.mul_add(*out, sum))
        })
        .collect()
    }

    /// Computes the gradients of one query head, and those of keys and values from it, in padded
    /// rows.
    #[inline(always)]
    fn backward(&self, operands: &HeadOperands<'_>, delta: &[f32]) -> HeadGradients {
        let HeadOperands { q, k, v, dout, lse } = operands;
        let (pitch, count) = (self.pitch, self.queries.len());
        let (k_columns, v_columns) = (self.columns(k), self.columns(v));
        let mut found = HeadGradients {
            dq: vec![0f32; q.len()],
            dk: vec![0f32; k.len()],
            dv: vec![0f32; v.len()],
        };
        let mut weights = [0f32; QUERIES * KEYS];
        let mut by_score = [0f32; QUERIES * KEYS];
        for first in (0..count).step_by(QUERIES) {
            let queries = first..(first + QUERIES).min(count);
            for block in self.blocks(queries.clone()) {
                self.products(&mut weights, q, &k_columns, &block);
                self.products(&mut by_score, dout, &v_columns, &block);
                for (r, query) in queries.clone().enumerate() {
                    let seen = whole_tiles(self.seen(&block, r));
                    let row = r * KEYS + seen.start..r * KEYS + seen.end;
                    let (weights, by_score) = (&mut weights[row.clone()], &mut by_score[row]);
                    self.weigh_backward(weights, by_score, lse[query], delta[query]);
                }
                let rows = |x, tokens: &Range<usize>| Rows {
                    values: part(x, tokens, pitch),
                    pitch,
                };
                let by_query = |values| Left {
                    values,
                    row_stride: KEYS,
                    step: 1,
                };
                let by_key = |values| Left {
                    values,
                    row_stride: 1,
                    step: KEYS,
                };
                let seen = |r| self.seen(&block, r);
                let seeing = |j| within(self.seeing(block.keys.start + j), &block.queries);
                let (queries, keys) = (&block.queries, &block.keys);
                let (sq, sk) = (queries.len(), keys.len());
                let dq = part_mut(&mut found.dq, queries, pitch);
                product::add(dq, pitch, sq, by_query(&by_score), rows(k, keys), seen);
                let dv = part_mut(&mut found.dv, keys, pitch);
                product::add(dv, pitch, sk, by_key(&weights), rows(dout, queries), seeing);
                let dk = part_mut(&mut found.dk, keys, pitch);
                product::add(dk, pitch, sk, by_key(&by_score), rows(q, queries), seeing);
            }
        }
        for value in found.dq.iter_mut().chain(&mut found.dk) {
            *value *= self.params.scale;
        }
        found
    }

    /// Converts the dot products of one query with keys to weights, and those of its output
    /// gradient with values to gradients of scores.
    #[inline(always)]
    fn weigh_backward(&self, weights: &mut [f32], by_score: &mut [f32], lse: f32, delta: f32) {
        // A row that sees no key, or only scores of `-inf`, has no weights.
        let seen = lse != f32::NEG_INFINITY;
        let weights = weights.as_chunks_mut::<COLUMNS>().0.iter_mut();
        for (weights, by_score) in weights.zip(by_score.as_chunks_mut::<COLUMNS>().0) {
            for (weight, by_score) in weights.iter_mut().zip(by_score) {
                let (s, slope) = score(*weight, &self.params);
                let exponential = exp_or_nan(s - lse);
                *weight = if seen { exponential } else { 0.0 };
                let by_weight = *weight * (*by_score - delta);
                *by_score = match self.params.softcap {
                    Some(_) => by_weight * slope,
                    None => by_weight,
                };
            }
        }
    }
}

/// Intersects `range` with `block`, relative to the beginning of `block`.
#[inline(always)]
fn within(range: Range<usize>, block: &Range<usize>) -> Range<usize> {
    let end = range.end.clamp(block.start, block.end);
    let start = range.start.clamp(block.start, end);
    start - block.start..end - block.start
}

/// Extends `columns` to whole tiles.
#[inline(always)]
fn whole_tiles(columns: Range<usize>) -> Range<usize> {
    columns.start / COLUMNS * COLUMNS..columns.end.next_multiple_of(COLUMNS)
}

/// Returns the rows of some tokens.
#[inline(always)]
fn part<'a>(x: &'a [f32], tokens: &Range<usize>, pitch: usize) -> &'a [f32] {
    &x[tokens.start * pitch..tokens.end * pitch]
}

/// Returns the rows of some tokens, mutably.
#[inline(always)]
fn part_mut<'a>(x: &'a mut [f32], tokens: &Range<usize>, pitch: usize) -> &'a mut [f32] {
    &mut x[tokens.start * pitch..tokens.end * pitch]
}

/// Returns a score, and the factor of its gradient from the soft cap.
#[inline(always)]
fn score(product: f32, params: &AttentionParams) -> (f32, f32) {
    let scaled = product * params.scale;
    match params.softcap {
        None => (scaled, 1.0),
        Some(cap) => {
            let t = tanh(scaled * (1.0 / cap));
            (cap * t, (-t).mul_add(t, 1.0))
        }
    }
}

/// Sums by pairwise reduction of neighbors.
#[inline(always)]
fn tree(mut sums: [f32; COLUMNS]) -> f32 {
    let mut len = COLUMNS;
    while len > 1 {
        len /= 2;
        for i in 0..len {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}
