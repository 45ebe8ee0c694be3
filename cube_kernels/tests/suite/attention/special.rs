//! Properties besides the values: rows that see no keys, NaN that does not spread, and bits that do
//! not depend on the batch.

use half::{bf16, f16};

use super::{
    case::{Case, Data, Found, Operand, run, with_shape},
    is_gpu,
};
use cubecl::prelude::*;
use nvfp4_formats::reference::attention::{HostHeads, Precision, attention_f64};

/// Returns the elements of tokens `range` of `[tokens, width]`.
fn rows<T: Copy>(x: &[T], width: usize, range: std::ops::Range<usize>) -> Vec<T> {
    x[range.start * width..range.end * width].to_vec()
}

/// Returns the results of sequence `index`.
fn sequence<T: Operand>(case: &Case, found: &Found<T>, index: usize) -> Found<T> {
    let range = |of| {
        let starts = case.starts(of);
        starts[index] as usize..starts[index + 1] as usize
    };
    let (q, k) = (range(|l: &(usize, usize)| l.0), range(|l| l.1));
    let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
    let tokens = case.tokens(|l| l.0);
    Found {
        out: rows(&found.out, wide, q.clone()),
        lse: (0..case.heads)
            .flat_map(|h| found.lse[h * tokens..][q.clone()].to_vec())
            .collect(),
        dq: rows(&found.dq, wide, q),
        dk: rows(&found.dk, narrow, k.clone()),
        dv: rows(&found.dv, narrow, k),
    }
}

/// Returns the operands of sequence `index` alone.
fn alone<T: Operand>(case: &Case, data: &Data<T>, index: usize) -> (Case, Data<T>) {
    let range = |of| {
        let starts = case.starts(of);
        starts[index] as usize..starts[index + 1] as usize
    };
    let (q, k) = (range(|l: &(usize, usize)| l.0), range(|l| l.1));
    let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
    let data = Data {
        q: rows(&data.q, wide, q.clone()),
        k: rows(&data.k, narrow, k.clone()),
        v: rows(&data.v, narrow, k),
        dout: rows(&data.dout, wide, q),
    };
    let case = Case {
        lengths: vec![case.lengths[index]],
        offsets: false,
        fused: false,
        behind: 0,
        ..case.clone()
    };
    (case, data)
}

fn company(client: &Client, head: usize) -> Case {
    let scale = if is_gpu(client) { 41 } else { 1 };
    let lengths = [(6, 8), (1, 1), (9, 4), (17, 17)].map(|(q, k)| (q * scale, k * scale));
    let mut case = Case::new(head, 0, 0).sequences(&lengths, 2);
    (case.heads, case.kv_heads) = (4, 2);
    case.causal()
}

/// A sequence has the same bits alone and in any batch: NaN and infinities in one sequence do not
/// change its neighbors.
fn neighbours<T: Operand>(client: &Client) {
    let heads: &[usize] = if is_gpu(client) { &[64, 128] } else { &[64] };
    for &head in heads {
        neighbours_of::<T>(client, &company(client, head));
    }
}

fn neighbours_of<T: Operand>(client: &Client, case: &Case) {
    let clean = Data::<T>::new(case);
    let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
    let mut spoiled = clean.clone();
    let q_start = case.starts(|l| l.0)[2] as usize;
    let k_start = case.starts(|l| l.1)[2] as usize;
    let (nan, infinity) = (T::from_f32(f32::NAN), T::from_f32(f32::INFINITY));
    spoiled.q[(q_start + 1) * wide + 3] = nan;
    spoiled.k[k_start * narrow + 5] = infinity;
    spoiled.v[(k_start + 2) * narrow] = nan;
    spoiled.v[k_start * narrow + 9] = infinity;
    spoiled.dout[(q_start + 2) * wide] = nan;
    // Tokens of no sequence.
    let (last_q, last_k) = (case.tokens(|l| l.0), case.tokens(|l| l.1));
    spoiled.q[(last_q - 1) * wide..].fill(nan);
    spoiled.k[(last_k - 1) * narrow..].fill(nan);
    spoiled.v[(last_k - 2) * narrow..].fill(infinity);
    spoiled.dout[(last_q - 2) * wide..].fill(nan);
    let found = run(client, case, &clean, None);
    let beside = run(client, case, &spoiled, None);
    for index in 0..case.lengths.len() {
        let what = format!("sequence {index} {:?}", T::KIND);
        let here = sequence(case, &found, index);
        let (single, data) = alone(case, &clean, index);
        let packed = Case {
            offsets: true,
            ..single.clone()
        };
        here.assert_equal(&run(client, &packed, &data, None), &what);
        here.assert_equal(&run(client, &single, &data, None), &what);
        if index != 2 {
            here.assert_equal(
                &sequence(case, &beside, index),
                &format!("{what}, beside NaN"),
            );
        }
    }
    assert!(
        sequence(case, &beside, 2)
            .out
            .iter()
            .any(|x| x.to_f32().is_nan())
    );
}

