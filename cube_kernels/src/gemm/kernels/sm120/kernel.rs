//! The block-scaled GEMM of consumer Blackwell (sm_120, sm_121): matrix instructions directly on
//! codes and block scales of NVFP4 (`mma.sync.m16n8k64`, `kind::mxf4nvf4` and `scale_vec::4X`: an
//! E4M3 scale per 16 elements) or MXFP8 (`mma.sync.m16n8k32`, `kind::mxf8f6f4` and `scale_vec::1X`:
//! a UE8M0 scale per 32).
//!
//! A cube of eight warps computes a tile of `out`. A stage holds the codes in [`ROW`] bytes of each
//! row, with their scales. `cp.async` fills a multi-stage pipeline, with zeros for elements outside
//! the operands or outside a group along K. An instruction takes 32 bytes of a row in either
//! format, and its fragments have the same bytes in the same registers. The four 16-byte chunks of
//! a row are swizzled so that the same chunk of eight rows, which `ldmatrix` reads at a time, is in
//! different banks. The sums of a warp have the layout of `wgmma`'s, so the epilogue is that of
//! [`sm90_bf16`](crate::gemm::kernels::sm90::bf16).
//!
//! This kernel has never run with the instruction, because no such GPU was available. Its machine
//! code was inspected, and everything but the instruction runs on other GPUs with
//! [`Multiply::Software`].

use std::fmt;

use super::stage::{
    Pieces, ROW, STAGES, STEP, TileRows, UNITS, copy_stage, stage_offset, swizzled,
};
use cubecl::{cmma, e2m1x2, e4m3, prelude::*, server::Handle};

use super::tile::{Multiply, SM120_TILE_N, Sm120Tile};
use crate::{
    Nvfp4Error,
    capabilities::GemmBackend,
    cube::{
        codec::{decode_e2m1, decode_e4m3, decode_e4m3_element},
        mx::decode_ue8m0,
        ptx::{
            BlockScaled, cp_async_commit_group, cp_async_wait_group, cvta_to_shared, ld_shared,
            ld_shared_v2, ldmatrix_x4, mma_m16n8k32_mxfp8,
        },
    },
    gemm::{
        arguments::{
            GroupedProblem, GroupedProblemLaunch, PackedMatrix, PackedMatrixLaunch,
            ProblemShapeLaunch,
        },
        epilogue::{Epilogue, STAGING, WarpTile, write_warp_tile},
        materialize::Materialized,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, UNALIGNED, sms},
        scheduler::{GroupedDim, place},
    },
    memory::address_type,
    moe::groups::extent,
};

/// Warps along the rows of `a`, and of `b`.
const WARPS: (usize, usize) = (4, 2);
/// Groups of eight rows of `b` per warp: columns of its sums.
const COLUMNS: usize = 8;
/// Tiles along the rows of `a` that run at the same time, for L2 reuse. Not measured.
const BAND: u32 = 8;
/// Sums per lane in 16 rows of `a`.
const SUMS: usize = 4 * COLUMNS;
/// Maximum shared memory of a cube on sm_120: 99 KiB.
const MOST_SHARED: usize = 99 << 10;

const _: () = {
    let widest = Sm120Tile {
        format: BlockScaled::Nvfp4,
        strips: 2,
        multiply: Multiply::Instruction,
    };
    assert!(STAGES * widest.stage() + UNITS / 32 * STAGING <= MOST_SHARED);
    assert!(widest.tile_m() == 2 * 16 * WARPS.0 && SM120_TILE_N == WARPS.1 * COLUMNS * 8);
};

