//! Selects the scale byte of one block: from its amax, by four over six, or by search.

use nvfp4_formats::BLOCK;
use nvfp4_formats::format::{e2m1, e4m3};

use super::rules::{Rule, block_amax};
use crate::interchange::GlobalScale;
use crate::interchange::packed::RANGE;

/// Number of scale bytes below the amax's byte that a search tries.
const BELOW: u8 = 6;
/// Number of scale bytes above it.
const ABOVE: u8 = 5;

/// Selection of a block's scale byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    pub fn scale_byte(&self, block: &[f32], weights: &[f32]) -> u8 {
        let amax = block_amax(block);
        let base = self.rule.scale_byte(amax, self.global);
        if amax == 0.0 {
            return base;
        }
        match self.choice {
            ScaleChoice::Max => base,
            ScaleChoice::FourOverSix => {
                let four = self.rule.scale_byte(1.5 * amax, self.global);
                self.best(block, weights, base, [four])
            }
            ScaleChoice::Search => {
                let first = base.saturating_sub(BELOW).max(1);
                let last = (base + ABOVE).min(e4m3::MAX_BYTE);
                self.best(block, weights, base, first..=last)
            }
        }
    }

    /// Returns the weighted squared error of `block` under its scale byte; see
    /// [`scale_byte`](Self::scale_byte).
    pub fn least_error(&self, block: &[f32], weights: &[f32]) -> f64 {
        self.error(block, weights, self.scale_byte(block, weights))
    }

    /// Returns the first byte of `base` and `others` with the smallest error.
    fn best(
        &self,
        block: &[f32],
        weights: &[f32],
        base: u8,
        others: impl IntoIterator<Item = u8>,
    ) -> u8 {
        let mut best = (self.error(block, weights, base), base);
        for byte in others {
            let error = self.error(block, weights, byte);
            if error < best.0 {
                best = (error, byte);
            }
        }
        best.1
    }

    /// Returns the weighted squared error of `block` under the scale byte `byte`.
    fn error(&self, block: &[f32], weights: &[f32], byte: u8) -> f64 {
        let values = self.round(block, byte);
        let terms = block.iter().zip(values).zip(weights);
        terms
            .map(|((&x, value), &weight)| {
                let difference = f64::from(x) - f64::from(value);
                f64::from(weight) * difference * difference
            })
            .sum()
    }

    /// Quantizes and dequantizes `block` under this scale byte.
    fn round(&self, block: &[f32], byte: u8) -> [f32; BLOCK] {
        let codes = self.rule.codes(block, byte, self.global);
        let scale = e4m3::decode(byte) * self.global.decode();
        std::array::from_fn(|i| e2m1::decode(codes[i / 2] >> (4 * (i % 2))) * scale)
    }
}
