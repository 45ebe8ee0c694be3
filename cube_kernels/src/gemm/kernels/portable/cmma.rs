//! Dense and grouped GEMMs on any GPU with 16x16x16 bf16 matrix instructions: tiles of both
//! operands are decoded, exactly, into shared memory and multiplied with `f32` accumulation. Device
//! memory never holds a dequantized copy of an operand.
//!
//! K ascends in steps of 16 from the first column of a group, independent of the tile. A grouped
//! GEMM is therefore bit-identical to the dense GEMMs of its groups.

use std::fmt;

use cubecl::{
    cmma::{self, MatrixIdent, MatrixLayout},
    prelude::*,
    server::Handle,
};
use half::bf16;

use crate::{
    BLOCK, Nvfp4Error,
    capabilities::GemmBackend,
    cube::codec::{decode_e2m1, decode_e4m3, load, magnitude_bits, store},
    gemm::{
        arguments::{
            GroupedProblem, GroupedProblemLaunch, MixedMatrix, MixedMatrixLaunch, ProblemShape,
            ProblemShapeLaunch,
        },
        epilogue::{Addends, Epilogue, apply_on},
        materialize::Materialized,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, sms},
        scheduler::{GroupedDim, place},
        tiles::{CMMA_TILE_N, CmmaTile},
    },
    memory::address_type,
    moe::groups::span,
};

/// Elements along K that are decoded at a time.
const DEPTH: usize = 32;
/// Row pitch of a tile in shared memory, in elements: padded by 16 bytes against bank conflicts.
const STRIDE: usize = DEPTH + 8;
/// Units per cube: eight planes of 32.
pub const UNITS: usize = 256;
/// Tiles along the rows of `a` that run at the same time, for L2 reuse.
const BAND: u32 = 8;
/// Cubes per SM in the grid of a grouped GEMM, whose number of tiles the host does not know.
const CUBES_PER_SM: usize = 4;

/// Stored rows of one operand, and blocks along K, that a tile loads at a time.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct TilePart {
    row: usize,
    row_end: usize,
    block: usize,
    block_end: usize,
    /// Columns of the operand.
    k: usize,
}

/// Dequantizes `tile_rows` stored rows of one operand, two blocks each, into shared memory. Each
/// unit takes a block at a time. Elements outside the group become zero.
#[cube]
fn dequantize_tile<W: Size>(
    matrix: &MixedMatrix<Vector<u32, Const<2>>, Vector<u16, W>>,
    tile: &mut [bf16],
    part: TilePart,
    #[comptime] tile_rows: usize,
    #[comptime] packed: bool,
) {
    #[unroll]
    for round in 0..comptime!((2 * tile_rows).div_ceil(UNITS)) {
        let item = UNIT_POS as usize + comptime!(round * UNITS);
        if item < comptime!(2 * tile_rows) {
            let row = part.row + item / 2usize;
            let block = part.block + item % 2usize;
            let base = (item / 2usize) * comptime!(STRIDE) + (item % 2usize) * 16usize;
            let inside = row < part.row_end && block < part.block_end;
            if comptime!(packed) {
                let mut words = Vector::<u32, Const<2>>::new(0u32);
                let mut scale = 0.0f32;
                if inside {
                    let index = row * (part.k / 16usize) + block;
                    words = matrix.codes[index];
                    scale = decode_e4m3(u32::cast_from(matrix.scales[index]));
                }
                #[unroll]
                for i in 0..16usize {
                    let code = words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
                    // Exact: code and scale have at most two and four significant bits.
                    tile[base + i] = bf16::cast_from(decode_e2m1(code) * scale);
                }
            } else {
                let size = W::value().comptime();
                #[unroll]
                for i in 0..comptime!(16 / size) {
                    let column = block * 16usize + comptime!(i * size);
                    let mut words = Vector::<u16, W>::new(0u16);
                    if inside && column < part.k {
                        words = matrix.dense[(row * part.k + column) / size];
                    }
                    #[unroll]
                    for j in 0..size {
                        tile[base + comptime!(i * size + j)] = bf16::reinterpret(words.extract(j));
                    }
                }
            }
        }
    }
}

