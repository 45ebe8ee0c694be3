//! A CTA of the [`sm100_block_scaled`](super) kernel: shared memory, barriers,
//! tensor memory and the epilogue warps. The threads that load and multiply are in
//! [`roles`](super::roles).
//!
//! In a pair of CTAs that share a tile, each loads its share and writes its 128 rows; the even one
//! issues the instructions of both.

use cubecl::prelude::{barrier::Barrier, *};

use super::{
    commands::{
        COMMANDS, CommandRing, ENGINE_UNITS, RING_WORDS, SoftwareTensorCore, UNITS, issue_stop,
        run_engine,
    },
    engine::{Memory, Peer, TMEM_WORDS},
    operands::{Sm100Plan, cta_share},
    output::{OutputTile, write_tile, write_transposed},
    roles::{issue_tiles, load_tiles},
    stage::{CtaState, GroupExtent, SwizzledScales, arrive_at_issuer, wait},
    tile::{Fault, Sm100Form, Sm100Tile, TensorCore},
};
use crate::{
    cube::ptx::{
        BlockScaled, TMEM_COLUMNS, barrier_cluster, cvta_to_shared, elect_sync,
        fence_mbarrier_init, ld_shared, st_shared, tcgen05_alloc, tcgen05_dealloc,
        tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync,
        tcgen05_relinquish_alloc_permit,
    },
    gemm::{
        arguments::GroupedProblem,
        epilogue::Epilogue,
        scheduler::{GroupedDim, place},
    },
};

/// Threads of the epilogue. They are the first warps, because a warp accesses the lanes of tensor
/// memory that match its index modulo four.
const EPILOGUE_UNITS: u32 = 128;
/// Warps that issue instructions and fill stages.
const MMA_WARP: u32 = 4;
const TMA_WARP: u32 = 5;

/// Maximum shared memory of a CTA on sm_90 and sm_100: 227 KiB.
const MOST_SHARED: usize = 227 << 10;

impl Sm100Plan {
    /// Returns the number of barriers of the pipeline and of the accumulators, in this order: full,
    /// empty, accumulators full, accumulators empty, arrived (if any). The barriers of the command
    /// ring follow.
    const fn barriers(self) -> usize {
        self.arrived_at() + if self.has_arrived() { self.stages() } else { 0 }
    }

    /// Returns the index of the first "arrived" barrier, which tracks the stages that have arrived
    /// in a CTA.
    pub(super) const fn arrived_at(self) -> usize {
        2 * self.stages() + 2
    }

    /// Returns true if stages have "arrived" barriers. Pairs of CTAs with the software model need
    /// them, because TMA on sm_90 cannot signal another CTA's barrier.
    pub(super) const fn has_arrived(self) -> bool {
        self.ctas() > 1 && matches!(self.core, TensorCore::Software(_))
    }

    /// Returns how the software model accesses the odd CTA's shared memory.
    const fn peer(self) -> Peer {
        match self.ctas() {
            1 => Peer::None,
            _ => Peer::Cluster,
        }
    }

    /// Returns true if all buffers fit into shared memory, and accumulators and scales into tensor
    /// memory.
    const fn fits(self) -> bool {
        let barriers = 8 * (self.barriers() + 2 * COMMANDS);
        self.b_rows() + self.stages() * self.scale_columns() <= TMEM_COLUMNS
            && self.operands() + 4 * RING_WORDS + barriers + 64 <= MOST_SHARED
    }
}

const _: () = {
    let mut i = 0;
    while i < 6 {
        let tile = Sm100Tile::instruction(BlockScaled::ALL[i % 2], Sm100Form::ALL[i / 2]);
        assert!(Sm100Plan::new(tile, GroupedDim::None).fits());
        i += 1;
    }
};

