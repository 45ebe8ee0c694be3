//! The backward on Hopper, in two passes: gradients of keys and values, then of queries. Both are
//! one pipeline. A CTA holds the rows of one side, 64 to a consumer warpgroup, and passes over
//! blocks of the other side, which the producer warpgroup brings in two stages.
//!
//! Two GEMMs of operands in shared memory give scores and gradients of weights; what becomes of
//! them is in registers, the left operand of one GEMM (queries) or two (keys), whose right operands
//! are what the stage holds, transposed as they are read. Nothing is added atomically, so results
//! repeat bit for bit.

use cubecl::prelude::{barrier::Barrier, *};
use half::bf16;

use super::forward::{BOX, BOX_VECTORS, CONSUMERS, STAGES, Schedule, WARPGROUP_ROWS};
use crate::{
    attention::mma::{
        dkdv::{mask_weights, score_gradients, slopes_of, weigh},
        dq::{mask_gradients, row_values, score_gradients as query_gradients},
        forward::cap_all,
        gradient::{GradientView, cap_derivative, exponent_offset},
        multiply::pack,
        problem::{Extent, MmaPlan, Problem, Visible, exponent_scale},
    },
    cube::ptx::{
        Major, WgmmaGemm, WgmmaOperand, cvta_to_shared, ld_shared_v4, mbarrier_arrive,
        mbarrier_arrive_expect_tx, mbarrier_wait_parity, named_barrier_sync, setmaxnreg_dec,
        setmaxnreg_inc, st_shared, wgmma_operand, wgmma_registers, wgmma_registers_pair,
        wgmma_shared_pair,
    },
    gemm::arguments::thread_in_cta,
};

/// Which gradients a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// A CTA holds keys and values, and passes over queries.
    KeysValues,
    /// A CTA holds queries, and passes over keys and values.
    Queries,
}

/// The comptime choices of `sm90_backward_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90BackwardPlan {
    /// What is shared with the kernels of `mma.sync`: a warp has one strip, and `inner` rows of the
    /// other side make a block.
    pub plan: MmaPlan,
    /// Which gradients are computed.
    pub pass: Pass,
    /// Gradients of `q` and `k` are rotated back.
    pub rope: bool,
}

impl Sm90BackwardPlan {
    /// Rows of a CTA.
    pub const fn rows(self) -> usize {
        WARPGROUP_ROWS * CONSUMERS
    }

    const fn boxes(self) -> usize {
        self.plan.head / BOX
    }

    /// Vectors of the rows of one operand that a CTA holds.
    const fn own_vectors(self) -> usize {
        self.rows() * self.plan.head / 8
    }

    /// Vectors of one operand in a stage.
    const fn stage_vectors(self) -> usize {
        self.plan.inner * self.plan.head / 8
    }

    /// Scores, and gradients of weights: rows of the CTA times a block.
    const fn scores(self) -> WgmmaGemm {
        WgmmaGemm {
            n: self.plan.inner,
            depth: self.plan.head,
            kind: self.plan.kind,
            a: WgmmaOperand {
                major: Major::K,
                box_bytes: self.rows() * 128,
            },
            b: WgmmaOperand {
                major: Major::K,
                box_bytes: self.plan.inner * 128,
            },
        }
    }

    /// Gradients: registers times a block.
    const fn gradients(self) -> WgmmaGemm {
        let block = WgmmaOperand {
            major: Major::Mn,
            box_bytes: self.plan.inner * 128,
        };
        WgmmaGemm {
            n: self.plan.head,
            depth: self.plan.inner,
            kind: self.plan.kind,
            a: block,
            b: block,
        }
    }

    const fn is_keys(self) -> bool {
        matches!(self.pass, Pass::KeysValues)
    }
}

/// What the backward reads and is told beside its maps.
#[derive(CubeType, CubeLaunch)]
pub struct BackwardProblem {
    /// What is computed, and of what size.
    pub problem: Problem,
    /// In which order the tiles are taken; its heads are those of the rows that a CTA holds.
    pub schedule: Schedule,
    /// Log-sum-exps and deltas of queries, and the rotations.
    pub saved: Rows,
}

