//! Forward on Hopper: a persistent grid with a producer warpgroup, of which one thread issues TMA
//! loads, and two consumer warpgroups of 64 queries each.
//!
//! A CTA processes one tile of 128 queries after another. Keys and values come in blocks of 128, in
//! two pipeline stages each; the queries of the next tile are loaded while this one is computed.
//! While a warpgroup computes a softmax, the tensor cores run its last GEMM with values, and the
//! GEMMs that the other warpgroup has queued.

use cubecl::prelude::{barrier::Barrier, *};
use half::bf16;

use super::{
    accumulators::{four_of, left},
    barriers::{Barriers, PLACES, place_of},
    tiles::{
        Schedule, Tile, TilePlan, Tiles, clear_behind, first_token, next_item, reaches_behind,
        row_in_map, show_cleared, tile_of,
    },
};
use crate::{
    attention::mma::{
        forward::{Rows, cap_all, first_highest, first_sum, mask, row_factors, weigh},
        multiply::pack,
        problem::{MmaPlan, Problem, Side, Visible, exponent_scale},
    },
    cube::{
        hadamard::Signs,
        ptx::{
            BlockEnd, Major, WgmmaGemm, WgmmaOperand, cvta_to_shared, ld_shared, ld_shared_v4,
            mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity, named_barrier_sync,
            setmaxnreg_dec, setmaxnreg_inc, st_shared, wgmma_operand, wgmma_registers_scaled,
            wgmma_shared_queued, wgmma_wait, wgmma_wait_behind,
        },
    },
    gemm::arguments::thread_in_cta,
    quantize::amax::{AmaxOut, AmaxPlan, Maxima, STRIP, fold_words, leave_plane},
};

/// One producer and two consumer warpgroups.
pub const UNITS: u32 = 384;
/// Rows per consumer warpgroup.
pub(super) const WARPGROUP_ROWS: usize = 64;
/// Number of consumer warpgroups.
pub(super) const CONSUMERS: usize = 2;
/// Number of consumer warps. Each signals separately that it has read a stage: the warps of a
/// warpgroup are not synchronized.
pub(super) const CONSUMER_WARPS: usize = 4 * CONSUMERS;
/// Pipeline stages of keys, and of values.
const STAGES: usize = 2;
/// Elements per row of a TMA box.
pub(super) const BOX: usize = 64;
/// Vectors of eight elements per row of a TMA box.
pub(super) const BOX_VECTORS: usize = 8;

/// Comptime choices of `sm90_forward_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Plan {
    /// Choices shared with the `mma.sync` kernels: a warp has one strip.
    pub plan: MmaPlan,
    /// Amax values of the output to compute, if any. For column amax values, strips of 16 tokens
    /// must not cross sequences.
    pub amax: Option<AmaxPlan>,
}

impl Sm90Plan {
    /// Returns the queries per CTA.
    pub const fn rows(self) -> usize {
        WARPGROUP_ROWS * CONSUMERS
    }

    /// Returns the tiles of queries.
    const fn tiles(self) -> TilePlan {
        TilePlan {
            rows: self.rows(),
            backwards: true,
            offsets: self.plan.offsets,
        }
    }

    /// Returns the boxes of 64 elements per head.
    const fn boxes(self) -> usize {
        self.plan.head / BOX
    }

    /// Returns the vectors of the queries of a tile.
    const fn q_vectors(self) -> usize {
        self.rows() * self.plan.head / 8
    }

    /// Returns the vectors of a stage of keys, or of values.
    const fn stage_vectors(self) -> usize {
        self.plan.inner * self.plan.head / 8
    }

