//! Kernels that begin before the previous one has ended, in graphs that enable it: see
//! [`graph::overlap_kernels`](crate::graph::overlap_kernels).

use cubecl::prelude::*;

use super::ptx;

/// Lets the next kernel begin: its cubes fill the space that those of this kernel leave.
#[cube]
pub fn let_next_begin(#[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::griddepcontrol_launch_dependents();
    }
}

/// Declares that previous kernels may write `memory`; call it before the wait. Otherwise compilers
/// treat memory that a kernel does not write as constant, and may load it before the wait.
#[cube]
pub fn written_before<T: CubePrimitive>(memory: &[T], #[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::may_change::<T>(memory.as_ptr());
    }
}

/// Waits for the previous kernels and makes their writes visible. Code before the wait may only
/// read memory that no earlier kernel of a graph with overlapping kernels writes.
#[cube]
pub fn wait_for_previous(#[comptime] overlaps: bool) {
    if comptime!(overlaps) {
        ptx::griddepcontrol_wait();
    }
}