/// What is known of the rows, and of their positions.
#[derive(CubeType, CubeLaunch)]
pub struct Rows {
    /// Log-sum-exp of each query, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// The sum of `dout · out` of each query, `[heads, tokens]`.
    pub delta: Box<[f32]>,
    /// Cosines of the rotation of each position, `[positions, head / 2]`. Read only where gradients
    /// are rotated back.
    pub cos: Box<[f32]>,
    /// The sines.
    pub sin: Box<[f32]>,
}

/// A tile of the rows that a CTA holds.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Tile {
    sequence: u32,
    head: u32,
    row: u32,
}

/// The blocks of the other side that a tile passes over: `count` from `first` on, once for each of
/// `heads` heads from `head` on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Blocks {
    first: u32,
    count: u32,
    head: u32,
    heads: u32,
}

/// Where the parts of shared memory begin. The barriers are those of the CTA's rows, then of the
/// stages: each pair of one that completes when the part is full, and one when it has been read.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Memory {
    own_a: u32,
    own_b: u32,
    block_a: u32,
    block_b: u32,
    /// Log-sum-exps of the queries of a stage, then their deltas.
    rows: u32,
    barriers: u32,
}

#[cube]
fn full(memory: Memory, number: u32) -> u32 {
    memory.barriers + number * 16u32
}

#[cube]
fn empty(memory: Memory, number: u32) -> u32 {
    memory.barriers + number * 16u32 + 8u32
}

/// Tile number `item`: sections one after another, in each the tiles with the most work first, the
/// first keys or the last queries of all pairs.
#[cube]
fn tile_of(problem: &BackwardProblem, item: u32, #[comptime] plan: Sm90BackwardPlan) -> Tile {
    let schedule = &problem.schedule;
    let pairs = problem.problem.sequences * schedule.heads;
    let per_section = schedule.section * schedule.blocks;
    let section = item / per_section;
    let first = section * schedule.section;
    let width = min(schedule.section, pairs - first);
    let within = item - section * per_section;
    let mut block = within / width;
    if comptime!(!plan.is_keys()) {
        block = schedule.blocks - 1u32 - block;
    }
    let pair = first + within % width;
    Tile {
        sequence: pair / schedule.heads,
        head: pair % schedule.heads,
        row: block * comptime!(plan.rows() as u32),
    }
}

#[cube]
fn blocks_of(
    problem: &BackwardProblem,
    visible: Visible,
    extent: Extent,
    tile: Tile,
    #[comptime] plan: Sm90BackwardPlan,
) -> Blocks {
    let inner = comptime!(plan.plan.inner as u32);
    let group = problem.problem.group;
    if comptime!(plan.is_keys()) {
        let last = min(tile.row + comptime!(plan.rows() as u32), extent.k_len) - 1u32;
        let q_len = i32::cast_from(extent.q_len);
        let first = u32::cast_from(visible.first_query(i32::cast_from(tile.row))) / inner;
        let end = u32::cast_from(visible.end_query(i32::cast_from(last), q_len)).div_ceil(inner);
        Blocks {
            first,
            count: max(end, first) - first,
            head: tile.head * group,
            heads: group,
        }
    } else {
        let last = min(tile.row + comptime!(plan.rows() as u32), extent.q_len) - 1u32;
        let first = u32::cast_from(visible.first(i32::cast_from(tile.row))) / inner;
        let end = u32::cast_from(visible.end(i32::cast_from(last))).div_ceil(inner);
        Blocks {
            first,
            count: max(end, first) - first,
            head: tile.head / group,
            heads: 1u32.runtime(),
        }
    }
}

