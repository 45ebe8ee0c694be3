//! Register reallocation between warpgroups.

use cubecl::prelude::*;

/// Releases registers of this warpgroup, down to `registers` per unit: `setmaxnreg.dec`.
///
/// PTX ISA "Miscellaneous Instructions: setmaxnreg"; PTX 8.0, sm_90a and later.
#[cube]
pub fn setmaxnreg_dec(#[comptime] registers: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {r};", r = const registers);
}

/// Acquires registers that another warpgroup released, up to `registers` per unit:
/// `setmaxnreg.inc`.
///
/// PTX ISA "Miscellaneous Instructions: setmaxnreg"; PTX 8.0, sm_90a and later.
#[cube]
pub fn setmaxnreg_inc(#[comptime] registers: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {r};", r = const registers);
}
