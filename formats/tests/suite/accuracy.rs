//! Signal-to-noise ratio of quantization in cases that require a scale per row or a global scale.

use crate::support::inputs::{Kind, values};
use nvfp4_formats::{Amax, BlockScaling, QuantParams, Rounding, Usage, reference};

const ROWS: usize = 64;
const COLS: usize = 256;
/// Threshold for a preserved signal: rounding to nearest gives 20.4 dB for normal data.
const KEPT: f64 = 18.0;
/// Threshold for a lost signal.
const LOST: f64 = 3.0;

/// Returns normal data, with each row multiplied by its factor.
fn rows(factor: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut x = values(Kind::Normal, ROWS * COLS, 7);
    for (row, values) in x.chunks_exact_mut(COLS).enumerate() {
        values.iter_mut().for_each(|value| *value *= factor(row));
    }
    x
}

/// Quantizes `x` to nearest, and dequantizes it.
fn quantized(x: &[f32], amax: &Amax) -> Vec<f32> {
    let params = QuantParams {
        scaling: BlockScaling::Standard,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    let usage = Usage::Rowwise;
    let packed = reference::quantize(x, ROWS, COLS, usage, amax, &params, 0).unwrap();
    reference::dequantize(&packed)
}

/// Returns the signal-to-quantization-noise ratio in decibels.
fn sqnr(exact: &[f32], found: &[f32]) -> f64 {
    let exact = exact.iter().map(|&x| f64::from(x));
    let noise = exact.clone().zip(found).map(|(x, &y)| x - f64::from(y));
    let power = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    10.0 * (power(&mut exact.clone()) / power(&mut noise.into_iter())).log10()
}

/// TransformerEngine's dual-SNR test: rows a million times smaller than others are lost with one
/// amax for the tensor, because their E4M3 block scales underflow, and preserved with one amax per
/// row.
#[test]
fn small_rows_are_kept_by_an_amax_of_their_own() {
    let x = rows(|row| if row % 2 == 0 { 1.0 } else { 1e-6 });
    let per_tensor = quantized(&x, &Amax::Tensor(reference::amax(&x)));
    let per_row = Amax::PerRow(reference::amax_rows(&x, ROWS, COLS));
    let per_row = quantized(&x, &per_row);
    for (name, parity, found, is_kept) in [
        ("large rows, per tensor", 0, &per_tensor, true),
        ("small rows, per tensor", 1, &per_tensor, false),
        ("large rows, per row", 0, &per_row, true),
        ("small rows, per row", 1, &per_row, true),
    ] {
        let half = |x: &[f32]| -> Vec<f32> {
            let rows = x.chunks_exact(COLS).skip(parity).step_by(2);
            rows.flatten().copied().collect()
        };
        let found = sqnr(&half(&x), &half(found));
        println!("{name}: {found:.2} dB");
        let holds = if is_kept { found >= KEPT } else { found < LOST };
        assert!(holds, "{name}: {found:.2} dB");
    }
}

/// torchao's pull request 2408: without a global scale, the block scales of a tensor with a tiny
/// amax underflow E4M3, and its values vanish. With one, the SQNR is that of any other tensor. An
/// amax of 2688 stands for no global scale, because the global scale is then 1.
#[test]
fn tiny_tensors_are_kept_by_the_global_scale() {
    for factor in [1e-5, 1e-10, 1e-20, 1e-30, 1e-34] {
        let x = rows(|_| factor);
        let without = quantized(&x, &Amax::Tensor(2688.0));
        assert!(without.iter().all(|&x| x == 0.0), "{factor:e}: not lost");
        let with = quantized(&x, &Amax::Tensor(reference::amax(&x)));
        let found = sqnr(&x, &with);
        println!("{factor:e}: {found:.2} dB with the global scale");
        assert!(found >= KEPT, "{factor:e}: {found:.2} dB");
    }
    // For an amax below 7.9e-36 (2688 / FLT_MAX) the global scale saturates: values are encoded
    // with FLT_MAX, but still decoded with amax / 2688. They only lose magnitude, by
    // `gain = amax * FLT_MAX / 2688`: the block scales become smaller by the same factor, but are
    // still far above the subnormals of E4M3. The error is `1 - gain` of the signal, and `gain`
    // times the noise of any other tensor; their amplitudes add up at worst.
    let x = rows(|_| 1e-36);
    let amax = reference::amax(&x);
    let gain = f64::from(amax) * f64::from(f32::MAX) / 2688.0;
    assert!((0.25..0.75).contains(&gain), "{gain}");
    let with = quantized(&x, &Amax::Tensor(amax));
    let noise = 10f64.powf(-KEPT / 20.0);
    let least = -20.0 * (1.0 - gain + gain * noise).log10();
    let found = sqnr(&x, &with);
    println!("1e-36: {found:.2} dB, at least {least:.2}");
    assert!(found >= least, "{found:.2} dB, but at least {least:.2}");
    // Divided by the gain, it behaves like any other tensor.
    let regained: Vec<f32> = with.iter().map(|&x| (f64::from(x) / gain) as f32).collect();
    let found = sqnr(&x, &regained);
    println!("1e-36, with its magnitude: {found:.2} dB");
    assert!(found >= KEPT, "{found:.2} dB");
    // Even smaller values stay finite and do not vanish.
    let x = rows(|_| 1e-39);
    let amax = reference::amax(&x);
    assert!(amax < f32::MIN_POSITIVE);
    let with = quantized(&x, &Amax::Tensor(amax));
    assert!(with.iter().all(|x| x.abs() <= 2.0 * amax));
    assert!(with.iter().any(|&x| x != 0.0));
    let without = quantized(&x, &Amax::Tensor(2688.0));
    assert!(without.iter().all(|&x| x == 0.0));
}
