//! Decoding over a cache: compares the kernels with the oracle, bit for bit without matrix
//! instructions, and the oracle with that of whole sequences.

use half::{bf16, f16};

use super::{
    case::{Operand, Tables},
    decode_bounds::Decoded,
    is_gpu,
};
use crate::support::device::{assert_floats, read_bytes, upload_bytes};
use crate::support::inputs::{Generator, convert};
use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::{
    AttentionParams,
    reference::attention::{
        AttentionShape, DecodeShape, HostHeads, HostKv, HostKvMut, append, attention_decode,
        attention_forward,
    },
};
use nvfp4_kernels::attention::{
    Heads,
    decode::{self, CacheKind, KvCache, NewTokens},
    proof::uses_mma,
};

/// A cache and the decoding steps on it.
#[derive(Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head: usize,
    capacity: usize,
    /// New tokens of each sequence in each step; sequences are padded to the longest.
    steps: Vec<Vec<u32>>,
    e4m3: bool,
    rotary: bool,
    params: AttentionParams,
}

impl Case {
    fn new(head: usize, capacity: usize, steps: &[&[u32]]) -> Self {
        Self {
            heads: 4,
            kv_heads: 2,
            head,
            capacity,
            steps: steps.iter().map(|step| step.to_vec()).collect(),
            e4m3: false,
            rotary: true,
            params: AttentionParams::causal(head),
        }
    }
}

/// Scales of E4M3 caches.
const SCALES: [f32; 2] = [0.03, 0.25];
/// Number of tokens in a step from which on a prompt is appended instead of decoded.
const PROMPT: usize = 20;

/// Performs the steps on the device and on the host, and compares outputs and caches.
fn check<T: Operand>(client: &Client, case: &Case) {
    let Case {
        heads,
        kv_heads,
        head,
        capacity,
        ..
    } = *case;
    let batch = case.steps[0].len();
    let mut random = Generator::new((head + capacity) as u32);
    let tables = Tables::new(capacity, head);
    let rope = tables.upload(client);
    let len = batch * capacity * kv_heads * head;
    let kind = if case.e4m3 {
        CacheKind::E4m3
    } else {
        CacheKind::Float
    };
    // Memory past a sequence is not read, so it is NaN.
    let bytes = if case.e4m3 { len } else { len * T::KIND.size() };
    let filled = vec![0xFFu8; bytes];
    let cache = KvCache {
        k: upload_bytes(client, &filled),
        v: upload_bytes(client, &filled),
        batch,
        capacity,
        kv_heads,
        head,
        kind,
        scales: if case.e4m3 { SCALES } else { [1.0; 2] },
    };
    let mut codes = [vec![0xFFu8; len], vec![0xFFu8; len]];
    let mut floats =
        [0, 1].map(|_| bytemuck::cast_slice::<u8, T>(&vec![0xFF; len * T::KIND.size()]).to_vec());
    let mut starts = vec![0u32; batch];
    for (index, counts) in case.steps.iter().enumerate() {
        let what = format!(
            "step {index} of {:?}, head {head}, {kind:?}, {:?}",
            case.steps,
            T::KIND
        );
        let time = counts.iter().copied().max().unwrap_or(0) as usize;
        let all = heads + 2 * kv_heads;
        let drawn: Vec<f32> = (0..batch * time * all * head)
            .map(|_| random.normal())
            .collect();
        let qkv = convert::<T>(&drawn);
        let shape = DecodeShape {
            heads,
            kv_heads,
            head,
            time,
            capacity,
            starts: &starts,
            counts,
        };
        let angles = case.rotary.then_some((&tables.cos[..], &tables.sin[..]));
        let [k_codes, v_codes] = &mut codes;
        let [k_floats, v_floats] = &mut floats;
        let mut written = match case.e4m3 {
            true => [
                HostKvMut::E4m3(k_codes, SCALES[0]),
                HostKvMut::E4m3(v_codes, SCALES[1]),
            ],
            false => [HostKvMut::Float(k_floats), HostKvMut::Float(v_floats)],
        };
        let [k, v] = &mut written;
        let queries = append(&qkv, [k, v], &shape, angles);
        let host = |i: usize| match case.e4m3 {
            true => HostKv::E4m3(&codes[i], SCALES[i]),
            false => HostKv::Float(&floats[i]),
        };
        let decoded = Decoded {
            queries: &queries,
            k: host(0),
            v: host(1),
            shape: &shape,
            params: &case.params,
        };

        let handle = upload_bytes(client, bytemuck::cast_slice(&qkv));
        let fused = Heads::contiguous(handle, [batch * time, all, head], T::KIND);
        let words = |values: &[u32]| upload_bytes(client, bytemuck::cast_slice(values));
        let (device_starts, device_counts) = (words(&starts), words(counts));
        let new = NewTokens {
            q: fused.part(0, heads),
            k: fused.part(heads, kv_heads),
            v: fused.part(heads + kv_heads, kv_heads),
            starts: &device_starts,
            counts: &device_counts,
            rope: case.rotary.then_some(&rope),
        };
        let values = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let read = |handle: &Handle, len: usize| -> Vec<T> {
            let bytes = read_bytes(client, handle, len * T::KIND.size());
            bytemuck::cast_slice(&bytes).to_vec()
        };
        let out = if time >= PROMPT {
            let turned = Heads::empty(client, [batch * time, heads, head], T::KIND);
            decode::append(client, &new, &cache, &turned).unwrap();
            let found = read(&turned.handle, queries.len());
            assert_floats(
                &values(&found),
                &values(&queries),
                &format!("{what}: queries"),
            );
            decode::decode(client, &new, &cache, &case.params).unwrap()
        } else {
            decode::decode(client, &new, &cache, &case.params).unwrap()
        };
        let by_mma = uses_mma(client, &new, &cache, &case.params);
        decoded.assert(&read(&out.handle, queries.len()), by_mma, &what);
        for (i, handle) in [&cache.k, &cache.v].into_iter().enumerate() {
            let found = read_bytes(client, handle, bytes);
            let expected: &[u8] = match case.e4m3 {
                true => &codes[i],
                false => bytemuck::cast_slice(&floats[i]),
            };
            assert_eq!(&found[..], expected, "{what}: cache {i}");
        }
        for (start, count) in starts.iter_mut().zip(counts) {
            *start += count;
        }
    }
}

