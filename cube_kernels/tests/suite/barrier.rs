//! Units of CubeCL's CPU runtime that wait at a barrier yield their core in these tests.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use nvfp4_test_support::{cpu_runtime, is_full};

unsafe extern "C" {
    fn LLVMContextCreate() -> *mut c_void;
    fn LLVMVoidTypeInContext(context: *mut c_void) -> *mut c_void;
    fn LLVMFunctionType(
        result: *mut c_void,
        parameters: *mut *mut c_void,
        count: c_uint,
        is_variadic: c_int,
    ) -> *mut c_void;
    fn LLVMGetInlineAsm(
        ty: *mut c_void,
        text: *const u8,
        text_len: usize,
        constraints: *const u8,
        constraints_len: usize,
        has_side_effects: c_int,
        aligns_stack: c_int,
        dialect: c_uint,
        can_throw: c_int,
    ) -> *mut c_void;
    fn LLVMPrintValueToString(value: *mut c_void) -> *mut c_char;
}

/// Returns how LLVM prints inline assembly with `text`.
fn assembly(text: &str) -> String {
    // SAFETY: LLVM-C/Core.h declares the functions so; the context lives as long as the process.
    unsafe {
        let context = LLVMContextCreate();
        let nothing = LLVMVoidTypeInContext(context);
        let ty = LLVMFunctionType(nothing, std::ptr::null_mut(), 0, 0);
        let value = LLVMGetInlineAsm(ty, text.as_ptr(), text.len(), "".as_ptr(), 0, 0, 0, 0, 0);
        let printed = CStr::from_ptr(LLVMPrintValueToString(value));
        printed.to_str().unwrap().to_owned()
    }
}

/// The instruction of a spinning unit becomes a system call, except with `--full`; others stay.
#[test]
fn a_waiting_unit_yields() {
    cpu_runtime(|| ());
    let expected = if is_full() { "pause" } else { "syscall" };
    let found = assembly("pause");
    assert!(found.contains(expected), "{found}");
    let other = assembly("nop");
    assert!(other.contains("\"nop\""), "{other}");
}
