//! Post-training quantization of a weight: moments of its input, the factor of the inverse second
//! moments, block scales by search, GPTQ.

use nvfp4_formats::ptq::{BlockQuantizer, Rule, ScaleChoice};
use nvfp4_kernels::ptq::{self, InputMoments, InverseFactor};
use nvfp4_kernels::tensor::FloatKind;

use crate::harness::{Section, Work};
use crate::inputs::Inputs;

/// Tokens that are added at a time.
const TOKENS: usize = 512;

/// Times the steps for a weight `n x k`. The last two copy codes and scales to the host.
pub fn quantize(section: &mut Section<'_>, [n, k]: [usize; 2]) {
    let client = section.client();
    let tokens = TOKENS.min(2 * k);
    let x = Inputs::new(&client, tokens, k, FloatKind::F32);
    let mut moments = InputMoments::new(&client, k, true);
    // The products are symmetric.
    let operations = tokens as f64 * (k * k) as f64;
    section.time_work(
        "moments of 512 tokens",
        Work::Operations(operations),
        |_| {
            moments.add(&client, x.get(0), 0..tokens).unwrap();
        },
    );
    let features = 4.0 * k as f64 * 3.0;
    section.time("read features", features, |_| {
        moments.features(&client).unwrap();
    });
    // Factor and triangular inverse: k³ / 3 products each.
    let operations = 4.0 / 3.0 * (k as f64).powi(3);
    section.time_work("inverse factor", Work::Operations(operations), |_| {
        InverseFactor::new(&client, &moments, None, 0.01).unwrap();
    });
    let factor = InverseFactor::new(&client, &moments, None, 0.01).unwrap();
    // Copied to the device each time.
    let value = |i: usize| ((i as f32 * 0.37).sin() + 1e-3) * 6.0;
    let weight: Vec<f32> = (0..n * k).map(value).collect();
    let quantizer = BlockQuantizer::new(Rule::ModelOpt, ScaleChoice::Search, 6.0);
    let ones = vec![1.0; k];
    let bytes = weight.len() as f64 * (4.0 + 9.0 / 16.0);
    section.time("block scales by search", bytes, |_| {
        ptq::round_rows(&client, &weight, &quantizer, &ones).unwrap();
    });
    let operations = n as f64 * (k as f64).powi(2);
    section.time_work("GPTQ", Work::Operations(operations), |_| {
        ptq::gptq(&client, &weight, &factor, &quantizer, &ones).unwrap();
    });
}
