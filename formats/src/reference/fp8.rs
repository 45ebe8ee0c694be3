//! Rows in FP8: E4M3 codes with one scale factor per row.

use rayon::prelude::*;

use super::{Element, amax_rows};
use crate::format::e4m3;

/// Multiple that kernels require of the columns of an FP8 weight.
pub const FP8_CHUNK: usize = 64;

/// Partial sums per row of [`fp8_linear`].
const LANES: usize = 16;

/// Rows in FP8: element `(n, k)` is `e4m3(codes[n, k]) · scales[n]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Rows {
    /// E4M3 bytes, row-major.
    pub codes: Vec<u8>,
    /// Scale factors, one per row.
    pub scales: Vec<f32>,
}

/// Quantizes `x` (`[rows, cols]`) to FP8: `scale = fl(amax / 448)` of each row, and
/// `code = E4M3(fl(x / scale))`, rounded to nearest even, saturating at 448.
///
/// A row whose scale is zero has codes of zero. A row with NaN or infinity becomes NaN: its scale
/// is NaN and all its codes are `0x7F`.
///
/// # Panics
/// Panics if `x` does not have `rows * cols` elements.
pub fn fp8_quantize_rows<T: Element>(x: &[T], rows: usize, cols: usize) -> Fp8Rows {
    let scales = amax_rows(x, rows, cols).into_iter().map(row_scale);
    let scales: Vec<f32> = scales.collect();
    let mut codes = vec![0; rows * cols];
    let filled = codes.par_chunks_mut(cols.max(1)).zip(&scales);
    filled.enumerate().for_each(|(row, (codes, scale))| {
        for (code, x) in codes.iter_mut().zip(&x[row * cols..][..cols]) {
            *code = match *scale == 0.0 {
                true => 0,
                false => e4m3::encode_element(x.to_f32() / scale),
            };
        }
    });
    Fp8Rows { codes, scales }
}

/// Returns the scale of a row with this amax.
fn row_scale(amax: f32) -> f32 {
    match amax.is_finite() {
        true => amax / e4m3::MAX,
        false => f32::NAN,
    }
}

/// Returns the values of rows of `cols` codes: `fl(code · scale)`.
///
/// # Panics
/// Panics if there are not `cols` codes per scale.
#[cfg(test)]
fn fp8_dequantize_rows(rows: &Fp8Rows, cols: usize) -> Vec<f32> {
    let Fp8Rows { codes, scales } = rows;
    assert_eq!(codes.len(), scales.len() * cols, "`codes` must be rows");
    let mut values = vec![0.0; codes.len()];
    for ((values, codes), scale) in values
        .chunks_mut(cols.max(1))
        .zip(codes.chunks(cols.max(1)))
        .zip(scales)
    {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = e4m3::decode_element(*code) * scale;
        }
    }
    values
}

