//! Forward of a norm.

use cubecl::prelude::*;

use super::{
    plan::{BLOCK, NormPlan},
    row::{
        At, Place, RowSum, block_at, is_inside, load_factors, load_raw, pack_raw, place, store_raw,
        unpack_raw,
    },
};
use crate::{
    cube::{
        exact::{fma, reciprocal, sqrt},
        hadamard::Signs,
        overlap::{let_next_begin, wait_for_previous, written_before},
    },
    quantize::amax::{
        AmaxOut, AmaxPlan, Maxima, Running, Strip, fold_strip, leave_group, leave_row,
    },
    reference::Norm,
};

/// Inputs of a norm. Inputs that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct NormInputs<C: CubePrimitive, D: CubePrimitive> {
    /// Input of the normalization, or the tensor that is added to the residual.
    pub x: Box<[C]>,
    /// Residual that is added before the normalization.
    pub residual: Box<[C]>,
    /// Gain of each column.
    pub gain: Box<[D]>,
    /// Bias of each column.
    pub bias: Box<[D]>,
    /// Term added to the mean square.
    pub epsilon: f32,
}

/// Outputs of a norm. Outputs that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct NormOutputs<C: CubePrimitive> {
    /// Sum of `x` and the residual.
    pub sum: Box<[C]>,
    /// Normalized rows.
    pub normed: Box<[C]>,
    /// Reciprocal standard deviation (rstd) of each row, followed by the row means.
    pub stats: Box<[f32]>,
    /// Buffer for the amax values of the normalized rows.
    pub amax: AmaxOut,
}

/// Rows that a cube processes at a time.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    /// First row.
    first: usize,
    /// Number of rows of the matrix.
    count: usize,
    cols: usize,
}

/// Normalizes rows. A cube processes as many rows at a time as its planes share. If it computes the
/// amax of transformed columns, it completes a strip of rows first and then rereads its output from
/// the L2 cache, because registers have no room for 16 rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn norm_kernel<F: Numeric, N: Size, G: Size>(
    inputs: NormInputs<Vector<F, N>, Vector<f32, G>>,
    mut outputs: NormOutputs<Vector<F, N>>,
    signs: Signs,
    rows: usize,
    cols: usize,
    #[comptime] plan: NormPlan,
    #[define(F)] _scalar: ElemType,
) {
    let place = place(plan);
    let slots = comptime!(plan.slots());
    let mut sums = RowSum::new(plan);
    written_before(&inputs.x, plan.overlaps);
    written_before(&inputs.residual, plan.overlaps);
    let mut gain = Array::<f32>::new(comptime!(plan.ready_gains()));
    if comptime!(plan.ready_gains() > 0) {
        #[unroll]
        for k in 0..plan.kept {
            let at = block_at(0usize, k, &place, cols);
            load_factors::<G>(&inputs.gain, &at, &mut gain, k * BLOCK, plan);
        }
    }
    // The next GEMM loads its weights while both kernels wait.
    let_next_begin(plan.overlaps);
    wait_for_previous(plan.overlaps);
    let cube_rows = comptime!(plan.cube_rows());
    let mut largest = Running::new();
    let mut maxima = Maxima::new();
    let mut first = CUBE_POS * cube_rows;
    while first < rows {
        for step in 0..comptime!(cube_rows / slots) {
            let these = Rows {
                first: first + step * slots,
                count: rows,
                cols,
            };
            if these.first < rows {
                if comptime!(plan.kept > 0) {
                    kept_rows::<F, N, G>(
                        &inputs,
                        &mut outputs,
                        &mut sums,
                        &gain,
                        &mut largest,
                        &place,
                        &these,
                        plan,
                    );
                } else {
                    long_row::<F, N, G>(
                        &inputs,
                        &mut outputs,
                        &mut sums,
                        &mut largest,
                        &place,
                        &these,
                        plan,
                    );
                }
            }
        }
        if comptime!(plan.amax.is_some_and(|amax| amax.cols.is_some())) {
            let of_cols = comptime!(AmaxPlan {
                rows: None,
                ..plan.amax.unwrap()
            });
            // Waits for the output of the cube's other units.
            sync_cube();
            let strip = Strip {
                row0: first,
                rows,
                row_words: cols * comptime!(plan.kind.size()) / 4usize,
            };
            fold_strip::<F, N>(
                &outputs.normed,
                &strip,
                &signs,
                &mut maxima,
                &mut outputs.amax,
                of_cols,
            );
        }
        first += CUBE_COUNT * cube_rows;
    }
    if comptime!(plan.amax.is_some()) {
        let amax = comptime!(plan.amax.unwrap());
        maxima.rows = largest.bits(false, plan.conversion, plan.kind);
        leave_group(&mut outputs.amax, 0usize, &maxima, amax);
    }
}

