//! E2M1 elements, one by one: rounding to nearest and stochastic rounding in plain operations, and
//! decoding. Devices with conversion instructions convert whole words instead.

use cubecl::prelude::*;

use super::{Conversion, INFINITY, MAGNITUDE, decode_e4m3};
use crate::cube::ptx;

/// Bits of 1 and of 6.
const ONE: u32 = 0x3F80_0000;
const SIX: u32 = 0x40C0_0000;
/// Bits of the smallest normal `f32`, 2⁻¹²⁶.
const MIN_NORMAL: u32 = 0x0080_0000;
/// 2²² + 1; see [`nearest_bits()`].
const SPREAD: f32 = 4_194_305.0;

/// Returns `min(|value|, 6)`, 6 for NaN: larger values all round to 6.
#[cube]
pub fn clamp_to_six(value: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::min_abs(value, 6.0f32)
    } else {
        // As an integer, NaN compares above everything.
        f32::reinterpret(min(u32::reinterpret(value) & MAGNITUDE, SIX))
    }
}

/// Returns the bits of the power of two, 1, 2 or 4, in whose binade `magnitude`, at most 6, has its
/// E2M1 neighbours: twice the step of the grid there. Below 1 the grid is that of [1, 2).
#[cube]
pub fn binade_bits(magnitude: f32) -> u32 {
    max(u32::reinterpret(magnitude), ONE) & INFINITY
}

/// Returns the bits of `magnitude + (2²² + 1) · binade`, rounded to nearest even.
///
/// The unit in the last place of that sum is the step of the E2M1 grid, so the addition rounds to
/// it with ties to even. This is the tie rule of E2M1, since even codes are even multiples of the
/// step in every binade. The last three bits are the multiple, plus the two units from `binade`.
/// The product is exact, so contraction does not matter.
#[cube]
pub fn nearest_bits(magnitude: f32, binade: u32) -> u32 {
    u32::reinterpret(f32::reinterpret(binade) * SPREAD + magnitude)
}

/// Returns the code, including the sign, from the bits of [`nearest_bits()`]. The bits of `binade
/// >> 22` are `254 + 2 E`: with the two units already there, the sum of the last three bits is the
/// code.
#[cube]
pub fn code_of(sum: u32, binade: u32, value: f32, #[comptime] conversion: Conversion) -> u32 {
    let bits = u32::reinterpret(value);
    let code = (sum + (binade >> 22u32)) & 7u32;
    if comptime!(conversion.has_ptx()) {
        // PTX makes every NaN that an operation returns positive ("mul": 0x7FFFFFFF).
        code | ((bits >> 28u32) & 8u32)
    } else {
        code | sign_unless_nan(bits)
    }
}

/// Returns the code nearest to `value`; see
/// [`reference::round_nearest`](crate::reference::round_nearest).
#[cube]
pub fn round_nearest(value: f32, #[comptime] conversion: Conversion) -> u32 {
    let magnitude = clamp_to_six(value, conversion);
    let binade = binade_bits(magnitude);
    code_of(nearest_bits(magnitude, binade), binade, value, conversion)
}

/// Rounds `value` by eight random bits, byte `byte` of `random`; see
/// [`reference::round_stochastic`](crate::reference::round_stochastic).
#[cube]
pub fn round_stochastic(
    value: f32,
    random: u32,
    #[comptime] byte: u32,
    #[comptime] conversion: Conversion,
) -> u32 {
    let magnitude = clamp_to_six(value, conversion);
    let binade = binade_bits(magnitude);
    // r / 512 · binade = r / 256 · step is exact, so the sum below is rounded once.
    let dither = dither(random, byte);
    let dithered = dither * f32::reinterpret(binade) + magnitude;
    if comptime!(conversion.has_ptx()) {
        // Round down to the grid of `magnitude`'s binade. If the sum has left that binade, it is
        // below the second grid point of the next one, so both grids round it down to the same
        // value.
        let sum = ptx::fma_rz(f32::reinterpret(binade), SPREAD, dithered);
        code_of(u32::reinterpret(sum), binade, value, conversion)
    } else {
        // Truncation keeps the exponent and the first mantissa bit. 2⁻¹²⁶ makes values below 1
        // `f32` subnormals, as they are in E2M1. Exact: one significant bit follows the first.
        let kept = u32::reinterpret(dithered) & 0x7FC0_0000u32;
        let code = u32::reinterpret(f32::reinterpret(kept) * f32::reinterpret(MIN_NORMAL));
        (code >> 22u32) | sign_unless_nan(u32::reinterpret(value))
    }
}

/// Returns `r / 512` for byte `byte` of `random`, without a conversion: the byte becomes mantissa
/// bits of a number whose exponent makes them units of 2⁻⁹.
#[cube]
fn dither(random: u32, #[comptime] byte: u32) -> f32 {
    let half = random >> comptime!(16 * (byte / 2));
    if comptime!(byte.is_multiple_of(2)) {
        f32::reinterpret((half & 0xFFu32) | (141u32 << 23u32)) - 16384.0f32
    } else {
        f32::reinterpret((half & 0xFF00u32) | (133u32 << 23u32)) - 64.0f32
    }
}

