//! Quantization from a given amax: row-wise, column-wise, both in one read, and 16x16 tiles.

use cubecl::{prelude::*, server::Handle};

use super::{
    groups::GroupOffsets,
    launch::{CopyArgs, CopyPlan, CopyRequest, Words, buffer, check_packed_cols, cubes, grid},
    tile::{self, Grouping, Shape, ShapeLaunch},
};
use crate::{
    BLOCK, BlockScaling, ErrorNorm, Hadamard, HadamardSize, Nvfp4Error, PackedAxis, ScaleLayout,
    cube::{
        block::{
            block_amax, candidate, candidate_scales, encode_block, quantize_block, resolve_offset,
        },
        codec::magnitude_bits,
        hadamard::{Signs, butterfly, normalize},
        philox::Random,
        scale::GlobalScale,
        words::{block_words, load_block_words, unpack_block},
    },
    device::{
        AmaxScope, DeviceCopy, DevicePacked, DeviceRounding, FloatKind, Groups, Matrix,
        address_type, conversion_of,
    },
    reference::padding::padded_bound,
};

/// The row-wise copy of `x` with one amax and compact scales: 1x16 blocks along each row. See
/// [`reference::quantize_row`](crate::reference::quantize_row).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
pub fn quantize_row(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
) -> Result<DevicePacked, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        PackedAxis::Cols,
        &plain(amax, rounding, None),
    )
}

/// The column-wise copy of `x` with one amax and compact scales: 16x1 blocks down each column, stored
/// transposed, the last block padded with zeros; transformed first with `hadamard`, in which case
/// `amax` is that of the transformed values. See
/// [`reference::quantize_col`](crate::reference::quantize_col).
///
/// # Errors
/// When a buffer is smaller than its shape.
pub fn quantize_col(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
    hadamard: Option<Hadamard>,
) -> Result<DevicePacked, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        PackedAxis::Rows,
        &plain(amax, rounding, hadamard),
    )
}

fn plain(amax: &Handle, rounding: DeviceRounding, hadamard: Option<Hadamard>) -> CopyRequest<'_> {
    CopyRequest {
        amax,
        scope: AmaxScope::Group,
        copy: DeviceCopy {
            hadamard,
            ..DeviceCopy::new(rounding)
        },
    }
}

/// One copy of `x`, along `axis`. See [`reference::quantize`](crate::reference::quantize); with
/// groups, each group is quantized as a matrix of its own, but for the block indices of stochastic
/// rounding, which go on from group to group.
///
/// # Errors
/// When the packed axis of a row-wise copy is no multiple of 16 (with a transform, of its size), four
/// over six is asked to round stochastically, the groups do not fit, or a buffer is smaller than its
/// shape.
pub fn quantize(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    axis: PackedAxis,
    request: &CopyRequest<'_>,
) -> Result<DevicePacked, Nvfp4Error> {
    if axis == PackedAxis::Cols && matches!(groups, Groups::One) {
        return quantize_rows(client, x, request);
    }
    let (row, col) = match axis {
        PackedAxis::Cols => (Some(request), None),
        PackedAxis::Rows => (None, Some(request)),
    };
    let (row, col) = launch_tiles(client, x, groups, row, col, Kind::Blocks)?;
    Ok(row.or(col).expect("one copy was asked for"))
}

/// Both copies of `x` from one read of it: `(row-wise, column-wise)`, each as [`quantize`] makes it.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_both(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: &CopyRequest<'_>,
    col: &CopyRequest<'_>,
) -> Result<(DevicePacked, DevicePacked), Nvfp4Error> {
    let (row, col) = launch_tiles(client, x, groups, Some(row), Some(col), Kind::Blocks)?;
    Ok((row.expect("asked for"), col.expect("asked for")))
}

