//! The kernel of greedy selection.

use cubecl::prelude::*;

use crate::{
    cube::{
        arrival::is_last_cube,
        codec::{INFINITY, MAGNITUDE, load},
        overlap::{let_next_begin, wait_for_previous, written_before},
    },
    tensor::FloatKind,
};

/// Logits per cube.
pub const CHUNK: usize = 1024;
/// Units per cube on a GPU.
pub const UNITS: usize = 256;

/// Comptime choices of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GreedyPlan {
    /// Element type of the logits.
    pub kind: FloatKind,
    /// True if cubes run concurrently, not one after another.
    pub concurrent: bool,
    /// True if the kernel can start before the previous one has ended.
    pub overlaps: bool,
}

/// Chunks of the rows of the logits.
#[derive(CubeType, CubeLaunch)]
pub struct Chunks {
    /// Largest logit of each chunk and its column, `[row, chunk]`.
    pub parts: Box<[u32]>,
    /// Number of finished chunks per row: zero before and after the launch.
    pub finished: Box<[u32]>,
    /// Logits per row.
    pub vocab: u32,
}

/// [`Greedy`] in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Step {
    /// Next token.
    pub tokens: Box<[i32]>,
    /// Number of tokens so far.
    pub starts: Box<[u32]>,
    /// Number of tokens added.
    pub counts: Box<[u32]>,
    /// Tokens of the last steps.
    pub ring: Box<[i32]>,
    /// Number of rows of `ring`.
    pub ring_len: u32,
    /// Number of steps so far.
    pub step: Box<[u32]>,
}

/// Maps floats to integers in the same order: both zeros are equal, and NaN is the largest.
#[cube]
fn ordered(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & MAGNITUDE;
    let above = magnitude | 0x8000_0000u32;
    let negative = bits != magnitude && magnitude != 0u32;
    let key = select(negative, !bits, above);
    select(magnitude > INFINITY, 0xFFFF_FFFFu32, key)
}

/// Reduces the keys of all units: entry 0 becomes the largest, of equal keys the one with the first
/// place.
#[cube]
fn largest_of_cube(key: u32, place: u32, keys: &mut Shared<[u32]>, places: &mut Shared<[u32]>) {
    keys[UNIT_POS as usize] = key;
    places[UNIT_POS as usize] = place;
    let mut len = CUBE_DIM;
    while len > 1u32 {
        let half = len.div_ceil(2u32);
        sync_cube();
        if UNIT_POS + half < len {
            let (own, other) = (UNIT_POS as usize, (UNIT_POS + half) as usize);
            let above = keys[other] > keys[own];
            let first = keys[other] == keys[own] && places[other] < places[own];
            if above || first {
                keys[own] = keys[other];
                places[own] = places[other];
            }
        }
        len = half;
    }
}

/// Finds the largest logit of each row. The cube that finishes the last chunk of a row reduces the
/// results of all its chunks and writes the next token. Cubes are `[chunk, row]`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn greedy_kernel<F: Numeric, N: Size>(
    logits: &[Vector<F, N>],
    mut chunks: Chunks,
    mut step: Step,
    #[comptime] plan: GreedyPlan,
    #[define(F)] _storage: ElemType,
) {
    let elements = N::value();
    let width = comptime!(elements as u32);
    let mut keys = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let mut places = Shared::<[u32]>::new_slice(comptime!(UNITS * 2));
    let mut verdict = Shared::<[u32]>::new_slice(1usize);
    written_before(logits, plan.overlaps);
    wait_for_previous(plan.overlaps);
    let_next_begin(plan.overlaps);
    let first = CUBE_POS_X * comptime!(CHUNK as u32);
    let last = min(first + comptime!(CHUNK as u32), chunks.vocab);
    let row = CUBE_POS_Y as usize;
    let row_at = row * (chunks.vocab / width) as usize;
    let mut key = 0u32;
    let mut place = first;
    let mut at = first + UNIT_POS * width;
    while at < last {
        let vector = logits[row_at + (at / width) as usize];
        #[unroll]
        for e in 0..N::value() {
            let this = ordered(load::<F>(vector.extract(e), plan.kind));
            // Ascending order: among equal logits the first one wins.
            if this > key {
                key = this;
                place = at + comptime!(e as u32);
            }
        }
        at += CUBE_DIM * width;
    }
    largest_of_cube(key, place, &mut keys, &mut places);
    let of_row = row * CUBE_COUNT_X as usize;
    if UNIT_POS == 0u32 {
        let part = (of_row + CUBE_POS_X as usize) * 2usize;
        chunks.parts[part] = keys[0];
        chunks.parts[part + 1usize] = places[0];
    }
    let count = CUBE_COUNT_X;
    if is_last_cube(
        &mut chunks.finished,
        row,
        count,
        &mut verdict,
        plan.concurrent,
    ) {
        let mut key = 0u32;
        let mut place = 0u32;
        let mut chunk = UNIT_POS;
        while chunk < count {
            let part = (of_row + chunk as usize) * 2usize;
            let this = chunks.parts[part];
            if this > key {
                key = this;
                place = chunks.parts[part + 1usize];
            }
            chunk += CUBE_DIM;
        }
        largest_of_cube(key, place, &mut keys, &mut places);
        take_step(&keys, &places, &mut step, row);
    }
}

/// Writes the argmax of a row as its next token.
#[cube]
fn take_step(keys: &Shared<[u32]>, places: &Shared<[u32]>, step: &mut Step, row: usize) {
    if UNIT_POS == 0u32 {
        // -inf and NaN.
        let nothing = keys[0] <= comptime!(!0xFF80_0000u32) || keys[0] == 0xFFFF_FFFFu32;
        let token = select(nothing, i32::new(-1), i32::cast_from(places[0]));
        let sequences = CUBE_COUNT_Y as usize;
        let at = step.step[row] % step.ring_len;
        step.ring[at as usize * sequences + row] = token;
        step.tokens[row] = token;
        let start = step.starts[row] + step.counts[row];
        step.starts[row] = start;
        let next = step.step[row] + 1u32;
        step.step[row] = next;
    }
}
