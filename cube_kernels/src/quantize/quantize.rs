//! Quantization from a given amax: row-wise, column-wise, both in one read, and 16x16 tiles.

use cubecl::{prelude::*, server::Handle};

use super::{
    plan::{QuantArgs, QuantPlan, QuantRequest, check_packed_cols},
    prologue::{self, Input, Producer, Sink, Source},
    tile::{self, BAND, Grouping, Shape, ShapeLaunch, Tile},
    transpose,
};
use crate::launch::{Words, buffer, grid, tile_bands};
use crate::moe::groups::{GroupOffsets, find_group};
use crate::{
    BLOCK, BlockScaling, ErrorNorm, Hadamard, HadamardSize, Layout, Nvfp4Error, ScaleLayout,
    Storage, Usage,
    capabilities::conversion_of,
    cube::{
        block::{
            BlockPlan, Encoded, block_amax, candidate, candidate_scales, encode_block,
            max_of_pairs, pairs_amax, quantize_with_amax, resolve_offset, stays_below_7,
        },
        codec::{Conversion, magnitude_bits},
        hadamard::{Signs, butterfly, normalize, normalized_pairs, unpack_pairs},
        philox::Random,
        scale::{GlobalScale, swizzled_at},
        unscaled::{scale_pair, store_unscaled_block, store_unscaled_word},
        words::{block_words, load_block_words, unpack_block},
    },
    memory::address_type,
    reference::padding::padded_bound,
    tensor::{
        AmaxGranularity, DeviceQuantParams, DeviceQuantized, DeviceRounding, FloatKind, Groups,
        Matrix,
    },
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
) -> Result<DeviceQuantized, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        Usage::Rowwise,
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
) -> Result<DeviceQuantized, Nvfp4Error> {
    quantize(
        client,
        x,
        &Groups::One,
        Usage::Columnwise,
        &plain(amax, rounding, hadamard),
    )
}

fn plain(amax: &Handle, rounding: DeviceRounding, hadamard: Option<Hadamard>) -> QuantRequest<'_> {
    QuantRequest {
        amax,
        scope: AmaxGranularity::PerTensor,
        copy: DeviceQuantParams {
            hadamard,
            ..DeviceQuantParams::new(rounding)
        },
    }
}

/// One copy of `x` (or of what is computed from its inputs), along `usage`. See [`reference::quantize`](crate::reference::quantize); with
/// groups, each group is quantized as a matrix of its own, but for the block indices of stochastic
/// rounding, which go on from group to group.
///
/// # Errors
/// When the packed axis of a row-wise copy is no multiple of 16 (with a transform, of its size), four
/// over six is asked to round stochastically, the groups do not fit, or a buffer is smaller than its
/// shape; for a computed `x` as [`produce`](super::produce()), too.
pub fn quantize<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    groups: &Groups,
    usage: Usage,
    request: &QuantRequest<'_>,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let source = x.into();
    let request = (request, Storage::Packed);
    if let (Source::Plain(x), Usage::Rowwise) = (source, usage)
        && by_rows(groups, &request.0.copy)
    {
        return quantize_rows(client, x, groups, request);
    }
    let (row, col) = match usage {
        Usage::Rowwise => (Some(request), None),
        Usage::Columnwise => (None, Some(request)),
    };
    let (row, col) = launch_tiles(client, source, groups, row, col, Kind::Blocks)?;
    Ok(row.or(col).expect("one was asked for"))
}

/// The copies of `x` that are asked for, `(row-wise, column-wise)`, from one read of it, each as
/// [`quantize`] makes it and in the form that is asked for: what a product multiplies next, and once, may
/// be written as values.
///
/// # Errors
/// As [`quantize`], and when scales of values are to be swizzled.
pub fn quantize_operands<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    row: Option<(&QuantRequest<'_>, Storage)>,
    col: Option<(&QuantRequest<'_>, Storage)>,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    match (x.into(), row, col) {
        (_, None, None) => Ok((None, None)),
        (Source::Plain(x), Some(row), None) => {
            Ok((Some(quantize_rows(client, x, &Groups::One, row)?), None))
        }
        (source, row, col) => launch_tiles(client, source, &Groups::One, row, col, Kind::Blocks),
    }
}

/// Both copies of `x` from one read of it: `(row-wise, column-wise)`, each as [`quantize`] makes it.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_both<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    groups: &Groups,
    row: &QuantRequest<'_>,
    col: &QuantRequest<'_>,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let [row, col] = [row, col].map(|request| Some((request, Storage::Packed)));
    let copies = launch_tiles(client, x.into(), groups, row, col, Kind::Blocks)?;
    let [row, col] = [copies.0, copies.1].map(|made| made.expect("asked for"));
    Ok((row, col))
}

