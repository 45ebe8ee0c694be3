//! Element types that can be quantized.

use half::{bf16, f16};

/// An input element: converts to `f32` exactly.
pub trait Element: Copy + Send + Sync + 'static {
    /// Returns the slice with its type.
    fn elements(x: &[Self]) -> Elements<'_>;

    /// Returns the exact value.
    fn to_f32(self) -> f32;

    /// Returns the element nearest to `value`, ties to even.
    fn from_f32(value: f32) -> Self;
}

/// A slice of elements of any type.
///
/// Generic functions are compiled in the crate that calls them, with its level of optimization. Code
/// that is compiled in this crate takes its elements so.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE binary16.
    F16(&'a [f16]),
}

impl Element for f32 {
    fn elements(x: &[Self]) -> Elements<'_> {
        Elements::F32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    fn elements(x: &[Self]) -> Elements<'_> {
        Elements::Bf16(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        // A bf16 is the upper half of an f32, including NaN payloads. The library's conversion
        // tests for NaN and does not vectorize.
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

impl Element for f16 {
    fn elements(x: &[Self]) -> Elements<'_> {
        Elements::F16(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        // The library's conversion branches. Exponent and mantissa are those of an f32, except that
        // the bias is 15, not 127.
        let bits = (self.to_bits() & 0x7FFF) as i32;
        let subnormal = bits as f32 * (1.0 / 16_777_216.0);
        let rebias = if bits >= 0x7C00 { 224 } else { 112 } << 23;
        let normal = f32::from_bits((bits << 13).wrapping_add(rebias) as u32);
        let magnitude = if bits < 0x0400 { subnormal } else { normal };
        f32::from_bits(magnitude.to_bits() | (self.to_bits() as u32 & 0x8000) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_the_librarys() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (
                Element::to_f32(f16::from_bits(bits)),
                f16::from_bits(bits).to_f32(),
            );
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
            let (ours, theirs) = (
                Element::to_f32(bf16::from_bits(bits)),
                bf16::from_bits(bits).to_f32(),
            );
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
