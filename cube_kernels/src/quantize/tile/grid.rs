//! Tiles of a matrix whose rows are in groups.
//!
//! Tiles restart at every group of rows. If the groups' offsets are in device memory, a small
//! kernel sums up the tiles of the groups, finds the group of each tile by bisection, and writes a
//! record per row of tiles ([`map_tiles()`]). Nothing is read back to the host, and the grid does
//! not depend on the groups.

use cubecl::{prelude::*, server::Handle};

use super::extent::cols;
use crate::{
    launch::{buffer, grid, two_axes, units},
    memory::allocate,
    moe::groups::find_group,
    tensor::{FloatKind, Groups},
};

/// Rows of tiles that cubes process together. Their blocks of one column make 256 bytes of codes
/// and a whole sector of scale bytes, which are then combined in the L2 cache; otherwise, stores of
/// partial sectors require a read of the sector.
pub(crate) const BAND: usize = 4;

/// Returns the grid of a kernel that quantizes one tile per cube. The first axis runs over the
/// tiles of a band of rows of tiles, column by column, the others over the bands. On a GPU there
/// are many cubes, which start as others end: the number of concurrent cubes depends on the
/// compiler's register allocation, and with a fixed grid, a few cubes too many for the SMs would
/// take 1.5 times as long.
pub(crate) fn tile_bands(
    client: &Client,
    row_tiles: usize,
    tile_cols: usize,
) -> (CubeCount, CubeDim) {
    let (y, z) = two_axes(row_tiles.div_ceil(BAND));
    (
        CubeCount::Static((tile_cols * BAND) as u32, y, z),
        CubeDim::new_1d(units(client) as u32),
    )
}

/// Comptime configuration of [`Groups`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// One group.
    One,
    /// Groups of equal size.
    Batch,
    /// Offsets in device memory; at most this many groups.
    Offsets(usize),
}

impl Grouping {
    pub(crate) fn of(groups: &Groups) -> Self {
        match groups {
            Groups::One => Self::One,
            Groups::Batch(_) => Self::Batch,
            // Few sizes, so that few kernels are compiled.
            Groups::Offsets { count, .. } => Self::Offsets(count.next_power_of_two().max(16)),
        }
    }

    const fn capacity(self) -> usize {
        match self {
            Self::Offsets(count) => count + 1,
            _ => 1,
        }
    }

    /// Returns true if columnwise operands of grouped GEMMs are concatenated along the columns, as
    /// for groups of any sizes; those of equally sized groups are stacked.
    pub(crate) const fn side_by_side(self) -> bool {
        matches!(self, Self::Offsets(_))
    }
}

/// Maximum number of units per cube.
pub(crate) const MAX_UNITS: usize = 256;

/// Run-time shape of the matrix and of its groups.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Shape {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Number of groups.
    pub groups: usize,
    /// Columns of tiles.
    pub tile_cols: usize,
}

/// Starts of groups, in several units.
#[derive(CubeType)]
pub struct Plan {
    /// Rows before each group.
    rows: Shared<[u32]>,
    /// Tiles of 128 rows before each group.
    tiles: Shared<[u32]>,
    /// Units of the columnwise tensor (blocks, or groups of a transform) before each group.
    units: Shared<[u32]>,
    /// Padded units of the swizzled scales of the columnwise tensor before each group.
    padded: Shared<[u32]>,
    /// Number of groups.
    count: usize,
}

/// A tile, and its position in the outputs.
#[derive(CubeType, Clone, Copy)]
pub struct Tile {
    /// Group index.
    pub group: usize,
    /// First row in the matrix.
    pub row0: usize,
    /// End row of its group (exclusive).
    pub row_end: usize,
    /// First row of its group.
    pub group_row0: usize,
    /// First column.
    pub col0: usize,
    /// Tiles of 128 rows before it, along the rows, over all groups.
    pub row_tile: usize,
    /// Units of the columnwise tensors of earlier groups.
    pub units_before: usize,
    /// Units of the columnwise tensors of earlier groups, padded for swizzled scales.
    pub padded_before: usize,
}

