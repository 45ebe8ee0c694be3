//! Kernel of the KL divergence; see [`reference`](crate::reference::kl_divergence_rows).

use cubecl::prelude::*;

use super::kernel::{
    GROUP, LOWEST, Lane, NEGATIVE_INFINITY, RowSize, combine_planes, combine_sums, exp,
    exponentials, largest, load_group, row_walk, serial_tree,
};
use crate::cube::{
    activation::ln,
    codec::Conversion,
    exact::{fma, reciprocal},
    row_blocks::{ROW_BLOCK, RowPlan, block_sum, block_values, block_vector},
};

/// Comptime choices of [`kl_divergence_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KlDivergencePlan {
    /// Lanes that share a row: [`cross_entropy_lanes`](crate::reference::cross_entropy_lanes).
    pub lanes: usize,
    /// True if each lane is a unit, in planes of 32; otherwise a unit processes the lanes one by
    /// one.
    pub planes: bool,
    /// True if the student's logits are replaced by their gradient.
    pub gradient: bool,
    /// Load plan of rows.
    pub rows: RowPlan,
    /// Method of computing exponentials.
    pub conversion: Conversion,
}

/// Sizes and factors of a KL divergence.
#[derive(CubeType, CubeLaunch)]
pub struct KlDivergenceArgs {
    /// Number of rows of logits.
    pub rows: usize,
    /// Logits per row.
    pub vocab: usize,
    /// Vectors per row.
    pub row_vectors: usize,
    /// Target of rows that are ignored.
    pub ignore: u32,
    /// Temperature.
    pub temperature: f32,
    /// Reciprocal of the temperature.
    pub inverse: f32,
}

/// Student and teacher of a row. The teacher's total is the sum of its exponentials times the
/// differences of the logits.
#[derive(CubeType)]
struct Pair {
    student: Lane,
    teacher: Lane,
}

#[cube]
fn no_lane() -> Lane {
    Lane {
        max: f32::reinterpret(LOWEST.runtime()),
        sum: 0.0f32.runtime(),
        total: 0.0f32.runtime(),
    }
}

#[cube]
fn clear(lane: &mut Lane) {
    lane.max = f32::reinterpret(LOWEST.runtime());
    lane.sum = 0.0f32;
    lane.total = 0.0f32;
}

/// Returns the logits of a block divided by the temperature; negative infinity past the end of the
/// row.
#[cube]
fn scaled<F: Numeric, N: Size>(
    loaded: &Array<Vector<F, N>>,
    #[comptime] start: usize,
    left: usize,
    inverse: f32,
    #[comptime] rows: RowPlan,
) -> Array<f32> {
    let fill = f32::reinterpret(NEGATIVE_INFINITY.runtime());
    let mut values = block_values::<F, N>(loaded, start, left, fill, rows);
    #[unroll]
    for i in 0..ROW_BLOCK {
        values[i] *= inverse;
    }
    values
}

/// Adds a group of blocks to a lane of both models.
#[cube]
fn fold_group<F: Numeric, N: Size>(
    pair: &mut Pair,
    student: &Array<Vector<F, N>>,
    teacher: &Array<Vector<F, N>>,
    first: usize,
    args: &KlDivergenceArgs,
    #[comptime] plan: KlDivergencePlan,
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
            let own = scaled::<F, N>(student, start, left, args.inverse, plan.rows);
            let max = largest(&own, pair.student.max);
            let kept = exp(pair.student.max - max, conversion);
            let sum = block_sum(&exponentials(&own, max, conversion));
            pair.student.sum = fma(pair.student.sum, kept, sum, conversion);
            pair.student.max = max;
            let other = scaled::<F, N>(teacher, start, left, args.inverse, plan.rows);
            let max = largest(&other, pair.teacher.max);
            let kept = exp(pair.teacher.max - max, conversion);
            let terms = exponentials(&other, max, conversion);
            let mut products = Array::<f32>::new(ROW_BLOCK);
            #[unroll]
            for i in 0..ROW_BLOCK {
                // Past the end of the row both are infinite.
                let product = terms[i] * (other[i] - own[i]);
                products[i] = select(terms[i] == 0.0f32, 0.0f32, product);
            }
            let teacher = &mut pair.teacher;
            teacher.sum = fma(teacher.sum, kept, block_sum(&terms), conversion);
            teacher.total = fma(teacher.total, kept, block_sum(&products), conversion);
            teacher.max = max;
        }
    }
}

/// Combines lanes that are units into the result of the row, which all of them receive.
#[cube]
fn combine_units(
    own: &Pair,
    shared: &mut Shared<[f32]>,
    #[comptime] plan: KlDivergencePlan,
) -> Pair {
    let (lanes, conversion) = comptime!((plan.lanes, plan.conversion));
    let student = combine_planes(&own.student, shared, lanes, false, conversion);
    let sum = combine_planes(&own.teacher, shared, lanes, false, conversion);
    // The total is rescaled like the sum.
    let total = Lane {
        max: own.teacher.max,
        sum: own.teacher.total,
        total: 0.0f32.runtime(),
    };
    let total = combine_planes(&total, shared, lanes, false, conversion);
    Pair {
        student,
        teacher: Lane {
            max: sum.max,
            sum: sum.sum,
            total: total.sum,
        },
    }
}

