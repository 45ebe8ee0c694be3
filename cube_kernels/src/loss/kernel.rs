//! Kernels of the cross entropy; see [`reference`](crate::reference::cross_entropy).

use cubecl::prelude::*;

use crate::{
    cube::{
        activation::{exp_of_negative, ln},
        codec::Conversion,
        exact::{fma, reciprocal},
        plane::{plane_largest, plane_tree},
        ptx,
        row_blocks::{ROW_BLOCK, RowPlan, block_sum, block_values, block_vector, vector_index},
    },
    reference::{LOG2_E, LOSS_LANES},
};

/// Blocks that a unit loads before it processes the first one.
pub(super) const GROUP: usize = 4;

/// Bits of negative infinity.
pub(super) const NEGATIVE_INFINITY: u32 = 0xFF80_0000;

/// Bits of the lowest finite number, the lower bound of every maximum.
pub(super) const LOWEST: u32 = 0xFF7F_FFFF;

/// Comptime choices of [`cross_entropy_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CrossEntropyPlan {
    /// Lanes that share a row: [`cross_entropy_lanes`](crate::reference::cross_entropy_lanes).
    pub lanes: usize,
    /// True if each lane is a unit, in planes of 32; otherwise a unit processes the lanes one by
    /// one.
    pub planes: bool,
    /// Groups of `GROUP` blocks per lane that stay in shared memory between the two passes.
    pub held: usize,
    /// True if the logits are replaced by their gradient.
    pub gradient: bool,
    /// True if label smoothing is used.
    pub smoothing: bool,
    /// Load plan of rows.
    pub rows: RowPlan,
    /// Method of computing exponentials.
    pub conversion: Conversion,
}

/// Sizes and factors of a cross entropy.
#[derive(CubeType, CubeLaunch)]
pub struct CrossEntropyArgs {
    /// Number of rows of logits.
    pub rows: usize,
    /// Logits per row.
    pub vocab: usize,
    /// Vectors per row.
    pub row_vectors: usize,
    /// Target of rows that are ignored.
    pub ignore: u32,
    /// Label smoothing.
    pub smoothing: f32,
    /// `1 / vocab`.
    pub spread: f32,
    /// Factor of the squared log-sum-exp.
    pub z_loss: f32,
}

/// Returns `e^x` for `x <= 0`.
#[cube]
pub(super) fn exp(x: f32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::ex2_approx_ftz(x * LOG2_E)
    } else {
        exp_of_negative(x, conversion)
    }
}

/// Returns the exponentials of a block, relative to `max`.
#[cube]
pub(super) fn exponentials(
    values: &Array<f32>,
    max: f32,
    #[comptime] conversion: Conversion,
) -> Array<f32> {
    let mut terms = Array::<f32>::new(ROW_BLOCK);
    #[unroll]
    for i in 0..ROW_BLOCK {
        terms[i] = exp(values[i] - max, conversion);
    }
    terms
}

/// A running maximum, the sum of exponentials relative to it, and the sum of the values.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lane {
    pub max: f32,
    pub sum: f32,
    pub total: f32,
}

/// Size of a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RowSize {
    /// Number of logits.
    pub vocab: usize,
    /// Number of vectors.
    pub vectors: usize,
}

/// Rows and lanes over which a unit iterates.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RowWalk {
    /// First row.
    pub row: usize,
    /// Step from one row to the next.
    pub step: usize,
    /// First lane of each row.
    pub lane: usize,
    /// Step from one lane to the next.
    pub lane_step: usize,
}

