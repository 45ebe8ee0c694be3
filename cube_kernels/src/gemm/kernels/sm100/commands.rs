//! Interface of the [`sm100_block_scaled`](super) kernel to its tensor core:
//! either instructions, or commands in a ring buffer in shared memory that four warps execute
//! ([`engine`](super::engine)).
//!
//! The ring holds the commands of more K tiles than the kernel has stages, so that a stage that is
//! released too early is overwritten before its commands are executed.

use cubecl::prelude::*;

use super::{
    engine::{BAD_TMEM, COMMIT, COPY, Command, MMA, Memory, STOP, execute_copy, execute_mma},
    operands::Sm100Plan,
    tile::TensorCore,
};
use crate::{
    cube::ptx::{
        BlockScaled, MmaOperands, ld_shared, ld_shared_v2, mapa, mbarrier_arrive,
        mbarrier_arrive_cluster, mbarrier_test_wait_parity, mbarrier_wait_parity,
        named_barrier_sync, nanosleep, st_shared, st_shared_v2, tcgen05_commit,
        tcgen05_commit_multicast, tcgen05_cp_32x128b_warpx4, tcgen05_ld_32x32b_x16, tcgen05_mma,
    },
    gemm::arguments::thread_in_cta,
};

/// Commands in the ring.
pub const COMMANDS: usize = 128;
/// Bytes per command.
const COMMAND: usize = 48;
/// Words of the ring.
pub const RING_WORDS: usize = COMMANDS * COMMAND / 4;
/// Maximum lookahead for copies, in commands.
const AHEAD: u32 = 24;
/// Threads of a CTA before those of the model.
pub const UNITS: u32 = 192;
/// Threads of the model.
pub const ENGINE_UNITS: u32 = 128;
/// Named barrier of the model.
const ENGINE_BARRIER: u32 = 1;

/// Memory of the software model; unused with hardware instructions.
#[derive(CubeType, CubeLaunch)]
pub struct SoftwareTensorCore {
    /// Tensor memory, per CTA.
    pub tmem: Box<[u32]>,
    /// Violation counters.
    pub violations: Box<[Atomic<u32>]>,
    /// Seed of delays, or 0.
    pub seed: u32,
}

/// Addresses of the command ring in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct CommandRing {
    /// Commands.
    pub words: u32,
    /// First of the barriers that complete when a command is written; those of executed commands
    /// follow.
    pub full: u32,
}

/// Sleeps for up to four microseconds, derived from `seed` and `event`.
#[cube]
pub fn delay(seed: u32, event: u32) {
    if seed != 0u32 {
        let mut hash = (event + 1u32) * 0x9e37_79b1u32 + seed * 0x85eb_ca77u32;
        hash ^= hash >> 15u32;
        hash *= 0x2c1b_3c6du32;
        hash ^= hash >> 12u32;
        if hash & 3u32 == 0u32 {
            nanosleep((hash >> 8u32) & 0x7ffu32);
        }
    }
}

/// Writes command number `queued` to the ring.
#[cube]
fn push(ring: CommandRing, queued: u32, command: Command) {
    let slot = queued % comptime!(COMMANDS as u32);
    let parity = ((queued / comptime!(COMMANDS as u32)) & 1u32) ^ 1u32;
    let full = ring.full + slot * 8u32;
    mbarrier_wait_parity(full + comptime!(8 * COMMANDS as u32), parity);
    let at = ring.words + slot * comptime!(COMMAND as u32);
    let (low, high) = (
        u32::cast_from(command.a),
        u32::cast_from(command.a >> 32u64),
    );
    st_shared_v2(at, low, high);
    let (low, high) = (
        u32::cast_from(command.b),
        u32::cast_from(command.b >> 32u64),
    );
    st_shared_v2(at + 8u32, low, high);
    st_shared(at + 16u32, u32::reinterpret(command.opcode));
    st_shared(at + 20u32, u32::reinterpret(command.target));
    st_shared(at + 24u32, u32::reinterpret(command.idesc));
    st_shared(at + 28u32, u32::reinterpret(command.a_scales));
    st_shared(at + 32u32, u32::reinterpret(command.b_scales));
    st_shared(at + 36u32, u32::reinterpret(command.accumulate));
    mbarrier_arrive(full);
}

