//! Helpers shared by the modules of the suite.

#[macro_use]
pub mod device;
pub mod epilogue;
pub mod gemm;
#[path = "../../../../formats/tests/suite/support/inputs.rs"]
pub mod inputs;
pub mod mxfp8;
pub mod packed;
pub mod policies;
pub mod process;
pub mod quantize;
pub mod samples;

#[cfg(all(feature = "cpu", feature = "cuda"))]
pub mod lock;
#[cfg(all(feature = "cpu", feature = "cuda"))]
pub mod nvrtc;
#[cfg(all(feature = "cpu", feature = "cuda"))]
#[macro_use]
pub mod sources;