/// Gradients of keys and values (`first`, `second`), or of queries (`first`). `own_a` and `own_b`
/// are what a CTA holds, `block_a` and `block_b` what it passes over: keys and values, queries and
/// the gradient of the output, or the other way round.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_backward_kernel(
    own_a: &TensorMap<bf16, Tiled>,
    own_b: &TensorMap<bf16, Tiled>,
    block_a: &TensorMap<bf16, Tiled>,
    block_b: &TensorMap<bf16, Tiled>,
    problem: BackwardProblem,
    mut first: GradientView,
    mut second: GradientView,
    #[comptime] plan: Sm90BackwardPlan,
) {
    let mut own_a_tile: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(plan.own_vectors()), 1024usize);
    let mut own_b_tile: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(plan.own_vectors()), 1024usize);
    let mut a_stages: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * plan.stage_vectors()), 1024usize);
    let mut b_stages: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * plan.stage_vectors()), 1024usize);
    let row_values: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * plan.plan.inner / 2), 16usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * (1 + STAGES)), 8usize);
    let memory = Memory {
        own_a: cvta_to_shared::<Vector<bf16, Const<8>>>(own_a_tile.as_slice().as_ptr()),
        own_b: cvta_to_shared::<Vector<bf16, Const<8>>>(own_b_tile.as_slice().as_ptr()),
        block_a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_stages.as_slice().as_ptr()),
        block_b: cvta_to_shared::<Vector<bf16, Const<8>>>(b_stages.as_slice().as_ptr()),
        rows: cvta_to_shared::<Vector<u32, Const<4>>>(row_values.as_slice().as_ptr()),
        barriers: cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr()),
    };
    if UNIT_POS == 0 {
        barriers[0].init_manual(1);
        barriers[1].init_manual(2);
        #[unroll]
        for i in 1..comptime!(1 + STAGES) {
            // TMA's thread, and the warp that stores what is known of queries.
            barriers[comptime!(2 * i)].init_manual(comptime!(1 + plan.is_keys() as u32));
            barriers[comptime!(2 * i + 1)].init_manual(2);
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    let sequences = problem.problem.sequences;
    let items = sequences * problem.schedule.heads * problem.schedule.blocks;
    let extent = Extent {
        q: 0u32,
        q_len: problem.problem.q_tokens / sequences,
        k: 0u32,
        k_len: problem.problem.k_tokens / sequences,
    };
    let visible = Visible::of(&problem.problem, extent, comptime!(plan.plan));
    let inner = comptime!(plan.plan.inner as u32);
    if UNIT_POS < 128u32 {
        setmaxnreg_dec(24u32);
        if UNIT_POS == 0u32 {
            let mut item = CUBE_POS as u32;
            let mut tiles = 0u32;
            let mut used = 0u32;
            while item < items {
                let tile = tile_of(&problem, item, plan);
                let blocks = blocks_of(&problem, visible, extent, tile, plan);
                mbarrier_wait_parity(empty(memory, 0u32), (tiles & 1u32) ^ 1u32);
                mbarrier_arrive_expect_tx(
                    full(memory, 0u32),
                    comptime!(32 * plan.own_vectors() as u32),
                );
                #[unroll]
                for i in 0..comptime!(plan.boxes()) {
                    let vectors = comptime!(plan.rows() * BOX_VECTORS);
                    let column = comptime!((i * BOX) as i32).runtime();
                    let (sequence, row) = (tile.sequence as i32, tile.row as i32);
                    barriers[0].tma_load_4d(
                        own_a,
                        &mut own_a_tile[comptime!(i * vectors)..comptime!((i + 1) * vectors)],
                        sequence,
                        row,
                        tile.head as i32,
                        column,
                    );
                    barriers[0].tma_load_4d(
                        own_b,
                        &mut own_b_tile[comptime!(i * vectors)..comptime!((i + 1) * vectors)],
                        sequence,
                        row,
                        tile.head as i32,
                        column,
                    );
                }
                for step in 0..blocks.count * blocks.heads {
                    let head = blocks.head + step / blocks.count;
                    let row = ((blocks.first + step % blocks.count) * inner) as i32;
                    let stage = used % comptime!(STAGES as u32);
                    let parity = ((used / comptime!(STAGES as u32)) & 1u32) ^ 1u32;
                    let number = 1u32 + stage;
                    mbarrier_wait_parity(empty(memory, number), parity);
                    mbarrier_arrive_expect_tx(
                        full(memory, number),
                        comptime!(32 * plan.stage_vectors() as u32),
                    );
                    let vectors = comptime!(plan.plan.inner * BOX_VECTORS);
                    let begin = stage as usize * comptime!(plan.stage_vectors());
                    #[unroll]
                    for i in 0..comptime!(plan.boxes()) {
                        let at = begin + comptime!(i * vectors);
                        let column = comptime!((i * BOX) as i32).runtime();
                        let ready = &barriers[2 * number as usize];
                        ready.tma_load_4d(
                            block_a,
                            &mut a_stages[at..at + vectors],
                            tile.sequence as i32,
                            row,
                            head as i32,
                            column,
                        );
                        ready.tma_load_4d(
                            block_b,
                            &mut b_stages[at..at + vectors],
                            tile.sequence as i32,
                            row,
                            head as i32,
                            column,
                        );
                    }
                    used += 1u32;
                }
                tiles += 1u32;
                item += CUBE_COUNT as u32;
            }
        } else if comptime!(plan.is_keys()) {
            if UNIT_POS / 32u32 == 1u32 {
                store_rows(&problem, visible, extent, items, memory, plan);
            }
        }
    } else {
        setmaxnreg_inc(240u32);
        let mut item = CUBE_POS as u32;
        let mut tiles = 0u32;
        let mut used = 0u32;
        while item < items {
            let tile = tile_of(&problem, item, plan);
            let blocks = blocks_of(&problem, visible, extent, tile, plan);
            mbarrier_wait_parity(full(memory, 0u32), tiles & 1u32);
            if comptime!(plan.is_keys()) {
                let sums = keys_and_values(&problem, visible, tile, blocks, memory, used, plan);
                // All warps of the warpgroup have read its keys and values.
                named_barrier_sync(thread_in_cta() / 128u32, 128u32);
                let place = Place {
                    token: tile.sequence * extent.k_len,
                    row: tile.row,
                    len: extent.k_len,
                    head: tile.head,
                };
                let scale = problem.problem.scale;
                let rotate = comptime!(plan.rope);
                write(
                    &mut first,
                    &sums.a,
                    &problem.saved,
                    place,
                    memory.own_a,
                    scale,
                    rotate,
                    plan,
                );
                let one = 1.0f32.runtime();
                write(
                    &mut second,
                    &sums.b,
                    &problem.saved,
                    place,
                    memory.own_b,
                    one,
                    false,
                    plan,
                );
            } else {
                let sums = queries(&problem, visible, extent, tile, blocks, memory, used, plan);
                named_barrier_sync(thread_in_cta() / 128u32, 128u32);
                let place = Place {
                    token: tile.sequence * extent.q_len,
                    row: tile.row,
                    len: extent.q_len,
                    head: tile.head,
                };
                let scale = problem.problem.scale;
                let rotate = comptime!(plan.rope);
                write(
                    &mut first,
                    &sums,
                    &problem.saved,
                    place,
                    memory.own_a,
                    scale,
                    rotate,
                    plan,
                );
            }
            // The next rows are written here by TMA, behind what this warpgroup wrote.
            sync_async_proxy_shared();
            named_barrier_sync(thread_in_cta() / 128u32, 128u32);
            if (UNIT_POS & 127u32) == 0u32 {
                mbarrier_arrive(empty(memory, 0u32));
            }
            used += blocks.count * blocks.heads;
            tiles += 1u32;
            item += CUBE_COUNT as u32;
        }
    }
}

/// A warp stores what is known of the queries of each stage.
#[cube]
fn store_rows(
    problem: &BackwardProblem,
    visible: Visible,
    extent: Extent,
    items: u32,
    memory: Memory,
    #[comptime] plan: Sm90BackwardPlan,
) {
    let lane = UNIT_POS % 32u32;
    let inner = comptime!(plan.plan.inner as u32);
    let mut item = CUBE_POS as u32;
    let mut used = 0u32;
    while item < items {
        let tile = tile_of(problem, item, plan);
        let blocks = blocks_of(problem, visible, extent, tile, plan);
        for step in 0..blocks.count * blocks.heads {
            let head = blocks.head + step / blocks.count;
            let row = (blocks.first + step % blocks.count) * inner;
            let stage = used % comptime!(STAGES as u32);
            let parity = ((used / comptime!(STAGES as u32)) & 1u32) ^ 1u32;
            let values = head as usize * problem.problem.q_tokens as usize
                + (tile.sequence * extent.q_len) as usize;
            mbarrier_wait_parity(empty(memory, 1u32 + stage), parity);
            #[unroll]
            for i in 0..comptime!(plan.plan.inner / 32) {
                let this = row + lane + comptime!(32 * i as u32);
                let mut lse = f32::INFINITY.runtime();
                let mut delta = 0.0f32;
                if this < extent.q_len {
                    lse = exponent_offset(problem.saved.lse[values + this as usize]);
                    delta = problem.saved.delta[values + this as usize];
                }
                let at = memory.rows
                    + stage * comptime!(8 * plan.plan.inner as u32)
                    + (lane + comptime!(32 * i as u32)) * 4u32;
                st_shared(at, u32::reinterpret(lse));
                st_shared(at + 4u32 * inner, u32::reinterpret(delta));
            }
            sync_plane();
            if lane == 0u32 {
                mbarrier_arrive(full(memory, 1u32 + stage));
            }
            used += 1u32;
        }
        item += CUBE_COUNT as u32;
    }
}

/// `count` groups of four accumulators from group `first` on, one for each eight columns.
#[cube]
fn fours<S: Size>(
    sums: Vector<f32, S>,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> Array<Vector<f32, Const<4>>> {
    let mut all = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for j in 0..count {
        let mut four = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for e in 0..4usize {
            four.insert(e, sums.extract(comptime!(4 * (first + j) + e)));
        }
        all[j] = four;
    }
    all
}

/// The left operand of the next GEMM.
#[cube]
fn left<A: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    #[comptime] plan: Sm90BackwardPlan,
) -> Vector<u32, A> {
    let mut words = Vector::<u32, A>::new(0u32);
    #[unroll]
    for j in 0..comptime!(plan.plan.inner / 8) {
        let four = sums[j];
        let kind = comptime!(plan.plan.kind);
        let low = pack(four.extract(0usize), four.extract(1usize), kind);
        let high = pack(four.extract(2usize), four.extract(3usize), kind);
        words.insert(comptime!(2 * j), low);
        words.insert(comptime!(2 * j + 1), high);
    }
    words
}

/// The gradients of a warpgroup's keys and values, not scaled.
#[derive(CubeType)]
struct Sums {
    a: Array<Vector<f32, Const<4>>>,
    b: Array<Vector<f32, Const<4>>>,
}

/// Bounds scores, and keeps the derivative of that.
#[cube]
fn bound(
    problem: &Problem,
    scores: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] plan: MmaPlan,
) -> Array<Vector<f32, Const<4>>> {
    let mut slopes = Array::<Vector<f32, Const<4>>>::new(comptime!(slopes_of(plan)));
    if comptime!(plan.softcap) {
        #[unroll]
        for i in 0..comptime!(plan.inner / 8) {
            let capped = cap_all(problem, scores[i]);
            scores[i] = capped;
            let mut slope = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                slope.insert(e, cap_derivative(problem, capped.extract(e)));
            }
            slopes[i] = slope;
        }
    }
    slopes
}

