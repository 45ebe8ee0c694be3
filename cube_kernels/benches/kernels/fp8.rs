//! Weights in FP8: their quantization, and linear layers of a few rows, which are bound by reading
//! the weight.

use nvfp4_kernels::{fp8, tensor::FloatKind};

use crate::{
    common::device::is_gpu,
    dense,
    harness::Section,
    inputs::{Inputs, Rotated},
};

/// Times a weight of `n` x `k`.
pub fn weight(section: &mut Section<'_>, [n, k]: [usize; 2]) {
    let client = section.client();
    let inputs = Inputs::bf16(&client, n, k);
    dense::copy(section, &inputs);
    let elements = inputs.elements();
    section.time("FP8 rows", 3.0 * elements, |i| {
        fp8::quantize_rows(&client, inputs.get(i)).unwrap();
    });
    let weights = Rotated::new(elements, |i| {
        fp8::quantize_rows(&client, inputs.get(i)).unwrap()
    });
    let rows: &[usize] = if is_gpu() { &[1, 16, 64] } else { &[2] };
    for &m in rows {
        let x = Inputs::bf16(&client, m, k);
        let bytes = elements + (4 * n + 2 * m * (n + k)) as f64;
        section
            .captured()
            .time(&format!("FP8 linear, {m} rows"), bytes, |i| {
                let out = FloatKind::Bf16;
                fp8::linear(&client, x.get(i), &weights[i], out).unwrap();
            });
    }
}
