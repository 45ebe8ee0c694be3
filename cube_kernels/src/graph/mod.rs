//! Captured graphs: updates of their input buffers, overlapping kernels, and branches.
//!
//! A graph reads and writes the buffers that it was captured with, and uses the scalar arguments of
//! the capture. Inputs of a replay are therefore copied into fixed buffers, by kernels queued
//! before the replay. See also [`quantize::advance_offset`](crate::quantize::advance_offset).

mod branch;
mod copy;
mod held;
#[cfg(feature = "proof")]
pub(crate) mod instances;
#[cfg(feature = "cuda")]
mod overlap;
mod words;

pub use branch::Branch;
pub use copy::copy_words;
pub use held::hold_for_branch;
#[cfg(all(feature = "cuda", feature = "proof"))]
pub use overlap::WAITING;
#[cfg(feature = "cuda")]
pub use overlap::overlap_kernels;
pub use words::set_words;
