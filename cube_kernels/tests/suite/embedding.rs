//! Embedding lookup and the gradient of the table, compared with the oracle bit for bit.

use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_formats::reference::{self, TablePart};
use nvfp4_kernels::{embedding, tensor::FloatKind};

use crate::support::{
    device::{DeviceElement, assert_floats, read_f32s, read_matrix, upload, upload_bytes},
    inputs::{Generator, Kind, convert, values},
};

fn ids_of(kind: &str, tokens: usize, vocab: usize) -> Vec<u32> {
    let mut random = Generator::new(tokens as u32);
    (0..tokens)
        .map(|token| match kind {
            "same" => vocab as u32 - 1,
            "ascending" => (token % vocab) as u32,
            "skewed" => {
                let u = random.uniform();
                (u * u * u * u * vocab as f32) as u32
            }
            // Some ids are not a row.
            "wrong" => (random.next_u32() % (2 * vocab as u32 + 1)).wrapping_sub(1),
            _ => random.next_u32() % vocab as u32,
        })
        .collect()
}

fn check_gradient<T: DeviceElement>(client: &Client) {
    let cpu = client.name() == "cpu";
    let sizes: &[(usize, usize, usize)] = if cpu {
        &[
            (0, 5, 8),
            (1, 1, 1),
            (33, 7, 8),
            (100, 300, 12),
            (1100, 256, 7),
            (1500, 70_000, 16),
        ]
    } else {
        &[
            (0, 5, 8),
            (1, 1, 1),
            (33, 7, 8),
            (1100, 256, 7),
            (16384, 256, 768),
            (20_001, 50_257, 96),
            (16384, 262_144, 64),
        ]
    };
    for &(tokens, vocab, cols) in sizes {
        for kind in ["uniform", "same", "ascending", "skewed", "wrong"] {
            let what = format!("{kind}: {tokens} of {vocab} x {cols} {:?}", T::KIND);
            let ids = ids_of(kind, tokens, vocab);
            let grad: Vec<T> = convert(&values(Kind::Heavy, tokens * cols, 3));
            let matrix = upload(client, &grad, tokens, cols);
            let on_device = upload_bytes(client, bytemuck::cast_slice(&ids));
            let found = embedding::embedding_gradient(client, &matrix, &on_device, vocab).unwrap();
            let found = read_f32s(client, &found.handle, vocab * cols);
            let expected = reference::embedding_gradient(&grad, &ids, vocab, cols);
            assert_floats(&found, &expected, &what);
        }
    }
}

fn check_rows<T: DeviceElement>(client: &Client) {
    for (tokens, vocab, cols) in [
        (0, 3, 8),
        (1, 1, 1),
        (50, 9, 7),
        (70, 300, 20),
        (65, 33, 64),
    ] {
        let table: Vec<T> = convert(&values(Kind::Normal, vocab * cols, 1));
        let matrix = upload(client, &table, vocab, cols);
        let parts = [0, 2].map(|first| TablePart {
            first,
            of: vocab + 2 * first,
        });
        for (kind, whole) in [
            ("uniform", parts[0]),
            ("wrong", parts[0]),
            ("uniform", parts[1]),
        ] {
            let ids = ids_of(kind, tokens, whole.of);
            let on_device = upload_bytes(client, bytemuck::cast_slice(&ids));
            let expected: Vec<f32> = reference::embedding(&table, whole, &ids, cols)
                .into_iter()
                .map(|x| x.to_f32())
                .collect();
            let look_up = |dtype| {
                let found =
                    embedding::embedding(client, (&matrix, whole), &on_device, tokens, dtype);
                found.unwrap()
            };
            let what = format!("{kind}: {tokens} of {vocab} x {cols} {:?}", T::KIND);
            let found = read_matrix::<f32>(client, &look_up(FloatKind::F32));
            assert_floats(&found, &expected, &what);
            let found = read_matrix::<bf16>(client, &look_up(FloatKind::Bf16));
            assert_floats(&found, &convert::<bf16>(&expected), &what);
            let found = read_matrix::<f16>(client, &look_up(FloatKind::F16));
            assert_floats(&found, &convert::<f16>(&expected), &what);
        }
    }
}

element_tests! {
    check_gradient: gradient_f32, gradient_bf16, gradient_f16;
    check_rows: rows_f32, rows_bf16, rows_f16;
}

#[test]
fn wrong_arguments_are_refused() {
    let client = client!("embedding::wrong_arguments_are_refused");
    let ids = upload_bytes(&client, &[0; 8]);
    let table = upload(&client, &[0f32; 16], 2, 8);
    let two = TablePart::whole(2);
    let error = embedding::embedding(&client, (&table, two), &ids, 3, FloatKind::F32).unwrap_err();
    assert!(error.to_string().contains("`ids`"), "{error}");
    let part = TablePart { first: 1, of: 2 };
    let error = embedding::embedding(&client, (&table, part), &ids, 2, FloatKind::F32).unwrap_err();
    assert!(error.to_string().contains("`part`"), "{error}");
    let grad = upload(&client, &[0f32; 24], 3, 8);
    let error = embedding::embedding_gradient(&client, &grad, &ids, 2).unwrap_err();
    assert!(error.to_string().contains("`ids`"), "{error}");
    let empty = upload::<f32>(&client, &[], 0, 8);
    let error = embedding::embedding(
        &client,
        (&empty, TablePart::whole(0)),
        &ids,
        2,
        FloatKind::F32,
    )
    .unwrap_err();
    assert!(error.to_string().contains("`table`"), "{error}");
}
