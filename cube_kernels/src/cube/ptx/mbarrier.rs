//! Barriers in shared memory, by address. PTX ISA "Parallel Synchronization and Communication
//! Instructions: mbarrier".

use cubecl::prelude::*;

#[cfg(doc)]
use super::{fence_acq_rel_cluster, mapa, tcgen05_fence_before_thread_sync};

/// Waits until the phase of `parity` of `barrier` is complete, and acquires previous writes:
/// `mbarrier.try_wait.parity`, repeated until it succeeds.
///
/// PTX 7.8; sm_90 and later.
#[cube]
pub fn mbarrier_wait_parity(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done;",
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};",
        "@!done bra WAIT; }}",
        barrier = in(_) barrier, parity = in(_) parity
    );
}

/// [`mbarrier_wait_parity()`] for arrivals of other CTAs of the cluster, whose previous writes it
/// acquires: with `acquire.cluster`.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_wait_parity_cluster(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done;",
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{barrier}], {parity};",
        "@!done bra WAIT; }}",
        barrier = in(_) barrier, parity = in(_) parity
    );
}

/// Arrives once at `barrier` and releases previous writes: `mbarrier.arrive`.
///
/// PTX 7.0 (7.8 for `shared::cta`); sm_80 and later.
#[cube]
pub fn mbarrier_arrive(barrier: u32) {
    gpu_asm!(
        "{{ .reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [{barrier}]; }}",
        barrier = in(_) barrier
    );
}

/// Arrives once at `barrier` and makes its phase expect `bytes` from TMA:
/// `mbarrier.arrive.expect_tx`.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    gpu_asm!(
        "{{ .reg .b64 token;",
        "mbarrier.arrive.expect_tx.shared::cta.b64 token, [{barrier}], {bytes}; }}",
        barrier = in(_) barrier, bytes = in(_) bytes
    );
}

/// Returns 1 if the phase of `parity` of `barrier` is complete, else 0, without waiting. If
/// complete, acquires previous writes: `mbarrier.test_wait.parity`.
///
/// PTX 7.1 (7.8 for `shared::cta`); sm_80 and later.
#[cube]
pub fn mbarrier_test_wait_parity(barrier: u32, parity: u32) -> u32 {
    let done: u32;
    gpu_asm!(
        "{{ .reg .pred done;",
        "mbarrier.test_wait.parity.shared::cta.b64 done, [{barrier}], {parity};",
        "selp.b32 {d}, 1, 0, done; }}",
        d = out(_) done, barrier = in(_) barrier, parity = in(_) parity
    );
    u32::reinterpret(done)
}

/// Arrives once at `barrier`, an address from [`mapa()`] in any CTA of the cluster, and releases
/// previous writes to that CTA: `mbarrier.arrive.release.cluster`.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_arrive_cluster(barrier: u32) {
    gpu_asm!(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{barrier}];",
        barrier = in(_) barrier
    );
}

/// [`mbarrier_arrive_cluster()`] without a release: `mbarrier.arrive.relaxed.cluster`. After a
/// [`tcgen05_fence_before_thread_sync()`] it orders `tcgen05` operations, as in the examples of PTX
/// ISA "tcgen05: Memory Consistency Model".
///
/// PTX 8.6; sm_90 and later.
#[cube]
pub fn mbarrier_arrive_cluster_relaxed(barrier: u32) {
    gpu_asm!(
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [{barrier}];",
        barrier = in(_) barrier
    );
}

/// Counts `bytes` as arrived, as TMA does, at `barrier`, an address from [`mapa()`]:
/// `mbarrier.complete_tx.relaxed.cluster`. A [`fence_acq_rel_cluster()`] before it releases
/// previous writes.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_complete_tx_cluster(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [{barrier}], {bytes};",
        barrier = in(_) barrier, bytes = in(_) bytes
    );
}
