//! The W4A16 GEMM of Hopper. It runs on H100 and H200.
//!
//! - `kernel`: the kernel, and its choice and launch.
//! - `arrange`: a pass before it, which rearranges `a`.
//! - `output`: its epilogue.

pub(in crate::gemm) mod arrange;
pub(in crate::gemm) mod kernel;
mod output;

pub(crate) use kernel::Sm90W4a16;
pub(super) use kernel::width_of;
pub(super) use output::TilePlace;
