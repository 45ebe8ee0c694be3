//! Attention, forward and backward, at the shapes for which `benches/pytorch_step.py attention` has
//! PyTorch's times: 16384 tokens, a width of 2048, causal.

use cubecl::prelude::Client;
use nvfp4_formats::AttentionParams;
use nvfp4_kernels::{
    attention::{self, Attention, AttentionGradients, Heads, Sequences},
    tensor::FloatKind,
};

use crate::{
    harness::{Section, Work},
    inputs::Inputs,
};

/// Tokens of all sequences.
const TOKENS: usize = 16384;

/// Times attention of `heads` heads of `head` elements over sequences of `length` tokens.
pub fn causal(section: &mut Section<'_>, length: usize, heads: usize, head: usize) {
    let lengths = vec![length; TOKENS / length];
    let sequences = Sequences::Equal(lengths.len());
    time(section, sequences, &lengths, [heads, head]);
}

/// Times attention over documents that fill rows of 2048 tokens, with offsets in device memory.
pub fn packed(section: &mut Section<'_>, heads: usize, head: usize) {
    const ROW: [usize; 8] = [37, 911, 120, 300, 9, 480, 64, 127];
    let lengths = ROW.repeat(TOKENS / 2048);
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
    let saved = attention::forward(&client, &attention).unwrap();
    let empty = || Heads::empty(&client, [TOKENS, heads, head], FloatKind::Bf16);
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
    let matrix = Inputs::bf16(client, TOKENS, heads * head);
    let handle = matrix.get(0).handle.clone();
    Heads::contiguous(handle, [TOKENS, heads, head], FloatKind::Bf16)
}
