//! The scale byte of one block: from its maximum, by four over six, or by search.

use nvfp4_kernels::BLOCK;
use nvfp4_kernels::format::{e2m1, e4m3};

use super::rules::{Rule, block_amax};
use crate::interchange::GlobalScale;
use crate::interchange::packed::RANGE;

/// The scale bytes that a search tries below the byte of the maximum.
const BELOW: u8 = 6;
/// And above it.
const ABOVE: u8 = 5;

/// How the scale byte of a block is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleChoice {
    /// The maximum of the block becomes 6.
    Max,
    /// The maximum becomes 6 or 4, whichever has the smaller error.
    FourOverSix,
    /// The byte with the smallest error of the twelve around that of the maximum.
    Search,
}

impl ScaleChoice {
    /// The largest magnitude that codes and scale bytes express under a global scale of 1: four
    /// over six needs room for scales 1.5 times larger, so its range is 6 · 256.
    pub const fn range(self) -> f32 {
        match self {
            Self::Max | Self::Search => RANGE,
            Self::FourOverSix => 1536.0,
        }
    }
}

/// Quantizes blocks under one global scale, in the arithmetic of a tool.
#[derive(Debug, Clone, Copy)]
pub struct BlockQuantizer {
    /// Whose arithmetic.
    pub rule: Rule,
    /// The global scale.
    pub global: GlobalScale,
    /// How scale bytes are found.
    pub choice: ScaleChoice,
}

impl BlockQuantizer {
    /// For a tensor, or tensors that share their scale, whose largest magnitude is `amax`.
    pub fn new(rule: Rule, choice: ScaleChoice, amax: f32) -> Self {
        // The rule divides by 2688: exact for `Max`, and of four over six only the range differs.
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

    /// The scale byte of `block`, whose squared errors count by `weights`: `E[x²]` of the inputs that
    /// its elements multiply.
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

    /// The weighted squared error of `block` under its scale byte; see
    /// [`scale_byte`](Self::scale_byte).
    pub fn least_error(&self, block: &[f32], weights: &[f32]) -> f64 {
        self.error(block, weights, self.scale_byte(block, weights))
    }

    /// Of `base` and `others` the first byte with the smallest error.
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

    /// The weighted squared error of `block` under the scale byte `byte`.
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

    /// The values that the codes of `block` under this scale byte stand for.
    fn round(&self, block: &[f32], byte: u8) -> [f32; BLOCK] {
        let codes = self.rule.codes(block, byte, self.global);
        let scale = e4m3::decode(byte) * self.global.decode();
        std::array::from_fn(|i| e2m1::decode(codes[i / 2] >> (4 * (i % 2))) * scale)
    }
}
