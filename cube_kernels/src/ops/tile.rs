//! Tiles of 128 rows and 64 columns in shared memory: how column-wise kernels find, load and read
//! them.
//!
//! A cube loads a tile with wide, coalesced loads; its units then read rows or columns of it. Words
//! lie `PITCH` apart from row to row, one more than a row has, so that neighbouring rows start in
//! neighbouring banks: loads by rows, reads by rows and reads by columns all spread over 32 banks.
//!
//! Tiles restart at every group of rows. Where the groups' offsets are in device memory, each cube
//! first sums up the tiles of the groups in shared memory, and then finds the group of a tile by
//! bisection: nothing is read back to the host, and the grid does not depend on the groups.

use cubecl::prelude::*;

use crate::{
    HadamardSize,
    cube::{
        hadamard::Signs,
        words::{flip_signs, unpack},
    },
    device::{FloatKind, Groups},
};

/// Rows of a tile.
pub(crate) const ROWS: usize = 128;
/// Columns of a tile.
pub(crate) const COLS: usize = 64;

/// Vectors that a unit loads before it stores the first: a tile of 16-bit elements in one turn of 256
/// units.
const IN_FLIGHT: usize = 4;

/// Words of one tile row.
pub(crate) const fn words(kind: FloatKind) -> usize {
    COLS * kind.size() / 4
}

/// Words from one tile row to the next.
pub(crate) const fn pitch(kind: FloatKind) -> usize {
    words(kind) + 1
}

/// The comptime side of [`Groups`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// One group.
    One,
    /// Groups of equally many rows.
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
}

/// The run-time side: the shape of the matrix and of its groups.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Shape {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Groups.
    pub groups: usize,
    /// Columns of tiles.
    pub tile_cols: usize,
}

/// Where groups start, in units of several sizes.
#[derive(CubeType)]
pub struct Plan {
    /// Rows before each group.
    rows: Shared<[u32]>,
    /// Tiles of 128 rows before each group.
    tiles: Shared<[u32]>,
    /// Units of the column-wise copy (blocks, or groups of a transform) before each group.
    units: Shared<[u32]>,
    /// Padded units of the swizzled scales of the column-wise copy before each group.
    padded: Shared<[u32]>,
}

/// A tile, and its place in the outputs.
#[derive(CubeType, Clone, Copy)]
pub struct Tile {
    /// Its group.
    pub group: usize,
    /// Its first row in the matrix.
    pub row0: usize,
    /// The row behind the last of its group.
    pub row_end: usize,
    /// The first row of its group.
    pub group_row0: usize,
    /// Its first column.
    pub col0: usize,
    /// Tiles of 128 rows before it in the row-wise direction, over all groups.
    pub row_tile: usize,
    /// Units of the column-wise copies of earlier groups.
    pub units_before: usize,
    /// The same, padded for swizzled scales.
    pub padded_before: usize,
}

/// Adds up the groups. `unit` is the number of rows that a unit of the column-wise copy spans.
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
        let wide = comptime!(if unit < 64 { 64u32 } else { unit as u32 });
        let mut g = UNIT_POS as usize;
        while g <= shape.groups {
            rows[g] = offsets[g];
            g += CUBE_DIM as usize;
        }
        sync_cube();
        // Each unit adds up all groups before its own: no more steps than a scan would need barriers
        // for, as groups are few.
        let mut g = UNIT_POS as usize;
        while g <= shape.groups {
            let mut tile_sum = 0u32;
            let mut unit_sum = 0u32;
            let mut padded_sum = 0u32;
            for h in 0..g {
                let count = rows[h + 1usize] - rows[h];
                tile_sum += count.div_ceil(128u32);
                unit_sum += count.div_ceil(comptime!(unit as u32));
                padded_sum += count.div_ceil(wide);
            }
            tiles[g] = tile_sum;
            units[g] = unit_sum;
            padded[g] = padded_sum;
            g += CUBE_DIM as usize;
        }
        sync_cube();
    }
    Plan {
        rows,
        tiles,
        units,
        padded,
    }
}

#[cube]
impl Plan {
    /// Tiles of 128 rows, over all groups.
    pub fn row_tiles(&self, shape: &Shape, #[comptime] grouping: Grouping) -> usize {
        match comptime!(grouping) {
            Grouping::One => shape.rows.div_ceil(128),
            Grouping::Batch => shape.groups * (shape.rows / shape.groups).div_ceil(128),
            Grouping::Offsets(_) => self.tiles[shape.groups] as usize,
        }
    }

