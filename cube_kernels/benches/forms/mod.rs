//! GEMMs of layers in forms other than a product of two tensors with one amax each: an amax per row
//! (per token), groups along K (weight gradients of experts), and small M with a fused norm and
//! SwiGLU.

use criterion::Criterion;
use cubecl::prelude::*;
use nvfp4_formats::{
    AmaxGranularity, Format, Layout,
    reference::{Activation, Norm},
};
use nvfp4_kernels::{
    activation::activation,
    gemm::{FusedLinear, FusedNorm, Gemm, Operand, fused_linear},
    moe::GroupOffsets,
    norm::{NormRequest, norm},
    quantize::AmaxRequest,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

use super::{
    CUBLAS, Noise, Record, b200_shape, cublas, decoded, device, is_wanted, multiply, shrunk, sizes,
    time_on_device,
};

/// Products of which operands have an amax per row.
const ROWS: [(usize, usize, usize); 4] = [
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 8192, 8192),
    (64, 8192, 8192),
];

/// Weight gradients of experts: inputs and outputs of a layer, tokens of all experts, and experts.
const EXPERTS: [(usize, usize, usize, usize); 3] = [
    (7168, 4096, 32768, 8),
    (7168, 4096, 32768, 32),
    (2048, 1536, 32768, 128),
];

/// Rows of a decoding step, and the inputs and outputs of gate and up: Llama-3 8B's.
const FUSED: [(usize, usize, usize); 3] = [(1, 28672, 4096), (8, 28672, 4096), (16, 28672, 4096)];

pub fn forms(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    for shape in ROWS {
        per_row(criterion, client, noise, shape);
    }
    for shape in EXPERTS {
        along_k(criterion, client, noise, shape);
    }
    for shape in FUSED {
        fused(criterion, client, noise, shape);
    }
}

/// Returns `packed` with `count` amax values, one per stored row of each group.
fn with_row_amax(client: &Client, packed: &DeviceQuantized, count: usize) -> DeviceQuantized {
    let values: Vec<f32> = (0..count).map(|row| 1000.0 + row as f32).collect();
    let amax = client.create_from_slice(bytemuck::cast_slice(&values));
    let layout = Layout {
        amax: AmaxGranularity::PerRow,
        ..packed.layout
    };
    let parts = (packed.codes.clone(), packed.scales.clone(), amax);
    DeviceQuantized::new(layout, parts)
}

/// Times products with an amax per row of no operand, of `a`, as in fprop, and of both, as in wgrad.
fn per_row(
    criterion: &mut Criterion,
    client: &Client,
    noise: &Noise,
    (m, n, k): (usize, usize, usize),
) {
    let name = format!("form/{m} x {n} x {k}");
    if !is_wanted(&name) {
        return;
    }
    let (m, n, k) = shrunk((m, n, k));
    let (a, b) = (noise.packed(client, m, k, 1), noise.packed(client, n, k, 2));
    let rows_a = with_row_amax(client, &a, m);
    let rows_b = with_row_amax(client, &b, n);
    for (kind, a, b) in [
        ("NVFP4", &a, &b),
        ("NVFP4 with an amax per row of one operand", &rows_a, &b),
        ("NVFP4 with an amax per row of both", &rows_a, &rows_b),
    ] {
        let shape = b200_shape(Format::Nvfp4, (m, n, k), 1);
        let record = Record::of_packed(format!("{name}, {kind}"), shape);
        time_on_device(criterion, client, record, |_| {
            multiply(client, Gemm::new(a, b)).unwrap();
        });
    }
    let (x, y) = (decoded(client, &a), decoded(client, &b));
    let record = Record::new(format!("{name}, {CUBLAS}"), 2.0 * (m * n * k) as f64);
    match cublas(client, &x, &y) {
        Ok(_) => time_on_device(criterion, client, record, |_| {
            cublas(client, &x, &y).unwrap();
        }),
        Err(error) => println!("{name}: {error}"),
    }
}

