//! Attention of a few new tokens over the cache by the matrix instructions of a warp,
//! `mma.sync.m16n8k16`, for every CUDA GPU from compute capability 8.0 on.
//!
//! Each warp has a quarter of the keys of each tile, copies them itself and keeps its own softmax,
//! so that warps synchronize only before the first tile and after the last one. The upper eight of
//! the 16 rows of an instruction have no queries.

use cubecl::prelude::*;

use super::{
    append::{CacheShape, Element, Extent, NewTokens, Seen, Turn},
    merge::RowBlock,
    mma_merge::{MmaOutput, merge_runs, write_part},
    plan::{DecodePlan, FRAGMENT_ROWS, WARP_KEYS, WARPS},
    run::Run,
    tile::Staged,
};
use crate::{
    attention::{
        mma::{
            forward::{Rows, online_softmax},
            multiply::{multiply_add, multiply_rows, pack, pack_left, zeros},
            problem::LOG2_E,
            tile::{chunk_offset, fragment_columns, fragment_rows},
        },
        scalar::math::{product, tanh},
    },
    cube::{
        arrival::is_last_cube,
        codec::load,
        overlap::{let_next_begin, wait_for_previous, written_before},
        ptx::{cp_async_wait_group, cvta_to_shared},
    },
};

/// Like `decode_run_kernel`, with the same arguments and the same runs. The summation order
/// differs, and weights are rounded to the type of the values.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn decode_mma_kernel<F: Numeric, N: Size>(
    new: NewTokens<F>,
    k_cache: &mut [Vector<F, N>],
    v_cache: &mut [Vector<F, N>],
    shape: CacheShape,
    output: &mut MmaOutput<F>,
    #[comptime] plan: DecodePlan,
    #[define(F)] _storage: ElemType,
) {
    let mut keys = Staged::<F, N>::new(plan);
    let mut values = Staged::<F, N>::new(plan);
    let words = comptime!(FRAGMENT_ROWS * plan.mma_tile().pitch() / 4);
    let mut queries = Shared::<[u32]>::new_aligned_slice(words, 128usize);
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(plan.scratch()));
    let mut verdict = Shared::<[u32]>::new_slice(1usize);
    let_next_begin(plan.overlaps);
    written_before(&new.q.data, plan.overlaps);
    written_before(&new.k.data, plan.overlaps);
    written_before(&new.v.data, plan.overlaps);
    let run = Run::new::<F>(&new, &shape, plan);
    let own = run.own;
    // Without any runs there is nothing to wait for.
    let mut is_last = own.runs == 0u32 && run.index == 0u32;
    if run.index < own.runs {
        let mut at = run.first_tile(&shape, plan);
        let queries_at = cvta_to_shared::<u32>(queries.as_slice().as_ptr());
        // The cached keys are loaded while the new tokens are read and rotated.
        keys.copy_of_warp(k_cache, &at, run.old(&at), plan);
        values.copy_of_warp(v_cache, &at, run.old(&at), plan);
        wait_for_previous(plan.overlaps);
        run.write_new::<F, F, N>(&new, k_cache, v_cache, &shape, &mut keys, &mut values, plan);
        // With few new tokens, the lower half of the units loads the queries meanwhile.
        if UNIT_POS < CUBE_DIM / 2u32 {
            bring_queries::<F>(&new, &shape, &own, &mut queries, run.block, plan);
        }
        let warp_key = UNIT_POS / 32u32 * comptime!(WARP_KEYS as u32);
        let q_rows = fragment_rows(queries_at, 0u32.runtime(), comptime!(plan.mma_tile()));
        let k_columns = fragment_columns(keys.address(), warp_key, comptime!(plan.mma_tile()));
        let v_rows = fragment_rows(values.address(), warp_key, comptime!(plan.mma_tile()));
        let mut rows = Rows {
            highest: Array::<f32>::new(2usize),
            sum: Array::<f32>::new(2usize),
            out: zeros(comptime!(plan.head / 8)),
        };
        #[unroll]
        for i in 0..2usize {
            rows.highest[i] = f32::NEG_INFINITY;
            rows.sum[i] = 0.0f32;
        }
        let natural = if comptime!(plan.softcap) {
            1.0f32.runtime()
        } else {
            shape.scale
        };
        let seen = Seen::of(&own, &shape, run.block.first_row + UNIT_POS % 32u32 / 4u32);
        cp_async_wait_group(1u32);
        sync_cube();
        while at.first < run.last {
            let next = run.next_tile(&at);
            let mut scores = multiply_rows(
                q_rows,
                k_columns,
                1usize,
                comptime!(WARP_KEYS),
                comptime!(plan.mma_tile()),
                plan.kind,
            );
            sync_plane();
            keys.copy_of_warp(k_cache, &next, next.count, plan);
            mask(&mut scores, &shape, &seen, at.first + warp_key, plan);
            online_softmax(
                &mut scores,
                &mut rows,
                natural * comptime!(LOG2_E),
                comptime!(plan.of_warp()),
            );
            let weights = pack_left(&scores, 1usize, comptime!(WARP_KEYS), plan.kind);
            cp_async_wait_group(1u32);
            sync_plane();
            multiply_add(
                &mut rows.out,
                &weights,
                v_rows,
                1usize,
                comptime!(WARP_KEYS),
                comptime!(plan.mma_tile()),
                plan.kind,
            );
            sync_plane();
            values.copy_of_warp(v_cache, &next, next.count, plan);
            cp_async_wait_group(1u32);
            sync_plane();
            at.base = next.base;
            at.count = next.count;
            at.first = next.first;
        }
        keep_warp(&rows, &mut scratch, natural, plan);
        sync_cube();
        let number = run.block.first_run(&shape) + run.index as usize;
        write_part::<F>(output, &scratch, number, plan);
        is_last = is_last_cube(
            &mut output.finished,
            run.block.index,
            own.runs,
            &mut verdict,
            plan.concurrent,
        );
    } else if run.index == 0u32 {
        // Without this wait the kernel could end before the previous one. Other cubes without a run
        // need not wait.
        wait_for_previous(plan.overlaps);
    }
    if is_last {
        merge_runs::<F>(
            output,
            &mut scratch,
            &shape,
            &own,
            run.block,
            new.time,
            plan,
        );
    }
}

