//! Quantizes weights to FP8 (E4M3).
//!
//! | readers | scales of the weight | inputs |
//! |---|---|---|
//! | compressed-tensors, W4A16 | per row | not quantized |
//! | compressed-tensors, W4A4 | per row | a scale per token, at run time |
//! | ModelOpt | one, shared by fused projections | one scale, of the calibration |
//!
//! A scale is amax / 448. ModelOpt's mixed files have no FP8 without quantized inputs.

use anyhow::{Result, ensure};
use nvfp4_formats::format::e4m3;

use crate::interchange::{Dialect, Fp8Format, Fp8Inputs, Fp8Scales, Fp8Weight, Scheme};

/// Returns the format of layers in FP8 beside layers in NVFP4 of `scheme`.
pub const fn format_for(dialect: Dialect, scheme: Scheme) -> Fp8Format {
    let (scales, inputs) = match (dialect, scheme) {
        (Dialect::ModelOpt, _) => (Fp8Scales::Tensor, Fp8Inputs::Static),
        (Dialect::CompressedTensors, Scheme::W4a16) => {
            (Fp8Scales::Channel, Fp8Inputs::HighPrecision)
        }
        (Dialect::CompressedTensors, Scheme::W4a4) => (Fp8Scales::Channel, Fp8Inputs::PerToken),
    };
    Fp8Format { scales, inputs }
}

/// Quantizes the weight `values` `[n, k]`, rounding to nearest even. `amax` is its largest
/// magnitude, or that of all weights that share its scale.
///
/// # Errors
/// Returns an error if the length does not match, or a value or `amax` is not finite.
pub fn quantize(
    values: &[f32],
    shape: [usize; 2],
    amax: f32,
    format: Fp8Format,
) -> Result<Fp8Weight> {
    let [n, k] = shape;
    ensure!(
        k > 0 && n.checked_mul(k) == Some(values.len()),
        "{} values for a weight of {n} x {k}",
        values.len()
    );
    ensure!(
        amax.is_finite() && values.iter().all(|value| value.abs() <= amax),
        "amax is {amax}, but all values must be finite and at most that"
    );
    let [rows, columns] = format.block(shape);
    let blocks = k.div_ceil(columns);
    let mut scales = vec![0f32; n.div_ceil(rows) * blocks];
    for (at, value) in values.iter().enumerate() {
        let scale = &mut scales[at / k / rows * blocks + at % k / columns];
        *scale = scale.max(value.abs());
    }
    if format.scales == Fp8Scales::Tensor {
        scales = vec![amax];
    }
    for scale in &mut scales {
        // Readers refuse a scale of 0; a subnormal one would lose bits of its own.
        *scale = match *scale {
            0.0 => 1.0,
            amax => (amax / e4m3::MAX).max(f32::MIN_POSITIVE),
        };
    }
    let code = |(at, value): (usize, &f32)| {
        e4m3::encode_element(value / scales[at / k / rows * blocks + at % k / columns])
    };
    Ok(Fp8Weight {
        shape,
        format,
        codes: values.iter().enumerate().map(code).collect(),
        scales,
        input_scale: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_formats::ptq::block_amax;

    fn made(values: &[f32], shape: [usize; 2], scales: Fp8Scales) -> Fp8Weight {
        let inputs = Fp8Inputs::HighPrecision;
        let format = Fp8Format { scales, inputs };
        quantize(values, shape, block_amax(values), format).unwrap()
    }

    /// Every E4M3 value with a scale of 1 is kept, and values between are rounded to even.
    #[test]
    fn elements_are_rounded_to_nearest_even() {
        let all: Vec<f32> = (0..=0x7Eu8)
            .flat_map(|byte| [byte, byte | 0x80])
            .map(e4m3::decode_element)
            .collect();
        let weight = made(&all, [1, all.len()], Fp8Scales::Channel);
        assert_eq!(weight.scales, [1.0]);
        assert_eq!(weight.dequantize(), all);
        // 448, ties at 17 and 19 between multiples of 2, and at half of the smallest subnormal.
        let values = [
            448.0,
            17.0,
            19.0,
            18.5,
            f32::exp2(-10.0),
            -f32::exp2(-10.0) * 1.5,
        ];
        let weight = made(&values, [1, 6], Fp8Scales::Tensor);
        let expected = [448.0, 16.0, 20.0, 18.0, 0.0, -f32::exp2(-9.0)];
        assert_eq!(weight.dequantize(), expected);
    }

    #[test]
    fn scales_are_those_of_their_rows_and_blocks() {
        let values = [
            448.0, 0.0, 0.0, 4.48, 0.0, 0.0, 0.0, 0.0, 896.0, 1.0, 1.0, 44.8f32,
        ];
        let of = |scales| made(&values, [3, 4], scales).scales;
        assert_eq!(of(Fp8Scales::Tensor), [2.0]);
        assert_eq!(of(Fp8Scales::Channel), [1.0, 1.0, 2.0]);
        let expected = [1.0, 4.48 / 448.0, 2.0, 44.8 / 448.0];
        assert_eq!(of(Fp8Scales::Block([2, 2])), expected);
        // A last block of one column.
        assert_eq!(of(Fp8Scales::Block([3, 3])), [2.0, 44.8 / 448.0]);
        let tiny = made(&[1e-40, 0.0], [1, 2], Fp8Scales::Tensor);
        assert_eq!(tiny.scales, [f32::MIN_POSITIVE]);
    }

    #[test]
    fn bad_values_are_errors() {
        let format = format_for(Dialect::ModelOpt, Scheme::W4a16);
        for (values, shape, amax) in [
            (vec![1.0, f32::NAN], [1, 2], 1.0),
            (vec![1.0, 2.0], [1, 2], 1.0),
            (vec![1.0, 2.0], [1, 2], f32::INFINITY),
            (vec![1.0, 2.0], [2, 2], 2.0),
        ] {
            assert!(quantize(&values, shape, amax, format).is_err());
        }
    }
}