/// The copies of `x` that are asked for, `(row-wise, column-wise)`, each as [`quantize`] makes it of
/// the groups, as operands of the grouped products: plain matrices, with one amax for each group, or
/// for each stored row of each group.
///
/// The row-wise copy is that of [`quantize`]. In the column-wise one the groups lie side by side and
/// not one after another: `cols` stored rows, in each of which group `g` takes the columns from entry
/// `g` of [`GroupOffsets::aligned`]`(client, x.rows, unit)` on, `unit` being 16 or the size of the
/// transform. It has room for [`padded_bound`]`(x.rows, groups, unit)` of them; those behind the last
/// group are not written. Rows of `x` behind the last group are not written in the row-wise copy.
/// Stochastic rounding numbers blocks as [`quantize`] does, group after group.
///
/// # Errors
/// As [`quantize`], and when scales are to be swizzled.
pub fn quantize_side_by_side<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    groups: &GroupOffsets,
    row: Option<&QuantRequest<'_>>,
    col: Option<&QuantRequest<'_>>,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    for request in [row, col].into_iter().flatten() {
        if request.copy.layout != ScaleLayout::Compact {
            return Err(Nvfp4Error::value(
                "copy",
                format!("{:?} scales", request.copy.layout),
                "compact scales",
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
    let [row, col] = [row, col].map(|request| request.map(|request| (request, Storage::Packed)));
    let (row, col) = match (x.into(), row, col) {
        (Source::Plain(x), Some(row), None) if by_rows(&groups, &row.0.copy) => {
            (Some(quantize_rows(client, x, &groups, row)?), None)
        }
        (source, row, col) => launch_tiles(client, source, &groups, row, col, Kind::SideBySide)?,
    };
    let row = row.map(|row| DeviceQuantized {
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
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
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
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    let [row, col] = layouts.map(|layout| of_tiles(amax, scaling, layout));
    let [row, col] = [&row, &col].map(|request| Some((request, Storage::Packed)));
    let copies = launch_tiles(client, x.into(), groups, row, col, Kind::Tiles)?;
    let [row, col] = [copies.0, copies.1].map(|made| made.expect("asked for"));
    Ok((row, col))
}

/// One of the two copies of [`quantize_tile_with`], that along `usage`, without the bytes of the other.
///
/// # Errors
/// As [`quantize_tile_with`].
pub fn quantize_tile_copy(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    amax: &Handle,
    scaling: BlockScaling,
    layout: ScaleLayout,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let request = of_tiles(amax, scaling, layout);
    let request = Some((&request, Storage::Packed));
    let (row, col) = match usage {
        Usage::Rowwise => (request, None),
        Usage::Columnwise => (None, request),
    };
    let (row, col) = launch_tiles(client, x.into(), groups, row, col, Kind::Tiles)?;
    Ok(row.or(col).expect("asked for"))
}

/// A copy of 16x16 tiles.
fn of_tiles(amax: &Handle, scaling: BlockScaling, layout: ScaleLayout) -> QuantRequest<'_> {
    QuantRequest {
        amax,
        scope: AmaxGranularity::PerTensor,
        copy: DeviceQuantParams {
            scaling,
            layout,
            ..DeviceQuantParams::new(DeviceRounding::Nearest)
        },
    }
}

fn check_row_transform(copy: &DeviceQuantParams) -> Result<(), Nvfp4Error> {
    match copy.hadamard {
        Some(hadamard) if hadamard.size() != HadamardSize::H16 => Err(Nvfp4Error::value(
            "hadamard",
            format!("{:?} on a row-wise copy", hadamard.size()),
            "H16 there; larger transforms on column-wise copies",
        )),
        _ => Ok(()),
    }
}

/// Whether [`quantize_rows`] makes the row-wise copy of these groups. Not four over six: its candidates follow from
/// the amax, which a row of a group has to itself there (16384 x 7168 in 8 groups, H100: 260 us, and 222 by tiles).
fn by_rows(groups: &Groups, copy: &DeviceQuantParams) -> bool {
    match groups {
        Groups::One => true,
        Groups::Offsets { .. } => {
            let chooses = matches!(copy.scaling, BlockScaling::FourOverSix(_));
            copy.layout == ScaleLayout::Compact && !chooses
        }
        Groups::Batch(_) => false,
    }
}

/// The row-wise copy of a matrix, or of groups ([`by_rows`]). A row of a group is quantized as any other, but
/// from the amax of its group: that takes less than tiles, whose elements go through shared memory.
fn quantize_rows(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    (request, form): (&QuantRequest<'_>, Storage),
) -> Result<DeviceQuantized, Nvfp4Error> {
    x.check("x")?;
    groups.check(x.rows)?;
    check_packed_cols(x)?;
    check_row_transform(&request.copy)?;
    let conversion = conversion_of(client);
    let args = QuantArgs::new(client, x, groups, Usage::Rowwise, request, form, conversion)?;
    if x.is_empty() {
        return Ok(args.out);
    }
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
            args.width(),
            words.arg(),
            args.amax(),
            group_offsets,
            args.codes(),
            args.scales(),
            args.offset(),
            args.random(),
            args.signs(),
            x.rows,
            blocks,
            group_count,
            across,
            whole_tiles,
            find_groups,
            plan,
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
    source: Source<'_>,
    groups: &Groups,
    row: Option<(&QuantRequest<'_>, Storage)>,
    col: Option<(&QuantRequest<'_>, Storage)>,
    kind: Kind,
) -> Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error> {
    let input = Input::new(source)?;
    let Input {
        matrix: x, words, ..
    } = &input;
    groups.check(x.rows)?;
    if row.is_some() || kind == Kind::Tiles {
        check_packed_cols(x)?;
    }
    if let Some((row, _)) = row {
        check_row_transform(&row.copy)?;
    }
    let conversion = conversion_of(client);
    let args = |usage, request: Option<(&QuantRequest<'_>, Storage)>| {
        request
            .map(|(request, form)| {
                QuantArgs::new(client, x, groups, usage, request, form, conversion)
            })
            .transpose()
    };
    let row = args(Usage::Rowwise, row)?;
    let mut col = args(Usage::Columnwise, col)?;
    if let (Kind::SideBySide, Some(col)) = (kind, &mut col) {
        let layout = Layout {
            rows: padded_bound(x.rows, groups.count(), col.out.unit()),
            ..col.out.layout
        };
        col.out = DeviceQuantized::empty(client, layout, Groups::One, &col.out.amax);
    }
    let side_by_side = match &col {
        Some(col) if kind == Kind::SideBySide => col.out.blocks(),
        _ => 0,
    };
    let swizzled_cols = col.as_ref().is_some_and(|col| col.plan.swizzled);
    // Swizzled scales of a column-wise copy are padded to 128 stored rows, which are columns here.
    let width = tile::cols(x.dtype);
    let unit = if swizzled_cols { 128 } else { width };
    let tile_cols = x.cols.next_multiple_of(unit) / width;
    let row_tiles = groups.units(x.rows, tile::ROWS);
    if x.is_empty() {
        let [row, col] = [row, col].map(|copy| copy.map(|args| args.out));
        return Ok((row, col));
    }
    let (count, dim) = tile_bands(client, row_tiles, tile_cols);
    let plan = TilePlan {
        row: row.as_ref().map(|row| row.plan),
        col: col.as_ref().map(|col| col.plan),
        tiles: kind == Kind::Tiles,
        side_by_side: kind == Kind::SideBySide,
        grouping: Grouping::of(groups),
        elements: words.elem.size() == 2,
        units: dim.x as usize,
    };
    // An absent copy's arguments are those of the other one; its buffers are not touched.
    let (r, c) = match (&row, &col) {
        (Some(row), Some(col)) => (row, col),
        (Some(copy), None) | (None, Some(copy)) => (copy, copy),
        (None, None) => unreachable!("a copy was asked for"),
    };
    let shape = (x.rows, x.cols);
    let map = tile::map_tiles(client, shape, groups, row_tiles, plan.span(), &r.out.amax);
    let elements = (x.len())
        .max(c.out.code_blocks() * BLOCK)
        .max(r.out.code_blocks() * BLOCK)
        // The padding of swizzled scales makes them more than elements where rows are few and long.
        .max(c.out.scale_bytes())
        .max(r.out.scale_bytes());
    // SAFETY: the kernel masks every access by the shapes it is given.
    unsafe {
        quantize_tiles_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(elements),
            words.width,
            r.width(),
            c.width(),
            words.arg(),
            input.producer(),
            map,
            ShapeLaunch::new(x.rows, x.cols, groups.count(), tile_cols),
            row_tiles,
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
    let [row, col] = [row, col].map(|copy| copy.map(|args| args.out));
    Ok((row, col))
}

/// The comptime choices of `quantize_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// The row-wise copy, if it is made.
    pub row: Option<QuantPlan>,
    /// The column-wise copy, if it is made.
    pub col: Option<QuantPlan>,
    /// Whether 16x16 tiles share a scale.
    pub tiles: bool,
    /// Whether the column-wise copies of groups lie side by side.
    pub side_by_side: bool,
    /// How groups are given.
    pub grouping: Grouping,
    /// Whether `x` is loaded by elements.
    pub elements: bool,
    /// Units of a cube.
    pub units: usize,
}

impl TilePlan {
    /// Rows that a unit of the column-wise copy spans.
    const fn span(&self) -> usize {
        match self.col {
            Some(col) => tile::span(col.hadamard),
            None => 16,
        }
    }

    /// The row-wise copy, or else the column-wise one: blocks of 16x16 tiles are quantized along rows for
    /// either.
    fn either(&self) -> QuantPlan {
        self.row.or(self.col).expect("a copy is made")
    }

    /// Who converts.
    fn conversion(&self) -> Conversion {
        self.either().policy.conversion
    }
}

/// Scale tiles of 128x4 side by side that are quantized together, where rows have a multiple of them: their
/// blocks of a row are 256 bytes of `x`, those of one tile 128.
const ACROSS: usize = 2;

/// One unit quantizes every `units`-th block. Blocks go row by row, or by `across` 128x4 tiles of scales
/// that lie side by side, so that scale bytes are written side by side in both layouts. `whole_tiles`: the
/// grid's units are a multiple of the `512 across` of such tiles. `codes` are two words (`C`) a block, or values of
/// four words each. With `find_groups` the amax of a row is that of its group, of `groups` that begin at
/// `group_offsets`; rows behind the last are not written. A cube then has neighbouring rows, so that its units
/// seldom come to another group, which they look for by bisection and whose scale they compute.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_row_kernel<N: Size, C: Size>(
    x: &[Vector<u32, N>],
    amax: &[f32],
    group_offsets: &[u32],
    codes: &mut [Vector<u32, C>],
    scales: &mut [u8],
    offset: &[u32],
    random: Random,
    signs: Signs,
    rows: usize,
    blocks: usize,
    groups: usize,
    #[comptime] across: usize,
    #[comptime] whole_tiles: bool,
    #[comptime] find_groups: bool,
    #[comptime] plan: QuantPlan,
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
    } else if comptime!(find_groups) {
        min(group_offsets[groups] as usize, rows) * blocks
    } else {
        rows * blocks
    };
    // Swizzled: the place of an item's tiles, kept up to date without a division for each.
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
    // Units that exchange halves of blocks go on together.
    let mut end = items;
    let mut item = ABSOLUTE_POS;
    let mut step = stride;
    if comptime!(plan.decoded) {
        end = items.div_ceil(32) * 32usize;
    }
    if comptime!(find_groups) {
        step = CUBE_DIM as usize;
        let share = items.div_ceil(stride) * step;
        item = CUBE_POS * share + UNIT_POS as usize;
        end = min(items, (CUBE_POS + 1usize) * share);
    }
    // The scale of the last group that was looked for, and the item behind its last.
    let mut group_amax = shared_scale.amax;
    let mut group_encode = shared_scale.encode;
    let mut group_block = shared_scale.block;
    let mut group_decode = shared_scale.decode;
    let mut group_end = 0usize;
    while item < end {
        let mut index = item;
        let mut target = item;
        let mut inside = true;
        if comptime!(plan.decoded) {
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
            target = item - place
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
            // Loaded first: it takes long.
            let words = load_block_words::<N>(x, index * per_block, kind);
            let global = if comptime!(find_groups) {
                if index >= group_end {
                    let group = find_group(group_offsets, groups, index / blocks);
                    let scale = GlobalScale::from_amax(amax[group], policy.scaling);
                    group_amax = scale.amax;
                    group_encode = scale.encode;
                    group_block = scale.block;
                    group_decode = scale.decode;
                    group_end = group_offsets[group + 1usize] as usize * blocks;
                }
                GlobalScale {
                    amax: group_amax,
                    encode: group_encode,
                    block: group_block,
                    decode: group_decode,
                }
            } else if comptime!(plan.per_row) {
                scale_of(&shared_scale, amax, index / blocks, plan)
            } else {
                scale_of(&shared_scale, amax, 0usize, plan)
            };
            let block = row_block(&words, &signs, plan, kind);
            let logical = u64::cast_from(index);
            let largest = row_amax_of(&words, &block, false, plan, kind);
            let encoded =
                quantize_with_amax(&block, 0usize, largest, &global, logical, &random, policy);
            if comptime!(plan.decoded) {
                block_codes = encoded.codes;
                scale = encoded.scale;
            } else {
                store_codes(codes, index, encoded.codes);
                scales[target] = u8::cast_from(encoded.scale);
            }
        } else if comptime!(!plan.decoded) {
            scales[target] = 0u8;
        }
        if comptime!(plan.decoded) {
            store_unscaled_block(codes, index, block_codes, scale, inside, policy.conversion);
        }
        item += step;
    }
}

/// Writes the codes of block `at`; `C` is 2.
#[cube]
fn store_codes<C: Size>(out: &mut [Vector<u32, C>], at: usize, codes: Vector<u32, Const<2>>) {
    let mut pair = Vector::<u32, C>::empty();
    pair.insert(0usize, codes.extract(0usize));
    pair.insert(1usize, codes.extract(1usize));
    out[at] = pair;
}

/// The scale that governs stored row `outer`: its own, where each has one, or the one for all.
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

/// The values of one block of a row-wise copy, transformed where the plan says so.
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

/// Words from one column to the next where codes wait to be written: two for each of eight blocks,
/// and one that spreads columns over banks.
const STAGE_PITCH: usize = 17;

/// Words from the scales of one block of all columns to those of the next.
const SCALE_PITCH: usize = 2 * tile::WORDS + 4;

/// What derives from the amax of one copy's group, once for each cube and group: the two factors of a
/// block's scale, and the multiplier for every scale byte.
#[derive(CubeType)]
struct ScaleTable {
    /// The fields of [`GlobalScale`].
    scalars: Shared<[f32]>,
    /// Multipliers of the elements of a block, by its scale byte.
    multipliers: Shared<[f32]>,
}

#[cube]
impl ScaleTable {
    fn new() -> ScaleTable {
        ScaleTable {
            scalars: Shared::new_slice(4usize),
            multipliers: Shared::new_slice(128usize),
        }
    }

    /// Filled by `count` units, of which this is number `unit`. The caller synchronises before and after.
    fn fill(&mut self, amax: f32, unit: u32, count: u32, #[comptime] policy: BlockPlan) {
        let global = GlobalScale::from_amax(amax, policy.scaling);
        let mut byte = unit;
        while byte < 128u32 {
            self.multipliers[byte as usize] = global.encode_multiplier(byte, policy.conversion);
            byte += count;
        }
        if unit == 0u32 {
            self.scalars[0] = global.amax;
            self.scalars[1] = global.encode;
            self.scalars[2] = global.block;
            self.scalars[3] = global.decode;
        }
    }

    fn global(&self) -> GlobalScale {
        GlobalScale {
            amax: self.scalars[0],
            encode: self.scalars[1],
            block: self.scalars[2],
            decode: self.scalars[3],
        }
    }
}

/// Scale byte and codes of the block of `values` from `first` on, whose largest magnitude is `amax`.
/// In a 16x16 tile `scale` is that of the tile, and `below_7` said of all of it. `pairs` and `in_pairs`
/// are those of [`encode_block()`].
#[cube]
fn quantize_by_table(
    values: &Array<f32>,
    #[comptime] first: usize,
    pairs: &Array<u32>,
    amax: f32,
    scale: u32,
    below_7: bool,
    global: &GlobalScale,
    table: &ScaleTable,
    index: u64,
    random: &Random,
    #[comptime] tiles: bool,
    #[comptime] in_pairs: bool,
    #[comptime] plan: QuantPlan,
) -> Encoded {
    let policy = comptime!(plan.policy);
    if comptime!(!tiles && matches!(policy.scaling, BlockScaling::FourOverSix(_))) {
        quantize_with_amax(values, first, amax, global, index, random, policy)
    } else {
        let scale = if comptime!(tiles) {
            scale
        } else {
            global.block_scale(amax, policy.scaling, policy.conversion)
        };
        let multiplier = if comptime!(plan.per_row) {
            global.encode_multiplier(scale, policy.conversion)
        } else {
            table.multipliers[scale as usize]
        };
        let below_7 = if comptime!(tiles) {
            below_7
        } else {
            stays_below_7(amax, multiplier)
        };
        Encoded {
            scale,
            codes: encode_block(
                values, first, pairs, multiplier, below_7, index, random, in_pairs, policy,
            ),
        }
    }
}

/// One cube makes the copies of a tile: it loads the tile, its units quantize the blocks of columns, whose
/// codes and scales wait in shared memory, and those of rows; then whole columns, 64 bytes of codes, are
/// written side by side. Other cubes of the multiprocessor compute while one waits. `map` holds a record
/// for each row of tiles where groups are in device memory, `row_tiles` is the number of rows of tiles that
/// there may be, `row_blocks` the length of a stored row of the column-wise copy where the groups lie side
/// by side. Codes of either copy are two words (`R`, `C`) a block, or values of four words each.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_tiles_kernel<F: Numeric, N: Size, R: Size, C: Size>(
    x: &[Vector<F, N>],
    producer: Producer,
    map: &[Vector<u32, Const<4>>],
    shape: Shape,
    row_tiles: usize,
    row_blocks: usize,
    row_amax: &[f32],
    row_codes: &mut [Vector<u32, R>],
    row_scales: &mut [u8],
    row_offset: &[u32],
    row_random: Random,
    row_signs: Signs,
    col_amax: &[f32],
    col_codes: &mut [Vector<u32, C>],
    col_scales: &mut [u8],
    col_offset: &[u32],
    col_random: Random,
    col_signs: Signs,
    #[comptime] plan: TilePlan,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let conversion = comptime!(plan.conversion());
    let elements = comptime!(plan.elements);
    let units = comptime!(plan.units);
    let width = N::value();
    let asynchronous = comptime!(tile::asynchronous(conversion, elements, width, units));
    let mut data: Shared<[u32]> = Shared::new_aligned_slice(tile::LEN, 16usize);
    let grouping = comptime!(plan.grouping);
    let span = comptime!(plan.span());
    let mut tile_scales: Shared<[u32]> = Shared::new_slice(comptime!(tile_count(kind)));
    // The maxima, then the errors of blocks; then codes, until they are transposed.
    let mut partial: Shared<[u32]> = Shared::new_aligned_slice(
        comptime!(if plan.tiles { transpose::LEN } else { 1usize }),
        8usize,
    );
    let has_col = comptime!(plan.col.is_some() && !plan.tiles);
    let stage_cols = comptime!(if has_col { tile::cols(kind) } else { 1 });
    let mut stage: Shared<[u32]> = Shared::new_slice(comptime!(stage_cols * STAGE_PITCH + 1));
    let mut stage_scales: Shared<[u32]> =
        Shared::new_slice(comptime!(if has_col { 8 * SCALE_PITCH } else { 1 }));
    let mut row_table = ScaleTable::new();
    let mut col_table = ScaleTable::new();

    let band = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) as usize;
    let tile_col = CUBE_POS_X as usize / BAND;
    let row_tile = band * BAND + CUBE_POS_X as usize % BAND;
    if row_tile < row_tiles {
        let tile = tile::tile_at(map, row_tile, tile_col, &shape, span, grouping, kind);
        if tile.row0 < tile.row_end {
            let mut sink = Sink::new_None();
            prologue::start_load::<F, N>(
                x, &producer, &mut sink, &mut data, &tile, &shape, false, elements, units,
                conversion, kind,
            );
            // Half of the units for each table, where there are two to fill.
            let row_tabled = comptime!(plan.tiles || plan.row.is_some_and(|row| !row.per_row));
            let col_tabled = comptime!(plan.col.is_some_and(|col| !col.per_row) && !plan.tiles);
            let halves = comptime!(row_tabled && col_tabled && units == 256);
            let count = comptime!(if halves {
                units as u32 / 2
            } else {
                units as u32
            });
            if comptime!(row_tabled) {
                let row = comptime!(plan.either());
                if UNIT_POS < count {
                    row_table.fill(row_amax[tile.group], UNIT_POS, count, row.policy);
                }
            }
            if comptime!(col_tabled) {
                let col = comptime!(plan.col.unwrap());
                let unit = if comptime!(halves) {
                    UNIT_POS - count
                } else {
                    UNIT_POS
                };
                if unit < count {
                    col_table.fill(col_amax[tile.group], unit, count, col.policy);
                }
            }
            tile::finish_load(asynchronous);

            if comptime!(plan.tiles) {
                let row = comptime!(plan.either());
                let global = row_table.global();
                choose_tile_scales(
                    &data,
                    &mut partial,
                    &mut tile_scales,
                    &global,
                    &row_table,
                    units,
                    row,
                    kind,
                );
            }
            if comptime!(plan.col.is_some() && !plan.tiles) {
                let col = comptime!(plan.col.unwrap());
                let random = resolve_offset(&col_random, col_offset, col.policy);
                quantize_columns(
                    &data,
                    &mut stage,
                    &mut stage_scales,
                    &tile,
                    &shape,
                    col_amax,
                    &col_table,
                    &random,
                    &col_signs,
                    units,
                    col,
                    kind,
                );
            }
            if comptime!(plan.tiles || plan.row.is_some()) {
                let row = comptime!(plan.either());
                let random = resolve_offset(&row_random, row_offset, row.policy);
                quantize_rows_of_tile(
                    &data,
                    &tile_scales,
                    &mut partial,
                    &tile,
                    &shape,
                    row_amax,
                    row_codes,
                    row_scales,
                    &row_table,
                    &random,
                    &row_signs,
                    plan,
                    row,
                    kind,
                );
            }
            sync_cube();
            if comptime!(plan.tiles && plan.col.is_some()) {
                let col = comptime!(plan.col.unwrap());
                transpose::write_transposed(
                    &partial,
                    &tile_scales,
                    &tile,
                    &shape,
                    col_codes,
                    col_scales,
                    units,
                    col,
                    kind,
                );
            } else if comptime!(plan.col.is_some()) {
                let col = comptime!(plan.col.unwrap());
                write_columns(
                    &stage,
                    &stage_scales,
                    &tile,
                    &shape,
                    row_blocks,
                    col_codes,
                    col_scales,
                    plan.side_by_side,
                    units,
                    col,
                    kind,
                );
            }
        }
    }
}

/// Quantizes the blocks along the rows of a tile by `plan`, for the row-wise copy, if it is made. Codes of
/// 16x16 tiles go to `copy`, too, if there is a column-wise one, where they wait for being transposed: those of
/// rows behind the last one as well, which pad blocks of columns.
#[cube]
fn quantize_rows_of_tile<C: Size>(
    data: &Shared<[u32]>,
    tile_scales: &Shared<[u32]>,
    copy: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    amax: &[f32],
    codes: &mut [Vector<u32, C>],
    scales: &mut [u8],
    table: &ScaleTable,
    random: &Random,
    signs: &Signs,
    #[comptime] copies: TilePlan,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) {
    let (tiles, units) = comptime!((copies.tiles, copies.units));
    let stores = comptime!(copies.row.is_some());
    let transposes = comptime!(tiles && copies.col.is_some());
    let conversion = comptime!(plan.policy.conversion);
    let blocks = shape.cols / 16usize;
    let padded_blocks = blocks.div_ceil(4);
    let group_scale = table.global();
    for turn in 0..comptime!(tile::blocks(kind) / units) {
        let place = tile::row_place(turn, units, kind);
        let r = place.row;
        let row_index = tile.row0 + r;
        let block_index = tile.col0 / 16usize + place.block;
        let inside = row_index < tile.row_end && block_index < blocks;
        let stored = row_index * blocks + block_index;
        let mut block_codes = Vector::<u32, Const<2>>::new(0u32);
        let mut scale = 0u32;
        if tiles || inside {
            let words = tile::load_row_block(data, r, place.block, conversion, kind);
            let block = row_block(&words, signs, plan, kind);
            let largest = row_amax_of(&words, &block, tiles, plan, kind);
            let global = scale_of(&group_scale, amax, row_index, plan);
            let of_tile = if comptime!(tiles) {
                tile_scales[(r / 16usize) * comptime!(tile::row_blocks(kind)) + place.block]
            } else {
                0u32.runtime()
            };
            let logical = u64::cast_from(stored);
            let encoded = quantize_by_table(
                &block,
                0usize,
                &words,
                largest,
                of_tile & 0xFFu32,
                of_tile > 0xFFu32,
                &global,
                table,
                logical,
                random,
                tiles,
                comptime!(
                    conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none()
                ),
                plan,
            );
            scale = encoded.scale;
            if comptime!(tiles) {
                // A tile that the last row cuts: below it is padding, whose scales are zero.
                scale = select(inside, scale, 0u32);
            }
            if comptime!(transposes) {
                let at = transpose::code_at(r, place.block);
                copy[at] = encoded.codes.extract(0usize);
                copy[at + 1usize] = encoded.codes.extract(1usize);
            }
            if comptime!(plan.decoded) {
                block_codes = encoded.codes;
            } else if stores && inside {
                store_codes(codes, stored, encoded.codes);
            }
        }
        if comptime!(stores) {
            if comptime!(plan.decoded) {
                store_unscaled_block(codes, stored, block_codes, scale, inside, conversion);
            } else if comptime!(plan.swizzled) {
                // Columns of tiles beyond these pad a column-wise copy only.
                if block_index < padded_blocks * 4usize {
                    let row = tile.row_tile * 128usize + r;
                    let target = swizzled_at(row, block_index, padded_blocks);
                    scales[target] = u8::cast_from(scale);
                }
            } else if inside {
                scales[stored] = u8::cast_from(scale);
            }
        }
    }
}

/// The largest magnitude of a block along a row, from its words where they are bf16 pairs.
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
        // That of the tile counts.
        0.0f32.runtime()
    } else if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none())
    {
        pairs_amax(words, 0usize)
    } else {
        block_amax(block, 0usize, conversion)
    }
}

