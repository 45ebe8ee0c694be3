//! The product for any CUDA GPU and the CPU: operands are decoded on the fly, exactly, and
//! multiplied with `f32` accumulation. No decoded copy of an operand is ever in memory.

use cubecl::{
    cmma::{self, MatrixIdent, MatrixLayout},
    prelude::*,
};
use half::bf16;

use crate::{
    BLOCK,
    cube::{
        codec::{decode_e2m1, decode_e4m3, store},
        ptx,
    },
    device::{Capabilities, DevicePacked, FloatKind, GemmPath, Matrix, address_type},
    ops::launch::grid,
};

/// Queues the kernel of a path that the device has. The caller checked the operands.
pub(super) fn launch(
    client: &Client,
    capabilities: &Capabilities,
    path: GemmPath,
    a: &DevicePacked,
    b: &DevicePacked,
    bias: Option<&Matrix>,
    result: &Matrix,
) {
    let (m, n, blocks, out) = (a.outer(), b.outer(), a.blocks(), result.dtype);
    // `add.rn` where the compiler may contract, which is CUDA's; see `Epilogue::ordered_add`.
    let epilogue = Epilogue {
        bias: bias.is_some(),
        ordered_add: capabilities.runtime == "cuda",
    };
    let address = address_type((m.max(n) * blocks * BLOCK).max(result.len()));
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let words = |packed: &DevicePacked| unsafe {
        BufferArg::from_raw_parts(packed.codes.clone(), packed.outer() * blocks)
    };
    let scales = |packed: &DevicePacked| unsafe {
        BufferArg::from_raw_parts(packed.scales.clone(), packed.outer() * blocks)
    };
    let amax = |packed: &DevicePacked| unsafe { BufferArg::from_raw_parts(packed.amax.clone(), 1) };
    let bias = match bias {
        Some(bias) => unsafe { BufferArg::from_raw_parts(bias.handle.clone(), n) },
        // Not read without a bias.
        None => amax(a),
    };
    let target = unsafe { BufferArg::from_raw_parts(result.handle.clone(), m * n) };
    match path {
        GemmPath::Hopper | GemmPath::CublasLt | GemmPath::MatrixInstructions => {
            let count = CubeCount::Static(n.div_ceil(TILE) as u32, m.div_ceil(TILE) as u32, 1);
            // SAFETY: the kernel masks every access by the shapes it is given.
            unsafe {
                matrix_kernel::launch_unchecked(
                    client,
                    count,
                    CubeDim::new_1d(UNITS as u32),
                    address,
                    words(a),
                    scales(a),
                    amax(a),
                    words(b),
                    scales(b),
                    amax(b),
                    bias,
                    target,
                    m,
                    n,
                    blocks,
                    epilogue,
                    out,
                    out.storage_type(),
                );
            }
        }
        GemmPath::Scalar => {
            let (count, dim) = grid(client, m * n);
            // SAFETY: the kernel stays below m * n.
            unsafe {
                scalar_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    words(a),
                    scales(a),
                    amax(a),
                    words(b),
                    scales(b),
                    amax(b),
                    bias,
                    target,
                    m,
                    n,
                    blocks,
                    epilogue,
                    out,
                    out.storage_type(),
                );
            }
        }
    }
}

/// The comptime choices of the epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Add a bias.
    pub bias: bool,
    /// Add it by an instruction that is never contracted with the multiplication before it: the
    /// specification rounds both.
    pub ordered_add: bool,
}

#[cube]
fn finish(
    sum: f32,
    alpha: f32,
    bias: &[f32],
    column: usize,
    #[comptime] epilogue: Epilogue,
) -> f32 {
    let scaled = sum * alpha;
    let mut value = scaled;
    if comptime!(epilogue.bias) {
        if comptime!(epilogue.ordered_add) {
            // `scaled`, not `value`: a mutable variable would reach the instruction as a pointer.
            value = ptx::add_rn(scaled, bias[column]);
        } else {
            value = scaled + bias[column];
        }
    }
    value
}

#[cube]
fn alpha(amax_a: &[f32], amax_b: &[f32]) -> f32 {
    (amax_a[0] / 2688.0f32) * (amax_b[0] / 2688.0f32)
}

