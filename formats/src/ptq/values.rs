//! Loops over all elements of a weight, on all cores: decoding, dequantization, errors.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::BLOCK;
use crate::format::e2m1;

/// Elements per task.
const PART: usize = 1 << 14;

/// Decodes bf16 elements, stored in little-endian order.
pub fn decode_bf16(bytes: &[u8]) -> Vec<f32> {
    decode(bytes, |element| bf16::from_le_bytes(element).to_f32())
}

/// Decodes f16 elements, stored in little-endian order.
pub fn decode_f16(bytes: &[u8]) -> Vec<f32> {
    decode(bytes, |element| f16::from_le_bytes(element).to_f32())
}

fn decode(bytes: &[u8], value: impl Fn([u8; 2]) -> f32 + Sync) -> Vec<f32> {
    let (elements, _) = bytes.as_chunks::<2>();
    let mut values = vec![0.0; elements.len()];
    let parts = values.par_chunks_mut(PART).zip(elements.par_chunks(PART));
    parts.for_each(|(values, elements)| {
        for (out, element) in values.iter_mut().zip(elements) {
            *out = value(*element);
        }
    });
    values
}

/// Returns the largest magnitude of `values`, 0 if there are none; NaN if one is NaN.
pub fn amax(values: &[f32]) -> f32 {
    // As integers, magnitudes are ordered, and NaN is above all numbers.
    let magnitude = |value: &f32| value.to_bits() & !(1 << 31);
    let largest = |part: &[f32]| part.iter().map(magnitude).fold(0, u32::max);
    let parts = values.par_chunks(PART).map(largest);
    f32::from_bits(parts.reduce(|| 0, u32::max))
}

/// Dequantizes `codes`, two per byte: multiplies each by the factor of its block's scale byte, and
/// then by `last`. `factors` are those of the bytes 0 to 127; the sign bit must be 0.
///
/// # Panics
/// Panics if a scale byte has a sign bit.
pub fn dequantize(codes: &[u8], scales: &[u8], factors: &[f32; 128], last: f32) -> Vec<f32> {
    let mut values = vec![0.0; 2 * codes.len()];
    let parts = (values.par_chunks_mut(PART))
        .zip(codes.par_chunks(PART / 2))
        .zip(scales.par_chunks(PART / BLOCK));
    parts.for_each(|((values, codes), scales)| {
        let blocks = values.as_chunks_mut::<BLOCK>().0.iter_mut();
        let blocks = blocks.zip(codes.as_chunks::<{ BLOCK / 2 }>().0);
        for ((values, codes), scale) in blocks.zip(scales) {
            let factor = factors[usize::from(*scale)];
            for (i, byte) in codes.iter().enumerate() {
                let [low, high] = e2m1::decode_byte(*byte);
                values[2 * i] = low * factor * last;
                values[2 * i + 1] = high * factor * last;
            }
        }
    });
    values
}

/// Returns Σ `c` w² and Σ `c` (w − ŵ)² over the elements w of `values` and ŵ of `quantized`, whose
/// rows are as wide as the factors `c`. The rows are added in order, so that the result does not
/// depend on the number of threads.
pub fn squares(values: &[f32], quantized: &[f32], factors: &[f32]) -> [f64; 2] {
    let k = factors.len();
    let rows = values.par_chunks(k).zip(quantized.par_chunks(k));
    let rows: Vec<[f64; 2]> = rows
        .map(|(values, quantized)| row_squares(values, quantized, factors))
        .collect();
    rows.iter()
        .fold([0.0, 0.0], |[a, b], [c, d]| [a + c, b + d])
}

/// The terms of the elements `i`, `i + 8`, .. are added first.
fn row_squares(values: &[f32], quantized: &[f32], factors: &[f32]) -> [f64; 2] {
    const LANES: usize = 8;
    let (mut signal, mut noise) = ([0f64; LANES], [0f64; LANES]);
    let parts = values.chunks(LANES).zip(quantized.chunks(LANES));
    for ((values, quantized), factors) in parts.zip(factors.chunks(LANES)) {
        let terms = values.iter().zip(quantized).zip(factors);
        for (lane, ((&value, &quantized), &factor)) in terms.enumerate() {
            let [value, quantized, factor] = [value, quantized, factor].map(f64::from);
            let difference = value - quantized;
            signal[lane] += factor * (value * value);
            noise[lane] += factor * (difference * difference);
        }
    }
    [signal.iter().sum(), noise.iter().sum()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitude_is_found() {
        let mut values = vec![0.5; 3 * PART];
        values[PART] = -3.0;
        assert_eq!(amax(&values), 3.0);
        values[2 * PART + 1] = f32::NEG_INFINITY;
        assert_eq!(amax(&values), f32::INFINITY);
        values[0] = -f32::NAN;
        assert!(amax(&values).is_nan());
        assert_eq!(amax(&[]), 0.0);
    }

    #[test]
    fn squares_are_those_of_all_elements() {
        let k = 19;
        let values: Vec<f32> = (0..7 * k).map(|i| (i as f32 * 0.3).sin()).collect();
        let quantized: Vec<f32> = values.iter().map(|x| (x * 4.0).round() / 4.0).collect();
        let factors: Vec<f32> = (0..k).map(|i| 1.0 + i as f32).collect();
        let mut expected = [0.0, 0.0];
        for (i, (w, q)) in values.iter().zip(&quantized).enumerate() {
            let [w, q, c] = [*w, *q, factors[i % k]].map(f64::from);
            expected[0] += c * w * w;
            expected[1] += c * (w - q) * (w - q);
        }
        let found = squares(&values, &quantized, &factors);
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-12 * expected,
                "{found} {expected}"
            );
        }
    }

    #[test]
    fn elements_are_decoded_across_tasks() {
        let len = PART + 3;
        let numbers = (0..len).map(|i| bf16::from_f32(i as f32));
        let bytes: Vec<u8> = numbers.flat_map(bf16::to_le_bytes).collect();
        let found = decode_bf16(&bytes);
        assert_eq!(found.len(), len);
        assert_eq!(found[PART + 2], bf16::from_f32((PART + 2) as f32).to_f32());
        let bytes: Vec<u8> = (0..len)
            .flat_map(|_| f16::from_f32(1.5).to_le_bytes())
            .collect();
        assert_eq!(decode_f16(&bytes), vec![1.5; len]);

        let blocks = PART / BLOCK + 1;
        let mut factors = [0.0; 128];
        factors[3] = 2.0;
        factors[4] = 8.0;
        let mut scales = vec![3; blocks];
        scales[blocks - 1] = 4;
        // Codes 2 (1.0) and 10 (-1.0).
        let codes = vec![0xA2; blocks * BLOCK / 2];
        let found = dequantize(&codes, &scales, &factors, 0.5);
        assert_eq!(found[..4], [1.0, -1.0, 1.0, -1.0]);
        assert_eq!(found[blocks * BLOCK - 2..], [4.0, -4.0]);
    }
}
