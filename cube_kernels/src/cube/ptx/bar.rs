//! Named barriers of a CTA.

use cubecl::prelude::*;

/// Waits for `units` units, whole warps, at barrier `number` of the cube's sixteen, and orders
/// their memory accesses: `barrier.sync.aligned`. Barrier 0 is that of `sync_cube`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: barrier"; PTX 6.0, all
/// targets.
#[cube]
pub fn named_barrier_sync(number: u32, units: u32) {
    gpu_asm!("barrier.sync.aligned {n}, {u};", n = in(_) number, u = in(_) units);
}
