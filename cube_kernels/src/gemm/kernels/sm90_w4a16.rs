//! The product of Hopper with a packed `b` that is decoded in registers: no bf16 copy of `b` is in
//! memory, and its codes and scales are read once for each tile along the rows of `a`.
//!
//! `wgmma` takes its left operand from registers, so the product is computed as `outᵀ = b · aᵀ`: each of
//! two consumer warpgroups decodes 64 rows of `b` (or two or four share 64 rows and take turns along the
//! contraction) and multiplies them with the rows of `a` that lie in shared memory as bf16. The columns of
//! `a` have been brought into the order in which lanes hold the codes of `b` (`w4a16_arrange::arrange`), in
//! which a lane needs one scale for sixteen codes.
//!
//! The first warp drives the copy engine, which brings codes and `a`; the three next ones copy block
//! scales, as they are: the consumers decode them. Tiles have the same height, but the instructions of
//! a tile at the end of a group (or of `a`) are only as wide as its rows.

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::{sm90_bf16::check_sm90, w4a16_arrange};
use crate::{
    Nvfp4Error,
    capabilities::GemmBackend,
    cube::ptx::{
        Major, cp_async, cp_async_mbarrier_arrive_noinc, cvta_to_global, cvta_to_shared,
        ld_shared_v4, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity,
        named_barrier_sync, setmaxnreg_dec, setmaxnreg_inc,
        sm90_mainloop::PipelineState,
        sm90_mainloop_w4a16::{
            PackedStage, Ring, w4a16_mainloop_n32, w4a16_mainloop_n64, w4a16_mainloop_n96,
            w4a16_mainloop_n128, w4a16_mainloop_n256,
        },
        st_shared, st_shared_v2, wgmma_descriptor,
    },
    gemm::{
        epilogue::{
            EpilogueKind, Factor, factor, finish, held, pack_pair, raise, rounded_magnitude,
        },
        heuristics,
        operand::OperandLayout,
        problem::{
            Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, misfit, sms,
        },
        scheduler::{GroupedDim, Schedule, place},
        tiles::{W4A16_STRIP, W4a16Tile},
    },
    memory::address_type,
    tensor::FloatKind,
};

/// Columns of half a stage: the 128 bytes of bf16 that the swizzle spans.
const HALF: usize = 64;
/// Units that copy scales.
const CARRIERS: usize = 96;
/// Words of codes of a row in a stage.
const ROW_WORDS: usize = w4a16_arrange::SPAN / 8;
/// Bytes of scales of a row in a stage.
const ROW_SCALES: usize = w4a16_arrange::SPAN / 16;

/// Floats from one row of the output to the next where warpgroups stage their sums: four more than
/// there are, so that the lanes of a warp write to different banks.
const STAGING_ROW: usize = W4A16_STRIP + 4;
impl W4a16Tile {
    /// Vectors of 16 bytes of `a` in half a stage.
    const fn a_half(self) -> usize {
        self.rows_a * 8
    }

    /// Rows of the output that are staged at a time.
    const fn chunk(self) -> usize {
        32
    }

    /// Floats that one warpgroup stages.
    const fn staging(self) -> usize {
        self.chunk() * STAGING_ROW
    }
}

/// The instructions' width for `rows` rows of `a`.
#[cube]
fn width_of(rows: u32, #[comptime] tile: W4a16Tile) -> u32 {
    let count = comptime!(tile.widths().len());
    let mut width = comptime!(tile.rows_a as u32).runtime();
    #[unroll]
    for i in 1..count {
        let narrower = comptime!(tile.widths()[count - 1 - i] as u32);
        if rows <= narrower {
            width = narrower.runtime();
        }
    }
    width
}