/// The copies of `x` that are asked for, `(row-wise, column-wise)`, each as [`quantize`] makes it of
/// the groups, as operands of the grouped products: plain matrices, with one amax for each group.
///
/// The row-wise copy is that of [`quantize`]. In the column-wise one the groups lie side by side and
/// not one after another: `cols` stored rows, in each of which group `g` takes the columns from entry
/// `g` of [`GroupOffsets::aligned`]`(client, x.rows, unit)` on, `unit` being 16 or the size of the
/// transform. It has room for [`padded_bound`]`(x.rows, groups, unit)` of them; those behind the last
/// group are not written. Rows of `x` behind the last group are not written in the row-wise copy.
/// Stochastic rounding numbers blocks as [`quantize`] does, group after group.
///
/// # Errors
/// As [`quantize`], and when scales are to be swizzled, or there is more than one amax to a group.
pub fn quantize_side_by_side(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    row: Option<&CopyRequest<'_>>,
    col: Option<&CopyRequest<'_>>,
) -> Result<(Option<DevicePacked>, Option<DevicePacked>), Nvfp4Error> {
    for request in [row, col].into_iter().flatten() {
        if request.copy.layout != ScaleLayout::Compact || request.scope != AmaxScope::Group {
            return Err(Nvfp4Error::value(
                "copy",
                format!(
                    "{:?} scales, one amax for each {:?}",
                    request.copy.layout, request.scope
                ),
                "compact scales, one amax for each group",
            ));
        }
    }
    let groups = Groups::Offsets {
        offsets: groups.offsets.clone(),
        count: groups.count,
    };
    if row.is_none() && col.is_none() {
        return Ok((None, None));
    }
    let (row, col) = launch_tiles(client, x, &groups, row, col, Kind::SideBySide)?;
    let row = row.map(|row| DevicePacked {
        groups: Groups::One,
        ..row
    });
    Ok((row, col))
}

/// Both copies of `x` in 16x16 tiles, rounded to nearest: `(row-wise, column-wise)`, the second the
/// exact transpose of the first. See
/// [`reference::quantize_tile`](crate::reference::quantize_tile).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
pub fn quantize_tile(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
) -> Result<(DevicePacked, DevicePacked), Nvfp4Error> {
    let layouts = [ScaleLayout::Compact; 2];
    quantize_tile_with(
        client,
        x,
        &Groups::One,
        amax,
        BlockScaling::Standard,
        layouts,
    )
}

/// [`quantize_tile`] of every group, with one amax for each, any scaling, and scales in `layouts`
/// (row-wise, column-wise). Four over six decides once for a tile.
///
/// # Errors
/// As [`quantize_tile`], and when the groups do not fit.
pub fn quantize_tile_with(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    amax: &Handle,
    scaling: BlockScaling,
    layouts: [ScaleLayout; 2],
) -> Result<(DevicePacked, DevicePacked), Nvfp4Error> {
    let [row, col] = layouts.map(|layout| CopyRequest {
        amax,
        scope: AmaxScope::Group,
        copy: DeviceCopy {
            scaling,
            layout,
            ..DeviceCopy::new(DeviceRounding::Nearest)
        },
    });
    let (row, col) = launch_tiles(client, x, groups, Some(&row), Some(&col), Kind::Tiles)?;
    Ok((row.expect("asked for"), col.expect("asked for")))
}

fn check_row_transform(copy: &DeviceCopy) -> Result<(), Nvfp4Error> {
    match copy.hadamard {
        Some(hadamard) if hadamard.size() != HadamardSize::H16 => Err(Nvfp4Error::value(
            "hadamard",
            format!("{:?} on a row-wise copy", hadamard.size()),
            "H16 there; larger transforms on column-wise copies",
        )),
        _ => Ok(()),
    }
}

fn quantize_rows(
    client: &Client,
    x: &Matrix,
    request: &CopyRequest<'_>,
) -> Result<DevicePacked, Nvfp4Error> {
    x.check("x")?;
    check_packed_cols(x)?;
    check_row_transform(&request.copy)?;
    let conversion = conversion_of(client);
    let args = CopyArgs::new(
        client,
        x,
        &Groups::One,
        PackedAxis::Cols,
        request,
        conversion,
    )?;
    if x.is_empty() {
        return Ok(args.out);
    }
    let words = Words::of(x);
    let blocks = x.cols / BLOCK;
    let items = if args.plan.swizzled {
        args.out.scale_bytes()
    } else {
        x.rows * blocks
    };
    let (count, dim) = grid(client, items);
    // SAFETY: the kernel stays below the number of blocks, and the buffers were checked for it.
    unsafe {
        quantize_row_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(items)),
            words.width,
            words.arg(),
            args.amax(),
            args.codes(),
            args.scales(),
            args.offset(),
            args.random(),
            args.signs(),
            x.rows,
            blocks,
            args.plan,
            x.dtype,
        );
    }
    Ok(args.out)
}

