//! The product of Hopper with a packed `b` that is decoded in registers: no bf16 copy of `b` is in
//! memory, and its codes and scales are read once for each tile along the rows of `a`.
//!
//! `wgmma` takes its left operand from registers, so the product is computed as `outᵀ = b · aᵀ`: each of
//! two consumer warpgroups decodes 64 rows of `b` (or two or four share 64 rows and take turns along the
//! contraction) and multiplies them with the `rows_a` rows of `a` that lie in shared memory as bf16.
//! The first warp drives the copy engine, which brings the codes and a bf16 `a`. The three next ones
//! decode block scales, a row of `b` to a unit, and where `a` is packed and has few rows its elements
//! too. (A warp that did both was measured: starting the engine held up the scales of every stage.)

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::{
    epilogue::{EpilogueKind, Factor, factor, finish, held, pack_pair, raise, rounded_magnitude},
    product::{Elements, Operand},
    sm90::{EpilogueArgs, GroupArgs, Grouping, place, start_of, tiles_along_m},
    workspace,
};
use crate::{
    cube::{
        codec::decode_e4m3,
        ptx_sm90::{
            barrier_expect, barrier_wait, decode_e2m1x8, decode_e4m3x2, descriptor, shared_address,
        },
        ptx_sm90_fused::{
            barrier_arrive, byte_selector, fence_shared, fused_loop_8_64, fused_loop_16_64,
            fused_loop_32_64, fused_loop_64_64, fused_loop_64_128, fused_loop_128_64,
            fused_loop_128_128, fused_loop_256_128, keep_56_registers, load_shared_f32_4, meet,
            store_shared_4, store_shared_f32, take_224_registers,
        },
    },
    device::{DevicePacked, FloatKind, address_type},
};

/// Columns of a part of a stage: the 128 bytes of bf16 that the swizzle spans.
const PART: usize = 64;
/// Rows of `b` of one consumer warpgroup.
const STRIP: usize = 64;
/// Floats from one row of the output to the next where warpgroups stage their sums: four more than
/// there are, so that the lanes of a warp write to different banks.
const STAGING_ROW: usize = STRIP + 4;

/// Units that decode scales.
const DECODERS: usize = 96;
/// Loads of scales, sixteen to a unit, that are under way.
const GROUPS_AHEAD: usize = 2;

/// How `a` is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Left {
    /// As codes, which every cube decodes for itself: few rows.
    Packed,
    /// As bf16.
    Bf16,
}

/// The shape of a tile and of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FusedTile {
    /// Rows of `a`: 8, 16, 32, 64, 128 or 256.
    pub rows_a: usize,
    /// Consumer warpgroups that have the same 64 rows of `b` and take turns along the contraction: 2 or
    /// 4; or 1, and two warpgroups have 64 rows each.
    pub ways: usize,
}

impl FusedTile {
    /// The tiles that there are kernels for.
    pub const ALL: [Self; 8] = {
        const fn tile(rows_a: usize, ways: usize) -> FusedTile {
            FusedTile { rows_a, ways }
        }
        [
            tile(256, 1),
            tile(128, 1),
            tile(128, 2),
            tile(64, 1),
            tile(64, 2),
            tile(32, 4),
            tile(16, 4),
            tile(8, 4),
        ]
    };

    /// Consumer warpgroups.
    pub const fn consumers(self) -> usize {
        if self.ways == 1 { 2 } else { self.ways }
    }

    /// Units of a cube: the first warpgroup and the consumers.
    pub const fn units(self) -> u32 {
        128 + 128 * self.consumers() as u32
    }

    /// Rows of `b` whose scales a unit decodes.
    const fn rows_of_unit(self) -> usize {
        self.rows_b().div_ceil(DECODERS)
    }

    /// Rows of `b`.
    pub const fn rows_b(self) -> usize {
        if self.ways == 1 { 2 * STRIP } else { STRIP }
    }

    /// Parts of a stage.
    pub const fn parts(self) -> usize {
        if self.rows_a <= 64 { 2 } else { 1 }
    }

