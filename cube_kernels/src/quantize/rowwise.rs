//! The rowwise tensor alone: blocks along rows, directly from memory to memory.

use cubecl::prelude::*;

use super::{
    plan::{QuantArgs, QuantOut, QuantOutArgs, QuantPlan, QuantTarget, memory_of},
    target::TargetSpec,
};
use crate::{
    BLOCK, BlockScaling, HadamardSize, Layout, Nvfp4Error, StoredForm, Usage,
    cube::{
        block::{Encoded, block_amax, pairs_amax, quantize_with_amax},
        hadamard::{Signs, butterfly, normalize},
        scale::GlobalScale,
        words::{block_words, load_block_words, unpack_block},
    },
    launch::{Words, buffer, grid},
    memory::address_type,
    moe::groups::find_group,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Returns true if [`quantize_rows`] makes the rowwise tensor of these groups. Not for four over
/// six, whose candidates derive from the amax, in this kernel separately for each row (16384 x 7168
/// in 8 groups, H100: 260 us, and 222 us by tiles).
pub(super) fn by_rows(groups: &Groups, target: &TargetSpec) -> bool {
    match groups {
        Groups::One => true,
        Groups::Offsets { .. } => {
            let chooses = matches!(target.params.scaling, BlockScaling::FourOverSix(_));
            !target.form.has_tiles() && !chooses
        }
        Groups::Batch(_) => false,
    }
}

/// Makes the rowwise tensor of a matrix, or of groups ([`by_rows`]). A row of a group is quantized
/// like any other, but with the amax of its group. This is faster than tiles, whose elements pass
/// through shared memory.
pub(super) fn quantize_rows(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    target: &TargetSpec,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let args = QuantArgs::new(client, x, groups, Usage::Rowwise, target)?;
    launch_rows(client, x, &args, None);
    Ok(args.out)
}

/// Makes the rowwise tensor of a matrix as codes and scales, and as values.
pub(super) fn quantize_rows_in_both_storages(
    client: &Client,
    x: &Matrix,
    target: &TargetSpec,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let args = QuantArgs::new(client, x, &Groups::One, Usage::Rowwise, target)?;
    let layout = Layout {
        form: StoredForm::Bf16Unscaled,
        ..args.out.layout
    };
    let values = DeviceQuantized::empty(client, layout, Groups::One, &args.out.amax);
    launch_rows(client, x, &args, Some(&values));
    Ok((args.out, values))
}

/// Writes the tensor of `args`, and its values to `values`, if present.
fn launch_rows(client: &Client, x: &Matrix, args: &QuantArgs, values: Option<&DeviceQuantized>) {
    if x.is_empty() {
        return;
    }
    let groups = &args.out.groups;
    let plan = args.plan;
    let (group_offsets, group_count) = match groups {
        // SAFETY: groups were checked to have one offset more than their number.
        Groups::Offsets { offsets, count } => (unsafe { buffer(offsets, count + 1) }, *count),
        // SAFETY: not read; there is at least one amax.
        _ => (unsafe { buffer(&args.out.amax, 1) }, 1),
    };
    let find_groups = matches!(groups, Groups::Offsets { .. }) && !plan.per_row;
    let words = Words::of(x);
    let blocks = x.cols / BLOCK;
    let items = if plan.swizzled {
        args.out.scale_bytes()
    } else {
        x.rows * blocks
    };
    let (count, dim) = grid(client, items);
    let across = if plan.swizzled && blocks.div_ceil(4).is_multiple_of(ACROSS) {
        ACROSS
    } else {
        1
    };
    let whole_tiles = matches!(count, CubeCount::Static(cubes, ..)
        if (cubes * dim.x).is_multiple_of(512 * across as u32));
    // SAFETY: the kernel stays below the number of blocks, and the buffers were checked for it.
    unsafe {
        quantize_row_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(items)),
            words.width,
            words.arg(),
            args.target(),
            values.map_or(QuantOutArgs::Absent, memory_of),
            RowGroupsLaunch::new(group_offsets, group_count),
            x.rows,
            blocks,
            RowPlan {
                quant: plan,
                across,
                whole_tiles,
                find_groups,
                with_values: values.is_some(),
                kind: x.dtype,
            },
        );
    }
}

/// Neighbouring 128x4 scale tiles that are quantized together, if rows have a multiple of them:
/// their blocks of a row are 256 bytes of `x`, those of one tile 128.
const ACROSS: usize = 2;

