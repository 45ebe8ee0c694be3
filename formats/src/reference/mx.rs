//! Microscaling formats: blocks of 32 elements with a UE8M0 scale (numerics, section 10).
//!
//! For a block with amax `a`: `v = fl(a · fl(1/max))`, where `max` is the largest value of an
//! element, 448 in MXFP8 and 6 in MXFP4. The scale byte `e` is `v` rounded up to a power of two. An
//! element is `fl(x · 2^(127 - e))` rounded to nearest even and saturating, and decodes to
//! `fl(q · 2^(e - 127))`.
//!
//! Special values: a NaN anywhere in a block makes its scale and all its values NaN. An infinity
//! makes the scale byte 254 and saturates to the largest element, which decodes to infinity; the
//! finite elements of such a block are not accurate. A block of zeros has scale byte 0 and keeps
//! its signs. Elements that pad the last block are zeros like any other.
//!
//! To turn the NVFP4 operand of a forward GEMM into such an operand of its backward, apply
//! [`dequantize`](super::dequantize()), round to the element type of the original, and apply
//! [`mx_quantize`] with the required usage; the kernel fuses both steps.

use rayon::prelude::*;

use super::{Element, quantize::check_matrix, rounding::round_nearest};
use crate::{
    Amax, Format, Layout, MX_BLOCK, Nvfp4Error, Origin, QuantizedTensor, Usage,
    format::{
        block::{BlockFormat, Mxfp4, Mxfp8},
        check_mx, e2m1, e4m3, ue8m0,
    },
};

/// A block format of the OCP microscaling specification: 32 elements and a UE8M0 scale.
trait MxFormat: BlockFormat {
    /// Returns the code of a scaled value, rounded to nearest even and saturating.
    fn encode(value: f32) -> u8;
    /// Returns the value of a code.
    fn decode(code: u8) -> f32;
}

impl MxFormat for Mxfp8 {
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        e4m3::encode_element(value)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        e4m3::decode_element(code)
    }
}

impl MxFormat for Mxfp4 {
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        round_nearest(value)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        e2m1::decode(code)
    }
}

/// Quantizes a `rows` x `cols` matrix to the microscaling format `format`, with blocks along
/// `usage`.
///
/// # Errors
/// Returns an error if `x` does not have `rows * cols` elements, or `format` is not a microscaling
/// format.
pub fn mx_quantize<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    format: Format,
) -> Result<QuantizedTensor, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_mx(format)?;
    let layout = Layout::new(format, (rows, cols), usage);
    let mut codes = vec![0u8; layout.code_bytes()];
    let mut scales = vec![0u8; layout.scale_bytes()];
    let blocks = layout.blocks();
    codes
        .par_chunks_mut((blocks * layout.block_bytes()).max(1))
        .zip(scales.par_chunks_mut(blocks.max(1)))
        .enumerate()
        .for_each(|(row, (codes, scales))| match format {
            Format::Nvfp4 => unreachable!("checked"),
            Format::Mxfp8 => quantize_row::<T, Mxfp8>(x, &layout, row, codes, scales),
            Format::Mxfp4 => quantize_row::<T, Mxfp4>(x, &layout, row, codes, scales),
        });
    QuantizedTensor::from_parts(layout, codes, scales, Amax::Absent, Origin::default())
}

/// Quantizes stored row `row` of `layout`.
fn quantize_row<T: Element, F: MxFormat>(
    x: &[T],
    layout: &Layout,
    row: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let blocks = codes.chunks_mut(layout.block_bytes());
    for (index, (codes, scale)) in blocks.zip(scales).enumerate() {
        let block: [f32; MX_BLOCK] = std::array::from_fn(|i| {
            let position = index * MX_BLOCK + i;
            match layout.usage {
                _ if position >= layout.inner() => 0.0,
                Usage::Rowwise => x[row * layout.cols + position].to_f32(),
                Usage::Columnwise => x[position * layout.cols + row].to_f32(),
            }
        });
        *scale = mx_scale::<F>(&block);
        let multiplier = ue8m0::decode_reciprocal(*scale);
        // The first element is in the lowest bits.
        let per_byte = 8 / F::CODE_BITS;
        for (byte, values) in codes.iter_mut().zip(block.chunks_exact(per_byte)) {
            let parts = values.iter().enumerate();
            *byte = parts.fold(0, |byte, (i, value)| {
                byte | F::encode(value * multiplier) << (i * F::CODE_BITS)
            });
        }
    }
}

/// Returns the scale byte of a block.
fn mx_scale<F: MxFormat>(block: &[f32; MX_BLOCK]) -> u8 {
    // Magnitudes compare as integers, NaN above everything.
    let bits = block
        .iter()
        .fold(0, |max, value| max.max(value.to_bits() & 0x7FFF_FFFF));
    ue8m0::encode_up(f32::from_bits(bits) * (1.0 / F::ELEMENT.max()))
}

/// Dequantizes `packed` to a matrix `[rows, cols]` in the orientation of the source.
///
/// # Panics
/// Panics if `packed` is not in a microscaling format.
pub fn mx_dequantize(packed: &QuantizedTensor) -> Vec<f32> {
    match packed.layout().format {
        Format::Nvfp4 => panic!("`packed` must be in a microscaling format"),
        Format::Mxfp8 => dequantize_as::<Mxfp8>(packed),
        Format::Mxfp4 => dequantize_as::<Mxfp4>(packed),
    }
}

