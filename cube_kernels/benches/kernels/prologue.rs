//! The operation before a GEMM, fused with amax computation and as a separate kernel.

use crate::quantize::{self, Amaxes, Prologue};
use cubecl::prelude::Client;
use nvfp4_formats::Rounding;
use nvfp4_kernels::tensor::{Groups, Matrix};

use crate::{
    dense::copy,
    harness::Section,
    inputs::{Inputs, NEAREST, PACKED, copy_of, plain_and_transformed, rht, stochastic, with_amax},
};

/// A prologue, with the name of its operation.
struct Case<'a> {
    name: &'a str,
    source: &'a dyn Fn(usize) -> Prologue<'a>,
    /// Bytes read, and elements computed.
    sizes: [f64; 2],
    /// Rounding of its quantized tensors.
    rounding: Rounding,
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
    let gated = |i| Prologue::SwiGlu(gate_up.get(i));
    let backward = |i| Prologue::SwiGluBackward {
        grad: x.get(i),
        gate_up: gate_up.get(i),
    };
    let n = x.elements();
    let all = [
        Case {
            name: "SwiGLU",
            source: &gated,
            sizes: [4.0 * n, n],
            rounding: NEAREST,
        },
        Case {
            name: "SwiGLU backward",
            source: &backward,
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
        sizes: [read, out],
        ref rounding,
    } = *case;
    let one = &Groups::One;
    let request = plain_and_transformed();
    let written = read + 2.0 * out;
    section.time(name, written, |i| {
        quantize::run_prologue(&client, source(i)).unwrap();
    });
    section.time(&format!("{name} written, amax plain + RHT"), written, |i| {
        quantize::run_prologue_with_amaxes(&client, source(i), one, &request).unwrap();
    });
    // All that stands between the inputs and both tensors, in two ways.
    let quantized = read + 2.0 * PACKED * out;
    let kernel = format!("{name}, all: written with maxima");
    section.time(&kernel, quantized, |i| {
        let (y, found) =
            quantize::run_prologue_with_amaxes(&client, source(i), one, &request).unwrap();
        copies(&client, &y, &found, rounding);
    });
    let kernel = format!("{name}, all: one after the other");
    section.time(&kernel, quantized, |i| {
        let y = quantize::run_prologue(&client, source(i)).unwrap();
        let found = quantize::amaxes(&client, &y, one, &request).unwrap();
        copies(&client, &y, &found, rounding);
    });
}

/// Computes the rowwise tensor and the transformed columnwise one, in one read.
fn copies(client: &Client, x: &Matrix, found: &Amaxes, rounding: &Rounding) {
    let copy = |hadamard| copy_of(*rounding, hadamard);
    let row = with_amax(found.rows.as_ref().unwrap(), copy(None));
    let col = with_amax(found.cols.as_ref().unwrap(), copy(rht()));
    quantize::quantize_both(client, x, &Groups::One, &row, &col).unwrap();
}