/// One unit computes every `units`-th output element, `k` ascending.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_kernel<F: Numeric>(
    a_codes: &[Vector<u32, Const<2>>],
    a_scales: &[u8],
    a_amax: &[f32],
    b_codes: &[Vector<u32, Const<2>>],
    b_scales: &[u8],
    b_amax: &[f32],
    bias: &[f32],
    out: &mut [F],
    m: usize,
    n: usize,
    blocks: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let alpha = alpha(a_amax, b_amax);
    let mut item = ABSOLUTE_POS;
    while item < m * n {
        let a_row = (item / n) * blocks;
        let b_row = (item % n) * blocks;
        let mut sum = 0.0f32;
        for block in 0..blocks {
            let a_words = a_codes[a_row + block];
            let b_words = b_codes[b_row + block];
            let a_scale = decode_e4m3(u32::cast_from(a_scales[a_row + block]));
            let b_scale = decode_e4m3(u32::cast_from(b_scales[b_row + block]));
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let x = decode_e2m1(a_words.extract(comptime!(i / 8)) >> shift) * a_scale;
                let y = decode_e2m1(b_words.extract(comptime!(i / 8)) >> shift) * b_scale;
                // The product is exact, so a contraction of this sum changes nothing.
                sum += x * y;
            }
        }
        out[item] = store::<F>(finish(sum, alpha, bias, item % n, epilogue), kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Rows and columns of the output tile of one cube.
const TILE: usize = 128;
/// Elements along the contraction that are decoded at a time.
const DEPTH: usize = 32;
/// Elements from one tile row to the next in shared memory: padded by 16 bytes against bank
/// conflicts.
const STRIDE: usize = DEPTH + 8;
/// Units of a cube: eight planes, each with a 64 x 32 part of the tile.
const UNITS: usize = 256;

/// Decodes `TILE` stored rows of one operand, two blocks each, into shared memory: one block for
/// each unit. What lies outside the operand becomes zero.
#[cube]
fn decode_tile(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    tile: &mut [bf16],
    row0: usize,
    block0: usize,
    rows: usize,
    blocks: usize,
) {
    let unit = UNIT_POS as usize;
    let row = row0 + unit / 2usize;
    let block = block0 + unit % 2usize;
    let base = (unit / 2usize) * comptime!(STRIDE) + (unit % 2usize) * 16usize;
    let inside = row < rows && block < blocks;
    let mut words = Vector::<u32, Const<2>>::new(0u32);
    let mut scale = 0.0f32;
    if inside {
        let index = row * blocks + block;
        words = codes[index];
        scale = decode_e4m3(u32::cast_from(scales[index]));
    }
    #[unroll]
    for i in 0..16usize {
        let code = words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
        // Exact: code and scale have at most two and four significant bits.
        tile[base + i] = bf16::cast_from(decode_e2m1(code) * scale);
    }
}

/// One cube computes a 128 x 128 tile with 16x16x16 bf16 matrix instructions.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn matrix_kernel<F: Numeric>(
    a_codes: &[Vector<u32, Const<2>>],
    a_scales: &[u8],
    a_amax: &[f32],
    b_codes: &[Vector<u32, Const<2>>],
    b_scales: &[u8],
    b_amax: &[f32],
    bias: &[f32],
    out: &mut [F],
    m: usize,
    n: usize,
    blocks: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut a_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(TILE * STRIDE), 128usize);
    let mut b_shared: Shared<[bf16]> =
        Shared::new_aligned_slice(comptime!(TILE * STRIDE), 128usize);
    let mut staging: Shared<[f32]> = Shared::new_aligned_slice(comptime!(8usize * 256), 128usize);
    let row0 = CUBE_POS_Y as usize * comptime!(TILE);
    let col0 = CUBE_POS_X as usize * comptime!(TILE);
    let plane = UNIT_POS as usize / 32usize;
    let lane = UNIT_POS as usize % 32usize;
    let plane_row = (plane / 4usize) * 64usize;
    let plane_col = (plane % 4usize) * 32usize;

    let mut accumulators = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for _ in 0..8 {
        accumulators.push(cmma::Matrix::<f32>::from_value(
            MatrixIdent::Accumulator,
            16usize,
            16usize,
            16usize,
            MatrixLayout::Undefined,
            0.0f32,
        ));
    }

    let mut block = 0usize;
    while block < blocks {
        decode_tile(a_codes, a_scales, &mut a_shared, row0, block, m, blocks);
        decode_tile(b_codes, b_scales, &mut b_shared, col0, block, n, blocks);
        sync_cube();
        #[unroll]
        for k in 0..comptime!(DEPTH / 16) {
            let mut columns = Sequence::<cmma::Matrix<bf16>>::new();
            #[unroll]
            for j in 0..2usize {
                let start = (plane_col + j * 16usize) * comptime!(STRIDE) + comptime!(k * 16);
                columns.push(cmma::Matrix::<bf16>::from_slice(
                    MatrixIdent::B,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::ColMajor,
                    &b_shared[start..comptime!(TILE * STRIDE)],
                    comptime!(STRIDE as u32),
                ));
            }
            #[unroll]
            for i in 0..4usize {
                let start = (plane_row + i * 16usize) * comptime!(STRIDE) + comptime!(k * 16);
                let rows = cmma::Matrix::<bf16>::from_slice(
                    MatrixIdent::A,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::RowMajor,
                    &a_shared[start..comptime!(TILE * STRIDE)],
                    comptime!(STRIDE as u32),
                );
                #[unroll]
                for j in 0..2usize {
                    let c = accumulators.index(comptime!(i * 2 + j));
                    cmma::execute(&rows, &columns[j], c, c);
                }
            }
        }
        sync_cube();
        block += comptime!(DEPTH / 16);
    }

    let alpha = alpha(a_amax, b_amax);
    let stage = plane * 256usize;
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..2usize {
            let c = accumulators.index(comptime!(i * 2 + j));
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
                if row < m && col < n {
                    let value = finish(staging[stage + element], alpha, bias, col, epilogue);
                    out[row * n + col] = store::<F>(value, kind);
                }
            }
            sync_cube();
        }
    }
}
