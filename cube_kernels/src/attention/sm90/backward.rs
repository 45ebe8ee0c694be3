//! Backward on Hopper in two passes: gradients of keys and values, then of queries. Both use the
//! same pipeline. A CTA holds the rows of one side, 64 per consumer warpgroup, and iterates over
//! blocks of the other side, which the producer warpgroup loads into three pipeline stages.
//!
//! Two GEMMs with operands in shared memory compute scores and gradients of weights. Their results
//! stay in registers and become the left operand of one GEMM (queries) or two (keys), whose right
//! operands are the contents of the stage, read transposed (`gradients`). There are no atomics on
//! gradients, so results repeat bit for bit.

use cubecl::prelude::{barrier::Barrier, *};
use half::bf16;

use super::{
    backward_problem::{
        BACKWARD_STAGES, BackwardProblem, Blocks, Memory, Sm90BackwardPlan, own_at, stage_of,
    },
    barriers::{Barriers, PLACES, place_of},
    forward::{BOX, BOX_VECTORS, CONSUMER_WARPS},
    gradients::{Place, keys_and_values, queries, write},
    tiles::{Tile, Tiles, first_token, next_item, row_in_map, tile_of},
};
use crate::{
    attention::mma::{
        gradient::{GradientView, exponent_offset},
        problem::{Side, Visible},
    },
    cube::ptx::{
        cvta_to_shared, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity,
        named_barrier_sync, setmaxnreg_dec, setmaxnreg_inc, st_shared,
    },
    gemm::arguments::thread_in_cta,
};

#[cube]
fn blocks_of(
    problem: &BackwardProblem,
    visible: Visible,
    tile: Tile,
    #[comptime] plan: Sm90BackwardPlan,
) -> Blocks {
    let extent = tile.extent;
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

/// A tile, and the blocks over which a CTA iterates for it. Each role of a CTA computes it
/// separately.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Work {
    tile: Tile,
    visible: Visible,
    blocks: Blocks,
}

/// Returns the work of tile `item`.
#[cube]
fn work_of(
    problem: &BackwardProblem,
    all: Tiles,
    item: u32,
    #[comptime] plan: Sm90BackwardPlan,
) -> Work {
    let tile = tile_of(&problem.schedule, all, item, comptime!(plan.tiles()));
    let visible = all.visible_in(&problem.problem, tile, comptime!(plan.plan));
    Work {
        tile,
        visible,
        blocks: blocks_of(problem, visible, tile, plan),
    }
}

