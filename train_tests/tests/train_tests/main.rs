//! burn-train's training loops with NVFP4 layers.

mod common;
#[cfg(feature = "cuda")]
mod ddp;
#[path = "../../../cube_kernels/tests/suite/support/process.rs"]
mod process;
mod resume;
#[cfg(feature = "cuda")]
#[path = "../../../burn_backend/tests/burn_nvfp4/support/skip.rs"]
mod skip;
mod train;