/// Returns the iteration of a unit. A cube processes one row at a time; if a row has 32 lanes and
/// lanes are units (`planes`), each plane processes one. A unit is a lane, or iterates over the
/// lanes.
#[cube]
pub(super) fn row_walk(#[comptime] lanes: usize, #[comptime] planes: bool) -> RowWalk {
    let mut walk = RowWalk {
        row: CUBE_POS,
        step: CUBE_COUNT,
        lane: UNIT_POS as usize,
        lane_step: CUBE_DIM as usize,
    };
    if comptime!(planes) {
        walk.lane_step = lanes;
        if comptime!(lanes == 32) {
            let rows = CUBE_DIM as usize / 32usize;
            walk.row = CUBE_POS * rows + UNIT_POS as usize / 32usize;
            walk.step = CUBE_COUNT * rows;
            walk.lane = UNIT_POS as usize % 32usize;
        }
    }
    walk
}

/// Returns the largest of all values and `start`.
#[cube]
pub(super) fn largest(values: &Array<f32>, start: f32) -> f32 {
    let low = max(max(values[0], values[1]), max(values[2], values[3]));
    let high = max(max(values[4], values[5]), max(values[6], values[7]));
    max(start, max(low, high))
}

/// Loads a group of a lane's blocks, which are `lanes` apart, starting at `first`.
#[cube]
pub(super) fn load_group<F: Numeric, N: Size>(
    x: &mut [Vector<F, N>],
    row: usize,
    first: usize,
    size: RowSize,
    #[comptime] lanes: usize,
    #[comptime] rows: RowPlan,
) -> Array<Vector<F, N>> {
    let width = N::value();
    let vectors = comptime!(rows.vectors(width));
    let mut loaded = Array::<Vector<F, N>>::new(comptime!(GROUP * vectors));
    #[unroll]
    for g in 0..GROUP {
        let block = first + comptime!(g * lanes);
        if block * ROW_BLOCK < size.vocab {
            #[unroll]
            for v in 0..vectors {
                let index = vector_index(row, block, v, size.vectors, vectors, rows);
                loaded[comptime!(g * vectors + v)] = x[index];
            }
        }
    }
    loaded
}

/// Adds a group of blocks to a lane's sums.
#[cube]
fn fold_group<F: Numeric, N: Size>(
    lane: &mut Lane,
    loaded: &Array<Vector<F, N>>,
    first: usize,
    args: &CrossEntropyArgs,
    #[comptime] plan: CrossEntropyPlan,
) {
    let width = N::value();
    let vectors = comptime!(plan.rows.vectors(width));
    let conversion = comptime!(plan.conversion);
    #[unroll]
    for g in 0..GROUP {
        let column = (first + comptime!(g * plan.lanes)) * ROW_BLOCK;
        if column < args.vocab {
            let left = args.vocab - column;
            let start = comptime!(g * vectors);
            let fill = f32::reinterpret(NEGATIVE_INFINITY.runtime());
            let values = block_values::<F, N>(loaded, start, left, fill, plan.rows);
            let max = largest(&values, lane.max);
            let terms = exponentials(&values, max, conversion);
            let kept = exp(lane.max - max, conversion);
            lane.sum = fma(lane.sum, kept, block_sum(&terms), conversion);
            lane.max = max;
            if comptime!(plan.smoothing) {
                let addends = block_values::<F, N>(loaded, start, left, 0.0f32, plan.rows);
                lane.total += block_sum(&addends);
            }
        }
    }
}

/// Combines lanes that are units into the result of the row, which all of them receive.
#[cube]
pub(super) fn combine_planes(
    own: &Lane,
    shared: &mut Shared<[f32]>,
    #[comptime] lanes: usize,
    #[comptime] with_total: bool,
    #[comptime] conversion: Conversion,
) -> Lane {
    let planes = comptime!(lanes / 32);
    let plane = UNIT_POS as usize / 32usize;
    let lane = UNIT_POS as usize % 32usize;
    let mut max = plane_largest(own.max, conversion);
    if comptime!(planes > 1) {
        if lane == 0usize {
            shared[plane] = max;
        }
        sync_cube();
        let mine = shared[select(lane < planes, lane, 0usize)];
        max = plane_largest(mine, conversion);
    }
    let mut sum = plane_tree(own.sum * exp(own.max - max, conversion), conversion);
    let mut total = 0.0f32;
    if comptime!(with_total) {
        total = plane_tree(own.total, conversion);
    }
    if comptime!(planes > 1) {
        if lane == 0usize {
            shared[32usize + plane] = sum;
            if comptime!(with_total) {
                shared[64usize + plane] = total;
            }
        }
        sync_cube();
        let here = lane < planes;
        let index = select(here, lane, 0usize);
        sum = plane_tree(select(here, shared[32usize + index], 0.0f32), conversion);
        if comptime!(with_total) {
            total = plane_tree(select(here, shared[64usize + index], 0.0f32), conversion);
        }
    }
    Lane { max, sum, total }
}

