//! Rows in blocks of 16 elements: distribution over units, loads, stores and sums.

use cubecl::prelude::*;

use super::plan::{BLOCK, NormPlan};
use crate::{
    cube::{
        codec::{load, store},
        ptx,
        words::{pack, unpack},
    },
    gemm::arguments::thread_in_cta,
};

/// Position of a block in a row.
#[derive(CubeType, Clone, Copy)]
pub struct At {
    /// Row.
    pub row: usize,
    /// Index of the block.
    pub block: usize,
    /// Number of columns of the matrix.
    pub cols: usize,
}

/// Share of a unit in the rows of its cube.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// Index of this unit among the units of its row.
    pub unit: usize,
    /// Number of units per row.
    pub units: usize,
    /// Row within the cube.
    pub slot: usize,
}

/// Returns the place of this unit.
#[cube]
pub fn place(#[comptime] plan: NormPlan) -> Place {
    let thread = thread_in_cta() as usize;
    if comptime!(plan.planes == 0) {
        Place {
            unit: thread,
            units: CUBE_DIM as usize,
            slot: 0usize.runtime(),
        }
    } else {
        let units = comptime!(32 * plan.planes);
        Place {
            unit: thread % units,
            units: units.runtime(),
            slot: thread / units,
        }
    }
}

/// Returns the position of a unit's block `k` in `row`.
#[cube]
pub fn block_at(row: usize, k: usize, place: &Place, cols: usize) -> At {
    At {
        row,
        block: place.unit + k * place.units,
        cols,
    }
}

/// Loads a block into `raw` from `first` on, [in register form](NormPlan::raw_words): zeros past
/// the end of the row.
#[cube]
pub fn load_raw<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    at: &At,
    raw: &mut Array<u32>,
    first: usize,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.whole) {
        // A block is as many 16-byte vectors as an element has bytes.
        let vectors = comptime!(plan.kind.size());
        let blocks = at.cols / BLOCK;
        // Past the end, the last block is loaded again and not used, so that loads do not branch.
        let inside = at.block < blocks;
        let start = (at.row * blocks + select(inside, at.block, blocks - 1usize)) * vectors;
        #[unroll]
        for v in 0..vectors {
            let vector = x[start + v];
            #[unroll]
            for w in 0..4usize {
                let word = u32::cast_from(vector.extract(w));
                raw[first + comptime!(v * 4 + w)] = select(inside, word, 0u32);
            }
        }
    } else {
        for i in 0..BLOCK {
            let column = at.block * BLOCK + i;
            let mut value = 0.0f32;
            if column < at.cols {
                value = load::<F>(x[at.row * at.cols + column].extract(0usize), plan.kind);
            }
            raw[first + i] = u32::reinterpret(value);
        }
    }
}

/// Writes a block from its register form in `raw`, from `first` on.
#[cube]
pub fn store_raw<F: Numeric, N: Size>(
    out: &mut [Vector<F, N>],
    at: &At,
    raw: &Array<u32>,
    first: usize,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.whole) {
        let vectors = comptime!(plan.kind.size());
        let start = (at.row * (at.cols / BLOCK) + at.block) * vectors;
        #[unroll]
        for v in 0..vectors {
            let mut vector = Vector::<F, N>::empty();
            #[unroll]
            for w in 0..4usize {
                vector.insert(w, F::cast_from(raw[first + comptime!(v * 4 + w)]));
            }
            out[start + v] = vector;
        }
    } else {
        for i in 0..BLOCK {
            let column = at.block * BLOCK + i;
            if column < at.cols {
                let index = at.row * at.cols + column;
                let mut vector = Vector::<F, N>::empty();
                vector.insert(
                    0usize,
                    store::<F>(f32::reinterpret(raw[first + i]), plan.kind),
                );
                out[index] = vector;
            }
        }
    }
}