/// Computes `out[m, n] = fl(fl(Σₖ a[m, k] · e4m3(code[n, k])) · scale[n])` in `f32`: `a` is
/// `[m, k]`, the result `[m, n]`.
///
/// Lane `i` of 16 sums the rounded products of columns `i`, `i + 16` and so on, starting from +0.
/// The lanes are added in order.
///
/// # Panics
/// Panics if `a` is not rows of `k` elements, or there are not `k` codes per scale.
pub fn fp8_linear<T: Element>(a: &[T], b: &Fp8Rows, k: usize) -> Vec<f32> {
    let (m, n) = (a.len() / k.max(1), b.scales.len());
    assert_eq!(a.len(), m * k, "`a` must be rows of {k}");
    assert_eq!(b.codes.len(), n * k, "`codes` must be rows of {k}");
    let a: Vec<f32> = a.iter().map(|value| value.to_f32()).collect();
    // Each row of `b` is decoded once for all rows of `a`.
    let mut columns = vec![0.0; m * n];
    let each = columns.par_chunks_mut(m.max(1)).enumerate();
    each.for_each_init(
        || vec![0.0; k],
        |decoded, (row, column)| {
            for (value, code) in decoded.iter_mut().zip(&b.codes[row * k..][..k]) {
                *value = e4m3::decode_element(*code);
            }
            for (out, a) in column.iter_mut().zip(a.chunks(k.max(1))) {
                *out = dot(a, decoded) * b.scales[row];
            }
        },
    );
    (0..m * n).map(|at| columns[at % n * m + at / n]).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.into_iter().fold(0.0, |sum, lane| sum + lane)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_scales_of_their_own() {
        let x = [
            [448.0, -1.0, 17.0, 0.0],
            [4.48, -0.01, 0.0, 0.04],
            [0.0, -0.0, 0.0, 0.0],
            [-3e38, 3e38, 1.0, 2e38],
        ];
        let made = fp8_quantize_rows(x.as_flattened(), 4, 4);
        assert_eq!(made.scales[0], 1.0);
        assert_eq!(made.scales[1], 4.48 / 448.0);
        assert_eq!(made.scales[2].to_bits(), 0);
        // 17 is halfway between 16 and 18, and rounds to the even code.
        assert_eq!(made.codes[..4], [0x7E, 0xB8, 0x58, 0]);
        assert_eq!(made.codes[8..12], [0; 4]);
        assert_eq!(made.codes[12..14], [0xFE, 0x7E]);
        let values = fp8_dequantize_rows(&made, 4);
        assert_eq!(values[..4], [448.0, -1.0, 16.0, 0.0]);
        for (row, (found, expected)) in values.chunks(4).zip(&x).enumerate() {
            let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                // Half an ulp of three mantissa bits, or half of the smallest subnormal.
                let bound = (expected.abs() / 16.0).max(largest / 448.0 / 1024.0) * 1.0001;
                assert!(
                    (found - expected).abs() <= bound,
                    "{row}: {found} {expected}"
                );
            }
        }
    }

    #[test]
    fn rows_that_are_not_finite_are_nan() {
        for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let x = [1.0, special, -2.0, 0.0, 1.0, 2.0, 3.0, 4.0];
            let made = fp8_quantize_rows(&x, 2, 4);
            assert_eq!(made.scales[0].to_bits(), 0x7FC0_0000);
            assert_eq!(made.codes[..4], [0x7F; 4]);
            assert!(made.scales[1].is_finite());
            let values = fp8_dequantize_rows(&made, 4);
            assert!(values[..4].iter().all(|value| value.is_nan()));
            let sums = fp8_linear(&[0.0, 0.0, 0.0, 0.0], &made, 4);
            assert!(sums[0].is_nan() && sums[1] == 0.0);
        }
    }

    /// Amax values so small that the scale is subnormal or zero.
    #[test]
    fn tiny_rows_do_not_become_infinite() {
        for bits in [1u32, 200, 224, 225, 5000, 1 << 23] {
            let x = [f32::from_bits(bits), -f32::from_bits(bits / 2)];
            let made = fp8_quantize_rows(&x, 1, 2);
            let values = fp8_dequantize_rows(&made, 2);
            assert!(
                values.iter().all(|value| value.abs() <= 2.0 * x[0]),
                "{bits}"
            );
            assert_eq!(made.codes == [0, 0], made.scales[0] == 0.0);
        }
    }

    /// At values halfway between two codes, multiplying by the reciprocal would round some of them
    /// the wrong way.
    #[test]
    fn values_are_divided_by_the_scale() {
        let halves: Vec<f32> = (17..32).step_by(2).map(|half| half as f32).collect();
        let mut differ = 0;
        for scale in (3..2000).step_by(2).map(|scale| scale as f32) {
            let x: Vec<f32> = [448.0].iter().chain(&halves).map(|x| x * scale).collect();
            let made = fp8_quantize_rows(&x, 1, x.len());
            assert_eq!(made.scales, [scale]);
            for (x, (half, code)) in x[1..].iter().zip(halves.iter().zip(&made.codes[1..])) {
                assert_eq!(*code, e4m3::encode(*half), "{half} times {scale}");
                differ += usize::from(*code != e4m3::encode(x * (1.0 / scale)));
            }
        }
        assert!(differ > 0);
    }

    #[test]
    fn products_are_those_of_f64() {
        let (m, n, k) = (3, 5, 70);
        let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.7).sin()).collect();
        let w: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.3).cos()).collect();
        let b = fp8_quantize_rows(&w, n, k);
        let values = fp8_dequantize_rows(&b, k);
        let found = fp8_linear(&a, &b, k);
        assert_eq!(found.len(), m * n);
        for (at, found) in found.iter().enumerate() {
            let (row, column) = (at / n, at % n);
            let pairs = a[row * k..][..k].iter().zip(&values[column * k..][..k]);
            let exact: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(*found) - exact).abs() < 1e-5, "{row}, {column}");
        }
    }
}