/// Sums a power of two of entries from `start` on, in a tree that adds neighbors first.
#[cube]
pub(super) fn serial_tree(
    values: &mut Shared<[f32]>,
    start: usize,
    #[comptime] count: usize,
) -> f32 {
    let mut len = comptime!(count / 2).runtime();
    while len > 0usize {
        for i in 0..len {
            let sum = values[start + 2usize * i] + values[start + 2usize * i + 1usize];
            values[start + i] = sum;
        }
        len /= 2usize;
    }
    values[start]
}

/// Combines lanes that are entries of shared memory, with one unit. Each lane's maximum is at
/// `start`, followed by its sum at `start + lanes`. The first entry of each becomes that of the
/// row. Further sums relative to the same lane maximum, from `rescaled` on, are rescaled with it
/// but not added.
#[cube]
pub(super) fn combine_sums(
    shared: &mut Shared<[f32]>,
    #[comptime] start: usize,
    #[comptime] rescaled: Option<usize>,
    #[comptime] lanes: usize,
    #[comptime] conversion: Conversion,
) {
    let mut max = shared[start];
    for lane in 1..lanes {
        max = largest_of(max, shared[start + lane]);
    }
    for lane in 0..lanes {
        let factor = exp(shared[start + lane] - max, conversion);
        shared[comptime!(start + lanes) + lane] *= factor;
        if comptime!(rescaled.is_some()) {
            shared[comptime!(rescaled.unwrap_or(0)) + lane] *= factor;
        }
    }
    let sum = serial_tree(shared, comptime!(start + lanes), lanes);
    shared[comptime!(start + lanes)] = sum;
    shared[start] = max;
}

/// Combines lanes that are entries of shared memory into the result of the row. The entries are
/// each lane's maximum, then its sum, then its total.
#[cube]
fn combine_entries(shared: &mut Shared<[f32]>, #[comptime] plan: CrossEntropyPlan) -> Lane {
    let (lanes, conversion) = comptime!((plan.lanes, plan.conversion));
    sync_cube();
    if UNIT_POS == 0u32 {
        combine_sums(shared, 0usize, None, lanes, conversion);
        let total = serial_tree(shared, comptime!(2 * lanes), lanes);
        shared[comptime!(2 * lanes)] = total;
    }
    sync_cube();
    let row = Lane {
        max: shared[0],
        sum: shared[lanes],
        total: shared[comptime!(2 * lanes)],
    };
    sync_cube();
    row
}

#[cube]
fn largest_of(a: f32, b: f32) -> f32 {
    max(a, b)
}

/// Returns element `column` of the row that starts at vector `row`.
#[cube]
fn element<F: Numeric, N: Size>(
    x: &mut [Vector<F, N>],
    row: usize,
    column: usize,
    #[comptime] plan: RowPlan,
) -> f32 {
    let width = N::value();
    let per = comptime!(plan.per_scalar());
    let per_vector = comptime!(per * width);
    let vector = x[row + column / per_vector];
    let place = column % per_vector;
    let mut found = 0.0f32;
    #[unroll]
    for i in 0..per_vector {
        let word = u32::cast_from(vector.extract(comptime!(i / per)));
        let value = crate::cube::words::unpack(word, comptime!((i % per) as u32), plan.kind);
        found = select(place == i, value, found);
    }
    found
}