/// Returns the elements of a block in register form in `raw`, from `first` on.
#[cube]
pub fn unpack_raw(raw: &Array<u32>, first: usize, #[comptime] plan: NormPlan) -> Array<f32> {
    let kind = comptime!(plan.kind);
    let mut values = Array::<f32>::new(BLOCK);
    if comptime!(plan.whole) {
        let per_word = comptime!(4 / kind.size());
        #[unroll]
        for i in 0..BLOCK {
            let half = comptime!((i % per_word) as u32);
            values[i] = unpack(raw[first + comptime!(i / per_word)], half, kind);
        }
    } else {
        for i in 0..BLOCK {
            values[i] = f32::reinterpret(raw[first + i]);
        }
    }
    values
}

/// Rounds the elements of a block to nearest even, and writes them to `raw` from `first` on.
#[cube]
pub fn pack_raw(
    values: &Array<f32>,
    raw: &mut Array<u32>,
    first: usize,
    #[comptime] plan: NormPlan,
) {
    let (kind, conversion) = comptime!((plan.kind, plan.conversion));
    if comptime!(plan.whole) {
        let per_word = comptime!(4 / kind.size());
        #[unroll]
        for w in 0..comptime!(plan.raw_words()) {
            let low = values[comptime!(w * per_word)];
            let high = values[comptime!(w * per_word + per_word - 1)];
            raw[first + w] = pack(low, high, kind, conversion);
        }
    } else {
        for i in 0..BLOCK {
            let word = pack(values[i], 0.0f32, kind, conversion);
            raw[first + i] = u32::reinterpret(unpack(word, 0u32, kind));
        }
    }
}

/// Loads the per-column factors of a block into `values` from `first` on: zeros past the end of the
/// row.
#[cube]
pub fn load_factors<G: Size>(
    factors: &[Vector<f32, G>],
    at: &At,
    values: &mut Array<f32>,
    first: usize,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.whole) {
        let blocks = at.cols / BLOCK;
        let inside = at.block < blocks;
        let start = select(inside, at.block, blocks - 1usize) * 4usize;
        #[unroll]
        for part in 0..4usize {
            let loaded = factors[start + part];
            #[unroll]
            for i in 0..4usize {
                values[first + comptime!(part * 4 + i)] = select(inside, loaded.extract(i), 0.0f32);
            }
        }
    } else {
        for i in 0..BLOCK {
            let column = at.block * BLOCK + i;
            let mut value = 0.0f32;
            if column < at.cols {
                value = factors[column].extract(0usize);
            }
            values[first + i] = value;
        }
    }
}

/// Writes the per-column values of a block to row `at.row` of a matrix of `f32`.
#[cube]
pub fn store_factors<G: Size>(
    out: &mut [Vector<f32, G>],
    at: &At,
    values: &Array<f32>,
    first: usize,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.whole) {
        let start = (at.row * (at.cols / BLOCK) + at.block) * 4usize;
        #[unroll]
        for part in 0..4usize {
            let mut vector = Vector::<f32, G>::empty();
            #[unroll]
            for i in 0..4usize {
                vector.insert(i, values[first + comptime!(part * 4 + i)]);
            }
            out[start + part] = vector;
        }
    } else {
        for i in 0..BLOCK {
            let column = at.block * BLOCK + i;
            if column < at.cols {
                let index = at.row * at.cols + column;
                let mut vector = Vector::<f32, G>::empty();
                vector.insert(0usize, values[first + i]);
                out[index] = vector;
            }
        }
    }
}

/// True if element `i` of a block is in the row. Elements past its end are zeros, which change no
/// sum except one of differences from the mean.
#[cube]
pub fn is_inside(at: &At, i: usize, #[comptime] plan: NormPlan) -> bool {
    if comptime!(plan.whole) {
        at.block < at.cols / BLOCK
    } else {
        at.block * BLOCK + i < at.cols
    }
}

/// Sums along rows, in the order of [`reference::norm_forward`](crate::reference::norm_forward).
///
/// Unit `u` of a row adds the blocks `u`, `u + units`, ... in this order. If planes share a row,
/// there are as many units as partial sums, or no more blocks than units.
#[derive(CubeType)]
pub struct RowSum {
    /// Partial sums if there are no planes; otherwise the sums of planes, double-buffered.
    sums: Shared<[f32]>,
    set: usize,
}

