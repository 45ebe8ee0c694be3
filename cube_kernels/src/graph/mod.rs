//! Captured graphs: writes to memory that they read, kernels that overlap, and branches.
//!
//! A graph reads and writes the buffers that it was captured with, and has the scalar arguments of
//! then. So inputs of a replay are copied into buffers that stay where they are, by kernels that
//! are queued before it. See [`quantize::advance_offset`](crate::quantize::advance_offset) too.

mod branch;
mod copy;
mod held;
#[cfg(feature = "cuda")]
mod overlap;
mod words;

pub use branch::Branch;
pub use copy::copy_words;
pub use held::hold_for_branch;
#[cfg(feature = "cuda")]
pub use overlap::{WAITING, overlap_kernels};
pub use words::set_words;

use crate::registry::instance::{DummyDevice, Instance};

/// For the registry of kernels.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let all = [copy::instances, words::instances];
    all.into_iter()
        .flat_map(|instances| instances(device))
        .collect()
}