/// One sequence, starting with its prompt, over several tiles and runs.
fn steps<T: Operand>(client: &Client) {
    let prompt = if is_gpu(client) { 1500 } else { 140 };
    let capacity = prompt as usize + 3;
    check::<T>(
        client,
        &Case::new(64, capacity, &[&[prompt], &[1], &[1], &[1]]),
    );
    check::<T>(client, &Case::new(64, 20, &[&[1], &[1], &[3], &[1]]));
}

/// Heads of every width, groups of eight and of more queries than a cube has, and enough heads that
/// a run has several tiles.
fn heads<T: Operand>(client: &Client) {
    let long = if is_gpu(client) { 1100 } else { 129 };
    for (head, heads, kv_heads) in [
        (128, 8, 1),
        (80, 12, 1),
        (96, 4, 2),
        (256, 2, 1),
        (24, 4, 4),
    ] {
        let mut case = Case::new(head, long + 8, &[&[long as u32], &[1], &[5]]);
        (case.heads, case.kv_heads) = (heads, kv_heads);
        check::<T>(client, &case);
    }
}

/// Sequences of different lengths, some of which get no new tokens.
fn batches<T: Operand>(client: &Client) {
    let long = if is_gpu(client) { 700 } else { 130 };
    let steps: [&[u32]; 4] = [&[long, 3, 0], &[1, 1, 1], &[1, 0, 1], &[0, 2, 2]];
    let case = Case {
        heads: 6,
        ..Case::new(16, long as usize + 4, &steps)
    };
    check::<T>(client, &case);
    check::<T>(
        client,
        &Case {
            rotary: false,
            ..case
        },
    );
}

/// Windows, soft caps, and groups of one head and of many.
fn masks<T: Operand>(client: &Client) {
    let long = if is_gpu(client) { 900 } else { 40 };
    for (window, softcap) in [(Some(7), None), (None, Some(1.5)), (Some(33), Some(0.5))] {
        let mut case = Case::new(32, long as usize + 8, &[&[long], &[1], &[4], &[1]]);
        (case.heads, case.kv_heads) = if window.is_some() { (2, 2) } else { (12, 1) };
        case.params.window = window;
        case.params.softcap = softcap;
        check::<T>(client, &case);
    }
}

/// E4M3 elements with scales.
fn e4m3<T: Operand>(client: &Client) {
    let long = if is_gpu(client) { 300 } else { 30 };
    for head in [64, 128] {
        let steps: [&[u32]; 3] = [&[long, 2], &[1, 1], &[2, 1]];
        let case = Case {
            e4m3: true,
            ..Case::new(head, long as usize + 4, &steps)
        };
        check::<T>(client, &case);
    }
}

