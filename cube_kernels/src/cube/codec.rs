//! The two codecs in software: E2M1 elements and E4M3 scales.

use std::sync::atomic::{AtomicBool, Ordering};

use cubecl::prelude::*;

use super::ptx;
use crate::tensor::FloatKind;

/// All bits of an `f32` but the sign.
pub(crate) const MAGNITUDE: u32 = 0x7FFF_FFFF;
/// Bits of +infinity; magnitudes above are NaN.
pub(crate) const INFINITY: u32 = 0x7F80_0000;
/// Bits of the canonical quiet NaN.
pub(crate) const QUIET_NAN: u32 = 0x7FC0_0000;
/// Bits of 448.
const E4M3_MAX: u32 = 0x43E0_0000;
/// Bits of 2⁻⁶, the smallest normal E4M3 value.
const E4M3_MIN_NORMAL: u32 = 121 << 23;

/// Bits of 1 and of 6.
const ONE: u32 = 0x3F80_0000;
const SIX: u32 = 0x40C0_0000;
/// Bits of the smallest normal `f32`, 2⁻¹²⁶.
const MIN_NORMAL: u32 = 0x0080_0000;
/// 2²² + 1; see [`nearest_bits()`].
const SPREAD: f32 = 4_194_305.0;

/// Who does the arithmetic for which some devices have instructions of their own. Every choice gives
/// the same bits, but for stochastic rounding by [`Conversion::Hardware`], which gives the same
/// distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Conversion {
    /// Plain operations on values and bit patterns: every device.
    Software,
    /// PTX of sm_80 and later: `max.NaN`, `fma.rz`, `rcp.rn`; no conversions.
    Sm80,
    /// The same with the E4M3 conversions of sm_89 and sm_90.
    Sm89,
    /// The same with `cvt.rn.satfinite.e2m1x2`; stochastic rounding in software: sm_120 and sm_121.
    HardwareNearest,
    /// The same with `cvt.rs.satfinite.e2m1x4` too: sm_100a and sm_103a.
    Hardware,
    /// [`Hardware`](Self::Hardware) with each of its two E2M1 instructions replaced by the operations of
    /// its software form on the same operands, in which byte `i` of a random word rounds element `i`:
    /// what surrounds the instructions, on any CUDA device of sm_89 and later. For tests; see
    /// [`emulate_e2m1_instructions`].
    Emulated,
}

/// Set by [`emulate_e2m1_instructions`].
static EMULATE: AtomicBool = AtomicBool::new(false);

/// From now on devices that have, in hardware, everything but E2M1 instructions are given kernels with
/// [`Conversion::Emulated`], and so are those that have them. Elsewhere nothing changes: there
/// [`Conversion::Software`] surrounds the same operations with the same ones. For tests, in a process of
/// their own.
#[doc(hidden)]
pub fn emulate_e2m1_instructions() {
    EMULATE.store(true, Ordering::Relaxed);
}

impl Conversion {
    /// Whether the kernel is CUDA C++, which may hold PTX for sm_80.
    pub const fn has_ptx(self) -> bool {
        !matches!(self, Self::Software)
    }

    /// Whether there is an instruction for `f32` to E4M3.
    pub const fn has_e4m3(self) -> bool {
        !matches!(self, Self::Software | Self::Sm80)
    }

    /// Whether there is an instruction for `f32` to E2M1, to nearest.
    pub const fn has_nearest(self) -> bool {
        matches!(
            self,
            Self::HardwareNearest | Self::Hardware | Self::Emulated
        )
    }

    /// Whether there is one that rounds stochastically.
    pub const fn has_stochastic(self) -> bool {
        matches!(self, Self::Hardware | Self::Emulated)
    }

    /// This one, or [`Emulated`](Self::Emulated) where that was asked for and can be.
    pub(crate) fn or_emulated(self) -> Self {
        if self.has_e4m3() && EMULATE.load(Ordering::Relaxed) {
            Self::Emulated
        } else {
            self
        }
    }
}

/// `min(|value|, 6)`, 6 for NaN: beyond it nothing but 6 is left to round to.
#[cube]
pub fn clamp_to_six(value: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::min_abs(value, 6.0f32)
    } else {
        // As integers NaN compares above everything.
        f32::reinterpret(min(u32::reinterpret(value) & MAGNITUDE, SIX))
    }
}

/// Bits of the power of two, 1, 2 or 4, in whose binade `magnitude`, at most 6, has its E2M1
/// neighbours: twice the step of the grid there. Below 1 the grid is that of [1, 2).
#[cube]
pub fn binade_bits(magnitude: f32) -> u32 {
    max(u32::reinterpret(magnitude), ONE) & INFINITY
}

