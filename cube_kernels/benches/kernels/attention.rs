//! Attention, forward and backward, at the shapes for which `benches/pytorch_step.py attention` has
//! PyTorch's times: 16384 tokens, a width of 2048, causal. Also rotary positions, and decoding over
//! a cache of keys and values.

use cubecl::{prelude::Client, server::Handle};
use nvfp4_formats::AttentionParams;
use nvfp4_kernels::{
    attention::{
        self, Attention, AttentionGradients, Heads, Rope, Rotation, Sequences, TokenSequences,
        decode::{self, CacheKind, KvCache, NewTokens},
    },
    tensor::FloatKind,
};

use crate::{
    common::device::size,
    harness::{Section, Work},
    inputs::{Inputs, filled, plain_and_transformed, words},
};

/// Returns the number of tokens of all sequences.
fn tokens() -> usize {
    size(16384, 128)
}

/// Times attention of `heads` heads of `head` elements over sequences of `length` tokens.
pub fn causal(section: &mut Section<'_>, length: usize, heads: usize, head: usize) {
    let length = length.min(tokens());
    let lengths = vec![length; tokens() / length];
    let sequences = Sequences::Equal(lengths.len());
    time(section, sequences, &lengths, [heads, head]);
}

/// Times attention over documents that fill rows of 2048 tokens, with offsets in device memory.
pub fn packed(section: &mut Section<'_>, heads: usize, head: usize) {
    const ROW: [usize; 8] = [37, 911, 120, 300, 9, 480, 64, 127];
    let lengths = size(ROW.repeat(tokens() / 2048), vec![37, 9, 82]);
    let mut offsets = vec![0u32];
    for length in &lengths {
        offsets.push(offsets[offsets.len() - 1] + *length as u32);
    }
    let client = section.client();
    let starts = client.create_from_slice(bytemuck::cast_slice(&offsets));
    let sequences = Sequences::Offsets {
        q: starts.clone(),
        k: starts,
        count: lengths.len(),
    };
    time(section, sequences, &lengths, [heads, head]);
}

/// Times forward and backward over sequences of these lengths.
fn time(
    section: &mut Section<'_>,
    sequences: Sequences,
    lengths: &[usize],
    [heads, head]: [usize; 2],
) {
    let client = section.client();
    let [q, k, v, dout] = [0; 4].map(|_| heads_of(&client, heads, head));
    let attention = Attention {
        q,
        k,
        v,
        sequences,
        params: AttentionParams::causal(head),
    };
    // Half of the scores, two operations per element in both GEMMs.
    let scores: usize = lengths.iter().map(|length| length * length).sum();
    let forward = 2.0 * (scores * heads * head) as f64;
    section.time_work("attention", Work::Operations(forward), |_| {
        attention::forward(&client, &attention).unwrap();
    });
    let with_amax = "attention, with amax of its output";
    section.time_work(with_amax, Work::Operations(forward), |_| {
        let request = plain_and_transformed();
        attention::forward_with_amaxes(&client, &attention, &request).unwrap();
    });
    let saved = attention::forward(&client, &attention).unwrap();
    let empty = || Heads::empty(&client, [tokens(), heads, head], FloatKind::Bf16);
    let gradients = AttentionGradients {
        dq: empty(),
        dk: empty(),
        dv: empty(),
    };
    let backward = "attention, backward";
    section.time_work(backward, Work::Operations(2.5 * forward), |_| {
        attention::backward(&client, &attention, &saved, &dout, None, &gradients).unwrap();
    });
}

fn heads_of(client: &Client, heads: usize, head: usize) -> Heads {
    heads_of_tokens(client, [tokens(), heads, head])
}

fn heads_of_tokens(client: &Client, shape: [usize; 3]) -> Heads {
    let [tokens, heads, head] = shape;
    let matrix = Inputs::bf16(client, tokens, heads * head);
    Heads::contiguous(matrix.get(0).handle.clone(), shape, FloatKind::Bf16)
}

/// Returns the tables of `positions` positions; their angles do not matter.
fn tables(client: &Client, positions: usize, head: usize) -> Rope {
    let table = |value: f32| {
        let values = std::iter::repeat_n(value.to_bits(), positions * head / 2);
        words(client, values)
    };
    Rope {
        cos: table(0.8),
        sin: table(0.6),
        positions,
    }
}

/// Times the rotation of queries or keys, in place as a layer does it.
pub fn rotary(section: &mut Section<'_>, heads: usize, head: usize) {
    let client = section.client();
    let length = size(2048, 64);
    let x = heads_of(&client, heads, head);
    let rope = tables(&client, length, head);
    let bytes = 2.0 * (tokens() * heads * head * 2) as f64;
    for (name, rotation) in [
        ("rotary positions", Rotation::Forward),
        ("rotary positions, gradients", Rotation::Inverse),
    ] {
        section.time(name, bytes, |_| {
            let sequences = TokenSequences::Equal(tokens() / length);
            attention::rope(&client, &x, sequences, &rope, rotation, &x).unwrap();
        });
    }
}

/// Heads of queries, heads of keys and values, and elements per head: Llama-3 8B's.
const DECODED: [usize; 3] = [32, 8, 128];

/// Times a decoding step of `batch` sequences of `length` tokens, and the first tokens of a prompt.
/// Bytes are those of the keys and values that are read; of a prompt, those of its tokens, read and
/// written.
pub fn decoding(section: &mut Section<'_>, batch: usize, length: usize) {
    let client = section.client();
    let [batch, length] = size([batch, length], [2, 40]);
    let prompt = size(256, 8);
    let [heads, kv_heads, head] = DECODED;
    let capacity = length + prompt;
    let rope = tables(&client, capacity, head);
    let numbers = |value: usize| words(&client, std::iter::repeat_n(value as u32, batch));
    let (starts, one, many) = (numbers(length), numbers(1), numbers(prompt));
    let step = |time: usize, counts| {
        let of = |heads| heads_of_tokens(&client, [batch * time, heads, head]);
        let (q, k, v) = (of(heads), of(kv_heads), of(kv_heads));
        NewTokens {
            q,
            k,
            v,
            starts: &starts,
            counts,
            rope: Some(&rope),
        }
    };
    let elements = batch * capacity * kv_heads * head;
    for (name, kind, element) in [("bf16", CacheKind::Float, 2), ("E4M3", CacheKind::E4m3, 1)] {
        // No NaN in either type.
        let memory = || -> Handle { filled(&client, elements * element, 0x8383_8383, 0x3030_3030) };
        let cache = KvCache {
            k: memory(),
            v: memory(),
            batch,
            capacity,
            kv_heads,
            head,
            kind,
            scales: [1.0; 2],
        };
        let new = step(1, &one);
        let params = AttentionParams::causal(head);
        let read = 2 * batch * length * kv_heads * head * element;
        section
            .captured()
            .time(&format!("decode, {name} cache"), read as f64, |_| {
                decode::decode(&client, &new, &cache, &params).unwrap();
            });
        let new = step(prompt, &many);
        let queries = Heads::empty(&client, new.q.shape(), FloatKind::Bf16);
        let moved = batch * prompt * head * (4 * heads + 2 * kv_heads * (2 + element));
        section.time(&format!("append, {name} cache"), moved as f64, |_| {
            decode::append(&client, &new, &cache, &queries).unwrap();
        });
    }
}