/// Reads the command in slot `slot`.
#[cube]
fn pull(ring: CommandRing, slot: u32) -> Command {
    let at = ring.words + slot * comptime!(COMMAND as u32);
    let a = ld_shared_v2(at);
    let b = ld_shared_v2(at + 8u32);
    Command {
        opcode: ld_shared(at + 16u32),
        target: ld_shared(at + 20u32),
        a: u64::cast_from(a.extract(0usize)) | (u64::cast_from(a.extract(1usize)) << 32u64),
        b: u64::cast_from(b.extract(0usize)) | (u64::cast_from(b.extract(1usize)) << 32u64),
        idesc: ld_shared(at + 24u32),
        a_scales: ld_shared(at + 28u32),
        b_scales: ld_shared(at + 32u32),
        accumulate: ld_shared(at + 36u32),
    }
}

/// Copies 512 bytes of block scales to four columns of tensor memory. Returns the number of
/// commands issued so far; `queued` is the number before.
#[cube]
pub fn issue_copy(
    ring: CommandRing,
    queued: u32,
    target: u32,
    source: u64,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    if comptime!(plan.core == TensorCore::Instruction) {
        tcgen05_cp_32x128b_warpx4(target, source, comptime!(plan.ctas()));
        queued
    } else {
        let command = Command {
            opcode: COPY.runtime(),
            target,
            a: source,
            b: 0u64.runtime(),
            idesc: 0u32.runtime(),
            a_scales: 0u32.runtime(),
            b_scales: 0u32.runtime(),
            accumulate: 0u32.runtime(),
        };
        push(ring, queued, command);
        queued + 1u32
    }
}

/// Multiplies 32 bytes of columns. Returns the same as [`issue_copy()`].
#[cube]
pub fn issue_mma(
    ring: CommandRing,
    queued: u32,
    operands: MmaOperands,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    if comptime!(plan.core == TensorCore::Instruction) {
        tcgen05_mma(operands, comptime!(plan.format), comptime!(plan.ctas()));
        queued
    } else {
        let command = Command {
            opcode: MMA.runtime(),
            target: operands.d,
            a: operands.a,
            b: operands.b,
            idesc: operands.idesc,
            a_scales: operands.a_scales,
            b_scales: operands.b_scales,
            accumulate: operands.accumulate,
        };
        push(ring, queued, command);
        queued + 1u32
    }
}

/// Arrives at `barrier` (in each CTA of a pair) when all commands issued before are complete.
/// Returns the same as [`issue_copy()`].
#[cube]
pub fn issue_commit(
    ring: CommandRing,
    queued: u32,
    barrier: u32,
    #[comptime] plan: Sm100Plan,
) -> u32 {
    if comptime!(plan.core == TensorCore::Instruction) {
        if comptime!(plan.ctas() == 1) {
            tcgen05_commit(barrier);
        } else {
            tcgen05_commit_multicast(barrier, comptime!((1u16 << plan.ctas()) - 1));
        }
        queued
    } else {
        push(ring, queued, other(COMMIT, barrier));
        queued + 1u32
    }
}

/// Arrives at `barrier`, in each CTA of a pair.
#[cube]
pub fn arrive_at_each(barrier: u32, #[comptime] ctas: u32) {
    if comptime!(ctas == 1) {
        mbarrier_arrive(barrier);
    } else {
        #[unroll]
        for rank in 0..ctas {
            mbarrier_arrive_cluster(mapa(barrier, rank.runtime()));
        }
    }
}

/// Stops the software model.
#[cube]
pub fn issue_stop(ring: CommandRing, queued: u32) {
    push(ring, queued, other(STOP, queued));
}

/// Returns a command without descriptors.
#[cube]
fn other(#[comptime] opcode: u32, target: u32) -> Command {
    Command {
        opcode: opcode.runtime(),
        target,
        a: 0u64.runtime(),
        b: 0u64.runtime(),
        idesc: 0u32.runtime(),
        a_scales: 0u32.runtime(),
        b_scales: 0u32.runtime(),
        accumulate: 0u32.runtime(),
    }
}

/// Loads 16 accumulators of the thread's lane; `address` is that of its warp.
#[cube]
pub fn load_accumulators(
    model: &mut SoftwareTensorCore,
    memory: Memory,
    address: u32,
    #[comptime] core: TensorCore,
) -> Vector<f32, Const<16>> {
    if comptime!(core == TensorCore::Instruction) {
        tcgen05_ld_32x32b_x16(address)
    } else {
        let (lanes, column) = (address >> 16u32, address & 0xffffu32);
        let own = (UNIT_POS / 32u32) % 4u32 * 32u32;
        let lane = UNIT_POS % 32u32;
        if lane == 0u32 && (lanes != own || column + 16u32 > 512u32) {
            model.violations[BAD_TMEM].fetch_add(1u32);
        }
        let mut sums = Vector::<f32, Const<16>>::new(0.0f32);
        #[unroll]
        for i in 0..16usize {
            let word = (column + comptime!(i as u32)) * 128u32 + lanes + lane;
            sums.insert(i, f32::reinterpret(model.tmem[memory.tmem + word as usize]));
        }
        sums
    }
}

