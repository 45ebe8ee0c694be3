//! Per-token quantization in one read: the kernel computes a row's amax while it loads the row, and
//! quantizes the row from registers.

use cubecl::prelude::*;

use super::{
    plan::{Draw, QuantArgs, QuantOut, QuantPlan},
    rowwise::{row_amax_of, row_block},
    target::TargetSpec,
    tile::MAX_UNITS,
};
use crate::{
    BLOCK, Nvfp4Error, Usage,
    capabilities::is_cpu,
    cube::{
        block::quantize_with_amax,
        codec::{canonical, magnitude_bits},
        scale::{GlobalScale, swizzled_at},
        words::{block_words, load_block_words},
    },
    launch::{Words, buffer, cubes},
    memory::{address_type, allocate},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Maximum number of blocks of a row that each unit keeps in registers between computing the amax
/// and quantizing. Blocks of a row beyond `units * KEPT` are read again.
const KEPT: usize = 4;

/// Quantizes `x` to a rowwise tensor with one amax per row, i.e. per token, which it also computes.
/// See [`reference::quantize`](crate::reference::quantize) with the amax values of
/// [`reference::amax_rows`](crate::reference::amax_rows).
pub(super) fn quantize_per_token(
    client: &Client,
    x: &Matrix,
    target: &TargetSpec,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let words = Words::of(x);
    let target = target.clone().amax(&allocate(client, x.rows * 4));
    let args = QuantArgs::new(client, x, &Groups::One, Usage::Rowwise, &target)?;
    if x.is_empty() {
        return Ok(args.out);
    }
    // Swizzled scales are padded to 128 rows, which are written too.
    let rows = if args.plan.swizzled {
        x.rows.next_multiple_of(128)
    } else {
        x.rows
    };
    let blocks = x.cols / BLOCK;
    let (count, dim) = row_cubes(client, rows, blocks);
    // SAFETY: the kernel stays below the shapes it is given, and the buffers were checked for them.
    unsafe {
        quantize_per_token_kernel::launch_unchecked(
            client,
            count,
            dim,
            // With few long rows, the padding of swizzled scales makes more scales than elements.
            address_type(x.len().max(args.out.scale_bytes())),
            words.width,
            words.arg(),
            buffer(&args.out.amax, x.rows),
            args.memory(),
            args.draw(),
            TokenRowsLaunch::new(x.rows, rows, blocks),
            PerTokenPlan {
                quant: args.plan,
                kept_blocks: blocks.div_ceil(dim.x as usize).min(KEPT),
                planes: !is_cpu(client),
                kind: x.dtype,
            },
        );
    }
    Ok(args.out)
}

/// Returns the launch of cubes that process one row at a time, with at most as many units as a row
/// has blocks.
fn row_cubes(client: &Client, rows: usize, blocks: usize) -> (CubeCount, CubeDim) {
    let (count, dim) = cubes(client, rows);
    let dim = if is_cpu(client) {
        dim
    } else {
        CubeDim::new_1d(blocks.next_multiple_of(32).min(dim.x as usize) as u32)
    };
    (count, dim)
}

/// Comptime configuration of [`quantize_per_token_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PerTokenPlan {
    /// Configuration of the tensor.
    pub quant: QuantPlan,
    /// Blocks of a row that each unit keeps in registers.
    pub kept_blocks: usize,
    /// True if planes support reductions.
    pub planes: bool,
    /// Element type of `x`.
    pub kind: FloatKind,
}

/// Rows of a matrix.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct TokenRows {
    /// Number of rows.
    pub rows: usize,
    /// Number of rows including those that pad swizzled scales.
    pub padded_rows: usize,
    /// Blocks per row.
    pub blocks: usize,
}

/// A block of a row of `blocks` blocks.
#[derive(CubeType, Clone, Copy)]
struct RowBlock {
    row: usize,
    block: usize,
    blocks: usize,
}

/// Loads block `block` of a row to slot `k` of `kept`; zeros after the last block.
#[cube]
fn keep_block<N: Size>(
    x: &[Vector<u32, N>],
    kept: &mut Array<u32>,
    at: &RowBlock,
    #[comptime] k: usize,
    #[comptime] kind: FloatKind,
) {
    let (row, block, blocks) = (at.row, at.block, at.blocks);
    let count = comptime!(block_words(kind));
    let width = N::value();
    let start = (row * blocks + block) * comptime!(count / width);
    #[unroll]
    for v in 0..comptime!(count / width) {
        let vector = if block < blocks {
            x[start + v]
        } else {
            Vector::<u32, N>::zero()
        };
        #[unroll]
        for w in 0..width {
            kept[comptime!(k * count + v * width + w)] = vector.extract(w);
        }
    }
}

/// Loads the words of a block that is not kept.
#[cube]
fn load_block<N: Size>(
    x: &[Vector<u32, N>],
    row: usize,
    block: usize,
    blocks: usize,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let width = N::value();
    let per_block = comptime!(block_words(kind) / width);
    load_block_words::<N>(x, (row * blocks + block) * per_block, kind)
}

