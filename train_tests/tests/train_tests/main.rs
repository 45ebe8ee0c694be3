//! burn-train's training loops with NVFP4 layers.

mod common;
#[path = "../../../cube_kernels/tests/suite/support/process.rs"]
mod process;
mod ranks;
mod resume;
mod train;