/// NaN in a query makes its row NaN, output and log-sum-exp, and no other.
fn rows_keep_their_nan<T: Operand>(client: &Client) {
    let length = if is_gpu(client) { 100 } else { 7 };
    let case = Case::new(64, length, length);
    let clean = Data::<T>::new(&case);
    let mut spoiled = clean.clone();
    let (width, row) = (case.heads * case.head, length / 2);
    // In the second head.
    spoiled.q[row * width + case.head + 11] = T::from_f32(f32::NAN);
    let found = run(client, &case, &clean, None);
    let beside = run(client, &case, &spoiled, None);
    let at = row * width + case.head;
    for (i, (x, y)) in found.out.iter().zip(&beside.out).enumerate() {
        match (at..at + case.head).contains(&i) {
            true => assert!(y.to_f32().is_nan(), "{i}"),
            false => assert_eq!(x.to_f32().to_bits(), y.to_f32().to_bits(), "{i}"),
        }
    }
    for (i, (x, y)) in found.lse.iter().zip(&beside.lse).enumerate() {
        match i == length + row {
            true => assert!(y.is_nan(), "{i}"),
            false => assert_eq!(x.to_bits(), y.to_bits(), "{i}"),
        }
    }
}

/// Rows without a visible key: output and gradient are 0, log-sum-exp is `-inf`, or 0 with a quiet
/// softmax.
fn unseen<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 19 } else { 1 };
    for quiet_softmax in [false, true] {
        let (sq, sk) = (13 * scale, 4 * scale);
        let mut case = Case::new(64, sq, sk).causal();
        case.params.quiet_softmax = quiet_softmax;
        let found = run(client, &case, &Data::<T>::new(&case), None);
        let width = case.heads * case.head;
        let unseen = sq - sk;
        for x in found.out[..unseen * width]
            .iter()
            .chain(&found.dq[..unseen * width])
        {
            assert_eq!(x.to_f32(), 0.0);
        }
        for h in 0..case.heads {
            for (i, &lse) in found.lse[h * sq..][..sq].iter().enumerate() {
                match (i < unseen, quiet_softmax) {
                    (true, false) => assert_eq!(lse, f32::NEG_INFINITY, "{i}"),
                    (true, true) => assert_eq!(lse, 0.0, "{i}"),
                    (false, _) => assert!(lse.is_finite(), "{i}"),
                }
            }
        }
    }
}

/// Repeated runs have the same bits.
fn repeated<T: Operand>(client: &Client) {
    let (length, runs) = if is_gpu(client) { (700, 200) } else { (9, 2) };
    let mut case = Case::new(64, length, length).causal();
    (case.heads, case.kv_heads) = (4, 2);
    let data = Data::<T>::new(&case);
    let first = run(client, &case, &data, None);
    for i in 0..runs {
        first.assert_equal(
            &run(client, &case, &data, None),
            &format!("run {i} {:?}", T::KIND),
        );
    }
}

element_tests! {
    neighbours: neighbours_f32, neighbours_bf16, neighbours_f16;
    rows_keep_their_nan: rows_keep_their_nan_f32, rows_keep_their_nan_bf16,
        rows_keep_their_nan_f16;
    unseen: unseen_f32, unseen_bf16, unseen_f16;
    repeated: repeated_f32, repeated_bf16, repeated_f16;
}

/// The gradients of the `f64` reference equal finite differences of its output.
#[test]
fn reference_gradients_are_those_of_differences() {
    const STEP: f32 = 1.0 / 512.0;
    let mut cases = vec![
        Case::new(4, 5, 7),
        Case::new(6, 7, 5).causal(),
        Case::new(4, 0, 0)
            .sequences(&[(3, 4), (0, 2), (4, 4)], 1)
            .causal(),
    ];
    for i in 0..2 {
        let mut case = cases[i].clone();
        (case.heads, case.kv_heads) = (4, 2);
        (case.params.softcap, case.params.quiet_softmax) = (Some(1.5), true);
        case.params.window = case.params.causal.then_some(3);
        cases.push(case);
    }
    for case in cases {
        // Multiples of the step are exact.
        let mut data = Data::<f32>::new(&case);
        for values in [&mut data.q, &mut data.k, &mut data.v, &mut data.dout] {
            values
                .iter_mut()
                .for_each(|x| *x = (*x / STEP).round() * STEP);
        }
        let evaluate = |data: &Data<f32>| {
            with_shape(&case, |shape| {
                let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
                let q = HostHeads::contiguous(&data.q, wide);
                let k = HostHeads::contiguous(&data.k, narrow);
                let v = HostHeads::contiguous(&data.v, narrow);
                let dout = HostHeads::contiguous(&data.dout, wide);
                attention_f64((q, k, v), dout, shape, Precision::F32)
            })
        };
        let loss = |data: &Data<f32>| -> f64 {
            let out = evaluate(data).out.value;
            out.iter().zip(&data.dout).map(|(x, y)| x * *y as f64).sum()
        };
        let found = evaluate(&data);
        let gradients = [&found.dq.value, &found.dk.value, &found.dv.value];
        for (part, gradient) in gradients.into_iter().enumerate() {
            for (i, &gradient) in gradient.iter().enumerate() {
                let at = |step: f32| {
                    let mut moved = data.clone();
                    let values = [&mut moved.q, &mut moved.k, &mut moved.v];
                    let [q, k, v] = values;
                    [q, k, v][part][i] += step;
                    loss(&moved)
                };
                let difference = (at(STEP) - at(-STEP)) / (2.0 * STEP as f64);
                assert!(
                    (difference - gradient).abs() < 2e-5,
                    "{case:?}: operand {part}, element {i}: {difference} and {gradient}"
                );
            }
        }
    }
}