    /// Returns the GEMM of scores: queries and keys in shared memory.
    pub const fn scores(self) -> WgmmaGemm {
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

    /// Returns the GEMM of the output: weights in registers, values in shared memory.
    pub const fn output(self) -> WgmmaGemm {
        let values = WgmmaOperand {
            major: Major::Mn,
            box_bytes: self.plan.inner * 128,
        };
        WgmmaGemm {
            n: self.plan.head,
            depth: self.plan.inner,
            kind: self.plan.kind,
            a: values,
            b: values,
        }
    }
}

/// Blocks of keys that a tile sees: from `first` up to `end` (exclusive).
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Blocks {
    first: u32,
    end: u32,
}

#[cube]
fn blocks_of(visible: Visible, tile: Tile, #[comptime] plan: Sm90Plan) -> Blocks {
    let inner = comptime!(plan.plan.inner as u32);
    let last = min(tile.row + comptime!(plan.rows() as u32), tile.extent.q_len) - 1u32;
    let end = u32::cast_from(visible.end(i32::cast_from(last))).div_ceil(inner);
    let first = u32::cast_from(visible.first(i32::cast_from(tile.row))) / inner;
    Blocks {
        first: min(first, end),
        end,
    }
}

/// Addresses of the shared-memory buffers, and the barriers: pairs of a full and an empty one.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Memory {
    q: u32,
    k: u32,
    v: u32,
    /// Barriers of the query buffers, followed by those of the stages of keys and of values.
    barriers: Barriers,
}

/// A pipeline stage of keys and of values.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Stage {
    /// Index of the barriers of the keys.
    keys: u32,
    /// Index of the barriers of the values.
    values: u32,
    /// Parity of the phase of the full barriers that ends when this use of the stage is full.
    parity: u32,
    /// Addresses of the keys and of the values.
    k: u32,
    v: u32,
}

/// Returns the address of the queries of the CTA's tile in buffer `place`.
#[cube]
fn q_at(memory: Memory, place: u32, #[comptime] plan: Sm90Plan) -> u32 {
    memory.q + place * comptime!(16 * plan.q_vectors() as u32)
}

/// Returns the stage of use `used`, counted from 0.
#[cube]
fn stage_of(memory: Memory, used: u32, #[comptime] plan: Sm90Plan) -> Stage {
    let stage = used % comptime!(STAGES as u32);
    let bytes = stage * comptime!(16 * plan.stage_vectors() as u32);
    Stage {
        keys: comptime!(PLACES as u32) + stage,
        values: comptime!((PLACES + STAGES) as u32) + stage,
        parity: (used / comptime!(STAGES as u32)) & 1u32,
        k: memory.k + bytes,
        v: memory.v + bytes,
    }
}

/// Outputs of the forward.
#[derive(CubeType, CubeLaunch)]
pub struct ForwardOutputs {
    /// Output, `[tokens, heads, head]`, in vectors of 16 bytes.
    pub out: Box<[Vector<u32, Const<4>>]>,
    /// Log-sum-exp of the rows, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// Amax output buffer; unused if the plan computes no amax.
    pub amax: AmaxOut,
}

