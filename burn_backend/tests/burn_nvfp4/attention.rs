//! Attention on plain tensors and in its module, compared with attention by Burn's operations.

use burn_core::module::ParamGroup;
use burn_core::tensor::activation::{quiet_softmax, softmax};
use burn_core::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::attention::{
    AttentionParams, RotaryTables, Sequences, attention, attention_qkv, try_attention,
    try_attention_qkv, try_attention_qkv_with_sinks, try_attention_with_sinks,
};
use burn_nvfp4::nn::{RopeCache, RopeCacheConfig};
use burn_nvfp4::{Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4Error, Nvfp4Recipe};

use crate::support::{
    activation, burn_matmul_error, device, gaussian, skip_where_small_only, values,
};

pub fn tensor<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let data = TensorData::new(gaussian(shape.iter().product(), seed), shape);
    Tensor::from_data(data, (device, DType::F32))
}

fn offsets(numbers: &[u32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
    Tensor::from_data(data, (device, DType::U32))
}

pub fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(
            (f - e).abs() <= tolerance * scale,
            "{what}[{i}]: {f}, not {e}"
        );
    }
}

/// Attention of one sequence by Burn's operations, for equal numbers of query and key heads.
fn by_burn(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, params: AttentionParams) -> Tensor<3> {
    let ([sq, heads, _], [sk, ..]) = (q.dims(), k.dims());
    let [q, k, v] = [q, k, v].map(|x| x.swap_dims(0, 1));
    let mut scores = q.matmul(k.swap_dims(1, 2)).mul_scalar(params.scale);
    if let Some(softcap) = params.softcap {
        scores = scores.div_scalar(softcap).tanh().mul_scalar(softcap);
    }
    if params.causal {
        let window = params.window.unwrap_or(usize::MAX / 4) as i64;
        let hidden: Vec<bool> = (0..sq * sk)
            .map(|at| {
                let last = (at / sk + sk) as i64 - sq as i64;
                let key = (at % sk) as i64;
                key > last || key <= last - window
            })
            .collect();
        let hidden = TensorData::new(hidden, [1, sq, sk]);
        let hidden = Tensor::<3, Bool>::from_data(hidden, &scores.device());
        scores = scores.mask_fill(hidden.expand([heads, sq, sk]), -1e30);
    }
    let weights = match params.quiet_softmax {
        true => quiet_softmax(scores, 2),
        false => softmax(scores, 2),
    };
    weights.matmul(v).swap_dims(0, 1)
}

/// Returns output and gradients of `forward` for a weighted sum of its output.
fn gradients<const N: usize>(
    inputs: [Tensor<3>; N],
    forward: impl Fn([Tensor<3>; N]) -> Tensor<3>,
) -> Vec<Vec<f32>> {
    let inputs = inputs.map(|x| Tensor::from_inner(x).require_grad());
    let out = forward(inputs.clone());
    let weights = Tensor::from_inner(tensor(out.dims(), 99, &out.device().without_autodiff()));
    let found = (out.clone() * weights).sum().backward();
    let mut all = vec![values(out.inner())];
    all.extend(inputs.iter().map(|x| values(x.grad(&found).unwrap())));
    all
}

#[test]
fn values_and_gradients_are_burns() {
    let device = device();
    let (heads, head) = (2, 8);
    let causal = AttentionParams::causal(head);
    let all = AttentionParams {
        window: Some(3),
        softcap: Some(1.5),
        quiet_softmax: true,
        ..causal
    };
    let lengths: &[(usize, usize)] = match crate::support::small_only() {
        true => &[(5, 7)],
        false => &[(9, 9), (5, 7), (1, 1)],
    };
    for &(sq, sk) in lengths {
        for params in [AttentionParams::new(head), causal, all] {
            let inputs = [
                tensor([sq, heads, head], 1, &device),
                tensor([sk, heads, head], 2, &device),
                tensor([sk, heads, head], 3, &device),
            ];
            let expected = gradients(inputs.clone(), |[q, k, v]| by_burn(q, k, v, params));
            let one = Sequences::Equal(1);
            let found = gradients(inputs, |[q, k, v]| attention(q, k, v, &one, params));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("{sq} queries, {sk} keys, {params:?}, tensor {i}");
                assert_near(&what, found, expected, burn_matmul_error(2e-4));
            }
        }
    }
}

