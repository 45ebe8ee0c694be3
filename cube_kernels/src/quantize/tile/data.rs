//! A tile in shared memory: loads, and reads of its rows and columns.

use cubecl::prelude::*;

use super::{
    extent::{ROWS, WORDS, row_blocks},
    grid::{Shape, Tile},
};
use crate::{
    Hadamard, HadamardSize,
    cube::{
        codec::Conversion,
        hadamard::{Signs, butterfly},
        ptx::{self, cvta_to_global, cvta_to_shared, ld_shared, ld_shared_v4},
        words::{block_words, flip_signs, unpack},
    },
    tensor::FloatKind,
};

/// Row pitch in words.
const PITCH: usize = WORDS + 4;
/// Words of a tile in shared memory.
pub(crate) const LEN: usize = ROWS * PITCH + (ROWS / 16) * 4;

/// Vectors that a unit loads before it stores the first, if it does both itself.
const IN_FLIGHT: usize = 4;

/// Load parameters of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LoadPlan {
    /// True if `x` is loaded by elements.
    pub elements: bool,
    /// Units per cube.
    pub units: usize,
    /// Implementation of conversions.
    pub conversion: Conversion,
    /// Element type.
    pub kind: FloatKind,
}

impl LoadPlan {
    /// Returns true if vectors of `width` words are loaded asynchronously, without registers.
    pub(crate) const fn asynchronous(&self, width: usize) -> bool {
        self.conversion.has_ptx() && !self.elements && width == 4 && self.units == 256
    }
}

/// Returns the index of word `word` of row `row` in shared memory.
#[cube]
pub fn word_at(row: usize, word: usize) -> usize {
    row * PITCH + (row / 16usize) * 4usize + word
}

