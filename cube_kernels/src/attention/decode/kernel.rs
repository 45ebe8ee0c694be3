//! Attention of a few new tokens over the cache: parts for runs of the keys, which the cube that
//! finishes the last run of its rows adds up.

use cubecl::prelude::*;

use super::append::{
    CacheShape, DecodePlan, Element, Extent, NewTokens, NewVector, extent, larger, turned,
    uncached, write_new,
};
use super::merge::{DecodeOutput, RowBlock, merge_runs};
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

/// Values that a unit loads before the first is added.
const AT_ONCE: usize = 8;

/// The keys that each query of a cube sees: from `first` to before `end`.
#[derive(CubeType)]
struct Sight {
    first: Array<u32>,
    end: Array<u32>,
}

#[cube]
impl Sight {
    /// Of the queries from row `first_row` of a head of keys on.
    fn new(
        own: &Extent,
        shape: &CacheShape,
        first_row: u32,
        #[comptime] plan: DecodePlan,
    ) -> Sight {
        let rows = comptime!(plan.rows);
        let mut sight = Sight {
            first: Array::new(rows),
            end: Array::new(rows),
        };
        #[unroll(plan.unroll)]
        for r in 0..rows {
            let end = own.start + (first_row + r as u32) / shape.group + 1u32;
            let near = end - min(end, shape.window);
            sight.first[r] = select(shape.window == 0u32, 0u32, near);
            sight.end[r] = select(end <= own.end, end, 0u32);
        }
        sight
    }

    /// Whether query `r` sees key `key`.
    fn sees(&self, r: usize, key: u32) -> bool {
        key >= self.first[r] && key < self.end[r]
    }
}

/// What a cube has in shared memory.
#[derive(CubeType)]
struct Stage {
    /// Queries, `[rows, head]`.
    queries: Shared<[f32]>,
    /// Scores and then weights of a tile, `[rows, DECODE_TILE]`.
    weights: Shared<[f32]>,
    /// Largest scores of the segments of a tile, `[rows, segments]`.
    segments: Shared<[f32]>,
    /// Sums of the slices: vectors `[row, element, slice, column]`.
    values: Shared<[f32]>,
    /// Sums of the weights of the slices, `[rows, slices]`.
    sums: Shared<[f32]>,
    /// The run so far, `[row, element, column]`.
    out: Shared<[f32]>,
    /// The largest score of the run before an even tile and before an odd one, and the sum of
    /// weights, `[3, rows]`.
    state: Shared<[f32]>,
}

/// What a unit loads of a tile before it needs it, where registers allow: its first key, and its
/// first values.
#[derive(CubeType)]
struct Ahead<C: Numeric, N: Size> {
    key: Array<Vector<C, N>>,
    values: Array<Vector<C, N>>,
}

/// Where a tile is in the caches.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Tile {
    /// The first vector of its first key.
    base: usize,
    /// Vectors from one key to the next.
    stride: usize,
    /// Its keys.
    count: u32,
}

/// A tile, and the number of its first key.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Now {
    tile: Tile,
    at: u32,
}

#[cube]
impl<C: Numeric, N: Size> Ahead<C, N> {
    fn new(#[comptime] plan: DecodePlan) -> Ahead<C, N> {
        Ahead::<C, N> {
            key: Array::new(comptime!(plan.columns())),
            values: Array::new(AT_ONCE),
        }
    }

    /// Loads what this unit needs first of the keys `from..to` of a tile.
    fn load(
        &mut self,
        k_cache: &mut [Vector<C, N>],
        v_cache: &mut [Vector<C, N>],
        tile: &Tile,
        from: u32,
        to: u32,
        #[comptime] plan: DecodePlan,
    ) {
        if comptime!(plan.loads_ahead()) {
            let key = UNIT_POS;
            if key >= from && key < to {
                load_key::<C, N>(k_cache, tile, key, &mut self.key, plan);
            }
            let slices = comptime!(plan.slices() as u32);
            let columns = comptime!(plan.columns() as u32);
            let (slice, column) = (UNIT_POS / columns, UNIT_POS % columns);
            #[unroll(plan.unroll)]
            for i in 0..AT_ONCE {
                let key = slice + i as u32 * slices;
                if key >= from && key < to {
                    let at = tile.base + key as usize * tile.stride + column as usize;
                    self.values[i] = v_cache[at];
                }
            }
        }
    }
}

