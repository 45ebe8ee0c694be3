//! Quantization rules of the tools, in their order of operations.
//!
//! All operations are `f32` with one rounding each. `f` is the global scale (ModelOpt's
//! `weight_scale_2`), `g` its divisor (compressed-tensors' `weight_global_scale`), and `a` the amax
//! of a block:
//!
//! | | ModelOpt | compressed-tensors | TransformerEngine |
//! |---|---|---|---|
//! | global scale | f = amax / 2688 | g = (1 / amax) 2688 | amax |
//! | scale byte | e4m3(a / (6 f)), at least 2⁻⁹ | e4m3(g (a / 6)) | e4m3(a (S fl(1/6))) |
//! | zero block | 1.0 | 0.125, also where the byte underflows | 0 |
//! | element | x / (s f) | x / (s / g) | x fl(1 / (s D)) |
//! | -0 | code 0 | code 0 | code 8 |

use half::bf16;

use super::{GlobalScale, RANGE};
use crate::format::e4m3;
use crate::{BLOCK, reference};

/// ModelOpt's smallest block scale, 2⁻⁹.
const MODELOPT_MIN: f32 = 1.0 / 512.0;
/// ModelOpt's scale of a block of zeros, 1.0.
const MODELOPT_ZERO: u8 = 0x38;
/// compressed-tensors' replacement for a block scale of 0: 0.125.
const CT_ZERO: u8 = 0x20;

/// Quantization rule of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// `NVFP4QTensor.quantize` of modelopt.
    ModelOpt,
    /// `calculate_qparams` and `NVFP4PackedCompressor` of compressed-tensors, from a model in f32.
    CompressedTensors,
    /// compressed-tensors with a model in bf16, where `a / 6` and both steps of `g` are rounded to
    /// bf16: 0.4 to 0.6 % of the codes differ from those of the other rules.
    CompressedTensorsBf16,
    /// TransformerEngine, and the kernels of this project.
    TransformerEngine,
}

impl Rule {
    /// Returns the global scale of tensors whose largest magnitude is `amax`. Returns 1 for zero
    /// tensors, because readers refuse zero and infinity. Below an amax of 7.9e-36, returns the
    /// smallest one that both dialects can represent, as in training; block scales are then
    /// smaller.
    pub fn global(self, amax: f32) -> GlobalScale {
        if amax == 0.0 {
            return match self {
                Self::CompressedTensors | Self::CompressedTensorsBf16 => GlobalScale::Divide(1.0),
                Self::ModelOpt | Self::TransformerEngine => GlobalScale::Multiply(1.0),
            };
        }
        match self {
            Self::ModelOpt => GlobalScale::multiply(amax / RANGE),
            // PyTorch divides a number by a tensor as reciprocal and product: two roundings.
            Self::CompressedTensors => GlobalScale::divide(1.0 / amax * RANGE),
            Self::CompressedTensorsBf16 => {
                let round = |value: f32| bf16::from_f32(value).to_f32();
                GlobalScale::divide(round(round(1.0 / amax) * RANGE))
            }
            Self::TransformerEngine => GlobalScale::Amax(amax),
        }
    }

    /// Returns the scale byte of a block whose largest magnitude is `amax`, under `global`.
    pub fn scale_byte(self, amax: f32, global: GlobalScale) -> u8 {
        let value = global.value();
        match self {
            Self::ModelOpt if amax == 0.0 => MODELOPT_ZERO,
            Self::ModelOpt => e4m3::encode((amax / (6.0 * value)).clamp(MODELOPT_MIN, e4m3::MAX)),
            Self::CompressedTensors | Self::CompressedTensorsBf16 => {
                let mut sixth = amax / 6.0;
                if self == Self::CompressedTensorsBf16 {
                    sixth = bf16::from_f32(sixth).to_f32();
                }
                match e4m3::encode((value * sixth).min(e4m3::MAX)) {
                    0 => CT_ZERO,
                    byte => byte,
                }
            }
            Self::TransformerEngine => {
                let scale = reference::GlobalScale::from_amax(value);
                e4m3::encode((amax * scale.block).min(e4m3::MAX))
            }
        }
    }

    /// Returns the divisor of elements in a block with this scale byte.
    pub(super) fn divisor(self, byte: u8, global: GlobalScale) -> f32 {
        let (scale, value) = (e4m3::decode(byte), global.value());
        match self {
            Self::ModelOpt | Self::TransformerEngine => scale * value,
            Self::CompressedTensors | Self::CompressedTensorsBf16 => scale / value,
        }
    }

    /// Returns the 16 codes of `block` under this scale byte, packed.
    pub fn codes(self, block: &[f32], byte: u8, global: GlobalScale) -> [u8; BLOCK / 2] {
        let divisor = self.divisor(byte, global);
        let mut codes = [0; BLOCK / 2];
        for (i, &x) in block.iter().enumerate() {
            codes[i / 2] |= nearest(x / divisor) << (4 * (i % 2));
        }
        codes
    }
}

/// Returns the nearest code, ties to even. A zero has code 0 regardless of its sign, as in both
/// tools; a value that rounds to zero keeps its sign.
pub fn nearest(value: f32) -> u8 {
    match value {
        0.0 => 0,
        value => reference::round_nearest(value),
    }
}

/// Returns the largest magnitude of `values`.
pub fn block_amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |amax, x| amax.max(x.abs()))
}