/// Attention of one sequence with sinks by Burn's operations: a column of scores without a value.
fn with_sinks_by_burn(
    [q, k, v]: [Tensor<3>; 3],
    sinks: Tensor<1>,
    params: AttentionParams,
) -> Tensor<3> {
    let ([sq, heads, _], [sk, ..]) = (q.dims(), k.dims());
    let [q, k, v] = [q, k, v].map(|x| x.swap_dims(0, 1));
    let mut scores = q.matmul(k.swap_dims(1, 2)).mul_scalar(params.scale);
    let window = params.window.unwrap_or(usize::MAX / 4) as i64;
    let hidden: Vec<bool> = (0..sq * sk)
        .map(|at| {
            let last = (at / sk + sk) as i64 - sq as i64;
            let key = (at % sk) as i64;
            key > last || key <= last - window
        })
        .collect();
    let hidden = TensorData::new(hidden, [1, sq, sk]);
    let hidden = Tensor::<3, Bool>::from_data(hidden, &scores.device());
    scores = scores.mask_fill(hidden.expand([heads, sq, sk]), -1e30);
    let sinks = sinks.reshape([heads, 1, 1]).expand([heads, sq, 1]);
    let weights = softmax(Tensor::cat(vec![scores, sinks], 2), 2);
    weights.narrow(2, 0, sk).matmul(v).swap_dims(0, 1)
}

/// Sinks take their share of every row, and have gradients, as have queries, keys and values, in
/// both forms of the inputs and for rows without keys.
#[test]
fn sinks_are_scores_without_values() {
    let device = device();
    let (heads, head) = (2, 8);
    let lengths: &[(usize, usize)] = match crate::support::small_only() {
        true => &[(5, 7)],
        false => &[(9, 9), (5, 7), (7, 5)],
    };
    for &(sq, sk) in lengths {
        for window in [None, Some(3)] {
            let params = AttentionParams {
                window,
                ..AttentionParams::causal(head)
            };
            let sinks = tensor([heads, 1, 1], 4, &device).mul_scalar(2.0);
            let inputs = [
                tensor([sq, heads, head], 1, &device),
                tensor([sk, heads, head], 2, &device),
                tensor([sk, heads, head], 3, &device),
                sinks,
            ];
            let one = Sequences::Equal(1);
            let expected = gradients(inputs.clone(), |[q, k, v, sinks]| {
                with_sinks_by_burn([q, k, v], sinks.reshape([heads]), params)
            });
            let separate = gradients(inputs.clone(), |[q, k, v, sinks]| {
                let sinks = Some(sinks.reshape([heads]));
                try_attention_with_sinks([q, k, v], &one, sinks, params).unwrap()
            });
            let fused = (sq == sk).then(|| {
                gradients(inputs, |[q, k, v, sinks]| {
                    let flat = |x: Tensor<3>| x.reshape([sq, heads * head]);
                    let qkv = Tensor::cat(vec![flat(q), flat(k), flat(v)], 1);
                    let (places, sinks) = ((&one, None), sinks.reshape([heads]));
                    let counts = [heads, heads];
                    let out = try_attention_qkv_with_sinks(qkv, counts, places, sinks, params);
                    out.unwrap().reshape([sq, heads, head])
                })
            });
            for found in [Some(separate), fused].into_iter().flatten() {
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what = format!("{sq} queries, {sk} keys, {window:?}, tensor {i}");
                    assert_near(&what, found, expected, burn_matmul_error(2e-4));
                }
            }
        }
    }
    let [q, k, v] = [1, 2, 3].map(|seed| tensor([4, heads, head], seed, &device));
    let wrong = Some(Tensor::<1>::zeros([heads + 1], &device));
    let params = AttentionParams::causal(head);
    let error = try_attention_with_sinks([q, k, v], &Sequences::Equal(1), wrong, params);
    assert!(
        matches!(
            error.unwrap_err(),
            Nvfp4Error::Shape {
                argument: "sinks",
                ..
            }
        ),
        "the sinks are named"
    );
}

/// A packed sequence has the same values and gradients as alone, independent of the other
/// sequences.
#[test]
fn packed_sequences_are_those_alone() {
    let device = device();
    let (heads, kv_heads, head) = (4, 2, 8);
    let starts = [0u32, 3, 3, 8];
    let tokens = 9;
    let params = AttentionParams::causal(head);
    let inputs = [
        tensor([tokens, heads, head], 4, &device),
        tensor([tokens, kv_heads, head], 5, &device),
        tensor([tokens, kv_heads, head], 6, &device),
    ];
    let sequences = Sequences::packed(offsets(&starts, &device));
    let whole = gradients(inputs.clone(), |[q, k, v]| {
        attention(q, k, v, &sequences, params)
    });
    for pair in starts.windows(2).filter(|pair| pair[0] < pair[1]) {
        let (first, len) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
        let alone = inputs.clone().map(|x| x.narrow(0, first, len));
        let found = gradients(alone, |[q, k, v]| {
            attention(q, k, v, &Sequences::Equal(1), params)
        });
        let out = heads * head;
        assert_eq!(found[0], whole[0][first * out..][..len * out]);
    }
    // The last token belongs to no sequence.
    for (values, width) in whole.iter().zip([heads, heads, kv_heads, kv_heads]) {
        let last = &values[(tokens - 1) * width * head..];
        assert!(last.iter().all(|value| *value == 0.0));
    }
}