/// Returns the number of written commands after command `at`, at most [`AHEAD`].
#[cube]
fn count_ahead(ring: CommandRing, at: u32) -> u32 {
    let mut count = 0u32;
    let mut looks = true;
    while looks {
        let next = at + count + 1u32;
        let slot = next % comptime!(COMMANDS as u32);
        let parity = (next / comptime!(COMMANDS as u32)) & 1u32;
        looks = mbarrier_test_wait_parity(ring.full + slot * 8u32, parity) == 1u32;
        if looks {
            count += 1u32;
            looks = count < AHEAD;
        }
    }
    count
}

/// Executes a copy for lane `lane` of each CTA.
#[cube]
fn copy_lanes(
    shared: &[u32],
    model: &mut SoftwareTensorCore,
    memory: Memory,
    command: Command,
    lane: u32,
) {
    let (tmem, violations) = (&mut model.tmem, &model.violations);
    for cta in 0..comptime!(memory.peer.ctas()) {
        let lane = lane + cta * ENGINE_UNITS;
        execute_copy(shared, tmem, memory, command, lane, violations);
    }
}

/// The software model: executes commands in ring order until the stop command. With an odd seed,
/// copies overtake earlier instructions and commits, as PTX permits: `tcgen05.cp` is ordered before
/// a later `tcgen05.mma`, but not after an earlier one.
///
/// In a pair of CTAs the model of the even one executes the commands for both; each thread has a
/// lane of each.
///
/// `board` is the address of a word of shared memory; `kind` is the kind of all multiplications.
#[cube]
pub fn run_engine(
    shared: &[u32],
    model: &mut SoftwareTensorCore,
    memory: Memory,
    ring: CommandRing,
    board: u32,
    #[comptime] kind: BlockScaled,
) {
    let lane = thread_in_cta() - UNITS;
    let seed = model.seed;
    let mut at = 0u32;
    // Bit `i`: command `at + i` is a copy that has been executed.
    let mut early = 0u32;
    let mut runs = true;
    while runs {
        let slot = at % comptime!(COMMANDS as u32);
        let parity = (at / comptime!(COMMANDS as u32)) & 1u32;
        let full = ring.full + slot * 8u32;
        mbarrier_wait_parity(full, parity);
        delay(seed, at);
        if seed % 2u32 == 1u32 {
            if lane == 0u32 {
                // A variable would reach the instruction as a pointer.
                st_shared(board, u32::reinterpret(count_ahead(ring, at)));
            }
            named_barrier_sync(ENGINE_BARRIER, ENGINE_UNITS);
            let count = ld_shared(board);
            let mut i = 1u32;
            while i <= count {
                let slot = (at + i) % comptime!(COMMANDS as u32);
                // All threads acquire what lane 0 saw.
                let parity = ((at + i) / comptime!(COMMANDS as u32)) & 1u32;
                mbarrier_wait_parity(ring.full + slot * 8u32, parity);
                let command = pull(ring, slot);
                if command.opcode == COPY && (early >> i) & 1u32 == 0u32 {
                    copy_lanes(shared, model, memory, command, lane);
                    early |= 1u32 << i;
                }
                i += 1u32;
            }
            named_barrier_sync(ENGINE_BARRIER, ENGINE_UNITS);
        }
        let command = pull(ring, slot);
        if command.opcode == COPY {
            if early & 1u32 == 0u32 {
                copy_lanes(shared, model, memory, command, lane);
            }
        } else if command.opcode == MMA {
            let (tmem, violations) = (&mut model.tmem, &model.violations);
            for cta in 0..comptime!(memory.peer.ctas()) {
                let lane = lane + cta * ENGINE_UNITS;
                execute_mma(shared, tmem, memory, command, lane, violations, kind);
            }
        } else if command.opcode == COMMIT {
            // All lanes have passed the earlier commands: they met after each command.
            if lane == 0u32 {
                let barrier = u32::reinterpret(command.target);
                arrive_at_each(barrier, comptime!(memory.peer.ctas()));
            }
        } else {
            runs = false;
        }
        named_barrier_sync(ENGINE_BARRIER, ENGINE_UNITS);
        mbarrier_arrive(full + comptime!(8 * COMMANDS as u32));
        early >>= 1u32;
        at += 1u32;
    }
}
