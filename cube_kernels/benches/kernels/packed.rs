//! Kernels whose input is packed already, and MS-EDEN, which takes both.

use nvfp4_kernels::{
    Hadamard, HadamardSize, PackedAxis, RandomStream,
    device::FloatKind,
    gemm,
    ops::{self, EdenSource},
    reference::EdenTarget,
};

use crate::{
    harness::{Section, Work},
    inputs::{Inputs, MX, NEAREST, PACKED, Rotated},
};

const AXES: [(&str, PackedAxis); 2] = [("row", PackedAxis::Cols), ("col", PackedAxis::Rows)];

pub fn packed(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let n = inputs.elements();
    let one_size = n * PACKED;
    let quantized = AXES.map(|(name, axis)| {
        let client = client.clone();
        let make = move |i| {
            let x = inputs.get(i);
            match axis {
                PackedAxis::Cols => ops::quantize_row(&client, x, inputs.amax(), NEAREST),
                PackedAxis::Rows => ops::quantize_col(&client, x, inputs.amax(), NEAREST, None),
            }
            .unwrap()
        };
        (name, Rotated::new(one_size, make))
    });
    for (from, packed) in &quantized {
        section.time(&format!("dequantize {from}"), n * (PACKED + 2.0), |i| {
            ops::dequantize(&client, &packed[i], FloatKind::Bf16).unwrap();
        });
        for (to, axis) in AXES {
            let name = format!("NVFP4 {from} to MXFP8 {to}");
            section.time(&name, n * (PACKED + MX), |i| {
                ops::mx_requantize(&client, &packed[i], axis, FloatKind::Bf16).unwrap();
            });
        }
    }
    for (name, axis) in AXES {
        let make = |i| ops::mx_quantize(&client, inputs.get(i), axis).unwrap();
        let packed = Rotated::new(n * MX, make);
        section.time(&format!("MXFP8 {name} dequantized"), n * (MX + 2.0), |i| {
            ops::mx_dequantize(&client, &packed[i], FloatKind::Bf16).unwrap();
        });
    }
    eden(section, "bf16", n * 2.0, inputs, |i| inputs.get(i).into());
    for (name, packed) in &quantized {
        let name = format!("NVFP4 {name}");
        eden(section, &name, n * PACKED, inputs, |i| (&packed[i]).into());
    }
    let [(_, a), (_, b)] = &quantized;
    if n < 1e8 {
        let operations = 2.0 * n * inputs.rows as f64;
        section.time_work("gemm", Work::Operations(operations), |i| {
            gemm::gemm(&client, &a[i], &b[i], None, FloatKind::Bf16).unwrap();
        });
    }
}

/// MS-EDEN of `source(i)`, which has `bytes`, along both axes.
fn eden<'a>(
    section: &mut Section<'_>,
    from: &str,
    bytes: f64,
    inputs: &Inputs,
    source: impl Fn(usize) -> EdenSource<'a>,
) {
    let client = section.client();
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 1);
    for (to, axis) in AXES {
        section.time(&format!("MS-EDEN amax, {from} to {to}"), bytes, |i| {
            ops::ms_eden_amax(&client, source(i), axis, &hadamard).unwrap();
        });
        let written = inputs.elements() * PACKED;
        section.time(&format!("MS-EDEN, {from} to {to}"), bytes + written, |i| {
            let (target, random) = (EdenTarget::Backward, RandomStream::new(1, 2, 3));
            // That of the values before the transform is about as large.
            let amax = inputs.amax();
            ops::ms_eden(&client, source(i), axis, amax, &hadamard, target, random).unwrap();
        });
    }
}
