//! RMSNorm as the prologue of another kernel, computed in each of its cubes.

use cubecl::prelude::*;

use super::{
    forward::{NormInputs, kept_squares, load_kept, row_factor},
    plan::{BLOCK, NormPlan},
    row::{Place, RowSum, block_at, place, plane_total, store_raw},
};

/// State of a unit, for rows that are whole blocks and are kept in registers.
#[derive(CubeType)]
pub struct NormPrologue {
    sums: RowSum,
    /// Row and blocks that this unit loads.
    pub place: Place,
}

#[cube]
impl NormPrologue {
    /// Returns the state before the first rows.
    pub fn new(#[comptime] plan: NormPlan) -> NormPrologue {
        NormPrologue {
            sums: RowSum::new(plan),
            place: place(plan),
        }
    }

    /// Loads the words of this unit's blocks of row `row`, with the residual added, if any; zeros
    /// if `row` is out of range. A unit with `is_writer` writes the sum with the residual to `sum`.
    pub fn load_row(
        &self,
        inputs: &NormInputs<Vector<u32, Const<4>>, Vector<f32, Const<4>>>,
        sum: &mut [Vector<u32, Const<4>>],
        row: usize,
        is_row: bool,
        is_writer: bool,
        cols: usize,
        #[comptime] plan: NormPlan,
    ) -> Array<u32> {
        let words = comptime!(plan.raw_words());
        let mut x = Array::<u32>::new(comptime!(words * plan.kept));
        #[unroll]
        for i in 0..comptime!(words * plan.kept) {
            x[i] = 0u32;
        }
        // Other units skip loads that are not needed.
        if is_row {
            load_kept::<u32, Const<4>, Const<4>>(inputs, &mut x, row, &self.place, cols, plan);
        }
        // Two conditions, of which only the inner one remains in the kernel.
        #[allow(clippy::collapsible_if)]
        if comptime!(plan.residual) {
            if is_row && is_writer {
                #[unroll]
                for k in 0..plan.kept {
                    let at = block_at(row, k, &self.place, cols);
                    if at.block < cols / BLOCK {
                        store_raw::<u32, Const<4>>(sum, &at, &x, k * words, plan);
                    }
                }
            }
        }
        x
    }

    /// Sums the squares of the rows that the units loaded. All units of the cube must participate;
    /// their earlier writes to shared memory are visible to all afterwards.
    pub fn add_squares(&mut self, x: &Array<u32>, cols: usize, #[comptime] plan: NormPlan) {
        let own = kept_squares(x, 0.0f32, &self.place, cols, plan);
        self.sums.leave(plane_total(own, plan), &self.place, plan);
    }

    /// Returns the rstd of row `slot` of the cube, for any unit.
    pub fn rstd(&self, slot: usize, cols: usize, epsilon: f32, #[comptime] plan: NormPlan) -> f32 {
        row_factor(self.sums.of_slot(slot, plan), cols, epsilon, plan)
    }
}
