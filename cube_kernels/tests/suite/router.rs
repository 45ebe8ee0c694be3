//! Router, its gradient and the order of choices, compared with the oracle bit for bit.

use cubecl::prelude::*;
use nvfp4_formats::reference::{self, BatchPart, Router, RouterGradients};
use nvfp4_kernels::moe;

use crate::support::{
    device::{assert_floats, read_f32s, read_u32, upload_bytes},
    inputs::{Generator, Kind, values},
};

/// Numbers of tokens, experts and choices.
fn sizes(client: &Client) -> Vec<(usize, usize, usize)> {
    let mut sizes = vec![(1, 1, 1), (5, 4, 2), (33, 16, 2), (70, 33, 1), (40, 6, 6)];
    if client.name() != "cpu" {
        sizes.extend([
            (17, 512, 4),
            (3, 512, 512),
            (16384, 16, 2),
            (20_001, 256, 8),
        ]);
    }
    sizes
}

fn logits(kind: &str, tokens: usize, experts: usize) -> Vec<f32> {
    let mut x = values(Kind::Normal, tokens * experts, 5);
    match kind {
        // Many equal logits, including zeros of both signs.
        "equal" => x.iter_mut().for_each(|x| *x = (*x * 2.0).round()),
        "wide" => x.iter_mut().for_each(|x| *x *= 40.0),
        _ => {}
    }
    x
}

fn upload_f32(client: &Client, x: &[f32]) -> cubecl::server::Handle {
    upload_bytes(client, bytemuck::cast_slice(x))
}

#[test]
fn routes_equal_the_oracle() {
    let client = client!("routes_equal_the_oracle");
    for (tokens, experts, top_k) in sizes(&client) {
        for (kind, normalize) in [("normal", true), ("equal", true), ("wide", false)] {
            let router = Router {
                experts,
                top_k,
                normalize,
            };
            let what = format!("{kind}, {tokens} tokens, {router:?}");
            let (slots, x) = (tokens * top_k, logits(kind, tokens, experts));
            let on_device = upload_f32(&client, &x);
            let expected = reference::route(&x, router);
            let found = moe::route(&client, &on_device, tokens, router).unwrap();
            let chosen = read_u32(&client, &found.chosen, slots);
            assert_eq!(chosen, expected.chosen, "{what}");
            let counts = read_u32(&client, &found.counts, experts);
            assert_eq!(counts, expected.counts, "{what}");
            let weights = read_f32s(&client, &found.weights, slots + 2);
            assert_floats(&weights[..slots], &expected.weights, &what);
            let losses = [expected.balance, expected.z];
            assert_floats(&weights[slots..], &losses, &format!("{what}: losses"));

            let mut grads = values(Kind::Normal, slots, 6);
            grads.extend([0.75, -0.5]);
            let on_host = RouterGradients {
                weights: &grads[..slots],
                balance: 0.75,
                z: -0.5,
            };
            let grads = upload_f32(&client, &grads);
            let place = (tokens, router);
            let made = moe::route_backward(&client, &on_device, &found, &grads, place).unwrap();
            let made = read_f32s(&client, &made, tokens * experts);
            let expected = reference::route_backward(&x, &expected, on_host, router);
            assert_floats(&made, &expected, &format!("{what}: gradient"));
        }
    }
}

/// A batch of three times as many tokens, whose choices include those of the other tokens.
#[test]
fn losses_of_a_part_equal_the_oracle() {
    let client = client!("losses_of_a_part_equal_the_oracle");
    for (tokens, experts, top_k) in sizes(&client) {
        let router = Router {
            experts,
            top_k,
            normalize: false,
        };
        let part = BatchPart {
            tokens,
            of: 3 * tokens,
        };
        let what = format!("{tokens} tokens, {router:?}");
        let x = logits("normal", tokens, experts);
        let mut random = Generator::new(experts as u32);
        let counts: Vec<u32> = (0..experts)
            .map(|_| random.next_u32() % (3 * tokens as u32 + 1))
            .collect();
        let on_device = upload_f32(&client, &x);
        let counted = upload_bytes(&client, bytemuck::cast_slice(&counts));
        let place = (part, router);
        let found = moe::router_losses(&client, &on_device, &counted, place).unwrap();
        let expected = reference::router_losses(&x, &counts, place);
        assert_floats(&read_f32s(&client, &found, 2), &expected, &what);

        let by = [0.75, -0.5];
        let grads = upload_f32(&client, &by);
        let made = moe::router_losses_backward(&client, &on_device, &counted, &grads, place);
        let made = read_f32s(&client, &made.unwrap(), tokens * experts);
        let expected = reference::router_losses_backward(&x, &counts, by, place);
        assert_floats(&made, &expected, &format!("{what}: gradient"));
        // Counts are an input, and stay unchanged.
        assert_eq!(read_u32(&client, &counted, experts), counts, "{what}");
    }
}