/// Coefficients of the gradient of a row.
#[derive(CubeType, Clone, Copy)]
struct Slope {
    /// The row's largest logit.
    max: f32,
    /// Factor of the exponentials.
    factor: f32,
    /// Value subtracted from every element.
    uniform: f32,
    /// Value subtracted from the target's element in addition.
    kept: f32,
    /// Target class.
    target: usize,
}

/// Replaces a group of blocks by its gradient, or by zeros if the row is ignored.
#[cube]
fn store_group<F: Numeric, N: Size>(
    x: &mut [Vector<F, N>],
    loaded: &Array<Vector<F, N>>,
    row: usize,
    first: usize,
    slope: &Slope,
    counted: bool,
    args: &CrossEntropyArgs,
    #[comptime] plan: CrossEntropyPlan,
) {
    let width = N::value();
    let vectors = comptime!(plan.rows.vectors(width));
    let conversion = comptime!(plan.conversion);
    #[unroll]
    for g in 0..GROUP {
        let block = first + comptime!(g * plan.lanes);
        let column = block * ROW_BLOCK;
        if column < args.vocab {
            let left = args.vocab - column;
            let mut values =
                block_values::<F, N>(loaded, comptime!(g * vectors), left, slope.max, plan.rows);
            #[unroll]
            for i in 0..ROW_BLOCK {
                let e = exp(values[i] - slope.max, conversion);
                let own = fma(e, slope.factor, -slope.uniform, conversion);
                values[i] = select(counted, own, 0.0f32);
            }
            if counted && slope.target / ROW_BLOCK == block {
                #[unroll]
                for i in 0..ROW_BLOCK {
                    let hit = slope.target - column == i;
                    values[i] -= select(hit, slope.kept, 0.0f32);
                }
            }
            #[unroll]
            for v in 0..vectors {
                let index = block * vectors + v;
                if comptime!(plan.rows.whole) || index < args.row_vectors {
                    x[row + index] = block_vector::<F, N>(&values, v, conversion, plan.rows);
                }
            }
        }
    }
}