/// Sums up the groups. `unit` is the number of rows that a unit of the columnwise tensor spans.
#[cube]
pub fn plan_groups(
    offsets: &[u32],
    shape: &Shape,
    #[comptime] unit: usize,
    #[comptime] grouping: Grouping,
) -> Plan {
    let capacity = comptime!(grouping.capacity());
    let mut rows: Shared<[u32]> = Shared::new_slice(capacity);
    let mut tiles: Shared<[u32]> = Shared::new_slice(capacity);
    let mut units: Shared<[u32]> = Shared::new_slice(capacity);
    let mut padded: Shared<[u32]> = Shared::new_slice(capacity);
    if comptime!(matches!(grouping, Grouping::Offsets(_))) {
        let wide = comptime!(padded_unit(unit) as u32);
        let mut g = UNIT_POS as usize;
        while g <= shape.groups {
            rows[g] = offsets[g];
            g += CUBE_DIM as usize;
        }
        sync_cube();
        // Each unit sums up a share of the groups, all units sum up the shares before theirs, and
        // each then iterates over its share again.
        let share = (shape.groups + 1usize).div_ceil(CUBE_DIM as usize);
        let first = min(UNIT_POS as usize * share, shape.groups + 1usize);
        let end = min(first + share, shape.groups + 1usize);
        let mut tile_sum = 0u32;
        let mut unit_sum = 0u32;
        let mut padded_sum = 0u32;
        for g in first..end {
            if g < shape.groups {
                let count = rows[g + 1usize] - rows[g];
                tile_sum += count.div_ceil(128u32);
                unit_sum += count.div_ceil(comptime!(unit as u32));
                padded_sum += count.div_ceil(wide);
            }
        }
        let mut sums: Shared<[u32]> = Shared::new_slice(comptime!(3 * MAX_UNITS));
        let place = UNIT_POS as usize;
        sums[place] = tile_sum;
        sums[place + MAX_UNITS] = unit_sum;
        sums[place + comptime!(2 * MAX_UNITS)] = padded_sum;
        sync_cube();
        let mut distance = 1usize;
        while distance < CUBE_DIM as usize {
            let mut tile_before = 0u32;
            let mut unit_before = 0u32;
            let mut padded_before = 0u32;
            if place >= distance {
                tile_before = sums[place - distance];
                unit_before = sums[place - distance + MAX_UNITS];
                padded_before = sums[place - distance + comptime!(2 * MAX_UNITS)];
            }
            sync_cube();
            sums[place] += tile_before;
            sums[place + MAX_UNITS] += unit_before;
            sums[place + comptime!(2 * MAX_UNITS)] += padded_before;
            sync_cube();
            distance *= 2usize;
        }
        tile_sum = sums[place] - tile_sum;
        unit_sum = sums[place + MAX_UNITS] - unit_sum;
        padded_sum = sums[place + comptime!(2 * MAX_UNITS)] - padded_sum;
        for g in first..end {
            tiles[g] = tile_sum;
            units[g] = unit_sum;
            padded[g] = padded_sum;
            if g < shape.groups {
                let count = rows[g + 1usize] - rows[g];
                tile_sum += count.div_ceil(128u32);
                unit_sum += count.div_ceil(comptime!(unit as u32));
                padded_sum += count.div_ceil(wide);
            }
        }
        sync_cube();
    }
    Plan {
        rows,
        tiles,
        units,
        padded,
        count: shape.groups,
    }
}

#[cube]
impl Plan {
    /// Returns the first tile of row `row_tile` of tiles.
    fn find(&self, row_tile: usize) -> Tile {
        // The last group whose tiles start at or before this one. It is not empty, since the next
        // group starts after it.
        let group = find_group(self.tiles.as_slice(), self.count, row_tile);
        let group_row0 = self.rows[group] as usize;
        Tile {
            group,
            row0: group_row0 + (row_tile - self.tiles[group] as usize) * 128usize,
            row_end: self.rows[group + 1usize] as usize,
            group_row0,
            col0: 0usize,
            row_tile,
            units_before: self.units[group] as usize,
            padded_before: self.padded[group] as usize,
        }
    }
}