    /// Stages of the ring; the main loops of
    /// [`ptx_sm90_fused`](crate::cube::ptx_sm90_fused) count the same.
    pub const fn stages(self) -> usize {
        match (self.rows_a, self.ways) {
            (256, _) => 5,
            (64, 1) => 6,
            _ => 8,
        }
    }

    /// Vectors of 16 bytes of `a` in a part.
    const fn a_part(self) -> usize {
        self.rows_a * 8
    }

    /// Words of scales in a part: four to a row.
    const fn scales_part(self) -> usize {
        self.rows_b() * 4
    }

    /// Rows of the output that are staged at a time.
    const fn chunk(self) -> usize {
        if self.rows_a < 32 { self.rows_a } else { 32 }
    }

    /// Floats that one warpgroup stages.
    const fn staging(self) -> usize {
        self.chunk() * STAGING_ROW
    }
}

/// The comptime choices of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FusedShape {
    /// The tile.
    pub tile: FusedTile,
    /// How `a` is read.
    pub left: Left,
    /// The contraction is a multiple of 256, so that sixteen scales of a row are an aligned vector.
    pub whole: bool,
}

impl FusedShape {
    /// Stages of which a unit loads the scales together.
    const fn group(self) -> usize {
        4 / self.tile.parts()
    }

    /// Stages whose scales (and codes of `a`) a unit has loaded ahead: the latency of memory.
    const fn ahead(self) -> usize {
        GROUPS_AHEAD * self.group()
    }

    /// Words of `a` that a unit decodes for each stage.
    const fn words(self) -> usize {
        match self.left {
            Left::Packed => (self.tile.parts() * self.tile.rows_a * 8).div_ceil(DECODERS),
            Left::Bf16 => 0,
        }
    }
}

