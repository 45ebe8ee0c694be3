//! Kernels of one stream that overlap (programmatic dependent launch).

use cubecl::prelude::*;

/// Waits until all kernels that this one was launched behind have ended, and sees what they wrote:
/// `griddepcontrol.wait`. Without such a launch they have ended before this one began.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: griddepcontrol"; PTX 7.8, sm_90
/// and later.
#[cube]
pub fn griddepcontrol_wait() {
    gpu_asm!("griddepcontrol.wait;");
}

/// For compilers, memory at `pointer` may change here: no instruction. They take what a kernel does
/// not write for constant, and `ld.global.nc` may be moved ahead of a wait.
#[cube]
pub fn may_change<T: CubePrimitive>(pointer: *const T) {
    gpu_asm!("// {p} may change", p = in(_) pointer);
}

/// The kernel launched behind this one may begin as soon as all cubes of this one have come here, or
/// have ended: `griddepcontrol.launch_dependents`.
///
/// PTX ISA as [`griddepcontrol_wait()`].
#[cube]
pub fn griddepcontrol_launch_dependents() {
    gpu_asm!("griddepcontrol.launch_dependents;");
}
