//! Overlapping kernels of one stream (programmatic dependent launch).

use cubecl::prelude::*;

/// Waits until all kernels on which this one depends have ended, and makes their writes visible:
/// `griddepcontrol.wait`. Without a programmatic launch they have ended before this kernel began.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: griddepcontrol"; PTX 7.8, sm_90
/// and later.
#[cube]
pub fn griddepcontrol_wait() {
    gpu_asm!("griddepcontrol.wait;");
}

/// Declares to compilers that memory at `pointer` may change here, without an instruction.
/// Otherwise they treat memory that a kernel does not write as constant, and `ld.global.nc` may be
/// moved before a wait.
#[cube]
pub fn may_change<T: CubePrimitive>(pointer: *const T) {
    gpu_asm!("// {p} may change", p = in(_) pointer);
}

/// Allows the next kernel to begin as soon as all cubes of this one have called it or ended:
/// `griddepcontrol.launch_dependents`.
///
/// PTX ISA as [`griddepcontrol_wait()`].
#[cube]
pub fn griddepcontrol_launch_dependents() {
    gpu_asm!("griddepcontrol.launch_dependents;");
}
