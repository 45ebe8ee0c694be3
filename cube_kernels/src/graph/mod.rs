//! Captured graphs: updates of their input buffers, overlapping kernels, and branches.
//!
//! A graph reads and writes the buffers that it was captured with, and uses the scalar arguments of
//! the capture. Inputs of a replay are therefore copied into fixed buffers, by kernels queued
//! before the replay. See also [`quantize::advance_offset`](crate::quantize::advance_offset).

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

/// Instances for the registry of kernels.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let all = [copy::instances, words::instances];
    all.into_iter()
        .flat_map(|instances| instances(device))
        .collect()
}