element_tests! {
    steps: steps_f32, steps_bf16, steps_f16;
    heads: heads_f32, heads_bf16, heads_f16;
    batches: batches_f32, batches_bf16, batches_f16;
    masks: masks_f32, masks_bf16, masks_f16;
    e4m3: e4m3_f32, e4m3_bf16, e4m3_f16;
}

/// Tokens beyond the capacity are not written, and no access is outside the cache.
#[test]
fn a_full_cache_takes_nothing_more() {
    let client = client!("decode::a_full_cache_takes_nothing_more");
    check::<f32>(&client, &Case::new(16, 5, &[&[4, 2], &[3, 1], &[1, 1]]));
}

/// Only the summation order differs.
#[test]
fn the_oracle_is_that_of_whole_sequences() {
    let (heads, kv_heads, head, tokens, new) = (4, 2, 32, 300, 3);
    let mut random = Generator::new(5);
    let mut draw = |len: usize| (0..len).map(|_| random.normal()).collect::<Vec<f32>>();
    let q = draw(new * heads * head);
    let k = draw(tokens * kv_heads * head);
    let v = draw(tokens * kv_heads * head);
    for (window, softcap) in [(None, None), (Some(70), Some(2.0))] {
        let params = AttentionParams {
            window,
            softcap,
            ..AttentionParams::causal(head)
        };
        let shape = AttentionShape {
            heads,
            kv_heads,
            head,
            q_tokens: new,
            k_tokens: tokens,
            q_starts: &[0, new as u32],
            k_starts: &[0, tokens as u32],
            params,
        };
        let wide = |x| HostHeads::contiguous(x, heads * head);
        let narrow = |x| HostHeads::contiguous(x, kv_heads * head);
        let whole = attention_forward(wide(&q), narrow(&k), narrow(&v), &shape).out;
        let shape = DecodeShape {
            heads,
            kv_heads,
            head,
            time: new,
            capacity: tokens,
            starts: &[(tokens - new) as u32],
            counts: &[new as u32],
        };
        let found = attention_decode(&q, HostKv::Float(&k), HostKv::Float(&v), &shape, &params);
        for (found, whole) in found.iter().zip(&whole) {
            assert!((found - whole).abs() <= 2e-6, "{found}, not {whole}");
        }
    }
}

/// Operands that do not fit are errors.
#[test]
fn misfits_are_errors() {
    let client = client!("decode::misfits_are_errors");
    let memory = client.empty(1 << 16);
    let heads = |count: usize| {
        let dtype = nvfp4_kernels::tensor::FloatKind::F32;
        Heads::contiguous(memory.clone(), [2, count, 16], dtype)
    };
    let new = NewTokens {
        q: heads(4),
        k: heads(2),
        v: heads(2),
        starts: &memory,
        counts: &memory,
        rope: None,
    };
    let cache = KvCache {
        k: memory.clone(),
        v: memory.clone(),
        batch: 2,
        capacity: 8,
        kv_heads: 2,
        head: 16,
        kind: CacheKind::Float,
        scales: [1.0; 2],
    };
    let params = AttentionParams::causal(16);
    assert!(decode::decode(&client, &new, &cache, &params).is_ok());
    let error = |new: &NewTokens<'_>, cache: &KvCache, params: &AttentionParams| {
        let made = decode::decode(&client, new, cache, params);
        made.unwrap_err().to_string()
    };
    let wider = NewTokens {
        k: heads(4),
        v: heads(4),
        ..new.clone()
    };
    assert!(error(&wider, &cache, &params).contains("`k`"));
    for (cache, expected) in [
        (
            KvCache {
                capacity: 1 << 20,
                ..cache.clone()
            },
            "cache.k",
        ),
        (
            KvCache {
                batch: 3,
                ..cache.clone()
            },
            "`q`",
        ),
        (
            KvCache {
                scales: [0.0, 1.0],
                ..cache.clone()
            },
            "cache.scales",
        ),
        (
            KvCache {
                scales: [1.0, f32::NAN],
                ..cache.clone()
            },
            "cache.scales",
        ),
    ] {
        let found = error(&new, &cache, &params);
        assert!(found.contains(expected), "{found}");
    }
    for params in [
        AttentionParams::new(16),
        AttentionParams {
            quiet_softmax: true,
            ..params
        },
    ] {
        assert!(error(&new, &cache, &params).contains("`params`"));
    }
}
