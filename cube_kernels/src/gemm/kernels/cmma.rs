//! Products, dense and in groups, on any GPU with 16x16x16 bf16 matrix instructions: tiles of either
//! operand are decoded, exactly, into shared memory and multiplied with `f32` accumulation. No decoded
//! copy of an operand is ever in device memory.
//!
//! The contraction ascends in steps of 16 from the first column of a group, whatever the tile is: a
//! product in groups has the bits of the dense products of its groups.

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
        epilogue::{EpilogueKind, Factor, factor, finish_on, raise},
        materialize::Materialized,
        problem::{Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, sms},
        scheduler::{GroupedDim, place},
        tiles::{CMMA_TILE_N, CmmaTile},
    },
    memory::address_type,
    moe::groups::span,
};

/// Elements along the contraction that are decoded at a time.
const DEPTH: usize = 32;
/// Elements from one tile row to the next in shared memory: padded by 16 bytes against bank
/// conflicts.
const STRIDE: usize = DEPTH + 8;
/// Units of a cube: eight planes of 32.
pub const UNITS: usize = 256;
/// Tiles along the rows of `a` that run side by side, for the L2 cache.
const BAND: u32 = 8;
/// Cubes on an SM that a grid for groups is made for, whose tiles the host does not know.
const CUBES_PER_SM: usize = 4;