/// Computes gradients of keys and values (`first`, `second`), or of queries (`first`). A CTA holds
/// `own_a` and `own_b` and iterates over `block_a` and `block_b`. These are keys and values versus
/// queries and the gradient of the output, or vice versa.
#[allow(
    clippy::collapsible_if,
    reason = "a comptime condition is decided before the other"
)]
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
        Shared::new_aligned_slice(comptime!(PLACES * plan.own_vectors()), 1024usize);
    let mut own_b_tile: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(PLACES * plan.own_vectors()), 1024usize);
    let mut a_stages: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(BACKWARD_STAGES * plan.stage_vectors()), 1024usize);
    let mut b_stages: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(BACKWARD_STAGES * plan.stage_vectors()), 1024usize);
    let row_values: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(BACKWARD_STAGES * plan.plan.inner / 2), 16usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * (PLACES + BACKWARD_STAGES)), 8usize);
    let items: Shared<[u32]> = Shared::new_aligned_slice(PLACES, 8usize);
    let memory = Memory {
        own_a: cvta_to_shared::<Vector<bf16, Const<8>>>(own_a_tile.as_slice().as_ptr()),
        own_b: cvta_to_shared::<Vector<bf16, Const<8>>>(own_b_tile.as_slice().as_ptr()),
        block_a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_stages.as_slice().as_ptr()),
        block_b: cvta_to_shared::<Vector<bf16, Const<8>>>(b_stages.as_slice().as_ptr()),
        rows: cvta_to_shared::<Vector<u32, Const<4>>>(row_values.as_slice().as_ptr()),
        barriers: Barriers {
            start: cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr()),
            items: cvta_to_shared::<u32>(items.as_slice().as_ptr()),
        },
    };
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..PLACES {
            barriers[comptime!(2 * i)].init_manual(1);
            // Both warpgroups, and the warp that stores the per-query values, if it waits.
            barriers[comptime!(2 * i + 1)].init_manual(comptime!(
                2 + (plan.is_keys() && plan.tiles().draws()) as u32
            ));
        }
        #[unroll]
        for i in PLACES..comptime!(PLACES + BACKWARD_STAGES) {
            // The TMA thread, and the warp that stores the per-query values.
            barriers[comptime!(2 * i)].init_manual(comptime!(1 + plan.is_keys() as u32));
            barriers[comptime!(2 * i + 1)].init_manual(comptime!(CONSUMER_WARPS as u32));
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    let offsets = comptime!(plan.plan.offsets);
    let in_tiles = comptime!(plan.tiles());
    let all = Tiles::of(&problem.problem, &problem.schedule, comptime!(plan.plan));
    let end = all.all();
    let inner = comptime!(plan.plan.inner as u32);
    if UNIT_POS < 128u32 {
        setmaxnreg_dec(24u32);
        if UNIT_POS == 0u32 {
            let mut item = CUBE_POS as u32;
            let mut tiles = 0u32;
            let mut used = 0u32;
            while item < end {
                let work = work_of(&problem, all, item, plan);
                let (tile, blocks) = (work.tile, work.blocks);
                memory.barriers.tell_item(tiles, item, in_tiles);
                let own = place_of(tiles);
                mbarrier_arrive_expect_tx(
                    memory.barriers.full(own.number),
                    comptime!(32 * plan.own_vectors() as u32),
                );
                let first = own.number as usize * comptime!(plan.own_vectors());
                #[unroll]
                for i in 0..comptime!(plan.boxes()) {
                    let vectors = comptime!(plan.rows() * BOX_VECTORS);
                    let column = comptime!((i * BOX) as i32).runtime();
                    let row = row_in_map(tile, tile.row, comptime!(plan.own_side()), offsets);
                    let sequence = tile.sequence as i32;
                    let at = first + comptime!(i * vectors);
                    barriers[2 * own.number as usize].tma_load_4d(
                        own_a,
                        &mut own_a_tile[at..at + vectors],
                        sequence,
                        row,
                        tile.head as i32,
                        column,
                    );
                    barriers[2 * own.number as usize].tma_load_4d(
                        own_b,
                        &mut own_b_tile[at..at + vectors],
                        sequence,
                        row,
                        tile.head as i32,
                        column,
                    );
                }
                let next = next_item(&problem.schedule, item, end, in_tiles);
                for step in 0..blocks.count * blocks.heads {
                    let head = blocks.head + step / blocks.count;
                    let row = (blocks.first + step % blocks.count) * inner;
                    let row = row_in_map(tile, row, comptime!(plan.other_side()), offsets);
                    let stage = stage_of(memory, used, plan);
                    mbarrier_wait_parity(memory.barriers.empty(stage.number), stage.parity ^ 1u32);
                    mbarrier_arrive_expect_tx(
                        memory.barriers.full(stage.number),
                        comptime!(32 * plan.stage_vectors() as u32),
                    );
                    let vectors = comptime!(plan.plan.inner * BOX_VECTORS);
                    let begin = (stage.number - comptime!(PLACES as u32)) as usize
                        * comptime!(plan.stage_vectors());
                    #[unroll]
                    for i in 0..comptime!(plan.boxes()) {
                        let at = begin + comptime!(i * vectors);
                        let column = comptime!((i * BOX) as i32).runtime();
                        let ready = &barriers[2 * stage.number as usize];
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
                item = next;
            }
            memory.barriers.tell_end(tiles, item, in_tiles);
        } else if comptime!(plan.is_keys()) {
            if UNIT_POS / 32u32 == 1u32 {
                store_rows(&problem, all, memory, plan);
            }
        }
    } else {
        setmaxnreg_inc(240u32);
        let mut tiles = 0u32;
        let mut used = 0u32;
        let mut item = memory.barriers.item(tiles, CUBE_POS as u32, in_tiles);
        while item < end {
            let work = work_of(&problem, all, item, plan);
            let (tile, visible, blocks) = (work.tile, work.visible, work.blocks);
            memory.barriers.wait_for_rows(tiles, in_tiles);
            let own = place_of(tiles);
            let held = Memory {
                own_a: own_at(memory.own_a, own.number, plan),
                own_b: own_at(memory.own_b, own.number, plan),
                block_a: memory.block_a,
                block_b: memory.block_b,
                rows: memory.rows,
                barriers: memory.barriers,
            };
            if comptime!(plan.is_keys()) {
                let sums = keys_and_values(&problem, visible, tile, blocks, held, used, plan);
                // Waits until all warps of the warpgroup have read its keys and values.
                named_barrier_sync(thread_in_cta() / 128u32, 128u32);
                let place = Place {
                    token: first_token(tile, Side::Keys, offsets),
                    row: tile.row,
                    len: tile.extent.k_len,
                    head: tile.head,
                };
                let scale = problem.problem.scale;
                let rotate = comptime!(plan.rope);
                write(
                    &mut first,
                    &sums.a,
                    &problem.saved,
                    place,
                    held.own_a,
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
                    held.own_b,
                    one,
                    false,
                    plan,
                );
            } else {
                let sums = queries(&problem, visible, tile, blocks, held, used, plan);
                named_barrier_sync(thread_in_cta() / 128u32, 128u32);
                let place = Place {
                    token: first_token(tile, Side::Queries, offsets),
                    row: tile.row,
                    len: tile.extent.q_len,
                    head: tile.head,
                };
                let scale = problem.problem.scale;
                let rotate = comptime!(plan.rope);
                write(
                    &mut first,
                    &sums,
                    &problem.saved,
                    place,
                    held.own_a,
                    scale,
                    rotate,
                    plan,
                );
            }
            // TMA writes the rows of the tile after next there, after the writes of this warpgroup.
            sync_async_proxy_shared();
            named_barrier_sync(thread_in_cta() / 128u32, 128u32);
            if (UNIT_POS & 127u32) == 0u32 {
                mbarrier_arrive(memory.barriers.empty(own.number));
            }
            used += blocks.count * blocks.heads;
            tiles += 1u32;
            item = memory
                .barriers
                .item(tiles, item + CUBE_COUNT as u32, in_tiles);
        }
    }
}

/// Stores the per-query values of each stage, with one warp.
#[cube]
fn store_rows(
    problem: &BackwardProblem,
    all: Tiles,
    memory: Memory,
    #[comptime] plan: Sm90BackwardPlan,
) {
    let lane = UNIT_POS % 32u32;
    let inner = comptime!(plan.plan.inner as u32);
    let in_tiles = comptime!(plan.tiles());
    let end = all.all();
    let mut tiles = 0u32;
    let mut used = 0u32;
    let mut item = memory.barriers.item(tiles, CUBE_POS as u32, in_tiles);
    while item < end {
        let work = work_of(problem, all, item, plan);
        let (tile, blocks) = (work.tile, work.blocks);
        if comptime!(in_tiles.draws()) {
            // All lanes have read the tile index.
            sync_plane();
            if lane == 0u32 {
                mbarrier_arrive(memory.barriers.empty(place_of(tiles).number));
            }
        }
        for step in 0..blocks.count * blocks.heads {
            let head = blocks.head + step / blocks.count;
            let row = (blocks.first + step % blocks.count) * inner;
            let stage = stage_of(memory, used, plan);
            let values = head as usize * problem.problem.q_tokens as usize
                + first_token(tile, Side::Queries, comptime!(plan.plan.offsets)) as usize;
            mbarrier_wait_parity(memory.barriers.empty(stage.number), stage.parity ^ 1u32);
            #[unroll]
            for i in 0..comptime!(plan.plan.inner / 32) {
                let this = row + lane + comptime!(32 * i as u32);
                let mut lse = f32::INFINITY.runtime();
                let mut delta = 0.0f32;
                if this < tile.extent.q_len {
                    lse = exponent_offset(problem.saved.lse[values + this as usize]);
                    delta = problem.saved.delta[values + this as usize];
                }
                let at = stage.rows + (lane + comptime!(32 * i as u32)) * 4u32;
                st_shared(at, u32::reinterpret(lse));
                st_shared(at + 4u32 * inner, u32::reinterpret(delta));
            }
            sync_plane();
            if lane == 0u32 {
                mbarrier_arrive(memory.barriers.full(stage.number));
            }
            used += 1u32;
        }
        tiles += 1u32;
        item = memory
            .barriers
            .item(tiles, item + CUBE_COUNT as u32, in_tiles);
    }
}
