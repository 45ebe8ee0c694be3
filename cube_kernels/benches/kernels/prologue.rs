//! The operation before a GEMM, fused with quantization and as a separate kernel.

use cubecl::prelude::Client;
use nvfp4_kernels::{
    quantize::{self, Amaxes, GateUp, Prologue},
    tensor::{DeviceNvfp4Params, DeviceRounding, Groups},
};

use crate::{
    dense::copy,
    harness::Section,
    inputs::{
        Inputs, NEAREST, PACKED, copy_of, plain_and_transformed, rht, stochastic, with_amax, words,
    },
};

const EPSILON: f32 = 1e-6;

/// A prologue, with the name of its operation.
struct Case<'a> {
    name: &'a str,
    source: &'a dyn Fn(usize) -> Prologue<'a>,
    /// Computes the factors that it requires.
    factors: &'a dyn Fn(usize),
    /// Bytes read, and elements computed.
    sizes: [f64; 2],
    /// Rounding of its quantized tensors.
    rounding: DeviceRounding,
}

/// Times all prologues of `rows` x `cols` values. The rates of unfused sequences use the bytes of
/// the fused form, so that times are comparable.
pub fn prologues(section: &mut Section<'_>, (rows, cols): (usize, usize)) {
    let client = section.client();
    let (x, gate_up) = (
        Inputs::bf16(&client, rows, cols),
        Inputs::bf16(&client, rows, 2 * cols),
    );
    copy(section, &x);
    let gain = words(&client, (0..cols).map(|_| 1.0f32.to_bits()));
    let rstd = quantize::rms_norm_rstd(&client, x.get(0), EPSILON).unwrap();
    let norm = |i| Prologue::RmsNorm {
        x: x.get(i),
        rstd: &rstd,
        gain: &gain,
    };
    let gated = |i| Prologue::SwiGlu(GateUp::Concatenated(gate_up.get(i)));
    let backward = |i| Prologue::SwiGluBackward {
        grad: x.get(i),
        inputs: GateUp::Concatenated(gate_up.get(i)),
    };
    let n = x.elements();
    let copy = DeviceNvfp4Params::new(NEAREST);
    let factors = |i| {
        quantize::rms_norm_rstd(&client, x.get(i), EPSILON).unwrap();
    };
    section.time("row factors of RMSNorm", 2.0 * n, factors);
    section.time("RMSNorm per token RN, one read", (2.0 + PACKED) * n, |i| {
        quantize::quantize_per_token_rms_norm(&client, x.get(i), &gain, EPSILON, &copy).unwrap();
    });
    section.time("RMSNorm, then per token RN", (2.0 + PACKED) * n, |i| {
        factors(i);
        let y = quantize::run_prologue(&client, norm(i)).unwrap();
        quantize::quantize_per_token(&client, &y, &copy).unwrap();
    });
    section.time("SwiGLU per token RN, one read", (4.0 + PACKED) * n, |i| {
        quantize::quantize_per_token(&client, gated(i), &copy).unwrap();
    });
    section.time("SwiGLU, then per token RN", (4.0 + PACKED) * n, |i| {
        let y = quantize::run_prologue(&client, gated(i)).unwrap();
        quantize::quantize_per_token(&client, &y, &copy).unwrap();
    });
    let all = [
        Case {
            name: "RMSNorm",
            source: &norm,
            factors: &factors,
            sizes: [2.0 * n, n],
            rounding: NEAREST,
        },
        Case {
            name: "SwiGLU",
            source: &gated,
            factors: &|_| (),
            sizes: [4.0 * n, n],
            rounding: NEAREST,
        },
        Case {
            name: "SwiGLU backward",
            source: &backward,
            factors: &|_| (),
            sizes: [6.0 * n, 2.0 * n],
            rounding: stochastic(),
        },
    ];
    for case in &all {
        both(section, case);
    }
}

/// Times the amax values and both quantized tensors of the computed values, in every
/// implementation.
fn both(section: &mut Section<'_>, case: &Case<'_>) {
    let client = section.client();
    let Case {
        name,
        source,
        factors,
        sizes: [read, out],
        ref rounding,
    } = *case;
    let one = &Groups::One;
    let request = plain_and_transformed();
    let written = read + 2.0 * out;
    section.time(name, written, |i| {
        quantize::run_prologue(&client, source(i)).unwrap();
    });
    let amaxes = "amax plain + RHT";
    section.time(&format!("{name}: {amaxes}"), read, |i| {
        quantize::amaxes(&client, source(i), one, &request).unwrap();
    });
    section.time(&format!("{name} written, {amaxes}"), written, |i| {
        quantize::run_prologue_with_amaxes(&client, source(i), one, &request).unwrap();
    });
    let quantized = read + 2.0 * PACKED * out;
    let found =
        std::cell::LazyCell::new(|| quantize::amaxes(&client, source(0), one, &request).unwrap());
    section.time(&format!("{name}: row + col RHT"), quantized, |i| {
        copies(&client, source(i), &found, rounding);
    });
    // The complete path from the inputs to both tensors, in three ways.
    section.time(&format!("{name}, all: computed twice"), quantized, |i| {
        factors(i);
        let found = quantize::amaxes(&client, source(i), one, &request).unwrap();
        copies(&client, source(i), &found, rounding);
    });
    let kernel = format!("{name}, all: written with maxima");
    section.time(&kernel, quantized, |i| {
        factors(i);
        let (y, found) =
            quantize::run_prologue_with_amaxes(&client, source(i), one, &request).unwrap();
        copies(&client, &y, &found, rounding);
    });
    let kernel = format!("{name}, all: one after the other");
    section.time(&kernel, quantized, |i| {
        factors(i);
        let y = quantize::run_prologue(&client, source(i)).unwrap();
        let found = quantize::amaxes(&client, &y, one, &request).unwrap();
        copies(&client, &y, &found, rounding);
    });
}

/// Computes the rowwise tensor and the transformed columnwise one, in one read.
fn copies<'a>(
    client: &Client,
    x: impl Into<Prologue<'a>>,
    found: &Amaxes,
    rounding: &DeviceRounding,
) {
    let copy = |hadamard| copy_of(rounding.clone(), hadamard);
    let row = with_amax(found.rows.as_ref().unwrap(), copy(None));
    let col = with_amax(found.cols.as_ref().unwrap(), copy(rht()));
    quantize::quantize_both(client, x, &Groups::One, &row, &col).unwrap();
}