#[cube]
fn keys_and_values(
    problem: &BackwardProblem,
    visible: Visible,
    tile: Tile,
    blocks: Blocks,
    memory: Memory,
    used: u32,
    #[comptime] plan: Sm90BackwardPlan,
) -> Sums {
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let leads = (UNIT_POS & 127u32) == 0u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let stage_bytes = comptime!(16 * plan.stage_vectors() as u32);
    let (scores_of, gradients_of) = comptime!((plan.scores(), plan.gradients()));
    let keys = wgmma_operand(memory.own_a + consumer * 8192u32, scores_of.a);
    let values = wgmma_operand(memory.own_b + consumer * 8192u32, scores_of.a);
    let size!(S) = comptime!(2 * plan.scores().accumulators());
    let size!(O) = comptime!(2 * plan.gradients().accumulators());
    let size!(A) = comptime!(plan.gradients().fragments());
    let (columns, count) = comptime!((plan.plan.inner / 8, plan.plan.head / 8));
    let scale = exponent_scale(&problem.problem, comptime!(plan.plan));
    let mut sums = Vector::<f32, O>::new(0.0f32);
    for step in 0..blocks.count * blocks.heads {
        let at = used + step;
        let stage = at % comptime!(STAGES as u32);
        let number = 1u32 + stage;
        mbarrier_wait_parity(full(memory, number), (at / comptime!(STAGES as u32)) & 1u32);
        let queries_at = memory.block_a + stage * stage_bytes;
        let dout_at = memory.block_b + stage * stage_bytes;
        let rows_at = memory.rows + stage * comptime!(8 * plan.plan.inner as u32);
        let queries = wgmma_operand(queries_at, scores_of.b);
        let dout = wgmma_operand(dout_at, scores_of.b);
        let found = wgmma_shared_pair::<S>(keys, queries, values, dout, scores_of);
        let mut scores = fours::<S>(found, 0usize, columns);
        let weight_gradients = fours::<S>(found, columns, columns);
        let slopes = bound(&problem.problem, &mut scores, comptime!(plan.plan));
        weigh(&mut scores, rows_at, scale, comptime!(plan.plan));
        let query = (blocks.first + step % blocks.count) * comptime!(plan.plan.inner as u32);
        mask_weights(
            &mut scores,
            visible,
            tile.row + warp_row,
            query,
            comptime!(plan.plan),
        );
        let weights = left::<A>(&scores, plan);
        score_gradients(
            &mut scores,
            &weight_gradients,
            &slopes,
            rows_at,
            comptime!(plan.plan),
        );
        let gradients = left::<A>(&scores, plan);
        let queries = wgmma_operand(queries_at, gradients_of.b);
        let dout = wgmma_operand(dout_at, gradients_of.b);
        sums = wgmma_registers_pair::<O, A>(
            Vector::<f32, O>::reinterpret(sums),
            gradients,
            queries,
            weights,
            dout,
            gradients_of,
        );
        if leads {
            mbarrier_arrive(empty(memory, number));
        }
    }
    let sums = Vector::<f32, O>::reinterpret(sums);
    Sums {
        a: fours::<O>(sums, 0usize, count),
        b: fours::<O>(sums, count, count),
    }
}

