//! Codecs for E2M1 elements, E4M3 scales and stored elements: counterparts of
//! [`format`](mod@crate::format).

use std::sync::atomic::{AtomicBool, Ordering};

mod dequantize;
mod e2m1;
mod e2m1_words;
mod e4m3;
mod element;

pub use dequantize::*;
pub use e2m1::*;
pub use e2m1_words::*;
pub use e4m3::*;
pub use element::*;

/// All bits of an `f32` but the sign.
pub(crate) const MAGNITUDE: u32 = 0x7FFF_FFFF;
/// Bits of +infinity; magnitudes above are NaN.
pub(crate) const INFINITY: u32 = 0x7F80_0000;
/// Bits of the canonical quiet NaN.
pub(crate) const QUIET_NAN: u32 = 0x7FC0_0000;

/// Implementation of arithmetic for which some devices have dedicated instructions. All variants
/// produce identical bits, except stochastic rounding with [`Conversion::Hardware`], which produces
/// the same distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Conversion {
    /// Plain operations on values and bit patterns: every device.
    Software,
    /// PTX of sm_80 and later: `max.NaN`, `fma.rz`, `rcp.rn`; no conversions.
    Sm80,
    /// `Sm80` plus the E4M3 conversions of sm_89 and sm_90.
    Sm89,
    /// `Sm89` plus `cvt.rn.satfinite.e2m1x2`, with stochastic rounding in software: sm_120 and
    /// sm_121.
    HardwareNearest,
    /// `HardwareNearest` plus `cvt.rs.satfinite.e2m1x4`: sm_100a and sm_103a.
    Hardware,
    /// [`Hardware`](Self::Hardware) with each of its two E2M1 instructions replaced by the
    /// operations of its software form on the same operands. It takes the bits of a random word in
    /// reversed order, as an instruction may take them in another order than the software form. It
    /// runs the code around the instructions on any CUDA device of sm_89 and later, for tests.
    Emulated,
}

/// True if a test asked for [`Conversion::Emulated`].
pub(crate) static EMULATE: AtomicBool = AtomicBool::new(false);

impl Conversion {
    /// Returns true if the kernel is CUDA C++, which may contain PTX for sm_80.
    pub const fn has_ptx(self) -> bool {
        !matches!(self, Self::Software)
    }

    /// Returns true if there is an instruction for `f32` to E4M3.
    pub const fn has_e4m3(self) -> bool {
        !matches!(self, Self::Software | Self::Sm80)
    }

    /// Returns true if there is an instruction for `f32` to E2M1, rounding to nearest.
    pub const fn has_nearest(self) -> bool {
        matches!(
            self,
            Self::HardwareNearest | Self::Hardware | Self::Emulated
        )
    }

    /// Returns true if there is an instruction for `f32` to E2M1, rounding stochastically.
    pub const fn has_stochastic(self) -> bool {
        matches!(self, Self::Hardware | Self::Emulated)
    }

    /// Returns [`Emulated`](Self::Emulated) if emulation was requested and is possible, otherwise
    /// `self`.
    pub(crate) fn or_emulated(self) -> Self {
        if self.has_e4m3() && EMULATE.load(Ordering::Relaxed) {
            Self::Emulated
        } else {
            self
        }
    }
}
