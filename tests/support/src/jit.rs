//! The compiler of CubeCL's CPU runtime, in tests.

#[cfg(unix)]
use std::ffi::{CStr, c_char, c_int};
use std::process::Command;
use std::sync::Once;

use crate::is_full;

/// Options of LLVM. A limit of 0 omits every optional pass; the second option makes it silent.
#[cfg(unix)]
const OPTIONS: [&CStr; 3] = [c"tests", c"-opt-bisect-limit=0", c"-opt-bisect-verbose=0"];

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

/// Does the same for a command of this workspace that the test binary of a package starts. Only
/// x86-64 Linux does.
///
/// # Panics
/// If the shared library of this crate is not beside the test binary.
pub fn preload(command: &mut Command) {
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let binary = std::env::current_exe().expect("the test binary has a path");
        let library = binary.with_file_name("libnvfp4_test_support.so");
        assert!(library.exists(), "{} is missing", library.display());
        command.env("LD_PRELOAD", library);
    }
}

/// Omits LLVM's optimizations, once per process and not with `--full`.
pub(crate) fn omit_optimizations() {
    static ONCE: Once = Once::new();
    if !is_full() {
        ONCE.call_once(set_options);
    }
}

#[cfg(not(unix))]
fn set_options() {}

#[cfg(unix)]
fn set_options() {
    use libloading::os::unix::Library;

    type Parse = unsafe extern "C" fn(c_int, *const *const c_char, *const c_char);
    let arguments = OPTIONS.map(CStr::as_ptr);
    // SAFETY: the function has this signature in LLVM-C/Support.h. It reads the strings, which are
    // static, and sets options, once, before LLVM reads them.
    unsafe {
        let process = Library::this();
        let parse = process.get::<Parse>(b"LLVMParseCommandLineOptions\0");
        let parse = parse.expect("LLVM is linked with CubeCL's CPU runtime");
        parse(arguments.len() as c_int, arguments.as_ptr(), c"".as_ptr());
    }
}