/// Row and column of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct TilePlace {
    /// Row of tiles.
    pub row: usize,
    /// Column of tiles.
    pub col: usize,
}

/// Returns tile number `index` of `rows` x `cols` tiles. Neighbouring numbers go down a band of
/// `band` rows of tiles, then to the next column, so that tiles that write parts of the same
/// sectors are processed together.
#[cube]
pub fn in_bands(index: usize, rows: usize, cols: usize, band: usize) -> TilePlace {
    let per_band = cols * band;
    let first = index / per_band * band;
    let height = min(rows - first, band);
    let within = index - first * cols;
    let col = within / height;
    TilePlace {
        row: first + within - col * height,
        col,
    }
}

/// Returns a tile of one group, or of groups of equal size.
#[cube]
fn even_tile(
    row_tile: usize,
    col0: usize,
    shape: &Shape,
    #[comptime] unit: usize,
    #[comptime] grouping: Grouping,
) -> Tile {
    if comptime!(grouping == Grouping::One) {
        Tile {
            group: 0usize,
            row0: row_tile * 128usize,
            row_end: shape.rows,
            group_row0: 0usize,
            col0,
            row_tile,
            units_before: 0usize,
            padded_before: 0usize,
        }
    } else {
        let count = shape.rows / shape.groups;
        let tiles = count.div_ceil(128);
        let group = row_tile / tiles;
        let group_row0 = group * count;
        Tile {
            group,
            row0: group_row0 + (row_tile - group * tiles) * 128usize,
            row_end: group_row0 + count,
            group_row0,
            col0,
            row_tile,
            units_before: group * count.div_ceil(unit),
            padded_before: group * count.div_ceil(comptime!(padded_unit(unit))),
        }
    }
}

/// Vectors per record of [`map_tiles()`].
pub(crate) const RECORD: usize = 2;

/// Returns the tile in row `row_tile` of tiles and column `tile_col`; it is empty if there is none.
/// [`map_tiles()`] writes `map` if the groups are in device memory.
#[cube]
pub fn tile_at(
    map: &[Vector<u32, Const<4>>],
    row_tile: usize,
    tile_col: usize,
    shape: &Shape,
    #[comptime] unit: usize,
    #[comptime] grouping: Grouping,
    #[comptime] kind: FloatKind,
) -> Tile {
    let col0 = tile_col * comptime!(cols(kind));
    tile_from(map, row_tile, col0, shape, unit, grouping)
}

/// [`tile_at()`] by first column, for tiles of any width.
#[cube]
pub fn tile_from(
    map: &[Vector<u32, Const<4>>],
    row_tile: usize,
    col0: usize,
    shape: &Shape,
    #[comptime] unit: usize,
    #[comptime] grouping: Grouping,
) -> Tile {
    if comptime!(matches!(grouping, Grouping::Offsets(_))) {
        let place = map[row_tile * RECORD];
        let group = map[row_tile * RECORD + 1usize];
        Tile {
            group: group.extract(0usize) as usize,
            row0: place.extract(0usize) as usize,
            row_end: place.extract(1usize) as usize,
            group_row0: place.extract(2usize) as usize,
            col0,
            row_tile,
            units_before: group.extract(1usize) as usize,
            padded_before: group.extract(2usize) as usize,
        }
    } else {
        even_tile(row_tile, col0, shape, unit, grouping)
    }
}

/// Position of the copy of a tile's group among columnwise ones, in units of some number of rows:
/// unit `u` of column `c` has number `first + c * pitch + u`.
#[derive(CubeType, Clone, Copy)]
pub struct GroupPlace {
    /// Number of its first unit.
    pub first: usize,
    /// Units from one column to the next.
    pub pitch: usize,
    /// Units per column.
    pub units: usize,
    /// First unit in this tile.
    pub unit0: usize,
}

