//! From a matrix to a microscaling format.

use cubecl::{prelude::*, server::Handle};

use super::super::tile::{
    GroupPlace, Grouping, Shape, ShapeLaunch, group_place, in_bands, map_tiles, tile_from,
};
use crate::{
    Format, Layout, MX_BLOCK, Nvfp4Error, Usage,
    capabilities::{Capabilities, is_cpu},
    cube::{
        codec::{load, magnitude_bits},
        mx::{decode_ue8m0_reciprocal, encode_word, mx_scale},
    },
    format::{block::ElementFormat, check_mx},
    launch::{buffer, grid, tile_grid, vector_size},
    memory::address_type,
    reference::padding::padded_bound,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// The comptime choices of every kernel here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxPlan {
    /// The elements of the format.
    pub element: ElementFormat,
    /// Whether the device converts to E4M3.
    pub hardware: bool,
    /// The element type of the matrix, or the one that dequantized values are rounded to.
    pub kind: FloatKind,
}

impl MxPlan {
    pub(super) fn new(client: &Client, format: Format, kind: FloatKind) -> Self {
        Self {
            element: format.element(),
            hardware: has_e4m3(client),
            kind,
        }
    }

    /// Codes in a word.
    pub(super) const fn per_word(&self) -> usize {
        32 / self.element.bits()
    }

    /// Words of the codes of a block of 32: as many as a code has bits.
    pub(super) const fn block_words(&self) -> usize {
        self.element.bits()
    }
}

/// [`MxPlan`] of a kernel over blocks along stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxRowPlan {
    /// Whether rows are whole blocks.
    pub dense: bool,
    /// Units that share a block.
    pub lanes: usize,
    /// What all kernels choose.
    pub mx: MxPlan,
}

/// Memory for the tensors of groups in one plain matrix; see [`mx_quantize_groups`].
pub(super) fn empty_of_groups(
    client: &Client,
    (rows, cols): (usize, usize),
    groups: &Groups,
    usage: Usage,
    format: Format,
) -> DeviceQuantized {
    let (shape, usage) = match (groups, usage) {
        (Groups::Batch(count), Usage::Columnwise) => ((count * cols, rows / count), Usage::Rowwise),
        (Groups::Offsets { count, .. }, Usage::Columnwise) => {
            ((padded_bound(rows, *count, format.block()), cols), usage)
        }
        _ => ((rows, cols), usage),
    };
    DeviceQuantized::empty_unscaled(client, Layout::new(format, shape, usage))
}

/// `x` in MXFP8 with blocks along `usage`: rowwise for [`Usage::Rowwise`]; columnwise, stored
/// transposed, for [`Usage::Columnwise`]. The last block of a row is padded with zeros.
///
/// # Errors
/// When the memory of `x` is smaller than its shape.
pub fn mx_quantize(
    client: &Client,
    x: &Matrix,
    usage: Usage,
    format: Format,
) -> Result<DeviceQuantized, Nvfp4Error> {
    mx_quantize_groups(client, x, &Groups::One, usage, format)
}