/// Starts loading a tile to shared memory; elements outside the group or the matrix are zeros. The
/// caller waits with [`wait_for_load()`].
///
/// `x` holds vectors of `N` words, or single elements of 16 bits if rows are not whole words.
#[cube]
pub fn start_load<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    shared: &mut Shared<[u32]>,
    tile: &Tile,
    shape: &Shape,
    #[comptime] plan: LoadPlan,
) {
    let (units, kind) = comptime!((plan.units, plan.kind));
    let width = N::value();
    if comptime!(plan.elements) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(ROWS * WORDS) {
            let r = item / WORDS;
            let w = item % WORDS;
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
            shared[word_at(r, w)] = word;
            item += units;
        }
    } else {
        let per_row = comptime!(WORDS / width);
        let row_vectors = shape.cols / comptime!(width * (4 / kind.size()));
        let vector0 = tile.col0 / comptime!(width * (4 / kind.size()));
        if comptime!(plan.asynchronous(width)) {
            let from = cvta_to_global::<Vector<F, N>>(unsafe { x.as_ptr_unchecked() });
            let step = comptime!(units / per_row);
            let r = UNIT_POS as usize / per_row;
            let v = UNIT_POS as usize % per_row;
            let to = cvta_to_shared::<u32>(shared.as_slice().as_ptr())
                + u32::cast_from(word_at(r, v * 4usize)) * 4u32;
            let rows = tile.row_end - tile.row0;
            let vector = vector0 + v;
            let first = (tile.row0 + r) * row_vectors + vector;
            #[unroll]
            for turn in 0..comptime!(ROWS / step) {
                let inside = r + comptime!(turn * step) < rows && vector < row_vectors;
                // The row offsets repeat every 16 rows.
                let place = comptime!(4 * turn * (step * PITCH + step / 16 * 4));
                ptx::cp_async_zfill(
                    to + comptime!(place as u32),
                    from + u64::cast_from(first + comptime!(turn * step) * row_vectors) * 16u64,
                    select(inside, 16u32, 0u32),
                    16u32,
                );
            }
        } else {
            let mut first = UNIT_POS as usize;
            while first < comptime!(ROWS * per_row) {
                // Issues all loads of an iteration before waiting for the first.
                let mut loaded = Array::<Vector<F, N>>::new(IN_FLIGHT);
                #[unroll]
                for j in 0..IN_FLIGHT {
                    let item = first + j * units;
                    let row = tile.row0 + item / per_row;
                    let vector = vector0 + item % per_row;
                    let inside = item < comptime!(ROWS * per_row)
                        && row < tile.row_end
                        && vector < row_vectors;
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
                        let start = word_at(item / per_row, (item % per_row) * width);
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
}

/// Waits until all units have loaded their parts.
#[cube]
pub fn wait_for_load(#[comptime] asynchronous: bool) {
    if comptime!(asynchronous) {
        ptx::cp_async_wait_all();
    }
    sync_cube();
}

/// A block along a row of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// Row of the tile.
    pub row: usize,
    /// Index of the block in that row.
    pub block: usize,
}

/// Returns the block along a row that a unit takes in iteration `turn`. Neighbouring units take
/// blocks of two or four neighbouring rows, whose vectors are in different banks; later iterations
/// go down the tile.
#[cube]
pub fn row_place(turn: usize, #[comptime] units: usize, #[comptime] kind: FloatKind) -> Place {
    let item = if comptime!(units.is_multiple_of(32)) {
        UNIT_POS as usize
    } else {
        UNIT_POS as usize + turn * units
    };
    let row0 = if comptime!(units.is_multiple_of(32)) {
        turn * comptime!(units / row_blocks(kind))
    } else {
        0usize.runtime()
    };
    if comptime!(kind.size() == 2) {
        Place {
            row: row0 + ((item / 4usize) & 1usize) + (item / 16usize) * 2usize,
            block: (item & 3usize) + ((item / 8usize) & 1usize) * 4usize,
        }
    } else {
        Place {
            row: row0 + ((item / 2usize) & 3usize) + (item / 16usize) * 4usize,
            block: (item & 1usize) + ((item / 8usize) & 1usize) * 2usize,
        }
    }
}

/// Returns the words of block `block` of tile row `row`.
#[cube]
pub fn load_row_block(
    shared: &Shared<[u32]>,
    row: usize,
    block: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<u32> {
    let count = comptime!(block_words(kind));
    let start = word_at(row, block * count);
    let mut words = Array::<u32>::new(count);
    if comptime!(conversion.has_ptx()) {
        let address =
            cvta_to_shared::<u32>(shared.as_slice().as_ptr()) + u32::cast_from(start) * 4u32;
        #[unroll]
        for v in 0..comptime!(count / 4) {
            let vector = ld_shared_v4(address + comptime!(16 * v as u32));
            #[unroll]
            for i in 0..4usize {
                words[comptime!(4 * v + i)] = vector.extract(i);
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            words[i] = shared[start + i];
        }
    }
    words
}

/// Returns [`span()`] words down the tile from row `row0` on, a multiple of 16.
#[cube]
pub fn load_words(
    shared: &Shared<[u32]>,
    row0: usize,
    word: usize,
    #[comptime] count: usize,
    #[comptime] conversion: Conversion,
) -> Array<u32> {
    let mut words = Array::<u32>::new(count);
    let start = word_at(row0, word);
    if comptime!(conversion.has_ptx()) {
        let address =
            cvta_to_shared::<u32>(shared.as_slice().as_ptr()) + u32::cast_from(start) * 4u32;
        #[unroll]
        for i in 0..count {
            words[i] = ld_shared(address + comptime!((4 * (i * PITCH + (i / 16) * 4)) as u32));
        }
    } else {
        #[unroll]
        for i in 0..count {
            words[i] = shared[start + comptime!(i * PITCH + (i / 16) * 4)];
        }
    }
    words
}

/// Returns the number of units that share one transform, each with 16 of its rows: neighbours of a
/// plane on a GPU, where a unit's registers hold no more; one without planes.
pub(crate) const fn lanes(size: Option<HadamardSize>, conversion: Conversion) -> usize {
    if conversion.has_ptx() {
        span(size) / 16
    } else {
        1
    }
}

/// Work item of a unit in the columns of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct ColumnItem {
    /// Index of the word in a row.
    pub word: usize,
    /// Index of the first of its blocks of 16 rows.
    pub block: usize,
    /// Index among the units that share a transform.
    pub lane: usize,
}

/// Returns the number of work items of the columns of a tile.
pub(crate) const fn column_items(size: Option<HadamardSize>, conversion: Conversion) -> usize {
    WORDS * (ROWS / span(size)) * lanes(size, conversion)
}

/// Returns item number `item`: neighbouring units take neighbouring words, or share transforms of
/// them.
#[cube]
pub fn column_item(
    item: usize,
    #[comptime] units: usize,
    #[comptime] size: Option<HadamardSize>,
    #[comptime] conversion: Conversion,
) -> ColumnItem {
    let lanes = comptime!(lanes(size, conversion));
    let per_span = comptime!(span(size) / 16);
    // In a cube with units for whole rows of words, the word is the same in each iteration.
    let fixed = comptime!(units.is_multiple_of(WORDS * lanes));
    let position = if comptime!(fixed) {
        UNIT_POS as usize % comptime!(WORDS * lanes)
    } else {
        item % comptime!(WORDS * lanes)
    };
    let lane = position % lanes;
    ColumnItem {
        word: position / lanes,
        block: item / comptime!(WORDS * lanes) * per_span + lane,
        lane,
    }
}

/// Returns one of the columns of `words`, with the signs of a transform applied; those of the
/// default transform are built into the kernel and cost nothing.
#[cube]
pub fn unpack_column(
    words: &Array<u32>,
    signs: &Signs,
    lane: usize,
    #[comptime] half: u32,
    #[comptime] size: Option<HadamardSize>,
    #[comptime] default_signs: bool,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let count = comptime!(span(size) / lanes(size, conversion));
    let shared = comptime!(lanes(size, conversion) > 1);
    let lane_signs = if comptime!(shared) {
        signs.of_lane(lane)
    } else {
        0u32.runtime()
    };
    let mut column = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        column[i] = if comptime!(size.is_none()) {
            unpack(words[i], half, kind)
        } else if comptime!(default_signs) {
            let value = unpack(words[i], half, kind);
            if comptime!(Hadamard::DEFAULT_SIGNS >> (i % 16) & 1 == 1) {
                -value
            } else {
                value
            }
        } else if comptime!(shared) {
            let negate = (lane_signs >> comptime!(i as u32)) & 1u32;
            unpack(flip_signs(words[i], negate, kind), half, kind)
        } else {
            unpack(flip_signs(words[i], signs.bit(i), kind), half, kind)
        };
    }
    column
}

/// Transforms the values of a column without the factor. If units share a transform, all units of
/// the plane must call it.
#[cube]
pub fn transform_values(
    values: &mut Array<f32>,
    lane: usize,
    #[comptime] size: HadamardSize,
    #[comptime] conversion: Conversion,
) {
    let lanes = comptime!(lanes(Some(size), conversion));
    if comptime!(lanes == 1) {
        butterfly(values, size);
    } else {
        butterfly(values, HadamardSize::H16);
        #[unroll]
        for stage in 0..comptime!(lanes.ilog2()) {
            let distance = comptime!(1u32 << stage);
            // The first of two units takes the sum, the second the value of the first minus its
            // own.
            let own = select(u32::cast_from(lane) & distance == 0u32, 1.0f32, -1.0f32);
            #[unroll]
            for i in 0..16usize {
                let value = values[i];
                values[i] = ptx::shfl_sync_bfly(value, distance) + value * own;
            }
        }
    }
}

/// Returns the rows that one transform, or one block, of a columnwise tensor spans.
pub(crate) const fn span(size: Option<HadamardSize>) -> usize {
    match size {
        Some(size) => size.elements(),
        None => 16,
    }
}