#[cube]
fn load_key<C: Numeric, N: Size>(
    k_cache: &mut [Vector<C, N>],
    tile: &Tile,
    key: u32,
    loaded: &mut Array<Vector<C, N>>,
    #[comptime] plan: DecodePlan,
) {
    let at = tile.base + key as usize * tile.stride;
    #[unroll(plan.unroll)]
    for c in 0..comptime!(plan.columns()) {
        loaded[c] = k_cache[at + c];
    }
}

/// A part of the attention of all queries that read one head of keys, over one run of the keys; the
/// new keys and values of the run are written first. The cube that finishes the last run of a block
/// of rows adds its parts. Cubes are `[run, block of rows of a head of keys, sequence]`.
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
    let rows = comptime!(plan.rows);
    let tile = comptime!(DECODE_TILE as u32);
    let mut stage = Stage {
        queries: Shared::new_aligned_slice(comptime!(plan.rows * plan.head), 16usize),
        weights: Shared::new_slice(comptime!(plan.rows * DECODE_TILE)),
        segments: Shared::new_slice(comptime!(plan.rows * plan.segments())),
        values: Shared::new_slice(comptime!(plan.rows * plan.width * plan.pitch())),
        sums: Shared::new_slice(comptime!(plan.rows * plan.slices())),
        out: Shared::new_slice(comptime!(plan.rows * plan.head)),
        state: Shared::new_slice(comptime!(3 * plan.rows)),
    };
    let mut verdict = Shared::<[u32]>::new_slice(1usize);
    let_next_begin(plan.overlaps);
    written_before(&new.q.data, plan.overlaps);
    written_before(&new.k.data, plan.overlaps);
    written_before(&new.v.data, plan.overlaps);
    let run = CUBE_POS_X;
    let sequence = CUBE_POS_Z;
    let blocks = (shape.group * new.time).div_ceil(comptime!(plan.rows as u32));
    let kv_head = CUBE_POS_Y / blocks;
    let first_row = (CUBE_POS_Y - kv_head * blocks) * comptime!(plan.rows as u32);
    let block = RowBlock {
        sequence,
        kv_head,
        first_row,
        index: (sequence * CUBE_COUNT_Y + CUBE_POS_Y) as usize,
    };
    let own = extent(&new.starts, &new.counts, new.time, &shape, sequence);
    // Without any run there is nothing to wait for.
    let mut is_last = own.runs == 0u32 && run == 0u32;
    if run < own.runs {
        let first = own.first + run * own.per;
        let last = min(first + own.per, own.end);
        let columns = comptime!(plan.columns() as u32);
        let stride = shape.kv_heads as usize * comptime!(plan.columns());
        let row = sequence as usize * shape.capacity as usize + first as usize;
        let base = (row * shape.kv_heads as usize + kv_head as usize) * comptime!(plan.columns());
        let mut tile_at = Tile {
            base,
            stride,
            count: min(tile, last - first),
        };
        let sight = Sight::new(&own, &shape, first_row, plan);
        let mut ahead = Ahead::<C, N>::new(plan);
        // What was there before is on its way while the new tokens are read and turned.
        let from = max(first, own.start);
        let old = min(from, first + tile_at.count) - first;
        ahead.load(k_cache, v_cache, &tile_at, 0u32, old, plan);
        wait_for_previous(plan.overlaps);
        // This run's new keys and values.
        let mut item = UNIT_POS;
        while from < last && item < (last - from) * columns {
            let key = from + item / columns;
            let place = kv_head * columns + item % columns;
            let vector = NewVector {
                sequence,
                t: key - own.start,
                position: key,
                place,
            };
            write_new::<F, C, N>(&new, k_cache, v_cache, &shape, vector, plan);
            item += CUBE_DIM;
        }
        begin::<F>(
            &new, &shape, &own, &mut stage, sequence, kv_head, first_row, plan,
        );
        sync_cube();
        ahead.load(k_cache, v_cache, &tile_at, old, tile_at.count, plan);
        let mut odd = 0u32;
        let mut at = first;
        while at < last {
            let count = tile_at.count;
            if at > first {
                ahead.load(k_cache, v_cache, &tile_at, 0u32, count, plan);
            }
            let now = Now { tile: tile_at, at };
            score_tile::<C, N>(k_cache, &shape, &mut stage, &now, &sight, &mut ahead, plan);
            sync_cube();
            if comptime!(!plan.planes) {
                highest_of_segments(&mut stage, &now, &sight, plan);
                sync_cube();
            }
            let mut key = UNIT_POS;
            while key < count {
                #[unroll(plan.unroll)]
                for r in 0..rows {
                    let highest = highest_of_tile(&stage.segments, r, plan);
                    let place = r * comptime!(DECODE_TILE) + key as usize;
                    let difference = stage.weights[place] - highest;
                    let weight = exp_or_nan(difference, plan.conversion);
                    let seen = sight.sees(r, at + key);
                    stage.weights[place] = select(seen, weight, 0.0f32);
                }
                key += CUBE_DIM;
            }
            sync_cube();
            add_values::<C, N>(v_cache, &shape, &mut stage, &tile_at, &mut ahead, plan);
            sync_cube();
            merge_tile(&mut stage, odd, plan);
            odd = 1u32 - odd;
            at += tile;
            tile_at.base += tile as usize * stride;
            tile_at.count = min(tile, last - min(at, last));
            sync_cube();
        }
        write_part::<F>(output, &stage, block.part(&shape, run, plan), odd, plan);
        is_last = is_last_cube(
            &mut output.finished,
            block.index,
            own.runs,
            &mut verdict,
            plan.concurrent,
        );
    } else {
        // Else the kernel could end before those in front of it.
        wait_for_previous(plan.overlaps);
    }
    if is_last {
        merge_runs::<F>(
            output,
            &mut stage.values,
            &shape,
            &own,
            block,
            new.time,
            plan,
        );
    }
}

