//! Backward of a norm.

use cubecl::prelude::*;

use super::{
    forward::{begin_row, find_largest, leave_largest},
    plan::{BLOCK, NormPlan, PLANES},
    row::{
        At, Place, RowSum, block_at, load_factors, load_raw, pack_raw, place, store_factors,
        store_raw, unpack_raw,
    },
};
use crate::{
    cube::{exact::fma, hadamard::Signs},
    quantize::amax::{AmaxOut, AmaxPlan, Maxima, Running, STRIP, Strip, fold_strip, leave_group},
    reference::Norm,
};

/// Inputs of the backward. Inputs that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct NormGradInputs<C: CubePrimitive, D: CubePrimitive> {
    /// Gradient of the output.
    pub grad: Box<[C]>,
    /// Gradient that the sum receives from its other uses.
    pub sum_grad: Box<[C]>,
    /// Input of the normalization.
    pub x: Box<[C]>,
    /// Reciprocal standard deviation (rstd) of each row, followed by the row means.
    pub stats: Box<[f32]>,
    /// Gain of each column.
    pub gain: Box<[D]>,
}

/// Outputs of the backward. Outputs that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct NormGradOutputs<C: CubePrimitive, D: CubePrimitive> {
    /// Gradient of the normalization's input.
    pub x: Box<[C]>,
    /// Gradient of the gain, `[part, column]`: one partial sum per part of the rows.
    pub gain: Box<[D]>,
    /// Gradient of the bias, `[part, column]`.
    pub bias: Box<[D]>,
    /// Buffer for the amax values of the gradient of the normalization's input.
    pub amax: AmaxOut,
}

/// A part: a range of rows whose column sums are accumulated together.
#[derive(CubeType, Clone, Copy)]
struct Part {
    number: usize,
    start: usize,
    end: usize,
    /// Number of rows of the matrix.
    count: usize,
    cols: usize,
}

/// Returns the first row of part `number`.
#[cube]
fn part_start(number: usize, rows: usize, parts: usize, #[comptime] plan: NormPlan) -> usize {
    if comptime!(plan.strips) {
        min(number * rows.div_ceil(STRIP) / parts * STRIP, rows)
    } else {
        number * rows / parts
    }
}

/// Amax state of the gradient of the normalization's input.
#[derive(CubeType)]
struct Found {
    /// Amax of all elements.
    largest: Running,
    /// Amax values of transformed columns.
    maxima: Maxima,
    /// Signs of the transform.
    signs: Signs,
}

#[cube]
impl Found {
    /// If row `row` ends a strip of the part, folds that strip, as the cube's units wrote it, into
    /// the column amax; the strip is in the L2 cache. All units must participate.
    fn end_row<F: Numeric, N: Size>(
        &mut self,
        x: &[Vector<F, N>],
        amax: &mut AmaxOut,
        row: usize,
        part: &Part,
        #[comptime] plan: NormPlan,
    ) {
        if comptime!(plan.amax.is_some_and(|amax| amax.cols.is_some())) {
            let of_cols = comptime!(AmaxPlan {
                rows: None,
                ..plan.amax.unwrap()
            });
            let behind = row + 1usize;
            if behind.is_multiple_of(STRIP) || behind >= part.end {
                sync_cube();
                let strip = Strip {
                    row0: row / STRIP * STRIP,
                    rows: part.end,
                    row_words: part.cols * comptime!(plan.kind.size()) / 4usize,
                };
                fold_strip::<F, N>(x, &strip, &self.signs, &mut self.maxima, amax, of_cols);
            }
        }
    }
}

/// Computes the gradients. A cube processes one part at a time, and as many of its rows as its
/// planes share.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn norm_backward_kernel<F: Numeric, N: Size, G: Size>(
    inputs: NormGradInputs<Vector<F, N>, Vector<f32, G>>,
    mut outputs: NormGradOutputs<Vector<F, N>, Vector<f32, G>>,
    signs: Signs,
    rows: usize,
    parts: usize,
    cols: usize,
    #[comptime] plan: NormPlan,
    #[define(F)] _scalar: ElemType,
) {
    let place = place(plan);
    let mut found = Found {
        largest: Running::new(),
        maxima: Maxima::new(),
        signs,
    };
    let mut number = CUBE_POS;
    while number < parts {
        let part = Part {
            number,
            start: part_start(number, rows, parts, plan),
            end: part_start(number + 1usize, rows, parts, plan),
            count: rows,
            cols,
        };
        if comptime!(plan.kept > 0) {
            kept_part::<F, N, G>(&inputs, &mut outputs, &mut found, &place, &part, plan);
        } else {
            long_part::<F, N, G>(&inputs, &mut outputs, &mut found, &place, &part, plan);
        }
        number += CUBE_COUNT;
    }
    if comptime!(plan.amax.is_some()) {
        let amax = comptime!(plan.amax.unwrap());
        found.maxima.rows = found.largest.bits(false, plan.conversion, plan.kind);
        leave_group(&mut outputs.amax, 0usize, &found.maxima, amax);
    }
}