/// Computes `out = softmax(mask(scale · q kᵀ)) v` and the log-sum-exp of the rows; `signs` are
/// those of the transform for column amax values.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_forward_kernel(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    problem: Problem,
    schedule: Schedule,
    outputs: &mut ForwardOutputs,
    signs: Signs,
    #[comptime] plan: Sm90Plan,
) {
    let mut q_tile: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(PLACES * plan.q_vectors()), 1024usize);
    let mut k_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * plan.stage_vectors()), 1024usize);
    let mut v_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * plan.stage_vectors()), 1024usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * (PLACES + 2 * STAGES)), 8usize);
    let items: Shared<[u32]> = Shared::new_aligned_slice(PLACES, 8usize);
    let memory = Memory {
        q: cvta_to_shared::<Vector<bf16, Const<8>>>(q_tile.as_slice().as_ptr()),
        k: cvta_to_shared::<Vector<bf16, Const<8>>>(k_tiles.as_slice().as_ptr()),
        v: cvta_to_shared::<Vector<bf16, Const<8>>>(v_tiles.as_slice().as_ptr()),
        barriers: Barriers {
            start: cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr()),
            items: cvta_to_shared::<u32>(items.as_slice().as_ptr()),
        },
    };
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..comptime!(PLACES + 2 * STAGES) {
            // For queries, a warpgroup arrives when its output has left their buffer.
            let readers = comptime!(if i < PLACES {
                CONSUMERS
            } else {
                CONSUMER_WARPS
            });
            barriers[comptime!(2 * i)].init_manual(1);
            barriers[comptime!(2 * i + 1)].init_manual(comptime!(readers as u32));
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    let offsets = comptime!(plan.plan.offsets);
    let in_tiles = comptime!(plan.tiles());
    let all = Tiles::of(&problem, &schedule, comptime!(plan.plan));
    let end = all.all();
    if UNIT_POS < 128u32 {
        setmaxnreg_dec(24u32);
        if UNIT_POS == 0u32 {
            let mut item = CUBE_POS as u32;
            let mut tiles = 0u32;
            let mut used = 0u32;
            while item < end {
                let tile = tile_of(&schedule, all, item, in_tiles);
                let visible = all.visible_in(&problem, tile, comptime!(plan.plan));
                let blocks = blocks_of(visible, tile, plan);
                let kv_head = tile.head / problem.group;
                memory.barriers.tell_item(tiles, item, in_tiles);
                let place = place_of(tiles);
                mbarrier_arrive_expect_tx(
                    memory.barriers.full(place.number),
                    comptime!(16 * plan.q_vectors() as u32),
                );
                let first = place.number as usize * comptime!(plan.q_vectors());
                #[unroll]
                for i in 0..comptime!(plan.boxes()) {
                    let vectors = comptime!(plan.rows() * BOX_VECTORS);
                    let at = first + comptime!(i * vectors);
                    barriers[2 * place.number as usize].tma_load_4d(
                        q,
                        &mut q_tile[at..at + vectors],
                        tile.sequence as i32,
                        row_in_map(tile, tile.row, Side::Queries, offsets),
                        tile.head as i32,
                        comptime!((i * BOX) as i32).runtime(),
                    );
                }
                let next = next_item(&schedule, item, end, in_tiles);
                let mut block = blocks.end;
                while block > blocks.first {
                    block -= 1u32;
                    let key = block * comptime!(plan.plan.inner as u32);
                    let row = row_in_map(tile, key, Side::Keys, offsets);
                    let stage = stage_of(memory, used, plan);
                    let bytes = comptime!(16 * plan.stage_vectors() as u32);
                    let vectors = comptime!(plan.plan.inner * BOX_VECTORS);
                    let first = (stage.keys - comptime!(PLACES as u32)) as usize
                        * comptime!(plan.stage_vectors());
                    mbarrier_wait_parity(memory.barriers.empty(stage.keys), stage.parity ^ 1u32);
                    mbarrier_arrive_expect_tx(memory.barriers.full(stage.keys), bytes);
                    #[unroll]
                    for i in 0..comptime!(plan.boxes()) {
                        let at = first + comptime!(i * vectors);
                        barriers[2 * stage.keys as usize].tma_load_4d(
                            k,
                            &mut k_tiles[at..at + vectors],
                            tile.sequence as i32,
                            row,
                            kv_head as i32,
                            comptime!((i * BOX) as i32).runtime(),
                        );
                    }
                    mbarrier_wait_parity(memory.barriers.empty(stage.values), stage.parity ^ 1u32);
                    mbarrier_arrive_expect_tx(memory.barriers.full(stage.values), bytes);
                    #[unroll]
                    for i in 0..comptime!(plan.boxes()) {
                        let at = first + comptime!(i * vectors);
                        barriers[2 * stage.values as usize].tma_load_4d(
                            v,
                            &mut v_tiles[at..at + vectors],
                            tile.sequence as i32,
                            row,
                            kv_head as i32,
                            comptime!((i * BOX) as i32).runtime(),
                        );
                    }
                    used += 1u32;
                }
                tiles += 1u32;
                item = next;
            }
            memory.barriers.tell_end(tiles, item, in_tiles);
        }
    } else {
        setmaxnreg_inc(240u32);
        let mut maxima = Maxima::new();
        let mut tiles = 0u32;
        let mut used = 0u32;
        let mut item = memory.barriers.item(tiles, CUBE_POS as u32, in_tiles);
        while item < end {
            let tile = tile_of(&schedule, all, item, in_tiles);
            let visible = all.visible_in(&problem, tile, comptime!(plan.plan));
            let blocks = blocks_of(visible, tile, plan);
            memory.barriers.wait_for_rows(tiles, in_tiles);
            let number = place_of(tiles).number;
            let own = Memory {
                q: q_at(memory, number, plan),
                k: memory.k,
                v: memory.v,
                barriers: memory.barriers,
            };
            let rows = attend(&problem, visible, tile, blocks, own, used, plan);
            let place = Place {
                token: first_token(tile, Side::Queries, offsets) + tile.row,
                rows: min(tile.extent.q_len - tile.row, comptime!(plan.rows() as u32)),
                head: tile.head,
                heads: schedule.heads,
                nobody: tile.nobody,
            };
            write(&problem, &rows, outputs, place, own, plan);
            if comptime!(plan.amax.is_some()) {
                fold_tile(place.rows, own, &signs, &mut maxima, plan);
            }
            release_queries(own, number);
            used += blocks.end - blocks.first;
            tiles += 1u32;
            item = memory
                .barriers
                .item(tiles, item + CUBE_COUNT as u32, in_tiles);
        }
        if comptime!(plan.amax.is_some()) {
            leave_plane(
                &mut outputs.amax,
                0usize,
                &maxima,
                comptime!(plan.amax.unwrap()),
            );
        }
    }
}