fn dequantize_as<F: MxFormat>(packed: &QuantizedTensor) -> Vec<f32> {
    let (rows, cols, blocks) = (packed.rows(), packed.cols(), packed.blocks());
    let mut out = vec![0f32; rows * cols];
    out.par_chunks_mut(cols.max(1))
        .enumerate()
        .for_each(|(row, out)| {
            for (col, value) in out.iter_mut().enumerate() {
                let (outer, inner) = packed.usage().stored_shape(row, col);
                let element = outer * blocks * MX_BLOCK + inner;
                let bit = element * F::CODE_BITS;
                let code = packed.codes()[bit / 8] >> (bit % 8);
                *value = F::decode(code) * ue8m0::decode(packed.scales()[element / MX_BLOCK]);
            }
        });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_by_hand() {
        // 448 · 2⁻³ = 56 is the largest value of scale 2⁻³; 57 needs the next one.
        let mut x = [0f32; 32];
        x[..4].copy_from_slice(&[56.0, -1.0, 0.3, -0.0]);
        let packed = mx_quantize(&x, 1, 32, Usage::Rowwise, Format::Mxfp8).unwrap();
        assert_eq!(packed.scales(), [124]);
        // 448, -8, 2.4 -> 2.5 (1.25 · 2), -0.
        assert_eq!(packed.codes()[..4], [0x7E, 0xD0, 0x42, 0x80]);
        assert_eq!(mx_dequantize(&packed)[..4], [56.0, -1.0, 0.3125, 0.0]);
        x[0] = 57.0;
        let packed = mx_quantize(&x, 1, 32, Usage::Rowwise, Format::Mxfp8).unwrap();
        assert_eq!(packed.scales(), [125]);
        assert_eq!(mx_dequantize(&packed)[0], 56.0);
    }

    #[test]
    fn a_block_of_mxfp4_by_hand() {
        // 6 · 2⁻³ = 0.75 is the largest value of scale 2⁻³; 0.76 needs the next one.
        let mut x = [0f32; 32];
        x[..5].copy_from_slice(&[0.75, -0.0625, 0.3, -0.0, 0.03]);
        let packed = mx_quantize(&x, 1, 32, Usage::Rowwise, Format::Mxfp4).unwrap();
        assert_eq!(packed.scales(), [124]);
        // 6, -0.5, 2.4 -> 2, -0, 0.24 -> 0; the first of two elements is in the low nibble.
        assert_eq!(packed.codes().len(), 16);
        assert_eq!(packed.codes()[..3], [0x97, 0x84, 0x00]);
        assert_eq!(mx_dequantize(&packed)[..5], [0.75, -0.0625, 0.25, 0.0, 0.0]);
        x[0] = 0.76;
        let packed = mx_quantize(&x, 1, 32, Usage::Rowwise, Format::Mxfp4).unwrap();
        assert_eq!(packed.scales(), [125]);
        // 3.04 -> 3.
        assert_eq!(mx_dequantize(&packed)[0], 0.75);
    }

    #[test]
    fn no_finite_value_saturates() {
        // 2^127 is excluded: its largest values round up to 2^128, which no f32 can represent.
        for exponent in -140..=126 {
            for mantissa in [1.0f32, 1.25, 1.74, 1.75, 1.76, 1.99] {
                let value = mantissa * 2f64.powi(exponent) as f32;
                let mut x = [0f32; 32];
                x[7] = value;
                let packed = mx_quantize(&x, 32, 1, Usage::Columnwise, Format::Mxfp8).unwrap();
                let back = mx_dequantize(&packed)[7];
                let error = (back as f64 - value as f64).abs();
                // Half an ulp of a 4-bit significand, or of the smallest scaled subnormal.
                let bound = (value as f64 / 16.0).max(2f64.powi(-127 - 10));
                assert!(error <= bound, "{value:e} -> {back:e}");
            }
        }
    }

    #[test]
    fn special_values() {
        let mut x = vec![1.0f32; 96];
        x[3] = f32::NAN;
        x[40] = f32::NEG_INFINITY;
        x[64..].fill(-0.0);
        let packed = mx_quantize(&x, 1, 96, Usage::Rowwise, Format::Mxfp8).unwrap();
        assert_eq!(packed.scales(), [255, 254, 0]);
        assert!(packed.codes()[..32].iter().all(|&code| code == 0x7F));
        let back = mx_dequantize(&packed);
        assert!(back[..32].iter().all(|value| value.is_nan()));
        assert_eq!(back[40], f32::NEG_INFINITY);
        assert!(packed.codes()[64..].iter().all(|&code| code == 0x80));
    }

    #[test]
    fn orientations_are_transposes() {
        // Two blocks along the rows, and one.
        for (rows, cols) in [(45, 70), (13, 70)] {
            let x: Vec<f32> = (0..rows * cols)
                .map(|i| ((i * 37 % 101) as f32 - 50.0).sinh())
                .collect();
            let transposed: Vec<f32> = (0..rows * cols)
                .map(|i| x[i % rows * cols + i / rows])
                .collect();
            let by_col = mx_quantize(&x, rows, cols, Usage::Columnwise, Format::Mxfp8).unwrap();
            let by_row =
                mx_quantize(&transposed, cols, rows, Usage::Rowwise, Format::Mxfp8).unwrap();
            assert_eq!(by_col.codes(), by_row.codes());
            assert_eq!(by_col.scales(), by_row.scales());
            assert!(by_col.scales().iter().all(|&scale| scale > 0));
            // The rest of the last block is zeros.
            let rest = rows..rows.next_multiple_of(32);
            assert!(by_col.codes()[rest].iter().all(|&code| code == 0));
        }
    }
}