/// The parts of a batch sum to the losses of the whole batch, and their gradients are its rows.
#[test]
fn losses_of_parts_are_those_of_the_batch() {
    let (tokens, experts, top_k) = (96, 8, 2);
    let router = Router {
        experts,
        top_k,
        normalize: true,
    };
    let x = logits("normal", tokens, experts);
    let all = reference::route(&x, router);
    let zeros = vec![0.0; tokens * top_k];
    let grads = RouterGradients {
        weights: &zeros,
        balance: 0.75,
        z: -0.5,
    };
    let gradient = reference::route_backward(&x, &all, grads, router);
    let half = x.len() / 2;
    let place = (
        BatchPart {
            tokens: tokens / 2,
            of: tokens,
        },
        router,
    );
    let (first, second) = x.split_at(half);
    let parts = [first, second].map(|x| reference::router_losses(x, &all.counts, place));
    for (i, whole) in [all.balance, all.z].into_iter().enumerate() {
        let sum = parts[0][i] + parts[1][i];
        assert!((sum - whole).abs() <= 1e-6 * whole.abs(), "{sum} {whole}");
    }
    let by = [0.75, -0.5];
    let made = [first, second]
        .map(|x| reference::router_losses_backward(x, &all.counts, by, place))
        .concat();
    for (found, expected) in made.iter().zip(&gradient) {
        assert!((found - expected).abs() <= 1e-7, "{found} {expected}");
    }
}

#[test]
fn sorted_choices_equal_the_oracle() {
    let client = client!("sorted_choices_equal_the_oracle");
    let mut sizes = vec![(1, 1), (7, 3), (1100, 16)];
    if client.name() != "cpu" {
        sizes.extend([(1500, 300), (32768, 16), (100_001, 512)]);
    }
    for (slots, experts) in sizes {
        let mut random = Generator::new(slots as u32);
        let random: Vec<u32> = (0..slots).map(|_| random.next_u32()).collect();
        let count = experts as u32;
        let kinds = [
            random.iter().map(|x| x % count).collect::<Vec<_>>(),
            // Some are not an expert.
            random.iter().map(|x| x % (count + 3)).collect(),
            vec![count - 1; slots],
            vec![u32::MAX; slots],
        ];
        for (kind, chosen) in kinds.iter().enumerate() {
            let what = format!("{slots} of {experts}, {kind}");
            let on_device = upload_bytes(&client, bytemuck::cast_slice(chosen));
            let found = moe::sort_choices(&client, &on_device, slots, experts).unwrap();
            let expected = reference::sort_choices(chosen, experts);
            for (found, expected) in [
                (&found.choices, &expected.choices),
                (&found.places, &expected.places),
                (&found.offsets, &expected.offsets),
                (&found.counts, &expected.counts),
            ] {
                let found = read_u32(&client, found, expected.len());
                assert_eq!(&found, expected, "{what}");
            }
            let middle = experts / 2;
            let windows = [0..experts, 0..1, middle..experts, middle..middle + 1];
            for held in windows {
                let what = format!("{what}, {held:?}");
                let window = held.clone();
                let found = moe::sort_window(&client, &on_device, slots, experts, window).unwrap();
                let expected = reference::sort_window(chosen, experts, held);
                for (name, found, expected) in [
                    ("choices", &found.choices, &expected.choices),
                    ("places", &found.places, &expected.places),
                    ("offsets", &found.offsets, &expected.offsets),
                    ("earlier", &found.earlier, &expected.earlier),
                    ("counts", &found.counts, &expected.counts),
                ] {
                    let found = read_u32(&client, found, expected.len());
                    assert_eq!(&found, expected, "{what}: {name}");
                }
            }
        }
    }
}

#[test]
fn router_arguments_are_named() {
    let client = client!("router_arguments_are_named");
    let logits = upload_f32(&client, &[0.0; 12]);
    let error = |tokens, experts, top_k| {
        let router = Router {
            experts,
            top_k,
            normalize: true,
        };
        let made = moe::route(&client, &logits, tokens, router);
        made.unwrap_err().to_string()
    };
    assert!(error(3, 0, 1).contains("`experts`"));
    assert!(error(3, 513, 1).contains("`experts`"));
    assert!(error(3, 4, 5).contains("`top_k`"));
    assert!(error(0, 4, 1).contains("`tokens`"));
    assert!(error(4, 4, 1).contains("`logits`"));
    let error = moe::sort_choices(&client, &logits, 13, 4).unwrap_err();
    assert!(error.to_string().contains("`chosen`"), "{error}");
    let error = moe::sort_window(&client, &logits, 13, 4, 0..2).unwrap_err();
    assert!(error.to_string().contains("`chosen`"), "{error}");
    for held in [2..2, 3..5] {
        let error = moe::sort_window(&client, &logits, 12, 4, held).unwrap_err();
        assert!(error.to_string().contains("`held`"), "{error}");
    }
}