/// Statistics of a row.
#[derive(CubeType, Clone, Copy)]
struct Stats {
    rstd: f32,
    mean: f32,
}

#[cube]
fn load_stats(stats: &[f32], row: usize, count: usize, #[comptime] plan: NormPlan) -> Stats {
    let mut mean = 0.0f32;
    if comptime!(plan.norm == Norm::Layer) {
        mean = stats[count + row];
    }
    Stats {
        rstd: stats[row],
        mean,
    }
}

/// Returns a normalized element of the row, before the gain.
#[cube]
fn normed(x: f32, stats: &Stats, #[comptime] plan: NormPlan) -> f32 {
    if comptime!(plan.norm == Norm::Layer) {
        (x - stats.mean) * stats.rstd
    } else {
        x * stats.rstd
    }
}

/// Adds the elements of a block of `grad · gain` times the normalized elements to `sum`.
#[cube]
fn add_dot(
    grad: &Array<f32>,
    x: &Array<f32>,
    gain: &Array<f32>,
    stats: &Stats,
    sum: f32,
    #[comptime] plan: NormPlan,
) -> f32 {
    let unrolled = comptime!(plan.conversion.has_ptx());
    let mut sum = sum;
    #[unroll(unrolled)]
    for i in 0..BLOCK {
        sum = fma(
            grad[i] * gain[i],
            normed(x[i], stats, plan),
            sum,
            plan.conversion,
        );
    }
    sum
}

/// Adds the elements of a block of `grad · gain` to `sum`.
#[cube]
fn add_scaled(grad: &Array<f32>, gain: &Array<f32>, sum: f32, #[comptime] plan: NormPlan) -> f32 {
    let unrolled = comptime!(plan.conversion.has_ptx());
    let mut sum = sum;
    #[unroll(unrolled)]
    for i in 0..BLOCK {
        sum = fma(grad[i], gain[i], sum, plan.conversion);
    }
    sum
}

/// Row means that the gradient needs.
#[derive(CubeType, Clone, Copy)]
struct Means {
    /// Mean of `grad · gain` times the normalized row.
    dot: f32,
    /// Mean of `grad · gain`.
    scaled: f32,
}

/// Replaces a block of the output's gradient by the gradient of `x`. Plans with a residual use
/// `sum_grad`.
#[cube]
fn by_x(
    grad: &mut Array<f32>,
    x: &Array<f32>,
    gain: &Array<f32>,
    sum_grad: &Array<f32>,
    stats: &Stats,
    means: &Means,
    #[comptime] plan: NormPlan,
) {
    let (unrolled, conversion) = comptime!((plan.conversion.has_ptx(), plan.conversion));
    #[unroll(unrolled)]
    for i in 0..BLOCK {
        let scaled = if comptime!(plan.norm == Norm::Layer) {
            fma(grad[i], gain[i], -means.scaled, conversion)
        } else {
            grad[i] * gain[i]
        };
        let centered = fma(-normed(x[i], stats, plan), means.dot, scaled, conversion);
        grad[i] = if comptime!(plan.residual) {
            fma(centered, stats.rstd, sum_grad[i], conversion)
        } else {
            centered * stats.rstd
        };
    }
}

/// A unit's blocks of a row of each matrix, and the row's rstd and mean.
#[derive(CubeType)]
struct Loaded {
    grad: Array<u32>,
    x: Array<u32>,
    stats: Array<f32>,
}

#[cube]
impl Loaded {
    fn new(#[comptime] plan: NormPlan) -> Loaded {
        let len = comptime!(plan.kept * plan.raw_words());
        Loaded {
            grad: Array::<u32>::new(len),
            x: Array::<u32>::new(len),
            stats: Array::<f32>::new(2usize),
        }
    }

