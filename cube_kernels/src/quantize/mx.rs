//! MXFP8: quantization of either orientation, from a matrix or from an NVFP4 operand, and back.
//!
//! The numbers are those of [`reference::mx_quantize`](crate::reference::mx_quantize) (specification,
//! section 10), byte for byte.

use cubecl::{prelude::*, server::Handle};

use super::{
    packed_source::{PackedBlock, PackedRows, PackedSource, SourcePlan, scale_at},
    tile::{GroupPlace, Grouping, Shape, ShapeLaunch, group_place, in_bands, map_tiles, tile_from},
};
use crate::launch::{grid, tile_grid, vector_size};
use crate::{
    BLOCK, Format, Layout, MX_BLOCK, Nvfp4Error, Usage,
    capabilities::{Capabilities, is_cpu},
    cube::{
        codec::{BlockFactors, decode_e4m3_element, load, magnitude_bits, store},
        mx::{decode_ue8m0, decode_ue8m0_reciprocal, encode_e4m3x4, mx_scale},
        ptx,
    },
    format::check_mx,
    memory::address_type,
    reference::padding::padded_bound,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Memory for the tensors of groups in one plain matrix; see [`mx_quantize_groups`].
fn empty_of_groups(
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

/// `x` in MXFP8 with blocks along `usage`: row-wise for [`Usage::Rowwise`]; column-wise, stored
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

/// [`mx_quantize`] of each group of rows as a matrix of its own, as operands of grouped products take them:
/// in one plain matrix.
///
/// Along [`Usage::Rowwise`] that is the copy of all rows. Along [`Usage::Columnwise`]
/// - copies of [`Groups::Batch`] lie one below the other. They are row-wise copies of the transposed matrices, and
///   so the result says: `count * x.cols` rows of `x.rows / count`, packed along [`Usage::Rowwise`].
/// - copies of [`Groups::Offsets`] lie side by side: `x.cols` stored rows, in each of which group `g` takes the
///   elements from entry `g` of
///   [`GroupOffsets::aligned`](super::GroupOffsets::aligned)`(client, x.rows, 32)` on. There is room for
///   [`padded_bound`]`(x.rows, count, 32)` of them; blocks behind the last group are not written.
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
    let hardware = has_e4m3(client);
    let (outer, blocks) = (out.outer(), out.blocks());
    let address = address_type(x.len().max(outer * blocks * MX_BLOCK));
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let scales = unsafe { BufferArg::from_raw_parts(out.scales.clone(), outer * blocks) };
    match usage {
        Usage::Rowwise => {
            let width = vector_size(x.dtype, x.cols);
            let lanes = lanes(client, x.dtype);
            let stored = 2.min(8 / lanes);
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
                    BufferArg::from_raw_parts(x.handle.clone(), x.len() / width),
                    BufferArg::from_raw_parts(out.codes.clone(), outer * blocks * 8 / stored),
                    scales,
                    x.rows,
                    x.cols,
                    x.cols.is_multiple_of(MX_BLOCK),
                    lanes,
                    hardware,
                    x.dtype,
                    x.dtype.storage_type(),
                );
            }
        }
        Usage::Columnwise => {
            let width = vector_size(x.dtype, x.cols);
            let tiles = Tiles::new(client, (x.rows, x.cols), groups);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                mx_quantize_col_kernel::launch_unchecked(
                    client,
                    tiles.count.clone(),
                    tiles.dim,
                    address,
                    width,
                    BufferArg::from_raw_parts(x.handle.clone(), x.len() / width),
                    tiles.map(client, &out.scales),
                    BufferArg::from_raw_parts(out.codes.clone(), outer * blocks * 2),
                    scales,
                    tiles.shape(),
                    tiles.rows,
                    blocks,
                    tiles.band,
                    Grouping::of(groups),
                    hardware,
                    x.dtype,
                    x.dtype.storage_type(),
                );
            }
        }
    }
    Ok(out)
}