/// The scales of one row in stage `step`, four bytes to a word; zeros beyond the end, where codes are zeros too
/// and no scale may be NaN. `pairs` are the scales in twos.
#[cube]
fn load_scales(pairs: &[u16], row: u32, step: u32, k: u32) -> Vector<u32, Const<2>> {
    let width = k / 32u32;
    let first = row as usize * width as usize;
    let mut words = Vector::<u32, Const<2>>::new(0u32);
    #[unroll]
    for i in 0..2usize {
        let at = step * 4u32 + comptime!(2 * i as u32);
        let mut word = 0u32;
        if at < width {
            word = u32::cast_from(pairs[first + at as usize]);
        }
        if at + 1u32 < width {
            word |= u32::cast_from(pairs[first + at as usize + 1usize]) << 16u32;
        }
        words.insert(i, word);
    }
    words
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group of rows.
///
/// Arguments are those of `sm90_kernel`, but for an `a` in the order of `w4a16_arrange::arrange`, the codes of `b`
/// (a map of words, eight codes each), and its scales in twos. Rows of tiles in groups are those of `schedule`
/// (`schedule_groups` writes it); a cube takes every `CUBE_COUNT`th tile.
/// `unit_of_sums` is what sums have to be multiplied by: decoded elements are 2^-8 times what they stand
/// for, those of `b` alone or of both operands. `amax` is raised to the largest magnitude of the output where the
/// epilogue says so.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fused_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    b_scales: &[u16],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    schedule: &[Vector<u32, Const<4>>],
    before: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    amax: &mut [Atomic<u32>],
    m: u32,
    n: u32,
    k: u32,
    groups: u32,
    a_range: f32,
    b_range: f32,
    unit_of_sums: f32,
    band: u32,
    #[comptime] grouping: GroupedDim,
    #[comptime] tile_shape: W4a16Tile,
    #[comptime] kind: EpilogueKind,
) {
    let stages = comptime!(tile_shape.stages());
    let rows_a = comptime!(tile_shape.rows_a as u32);
    let rows_b = comptime!(tile_shape.rows_b() as u32);
    // In vectors of 16 bytes.
    let a_half = comptime!(tile_shape.a_half());
    let codes_stage = comptime!(tile_shape.rows_b() * ROW_WORDS / 4);
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> = Shared::new_aligned_slice(
        comptime!(2 * tile_shape.stages() * tile_shape.a_half()),
        1024usize,
    );
    let mut code_tiles: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(tile_shape.stages() * tile_shape.rows_b() * ROW_WORDS / 4),
        128usize,
    );
    let scale_tiles: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(tile_shape.stages() * tile_shape.rows_b() * ROW_SCALES / 16),
        128usize,
    );
    let staging: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(tile_shape.consumers() * tile_shape.staging() / 4),
        128usize,
    );
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(4 * tile_shape.stages()), 8usize);
    // Two to a stage, for the halves of `a`; codes and scales come with the first.
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    let empty = full + comptime!(16 * tile_shape.stages() as u32);
    let a_at = cvta_to_shared::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr());
    let codes_at = cvta_to_shared::<Vector<u32, Const<4>>>(code_tiles.as_slice().as_ptr());
    let scales_at = cvta_to_shared::<Vector<u32, Const<4>>>(scale_tiles.as_slice().as_ptr());
    let staging_at = cvta_to_shared::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr());
    let unit = UNIT_POS;
    let lane = unit % 32u32;
    if unit == 0 {
        #[unroll]
        for s in 0..comptime!(2 * stages) {
            // The copy engine, and each unit that copies scales; the units that consume a stage.
            barriers[s].init_manual(comptime!(if s % 2 == 0 { 1 + CARRIERS as u32 } else { 1 }));
            barriers[s + comptime!(2 * stages)].init_manual(comptime!(if tile_shape.ways == 1 {
                256
            } else {
                128
            }));
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let tiles_n = n.div_ceil(rows_b);
    let tiles_m = if comptime!(grouping == GroupedDim::M) {
        schedule[0].extract(0usize)
    } else {
        m.div_ceil(rows_a)
    };
    let tiles = tiles_m * tiles_n;
    let steps = k.div_ceil(comptime!(w4a16_arrange::SPAN as u32));
    let mut tile = CUBE_POS as u32;
    // Stages used so far: all units count alike, so the ring needs no other state.
    let mut used = 0u32;
    if unit < 32u32 {
        // Sums and fragments take more registers than an equal share.
        if comptime!(tile_shape.consumers() == 2) {
            setmaxnreg_dec(56u32);
        }
        if lane == 0u32 {
            while tile < tiles {
                let at = place_of(
                    schedule, tile, tiles_m, tiles_n, band, m, grouping, tile_shape,
                );
                let column = at.group * n + at.column;
                let width = width_of(at.end - at.row, tile_shape);
                for step in 0..steps {
                    let stage = used % comptime!(stages as u32);
                    let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
                    #[unroll]
                    for half in 0..2usize {
                        let number = stage * 2u32 + comptime!(half as u32);
                        mbarrier_wait_parity(empty + number * 8u32, parity);
                        let codes = comptime!(if half == 0 {
                            tile_shape.rows_b() as u32 * ROW_WORDS as u32 * 4
                        } else {
                            0
                        });
                        mbarrier_arrive_expect_tx(full + number * 8u32, width * 128u32 + codes);
                        let s = stage as usize;
                        let ready = &barriers[number as usize];
                        if comptime!(half == 0) {
                            ready.tma_load_2d(
                                b,
                                &mut code_tiles[s * codes_stage..(s + 1) * codes_stage],
                                column as i32,
                                (step * comptime!(ROW_WORDS as u32)) as i32,
                            );
                        }
                        #[unroll]
                        for copy in 0..comptime!(tile_shape.rows_a / tile_shape.rows_of_copy()) {
                            let rows = comptime!(tile_shape.rows_of_copy());
                            let ahead = comptime!((copy * rows) as u32);
                            if ahead < width {
                                let first = number as usize * a_half + comptime!(copy * rows * 8);
                                ready.tma_load_2d(
                                    a,
                                    &mut a_tiles[first..first + comptime!(rows * 8)],
                                    (at.row + ahead) as i32,
                                    (step * comptime!(w4a16_arrange::SPAN as u32)
                                        + comptime!((half * HALF) as u32))
                                        as i32,
                                );
                            }
                        }
                    }
                    used += 1u32;
                }
                tile += CUBE_COUNT as u32;
            }
        }
    } else if unit < 128u32 {
        if comptime!(tile_shape.consumers() == 2) {
            setmaxnreg_dec(56u32);
        }
        let rows_of_unit = comptime!(tile_shape.rows_b().div_ceil(CARRIERS));
        let carrier = unit - 32u32;
        // Then the scales of a row in a stage are aligned.
        let is_whole = k & comptime!(w4a16_arrange::SPAN as u32 - 1) == 0u32;
        let scales_from = cvta_to_global::<u16>(b_scales.as_ptr());
        while tile < tiles {
            let at = place_of(
                schedule, tile, tiles_m, tiles_n, band, m, grouping, tile_shape,
            );
            let column = at.group * n + at.column;
            // Rows outside read the last one; what comes of them is not written.
            let last_row = groups * n - 1u32;
            for step in 0..steps {
                let stage = used % comptime!(stages as u32);
                let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
                let barrier = full + stage * 16u32;
                mbarrier_wait_parity(empty + stage * 16u32, parity);
                #[unroll]
                for r in 0..rows_of_unit {
                    let line = carrier + comptime!((r * CARRIERS) as u32);
                    if line < rows_b {
                        let row = min(column + line, last_row);
                        let to = scales_at + (stage * rows_b + line) * 8u32;
                        if is_whole {
                            let at = u64::cast_from(row) * u64::cast_from(k / 16u32)
                                + u64::cast_from(step * 8u32);
                            cp_async(to, scales_from + at, 8u32);
                        } else {
                            let words = load_scales(b_scales, row, step, k);
                            st_shared_v2(to, words.extract(0usize), words.extract(1usize));
                        }
                    }
                }
                if is_whole {
                    cp_async_mbarrier_arrive_noinc(barrier);
                } else {
                    mbarrier_arrive(barrier);
                }
                used += 1u32;
            }
            tile += CUBE_COUNT as u32;
        }
    } else {
        if comptime!(tile_shape.consumers() == 2) {
            setmaxnreg_inc(224u32);
        }
        let consumer = unit / 128u32 - 1u32;
        let warp = (unit % 128u32) / 32u32;
        let mut strip = consumer;
        if comptime!(tile_shape.ways > 1) {
            strip = 0u32;
        }
        // This lane's upper row of the strips of `b`, and the place of its codes and scales.
        let local = strip * comptime!(W4A16_STRIP as u32) + warp * 16u32 + lane / 4u32;
        let codes = codes_at + local * 64u32 + (lane % 4u32) * 16u32;
        let scales = scales_at + local * 8u32 + (lane % 4u32) * 2u32;
        let a_tile = wgmma_descriptor(a_at, Major::K);
        let packed = PackedStage {
            codes,
            scales,
            rows: rows_b.runtime(),
        };
        let ring = Ring {
            stages: comptime!(stages as u32).runtime(),
            advance: comptime!(tile_shape.ways as u32).runtime(),
            a_half: comptime!(tile_shape.a_half() as u64).runtime(),
        };
        while tile < tiles {
            let at = place_of(
                schedule, tile, tiles_m, tiles_n, band, m, grouping, tile_shape,
            );
            let width = width_of(at.end - at.row, tile_shape);
            let mut begin = used;
            let mut own_steps = steps;
            if comptime!(tile_shape.ways > 1) {
                begin += consumer;
                own_steps = (steps + comptime!(tile_shape.ways as u32 - 1) - consumer)
                    / comptime!(tile_shape.ways as u32);
            }
            // Values: the main loops would take variables for pointers.
            let stage = u32::reinterpret(begin % comptime!(stages as u32));
            let parity = u32::reinterpret((begin / comptime!(stages as u32)) & 1u32);
            let own_steps = u32::reinterpret(own_steps);
            let pipeline = PipelineState {
                full,
                empty,
                stage,
                parity,
            };
            #[unroll]
            for i in 0..comptime!(tile_shape.widths().len()) {
                let here = comptime!(tile_shape.widths()[i]);
                if width == comptime!(here as u32) {
                    // There is no vector of 48 values.
                    let size!(S) = comptime!(if here == 96 { 64 } else { here / 2 });
                    let mut sums = Vector::<f32, S>::new(0.0f32);
                    if own_steps > 0u32 {
                        if comptime!(here == 256) {
                            sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n256(
                                pipeline, ring, a_tile, packed, own_steps,
                            ));
                        } else if comptime!(here == 128) {
                            sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n128(
                                pipeline, ring, a_tile, packed, own_steps,
                            ));
                        } else if comptime!(here == 96) {
                            sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n96(
                                pipeline, ring, a_tile, packed, own_steps,
                            ));
                        } else if comptime!(here == 64) {
                            sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n64(
                                pipeline, ring, a_tile, packed, own_steps,
                            ));
                        } else {
                            sums = Vector::<f32, S>::reinterpret(w4a16_mainloop_n32(
                                pipeline, ring, a_tile, packed, own_steps,
                            ));
                        }
                    }
                    write_tile::<S>(
                        sums,
                        at.row,
                        at.end,
                        at.column,
                        at.group,
                        a_amax,
                        b_amax,
                        bias,
                        before,
                        out,
                        amax,
                        n,
                        a_range,
                        b_range,
                        unit_of_sums,
                        staging_at,
                        strip,
                        consumer,
                        here,
                        tile_shape,
                        kind,
                    );
                }
            }
            used += steps;
            tile += CUBE_COUNT as u32;
        }
    }
}

