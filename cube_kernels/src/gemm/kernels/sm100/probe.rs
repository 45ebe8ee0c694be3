//! Probes of the tensor cores of sm_100, for hardware bring-up: writing and reading tensor memory,
//! and a single multiplication with the copies of its scales. Each dumps all of tensor memory, so
//! that a wrong layout shows where its words went.
//!
//! An image holds the operands of one multiplication as they are in shared memory: the codes of 128
//! rows of `a` and 256 of `b` with the 128-byte swizzle, as four steps of 64 columns of NVFP4 or 32
//! of MXFP8, and block scales in 128x4 tiles: of one step of NVFP4, or of all four of MXFP8.
//! [`step_model_kernel()`] executes the same commands on the same image with the software model, on
//! any device.
//!
//! The instructions of these kernels have never run, because no such GPU was available. Their
//! machine code was inspected.

use cubecl::prelude::{barrier::Barrier, *};

use super::{
    engine::{COPY, Command, MMA, Memory, Peer, execute_copy, execute_mma},
    operands::ATOM,
    tile::{SM100_TILE_M, SM100_TILE_N},
};
use crate::cube::ptx::{
    BlockScaled, MmaOperands, SharedLayout, TMEM_COLUMNS, TMEM_LANES, cvta_to_shared, elect_sync,
    instruction_descriptor, ld_shared, mbarrier_wait_parity, tcgen05_alloc, tcgen05_commit,
    tcgen05_cp_32x128b_warpx4, tcgen05_dealloc, tcgen05_descriptor,
    tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync, tcgen05_ld_32x32b_x16,
    tcgen05_mma, tcgen05_relinquish_alloc_permit, tcgen05_st_32x32b_x1,
};

/// Bytes of codes per row of an image.
pub const ROW: usize = 128;
const STEP: usize = 32;
/// Offset of the codes of `b` in an image, in bytes.
pub const B_CODES_AT: usize = SM100_TILE_M * ROW;
/// Offset of the scales: one tile of `a`, then two of `b`.
pub const SCALES_AT: usize = B_CODES_AT + SM100_TILE_N * ROW;
/// Bytes of an image.
pub const IMAGE: usize = SCALES_AT + 3 * ATOM;
/// First column of scales in tensor memory, after the accumulators: four of `a`, eight of `b`.
pub const SCALE_COLUMN: u32 = SM100_TILE_N as u32;
/// Initial contents of tensor memory: a NaN.
pub const POISON: u32 = 0x7fff_ffff;
/// Address of the image in the software model's shared window; codes require this alignment.
const MODEL_BASE: u32 = 1024;
/// Threads of a probe: one per lane of tensor memory.
pub const PROBE_UNITS: u32 = TMEM_LANES as u32;

/// Warp that allocates and issues. It differs from the warp whose thread initializes the barrier,
/// so that it has not diverged.
const ISSUING_WARP: u32 = 1;

/// Returns the address of the thread's lane in tensor memory, for its warp.
#[cube]
fn lane_address(tmem: u32) -> u32 {
    tmem + ((UNIT_POS / 32u32) << 21u32)
}

/// Allocates all of tensor memory. Its address is passed to all threads through shared memory at
/// `board`.
#[cube]
fn allocate_tmem(board: u32) -> u32 {
    if UNIT_POS / 32u32 == ISSUING_WARP {
        tcgen05_alloc(board, comptime!(TMEM_COLUMNS as u32), 1usize);
        tcgen05_relinquish_alloc_permit(1usize);
    }
    tcgen05_fence_before_thread_sync();
    sync_cube();
    tcgen05_fence_after_thread_sync();
    ld_shared(board)
}

/// Frees the memory of [`allocate_tmem()`] after the loads of all threads.
#[cube]
fn free_tmem(tmem: u32) {
    tcgen05_fence_before_thread_sync();
    sync_cube();
    tcgen05_fence_after_thread_sync();
    if UNIT_POS / 32u32 == ISSUING_WARP {
        tcgen05_dealloc(tmem, comptime!(TMEM_COLUMNS as u32), 1usize);
    }
}

/// Writes all of tensor memory to `out`, `[column][lane]`.
#[cube]
fn dump_tmem(tmem: u32, out: &mut [u32]) {
    let lane = lane_address(tmem);
    for chunk in 0..comptime!(TMEM_COLUMNS as u32 / 16) {
        let words = tcgen05_ld_32x32b_x16(lane + chunk * 16u32);
        #[unroll]
        for i in 0..16usize {
            let column = chunk * 16u32 + comptime!(i as u32);
            let at = column * comptime!(TMEM_LANES as u32) + UNIT_POS;
            out[at as usize] = u32::reinterpret(words.extract(i));
        }
    }
}

/// Stores `words`, `[column][lane]`, to tensor memory, and loads them to `out`. All stores precede
/// the first load. One CTA.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn tmem_round_trip_kernel(words: &[u32], out: &mut [u32]) {
    let board: Shared<[u32]> = Shared::new_aligned_slice(4usize, 16usize);
    let tmem = allocate_tmem(cvta_to_shared::<u32>(board.as_slice().as_ptr()));
    let lane = lane_address(tmem);
    for column in 0..comptime!(TMEM_COLUMNS as u32) {
        let at = column * comptime!(TMEM_LANES as u32) + UNIT_POS;
        let word = words[at as usize];
        tcgen05_st_32x32b_x1(lane + column, word);
    }
    tcgen05_fence_before_thread_sync();
    sync_cube();
    tcgen05_fence_after_thread_sync();
    dump_tmem(tmem, out);
    free_tmem(tmem);
}