/// The NVFP4 matrix `packed` in MXFP8 with blocks along `usage` of its source, which may be the axis
/// it is packed along or the other one, in one kernel: the bytes of [`dequantize`](super::dequantize())
/// to `via` followed by [`mx_quantize_groups`], without the matrix between them in memory. `via` is the
/// element type that the dequantized values are rounded to, that of the training as a rule.
///
/// # Errors
/// When a buffer is smaller than its shape; for groups with offsets that are packed along their rows, and
/// for groups with swizzled scales where the axis stays the same.
pub fn mx_requantize(
    client: &Client,
    packed: &DeviceQuantized,
    usage: Usage,
    format: Format,
    via: FloatKind,
) -> Result<DeviceQuantized, Nvfp4Error> {
    check_mx(format)?;
    let source = PackedSource::even("packed", packed)?;
    let shape = (packed.rows(), packed.cols());
    let out = empty_of_groups(client, shape, &packed.groups, usage, format);
    if source.rows * source.cols == 0 {
        return Ok(out);
    }
    let hardware = has_e4m3(client);
    let mx_blocks = out.outer() * out.blocks();
    let address = address_type(mx_blocks.max(source.rows * source.blocks) * MX_BLOCK);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let codes = unsafe { BufferArg::from_raw_parts(out.codes.clone(), mx_blocks * 2) };
    let scales = unsafe { BufferArg::from_raw_parts(out.scales.clone(), mx_blocks) };
    if usage == packed.usage() {
        source.check_flat("packed")?;
        let maxima = source.row_maxima(client)?;
        // A unit takes an NVFP4 block on a GPU, both on the CPU.
        let lanes = if is_cpu(client) { 1 } else { 2 };
        let (count, dim) = grid(client, mx_blocks * lanes);
        // SAFETY: the kernel stays below the number of blocks.
        unsafe {
            mx_requantize_along_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                source.codes(),
                source.scales(),
                maxima.arg(),
                codes,
                scales,
                source.rows,
                source.cols,
                source.blocks,
                maxima.items(source.cols.div_ceil(MX_BLOCK)),
                source.range(),
                source.blocks * BLOCK == source.cols && source.cols.is_multiple_of(MX_BLOCK),
                maxima.rows.is_some(),
                source.plan.swizzled,
                lanes,
                hardware,
                via,
                via.storage_type(),
            );
        }
    } else {
        let tiles = Tiles::new(client, (source.rows, source.cols), &source.groups);
        // SAFETY: the kernel masks every access by the shape.
        unsafe {
            mx_requantize_across_kernel::launch_unchecked(
                client,
                tiles.count.clone(),
                tiles.dim,
                address,
                16 / via.size(),
                source.arg(),
                tiles.map(client, source.unread()),
                codes,
                scales,
                tiles.shape(),
                tiles.rows,
                out.blocks(),
                tiles.band,
                source.plan,
                hardware,
                via,
                via.storage_type(),
            );
        }
    }
    Ok(out)
}

/// The launch of a kernel over tiles of rows in groups.
struct Tiles<'a> {
    matrix: (usize, usize),
    groups: &'a Groups,
    rows: usize,
    cols: usize,
    band: usize,
    count: CubeCount,
    dim: CubeDim,
}