/// Where a tile lies.
#[derive(CubeType, Clone, Copy)]
struct TilePlace {
    /// The group of its rows of `a`.
    group: u32,
    /// The first of them.
    row: u32,
    /// The row behind the last of the group.
    end: u32,
    /// Its first row of `b`, of those of the group.
    column: u32,
}

/// Sm90Tile number `number` of `tiles_m` x `tiles_n`.
#[cube]
fn place_of(
    schedule: &[Vector<u32, Const<4>>],
    number: u32,
    tiles_m: u32,
    tiles_n: u32,
    band: u32,
    m: u32,
    #[comptime] grouping: GroupedDim,
    #[comptime] tile: W4a16Tile,
) -> TilePlace {
    let rows_b = comptime!(tile.rows_b() as u32);
    let at = place(number, tiles_m, tiles_n, band, 1u32, rows_b);
    if comptime!(grouping == GroupedDim::M) {
        let entry = schedule[at.row as usize + 1usize];
        TilePlace {
            group: entry.extract(0usize),
            row: entry.extract(1usize),
            end: entry.extract(2usize),
            column: at.column,
        }
    } else {
        TilePlace {
            group: 0u32,
            row: at.row * comptime!(tile.rows_a as u32),
            end: m,
            column: at.column,
        }
    }
}

