//! Attention of a few new tokens over the cache. Each cube computes the partial result of a run of
//! the keys; the cube that finishes the last run of its rows sums them.

use cubecl::prelude::*;

use super::append::{CacheShape, Element, Extent, NewTokens, Seen, larger, turned, uncached};
use super::merge::{DecodeOutput, RowBlock, merge_runs};
use super::plan::DecodePlan;
use super::run::Run;
use super::tile::{Staged, Tile, wait_for_tile};
use crate::{
    attention::scalar::math::{exp_or_nan, product, tanh},
    cube::{
        arrival::is_last_cube,
        codec::{MAGNITUDE, load},
        exact::fma,
        overlap::{let_next_begin, wait_for_previous, written_before},
        plane::plane_largest,
    },
    reference::attention::DECODE_TILE,
};

/// Values that a unit loads before it adds the first one.
const AT_ONCE: usize = 8;

/// Position of a unit within its team.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Member {
    /// Index of the unit within the team.
    unit: u32,
    /// Number of units of the team.
    units: u32,
    /// First row of the team.
    first_row: usize,
}

#[cube]
impl Member {
    fn new(#[comptime] plan: DecodePlan) -> Member {
        if comptime!(plan.teams > 1) {
            let units = comptime!(DECODE_TILE as u32);
            Member {
                unit: UNIT_POS % units,
                units: units.runtime(),
                first_row: (UNIT_POS / units) as usize * comptime!(plan.own_rows()),
            }
        } else {
            Member {
                unit: UNIT_POS,
                units: CUBE_DIM,
                first_row: 0usize.runtime(),
            }
        }
    }
}

/// Keys that each query of a team sees: from `first` up to `end` (exclusive).
#[derive(CubeType)]
struct Sight {
    first: Array<u32>,
    end: Array<u32>,
}

#[cube]
impl Sight {
    /// Returns the keys seen by the queries of a team, whose first query is row `first_row` of a
    /// head of keys.
    fn new(
        own: &Extent,
        shape: &CacheShape,
        first_row: u32,
        #[comptime] plan: DecodePlan,
    ) -> Sight {
        let rows = comptime!(plan.own_rows());
        let mut sight = Sight {
            first: Array::new(rows),
            end: Array::new(rows),
        };
        #[unroll(plan.unroll)]
        for r in 0..rows {
            let seen = Seen::of(own, shape, first_row + r as u32);
            sight.first[r] = seen.first;
            sight.end[r] = seen.end;
        }
        sight
    }

    /// True if query `r` of the team sees key `key`.
    fn sees(&self, r: usize, key: u32) -> bool {
        key >= self.first[r] && key < self.end[r]
    }
}

/// Shared memory of a cube.
#[derive(CubeType)]
struct Stage {
    /// Queries, `[rows, head]`.
    queries: Shared<[f32]>,
    /// Scores, later weights, of a tile, `[rows, DECODE_TILE]`.
    weights: Shared<[f32]>,
    /// Largest score of each segment of a tile, `[rows, segments]`.
    segments: Shared<[f32]>,
    /// Weighted values summed per slice: vectors `[row, element, slice, column]`.
    values: Shared<[f32]>,
    /// Sums of weights per slice, `[rows, slices]`.
    sums: Shared<[f32]>,
    /// Accumulated output of the run, `[row, element, column]`.
    out: Shared<[f32]>,
    /// Largest score of the run before an even tile and before an odd tile, and the sum of weights,
    /// `[3, rows]`.
    state: Shared<[f32]>,
}