/// [`mx_quantize`] of each group of rows as a matrix of its own, as operands of grouped GEMMs take
/// them: in one plain matrix.
///
/// Along [`Usage::Rowwise`] that is the copy of all rows. Along [`Usage::Columnwise`]
/// - copies of [`Groups::Batch`] lie one below the other. They are rowwise tensors of the
///   transposed matrices, and so the result says: `count * x.cols` rows of `x.rows / count`, packed
///   along [`Usage::Rowwise`].
/// - copies of [`Groups::Offsets`] are concatenated along the columns: `x.cols` stored rows, in
///   each of which group `g` takes the elements from entry `g` of
///   [`GroupOffsets::aligned`](crate::moe::GroupOffsets::aligned)`(client, x.rows, 32)` on. There
///   is room for [`padded_bound`]`(x.rows, count, 32)` of them; blocks behind the last group are
///   not written.
///
/// # Errors
/// When the groups do not fit, or the memory of `x` is smaller than its shape.
pub fn mx_quantize_groups(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    format: Format,
) -> Result<DeviceQuantized, Nvfp4Error> {
    check_mx(format)?;
    x.check("x")?;
    groups.check(x.rows)?;
    let out = empty_of_groups(client, (x.rows, x.cols), groups, usage, format);
    if x.is_empty() {
        return Ok(out);
    }
    let plan = MxPlan::new(client, format, x.dtype);
    let (outer, blocks) = (out.outer(), out.blocks());
    let address = address_type(x.len().max(outer * blocks * MX_BLOCK));
    let width = vector_size(x.dtype, x.cols);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let source = unsafe { buffer(&x.handle, x.len() / width) };
    let codes = |words: usize| unsafe { buffer(&out.codes, out.code_bytes() / (4 * words)) };
    let scales = unsafe { buffer(&out.scales, outer * blocks) };
    match usage {
        Usage::Rowwise => {
            let lanes = lanes(client, x.dtype, plan.element);
            let stored = 2.min(plan.block_words() / lanes);
            let plan = MxRowPlan {
                dense: x.cols.is_multiple_of(MX_BLOCK),
                lanes,
                mx: plan,
            };
            let (count, dim) = grid(client, outer * blocks * lanes);
            // SAFETY: the kernel stays below the number of blocks and the columns.
            unsafe {
                mx_quantize_row_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    stored,
                    source,
                    codes(stored),
                    scales,
                    x.rows,
                    x.cols,
                    plan,
                    x.dtype.storage_type(),
                );
            }
        }
        Usage::Columnwise => {
            let tiles = Tiles::new(client, (x.rows, x.cols), groups);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                mx_quantize_col_kernel::launch_unchecked(
                    client,
                    tiles.count.clone(),
                    tiles.dim,
                    address,
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

/// The launch of a kernel over tiles of rows in groups.
pub(super) struct Tiles<'a> {
    pub(super) matrix: (usize, usize),
    pub(super) groups: &'a Groups,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) band: usize,
    pub(super) count: CubeCount,
    pub(super) dim: CubeDim,
}

impl<'a> Tiles<'a> {
    pub(super) fn new(client: &Client, (rows, cols): (usize, usize), groups: &'a Groups) -> Self {
        let tile_rows = groups.units(rows, TILE_ROWS);
        let tile_cols = cols.div_ceil(TILE_COLS);
        let (count, dim) = tile_grid(client, tile_rows * tile_cols);
        Self {
            matrix: (rows, cols),
            groups,
            rows: tile_rows,
            cols: tile_cols,
            band: band_of(cols),
            count,
            dim,
        }
    }

    /// `row_blocks` are the blocks of a stored row of the result, `unread` any memory.
    pub(super) fn args(
        &self,
        client: &Client,
        row_blocks: usize,
        unread: &Handle,
    ) -> MxTilesLaunch {
        let (matrix, groups) = (self.matrix, self.groups);
        MxTilesLaunch::new(
            map_tiles(client, matrix, groups, self.rows, MX_BLOCK, unread),
            ShapeLaunch::new(matrix.0, matrix.1, groups.count(), self.cols),
            self.rows,
            row_blocks,
            self.band,
        )
    }
}

/// Rows and columns of the tile that one cube turns into columns.
pub(super) const TILE_ROWS: usize = 128;
pub(super) const TILE_COLS: usize = 64;

/// Rows of tiles that cubes work on together where `cols` columns of tiles lie between one tile and
/// the next below: the scale bytes of a column from eight tiles make a sector of memory. Where rows
/// are short all eight are in the L2 cache together anyway, and tiles in rows are faster (MXFP8,
/// H100: 78 us instead of 92 for 8192 x 8192, but 371 instead of 313 for 16384 x 16384).
fn band_of(cols: usize) -> usize {
    if cols > 12288 { 8 } else { 1 }
}

/// Words from one column's codes to the next in shared memory: those of a column of a tile, and one
/// against bank conflicts.
pub(super) const fn stage_pitch(element: ElementFormat) -> usize {
    TILE_ROWS * element.bits() / 32 + 1
}

/// Whether the device converts to E4M3 itself: sm_89 and later.
fn has_e4m3(client: &Client) -> bool {
    let capability = Capabilities::of(client).compute_capability;
    capability.is_some_and(|capability| capability >= 89)
}

/// Units that share a block of a row: each loads 16 bytes where it can, so that the loads of
/// neighbours are contiguous.
fn lanes(client: &Client, dtype: FloatKind, element: ElementFormat) -> usize {
    if is_cpu(client) {
        1
    } else {
        // No less than a word of codes.
        (MX_BLOCK * dtype.size() / 16).min(element.bits())
    }
}

/// The largest magnitude of a few values, as bits.
#[cube]
pub(super) fn amax_of(values: &Array<f32>, #[comptime] len: usize) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..len {
        bits = max(bits, magnitude_bits(values[i]));
    }
    bits
}

/// The largest of what `lanes` neighbouring units hold.
#[cube]
pub(super) fn max_of_lanes(bits: u32, #[comptime] lanes: usize) -> u32 {
    let mut result = bits;
    if comptime!(lanes > 1) {
        result = max(result, plane_shuffle_xor(result, 1u32));
    }
    if comptime!(lanes > 2) {
        result = max(result, plane_shuffle_xor(result, 2u32));
    }
    if comptime!(lanes > 4) {
        result = max(result, plane_shuffle_xor(result, 4u32));
    }
    result
}

/// `lanes` neighbouring units quantize one block of a row, `dense` where rows are whole blocks. All
/// units of a cube stay in the loop together, because the amax is exchanged among them.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_quantize_row_kernel<F: Numeric, N: Size, M: Size>(
    x: &[Vector<F, N>],
    codes: &mut [Vector<u32, M>],
    scales: &mut [u8],
    rows: usize,
    cols: usize,
    #[comptime] plan: MxRowPlan,
    #[define(F)] _storage: ElemType,
) {
    let (dense, lanes) = comptime!((plan.dense, plan.lanes));
    let (plan, kind) = comptime!((plan.mx, plan.mx.kind));
    let width = N::value();
    let stored = M::value();
    let elements = comptime!(32 / lanes);
    let per_word = comptime!(plan.per_word());
    let blocks = cols.div_ceil(32);
    let vectors = cols / width;
    let items = rows * blocks * lanes;
    let mut base = CUBE_POS * CUBE_DIM as usize;
    while base < items {
        let item = base + UNIT_POS as usize;
        let block = item / lanes;
        let inside = item < items;
        let mut values = Array::<f32>::new(elements);
        // The width of a vector divides the columns: it lies within them or behind them.
        #[unroll]
        for v in 0..comptime!(elements / width) {
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if comptime!(dense) {
                if inside {
                    vector = x[item * comptime!(elements / width) + v];
                }
            } else {
                let first = (block % blocks) * 32usize + (item % lanes) * elements;
                let position = first + comptime!(v * width);
                if inside && position < cols {
                    vector = x[(block / blocks) * vectors + position / width];
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
                    let at = comptime!((v * stored + w) * per_word);
                    let word = encode_word(&values, at, multiplier, plan.element, plan.hardware);
                    words.insert(w, word);
                }
                codes[item * comptime!(elements / per_word / stored) + v] = words;
            }
            if item % lanes == comptime!(lanes - 1) {
                scales[block] = u8::cast_from(scale);
            }
        }
        base += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Where blocks of the columns of a tile wait to be written.
#[derive(CubeType)]
pub(super) struct Staging {
    /// The codes of each column.
    codes: Shared<[u32]>,
    /// The scale bytes.
    scales: Shared<[u32]>,
}

#[cube]
impl Staging {
    pub(super) fn new(#[comptime] element: ElementFormat) -> Staging {
        Staging {
            codes: Shared::new_slice(comptime!(TILE_COLS * stage_pitch(element))),
            scales: Shared::new_slice(comptime!((TILE_COLS + 1) * TILE_ROWS / 32)),
        }
    }
}

/// Where the columns of a tile belong: `col0` is the first of `cols` columns of the matrix.
#[derive(CubeType)]
pub(super) struct ColumnPlace {
    pub(super) group: GroupPlace,
    pub(super) col0: usize,
    pub(super) cols: usize,
}

/// The columns of a tile in shared memory become blocks: one unit takes 32 rows of one column; the
/// codes gather in shared memory and leave as runs of 128 bytes.
#[cube]
pub(super) fn quantize_tile_columns<F: Numeric>(
    tile: &[Vector<F, Const<1>>],
    staging: &mut Staging,
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    at: &ColumnPlace,
    #[comptime] plan: MxPlan,
) {
    let kind = comptime!(plan.kind);
    let pitch = comptime!(stage_pitch(plan.element));
    let words = comptime!(plan.block_words());
    let per_word = comptime!(plan.per_word());
    let place = &at.group;
    let (col0, cols) = (at.col0, at.cols);
    let (block0, blocks) = (place.unit0, place.units);
    let mut task = UNIT_POS as usize;
    while task < comptime!(TILE_COLS * TILE_ROWS / 32) {
        let col = task % comptime!(TILE_COLS);
        let block = task / comptime!(TILE_COLS);
        let mut values = Array::<f32>::new(32usize);
        #[unroll]
        for i in 0..32usize {
            let element = tile[(block * 32usize + i) * comptime!(TILE_COLS) + col];
            values[i] = load::<F>(element.extract(0usize), kind);
        }
        let scale = mx_scale(amax_of(&values, 32usize), plan.element);
        let multiplier = decode_ue8m0_reciprocal(scale);
        #[unroll]
        for w in 0..words {
            let first = comptime!(w * per_word);
            staging.codes[col * pitch + block * words + w] =
                encode_word(&values, first, multiplier, plan.element, plan.hardware);
        }
        staging.scales[block * comptime!(TILE_COLS + 1) + col] = scale;
        task += CUBE_DIM as usize;
    }
    sync_cube();
    // Bytes of one stored row by neighbouring units.
    let mut item = UNIT_POS as usize;
    while item < comptime!(TILE_COLS * TILE_ROWS / 32) {
        let col = item / comptime!(TILE_ROWS / 32);
        let block = item % comptime!(TILE_ROWS / 32);
        if col0 + col < cols && block0 + block < blocks {
            let scale = staging.scales[block * comptime!(TILE_COLS + 1) + col];
            let at = place.first + (col0 + col) * place.pitch + block0 + block;
            scales[at] = u8::cast_from(scale);
        }
        item += CUBE_DIM as usize;
    }
    // Four words to a unit; the padding of the stage spreads them over the banks.
    let mut item = UNIT_POS as usize;
    let vectors = comptime!(words / 4);
    let column_vectors = comptime!(TILE_ROWS / 32 * vectors);
    while item < comptime!(TILE_COLS * column_vectors) {
        let col = item / column_vectors;
        let position = item % column_vectors;
        let at = block0 * vectors + position;
        if col0 + col < cols && at < blocks * vectors {
            let mut words = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for w in 0..4usize {
                words.insert(w, staging.codes[col * pitch + position * 4usize + w]);
            }
            codes[(place.first + (col0 + col) * place.pitch) * vectors + at] = words;
        }
        item += CUBE_DIM as usize;
    }
}

/// The tiles of a matrix, and how the tensors of its groups lie.
#[derive(CubeType, CubeLaunch)]
pub struct MxTiles {
    /// What `tile::map_tiles` wrote.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// The matrix.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
    /// Blocks of a stored row where the tensors of groups share their stored rows.
    pub row_blocks: usize,
    /// Rows of tiles that neighbouring cubes take together.
    pub band: usize,
}

/// One cube makes the column blocks of every `cubes`-th tile of 128 x 64; neighbouring cubes take
/// tiles of a band of rows.
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
            let side_by_side = comptime!(grouping.side_by_side());
            let group = group_place(&at, cols, tiles.row_blocks, 32usize, side_by_side);
            let place = ColumnPlace { group, col0, cols };
            let tile = tile.as_slice();
            quantize_tile_columns::<F>(tile, &mut staging, codes, scales, &place, plan);
            // The next tile overwrites what slower units still read.
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}
