//! Configuration and shared memory of a kernel that quantizes tiles.

use cubecl::prelude::*;

use super::{
    plan::QuantPlan,
    tile::{self, Grouping, LoadPlan, ROWS, Shape},
};
use crate::{BlockScaling, HadamardSize, tensor::FloatKind};

/// Comptime configuration of `quantize_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// Rowwise tensor, if requested.
    pub row: Option<QuantPlan>,
    /// Columnwise tensor, if requested.
    pub col: Option<QuantPlan>,
    /// True if 16x16 tiles share a scale.
    pub tiles: bool,
    /// True if the columnwise tensors of groups share their stored rows.
    pub side_by_side: bool,
    /// Representation of groups.
    pub grouping: Grouping,
    /// True if `x` is loaded by elements.
    pub elements: bool,
    /// Units per cube.
    pub units: usize,
    /// Element type of `x`.
    pub kind: FloatKind,
}

impl TilePlan {
    /// Returns the rows that a unit of the columnwise tensor spans.
    pub(super) const fn span(&self) -> usize {
        match self.col {
            Some(col) => tile::span(col.hadamard),
            None => 16,
        }
    }

    /// Returns the rowwise tensor, or else the columnwise one: blocks of 16x16 tiles are quantized
    /// along rows for either.
    pub(super) fn either(&self) -> QuantPlan {
        self.row.or(self.col).expect("a tensor is made")
    }

    /// Returns the rows per tile, if each has its own amax.
    pub(super) fn row_lines(&self) -> usize {
        match self.row {
            Some(row) if row.per_row && !self.tiles => ROWS,
            _ => 0,
        }
    }

    /// Returns the columns per tile, if each has its own amax.
    pub(super) fn col_lines(&self) -> usize {
        match self.col {
            Some(col) if col.per_row && !self.tiles => tile::cols(self.kind),
            _ => 0,
        }
    }

    /// Returns the multiple of blocks of columns at which they are quantized. If the transform's
    /// factor is a power of two, transformed values are kept without it, which loses no bits, and
    /// the scales compensate. Not if units share the transform, since one of them could not repeat
    /// it, as extreme values require.
    pub(super) fn col_multiple(&self) -> f32 {
        match self.col {
            Some(QuantPlan {
                hadamard: Some(HadamardSize::H16),
                policy,
                ..
            }) if policy.conversion.has_ptx()
                && !self.tiles
                && self.kind == FloatKind::Bf16
                && !matches!(policy.scaling, BlockScaling::FourOverSix(_)) =>
            {
                1.0 / HadamardSize::H16.factor()
            }
            _ => 1.0,
        }
    }

    /// Returns the load parameters of tiles.
    pub(super) fn load(&self) -> LoadPlan {
        LoadPlan {
            elements: self.elements,
            units: self.units,
            conversion: self.either().policy.conversion,
            kind: self.kind,
        }
    }
}

/// Tiles of a matrix and of its groups.
#[derive(CubeType, CubeLaunch)]
pub struct TileGrid {
    /// Record per row of tiles, if groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// Matrix shape.
    pub shape: Shape,
    /// Maximum number of rows of tiles.
    pub row_tiles: usize,
    /// Blocks per stored row of the columnwise tensor, if groups share its stored rows or each is
    /// padded to whole tiles of scales.
    pub row_blocks: usize,
}

/// Column pitch of staged codes in words: two for each of eight blocks, plus one against bank
/// conflicts.
pub(super) const STAGE_PITCH: usize = 17;

/// Words from the scales of one block of all columns to those of the next.
pub(super) const SCALE_PITCH: usize = 2 * tile::WORDS + 4;

/// Row pitch of staged codes in words, for 16x16 tiles that are to be transposed: 16, plus two
/// against bank conflicts.
pub(super) const CODE_PITCH: usize = 18;

/// Words of codes per tile, with an offset of two words every 8 rows.
const CODES: usize = ROWS * CODE_PITCH + ROWS / 8 * 2;

/// Returns the number of 16x16 tiles per tile.
pub(super) const fn tile_count(kind: FloatKind) -> usize {
    tile::blocks(kind) / 16
}

/// Shared memory of a cube that quantizes a tile.
#[derive(CubeType)]
pub(super) struct TileMemory {
    /// Words of the tile.
    pub data: Shared<[u32]>,
    /// Scale bytes of its 16x16 tiles.
    pub tile_scales: Shared<[u32]>,
    /// For 16x16 tiles: amax values, then errors of blocks, then codes until they are transposed.
    pub partial: Shared<[u32]>,
    /// Codes of the columns, until they are written.
    pub stage: Shared<[u32]>,
    /// Scales of the columns.
    pub stage_scales: Shared<[u32]>,
}

#[cube]
impl TileMemory {
    pub fn new(#[comptime] plan: TilePlan) -> TileMemory {
        let kind = comptime!(plan.kind);
        let has_col = comptime!(plan.col.is_some() && !plan.tiles);
        let stage_cols = comptime!(if has_col { tile::cols(kind) } else { 1 });
        TileMemory {
            data: Shared::new_aligned_slice(tile::LEN, 16usize),
            tile_scales: Shared::new_slice(comptime!(tile_count(kind))),
            partial: Shared::new_aligned_slice(
                comptime!(if plan.tiles { CODES } else { 1usize }),
                8usize,
            ),
            stage: Shared::new_slice(comptime!(stage_cols * STAGE_PITCH + 1)),
            stage_scales: Shared::new_slice(comptime!(if has_col { 8 * SCALE_PITCH } else { 1 })),
        }
    }
}
