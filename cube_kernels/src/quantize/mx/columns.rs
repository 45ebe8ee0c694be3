//! Blocks down the columns of a tile.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::tile::{GroupPlace, Grouping, Shape, ShapeLaunch, Tile, group_place, map_tiles},
    plan::MxPlan,
    rows::amax_of,
};
use crate::{
    MX_BLOCK,
    cube::{
        codec::load,
        mx::{decode_ue8m0_reciprocal, encode_word, mx_scale},
        scale::swizzled_at,
    },
    format::block::ElementFormat,
    launch::tile_grid,
    tensor::Groups,
};

/// Launch of a kernel over tiles of rows in groups.
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
    /// Returns the tiles of a matrix of `rows` x `cols`. With `swizzled` scales these include tiles
    /// that only write padding, up to 128 stored rows of the result, which are columns here.
    pub(super) fn new(
        client: &Client,
        (rows, cols): (usize, usize),
        groups: &'a Groups,
        swizzled: bool,
    ) -> Self {
        let tile_rows = groups.units(rows, TILE_ROWS);
        let unit = if swizzled { 128 } else { TILE_COLS };
        let tile_cols = cols.next_multiple_of(unit) / TILE_COLS;
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

    /// Returns the launch arguments. `row_blocks` are the blocks per stored row of the result,
    /// `unread` is a placeholder buffer.
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

/// Rows of the tile that one cube transposes.
pub(super) const TILE_ROWS: usize = 128;
pub(super) const TILE_COLS: usize = 64;

/// Returns the number of rows of tiles that cubes process together if `cols` columns of tiles lie
/// between a tile and the next one below: the scale bytes of a column from eight tiles make a
/// memory sector. If rows are short, all eight are in the L2 cache at the same time anyway, and row
/// order is faster (MXFP8, H100: 78 us instead of 92 for 8192 x 8192, but 371 instead of 313 for
/// 16384 x 16384).
fn band_of(cols: usize) -> usize {
    if cols > 12288 { 8 } else { 1 }
}

/// Returns the column pitch of codes in shared memory, in words: those of a column of a tile, plus
/// one against bank conflicts.
pub(super) const fn stage_pitch(element: ElementFormat) -> usize {
    TILE_ROWS * element.bits() / 32 + 1
}

/// Staging memory for the column blocks of a tile.
#[derive(CubeType)]
pub(super) struct Staging {
    /// Codes of each column.
    codes: Shared<[u32]>,
    /// Scale bytes.
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

/// Destination of the columns of a tile.
#[derive(CubeType)]
pub(super) struct ColumnPlace {
    /// Position of their blocks.
    group: GroupPlace,
    /// First column.
    col0: usize,
    /// Columns of the matrix.
    cols: usize,
    /// Offset of the 128x4 tiles of scales.
    tiles: usize,
    /// Index of the group's first block within these tiles.
    tiled_block: usize,
    /// Tiles per row of tiles.
    tiled_width: usize,
}

#[cube]
impl ColumnPlace {
    /// Returns the destination of the columns of `tile` of a matrix of `cols`; stored rows that
    /// groups share have `row_blocks` blocks.
    pub(super) fn new(
        tile: &Tile,
        cols: usize,
        row_blocks: usize,
        #[comptime] grouping: Grouping,
    ) -> ColumnPlace {
        let side_by_side = comptime!(grouping.side_by_side());
        let group = group_place(tile, cols, row_blocks, 32usize, side_by_side);
        let mut tiles = 0usize;
        let mut tiled_block = 0usize;
        let mut tiled_width = group.units.div_ceil(4);
        if comptime!(side_by_side) {
            tiled_block = group.first;
            tiled_width = row_blocks.div_ceil(4);
        } else {
            tiles = tile.group * cols.div_ceil(128) * tiled_width * 512usize;
        }
        ColumnPlace {
            group,
            col0: tile.col0,
            cols,
            tiles,
            tiled_block,
            tiled_width,
        }
    }
}

/// Quantizes the columns of a tile in shared memory to blocks. Each unit takes 32 rows of one
/// column; codes are gathered in shared memory and written in runs of 128 bytes.
#[cube]
pub(super) fn quantize_tile_columns<F: Numeric>(
    tile: &[Vector<F, Const<1>>],
    staging: &mut Staging,
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u8],
    at: &ColumnPlace,
    #[comptime] grouping: Grouping,
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
    let mut item = UNIT_POS as usize;
    while item < comptime!(TILE_COLS * TILE_ROWS / 32) {
        let block = item % comptime!(TILE_ROWS / 32);
        if comptime!(plan.swizzled) {
            // Neighbouring units write the bytes of one line of a scale tile: stored rows 32 apart.
            let col = item / 8usize + item / 4usize % 2usize * 32usize;
            let inside = col0 + col < cols && block0 + block < blocks;
            // If groups share stored rows, blocks after the last one belong to another group;
            // otherwise tiles are padded with zeros.
            let in_tiles = comptime!(!grouping.side_by_side()) || block0 + block < blocks;
            if in_tiles {
                let scale = staging.scales[block * comptime!(TILE_COLS + 1) + col];
                let block = at.tiled_block + block0 + block;
                let byte = at.tiles + swizzled_at(col0 + col, block, at.tiled_width);
                scales[byte] = u8::cast_from(select(inside, scale, 0u32));
            }
        } else {
            // Neighbouring units write the bytes of one stored row.
            let col = item / comptime!(TILE_ROWS / 32);
            if col0 + col < cols && block0 + block < blocks {
                let scale = staging.scales[block * comptime!(TILE_COLS + 1) + col];
                let byte = place.first + (col0 + col) * place.pitch + block0 + block;
                scales[byte] = u8::cast_from(scale);
            }
        }
        item += CUBE_DIM as usize;
    }
    // Four words per unit; the padding of the stage avoids bank conflicts.
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

/// Tiles of a matrix, and layout of the tensors of its groups.
#[derive(CubeType, CubeLaunch)]
pub struct MxTiles {
    /// Map written by `tile::map_tiles`.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// Matrix shape.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
    /// Blocks per stored row, if the tensors of groups share their stored rows.
    pub row_blocks: usize,
    /// Rows of tiles that neighbouring cubes process together.
    pub band: usize,
}
