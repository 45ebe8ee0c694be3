//! Rotary positions: the pass, and gradients that are rotated back.

use half::{bf16, f16};

use super::{
    case::{Case, Operand, Tables, check_turned, nan_memory, read},
    is_gpu,
};
use crate::support::device::{assert_floats, upload_bytes};
use crate::support::inputs::{Generator, convert};
use cubecl::prelude::*;
use nvfp4_formats::reference::attention::rope;
use nvfp4_kernels::attention::{self, Heads, Rotation, TokenSequences};

/// Heads by vectors and by elements, contiguous and as columns of a wider matrix, into other memory
/// and in place, forward and inverse.
fn pass<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 37 } else { 1 };
    for (heads, head, extra) in [(5, 64, 16), (3, 20, 3), (1, 2, 0), (6, 128, 0)] {
        let lengths = [3, 0, 9, 1, 5].map(|length| length * scale);
        let mut starts = vec![0u32];
        for length in lengths {
            starts.push(starts[starts.len() - 1] + length as u32);
        }
        let tokens = starts[5] as usize;
        let width = heads * head;
        let tables = Tables::new(7 * scale, head);
        let angles = (&tables.cos[..], &tables.sin[..]);
        let device_tables = tables.upload(client);
        let mut random = Generator::new(head as u32);
        let drawn: Vec<f32> = (0..tokens * (width + extra))
            .map(|_| random.normal())
            .collect();
        let matrix = convert::<T>(&drawn);
        let x: Vec<T> = matrix
            .chunks(width + extra)
            .flat_map(|row| row[extra..].to_vec())
            .collect();
        let handle = upload_bytes(client, bytemuck::cast_slice(&starts));
        let sequences = TokenSequences::Offsets {
            starts: &handle,
            count: 5,
        };
        for rotation in [Rotation::Forward, Rotation::Inverse] {
            let inverse = rotation == Rotation::Inverse;
            let what = format!("{heads} heads of {head} {rotation:?} {:?}", T::KIND);
            let expected = rope(&x, (heads, head), &starts, angles, inverse);
            let from = Heads {
                offset: extra,
                row_stride: width + extra,
                ..Heads::contiguous(
                    upload_bytes(client, bytemuck::cast_slice(&matrix)),
                    [tokens, heads, head],
                    T::KIND,
                )
            };
            let to = Heads::contiguous(
                nan_memory(client, tokens * width * size_of::<T>()),
                [tokens, heads, head],
                T::KIND,
            );
            attention::rope(client, &from, sequences, &device_tables, rotation, &to).unwrap();
            assert_floats(&read::<T>(client, &to), &expected, &what);
            attention::rope(client, &from, sequences, &device_tables, rotation, &from).unwrap();
            assert_floats(
                &read::<T>(client, &from),
                &expected,
                &format!("{what}, in place"),
            );
        }
        // Sequences of one length.
        let equal: Vec<u32> = (0..=3).map(|i| i * (tokens / 3) as u32).collect();
        let from = Heads::contiguous(
            upload_bytes(client, bytemuck::cast_slice(&x)),
            [tokens, heads, head],
            T::KIND,
        );
        let all = TokenSequences::Equal(3);
        attention::rope(client, &from, all, &device_tables, Rotation::Forward, &from).unwrap();
        let expected = rope(&x, (heads, head), &equal, angles, false);
        assert_floats(&read::<T>(client, &from), &expected, "equal lengths");
    }
}

/// Gradients that are rotated back when they are written.
fn backward<T: Operand>(client: &Client) {
    let scale = if is_gpu(client) { 29 } else { 1 };
    for fused in [false, true] {
        let lengths = [(5, 5), (0, 0), (8, 8), (2, 2)].map(|(q, k)| (q * scale, k * scale));
        let mut case = Case::new(64, 0, 0).sequences(&lengths, if fused { 3 } else { 0 });
        (case.heads, case.kv_heads, case.fused) = (4, 2, fused);
        let case = case.causal();
        // Tokens beyond the tables are rotated like their last position.
        for positions in [8 * scale, 4 * scale] {
            check_turned::<T>(client, &case, &Tables::new(positions, case.head));
        }
    }
}

element_tests! {
    pass: pass_f32, pass_bf16, pass_f16;
    backward: backward_f32, backward_bf16, backward_f16;
}