/// Computes the loss of each row and optionally replaces the logits by their gradient. A cube
/// processes one row at a time; if a row has 32 lanes and lanes are units, each plane processes
/// one.
///
/// The second pass rereads the logits that do not stay in shared memory, from the last to the
/// first: the L2 cache then still has most of them.
#[allow(
    clippy::collapsible_if,
    reason = "a comptime condition is decided before the other"
)]
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn cross_entropy_kernel<F: Numeric, N: Size>(
    x: &mut [Vector<F, N>],
    targets: &[u32],
    scale: &[f32],
    losses: &mut [f32],
    args: CrossEntropyArgs,
    #[comptime] plan: CrossEntropyPlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let vectors = comptime!(plan.rows.vectors(width));
    let (lanes, conversion) = comptime!((plan.lanes, plan.conversion));
    let per_group = comptime!(GROUP * lanes);
    let mut shared: Shared<[f32]> =
        Shared::new_slice(comptime!(if plan.planes { 96 } else { 3 * lanes }));
    let mut held: Shared<[Vector<F, N>]> = Shared::new_slice(comptime!(if plan.held > 0 {
        plan.held * per_group * vectors
    } else {
        1
    }));
    let walk = row_walk(lanes, plan.planes);
    let (first_lane, lane_step) = (walk.lane, walk.lane_step);
    let mut row = walk.row;
    let size = RowSize {
        vocab: args.vocab,
        vectors: args.row_vectors,
    };
    let blocks = (args.vocab + comptime!(ROW_BLOCK - 1)) / ROW_BLOCK;
    let groups = (blocks + comptime!(per_group - 1)) / per_group;
    while row < args.rows {
        let start = row * args.row_vectors;
        let target = targets[row];
        let counted = target != args.ignore;
        let valid = (target as usize) < args.vocab;
        let mut slope = Slope {
            max: 0.0f32.runtime(),
            factor: 0.0f32.runtime(),
            uniform: 0.0f32.runtime(),
            kept: 0.0f32.runtime(),
            target: target as usize,
        };
        let mut loss = 0.0f32;
        if counted {
            let at = element::<F, N>(x, start, select(valid, target as usize, 0usize), plan.rows);
            let mut own = Lane {
                max: f32::reinterpret(LOWEST.runtime()),
                sum: 0.0f32.runtime(),
                total: 0.0f32.runtime(),
            };
            let mut lane = first_lane;
            while lane < lanes {
                own.max = f32::reinterpret(LOWEST.runtime());
                own.sum = 0.0f32;
                own.total = 0.0f32;
                for group in 0..groups {
                    let first = group * per_group + lane;
                    let loaded = load_group::<F, N>(x, start, first, size, lanes, plan.rows);
                    if comptime!(plan.held > 0 && plan.gradient) {
                        if group < plan.held {
                            #[unroll]
                            for g in 0..GROUP {
                                #[unroll]
                                for v in 0..vectors {
                                    let block = first + comptime!(g * lanes);
                                    held[block * vectors + v] = loaded[comptime!(g * vectors + v)];
                                }
                            }
                        }
                    }
                    fold_group::<F, N>(&mut own, &loaded, first, &args, plan);
                }
                if comptime!(!plan.planes) {
                    shared[lane] = own.max;
                    shared[lanes + lane] = own.sum;
                    shared[comptime!(2 * lanes) + lane] = own.total;
                }
                lane += lane_step;
            }
            let whole = if comptime!(plan.planes) {
                combine_planes(&own, &mut shared, lanes, plan.smoothing, conversion)
            } else {
                combine_entries(&mut shared, plan)
            };
            let lse = whole.max + ln(whole.sum, conversion);
            let kept = 1.0f32 - args.smoothing;
            loss = kept * (lse - at);
            if comptime!(plan.smoothing) {
                let mean_below = fma(whole.total, -args.spread, lse, conversion);
                loss = fma(args.smoothing, mean_below, loss, conversion);
            }
            loss = fma(args.z_loss * lse, lse, loss, conversion);
            let nan = f32::reinterpret(0x7FC0_0000u32.runtime());
            loss = select(valid, loss, nan);
            let scale = scale[0];
            let by_lse = fma(2.0f32 * args.z_loss, lse, 1.0f32, conversion);
            let factor = (by_lse * scale) * reciprocal(whole.sum, conversion);
            slope.max = whole.max;
            slope.factor = select(valid, factor, nan);
            slope.uniform = (args.smoothing * args.spread) * scale;
            slope.kept = kept * scale;
        }
        if first_lane == 0usize {
            losses[row] = loss;
        }
        if comptime!(plan.gradient) {
            let mut lane = first_lane;
            while lane < lanes {
                let mut turn = groups;
                while turn > 0usize {
                    turn -= 1usize;
                    let first = turn * per_group + lane;
                    if comptime!(plan.held > 0) {
                        if turn < plan.held {
                            let mut loaded = Array::<Vector<F, N>>::new(comptime!(GROUP * vectors));
                            #[unroll]
                            for g in 0..GROUP {
                                #[unroll]
                                for v in 0..vectors {
                                    let block = first + comptime!(g * lanes);
                                    loaded[comptime!(g * vectors + v)] = held[block * vectors + v];
                                }
                            }
                            store_group::<F, N>(
                                x, &loaded, start, first, &slope, counted, &args, plan,
                            );
                        } else {
                            let loaded =
                                load_group::<F, N>(x, start, first, size, lanes, plan.rows);
                            store_group::<F, N>(
                                x, &loaded, start, first, &slope, counted, &args, plan,
                            );
                        }
                    } else {
                        let loaded = load_group::<F, N>(x, start, first, size, lanes, plan.rows);
                        store_group::<F, N>(x, &loaded, start, first, &slope, counted, &args, plan);
                    }
                }
                lane += lane_step;
            }
        }
        row += walk.step;
    }
}

