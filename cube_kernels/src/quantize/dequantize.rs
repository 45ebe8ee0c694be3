//! Dequantization kernels.

use cubecl::prelude::*;

use super::{
    mx::mx_dequantize,
    packed_source::{PackedRows, PackedRowsLaunch, PackedSource, SourcePlan, scale_at},
    scale_order::in_form,
    tile::{Grouping, ROWS, Shape, ShapeLaunch, group_place, map_tiles, padded_unit, tile_from},
};
use crate::launch::{buffer, grid};
use crate::{
    BLOCK, Format, Nvfp4Error, StoredForm, Usage,
    cube::{
        codec::{BlockFactors, store},
        scale::swizzled_at,
    },
    memory::{address_type, is_aligned},
    tensor::{AmaxGranularity, DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Dequantizes `packed` to a matrix of `rows` x `cols` in the orientation of its source, rounded
/// once to `out`. See [`reference::dequantize`](crate::reference::dequantize) and
/// [`reference::mx_dequantize`](crate::reference::mx_dequantize). A transform is not undone; rows
/// that belong to no group are undefined. MX scales in 128x4 tiles are first unswizzled in a separate
/// pass.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub fn dequantize(
    client: &Client,
    packed: &DeviceQuantized,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    if packed.layout.format.is_mx() {
        return mx_dequantize(client, packed, out);
    }
    packed.check_codes("packed", Format::Nvfp4)?;
    packed.check("packed")?;
    packed.groups.check(packed.rows())?;
    let result = Matrix::empty(client, packed.rows(), packed.cols(), out);
    match packed.usage() {
        _ if result.is_empty() => {}
        Usage::Rowwise => dequantize_rows(client, packed, &result)?,
        Usage::Columnwise => dequantize_cols(client, packed, &result),
    }
    Ok(result)
}

/// Launches the kernel for a tensor in the orientation of its source.
fn dequantize_rows(
    client: &Client,
    packed: &DeviceQuantized,
    result: &Matrix,
) -> Result<(), Nvfp4Error> {
    // The kernel handles rows but not groups, at each of which tiles of scales start anew.
    let is_tiled = packed.layout.form == StoredForm::Tiles;
    let in_rows = match &packed.groups {
        Groups::Batch(_) | Groups::Offsets { .. } if is_tiled => {
            Some(in_form(client, packed, StoredForm::Rows)?)
        }
        _ => None,
    };
    let packed = in_rows.as_ref().unwrap_or(packed);
    let source = PackedSource::even("packed", packed)?;
    if source.blocks * BLOCK != source.cols {
        return Err(Nvfp4Error::shape(
            "packed",
            format!("{} columns, packed along them", source.cols),
            "a multiple of 16",
        ));
    }
    let maxima = source.row_maxima(client)?;
    // Eight codes become 16 bytes of 16-bit values.
    let row_words = source.blocks * 2;
    let words = source.rows * row_words;
    let (count, dim) = grid(client, words);
    // SAFETY: the buffers were checked against the shapes.
    unsafe {
        dequantize_rows_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(result.len()),
            PackedWordsLaunch::new(
                buffer(&packed.codes, words),
                source.scales(),
                maxima.arg(),
                row_words,
                maxima.items(row_words),
                source.range(),
            ),
            buffer(&result.handle, words),
            words,
            WordsPlan {
                per_row: maxima.rows.is_some(),
                swizzled: source.plan.swizzled,
                kind: result.dtype,
            },
            result.dtype.storage_type(),
        );
    }
    Ok(())
}

