//! The element types that can be quantized.

use half::{bf16, f16};

/// An input element: converts to `f32` exactly.
pub trait Element: Copy + Send + Sync + 'static {
    /// The value, exactly.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // A bf16 is the upper half of an f32, NaN payloads included; written out because the
        // library's conversion tests for NaN and does not vectorise.
        f32::from_bits((self.to_bits() as u32) << 16)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}
