//! The instructions of the fifth-generation tensor cores, `tcgen05`, for one CTA (`cta_group::1`)
//! and for two of a cluster (`cta_group::2`). PTX ISA "TensorCore 5th Generation Family
//! Instructions"; PTX 8.6, sm_100a and sm_103a, unless a wrapper says otherwise.
//!
//! Accumulators and block scales are in tensor memory (TMEM): 128 lanes of 512 columns of 32 bits
//! in each SM, addressed as `lane << 16 | column`. Operands are in shared memory and addressed by
//! [descriptors](tcgen05_descriptor()). One thread issues [`tcgen05_cp_32x128b_warpx4()`],
//! [`tcgen05_mma()`] and [`tcgen05_commit()`]: the one that [`elect_sync()`] elects. If a thread is
//! selected by its index instead, ptxas repeats the election in a loop around each of these
//! instructions.
//!
//! A wrapper with `ctas` takes 1 or 2, the same number throughout a kernel. A pair consists of the
//! CTAs `2 i` and `2 i + 1` of a cluster. Its even CTA issues for both: an address or a descriptor
//! refers to the same location in the memory of either. A multiplication takes the even CTA's rows
//! of `a` and then the odd one's, and likewise for `b`. The accumulators of a row of `a`, and the
//! scales of both operands for them, are in the tensor memory of the CTA that has the row.
//!
//! These instructions have never run, because no such GPU was available. Their machine code was
//! inspected.

use cubecl::prelude::*;

use super::BlockScaled;
#[cfg(doc)]
use super::tcgen05_descriptor;

/// Columns of tensor memory per SM.
pub const TMEM_COLUMNS: usize = 512;
/// Lanes of tensor memory.
pub const TMEM_LANES: usize = 128;

/// Returns 1 in one thread of a converged warp, 0 in the others: `elect.sync`.
///
/// PTX ISA "Parallel Synchronization and Communication Instructions: elect.sync"; PTX 8.0, sm_90
/// and later.
#[cube]
pub fn elect_sync() -> u32 {
    let elected: u32;
    gpu_asm!(
        "{{ .reg .pred leader; elect.sync _|leader, 0xffffffff;",
        "selp.b32 {e}, 1, 0, leader; }}",
        e = out(_) elected
    );
    u32::reinterpret(elected)
}

/// Allocates `columns` columns of tensor memory (32 to 512, a power of two) and stores their
/// address to shared memory at `target`: `tcgen05.alloc`. Must be called by all threads of one
/// warp; in a pair, of one warp in each CTA. It waits until another CTA of the SM has freed enough.
#[cube]
pub fn tcgen05_alloc(target: u32, #[comptime] columns: u32, #[comptime] ctas: usize) {
    gpu_asm!(
        "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [{t}], {c};",
        g = const ctas, t = in(_) target, c = const columns
    );
}

/// Promises that this CTA makes no further allocations: `tcgen05.relinquish_alloc_permit`. Must be
/// called by the warp that allocated.
#[cube]
pub fn tcgen05_relinquish_alloc_permit(#[comptime] ctas: usize) {
    gpu_asm!(
        "tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;",
        g = const ctas
    );
}

/// Frees the memory of [`tcgen05_alloc()`]: `tcgen05.dealloc`. Must be called by all threads of one
/// warp, after all accesses of the CTA; in a pair, of one warp in each CTA, after the accesses of
/// both.
#[cube]
pub fn tcgen05_dealloc(address: u32, #[comptime] columns: u32, #[comptime] ctas: usize) {
    gpu_asm!(
        "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 {a}, {c};",
        g = const ctas, a = in(_) address, c = const columns
    );
}

/// Copies 32 lines of 16 bytes from shared memory to four columns of tensor memory, line `i` to the
/// lanes `i`, `i + 32`, `i + 64` and `i + 96`: `tcgen05.cp.32x128b.warpx4`. One thread. In a pair,
/// each CTA's shared memory goes to its own tensor memory.
#[cube]
pub fn tcgen05_cp_32x128b_warpx4(target: u32, source: u64, #[comptime] ctas: usize) {
    gpu_asm!(
        "tcgen05.cp.cta_group::{g}.32x128b.warpx4 [{t}], {s};",
        g = const ctas, t = in(_) target, s = in(_) source
    );
}

/// Operands of [`tcgen05_mma()`].
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct MmaOperands {
    /// Address of the accumulators in tensor memory.
    pub d: u32,
    /// Descriptor of `a` in shared memory.
    pub a: u64,
    /// Descriptor of `b` in shared memory.
    pub b: u64,
    /// Instruction descriptor.
    pub idesc: u32,
    /// Address of the block scales of `a` in tensor memory.
    pub a_scales: u32,
    /// Address of the block scales of `b` in tensor memory.
    pub b_scales: u32,
    /// 0 to replace the accumulators, otherwise to add to them.
    pub accumulate: u32,
}