/// Comptime configuration of [`quantize_row_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowPlan {
    /// Configuration of the tensor.
    pub quant: QuantPlan,
    /// 128x4 scale tiles that are quantized together.
    pub across: usize,
    /// True if the number of units of the grid is a multiple of the `512 across` blocks of such
    /// tiles.
    pub whole_tiles: bool,
    /// True if the amax of a row is that of its group.
    pub find_groups: bool,
    /// True to write values in addition to codes and scales.
    pub with_values: bool,
    /// Element type of `x`.
    pub kind: FloatKind,
}

/// Groups of rows. Not read if there is one group, or if each row has its own amax.
#[derive(CubeType, CubeLaunch)]
pub struct RowGroups {
    /// First row of each group, and end of the last one.
    pub offsets: Box<[u32]>,
    /// Number of groups.
    pub count: usize,
}

/// Each unit quantizes every `units`-th block. Blocks are processed row by row, or by `across`
/// 128x4 tiles of scales that are neighbours in a row of tiles, so that scale bytes are written
/// contiguously in both orders. With `find_groups`, rows after the last group are not written. A
/// cube then has neighbouring rows, so that its units rarely reach another group, which they find
/// by bisection and whose scale they compute.
///
/// `values` is an additional output with code times block scale, for a packed tensor.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_row_kernel<N: Size>(
    x: &[Vector<u32, N>],
    mut target: QuantTarget,
    mut values: QuantOut,
    groups: RowGroups,
    rows: usize,
    blocks: usize,
    #[comptime] rowwise: RowPlan,
) {
    let (plan, kind) = comptime!((rowwise.quant, rowwise.kind));
    let (across, whole_tiles) = comptime!((rowwise.across, rowwise.whole_tiles));
    let find_groups = comptime!(rowwise.find_groups);
    let writes_values = comptime!(plan.unscaled || rowwise.with_values);
    let policy = comptime!(plan.policy);
    let shared_scale = GlobalScale::from_amax(target.amax[0], policy.scaling);
    let random = target.draw.resolve(policy);
    let width = N::value();
    let per_block = comptime!(block_words(kind) / width);
    let padded_blocks = blocks.div_ceil(4);
    let items = if comptime!(plan.swizzled) {
        rows.div_ceil(128) * padded_blocks * 512usize
    } else if comptime!(find_groups) {
        min(groups.offsets[groups.count] as usize, rows) * blocks
    } else {
        rows * blocks
    };
    // For swizzled scales: the position of an item's tiles, updated without a division per item.
    let tile_items = comptime!(512 * across);
    let tile_cols = padded_blocks / across;
    let position = ABSOLUTE_POS / tile_items;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let whole = comptime!(plan.swizzled && whole_tiles);
    let mut tile_row = 0usize;
    let mut tile_col = 0usize;
    let mut row_step = 0usize;
    let mut col_step = 0usize;
    if comptime!(whole) {
        tile_row = position / tile_cols;
        tile_col = position - tile_row * tile_cols;
        row_step = (stride / tile_items) / tile_cols;
        col_step = stride / tile_items - row_step * tile_cols;
    }
    // Units that exchange halves of blocks stay together.
    let mut end = items;
    let mut item = ABSOLUTE_POS;
    let mut step = stride;
    if comptime!(writes_values) {
        end = items.div_ceil(32) * 32usize;
    }
    if comptime!(find_groups) {
        step = CUBE_DIM as usize;
        let share = items.div_ceil(stride) * step;
        item = CUBE_POS * share + UNIT_POS as usize;
        end = min(items, (CUBE_POS + 1usize) * share);
    }
    // Scale of the last group found, and end of its items.
    let mut group_amax = shared_scale.amax;
    let mut group_encode = shared_scale.encode;
    let mut group_block = shared_scale.block;
    let mut group_decode = shared_scale.decode;
    let mut group_end = 0usize;
    while item < end {
        let mut index = item;
        let mut scale_at = item;
        let mut inside = true;
        if comptime!(writes_values) {
            inside = item < items;
        }
        let mut block_codes = Vector::<u32, Const<2>>::new(0u32);
        let mut scale = 0u32;
        if comptime!(plan.swizzled) {
            let place = item % tile_items;
            if comptime!(!whole) {
                let tiles = item / tile_items;
                tile_row = tiles / tile_cols;
                tile_col = tiles % tile_cols;
            }
            // Rows 32 apart are neighbours in a tile.
            let place_row = place / comptime!(4 * across);
            let place_block = place % comptime!(4 * across);
            let row = tile_row * 128usize + place_row / 4usize + (place_row % 4usize) * 32usize;
            let block = tile_col * comptime!(4 * across) + place_block;
            inside = row < rows && block < blocks;
            index = row * blocks + block;
            scale_at = item - place
                + (place_block / 4usize) * 512usize
                + place_row * 4usize
                + place_block % 4usize;
            if comptime!(whole) {
                tile_row += row_step;
                tile_col += col_step;
                if tile_col >= tile_cols {
                    tile_col -= tile_cols;
                    tile_row += 1usize;
                }
            }
        }
        if inside {
            // Loaded first, because of its latency.
            let words = load_block_words::<N>(x, index * per_block, kind);
            let global = if comptime!(find_groups) {
                if index >= group_end {
                    let group = find_group(&groups.offsets, groups.count, index / blocks);
                    let scale = GlobalScale::from_amax(target.amax[group], policy.scaling);
                    group_amax = scale.amax;
                    group_encode = scale.encode;
                    group_block = scale.block;
                    group_decode = scale.decode;
                    group_end = groups.offsets[group + 1usize] as usize * blocks;
                }
                GlobalScale {
                    amax: group_amax,
                    encode: group_encode,
                    block: group_block,
                    decode: group_decode,
                }
            } else if comptime!(plan.per_row) {
                scale_of(&shared_scale, &target.amax, index / blocks, plan)
            } else {
                scale_of(&shared_scale, &target.amax, 0usize, plan)
            };
            let block = row_block(&words, &target.draw.signs, plan, kind);
            let logical = target.draw.number(index, blocks, policy);
            let largest = row_amax_of(&words, &block, false, plan, kind);
            let encoded =
                quantize_with_amax(&block, 0usize, largest, &global, logical, &random, policy);
            if comptime!(writes_values) {
                block_codes = encoded.codes;
                scale = encoded.scale;
            }
            if comptime!(!plan.unscaled) {
                target.out.store_codes(index, encoded.codes);
                target.out.store_scale(scale_at, encoded.scale);
            }
        } else if comptime!(plan.swizzled) {
            target.out.store_scale(scale_at, 0u32.runtime());
        }
        if comptime!(writes_values) {
            let block = Encoded {
                scale,
                codes: block_codes,
            };
            // One of these outputs takes values.
            let conversion = comptime!(policy.conversion);
            target.out.store_values(index, &block, inside, conversion);
            values.store_values(index, &block, inside, conversion);
        }
        item += step;
    }
}