/// Computes the output of one warpgroup's queries of a tile, `used` blocks after the first. The
/// GEMM of a block's weights and values runs while the weights of the next block are computed.
#[cube]
fn attend(
    problem: &Problem,
    visible: Visible,
    tile: Tile,
    blocks: Blocks,
    memory: Memory,
    used: u32,
    #[comptime] plan: Sm90Plan,
) -> Rows {
    let inner = comptime!(plan.plan.inner as u32);
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let leads = UNIT_POS & 31u32 == 0u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    let (scores_of, output_of) = comptime!((plan.scores(), plan.output()));
    let queries = wgmma_operand(memory.q + consumer * 8192u32, scores_of.a);
    let scale = exponent_scale(problem, comptime!(plan.plan));
    let size!(S) = comptime!(plan.scores().accumulators());
    let size!(O) = comptime!(plan.output().accumulators());
    let size!(A) = comptime!(plan.output().fragments());
    let columns = comptime!(plan.plan.head / 8);
    let mut rows = Rows {
        highest: Array::<f32>::new(2usize),
        sum: Array::<f32>::new(2usize),
        out: Array::<Vector<f32, Const<4>>>::new(columns),
    };
    #[unroll]
    for i in 0..2usize {
        rows.highest[i] = first_highest(comptime!(plan.plan));
        rows.sum[i] = first_sum(comptime!(plan.plan));
    }
    let mut sums = Vector::<f32, O>::new(0.0f32);
    let mut weights = Vector::<u32, A>::new(0u32);
    // Factors of the sums before the products of `weights` are added.
    let mut low = 0.0f32;
    let mut high = 0.0f32;
    let count = blocks.end - blocks.first;
    // The first block has no predecessor.
    #[unroll]
    for part in 0..2usize {
        let begin = if comptime!(part == 0) {
            0u32.runtime()
        } else {
            1u32.runtime()
        };
        let end = if comptime!(part == 0) {
            min(count, 1u32)
        } else {
            count
        };
        for step in begin..end {
            let stage = stage_of(memory, used + step, plan);
            mbarrier_wait_parity(memory.barriers.full(stage.keys), stage.parity);
            let keys = wgmma_operand(stage.k, scores_of.b);
            let found = wgmma_shared_queued::<S>(queries, keys, scores_of);
            if comptime!(part == 1) {
                let before = stage_of(memory, used + step - 1u32, plan);
                mbarrier_wait_parity(memory.barriers.full(before.values), before.parity);
                sums = wgmma_registers_scaled::<O, A>(
                    Vector::<f32, O>::reinterpret(sums),
                    low,
                    high,
                    Vector::<u32, A>::reinterpret(weights),
                    wgmma_operand(before.v, output_of.b),
                    output_of,
                    BlockEnd::Runs,
                );
            }
            let found = wgmma_wait::<S>(found, scores_of, part);
            if leads {
                mbarrier_arrive(memory.barriers.empty(stage.keys));
            }
            let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(plan.plan.inner / 8));
            #[unroll]
            for j in 0..comptime!(plan.plan.inner / 8) {
                let mut four = four_of::<S>(found, j);
                if comptime!(plan.plan.softcap) {
                    four = cap_all(problem, four);
                }
                scores[j] = four;
            }
            let block = blocks.end - 1u32 - step;
            mask(
                &mut scores,
                visible,
                tile.row + warp_row,
                block * inner,
                comptime!(plan.plan),
            );
            let factors = weigh(
                &mut scores,
                &mut rows.highest,
                &mut rows.sum,
                scale,
                comptime!(plan.plan),
            );
            low = factors[0usize];
            high = factors[1usize];
            // Only the first block extends past the end of the sequence.
            if comptime!(part == 0 && plan.plan.offsets) {
                clear_values(memory, stage, block * inner, tile.extent.k_len, plan);
            }
            if comptime!(part == 1) {
                wgmma_wait_behind(rows.sum[0usize] + rows.sum[1usize]);
                if leads {
                    let before = stage_of(memory, used + step - 1u32, plan);
                    mbarrier_arrive(memory.barriers.empty(before.values));
                }
            }
            weights = left::<A>(&scores, comptime!(plan.plan));
        }
    }
    if count > 0u32 {
        let last = stage_of(memory, used + count - 1u32, plan);
        mbarrier_wait_parity(memory.barriers.full(last.values), last.parity);
        sums = wgmma_registers_scaled::<O, A>(
            Vector::<f32, O>::reinterpret(sums),
            low,
            high,
            Vector::<u32, A>::reinterpret(weights),
            wgmma_operand(last.v, output_of.b),
            output_of,
            BlockEnd::Waits,
        );
        if leads {
            mbarrier_arrive(memory.barriers.empty(last.values));
        }
    }
    let sums = Vector::<f32, O>::reinterpret(sums);
    #[unroll]
    for j in 0..columns {
        rows.out[j] = four_of::<O>(sums, j);
    }
    rows
}

