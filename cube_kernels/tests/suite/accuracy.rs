//! How much quantization keeps of a signal, where a scale for each row or a global scale is what
//! keeps it.

use crate::support::inputs::{Kind, values};
use nvfp4_kernels::{Amax, BlockScaling, Nvfp4Params, Rounding, Usage, reference};

const ROWS: usize = 64;
const COLS: usize = 256;
/// Round to nearest keeps 20.4 dB of normal data.
const KEPT: f64 = 18.0;
/// Less is a signal that is lost.
const LOST: f64 = 3.0;

/// Normal data, each row multiplied by its factor.
fn rows(factor: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut x = values(Kind::Normal, ROWS * COLS, 7);
    for (row, values) in x.chunks_exact_mut(COLS).enumerate() {
        values.iter_mut().for_each(|value| *value *= factor(row));
    }
    x
}

/// What codes and scales of `x` stand for, to nearest.
fn quantized(x: &[f32], amax: &Amax) -> Vec<f32> {
    let params = Nvfp4Params {
        scaling: BlockScaling::Standard,
        ..Nvfp4Params::new(Rounding::Nearest)
    };
    let usage = Usage::Rowwise;
    let packed = reference::quantize(x, ROWS, COLS, usage, amax, &params, 0).unwrap();
    reference::dequantize(&packed)
}

/// Signal to quantization noise, in decibels.
fn sqnr(exact: &[f32], found: &[f32]) -> f64 {
    let exact = exact.iter().map(|&x| f64::from(x));
    let noise = exact.clone().zip(found).map(|(x, &y)| x - f64::from(y));
    let power = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    10.0 * (power(&mut exact.clone()) / power(&mut noise.into_iter())).log10()
}

/// TransformerEngine's dual-SNR test: rows a million times smaller than others are lost with one
/// amax for the tensor, whose E4M3 block scales they underflow, and kept with one for each row.
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

/// torchao's pull request 2408: without a global scale the block scales of a tensor of tiny amax
/// underflow E4M3, and its values vanish; with it the SQNR is that of any other tensor. An amax of
/// 2688 stands for no global scale: it makes one of 1.
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
    // From an amax of 7.9e-36 down, 2688 / FLT_MAX, the global scale saturates: values are encoded
    // with FLT_MAX, and decoded with amax / 2688 all the same. So they lose magnitude, by `gain =
    // amax * FLT_MAX / 2688`, and nothing else: the block scales, which are as much smaller, are
    // still far above the subnormal ones of E4M3. The error follows: `1 - gain` of the signal, and
    // `gain` times the noise of any other tensor, whose amplitudes add up at worst.
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
    // With the magnitude given back, it is any other tensor.
    let regained: Vec<f32> = with.iter().map(|&x| (f64::from(x) / gain) as f32).collect();
    let found = sqnr(&x, &regained);
    println!("1e-36, with its magnitude: {found:.2} dB");
    assert!(found >= KEPT, "{found:.2} dB");
    // Smaller still, values stay finite, and do not vanish.
    let x = rows(|_| 1e-39);
    let amax = reference::amax(&x);
    assert!(amax < f32::MIN_POSITIVE);
    let with = quantized(&x, &Amax::Tensor(amax));
    assert!(with.iter().all(|x| x.abs() <= 2.0 * amax));
    assert!(with.iter().any(|&x| x != 0.0));
    let without = quantized(&x, &Amax::Tensor(2688.0));
    assert!(without.iter().all(|&x| x == 0.0));
}
