//! Quantization of a matrix to a microscaling format.

use cubecl::prelude::*;

use super::{
    super::{
        target::TargetSpec,
        tile::{Grouping, in_bands, tile_from},
    },
    columns::{ColumnPlace, MxTiles, Staging, TILE_COLS, TILE_ROWS, Tiles, quantize_tile_columns},
    plan::{MxPlan, MxRowPlan, empty_of_groups},
    rows::{MxRows, RowTiles, amax_of, max_of_lanes, row_block},
};
use crate::{
    MX_BLOCK, Nvfp4Error, Usage,
    capabilities::is_cpu,
    cube::{
        codec::load,
        mx::{decode_ue8m0_reciprocal, encode_word, mx_scale},
    },
    format::{block::ElementFormat, check_mx},
    launch::{buffer, grid, vector_size},
    memory::address_type,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Quantizes each group of rows of `x` to a microscaling format with blocks along `usage`, in the
/// form that grouped GEMMs read: one plain matrix. The last block of a row is padded with zeros.
///
/// Along [`Usage::Rowwise`] this is the tensor of all rows; columnwise tensors are stored
/// transposed. Along [`Usage::Columnwise`]:
/// - Tensors of [`Groups::Batch`] are stacked. They are rowwise tensors of the transposed matrices,
///   and the result is labelled as such: `count * x.cols` rows of `x.rows / count`, packed along
///   [`Usage::Rowwise`].
/// - Tensors of [`Groups::Offsets`] are concatenated along the columns: `x.cols` stored rows, in
///   each of which group `g` takes the elements from entry `g` of
///   [`GroupOffsets::aligned`](crate::moe::GroupOffsets::aligned)`(client, x.rows, 32)` on. There
///   is space for [`padded_bound`](crate::reference::padding::padded_bound)`(x.rows, count, 32)`
///   elements; blocks after the last group are not written.
///
/// Scales in 128x4 tiles have the layout in which GEMMs with these groups read them. Tiles start
/// anew at each matrix of a batch and, along [`Usage::Rowwise`], at each group of rows, as recorded
/// in the groups of the result; rows that belong to no group are then not written. Tensors
/// concatenated along the columns have the tiles of one matrix, in which a group may begin within a
/// tile.
///
/// # Errors
/// Returns an error if the format is no microscaling format.
pub(in crate::quantize) fn mx_quantize(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    target: &TargetSpec,
) -> Result<DeviceQuantized, Nvfp4Error> {
    check_mx(target.params.format)?;
    let out = empty_of_groups(client, (x.rows, x.cols), groups, usage, target);
    if x.is_empty() {
        return Ok(out);
    }
    let plan = MxPlan::new(client, target, x.dtype);
    let blocks = out.blocks();
    let elements = x.len().max(out.code_blocks() * MX_BLOCK);
    let width = vector_size(x.dtype, x.cols);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let source = unsafe { buffer(&x.handle, x.len() / width) };
    let codes = |words: usize| unsafe { buffer(&out.codes, out.code_bytes() / (4 * words)) };
    let scales = unsafe { buffer(&out.scales, out.scale_bytes()) };
    match usage {
        Usage::Rowwise => {
            let lanes = lanes(client, x.dtype, plan.element);
            let stored = 2.min(plan.block_words() / lanes);
            let tiles = RowTiles::new((x.rows, x.cols), groups, plan.swizzled);
            let plan = MxRowPlan {
                dense: x.cols.is_multiple_of(MX_BLOCK),
                lanes,
                tiles: tiles.grouping(),
                mx: plan,
            };
            let items = tiles.blocks() * lanes;
            let (count, dim) = grid(client, items);
            // SAFETY: the kernel stays below the number of blocks and the columns.
            unsafe {
                mx_quantize_row_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    // With padded tiles of few rows there are more units than matrix elements.
                    address_type(elements.max(items)),
                    width,
                    stored,
                    source,
                    codes(stored),
                    scales,
                    tiles.args(client, 1, &out.scales),
                    plan,
                    x.dtype.storage_type(),
                );
            }
        }
        Usage::Columnwise => {
            let tiles = Tiles::new(client, (x.rows, x.cols), groups, plan.swizzled);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                mx_quantize_col_kernel::launch_unchecked(
                    client,
                    tiles.count.clone(),
                    tiles.dim,
                    address_type(elements.max(out.scale_bytes())),
                    width,
                    source,
                    codes(4),
                    scales,
                    tiles.args(client, blocks, &out.scales),
                    Grouping::of(groups),
                    plan,
                    x.dtype.storage_type(),
                );
            }
        }
    }
    Ok(out)
}

