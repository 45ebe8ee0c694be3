//! Requantization of NVFP4 to a microscaling format, along the same axis or the other one.

use cubecl::prelude::*;

use super::{
    super::{
        packed_source::{PackedBlock, PackedRows, PackedSource, SourcePlan, scale_at},
        target::TargetSpec,
        tile::{Grouping, in_bands, tile_from},
    },
    columns::{ColumnPlace, MxTiles, Staging, TILE_COLS, TILE_ROWS, Tiles, quantize_tile_columns},
    plan::{MxPlan, MxRowPlan, empty_of_groups},
    rows::{MxRows, RowTiles, amax_of, max_of_lanes, row_block},
};
use crate::{
    BLOCK, MX_BLOCK, Nvfp4Error, Usage,
    capabilities::is_cpu,
    cube::{
        codec::{BlockFactors, load, store},
        mx::{decode_ue8m0_reciprocal, encode_word, mx_scale},
        ptx,
    },
    format::check_mx,
    launch::{buffer, grid},
    memory::address_type,
    tensor::{DeviceQuantized, FloatKind},
};

/// NVFP4 blocks per tile.
const TILE_BLOCKS: usize = TILE_ROWS * TILE_COLS / 16;
/// NVFP4 blocks that a unit loads before it decodes the first: a cube of 256 loads all of a tile.
const IN_FLIGHT: usize = 2;

/// Requantizes the NVFP4 matrix `packed` in one kernel to a microscaling format with blocks along
/// `usage` of its source, either the axis along which it is packed or the other one. The result is
/// byte-identical to [`dequantize`](fn@crate::quantize::dequantize) to `via` followed by
/// [`mx_quantize`](super::quantize::mx_quantize), without the intermediate matrix in
/// memory. Block scales of input and output may each be in rows or in 128x4 tiles. `via` is the
/// element type to which the dequantized values are rounded, usually that of the training.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, and for groups with offsets that are
/// packed along their rows.
pub(in crate::quantize) fn mx_requantize(
    client: &Client,
    packed: &DeviceQuantized,
    usage: Usage,
    target: &TargetSpec,
    via: FloatKind,
) -> Result<DeviceQuantized, Nvfp4Error> {
    check_mx(target.params.format)?;
    let source = PackedSource::even("packed", packed)?;
    let shape = (packed.rows(), packed.cols());
    let out = empty_of_groups(client, shape, &packed.groups, usage, target);
    if source.rows * source.cols == 0 {
        return Ok(out);
    }
    let plan = MxPlan::new(client, target, via);
    let elements = out.code_blocks().max(source.rows * source.blocks) * MX_BLOCK;
    // With few long rows, the padding of tiles makes more scales than elements.
    let elements = elements.max(out.scale_bytes()).max(packed.scale_bytes());
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let codes = |words: usize| unsafe { buffer(&out.codes, out.code_bytes() / (4 * words)) };
    let scales = unsafe { buffer(&out.scales, out.scale_bytes()) };
    if usage == packed.usage() {
        let maxima = source.row_maxima(client)?;
        // A unit takes one NVFP4 block on a GPU, both on the CPU.
        let lanes = if is_cpu(client) { 1 } else { 2 };
        // If the scales of either side start anew at each group, rows are found through tiles.
        let by_tiles = plan.swizzled || source.plan.swizzled;
        let tiles = RowTiles::new((source.rows, source.cols), &source.groups, by_tiles);
        let items = tiles.blocks() * lanes;
        let (count, dim) = grid(client, items);
        let amax_blocks = maxima.items(source.cols.div_ceil(MX_BLOCK));
        let rows = tiles.args(client, amax_blocks, source.unread());
        let from = SourcePlan {
            per_row: maxima.rows.is_some(),
            ..source.plan
        };
        let plan = MxRowPlan {
            dense: source.blocks * BLOCK == source.cols && source.cols.is_multiple_of(MX_BLOCK),
            lanes,
            tiles: tiles.grouping(),
            mx: plan,
        };
        let half_words = plan.mx.block_words() / 2;
        // SAFETY: the kernel stays below the number of blocks.
        unsafe {
            mx_requantize_along_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(elements.max(items)),
                half_words,
                source.arg_with(maxima.arg()),
                codes(half_words),
                scales,
                rows,
                from,
                plan,
                via.storage_type(),
            );
        }
    } else {
        let shape = (source.rows, source.cols);
        let tiles = Tiles::new(client, shape, &source.groups, plan.swizzled);
        // SAFETY: the kernel masks every access by the shape.
        unsafe {
            mx_requantize_across_kernel::launch_unchecked(
                client,
                tiles.count.clone(),
                tiles.dim,
                address_type(elements),
                16 / via.size(),
                source.arg(),
                codes(4),
                scales,
                tiles.args(client, out.blocks(), source.unread()),
                source.plan,
                plan,
                via.storage_type(),
            );
        }
    }
    Ok(out)
}