/// Finishes the sums of a tile and writes them. A lane has rows `lane / 4` and 8 below of the 16 rows
/// of `b` of its warp, for two neighbouring rows of `a` in each eight; through shared memory they
/// become rows of the output, 16 bytes to a unit.
#[cube]
fn write_tile<N: Size>(
    sums: Vector<f32, N>,
    row0: u32,
    end: u32,
    column0: u32,
    group: u32,
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    before: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    amax: &mut [Atomic<u32>],
    n: u32,
    a_range: f32,
    b_range: f32,
    unit_of_sums: f32,
    staging_at: u32,
    strip: u32,
    consumer: u32,
    #[comptime] width: usize,
    #[comptime] tile_shape: W4a16Tile,
    #[comptime] kind: EpilogueKind,
) {
    let lane = UNIT_POS % 32u32;
    let warp = (UNIT_POS % 128u32) / 32u32;
    // With shared strips all consumers write the tile together, else each its own columns.
    let units = comptime!(128 * tile_shape.ways as u32);
    let mut number = 1u32 + consumer;
    let mut unit = UNIT_POS % 128u32;
    if comptime!(tile_shape.ways > 1) {
        number = 1u32;
        unit += consumer * 128u32;
    }
    let number = u32::reinterpret(number);
    let stage_bytes = comptime!(tile_shape.staging() as u32 * 4);
    let own = staging_at + consumer * stage_bytes;
    let read = staging_at + strip * stage_bytes;
    let column0 = column0 + strip * comptime!(W4A16_STRIP as u32);
    // Columns of 16 bytes, and how many of them a row has.
    let vector = comptime!(16 / kind.out.size() as u32);
    let per_row = comptime!(W4A16_STRIP as u32 / (16 / kind.out.size() as u32));
    let items =
        comptime!(tile_shape.chunk() as u32 * (W4A16_STRIP as u32 / (16 / kind.out.size() as u32)));
    let b_factor = factor(b_amax, 0u32, group, b_range, comptime!(kind.b.of_tile()));
    let mut largest = 0u32;
    #[unroll]
    for chunk in 0..comptime!(width / tile_shape.chunk()) {
        let chunk_row = row0 + comptime!((chunk * tile_shape.chunk()) as u32);
        if chunk_row < end {
            // The chunk before has been read.
            named_barrier_sync(number, units.runtime());
            #[unroll]
            for j in 0..comptime!(tile_shape.chunk() / 8) {
                let first = comptime!((chunk * tile_shape.chunk() / 8 + j) * 4);
                let at = own
                    + ((lane % 4u32) * 2u32 + comptime!(j as u32 * 8))
                        * comptime!(STAGING_ROW as u32 * 4)
                    + (warp * 16u32 + lane / 4u32) * 4u32;
                let below = at + comptime!(STAGING_ROW as u32 * 4);
                st_shared(at, u32::reinterpret(sums.extract(first)));
                st_shared(below, u32::reinterpret(sums.extract(comptime!(first + 1))));
                st_shared(
                    at + 32u32,
                    u32::reinterpret(sums.extract(comptime!(first + 2))),
                );
                st_shared(
                    below + 32u32,
                    u32::reinterpret(sums.extract(comptime!(first + 3))),
                );
            }
            named_barrier_sync(number, units.runtime());
            #[unroll]
            for round in 0..comptime!(items.div_ceil(units)) {
                let item = unit + comptime!(round * units);
                let line = item / per_row;
                let within = (item % per_row) * vector;
                let row = chunk_row + line;
                let column = column0 + within;
                if item < items && row < end && column < n {
                    let line_factor = factor(a_amax, row, group, a_range, kind.a);
                    let from = read + line * comptime!(STAGING_ROW as u32 * 4) + within * 4u32;
                    let mut words = Vector::<u32, Const<4>>::new(0u32);
                    #[unroll]
                    for four in 0..comptime!(vector as usize / 4) {
                        let mut values = load_sums(from + comptime!(four as u32 * 16));
                        #[unroll]
                        for way in 1..comptime!(tile_shape.ways) {
                            values += load_sums(
                                from + comptime!(way as u32) * stage_bytes
                                    + comptime!(four as u32 * 16),
                            );
                        }
                        #[unroll]
                        for pair in 0..2usize {
                            let here = column + comptime!((four * 4 + pair * 2) as u32);
                            let own = group * n + here;
                            let index = row as usize * n as usize + here as usize;
                            let even = element(
                                values.extract(comptime!(2 * pair)),
                                own,
                                group,
                                line_factor,
                                b_factor,
                                b_amax,
                                b_range,
                                bias,
                                held(before, index, 0u32, kind),
                                unit_of_sums,
                                kind,
                            );
                            let odd = element(
                                values.extract(comptime!(2 * pair + 1)),
                                own + 1u32,
                                group,
                                line_factor,
                                b_factor,
                                b_amax,
                                b_range,
                                bias,
                                held(before, index, 1u32, kind),
                                unit_of_sums,
                                kind,
                            );
                            if comptime!(kind.out == FloatKind::F32) {
                                words.insert(comptime!(2 * pair), u32::reinterpret(even));
                                words.insert(comptime!(2 * pair + 1), u32::reinterpret(odd));
                            } else {
                                words.insert(
                                    comptime!(2 * four + pair),
                                    pack_pair(even, odd, comptime!(kind.out)),
                                );
                            }
                            if comptime!(kind.amax.is_some()) {
                                largest =
                                    max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                            }
                        }
                    }
                    out[(row as usize * n as usize + column as usize)
                        / comptime!(16 / kind.out.size())] = words;
                }
            }
        }
    }
    if comptime!(kind.amax.is_some()) {
        raise(amax, group, largest, kind);
    }
}