/// Computes partial attention of all queries that read one head of keys, over one run of the keys,
/// after writing the run's new keys and values. The cube that finishes the last run of a block of
/// rows sums the partial results. Cubes are `[run, block of rows of a head of keys, sequence]`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn decode_run_kernel<F: Numeric, C: Numeric, N: Size>(
    new: NewTokens<F>,
    k_cache: &mut [Vector<C, N>],
    v_cache: &mut [Vector<C, N>],
    shape: CacheShape,
    output: &mut DecodeOutput<F>,
    #[comptime] plan: DecodePlan,
    #[define(F)] _storage: ElemType,
    #[define(C)] _cached: ElemType,
) {
    let mut stage = Stage {
        queries: Shared::new_aligned_slice(comptime!(plan.rows * plan.head), 16usize),
        weights: Shared::new_slice(comptime!(plan.rows * DECODE_TILE)),
        segments: Shared::new_slice(comptime!(plan.rows * plan.segments())),
        values: Shared::new_slice(comptime!(plan.rows * plan.width * plan.pitch())),
        sums: Shared::new_slice(comptime!(plan.rows * plan.slices())),
        out: Shared::new_slice(comptime!(plan.rows * plan.head)),
        state: Shared::new_slice(comptime!(3 * plan.rows)),
    };
    let mut keys = Staged::<C, N>::new(plan);
    let mut values = Staged::<C, N>::new(plan);
    let mut verdict = Shared::<[u32]>::new_slice(1usize);
    let_next_begin(plan.overlaps);
    written_before(&new.q.data, plan.overlaps);
    written_before(&new.k.data, plan.overlaps);
    written_before(&new.v.data, plan.overlaps);
    let run = Run::new::<F>(&new, &shape, plan);
    let own = run.own;
    // Without any runs there is nothing to wait for.
    let mut is_last = own.runs == 0u32 && run.index == 0u32;
    if run.index < own.runs {
        let mut tile_at = run.first_tile(&shape, plan);
        let member = Member::new(plan);
        let first_row = run.block.first_row + member.first_row as u32;
        let sight = Sight::new(&own, &shape, first_row, plan);
        // The cached keys are loaded while the new tokens are read and rotated.
        keys.copy(k_cache, &tile_at, run.old(&tile_at), plan);
        values.copy(v_cache, &tile_at, run.old(&tile_at), plan);
        wait_for_previous(plan.overlaps);
        run.write_new::<F, C, N>(&new, k_cache, v_cache, &shape, &mut keys, &mut values, plan);
        begin::<F>(&new, &shape, &own, &mut stage, run.block, plan);
        let mut odd = 0u32;
        while tile_at.first < run.last {
            let next = run.next_tile(&tile_at);
            wait_for_tile(plan);
            sync_cube();
            score_tile::<C, N>(
                &keys, k_cache, &shape, &mut stage, &tile_at, &sight, member, plan,
            );
            sync_cube();
            keys.copy(k_cache, &next, next.count, plan);
            if comptime!(!plan.planes) {
                highest_of_segments(&mut stage, &tile_at, &sight, plan);
                sync_cube();
            }
            weigh(&mut stage, &tile_at, &sight, member, plan);
            wait_for_tile(plan);
            sync_cube();
            add_values::<C, N>(&values, v_cache, &shape, &mut stage, &tile_at, member, plan);
            sync_cube();
            values.copy(v_cache, &next, next.count, plan);
            merge_tile(&mut stage, odd, plan);
            odd = 1u32 - odd;
            tile_at.base = next.base;
            tile_at.count = next.count;
            tile_at.first = next.first;
        }
        sync_cube();
        let part = run.block.part(&shape, run.index, plan);
        write_part::<F>(output, &stage, part, odd, plan);
        is_last = is_last_cube(
            &mut output.finished,
            run.block.index,
            own.runs,
            &mut verdict,
            plan.concurrent,
        );
    } else if run.index == 0u32 {
        // Without this wait the kernel could end before the previous one. Other cubes without a run
        // need not wait.
        wait_for_previous(plan.overlaps);
    }
    if is_last {
        merge_runs::<F>(
            output,
            &mut stage.values,
            &shape,
            &own,
            run.block,
            new.time,
            plan,
        );
    }
}

/// Writes the finished run of this cube to the partial results from `first` on.
#[cube]
fn write_part<F: Numeric>(
    output: &mut DecodeOutput<F>,
    stage: &Stage,
    first: usize,
    odd: u32,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.rows as u32);
    let columns = comptime!(plan.columns() as u32);
    let length = comptime!(plan.part() as u32);
    let width = comptime!(plan.width as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.part()) as u32) {
        let row = item / length;
        let d = item % length;
        let mut value = stage.state[(2u32 * rows + row) as usize];
        if d < comptime!(plan.head as u32) {
            let of_row = row * comptime!(plan.head as u32);
            value = stage.out[(of_row + d % width * columns + d / width) as usize];
        } else if d == comptime!(plan.head as u32) {
            value = stage.state[(odd * rows + row) as usize];
        }
        output.parts[first + item as usize] = value;
        item += CUBE_DIM;
    }
}

/// Loads the queries into shared memory, with zeros for missing ones, and initializes the run.
#[cube]
fn begin<F: Numeric>(
    new: &NewTokens<F>,
    shape: &CacheShape,
    own: &Extent,
    stage: &mut Stage,
    block: RowBlock,
    #[comptime] plan: DecodePlan,
) {
    let head = comptime!(plan.head as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.head) as u32) {
        let row = block.first_row + item / head;
        let t = row / shape.group;
        let mut value = 0.0f32;
        if t < new.time {
            let token = block.sequence * new.time + t;
            let index = block.kv_head * shape.group + row % shape.group;
            let of = Element {
                token,
                index,
                position: min(own.start + t, new.positions - 1u32),
            };
            let stored = turned::<F>(&new.q, &new.cos, &new.sin, of, item % head, plan);
            value = load::<F>(stored, plan.kind);
        }
        stage.queries[item as usize] = value;
        stage.out[item as usize] = 0.0f32;
        item += CUBE_DIM;
    }
    let mut row = UNIT_POS;
    while row < comptime!(plan.rows as u32) {
        stage.state[row as usize] = f32::new(comptime!(f32::MIN));
        stage.state[(comptime!(2 * plan.rows as u32) + row) as usize] = 0.0f32;
        row += CUBE_DIM;
    }
}

