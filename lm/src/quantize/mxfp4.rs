//! Casts weights that are stored in MXFP4 to NVFP4.
//!
//! Both formats have E2M1 codes. A block of 32 with scale 2ᵉ becomes two blocks of 16 with the same
//! codes and the scale 2ᵉ = 2ᵉ⁻ᵍ · 2ᵍ, where 2ᵍ is the global scale and 2ᵉ⁻ᵍ an E4M3 number: one of
//! the 18 powers of two from 2⁻⁹ to 2⁸. With g = max e - 8, all blocks whose scale is at least 2⁻¹⁷
//! of the largest keep every bit. The codes of the others are rounded under the E4M3 scale of least
//! error; they are exact, too, if their values happen to be multiples of a coarser step, or zero.

use anyhow::{Result, ensure};
use nvfp4_formats::BLOCK;
use nvfp4_formats::format::{e2m1, e4m3};
use nvfp4_formats::ptq::{BlockQuantizer, GlobalScale, ScaleChoice};
use serde::{Deserialize, Serialize};

use super::rules::rule_of;
use crate::hf::tensors::{MXFP4_BLOCK, Mxfp4, mxfp4_scale};
use crate::interchange::{Arithmetic, Dialect, PackedWeight};

/// Exponent of the largest power of two in E4M3.
const LARGEST: i32 = 8;
/// Exponent of the smallest one.
const SMALLEST: i32 = -9;
/// Exponents of global scales whose reciprocals are normal `f32` numbers, too.
const GLOBAL: std::ops::RangeInclusive<i32> = -120..=120;
/// Exponent of an E8M0 scale of 0.
const BIAS: i32 = 127;

/// Exactness of a cast weight.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cast {
    /// Number of blocks of 16.
    pub blocks: usize,
    /// Number of blocks in which a value changed.
    pub inexact_blocks: usize,
    /// Largest change of a value, as a share of the weight's largest magnitude.
    pub largest_error: f32,
}

/// Casts `weights` of `k` columns, which share one global scale, for readers of `dialect`.
///
/// # Errors
/// Returns an error if a scale is not a number, or if a weight has no whole rows.
pub fn cast(weights: &[Mxfp4], k: usize, dialect: Dialect) -> Result<Vec<(PackedWeight, Cast)>> {
    let blocks = || weights.iter().flat_map(blocks_of);
    ensure!(
        blocks().all(|(_, scale)| scale != u8::MAX),
        "a block's MXFP4 scale is not a number"
    );
    let exponents = blocks().filter(|(codes, _)| codes.iter().any(|code| code & 0x77 != 0));
    let largest = exponents.map(|(_, scale)| i32::from(scale) - BIAS).max();
    let global = largest.map_or(0, |largest| {
        (largest - LARGEST).clamp(*GLOBAL.start(), *GLOBAL.end())
    });
    weights
        .iter()
        .map(|weight| cast_one(weight, k, (global, dialect)))
        .collect()
}

/// Returns the codes and the scale of each block.
fn blocks_of(weight: &Mxfp4) -> impl Iterator<Item = (&[u8], u8)> {
    let codes = weight.codes.chunks(MXFP4_BLOCK / 2);
    codes.zip(weight.scales.iter().copied())
}

fn cast_one(
    weight: &Mxfp4,
    k: usize,
    (exponent, dialect): (i32, Dialect),
) -> Result<(PackedWeight, Cast)> {
    let elements = 2 * weight.codes.len();
    ensure!(
        k.is_multiple_of(MXFP4_BLOCK) && k > 0 && elements.is_multiple_of(k),
        "the weight has {elements} elements in MXFP4, but must have rows of {k}"
    );
    let factor = 2f64.powi(exponent) as f32;
    let global = match dialect {
        Dialect::ModelOpt => GlobalScale::multiply(factor),
        Dialect::CompressedTensors => GlobalScale::divide(1.0 / factor),
    };
    global.check()?;
    let quantizer = BlockQuantizer {
        rule: rule_of(dialect),
        global,
        choice: ScaleChoice::Search,
    };
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (block, scale) in blocks_of(weight) {
        let own = i32::from(scale) - BIAS - exponent;
        for half in block.chunks(BLOCK / 2) {
            let is_zero = half.iter().all(|pair| pair & 0x77 == 0);
            if is_zero || (SMALLEST..=LARGEST).contains(&own) {
                let own = own.clamp(SMALLEST, LARGEST);
                scales.push(e4m3::encode(2f64.powi(own) as f32));
                codes.extend_from_slice(half);
                continue;
            }
            let values = half.iter().flat_map(|pair| [pair & 0xF, pair >> 4]);
            let mut block = [0f32; BLOCK];
            for (value, code) in block.iter_mut().zip(values) {
                *value = e2m1::decode(code) * mxfp4_scale(scale);
            }
            let byte = quantizer.scale_byte(&block, &[1.0; BLOCK]);
            scales.push(byte);
            codes.extend(quantizer.rule.codes(&block, byte, global));
        }
    }
    let made = PackedWeight::new([elements / k, k], codes, scales, global, None)?;
    let report = compare(weight, &made.dequantize(Arithmetic::CodeTimesScale));
    Ok((made, report))
}