/// The fused form rotates, and returns one gradient, rotated back; it does not modify memory that
/// others hold.
#[test]
fn one_projection_is_three_tensors() {
    let device = device();
    let (tokens, heads, kv_heads, head) = (8, 4, 2, 8);
    let width = (heads + 2 * kv_heads) * head;
    let params = AttentionParams::causal(head);
    let tables = RotaryTables::try_new(4, head, 10_000.0, &device).unwrap();
    let qkv = tensor([tokens, 1, width], 7, &device);
    let before = values(qkv.clone());
    let autodiff = device.clone().autodiff();
    let sequences = Sequences::Equal(2);
    let differentiable = RotaryTables::try_new(4, head, 10_000.0, &autodiff).unwrap();
    let found = gradients([qkv.clone()], |[qkv]| {
        let qkv = qkv.reshape([tokens, width]);
        let (sizes, tables) = ([heads, kv_heads], Some(&differentiable));
        let out = attention_qkv(qkv, sizes, &sequences, tables, params);
        out.reshape([tokens, heads, head])
    });
    assert_eq!(values(qkv.clone()), before, "the input is held here");
    let positions = RopeCacheConfig::new(4, head).init(&autodiff);
    let expected = gradients([qkv.clone()], |[qkv]| {
        let part = |first: usize, heads: usize| {
            qkv.clone()
                .narrow(2, first * head, heads * head)
                .reshape([tokens, heads, head])
        };
        let turn = |x: Tensor<3>| {
            let [_, heads, _] = x.dims();
            let x = x.reshape([2, tokens / 2, heads, head]).swap_dims(1, 2);
            positions
                .rotate(x)
                .swap_dims(1, 2)
                .reshape([tokens, heads, head])
        };
        let (q, k) = (turn(part(0, heads)), turn(part(heads, kv_heads)));
        let v = part(heads + kv_heads, kv_heads);
        attention(q, k, v, &sequences, params)
    });
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_near(&format!("tensor {i}"), found, expected, 1e-5);
    }
    // Without autodiff, with no other owner of the memory.
    let plain = attention_qkv(
        qkv.reshape([tokens, width]),
        [heads, kv_heads],
        &sequences,
        Some(&tables),
        params,
    );
    assert_eq!(values(plain), found[0]);
}

fn module(config: &Nvfp4AttentionConfig, device: &Device) -> Nvfp4Attention {
    let exempt = Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()));
    let attention = config.clone().with_recipe(exempt.clone()).init(device);
    exempt.apply(&attention).unwrap();
    attention
}

/// With padding, even if it is all `false`, Burn's operations compute; without padding, the
/// kernels.
#[test]
fn the_module_is_its_unfused_form() {
    skip_where_small_only!();
    let device = device().autodiff();
    let (batch, time, width) = (2, 11, 64);
    let plain = Nvfp4AttentionConfig::new(width, 4);
    let configs = [
        (plain.clone(), true),
        (plain.clone().with_kv_heads(Some(2)), false),
        (
            plain
                .with_kv_heads(Some(1))
                .with_window(Some(4))
                .with_softcap(Some(0.5))
                .with_quiet_softmax(true),
            true,
        ),
    ];
    for (config, causal) in configs {
        let attention = module(&config, &device);
        let positions = RopeCacheConfig::new(16, width / 4)
            .with_causal(causal)
            .init(&device);
        let no_padding = Tensor::<2, Bool>::from_data(
            TensorData::new(vec![false; batch * time], [batch, time]),
            &device,
        );
        for dtype in [DType::F32, activation()] {
            let run = |padding| {
                let x: Tensor<3> = Tensor::from_inner(
                    tensor([batch, time, width], 8, &device.clone().without_autodiff()).cast(dtype),
                );
                let x = x.require_grad();
                let out = attention
                    .try_forward(x.clone(), &positions, padding)
                    .unwrap();
                assert_eq!(out.dtype(), dtype);
                let found = out.clone().cast(DType::F32).powi_scalar(2).sum().backward();
                let weight = attention.qkv.weight.grad(&found).unwrap();
                [
                    values(out.inner()),
                    values(x.grad(&found).unwrap()),
                    values(weight),
                ]
            };
            let tolerance = match dtype {
                DType::F32 => burn_matmul_error(1e-4),
                _ => 3e-2,
            };
            let (found, expected) = (run(None), run(Some(no_padding.clone())));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("{config:?}, {dtype:?}, tensor {i}");
                assert_near(&what, found, expected, tolerance);
            }
        }
    }
}