/// Four staged sums.
#[cube]
fn load_sums(address: u32) -> Vector<f32, Const<4>> {
    Vector::<f32, Const<4>>::reinterpret(ld_shared_v4(address))
}

/// One output element from its sum.
#[cube]
fn element(
    sum: f32,
    own: u32,
    group: u32,
    line_factor: f32,
    b_factor: f32,
    b_amax: &[f32],
    b_range: f32,
    bias: &[f32],
    before: f32,
    unit_of_sums: f32,
    #[comptime] kind: EpilogueKind,
) -> f32 {
    let mut column_factor = b_factor;
    if comptime!(kind.b == Factor::PerRow) {
        column_factor = factor(b_amax, own, group, b_range, kind.b);
    }
    let mut addend = 0.0f32;
    if comptime!(kind.bias) {
        addend = bias[own as usize];
    }
    finish(
        sum * unit_of_sums,
        line_factor * column_factor,
        addend,
        before,
        kind,
    )
}

/// The GEMM of sm_90 with a packed weight that is dequantized in registers.
pub(crate) struct Sm90W4a16;

impl Kernel for Sm90W4a16 {
    fn name(&self) -> &'static str {
        "sm90_w4a16"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm90Wgmma
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        check_sm90(device, problem)?;
        let k = problem.shape.k;
        match problem {
            _ if problem.b != OperandLayout::Packed => Err(Refusal::Operands("`b` is not packed")),
            _ if problem.a == OperandLayout::MnMajor => Err(Refusal::Operands("`a` is MN-major")),
            _ if problem.grouped == GroupedDim::K => Err(Refusal::Operands("groups are along K")),
            // TMA reads rows of whole 16 bytes of codes.
            _ if k == 0 || !k.is_multiple_of(32) => {
                Err(Refusal::Operands("k is no multiple of 32"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        if problem.grouped == GroupedDim::M {
            let (tile, band) = heuristics::sm90_w4a16_grouped(problem);
            return Plan::W4a16(tile, band).into();
        }
        let (tile, band, estimate) = heuristics::sm90_w4a16(device.sms, problem);
        Candidate {
            plan: Plan::W4a16(tile, band),
            estimate: Some(estimate),
        }
    }

    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error> {
        match plan {
            Plan::W4a16(tile, band) if launch.b.is_packed() && !launch.a.is_mn_major() => {
                queue(launch, tile, band);
                Ok(())
            }
            plan => Err(misfit(plan, launch)),
        }
    }
}

/// Queues the GEMM: `m` rows of `n`. Before it `a` is brought into the order of the kernel, as bf16.
fn queue(launch: &Launch, tile: W4a16Tile, band: usize) {
    let Launch {
        client,
        a,
        b,
        groups,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let schedule = match groups.grouping {
        GroupedDim::M => Some(Schedule::of(tile, m, groups.groups)),
        GroupedDim::None | GroupedDim::K => None,
    };
    let rows = match schedule {
        Some(schedule) => schedule.rows_of_tiles(m, groups.groups),
        None => m.div_ceil(tile.rows_a),
    };
    let tiles = rows * n.div_ceil(tile.rows_b());
    let cubes = tiles.min(sms(client));
    // One more, with their number.
    let entries = if schedule.is_some() { rows + 1 } else { 1 };
    let (arranged, schedule) = w4a16_arrange::arrange(client, a, k, groups, entries, schedule);
    let out = &output.matrix().handle;
    let unit_of_sums = if a.is_packed() { 65536.0 } else { 256.0 };
    let width = k.next_multiple_of(w4a16_arrange::SPAN);
    // SAFETY: the memory was allocated for `m` x `width` elements.
    let a_tensor =
        unsafe { TensorArg::from_raw_parts(arranged, [width, 1].into(), [m, width].into()) };
    let a_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_of_copy(), HALF].into(),
        },
        a_tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256);
    // SAFETY: the caller checked that the memory holds these words of eight codes.
    let b_tensor = unsafe {
        TensorArg::from_raw_parts(b.codes.clone(), [k / 8, 1].into(), [b.rows, k / 8].into())
    };
    let b_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_b(), ROW_WORDS].into(),
        },
        b_tensor,
        u32::elem_type_native(),
    )
    .with_prefetch(TensorMapPrefetch::B256);
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked that the memory holds what the kernel reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let bytes = m * n * epilogue.kind.out.size();
    // SAFETY: the kernel masks what it writes by rows and columns, and clamps what it reads.
    unsafe {
        fused_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(tile.units()),
            address_type((m * n).max(b.rows * k / 32)),
            a_map,
            b_map,
            memory(&b.scales, b.rows * k / 32),
            memory(&epilogue.a_amax, m),
            memory(&epilogue.b_amax, b.rows),
            memory(&epilogue.bias, b.rows),
            memory(&schedule, entries),
            memory(out, bytes / 4),
            memory(out, bytes / 16),
            memory(&epilogue.amax, epilogue.amax_len(groups.groups)),
            m as u32,
            n as u32,
            k as u32,
            groups.groups as u32,
            epilogue.ranges[0],
            epilogue.ranges[1],
            unit_of_sums,
            band as u32,
            groups.grouping,
            tile,
            epilogue.kind,
        );
    }
}