/// Computes the scores of a tile, one key per unit at a time. With planes, also computes the
/// largest score within each plane.
#[cube]
fn score_tile<C: Numeric, N: Size>(
    keys: &Staged<C, N>,
    k_cache: &mut [Vector<C, N>],
    shape: &CacheShape,
    stage: &mut Stage,
    tile: &Tile,
    sight: &Sight,
    member: Member,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.own_rows());
    let columns = comptime!(plan.columns());
    let mut highest = Array::<f32>::new(rows);
    #[unroll(plan.unroll)]
    for r in 0..rows {
        highest[r] = f32::new(comptime!(f32::MIN));
    }
    let mut key = member.unit;
    while key < tile.count {
        let mut sums = Array::<f32>::new(comptime!(4 * plan.own_rows()));
        #[unroll(plan.unroll)]
        for i in 0..comptime!(4 * plan.own_rows()) {
            sums[i] = 0.0f32;
        }
        #[unroll(plan.unroll)]
        for c in 0..columns {
            let vector = keys.vector(k_cache, tile, key, c as u32, plan);
            #[unroll]
            for e in 0..N::value() {
                let k = uncached::<C>(vector.extract(e), shape.k_scale, plan);
                #[unroll(plan.unroll)]
                for r in 0..rows {
                    let of_row = (member.first_row + r) * comptime!(plan.head);
                    let q = stage.queries[of_row + c * comptime!(plan.width) + e];
                    let to = r * 4usize + comptime!(e % 4);
                    sums[to] = fma(q, k, sums[to], plan.conversion);
                }
            }
        }
        #[unroll(plan.unroll)]
        for r in 0..rows {
            let low = sums[r * 4usize] + sums[r * 4usize + 1usize];
            let high = sums[r * 4usize + 2usize] + sums[r * 4usize + 3usize];
            let scaled = product(low + high, shape.scale, plan.conversion);
            let mut score = scaled;
            if comptime!(plan.softcap) {
                let t = tanh(scaled * shape.inverse_cap, plan.conversion);
                score = product(shape.softcap, t, plan.conversion);
            }
            let of_row = (member.first_row + r) * comptime!(DECODE_TILE);
            stage.weights[of_row + key as usize] = score;
            let above = larger(highest[r], score);
            highest[r] = select(sight.sees(r, tile.first + key), above, highest[r]);
        }
        key += member.units;
    }
    if comptime!(plan.planes) {
        #[unroll]
        for r in 0..rows {
            let of_plane = plane_largest(highest[r], plan.conversion);
            if UNIT_POS & 31u32 == 0u32 {
                let of_row = (member.first_row + r) * comptime!(plan.segments());
                stage.segments[of_row + member.unit as usize / 32usize] = of_plane;
            }
        }
    }
}

/// Turns the scores of a tile into weights, relative to the largest score of the tile.
#[cube]
fn weigh(
    stage: &mut Stage,
    tile: &Tile,
    sight: &Sight,
    member: Member,
    #[comptime] plan: DecodePlan,
) {
    #[unroll(plan.unroll)]
    for r in 0..comptime!(plan.own_rows()) {
        let row = member.first_row + r;
        let highest = highest_of_tile(&stage.segments, row, plan);
        let mut key = member.unit;
        while key < tile.count {
            let place = row * comptime!(DECODE_TILE) + key as usize;
            let difference = stage.weights[place] - highest;
            let weight = exp_or_nan(difference, plan.conversion);
            let seen = sight.sees(r, tile.first + key);
            stage.weights[place] = select(seen, weight, 0.0f32);
            key += member.units;
        }
    }
}

/// Computes the largest visible score of each segment of a tile.
#[cube]
fn highest_of_segments(
    stage: &mut Stage,
    tile: &Tile,
    sight: &Sight,
    #[comptime] plan: DecodePlan,
) {
    let segments = comptime!(plan.segments() as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.segments()) as u32) {
        let row = (item / segments) as usize;
        let segment = item % segments;
        let mut highest = f32::new(comptime!(f32::MIN));
        for i in 0..comptime!((DECODE_TILE / plan.segments()) as u32) {
            let key = i * segments + segment;
            if key < tile.count && sight.sees(row, tile.first + key) {
                let score = stage.weights[row * comptime!(DECODE_TILE) + key as usize];
                highest = larger(highest, score);
            }
        }
        stage.segments[item as usize] = highest;
        item += CUBE_DIM;
    }
}