/// The gradient of a warpgroup's queries, not scaled.
#[cube]
fn queries(
    problem: &BackwardProblem,
    visible: Visible,
    extent: Extent,
    tile: Tile,
    blocks: Blocks,
    memory: Memory,
    used: u32,
    #[comptime] plan: Sm90BackwardPlan,
) -> Array<Vector<f32, Const<4>>> {
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let leads = (UNIT_POS & 127u32) == 0u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let stage_bytes = comptime!(16 * plan.stage_vectors() as u32);
    let (scores_of, gradients_of) = comptime!((plan.scores(), plan.gradients()));
    let q = wgmma_operand(memory.own_a + consumer * 8192u32, scores_of.a);
    let dout = wgmma_operand(memory.own_b + consumer * 8192u32, scores_of.a);
    let size!(S) = comptime!(2 * plan.scores().accumulators());
    let size!(O) = comptime!(plan.gradients().accumulators());
    let size!(A) = comptime!(plan.gradients().fragments());
    let (columns, count) = comptime!((plan.plan.inner / 8, plan.plan.head / 8));
    let scale = exponent_scale(&problem.problem, comptime!(plan.plan));
    let rows = row_values(
        &problem.saved.lse,
        &problem.saved.delta,
        tile.head as usize * problem.problem.q_tokens as usize
            + (tile.sequence * extent.q_len) as usize,
        tile.row + warp_row,
        extent.q_len,
        comptime!(plan.plan),
    );
    let mut dq = Vector::<f32, O>::new(0.0f32);
    for step in 0..blocks.count {
        let at = used + step;
        let stage = at % comptime!(STAGES as u32);
        let number = 1u32 + stage;
        mbarrier_wait_parity(full(memory, number), (at / comptime!(STAGES as u32)) & 1u32);
        let keys_at = memory.block_a + stage * stage_bytes;
        let values_at = memory.block_b + stage * stage_bytes;
        let keys = wgmma_operand(keys_at, scores_of.b);
        let values = wgmma_operand(values_at, scores_of.b);
        let found = wgmma_shared_pair::<S>(q, keys, dout, values, scores_of);
        let mut scores = fours::<S>(found, 0usize, columns);
        let found = fours::<S>(found, columns, columns);
        let slopes = bound(&problem.problem, &mut scores, comptime!(plan.plan));
        query_gradients(
            &mut scores,
            &found,
            &slopes,
            &rows,
            scale,
            comptime!(plan.plan),
        );
        let key = (blocks.first + step) * comptime!(plan.plan.inner as u32);
        mask_gradients(
            &mut scores,
            visible,
            tile.row + warp_row,
            key,
            comptime!(plan.plan),
        );
        let weights = left::<A>(&scores, plan);
        let keys = wgmma_operand(keys_at, gradients_of.b);
        dq = wgmma_registers::<O, A>(
            Vector::<f32, O>::reinterpret(dq),
            weights,
            keys,
            gradients_of,
        );
        if leads {
            mbarrier_arrive(empty(memory, number));
        }
    }
    fours::<O>(Vector::<f32, O>::reinterpret(dq), 0usize, count)
}

