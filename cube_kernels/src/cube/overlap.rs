//! Kernels that begin before the one in front of them has ended, where a graph says so: see
//! [`graph::overlap_kernels`](crate::graph::overlap_kernels).

use cubecl::prelude::*;

use super::ptx;

/// Lets the next kernel begin: its cubes take what room those of this one leave.
#[cube]
pub fn let_next_begin(#[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::griddepcontrol_launch_dependents();
    }
}

/// Kernels in front of this one may write `memory`: call this before the wait. Without it compilers
/// load what a kernel does not write as a constant, which may be ahead of the wait.
#[cube]
pub fn written_before<T: CubePrimitive>(memory: &[T], #[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::may_change::<T>(memory.as_ptr());
    }
}

/// Waits for the kernels in front of this one, and sees what they wrote. What stands before this
/// reads only memory that no kernel of a graph with overlapping kernels writes in front of it.
#[cube]
pub fn wait_for_previous(#[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::griddepcontrol_wait();
    }
}