/// Waits for the values of `stage`, for the keys from `key` on in a sequence of length `len`, and
/// overwrites those past the end of the sequence, if any.
#[cube]
fn clear_values(memory: Memory, stage: Stage, key: u32, len: u32, #[comptime] plan: Sm90Plan) {
    let (inner, boxes) = comptime!((plan.plan.inner, plan.boxes()));
    if reaches_behind(key, len, inner) {
        mbarrier_wait_parity(memory.barriers.full(stage.values), stage.parity);
        clear_behind(stage.v, key, len, inner, boxes);
        show_cleared();
    }
}

/// Destination of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    /// First token.
    token: u32,
    /// Number of rows.
    rows: u32,
    /// Head.
    head: u32,
    /// Number of heads.
    heads: u32,
    /// True if the tokens belong to no sequence.
    nobody: bool,
}

/// Divides the rows by their sums and writes them through the buffer of their queries, where they
/// stay until [`release_queries`].
#[cube]
fn write(
    problem: &Problem,
    rows: &Rows,
    outputs: &mut ForwardOutputs,
    place: Place,
    memory: Memory,
    #[comptime] plan: Sm90Plan,
) {
    let lane = UNIT_POS % 32u32;
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    // Waits until all warps of the warpgroup have read its queries.
    named_barrier_sync(1u32 + consumer, 128u32);
    #[unroll]
    for i in 0..2usize {
        let half = comptime!(2 * i);
        let row = warp_row + comptime!(8 * i as u32) + lane / 4u32;
        let factors = row_factors(problem, rows, i, comptime!(plan.plan));
        if lane & 3u32 == 0u32 && row < place.rows {
            let index =
                place.head as usize * problem.q_tokens as usize + (place.token + row) as usize;
            outputs.lse[index] = if comptime!(plan.plan.offsets) {
                // A token of no sequence has no sum either, with or without an additional score.
                select(place.nobody, f32::NEG_INFINITY, factors.lse)
            } else {
                factors.lse
            };
        }
        #[unroll]
        for j in 0..comptime!(plan.plan.head / 8) {
            let four = rows.out[j];
            let low = four.extract(half) * factors.inverse;
            let high = four.extract(comptime!(half + 1)) * factors.inverse;
            let word = pack(low, high, comptime!(plan.plan.kind));
            let part = comptime!((j / 8 * plan.rows() * 128) as u32);
            let chunk = (comptime!(j as u32 % 8) ^ (row & 7u32)) * 16u32;
            st_shared(
                memory.q + part + row * 128u32 + chunk + (lane % 4u32) * 4u32,
                word,
            );
        }
    }
    sync_plane();
    let chunks = comptime!(plan.plan.head as u32 / 8);
    #[unroll]
    for i in 0..comptime!(plan.plan.head / 16) {
        let item = lane + comptime!(32 * i as u32);
        let row = warp_row + item / chunks;
        let chunk = item % chunks;
        if row < place.rows {
            let part = (chunk / 8u32) * comptime!((plan.rows() * 128) as u32);
            let within = ((chunk % 8u32) ^ (row & 7u32)) * 16u32;
            let index = ((place.token + row) as usize * place.heads as usize + place.head as usize)
                * comptime!(plan.plan.head / 8)
                + chunk as usize;
            outputs.out[index] = ld_shared_v4(memory.q + part + row * 128u32 + within);
        }
    }
}

