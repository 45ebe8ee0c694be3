//! Dgrad of layers with a packed weight in the layout that their forward reads: codes read across
//! the K dimension, compared with the same weight dequantized in advance.

use criterion::Criterion;
use cubecl::prelude::*;
use nvfp4_kernels::{
    gemm::{
        Gemm, Operand, Plan,
        proof::{W4a16MnMajor, W4a16MnTile, decode},
    },
    moe::GroupOffsets,
    tensor::{FloatKind, Matrix},
};

use super::{
    CUBLAS, Noise, Record, cublas, is_gpu, is_wanted, multiply, shrunk, sizes, time_on_device,
};

/// Tokens, inputs and outputs of a layer: M, N and K.
const LAYERS: [(usize, usize, usize); 5] = [
    (4096, 4096, 14336),
    (4096, 14336, 4096),
    (4096, 4096, 6144),
    (1024, 4096, 4096),
    (256, 4096, 14336),
];

/// Layers of all tokens, with the number of experts.
const EXPERTS: [(usize, usize, usize, usize); 2] = [(8192, 4096, 7168, 8), (8192, 2048, 1536, 128)];

/// Returns `rows` rows of packed elements as bf16, without the global scale.
fn dequantized(client: &Client, noise: &Noise, rows: usize, cols: usize) -> Matrix {
    let packed = noise.packed(client, rows, cols, 2);
    Matrix::new(decode(client, &packed), rows, cols, FloatKind::Bf16).unwrap()
}

pub fn dgrad(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    for (m, n, k) in LAYERS {
        let name = format!("dgrad/{m} x {n} x {k}");
        if !is_wanted(&name) {
            continue;
        }
        let (m, n, k) = shrunk((m, n, k));
        let operations = 2.0 * (m * n * k) as f64;
        let (dy, w) = (noise.matrix(client, m, k, 1), noise.packed(client, k, n, 2));
        let mut run = |kind: &str, queue: &dyn Fn()| {
            let record = Record::new(format!("{name}, {kind}"), operations);
            time_on_device(criterion, client, record, |_| queue());
        };
        run("packed", &|| {
            multiply(client, Gemm::new(&dy, Operand::packed_mn_major(&w))).unwrap();
        });
        // These kernels are the GPU's.
        for tile in W4a16MnTile::ALL.into_iter().filter(|_| is_gpu()) {
            let plan = Plan::from(W4a16MnMajor(tile, 16));
            let request = || Gemm::new(&dy, Operand::packed_mn_major(&w)).plan(plan);
            run(&format!("packed, {} rows", tile.rows_a()), &|| {
                multiply(client, request()).unwrap();
            });
        }
        let dense = dequantized(client, noise, k, n);
        run("bf16, MN-major", &|| {
            multiply(client, Gemm::new(&dy, Operand::mn_major(&dense))).unwrap();
        });
        run("dequantized, then bf16", &|| {
            let values = Matrix::new(decode(client, &w), k, n, FloatKind::Bf16).unwrap();
            multiply(client, Gemm::new(&dy, Operand::mn_major(&values))).unwrap();
        });
        let rows = noise.matrix(client, n, k, 3);
        match cublas(client, &dy, &rows) {
            Ok(_) => run(CUBLAS, &|| {
                cublas(client, &dy, &rows).unwrap();
            }),
            Err(error) => println!("{name}: {error}"),
        }
    }
    for (m, n, k, groups) in EXPERTS {
        let name = format!("dgrad/{m} x {n} x {k}, {groups} ");
        if !is_wanted(&name) {
            continue;
        }
        let (m, n, k) = shrunk((m, n, k));
        let dy = noise.matrix(client, m, k, 1);
        let w = noise.packed(client, groups * k, n, 2);
        let dense = dequantized(client, noise, groups * k, n);
        for (kind, skewed) in [("balanced", false), ("skewed", true)] {
            let mut offsets = vec![0u32];
            for size in sizes(m, groups, skewed) {
                offsets.push(offsets.last().unwrap() + size as u32);
            }
            let offsets = GroupOffsets {
                offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
                count: groups,
            };
            for (form, b) in [
                ("packed", Operand::packed_mn_major(&w)),
                ("bf16, MN-major", Operand::mn_major(&dense)),
            ] {
                let record = format!("{name}{kind}, {form}");
                let record = Record::new(record, 2.0 * (m * n * k) as f64);
                time_on_device(criterion, client, record, |_| {
                    multiply(client, Gemm::new(&dy, b).m_grouped(&offsets)).unwrap();
                });
            }
        }
    }
}
