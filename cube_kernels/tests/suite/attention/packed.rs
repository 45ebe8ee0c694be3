//! Sequences of any lengths, concatenated at offsets in device memory.

use half::{bf16, f16};

use super::{
    case::{Case, Data, Operand, Tables, check, check_turned, run},
    is_gpu,
};
use cubecl::prelude::*;

/// Sequences of any lengths, including none on one side or on both, and tokens of no sequence.
fn any_lengths<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 23 } else { 1 };
    let lengths = |all: &[(usize, usize)]| -> Vec<(usize, usize)> {
        all.iter().map(|&(q, k)| (q * scale, k * scale)).collect()
    };
    let mixed = lengths(&[
        (0, 3),
        (5, 5),
        (7, 0),
        (0, 0),
        (1, 9),
        (12, 2),
        (3, 3),
        (0, 1),
    ]);
    let same = lengths(&[(4, 4), (0, 0), (11, 11), (1, 1), (0, 0)]);
    for behind in [0, 6] {
        for causal in [false, true] {
            let mut case = Case::new(64, 0, 0).sequences(&mixed, behind);
            case.params.causal = causal;
            check::<T>(client, &case);
            case.params.quiet_softmax = true;
            case.params.window = causal.then_some(3);
            check::<T>(client, &case);
            let mut case = Case::new(64, 0, 0).sequences(&same, behind);
            (case.heads, case.kv_heads, case.fused) = (4, 2, true);
            case.params.causal = causal;
            check::<T>(client, &case);
        }
    }
    // Sequences of one length, given by their number.
    let mut case = Case::new(64, 0, 0).sequences(&lengths(&[(5, 5); 3]), 0);
    (case.offsets, case.fused) = (false, true);
    check::<T>(client, &case.causal());
    // No tokens on one side.
    for (sq, sk) in [(0, 0), (5, 0), (0, 5)] {
        check::<T>(client, &Case::new(64, sq, sk));
    }
}

/// Lengths near the strip and tile sizes, and longer than a tile; on the CPU runtime a few short
/// ones.
fn lengths(client: &Client) -> Vec<(usize, usize)> {
    let all: &[usize] = match is_gpu(client) {
        true => &[
            0, 1, 15, 16, 17, 127, 128, 129, 300, 0, 255, 256, 257, 513, 2, 0,
        ],
        false => &[0, 1, 5, 0, 9, 2, 0],
    };
    all.iter().map(|&length| (length, length)).collect()
}

/// Such lengths with other numbers of keys: fewer and more than queries, and none on either side.
fn shifted(client: &Client) -> Vec<(usize, usize)> {
    match is_gpu(client) {
        true => vec![
            (5, 300),
            (300, 129),
            (0, 17),
            (128, 0),
            (127, 385),
            (1, 1),
            (257, 256),
            (16, 2),
            (129, 640),
        ],
        false => vec![(2, 7), (7, 3), (0, 2), (3, 0), (4, 4)],
    }
}

/// Both head sizes of Hopper's kernels, with every mask and score transformation.
fn masks<T: Operand>(client: &Client) {
    let (behind, window) = if is_gpu(client) { (37, 40) } else { (3, 3) };
    for head in [64, 128] {
        for (lengths, fused) in [(lengths(client), true), (shifted(client), false)] {
            let mut case = Case::new(head, 0, 0).sequences(&lengths, behind);
            (case.heads, case.kv_heads, case.fused) = (4, 2, fused);
            check::<T>(client, &case);
            case.params.causal = true;
            check::<T>(client, &case);
            // Tokens of no sequence have no sum, with or without an additional score.
            (case.params.softcap, case.params.quiet_softmax) = (Some(2.0), true);
            check::<T>(client, &case);
            (case.params.window, case.kv_heads) = (Some(window), 1);
            check::<T>(client, &case);
        }
    }
}

/// One sequence that fills several blocks, between short ones that begin and end within them.
fn long_between_short<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 100 } else { 1 };
    for head in [64, 128] {
        let lengths = [3, 11 * scale, 1, 2 * scale + 7].map(|length| (length, length));
        check::<T>(
            client,
            &Case::new(head, 0, 0).sequences(&lengths, 0).causal(),
        );
    }
}

/// Rotated-back gradients of queries and keys, for sequences within the tables and for longer ones.
fn turned<T: Operand>(client: &Client) {
    let (behind, positions) = match is_gpu(client) {
        true => (29, [513, 130]),
        false => (2, [9, 4]),
    };
    for head in [64, 128] {
        let mut case = Case::new(head, 0, 0).sequences(&lengths(client), behind);
        (case.heads, case.kv_heads, case.fused) = (4, 2, true);
        for positions in positions {
            let tables = Tables::new(positions, head);
            check_turned::<T>(client, &case.clone().causal(), &tables);
        }
        let mut case = Case::new(head, 0, 0).sequences(&shifted(client), behind);
        case.params.window = Some(positions[1]);
        check_turned::<T>(client, &case.causal(), &Tables::new(positions[0], head));
    }
}

/// Sequences of one length have the same bits, whether given by offsets or by their number.
fn equal_lengths<T: Operand>(client: &Client) {
    let sizes: &[(usize, usize)] = match is_gpu(client) {
        true => &[(1, 1), (100, 100), (128, 256), (300, 300), (513, 129)],
        false => &[(1, 1), (6, 6), (3, 7)],
    };
    for head in [64, 128] {
        for &length in sizes {
            let mut case = Case::new(head, 0, 0).sequences(&[length; 3], 0);
            (case.heads, case.kv_heads) = (4, 2);
            for window in [None, Some(3)] {
                case.params.causal = true;
                case.params.window = window;
                let data = Data::<T>::new(&case);
                let tables = Tables::new(length.0.max(length.1), head);
                let packed = run(client, &case, &data, Some(&tables));
                let equal = Case {
                    offsets: false,
                    ..case.clone()
                };
                let equal = run(client, &equal, &data, Some(&tables));
                packed.assert_equal(&equal, &format!("{case:?} {:?}", T::KIND));
            }
        }
    }
}

element_tests! {
    any_lengths: any_lengths_f32, any_lengths_bf16, any_lengths_f16;
    masks: masks_f32, masks_bf16, masks_f16;
    long_between_short: long_between_short_f32, long_between_short_bf16, long_between_short_f16;
    turned: turned_f32, turned_bf16, turned_f16;
    equal_lengths: equal_lengths_f32, equal_lengths_bf16, equal_lengths_f16;
}
