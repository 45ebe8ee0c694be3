//! Asynchronous copies from device to shared memory: by single units (`cp.async`), in bulk
//! (`cp.async.bulk`), and of boxes of a matrix (`cp.async.bulk.tensor`).

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

#[cfg(doc)]
use super::mapa;

/// Starts a copy of `width` bytes (4, 8 or 16, with that alignment) from device to shared memory:
/// `cp.async.cg` for 16 bytes, which bypasses the L1 cache, `cp.async.ca` for fewer. The copy
/// belongs to the group that [`cp_async_commit_group()`] closes.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async"; PTX 7.0, sm_80 and later.
#[cube]
pub fn cp_async(target: u32, source: u64, #[comptime] width: u32) {
    if comptime!(width == 16) {
        gpu_asm!("cp.async.cg.shared.global [{t}], [{s}], 16;", t = in(_) target, s = in(_) source);
    } else {
        gpu_asm!(
            "cp.async.ca.shared.global [{t}], [{s}], {w};",
            t = in(_) target, s = in(_) source, w = const width
        );
    }
}

/// [`cp_async()`] that reads the first `bytes` of `width` and writes zeros for the others: the form
/// with `src-size`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async"; PTX 7.0, sm_80 and later.
#[cube]
pub fn cp_async_zfill(target: u32, source: u64, bytes: u32, #[comptime] width: u32) {
    if comptime!(width == 16) {
        gpu_asm!(
            "cp.async.cg.shared.global [{t}], [{s}], 16, {b};",
            t = in(_) target, s = in(_) source, b = in(_) bytes
        );
    } else {
        gpu_asm!(
            "cp.async.ca.shared.global [{t}], [{s}], {w}, {b};",
            t = in(_) target, s = in(_) source, b = in(_) bytes, w = const width
        );
    }
}

/// Closes the group of this unit's copies since the last call: `cp.async.commit_group`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async.commit_group"; PTX 7.0, sm_80 and
/// later.
#[cube]
pub fn cp_async_commit_group() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most the last `pending` groups of this unit are in flight: `cp.async.wait_group`.
/// Other units see the copied data after the next barrier.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async.wait_group"; PTX 7.0, sm_80 and
/// later.
#[cube]
pub fn cp_async_wait_group(#[comptime] pending: u32) {
    gpu_asm!("cp.async.wait_group {p};", p = const pending);
}

/// Waits for all copies that this unit has started: `cp.async.wait_all`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async.wait_all"; PTX 7.0, sm_80 and
/// later.
#[cube]
pub fn cp_async_wait_all() {
    gpu_asm!("cp.async.wait_all;");
}

/// Arrives at the mbarrier when all previous [copies](cp_async()) of this unit have completed:
/// `cp.async.mbarrier.arrive.noinc`, one of the arrivals that the barrier expects.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive"; PTX
/// 7.0, sm_80 and later.
#[cube]
pub fn cp_async_mbarrier_arrive_noinc(barrier: u32) {
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];",
        barrier = in(_) barrier
    );
}

/// Starts a bulk copy of `bytes`, a multiple of 16, from device memory at `source` to shared memory
/// at `target`, both multiples of 16; completion is counted in bytes at `barrier`: `cp.async.bulk`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async.bulk"; PTX 8.0, sm_90 and later.
#[cube]
pub fn cp_async_bulk(target: u32, source: u64, bytes: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "[{t}], [{s}], {n}, [{b}];",
        t = in(_) target, s = in(_) source, n = in(_) bytes, b = in(_) barrier
    );
}

/// Copies a box of the matrix of `map`, from `column` and `row` on, to the shared memory of this
/// CTA at `target` by TMA. The bytes arrive at `barrier`, which may belong to the other CTA of the
/// pair, by an address from [`mapa()`]: `cp.async.bulk.tensor.2d` with `cta_group::2`.
///
/// PTX ISA "Data Movement and Conversion Instructions: cp.async.bulk.tensor"; PTX 8.6, sm_100a and
/// sm_103a. It has never run, because no such GPU was available.
#[cube]
pub fn cp_async_bulk_tensor_2d_pair(
    target: u32,
    map: &TensorMap<u32, Tiled>,
    column: i32,
    row: i32,
    barrier: u32,
) {
    let map = tensor_map_address(map);
    gpu_asm!(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes",
        "[{t}], [{m}, {{{c}, {r}}}], [{b}];",
        t = in(_) target, m = in(_) map, c = in(_) column, r = in(_) row, b = in(_) barrier
    );
}
