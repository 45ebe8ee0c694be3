use half::bf16;
use nvfp4_formats::reference::attention::{Precision, attention_f64};
use nvfp4_formats::reference::attention::{attention_backward, attention_forward};

use super::*;

/// Sizes, mask and sequences of a call.
struct Case {
    heads: usize,
    kv_heads: usize,
    head: usize,
    q_tokens: usize,
    k_tokens: usize,
    q_starts: Vec<u32>,
    k_starts: Vec<u32>,
    params: AttentionParams,
}

impl Case {
    /// Creates a case with one sequence.
    fn one(heads: [usize; 2], head: usize, tokens: [usize; 2], params: AttentionParams) -> Self {
        Self {
            heads: heads[0],
            kv_heads: heads[1],
            head,
            q_tokens: tokens[0],
            k_tokens: tokens[1],
            q_starts: vec![0, tokens[0] as u32],
            k_starts: vec![0, tokens[1] as u32],
            params,
        }
    }

    fn shape(&self) -> AttentionShape<'_> {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head: self.head,
            q_tokens: self.q_tokens,
            k_tokens: self.k_tokens,
            q_starts: &self.q_starts,
            k_starts: &self.k_starts,
            params: self.params,
        }
    }

    fn name(&self) -> String {
        format!(
            "{} and {} heads of {}, {} queries, {} keys, {:?}",
            self.heads, self.kv_heads, self.head, self.q_tokens, self.k_tokens, self.params
        )
    }
}

/// Approximately normally distributed numbers.
fn values<T: Element>(len: usize, seed: u32) -> Vec<T> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    let normal = || T::from_f32((uniform() + uniform() + uniform() + uniform()) * 1.7);
    std::iter::repeat_with(normal).take(len).collect()
}

/// Operands of a case, and a gradient of its output.
struct Data<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dout: Vec<T>,
}

impl<T: Element> Data<T> {
    fn new(case: &Case) -> Self {
        let queries = case.q_tokens * case.heads * case.head;
        let keys = case.k_tokens * case.kv_heads * case.head;
        Self {
            q: values(queries, 1),
            k: values(keys, 2),
            v: values(keys, 3),
            dout: values(queries, 4),
        }
    }

    fn operands(&self, case: &Case) -> [HostHeads<'_, T>; 3] {
        let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
        [
            HostHeads::contiguous(&self.q, wide),
            HostHeads::contiguous(&self.k, narrow),
            HostHeads::contiguous(&self.v, narrow),
        ]
    }
}

/// Returns output, log-sum-exp, and the gradients of queries, keys and values.
fn run<T: Element>(case: &Case, data: &Data<T>) -> (Vec<T>, Vec<f32>, [Vec<T>; 3]) {
    let (shape, operands) = (case.shape(), data.operands(case));
    let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
    let forward = super::forward(operands, &shape);
    let out = HostHeads::contiguous(&forward.out, wide);
    let dout = HostHeads::contiguous(&data.dout, wide);
    let found = backward(operands, (out, &forward.lse), dout, &shape);
    let zeros = |len| vec![T::from_f32(0.0); len];
    let to = |row_stride| Columns {
        row_stride,
        offset: 0,
    };
    let mut dq = zeros(data.q.len());
    let (mut dk, mut dv) = (zeros(data.k.len()), zeros(data.v.len()));
    found.write_queries(to(wide), &mut dq);
    found.write_keys(to(narrow), &mut dk);
    found.write_values(to(narrow), &mut dv);
    (forward.out, forward.lse, [dq, dk, dv])
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.to_f32().to_bits()).collect()
}

fn masks(head: usize) -> Vec<AttentionParams> {
    let causal = AttentionParams::causal(head);
    vec![
        AttentionParams::new(head),
        causal,
        AttentionParams {
            window: Some(37),
            ..causal
        },
        AttentionParams {
            window: Some(3),
            softcap: Some(1.5),
            quiet_softmax: true,
            ..causal
        },
        AttentionParams {
            softcap: Some(20.0),
            quiet_softmax: true,
            ..AttentionParams::new(head)
        },
    ]
}

/// Sizes at and around the boundaries of blocks and tiles.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, head, tokens) in [
        ([1, 1], 32, [64, 64]),
        ([4, 2], 8, [130, 130]),
        ([2, 1], 80, [67, 150]),
        ([1, 1], 17, [150, 67]),
        ([2, 2], 64, [1, 129]),
        ([3, 1], 5, [5, 3]),
    ] {
        for params in masks(head) {
            cases.push(Case::one(heads, head, tokens, params));
        }
    }
    // Several sequences, one of them empty, one without keys, and tokens after the last.
    cases.push(Case {
        q_tokens: 170,
        k_tokens: 160,
        q_starts: vec![0, 3, 3, 70, 72, 165],
        k_starts: vec![0, 65, 65, 90, 90, 158],
        ..Case::one([4, 2], 16, [0, 0], AttentionParams::causal(16))
    });
    cases
}

/// Asserts that the error of every value is within its bound.
fn check<T: Element>(case: &Case, precision: Precision) {
    let data = Data::<T>::new(case);
    let [q, k, v] = data.operands(case);
    let dout = HostHeads::contiguous(&data.dout, case.heads * case.head);
    let exact = attention_f64((q, k, v), dout, &case.shape(), precision);
    let (out, lse, [dq, dk, dv]) = run(case, &data);
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f32().into()).collect() };
    let lse: Vec<f64> = lse.iter().map(|x| (*x).into()).collect();
    for (what, bounded, found) in [
        ("out", &exact.out, wide(&out)),
        ("lse", &exact.lse, lse),
        ("dq", &exact.dq, wide(&dq)),
        ("dk", &exact.dk, wide(&dk)),
        ("dv", &exact.dv, wide(&dv)),
    ] {
        assert_eq!(found.len(), bounded.value.len(), "{what}");
        if let Some((i, ratio)) = bounded.worst(found.iter().copied()) {
            let (value, found) = (bounded.value[i], found[i]);
            assert!(
                ratio <= 1.0,
                "{}: {what}[{i}] is {found}, not {value}: {ratio} of its bound",
                case.name()
            );
        }
    }
}