/// Where a tile is written.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    /// The first token of the sequence.
    token: u32,
    /// The tile's first row in it.
    row: u32,
    /// Rows of the sequence.
    len: u32,
    /// The head.
    head: u32,
}

/// Where pair `pair` of eight columns `chunk` of row `row` lies in boxes of the CTA's rows.
#[cube]
fn box_offset(row: u32, chunk: u32, #[comptime] plan: Sm90BackwardPlan) -> u32 {
    (chunk / 8u32) * comptime!((plan.rows() * 128) as u32)
        + row * 128u32
        + ((chunk % 8u32) ^ (row & 7u32)) * 16u32
}

/// Scales a warpgroup's rows of a gradient, rotates them back where `rotate`, rounds and writes
/// them, through the place of the rows at `tile_at`.
#[cube]
fn write(
    view: &mut GradientView,
    sums: &Array<Vector<f32, Const<4>>>,
    saved: &Rows,
    place: Place,
    tile_at: u32,
    scale: f32,
    #[comptime] rotate: bool,
    #[comptime] plan: Sm90BackwardPlan,
) {
    let lane = UNIT_POS % 32u32;
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let half_columns = comptime!(plan.plan.head / 16);
    let kind = comptime!(plan.plan.kind);
    #[unroll]
    for i in 0..2usize {
        let half = comptime!(2 * i);
        let row = warp_row + comptime!(8 * i as u32) + lane / 4u32;
        let at = tile_at + (lane % 4u32) * 4u32;
        // Rows behind the sequence have no position; what is read for them is not written.
        let position = min(place.row + row, place.len - 1u32);
        let table =
            position as usize * comptime!(plan.plan.head / 2) + (lane % 4u32 * 2u32) as usize;
        #[unroll]
        for j in 0..half_columns {
            let near = sums[j];
            let far = sums[comptime!(half_columns + j)];
            let mut x0 = near.extract(half) * scale;
            let mut x1 = near.extract(comptime!(half + 1)) * scale;
            let mut y0 = far.extract(half) * scale;
            let mut y1 = far.extract(comptime!(half + 1)) * scale;
            if comptime!(rotate) {
                let entry = table + comptime!(8 * j);
                let (cos0, cos1) = (saved.cos[entry], saved.cos[entry + 1]);
                let (sin0, sin1) = (saved.sin[entry], saved.sin[entry + 1]);
                let (a0, a1) = (x0 * cos0 + y0 * sin0, x1 * cos1 + y1 * sin1);
                y0 = y0 * cos0 - x0 * sin0;
                y1 = y1 * cos1 - x1 * sin1;
                x0 = a0;
                x1 = a1;
            }
            let chunk = comptime!(j as u32).runtime();
            st_shared(at + box_offset(row, chunk, plan), pack(x0, x1, kind));
            let chunk = comptime!((half_columns + j) as u32).runtime();
            st_shared(at + box_offset(row, chunk, plan), pack(y0, y1, kind));
        }
    }
    sync_plane();
    let chunks = comptime!(plan.plan.head as u32 / 8);
    #[unroll]
    for i in 0..comptime!(plan.plan.head / 16) {
        let item = lane + comptime!(32 * i as u32);
        let row = warp_row + item / chunks;
        let chunk = item % chunks;
        if place.row + row < place.len {
            let token = (place.token + place.row + row) as usize;
            let index = view.offset as usize
                + token * view.stride as usize
                + place.head as usize * comptime!(plan.plan.head / 8)
                + chunk as usize;
            view.data[index] = ld_shared_v4(tile_at + box_offset(row, chunk, plan));
        }
    }
}
