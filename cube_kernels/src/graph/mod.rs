//! Writes to memory that captured graphs read: what changes from replay to replay.
//!
//! A graph reads and writes the buffers that it was captured with, and has the scalar arguments of
//! then. So inputs of a replay are copied into buffers that stay where they are, by kernels that are
//! queued before it. See [`quantize::advance_offset`](crate::quantize::advance_offset) and
//! [`optimizer::set_words`](crate::optimizer::set_words) too.

mod copy;

pub use copy::copy_words;

pub(crate) use copy::instances;
