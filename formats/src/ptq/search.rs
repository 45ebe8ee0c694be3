//! Selects the scale byte of one block: from its amax, by four over six, or by search.

use std::ops::RangeInclusive;

use rayon::prelude::*;

use super::{GlobalScale, RANGE, Rule, block_amax};
use crate::format::e4m3;
use crate::reference::TO_INTEGER;
use crate::{BLOCK, with_fma};

/// Number of scale bytes below the amax's byte that a search tries.
const BELOW: u8 = 6;
/// Number of scale bytes above it.
const ABOVE: u8 = 5;

/// Selection of a block's scale byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleChoice {
    /// Maps the amax of the block to 6.
    Max,
    /// Maps the amax to 6 or 4, whichever gives the smaller error.
    FourOverSix,
    /// Picks the byte with the smallest error among the twelve around that of the amax.
    Search,
}

impl ScaleChoice {
    /// Returns the largest magnitude that codes and scale bytes can represent with a global scale
    /// of 1. Four over six needs room for scales 1.5 times larger, so its range is 6 · 256.
    pub const fn range(self) -> f32 {
        match self {
            Self::Max | Self::Search => RANGE,
            Self::FourOverSix => 1536.0,
        }
    }
}

/// Quantizes blocks with one global scale, in the arithmetic of a tool.
#[derive(Debug, Clone, Copy)]
pub struct BlockQuantizer {
    /// Arithmetic.
    pub rule: Rule,
    /// Global scale.
    pub global: GlobalScale,
    /// Selection of scale bytes.
    pub choice: ScaleChoice,
}

impl BlockQuantizer {
    /// Creates a quantizer for a tensor, or tensors with a shared scale, whose largest magnitude is
    /// `amax`.
    pub fn new(rule: Rule, choice: ScaleChoice, amax: f32) -> Self {
        // The rule divides by 2688: exact for `Max`; four over six differs only in the range.
        let global = match (choice, rule.global(amax)) {
            (ScaleChoice::FourOverSix, GlobalScale::Multiply(_)) if amax > 0.0 => {
                GlobalScale::multiply(amax / choice.range())
            }
            (ScaleChoice::FourOverSix, GlobalScale::Divide(_)) if amax > 0.0 => {
                GlobalScale::divide(choice.range() / amax)
            }
            (_, global) => global,
        };
        Self {
            rule,
            global,
            choice,
        }
    }

    /// Returns the scale byte of `block`. Squared errors are weighted by `weights`, the `E[x²]` of
    /// the inputs that its elements multiply.
    pub fn scale_byte(&self, block: &[f32; BLOCK], weights: &[f32; BLOCK]) -> u8 {
        match self.choice {
            ScaleChoice::Max => self.rule.scale_byte(block_amax(block), self.global),
            _ => self.best(block, weights).1,
        }
    }

    /// Returns the weighted squared error of `block` under its scale byte; see
    /// [`scale_byte`](Self::scale_byte).
    pub fn least_error(&self, block: &[f32; BLOCK], weights: &[f32; BLOCK]) -> f64 {
        self.best(block, weights).0
    }

    /// Returns the scale byte with the smallest error, after that error. Among equal errors, the
    /// byte of the amax comes first, and then the smallest.
    fn best(&self, block: &[f32; BLOCK], weights: &[f32; BLOCK]) -> (f64, u8) {
        let amax = block_amax(block);
        let base = self.rule.scale_byte(amax, self.global);
        if amax == 0.0 {
            return (0.0, base);
        }
        let others = match self.choice {
            ScaleChoice::Max => base..=base,
            ScaleChoice::FourOverSix => {
                let four = self.rule.scale_byte(1.5 * amax, self.global);
                four..=four
            }
            ScaleChoice::Search => {
                base.saturating_sub(BELOW).max(1)..=(base + ABOVE).min(e4m3::MAX_BYTE)
            }
        };
        least(self, block, weights, base, others)
    }

    /// Returns the weighted squared error of `block` under the scale byte `byte`: the terms of
    /// elements `i` and `i + 8` are added, then those of `i` and `i + 4`, and so on.
    #[inline(always)]
    fn error(&self, block: &[f32; BLOCK], weights: &[f32; BLOCK], byte: u8) -> f64 {
        let divisor = self.rule.divisor(byte, self.global);
        let scale = e4m3::decode(byte) * self.global.decode();
        let mut terms = [0f64; BLOCK];
        for i in 0..BLOCK {
            let value = round_e2m1(block[i] / divisor) * scale;
            let difference = f64::from(block[i]) - f64::from(value);
            terms[i] = f64::from(weights[i]) * (difference * difference);
        }
        let mut len = BLOCK;
        while len > 1 {
            len /= 2;
            for i in 0..len {
                terms[i] += terms[i + len];
            }
        }
        terms[0]
    }
}

with_fma!(
    fn least(
        quantizer: &BlockQuantizer,
        block: &[f32; BLOCK],
        weights: &[f32; BLOCK],
        base: u8,
        others: RangeInclusive<u8>,
    ) -> (f64, u8) = least_body
);

