//! Loads and stores by address. PTX ISA "Data Movement and Conversion Instructions: ld, st".
//!
//! Several accesses at constant offsets take one instruction each, with the offset as an immediate;
//! indices of a shared array would be multiplied and added for each access.

use cubecl::prelude::*;

/// Loads one word from shared memory: `ld.shared.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_shared(address: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared.b32 {w}, [{a}];", w = out(_) word, a = in(_) address);
    u32::reinterpret(word)
}

/// Loads two words from shared memory, aligned to eight bytes: `ld.shared.v2.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_shared_v2(address: u32) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!("ld.shared.v2.b32 {w}, [{a}];", w = out(_) words, a = in(_) address);
    Vector::<u32, Const<2>>::reinterpret(words)
}

/// Loads four words from shared memory, aligned to sixteen bytes: `ld.shared.v4.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_shared_v4(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.b32 {w}, [{a}];", w = out(_) words, a = in(_) address);
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Stores one word to shared memory: `st.shared.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn st_shared(address: u32, word: u32) {
    gpu_asm!("st.shared.b32 [{a}], {w};", a = in(_) address, w = in(_) word);
}

/// Stores two words to shared memory, aligned to eight bytes: `st.shared.v2.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn st_shared_v2(address: u32, low: u32, high: u32) {
    gpu_asm!(
        "st.shared.v2.b32 [{a}], {{{l}, {h}}};",
        a = in(_) address, l = in(_) low, h = in(_) high
    );
}

/// Loads one byte of device memory: `ld.global.u8`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_global_u8(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.u8 {v}, [{a}];", v = out(_) value, a = in(_) address);
    u32::reinterpret(value)
}

/// Loads a word of device memory: `ld.global.b32`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_global_u32(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.b32 {v}, [{a}];", v = out(_) value, a = in(_) address);
    u32::reinterpret(value)
}

/// Loads two bytes of device memory, aligned to two: `ld.global.u16`.
///
/// PTX 1.0; all targets.
#[cube]
pub fn ld_global_u16(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.u16 {v}, [{a}];", v = out(_) value, a = in(_) address);
    u32::reinterpret(value)
}

/// Loads two words of device memory, aligned to eight bytes, that this SM reads only once:
/// `ld.global.L1::no_allocate.L2::256B.v2.b32`.
///
/// PTX 7.4; sm_80 and later.
#[cube]
pub fn ld_global_no_allocate_v2(address: u64) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!(
        "ld.global.L1::no_allocate.L2::256B.v2.b32 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<2>>::reinterpret(words)
}

/// Loads four words of device memory, aligned to sixteen bytes, that this SM reads only once:
/// `ld.global.L1::no_allocate.L2::256B.v4.b32`.
///
/// PTX 7.4; sm_80 and later.
#[cube]
pub fn ld_global_no_allocate_v4(address: u64) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.global.L1::no_allocate.L2::256B.v4.b32 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Loads one word of device memory that another CTA releases with [`red_release_gpu_add()`], and
/// makes that CTA's previous writes visible: `ld.acquire.gpu.global.b32`.
///
/// PTX 6.0; sm_70 and later.
#[cube]
pub fn ld_acquire_gpu(address: u64) -> u32 {
    let word: u32;
    gpu_asm!("ld.acquire.gpu.global.b32 {w}, [{a}];", w = out(_) word, a = in(_) address);
    u32::reinterpret(word)
}

/// Adds to a word of device memory, after all writes of this thread and of those with which it has
/// synchronized: `red.release.gpu.global.add.u32`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: red"; PTX 6.0, sm_70 and
/// later.
#[cube]
pub fn red_release_gpu_add(address: u64, addend: u32) {
    gpu_asm!(
        "red.release.gpu.global.add.u32 [{a}], {v};",
        a = in(_) address, v = in(_) addend
    );
}

/// Increments a counter in device memory, unordered with other accesses: adds one, or resets a word
/// of `last` or more to zero. Returns the previous value: `atom.relaxed.gpu.global.inc.u32`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: atom"; PTX 6.0, sm_70 and
/// later.
#[cube]
pub fn atom_relaxed_gpu_inc(address: u64, last: u32) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.relaxed.gpu.global.inc.u32 {b}, [{a}], {l};",
        b = out(_) before, a = in(_) address, l = in(_) last
    );
    u32::reinterpret(before)
}

/// [`atom_relaxed_gpu_inc()`] with ordering: `atom.acq_rel.gpu.global.inc.u32`. It releases all
/// writes of this thread and of those with which it has synchronized, and acquires the writes of
/// threads that incremented the counter before.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: atom"; PTX 6.0, sm_70 and
/// later.
#[cube]
pub fn atom_acq_rel_gpu_inc(address: u64, last: u32) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.acq_rel.gpu.global.inc.u32 {b}, [{a}], {l};",
        b = out(_) before, a = in(_) address, l = in(_) last
    );
    u32::reinterpret(before)
}
