//! Writes to memory that captured graphs read: what changes from replay to replay.
//!
//! A graph reads and writes the buffers that it was captured with, and has the scalar arguments of
//! then. So inputs of a replay are copied into buffers that stay where they are, by kernels that
//! are queued before it. See [`quantize::advance_offset`](crate::quantize::advance_offset) too.

mod copy;
#[cfg(feature = "cuda")]
mod overlap;
mod words;

pub use copy::copy_words;
#[cfg(feature = "cuda")]
pub use overlap::overlap_kernels;
pub use words::set_words;

use crate::registry::instance::{DummyDevice, Instance};

/// For the registry of kernels.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let all = [copy::instances, words::instances];
    all.into_iter()
        .flat_map(|instances| instances(device))
        .collect()
}