/// What [`launch_tiles`] makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// 1x16 blocks, the copies of groups one after another.
    Blocks,
    /// 16x16 tiles, the copies of groups one after another.
    Tiles,
    /// 1x16 blocks, the column-wise copies of groups side by side in one matrix.
    SideBySide,
}

fn launch_tiles(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: Option<&CopyRequest<'_>>,
    col: Option<&CopyRequest<'_>>,
    kind: Kind,
) -> Result<(Option<DevicePacked>, Option<DevicePacked>), Nvfp4Error> {
    x.check("x")?;
    groups.check(x.rows)?;
    if let Some(row) = row {
        check_packed_cols(x)?;
        check_row_transform(&row.copy)?;
    }
    let conversion = conversion_of(client);
    let args = |axis, request: Option<&CopyRequest<'_>>| {
        request
            .map(|request| CopyArgs::new(client, x, groups, axis, request, conversion))
            .transpose()
    };
    let row = args(PackedAxis::Cols, row)?;
    let mut col = args(PackedAxis::Rows, col)?;
    if let (Kind::SideBySide, Some(col)) = (kind, &mut col) {
        let out = DevicePacked {
            groups: Groups::One,
            rows: padded_bound(x.rows, groups.count(), col.out.unit()),
            ..col.out.clone()
        };
        col.out = out.allocated(client);
    }
    let side_by_side = match &col {
        Some(col) if kind == Kind::SideBySide => col.out.blocks(),
        _ => 0,
    };
    let swizzled_cols = col.as_ref().is_some_and(|col| col.plan.swizzled);
    // Swizzled scales of a column-wise copy are padded to 128 stored rows, which are columns here.
    let unit = if swizzled_cols { 128 } else { tile::COLS };
    let tile_cols = x.cols.next_multiple_of(unit) / tile::COLS;
    let row_tiles = groups.units(x.rows, tile::ROWS);
    if x.is_empty() {
        return Ok((row.map(|row| row.out), col.map(|col| col.out)));
    }
    let words = Words::of(x);
    let plan = TilePlan {
        row: row.as_ref().map(|row| row.plan),
        col: col.as_ref().map(|col| col.plan),
        tiles: kind == Kind::Tiles,
        side_by_side: kind == Kind::SideBySide,
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
    };
    let (count, dim) = cubes(client, row_tiles * tile_cols);
    // An absent copy's arguments are those of the other one; its buffers are not touched.
    let (r, c) = match (&row, &col) {
        (Some(row), Some(col)) => (row, col),
        (Some(copy), None) | (None, Some(copy)) => (copy, copy),
        (None, None) => unreachable!("a copy was asked for"),
    };
    let offsets = match groups {
        // SAFETY: checked above.
        Groups::Offsets { offsets, count } => unsafe { buffer(offsets, count + 1) },
        _ => r.amax(),
    };
    let elements = (x.len())
        .max(c.out.code_blocks() * BLOCK)
        .max(r.out.code_blocks() * BLOCK);
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        quantize_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(elements),
            words.width,
            words.arg(),
            offsets,
            ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols),
            side_by_side,
            r.amax(),
            r.codes(),
            r.scales(),
            r.offset(),
            r.random(),
            r.signs(),
            c.amax(),
            c.codes(),
            c.scales(),
            c.offset(),
            c.random(),
            c.signs(),
            plan,
            x.dtype,
            words.elem,
        );
    }
    Ok((row.map(|row| row.out), col.map(|col| col.out)))
}

/// The comptime choices of `quantize_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// The row-wise copy, if it is made.
    pub row: Option<CopyPlan>,
    /// The column-wise copy, if it is made.
    pub col: Option<CopyPlan>,
    /// Whether 16x16 tiles share a scale.
    pub tiles: bool,
    /// Whether the column-wise copies of groups lie side by side.
    pub side_by_side: bool,
    /// How groups are given.
    pub grouping: Grouping,
    /// Whether `x` is loaded by elements.
    pub elements: bool,
}