/// Compares the values `found` with those of `weight`.
fn compare(weight: &Mxfp4, found: &[f32]) -> Cast {
    let (mut blocks, mut inexact_blocks) = (0, 0);
    let (mut error, mut amax) = (0f32, 0f32);
    for ((codes, scale), found) in blocks_of(weight).zip(found.chunks(MXFP4_BLOCK)) {
        let factor = mxfp4_scale(scale);
        for (codes, found) in codes.chunks(BLOCK / 2).zip(found.chunks(BLOCK)) {
            let values = codes.iter().flat_map(|pair| [pair & 0xF, pair >> 4]);
            let mut is_exact = true;
            for (code, found) in values.zip(found) {
                let value = e2m1::decode(code) * factor;
                amax = amax.max(value.abs());
                error = error.max((value - found).abs());
                is_exact &= value == *found;
            }
            blocks += 1;
            inexact_blocks += usize::from(!is_exact);
        }
    }
    Cast {
        blocks,
        inexact_blocks,
        largest_error: if amax > 0.0 { error / amax } else { 0.0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one row of blocks with these scale bytes, whose codes count up.
    fn row(scales: &[u8]) -> Mxfp4 {
        let codes = (0..scales.len() * 16).map(|i| (i * 37 % 251) as u8);
        Mxfp4 {
            codes: codes.collect(),
            scales: scales.to_vec(),
        }
    }

    fn values(weight: &Mxfp4) -> Vec<f32> {
        let all = blocks_of(weight).flat_map(|(codes, scale)| {
            let codes = codes.iter().flat_map(|pair| [pair & 0xF, pair >> 4]);
            codes.map(move |code| e2m1::decode(code) * mxfp4_scale(scale))
        });
        all.collect()
    }

    /// Every scale within 2¹⁷ of the largest is kept, in both dialects, at both ends of the range
    /// of exponents; codes keep the sign of zeros.
    #[test]
    fn scales_in_range_are_exact() {
        for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
            for first in [10u8, 110, 230] {
                let scales: Vec<u8> = (first..first + 18).collect();
                let weight = row(&scales);
                let made = cast(std::slice::from_ref(&weight), scales.len() * 32, dialect).unwrap();
                let [(made, report)] = &made[..] else {
                    panic!("one weight was cast")
                };
                assert_eq!(made.codes(), weight.codes);
                assert_eq!(made.dequantize(dialect.arithmetic()), values(&weight));
                let exact = Cast {
                    blocks: 36,
                    inexact_blocks: 0,
                    largest_error: 0.0,
                };
                assert_eq!(*report, exact, "{first}");
            }
        }
    }

    #[test]
    fn scales_out_of_range_are_rounded_and_counted() {
        let mut weight = row(&[120, 120 - 18, 120 - 40]);
        let made = cast(&[weight.clone()], 96, Dialect::ModelOpt).unwrap();
        let (made, report) = &made[0];
        assert_eq!((report.blocks, report.inexact_blocks), (6, 4));
        // Half a step of the smallest scale: 2⁻⁹ · 2⁻¹⁵ · 0.25 of an amax of 6 · 2⁻⁷.
        let bound = 2f32.powi(-9 - 15 - 2) / (6.0 * 2f32.powi(-7));
        assert!(report.largest_error > 0.0 && report.largest_error <= bound);
        let found = made.dequantize(Arithmetic::CodeTimesScale);
        assert_eq!(found[..32], values(&weight)[..32]);
        // Even multiples of the step survive one exponent below the range, and zeros everywhere.
        weight.codes[16..32].fill(0x42);
        weight.codes[32..].fill(0x80);
        let (_, report) = cast(&[weight], 96, Dialect::ModelOpt).unwrap()[0].clone();
        assert_eq!((report.blocks, report.inexact_blocks), (6, 0));
    }

    #[test]
    fn weights_of_a_group_share_the_global_scale() {
        let made = cast(&[row(&[120]), row(&[110])], 32, Dialect::ModelOpt).unwrap();
        assert_eq!(made[0].0.global(), made[1].0.global());
        assert!(made.iter().all(|(_, report)| report.inexact_blocks == 0));
    }

    #[test]
    fn scales_that_are_no_numbers_are_errors() {
        let error = cast(&[row(&[255])], 32, Dialect::ModelOpt).unwrap_err();
        assert!(error.to_string().contains("not a number"), "{error}");
        let error = cast(&[row(&[1])], 48, Dialect::ModelOpt).unwrap_err();
        assert!(error.to_string().contains("rows of 48"), "{error}");
    }
}
