//! The tiles of MS-EDEN, and their places in the result.

use cubecl::prelude::*;

use super::super::{
    packed_source::SourcePlan,
    tile::{Grouping, ROWS, Shape, group_place, tile_from},
};
use crate::cube::{codec::Conversion, eden::LINES, philox::Numbering, scale::swizzled_at};

/// The comptime choices of MS-EDEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EdenPolicy {
    /// The contraction runs across the stored rows.
    pub across: bool,
    /// The source is an NVFP4 tensor.
    pub packed: bool,
    /// Elements of 16 bits of a matrix are loaded in words of two. Along rows they are
    /// not, to a packed result: ptxas would spill registers for it.
    pub words: bool,
    /// How the source is stored; of one that is not packed, how its groups are given.
    pub source: SourcePlan,
    /// Scales are written in 128x4 tiles.
    pub swizzled: bool,
    /// The random offset has a part in device memory.
    pub device_offset: bool,
    /// How rotation groups are numbered in drawing.
    pub numbering: Numbering,
    /// The signs of the transform are drawn by the kernel.
    pub redrawn_signs: bool,
    /// The result is codes times scales in bf16.
    pub unscaled: bool,
    /// The planes that share a tile, each of which takes some of its turns: 1, 2 or 4. More than
    /// one where tiles of a packed source without groups are few.
    pub planes_of_tile: usize,
    /// Who converts to E2M1.
    pub conversion: Conversion,
}

impl EdenPolicy {
    /// Whether there are no groups.
    pub(super) fn plain(self) -> bool {
        self.source.grouping == Grouping::One
    }

    /// Whether a plane works on a tile by itself.
    pub(super) fn planes(self) -> bool {
        self.conversion.has_ptx()
    }

    /// Turns for which a unit loads at a time: across a packed source its word of codes is of
    /// eight lines.
    pub(super) fn held_turns(self) -> usize {
        if self.packed && self.across { TURNS } else { 1 }
    }

    /// The most planes of a cube; 1 where a cube works on a tile as a whole.
    pub(in crate::quantize) fn planes_of_cube(self) -> usize {
        match (self.planes(), self.planes_of_tile) {
            (false, _) => 1,
            (true, 1) => MOST_PLANES,
            (true, _) => FEW_PLANES,
        }
    }

    /// Turns that a plane takes of a tile.
    pub(super) fn turns(self) -> usize {
        TURNS / self.planes_of_tile
    }

    /// Turns whose lines a plane corrects at a time: those of half a tile, or all that it takes.
    pub(super) fn corrected_turns(self) -> usize {
        self.turns().min(TURNS / 2)
    }
}

/// How often a plane takes lines of a tile.
pub(super) const TURNS: usize = 4;

/// Lines of half a tile, which a plane corrects at a time: those of two turns.
pub(super) const HALF: usize = LINES / 2;

/// Planes of a cube at most.
const MOST_PLANES: usize = 8;

/// The same where planes share tiles, so that more SMs have a cube: one plane for each of an SM's
/// schedulers.
const FEW_PLANES: usize = 4;

/// The number of a line among those of its half of a tile.
#[cube]
pub(super) fn slot_of_line(line: usize, #[comptime] policy: EdenPolicy) -> usize {
    if comptime!(policy.held_turns() > 1) {
        line / 8usize * 4usize + line % 4usize
    } else {
        line % HALF
    }
}

/// The line of the tile that is number `slot` of half `half`.
#[cube]
pub(super) fn line_of_slot(slot: usize, half: usize, #[comptime] policy: EdenPolicy) -> usize {
    if comptime!(policy.held_turns() > 1) {
        slot / 4usize * 8usize + half * 4usize + slot % 4usize
    } else {
        half * HALF + slot
    }
}

/// Whether the line in slot `slot` of half a tile is one of turn `turn` of that half.
#[cube]
pub(super) fn is_slot_of_turn(slot: usize, turn: usize, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(policy.held_turns() > 1) {
        slot % 4usize / 2usize == turn
    } else {
        slot / 8usize == turn
    }
}

/// The tiles of a stored matrix and of its groups; `map` is what
/// [`map_tiles()`](super::super::tile::map_tiles) wrote.
#[derive(CubeType, CubeLaunch)]
pub struct EdenTiles {
    /// A record for each row of tiles, where groups are in device memory.
    pub map: Box<[Vector<u32, Const<4>>]>,
    /// The stored matrix.
    pub shape: Shape,
    /// Rows of tiles.
    pub row_tiles: usize,
    /// Rotation groups of a line of the result, where the tensors of groups share its lines.
    pub row_groups: usize,
}

/// A tile of a stored matrix, and its place in the result.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Position {
    /// Its first line.
    pub line0: usize,
    /// The line behind the last one.
    pub lines: usize,
    /// Its first position along the contraction.
    pub start: usize,
    /// The position behind the last one.
    pub end: usize,
    /// The number of its rotation group on line 0 in the result.
    pub first: usize,
    /// Rotation groups from one line to the next.
    pub pitch: usize,
    /// The same in the order in which random bits are drawn: one group of rows after another.
    pub drawn_first: usize,
    /// The pitch of that.
    pub drawn_pitch: usize,
    /// The group of rows.
    pub part: usize,
    /// Rotation groups of one line in the copies of earlier groups of rows, where these lie along
    /// the contraction.
    pub units_before: usize,
    /// What padding every group of rows to 128 adds to the numbers of the tile's stored rows.
    pub padding: usize,
}

/// Tile number `index`. Neighbouring cubes read neighbouring memory. `map` is what [`map_tiles()`]
/// wrote, `row_groups` the length of a line of the result where groups share their lines.
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

/// Whether there is anything to do in a tile: where rows are in groups, not in all.
#[cube]
pub(super) fn is_filled(at: &Position, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(!policy.swizzled) {
        at.line0 < at.lines && at.start < at.end
    } else if comptime!(policy.across) {
        at.start < at.end
    } else {
        // Lines that pad 128 of them have scales, too.
        at.line0 - (at.line0 + at.padding) % 128usize < at.lines
    }
}

/// The word, in scales in 128x4 tiles, of a tile's rotation group on line `line`: the bytes of its
/// first four blocks. Those of the others are [`TILE_OF_SCALES`] words behind.
#[cube]
pub(super) fn swizzled_word(at: &Position, line: usize, #[comptime] policy: EdenPolicy) -> usize {
    // Groups side by side are whole rotation groups, and so whole tiles, of one matrix.
    let one_matrix = comptime!(policy.across && policy.source.grouping.side_by_side());
    let row = if comptime!(policy.across) {
        line
    } else {
        line + at.padding
    };
    // Eight bytes for each rotation group, in tiles of four blocks.
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