impl<'a> Tiles<'a> {
    fn new(client: &Client, (rows, cols): (usize, usize), groups: &'a Groups) -> Self {
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

    fn shape(&self) -> ShapeLaunch {
        let (rows, cols) = self.matrix;
        ShapeLaunch::new(rows, cols, self.groups.count(), self.cols)
    }

    fn map(&self, client: &Client, unread: &Handle) -> BufferArg {
        map_tiles(
            client,
            self.matrix,
            self.groups,
            self.rows,
            MX_BLOCK,
            unread,
        )
    }
}

/// The matrix that `packed` stands for, in the orientation of its source, rounded once to `out`. See
/// [`reference::mx_dequantize`](crate::reference::mx_dequantize).
///
/// # Errors
/// When a buffer is smaller than its shape.
pub fn mx_dequantize(
    client: &Client,
    packed: &DeviceQuantized,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    check_mx(packed.layout.format)?;
    packed.check_codes("packed", packed.layout.format)?;
    packed.check_no_groups("packed")?;
    packed.check("packed")?;
    let result = Matrix::empty(client, packed.rows(), packed.cols(), out);
    if result.is_empty() {
        return Ok(result);
    }
    let (outer, inner, blocks) = (packed.outer(), packed.inner(), packed.blocks());
    let address = address_type(outer * blocks * MX_BLOCK);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let codes = unsafe { BufferArg::from_raw_parts(packed.codes.clone(), outer * blocks * 8) };
    let scales = unsafe { BufferArg::from_raw_parts(packed.scales.clone(), outer * blocks) };
    match packed.usage() {
        Usage::Rowwise => {
            let width = vector_size(out, inner);
            let (count, dim) = grid(client, result.len() / width);
            // SAFETY: the kernel stays below the shape of the result.
            unsafe {
                mx_dequantize_row_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    codes,
                    scales,
                    BufferArg::from_raw_parts(result.handle.clone(), result.len() / width),
                    outer,
                    inner,
                    out,
                    out.storage_type(),
                );
            }
        }
        Usage::Columnwise => {
            let width = vector_size(out, outer);
            let tiles = inner.div_ceil(TILE_ROWS) * outer.div_ceil(TILE_COLS);
            let (count, dim) = tile_grid(client, tiles);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                mx_dequantize_col_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    codes,
                    scales,
                    BufferArg::from_raw_parts(result.handle.clone(), result.len() / width),
                    inner,
                    outer,
                    out,
                    out.storage_type(),
                );
            }
        }
    }
    Ok(result)
}

/// Rows and columns of the tile that one cube turns into columns.
const TILE_ROWS: usize = 128;
const TILE_COLS: usize = 64;
/// Blocks of NVFP4 of a tile.
const TILE_BLOCKS: usize = TILE_ROWS * TILE_COLS / 16;
/// Blocks of NVFP4 that a unit loads before it decodes the first: a cube of 256 all of a tile.
const IN_FLIGHT: usize = 2;

/// Rows of tiles that cubes work on together where `cols` columns of tiles lie between one tile and the
/// next below: the scale bytes of a column from eight tiles make a sector of memory. Where rows are short all
/// eight are in the L2 cache together anyway, and tiles in rows are faster (H100: 78 us instead of 92 for
/// 8192 x 8192, but 371 instead of 313 for 16384 x 16384).
fn band_of(cols: usize) -> usize {
    if cols > 12288 { 8 } else { 1 }
}

/// Words from one column's codes to the next in shared memory: 128 bytes, and one word against bank
/// conflicts.
const STAGE: usize = TILE_ROWS / 4 + 1;

/// Whether the device converts to E4M3 itself: sm_89 and later.
fn has_e4m3(client: &Client) -> bool {
    let capability = Capabilities::of(client).compute_capability;
    capability.is_some_and(|capability| capability >= 89)
}

/// Units that share a block of a row: each loads 16 bytes, so that the loads of neighbours are
/// contiguous.
fn lanes(client: &Client, dtype: FloatKind) -> usize {
    if is_cpu(client) {
        1
    } else {
        MX_BLOCK * dtype.size() / 16
    }
}

/// The largest magnitude of a few values, as bits.
#[cube]
fn amax_of(values: &Array<f32>, #[comptime] len: usize) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..len {
        bits = max(bits, magnitude_bits(values[i]));
    }
    bits
}

