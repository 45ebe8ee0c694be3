//! The block-scaled GEMM of consumer Blackwell (sm_120, sm_121), `sm120_block_scaled`: `mma.sync`
//! directly on codes and block scales of NVFP4 or MXFP8.
//!
//! **It has never run on hardware with its instruction**, because no such GPU was available. Its
//! machine code was inspected. With [`Multiply::Software`](super::Multiply::Software) the rest runs
//! on other GPUs. Dispatch asks it on these GPUs after `small_m`.
//!
//! - `kernel`: the kernel, and its choice and launch.
//! - `stage`: the layout of a stage in shared memory, and its copies.

mod kernel;
mod stage;

pub use kernel::{BlockScaledMma, Sm120Plan, sm120_block_scaled_kernel};
pub(crate) use kernel::{Sm120BlockScaled, check_sm120};
pub use stage::Pieces;