#[cube]
fn sign_unless_nan(bits: u32) -> u32 {
    select((bits & MAGNITUDE) > INFINITY, 0u32, (bits >> 28u32) & 8u32)
}

/// Returns the codes of eight values from element `first` on, rounded to nearest, the first in the
/// lowest nibble: by [`ptx::cvt_rn_e2m1x8()`], or by its software form.
#[cube]
pub fn nearest_codes(
    values: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] conversion: Conversion,
) -> u32 {
    if comptime!(conversion.has_nearest() && conversion != Conversion::Emulated) {
        ptx::cvt_rn_e2m1x8(values, first)
    } else {
        let mut word = 0u32;
        #[unroll]
        for i in 0..8usize {
            let code = round_nearest(values[comptime!(first + 7 - i)], conversion);
            word = word * 16u32 + code;
        }
        word
    }
}

/// Returns the codes of eight values from element `first` on, rounded stochastically by `low`
/// (elements 0 to 3) and `high` (4 to 7): by [`ptx::cvt_rs_e2m1x8()`], or by its software form.
#[cube]
pub fn stochastic_codes(
    values: &Array<f32>,
    #[comptime] first: usize,
    low: u32,
    high: u32,
    #[comptime] conversion: Conversion,
) -> u32 {
    if comptime!(conversion == Conversion::Hardware) {
        ptx::cvt_rs_e2m1x8(values, first, low, high)
    } else {
        let low = software_word(low, conversion);
        let high = software_word(high, conversion);
        let mut word = 0u32;
        #[unroll]
        for i in 0..8usize {
            let element = comptime!(7 - i);
            let random = if comptime!(element < 4) { low } else { high };
            let value = values[comptime!(first + element)];
            let byte = comptime!(element as u32 % 4);
            word = word * 16u32 + round_stochastic(value, random, byte, conversion);
        }
        word
    }
}

/// Returns the random word whose byte `i` has the bits of element `i`, of one in the order of
/// `conversion`.
#[cube]
pub fn software_word(random: u32, #[comptime] conversion: Conversion) -> u32 {
    if comptime!(conversion == Conversion::Emulated) {
        random.reverse_bits()
    } else {
        random
    }
}

/// Returns the value of the code in the low nibble of `code`.
#[cube]
pub fn decode_e2m1(code: u32) -> f32 {
    // Exponent and mantissa become those of an `f32`, whose bias is 126 larger; the code with a
    // zero exponent is subnormal in both. Multiplication by a power of two is exact.
    let magnitude = f32::reinterpret((code & 7u32) << 22u32) * f32::reinterpret(253u32 << 23u32);
    f32::reinterpret(u32::reinterpret(magnitude) | ((code & 8u32) << 28u32))
}

/// Returns 2⁻¹²⁶ times the value of the code in the low nibble of `code`: exponent and mantissa of
/// the code, moved to the lowest bits of those of an `f32`, including the subnormal 0.5.
#[cube]
fn decode_e2m1_tiny(code: u32) -> f32 {
    f32::reinterpret(((code & 7u32) << 22u32) | ((code & 8u32) << 28u32))
}

/// Factors of the codes of a block: its scale and the factor of its tensor, multiplied by powers of
/// two that together compensate the 2⁻¹²⁶ of the codes.
#[derive(CubeType, Clone, Copy)]
pub struct BlockFactors {
    /// Factor of the scale.
    pub scale: f32,
    /// Factor of the tensor.
    pub tensor: f32,
}

#[cube]
impl BlockFactors {
    /// Factors of a block with scale byte `scale` in a tensor with factor `tensor`, which is at
    /// most `f32::MAX / 1536` or not finite.
    pub fn new(scale: u32, tensor: f32) -> BlockFactors {
        BlockFactors {
            // At most 448 · 2¹¹⁸.
            scale: decode_e4m3(scale) * comptime!(f32::from_bits((118 + 127) << 23)),
            tensor: tensor * 256.0f32,
        }
    }

    /// Returns `fl(fl(value · scale) · tensor)` for the value of the code in the low nibble of
    /// `code`, with two multiplications. The first one is exact, as it is without the powers of
    /// two; subnormals must not be flushed.
    pub fn decode(&self, code: u32) -> f32 {
        decode_e2m1_tiny(code) * self.scale * self.tensor
    }

    /// `decode` for values that are summed: the compiler may not contract the last multiplication
    /// with the addition. Requires PTX.
    pub fn decode_term(&self, code: u32) -> f32 {
        ptx::mul_rn(decode_e2m1_tiny(code) * self.scale, self.tensor)
    }
}
