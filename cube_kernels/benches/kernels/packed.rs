//! Kernels with packed inputs, and MS-EDEN with both kinds of input.

use crate::quantize::{self, EdenSource, Quantize, TargetSpec};
use cubecl::server::Handle;
use nvfp4_formats::{
    BLOCK, Format, Hadamard, HadamardSize, QuantParams, RandomStream, StoredForm, Usage,
};
use nvfp4_kernels::{
    gemm,
    tensor::{FloatKind, Groups},
};

use crate::{
    harness::{Section, Work},
    inputs::{Inputs, MX, NEAREST, PACKED, Rotated, copy_of, with_amax},
};

const USAGES: [(&str, Usage); 2] = [("row", Usage::Rowwise), ("col", Usage::Columnwise)];

pub fn packed(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let n = inputs.elements();
    let one_size = n * PACKED;
    let quantized = USAGES.map(|(name, usage)| {
        let client = client.clone();
        let make = move |i| {
            let x = inputs.get(i);
            match usage {
                Usage::Rowwise => quantize::quantize_row(&client, x, inputs.amax(), NEAREST),
                Usage::Columnwise => {
                    quantize::quantize_col(&client, x, inputs.amax(), NEAREST, None)
                }
            }
            .unwrap()
        };
        (name, Rotated::new(one_size, make))
    });
    for (from, packed) in &quantized {
        let scales = 2.0 * n / BLOCK as f64;
        section.time(&format!("scales of {from} into 128x4 tiles"), scales, |i| {
            quantize::in_form(&client, &packed[i], StoredForm::Tiles).unwrap();
        });
        let make = |i: usize| quantize::in_form(&client, &packed[i], StoredForm::Tiles).unwrap();
        let tiled = Rotated::new(one_size, make);
        section.time(&format!("scales of {from} into rows"), scales, |i| {
            quantize::in_form(&client, &tiled[i], StoredForm::Rows).unwrap();
        });
        section.time(&format!("dequantize {from}"), n * (PACKED + 2.0), |i| {
            quantize::dequantize(&client, &packed[i], FloatKind::Bf16).unwrap();
        });
        for (to, usage) in USAGES {
            let name = format!("NVFP4 {from} to MXFP8 {to}");
            section.time(&name, n * (PACKED + MX), |i| {
                quantize::mx_requantize(&client, &packed[i], usage, Format::Mxfp8, FloatKind::Bf16)
                    .unwrap();
            });
        }
    }
    for (name, usage) in USAGES {
        let make = |i| quantize::mx_quantize(&client, inputs.get(i), usage, Format::Mxfp8).unwrap();
        let packed = Rotated::new(n * MX, make);
        section.time(&format!("MXFP8 {name} dequantized"), n * (MX + 2.0), |i| {
            quantize::dequantize(&client, &packed[i], FloatKind::Bf16).unwrap();
        });
    }
    for (to, usage) in USAGES {
        let amax = || inputs.amax();
        let name = format!("bf16 to {to}");
        eden(section, &name, [2.0 * n, n * PACKED], usage, amax, |i| {
            inputs.get(i).request()
        });
        for (from, packed) in &quantized {
            let name = format!("NVFP4 {from} to {to}");
            eden(section, &name, [n * PACKED; 2], usage, amax, |i| {
                packed[i].request()
            });
        }
    }
    eden_pair(section, inputs);
    // As the backward makes the left operand of a weight gradient, for a bf16 GEMM.
    let (from, packed) = &quantized[0];
    let name = format!("MS-EDEN, NVFP4 {from} to col, unscaled bf16");
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 1);
    section.time(&name, n * (PACKED + 2.0), |i| {
        let form = StoredForm::Bf16Unscaled;
        let random = RandomStream::new(1, 2, 3);
        let (source, usage, amax) = (&packed[i], Usage::Columnwise, inputs.amax());
        quantize::ms_eden_as(&client, source, usage, amax, &hadamard, random, form).unwrap();
    });
    let [(_, a), (_, b)] = &quantized;
    if n < 1e8 {
        let operations = 2.0 * n * inputs.rows as f64;
        section.time_work("gemm", Work::Operations(operations), |i| {
            gemm::gemm(&client, &gemm::Gemm::new(&a[i], &b[i])).unwrap();
        });
    }
}