#[inline(always)]
fn least_body(
    quantizer: &BlockQuantizer,
    block: &[f32; BLOCK],
    weights: &[f32; BLOCK],
    base: u8,
    others: RangeInclusive<u8>,
) -> (f64, u8) {
    let mut best = (quantizer.error(block, weights, base), base);
    for byte in others {
        let error = quantizer.error(block, weights, byte);
        if error < best.0 {
            best = (error, byte);
        }
    }
    best
}

/// Rounds to the nearest value of E2M1, ties to the even code. Without branches, so that the
/// elements of a block are rounded side by side.
#[inline(always)]
fn round_e2m1(x: f32) -> f32 {
    // The sum is rounded to a multiple of the step, ties to even multiples.
    let to_step = |x: f32, step: f32| {
        let shift = step * TO_INTEGER;
        (x + shift) - shift
    };
    let magnitude = x.abs().min(6.0);
    let rounded = match magnitude {
        m if m < 2.0 => to_step(m, 0.5),
        m if m < 4.0 => to_step(m, 1.0),
        m => to_step(m, 2.0),
    };
    rounded.copysign(x)
}

/// Returns the codes and scale bytes of rows that are as wide as `weights`, with each block
/// quantized independently.
///
/// # Panics
/// Panics if the width is not a multiple of 16.
pub fn round_rows(
    values: &[f32],
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> (Vec<u8>, Vec<u8>) {
    let k = weights.len();
    let (weights, rest) = weights.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "rows of {k} elements");
    let mut codes = vec![0; values.len() / 2];
    let mut scales = vec![0; values.len() / BLOCK];
    let rows = (values.par_chunks(k))
        .zip(codes.par_chunks_mut(k / 2))
        .zip(scales.par_chunks_mut(k / BLOCK));
    rows.for_each(|((row, codes), scales)| {
        let blocks = row.as_chunks::<BLOCK>().0.iter().zip(weights);
        let outputs = codes.as_chunks_mut().0.iter_mut().zip(scales);
        for ((block, weights), (codes, scale)) in blocks.zip(outputs) {
            *scale = quantizer.scale_byte(block, weights);
            *codes = quantizer.rule.codes(block, *scale, quantizer.global);
        }
    });
    (codes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::e2m1;
    use crate::ptq::nearest;

    #[test]
    fn rounding_without_branches_is_that_of_the_codes() {
        let edges = (0..=64).map(|i| i as f32 / 8.0);
        let beside = edges.flat_map(|x| [x.next_down(), x, x.next_up()]);
        let all = beside.chain([f32::MIN_POSITIVE, 1e9, f32::INFINITY]);
        for x in all.flat_map(|x| [x, -x]) {
            assert_eq!(round_e2m1(x), e2m1::decode(nearest(x)), "{x}");
        }
    }

    /// The choice is compared with that of one block at a time, by codes.
    #[test]
    fn the_choice_has_the_smallest_error() {
        let rules = [
            Rule::ModelOpt,
            Rule::CompressedTensors,
            Rule::TransformerEngine,
        ];
        let choices = [ScaleChoice::FourOverSix, ScaleChoice::Search];
        for (seed, (rule, choice)) in rules
            .into_iter()
            .flat_map(|rule| choices.map(|choice| (rule, choice)))
            .enumerate()
        {
            let value = |i: usize| ((i * 37 + seed * 11) as f32 * 0.71).sin().powi(3);
            let values: Vec<f32> = (0..64 * BLOCK).map(value).collect();
            let weights: [f32; BLOCK] = std::array::from_fn(|i| 0.1 + (i % 5) as f32);
            let quantizer = BlockQuantizer::new(rule, choice, 1.0);
            for block in values.as_chunks::<BLOCK>().0 {
                let error = |byte: u8| -> f64 {
                    let codes = rule.codes(block, byte, quantizer.global);
                    let scale = e4m3::decode(byte) * quantizer.global.decode();
                    let value = |i: usize| e2m1::decode(codes[i / 2] >> (4 * (i % 2))) * scale;
                    let term = |i: usize| {
                        let difference = f64::from(block[i]) - f64::from(value(i));
                        f64::from(weights[i]) * difference.powi(2)
                    };
                    (0..BLOCK).map(term).sum()
                };
                let base = rule.scale_byte(block_amax(block), quantizer.global);
                let tried: Vec<u8> = match choice {
                    ScaleChoice::Search => (base - 6..=(base + 5).min(126)).collect(),
                    _ => vec![
                        base,
                        rule.scale_byte(1.5 * block_amax(block), quantizer.global),
                    ],
                };
                let least = tried.into_iter().map(error).fold(f64::INFINITY, f64::min);
                let found = error(quantizer.scale_byte(block, &weights));
                assert!(
                    found <= least * (1.0 + 1e-12),
                    "{rule:?} {choice:?}: {found} {least}"
                );
                let stated = quantizer.least_error(block, &weights);
                assert!((stated - found).abs() <= 1e-12 * found, "{stated} {found}");
            }
        }
    }
}
