//! Order in which kernels process the blocks of stored rows.
//!
//! If scales are in rows, blocks are processed row by row, and both are contiguous. If scales are
//! in 128x4 tiles, blocks are processed in the order of the scale bytes: four neighbouring blocks
//! of a row, then the rows 32 apart.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::tile::{Grouping, Shape, ShapeLaunch, map_tiles, tile_from},
    plan::MxRowPlan,
};
use crate::{MX_BLOCK, cube::codec::magnitude_bits, tensor::Groups};

/// Launch of a kernel over blocks of stored rows, by tiles if `tiles`.
pub(super) struct RowTiles<'a> {
    rows: usize,
    cols: usize,
    groups: &'a Groups,
    tiles: bool,
}

impl<'a> RowTiles<'a> {
    pub(super) fn new((rows, cols): (usize, usize), groups: &'a Groups, tiles: bool) -> Self {
        Self {
            rows,
            cols,
            groups,
            tiles,
        }
    }

    /// Returns how the kernel finds the rows of a tile, if it processes blocks by tiles.
    pub(super) fn grouping(&self) -> Option<Grouping> {
        self.tiles.then(|| Grouping::of(self.groups))
    }

    fn row_tiles(&self) -> usize {
        self.groups.units(self.rows, 128)
    }

    fn tile_cols(&self) -> usize {
        self.cols.div_ceil(4 * MX_BLOCK)
    }

    /// Returns the number of blocks to process, including the padding of tiles.
    pub(super) fn blocks(&self) -> usize {
        match self.tiles {
            true => self.row_tiles() * self.tile_cols() * 512,
            false => self.rows * self.cols.div_ceil(MX_BLOCK),
        }
    }

    /// Returns the launch arguments of the rows; `unread` is a placeholder buffer.
    pub(super) fn args(
        &self,
        client: &Client,
        amax_blocks: usize,
        unread: &Handle,
    ) -> MxRowsLaunch {
        let groups = match self.tiles {
            true => self.groups,
            // Groups are not needed.
            false => &Groups::One,
        };
        let (shape, row_tiles) = ((self.rows, self.cols), self.row_tiles());
        MxRowsLaunch::new(
            map_tiles(client, shape, groups, row_tiles, MX_BLOCK, unread),
            ShapeLaunch::new(self.rows, self.cols, groups.count(), self.tile_cols()),
            row_tiles,
            amax_blocks,
        )
    }
}

/// Stored rows in a kernel over blocks along rows.
#[derive(CubeType, CubeLaunch)]
pub struct MxRows {
    /// Map written by `tile::map_tiles`.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// Rows, and columns of 128x4 tiles of scales.
    pub shape: Shape,
    /// Rows of 128x4 tiles of scales.
    pub row_tiles: usize,
    /// Blocks per amax of the source, unless one amax applies to all.
    pub amax_blocks: usize,
}

#[cube]
impl MxRows {
    /// Returns the number of blocks to process, including the padding of tiles.
    pub fn blocks(&self, #[comptime] plan: MxRowPlan) -> usize {
        if comptime!(plan.tiles.is_some()) {
            self.row_tiles * self.shape.tile_cols * 512usize
        } else {
            self.shape.rows * self.shape.cols.div_ceil(32)
        }
    }
}

/// A block of a stored row.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowBlock {
    /// Row.
    pub(super) row: usize,
    /// Index of the row if every group is padded to 128 rows, for processing by tiles.
    pub(super) tiled: usize,
    /// Index of the block in its row.
    pub(super) block: usize,
    /// Index of the block among those of all rows.
    pub(super) stored: usize,
    /// True unless the block is padding of a tile.
    pub(super) inside: bool,
    /// Index of its scale byte.
    pub(super) scale: usize,
}

/// Returns the block at position `index` of the processing order, which may be after the last one.
#[cube]
pub(super) fn row_block(index: usize, rows: &MxRows, #[comptime] plan: MxRowPlan) -> RowBlock {
    let blocks = rows.shape.cols.div_ceil(32);
    if comptime!(plan.tiles.is_some()) {
        let grouping = comptime!(plan.tiles.unwrap());
        let tile = index / 512usize;
        let place = index % 512usize;
        let row_tile = tile / rows.shape.tile_cols;
        let tile_col = tile - row_tile * rows.shape.tile_cols;
        // Units after the last tile read the record of that tile.
        let known = min(row_tile, rows.row_tiles - 1usize);
        let at = tile_from(&rows.map, known, 0usize, &rows.shape, 32usize, grouping);
        let within = place / 16usize + place / 4usize % 4usize * 32usize;
        let row = at.row0 + within;
        let block = tile_col * 4usize + place % 4usize;
        let stored = row * blocks + block;
        let mut scale = stored;
        if comptime!(plan.mx.swizzled) {
            scale = index;
        }
        RowBlock {
            row,
            tiled: row_tile * 128usize + within,
            block,
            stored,
            inside: row < at.row_end && block < blocks,
            scale,
        }
    } else {
        let row = index / blocks;
        RowBlock {
            row,
            tiled: row,
            block: index - row * blocks,
            stored: index,
            inside: true.runtime(),
            scale: index,
        }
    }
}

/// Returns the largest magnitude of a few values, as bits.
#[cube]
pub(super) fn amax_of(values: &Array<f32>, #[comptime] len: usize) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..len {
        bits = max(bits, magnitude_bits(values[i]));
    }
    bits
}

/// Returns the maximum over `lanes` neighbouring units.
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