/// Returns the 16 values of an NVFP4 block, rounded to `via`, by a conversion instruction if there
/// is one.
#[cube]
fn decode_block<F: Numeric>(block: &PackedBlock, #[comptime] plan: MxPlan) -> Array<f32> {
    let via = comptime!(plan.kind);
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for pair in 0..8usize {
        let at = comptime!(pair * 2);
        let word = block.words.extract(comptime!(at / 8));
        let low = word >> comptime!(4 * (at as u32 % 8));
        let high = word >> comptime!(4 * (at as u32 % 8) + 4);
        let low = block.factors.decode(low);
        let high = block.factors.decode(high);
        if comptime!(plan.hardware && via == FloatKind::Bf16) {
            let both = ptx::cvt_rn_bf16x2(low, high);
            values[at] = f32::reinterpret(both << 16u32);
            values[comptime!(at + 1)] = f32::reinterpret(both & 0xFFFF_0000u32);
        } else {
            values[at] = load::<F>(store::<F>(low, via), via);
            values[comptime!(at + 1)] = load::<F>(store::<F>(high, via), via);
        }
    }
    values
}

/// Returns a value that is already representable in `via` as a stored element.
#[cube]
fn stored<F: Numeric>(value: f32, #[comptime] via: FloatKind) -> F {
    if comptime!(via == FloatKind::Bf16) {
        F::cast_from(u32::reinterpret(value) >> 16u32)
    } else {
        F::cast_from(value)
    }
}

