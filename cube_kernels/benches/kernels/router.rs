//! The router of a mixture of experts: choice, its gradient, losses, and sorting by expert.

use nvfp4_formats::reference::{BatchPart, Router};
use nvfp4_kernels::{moe, tensor::FloatKind};

use crate::{
    harness::Section,
    inputs::{Inputs, words},
};

/// Times the routing of `tokens` tokens to `top_k` of `experts` experts. Bytes are those of logits,
/// weights and choices, and of their gradients.
pub fn routing(section: &mut Section<'_>, [tokens, experts, top_k]: [usize; 3]) {
    let client = section.client();
    let router = Router {
        experts,
        top_k,
        normalize: true,
    };
    let slots = tokens * top_k;
    let logits = Inputs::new(&client, tokens, experts, FloatKind::F32);
    let (read, choice) = (4.0 * logits.elements(), 4.0 * slots as f64);
    section.time("route", read + 2.0 * choice, |i| {
        moe::route(&client, &logits.get(i).handle, tokens, router).unwrap();
    });
    let routed = moe::route(&client, &logits.get(0).handle, tokens, router).unwrap();
    let ones = |len: usize| words(&client, std::iter::repeat_n(1f32.to_bits(), len));
    let grads = ones(slots + 2);
    section.time("route, backward", 2.0 * read + 3.0 * choice, |i| {
        let logits = &logits.get(i).handle;
        moe::route_backward(&client, logits, &routed, &grads, (tokens, router)).unwrap();
    });
    // Of a rank that has all tokens: its part of the batch, and the choices of all ranks.
    let part = BatchPart { tokens, of: tokens };
    section.time("router losses", read, |i| {
        let logits = &logits.get(i).handle;
        moe::router_losses(&client, logits, &routed.counts, (part, router)).unwrap();
    });
    let grads = ones(2);
    section.time("router losses, backward", 2.0 * read, |i| {
        let (logits, place) = (&logits.get(i).handle, (part, router));
        moe::router_losses_backward(&client, logits, &routed.counts, &grads, place).unwrap();
    });
    section.time("choices sorted by expert", 3.0 * choice, |_| {
        moe::sort_choices(&client, &routed.chosen, slots, experts).unwrap();
    });
    let held = 0..experts.div_ceil(8);
    section.time(
        "choices of an eighth of the experts sorted",
        3.0 * choice,
        |_| {
            moe::sort_window(&client, &routed.chosen, slots, experts, held.clone()).unwrap();
        },
    );
}