/// Returns the operands of the multiplication of step `step` of an image at `base`, with
/// accumulators at `tmem`. A step of MXFP8 uses one byte of each word of scales, which the
/// instruction descriptor selects.
#[cube]
fn step_operands(base: u32, tmem: u32, step: u32, #[comptime] kind: BlockScaled) -> MmaOperands {
    let plain = comptime!(instruction_descriptor(
        kind,
        SM100_TILE_M as u32,
        SM100_TILE_N as u32
    ));
    // Not a variable: an instruction in assembly would get its address.
    let idesc = if comptime!(kind == BlockScaled::Mxfp8) {
        // The same as `with_scale_ids`.
        plain.runtime() | (step << 4u32) | (step << 29u32)
    } else {
        plain.runtime()
    };
    let codes = base + step * comptime!(STEP as u32);
    MmaOperands {
        d: tmem,
        a: tcgen05_descriptor(codes, SharedLayout::CODES),
        b: tcgen05_descriptor(codes + comptime!(B_CODES_AT as u32), SharedLayout::CODES),
        idesc,
        a_scales: tmem + SCALE_COLUMN,
        b_scales: tmem + comptime!(SCALE_COLUMN + 4),
        accumulate: 0u32.runtime(),
    }
}

/// Poisons tensor memory, copies the three tiles of scales of `image` to it, multiplies step `step`
/// if `multiplies` names a format, and dumps tensor memory to `out`. One CTA.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn step_kernel(
    image: &[u32],
    out: &mut [u32],
    step: u32,
    #[comptime] multiplies: Option<BlockScaled>,
) {
    let mut operands: Shared<[u32]> = Shared::new_aligned_slice(comptime!(IMAGE / 4), 1024usize);
    let board: Shared<[u32]> = Shared::new_aligned_slice(4usize, 16usize);
    let barriers: Shared<[Barrier]> = Shared::new_aligned_slice(1usize, 8usize);
    let base = cvta_to_shared::<u32>(operands.as_slice().as_ptr());
    let done = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let mut word = UNIT_POS as usize;
    while word < comptime!(IMAGE / 4) {
        operands[word] = image[word];
        word += comptime!(PROBE_UNITS as usize);
    }
    if UNIT_POS == 0u32 {
        barriers[0].init_manual(1u32);
    }
    sync_async_proxy_shared();
    let tmem = allocate_tmem(cvta_to_shared::<u32>(board.as_slice().as_ptr()));
    let lane = lane_address(tmem);
    for column in 0..comptime!(TMEM_COLUMNS as u32) {
        tcgen05_st_32x32b_x1(lane + column, POISON.runtime());
    }
    tcgen05_fence_before_thread_sync();
    sync_cube();
    tcgen05_fence_after_thread_sync();
    if UNIT_POS / 32u32 == ISSUING_WARP {
        if elect_sync() != 0u32 {
            #[unroll]
            for tile in 0..3u32 {
                let from = base + comptime!(SCALES_AT as u32 + tile * ATOM as u32);
                tcgen05_cp_32x128b_warpx4(
                    tmem + comptime!(SCALE_COLUMN + 4 * tile),
                    tcgen05_descriptor(from, SharedLayout::SCALES),
                    1usize,
                );
            }
            if comptime!(multiplies.is_some()) {
                let kind = comptime!(multiplies.unwrap());
                tcgen05_mma(step_operands(base, tmem, step, kind), kind, 1usize);
            }
            tcgen05_commit(done);
        }
        sync_plane();
    }
    mbarrier_wait_parity(done, 0u32.runtime());
    tcgen05_fence_after_thread_sync();
    dump_tmem(tmem, out);
    free_tmem(tmem);
}

/// [`step_kernel()`] on the software model. `tmem` is tensor memory, poisoned by the caller. One
/// unit executes all lanes.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn step_model_kernel(
    image: &[u32],
    tmem: &mut [u32],
    violations: &[Atomic<u32>],
    step: u32,
    #[comptime] multiplies: Option<BlockScaled>,
) {
    let memory = Memory {
        shared: MODEL_BASE.runtime(),
        bytes: comptime!(IMAGE as u32).runtime(),
        tmem: 0usize.runtime(),
        peer: Peer::None,
    };
    if UNIT_POS == 0u32 {
        #[unroll]
        for tile in 0..3u32 {
            let from = comptime!(MODEL_BASE + SCALES_AT as u32 + tile * ATOM as u32).runtime();
            let command = Command {
                opcode: COPY.runtime(),
                target: comptime!(SCALE_COLUMN + 4 * tile).runtime(),
                a: tcgen05_descriptor(from, SharedLayout::SCALES),
                b: 0u64.runtime(),
                idesc: 0u32.runtime(),
                a_scales: 0u32.runtime(),
                b_scales: 0u32.runtime(),
                accumulate: 0u32.runtime(),
            };
            for lane in 0..comptime!(TMEM_LANES as u32) {
                execute_copy(image, tmem, memory, command, lane, violations);
            }
        }
        if comptime!(multiplies.is_some()) {
            let kind = comptime!(multiplies.unwrap());
            let mma = step_operands(MODEL_BASE.runtime(), 0u32.runtime(), step, kind);
            let command = Command {
                opcode: MMA.runtime(),
                target: mma.d,
                a: mma.a,
                b: mma.b,
                idesc: mma.idesc,
                a_scales: mma.a_scales,
                b_scales: mma.b_scales,
                accumulate: mma.accumulate,
            };
            for lane in 0..comptime!(TMEM_LANES as u32) {
                execute_mma(image, tmem, memory, command, lane, violations, kind);
            }
        }
    }
}