/// Dequantizes `DEPTH` stored rows of a packed MN-major operand, over the columns of a tile, into
/// shared memory, one block per unit. It writes the same layout as [`dequantize_tile`], with rows
/// along K. Elements out of bounds become zero. `part` counts stored rows, and the blocks along
/// them.
#[cube]
fn dequantize_mn_major_tile<W: Size>(
    matrix: &MixedMatrix<Vector<u32, Const<2>>, Vector<u16, W>>,
    tile: &mut [bf16],
    part: TilePart,
) {
    #[unroll]
    for round in 0..comptime!((DEPTH * CMMA_TILE_N / 16).div_ceil(UNITS)) {
        let item = UNIT_POS as usize + comptime!(round * UNITS);
        // Neighbouring units have neighbouring rows, so that they write to neighbouring addresses.
        let (row, block) = (item % DEPTH, item / DEPTH);
        let base = block * comptime!(16 * STRIDE) + row;
        let (row, block) = (part.row + row, part.block + block);
        let mut words = Vector::<u32, Const<2>>::new(0u32);
        let mut scale = 0.0f32;
        if row < part.row_end && block < part.block_end {
            let index = row * part.block_end + block;
            words = matrix.codes[index];
            scale = decode_e4m3(u32::cast_from(matrix.scales[index]));
        }
        #[unroll]
        for i in 0..16usize {
            let code = words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
            // Exact: code and scale have at most two and four significant bits.
            tile[base + comptime!(i * STRIDE)] = bf16::cast_from(decode_e2m1(code) * scale);
        }
    }
}

/// Comptime configuration of `cmma_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CmmaPlan {
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// Tile.
    pub tile: CmmaTile,
    /// True if `a` and `b` are packed, respectively.
    pub packed: [bool; 2],
    /// True if the stored rows of a packed `b` are K.
    pub b_mn_major: bool,
    /// True if the compiler may contract additions with multiplications, which must then be
    /// separate instructions; see `gemm::epilogue::apply_on`.
    pub ordered_add: bool,
}

/// Position of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct TilePlace {
    group: usize,
    /// First row of `a`, and end row of the group (exclusive).
    row: usize,
    end: usize,
    /// First column of the output.
    column: usize,
    /// Rows of `b` before those of the group.
    b_first: usize,
    /// Offset of this plane within the tile.
    plane_row: usize,
    plane_column: usize,
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid does not
/// depend on device memory. The bias has a row per group. For each operand the kernel reads either
/// codes and scales or `dense`, in vectors that divide its rows. The epilogue reads the previous
/// contents of the output from `out`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn cmma_kernel<F: Numeric, W: Size>(
    a: MixedMatrix<Vector<u32, Const<2>>, Vector<u16, W>>,
    b: MixedMatrix<Vector<u32, Const<2>>, Vector<u16, W>>,
    problem: GroupedProblem,
    epilogue: Epilogue,
    out: &mut [F],
    #[comptime] plan: CmmaPlan,
    #[define(F)] _storage: ElemType,
) {
    let shape = comptime!(plan.tile);
    let tile_m = comptime!(plan.tile.rows());
    let mut a_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(shape.rows() * STRIDE), 128usize);
    let mut b_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(CMMA_TILE_N * STRIDE), 128usize);
    let mut staging: Shared<[f32]> = Shared::new_aligned_slice(comptime!(8usize * 256), 128usize);
    let m = problem.shape.m as usize;
    let n = problem.shape.n as usize;
    let k = problem.shape.k as usize;
    let groups = problem.shape.groups as usize;
    let plane = UNIT_POS as usize / 32usize;
    let plane_row = (plane / comptime!(shape.planes_n())) * comptime!(16 * shape.strips());
    let plane_column = (plane % comptime!(shape.planes_n())) * comptime!(16 * shape.columns());
    let tiles_n = n.div_ceil(CMMA_TILE_N) as u32;

    let mut tile = CUBE_POS as u32;
    // Current group, and number of tiles before it.
    let mut group = 0usize;
    let mut passed = 0u32;
    while group < groups {
        // Rows of `a` and blocks along K that belong to the group.
        let mut first = 0usize;
        let mut end = m;
        let mut block = 0usize;
        let mut block_end = k.div_ceil(16usize);
        if comptime!(plan.grouped == GroupedDim::M) {
            let rows = span(&problem.offsets, group, m);
            first = rows.start;
            end = max(rows.end, rows.start);
        }
        if comptime!(plan.grouped == GroupedDim::K) {
            let columns = span(&problem.offsets, group, k);
            block = columns.start / 16usize;
            block_end = columns.end.div_ceil(16usize);
        }
        let tiles_m = (end - first).div_ceil(tile_m) as u32;
        if tile - passed < tiles_m * tiles_n {
            let at = place(
                tile - passed,
                tiles_m,
                tiles_n,
                BAND,
                comptime!(tile_m as u32),
                comptime!(CMMA_TILE_N as u32),
            );
            let mut b_first = 0usize;
            if comptime!(plan.grouped == GroupedDim::M) {
                b_first = group * n;
            }
            let at = TilePlace {
                group,
                row: first + at.row as usize,
                end,
                column: at.column as usize,
                b_first,
                plane_row,
                plane_column,
            };
            let mut accumulators = Sequence::<cmma::Matrix<f32>>::new();
            #[unroll]
            for _ in 0..comptime!(shape.strips() * shape.columns()) {
                accumulators.push(cmma::Matrix::<f32>::from_value(
                    MatrixIdent::Accumulator,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::Undefined,
                    0.0f32,
                ));
            }
            while block < block_end {
                let a_part = TilePart {
                    row: at.row,
                    row_end: at.end,
                    block,
                    block_end,
                    k,
                };
                dequantize_tile::<W>(&a, &mut a_shared, a_part, tile_m, comptime!(plan.packed[0]));
                if comptime!(plan.b_mn_major) {
                    let mut row = block * 16usize;
                    let mut row_end = k;
                    if comptime!(plan.grouped == GroupedDim::M) {
                        row += group * k;
                        row_end += group * k;
                    }
                    let b_part = TilePart {
                        row,
                        row_end,
                        block: at.column / 16usize,
                        block_end: n.div_ceil(16usize),
                        k,
                    };
                    dequantize_mn_major_tile::<W>(&b, &mut b_shared, b_part);
                } else {
                    let b_part = TilePart {
                        row: at.b_first + at.column,
                        row_end: at.b_first + n,
                        block,
                        block_end,
                        k,
                    };
                    let packed = comptime!(plan.packed[1]);
                    dequantize_tile::<W>(&b, &mut b_shared, b_part, CMMA_TILE_N, packed);
                }
                sync_cube();
                multiply_tile(
                    &a_shared,
                    &b_shared,
                    &accumulators,
                    plane_row,
                    plane_column,
                    shape,
                );
                sync_cube();
                block += comptime!(DEPTH / 16);
            }
            write_tile::<F>(
                &accumulators,
                &mut staging,
                at,
                &problem.shape,
                &epilogue,
                out,
                plan,
            );
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            group += 1usize;
        }
    }
}

