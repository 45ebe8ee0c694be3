//! Attention, forward and backward, compared with the oracle and with `f64` within error bounds.
//! Runs on CubeCL's CPU runtime, or on a GPU, where bf16 and f16 use matrix instructions.

mod amax;
mod case;
mod decode;
mod decode_bounds;
pub mod decode_launches;
mod errors;
mod packed;
mod rotary;
mod special;

use half::{bf16, f16};

use self::case::{Case, Operand, check};
use cubecl::prelude::*;

/// True if larger problems are fast.
fn is_gpu(client: &Client) -> bool {
    client.name() == "cuda"
}

fn shapes<T: Operand>(client: &Client) {
    let shapes: &[(usize, usize)] = match is_gpu(client) {
        true => &[
            (1, 1),
            (239, 1),
            (799, 3),
            (113, 203),
            (384, 256),
            (1023, 1024),
        ],
        false => &[(1, 1), (23, 1), (31, 3), (13, 29), (24, 16)],
    };
    for &(sq, sk) in shapes {
        check::<T>(client, &Case::new(64, sq, sk));
        check::<T>(client, &Case::new(64, sq, sk).causal());
    }
}

/// Every number of lanes, whole and with padding; on a GPU all head sizes of common models.
fn head_sizes<T: Operand>(client: &Client) {
    let sizes: &[usize] = match is_gpu(client) {
        true => &[1, 7, 20, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256],
        false => &[7, 48, 80, 256],
    };
    for &head in sizes {
        let (sq, sk) = if is_gpu(client) { (137, 145) } else { (7, 19) };
        check::<T>(client, &Case::new(head, sq, sk).causal());
    }
}

fn groups<T: Operand>(client: &Client) {
    for (heads, kv_heads) in [(1, 1), (4, 1), (8, 2), (8, 1)] {
        let (sq, sk) = if is_gpu(client) { (150, 150) } else { (9, 9) };
        let case = Case {
            heads,
            kv_heads,
            ..Case::new(64, sq, sk).causal()
        };
        check::<T>(client, &case);
    }
}

/// All masks and score transformations, with more and with fewer queries than keys.
fn masks<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 11 } else { 1 };
    for (sq, sk) in [(21, 13), (13, 21), (18, 18)] {
        for window in [None, Some(1), Some(5), Some(1000)] {
            for (softcap, quiet_softmax) in [(None, true), (Some(0.7), false), (Some(2.0), true)] {
                let mut case = Case::new(64, sq * scale, sk * scale).causal();
                case.params.window = window.map(|window| window * scale);
                case.params.softcap = softcap;
                case.params.quiet_softmax = quiet_softmax;
                check::<T>(client, &case);
                if window.is_none() {
                    case.params.causal = false;
                    check::<T>(client, &case);
                }
            }
        }
    }
}

/// Scores of ten thousand, with either sign.
fn large_scores<T: Operand>(client: &Client) {
    let length = if is_gpu(client) { 130 } else { 14 };
    for quiet_softmax in [false, true] {
        let mut case = Case::new(64, length, length).causal();
        case.magnitude = 100.0;
        case.params.scale = 1.0 / 8.0;
        case.params.quiet_softmax = quiet_softmax;
        check::<T>(client, &case);
    }
}

/// Scales for which the largest `q · k` does not have the largest score.
fn scales<T: Operand>(client: &Client) {
    let length = if is_gpu(client) { 150 } else { 9 };
    for scale in [-0.125, 0.0] {
        for offsets in [false, true] {
            let mut case = Case::new(64, length, length).causal();
            (case.offsets, case.params.scale) = (offsets, scale);
            check::<T>(client, &case);
        }
    }
}

element_tests! {
    shapes: shapes_f32, shapes_bf16, shapes_f16;
    head_sizes: head_sizes_f32, head_sizes_bf16, head_sizes_f16;
    groups: groups_f32, groups_bf16, groups_f16;
    masks: masks_f32, masks_bf16, masks_f16;
    large_scores: large_scores_f32, large_scores_bf16, large_scores_f16;
    scales: scales_f32, scales_bf16, scales_f16;
}

/// Lengths near every tile size, on a GPU.
#[test]
fn lengths() {
    let test = "attention::lengths";
    let client = on_gpu!(test, "minutes on the CPU");
    let powers = (0..=12).flat_map(|power| [(1usize << power) - 1, 1 << power, (1 << power) + 1]);
    let others = [72, 80, 96, 112, 144, 160, 176, 192, 1000, 3001];
    for length in powers.chain(others).filter(|&length| length > 0) {
        let mut case = Case::new(if length % 2 == 0 { 128 } else { 64 }, length, length);
        case.heads = if length > 1025 { 1 } else { 2 };
        case.kv_heads = 1;
        check::<bf16>(&client, &case.clone().causal());
        check::<f32>(&client, &case);
    }
}