/// The largest of what `lanes` neighbouring units hold.
#[cube]
fn max_of_lanes(bits: u32, #[comptime] lanes: usize) -> u32 {
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

/// `lanes` neighbouring units quantize one block of a row, `dense` where rows are whole blocks. All units of a cube stay in the loop
/// together, because the maximum is exchanged among them.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_quantize_row_kernel<F: Numeric, N: Size, M: Size>(
    x: &[Vector<F, N>],
    codes: &mut [Vector<u32, M>],
    scales: &mut [u8],
    rows: usize,
    cols: usize,
    #[comptime] dense: bool,
    #[comptime] lanes: usize,
    #[comptime] hardware: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let stored = M::value();
    let elements = comptime!(32 / lanes);
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
        let scale = mx_scale(max_of_lanes(amax_of(&values, elements), lanes));
        let multiplier = decode_ue8m0_reciprocal(scale);
        if inside {
            #[unroll]
            for v in 0..comptime!(elements / 4 / stored) {
                let mut words = Vector::<u32, M>::empty();
                #[unroll]
                for w in 0..stored {
                    let at = comptime!((v * stored + w) * 4);
                    words.insert(w, encode_e4m3x4(&values, at, multiplier, hardware));
                }
                codes[item * comptime!(elements / 4 / stored) + v] = words;
            }
            if item % lanes == comptime!(lanes - 1) {
                scales[block] = u8::cast_from(scale);
            }
        }
        base += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The columns of a tile in shared memory become blocks, those of `place`: one unit takes 32 rows of one
/// column; the codes gather in shared memory and leave as runs of 128 bytes. The first column is `col0` of
/// `cols`.
#[cube]
fn quantize_tile_columns<F: Numeric>(
    tile: &[Vector<F, Const<1>>],
    stage: &mut [u32],
    bytes: &mut [u32],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    place: &GroupPlace,
    col0: usize,
    cols: usize,
    #[comptime] hardware: bool,
    #[comptime] kind: FloatKind,
) {
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
        let scale = mx_scale(amax_of(&values, 32usize));
        let multiplier = decode_ue8m0_reciprocal(scale);
        #[unroll]
        for w in 0..8usize {
            stage[col * comptime!(STAGE) + block * 8usize + w] =
                encode_e4m3x4(&values, comptime!(w * 4), multiplier, hardware);
        }
        bytes[block * comptime!(TILE_COLS + 1) + col] = scale;
        task += CUBE_DIM as usize;
    }
    sync_cube();
    // Bytes of one stored row by neighbouring units.
    let mut item = UNIT_POS as usize;
    while item < comptime!(TILE_COLS * TILE_ROWS / 32) {
        let col = item / comptime!(TILE_ROWS / 32);
        let block = item % comptime!(TILE_ROWS / 32);
        if col0 + col < cols && block0 + block < blocks {
            let scale = bytes[block * comptime!(TILE_COLS + 1) + col];
            let at = place.first + (col0 + col) * place.pitch + block0 + block;
            scales[at] = u8::cast_from(scale);
        }
        item += CUBE_DIM as usize;
    }
    // Four words to a unit; the padding of the stage spreads them over the banks.
    let mut item = UNIT_POS as usize;
    while item < comptime!(TILE_COLS * TILE_ROWS / 16) {
        let col = item / comptime!(TILE_ROWS / 16);
        let position = item % comptime!(TILE_ROWS / 16);
        let at = block0 * 2usize + position;
        if col0 + col < cols && at < blocks * 2usize {
            let mut words = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for w in 0..4usize {
                words.insert(w, stage[col * comptime!(STAGE) + position * 4usize + w]);
            }
            codes[(place.first + (col0 + col) * place.pitch) * 2usize + at] = words;
        }
        item += CUBE_DIM as usize;
    }
}

