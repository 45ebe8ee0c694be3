//! The compiler of CubeCL's CPU runtime, in tests.

#[cfg(unix)]
use std::ffi::{CStr, c_char, c_int};
use std::sync::Once;

use crate::is_full;

/// Options of LLVM. A limit of 0 omits every optional pass; the second option makes it silent.
#[cfg(unix)]
const OPTIONS: [&CStr; 3] = [c"tests", c"-opt-bisect-limit=0", c"-opt-bisect-verbose=0"];

/// Returns `device()`, a device or client of CubeCL's CPU runtime, which compiles kernels without
/// LLVM's optimizations: these take several times as long as a test. `cargo xtask test --full` keeps
/// them, as do systems other than Unix.
///
/// Call this before the first kernel of the process.
///
/// # Panics
/// If LLVM is not linked.
pub fn cpu_runtime<D>(device: impl FnOnce() -> D) -> D {
    static ONCE: Once = Once::new();
    if !is_full() {
        ONCE.call_once(omit_optimizations);
    }
    device()
}

#[cfg(not(unix))]
fn omit_optimizations() {}

#[cfg(unix)]
fn omit_optimizations() {
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