/// Decodes `tile_rows` stored rows of one operand, two blocks each, into shared memory, a block to a unit
/// at a time. What lies outside the group becomes zero.
#[cube]
fn decode_tile<W: Size>(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    dense: &[Vector<u16, W>],
    tile: &mut [bf16],
    row0: usize,
    end: usize,
    block0: usize,
    block_end: usize,
    k: usize,
    #[comptime] tile_rows: usize,
    #[comptime] packed: bool,
) {
    #[unroll]
    for round in 0..comptime!((2 * tile_rows).div_ceil(UNITS)) {
        let item = UNIT_POS as usize + comptime!(round * UNITS);
        if item < comptime!(2 * tile_rows) {
            let row = row0 + item / 2usize;
            let block = block0 + item % 2usize;
            let base = (item / 2usize) * comptime!(STRIDE) + (item % 2usize) * 16usize;
            let inside = row < end && block < block_end;
            if comptime!(packed) {
                let mut words = Vector::<u32, Const<2>>::new(0u32);
                let mut scale = 0.0f32;
                if inside {
                    let index = row * (k / 16usize) + block;
                    words = codes[index];
                    scale = decode_e4m3(u32::cast_from(scales[index]));
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
                    if inside && column < k {
                        words = dense[(row * k + column) / size];
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

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`, for each group.
///
/// Tiles are numbered through all groups, and a cube takes every `CUBE_COUNT`th: the grid depends on
/// nothing that is in device memory. The bias has a row for each group. Of each operand either codes and
/// scales are read or, in vectors that divide its rows, `dense`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn matrix_kernel<F: Numeric, W: Size>(
    a_codes: &[Vector<u32, Const<2>>],
    a_scales: &[u8],
    a_dense: &[Vector<u16, W>],
    b_codes: &[Vector<u32, Const<2>>],
    b_scales: &[u8],
    b_dense: &[Vector<u16, W>],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    offsets: &[u32],
    out: &mut [F],
    amax: &mut [Atomic<u32>],
    m: usize,
    n: usize,
    k: usize,
    groups: usize,
    a_range: f32,
    b_range: f32,
    #[comptime] grouping: GroupedDim,
    #[comptime] shape: CmmaTile,
    #[comptime] packed: [bool; 2],
    #[comptime] ordered_add: bool,
    #[comptime] kind: EpilogueKind,
    #[define(F)] _storage: ElemType,
) {
    let tile_m = comptime!(shape.rows());
    let mut a_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(shape.rows() * STRIDE), 128usize);
    let mut b_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(CMMA_TILE_N * STRIDE), 128usize);
    let mut staging: Shared<[f32]> = Shared::new_aligned_slice(comptime!(8usize * 256), 128usize);
    let plane = UNIT_POS as usize / 32usize;
    let lane = UNIT_POS as usize % 32usize;
    let plane_row = (plane / comptime!(shape.planes_n())) * comptime!(16 * shape.strips());
    let plane_col = (plane % comptime!(shape.planes_n())) * comptime!(16 * shape.columns());
    let stage = plane * 256usize;
    let tiles_n = n.div_ceil(CMMA_TILE_N) as u32;

    let mut tile = CUBE_POS as u32;
    // The group that is looked at, and the tiles before it.
    let mut group = 0usize;
    let mut passed = 0u32;
    while group < groups {
        // Rows of `a` and blocks of the contraction that belong to the group.
        let mut first = 0usize;
        let mut end = m;
        let mut block = 0usize;
        let mut block_end = k.div_ceil(16usize);
        if comptime!(grouping == GroupedDim::M) {
            let rows = span(offsets, group, m);
            first = rows.start;
            end = max(rows.end, rows.start);
        }
        if comptime!(grouping == GroupedDim::K) {
            let columns = span(offsets, group, k);
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
            let row0 = first + at.row as usize;
            let col0 = at.column as usize;
            let mut b_first = 0usize;
            if comptime!(grouping == GroupedDim::M) {
                b_first = group * n;
            }

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
                decode_tile(
                    a_codes,
                    a_scales,
                    a_dense,
                    &mut a_shared,
                    row0,
                    end,
                    block,
                    block_end,
                    k,
                    tile_m,
                    comptime!(packed[0]),
                );
                decode_tile(
                    b_codes,
                    b_scales,
                    b_dense,
                    &mut b_shared,
                    b_first + col0,
                    b_first + n,
                    block,
                    block_end,
                    k,
                    CMMA_TILE_N,
                    comptime!(packed[1]),
                );
                sync_cube();
                #[unroll]
                for step in 0..comptime!(DEPTH / 16) {
                    let mut columns = Sequence::<cmma::Matrix<bf16>>::new();
                    #[unroll]
                    for j in 0..comptime!(shape.columns()) {
                        let start =
                            (plane_col + j * 16usize) * comptime!(STRIDE) + comptime!(step * 16);
                        columns.push(cmma::Matrix::<bf16>::from_slice(
                            MatrixIdent::B,
                            16usize,
                            16usize,
                            16usize,
                            MatrixLayout::ColMajor,
                            &b_shared[start..comptime!(CMMA_TILE_N * STRIDE)],
                            comptime!(STRIDE as u32),
                        ));
                    }
                    #[unroll]
                    for i in 0..comptime!(shape.strips()) {
                        let start =
                            (plane_row + i * 16usize) * comptime!(STRIDE) + comptime!(step * 16);
                        let rows = cmma::Matrix::<bf16>::from_slice(
                            MatrixIdent::A,
                            16usize,
                            16usize,
                            16usize,
                            MatrixLayout::RowMajor,
                            &a_shared[start..comptime!(shape.rows() * STRIDE)],
                            comptime!(STRIDE as u32),
                        );
                        #[unroll]
                        for j in 0..comptime!(shape.columns()) {
                            let c = accumulators.index(comptime!(i * shape.columns() + j));
                            cmma::execute(&rows, &columns[j], c, c);
                        }
                    }
                }
                sync_cube();
                block += comptime!(DEPTH / 16);
            }

            let a_whole = factor(
                a_amax,
                0u32,
                group as u32,
                a_range,
                comptime!(kind.a.of_tile()),
            );
            let b_whole = factor(
                b_amax,
                0u32,
                group as u32,
                b_range,
                comptime!(kind.b.of_tile()),
            );
            let mut largest = 0u32;
            #[unroll]
            for i in 0..comptime!(shape.strips()) {
                #[unroll]
                for j in 0..comptime!(shape.columns()) {
                    let c = accumulators.index(comptime!(i * shape.columns() + j));
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
                        let row = row0 + plane_row + comptime!(i * 16) + element / 16usize;
                        let col = col0 + plane_col + comptime!(j * 16) + element % 16usize;
                        if row < end && col < n {
                            let mut a_factor = a_whole;
                            // Groups of the contraction have factors of their own.
                            let mut a_first = 0usize;
                            let mut b_own = b_first + col;
                            if comptime!(grouping == GroupedDim::K) {
                                a_first = group * m;
                                b_own += group * n;
                            }
                            if comptime!(kind.a == Factor::PerRow) {
                                let own = (a_first + row) as u32;
                                a_factor = factor(a_amax, own, 0u32, a_range, kind.a);
                            }
                            let mut b_factor = b_whole;
                            if comptime!(kind.b == Factor::PerRow) {
                                let own = b_own as u32;
                                b_factor = factor(b_amax, own, 0u32, b_range, kind.b);
                            }
                            let mut item = row * n + col;
                            if comptime!(grouping == GroupedDim::K) {
                                item += group * m * n;
                            }
                            let mut addend = 0.0f32;
                            if comptime!(kind.bias) {
                                addend = bias[group * n + col];
                            }
                            let mut before = 0.0f32;
                            if comptime!(kind.accumulate) {
                                before = load::<F>(out[item], kind.out);
                            }
                            let value = finish_on(
                                staging[stage + element],
                                a_factor * b_factor,
                                addend,
                                before,
                                ordered_add,
                                kind,
                            );
                            let stored = store::<F>(value, kind.out);
                            out[item] = stored;
                            if comptime!(kind.amax.is_some()) {
                                let bits = magnitude_bits(load::<F>(stored, kind.out));
                                largest = max(largest, bits);
                            }
                        }
                    }
                    sync_cube();
                }
            }
            if comptime!(kind.amax.is_some()) {
                raise(amax, group as u32, largest, kind);
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles_m * tiles_n;
            group += 1usize;
        }
    }
}

/// The GEMM of any GPU with matrix instructions.
pub(crate) struct Cmma;

impl Kernel for Cmma {
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
        Plan::Cmma.into()
    }

    fn launch(&self, launch: &Launch, _plan: Plan) -> Result<(), Nvfp4Error> {
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
            // Each group may end in a tile of its own.
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
    // Elements that are loaded together from bf16 rows: as many as rows and their beginning allow.
    let is_whole = |operand: &Materialized| operand.is_packed() || operand.is_aligned();
    let width = match is_whole(a) && is_whole(b) {
        true => 1 << k.trailing_zeros().min(3),
        false => 1,
    };
    let b_rows = match groups.grouping {
        GroupedDim::M => count * n,
        GroupedDim::None | GroupedDim::K => n,
    };
    let (a_len, b_len) = (m * k, b_rows * k);
    // SAFETY: the kernel masks every access by the shapes it is given, and offsets by `m` and `k`.
    unsafe {
        matrix_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(a_len.max(b_len).max(result.len())),
            width,
            memory(&a.codes, a_len / BLOCK),
            memory(&a.scales, a_len / BLOCK),
            memory(&a.dense, a_len / width),
            memory(&b.codes, b_len / BLOCK),
            memory(&b.scales, b_len / BLOCK),
            memory(&b.dense, b_len / width),
            memory(&epilogue.a_amax, m),
            memory(&epilogue.b_amax, b_rows),
            memory(&epilogue.bias, b_rows),
            memory(&groups.offsets, count + 1),
            memory(&result.handle, result.len()),
            memory(&epilogue.amax, epilogue.amax_len(count)),
            m,
            n,
            k,
            count,
            epilogue.ranges[0],
            epilogue.ranges[1],
            groups.grouping,
            shape,
            [a.is_packed(), b.is_packed()],
            // Where the compiler may contract, which is CUDA's.
            capabilities.runtime == "cuda",
            epilogue.kind,
            result.dtype.storage_type(),
        );
    }
}