/// Each cube quantizes one row at a time. A unit's first blocks stay in its registers.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_per_token_kernel<N: Size>(
    x: &[Vector<u32, N>],
    amax: &mut [f32],
    mut out: QuantOut,
    draw: Draw,
    of: TokenRows,
    #[comptime] per_token: PerTokenPlan,
) {
    let (plan, kind) = comptime!((per_token.quant, per_token.kind));
    let (kept_blocks, planes) = comptime!((per_token.kept_blocks, per_token.planes));
    let policy = comptime!(plan.policy);
    let random = draw.resolve(policy);
    let (rows, blocks) = (of.rows, of.blocks);
    let words_per_block = comptime!(block_words(kind));
    let units = CUBE_DIM as usize;
    let unit = UNIT_POS as usize;
    let padded_blocks = blocks.div_ceil(4);
    // One slot per plane, or per unit; two alternating sets, so that one barrier per row is enough.
    let slots = comptime!(if planes { MAX_UNITS / 32 } else { MAX_UNITS });
    let mut partial: Shared<[u32]> = Shared::new_slice(comptime!(2 * slots));
    let mut turn = 0usize;
    let mut row = CUBE_POS;
    while row < of.padded_rows {
        if row < rows {
            let mut kept = Array::<u32>::new(comptime!(kept_blocks * words_per_block));
            let mut bits = 0u32;
            // Issues all loads before waiting for the first.
            #[unroll]
            for k in 0..kept_blocks {
                let block = unit + k * units;
                let at = RowBlock { row, block, blocks };
                keep_block::<N>(x, &mut kept, &at, k, kind);
            }
            #[unroll]
            for k in 0..kept_blocks {
                let words = kept_block(&kept, k, kind);
                let values = row_block(&words, &draw.signs, plan, kind);
                // Blocks after the last one are zeros.
                let here = row_amax_of(&words, &values, false, plan, kind);
                bits = max(bits, magnitude_bits(here));
            }
            let mut block = unit + kept_blocks * units;
            while block < blocks {
                let words = load_block::<N>(x, row, block, blocks, kind);
                let values = row_block(&words, &draw.signs, plan, kind);
                let here = row_amax_of(&words, &values, false, plan, kind);
                bits = max(bits, magnitude_bits(here));
                block += units;
            }
            if comptime!(planes) {
                let plane = plane_max(bits);
                if UNIT_POS_PLANE == 0u32 {
                    partial[turn * slots + unit / 32usize] = plane;
                }
                sync_cube();
                bits = 0u32;
                for p in 0..units / 32usize {
                    bits = max(bits, partial[turn * slots + p]);
                }
                turn = 1usize - turn;
            } else if units > 1usize {
                partial[turn * slots + unit] = bits;
                sync_cube();
                for p in 0..units {
                    bits = max(bits, partial[turn * slots + p]);
                }
                turn = 1usize - turn;
            }
            let row_amax = f32::reinterpret(canonical(bits));
            if unit == 0usize {
                amax[row] = row_amax;
            }
            let global = GlobalScale::from_amax(row_amax, policy.scaling);

            #[unroll]
            for k in 0..kept_blocks {
                let block = unit + k * units;
                if block < blocks {
                    let words = kept_block(&kept, k, kind);
                    let values = row_block(&words, &draw.signs, plan, kind);
                    let index = row * blocks + block;
                    let logical = draw.number(index, blocks, policy);
                    let largest = row_amax_of(&words, &values, false, plan, kind);
                    let encoded = quantize_with_amax(
                        &values, 0usize, largest, &global, logical, &random, policy,
                    );
                    out.store_codes(index, encoded.codes);
                    let place = scale_place(row, block, blocks, plan);
                    out.store_scale(place, encoded.scale);
                }
            }
            let mut block = unit + kept_blocks * units;
            while block < blocks {
                let words = load_block::<N>(x, row, block, blocks, kind);
                let values = row_block(&words, &draw.signs, plan, kind);
                let index = row * blocks + block;
                let logical = draw.number(index, blocks, policy);
                let largest = row_amax_of(&words, &values, false, plan, kind);
                let encoded =
                    quantize_with_amax(&values, 0usize, largest, &global, logical, &random, policy);
                out.store_codes(index, encoded.codes);
                let place = scale_place(row, block, blocks, plan);
                out.store_scale(place, encoded.scale);
                block += units;
            }
        }
        if comptime!(plan.swizzled) {
            // Padding: blocks after the last one of a row, and all of the rows after the last one.
            let mut block = unit;
            if row < rows {
                block += blocks;
            }
            while block < padded_blocks * 4usize {
                let place = scale_place(row, block, blocks, plan);
                out.store_scale(place, 0u32.runtime());
                block += units;
            }
        }
        row += CUBE_COUNT;
    }
}

/// Returns the words of one of the blocks in registers.
#[cube]
fn kept_block(kept: &Array<u32>, #[comptime] k: usize, #[comptime] kind: FloatKind) -> Array<u32> {
    let count = comptime!(block_words(kind));
    let mut words = Array::<u32>::new(count);
    #[unroll]
    for w in 0..count {
        words[w] = kept[comptime!(k * count + w)];
    }
    words
}

/// Returns the index of the scale of a block of a rowwise tensor.
#[cube]
fn scale_place(row: usize, block: usize, blocks: usize, #[comptime] plan: QuantPlan) -> usize {
    if comptime!(plan.swizzled) {
        swizzled_at(row, block, blocks.div_ceil(4))
    } else {
        row * blocks + block
    }
}