/// Multiplies one stage and adds the result to the sums of a warp.
#[cube]
fn multiply_stage(
    stage: u32,
    warp_row: u32,
    warp_column: u32,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] shape: Sm120Tile,
) {
    let lane = UNIT_POS % 32u32;
    // For `ldmatrix` a lane addresses one row of one of four matrices.
    let (matrix, line) = (lane / 8u32, lane % 8u32);
    let strips = comptime!(shape.strips);
    let mut a_scales = Array::<Vector<u32, Const<2>>>::new(comptime!(shape.strips));
    #[unroll]
    for i in 0..strips {
        let row = warp_row + comptime!(16 * i as u32) + lane / 4u32 + (lane % 2u32) * 8u32;
        a_scales[i] = row_scales(stage + comptime!(shape.a_scales()), row, shape);
    }
    let mut b_scales = Array::<Vector<u32, Const<2>>>::new(COLUMNS);
    #[unroll]
    for j in 0..COLUMNS {
        let row = warp_column + comptime!(8 * j as u32) + lane / 4u32;
        b_scales[j] = row_scales(stage + comptime!(shape.b_scales()), row, shape);
    }
    #[unroll]
    for half in 0..comptime!(ROW / STEP) {
        let mut a = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.strips));
        #[unroll]
        for i in 0..strips {
            // Upper rows, lower rows, then both at the next 16 bytes.
            let row = warp_row + comptime!(16 * i as u32) + (matrix % 2u32) * 8u32 + line;
            let chunk = comptime!(2 * half as u32) + matrix / 2u32;
            a[i] = ldmatrix_x4(stage + row * comptime!(ROW as u32) + swizzled(row, chunk));
        }
        let mut b = Array::<Vector<u32, Const<4>>>::new(comptime!(COLUMNS / 2));
        #[unroll]
        for j in 0..comptime!(COLUMNS / 2) {
            // Eight rows, the same rows at the next 16 bytes, then eight more rows.
            let row = warp_column + comptime!(16 * j as u32) + (matrix / 2u32) * 8u32 + line;
            let chunk = comptime!(2 * half as u32) + matrix % 2u32;
            let part = stage + comptime!(shape.b_codes());
            b[j] = ldmatrix_x4(part + row * comptime!(ROW as u32) + swizzled(row, chunk));
        }
        #[unroll]
        for j in 0..COLUMNS {
            let words = b[comptime!(j / 2)];
            let mut pair = Vector::<u32, Const<2>>::empty();
            pair.insert(0usize, words.extract(comptime!(2 * (j % 2))));
            pair.insert(1usize, words.extract(comptime!(2 * (j % 2) + 1)));
            #[unroll]
            for i in 0..strips {
                let at = comptime!(i * COLUMNS + j);
                let scales = ScalePair {
                    a: a_scales[i].extract(half),
                    b: b_scales[j].extract(half),
                };
                let step = comptime!(half as u32);
                sums[at] = multiply(sums[at], a[i], pair, scales, step, shape);
            }
        }
    }
}

/// Returns the scales of row `row` in a stage, one word per instruction: in MXFP8 the same word for
/// both, of which an instruction uses one byte.
#[cube]
fn row_scales(scales: u32, row: u32, #[comptime] shape: Sm120Tile) -> Vector<u32, Const<2>> {
    let address = scales + row * comptime!(shape.scale_pitch() as u32);
    if comptime!(shape.format == BlockScaled::Nvfp4) {
        ld_shared_v2(address)
    } else {
        Vector::<u32, Const<2>>::new(ld_shared(address))
    }
}

/// Scales of an instruction's operands that a lane holds.
#[derive(CubeType, Clone, Copy)]
struct ScalePair {
    a: u32,
    b: u32,
}