    fn load<F: Numeric, N: Size, G: Size>(
        &mut self,
        inputs: &NormGradInputs<Vector<F, N>, Vector<f32, G>>,
        row: usize,
        place: &Place,
        part: &Part,
        #[comptime] plan: NormPlan,
    ) {
        let (kept, words) = comptime!((plan.kept, plan.raw_words()));
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, part.cols);
            load_raw::<F, N>(&inputs.grad, &at, &mut self.grad, k * words, plan);
            load_raw::<F, N>(&inputs.x, &at, &mut self.x, k * words, plan);
        }
        let stats = load_stats(&inputs.stats, row, part.count, plan);
        self.stats[0] = stats.rstd;
        self.stats[1] = stats.mean;
    }

    fn copy(&mut self, from: &Loaded, #[comptime] plan: NormPlan) {
        #[unroll]
        for i in 0..comptime!(plan.kept * plan.raw_words()) {
            self.grad[i] = from.grad[i];
            self.x[i] = from.x[i];
        }
        self.stats[0] = from.stats[0];
        self.stats[1] = from.stats[1];
    }
}

/// Processes a part whose rows and column sums are kept in registers. If a unit has one block of a
/// row, the next row is loaded while the current one is computed.
#[cube]
fn kept_part<F: Numeric, N: Size, G: Size>(
    inputs: &NormGradInputs<Vector<F, N>, Vector<f32, G>>,
    outputs: &mut NormGradOutputs<Vector<F, N>, Vector<f32, G>>,
    found: &mut Found,
    place: &Place,
    part: &Part,
    #[comptime] plan: NormPlan,
) {
    let (kept, slots, words) = comptime!((plan.kept, plan.slots(), plan.raw_words()));
    let (layer, biased) = comptime!((plan.norm == Norm::Layer, plan.bias));
    let (unrolled, len) = comptime!((plan.conversion.has_ptx(), plan.kept * BLOCK));
    let (cols, blocks) = (part.cols, part.cols.div_ceil(BLOCK));
    let columns = f32::cast_from(cols);
    let mut gain_sums = Array::<f32>::new(len);
    let mut bias_sums = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        gain_sums[i] = 0.0f32;
        bias_sums[i] = 0.0f32;
    }
    let mut dots = RowSum::new(plan);
    let mut sums = RowSum::new(plan);
    let last = part.end - 1usize;
    let mut row = part.start + place.slot;
    let mut gain = Array::<f32>::new(BLOCK);
    let mut loaded = Loaded::new(plan);
    let mut ahead = Loaded::new(plan);
    if comptime!(kept == 1) {
        ahead.load::<F, N, G>(inputs, min(row, last), place, part, plan);
    }
    let steps = (part.end - part.start).div_ceil(slots);
    for step in 0..steps {
        if comptime!(kept == 1) {
            loaded.copy(&ahead, plan);
            ahead.load::<F, N, G>(inputs, min(row + slots, last), place, part, plan);
        } else {
            loaded.load::<F, N, G>(inputs, min(row, last), place, part, plan);
        }
        let mut sum_grad = Array::<u32>::new(comptime!(kept * words));
        if comptime!(plan.residual) {
            #[unroll]
            for k in 0..kept {
                let at = block_at(min(row, last), k, place, cols);
                load_raw::<F, N>(&inputs.sum_grad, &at, &mut sum_grad, k * words, plan);
            }
        }
        let stats = Stats {
            rstd: loaded.stats[0],
            mean: loaded.stats[1],
        };
        let mut dot = 0.0f32;
        let mut scaled = 0.0f32;
        #[unroll]
        for k in 0..kept {
            let at = block_at(row, k, place, cols);
            load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
            let grad = unpack_raw(&loaded.grad, k * words, plan);
            let x = unpack_raw(&loaded.x, k * words, plan);
            dot = add_dot(&grad, &x, &gain, &stats, dot, plan);
            if comptime!(layer) {
                scaled = add_scaled(&grad, &gain, scaled, plan);
            }
        }
        dot = dots.total(dot, place, plan) / columns;
        if comptime!(layer) {
            scaled = sums.total(scaled, place, plan) / columns;
        }
        let means = Means { dot, scaled };
        // If the part is not a multiple of the slots, the last row is loaded again and not used.
        if row < part.end {
            begin_row(&mut found.largest, plan);
            #[unroll]
            for k in 0..kept {
                let at = block_at(row, k, place, cols);
                load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
                let mut grad = unpack_raw(&loaded.grad, k * words, plan);
                let x = unpack_raw(&loaded.x, k * words, plan);
                #[unroll(unrolled)]
                for i in 0..BLOCK {
                    let value = normed(x[i], &stats, plan);
                    let sum = gain_sums[k * BLOCK + i];
                    gain_sums[k * BLOCK + i] = fma(grad[i], value, sum, plan.conversion);
                    if comptime!(biased) {
                        bias_sums[k * BLOCK + i] += grad[i];
                    }
                }
                if comptime!(plan.residual) {
                    let more = unpack_raw(&sum_grad, k * words, plan);
                    by_x(&mut grad, &x, &gain, &more, &stats, &means, plan);
                } else {
                    let none = Array::<f32>::new(1usize);
                    by_x(&mut grad, &x, &gain, &none, &stats, &means, plan);
                }
                pack_raw(&grad, &mut loaded.grad, k * words, plan);
                if at.block < blocks {
                    store_raw::<F, N>(&mut outputs.x, &at, &loaded.grad, k * words, plan);
                    find_largest(&loaded.grad, k * words, &mut found.largest, plan);
                }
            }
            leave_largest(&found.largest, &mut outputs.amax, row, plan);
        }
        let last_of_step = part.start + step * slots + comptime!(slots - 1);
        let last_of_step = min(last_of_step, last);
        found.end_row::<F, N>(&outputs.x, &mut outputs.amax, last_of_step, part, plan);
        row += slots;
    }
    if comptime!(slots > 1) {
        let mut scratch = Shared::<[f32]>::new_slice(comptime!(BLOCK * 32 * PLANES));
        add_slots(&mut gain_sums, &mut scratch, place, plan);
        if comptime!(biased) {
            add_slots(&mut bias_sums, &mut scratch, place, plan);
        }
    }
    if place.slot == 0usize {
        #[unroll]
        for k in 0..kept {
            let at = block_at(part.number, k, place, cols);
            if at.block < blocks {
                store_factors::<G>(&mut outputs.gain, &at, &gain_sums, k * BLOCK, plan);
                if comptime!(biased) {
                    store_factors::<G>(&mut outputs.bias, &at, &bias_sums, k * BLOCK, plan);
                }
            }
        }
    }
}

