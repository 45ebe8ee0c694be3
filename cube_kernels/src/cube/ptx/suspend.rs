//! Suspension of a thread.

use cubecl::prelude::*;

/// Suspends the thread for about `nanoseconds`, at most twice that: `nanosleep`.
///
/// PTX ISA "Miscellaneous Instructions: nanosleep"; PTX 6.3, sm_70 and later.
#[cube]
pub fn nanosleep(nanoseconds: u32) {
    gpu_asm!("nanosleep.u32 {t};", t = in(_) nanoseconds);
}