#[test]
fn the_module_takes_packed_sequences() {
    skip_where_small_only!();
    let device = device();
    let attention = module(&Nvfp4AttentionConfig::new(32, 2), &device);
    let positions = RopeCacheConfig::new(8, 16).init(&device);
    let x = tensor([9, 32], 9, &device);
    let packed = offsets(&[0, 4, 4, 9], &device);
    let found = values(attention.forward_packed(x.clone(), &positions, packed));
    let alone = |first: usize, len: usize| {
        let x = x.clone().narrow(0, first, len).reshape([1, len, 32]);
        values(attention.forward(x, &positions))
    };
    let expected = [alone(0, 4), alone(4, 5)].concat();
    assert_near("packed", &found, &expected, 1e-5);
}

pub fn argument<T>(result: Result<T, Nvfp4Error>) -> &'static str {
    match result.err().unwrap() {
        Nvfp4Error::Shape { argument, .. }
        | Nvfp4Error::DType { argument, .. }
        | Nvfp4Error::Value { argument, .. }
        | Nvfp4Error::Device { argument, .. } => argument,
        other => panic!("{other}"),
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    skip_where_small_only!();
    let device = device();
    let params = AttentionParams::new(8);
    let one = Sequences::Equal(1);
    let x = |shape| tensor::<3>(shape, 1, &device);
    let run = |q, k, v, sequences: &Sequences, params| {
        argument(try_attention(x(q), x(k), x(v), sequences, params))
    };
    assert_eq!(run([4, 3, 8], [4, 2, 8], [4, 2, 8], &one, params), "k");
    assert_eq!(run([4, 2, 8], [4, 2, 4], [4, 2, 4], &one, params), "k");
    assert_eq!(run([4, 2, 8], [4, 2, 8], [5, 2, 8], &one, params), "v");
    assert_eq!(
        run([4, 1, 257], [4, 1, 257], [4, 1, 257], &one, params),
        "q"
    );
    let (shape, three) = ([4, 2, 8], Sequences::Equal(3));
    assert_eq!(run(shape, shape, shape, &three, params), "sequences");
    let none = Sequences::packed(offsets(&[0], &device));
    assert_eq!(run(shape, shape, shape, &none, params), "sequences");
    let window = AttentionParams {
        window: Some(2),
        ..params
    };
    assert_eq!(run(shape, shape, shape, &one, window), "window");
    let signed =
        Tensor::<1, Int>::from_data(TensorData::new(vec![0i32, 4], [2]), (&device, DType::I32));
    let signed = Sequences::packed(signed);
    assert_eq!(run(shape, shape, shape, &signed, params), "sequences.q");
    let half = x(shape).cast(DType::BF16);
    let found = try_attention(x(shape), half, x(shape), &one, params);
    assert_eq!(argument(found), "k");

    let qkv = || tensor::<2>([4, 32], 1, &device);
    let found = try_attention_qkv(qkv(), [3, 1], &one, None, params);
    assert_eq!(argument(found), "qkv");
    let short = RotaryTables::try_new(3, 8, 10_000.0, &device).unwrap();
    let found = try_attention_qkv(qkv(), [2, 1], &one, Some(&short), params);
    assert_eq!(argument(found), "rotary");
    assert_eq!(
        argument(RotaryTables::try_new(0, 8, 1.0, &device)),
        "positions"
    );
    assert_eq!(argument(RotaryTables::try_new(4, 7, 1.0, &device)), "head");
    assert_eq!(
        argument(RotaryTables::try_new(4, 8, 0.0, &device)),
        "rotary"
    );

    let config = Nvfp4AttentionConfig::new(32, 2);
    let bad = config.clone().with_window(Some(0)).try_init(&device);
    assert_eq!(argument(bad), "window");
    let bad = config.clone().with_softcap(Some(-1.0)).try_init(&device);
    assert_eq!(argument(bad), "softcap");
    let windowed = module(&config.clone().with_window(Some(2)), &device);
    let open: RopeCache = RopeCacheConfig::new(8, 16).with_causal(false).init(&device);
    let found = windowed.try_forward(x([1, 4, 32]), &open, None);
    assert_eq!(argument(found), "positions");
    let dropped = module(&config.with_dropout(0.5), &device);
    let causal = RopeCacheConfig::new(8, 16).init(&device);
    let packed = offsets(&[0, 4], &device);
    let found = dropped.try_forward_packed(tensor([4, 32], 1, &device), &causal, packed);
    assert_eq!(argument(found), "dropout");
}
