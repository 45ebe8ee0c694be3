//! Registers that warpgroups hand to each other.

use cubecl::prelude::*;

/// Gives registers of this warpgroup back, down to `registers` a unit: `setmaxnreg.dec`.
///
/// PTX ISA "Miscellaneous Instructions: setmaxnreg"; PTX 8.0, sm_90a and later.
#[cube]
pub fn setmaxnreg_dec(#[comptime] registers: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {r};", r = const registers);
}

/// Takes registers that another warpgroup gave back, up to `registers` a unit: `setmaxnreg.inc`.
///
/// PTX ISA "Miscellaneous Instructions: setmaxnreg"; PTX 8.0, sm_90a and later.
#[cube]
pub fn setmaxnreg_inc(#[comptime] registers: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {r};", r = const registers);
}
