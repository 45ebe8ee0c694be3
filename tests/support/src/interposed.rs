//! Functions of LLVM that CubeCL's CPU runtime calls while it compiles a kernel. The dynamic linker
//! finds these before LLVM's, which they call.
//!
//! A barrier of CubeCL's CPU runtime spins, with one thread per unit: on two cores, each of 256
//! threads spins until the end of its time slice. Here it yields its core.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::options::omit_optimizations;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// Handle of the objects after the caller's.
const RTLD_NEXT: *mut c_void = -1_isize as *mut c_void;

/// The instruction of a spinning unit.
const PAUSE: &[u8] = b"pause";

/// The system call `sched_yield`, and the registers that it changes.
const YIELD: &[u8] = b"movl $$24, %eax; syscall";
const CHANGED: &[u8] = b"~{rax},~{rcx},~{r11},~{memory}";

/// Makes the linker keep the functions of this module.
pub(crate) fn keep() {
    std::hint::black_box((
        LLVMGetInlineAsm as *const c_void,
        LLVMParseIRInContext2 as *const c_void,
    ));
}

/// Returns LLVM's own function `name`.
///
/// # Safety
/// `F` must be the type of a pointer to that function.
unsafe fn llvm<F: Copy>(name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the name ends with a zero, and a pointer to a function has the size of any pointer.
    unsafe {
        let function = dlsym(RTLD_NEXT, name.as_ptr());
        assert!(!function.is_null(), "LLVM has no {name:?}");
        std::mem::transmute_copy(&function)
    }
}

/// Replaces the instruction of a spinning unit.
#[allow(clippy::too_many_arguments, non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn LLVMGetInlineAsm(
    ty: *mut c_void,
    text: *const u8,
    text_len: usize,
    constraints: *const u8,
    constraints_len: usize,
    has_side_effects: c_int,
    aligns_stack: c_int,
    dialect: c_uint,
    can_throw: c_int,
) -> *mut c_void {
    type Function = unsafe extern "C" fn(
        *mut c_void,
        *const u8,
        usize,
        *const u8,
        usize,
        c_int,
        c_int,
        c_uint,
        c_int,
    ) -> *mut c_void;
    // SAFETY: LLVM-C/Core.h declares the function so, and the caller passes valid slices.
    unsafe {
        let original: Function = llvm(c"LLVMGetInlineAsm");
        let spins = std::slice::from_raw_parts(text, text_len) == PAUSE;
        let (text, constraints) = match spins && !crate::is_full() {
            true => (YIELD, CHANGED),
            false => (
                std::slice::from_raw_parts(text, text_len),
                std::slice::from_raw_parts(constraints, constraints_len),
            ),
        };
        original(
            ty,
            text.as_ptr(),
            text.len(),
            constraints.as_ptr(),
            constraints.len(),
            c_int::from(spins) | has_side_effects,
            aligns_stack,
            dialect,
            can_throw,
        )
    }
}

/// Omits LLVM's optimizations before the first kernel of a process that does not call
/// [`cpu_runtime`](crate::cpu_runtime).
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn LLVMParseIRInContext2(
    context: *mut c_void,
    buffer: *mut c_void,
    module: *mut *mut c_void,
    message: *mut *mut c_char,
) -> c_int {
    type Function =
        unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void, *mut *mut c_char) -> c_int;
    omit_optimizations();
    // SAFETY: LLVM-C/IRReader.h declares the function so.
    unsafe {
        let original: Function = llvm(c"LLVMParseIRInContext2");
        original(context, buffer, module, message)
    }
}