/// Quantizes the blocks down the columns of a tile into `stage`.
#[cube]
fn quantize_columns(
    data: &Shared<[u32]>,
    stage: &mut Shared<[u32]>,
    stage_scales: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    amax: &[f32],
    table: &ScaleTable,
    random: &Random,
    signs: &Signs,
    #[comptime] units: usize,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) {
    let policy = comptime!(plan.policy);
    let conversion = comptime!(policy.conversion);
    let per_word = comptime!(4 / kind.size());
    let span = comptime!(tile::span(plan.hadamard));
    // Whether a column's maximum comes from its words, two columns at once.
    let packed_amax =
        comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none());
    let count = comptime!(span / tile::lanes(plan.hadamard, conversion));
    let shared = comptime!(tile::lanes(plan.hadamard, conversion) > 1);
    // Blocks of one stored row of this group's copy, and the first of them in this tile.
    let per_unit = comptime!(span / 16);
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(span) * per_unit;
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    let base = shape.cols * tile.units_before * per_unit;
    let group_scale = table.global();

    let mut item = UNIT_POS as usize;
    while item < comptime!(tile::column_items(plan.hadamard, conversion)) {
        let at = tile::column_item(item, units, plan.hadamard, conversion);
        let word = at.word;
        let first = block0 + at.block;
        // Units that share a transform go on together, and only what they store depends on where the
        // matrix ends.
        if shared || first < group_blocks {
            let words = tile::load_words(data, at.block * 16usize, word, count, conversion);
            let both = if comptime!(packed_amax) {
                max_of_pairs(&words, 0usize, 16usize)
            } else {
                0u32.runtime()
            };
            #[unroll]
            for half in 0..comptime!(per_word as u32) {
                let c = word * per_word + half as usize;
                let column = tile.col0 + c;
                let inside = first < group_blocks && column < shape.cols;
                if shared || inside {
                    // Loaded again for the other column, where they would take registers that a fourth
                    // cube on the multiprocessor needs.
                    let words = if comptime!(packed_amax || half == 0) {
                        words
                    } else {
                        tile::load_words(data, at.block * 16usize, word, count, conversion)
                    };
                    let mut values = tile::unpack_column(
                        &words,
                        signs,
                        at.lane,
                        half,
                        plan.hadamard,
                        plan.default_signs,
                        conversion,
                        kind,
                    );
                    let pairs = transform_column(&mut values, at.lane, count, plan);
                    if inside {
                        let outer = tile.group * shape.cols + column;
                        let global = scale_of(&group_scale, amax, outer, plan);
                        #[unroll]
                        for b in 0..comptime!(count / 16) {
                            let place = at.block + b;
                            let from = comptime!(b * 16);
                            let largest = if comptime!(packed_amax && half == 0) {
                                f32::reinterpret(both << 16u32)
                            } else if comptime!(packed_amax) {
                                f32::reinterpret(both & 0xFFFF_0000u32)
                            } else if comptime!(conversion.has_ptx() && plan.hadamard.is_some()) {
                                pairs_amax(&pairs, comptime!(from / 2))
                            } else {
                                block_amax(&values, from, conversion)
                            };
                            let logical = u64::cast_from(base + column * group_blocks + first + b);
                            let encoded = quantize_by_table(
                                &values,
                                from,
                                &pairs,
                                largest,
                                0u32.runtime(),
                                false.runtime(),
                                &global,
                                table,
                                logical,
                                random,
                                false,
                                comptime!(conversion.has_ptx() && plan.hadamard.is_some()),
                                plan,
                            );
                            let slot = stage_slot(word, half as usize);
                            stage[slot + place * 2usize] = encoded.codes.extract(0usize);
                            stage[slot + place * 2usize + 1usize] = encoded.codes.extract(1usize);
                            let scale = if comptime!(plan.decoded) {
                                scale_pair(encoded.scale)
                            } else {
                                encoded.scale
                            };
                            stage_scales[scale_slot(word, half as usize, place)] = scale;
                        }
                    }
                }
            }
        }
        item += units;
    }
}