#[cube]
impl RowSum {
    /// Allocates shared memory for the sums.
    pub fn new(#[comptime] plan: NormPlan) -> RowSum {
        let len = comptime!(match plan.planes {
            0 => plan.row_lanes,
            _ => 2 * plan.cube_planes,
        });
        RowSum {
            sums: Shared::new_slice(len),
            set: 0usize.runtime(),
        }
    }

    /// Starts the sum of a row if there are no planes. All units of the cube must participate.
    pub fn clear(&mut self, #[comptime] plan: NormPlan) {
        if comptime!(plan.planes == 0) {
            sync_cube();
            let mut lane = UNIT_POS as usize;
            while lane < plan.row_lanes {
                self.sums[lane] = 0.0f32;
                lane += CUBE_DIM as usize;
            }
            sync_cube();
        }
    }

    /// Returns the partial sum of `block` over the earlier blocks; with planes this is `own`, the
    /// unit's sum.
    pub fn get(&self, own: f32, block: usize, #[comptime] plan: NormPlan) -> f32 {
        if comptime!(plan.planes == 0) {
            self.sums[block % plan.row_lanes]
        } else {
            own
        }
    }

    /// Stores the partial sum of `block` if there are no planes.
    pub fn set(&mut self, sum: f32, block: usize, #[comptime] plan: NormPlan) {
        if comptime!(plan.planes == 0) {
            self.sums[block % plan.row_lanes] = sum;
        }
    }

    /// Returns the sum of the row to every unit. All units must participate.
    pub fn total(&mut self, own: f32, place: &Place, #[comptime] plan: NormPlan) -> f32 {
        if comptime!(plan.planes == 0) {
            sync_cube();
            if UNIT_POS == 0u32 {
                let mut len = comptime!(plan.row_lanes / 2).runtime();
                while len > 0usize {
                    for i in 0..len {
                        let sum = self.sums[2usize * i] + self.sums[2usize * i + 1usize];
                        self.sums[i] = sum;
                    }
                    len /= 2usize;
                }
            }
            sync_cube();
            self.sums[0]
        } else {
            let sum = plane_total(own, plan);
            if comptime!(plan.planes > 1) {
                self.leave(sum, place, plan);
                self.of_slot(place.slot, plan)
            } else {
                sum
            }
        }
    }

    /// Publishes the [sum of this plane](plane_total) to all units of the cube, which must all
    /// participate.
    pub fn leave(&mut self, sum: f32, place: &Place, #[comptime] plan: NormPlan) {
        // Slower units may still read the previous set.
        self.set = 1usize - self.set;
        let first = self.set * plan.cube_planes + place.slot * plan.planes;
        if place.unit & 31usize == 0usize {
            self.sums[first + place.unit / 32usize] = sum;
        }
        sync_cube();
    }

    /// Returns the sum of row `slot` of the cube, whose planes have published theirs.
    pub fn of_slot(&self, slot: usize, #[comptime] plan: NormPlan) -> f32 {
        let planes = comptime!(plan.planes);
        let first = self.set * plan.cube_planes + slot * planes;
        let mut sums = Array::<f32>::new(planes);
        #[unroll]
        for p in 0..planes {
            sums[p] = self.sums[first + p];
        }
        #[unroll]
        for stage in 0..comptime!(planes.ilog2()) {
            let len = comptime!(planes >> (stage + 1));
            #[unroll]
            for i in 0..len {
                sums[i] = sums[comptime!(2 * i)] + sums[comptime!(2 * i + 1)];
            }
        }
        sums[0]
    }
}

/// Returns the sum of a plane to each of its units.
#[cube]
pub fn plane_total(own: f32, #[comptime] plan: NormPlan) -> f32 {
    // Both units of a pair add the same two numbers, so all of them have the sum of the tree.
    let mut sum = own;
    #[unroll]
    for stage in 0..5u32 {
        let distance = comptime!(1u32 << stage);
        sum += if comptime!(plan.conversion.has_ptx()) {
            ptx::shfl_sync_bfly(sum, distance)
        } else {
            plane_shuffle_xor(sum, distance)
        };
    }
    sum
}