/// Times MS-EDEN of gradients along both axes: the amax values of both, and everything.
fn eden_pair(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let n = inputs.elements();
    let hadamards = [1, 2].map(|seed| Hadamard::seeded_with_size(HadamardSize::H128, seed));
    section.time("MS-EDEN amax, bf16 to row + col", 2.0 * n, |i| {
        let [row, col] = &hadamards;
        quantize::ms_eden_amax_pair(&client, inputs.get(i), [row, col]).unwrap();
    });
    let bytes = n * (2.0 + 2.0 * PACKED);
    section.time("MS-EDEN with amax, bf16 to row + col", bytes, |i| {
        let [row, col] = hadamards.map(|hadamard| {
            let random = RandomStream::new(1, 2, 3);
            TargetSpec::new(QuantParams::ms_eden(hadamard, random))
        });
        let request = Quantize::new(inputs.get(i)).rowwise(row).columnwise(col);
        request.launch(&client).unwrap();
    });
}

/// Times the quantization of tokens in groups in the backward, with one `amax` per group: along the
/// tokens.
pub fn grouped(section: &mut Section<'_>, inputs: &Inputs, groups: &Groups, amax: &Handle) {
    let client = section.client();
    let n = inputs.elements();
    let suffix = match groups {
        Groups::One => "no groups".into(),
        _ => format!("{} groups", groups.count()),
    };
    let usage = Usage::Columnwise;
    section.time(&format!("MXFP8 col, {suffix}"), n * (2.0 + MX), |i| {
        quantize::mx_quantize_groups(&client, inputs.get(i), groups, usage, Format::Mxfp8).unwrap();
    });
    let quantized = Rotated::new(n * PACKED, |i| {
        let request = with_amax(amax, copy_of(NEAREST, None));
        quantize::quantize(&client, inputs.get(i), groups, Usage::Rowwise, &request).unwrap()
    });
    let name = format!("dequantize row, {suffix}");
    section.time(&name, n * (PACKED + 2.0), |i| {
        quantize::dequantize(&client, &quantized[i], FloatKind::Bf16).unwrap();
    });
    let name = format!("NVFP4 row to MXFP8 col, {suffix}");
    section.time(&name, n * (PACKED + MX), |i| {
        quantize::mx_requantize(
            &client,
            &quantized[i],
            usage,
            Format::Mxfp8,
            FloatKind::Bf16,
        )
        .unwrap();
    });
    let name = format!("bf16 to col, {suffix}");
    let bytes = [2.0 * n, n * PACKED];
    eden(
        section,
        &name,
        bytes,
        usage,
        || amax,
        |i| Quantize::new(inputs.get(i)).groups(groups),
    );
    let name = format!("NVFP4 row to col, {suffix}");
    eden(
        section,
        &name,
        [n * PACKED; 2],
        usage,
        || amax,
        |i| quantized[i].request(),
    );
}

/// Times MS-EDEN of `source(i)` along `usage`, and its amax; the amax before the transform is about
/// as large. `bytes` are read and written.
fn eden<'a>(
    section: &mut Section<'_>,
    name: &str,
    [read, written]: [f64; 2],
    usage: Usage,
    amax: impl Fn() -> &'a Handle,
    source: impl Fn(usize) -> Quantize<'a>,
) {
    let client = section.client();
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 1);
    section.time(&format!("MS-EDEN amax, {name}"), read, |i| {
        quantize::ms_eden_amax(&client, &source(i), usage, &hadamard).unwrap();
    });
    section.time(&format!("MS-EDEN, {name}"), read + written, |i| {
        let random = RandomStream::new(1, 2, 3);
        quantize::ms_eden(&client, &source(i), usage, amax(), &hadamard, random).unwrap();
    });
}
