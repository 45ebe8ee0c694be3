//! Test support for all packages: golden checkpoints, the compiler of CubeCL's CPU runtime, and the
//! reasons for which a test may skip itself. `cargo xtask test` reads the lines that this crate
//! prints.

mod golden;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod interposed;
mod jit;
mod options;
mod skip;

pub use golden::{Scratch, golden, golden_with_tokenizer};
pub use jit::{cpu_runtime, preload};
pub use skip::{Elsewhere, Skip, is_full, test_name};
