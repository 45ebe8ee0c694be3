//! RMSNorm as the prologue of another kernel, in every cube of it.

use cubecl::prelude::*;

use super::{
    forward::{NormInputs, kept_rstd, load_kept, normalize_kept},
    plan::{BLOCK, NormPlan},
    row::{Place, RowSum, block_at, load_factors, place, store_raw},
};

/// The state of a unit. Rows are whole blocks, of which units keep all, and gains are
/// [ready](NormPlan::ready_gains).
#[derive(CubeType)]
pub struct NormPrologue {
    sums: RowSum,
    gains: Array<f32>,
    /// The part of the cube's rows that this unit works on.
    pub place: Place,
}

#[cube]
impl NormPrologue {
    /// Loads the gains, which no kernel in front writes.
    pub fn new(
        inputs: &NormInputs<Vector<u32, Const<4>>, Vector<f32, Const<4>>>,
        cols: usize,
        #[comptime] plan: NormPlan,
    ) -> NormPrologue {
        let place = place(plan);
        let mut gains = Array::<f32>::new(comptime!(plan.ready_gains()));
        #[unroll]
        for k in 0..plan.kept {
            let at = block_at(0usize, k, &place, cols);
            load_factors::<Const<4>>(&inputs.gain, &at, &mut gains, k * BLOCK, plan);
        }
        NormPrologue {
            sums: RowSum::new(plan),
            gains,
            place,
        }
    }

    /// The words of this unit's blocks of row `row`, normalised; of those behind the end anything. All units of the cube must be here. Those of one that `is_writer` write the row
    /// with the residual to `sum`, where there is one.
    pub fn norm_row(
        &mut self,
        inputs: &NormInputs<Vector<u32, Const<4>>, Vector<f32, Const<4>>>,
        sum: &mut [Vector<u32, Const<4>>],
        row: usize,
        is_row: bool,
        is_writer: bool,
        cols: usize,
        #[comptime] plan: NormPlan,
    ) -> Array<u32> {
        let words = comptime!(plan.raw_words());
        let blocks = cols / BLOCK;
        let mut x = Array::<u32>::new(comptime!(words * plan.kept));
        #[unroll]
        for i in 0..comptime!(words * plan.kept) {
            x[i] = 0u32;
        }
        // Not behind the end: the other units wait for no load of these.
        if is_row {
            load_kept::<u32, Const<4>, Const<4>>(inputs, &mut x, row, &self.place, cols, plan);
        }
        if comptime!(plan.residual) {
            if is_row && is_writer {
                #[unroll]
                for k in 0..plan.kept {
                    let at = block_at(row, k, &self.place, cols);
                    if at.block < blocks {
                        store_raw::<u32, Const<4>>(sum, &at, &x, k * words, plan);
                    }
                }
            }
        }
        let place = &self.place;
        let rstd = kept_rstd(
            &x,
            0.0f32,
            &mut self.sums,
            place,
            cols,
            inputs.epsilon,
            plan,
        );
        #[unroll]
        for k in 0..plan.kept {
            let at = block_at(row, k, place, cols);
            normalize_kept::<u32, Const<4>, Const<4>>(
                &mut x,
                inputs,
                &self.gains,
                &at,
                k,
                0.0f32,
                rstd,
                plan,
            );
        }
        x
    }
}
