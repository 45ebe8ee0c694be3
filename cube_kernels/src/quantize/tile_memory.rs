//! What a kernel that quantizes tiles is asked for, and its shared memory.

use cubecl::prelude::*;

use super::{
    plan::QuantPlan,
    tile::{self, Grouping, LoadPlan, ROWS, Shape},
};
use crate::{BlockScaling, HadamardSize, tensor::FloatKind};

/// The comptime choices of `quantize_tiles_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// The rowwise tensor, if it is made.
    pub row: Option<QuantPlan>,
    /// The columnwise tensor, if it is made.
    pub col: Option<QuantPlan>,
    /// Whether 16x16 tiles share a scale.
    pub tiles: bool,
    /// Whether the columnwise tensors of groups share their stored rows.
    pub side_by_side: bool,
    /// How groups are given.
    pub grouping: Grouping,
    /// Whether `x` is loaded by elements.
    pub elements: bool,
    /// Units of a cube.
    pub units: usize,
    /// The element type of `x`.
    pub kind: FloatKind,
}

impl TilePlan {
    /// Rows that a unit of the columnwise tensor spans.
    pub(super) const fn span(&self) -> usize {
        match self.col {
            Some(col) => tile::span(col.hadamard),
            None => 16,
        }
    }

    /// The rowwise tensor, or else the columnwise one: blocks of 16x16 tiles are quantized along
    /// rows for either.
    pub(super) fn either(&self) -> QuantPlan {
        self.row.or(self.col).expect("a copy is made")
    }

    /// Rows of a tile, if each has its own amax.
    pub(super) fn row_lines(&self) -> usize {
        match self.row {
            Some(row) if row.per_row && !self.tiles => ROWS,
            _ => 0,
        }
    }

    /// Columns of a tile, if each has its own amax.
    pub(super) fn col_lines(&self) -> usize {
        match self.col {
            Some(col) if col.per_row && !self.tiles => tile::cols(self.kind),
            _ => 0,
        }
    }

    /// What blocks of columns are a multiple of while they are quantized: transformed values keep
    /// the transform's factor back where it is a power of two, which takes no bits from them, and
    /// the scales make up for it. A transform that units share cannot be done again by one of them,
    /// as extreme values need it.
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

    /// How tiles are loaded.
    pub(super) fn load(&self) -> LoadPlan {
        LoadPlan {
            elements: self.elements,
            units: self.units,
            conversion: self.either().policy.conversion,
            kind: self.kind,
        }
    }
}

/// The tiles of a matrix and of its groups.
#[derive(CubeType, CubeLaunch)]
pub struct TileGrid {
    /// A record for each row of tiles, where groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// The matrix.
    pub shape: Shape,
    /// Rows of tiles that there may be.
    pub row_tiles: usize,
    /// Blocks of a stored row of the columnwise tensor, where groups share its stored rows or each
    /// is padded to whole tiles of scales.
    pub row_blocks: usize,
}

/// Words from one column to the next where codes wait to be written: two for each of eight blocks,
/// and one that spreads columns over banks.
pub(super) const STAGE_PITCH: usize = 17;

/// Words from the scales of one block of all columns to those of the next.
pub(super) const SCALE_PITCH: usize = 2 * tile::WORDS + 4;

/// Words of codes from one row of a tile to the next where 16x16 tiles wait for being transposed:
/// 16, and two that spread rows over banks.
pub(super) const CODE_PITCH: usize = 18;

/// Words of codes of a tile, each 8 rows two further on.
const CODES: usize = ROWS * CODE_PITCH + ROWS / 8 * 2;

/// 16x16 tiles of a tile.
pub(super) const fn tile_count(kind: FloatKind) -> usize {
    tile::blocks(kind) / 16
}

/// The shared memory of a cube that quantizes a tile.
#[derive(CubeType)]
pub(super) struct TileMemory {
    /// The words of the tile.
    pub data: Shared<[u32]>,
    /// Scale bytes of its 16x16 tiles.
    pub tile_scales: Shared<[u32]>,
    /// Of 16x16 tiles: the amax values, then the errors of blocks; then codes, until they are
    /// transposed.
    pub partial: Shared<[u32]>,
    /// Codes of the columns, until they are written.
    pub stage: Shared<[u32]>,
    /// Their scales.
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