/// Bits of `magnitude + (2²² + 1) · binade`, rounded to nearest even.
///
/// The unit in the last place of that sum is the step of the E2M1 grid, so the addition rounds to
/// it, ties to even, which is the tie rule of E2M1, since even codes are even multiples of the step
/// in every binade. The last three bits are the multiple, plus the two units that `binade` makes.
/// The product is exact, so contraction does not matter.
#[cube]
pub fn nearest_bits(magnitude: f32, binade: u32) -> u32 {
    u32::reinterpret(f32::reinterpret(binade) * SPREAD + magnitude)
}

/// The code, sign included, from the bits of [`nearest_bits()`]. Bits of `binade >> 22` are
/// `254 + 2 E`: with the two units already there the sum of last three bits is the code.
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

/// The code nearest to `value`; see [`reference::round_nearest`](crate::reference::round_nearest).
#[cube]
pub fn round_nearest(value: f32, #[comptime] conversion: Conversion) -> u32 {
    let magnitude = clamp_to_six(value, conversion);
    let binade = binade_bits(magnitude);
    code_of(nearest_bits(magnitude, binade), binade, value, conversion)
}

/// `value` rounded by eight random bits, byte `byte` of `random`; see
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
        // Down to the grid of `magnitude`'s binade. Where the sum has left that binade it is below
        // the next binade's second grid point, so both grids agree on what is below it.
        let sum = ptx::fma_rz(f32::reinterpret(binade), SPREAD, dithered);
        code_of(u32::reinterpret(sum), binade, value, conversion)
    } else {
        // Exponent and first mantissa bit are what truncation keeps; 2⁻¹²⁶ makes them an `f32`
        // subnormal below 1, as they are in E2M1. Exact: one significant bit follows the first.
        let kept = u32::reinterpret(dithered) & 0x7FC0_0000u32;
        let code = u32::reinterpret(f32::reinterpret(kept) * f32::reinterpret(MIN_NORMAL));
        (code >> 22u32) | sign_unless_nan(u32::reinterpret(value))
    }
}

/// `r / 512` for byte `byte` of `random`, without a conversion: the byte becomes mantissa bits of a
/// number whose exponent makes them units of 2⁻⁹.
#[cube]
fn dither(random: u32, #[comptime] byte: u32) -> f32 {
    let half = random >> comptime!(16 * (byte / 2));
    if comptime!(byte.is_multiple_of(2)) {
        f32::reinterpret((half & 0xFFu32) | (141u32 << 23u32)) - 16384.0f32
    } else {
        f32::reinterpret((half & 0xFF00u32) | (133u32 << 23u32)) - 64.0f32
    }
}

/// The codes of eight values from element `first` on, rounded to nearest, the first in the lowest nibble:
/// by [`ptx::cvt_rn_e2m1x8()`], or by its software form.
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

/// The codes of eight values from element `first` on, rounded by `low` (elements 0 to 3) and `high` (4 to
/// 7): by [`ptx::cvt_rs_e2m1x8()`], or by its software form.
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

/// The codes of eight of `values · multiplier` from element `first` on, rounded to nearest, the first
/// in the lowest nibble. `signs` are those of [`sign_nibbles()`]; `below_7` says that no product is larger than that. Needs PTX; see
/// [`ptx::code_nearest()`].
#[cube]
pub fn nearest_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    signs: u32,
    #[comptime] below_7: bool,
) -> u32 {
    let mut pairs = Array::<u32>::new(4usize);
    #[unroll]
    for pair in 0..4usize {
        let even = values[comptime!(first + 2 * pair)];
        let odd = values[comptime!(first + 2 * pair + 1)];
        pairs[pair] = if comptime!(below_7) {
            ptx::code_nearest_below_7(odd, multiplier) * 16u32
                + ptx::code_nearest_below_7(even, multiplier)
        } else {
            ptx::code_nearest(odd, multiplier) * 16u32 + ptx::code_nearest(even, multiplier)
        };
    }
    let low = ptx::permute(pairs[0], pairs[1], 0x40u32);
    let high = ptx::permute(pairs[2], pairs[3], 0x40u32);
    let magnitudes = ptx::permute(low, high, 0x5410u32);
    magnitudes | (signs & 0x8888_8888u32)
}