/// Folds the words of an output block into the amax.
#[cube]
pub(super) fn find_largest(
    raw: &Array<u32>,
    first: usize,
    largest: &mut Running,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.amax.is_some()) {
        #[unroll]
        for w in 0..comptime!(plan.raw_words()) {
            largest.fold::<u32>(raw[first + w], false, plan.conversion, plan.kind);
        }
    }
}

/// Starts the amax of a row, if each row has one.
#[cube]
pub(super) fn begin_row(largest: &mut Running, #[comptime] plan: NormPlan) {
    if comptime!(plan.has_row_amax()) {
        largest.clear();
    }
}

/// Raises the amax of `row`, if each row has one. All units of the row must call it.
#[cube]
pub(super) fn leave_largest(
    largest: &Running,
    out: &mut AmaxOut,
    row: usize,
    #[comptime] plan: NormPlan,
) {
    if comptime!(plan.has_row_amax()) {
        let bits = largest.bits(false, plan.conversion, plan.kind);
        leave_row(out, row, bits, comptime!(plan.amax.unwrap()));
    }
}

/// Returns `1 / sqrt(squares / cols + epsilon)`.
#[cube]
pub fn row_factor(squares: f32, cols: usize, epsilon: f32, #[comptime] plan: NormPlan) -> f32 {
    let mean = squares / f32::cast_from(cols);
    let conversion = comptime!(plan.conversion);
    reciprocal(sqrt(mean + epsilon, conversion), conversion)
}

/// Adds the elements of a block to `sum`, or their squares if `square` is set, after subtracting
/// the mean.
#[cube]
fn add_block(
    values: &Array<f32>,
    at: &At,
    mean: f32,
    sum: f32,
    #[comptime] square: bool,
    #[comptime] plan: NormPlan,
) -> f32 {
    let unrolled = comptime!(plan.conversion.has_ptx());
    let mut sum = sum;
    #[unroll(unrolled)]
    for i in 0..BLOCK {
        if comptime!(square) {
            let value = if comptime!(plan.norm == Norm::Layer) {
                select(is_inside(at, i, plan), values[i] - mean, 0.0f32)
            } else {
                values[i]
            };
            sum = fma(value, value, sum, plan.conversion);
        } else {
            sum += values[i];
        }
    }
    sum
}

/// Normalizes a centered element.
#[cube]
pub fn scaled(centered: f32, rstd: f32, gain: f32) -> f32 {
    centered * rstd * gain
}

/// Normalizes a block in place.
#[cube]
fn normalize<G: Size>(
    gain: &Array<f32>,
    biases: &[Vector<f32, G>],
    values: &mut Array<f32>,
    at: &At,
    mean: f32,
    rstd: f32,
    #[comptime] plan: NormPlan,
) {
    let unrolled = comptime!(plan.conversion.has_ptx());
    if comptime!(plan.bias) {
        let mut bias = Array::<f32>::new(BLOCK);
        load_factors::<G>(biases, at, &mut bias, 0usize, plan);
        #[unroll(unrolled)]
        for i in 0..BLOCK {
            let normed = (values[i] - mean) * rstd;
            values[i] = fma(normed, gain[i], bias[i], plan.conversion);
        }
    } else {
        #[unroll(unrolled)]
        for i in 0..BLOCK {
            let centered = if comptime!(plan.norm == Norm::Layer) {
                values[i] - mean
            } else {
                values[i]
            };
            values[i] = scaled(centered, rstd, gain[i]);
        }
    }
}

