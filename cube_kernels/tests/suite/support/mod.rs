//! Helpers shared by the modules of the suite.

pub mod inputs;
pub mod literal;

#[cfg(feature = "cube")]
#[macro_use]
pub mod device;
#[cfg(feature = "cube")]
pub mod epilogue;
#[cfg(feature = "cube")]
pub mod gemm;
#[cfg(feature = "cube")]
pub mod mxfp8;
#[cfg(feature = "cube")]
pub mod packed;
#[cfg(feature = "cube")]
pub mod policies;
#[cfg(feature = "cube")]
pub mod process;
#[cfg(feature = "cube")]
pub mod quantize;
#[cfg(feature = "cube")]
pub mod samples;

#[cfg(all(feature = "cpu", feature = "cuda"))]
pub mod lock;
#[cfg(all(feature = "cpu", feature = "cuda"))]
pub mod nvrtc;
#[cfg(all(feature = "cpu", feature = "cuda"))]
#[macro_use]
pub mod sources;

/// True if this run omits nothing: `cargo xtask test --full`.
#[cfg(feature = "cube")]
pub fn is_full() -> bool {
    std::env::var_os("NVFP4_TEST_FULL").is_some()
}