/// Adds a block's sums of all slots into the first slot, neighbors first. All units of the cube
/// must participate.
#[cube]
fn add_slots(
    sums: &mut Array<f32>,
    scratch: &mut Shared<[f32]>,
    place: &Place,
    #[comptime] plan: NormPlan,
) {
    let slots = comptime!(plan.slots());
    let stride = comptime!(32 * PLANES);
    sync_cube();
    #[unroll]
    for i in 0..BLOCK {
        scratch[i * stride + UNIT_POS as usize] = sums[i];
    }
    sync_cube();
    #[unroll]
    for i in 0..BLOCK {
        let mut lanes = Array::<f32>::new(slots);
        #[unroll]
        for slot in 0..slots {
            lanes[slot] = scratch[i * stride + slot * place.units + place.unit];
        }
        #[unroll]
        for stage in 0..comptime!(slots.ilog2()) {
            let len = comptime!(slots >> (stage + 1));
            #[unroll]
            for lane in 0..len {
                lanes[lane] = lanes[comptime!(2 * lane)] + lanes[comptime!(2 * lane + 1)];
            }
        }
        sums[i] = lanes[0];
    }
}

/// Processes a part whose rows are read again in each step.
#[cube]
fn long_part<F: Numeric, N: Size, G: Size>(
    inputs: &NormGradInputs<Vector<F, N>, Vector<f32, G>>,
    outputs: &mut NormGradOutputs<Vector<F, N>, Vector<f32, G>>,
    found: &mut Found,
    place: &Place,
    part: &Part,
    #[comptime] plan: NormPlan,
) {
    let (layer, words) = comptime!((plan.norm == Norm::Layer, plan.raw_words()));
    let (cols, blocks) = (part.cols, part.cols.div_ceil(BLOCK));
    let columns = f32::cast_from(cols);
    let mut dots = RowSum::new(plan);
    let mut sums = RowSum::new(plan);
    let mut loaded = Array::<u32>::new(words);
    let mut gain = Array::<f32>::new(BLOCK);
    for row in part.start..part.end {
        let stats = load_stats(&inputs.stats, row, part.count, plan);
        let mut dot = 0.0f32;
        let mut scaled = 0.0f32;
        dots.clear(plan);
        if comptime!(layer) {
            sums.clear(plan);
        }
        let mut block = place.unit;
        while block < blocks {
            let at = At { row, block, cols };
            load_raw::<F, N>(&inputs.grad, &at, &mut loaded, 0usize, plan);
            let grad = unpack_raw(&loaded, 0usize, plan);
            load_raw::<F, N>(&inputs.x, &at, &mut loaded, 0usize, plan);
            let x = unpack_raw(&loaded, 0usize, plan);
            load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
            dot = add_dot(&grad, &x, &gain, &stats, dots.get(dot, block, plan), plan);
            dots.set(dot, block, plan);
            if comptime!(layer) {
                scaled = add_scaled(&grad, &gain, sums.get(scaled, block, plan), plan);
                sums.set(scaled, block, plan);
            }
            block += place.units;
        }
        dot = dots.total(dot, place, plan) / columns;
        if comptime!(layer) {
            scaled = sums.total(scaled, place, plan) / columns;
        }
        let means = Means { dot, scaled };
        begin_row(&mut found.largest, plan);
        block = place.unit;
        while block < blocks {
            let at = At { row, block, cols };
            load_raw::<F, N>(&inputs.grad, &at, &mut loaded, 0usize, plan);
            let mut grad = unpack_raw(&loaded, 0usize, plan);
            load_raw::<F, N>(&inputs.x, &at, &mut loaded, 0usize, plan);
            let x = unpack_raw(&loaded, 0usize, plan);
            load_factors::<G>(&inputs.gain, &at, &mut gain, 0usize, plan);
            if comptime!(plan.residual) {
                load_raw::<F, N>(&inputs.sum_grad, &at, &mut loaded, 0usize, plan);
                let sum_grad = unpack_raw(&loaded, 0usize, plan);
                by_x(&mut grad, &x, &gain, &sum_grad, &stats, &means, plan);
            } else {
                let none = Array::<f32>::new(1usize);
                by_x(&mut grad, &x, &gain, &none, &stats, &means, plan);
            }
            pack_raw(&grad, &mut loaded, 0usize, plan);
            store_raw::<F, N>(&mut outputs.x, &at, &loaded, 0usize, plan);
            find_largest(&loaded, 0usize, &mut found.largest, plan);
            block += place.units;
        }
        leave_largest(&found.largest, &mut outputs.amax, row, plan);
        found.end_row::<F, N>(&outputs.x, &mut outputs.amax, row, part, plan);
    }
    let mut block = place.unit;
    while block < blocks {
        long_columns::<F, N, G>(inputs, outputs, block, part, plan);
        block += place.units;
    }
}

