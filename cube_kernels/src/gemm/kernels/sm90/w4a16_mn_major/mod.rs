//! The W4A16 GEMM of Hopper for a packed MN-major `b`. It runs on H100 and H200.
//!
//! - `kernel`: the kernel, and its choice and launch.
//! - `stage`: the warps that load block scales, and a lane's addresses in a stage.
//! - `tiles`: tile positions, and their distribution to cubes.
//! - `output`: its epilogue.

pub(in crate::gemm) mod kernel;
mod output;
mod stage;
pub(in crate::gemm) mod tiles;

pub(crate) use kernel::Sm90W4a16MnMajor;