/// Returns the position of the copy of the group of `tile`, of `cols` columns. Copies follow each
/// other, or with `side_by_side` share stored rows of `row_units` units, in each of which the
/// groups follow each other. `unit` is that of the tile.
#[cube]
pub fn group_place(
    tile: &Tile,
    cols: usize,
    row_units: usize,
    #[comptime] unit: usize,
    #[comptime] side_by_side: bool,
) -> GroupPlace {
    let units = (tile.row_end - tile.group_row0).div_ceil(unit);
    let unit0 = (tile.row0 - tile.group_row0) / unit;
    if comptime!(side_by_side) {
        GroupPlace {
            first: tile.units_before,
            pitch: row_units,
            units,
            unit0,
        }
    } else {
        GroupPlace {
            first: cols * tile.units_before,
            pitch: units,
            units,
            unit0,
        }
    }
}

/// Writes the record of each of `row_tiles` rows of tiles: start and end of its rows, start of its
/// group, the index of the group, and the size of the columnwise tensors of earlier groups. Rows of
/// tiles after the last group are empty.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn map_tiles_kernel(
    offsets: &[u32],
    map: &mut [Vector<u32, Const<4>>],
    shape: Shape,
    row_tiles: usize,
    #[comptime] unit: usize,
    #[comptime] grouping: Grouping,
) {
    let groups = plan_groups(offsets, &shape, unit, grouping);
    let mut row_tile = ABSOLUTE_POS;
    while row_tile < row_tiles {
        let mut place = Vector::<u32, Const<4>>::new(0u32);
        let mut group = Vector::<u32, Const<4>>::new(0u32);
        if row_tile < groups.tiles[shape.groups] as usize {
            let tile = groups.find(row_tile);
            place.insert(0usize, tile.row0 as u32);
            place.insert(1usize, tile.row_end as u32);
            place.insert(2usize, tile.group_row0 as u32);
            group.insert(0usize, tile.group as u32);
            group.insert(1usize, tile.units_before as u32);
            group.insert(2usize, tile.padded_before as u32);
        }
        map[row_tile * RECORD] = place;
        map[row_tile * RECORD + 1usize] = group;
        row_tile += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Returns the records of the rows of tiles of `rows` rows in groups, in device memory, if the
/// groups' offsets are there; `unit` is as for [`plan_groups()`]. Otherwise returns the placeholder
/// `unread`, with at least one word.
pub(crate) fn map_tiles(
    client: &Client,
    (rows, cols): (usize, usize),
    groups: &Groups,
    row_tiles: usize,
    unit: usize,
    unread: &Handle,
) -> BufferArg {
    let Groups::Offsets { offsets, count } = groups else {
        // SAFETY: not read.
        return unsafe { buffer(unread, 1) };
    };
    // SAFETY: groups were checked to have one offset more than their number.
    let offsets = unsafe { buffer(offsets, count + 1) };
    let bytes = row_tiles * RECORD * 16;
    let map = allocate(client, bytes);
    // SAFETY: allocated for it.
    let arg = || unsafe { buffer(&map, row_tiles * RECORD) };
    let (cubes, dim) = grid(client, row_tiles);
    // SAFETY: the offsets are one more than the groups, and the kernel stays below the rows of
    // tiles.
    unsafe {
        map_tiles_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            offsets,
            arg(),
            ShapeLaunch::new(rows, cols, *count, 1),
            row_tiles,
            unit,
            Grouping::of(groups),
        );
    }
    arg()
}

/// Returns the number of rows to which a group is padded in swizzled scales of a columnwise tensor
/// whose unit spans `unit` rows.
pub(crate) const fn padded_unit(unit: usize) -> usize {
    if unit < 64 { 64 } else { unit }
}