/// Loads the rotated queries of a block into shared memory, with zeros for missing ones.
#[cube]
fn bring_queries<F: Numeric>(
    new: &NewTokens<F>,
    shape: &CacheShape,
    own: &Extent,
    queries: &mut Shared<[u32]>,
    block: RowBlock,
    #[comptime] plan: DecodePlan,
) {
    let pairs = comptime!((plan.head / 2) as u32);
    let items = comptime!(plan.rows * plan.head / 2);
    #[unroll]
    for i in 0..comptime!(items.div_ceil(16 * WARPS)) {
        let item = UNIT_POS + comptime!((i * 16 * WARPS) as u32);
        let (row, pair) = (item / pairs, item % pairs);
        let of_head = block.first_row + row;
        let t = of_head / shape.group;
        if row < comptime!(plan.rows as u32) {
            let mut word = 0u32;
            if t < new.time {
                let of = Element {
                    token: block.sequence * new.time + t,
                    index: block.kv_head * shape.group + of_head % shape.group,
                    position: min(own.start + t, new.positions - 1u32),
                };
                let turn = Turn::new::<F>(&new.q, of, 2u32 * pair, plan);
                let low = turn.element::<F>(&new.q, &new.cos, &new.sin, 0usize, plan);
                let high = turn.element::<F>(&new.q, &new.cos, &new.sin, 1usize, plan);
                word = pack(
                    load::<F>(low, plan.kind),
                    load::<F>(high, plan.kind),
                    plan.kind,
                );
            }
            let at = chunk_offset(row, pair / 4u32, comptime!(plan.mma_tile())) / 4u32;
            queries[(at + pair % 4u32) as usize] = word;
        }
    }
}

/// Applies the soft cap to a warp's scores and masks the keys that a query must not see. `first` is
/// the warp's first key.
#[cube]
fn mask(
    scores: &mut Array<Vector<f32, Const<4>>>,
    shape: &CacheShape,
    seen: &Seen,
    first: u32,
    #[comptime] plan: DecodePlan,
) {
    #[unroll]
    for j in 0..comptime!(WARP_KEYS / 8) {
        let mut four = scores[j];
        #[unroll]
        for e in 0..2usize {
            let key = first + comptime!((8 * j + e) as u32) + UNIT_POS % 4u32 * 2u32;
            let product_of_heads = four.extract(e);
            let mut score = product_of_heads;
            if comptime!(plan.softcap) {
                let scaled = product(product_of_heads, shape.scale, plan.conversion);
                let t = tanh(scaled * shape.inverse_cap, plan.conversion);
                score = shape.softcap * t;
            }
            let visible = key >= seen.first && key < seen.end;
            four.insert(e, select(visible, score, f32::NEG_INFINITY));
        }
        scores[j] = four;
    }
}

/// Writes a warp's results of each row to `scratch`, `[warp, row]`, in the format of partial
/// results.
#[cube]
fn keep_warp(rows: &Rows, scratch: &mut Shared<[f32]>, natural: f32, #[comptime] plan: DecodePlan) {
    let lane = UNIT_POS % 32u32;
    let (row, column) = (lane / 4u32, lane % 4u32);
    let mut sum = rows.sum[0usize];
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    if row < comptime!(plan.rows as u32) {
        let at = (UNIT_POS / 32u32 * comptime!(plan.rows as u32) + row) as usize
            * comptime!(plan.part());
        #[unroll]
        for j in 0..comptime!(plan.head / 8) {
            let four = rows.out[j];
            let to = at + comptime!(8 * j) + 2usize * column as usize;
            scratch[to] = four.extract(0usize);
            scratch[to + 1usize] = four.extract(1usize);
        }
        if column == 0u32 {
            let highest = rows.highest[0usize];
            let none = highest == f32::NEG_INFINITY;
            scratch[at + comptime!(plan.head)] =
                select(none, f32::new(comptime!(f32::MIN)), highest * natural);
            scratch[at + comptime!(plan.head + 1)] = sum;
        }
    }
}