/// Returns `c + a · b` for 16 rows of `a`, 8 of `b` and the columns of instruction `step` of a
/// stage, with every block multiplied by its scale.
///
/// PTX ISA 8.7 and later, sections "Matrix Fragments for mma.m16n8k64" (E2M1), "for mma.m16n8k32"
/// (E4M3) and "Block Scaling for mma.sync". Lane `4 g + t` holds, the first code of a word in its
/// lowest bits:
/// - `a`: bytes `4 t..` of rows `g` and `g + 8`, then the same rows 16 bytes on;
/// - `b`: bytes `4 t..` of row `g`, then 16 bytes on;
/// - `c`: columns `2 t`, `2 t + 1` of row `g`, then of row `g + 8`;
/// - `scales.a`: the four NVFP4 scales of row `g` if `t` is 0, of row `g + 8` if it is 1;
/// - `scales.b`: those of row `g` if `t` is 0. Scales of other lanes are not read. MXFP8 scales are
///   byte `step`.
#[cube]
fn multiply(
    c: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    scales: ScalePair,
    #[comptime] step: u32,
    #[comptime] shape: Sm120Tile,
) -> Vector<f32, Const<4>> {
    if comptime!(shape.multiply == Multiply::Software) {
        multiply_in_software(c, a, b, scales, step, shape.format)
    } else if comptime!(shape.format == BlockScaled::Nvfp4) {
        multiply_nvfp4(c, a, b, scales)
    } else {
        mma_m16n8k32_mxfp8(c, a, b, scales.a, scales.b, step)
    }
}

/// Multiplies with the NVFP4 instruction.
#[cube]
fn multiply_nvfp4(
    c: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    scales: ScalePair,
) -> Vector<f32, Const<4>> {
    let definition = cmma::MmaDefinition::<e2m1x2, e2m1x2, f32>::new_scaled::<e4m3>(
        16usize, 8usize, 64usize, 4usize,
    );
    let mut left = Array::<Vector<e2m1x2, Const<4>>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        left[i] = Vector::<e2m1x2, Const<4>>::reinterpret(a.extract(i));
    }
    let mut right = Array::<Vector<e2m1x2, Const<4>>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        right[i] = Vector::<e2m1x2, Const<4>>::reinterpret(b.extract(i));
    }
    let mut sums = Array::<Vector<f32, Const<2>>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        pair.insert(0usize, c.extract(comptime!(2 * i)));
        pair.insert(1usize, c.extract(comptime!(2 * i + 1)));
        sums[i] = pair;
    }
    let sums = definition.execute_scaled(
        &left,
        &right,
        &sums,
        Vector::<e4m3, Const<4>>::reinterpret(scales.a),
        Vector::<e4m3, Const<4>>::reinterpret(scales.b),
    );
    let mut out = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for i in 0..2usize {
        out.insert(comptime!(2 * i), sums[i].extract(0usize));
        out.insert(comptime!(2 * i + 1), sums[i].extract(1usize));
    }
    out
}

/// Returns element `i` of a word of codes times its scale, byte `scale` of `scales`. Exact: an E2M1
/// code has two significant bits and an E4M3 scale four, and a UE8M0 scale is a power of two.
#[cube]
fn element(word: u32, i: u32, scales: u32, scale: u32, #[comptime] format: BlockScaled) -> f32 {
    let byte = (scales >> (8u32 * scale)) & 0xFFu32;
    if comptime!(format == BlockScaled::Nvfp4) {
        decode_e2m1(word >> (4u32 * i)) * decode_e4m3(byte)
    } else {
        decode_e4m3_element((word >> (8u32 * i)) & 0xFFu32) * decode_ue8m0(byte)
    }
}

