//! Amax values of the output that the forward computes while writing it, compared with those of a
//! separate pass and of the oracle.

use super::is_gpu;
use crate::support::device::{DeviceElement, assert_floats, read_bytes, read_f32s, upload_bytes};
use crate::support::inputs::{Generator, convert};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_formats::{AmaxGranularity, AttentionParams, Hadamard, HadamardSize, reference};
use nvfp4_kernels::{
    attention::{Attention, Heads, Sequences, forward, forward_with_amaxes},
    quantize::AmaxRequest,
};

fn requests() -> Vec<AmaxRequest> {
    let whole = AmaxGranularity::PerTensor;
    let request = |hadamard: Option<Option<Hadamard>>| AmaxRequest {
        rows: Some(whole),
        cols: hadamard.map(|hadamard| (whole, hadamard)),
    };
    let longer = Hadamard::seeded_with_size(HadamardSize::H32, 9);
    vec![
        request(None),
        request(Some(None)),
        request(Some(Some(Hadamard::default()))),
        request(Some(Some(longer))),
        AmaxRequest::default(),
    ]
}

/// Sequences of whole tiles, with a remainder of whole strips, with fewer tokens than a strip, and
/// with lengths for which strips cross several sequences; and a single sequence. The last value is
/// NaN.
#[test]
fn the_forward_finds_the_amaxes_of_its_output() {
    let client = client!("amax::the_forward_finds_the_amaxes_of_its_output");
    check(&client, |count, _| Sequences::Equal(count));
}

/// Sequences at offsets: every second one is longer than its neighbors.
#[test]
fn packed_sequences() {
    let client = client!("amax::packed_sequences");
    check(&client, |count, tokens| {
        let all = count * tokens;
        let starts: Vec<u32> = (0..=count)
            .map(|i| (i * tokens + i % 2).min(all) as u32)
            .collect();
        let starts = upload_bytes(&client, bytemuck::cast_slice(&starts));
        Sequences::Offsets {
            q: starts.clone(),
            k: starts,
            count,
        }
    });
}

/// `sequences` returns the given number of sequences of the given length.
fn check(client: &Client, sequences: impl Fn(usize, usize) -> Sequences) {
    let cases: &[(usize, usize)] = match is_gpu(client) {
        true => &[
            (2, 256),
            (3, 144),
            (2, 137),
            (1, 137),
            (5, 7),
            (1, 1),
            (9, 1024),
        ],
        false => &[(2, 16), (1, 21), (2, 5)],
    };
    let (heads, kv_heads) = (4, 2);
    for head in [64, 128] {
        for (&(count, tokens), has_nan) in
            cases.iter().flat_map(|case| [(case, false), (case, true)])
        {
            let rows = count * tokens;
            let mut random = Generator::new((rows + head) as u32);
            let len = rows * (heads + 2 * kv_heads) * head;
            let mut drawn: Vec<f32> = (0..len).map(|_| random.normal()).collect();
            if has_nan {
                drawn[len - 1] = f32::NAN;
            }
            let handle = upload_bytes(client, bytemuck::cast_slice(&convert::<bf16>(&drawn)));
            let all = [rows, heads + 2 * kv_heads, head];
            let fused = Heads::contiguous(handle, all, bf16::KIND);
            let attention = Attention {
                q: fused.part(0, heads),
                k: fused.part(heads, kv_heads),
                v: fused.part(heads + kv_heads, kv_heads),
                sequences: sequences(count, tokens),
                params: AttentionParams::causal(head),
            };
            let cols = heads * head;
            let read = |out: &Heads| -> Vec<bf16> {
                let bytes = read_bytes(client, &out.handle, rows * cols * 2);
                bytemuck::cast_slice(&bytes).to_vec()
            };
            let values = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
            let plain = read(&forward(client, &attention).unwrap().out);
            for request in requests() {
                let what = format!("{count} x {tokens}, head {head}, NaN {has_nan}, {request:?}");
                let (output, found) = forward_with_amaxes(client, &attention, &request).unwrap();
                let out = read(&output.out);
                assert_floats(&values(&out), &values(&plain), &what);
                let of_cols = request.cols.map(|(_, hadamard)| match hadamard {
                    Some(hadamard) => reference::amax_rht(&out, rows, cols, &hadamard),
                    None => reference::amax(&out),
                });
                let expected = [request.rows.map(|_| reference::amax(&out)), of_cols];
                let found = [found.rows, found.cols]
                    .map(|amax| amax.map(|amax| read_f32s(client, &amax, 1)[0].to_bits()));
                assert_eq!(found, expected.map(|amax| amax.map(f32::to_bits)), "{what}");
                assert_eq!(
                    has_nan && request.rows.is_some(),
                    found[0].is_some_and(|bits| f32::from_bits(bits).is_nan())
                );
            }
        }
    }
}
