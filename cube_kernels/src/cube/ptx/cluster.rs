//! CTAs of a cluster: access to another CTA's shared memory, and the cluster barrier.

use cubecl::prelude::*;

/// Returns the address in the cluster's shared window that corresponds to `address` in CTA number
/// `rank`: `mapa.shared::cluster`.
///
/// PTX ISA "Data Movement and Conversion Instructions: mapa"; PTX 7.8, sm_90 and later.
#[cube]
pub fn mapa(address: u32, rank: u32) -> u32 {
    let mapped: u32;
    gpu_asm!(
        "mapa.shared::cluster.u32 {o}, {a}, {r};",
        o = out(_) mapped, a = in(_) address, r = in(_) rank,
        options(pure, nomem)
    );
    u32::reinterpret(mapped)
}

/// Loads one word from the shared memory of a CTA of the cluster, at an address from [`mapa()`]:
/// `ld.shared::cluster.b32`.
///
/// PTX ISA "Data Movement and Conversion Instructions: ld"; PTX 7.8, sm_90 and later.
#[cube]
pub fn ld_shared_cluster(address: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared::cluster.b32 {w}, [{a}];", w = out(_) word, a = in(_) address);
    u32::reinterpret(word)
}

/// Waits for all threads of the cluster and makes their previous writes visible:
/// `barrier.cluster.arrive.release` and `barrier.cluster.wait.acquire`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: barrier.cluster"; PTX 8.0,
/// sm_90 and later.
#[cube]
pub fn barrier_cluster() {
    gpu_asm!(
        "barrier.cluster.arrive.release;",
        "barrier.cluster.wait.acquire;"
    );
}

/// Makes barriers that this thread has initialized visible to the cluster after a
/// [`barrier_cluster()`]: `fence.mbarrier_init.release.cluster`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: membar / fence"; PTX 8.0,
/// sm_90 and later.
#[cube]
pub fn fence_mbarrier_init() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// Orders memory accesses of this thread before and after it for all CTAs of the cluster:
/// `fence.acq_rel.cluster`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: membar / fence"; PTX 7.8,
/// sm_90 and later.
#[cube]
pub fn fence_acq_rel_cluster() {
    gpu_asm!("fence.acq_rel.cluster;");
}