/// Returns the number of units that share a block of a row: each loads 16 bytes if possible, so
/// that loads of neighbours are contiguous.
fn lanes(client: &Client, dtype: FloatKind, element: ElementFormat) -> usize {
    if is_cpu(client) {
        1
    } else {
        // At least one word of codes per unit.
        (MX_BLOCK * dtype.size() / 16).min(element.bits())
    }
}

/// `lanes` neighbouring units quantize one block of a row; `dense` means that rows consist of whole
/// blocks. All units of a cube stay in the loop together, because they exchange the amax.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_quantize_row_kernel<F: Numeric, N: Size, M: Size>(
    x: &[Vector<F, N>],
    codes: &mut [Vector<u32, M>],
    scales: &mut [u8],
    rows: MxRows,
    #[comptime] row_plan: MxRowPlan,
    #[define(F)] _storage: ElemType,
) {
    let (dense, lanes) = comptime!((row_plan.dense, row_plan.lanes));
    let (plan, kind) = comptime!((row_plan.mx, row_plan.mx.kind));
    let width = N::value();
    let stored = M::value();
    let elements = comptime!(32 / lanes);
    let per_word = comptime!(plan.per_word());
    let cols = rows.shape.cols;
    let vectors = cols / width;
    let items = rows.blocks(row_plan) * lanes;
    let mut base = CUBE_POS * CUBE_DIM as usize;
    while base < items {
        let item = base + UNIT_POS as usize;
        let lane = item % lanes;
        let at = row_block(item / lanes, &rows, row_plan);
        let inside = item < items && at.inside;
        // Index of the unit's part among those of all blocks.
        let part = at.stored * lanes + lane;
        let mut values = Array::<f32>::new(elements);
        // The vector width divides the number of columns: a vector is either within bounds or after
        // the end.
        #[unroll]
        for v in 0..comptime!(elements / width) {
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if comptime!(dense) {
                if inside {
                    vector = x[part * comptime!(elements / width) + v];
                }
            } else {
                let first = at.block * 32usize + lane * elements;
                let position = first + comptime!(v * width);
                if inside && position < cols {
                    vector = x[at.row * vectors + position / width];
                }
            }
            #[unroll]
            for i in 0..width {
                values[comptime!(v * width + i)] = load::<F>(vector.extract(i), kind);
            }
        }
        let amax = max_of_lanes(amax_of(&values, elements), lanes);
        let scale = mx_scale(amax, plan.element);
        let multiplier = decode_ue8m0_reciprocal(scale);
        if inside {
            #[unroll]
            for v in 0..comptime!(elements / per_word / stored) {
                let mut words = Vector::<u32, M>::empty();
                #[unroll]
                for w in 0..stored {
                    let first = comptime!((v * stored + w) * per_word);
                    let word = encode_word(&values, first, multiplier, plan.element, plan.hardware);
                    words.insert(w, word);
                }
                codes[part * comptime!(elements / per_word / stored) + v] = words;
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

/// Each cube quantizes the column blocks of every `cubes`-th tile of 128 x 64; neighbouring cubes
/// take tiles of a band of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_quantize_col_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    tiles: MxTiles,
    #[comptime] grouping: Grouping,
    #[comptime] plan: MxPlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let mut tile = Shared::<[Vector<F, Const<1>>]>::new_aligned_slice(
        comptime!(TILE_ROWS * TILE_COLS),
        16usize,
    );
    let mut staging = Staging::new(plan.element);
    let shape = &tiles.shape;
    let cols = shape.cols;
    let vectors = cols / width;
    let mut index = CUBE_POS;
    while index < tiles.row_tiles * shape.tile_cols {
        let place = in_bands(index, tiles.row_tiles, shape.tile_cols, tiles.band);
        let col0 = place.col * comptime!(TILE_COLS);
        let at = tile_from(&tiles.map, place.row, col0, shape, 32usize, grouping);
        if comptime!(grouping == Grouping::One) || at.row0 < at.row_end {
            let wide = tile.as_mut_slice().with_vector_size_mut::<N>();
            let mut item = UNIT_POS as usize;
            while item < comptime!(TILE_ROWS * TILE_COLS / width) {
                let row = at.row0 + item / comptime!(TILE_COLS / width);
                let col = col0 + (item % comptime!(TILE_COLS / width)) * width;
                let mut vector = Vector::<F, N>::new(F::from_int(0));
                if row < at.row_end && col < cols {
                    vector = x[row * vectors + col / width];
                }
                wide[item] = vector;
                item += CUBE_DIM as usize;
            }
            sync_cube();
            let place = ColumnPlace::new(&at, cols, tiles.row_blocks, grouping);
            let tile = tile.as_slice();
            quantize_tile_columns::<F>(tile, &mut staging, codes, scales, &place, grouping, plan);
            // The next tile overwrites data that slower units may still read.
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}
