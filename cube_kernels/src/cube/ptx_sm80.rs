//! PTX of sm_80 and later: copies into shared memory that nobody waits for, and loads of matrix
//! fragments from it.
//!
//! Shared memory is addressed by its 32-bit address inside the cube
//! ([`shared_address()`](super::ptx_sm90::shared_address())).

use cubecl::prelude::*;

/// The address of device memory in its own address space: `cvta.to.global`.
///
/// PTX ISA 2.0 and later, section "Data Movement and Conversion Instructions: cvta". All targets.
#[cube]
pub fn global_address<T: CubePrimitive>(pointer: *const T) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {o}, {p};",
        p = in(_) pointer, o = out(_) address,
        options(pure, nomem)
    );
    u64::reinterpret(address)
}

/// Copies `width` bytes (4, 8 or 16, and aligned to it) from device to shared memory, of which the
/// first `bytes` are read and the others become zeros: `cp.async`. Part of the group that
/// [`copy_async_commit()`] closes.
///
/// PTX ISA 7.0 and later, section "Data Movement and Conversion Instructions: cp.async". Targets:
/// sm_80 and later. Sixteen bytes bypass the L1 cache.
#[cube]
pub fn copy_async(target: u32, source: u64, bytes: u32, #[comptime] width: u32) {
    if comptime!(width == 16) {
        gpu_asm!(
            "cp.async.cg.shared.global [{t}], [{s}], 16, {b};",
            t = in(_) target, s = in(_) source, b = in(_) bytes
        );
    } else if comptime!(width == 8) {
        gpu_asm!(
            "cp.async.ca.shared.global [{t}], [{s}], 8, {b};",
            t = in(_) target, s = in(_) source, b = in(_) bytes
        );
    } else {
        gpu_asm!(
            "cp.async.ca.shared.global [{t}], [{s}], 4, {b};",
            t = in(_) target, s = in(_) source, b = in(_) bytes
        );
    }
}

/// Closes the group of this unit's copies since the last one: `cp.async.commit_group`.
///
/// PTX ISA 7.0 and later. Targets: sm_80 and later.
#[cube]
pub fn copy_async_commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most the last `pending` (0 to 2) groups of this unit are under way:
/// `cp.async.wait_group`. Other units see what was copied behind the next barrier.
///
/// PTX ISA 7.0 and later. Targets: sm_80 and later.
#[cube]
pub fn copy_async_wait(#[comptime] pending: usize) {
    if comptime!(pending == 0) {
        gpu_asm!("cp.async.wait_group 0;");
    } else if comptime!(pending == 1) {
        gpu_asm!("cp.async.wait_group 1;");
    } else {
        gpu_asm!("cp.async.wait_group 2;");
    }
}

/// Four 8 x 8 matrices of two-byte elements (or of 32 E2M1 codes in a row): lane `8 i + r` gives the
/// address of row `r` of matrix `i`, sixteen bytes, and lane `4 r + c` receives word `c` of row `r` of
/// each: `ldmatrix.x4`.
///
/// PTX ISA 6.5 and later, section "Warp-level matrix load instruction: ldmatrix". Targets: sm_75 and
/// later.
#[cube]
pub fn load_matrices(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Loads two words from shared memory, aligned to eight bytes.
#[cube]
pub fn load_shared_2(address: u32) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!("ld.shared.v2.b32 {w}, [{a}];", w = out(_) words, a = in(_) address);
    Vector::<u32, Const<2>>::reinterpret(words)
}

/// Loads one word from shared memory. Of several loads a constant apart, each is one instruction with the
/// constant in it; indices of a shared array are multiplied and added for each.
#[cube]
pub fn load_shared(address: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared.b32 {w}, [{a}];", w = out(_) word, a = in(_) address);
    u32::reinterpret(word)
}