/// Transforms `count` values of a column, where the plan says so; with PTX they are returned in bf16
/// pairs, too.
#[cube]
fn transform_column(
    values: &mut Array<f32>,
    lane: usize,
    #[comptime] count: usize,
    #[comptime] plan: QuantPlan,
) -> Array<u32> {
    let conversion = comptime!(plan.policy.conversion);
    if comptime!(plan.hadamard.is_some()) {
        let size = comptime!(plan.hadamard.unwrap());
        tile::transform_values(values, lane, size, conversion);
        if comptime!(conversion.has_ptx()) {
            let pairs = normalized_pairs(&*values, count, size);
            unpack_pairs(&pairs, values, count);
            pairs
        } else {
            normalize(values, size, conversion);
            Array::<u32>::new(1usize)
        }
    } else {
        Array::<u32>::new(1usize)
    }
}

/// Where the codes of a column wait: neighbouring units hold neighbouring words, so the columns of a
/// word lie apart, an odd number of banks.
#[cube]
fn stage_slot(word: usize, half: usize) -> usize {
    (half * tile::WORDS + word) * STAGE_PITCH + half
}

/// Where the scale of a column's block waits: 8 blocks of two columns are written, and those of four
/// neighbouring columns read, in different banks.
#[cube]
fn scale_slot(word: usize, half: usize, place: usize) -> usize {
    place * SCALE_PITCH + half * comptime!(tile::WORDS + 2) + word
}