/// The signs of eight values in four bf16 pairs from pair `first` on, each repeated over its nibble.
/// Needs PTX.
#[cube]
pub fn sign_nibbles_of_pairs(pairs: &Array<u32>, #[comptime] first: usize) -> u32 {
    // Elements 0, 2, 1, 3, a byte each.
    let low = ptx::permute(pairs[first], pairs[comptime!(first + 1)], 0xFBD9u32);
    let high = ptx::permute(
        pairs[comptime!(first + 2)],
        pairs[comptime!(first + 3)],
        0xFBD9u32,
    );
    let even = ptx::permute(low, high, 0x5410u32);
    let odd = ptx::permute(low, high, 0x7632u32);
    (even & 0x0F0F_0F0Fu32) | (odd & 0xF0F0_F0F0u32)
}

/// The sign of each of eight values, repeated over its nibble. Needs PTX.
#[cube]
pub fn sign_nibbles(values: &Array<f32>, #[comptime] first: usize) -> u32 {
    let mut halves = Array::<u32>::new(2usize);
    #[unroll]
    for odd in 0..2usize {
        let mut pairs = Array::<u32>::new(2usize);
        #[unroll]
        for pair in 0..2usize {
            let low = values[comptime!(first + odd + 4 * pair)];
            let high = values[comptime!(first + odd + 4 * pair + 2)];
            pairs[pair] = ptx::permute(u32::reinterpret(low), u32::reinterpret(high), 0x00FBu32);
        }
        halves[odd] = ptx::permute(pairs[0], pairs[1], 0x5410u32);
    }
    (halves[0] & 0x0F0F_0F0Fu32) | (halves[1] & 0xF0F0_F0F0u32)
}

/// The codes of eight of `values · multiplier` from element `first` on, rounded by the bytes of `low`
/// (the first four) and `high`; `signs` are those of [`sign_nibbles()`]. Needs PTX; see [`ptx::code_units_x2()`].
#[cube]
pub fn stochastic_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    multiplier: f32,
    signs: u32,
    low: u32,
    high: u32,
) -> u32 {
    // Even elements, then odd ones: each a byte whose bits 1 to 3 are the code.
    let mut halves = Array::<u32>::new(2usize);
    #[unroll]
    for odd in 0..2usize {
        let mut quads = Array::<u32>::new(2usize);
        #[unroll]
        for quad in 0..2usize {
            let element = comptime!(first + 4 * quad + odd);
            let units =
                ptx::code_units_x2(values[element], values[comptime!(element + 2)], multiplier);
            let random = if comptime!(quad == 0) { low } else { high };
            // A random byte counts units of 1/256.
            quads[quad] = if comptime!(odd == 0) {
                ptx::add_twice(random, 0x00FF_00FFu32, units)
            } else {
                ptx::permute(random, 0u32, 0x4341u32) * 2u32 + units
            };
        }
        halves[odd] = ptx::permute(quads[0], quads[1], 0x7531u32);
    }
    let magnitudes =
        ((halves[0] >> 1u32) & 0x0707_0707u32) | ((halves[1] << 3u32) & 0x7070_7070u32);
    magnitudes | (signs & 0x8888_8888u32)
}

#[cube]
fn sign_unless_nan(bits: u32) -> u32 {
    select((bits & MAGNITUDE) > INFINITY, 0u32, (bits >> 28u32) & 8u32)
}

/// The value of the code in the low nibble of `code`.
#[cube]
pub fn decode_e2m1(code: u32) -> f32 {
    // Exponent and mantissa as those of an `f32`, whose bias is 126 larger; the code without an
    // exponent is a subnormal in both. Multiplication by a power of two is exact.
    let magnitude = f32::reinterpret((code & 7u32) << 22u32) * f32::reinterpret(253u32 << 23u32);
    f32::reinterpret(u32::reinterpret(magnitude) | ((code & 8u32) << 28u32))
}

/// 2⁻¹²⁶ of the value of the code in the low nibble of `code`: exponent and mantissa of the code, moved to
/// the lowest bits of those of an `f32`, the subnormal 0.5 included.
#[cube]
fn decode_e2m1_tiny(code: u32) -> f32 {
    f32::reinterpret(((code & 7u32) << 22u32) | ((code & 8u32) << 28u32))
}

/// What multiplies the codes of a block: its scale and the factor of its tensor, raised by powers of two
/// that together are the 2¹²⁶ which the codes lack.
#[derive(CubeType, Clone, Copy)]
pub struct BlockFactors {
    scale: f32,
    tensor: f32,
}

#[cube]
impl BlockFactors {
    /// Of a block with scale byte `scale` in a tensor with factor `tensor`, at most `f32::MAX / 1536` or
    /// not finite.
    pub fn new(scale: u32, tensor: f32) -> BlockFactors {
        BlockFactors {
            // At most 448 · 2¹¹⁸.
            scale: decode_e4m3(scale) * comptime!(f32::from_bits((118 + 127) << 23)),
            tensor: tensor * 256.0f32,
        }
    }