/// Launches the kernel for a tensor that is stored transposed, or for such tensors of groups.
fn dequantize_cols(client: &Client, packed: &DeviceQuantized, result: &Matrix) {
    let out = result.dtype;
    let blocks = packed.code_blocks();
    let address = address_type(blocks * BLOCK);
    let plan = SourcePlan {
        per_row: packed.layout.amax == AmaxGranularity::PerRow,
        swizzled: packed.layout.form == StoredForm::Tiles,
        grouping: Grouping::of(&packed.groups),
    };
    let whole_sectors = packed.outer().is_multiple_of(2)
        && packed.blocks().is_multiple_of(BLOCKS)
        && is_aligned(&packed.codes)
        && is_aligned(&packed.scales);
    let plain = plan.grouping == Grouping::One && !plan.swizzled;
    // SAFETY (of every argument): the buffers were checked against the shapes.
    let amax = unsafe { buffer(&packed.amax, packed.amax_len()) };
    if plain && whole_sectors {
        let items = packed.outer() / 2 * (packed.blocks() / BLOCKS);
        let (count, dim) = grid(client, items);
        // SAFETY: as above.
        unsafe {
            dequantize_col_pairs_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                PackedSectorsLaunch::new(
                    buffer(&packed.codes, blocks / 2),
                    buffer(&packed.scales, blocks / BLOCKS),
                    amax,
                    packed.outer(),
                    packed.inner(),
                    packed.blocks(),
                    packed.layout.scaling.range(),
                ),
                buffer(&result.handle, result.len() / 2),
                plan.per_row,
                out,
                out.storage_type(),
            );
        }
        return;
    }
    let (rows, cols, groups) = (packed.rows(), packed.cols(), &packed.groups);
    let row_tiles = groups.units(rows, ROWS);
    let numbers = match groups {
        Groups::One => packed.blocks(),
        _ => row_tiles * TILE_BLOCKS,
    };
    let (count, dim) = grid(client, cols * numbers);
    let span = packed.unit();
    // SAFETY: as above.
    unsafe {
        dequantize_cols_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            PackedRowsLaunch::new(
                buffer(&packed.codes, blocks),
                buffer(&packed.scales, packed.scale_bytes()),
                amax,
                packed.blocks(),
                packed.layout.scaling.range(),
            ),
            map_tiles(client, (rows, cols), groups, row_tiles, span, &packed.amax),
            buffer(&result.handle, result.len()),
            ShapeLaunch::new(rows, cols, groups.count(), 1),
            numbers,
            ColumnsPlan {
                span,
                source: plan,
                kind: out,
            },
            out.storage_type(),
        );
    }
}

/// A rowwise tensor for a kernel that reads words of eight codes.
#[derive(CubeType, CubeLaunch)]
pub struct PackedWords {
    /// Codes, eight per item.
    pub codes: Box<[u32]>,
    /// Scale bytes.
    pub scales: Box<[u8]>,
    /// Amax values.
    pub amax: Box<[f32]>,
    /// Words per row.
    pub row_words: usize,
    /// Words per amax, unless one amax applies to all.
    pub amax_words: usize,
    /// Divisor of an amax.
    pub range: f32,
}

/// Comptime configuration of [`dequantize_rows_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WordsPlan {
    /// True if an amax applies to `amax_words` words instead of all.
    pub per_row: bool,
    /// True if scales are in 128x4 tiles.
    pub swizzled: bool,
    /// Element type of the result.
    pub kind: FloatKind,
}