/// Returns the threads per CTA.
pub const fn units(core: TensorCore) -> u32 {
    match core {
        TensorCore::Instruction => UNITS,
        TensorCore::Software(_) => UNITS + ENGINE_UNITS,
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for the rows of each
/// group, or with sums over the columns `k` of each group into a separate `m` x `n` output.
///
/// Tiles are numbered through all groups, and a CTA takes every `CUBE_COUNT`th, or a pair of CTAs
/// every `CUBE_COUNT / 2`th: the grid does not depend on device memory. The bias has a row per
/// group.
///
/// The maps `a` and `b`, of words of codes, and the scales are those of the instruction's operands;
/// the epilogue has those of the GEMM. `out` is in units of 16 bytes.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = (plan.ctas() as u32, 1, 1)
)]
pub fn sm100_block_scaled_kernel(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    scales: SwizzledScales,
    problem: GroupedProblem,
    epilogue: Epilogue,
    model: &mut SoftwareTensorCore,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Sm100Plan,
) {
    let core = comptime!(plan.core);
    let is_software = comptime!(core != TensorCore::Instruction);
    let mut operands: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(plan.operands() / 4), 1024usize);
    let commands: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(if is_software { RING_WORDS } else { 4 }), 16usize);
    // Base address of tensor memory, and a word for the software model.
    let board: Shared<[u32]> = Shared::new_aligned_slice(4usize, 16usize);
    let barrier_count = comptime!(plan.barriers() + if is_software { 2 * COMMANDS } else { 0 });
    let barriers: Shared<[Barrier]> = Shared::new_aligned_slice(barrier_count, 8usize);
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let operands_at = cvta_to_shared::<u32>(operands.as_slice().as_ptr());
    let board_at = cvta_to_shared::<u32>(board.as_slice().as_ptr());
    let memory = Memory {
        shared: operands_at,
        bytes: comptime!(plan.operands() as u32).runtime(),
        tmem: CUBE_POS * comptime!(TMEM_WORDS),
        peer: comptime!(plan.peer()),
    };
    let warp = UNIT_POS / 32u32;
    let rank = CUBE_POS as u32 % comptime!(plan.ctas() as u32);

    init_barriers(&barriers, plan);
    if comptime!(is_software) {
        poison(model, memory);
        if UNIT_POS == 0u32 {
            st_shared(board_at, 0u32.runtime());
        }
    } else if warp == MMA_WARP {
        tcgen05_alloc(
            board_at,
            comptime!(TMEM_COLUMNS as u32),
            comptime!(plan.ctas()),
        );
        tcgen05_relinquish_alloc_permit(comptime!(plan.ctas()));
        tcgen05_fence_before_thread_sync();
    }
    sync_async_proxy_shared();
    sync_ctas(plan);
    if comptime!(!is_software) {
        tcgen05_fence_after_thread_sync();
    }
    let mut seed = 0u32;
    if comptime!(is_software) {
        seed = model.seed;
    }
    let cta = CtaState {
        operands: operands_at,
        full,
        accumulators: full + comptime!(16 * plan.stages() as u32),
        ring: CommandRing {
            words: cvta_to_shared::<u32>(commands.as_slice().as_ptr()),
            full: full + comptime!(8 * plan.barriers() as u32),
        },
        tmem: ld_shared(board_at),
        seed,
        rank,
    };

    if warp < comptime!(EPILOGUE_UNITS / 32) {
        write_tiles(&problem, &epilogue, model, memory, out, cta, plan);
    } else if warp == MMA_WARP {
        if rank == 0u32 {
            if elect_sync() != 0u32 {
                let queued = issue_tiles(&problem, cta, plan);
                if comptime!(is_software) {
                    issue_stop(cta.ring, queued);
                }
            }
            sync_plane();
        }
    } else if warp == TMA_WARP {
        if elect_sync() != 0u32 {
            load_tiles(a, b, &scales, &problem, &mut operands, &barriers, cta, plan);
        }
        sync_plane();
    } else if comptime!(is_software) {
        let (ring, board) = (cta.ring, board_at + 4u32);
        if rank == 0u32 {
            run_engine(
                &operands,
                model,
                memory,
                ring,
                board,
                comptime!(plan.format),
            );
        }
    }

    // All accumulators have been read. In a pair of CTAs, neither may exit while the other one
    // still accesses its shared or tensor memory.
    if comptime!(!is_software) {
        tcgen05_fence_before_thread_sync();
        sync_ctas(plan);
        if warp == MMA_WARP {
            tcgen05_fence_after_thread_sync();
            tcgen05_dealloc(
                cta.tmem,
                comptime!(TMEM_COLUMNS as u32),
                comptime!(plan.ctas()),
            );
        }
    } else if comptime!(plan.ctas() > 1) {
        sync_ctas(plan);
    }
}

