//! Permutation of bytes within a register, and of registers within a warp.

use cubecl::prelude::*;

/// Returns four bytes of `a` (numbers 0 to 3) and `b` (4 to 7), selected by the nibbles of
/// `selector`, lowest first. Bit 3 of a nibble fills the byte with its top bit: `prmt.b32`.
///
/// PTX ISA "Data Movement and Conversion Instructions: prmt"; PTX 2.0, all targets.
#[cube]
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    let selector = u32::reinterpret(selector);
    let bytes: u32;
    gpu_asm!(
        "prmt.b32 {o}, {a}, {b}, {s};",
        o = out(_) bytes, a = in(_) a, b = in(_) b, s = in(_) selector,
        options(pure, nomem)
    );
    u32::reinterpret(bytes)
}

/// Returns `value` of the unit of this plane whose index differs by the bits of `mask`:
/// `shfl.sync.bfly.b32` of all 32 units, all of which must call it. CubeCL's own shuffle queries
/// the active units, which costs four times as much.
///
/// PTX ISA "Data Movement and Conversion Instructions: shfl.sync"; PTX 6.0, all targets.
#[cube]
pub fn shfl_sync_bfly(value: f32, #[comptime] mask: u32) -> f32 {
    let value = f32::reinterpret(value);
    let other: f32;
    gpu_asm!(
        "shfl.sync.bfly.b32 {o}, {v}, {m}, 0x1f, 0xffffffff;",
        o = out(_) other, v = in(_) value, m = in(_) mask
    );
    f32::reinterpret(other)
}

/// Returns a bit for each unit of this plane whose `predicate` is not zero: `vote.sync.ballot.b32`
/// of all 32 units, all of which must call it. CubeCL's own ballot covers only the active units,
/// possibly not all of them after a branch.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: vote.sync"; PTX 6.0, all
/// targets.
#[cube]
pub fn vote_sync_ballot(predicate: u32) -> u32 {
    let units: u32;
    gpu_asm!(
        "{{ .reg .pred p; setp.ne.u32 p, {v}, 0;",
        "vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) units, v = in(_) predicate
    );
    units
}