/// Returns the largest score of row `row` in a tile.
#[cube]
fn highest_of_tile(segments: &Shared<[f32]>, row: usize, #[comptime] plan: DecodePlan) -> f32 {
    let count = comptime!(plan.segments());
    let mut highest = f32::new(comptime!(f32::MIN));
    #[unroll]
    for i in 0..count {
        highest = larger(highest, segments[row * count + i]);
    }
    highest
}

/// Computes the weighted values of a tile: each unit has one vector of the keys of one slice at a
/// time.
#[cube]
fn add_values<C: Numeric, N: Size>(
    staged: &Staged<C, N>,
    v_cache: &mut [Vector<C, N>],
    shape: &CacheShape,
    stage: &mut Stage,
    tile: &Tile,
    member: Member,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.own_rows());
    let width = comptime!(plan.width);
    let columns = comptime!(plan.columns() as u32);
    let slices = comptime!(plan.slices() as u32);
    let mut item = member.unit;
    while item < slices * columns {
        let slice = item / columns;
        let column = item % columns;
        let mut values = Array::<f32>::new(comptime!(plan.own_rows() * plan.width));
        let mut sums = Array::<f32>::new(rows);
        #[unroll(plan.unroll)]
        for r in 0..rows {
            sums[r] = 0.0f32;
            #[unroll]
            for e in 0..width {
                values[r * width + e] = 0.0f32;
            }
        }
        let mut first = slice;
        while first < tile.count {
            let mut loaded = Array::<Vector<C, N>>::new(AT_ONCE);
            // Several loads are in flight at a time. Keys past the last one read the last key and
            // are not added.
            #[unroll(plan.unroll)]
            for i in 0..AT_ONCE {
                let key = min(first + i as u32 * slices, tile.count - 1u32);
                loaded[i] = staged.vector(v_cache, tile, key, column, plan);
            }
            #[unroll(plan.unroll)]
            for i in 0..AT_ONCE {
                let key = first + i as u32 * slices;
                if key < tile.count {
                    let vector = loaded[i];
                    #[unroll(plan.unroll)]
                    for r in 0..rows {
                        let of_row = (member.first_row + r) * comptime!(DECODE_TILE);
                        let weight = stage.weights[of_row + key as usize];
                        sums[r] += weight;
                        if (u32::reinterpret(weight) & MAGNITUDE) != 0u32 {
                            #[unroll]
                            for e in 0..width {
                                let v = uncached::<C>(vector.extract(e), shape.v_scale, plan);
                                let to = r * width + e;
                                values[to] = fma(weight, v, values[to], plan.conversion);
                            }
                        }
                    }
                }
            }
            first += comptime!(AT_ONCE as u32) * slices;
        }
        #[unroll(plan.unroll)]
        for r in 0..rows {
            let row = member.first_row + r;
            #[unroll]
            for e in 0..width {
                let place = (row * width + e) * comptime!(plan.pitch()) + item as usize;
                stage.values[place] = values[r * width + e];
            }
            if column == 0u32 {
                stage.sums[row * comptime!(plan.slices()) + slice as usize] = sums[r];
            }
        }
        item += member.units;
    }
}

/// Sums the slices of a tile in order, and adds the tile to its run.
#[cube]
fn merge_tile(stage: &mut Stage, odd: u32, #[comptime] plan: DecodePlan) {
    let rows = comptime!(plan.rows as u32);
    let columns = comptime!(plan.columns());
    let slices = comptime!(plan.slices());
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.head) as u32) {
        let row = item / comptime!(plan.head as u32);
        // `[element, column]`.
        let within = (item % comptime!(plan.head as u32)) as usize;
        let (element, column) = (within / columns, within % columns);
        let of_row = row as usize * comptime!(plan.width) + element;
        let at = of_row * comptime!(plan.pitch()) + column;
        let mut sum = 0.0f32;
        for slice in 0..slices {
            sum += stage.values[at + slice * columns];
        }
        let highest = highest_of_tile(&stage.segments, row as usize, plan);
        let before = stage.state[(odd * rows + row) as usize];
        let above = larger(before, highest);
        let old = exp_or_nan(before - above, plan.conversion);
        let new = exp_or_nan(highest - above, plan.conversion);
        let rest = product(stage.out[item as usize], old, plan.conversion);
        stage.out[item as usize] = fma(sum, new, rest, plan.conversion);
        if within == 0usize {
            let mut sum = 0.0f32;
            for slice in 0..slices {
                sum += stage.sums[row as usize * slices + slice];
            }
            let total = (2u32 * rows + row) as usize;
            let rest = product(stage.state[total], old, plan.conversion);
            stage.state[total] = fma(sum, new, rest, plan.conversion);
            // Use the other entry: units of this row still read the first one.
            stage.state[((1u32 - odd) * rows + row) as usize] = above;
        }
        item += CUBE_DIM;
    }
}