/// Returns the scale of stored row `outer`: its own if each row has one, otherwise the one for all.
#[cube]
fn scale_of(
    all: &GlobalScale,
    amax: &[f32],
    outer: usize,
    #[comptime] plan: QuantPlan,
) -> GlobalScale {
    if comptime!(plan.per_row) {
        GlobalScale::from_amax(amax[outer], plan.policy.scaling)
    } else {
        GlobalScale {
            amax: all.amax,
            encode: all.encode,
            block: all.block,
            decode: all.decode,
        }
    }
}

/// Returns the values of one block of a rowwise tensor, transformed if the plan requires it.
#[cube]
pub(super) fn row_block(
    words: &Array<u32>,
    signs: &Signs,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let mut block = unpack_block(words, kind);
    if comptime!(plan.hadamard.is_some()) {
        #[unroll]
        for i in 0..16usize {
            let flip = signs.bit(i) << 31u32;
            block[i] = f32::reinterpret(u32::reinterpret(block[i]) ^ flip);
        }
        butterfly(&mut block, HadamardSize::H16);
        normalize(&mut block, HadamardSize::H16, plan.policy.conversion);
    }
    block
}

/// Returns the largest magnitude of a block along a row, computed from words if these are bf16
/// pairs.
#[cube]
pub(super) fn row_amax_of(
    words: &Array<u32>,
    block: &Array<f32>,
    #[comptime] tiles: bool,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) -> f32 {
    let conversion = comptime!(plan.policy.conversion);
    if comptime!(tiles) {
        // The amax of the tile applies.
        0.0f32.runtime()
    } else if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none())
    {
        pairs_amax(words, 0usize)
    } else {
        block_amax(block, 0usize, conversion)
    }
}