/// Each unit decodes every `units`-th of `words` words of eight codes to one vector.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_rows_kernel<F: Numeric>(
    source: PackedWords,
    out: &mut [Vector<F, Const<8>>],
    words: usize,
    #[comptime] plan: WordsPlan,
    #[define(F)] _storage: ElemType,
) {
    let (swizzled, kind) = comptime!((plan.swizzled, plan.kind));
    let row_words = source.row_words;
    let tensor = source.amax[0] / source.range;
    let mut item = ABSOLUTE_POS;
    while item < words {
        let factor = if comptime!(plan.per_row) {
            source.amax[item / source.amax_words] / source.range
        } else {
            tensor
        };
        let word = source.codes[item];
        let at = if comptime!(swizzled) {
            let row = item / row_words;
            let block = (item - row * row_words) / 2usize;
            scale_at(row, row, block, row_words / 2usize, true)
        } else {
            item / 2usize
        };
        let factors = BlockFactors::new(u32::cast_from(source.scales[at]), factor);
        let mut vector = Vector::<F, Const<8>>::empty();
        #[unroll]
        for i in 0..8usize {
            let value = factors.decode(word >> comptime!(4 * i as u32));
            vector.insert(i, store::<F>(value, kind));
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Blocks of a stored row that a unit decodes: 32 bytes of codes, a memory sector.
const BLOCKS: usize = 4;

/// A columnwise tensor for a kernel that reads whole memory sectors.
#[derive(CubeType, CubeLaunch)]
pub struct PackedSectors {
    /// Codes, two blocks per item.
    pub codes: Box<[Vector<u32, Const<4>>]>,
    /// Scale bytes, four per item.
    pub scales: Box<[u32]>,
    /// Amax values.
    pub amax: Box<[f32]>,
    /// Stored rows.
    pub outer: usize,
    /// Elements per stored row, without padding.
    pub inner: usize,
    /// Blocks per stored row.
    pub blocks: usize,
    /// Divisor of an amax.
    pub range: f32,
}

/// Each unit decodes `BLOCKS` blocks of each of two stored rows of a columnwise tensor, and stores
/// pairs of the result. Neighbouring units take neighbouring stored rows, which are neighbouring
/// columns of the result. Whole sectors are loaded at once: neighbours load from other rows, so a
/// second load of a sector would miss the cache.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_col_pairs_kernel<F: Numeric>(
    source: PackedSectors,
    out: &mut [Vector<F, Const<2>>],
    #[comptime] per_row: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let tensor = source.amax[0] / source.range;
    let pairs = source.outer / 2usize;
    let quads = source.blocks / BLOCKS;
    let mut item = ABSOLUTE_POS;
    while item < pairs * quads {
        let quad = item / pairs;
        let pair = item - quad * pairs;
        let mut low_factor = tensor;
        let mut high_factor = tensor;
        if comptime!(per_row) {
            low_factor = source.amax[2usize * pair] / source.range;
            high_factor = source.amax[2usize * pair + 1usize] / source.range;
        }
        let low = 2usize * pair * quads + quad;
        let high = low + quads;
        let low_scales = source.scales[low];
        let high_scales = source.scales[high];
        let mut low_codes = Array::<Vector<u32, Const<4>>>::new(2usize);
        let mut high_codes = Array::<Vector<u32, Const<4>>>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            low_codes[half] = source.codes[2usize * low + half];
            high_codes[half] = source.codes[2usize * high + half];
        }
        let start = quad * comptime!(BLOCKS * 16);
        let mut target = start * pairs + pair;
        #[unroll]
        for b in 0..BLOCKS {
            let shift = comptime!(8 * b as u32);
            let low_factors = BlockFactors::new((low_scales >> shift) & 0xFFu32, low_factor);
            let high_factors = BlockFactors::new((high_scales >> shift) & 0xFFu32, high_factor);
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let word = comptime!(2 * (b % 2) + i / 8);
                let low_code = low_codes[comptime!(b / 2)].extract(word) >> shift;
                let high_code = high_codes[comptime!(b / 2)].extract(word) >> shift;
                let mut values = Vector::<F, Const<2>>::empty();
                values.insert(0usize, store::<F>(low_factors.decode(low_code), kind));
                values.insert(1usize, store::<F>(high_factors.decode(high_code), kind));
                if start + comptime!(b * 16 + i) < source.inner {
                    out[target] = values;
                }
                target += pairs;
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Blocks down a column of a tile.
const TILE_BLOCKS: usize = ROWS / BLOCK;

/// A block of a columnwise tensor.
#[derive(CubeType, Clone, Copy)]
struct ColumnBlock {
    /// Index of its codes.
    index: usize,
    /// Index of its scale byte.
    scale: usize,
    /// Index of its amax, if there are several.
    amax: usize,
    /// Row of its first element.
    first: usize,
    /// End row of its group (exclusive).
    end: usize,
}

/// Returns block number `number` of column `column`: counted among its `blocks` or, with groups,
/// among those of its tiles, some of which are cut short.
#[cube]
fn column_block(
    map: &[Vector<u32, Const<4>>],
    shape: &Shape,
    column: usize,
    number: usize,
    blocks: usize,
    #[comptime] span: usize,
    #[comptime] plan: SourcePlan,
) -> ColumnBlock {
    if comptime!(plan.grouping == Grouping::One) {
        ColumnBlock {
            index: column * blocks + number,
            scale: scale_at(column, column, number, blocks, plan.swizzled),
            amax: column,
            first: number * 16usize,
            end: shape.rows,
        }
    } else {
        let row_tile = number / TILE_BLOCKS;
        let below = number - row_tile * TILE_BLOCKS;
        let tile = tile_from(map, row_tile, 0usize, shape, span, plan.grouping);
        let place = group_place(&tile, shape.cols, 0usize, span, false);
        let per_unit = comptime!(span / BLOCK);
        let pitch = place.pitch * per_unit;
        let block = (tile.row0 - tile.group_row0) / 16usize + below;
        let index = place.first * per_unit + column * pitch + block;
        let scale = if comptime!(plan.swizzled) {
            let padded_blocks = comptime!(padded_unit(span) / BLOCK);
            shape.cols.div_ceil(128) * 128usize * tile.padded_before * padded_blocks
                + swizzled_at(column, block, pitch.div_ceil(4))
        } else {
            index
        };
        ColumnBlock {
            index,
            scale,
            amax: if comptime!(plan.per_row) {
                tile.group * shape.cols + column
            } else {
                tile.group
            },
            first: tile.row0 + below * 16usize,
            end: tile.row_end,
        }
    }
}

/// Comptime configuration of [`dequantize_cols_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ColumnsPlan {
    /// Number of rows to a multiple of which the tensor is padded.
    pub span: usize,
    /// Storage of the tensor.
    pub source: SourcePlan,
    /// Element type of the result.
    pub kind: FloatKind,
}

/// Each unit decodes every `units`-th block of a columnwise tensor; `numbers` is the count of block
/// numbers per column for `column_block`. Neighbouring units take neighbouring stored rows, which
/// are neighbouring columns of the result. `tile::map_tiles` writes `map` for the plan's span.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_cols_kernel<F: Numeric>(
    source: PackedRows,
    map: &[Vector<u32, Const<4>>],
    out: &mut [F],
    shape: Shape,
    numbers: usize,
    #[comptime] columns: ColumnsPlan,
    #[define(F)] _storage: ElemType,
) {
    let (span, plan, kind) = comptime!((columns.span, columns.source, columns.kind));
    let blocks = source.blocks;
    let outer = shape.cols;
    let grouped = comptime!(plan.grouping != Grouping::One);
    let tensor = source.factor();
    let mut item = ABSOLUTE_POS;
    while item < outer * numbers {
        let column = item % outer;
        let at = column_block(map, &shape, column, item / outer, blocks, span, plan);
        if comptime!(!grouped) || at.first < at.end {
            let factor = if comptime!(grouped || plan.per_row) {
                source.amax[at.amax] / source.range
            } else {
                tensor
            };
            let factors = BlockFactors::new(u32::cast_from(source.scales[at.scale]), factor);
            let words = source.codes[at.index];
            #[unroll]
            for i in 0..16usize {
                let word = words.extract(comptime!(i / 8));
                let value = factors.decode(word >> comptime!(4 * (i as u32 % 8)));
                let position = at.first + i;
                if position < at.end {
                    out[position * outer + column] = store::<F>(value, kind);
                }
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