/// Multiplies `DEPTH` columns of a tile and adds them to the accumulators of a plane.
#[cube]
fn multiply_tile(
    a: &[bf16],
    b: &[bf16],
    accumulators: &Sequence<cmma::Matrix<f32>>,
    plane_row: usize,
    plane_column: usize,
    #[comptime] shape: CmmaTile,
) {
    #[unroll]
    for step in 0..comptime!(DEPTH / 16) {
        let mut columns = Sequence::<cmma::Matrix<bf16>>::new();
        #[unroll]
        for j in 0..comptime!(shape.columns()) {
            let start = (plane_column + j * 16usize) * comptime!(STRIDE) + comptime!(step * 16);
            columns.push(cmma::Matrix::<bf16>::from_slice(
                MatrixIdent::B,
                16usize,
                16usize,
                16usize,
                MatrixLayout::ColMajor,
                &b[start..comptime!(CMMA_TILE_N * STRIDE)],
                comptime!(STRIDE as u32),
            ));
        }
        #[unroll]
        for i in 0..comptime!(shape.strips()) {
            let start = (plane_row + i * 16usize) * comptime!(STRIDE) + comptime!(step * 16);
            let rows = cmma::Matrix::<bf16>::from_slice(
                MatrixIdent::A,
                16usize,
                16usize,
                16usize,
                MatrixLayout::RowMajor,
                &a[start..comptime!(shape.rows() * STRIDE)],
                comptime!(STRIDE as u32),
            );
            #[unroll]
            for j in 0..comptime!(shape.columns()) {
                let c = accumulators.index(comptime!(i * shape.columns() + j));
                cmma::execute(&rows, &columns[j], c, c);
            }
        }
    }
}

/// Applies the epilogue to the accumulators of a plane, 16 x 16 at a time, and writes them.
#[cube]
fn write_tile<F: Numeric>(
    accumulators: &Sequence<cmma::Matrix<f32>>,
    staging: &mut [f32],
    at: TilePlace,
    shape: &ProblemShape,
    epilogue: &Epilogue,
    out: &mut [F],
    #[comptime] plan: CmmaPlan,
) {
    let kind = comptime!(epilogue.kind);
    let m = shape.m as usize;
    let n = shape.n as usize;
    let lane = UNIT_POS as usize % 32usize;
    let stage = (UNIT_POS as usize / 32usize) * 256usize;
    let a_tile_factor = epilogue.a_tile_factor(at.group as u32);
    let b_tile_factor = epilogue.b_tile_factor(at.group as u32);
    let mut largest = 0u32;
    #[unroll]
    for i in 0..comptime!(plan.tile.strips()) {
        #[unroll]
        for j in 0..comptime!(plan.tile.columns()) {
            let c = accumulators.index(comptime!(i * plan.tile.columns() + j));
            cmma::store(
                &mut staging[stage..stage + 256usize],
                c,
                16,
                MatrixLayout::RowMajor,
            );
            sync_cube();
            #[unroll]
            for e in 0..8usize {
                let element = lane + comptime!(e * 32);
                let row = at.row + at.plane_row + comptime!(i * 16) + element / 16usize;
                let column = at.column + at.plane_column + comptime!(j * 16) + element % 16usize;
                if row < at.end && column < n {
                    // Groups along K have separate factors and outputs.
                    let mut a_own = row;
                    let mut b_own = at.b_first + column;
                    let mut item = row * n + column;
                    if comptime!(plan.grouped == GroupedDim::K) {
                        a_own += at.group * m;
                        b_own += at.group * n;
                        item += at.group * m * n;
                    }
                    let mut c = 0.0f32;
                    if comptime!(kind.accumulate) {
                        c = load::<F>(out[item], kind.out);
                    }
                    let with = Addends {
                        alpha: epilogue.a_row_factor(a_own as u32, a_tile_factor)
                            * epilogue.b_row_factor(b_own as u32, b_tile_factor),
                        bias: epilogue.load_bias(at.group * n + column),
                        c,
                    };
                    let value = apply_on(staging[stage + element], with, plan.ordered_add, kind);
                    let stored = store::<F>(value, kind.out);
                    out[item] = stored;
                    if comptime!(kind.amax.is_some()) {
                        largest = max(largest, magnitude_bits(load::<F>(stored, kind.out)));
                    }
                }
            }
            sync_cube();
        }
    }
    epilogue.atomic_amax(at.group as u32, largest);
}

