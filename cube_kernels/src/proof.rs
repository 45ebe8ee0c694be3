//! What tests and benchmarks use besides the API of the crate: building blocks of kernels, and
//! settings of the process.

use std::sync::atomic::Ordering;

pub use crate::cube::{block, codec, exact, hadamard, philox, ptx};
use crate::{cube::codec::EMULATE, launch::ASKED_UNITS};

impl ptx::SharedLayout {
    /// Returns the descriptor of an operand at `address`, a multiple of 16 in the shared window, as
    /// a kernel computes it.
    pub const fn at(self, address: u32) -> u64 {
        self.bits() | ((address & 0x3_ffff) >> 4) as u64
    }
}

/// Sets the number of units per cube for the kernels of [`quantize`](crate::quantize); 0 restores
/// the device's default. On a GPU it must be a multiple of 32, at most 256. For tests that run in
/// their own process: no result depends on it.
pub fn set_units(units: usize) {
    ASKED_UNITS.store(units, Ordering::Relaxed);
}

/// Switches kernels to [`Conversion::Emulated`](codec::Conversion::Emulated) on all devices that
/// have E4M3 conversions, with or without E2M1 instructions. Other devices are unaffected: there
/// [`Conversion::Software`](codec::Conversion::Software) runs the same operations. For tests in a
/// separate process, called before anything else uses CubeCL: devices are asked once.
pub fn emulate_e2m1_instructions() {
    EMULATE.store(true, Ordering::Relaxed);
}
