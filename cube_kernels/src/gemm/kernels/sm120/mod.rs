//! The block-scaled GEMM of consumer Blackwell (sm_120, sm_121), `sm120_block_scaled`: `mma.sync`
//! directly on codes and block scales of NVFP4 or MXFP8.
//!
//! **It has never run on hardware with its instruction**, because no such GPU was available. Its
//! machine code was inspected. With [`Multiply::Software`](tile::Multiply::Software) the rest runs
//! on other GPUs. Dispatch asks it on these GPUs after `small_m`.
//!
//! - `kernel`: the kernel, and its choice and launch.
//! - `tile`: the tile shapes.
//! - `stage`: the layout of a stage in shared memory, and its copies.

pub(in crate::gemm) mod kernel;
pub(in crate::gemm) mod stage;
pub(crate) mod tile;

pub(crate) use kernel::{Sm120BlockScaled, check_sm120};
