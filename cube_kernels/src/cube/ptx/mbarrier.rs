//! Barriers in shared memory, by their address. PTX ISA "Parallel Synchronization and Communication
//! Instructions: mbarrier".

use cubecl::prelude::*;

#[cfg(doc)]
use super::{fence_acq_rel_cluster, mapa, tcgen05_fence_before_thread_sync};

/// Waits until the phase of `parity` of `barrier` is complete, and acquires what was written
/// before: `mbarrier.try_wait.parity`, repeated until it succeeds.
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

/// [`mbarrier_wait_parity()`] for arrivals of other CTAs of the cluster, which acquires what they
/// wrote before: with `acquire.cluster`.
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

/// Arrives once at `barrier` and releases what was written before: `mbarrier.arrive`.
///
/// PTX 7.0 (7.8 for `shared::cta`); sm_80 and later.
#[cube]
pub fn mbarrier_arrive(barrier: u32) {
    gpu_asm!(
        "{{ .reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [{barrier}]; }}",
        barrier = in(_) barrier
    );
}

/// Arrives once at `barrier` and lets its phase expect `bytes` from TMA:
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

/// Whether the phase of `parity` of `barrier` is complete, 1 or 0, without waiting; if so, acquires
/// what was written before: `mbarrier.test_wait.parity`.
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

/// Arrives once at `barrier`, an address that [`mapa()`] returns, of any CTA of the cluster, and
/// releases to that CTA what was written before: `mbarrier.arrive.release.cluster`.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_arrive_cluster(barrier: u32) {
    gpu_asm!(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{barrier}];",
        barrier = in(_) barrier
    );
}

/// [`mbarrier_arrive_cluster()`] that releases nothing: `mbarrier.arrive.relaxed.cluster`. Behind a
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

/// Counts `bytes` as arrived, as TMA does, at `barrier`, an address that [`mapa()`] returns:
/// `mbarrier.complete_tx.relaxed.cluster`. A [`fence_acq_rel_cluster()`] before it releases what
/// was written.
///
/// PTX 8.0; sm_90 and later.
#[cube]
pub fn mbarrier_complete_tx_cluster(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [{barrier}], {bytes};",
        barrier = in(_) barrier, bytes = in(_) bytes
    );
}