    /// `fl(fl(value · scale) · tensor)`, the value being that of the code in the low nibble of `code`, with
    /// two multiplications. The first one is exact, as it is without the powers of two; subnormals
    /// must not be flushed.
    pub fn decode(&self, code: u32) -> f32 {
        decode_e2m1_tiny(code) * self.scale * self.tensor
    }
}

/// The E4M3 byte nearest to the non-negative `value`; see
/// [`format::e4m3::encode`](crate::format::e4m3::encode). Integers only, so that no contraction can
/// touch the product that `value` comes from.
#[cube]
pub fn encode_e4m3(value: f32) -> u32 {
    let bits = u32::reinterpret(value) & MAGNITUDE;
    // Normal: keep three mantissa bits, half to even.
    let rounded = (bits + 0x0007_FFFFu32 + ((bits >> 20u32) & 1u32)) >> 20u32;
    let normal = min(rounded - select(rounded > 960u32, 960u32, 0u32), 0x7Eu32);
    // Subnormal: units of 2⁻⁹ from the significand, half to even. Beyond 25 places nothing is left.
    let exponent = bits >> 23u32;
    let significand = (bits & 0x007F_FFFFu32) | 0x0080_0000u32;
    let shift = min(141u32 - min(exponent, 120u32), 25u32);
    let units = significand >> shift;
    let rest = significand & ((1u32 << shift) - 1u32);
    let half = 1u32 << (shift - 1u32);
    let up = (rest > half) || (rest == half && (units & 1u32) == 1u32);
    let subnormal = units + u32::cast_from(up);
    let finite = select(bits < E4M3_MIN_NORMAL, subnormal, normal);
    let saturated = select(bits >= E4M3_MAX, 0x7Eu32, finite);
    select(bits > INFINITY, 0x7Fu32, saturated)
}

/// The value of an E4M3 byte.
#[cube]
pub fn decode_e4m3(byte: u32) -> f32 {
    let byte = byte & 0x7Fu32;
    // As in `decode_e2m1`; the biases differ by 120.
    let value = f32::reinterpret(byte << 20u32) * f32::reinterpret(247u32 << 23u32);
    select(byte == 0x7Fu32, f32::reinterpret(QUIET_NAN), value)
}

/// The E4M3 element nearest to `value`, with its sign; see
/// [`format::e4m3::encode_element`](crate::format::e4m3::encode_element).
#[cube]
pub fn encode_e4m3_element(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = (bits >> 24u32) & 0x80u32;
    encode_e4m3(value) | select((bits & MAGNITUDE) > INFINITY, 0u32, sign)
}

/// The value of an E4M3 element in the low byte of `byte`, with its sign.
#[cube]
pub fn decode_e4m3_element(byte: u32) -> f32 {
    let magnitude = u32::reinterpret(decode_e4m3(byte));
    f32::reinterpret(magnitude | ((byte & 0x80u32) << 24u32))
}

/// The magnitude of a value as integer bits, in which NaN compares above infinity.
#[cube]
pub fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & MAGNITUDE
}

/// Magnitude bits with every NaN replaced by the canonical one.
#[cube]
pub fn canonical(bits: u32) -> u32 {
    select(bits > INFINITY, QUIET_NAN, bits)
}

/// A stored element as `f32`, exactly. `F` is the storage type of `kind`.
#[cube]
pub fn load<F: Numeric>(stored: F, #[comptime] kind: FloatKind) -> f32 {
    if comptime!(kind == FloatKind::Bf16) {
        f32::reinterpret(u32::cast_from(stored) << 16u32)
    } else {
        f32::cast_from(stored)
    }
}

/// `value` rounded to nearest even, as a stored element.
#[cube]
pub fn store<F: Numeric>(value: f32, #[comptime] kind: FloatKind) -> F {
    if comptime!(kind == FloatKind::Bf16) {
        F::cast_from(bf16_bits(value))
    } else {
        F::cast_from(value)
    }
}

/// `value` rounded to bf16, ties to even.
#[cube]
pub fn round_to_bf16(value: f32) -> f32 {
    f32::reinterpret(bf16_bits(value) << 16u32)
}

#[cube]
fn bf16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    // A NaN must not round to infinity: keep its upper half and make it quiet.
    let nan = (bits >> 16u32) | 0x40u32;
    select((bits & MAGNITUDE) > INFINITY, nan, rounded)
}