/// Waits for all threads of the CTAs that share a tile.
#[cube]
fn sync_ctas(#[comptime] plan: Sm100Plan) {
    if comptime!(plan.ctas() == 1) {
        sync_cube();
    } else {
        barrier_cluster();
    }
}

/// Initializes the barriers for all threads and, after the fence that follows, for TMA.
#[cube]
fn init_barriers(barriers: &[Barrier], #[comptime] plan: Sm100Plan) {
    let stages = comptime!(plan.stages());
    if UNIT_POS == 0u32 {
        #[unroll]
        for s in 0..stages {
            barriers[s].init_manual(1u32);
            barriers[s + stages].init_manual(1u32);
        }
        barriers[comptime!(2 * stages)].init_manual(1u32);
        let epilogue_units = comptime!(EPILOGUE_UNITS * plan.ctas() as u32);
        barriers[comptime!(2 * stages + 1)].init_manual(epilogue_units);
        if comptime!(plan.has_arrived()) {
            let first = comptime!(plan.arrived_at());
            #[unroll]
            for s in 0..stages {
                barriers[comptime!(first + s)].init_manual(1u32);
            }
        }
        if comptime!(plan.core != TensorCore::Instruction) {
            let first = comptime!(plan.barriers());
            for s in 0..COMMANDS {
                barriers[first + s].init_manual(1u32);
                barriers[comptime!(first + COMMANDS) + s].init_manual(ENGINE_UNITS);
            }
        }
        if comptime!(plan.ctas() > 1) {
            fence_mbarrier_init();
        }
    }
}

/// Fills the CTA's tensor memory with NaN, since `tcgen05.alloc` returns memory with undefined
/// contents.
#[cube]
fn poison(model: &mut SoftwareTensorCore, memory: Memory) {
    let mut word = UNIT_POS as usize;
    while word < TMEM_WORDS {
        model.tmem[memory.tmem + word] = 0x7fff_ffffu32;
        word += CUBE_DIM as usize;
    }
}

/// Runs the epilogue of all tiles of this CTA.
#[cube]
fn write_tiles(
    problem: &GroupedProblem,
    epilogue: &Epilogue,
    model: &mut SoftwareTensorCore,
    memory: Memory,
    out: &mut [Vector<u32, Const<4>>],
    cta: CtaState,
    #[comptime] plan: Sm100Plan,
) {
    let core = comptime!(plan.core);
    let tile_m = comptime!(plan.tile().tile_m() as u32);
    let tile_n = comptime!(plan.tile().tile_n() as u32);
    let tiles_n = problem.shape.n.div_ceil(tile_n);
    let lanes = (UNIT_POS / 32u32) * 32u32;
    let mut tile = cta.first_tile(plan);
    // Current group, number of tiles before it, and number of tiles of this CTA so far.
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut done = 0u32;
    while group < problem.shape.groups {
        let extent = GroupExtent::of(problem, group, plan);
        let tiles_m = extent.tiles(plan);
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                tile_m,
                tile_n,
            );
            // An empty group along K has no multiplications; its output is zeros.
            let is_empty = extent.is_empty(comptime!(plan.grouped));
            let mut waits = !is_empty;
            if comptime!(core.has_fault(Fault::NoAccumulatorWait)) {
                waits = false;
            }
            if waits {
                wait(cta.accumulators, done & 1u32, plan);
            }
            if comptime!(core == TensorCore::Instruction) {
                tcgen05_fence_after_thread_sync();
            }
            // Without swapped operands: the rows of `a` of this CTA.
            let mut row = extent.first + at.row;
            if comptime!(plan.ctas() > 1) {
                row += cta_share(cta.rank, plan).a;
            }
            let own = OutputTile {
                row,
                end: extent.end,
                column: at.column,
                n: problem.shape.n,
                group,
                accumulators: cta.tmem + (lanes << 16u32),
                is_empty,
            };
            if comptime!(plan.swaps_ab()) {
                write_transposed(model, memory, own, epilogue, out, core);
            } else {
                write_tile(model, memory, own, epilogue, out, core);
            }
            if comptime!(core == TensorCore::Instruction) {
                tcgen05_fence_before_thread_sync();
            }
            if !is_empty {
                arrive_at_issuer(cta.accumulators + 8u32, plan);
                done += 1u32;
            }
            tile += cta.tile_step(plan);
        } else {
            passed += tiles_m * tiles_n;
            group += 1u32;
        }
    }
}