/// `lanes` neighbouring units convert two NVFP4 blocks of a stored row to one block of the result;
/// `dense` means that rows consist of whole blocks of the result. `M` words are the codes of 16
/// elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_requantize_along_kernel<F: Numeric, M: Size>(
    source: PackedRows,
    codes: &mut [Vector<u32, M>],
    scales: &mut [u8],
    rows: MxRows,
    #[comptime] from: SourcePlan,
    #[comptime] row_plan: MxRowPlan,
    #[define(F)] _storage: ElemType,
) {
    let (dense, lanes) = comptime!((row_plan.dense, row_plan.lanes));
    let plan = comptime!(row_plan.mx);
    let per_word = comptime!(plan.per_word());
    let halves = comptime!(2 / lanes);
    let (outer, inner, nv_blocks) = (rows.shape.rows, rows.shape.cols, source.blocks);
    let blocks = inner.div_ceil(32);
    let shared = source.factor();
    let items = rows.blocks(row_plan) * lanes;
    let mut base = CUBE_POS * CUBE_DIM as usize;
    while base < items {
        let item = base + UNIT_POS as usize;
        let lane = item % lanes;
        let at = row_block(item / lanes, &rows, row_plan);
        let inside = item < items && at.inside;
        // Index of the unit's part among those of all blocks.
        let part = at.stored * lanes + lane;
        let factor = if comptime!(from.per_row) {
            // Units without a block run along with the others.
            source.amax[min(at.stored, outer * blocks - 1usize) / rows.amax_blocks] / source.range
        } else {
            shared
        };
        let mut values = Array::<f32>::new(comptime!(16 * halves));
        #[unroll]
        for half in 0..halves {
            let mut index = part * halves + half;
            let mut present = 16usize;
            if comptime!(!dense) {
                let first = at.block * 32usize + lane * 16usize + comptime!(half * 16);
                index = at.row * nv_blocks + first / 16usize;
                present = min(inner - min(first, inner), 16usize);
            }
            let mut words = Vector::<u32, Const<2>>::new(0u32);
            let mut scale = 0u32;
            if inside && present > 0usize {
                words = source.codes[index];
                let byte = if comptime!(from.swizzled) {
                    let block = index - at.row * nv_blocks;
                    scale_at(at.row, at.tiled, block, nv_blocks, true)
                } else {
                    index
                };
                scale = u32::cast_from(source.scales[byte]);
            }
            let block = PackedBlock {
                words,
                factors: BlockFactors::new(scale, factor),
            };
            let decoded = decode_block::<F>(&block, plan);
            #[unroll]
            for i in 0..16usize {
                let mut value = decoded[i];
                if comptime!(!dense) {
                    // The padding of the NVFP4 block is not part of the matrix.
                    value = select(i < present, value, 0.0f32);
                }
                values[comptime!(half * 16 + i)] = value;
            }
        }
        let bits = amax_of(&values, comptime!(16 * halves));
        let scale = mx_scale(max_of_lanes(bits, lanes), plan.element);
        let multiplier = decode_ue8m0_reciprocal(scale);
        if inside {
            #[unroll]
            for half in 0..halves {
                let mut words = Vector::<u32, M>::empty();
                #[unroll]
                for w in 0..comptime!(16 / per_word) {
                    let first = comptime!(half * 16 + w * per_word);
                    let word = encode_word(&values, first, multiplier, plan.element, plan.hardware);
                    words.insert(w, word);
                }
                codes[part * halves + half] = words;
            }
        }
        if lane == comptime!(lanes - 1) {
            if comptime!(plan.swizzled) {
                // Padding of the tiles is zero.
                if item < items {
                    scales[at.scale] = u8::cast_from(select(inside, scale, 0u32));
                }
            } else if inside {
                scales[at.scale] = u8::cast_from(scale);
            }
        }
        base += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each cube dequantizes every `cubes`-th tile of 128 stored rows x 64 and quantizes blocks down
/// its columns. `F` is the storage type of `plan.kind`, `N` elements of it are 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_requantize_across_kernel<F: Numeric, N: Size>(
    source: PackedRows,
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    tiles: MxTiles,
    #[comptime] from: SourcePlan,
    #[comptime] plan: MxPlan,
    #[define(F)] _storage: ElemType,
) {
    let via = comptime!(plan.kind);
    let width = N::value();
    let mut tile = Shared::<[Vector<F, Const<1>>]>::new_aligned_slice(
        comptime!(TILE_ROWS * TILE_COLS),
        16usize,
    );
    let mut staging = Staging::new(plan.element);
    let shape = &tiles.shape;
    let grouping = comptime!(from.grouping);
    let shared = source.factor();
    let mut index = CUBE_POS;
    while index < tiles.row_tiles * shape.tile_cols {
        let place = in_bands(index, tiles.row_tiles, shape.tile_cols, tiles.band);
        let col0 = place.col * comptime!(TILE_COLS);
        let block0 = place.col * comptime!(TILE_COLS / 16);
        let at = tile_from(&tiles.map, place.row, col0, shape, 32usize, grouping);
        if comptime!(grouping == Grouping::One) || at.row0 < at.row_end {
            let own = source.factor_of(at.group, shared, from);
            let wide = tile.as_mut_slice().with_vector_size_mut::<N>();
            let mut first = UNIT_POS as usize;
            while first < comptime!(TILE_BLOCKS) {
                // Issues all loads of an iteration before waiting for the first.
                let mut loaded = Sequence::<PackedBlock>::new();
                #[unroll]
                for j in 0..IN_FLIGHT {
                    let item = first + j * CUBE_DIM as usize;
                    let r = item / comptime!(TILE_COLS / 16);
                    let row = at.row0 + r;
                    let block = block0 + item % comptime!(TILE_COLS / 16);
                    let tiled = at.row_tile * 128usize + r;
                    let in_tile = item < comptime!(TILE_BLOCKS);
                    let inside = in_tile && row < at.row_end && block < source.blocks;
                    loaded.push(source.load(row, tiled, block, own, inside, from));
                }
                #[unroll]
                for j in 0..IN_FLIGHT {
                    let item = first + j * CUBE_DIM as usize;
                    if item < comptime!(TILE_BLOCKS) {
                        let values = decode_block::<F>(loaded.index(j), plan);
                        #[unroll]
                        for v in 0..comptime!(16 / width) {
                            let mut vector = Vector::<F, N>::empty();
                            #[unroll]
                            for i in 0..width {
                                let value = values[comptime!(v * width + i)];
                                vector.insert(i, stored::<F>(value, via));
                            }
                            wide[item * comptime!(16 / width) + v] = vector;
                        }
                    }
                }
                first += IN_FLIGHT * CUBE_DIM as usize;
            }
            sync_cube();
            let place = ColumnPlace::new(&at, shape.cols, tiles.row_blocks, grouping);
            let tile = tile.as_slice();
            quantize_tile_columns::<F>(tile, &mut staging, codes, scales, &place, grouping, plan);
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}
