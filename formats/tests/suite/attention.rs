//! Attention of the oracle, and its reference in `f64`, compared with a literal softmax of all
//! scores.

use nvfp4_formats::AttentionParams;
use nvfp4_formats::reference::attention::{
    AttentionShape, Bounded, HostHeads, Precision, attention_backward, attention_f64,
    attention_forward,
};

use crate::support::inputs::{Kind, values};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 20;
/// Two sequences with more keys than queries, and a last token of no sequence.
const Q_STARTS: [u32; 3] = [0, 5, 12];
const K_STARTS: [u32; 3] = [0, 8, 17];
const Q_TOKENS: usize = 13;
const K_TOKENS: usize = 18;

fn masks() -> [AttentionParams; 5] {
    let causal = AttentionParams::causal(HEAD);
    let windowed = AttentionParams {
        window: Some(3),
        ..causal
    };
    let capped = AttentionParams {
        softcap: Some(1.5),
        ..AttentionParams::new(HEAD)
    };
    let quiet = AttentionParams {
        softcap: Some(0.75),
        quiet_softmax: true,
        ..windowed
    };
    [AttentionParams::new(HEAD), causal, windowed, capped, quiet]
}

/// Output, log-sum-exp and gradients.
struct Literal {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Computes every row by its definition, from all weights of the row.
fn literal([q, k, v, dout]: [&[f32]; 4], params: &AttentionParams) -> Literal {
    let mut all = Literal {
        out: vec![0.0; q.len()],
        lse: vec![f64::NEG_INFINITY; HEADS * Q_TOKENS],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    let scale = f64::from(params.scale);
    for sequence in 0..2 {
        let queries = Q_STARTS[sequence] as usize..Q_STARTS[sequence + 1] as usize;
        let keys = K_STARTS[sequence] as usize..K_STARTS[sequence + 1] as usize;
        let diagonal = keys.len() as isize - queries.len() as isize;
        for (h, (i, query)) in
            (0..HEADS).flat_map(|h| queries.clone().enumerate().map(move |q| (h, q)))
        {
            let last = i as isize + diagonal;
            let sees = |j: usize| {
                let j = j as isize;
                let window = params
                    .window
                    .map_or(isize::MIN, |window| last - window as isize);
                !params.causal || j <= last && j > window
            };
            let at_q = (query * HEADS + h) * HEAD;
            let at_k = |key: usize| (key * KV_HEADS + h / 2) * HEAD;
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                (0..HEAD).map(|d| f64::from(a[d]) * f64::from(b[d])).sum()
            };
            // Key, score, and derivative of the score by the scaled product.
            let scores: Vec<(usize, f64, f64)> = (keys.clone().enumerate())
                .filter(|(j, _)| sees(*j))
                .map(|(_, key)| {
                    let scaled = scale * dot(&q[at_q..], &k[at_k(key)..]);
                    match params.softcap.map(f64::from) {
                        None => (key, scaled, 1.0),
                        Some(cap) => {
                            let t = (scaled / cap).tanh();
                            (key, cap * t, 1.0 - t * t)
                        }
                    }
                })
                .collect();
            let quiet = if params.quiet_softmax { 1.0 } else { 0.0 };
            let sum: f64 = scores.iter().map(|(_, score, _)| score.exp()).sum::<f64>() + quiet;
            all.lse[h * Q_TOKENS + query] = sum.ln();
            let mut mean = 0.0;
            for &(key, score, _) in &scores {
                let weight = score.exp() / sum;
                mean += weight * dot(&dout[at_q..], &v[at_k(key)..]);
                for d in 0..HEAD {
                    all.out[at_q + d] += weight * f64::from(v[at_k(key) + d]);
                    all.dv[at_k(key) + d] += weight * f64::from(dout[at_q + d]);
                }
            }
            for &(key, score, slope) in &scores {
                let weight = score.exp() / sum;
                let by_product =
                    weight * (dot(&dout[at_q..], &v[at_k(key)..]) - mean) * slope * scale;
                for d in 0..HEAD {
                    all.dq[at_q + d] += by_product * f64::from(k[at_k(key) + d]);
                    all.dk[at_k(key) + d] += by_product * f64::from(q[at_q + d]);
                }
            }
        }
    }
    all
}

/// Compares a result in `f64`, and one in `f32` by its bounds, which may not be wide.
fn check(name: &str, exact: &[f64], reference: &Bounded, found: &[f32]) {
    assert_eq!(reference.value.len(), exact.len(), "{name}");
    assert_eq!(found.len(), exact.len(), "{name}");
    for (i, (exact, value)) in exact.iter().zip(&reference.value).enumerate() {
        let near = exact == value || (exact - value).abs() <= 1e-12 * (1.0 + exact.abs());
        assert!(near, "{name} {i}: {value}, exactly {exact}");
    }
    let worst = reference.worst(found.iter().map(|&x| f64::from(x)));
    assert!(
        worst.is_none_or(|(_, ratio)| ratio <= 1.0),
        "{name}: {worst:?}"
    );
    let widest = reference.error.iter().copied().fold(0.0, f64::max);
    assert!(widest > 0.0 && widest < 1e-3, "{name}: a bound of {widest}");
}

#[test]
fn oracle_and_f64_agree_with_the_definition() {
    let (wide, narrow) = (HEADS * HEAD, KV_HEADS * HEAD);
    let q = values(Kind::Normal, Q_TOKENS * wide, 1);
    let k = values(Kind::Normal, K_TOKENS * narrow, 2);
    let v = values(Kind::Normal, K_TOKENS * narrow, 3);
    let dout = values(Kind::Normal, Q_TOKENS * wide, 4);
    for params in masks() {
        let shape = AttentionShape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head: HEAD,
            q_tokens: Q_TOKENS,
            k_tokens: K_TOKENS,
            q_starts: &Q_STARTS,
            k_starts: &K_STARTS,
            params,
        };
        let heads = HostHeads::contiguous;
        let (hq, hk, hv) = (heads(&q, wide), heads(&k, narrow), heads(&v, narrow));
        let hdout = heads(&dout, wide);
        let forward = attention_forward(hq, hk, hv, &shape);
        let saved = (heads(&forward.out, wide), &forward.lse[..]);
        let backward = attention_backward((hq, hk, hv), saved, hdout, &shape);
        let reference = attention_f64((hq, hk, hv), hdout, &shape, Precision::F32);
        let exact = literal([&q, &k, &v, &dout], &params);
        let name = |of: &str| format!("{of} of {params:?}");
        check(&name("out"), &exact.out, &reference.out, &forward.out);
        check(&name("lse"), &exact.lse, &reference.lse, &forward.lse);
        check(&name("dq"), &exact.dq, &reference.dq, &backward.dq);
        check(&name("dk"), &exact.dk, &reference.dk, &backward.dk);
        check(&name("dv"), &exact.dv, &reference.dv, &backward.dv);
    }
}

#[test]
fn bounds_find_the_worst_error() {
    let bounded = Bounded {
        value: vec![1.0, 2.0, f64::NAN, f64::NEG_INFINITY, 3.0],
        error: vec![0.5, 0.125, 0.0, 0.0, 0.25],
    };
    let same = [1.0, 2.0, f64::NAN, f64::NEG_INFINITY, 3.0];
    assert_eq!(bounded.worst(same), None);
    let other = [1.25, 2.25, f64::NAN, f64::NEG_INFINITY, 2.75];
    assert_eq!(bounded.worst(other), Some((1, 2.0)));
    let infinite = [1.0, 2.0, f64::NAN, 0.0, 3.0];
    assert_eq!(bounded.worst(infinite), Some((3, f64::INFINITY)));
    let unknown = [f64::NAN, 2.0, f64::NAN, f64::NEG_INFINITY, 3.0];
    assert_eq!(bounded.worst(unknown), Some((0, f64::INFINITY)));
}