/// Writes the run of this cube, which is over, to the parts from `first` on.
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
    let pairs = comptime!(plan.part() as u32);
    let width = comptime!(plan.width as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.part()) as u32) {
        let row = item / pairs;
        let pair = item % pairs;
        let mut value = Vector::<f32, Const<2>>::empty();
        if pair < comptime!((plan.head / 2) as u32) {
            // Elements of a pair are of one vector: their columns are those of the cache.
            let d = pair * 2u32;
            let of_row = row * comptime!(plan.head as u32);
            let place = (of_row + d % width * columns + d / width) as usize;
            value.insert(0usize, stage.out[place]);
            value.insert(1usize, stage.out[place + comptime!(plan.columns())]);
        } else {
            value.insert(0usize, stage.state[(odd * rows + row) as usize]);
            value.insert(1usize, stage.state[(2u32 * rows + row) as usize]);
        }
        output.parts[first + item as usize] = value;
        item += CUBE_DIM;
    }
}

/// Brings the queries to shared memory, zeros where there are none, and begins the run.
#[cube]
fn begin<F: Numeric>(
    new: &NewTokens<F>,
    shape: &CacheShape,
    own: &Extent,
    stage: &mut Stage,
    sequence: u32,
    kv_head: u32,
    first_row: u32,
    #[comptime] plan: DecodePlan,
) {
    let head = comptime!(plan.head as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.head) as u32) {
        let row = first_row + item / head;
        let t = row / shape.group;
        let mut value = 0.0f32;
        if t < new.time {
            let token = sequence * new.time + t;
            let index = kv_head * shape.group + row % shape.group;
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

/// The scores of a tile: a unit has one key at a time, the first of which was loaded. Where there
/// are planes, also the largest score that each of them has seen.
#[cube]
fn score_tile<C: Numeric, N: Size>(
    k_cache: &mut [Vector<C, N>],
    shape: &CacheShape,
    stage: &mut Stage,
    now: &Now,
    sight: &Sight,
    ahead: &mut Ahead<C, N>,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.rows);
    let columns = comptime!(plan.columns());
    let mut highest = Array::<f32>::new(rows);
    #[unroll(plan.unroll)]
    for r in 0..rows {
        highest[r] = f32::new(comptime!(f32::MIN));
    }
    let mut key = UNIT_POS;
    while key < now.tile.count {
        if comptime!(!plan.loads_ahead()) || key >= CUBE_DIM {
            load_key::<C, N>(k_cache, &now.tile, key, &mut ahead.key, plan);
        }
        let mut sums = Array::<f32>::new(comptime!(4 * plan.rows));
        #[unroll(plan.unroll)]
        for i in 0..comptime!(4 * plan.rows) {
            sums[i] = 0.0f32;
        }
        #[unroll(plan.unroll)]
        for c in 0..columns {
            let vector = ahead.key[c];
            #[unroll]
            for e in 0..N::value() {
                let k = uncached::<C>(vector.extract(e), shape.k_scale, plan);
                #[unroll(plan.unroll)]
                for r in 0..rows {
                    let q = stage.queries[r * comptime!(plan.head) + c * comptime!(plan.width) + e];
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
            stage.weights[r * comptime!(DECODE_TILE) + key as usize] = score;
            let above = larger(highest[r], score);
            highest[r] = select(sight.sees(r, now.at + key), above, highest[r]);
        }
        key += CUBE_DIM;
    }
    if comptime!(plan.planes) {
        #[unroll]
        for r in 0..rows {
            let of_plane = plane_largest(highest[r], plan.conversion);
            if UNIT_POS & 31u32 == 0u32 {
                stage.segments[r * comptime!(plan.segments()) + UNIT_POS as usize / 32usize] =
                    of_plane;
            }
        }
    }
}

/// The largest scores of the segments of a tile that are seen.
#[cube]
fn highest_of_segments(stage: &mut Stage, now: &Now, sight: &Sight, #[comptime] plan: DecodePlan) {
    let segments = comptime!(plan.segments() as u32);
    let mut item = UNIT_POS;
    while item < comptime!((plan.rows * plan.segments()) as u32) {
        let row = (item / segments) as usize;
        let segment = item % segments;
        let mut highest = f32::new(comptime!(f32::MIN));
        for i in 0..comptime!((DECODE_TILE / plan.segments()) as u32) {
            let key = i * segments + segment;
            if key < now.tile.count && sight.sees(row, now.at + key) {
                let score = stage.weights[row * comptime!(DECODE_TILE) + key as usize];
                highest = larger(highest, score);
            }
        }
        stage.segments[item as usize] = highest;
        item += CUBE_DIM;
    }
}

/// The largest score of row `row` in a tile.
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

/// The weighted values of a tile: a unit has one vector of the keys of one slice at a time. Its
/// first ones were loaded.
#[cube]
fn add_values<C: Numeric, N: Size>(
    v_cache: &mut [Vector<C, N>],
    shape: &CacheShape,
    stage: &mut Stage,
    tile: &Tile,
    ahead: &mut Ahead<C, N>,
    #[comptime] plan: DecodePlan,
) {
    let rows = comptime!(plan.rows);
    let width = comptime!(plan.width);
    let columns = comptime!(plan.columns() as u32);
    let slices = comptime!(plan.slices() as u32);
    let mut item = UNIT_POS;
    while item < slices * columns {
        let slice = item / columns;
        let column = item % columns;
        let mut values = Array::<f32>::new(comptime!(plan.rows * plan.width));
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
            if comptime!(!plan.loads_ahead()) || item >= CUBE_DIM || first > slice {
                // Several on the way at a time. Those behind the last read it, and are not added.
                #[unroll(plan.unroll)]
                for i in 0..AT_ONCE {
                    let key = min(first + i as u32 * slices, tile.count - 1u32);
                    let at = tile.base + key as usize * tile.stride + column as usize;
                    ahead.values[i] = v_cache[at];
                }
            }
            #[unroll(plan.unroll)]
            for i in 0..AT_ONCE {
                let key = first + i as u32 * slices;
                if key < tile.count {
                    let vector = ahead.values[i];
                    #[unroll(plan.unroll)]
                    for r in 0..rows {
                        let weight = stage.weights[r * comptime!(DECODE_TILE) + key as usize];
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
            #[unroll]
            for e in 0..width {
                let place = (r * width + e) * comptime!(plan.pitch()) + item as usize;
                stage.values[place] = values[r * width + e];
            }
            if column == 0u32 {
                stage.sums[r * comptime!(plan.slices()) + slice as usize] = sums[r];
            }
        }
        item += CUBE_DIM;
    }
}

/// Adds the slices of a tile in order, and the tile to its run.
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
            // The other one: units of this row still read the first.
            stage.state[((1u32 - odd) * rows + row) as usize] = above;
        }
        item += CUBE_DIM;
    }
}