/// Computes the sums of one block of columns over the rows of a part.
#[cube]
fn long_columns<F: Numeric, N: Size, G: Size>(
    inputs: &NormGradInputs<Vector<F, N>, Vector<f32, G>>,
    outputs: &mut NormGradOutputs<Vector<F, N>, Vector<f32, G>>,
    block: usize,
    part: &Part,
    #[comptime] plan: NormPlan,
) {
    let (lanes, words, biased) = comptime!((plan.lanes, plan.raw_words(), plan.bias));
    let cols = part.cols;
    let mut loaded = Array::<u32>::new(words);
    let mut gain_sums = Array::<f32>::new(comptime!(lanes * BLOCK));
    let mut bias_sums = Array::<f32>::new(comptime!(lanes * BLOCK));
    for i in 0..comptime!(lanes * BLOCK) {
        gain_sums[i] = 0.0f32;
        bias_sums[i] = 0.0f32;
    }
    for row in part.start..part.end {
        let at = At { row, block, cols };
        let stats = load_stats(&inputs.stats, row, part.count, plan);
        load_raw::<F, N>(&inputs.grad, &at, &mut loaded, 0usize, plan);
        let grad = unpack_raw(&loaded, 0usize, plan);
        load_raw::<F, N>(&inputs.x, &at, &mut loaded, 0usize, plan);
        let x = unpack_raw(&loaded, 0usize, plan);
        let first = (row - part.start) % lanes * BLOCK;
        for i in 0..BLOCK {
            let value = normed(x[i], &stats, plan);
            let sum = gain_sums[first + i];
            gain_sums[first + i] = fma(grad[i], value, sum, plan.conversion);
            if comptime!(biased) {
                bias_sums[first + i] += grad[i];
            }
        }
    }
    let at = At {
        row: part.number,
        block,
        cols,
    };
    add_lanes(&mut gain_sums, lanes);
    store_factors::<G>(&mut outputs.gain, &at, &gain_sums, 0usize, plan);
    if comptime!(biased) {
        add_lanes(&mut bias_sums, lanes);
        store_factors::<G>(&mut outputs.bias, &at, &bias_sums, 0usize, plan);
    }
}

/// Adds `lanes` blocks into the first one, neighbors first.
#[cube]
fn add_lanes(sums: &mut Array<f32>, #[comptime] lanes: usize) {
    #[unroll]
    for stage in 0..comptime!(lanes.ilog2()) {
        let len = comptime!(lanes >> (stage + 1));
        #[unroll]
        for lane in 0..len {
            for i in 0..BLOCK {
                let sum = sums[comptime!(2 * lane) * BLOCK + i]
                    + sums[comptime!(2 * lane + 1) * BLOCK + i];
                sums[lane * BLOCK + i] = sum;
            }
        }
    }
}