/// One cube makes the column blocks of every `cubes`-th tile of 128 x 64, of `row_tiles` rows of them;
/// neighbouring cubes take tiles of a band of rows. `map` is what `tile::map_tiles` wrote, `row_blocks` the
/// length of a stored row where groups lie side by side.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_quantize_col_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    map: &[Vector<u32, Const<4>>],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    shape: Shape,
    row_tiles: usize,
    row_blocks: usize,
    band: usize,
    #[comptime] grouping: Grouping,
    #[comptime] hardware: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let mut tile = Shared::<[Vector<F, Const<1>>]>::new_aligned_slice(
        comptime!(TILE_ROWS * TILE_COLS),
        16usize,
    );
    let mut stage = Shared::<[u32]>::new_slice(comptime!(TILE_COLS * STAGE));
    let mut bytes = Shared::<[u32]>::new_slice(comptime!((TILE_COLS + 1) * TILE_ROWS / 32));
    let cols = shape.cols;
    let vectors = cols / width;
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let place = in_bands(index, row_tiles, shape.tile_cols, band);
        let col0 = place.col * comptime!(TILE_COLS);
        let at = tile_from(map, place.row, col0, &shape, 32usize, grouping);
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
            let place = group_place(&at, cols, row_blocks, 32usize, side_by_side);
            quantize_tile_columns::<F>(
                tile.as_slice(),
                stage.as_mut_slice(),
                bytes.as_mut_slice(),
                codes,
                scales,
                &place,
                col0,
                cols,
                hardware,
                kind,
            );
            // The next tile overwrites what slower units still read.
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}