#[test]
fn errors_are_within_the_bounds_of_kernels() {
    for case in cases() {
        check::<f32>(&case, Precision::F32);
        check::<bf16>(&case, Precision::BF16);
    }
}

/// The tolerance is 2⁻¹⁸ of the largest value, far below the bounds.
#[test]
fn values_are_the_oracles() {
    for case in cases() {
        let data = Data::<f32>::new(&case);
        let [q, k, v] = data.operands(&case);
        let (out, lse, [dq, dk, dv]) = run(&case, &data);
        let forward = attention_forward(q, k, v, &case.shape());
        let wide = case.heads * case.head;
        let by_oracle = (HostHeads::contiguous(&forward.out, wide), &forward.lse[..]);
        let dout = HostHeads::contiguous(&data.dout, wide);
        let backward = attention_backward((q, k, v), by_oracle, dout, &case.shape());
        for (what, found, expected) in [
            ("out", out, forward.out),
            ("lse", lse, forward.lse),
            ("dq", dq, backward.dq),
            ("dk", dk, backward.dk),
            ("dv", dv, backward.dv),
        ] {
            let finite = expected.iter().filter(|x| x.is_finite());
            let largest = finite.fold(0f32, |m, x| m.max(x.abs()));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let near = (found - expected).abs() <= largest * 2f32.powi(-18);
                assert!(
                    near || found.to_bits() == expected.to_bits(),
                    "{}: {what}[{i}] is {found}, not {expected}",
                    case.name()
                );
            }
        }
    }
}

/// Threads, other sequences, and a CPU without vector units change no bit.
#[test]
fn bits_depend_on_the_sequence_alone() {
    let params = AttentionParams {
        window: Some(70),
        ..AttentionParams::causal(24)
    };
    let several = Case {
        q_tokens: 230,
        k_tokens: 230,
        q_starts: vec![0, 7, 140, 230],
        k_starts: vec![0, 7, 140, 230],
        ..Case::one([4, 2], 24, [0, 0], params)
    };
    let data = Data::<f32>::new(&several);
    let (out, _, [dq, dk, dv]) = run(&several, &data);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let (again, _, gradients) = pool.build().unwrap().install(|| run(&several, &data));
        assert_eq!(bits(&again), bits(&out), "{threads} threads");
        for (found, expected) in gradients.iter().zip([&dq, &dk, &dv]) {
            assert_eq!(bits(found), bits(expected), "{threads} threads");
        }
    }
    let rows = |x: &[f32], width: usize| x[7 * width..140 * width].to_vec();
    let (wide, narrow) = (4 * 24, 2 * 24);
    let alone = Data {
        q: rows(&data.q, wide),
        k: rows(&data.k, narrow),
        v: rows(&data.v, narrow),
        dout: rows(&data.dout, wide),
    };
    let one = Case::one([4, 2], 24, [133, 133], params);
    let (out_alone, _, gradients) = run(&one, &alone);
    assert_eq!(bits(&out_alone), bits(&rows(&out, wide)));
    let whole = [rows(&dq, wide), rows(&dk, narrow), rows(&dv, narrow)];
    for (found, expected) in gradients.iter().zip(&whole) {
        assert_eq!(bits(found), bits(expected));
    }
    // First head, compiled without fused multiply-adds.
    let shape = several.shape();
    let heads = PerHead::new(&shape);
    let sequence = &heads.sequences[1];
    let (plain, _) = forward_head_body(sequence, data.operands(&several), 0, &shape);
    for (plain, row) in plain.chunks(32).zip(out_alone.chunks(wide)) {
        assert_eq!(bits(&plain[..24]), bits(&row[..24]));
    }
}

/// Masked keys and values cannot make a row NaN; visible ones do.
#[test]
fn hidden_values_do_not_matter() {
    let case = Case::one([1, 1], 16, [100, 100], AttentionParams::causal(16));
    let mut data = Data::<f32>::new(&case);
    let (expected, ..) = run(&case, &data);
    for (token, value) in [(70, f32::NAN), (81, f32::INFINITY)] {
        data.v[token * 16 + 3] = value;
    }
    data.k[90 * 16] = f32::NAN;
    let (found, lse, _) = run(&case, &data);
    assert_eq!(bits(&found[..70 * 16]), bits(&expected[..70 * 16]));
    assert!(found[70 * 16 + 3].is_nan());
    assert_eq!(found[75 * 16 + 2], expected[75 * 16 + 2]);
    assert!(lse[89].is_finite() && lse[90..].iter().all(|lse| lse.is_nan()));
}

#[test]
fn queries_that_see_a_key_see_it() {
    for (sq, sk) in [(5, 9), (9, 5), (70, 70)] {
        for params in masks(8) {
            let sequence = Sequence {
                queries: 0..sq,
                keys: 0..sk,
                pitch: 16,
                params,
            };
            for j in 0..sk {
                let seeing = sequence.seeing(j);
                for i in 0..sq {
                    let sees = sequence.visible(i).contains(&j);
                    assert_eq!(seeing.contains(&i), sees, "{params:?}, {i}, {j}");
                }
            }
        }
    }
}