/// Returns the sum of two blocks.
#[cube]
fn add_residual(
    x: &Array<u32>,
    residual: &Array<u32>,
    first: usize,
    #[comptime] plan: NormPlan,
) -> Array<f32> {
    let mut values = unpack_raw(x, first, plan);
    let more = unpack_raw(residual, first, plan);
    #[unroll]
    for i in 0..BLOCK {
        values[i] += more[i];
    }
    values
}

/// Loads the words of this unit's blocks of row `row` into `x`: those of the sum with the residual,
/// if any.
#[cube]
pub fn load_kept<F: Numeric, N: Size, G: Size>(
    inputs: &NormInputs<Vector<F, N>, Vector<f32, G>>,
    x: &mut Array<u32>,
    row: usize,
    place: &Place,
    cols: usize,
    #[comptime] plan: NormPlan,
) {
    let (kept, words) = comptime!((plan.kept, plan.raw_words()));
    #[unroll]
    for k in 0..kept {
        let at = block_at(row, k, place, cols);
        load_raw::<F, N>(&inputs.x, &at, x, k * words, plan);
    }
    if comptime!(plan.residual) {
        let mut residual = Array::<u32>::new(comptime!(words * kept));
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, cols);
            load_raw::<F, N>(&inputs.residual, &at, &mut residual, k * words, plan);
        }
        #[unroll]
        for k in 0..kept {
            let sum = add_residual(&*x, &residual, k * words, plan);
            pack_raw(&sum, x, k * words, plan);
        }
    }
}

/// Returns the sum of squares of the kept blocks `x` of a row, after subtracting the mean.
#[cube]
pub fn kept_squares(
    x: &Array<u32>,
    mean: f32,
    place: &Place,
    cols: usize,
    #[comptime] plan: NormPlan,
) -> f32 {
    let words = comptime!(plan.raw_words());
    let mut own = 0.0f32;
    #[unroll]
    for k in 0..plan.kept {
        let at = block_at(0usize, k, place, cols);
        let values = unpack_raw(x, k * words, plan);
        own = add_block(&values, &at, mean, own, true, plan);
    }
    own
}

/// Processes rows whose blocks are kept in registers.
#[cube]
fn kept_rows<F: Numeric, N: Size, G: Size>(
    inputs: &NormInputs<Vector<F, N>, Vector<f32, G>>,
    outputs: &mut NormOutputs<Vector<F, N>>,
    sums: &mut RowSum,
    ready: &Array<f32>,
    largest: &mut Running,
    place: &Place,
    rows: &Rows,
    #[comptime] plan: NormPlan,
) {
    let (kept, words) = comptime!((plan.kept, plan.raw_words()));
    let (cols, blocks) = (rows.cols, rows.cols.div_ceil(BLOCK));
    // Past the end, the last row is read again and not used.
    let is_row = rows.first + place.slot < rows.count;
    let row = min(rows.first + place.slot, rows.count - 1usize);
    let mut x = Array::<u32>::new(comptime!(words * kept));
    load_kept::<F, N, G>(inputs, &mut x, row, place, cols, plan);
    if comptime!(plan.residual) {
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, cols);
            if is_row && at.block < blocks {
                store_raw::<F, N>(&mut outputs.sum, &at, &x, k * words, plan);
            }
        }
    }
    let mut mean = 0.0f32;
    if comptime!(plan.norm == Norm::Layer) {
        let mut own = 0.0f32;
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, cols);
            let values = unpack_raw(&x, k * words, plan);
            own = add_block(&values, &at, 0.0f32, own, false, plan);
        }
        mean = sums.total(own, place, plan) / f32::cast_from(cols);
    }
    let own = kept_squares(&x, mean, place, cols, plan);
    let squares = sums.total(own, place, plan);
    let rstd = row_factor(squares, cols, inputs.epsilon, plan);
    if is_row {
        begin_row(largest, plan);
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, cols);
            if at.block < blocks {
                let mut values = unpack_raw(&x, k * words, plan);
                let mut gain = Array::<f32>::new(BLOCK);
                if comptime!(plan.ready_gains() > 0) {
                    #[unroll]
                    for i in 0..BLOCK {
                        gain[i] = ready[comptime!(k * BLOCK + i)];
                    }
                } else {
                    load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
                }
                normalize::<G>(&gain, &inputs.bias, &mut values, &at, mean, rstd, plan);
                pack_raw(&values, &mut x, k * words, plan);
                store_raw::<F, N>(&mut outputs.normed, &at, &x, k * words, plan);
                find_largest(&x, k * words, largest, plan);
            }
        }
        leave_largest(&*largest, &mut outputs.amax, row, plan);
        if place.unit == 0usize {
            outputs.stats[row] = rstd;
            if comptime!(plan.norm == Norm::Layer) {
                let index = rows.count + row;
                outputs.stats[index] = mean;
            }
        }
    }
}