/// The 16 values of an NVFP4 block, rounded to `via` by the instruction where there is one.
#[cube]
fn decode_block<F: Numeric>(
    block: &PackedBlock,
    #[comptime] hardware: bool,
    #[comptime] via: FloatKind,
) -> Array<f32> {
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for pair in 0..8usize {
        let at = comptime!(pair * 2);
        let word = block.words.extract(comptime!(at / 8));
        let low = word >> comptime!(4 * (at as u32 % 8));
        let high = word >> comptime!(4 * (at as u32 % 8) + 4);
        let low = block.factors.decode(low);
        let high = block.factors.decode(high);
        if comptime!(hardware && via == FloatKind::Bf16) {
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

/// A value that is `via` already, as a stored element.
#[cube]
fn stored<F: Numeric>(value: f32, #[comptime] via: FloatKind) -> F {
    if comptime!(via == FloatKind::Bf16) {
        F::cast_from(u32::reinterpret(value) >> 16u32)
    } else {
        F::cast_from(value)
    }
}

/// `lanes` neighbouring units turn two NVFP4 blocks of a stored row, which has `nv_blocks`, into one of MXFP8,
/// `dense` where rows are whole MXFP8 blocks. With `maxima` an amax stands for `amax_blocks` MXFP8 blocks, and
/// for all otherwise.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_requantize_along_kernel<F: Numeric>(
    nv_codes: &[Vector<u32, Const<2>>],
    nv_scales: &[u8],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    outer: usize,
    inner: usize,
    nv_blocks: usize,
    amax_blocks: usize,
    range: f32,
    #[comptime] dense: bool,
    #[comptime] maxima: bool,
    #[comptime] swizzled: bool,
    #[comptime] lanes: usize,
    #[comptime] hardware: bool,
    #[comptime] via: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let halves = comptime!(2 / lanes);
    let blocks = inner.div_ceil(32);
    let shared = amax[0] / range;
    let items = outer * blocks * lanes;
    let mut base = CUBE_POS * CUBE_DIM as usize;
    while base < items {
        let item = base + UNIT_POS as usize;
        let block = item / lanes;
        let inside = item < items;
        let factor = if comptime!(maxima) {
            // Units behind the last block go along with the others.
            amax[min(block, outer * blocks - 1usize) / amax_blocks] / range
        } else {
            shared
        };
        let mut values = Array::<f32>::new(comptime!(16 * halves));
        #[unroll]
        for half in 0..halves {
            let mut index = item * halves + half;
            let mut present = 16usize;
            if comptime!(!dense) {
                let first =
                    (block % blocks) * 32usize + (item % lanes) * 16usize + comptime!(half * 16);
                index = (block / blocks) * nv_blocks + first / 16usize;
                present = min(inner - min(first, inner), 16usize);
            }
            let mut words = Vector::<u32, Const<2>>::new(0u32);
            let mut scale = 0u32;
            if inside && present > 0usize {
                words = nv_codes[index];
                let at = if comptime!(swizzled) {
                    let row = index / nv_blocks;
                    scale_at(row, row, index - row * nv_blocks, nv_blocks, true)
                } else {
                    index
                };
                scale = u32::cast_from(nv_scales[at]);
            }
            let block = PackedBlock {
                words,
                factors: BlockFactors::new(scale, factor),
            };
            let decoded = decode_block::<F>(&block, hardware, via);
            #[unroll]
            for i in 0..16usize {
                let mut value = decoded[i];
                if comptime!(!dense) {
                    // What pads the NVFP4 block is no part of the matrix.
                    value = select(i < present, value, 0.0f32);
                }
                values[comptime!(half * 16 + i)] = value;
            }
        }
        let bits = amax_of(&values, comptime!(16 * halves));
        let scale = mx_scale(max_of_lanes(bits, lanes));
        let multiplier = decode_ue8m0_reciprocal(scale);
        if inside {
            #[unroll]
            for half in 0..halves {
                let mut words = Vector::<u32, Const<4>>::empty();
                #[unroll]
                for w in 0..4usize {
                    let at = comptime!(half * 16 + w * 4);
                    words.insert(w, encode_e4m3x4(&values, at, multiplier, hardware));
                }
                codes[item * halves + half] = words;
            }
            if item % lanes == comptime!(lanes - 1) {
                scales[block] = u8::cast_from(scale);
            }
        }
        base += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One cube decodes every `cubes`-th tile of 128 stored rows x 64, of `row_tiles` rows of them, and makes MXFP8
/// blocks down its columns. `map` and `row_blocks` are as for
/// [`mx_quantize_col_kernel()`]. `F` is the storage type of `via`, `N` elements of it are 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_requantize_across_kernel<F: Numeric, N: Size>(
    source: PackedRows,
    map: &[Vector<u32, Const<4>>],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    shape: Shape,
    row_tiles: usize,
    row_blocks: usize,
    band: usize,
    #[comptime] plan: SourcePlan,
    #[comptime] hardware: bool,
    #[comptime] via: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let mut tile = Shared::<[Vector<F, Const<1>>]>::new_aligned_slice(
        comptime!(TILE_ROWS * TILE_COLS),
        16usize,
    );
    let mut stage = Shared::<[u32]>::new_slice(comptime!(TILE_COLS * STAGE));
    let mut bytes = Shared::<[u32]>::new_slice(comptime!((TILE_COLS + 1) * TILE_ROWS / 32));
    let grouping = comptime!(plan.grouping);
    let shared = source.factor();
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let place = in_bands(index, row_tiles, shape.tile_cols, band);
        let col0 = place.col * comptime!(TILE_COLS);
        let block0 = place.col * comptime!(TILE_COLS / 16);
        let at = tile_from(map, place.row, col0, &shape, 32usize, grouping);
        if comptime!(grouping == Grouping::One) || at.row0 < at.row_end {
            let own = source.factor_of(at.group, shared, plan);
            let wide = tile.as_mut_slice().with_vector_size_mut::<N>();
            let mut first = UNIT_POS as usize;
            while first < comptime!(TILE_BLOCKS) {
                // All loads of a turn are under way before the first is waited for.
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
                    loaded.push(source.load(row, tiled, block, own, inside, plan));
                }
                #[unroll]
                for j in 0..IN_FLIGHT {
                    let item = first + j * CUBE_DIM as usize;
                    if item < comptime!(TILE_BLOCKS) {
                        let values = decode_block::<F>(loaded.index(j), hardware, via);
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
            let side_by_side = comptime!(grouping.side_by_side());
            let place = group_place(&at, shape.cols, row_blocks, 32usize, side_by_side);
            quantize_tile_columns::<F>(
                tile.as_slice(),
                stage.as_mut_slice(),
                bytes.as_mut_slice(),
                codes,
                scales,
                &place,
                col0,
                shape.cols,
                hardware,
                via,
            );
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}

/// One unit decodes every `units`-th vector of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_dequantize_row_kernel<F: Numeric, N: Size>(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<F, N>],
    rows: usize,
    cols: usize,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let vectors = cols / width;
    let blocks = cols.div_ceil(32);
    let mut item = ABSOLUTE_POS;
    while item < rows * vectors {
        let row = item / vectors;
        let first = (item % vectors) * width;
        let block = row * blocks + first / 32usize;
        let scale = decode_ue8m0(u32::cast_from(scales[block]));
        let word = block * 8usize + first % 32usize / 4usize;
        let mut vector = Vector::<F, N>::empty();
        #[unroll]
        for w in 0..comptime!(width.div_ceil(4)) {
            let packed = codes[word + w];
            #[unroll]
            for i in 0..comptime!(width.min(4)) {
                // A vector of less than four elements starts within a word.
                let shift = comptime!(8 * i as u32) + 8u32 * (first % 4usize) as u32;
                let value = decode_e4m3_element(packed >> shift) * scale;
                vector.insert(comptime!(w * 4 + i), store::<F>(value, kind));
            }
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One cube decodes every `cubes`-th tile of 128 x 64 of a matrix that is stored transposed: words of
/// its 64 stored rows gather in shared memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_dequantize_col_kernel<F: Numeric, N: Size>(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<F, N>],
    rows: usize,
    cols: usize,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let mut stage = Shared::<[u32]>::new_slice(comptime!(TILE_COLS * STAGE));
    let mut factors = Shared::<[f32]>::new_slice(comptime!(TILE_COLS * TILE_ROWS / 32));
    let blocks = rows.div_ceil(32);
    let vectors = cols / width;
    let tile_cols = cols.div_ceil(TILE_COLS);
    let tiles = rows.div_ceil(TILE_ROWS) * tile_cols;
    let mut index = CUBE_POS;
    while index < tiles {
        let row0 = (index / tile_cols) * comptime!(TILE_ROWS);
        let col0 = (index % tile_cols) * comptime!(TILE_COLS);
        let mut item = UNIT_POS as usize;
        while item < comptime!(TILE_COLS * TILE_ROWS / 4) {
            let col = item / comptime!(TILE_ROWS / 4);
            let word = item % comptime!(TILE_ROWS / 4);
            let block = row0 / 32usize + word / 8usize;
            if col0 + col < cols && block < blocks {
                let at = (col0 + col) * blocks + block;
                stage[col * comptime!(STAGE) + word] = codes[at * 8usize + word % 8usize];
                if word % 8usize == 7usize {
                    let scale = decode_ue8m0(u32::cast_from(scales[at]));
                    factors[(word / 8usize) * comptime!(TILE_COLS) + col] = scale;
                }
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        let mut item = UNIT_POS as usize;
        while item < comptime!(TILE_COLS * TILE_ROWS / width) {
            let row = item / comptime!(TILE_COLS / width);
            let col = (item % comptime!(TILE_COLS / width)) * width;
            if row0 + row < rows && col0 + col < cols {
                let shift = 8u32 * (row % 4usize) as u32;
                let mut vector = Vector::<F, N>::empty();
                #[unroll]
                for i in 0..width {
                    let packed = stage[(col + i) * comptime!(STAGE) + row / 4usize];
                    let scale = factors[(row / 32usize) * comptime!(TILE_COLS) + col + i];
                    let value = decode_e4m3_element(packed >> shift) * scale;
                    vector.insert(i, store::<F>(value, kind));
                }
                out[(row0 + row) * vectors + (col0 + col) / width] = vector;
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        index += CUBE_COUNT;
    }
}
