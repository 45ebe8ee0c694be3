//! Tiles of MS-EDEN, and their positions in the result.

use cubecl::prelude::*;

use super::super::{
    packed_source::SourcePlan,
    tile::{Grouping, ROWS, Shape, group_place, tile_from},
};
use crate::cube::{codec::Conversion, eden::LINES, philox::Numbering, scale::swizzled_at};

/// Comptime configuration of MS-EDEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EdenPolicy {
    /// True if K runs across the stored rows.
    pub across: bool,
    /// True if the source is an NVFP4 tensor.
    pub packed: bool,
    /// True if 16-bit elements of a matrix are loaded in words of two. Not along rows to a packed
    /// result, for which ptxas would spill registers.
    pub words: bool,
    /// Storage of the source; for a source that is not packed, only the representation of groups.
    pub source: SourcePlan,
    /// True to write scales in 128x4 tiles.
    pub swizzled: bool,
    /// True if the random offset has a part in device memory.
    pub device_offset: bool,
    /// Numbering of rotation groups for random draws.
    pub numbering: Numbering,
    /// True if the kernel draws the signs of the transform.
    pub redrawn_signs: bool,
    /// True if the result is codes times scales in bf16.
    pub unscaled: bool,
    /// Planes that share a tile, each taking some of its turns: 1, 2 or 4. More than one only if a
    /// packed source without groups has few tiles.
    pub planes_of_tile: usize,
    /// Implementation of the conversion to E2M1.
    pub conversion: Conversion,
}

impl EdenPolicy {
    /// Returns true if there are no groups.
    pub(super) fn plain(self) -> bool {
        self.source.grouping == Grouping::One
    }

    /// Returns true if a single plane works on a tile, rather than a cube.
    pub(super) fn planes(self) -> bool {
        self.conversion.has_ptx()
    }

    /// Returns the number of turns that a unit loads at a time: across a packed source its word of
    /// codes covers eight lines.
    pub(super) fn held_turns(self) -> usize {
        if self.packed && self.across { TURNS } else { 1 }
    }

    /// Returns the maximum planes per cube; 1 if a whole cube works on a tile.
    pub(in crate::quantize) fn planes_of_cube(self) -> usize {
        match (self.planes(), self.planes_of_tile) {
            (false, _) => 1,
            (true, 1) => MOST_PLANES,
            (true, _) => FEW_PLANES,
        }
    }

    /// Returns the turns of a tile that a plane takes.
    pub(super) fn turns(self) -> usize {
        TURNS / self.planes_of_tile
    }

    /// Returns the turns whose lines a plane corrects at a time: those of half a tile, or all that
    /// it takes.
    pub(super) fn corrected_turns(self) -> usize {
        self.turns().min(TURNS / 2)
    }
}

/// Turns in which a plane takes the lines of a tile.
pub(super) const TURNS: usize = 4;

/// Lines of half a tile, which a plane corrects at a time: those of two turns.
pub(super) const HALF: usize = LINES / 2;

/// Maximum planes per cube.
const MOST_PLANES: usize = 8;

/// Maximum planes per cube if planes share tiles, so that more SMs have a cube: one plane per
/// scheduler of an SM.
const FEW_PLANES: usize = 4;

/// Returns the index of a line within its half of a tile.
#[cube]
pub(super) fn slot_of_line(line: usize, #[comptime] policy: EdenPolicy) -> usize {
    if comptime!(policy.held_turns() > 1) {
        line / 8usize * 4usize + line % 4usize
    } else {
        line % HALF
    }
}

/// Returns the line of the tile that is number `slot` of half `half`.
#[cube]
pub(super) fn line_of_slot(slot: usize, half: usize, #[comptime] policy: EdenPolicy) -> usize {
    if comptime!(policy.held_turns() > 1) {
        slot / 4usize * 8usize + half * 4usize + slot % 4usize
    } else {
        half * HALF + slot
    }
}

/// Returns true if the line in slot `slot` of half a tile belongs to turn `turn` of that half.
#[cube]
pub(super) fn is_slot_of_turn(slot: usize, turn: usize, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(policy.held_turns() > 1) {
        slot % 4usize / 2usize == turn
    } else {
        slot / 8usize == turn
    }
}

/// Tiles of a stored matrix and of its groups; [`map_tiles()`](super::super::tile::map_tiles)
/// writes `map`.
#[derive(CubeType, CubeLaunch)]
pub struct EdenTiles {
    /// Record per row of tiles, if groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// Shape of the stored matrix.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
    /// Rotation groups per line of the result, if the tensors of groups share its lines.
    pub row_groups: usize,
}