impl TilePlan {
    /// Rows that a unit of the column-wise copy spans.
    const fn span(&self) -> usize {
        match self.col {
            Some(col) => tile::span(col.hadamard),
            None => 16,
        }
    }
}

/// One unit quantizes every `units`-th block. Blocks go in the order of the scales: row by row, or
/// 128x4 tile by tile, so that scale bytes are written side by side in both layouts.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_row_kernel<N: Size>(
    x: &[Vector<u32, N>],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [u8],
    offset: &[u32],
    random: Random,
    signs: Signs,
    rows: usize,
    blocks: usize,
    #[comptime] plan: CopyPlan,
    #[comptime] kind: FloatKind,
) {
    let policy = comptime!(plan.policy);
    let shared_scale = GlobalScale::from_amax(amax[0], policy.scaling);
    let random = resolve_offset(&random, offset, policy);
    let width = N::value();
    let per_block = comptime!(block_words(kind) / width);
    let padded_blocks = blocks.div_ceil(4);
    let items = if comptime!(plan.swizzled) {
        rows.div_ceil(128) * padded_blocks * 512usize
    } else {
        rows * blocks
    };
    let mut item = ABSOLUTE_POS;
    while item < items {
        let mut index = item;
        let mut inside = true;
        if comptime!(plan.swizzled) {
            let tile = item / 512usize;
            let place = item % 512usize;
            let row = (tile / padded_blocks) * 128usize
                + (place / 16usize)
                + ((place / 4usize) % 4usize) * 32usize;
            let block = (tile % padded_blocks) * 4usize + place % 4usize;
            inside = row < rows && block < blocks;
            index = row * blocks + block;
        }
        if inside {
            let global = scale_of(&shared_scale, amax, index / blocks, plan);
            let words = load_block_words::<N>(x, index * per_block, kind);
            let block = row_block(&words, &signs, plan, kind);
            let logical = u64::cast_from(index);
            let encoded = quantize_block(&block, 0usize, &global, logical, &random, policy);
            codes[index] = encoded.codes;
            scales[item] = u8::cast_from(encoded.scale);
        } else {
            scales[item] = 0u8;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The scale that governs stored row `outer`: its own, where each has one, or the one for all.
#[cube]
fn scale_of(
    all: &GlobalScale,
    amax: &[f32],
    outer: usize,
    #[comptime] plan: CopyPlan,
) -> GlobalScale {
    if comptime!(plan.per_outer) {
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

/// The values of one block of a row-wise copy, transformed where the plan says so.
#[cube]
pub(super) fn row_block(
    words: &Array<u32>,
    signs: &Signs,
    #[comptime] plan: CopyPlan,
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

/// Words from one column to the next where codes wait to be written: two for each of eight blocks,
/// and one that spreads columns over banks.
const STAGE_PITCH: usize = 17;

/// One cube makes the copies of one tile at a time: it loads the tile, its units quantize the blocks
/// of rows, then those of columns, whose codes and scales wait in shared memory until whole columns
/// of the tile, 64 bytes of codes, can be written side by side. `row_blocks` is the length of a stored
/// row of the column-wise copy where the groups lie side by side.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_tiles_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    offsets: &[u32],
    shape: Shape,
    row_blocks: usize,
    row_amax: &[f32],
    row_codes: &mut [Vector<u32, Const<2>>],
    row_scales: &mut [u8],
    row_offset: &[u32],
    row_random: Random,
    row_signs: Signs,
    col_amax: &[f32],
    col_codes: &mut [Vector<u32, Const<2>>],
    col_scales: &mut [u8],
    col_offset: &[u32],
    col_random: Random,
    col_signs: Signs,
    #[comptime] plan: TilePlan,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let pitch = comptime!(tile::pitch(kind));
    let mut data: Shared<[u32]> = Shared::new_slice(comptime!(tile::ROWS * pitch));
    let grouping = comptime!(plan.grouping);
    let span = comptime!(plan.span());
    let groups = tile::plan_groups(offsets, &shape, span, grouping);
    let tiles = groups.row_tiles(&shape, grouping) * shape.tile_cols;
    let blocks = shape.cols / 16usize;
    let padded_blocks = blocks.div_ceil(4);
    // Scales of 16x16 tiles: eight rows of four.
    let mut tile_scales: Shared<[u32]> = Shared::new_slice(32usize);
    let mut partial: Shared<[u32]> =
        Shared::new_slice(comptime!(if plan.tiles { 1024usize } else { 1usize }));

    let mut index = CUBE_POS;
    while index < tiles {
        let tile = groups.locate(index, &shape, span, grouping);
        tile::load_tile::<F, N>(x, &mut data, &tile, &shape, plan.elements, kind);
        sync_cube();

        if comptime!(plan.tiles) {
            let row = comptime!(plan.row.unwrap());
            let global = GlobalScale::from_amax(row_amax[tile.group], row.policy.scaling);
            choose_tile_scales(&data, &mut partial, &mut tile_scales, &global, row, kind);
        }

        if comptime!(plan.row.is_some()) {
            let row = comptime!(plan.row.unwrap());
            let policy = comptime!(row.policy);
            let random = resolve_offset(&row_random, row_offset, policy);
            let group_scale = if comptime!(row.per_outer) {
                GlobalScale::from_amax(1.0f32, policy.scaling)
            } else {
                GlobalScale::from_amax(row_amax[tile.group], policy.scaling)
            };
            let mut item = UNIT_POS as usize;
            while item < 512usize {
                let r = item / 4usize;
                let row_index = tile.row0 + r;
                let block_index = tile.col0 / 16usize + item % 4usize;
                let inside = row_index < tile.row_end && block_index < blocks;
                let stored = row_index * blocks + block_index;
                let mut scale = 0u32;
                if inside {
                    let mut words = Array::<u32>::new(comptime!(block_words(kind)));
                    let start = r * pitch + (item % 4usize) * comptime!(block_words(kind));
                    #[unroll]
                    for i in 0..comptime!(block_words(kind)) {
                        words[i] = data[start + i];
                    }
                    let block = row_block(&words, &row_signs, row, kind);
                    let global = scale_of(&group_scale, row_amax, row_index, row);
                    let logical = u64::cast_from(stored);
                    if comptime!(plan.tiles) {
                        scale = tile_scales[(r / 16usize) * 4usize + item % 4usize];
                        let multiplier = global.encode_multiplier(scale, policy.conversion);
                        row_codes[stored] =
                            encode_block(&block, 0usize, multiplier, logical, &random, policy);
                    } else {
                        let encoded =
                            quantize_block(&block, 0usize, &global, logical, &random, policy);
                        scale = encoded.scale;
                        row_codes[stored] = encoded.codes;
                    }
                }
                if comptime!(row.swizzled) {
                    // Columns of tiles beyond these pad a column-wise copy only.
                    if tile.col0 / 64usize < padded_blocks {
                        let target = (tile.row_tile * padded_blocks + tile.col0 / 64usize)
                            * 512usize
                            + (r % 32usize) * 16usize
                            + (r / 32usize) * 4usize
                            + item % 4usize;
                        row_scales[target] = u8::cast_from(scale);
                    }
                } else if inside {
                    row_scales[stored] = u8::cast_from(scale);
                }
                item += CUBE_DIM as usize;
            }
        }

        if comptime!(plan.col.is_some()) {
            let col = comptime!(plan.col.unwrap());
            let policy = comptime!(col.policy);
            let random = resolve_offset(&col_random, col_offset, policy);
            let mut stage: Shared<[u32]> = Shared::new_slice(comptime!(tile::COLS * STAGE_PITCH));
            let mut stage_scales: Shared<[u32]> = Shared::new_slice(comptime!(tile::COLS * 8));
            let per_word = comptime!(4 / kind.size());
            let words = comptime!(tile::words(kind));
            // Blocks of one stored row of this group's copy, and the first of them in this tile.
            let per_unit = comptime!(span / 16);
            let group_blocks = (tile.row_end - tile.group_row0).div_ceil(span) * per_unit;
            let block0 = (tile.row0 - tile.group_row0) / 16usize;
            let base = shape.cols * tile.units_before * per_unit;
            // Where the group's copy begins in memory, and from one stored row to the next. Random
            // bits are drawn for the same blocks in either order.
            let mut start = base;
            let mut row_pitch = group_blocks;
            if comptime!(plan.side_by_side) {
                start = tile.units_before * per_unit;
                row_pitch = row_blocks;
            }
            let group_scale = if comptime!(col.per_outer) {
                GlobalScale::from_amax(1.0f32, policy.scaling)
            } else {
                GlobalScale::from_amax(col_amax[tile.group], policy.scaling)
            };

            let mut item = UNIT_POS as usize;
            while item < comptime!(words * (tile::ROWS / span)) {
                let word = item % words;
                let chunk = item / words;
                let first = block0 + chunk * per_unit;
                if first < group_blocks {
                    let column_words =
                        tile::load_words(&data, chunk * span, word, &col_signs, col.hadamard, kind);
                    #[unroll]
                    for half in 0..comptime!(per_word as u32) {
                        let c = word * per_word + half as usize;
                        let column = tile.col0 + c;
                        if column < shape.cols {
                            let mut values =
                                tile::unpack_column(&column_words, half, col.hadamard, kind);
                            if comptime!(col.hadamard.is_some()) {
                                let size = comptime!(col.hadamard.unwrap());
                                butterfly(&mut values, size);
                                normalize(&mut values, size, policy.conversion);
                            }
                            let outer = tile.group * shape.cols + column;
                            let global = scale_of(&group_scale, col_amax, outer, col);
                            // Neighbouring units hold neighbouring words, so the halves lie apart.
                            let slot = comptime!(half as usize * words) + word;
                            #[unroll]
                            for b in 0..per_unit {
                                let stored = base + column * group_blocks + first + b;
                                let logical = u64::cast_from(stored);
                                let place = chunk * per_unit + b;
                                let from = comptime!(b * 16);
                                if comptime!(plan.tiles) {
                                    let scale = tile_scales[place * 4usize + c / 16usize];
                                    let multiplier =
                                        global.encode_multiplier(scale, policy.conversion);
                                    let codes = encode_block(
                                        &values, from, multiplier, logical, &random, policy,
                                    );
                                    stage[slot * STAGE_PITCH + place * 2usize] =
                                        codes.extract(0usize);
                                    stage[slot * STAGE_PITCH + place * 2usize + 1usize] =
                                        codes.extract(1usize);
                                    stage_scales[slot * 8usize + place] = scale;
                                } else {
                                    let encoded = quantize_block(
                                        &values, from, &global, logical, &random, policy,
                                    );
                                    stage[slot * STAGE_PITCH + place * 2usize] =
                                        encoded.codes.extract(0usize);
                                    stage[slot * STAGE_PITCH + place * 2usize + 1usize] =
                                        encoded.codes.extract(1usize);
                                    stage_scales[slot * 8usize + place] = encoded.scale;
                                }
                            }
                        }
                    }
                }
                item += CUBE_DIM as usize;
            }
            sync_cube();

            let padded_group = group_blocks.div_ceil(4);
            let padded_base = shape.cols.div_ceil(128)
                * 128usize
                * tile.padded_before
                * comptime!(if span < 64 { 4 } else { span / 16 });
            let mut item = UNIT_POS as usize;
            while item < comptime!(tile::COLS * 8) {
                let c = item / 8usize;
                let place = item % 8usize;
                let column = tile.col0 + c;
                let block = block0 + place;
                let inside = column < shape.cols && block < group_blocks;
                let slot = (c % per_word) * words + c / per_word;
                let mut scale = 0u32;
                if inside {
                    let mut codes = Vector::<u32, Const<2>>::empty();
                    codes.insert(0usize, stage[slot * STAGE_PITCH + place * 2usize]);
                    codes.insert(1usize, stage[slot * STAGE_PITCH + place * 2usize + 1usize]);
                    scale = stage_scales[slot * 8usize + place];
                    col_codes[start + column * row_pitch + block] = codes;
                }
                if comptime!(col.swizzled) {
                    if block < padded_group * 4usize {
                        let target = padded_base
                            + ((column / 128usize) * padded_group + block / 4usize) * 512usize
                            + (column % 32usize) * 16usize
                            + ((column % 128usize) / 32usize) * 4usize
                            + block % 4usize;
                        col_scales[target] = u8::cast_from(scale);
                    }
                } else if inside {
                    col_scales[start + column * row_pitch + block] = u8::cast_from(scale);
                }
                item += CUBE_DIM as usize;
            }
        }
        sync_cube();
        index += CUBE_COUNT;
    }
}

/// The scale bytes of the 32 16x16 tiles of a tile in shared memory. Synchronises before it returns.
#[cube]
fn choose_tile_scales(
    data: &Shared<[u32]>,
    partial: &mut Shared<[u32]>,
    scales: &mut Shared<[u32]>,
    global: &GlobalScale,
    #[comptime] plan: CopyPlan,
    #[comptime] kind: FloatKind,
) {
    let conversion = comptime!(plan.policy.conversion);
    let mut item = UNIT_POS as usize;
    while item < 512usize {
        let block = shared_block(data, item, kind);
        partial[item] = magnitude_bits(block_amax(&block, 0usize, conversion));
        item += CUBE_DIM as usize;
    }
    sync_cube();
    let mut item = UNIT_POS as usize;
    while item < 32usize {
        let first = (item / 4usize) * 64usize + item % 4usize;
        let mut bits = 0u32;
        for r in 0..16usize {
            bits = max(bits, partial[first + r * 4usize]);
        }
        let amax = f32::reinterpret(bits);
        scales[item] = match comptime!(plan.policy.scaling) {
            BlockScaling::FourOverSix(_) => {
                // Both candidates wait here, the one for 6 in the low byte.
                let both = candidate_scales(amax, global, conversion);
                both.extract(0usize) | (both.extract(1usize) << 8u32)
            }
            _ => global.block_scale(amax, plan.policy.scaling, conversion),
        };
        item += CUBE_DIM as usize;
    }
    sync_cube();
    if comptime!(matches!(plan.policy.scaling, BlockScaling::FourOverSix(_))) {
        let norm = comptime!(match plan.policy.scaling {
            BlockScaling::FourOverSix(norm) => norm,
            _ => ErrorNorm::Mae,
        });
        let mut item = UNIT_POS as usize;
        while item < 512usize {
            let block = shared_block(data, item, kind);
            let both = scales[(item / 64usize) * 4usize + item % 4usize];
            let six = candidate(&block, 0usize, both & 0xFFu32, global, norm, conversion);
            let four = candidate(&block, 0usize, both >> 8u32, global, norm, conversion);
            partial[item] = u32::reinterpret(six.error);
            partial[item + 512usize] = u32::reinterpret(four.error);
            item += CUBE_DIM as usize;
        }
        sync_cube();
        let mut item = UNIT_POS as usize;
        while item < 32usize {
            let first = (item / 4usize) * 64usize + item % 4usize;
            let six = sum_of_rows(&*partial, first);
            let four = sum_of_rows(&*partial, first + 512usize);
            let both = scales[item];
            scales[item] = select(four < six, both >> 8u32, both & 0xFFu32);
            item += CUBE_DIM as usize;
        }
        sync_cube();
    }
}

/// Block `item` of a tile in shared memory, four blocks to a row.
#[cube]
fn shared_block(data: &Shared<[u32]>, item: usize, #[comptime] kind: FloatKind) -> Array<f32> {
    let words = comptime!(block_words(kind));
    let start = (item / 4usize) * comptime!(tile::pitch(kind)) + (item % 4usize) * words;
    let mut bits = Array::<u32>::new(words);
    #[unroll]
    for i in 0..words {
        bits[i] = data[start + i];
    }
    unpack_block(&bits, kind)
}

/// The sum of the errors of 16 rows, by the tree of the specification (section 7).
#[cube]
fn sum_of_rows(errors: &Shared<[u32]>, first: usize) -> f32 {
    let mut rows = Array::<f32>::new(16usize);
    #[unroll]
    for r in 0..16usize {
        rows[r] = f32::reinterpret(errors[first + r * 4usize]);
    }
    #[unroll]
    for stage in 0..4u32 {
        let width = comptime!(8usize >> stage);
        #[unroll]
        for r in 0..width {
            rows[r] += rows[comptime!(r + width)];
        }
    }
    rows[0]
}
