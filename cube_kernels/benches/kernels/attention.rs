//! Attention, forward and backward, at the shapes at which `benches/pytorch_step.py attention` has
//! PyTorch's times: 16384 tokens, a width of 2048, causal.

use cubecl::prelude::Client;
use nvfp4_kernels::{
    attention::{self, Attention, AttentionGradients, AttentionParams, Heads, Sequences},
    tensor::FloatKind,
};

use crate::{
    harness::{Section, Work},
    inputs::Inputs,
};

/// Tokens of all sequences.
const TOKENS: usize = 16384;

/// Attention of `heads` heads of `head` elements over sequences of `length` tokens.
pub fn causal(section: &mut Section<'_>, length: usize, heads: usize, head: usize) {
    let client = section.client();
    let [q, k, v, dout] = [0; 4].map(|_| heads_of(&client, heads, head));
    let attention = Attention {
        q,
        k,
        v,
        sequences: Sequences::Equal(TOKENS / length),
        params: AttentionParams::causal(head),
    };
    // Half of the scores, two operations for each element of both GEMMs.
    let forward = 2.0 * (TOKENS * length * heads * head) as f64;
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