/// Computes `d = a · bᵀ (+ d)` over 32 bytes of codes of each row: 64 of E2M1 with an E4M3 scale
/// per 16, or 32 of E4M3 with a UE8M0 scale: `tcgen05.mma.kind::mxf4nvf4.block_scale.block16` or
/// `kind::mxf8f6f4.block_scale.block32`. One thread.
///
/// Requires PTX 8.8 for the names `block16` instead of `scale_vec::4X`, which ptxas refuses for the
/// family target sm_100f, and `block32` instead of `scale_vec::1X`.
#[cube]
pub fn tcgen05_mma(operands: MmaOperands, #[comptime] kind: BlockScaled, #[comptime] ctas: usize) {
    let MmaOperands {
        d,
        a,
        b,
        idesc,
        a_scales,
        b_scales,
        accumulate,
    } = operands;
    if comptime!(kind == BlockScaled::Nvfp4) {
        gpu_asm!(
            "{{ .reg .pred accumulate; setp.ne.b32 accumulate, {p}, 0;",
            "tcgen05.mma.cta_group::{g}.kind::mxf4nvf4.block_scale.block16",
            "[{d}], {a}, {b}, {i}, [{sfa}], [{sfb}], accumulate; }}",
            d = in(_) d, a = in(_) a, b = in(_) b, i = in(_) idesc,
            sfa = in(_) a_scales, sfb = in(_) b_scales, p = in(_) accumulate, g = const ctas
        );
    } else {
        gpu_asm!(
            "{{ .reg .pred accumulate; setp.ne.b32 accumulate, {p}, 0;",
            "tcgen05.mma.cta_group::{g}.kind::mxf8f6f4.block_scale.block32",
            "[{d}], {a}, {b}, {i}, [{sfa}], [{sfb}], accumulate; }}",
            d = in(_) d, a = in(_) a, b = in(_) b, i = in(_) idesc,
            sfa = in(_) a_scales, sfb = in(_) b_scales, p = in(_) accumulate, g = const ctas
        );
    }
}

/// Arrives once at `barrier` when all previous `tcgen05` operations of this thread are complete:
/// `tcgen05.commit`. Implies [`tcgen05_fence_before_thread_sync()`].
#[cube]
pub fn tcgen05_commit(barrier: u32) {
    gpu_asm!(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{b}];",
        b = in(_) barrier
    );
}

/// [`tcgen05_commit()`] in a pair, which arrives at the barrier at `barrier` in the shared memory
/// of each CTA of the cluster whose bit is set in `mask`: `tcgen05.commit` with
/// `multicast::cluster`.
#[cube]
pub fn tcgen05_commit_multicast(barrier: u32, #[comptime] mask: u16) {
    gpu_asm!(
        "{{ .reg .b16 ctas; mov.b16 ctas, {m};",
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
        "[{b}], ctas; }}",
        b = in(_) barrier, m = const mask
    );
}

/// Loads 16 columns of the thread's lane of tensor memory, and waits for them:
/// `tcgen05.ld.32x32b.x16` and `tcgen05.wait::ld`, in one block so that no register of the load is
/// read earlier. Must be called by all threads of a warp: warp `w` of a warpgroup has the lanes
/// from `32 w` on, which `address` must contain.
#[cube]
pub fn tcgen05_ld_32x32b_x16(address: u32) -> Vector<f32, Const<16>> {
    let sums: Vector<f32, Const<16>>;
    gpu_asm!(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {v}, [{a}];",
        "tcgen05.wait::ld.sync.aligned;",
        v = out(_) sums, a = in(_) address
    );
    Vector::<f32, Const<16>>::reinterpret(sums)
}

/// Stores a word to a column of the thread's lane of tensor memory, and waits for it:
/// `tcgen05.st.32x32b.x1` and `tcgen05.wait::st`. Must be called by a whole warp, as
/// [`tcgen05_ld_32x32b_x16()`].
#[cube]
pub fn tcgen05_st_32x32b_x1(address: u32, word: u32) {
    gpu_asm!(
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [{a}], {{{w}}};",
        "tcgen05.wait::st.sync.aligned;",
        a = in(_) address, w = in(_) word
    );
}

/// Orders previous `tcgen05` operations before the thread synchronization that follows:
/// `tcgen05.fence::before_thread_sync`.
#[cube]
pub fn tcgen05_fence_before_thread_sync() {
    gpu_asm!("tcgen05.fence::before_thread_sync;");
}

/// Orders later `tcgen05` operations after the preceding thread synchronization:
/// `tcgen05.fence::after_thread_sync`.
#[cube]
pub fn tcgen05_fence_after_thread_sync() {
    gpu_asm!("tcgen05.fence::after_thread_sync;");
}