/// Times weight gradients of experts into `f32`, and the dense GEMM with as many operations. The
/// groups of cuBLAS, one call each, have equal sizes and bf16 outputs.
fn along_k(
    criterion: &mut Criterion,
    client: &Client,
    noise: &Noise,
    (m, n, k, groups): (usize, usize, usize, usize),
) {
    let full = format!("form along K/{m} x {n} x {k}");
    if !is_wanted(&full) {
        return;
    }
    let (m, n, _) = shrunk((m, n, k));
    let k = device::size(k, 64 * groups);
    let operations = 2.0 * (m * n * k) as f64;
    let record = |kind: &str| Record::new(format!("{full}, {kind}"), operations);
    let (a, b) = (noise.packed(client, m, k, 1), noise.packed(client, n, k, 2));
    let into_f32 = |request: Gemm<'_>| {
        multiply(client, request.out(FloatKind::F32)).unwrap();
    };
    // The dense GEMM of other numbers of groups has the same name.
    time_on_device(criterion, client, record("dense, NVFP4"), |_| {
        into_f32(Gemm::new(&a, &b));
    });
    let [mx_a, mx_b] =
        [(m, 1), (n, 2)].map(|(rows, seed)| noise.mx(client, Format::Mxfp8, (rows, k), seed));
    let rows_a = with_row_amax(client, &a, groups * m);
    let rows_b = with_row_amax(client, &b, groups * n);
    for (kind, skewed) in [("balanced", false), ("skewed", true)] {
        let mut offsets = vec![0u32];
        let mut end = 0;
        for size in sizes(k, groups, skewed) {
            end += size;
            // Whole transforms, and all columns.
            offsets.push((end.next_multiple_of(64)).min(k) as u32);
        }
        let offsets = GroupOffsets {
            offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
            count: groups,
        };
        for (format, a, b) in [
            ("NVFP4", &a, &b),
            ("NVFP4 with an amax per row", &rows_a, &rows_b),
            ("MXFP8", &mx_a, &mx_b),
        ] {
            let record = record(&format!("{groups} {kind}, {format}"));
            time_on_device(criterion, client, record, |_| {
                into_f32(Gemm::new(a, b).k_grouped(&offsets).k_alignment(64));
            });
        }
    }
    let experts: Vec<[Matrix; 2]> = (0..groups)
        .map(|group| [m, n].map(|rows| noise.matrix(client, rows, k / groups, group)))
        .collect();
    let record = record(&format!("{groups} balanced, {CUBLAS}"));
    match cublas(client, &experts[0][0], &experts[0][1]) {
        Ok(_) => time_on_device(criterion, client, record, |_| {
            for [x, y] in &experts {
                cublas(client, x, y).unwrap();
            }
        }),
        Err(error) => println!("{full}: {error}"),
    }
}

/// Times gate and up of a decoding step after a norm with a residual: in one kernel, and in three.
fn fused(
    criterion: &mut Criterion,
    client: &Client,
    noise: &Noise,
    (m, n, k): (usize, usize, usize),
) {
    const EPSILON: f32 = 1e-5;
    let name = format!("form fused/{m} x {n} x {k}");
    if !is_wanted(&name) {
        return;
    }
    let (m, n, k) = shrunk((m, n, k));
    let [x, residual] = [1, 2].map(|seed| noise.matrix(client, m, k, seed));
    let gain = client.create_from_slice(bytemuck::cast_slice(&vec![1f32; k]));
    // As many sets as leave the L2 cache before their next use.
    let weights: Vec<_> = (0..device::size(3, 1))
        .map(|seed| noise.packed(client, n, k, seed))
        .collect();
    let weight = |i: usize| Operand::from(&weights[i % weights.len()]);
    let request = |i: usize| FusedLinear {
        x: &x,
        norm: Some(FusedNorm {
            residual: Some(&residual),
            gain: &gain,
            epsilon: EPSILON,
        }),
        weight: weight(i),
        bias: None,
        swiglu: true,
    };
    let record = |kind: &str| {
        let shape = b200_shape(Format::Nvfp4, (m, n, k), 1);
        Record::of_packed(format!("{name}, {kind}"), shape)
    };
    match request(0).refusal(client).unwrap() {
        None => time_on_device(criterion, client, record("norm and SwiGLU fused"), |i| {
            fused_linear(client, &request(i)).unwrap();
        }),
        Some(refusal) => println!("{name}: {refusal}"),
    }
    time_on_device(criterion, client, record("three kernels"), |i| {
        let request = NormRequest {
            norm: Norm::Rms,
            x: &x,
            residual: Some(&residual),
            gain: &gain,
            bias: None,
            epsilon: EPSILON,
            amax: AmaxRequest::default(),
        };
        let normed = norm(client, &request).unwrap().normed;
        let y = multiply(client, Gemm::new(&normed, weight(i))).unwrap();
        activation(client, Activation::SwiGlu, &y).unwrap();
    });
}
