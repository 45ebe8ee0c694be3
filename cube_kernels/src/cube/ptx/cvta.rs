//! Conversion of addresses to a specific state space.

use cubecl::prelude::*;

/// Returns the 32-bit address of shared memory in the shared window: `cvta.to.shared`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cvta"; PTX 2.0, all targets.
#[cube]
pub fn cvta_to_shared<T: CubePrimitive>(pointer: *const T) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}",
        p = in(_) pointer, o = out(_) address,
        options(pure, nomem)
    );
    u32::reinterpret(address)
}

/// Returns the address of device memory in the global window: `cvta.to.global`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cvta"; PTX 2.0, all targets.
#[cube]
pub fn cvta_to_global<T: CubePrimitive>(pointer: *const T) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {o}, {p};",
        p = in(_) pointer, o = out(_) address,
        options(pure, nomem)
    );
    u64::reinterpret(address)
}