/// A tile of a stored matrix, and its position in the result.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Position {
    /// First line.
    pub line0: usize,
    /// End line (exclusive).
    pub lines: usize,
    /// First position along K.
    pub start: usize,
    /// End position along K (exclusive).
    pub end: usize,
    /// Index of its rotation group on line 0 in the result.
    pub first: usize,
    /// Rotation groups from one line to the next.
    pub pitch: usize,
    /// Index of its rotation group on line 0 in the order of random draws: one group of rows after
    /// another.
    pub drawn_first: usize,
    /// Pitch of lines in the order of random draws.
    pub drawn_pitch: usize,
    /// Index of the group of rows.
    pub part: usize,
    /// Rotation groups per line in the copies of earlier groups of rows, if these are along K.
    pub units_before: usize,
    /// Row padding of earlier groups, if every group of rows is padded to 128: the offset that it
    /// adds to the indices of the tile's stored rows.
    pub padding: usize,
}

/// Returns tile number `index`. Neighbouring cubes read neighbouring memory. [`map_tiles()`] writes
/// `map`; `row_groups` is the length of a line of the result if groups share lines.
#[cube]
pub(super) fn tile_position(
    index: usize,
    tiles: &EdenTiles,
    #[comptime] policy: EdenPolicy,
) -> Position {
    let grouping = comptime!(policy.source.grouping);
    let shape = &tiles.shape;
    let row = index / shape.tile_cols;
    let column = index % shape.tile_cols;
    if comptime!(policy.across) {
        let line0 = column * comptime!(LINES);
        let tile = tile_from(&tiles.map, row, line0, shape, 128usize, grouping);
        let side_by_side = comptime!(grouping.side_by_side());
        let place = group_place(&tile, shape.cols, tiles.row_groups, 128usize, side_by_side);
        let drawn = group_place(&tile, shape.cols, tiles.row_groups, 128usize, false);
        Position {
            line0,
            lines: shape.cols,
            start: tile.row0,
            end: tile.row_end,
            first: place.first + place.unit0,
            pitch: place.pitch,
            drawn_first: drawn.first + drawn.unit0,
            drawn_pitch: drawn.pitch,
            part: tile.group,
            units_before: tile.units_before,
            padding: row * 128usize - tile.row0,
        }
    } else if comptime!(policy.plain()) {
        Position {
            line0: row * comptime!(LINES),
            lines: shape.rows,
            start: column * 128usize,
            end: shape.cols,
            first: column,
            pitch: shape.tile_cols,
            drawn_first: column,
            drawn_pitch: shape.tile_cols,
            part: 0usize,
            units_before: 0usize,
            padding: 0usize,
        }
    } else {
        let parts = comptime!(ROWS / LINES);
        let row_tile = row / parts;
        let tile = tile_from(&tiles.map, row_tile, 0usize, shape, 128usize, grouping);
        Position {
            line0: tile.row0 + (row - row_tile * parts) * comptime!(LINES),
            lines: tile.row_end,
            start: column * 128usize,
            end: shape.cols,
            first: column,
            pitch: shape.tile_cols,
            drawn_first: column,
            drawn_pitch: shape.tile_cols,
            part: tile.group,
            units_before: 0usize,
            padding: row_tile * 128usize - tile.row0,
        }
    }
}

/// Returns true if there is work in a tile. If rows are in groups, some tiles have none.
#[cube]
pub(super) fn is_filled(at: &Position, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(!policy.swizzled) {
        at.line0 < at.lines && at.start < at.end
    } else if comptime!(policy.across) {
        at.start < at.end
    } else {
        // Lines that pad a group to 128 have scales, too.
        at.line0 - (at.line0 + at.padding) % 128usize < at.lines
    }
}

/// Returns the index of the word with the first four scale bytes, in 128x4 tiles, of a tile's
/// rotation group on line `line`. The other four follow [`TILE_OF_SCALES`] words later.
#[cube]
pub(super) fn swizzled_word(at: &Position, line: usize, #[comptime] policy: EdenPolicy) -> usize {
    // Groups concatenated along the columns are whole rotation groups, and so whole tiles, of one
    // matrix.
    let one_matrix = comptime!(policy.across && policy.source.grouping.side_by_side());
    let row = if comptime!(policy.across) {
        line
    } else {
        line + at.padding
    };
    // Eight bytes per rotation group, in tiles of four blocks.
    let mut before = 0usize;
    let mut group = at.first;
    if comptime!(!one_matrix) {
        before = at.lines.div_ceil(128) * 128usize * at.units_before * 2usize;
        group -= at.lines * at.units_before;
    }
    before + swizzled_at(row, group * 8usize, at.pitch * 2usize) / 4usize
}

/// Words of a 128x4 tile of scales.
pub(super) const TILE_OF_SCALES: usize = 128;