/// Frees this warpgroup's part of buffer `number`, which contains an output from [`write`], for the
/// queries of the tile after next.
#[cube]
fn release_queries(memory: Memory, number: u32) {
    let consumer = thread_in_cta() / 128u32 - 1u32;
    // TMA writes them, after the writes of this warpgroup.
    sync_async_proxy_shared();
    named_barrier_sync(1u32 + consumer, 128u32);
    if (UNIT_POS & 127u32) == 0u32 {
        mbarrier_arrive(memory.barriers.empty(number));
    }
}

/// Folds the rows of a warp into the amax. They are a strip of 16 of the `rows` rows of a tile that
/// [`write`] left in shared memory; each lane processes the columns of one word of every box. Rows
/// past the last one are zeros, as past the last token.
#[cube]
fn fold_tile(
    rows: u32,
    memory: Memory,
    signs: &Signs,
    maxima: &mut Maxima,
    #[comptime] plan: Sm90Plan,
) {
    let lane = UNIT_POS % 32u32;
    let consumer = thread_in_cta() / 128u32 - 1u32;
    let warp_row = ((UNIT_POS / 32u32) & 3u32) * 16u32 + consumer * 64u32;
    if warp_row < rows {
        #[unroll]
        for part in 0..comptime!(plan.boxes()) {
            let box_at = memory.q + comptime!((part * plan.rows() * 128) as u32);
            let start = box_at + warp_row * 128u32 + (lane % 4u32) * 4u32;
            let mut column = Array::<u32>::new(STRIP);
            #[unroll]
            for i in 0..STRIP {
                let chunk = ((lane / 4u32) ^ comptime!(i as u32 & 7)) * 16u32;
                let word = ld_shared(start + comptime!(i as u32 * 128) + chunk);
                column[i] = select(warp_row + comptime!(i as u32) < rows, word, 0u32);
            }
            let folded = fold_words(&column, signs, 0usize, comptime!(plan.amax.unwrap()));
            maxima.include(&folded, comptime!(plan.amax.unwrap()));
        }
    }
}
