//! Tests NVFP4 layers in burn-train's training loops.

mod common;
#[path = "../../../cube_kernels/tests/suite/support/process.rs"]
mod process;
mod ranks;
mod resume;
mod train;