/// Combines lanes that are entries of shared memory into the result of the row. The entries are
/// each lane's maximum and sum of the student, then those of the teacher, then the teacher's
/// totals.
#[cube]
fn combine_entries(shared: &mut Shared<[f32]>, #[comptime] plan: KlDivergencePlan) -> Pair {
    let (lanes, conversion) = comptime!((plan.lanes, plan.conversion));
    sync_cube();
    if UNIT_POS == 0u32 {
        let (teacher, total) = comptime!((2 * lanes, Some(4 * lanes)));
        combine_sums(shared, 0usize, None, lanes, conversion);
        combine_sums(shared, teacher, total, lanes, conversion);
        let total = serial_tree(shared, comptime!(4 * lanes), lanes);
        shared[comptime!(4 * lanes)] = total;
    }
    sync_cube();
    let row = Pair {
        student: Lane {
            max: shared[0],
            sum: shared[lanes],
            total: 0.0f32.runtime(),
        },
        teacher: Lane {
            max: shared[comptime!(2 * lanes)],
            sum: shared[comptime!(3 * lanes)],
            total: shared[comptime!(4 * lanes)],
        },
    };
    sync_cube();
    row
}

/// Coefficients of the gradient of a row.
#[derive(CubeType, Clone, Copy)]
struct Slope {
    /// Largest logit of the student.
    student: f32,
    /// Largest logit of the teacher.
    teacher: f32,
    /// Factor of the student's exponentials.
    of_student: f32,
    /// Factor of the teacher's exponentials.
    of_teacher: f32,
    /// True if the row counts.
    counted: bool,
}

/// Replaces a group of the student's blocks by its gradient.
#[cube]
fn store_group<F: Numeric, N: Size>(
    student: &mut [Vector<F, N>],
    own: &Array<Vector<F, N>>,
    other: &Array<Vector<F, N>>,
    row: usize,
    first: usize,
    slope: &Slope,
    args: &KlDivergenceArgs,
    #[comptime] plan: KlDivergencePlan,
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
            let start = comptime!(g * vectors);
            let mut own = scaled::<F, N>(own, start, left, args.inverse, plan.rows);
            let other = scaled::<F, N>(other, start, left, args.inverse, plan.rows);
            #[unroll]
            for i in 0..ROW_BLOCK {
                let q = exp(own[i] - slope.student, conversion);
                let p = exp(other[i] - slope.teacher, conversion) * slope.of_teacher;
                let gradient = fma(q, slope.of_student, -p, conversion);
                own[i] = select(slope.counted, gradient, 0.0f32);
            }
            #[unroll]
            for v in 0..vectors {
                let index = block * vectors + v;
                if comptime!(plan.rows.whole) || index < args.row_vectors {
                    student[row + index] = block_vector::<F, N>(&own, v, conversion, plan.rows);
                }
            }
        }
    }
}

/// Computes the loss of each row and optionally replaces the student's logits by their gradient. A
/// cube processes one row at a time; if a row has 32 lanes and lanes are units, each plane
/// processes one. Both matrices are read twice, the second time from the last group to the first:
/// the L2 cache then still has most of them. `teacher` is not written.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn kl_divergence_kernel<F: Numeric, N: Size>(
    student: &mut [Vector<F, N>],
    teacher: &mut [Vector<F, N>],
    targets: &[u32],
    scale: &[f32],
    losses: &mut [f32],
    args: KlDivergenceArgs,
    #[comptime] plan: KlDivergencePlan,
    #[define(F)] _storage: ElemType,
) {
    let (lanes, conversion) = comptime!((plan.lanes, plan.conversion));
    let per_group = comptime!(GROUP * lanes);
    let mut shared: Shared<[f32]> =
        Shared::new_slice(comptime!(if plan.planes { 96 } else { 5 * lanes }));
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
        let mut slope = Slope {
            student: 0.0f32.runtime(),
            teacher: 0.0f32.runtime(),
            of_student: 0.0f32.runtime(),
            of_teacher: 0.0f32.runtime(),
            counted: targets[row] != args.ignore,
        };
        let mut loss = 0.0f32;
        if slope.counted {
            let mut own = Pair {
                student: no_lane(),
                teacher: no_lane(),
            };
            let mut lane = first_lane;
            while lane < lanes {
                clear(&mut own.student);
                clear(&mut own.teacher);
                for group in 0..groups {
                    let first = group * per_group + lane;
                    let q = load_group::<F, N>(student, start, first, size, lanes, plan.rows);
                    let p = load_group::<F, N>(teacher, start, first, size, lanes, plan.rows);
                    fold_group::<F, N>(&mut own, &q, &p, first, &args, plan);
                }
                if comptime!(!plan.planes) {
                    shared[lane] = own.student.max;
                    shared[lanes + lane] = own.student.sum;
                    shared[comptime!(2 * lanes) + lane] = own.teacher.max;
                    shared[comptime!(3 * lanes) + lane] = own.teacher.sum;
                    shared[comptime!(4 * lanes) + lane] = own.teacher.total;
                }
                lane += lane_step;
            }
            let whole = if comptime!(plan.planes) {
                combine_units(&own, &mut shared, plan)
            } else {
                combine_entries(&mut shared, plan)
            };
            let (q, p) = (&whole.student, &whole.teacher);
            let below = (q.max + ln(q.sum, conversion)) - (p.max + ln(p.sum, conversion));
            let inverse = reciprocal(p.sum, conversion);
            let divergence = fma(p.total, inverse, below, conversion);
            loss = (args.temperature * args.temperature) * divergence;
            let size = args.temperature * scale[0];
            slope.student = q.max;
            slope.teacher = p.max;
            slope.of_student = size * reciprocal(q.sum, conversion);
            slope.of_teacher = size * inverse;
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
                    let q = load_group::<F, N>(student, start, first, size, lanes, plan.rows);
                    let p = load_group::<F, N>(teacher, start, first, size, lanes, plan.rows);
                    store_group::<F, N>(student, &q, &p, start, first, &slope, &args, plan);
                }
                lane += lane_step;
            }
        }
        row += walk.step;
    }
}
