//! Scale byte and codes of one block, by the rules of the tools:
//! [`BlockQuantizer`](nvfp4_formats::ptq::BlockQuantizer) in kernels.

use cubecl::prelude::*;
use nvfp4_formats::ptq::{BlockQuantizer, Rule, ScaleChoice};

use crate::{
    BLOCK, Nvfp4Error,
    cube::{
        codec::{Conversion, MAGNITUDE, decode_e2m1, decode_e4m3, encode_e4m3, round_nearest},
        exact::{product_f64, quotient},
    },
};

/// Bits of 2⁻⁹, ModelOpt's smallest block scale.
const MODELOPT_MIN: f32 = 1.0 / 512.0;
/// Largest E4M3 value.
const E4M3_MAX: f32 = 448.0;

/// Comptime choices of a block quantizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockPlan {
    /// Arithmetic, that of ModelOpt or of compressed-tensors.
    pub rule: Rule,
    /// Selection of scale bytes.
    pub choice: ScaleChoice,
    /// Arithmetic of the device.
    pub conversion: Conversion,
}

impl BlockPlan {
    /// Returns the choices of `quantizer`.
    ///
    /// # Errors
    /// Returns an error for a rule without a kernel.
    pub fn new(quantizer: &BlockQuantizer, conversion: Conversion) -> Result<Self, Nvfp4Error> {
        let BlockQuantizer { rule, choice, .. } = *quantizer;
        match rule {
            Rule::ModelOpt | Rule::CompressedTensors => Ok(Self {
                rule,
                choice,
                conversion,
            }),
            _ => Err(Nvfp4Error::value(
                "rule",
                format!("{rule:?}"),
                "ModelOpt or CompressedTensors",
            )),
        }
    }
}

/// Global scale of a weight.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Global {
    /// Stored scalar.
    pub value: f32,
    /// Dequantization factor.
    pub factor: f32,
}

impl Global {
    /// Returns the global scale of `quantizer`, as an argument.
    pub fn arg(quantizer: &BlockQuantizer) -> GlobalLaunch {
        GlobalLaunch::new(quantizer.global.value(), quantizer.global.decode())
    }
}

/// Returns the scale byte of a block whose largest magnitude is `amax`.
#[cube]
fn byte_of(amax: f32, global: &Global, #[comptime] plan: BlockPlan) -> u32 {
    if comptime!(plan.rule == Rule::ModelOpt) {
        let scale = quotient(amax, 6.0f32 * global.value, plan.conversion);
        let scale = select(scale < MODELOPT_MIN, MODELOPT_MIN, scale);
        let scale = select(scale > E4M3_MAX, E4M3_MAX, scale);
        select(amax == 0.0f32, 0x38u32, encode_e4m3(scale))
    } else {
        let scale = global.value * quotient(amax, 6.0f32, plan.conversion);
        let byte = encode_e4m3(select(scale > E4M3_MAX, E4M3_MAX, scale));
        select(byte == 0u32, 0x20u32, byte)
    }
}

/// A block under its scale byte.
#[derive(CubeType, Clone, Copy)]
pub struct ScaledBlock {
    /// Divisor of its elements.
    divisor: f32,
    /// Factor of the values of its codes.
    factor: f32,
}

#[cube]
impl ScaledBlock {
    /// Returns the block with scale byte `byte`.
    pub fn new(byte: u32, global: &Global, #[comptime] plan: BlockPlan) -> ScaledBlock {
        let scale = decode_e4m3(byte);
        let divisor = if comptime!(plan.rule == Rule::ModelOpt) {
            scale * global.value
        } else {
            quotient(scale, global.value, plan.conversion)
        };
        ScaledBlock {
            divisor,
            factor: scale * global.factor,
        }
    }

    /// Returns the code of `x`. A zero has code 0 regardless of its sign.
    pub fn code(&self, x: f32, #[comptime] plan: BlockPlan) -> u32 {
        let value = quotient(x, self.divisor, plan.conversion);
        select(value == 0.0f32, 0u32, round_nearest(value, plan.conversion))
    }

    /// Returns the dequantized value of a code.
    pub fn value(&self, code: u32) -> f32 {
        decode_e2m1(code) * self.factor
    }
}

/// Returns the squared error of `block` under the scale byte `byte`, weighted by `weights`, in the
/// order of the host: the terms of elements `i` and `i + 8` are added, then those of `i` and
/// `i + 4`, and so on.
#[cube]
fn error_of(
    block: &Array<f32>,
    weights: &Array<f32>,
    byte: u32,
    global: &Global,
    #[comptime] plan: BlockPlan,
) -> f64 {
    let scaled = ScaledBlock::new(byte, global, plan);
    let mut terms = Array::<f64>::new(BLOCK);
    #[unroll]
    for i in 0..BLOCK {
        let value = scaled.value(scaled.code(block[i], plan));
        let difference = f64::cast_from(block[i]) - f64::cast_from(value);
        let square = product_f64(difference, difference, plan.conversion);
        terms[i] = product_f64(f64::cast_from(weights[i]), square, plan.conversion);
    }
    #[unroll]
    for stage in 0..4u32 {
        let width = comptime!(BLOCK >> (stage + 1));
        #[unroll]
        for i in 0..width {
            terms[i] += terms[comptime!(i + width)];
        }
    }
    terms[0]
}

/// Returns the largest magnitude of a block.
#[cube]
fn amax_of(block: &Array<f32>) -> f32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..BLOCK {
        bits = max(bits, u32::reinterpret(block[i]) & MAGNITUDE);
    }
    f32::reinterpret(bits)
}

/// Returns the scale byte of `block`, of 16 elements. Squared errors are weighted by `weights`.
/// Among equal errors, the byte of the amax comes first, and then the smallest.
#[cube]
pub fn scale_byte(
    block: &Array<f32>,
    weights: &Array<f32>,
    global: &Global,
    #[comptime] plan: BlockPlan,
) -> u32 {
    let amax = amax_of(block);
    let base = byte_of(amax, global, plan);
    if comptime!(plan.choice == ScaleChoice::Max) {
        base
    } else {
        best_byte(block, weights, base, global, plan)
    }
}

/// Returns the byte with the smallest error, of those that the choice tries and `base`, that of the
/// amax.
#[cube]
fn best_byte(
    block: &Array<f32>,
    weights: &Array<f32>,
    base: u32,
    global: &Global,
    #[comptime] plan: BlockPlan,
) -> u32 {
    let amax = amax_of(block);
    let mut best = base;
    if amax != 0.0f32 {
        let mut least = error_of(block, weights, base, global, plan);
        let mut byte = max(base - min(base, 6u32), 1u32);
        let mut last = min(base + 5u32, 0x7Eu32);
        if comptime!(plan.choice == ScaleChoice::FourOverSix) {
            byte = byte_of(1.5f32 * amax, global, plan);
            last = byte;
        }
        while byte <= last {
            let error = error_of(block, weights, byte, global, plan);
            if error < least {
                least = error;
                best = byte;
            }
            byte += 1u32;
        }
    }
    best
}
