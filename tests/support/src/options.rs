//! Options of LLVM in tests.

#[cfg(unix)]
use std::ffi::{CStr, c_char, c_int};
use std::sync::Once;

use crate::is_full;

/// Options of LLVM. A limit of 0 omits every optional pass; the second option makes it silent.
#[cfg(unix)]
const OPTIONS: [&CStr; 3] = [c"tests", c"-opt-bisect-limit=0", c"-opt-bisect-verbose=0"];

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