/// The scales of sixteen blocks of one row, from column `256 · index` on; zeros (or, with `whole`, those
/// of the last blocks) beyond the end.
#[cube]
fn load_scales(
    scales: &[Vector<u32, Const<4>>],
    pairs: &[u16],
    row: u32,
    index: u32,
    k: u32,
    #[comptime] whole: bool,
) -> Vector<u32, Const<4>> {
    if comptime!(whole) {
        let width = k / 256u32;
        scales[(row * width + min(index, width - 1u32)) as usize]
    } else {
        let width = k / 32u32;
        let first = row * width;
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            let at = index * 8u32 + comptime!(2 * i as u32);
            let mut word = 0u32;
            if at < width {
                word = u32::cast_from(pairs[(first + at) as usize]);
            }
            if at + 1u32 < width {
                word |= u32::cast_from(pairs[(first + at + 1u32) as usize]) << 16u32;
            }
            words.insert(i, word);
        }
        words
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group of rows.
///
/// Tiles are numbered as in `sm90_kernel`, whose arguments these are, but
/// for the codes of `b` (a map of words, eight codes each), its scales (`b_scales` and `b_pairs` are
/// the same memory), and the codes and scales of `a`, read where it is packed. `amax` is raised to the
/// largest magnitude of the output where the epilogue says so.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fused_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<u32, Tiled>,
    a_codes: &[u32],
    a_scales: &[u8],
    b_scales: &[Vector<u32, Const<4>>],
    b_pairs: &[u16],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    offsets: &[u32],
    before: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    amax: &mut [Atomic<u32>],
    m: u32,
    n: u32,
    k: u32,
    groups: u32,
    a_range: f32,
    b_range: f32,
    band: u32,
    #[comptime] grouping: Grouping,
    #[comptime] shape: FusedShape,
    #[comptime] kind: EpilogueKind,
) {
    let tile_shape = comptime!(shape.tile);
    let stages = comptime!(shape.tile.stages());
    let parts = comptime!(shape.tile.parts());
    let rows_a = comptime!(shape.tile.rows_a as u32);
    let rows_b = comptime!(shape.tile.rows_b() as u32);
    // In vectors of 16 bytes.
    let a_part = comptime!(shape.tile.a_part());
    let codes_stage = comptime!(shape.tile.parts() * shape.tile.rows_b() * 2);
    let scales_part = comptime!(shape.tile.scales_part() as u32);
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> = Shared::new_aligned_slice(
        comptime!(shape.tile.stages() * shape.tile.parts() * shape.tile.a_part()),
        1024usize,
    );
    let mut code_tiles: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(shape.tile.stages() * shape.tile.parts() * shape.tile.rows_b() * 2),
        1024usize,
    );
    let scale_tiles: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(shape.tile.stages() * shape.tile.parts() * shape.tile.rows_b()),
        128usize,
    );
    let staging: Shared<[Vector<u32, Const<4>>]> = Shared::new_aligned_slice(
        comptime!(shape.tile.consumers() * shape.tile.staging() / 4),
        128usize,
    );
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * shape.tile.stages()), 8usize);
    let full = shared_address::<Barrier>(barriers.as_slice().as_ptr());
    let empty = full + comptime!(8 * shape.tile.stages() as u32);
    let a_at = shared_address::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr());
    let codes_at = shared_address::<Vector<u32, Const<4>>>(code_tiles.as_slice().as_ptr());
    let scales_at = shared_address::<Vector<u32, Const<4>>>(scale_tiles.as_slice().as_ptr());
    let staging_at = shared_address::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr());
    let unit = UNIT_POS;
    let lane = unit % 32u32;
    if unit == 0 {
        #[unroll]
        for s in 0..stages {
            // The warp of the copy engine and those that decode; the warps that consume a stage.
            barriers[s].init_manual(4);
            barriers[s + stages].init_manual(comptime!(if shape.tile.ways == 1 { 8 } else { 4 }));
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let tiles_n = n.div_ceil(rows_b);
    let steps = k.div_ceil(comptime!((PART * parts) as u32));
    let mut tile = CUBE_POS as u32;
    // The group that is looked at, and the tiles before it.
    let mut group = 0u32;
    let mut passed = 0u32;
    // Stages used so far: all units count alike, so the ring needs no other state.
    let mut used = 0u32;
    if unit < 32u32 {
        // The sums of the widest tile leave too few registers beside them.
        if comptime!(tile_shape.rows_a == 256) {
            keep_56_registers();
        }
        if lane == 0u32 {
            while group < groups {
                let tiles_m = tiles_along_m(offsets, group, m, grouping, rows_a);
                if tile - passed < tiles_m * tiles_n {
                    let at = place(tile - passed, tiles_m, tiles_n, band, rows_a, rows_b);
                    let mut row = at.row;
                    let mut column = at.column;
                    if comptime!(grouping == Grouping::Rows) {
                        row += start_of(offsets, group, grouping);
                        column += group * n;
                    }
                    for step in 0..steps {
                        let stage = used % comptime!(stages as u32);
                        let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
                        barrier_wait(empty + stage * 8u32, parity);
                        let bytes_a = comptime!(match shape.left {
                            Left::Packed => 0,
                            Left::Bf16 => shape.tile.a_part() * 16,
                        });
                        barrier_expect(
                            full + stage * 8u32,
                            comptime!(
                                (shape.tile.parts() * (bytes_a + shape.tile.rows_b() * PART / 2))
                                    as u32
                            ),
                        );
                        let s = stage as usize;
                        let ready = &barriers[s];
                        ready.tma_load_2d(
                            b,
                            &mut code_tiles[s * codes_stage..(s + 1) * codes_stage],
                            column as i32,
                            (step * comptime!((PART * parts / 8) as u32)) as i32,
                        );
                        if comptime!(shape.left == Left::Bf16) {
                            #[unroll]
                            for p in 0..parts {
                                let first = s * comptime!(parts * a_part) + comptime!(p * a_part);
                                ready.tma_load_2d(
                                    a,
                                    &mut a_tiles[first..first + a_part],
                                    row as i32,
                                    (step * comptime!((PART * parts) as u32)
                                        + comptime!((p * PART) as u32))
                                        as i32,
                                );
                            }
                        }
                        used += 1u32;
                    }
                    tile += CUBE_COUNT as u32;
                } else {
                    passed += tiles_m * tiles_n;
                    group += 1u32;
                }
            }
        }
    } else if unit < 128u32 {
        if comptime!(tile_shape.rows_a == 256) {
            keep_56_registers();
        }
        let ahead = comptime!(shape.ahead());
        let items = comptime!(shape.words());
        let stages_of_load = comptime!(shape.group());
        let rows_of_unit = comptime!(shape.tile.rows_of_unit());
        let decoder = unit - 32u32;
        while group < groups {
            let tiles_m = tiles_along_m(offsets, group, m, grouping, rows_a);
            if tile - passed < tiles_m * tiles_n {
                let at = place(tile - passed, tiles_m, tiles_n, band, rows_a, rows_b);
                let mut row = at.row;
                let mut column = at.column;
                if comptime!(grouping == Grouping::Rows) {
                    row += start_of(offsets, group, grouping);
                    column += group * n;
                }
                // Rows outside read the last one; what comes of them is not written.
                let last_row = groups * n - 1u32;
                let mut loaded = Array::<Vector<u32, Const<4>>>::new(comptime!(
                    GROUPS_AHEAD * shape.tile.rows_of_unit()
                ));
                let mut a_words =
                    Array::<u32>::new(comptime!((shape.ahead() * shape.words()).max(1)));
                let mut a_bytes =
                    Array::<u8>::new(comptime!((shape.ahead() * shape.words()).max(1)));
                #[unroll]
                for g in 0..GROUPS_AHEAD {
                    #[unroll]
                    for r in 0..rows_of_unit {
                        let line = decoder + comptime!((r * DECODERS) as u32);
                        if line < rows_b {
                            loaded[comptime!(g * rows_of_unit + r)] = load_scales(
                                b_scales,
                                b_pairs,
                                min(column + line, last_row),
                                comptime!(g as u32),
                                k,
                                comptime!(shape.whole),
                            );
                        }
                    }
                }
                #[unroll]
                for d in 0..ahead {
                    #[unroll]
                    for i in 0..items {
                        let word = a_word(decoder, comptime!(d as u32), i, row, m, k, shape);
                        a_words[comptime!(d * items + i)] = a_codes[word];
                        a_bytes[comptime!(d * items + i)] = a_scales[word / 2usize];
                    }
                }
                let mut base = 0u32;
                while base < steps {
                    #[unroll]
                    for g in 0..GROUPS_AHEAD {
                        let mut scales = Array::<Vector<u32, Const<4>>>::new(comptime!(
                            shape.tile.rows_of_unit()
                        ));
                        #[unroll]
                        for r in 0..rows_of_unit {
                            let slot = comptime!(g * rows_of_unit + r);
                            scales[r] = loaded[slot];
                            let line = decoder + comptime!((r * DECODERS) as u32);
                            if line < rows_b {
                                loaded[slot] = load_scales(
                                    b_scales,
                                    b_pairs,
                                    min(column + line, last_row),
                                    base / comptime!(shape.group() as u32)
                                        + comptime!((g + GROUPS_AHEAD) as u32),
                                    k,
                                    comptime!(shape.whole),
                                );
                            }
                        }
                        #[unroll]
                        for e in 0..stages_of_load {
                            let d = comptime!(g * stages_of_load + e);
                            let step = base + comptime!(d as u32);
                            if step < steps {
                                let stage = used % comptime!(stages as u32);
                                let parity = ((used / comptime!(stages as u32)) & 1u32) ^ 1u32;
                                barrier_wait(empty + stage * 8u32, parity);
                                #[unroll]
                                for r in 0..rows_of_unit {
                                    let line = decoder + comptime!((r * DECODERS) as u32);
                                    if line < rows_b {
                                        #[unroll]
                                        for p in 0..parts {
                                            let part = step * comptime!(parts as u32)
                                                + comptime!(p as u32);
                                            let mut word =
                                                scales[r].extract(comptime!(e * parts + p));
                                            // Beyond the end nothing is added: codes are zeros
                                            // there, and no scale may be NaN.
                                            if part * 64u32 >= k {
                                                word = 0u32;
                                            }
                                            store_shared_4(
                                                scales_at
                                                    + (stage * comptime!(parts as u32)
                                                        + comptime!(p as u32))
                                                        * comptime!(scales_part * 4)
                                                    + line * 16u32,
                                                four_scales(word),
                                            );
                                        }
                                    }
                                }
                                if comptime!(shape.left == Left::Packed) {
                                    #[unroll]
                                    for i in 0..items {
                                        let slot = comptime!(d * items + i);
                                        let mut word = a_words[slot];
                                        let mut byte = a_bytes[slot];
                                        let local = decoder + comptime!((i * DECODERS) as u32);
                                        let line = local / comptime!(8 * parts as u32);
                                        let vector = local % comptime!(8 * parts as u32);
                                        if (step * comptime!(8 * parts as u32) + vector) * 8u32 >= k
                                            || row + line >= m
                                        {
                                            word = 0u32;
                                            byte = 0u8;
                                        }
                                        let scale =
                                            u32::reinterpret(decode_e4m3(u32::cast_from(byte)))
                                                >> 16u32;
                                        let eight = decode_e2m1x8(
                                            u32::reinterpret(word),
                                            scale | (scale << 16u32),
                                        );
                                        if line < rows_a {
                                            store_shared_4(
                                                a_at + (stage * comptime!(parts as u32)
                                                    + vector / 8u32)
                                                    * comptime!(a_part as u32 * 16)
                                                    + line * 128u32
                                                    + ((vector ^ line) & 7u32) * 16u32,
                                                eight,
                                            );
                                        }
                                        let next = a_word(
                                            decoder,
                                            step + comptime!(ahead as u32),
                                            i,
                                            row,
                                            m,
                                            k,
                                            shape,
                                        );
                                        a_words[slot] = a_codes[next];
                                        a_bytes[slot] = a_scales[next / 2usize];
                                    }
                                    fence_shared();
                                }
                                sync_plane();
                                if lane == 0u32 {
                                    barrier_arrive(full + stage * 8u32);
                                }
                                used += 1u32;
                            }
                        }
                    }
                    base += comptime!(ahead as u32);
                }
                tile += CUBE_COUNT as u32;
            } else {
                passed += tiles_m * tiles_n;
                group += 1u32;
            }
        }
    } else {
        if comptime!(tile_shape.rows_a == 256) {
            take_224_registers();
        }
        let consumer = unit / 128u32 - 1u32;
        let leader = u32::cast_from(lane == 0u32);
        let warp = (unit % 128u32) / 32u32;
        let mut strip = consumer;
        if comptime!(tile_shape.ways > 1) {
            strip = 0u32;
        }
        // This lane's upper row of the strips of `b`, and the place of its codes.
        let local = strip * comptime!(STRIP as u32) + warp * 16u32 + lane / 4u32;
        let mut codes = codes_at;
        if comptime!(parts == 2) {
            codes += local * 64u32 + ((local / 2u32) & 3u32) * 16u32;
        } else {
            codes += local * 32u32 + ((local / 4u32) & 1u32) * 16u32;
        }
        let scales = scales_at + local * 16u32;
        let selector = byte_selector(lane % 4u32);
        let a_tile = descriptor(a_at);
        while group < groups {
            let tiles_m = tiles_along_m(offsets, group, m, grouping, rows_a);
            if tile - passed < tiles_m * tiles_n {
                let at = place(tile - passed, tiles_m, tiles_n, band, rows_a, rows_b);
                let mut first = 0u32;
                let mut end = m;
                if comptime!(grouping == Grouping::Rows) {
                    first = start_of(offsets, group, grouping);
                    end = start_of(offsets, group + 1u32, grouping);
                }
                let mut begin = used;
                let mut own_steps = steps;
                let mut advance = 1u32;
                if comptime!(tile_shape.ways > 1) {
                    begin += consumer;
                    own_steps = (steps + comptime!(tile_shape.ways as u32 - 1) - consumer)
                        / comptime!(tile_shape.ways as u32);
                    advance = comptime!(tile_shape.ways as u32).runtime();
                }
                let stage = begin % comptime!(stages as u32);
                let parity = (begin / comptime!(stages as u32)) & 1u32;
                let own_parts = own_steps * comptime!(parts as u32);
                let row = first + at.row;
                // Values: the main loops would take variables for pointers.
                let advance = u32::reinterpret(advance);
                let codes = u32::reinterpret(codes);
                if comptime!(tile_shape.rows_a == 256) {
                    let mut sums = Vector::<f32, Const<128>>::new(0.0f32);
                    if own_parts > 0u32 {
                        sums = fused_loop_256_128(
                            full, empty, a_tile, codes, scales, selector, stage, parity, advance,
                            own_parts, leader,
                        );
                    }
                    write_tile::<Const<128>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                } else if comptime!(tile_shape.rows_a == 128) {
                    let mut sums = Vector::<f32, Const<64>>::new(0.0f32);
                    if own_parts > 0u32 {
                        if comptime!(tile_shape.ways > 1) {
                            sums = fused_loop_128_64(
                                full, empty, a_tile, codes, scales, selector, stage, parity,
                                advance, own_parts, leader,
                            );
                        } else {
                            sums = fused_loop_128_128(
                                full, empty, a_tile, codes, scales, selector, stage, parity,
                                advance, own_parts, leader,
                            );
                        }
                    }
                    write_tile::<Const<64>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                } else if comptime!(tile_shape.rows_a == 64) {
                    let mut sums = Vector::<f32, Const<32>>::new(0.0f32);
                    if own_parts > 0u32 {
                        if comptime!(tile_shape.ways > 1) {
                            sums = fused_loop_64_64(
                                full, empty, a_tile, codes, scales, selector, stage, parity,
                                advance, own_parts, leader,
                            );
                        } else {
                            sums = fused_loop_64_128(
                                full, empty, a_tile, codes, scales, selector, stage, parity,
                                advance, own_parts, leader,
                            );
                        }
                    }
                    write_tile::<Const<32>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                } else if comptime!(tile_shape.rows_a == 32) {
                    let mut sums = Vector::<f32, Const<16>>::new(0.0f32);
                    if own_parts > 0u32 {
                        sums = fused_loop_32_64(
                            full, empty, a_tile, codes, scales, selector, stage, parity, advance,
                            own_parts, leader,
                        );
                    }
                    write_tile::<Const<16>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                } else if comptime!(tile_shape.rows_a == 16) {
                    let mut sums = Vector::<f32, Const<8>>::new(0.0f32);
                    if own_parts > 0u32 {
                        sums = fused_loop_16_64(
                            full, empty, a_tile, codes, scales, selector, stage, parity, advance,
                            own_parts, leader,
                        );
                    }
                    write_tile::<Const<8>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                } else {
                    let mut sums = Vector::<f32, Const<4>>::new(0.0f32);
                    if own_parts > 0u32 {
                        sums = fused_loop_8_64(
                            full, empty, a_tile, codes, scales, selector, stage, parity, advance,
                            own_parts, leader,
                        );
                    }
                    write_tile::<Const<4>>(
                        sums, row, end, at.column, group, a_amax, b_amax, bias, before, out, amax,
                        n, a_range, b_range, staging_at, strip, consumer, tile_shape, kind,
                    );
                }
                used += steps;
                tile += CUBE_COUNT as u32;
            } else {
                passed += tiles_m * tiles_n;
                group += 1u32;
            }
        }
    }
}

/// Four scales as the main loops read them.
#[cube]
fn four_scales(word: u32) -> Vector<u32, Const<4>> {
    let low = decode_e4m3x2(u16::cast_from(word & 0xffffu32));
    let high = decode_e4m3x2(u16::cast_from(word >> 16u32));
    let mut four = Vector::<u32, Const<4>>::new(0u32);
    four.insert(0usize, low.extract(0usize));
    four.insert(1usize, low.extract(1usize));
    four.insert(2usize, high.extract(0usize));
    four.insert(3usize, high.extract(1usize));
    four
}

/// The word of `a` that unit `decoder` of those that decode takes as its `i`th of a stage; some word of `a` where it lies
/// outside.
#[cube]
fn a_word(
    decoder: u32,
    step: u32,
    #[comptime] i: usize,
    row: u32,
    m: u32,
    k: u32,
    #[comptime] shape: FusedShape,
) -> usize {
    let local = decoder + comptime!((i * DECODERS) as u32);
    let width = comptime!(8 * shape.tile.parts() as u32);
    let line = min(row + local / width, m - 1u32);
    let words = k / 8u32;
    let word = min(step * width + local % width, words - 1u32);
    line as usize * words as usize + word as usize
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
    staging_at: u32,
    strip: u32,
    consumer: u32,
    #[comptime] tile: FusedTile,
    #[comptime] kind: EpilogueKind,
) {
    let lane = UNIT_POS % 32u32;
    let warp = (UNIT_POS % 128u32) / 32u32;
    // With shared strips all consumers write the tile together, else each its own columns.
    let units = comptime!(128 * tile.ways as u32);
    let mut number = 1u32 + consumer;
    let mut unit = UNIT_POS % 128u32;
    if comptime!(tile.ways > 1) {
        number = 1u32;
        unit += consumer * 128u32;
    }
    let number = u32::reinterpret(number);
    let stage_bytes = comptime!(tile.staging() as u32 * 4);
    let own = staging_at + consumer * stage_bytes;
    let read = staging_at + strip * stage_bytes;
    let column0 = column0 + strip * comptime!(STRIP as u32);
    // Columns of 16 bytes, and how many of them a row has.
    let width = comptime!(16 / kind.out.size() as u32);
    let per_row = comptime!(STRIP as u32 / (16 / kind.out.size() as u32));
    let items = comptime!(tile.chunk() as u32 * (STRIP as u32 / (16 / kind.out.size() as u32)));
    let b_factor = factor(b_amax, 0u32, group, b_range, comptime!(kind.b.of_tile()));
    let mut largest = 0u32;
    #[unroll]
    for chunk in 0..comptime!(tile.rows_a / tile.chunk()) {
        let chunk_row = row0 + comptime!((chunk * tile.chunk()) as u32);
        if chunk_row < end {
            // The chunk before has been read.
            meet(number, units.runtime());
            #[unroll]
            for j in 0..comptime!(tile.chunk() / 8) {
                let first = comptime!((chunk * tile.chunk() / 8 + j) * 4);
                let at = own
                    + ((lane % 4u32) * 2u32 + comptime!(j as u32 * 8))
                        * comptime!(STAGING_ROW as u32 * 4)
                    + (warp * 16u32 + lane / 4u32) * 4u32;
                let below = at + comptime!(STAGING_ROW as u32 * 4);
                store_shared_f32(at, sums.extract(first));
                store_shared_f32(below, sums.extract(comptime!(first + 1)));
                store_shared_f32(at + 32u32, sums.extract(comptime!(first + 2)));
                store_shared_f32(below + 32u32, sums.extract(comptime!(first + 3)));
            }
            meet(number, units.runtime());
            #[unroll]
            for round in 0..comptime!(items.div_ceil(units)) {
                let item = unit + comptime!(round * units);
                let line = item / per_row;
                let within = (item % per_row) * width;
                let row = chunk_row + line;
                let column = column0 + within;
                if item < items && row < end && column < n {
                    let line_factor = factor(a_amax, row, group, a_range, kind.a);
                    let from = read + line * comptime!(STAGING_ROW as u32 * 4) + within * 4u32;
                    let mut words = Vector::<u32, Const<4>>::new(0u32);
                    #[unroll]
                    for four in 0..comptime!(width as usize / 4) {
                        let mut values = load_shared_f32_4(from + comptime!(four as u32 * 16));
                        #[unroll]
                        for way in 1..comptime!(tile.ways) {
                            values += load_shared_f32_4(
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
                            if comptime!(kind.amax) {
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
    if comptime!(kind.amax) {
        raise(amax, largest);
    }
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
    // Elements of `b` were 2^-8 times what they stand for.
    finish(
        sum * 256.0f32,
        line_factor * column_factor,
        addend,
        before,
        kind,
    )
}

/// Whether this kernel takes a contraction of `k`, as stored: the copy engine reads rows of whole 16
/// bytes of codes.
pub(super) fn takes(k: usize) -> bool {
    k > 0 && k.is_multiple_of(32)
}

/// Queues the product of `a` and the packed `b`, both `k` long, into `out`: `m` rows of `n`. An `a`
/// that is packed and has more than `DECODED_BY_EACH` rows is decoded to bf16 first.
pub(super) fn launch(
    client: &Client,
    a: &Operand,
    b: &DevicePacked,
    (m, n, k): (usize, usize, usize),
    groups: &GroupArgs,
    epilogue: &EpilogueArgs,
    out: &Handle,
    (tile, band): (FusedTile, usize),
) {
    let rows = match groups.grouping {
        // Each group may end in a tile of its own.
        Grouping::Rows => m.div_ceil(tile.rows_a) + groups.groups,
        Grouping::Dense | Grouping::Depth => m.div_ceil(tile.rows_a),
    };
    let tiles = rows * n.div_ceil(tile.rows_b());
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    // Small tiles leave shared memory for two cubes.
    let resident = if tile.rows_a <= 16 { 2 } else { 1 };
    let cubes = tiles.min(resident * processors.unwrap_or(132) as usize);
    let unread = out;
    let (a_codes, a_scales, dense, left) = match a.elements {
        Elements::Packed(packed)
            if tile.rows_a <= DECODED_BY_EACH && groups.grouping == Grouping::Dense =>
        {
            (&packed.codes, &packed.scales, b.codes.clone(), Left::Packed)
        }
        Elements::Packed(packed) => (
            unread,
            unread,
            workspace::decode(client, packed),
            Left::Bf16,
        ),
        Elements::Bf16(matrix) => (unread, unread, matrix.handle.clone(), Left::Bf16),
    };
    let shape = FusedShape {
        tile,
        left,
        whole: k.is_multiple_of(256),
    };
    // A packed `a` is not read through its map, which may then be of any memory.
    let a_rows = match left {
        Left::Packed => 1,
        Left::Bf16 => m,
    };
    let a_width = match left {
        Left::Packed => 16,
        Left::Bf16 => k,
    };
    // SAFETY: the caller checked that the memory holds `a_rows` x `a_width` elements.
    let a_tensor =
        unsafe { TensorArg::from_raw_parts(dense, [a_width, 1].into(), [a_rows, a_width].into()) };
    let a_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_a, PART].into(),
        },
        a_tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256);
    // SAFETY: as above, in words of eight codes.
    let b_tensor = unsafe {
        TensorArg::from_raw_parts(
            b.codes.clone(),
            [k / 8, 1].into(),
            [b.outer(), k / 8].into(),
        )
    };
    let b_map = TensorMapArg::new(
        TiledArgs {
            tile_size: [tile.rows_b(), tile.parts() * PART / 8].into(),
        },
        b_tensor,
        u32::elem_type_native(),
    )
    .with_swizzle(match tile.parts() {
        2 => TensorMapSwizzle::B64,
        _ => TensorMapSwizzle::B32,
    })
    .with_prefetch(TensorMapPrefetch::B256);
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked that the memory holds what the kernel reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let bytes = m * n * epilogue.kind.out.size();
    let scales = b.outer() * k / 16;
    // SAFETY: the kernel masks what it writes by rows and columns, and clamps what it reads.
    unsafe {
        fused_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(tile.units()),
            address_type((m * n).max(m * k)),
            a_map,
            b_map,
            memory(a_codes, m * k / 8),
            memory(a_scales, m * k / 16),
            memory(&b.scales, scales / 16),
            memory(&b.scales, scales / 2),
            memory(&epilogue.a_amax, m),
            memory(&epilogue.b_amax, b.outer()),
            memory(&epilogue.bias, b.outer()),
            memory(&groups.offsets, groups.groups + 1),
            memory(out, bytes / 4),
            memory(out, bytes / 16),
            memory(&epilogue.amax, 1),
            m as u32,
            n as u32,
            k as u32,
            groups.groups as u32,
            epilogue.ranges[0],
            epilogue.ranges[1],
            band as u32,
            groups.grouping,
            shape,
            epilogue.kind,
        );
    }
}

/// The most rows of a packed `a` that every cube decodes for itself; more are decoded once, by a kernel
/// before.
const DECODED_BY_EACH: usize = 16;
