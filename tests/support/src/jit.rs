//! The compiler of CubeCL's CPU runtime, in tests.

use std::process::Command;

use crate::options::omit_optimizations;

/// Returns `device()`, a device or client of CubeCL's CPU runtime, which compiles kernels without
/// LLVM's optimizations: these take several times as long as a test. On x86-64 Linux, units that
/// wait at a barrier also yield their core. `cargo xtask test --full` changes nothing, nor do systems
/// other than Unix.
///
/// Call this before the first kernel of the process.
///
/// # Panics
/// If LLVM is not linked.
pub fn cpu_runtime<D>(device: impl FnOnce() -> D) -> D {
    omit_optimizations();
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    crate::interposed::keep();
    device()
}

/// Changes a command that a test starts in the same way, on x86-64 Linux with glibc.
///
/// # Panics
/// If the shared library of this crate is not beside the test binary.
pub fn preload(command: &mut Command) {
    if cfg!(all(
        target_os = "linux",
        target_env = "gnu",
        target_arch = "x86_64"
    )) {
        let binary = std::env::current_exe().expect("the test binary has a path");
        let library = binary.with_file_name("libnvfp4_test_support.so");
        assert!(library.exists(), "{} is missing", library.display());
        command.env("LD_PRELOAD", library);
    }
}