/// Emulates the instruction. Columns ascend, and every element and product is exact.
#[cube]
fn multiply_in_software(
    c: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    scales: ScalePair,
    #[comptime] step: u32,
    #[comptime] format: BlockScaled,
) -> Vector<f32, Const<4>> {
    let codes = comptime!(32 / format.format().code_bits() as u32);
    let group = UNIT_POS_PLANE / 4u32;
    let within = UNIT_POS_PLANE % 4u32;
    // First lanes that hold the rows of `b` whose sums this lane has.
    let even = within * 8u32;
    let odd = even + 4u32;
    let a_upper = plane_shuffle(scales.a, 4u32 * group);
    let a_lower = plane_shuffle(scales.a, 4u32 * group + 1u32);
    let b_even = plane_shuffle(scales.b, even);
    let b_odd = plane_shuffle(scales.b, odd);
    let mut c0 = c.extract(0usize);
    let mut c1 = c.extract(1usize);
    let mut c2 = c.extract(2usize);
    let mut c3 = c.extract(3usize);
    // One word at a time.
    for part in 0..8u32 {
        let lane = part % 4u32;
        let first = part < 4u32;
        let upper = plane_shuffle(
            select(first, a.extract(0usize), a.extract(2usize)),
            4u32 * group + lane,
        );
        let lower = plane_shuffle(
            select(first, a.extract(1usize), a.extract(3usize)),
            4u32 * group + lane,
        );
        let words = select(first, b.extract(0usize), b.extract(1usize));
        let left = plane_shuffle(words, even + lane);
        let right = plane_shuffle(words, odd + lane);
        let scale = if comptime!(format == BlockScaled::Nvfp4) {
            part / 2u32
        } else {
            step.runtime()
        };
        for i in 0..codes {
            let up = element(upper, i, a_upper, scale, format);
            let low = element(lower, i, a_lower, scale, format);
            let x = element(left, i, b_even, scale, format);
            let y = element(right, i, b_odd, scale, format);
            c0 += up * x;
            c1 += up * y;
            c2 += low * x;
            c3 += low * y;
        }
    }
    let mut out = Vector::<f32, Const<4>>::new(c0);
    out.insert(1usize, c1);
    out.insert(2usize, c2);
    out.insert(3usize, c3);
    out
}

/// Comptime configuration of `sm120_block_scaled_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm120Plan {
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// Tile.
    pub tile: Sm120Tile,
    /// Bytes of a row copied at a time.
    pub pieces: Pieces,
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for the rows or the
/// columns of each group.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid does not
/// depend on device memory. The bias has a row per group. `out` is in units of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm120_block_scaled_kernel(
    a: PackedMatrix<u32>,
    b: PackedMatrix<u32>,
    problem: GroupedProblem,
    epilogue: Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Sm120Plan,
) {
    let shape = comptime!(plan.tile);
    let tile_m = comptime!(plan.tile.tile_m() as u32);
    let tile_n = comptime!(SM120_TILE_N as u32);
    let strips = comptime!(plan.tile.strips);
    let ring: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(STAGES * shape.stage() / 16), 128usize);
    let staging: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(UNITS / 32 * STAGING / 16), 128usize);
    let ring_at = cvta_to_shared::<Vector<u32, Const<4>>>(ring.as_slice().as_ptr());
    let warp = UNIT_POS / 32u32;
    let staging_at = cvta_to_shared::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr())
        + warp * comptime!(STAGING as u32);
    // First row of this warp in the tile.
    let warp_row = (warp / comptime!(WARPS.1 as u32)) * comptime!(16 * shape.strips as u32);
    let warp_column = (warp % comptime!(WARPS.1 as u32)) * comptime!(8 * COLUMNS as u32);
    let n = problem.shape.n;
    let tiles_n = n.div_ceil(tile_n);

    let mut tile = CUBE_POS as u32;
    // Current group, and number of tiles before it.
    let mut group = 0u32;
    let mut passed = 0u32;
    while group < problem.shape.groups {
        // Existing rows of the group, rows of its output, and its columns.
        let mut first = 0u32;
        let mut end = problem.shape.m;
        let mut output = 0u32;
        let mut b_first = 0u32;
        let mut k_first = 0u32;
        let mut k_end = problem.shape.k;
        if comptime!(plan.grouped == GroupedDim::M) {
            let rows = extent(&problem.offsets, group, problem.shape.m);
            first = rows.start;
            end = rows.end;
            b_first = group * n;
        }
        if comptime!(plan.grouped == GroupedDim::K) {
            let columns = extent(&problem.offsets, group, problem.shape.k);
            k_first = columns.start;
            k_end = columns.end;
            output = group * problem.shape.m;
        }
        let tiles_m = (end - first).div_ceil(tile_m);
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                problem.band,
                tile_m,
                tile_n,
            );
            let rows = TileRows {
                a: first + at.row,
                a_end: end,
                b: b_first + at.column,
                b_end: b_first + n,
                from: bytes_of(k_first, shape.format),
                end: bytes_of(k_end, shape.format),
                pitch: bytes_of(problem.shape.k, shape.format),
            };
            let sums = multiply_tile(&a, &b, ring_at, rows, warp_row, warp_column, plan);
            #[unroll]
            for i in 0..strips {
                let mut strip = Vector::<f32, Const<SUMS>>::new(0.0f32);
                #[unroll]
                for j in 0..COLUMNS {
                    #[unroll]
                    for e in 0..4usize {
                        let sum = sums[comptime!(i * COLUMNS + j)];
                        strip.insert(comptime!(4 * j + e), sum.extract(e));
                    }
                }
                let own = WarpTile {
                    row: output + rows.a + warp_row + comptime!(16 * i as u32),
                    end: output + end,
                    column: at.column + warp_column,
                    n,
                    group,
                    staging: staging_at,
                };
                write_warp_tile::<Const<SUMS>>(strip, own, &epilogue, out, comptime!(8 * COLUMNS));
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            group += 1u32;
        }
    }
}