/// The GEMM of any GPU with matrix instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cmma;

impl GemmKernel for Cmma {
    fn name(&self) -> &'static str {
        "cmma"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Cmma
    }

    fn supports(&self, device: &Device, _problem: &Problem) -> Result<(), Refusal> {
        match device.capabilities.gemm {
            GemmBackend::Scalar => Err(Refusal::Device(
                "the device has no 16x16x16 bf16 matrix instructions in planes of 32",
            )),
            _ => Ok(()),
        }
    }

    fn plan(&self, _device: &Device, _problem: &Problem) -> Candidate {
        Self.into()
    }
}

impl fmt::Display for Cmma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cmma 16x16x16, tiles dequantized in shared memory")
    }
}

impl GemmPlan for Cmma {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Cmma
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        queue(launch);
        Ok(())
    }
}

/// Queues the GEMM: `m` rows (all of them, or those of one group's output) of `n`.
fn queue(launch: &Launch) {
    let Launch {
        client,
        capabilities,
        a,
        b,
        groups,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let result = output.matrix();
    let count = groups.groups;
    let rows = match groups.grouping {
        GroupedDim::M => m.div_ceil(count),
        GroupedDim::None | GroupedDim::K => m,
    };
    let shape = CmmaTile::of(rows);
    let tiles = m.div_ceil(shape.rows());
    let tiles = n.div_ceil(CMMA_TILE_N)
        * match groups.grouping {
            // Each group may end in a partial tile.
            GroupedDim::M => tiles + count,
            GroupedDim::None | GroupedDim::K => tiles * count,
        };
    let cubes = match groups.grouping {
        GroupedDim::None => tiles,
        _ => tiles.min(CUBES_PER_SM * sms(client)),
    };
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let memory =
        |handle: &Handle, len: usize| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    // Elements per load from bf16 rows: as many as the row length and alignment allow.
    let is_whole = |operand: &Materialized| operand.is_packed() || operand.is_aligned();
    let width = match is_whole(a) && is_whole(b) {
        true => 1 << k.trailing_zeros().min(3),
        false => 1,
    };
    let b_rows = match groups.grouping {
        GroupedDim::M => count * n,
        GroupedDim::None | GroupedDim::K => n,
    };
    let a_len = m * k;
    let b_len = match b.layout {
        OperandLayout::PackedMnMajor => b.stored_len(k),
        _ => b_rows * k,
    };
    // SAFETY: the kernel masks every access by the shapes it is given, and offsets by `m` and `k`.
    unsafe {
        cmma_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(a_len.max(b_len).max(result.len())),
            width,
            MixedMatrixLaunch::new(
                memory(&a.elements, a_len / BLOCK),
                memory(&a.scales, a_len / BLOCK),
                memory(&a.elements, a_len / width),
            ),
            MixedMatrixLaunch::new(
                memory(&b.elements, b_len / BLOCK),
                memory(&b.scales, b_len / BLOCK),
                memory(&b.elements, b_len / width),
            ),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), count),
                memory(&groups.offsets, count + 1),
                BAND,
            ),
            epilogue.launch([m, b_rows], count, (&result.handle, 1), 1.0),
            memory(&result.handle, result.len()),
            CmmaPlan {
                grouped: groups.grouping,
                tile: shape,
                packed: [a.is_packed(), b.is_packed()],
                b_mn_major: b.is_mn_major(),
                // CUDA's compiler contracts.
                ordered_add: capabilities.runtime == "cuda",
            },
            result.dtype.storage_type(),
        );
    }
}