    /// Tile number `index`, columns of tiles fastest.
    pub fn locate(
        &self,
        index: usize,
        shape: &Shape,
        #[comptime] unit: usize,
        #[comptime] grouping: Grouping,
    ) -> Tile {
        let row_tile = index / shape.tile_cols;
        let col0 = (index % shape.tile_cols) * 64usize;
        let wide = comptime!(if unit < 64 { 64usize } else { unit });
        match comptime!(grouping) {
            Grouping::One => Tile {
                group: 0usize,
                row0: row_tile * 128usize,
                row_end: shape.rows,
                group_row0: 0usize,
                col0,
                row_tile,
                units_before: 0usize,
                padded_before: 0usize,
            },
            Grouping::Batch => {
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
                    padded_before: group * count.div_ceil(wide),
                }
            }
            Grouping::Offsets(_) => {
                // The last group whose tiles start at or before this one; it is not empty, for the
                // next one starts behind it.
                let mut low = 0usize;
                let mut high = shape.groups;
                while high - low > 1usize {
                    let middle = (low + high) / 2usize;
                    if self.tiles[middle] as usize <= row_tile {
                        low = middle;
                    } else {
                        high = middle;
                    }
                }
                let group_row0 = self.rows[low] as usize;
                Tile {
                    group: low,
                    row0: group_row0 + (row_tile - self.tiles[low] as usize) * 128usize,
                    row_end: self.rows[low + 1usize] as usize,
                    group_row0,
                    col0,
                    row_tile,
                    units_before: self.units[low] as usize,
                    padded_before: self.padded[low] as usize,
                }
            }
        }
    }
}

/// Loads a tile into shared memory; zeros where the group or the matrix ends. The caller
/// synchronises.
///
/// `x` holds vectors of `N` words, or single elements of 16 bits where rows have no whole words.
#[cube]
pub fn load_tile<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] elements: bool,
    #[comptime] kind: FloatKind,
) {
    let width = N::value();
    let pitch = comptime!(pitch(kind));
    if comptime!(elements) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(ROWS * COLS / 2) {
            let r = item / comptime!(COLS / 2);
            let w = item % comptime!(COLS / 2);
            let row = tile.row0 + r;
            let col = tile.col0 + 2usize * w;
            let mut word = 0u32;
            if row < tile.row_end && col < shape.cols {
                let start = row * shape.cols + col;
                word = u32::cast_from(x[start].extract(0usize));
                if col + 1usize < shape.cols {
                    word |= u32::cast_from(x[start + 1usize].extract(0usize)) << 16u32;
                }
            }
            shared[r * pitch + w] = word;
            item += CUBE_DIM as usize;
        }
    } else {
        let per_row = comptime!(words(kind) / width);
        let row_vectors = shape.cols / comptime!(width * (4 / kind.size()));
        let vector0 = tile.col0 / comptime!(width * (4 / kind.size()));
        let units = CUBE_DIM as usize;
        let mut first = UNIT_POS as usize;
        while first < comptime!(ROWS * per_row) {
            // All loads of a turn are under way before the first is waited for.
            let mut loaded = Array::<Vector<F, N>>::new(IN_FLIGHT);
            #[unroll]
            for j in 0..IN_FLIGHT {
                let item = first + j * units;
                let row = tile.row0 + item / per_row;
                let vector = vector0 + item % per_row;
                let inside =
                    item < comptime!(ROWS * per_row) && row < tile.row_end && vector < row_vectors;
                loaded[j] = if inside {
                    x[row * row_vectors + vector]
                } else {
                    Vector::<F, N>::zero()
                };
            }
            #[unroll]
            for j in 0..IN_FLIGHT {
                let item = first + j * units;
                if item < comptime!(ROWS * per_row) {
                    let start = (item / per_row) * pitch + (item % per_row) * width;
                    #[unroll]
                    for i in 0..width {
                        shared[start + i] = u32::cast_from(loaded[j].extract(i));
                    }
                }
            }
            first += IN_FLIGHT * units;
        }
    }
}

/// `words(size)` words down the tile from row `row0` on, with the signs of a transform.
#[cube]
pub fn load_words(
    shared: &Shared<[u32]>,
    row0: usize,
    word: usize,
    signs: &Signs,
    #[comptime] size: Option<HadamardSize>,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let count = comptime!(span(size));
    let mut words = Array::<u32>::new(count);
    #[unroll]
    for i in 0..count {
        let bits = shared[(row0 + i) * comptime!(pitch(kind)) + word];
        words[i] = if comptime!(size.is_some()) {
            flip_signs(bits, signs.bit(i), kind)
        } else {
            bits
        };
    }
    words
}

/// One of the columns of `words`.
#[cube]
pub fn unpack_column(
    words: &Array<u32>,
    #[comptime] half: u32,
    #[comptime] size: Option<HadamardSize>,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let count = comptime!(span(size));
    let mut column = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        column[i] = unpack(words[i], half, kind);
    }
    column
}

/// Rows that one item of a column-wise kernel spans.
pub(crate) const fn span(size: Option<HadamardSize>) -> usize {
    match size {
        Some(size) => size.elements(),
        None => 16,
    }
}