/// Returns the bytes of codes of `columns` columns.
#[cube]
fn bytes_of(columns: u32, #[comptime] format: BlockScaled) -> u32 {
    if comptime!(format == BlockScaled::Nvfp4) {
        columns / 2u32
    } else {
        columns
    }
}

/// The mainloop: computes the sums of one warp of a tile, while later stages are copied.
#[cube]
fn multiply_tile(
    a: &PackedMatrix<u32>,
    b: &PackedMatrix<u32>,
    ring: u32,
    rows: TileRows,
    warp_row: u32,
    warp_column: u32,
    #[comptime] plan: Sm120Plan,
) -> Array<Vector<f32, Const<4>>> {
    let shape = comptime!(plan.tile);
    let pieces = comptime!(plan.pieces);
    let steps = rows.stages();
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(plan.tile.strips * COLUMNS));
    #[unroll]
    for i in 0..comptime!(shape.strips * COLUMNS) {
        sums[i] = Vector::new(0.0f32);
    }
    // The previous tile may still be read.
    sync_cube();
    for stage in 0..comptime!(STAGES as u32 - 1) {
        if stage < steps {
            copy_stage(a, b, ring, stage, rows, shape, pieces);
        }
        cp_async_commit_group();
    }
    for step in 0..steps {
        // The copies of this step have arrived, and the previous step has been read: its stage
        // takes the next copies.
        cp_async_wait_group(comptime!(STAGES as u32 - 2));
        sync_cube();
        let ahead = step + comptime!(STAGES as u32 - 1);
        if ahead < steps {
            copy_stage(a, b, ring, ahead, rows, shape, pieces);
        }
        cp_async_commit_group();
        let stage = ring + stage_offset(step, shape);
        multiply_stage(stage, warp_row, warp_column, &mut sums, shape);
    }
    sums
}

/// The block-scaled GEMM of sm_120.
pub(crate) struct Sm120BlockScaled;

/// Checks that the sm_120 kernels support the sizes and memory: they write 16 bytes at a time.
///
/// # Errors
/// Returns the reason if they do not.
pub(crate) fn check_sm120(device: &Device, problem: &Problem) -> Result<(), Refusal> {
    let GemmShape { n, k, .. } = problem.shape;
    if device.capabilities.gemm != GemmBackend::Sm120BlockScaled {
        return Err(Refusal::Device(
            "the device is not of compute capability 12.0 or 12.1",
        ));
    }
    if !n.is_multiple_of(8) || !k.is_multiple_of(8) {
        return Err(Refusal::Operands("n or k is no multiple of 8"));
    }
    if !problem.aligned {
        return Err(Refusal::Operands(UNALIGNED));
    }
    Ok(())
}