/// Counts the targets that are not ignored, with one cube. `out` becomes `1 / count` (0 for none),
/// or 1 for the sum of losses.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn target_scale_kernel(
    targets: &[u32],
    out: &mut [f32],
    rows: usize,
    ignore: u32,
    #[comptime] mean: bool,
    #[comptime] conversion: Conversion,
    #[comptime] units: usize,
) {
    if comptime!(mean) {
        let mut counts: Shared<[u32]> = Shared::new_slice(units);
        let unit = UNIT_POS as usize;
        let mut count = 0u32;
        let mut row = unit;
        while row < rows {
            count += u32::cast_from(targets[row] != ignore);
            row += units;
        }
        counts[unit] = count;
        let mut len = comptime!(units / 2).runtime();
        while len > 0usize {
            sync_cube();
            if unit < len {
                counts[unit] += counts[unit + len];
            }
            len /= 2usize;
        }
        sync_cube();
        if unit == 0usize {
            let all = f32::cast_from(max(counts[0], 1u32));
            out[0] = select(counts[0] == 0u32, 0.0f32, reciprocal(all, conversion));
        }
    } else if UNIT_POS == 0u32 {
        out[0] = 1.0f32;
    }
}

/// Sums the losses of rows, with one cube; see
/// [`reference::sum_losses`](crate::reference::sum_losses).
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn sum_losses_kernel(losses: &[f32], scale: &[f32], out: &mut [f32], rows: usize) {
    let mut sums: Shared<[f32]> = Shared::new_slice(LOSS_LANES);
    let unit = UNIT_POS as usize;
    let mut lane = unit;
    while lane < LOSS_LANES {
        let mut sum = 0.0f32;
        let mut row = lane;
        while row < rows {
            sum += losses[row];
            row += LOSS_LANES;
        }
        sums[lane] = sum;
        lane += CUBE_DIM as usize;
    }
    let mut len = comptime!(LOSS_LANES / 2).runtime();
    while len > 0usize {
        sync_cube();
        let mut i = unit;
        while i < len {
            sums[i] += sums[i + len];
            i += CUBE_DIM as usize;
        }
        len /= 2usize;
    }
    sync_cube();
    if unit == 0usize {
        out[0] = sums[0] * scale[0];
    }
}

/// Multiplies every element by `factor[0]`; if that is 1, nothing is read or written.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scale_kernel<F: Numeric, N: Size>(
    x: &mut [Vector<F, N>],
    factor: &[f32],
    blocks: usize,
    len: usize,
    #[comptime] conversion: Conversion,
    #[comptime] plan: RowPlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let vectors = comptime!(plan.vectors(width));
    let row_vectors = len / comptime!(plan.per_scalar() * width);
    let factor = factor[0];
    let mut block = ABSOLUTE_POS;
    if factor == 1.0f32 {
        block = blocks;
    }
    while block < blocks {
        let mut loaded = Array::<Vector<F, N>>::new(vectors);
        #[unroll]
        for v in 0..vectors {
            loaded[v] = x[vector_index(0usize, block, v, row_vectors, vectors, plan)];
        }
        let left = len - block * ROW_BLOCK;
        let mut values = block_values::<F, N>(&loaded, 0usize, left, 0.0f32, plan);
        #[unroll]
        for i in 0..ROW_BLOCK {
            values[i] *= factor;
        }
        #[unroll]
        for v in 0..vectors {
            let index = block * vectors + v;
            if comptime!(plan.whole) || index < row_vectors {
                x[index] = block_vector::<F, N>(&values, v, conversion, plan);
            }
        }
        block += CUBE_COUNT * CUBE_DIM as usize;
    }
}