/// Writes the codes and scales that wait in `stage`, or the values that they stand for.
#[cube]
fn write_columns<C: Size>(
    stage: &Shared<[u32]>,
    stage_scales: &Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    row_blocks: usize,
    codes: &mut [Vector<u32, C>],
    scales: &mut [u8],
    #[comptime] side_by_side: bool,
    #[comptime] units: usize,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) {
    let per_word = comptime!(4 / kind.size());
    let span = comptime!(tile::span(plan.hadamard));
    let per_unit = comptime!(span / 16);
    let group_blocks = (tile.row_end - tile.group_row0).div_ceil(span) * per_unit;
    let block0 = (tile.row0 - tile.group_row0) / 16usize;
    // Where the group's copy begins, and from one stored row to the next. Random bits are drawn for the
    // same blocks in either order.
    let mut start = shape.cols * tile.units_before * per_unit;
    let mut row_pitch = group_blocks;
    if comptime!(side_by_side) {
        start = tile.units_before * per_unit;
        row_pitch = row_blocks;
    }
    let padded_group = group_blocks.div_ceil(4);
    let padded_base = shape.cols.div_ceil(128)
        * 128usize
        * tile.padded_before
        * comptime!(if span < 64 { 4 } else { span / 16 });
    // With units for several whole columns, turn by turn the same place of columns further on.
    let writers = comptime!(plan.writers());
    let across = comptime!(8 * writers);
    let whole = comptime!(units.is_multiple_of(2 * across));
    let step = comptime!(units / across);
    #[unroll(whole)]
    for turn in 0..comptime!(tile::cols(kind) * across / units) {
        let c = if comptime!(whole) {
            UNIT_POS as usize / across + turn * step
        } else {
            (UNIT_POS as usize + turn * units) / across
        };
        let part = if comptime!(whole) {
            UNIT_POS as usize % across
        } else {
            (UNIT_POS as usize + turn * units) % across
        };
        let place = part / writers;
        let column = tile.col0 + c;
        let block = block0 + place;
        let inside = column < shape.cols && block < group_blocks;
        let word = if comptime!(whole) {
            UNIT_POS as usize / across / per_word + turn * comptime!(step / per_word)
        } else {
            c / per_word
        };
        let half = if comptime!(whole) {
            (UNIT_POS as usize / across) % per_word
        } else {
            c % per_word
        };
        let slot = stage_slot(word, half);
        let mut scale = 0u32;
        if inside {
            if comptime!(plan.decoded) {
                // A unit for each word of codes.
                let vector = (start + column * row_pitch + block) * writers + part % writers;
                let pair = stage_scales[scale_slot(word, half, place)];
                let conversion = comptime!(plan.policy.conversion);
                store_unscaled_word(codes, vector, stage[slot + part], pair, conversion);
            } else {
                let mut pair = Vector::<u32, C>::empty();
                pair.insert(0usize, stage[slot + place * 2usize]);
                pair.insert(1usize, stage[slot + place * 2usize + 1usize]);
                scale = stage_scales[scale_slot(word, half, place)];
                codes[start + column * row_pitch + block] = pair;
            }
        }
        if comptime!(plan.decoded) {
            // Values have no scales.
        } else if comptime!(plan.swizzled) {
            if block < padded_group * 4usize {
                let target = padded_base + swizzled_at(column, block, padded_group);
                scales[target] = u8::cast_from(scale);
            }
        } else if inside {
            scales[start + column * row_pitch + block] = u8::cast_from(scale);
        }
    }
}