impl GemmKernel for Sm120BlockScaled {
    fn name(&self) -> &'static str {
        "sm120_block_scaled"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm120BlockScaled
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        check_sm120(device, problem)?;
        match problem.block_scaled() {
            Some(_) => Ok(()),
            None => Err(Refusal::Operands(
                "block-scaled instructions take packed operands of one format",
            )),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        let GemmShape { m, n, .. } = problem.shape;
        let outputs = match problem.grouped {
            GroupedDim::K => problem.groups,
            GroupedDim::None | GroupedDim::M => 1,
        };
        let format = problem.block_scaled().unwrap_or(BlockScaled::Nvfp4);
        let shape = (m, n, outputs);
        let tile = Sm120Tile::of(format, device.sms, shape, Multiply::Instruction);
        BlockScaledMma(tile).into()
    }

    fn takes_mxfp8(&self) -> bool {
        true
    }

    fn multiplies_codes_on(&self, compute_capability: Option<u32>) -> bool {
        compute_capability >= Some(120)
    }
}

/// Plan: block-scaled `mma.sync` on codes and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockScaledMma(pub Sm120Tile);

impl fmt::Display for BlockScaledMma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, n) = (self.0.tile_m(), SM120_TILE_N);
        let by = match self.0.multiply {
            Multiply::Instruction => "block-scaled mma.sync",
            Multiply::Software => "block-scaled mma.sync in software",
        };
        let format = self.0.format.suffix();
        write!(f, "{by}{format}, {m} x {n} tiles")
    }
}

impl GemmPlan for BlockScaledMma {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm120BlockScaled
    }

    fn reads_codes_directly(&self) -> bool {
        true
    }

    fn emulated_backend(&self) -> Option<GemmBackend> {
        (self.0.multiply == Multiply::Software).then_some(GemmBackend::Sm120BlockScaled)
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        if launch.block_scaled() != Some(self.0.format) {
            return Err(launch.misfit(self));
        }
        queue(launch, self.0);
        Ok(())
    }
}

/// Queues the GEMM: `m` rows of `n`, dense or with groups along M, or as many for each group along
/// K.
fn queue(launch: &Launch, shape: Sm120Tile) {
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
    let out = &output.matrix().handle;
    let rows = match groups.grouping {
        // Each group may end in a partial tile.
        GroupedDim::M => m.div_ceil(shape.tile_m()) + groups.groups,
        GroupedDim::None | GroupedDim::K => m.div_ceil(shape.tile_m()) * groups.groups,
    };
    let tiles = rows * n.div_ceil(SM120_TILE_N);
    // Shared memory holds one cube per SM.
    let cubes = tiles.min(sms(client));
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked the operands against their shapes, and that the memory holds
        // what `epilogue.kind` reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    // Rows of the output, and of the factors of `b`.
    let (outputs, b_factors) = match groups.grouping {
        GroupedDim::K => (groups.groups * m, groups.groups * n),
        GroupedDim::None | GroupedDim::M => (m, b.rows),
    };
    let bytes = outputs * n * epilogue.kind.out.size();
    let format = shape.format.format();
    let packed = |matrix: &Materialized, rows: usize| {
        PackedMatrixLaunch::new(
            memory(&matrix.elements, rows * k * format.code_bits() / 32),
            memory(&matrix.scales, rows * k / format.block()),
        )
    };
    // Common divisor of the row length and of the starts of groups along K.
    let unit = match groups.grouping {
        GroupedDim::K => 1 << (k | launch.k_alignment).trailing_zeros(),
        GroupedDim::None | GroupedDim::M => k,
    };
    // SAFETY: the kernel masks what it reads and writes by rows and columns.
    unsafe {
        sm120_block_scaled_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type((m.max(b.rows) * k).max(outputs * n)),
            packed(a, m),
            packed(b, b.rows),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                BAND,
            ),
            epilogue.launch([outputs, b_factors], groups.groups, (out, bytes / 4), 1.0),
            memory(out, bytes / 16),
            Sm120Plan {
                grouped: groups.grouping,
                tile: shape,
                pieces: Pieces::of(shape.format, unit),
            },
        );
    }
}
