//! Stored elements (f32, bf16, f16) as `f32`, and magnitudes as integers.

use cubecl::prelude::*;

use super::{INFINITY, MAGNITUDE, QUIET_NAN};
use crate::tensor::FloatKind;

/// Returns the magnitude of a value as integer bits, in which NaN compares above infinity.
#[cube]
pub fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & MAGNITUDE
}

/// Replaces every NaN in magnitude bits by the canonical one.
#[cube]
pub fn canonical(bits: u32) -> u32 {
    select(bits > INFINITY, QUIET_NAN, bits)
}

/// Converts a stored element to `f32`, exactly. `F` is the storage type of `kind`.
#[cube]
pub fn load<F: Numeric>(stored: F, #[comptime] kind: FloatKind) -> f32 {
    if comptime!(kind == FloatKind::Bf16) {
        f32::reinterpret(u32::cast_from(stored) << 16u32)
    } else {
        f32::cast_from(stored)
    }
}

/// Rounds `value` to nearest even, as a stored element.
#[cube]
pub fn store<F: Numeric>(value: f32, #[comptime] kind: FloatKind) -> F {
    if comptime!(kind == FloatKind::Bf16) {
        F::cast_from(bf16_bits(value))
    } else {
        F::cast_from(value)
    }
}

/// Rounds `value` to bf16, ties to even.
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