/// Processes a row that is read again in each step.
#[cube]
fn long_row<F: Numeric, N: Size, G: Size>(
    inputs: &NormInputs<Vector<F, N>, Vector<f32, G>>,
    outputs: &mut NormOutputs<Vector<F, N>>,
    sums: &mut RowSum,
    largest: &mut Running,
    place: &Place,
    rows: &Rows,
    #[comptime] plan: NormPlan,
) {
    let words = comptime!(plan.raw_words());
    let (row, cols, blocks) = (rows.first, rows.cols, rows.cols.div_ceil(BLOCK));
    let mut x = Array::<u32>::new(words);
    let mut own = 0.0f32;
    sums.clear(plan);
    let mut block = place.unit;
    while block < blocks {
        let at = At { row, block, cols };
        load_raw::<F, N>(&inputs.x, &at, &mut x, 0usize, plan);
        if comptime!(plan.residual) {
            let mut residual = Array::<u32>::new(words);
            load_raw::<F, N>(&inputs.residual, &at, &mut residual, 0usize, plan);
            let sum = add_residual(&x, &residual, 0usize, plan);
            pack_raw(&sum, &mut x, 0usize, plan);
            store_raw::<F, N>(&mut outputs.sum, &at, &x, 0usize, plan);
        }
        let values = unpack_raw(&x, 0usize, plan);
        let square = comptime!(plan.norm == Norm::Rms);
        own = add_block(
            &values,
            &at,
            0.0f32,
            sums.get(own, block, plan),
            square,
            plan,
        );
        sums.set(own, block, plan);
        block += place.units;
    }
    let mut total = sums.total(own, place, plan);
    let mut mean = 0.0f32;
    if comptime!(plan.norm == Norm::Layer) {
        mean = total / f32::cast_from(cols);
        own = 0.0f32;
        sums.clear(plan);
        block = place.unit;
        while block < blocks {
            let at = At { row, block, cols };
            // This unit wrote the sum.
            if comptime!(plan.residual) {
                load_raw::<F, N>(&outputs.sum, &at, &mut x, 0usize, plan);
            } else {
                load_raw::<F, N>(&inputs.x, &at, &mut x, 0usize, plan);
            }
            let values = unpack_raw(&x, 0usize, plan);
            own = add_block(&values, &at, mean, sums.get(own, block, plan), true, plan);
            sums.set(own, block, plan);
            block += place.units;
        }
        total = sums.total(own, place, plan);
    }
    let rstd = row_factor(total, cols, inputs.epsilon, plan);
    begin_row(largest, plan);
    block = place.unit;
    while block < blocks {
        let at = At { row, block, cols };
        // This unit wrote the sum.
        if comptime!(plan.residual) {
            load_raw::<F, N>(&outputs.sum, &at, &mut x, 0usize, plan);
        } else {
            load_raw::<F, N>(&inputs.x, &at, &mut x, 0usize, plan);
        }
        let mut values = unpack_raw(&x, 0usize, plan);
        let mut gain = Array::<f32>::new(BLOCK);
        load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
        normalize::<G>(&gain, &inputs.bias, &mut values, &at, mean, rstd, plan);
        pack_raw(&values, &mut x, 0usize, plan);
        store_raw::<F, N>(&mut outputs.normed, &at, &x, 0usize, plan);
        find_largest(&x, 0usize, largest, plan);
        block += place.units;
    }
    leave_largest(&*largest, &mut outputs.amax, row, plan);
    if place.unit == 0usize {
        outputs.stats[row] = rstd;
        if comptime!(plan.norm == Norm::Layer) {
            let index = rows.count + row;
            outputs.stats[index] = mean;
        }
    }
}