/// 16x16 tiles of a tile.
const fn tile_count(kind: FloatKind) -> usize {
    tile::blocks(kind) / 16
}

/// The scale bytes of the 16x16 tiles of a tile in shared memory, with bit 8 set where
/// [`stays_below_7()`] says so of the whole tile. Synchronises before it returns.
#[cube]
fn choose_tile_scales(
    data: &Shared<[u32]>,
    partial: &mut Shared<[u32]>,
    scales: &mut Shared<[u32]>,
    global: &GlobalScale,
    table: &ScaleTable,
    #[comptime] units: usize,
    #[comptime] plan: QuantPlan,
    #[comptime] kind: FloatKind,
) {
    let conversion = comptime!(plan.policy.conversion);
    let blocks = comptime!(tile::blocks(kind));
    let per_row = comptime!(tile::row_blocks(kind));
    let count = comptime!(tile_count(kind));
    for turn in 0..comptime!(blocks / units) {
        let place = tile::row_place(turn, units, kind);
        let words = tile::load_row_block(data, place.row, place.block, conversion, kind);
        let amax = if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16) {
            pairs_amax(&words, 0usize)
        } else {
            block_amax(&unpack_block(&words, kind), 0usize, conversion)
        };
        partial[place.row * per_row + place.block] = magnitude_bits(amax);
    }
    sync_cube();
    let mut item = UNIT_POS as usize;
    while item < count {
        let first = (item / per_row) * (16usize * per_row) + item % per_row;
        let mut bits = 0u32;
        for r in 0..16usize {
            bits = max(bits, partial[first + r * per_row]);
        }
        let amax = f32::reinterpret(bits);
        scales[item] = match comptime!(plan.policy.scaling) {
            BlockScaling::FourOverSix(_) => {
                // Both candidates wait here, the one for 6 in the low byte.
                let both = candidate_scales(amax, global, conversion);
                both.extract(0usize) | (both.extract(1usize) << 8u32)
            }
            _ => {
                let scale = global.block_scale(amax, plan.policy.scaling, conversion);
                let below_7 = stays_below_7(amax, table.multipliers[scale as usize]);
                scale | (u32::cast_from(below_7) << 8u32)
            }
        };
        item += CUBE_DIM as usize;
    }
    sync_cube();
    if comptime!(matches!(plan.policy.scaling, BlockScaling::FourOverSix(_))) {
        let norm = comptime!(match plan.policy.scaling {
            BlockScaling::FourOverSix(norm) => norm,
            _ => ErrorNorm::Mae,
        });
        for turn in 0..comptime!(blocks / units) {
            let place = tile::row_place(turn, units, kind);
            let words = tile::load_row_block(data, place.row, place.block, conversion, kind);
            let block = unpack_block(&words, kind);
            let both = scales[(place.row / 16usize) * per_row + place.block];
            let six = candidate(&block, 0usize, both & 0xFFu32, global, norm, conversion);
            let four = candidate(&block, 0usize, both >> 8u32, global, norm, conversion);
            let target = place.row * per_row + place.block;
            partial[target] = u32::reinterpret(six.error);
            partial[target + blocks] = u32::reinterpret(four.error);
        }
        sync_cube();
        let mut item = UNIT_POS as usize;
        while item < count {
            let first = (item / per_row) * (16usize * per_row) + item % per_row;
            let six = sum_of_rows(&*partial, first, per_row);
            let four = sum_of_rows(&*partial, first + blocks, per_row);
            let both = scales[item];
            scales[item] = select(four < six, both >> 8u32, both & 0xFFu32);
            item += CUBE_DIM as usize;
        }
        sync_cube();
    }
}

/// The sum of the errors of 16 rows, by the tree of the specification (section 7).
#[cube]
fn sum_of_rows(errors: &Shared<[u32]>, first: usize, #[comptime] per_row: usize) -> f32 {
    let mut rows = Array::<f32>::new(16usize);
    #[unroll]
    for r in 0..16usize {
        rows[r] = f32::reinterpret(errors[first + r * per_row]);
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
