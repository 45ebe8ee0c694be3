//! From the blocks of a plane to the result: corrects rotation groups and writes. A plane processes
//! half a tile at a time: two units correct a group, and their lines take so little shared memory
//! that registers limit the planes per SM.

use cubecl::prelude::*;

use super::{
    arguments::{EdenDraw, EdenOut},
    position::{EdenPolicy, HALF, Position, TURNS, is_slot_of_turn, line_of_slot},
};
use crate::cube::{
    codec::decode_e4m3,
    eden::{EdenSums, SUMS, eden_correction, round_scale_stochastic},
    philox::{Random, block_words},
    ptx,
};

/// Vectors of eight values per line of a tile in shared memory: 16, plus one against bank
/// conflicts.
const VECTORS: usize = 17;

/// Data in shared memory of the blocks of half a plane's tile, until their groups are corrected.
#[derive(CubeType)]
pub(super) struct PlaneBlocks {
    /// Index of the plane in its cube.
    plane: usize,
    /// `xx` of all lines of a plane, then `xq`.
    sums: Shared<[f32]>,
    /// Decoded scale bytes: before the correction, and also after it if the result is not packed.
    scales: Shared<[f32]>,
    /// Decoded codes as bf16, if the result is not packed.
    values: Shared<[Vector<u32, Const<4>>]>,
}

#[cube]
impl PlaneBlocks {
    /// Allocates memory for cubes with up to `planes` planes.
    pub fn new(#[comptime] planes: usize, #[comptime] unscaled: bool) -> PlaneBlocks {
        let vectors = comptime!(if unscaled { planes * HALF * VECTORS } else { 1 });
        PlaneBlocks {
            plane: UNIT_POS as usize / 32usize,
            sums: Shared::new_slice(comptime!(planes * 2 * HALF * SUMS)),
            scales: Shared::new_slice(comptime!(planes * HALF * SUMS)),
            values: Shared::new_aligned_slice(vectors, 16usize),
        }
    }

    /// Stores the sums and the scale of block `segment` of the line in `slot`.
    pub fn take_sums(&mut self, sums: &EdenSums, scale: f32, slot: usize, segment: usize) {
        let line = self.plane * comptime!(2 * HALF) + slot;
        self.sums[line * comptime!(SUMS) + segment] = sums.xx;
        self.sums[(line + HALF) * comptime!(SUMS) + segment] = sums.xq;
        self.scales[(self.plane * HALF + slot) * comptime!(SUMS) + segment] = scale;
    }

    /// Stores the decoded codes of a block, as pairs of bf16.
    pub fn take_values(&mut self, pairs: &Array<u32>, slot: usize, segment: usize) {
        let at = (self.plane * HALF + slot) * VECTORS + segment * 2usize;
        #[unroll]
        for half in 0..2usize {
            let mut vector = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for i in 0..4usize {
                vector.insert(i, pairs[comptime!(half * 4 + i)]);
            }
            self.values[at + half] = vector;
        }
    }

    /// Corrects the groups of the lines that a plane took from turn `turn` of a tile on, at most
    /// half a tile, and writes the remaining results. All units of the plane must call it, after a
    /// barrier.
    pub fn finish(
        &mut self,
        turn: usize,
        at: &Position,
        out: &mut EdenOut,
        draw: &EdenDraw,
        random: &Random,
        #[comptime] policy: EdenPolicy,
    ) {
        let unit = UNIT_POS_PLANE as usize;
        let slot = unit % HALF;
        // The upper half of the units sums `xq`, and has the upper half of the blocks.
        let upper = unit / HALF;
        let is_upper = upper == 1usize;
        let half = turn / comptime!(TURNS / 2);
        let row = at.line0 + line_of_slot(slot, half, policy);
        let is_taken = is_taken(slot, turn, policy);
        let sums = ((self.plane * 2usize + upper) * HALF + slot) * comptime!(SUMS);
        let scales = (self.plane * HALF + slot) * comptime!(SUMS);
        let mut sum = 0.0f32;
        #[unroll]
        for b in 0..8usize {
            let scale = self.scales[scales + b];
            sum = fma(scale * scale, self.sums[sums + b], sum);
        }
        let other = ptx::shfl_sync_bfly(sum, HALF as u32);
        let xx = select(is_upper, other, sum);
        let xq = select(is_upper, sum, other);
        let correction = eden_correction(xx, xq);
        let index = row * at.drawn_pitch + at.drawn_first;
        let index = draw
            .position
            .number(index, at.drawn_pitch, &draw.earlier, policy.numbering);
        let words = block_words(index, random);
        let first = select(is_upper, words[2], words[0]);
        let second = select(is_upper, words[3], words[1]);
        let own = scales + upper * 4usize;
        let mut word = 0u32;
        #[unroll]
        for i in 0..4usize {
            let drawn = if comptime!(i < 2) { first } else { second };
            let drawn = (drawn >> comptime!(16 * (i as u32 % 2))) & 0xFFFFu32;
            let corrected = self.scales[own + i] * correction;
            let byte = round_scale_stochastic(corrected, drawn, policy.conversion);
            if comptime!(policy.unscaled) {
                self.scales[own + i] = decode_e4m3(byte);
            }
            word |= byte << comptime!(8 * i as u32);
        }
        if comptime!(policy.unscaled) {
            sync_plane();
            self.write_values(turn, at, out, policy);
        } else {
            let other = ptx::shfl_sync_bfly(f32::reinterpret(word), HALF as u32);
            let mut bytes = Vector::<u32, Const<2>>::new(0u32);
            if row < at.lines {
                bytes.insert(0usize, word);
                bytes.insert(1usize, u32::reinterpret(other));
            }
            if !is_upper && is_taken && (comptime!(policy.swizzled) || row < at.lines) {
                out.values.store_scales(bytes, at, row, policy);
            }
        }
    }

    /// Returns the scale of block `block` of the line in slot `slot` of all planes, in both halves
    /// of a word.
    fn scale_pair(&self, slot: usize, block: usize) -> u32 {
        let scale = u32::reinterpret(self.scales[slot * comptime!(SUMS) + block]);
        ptx::prmt(scale, scale, 0x3232u32)
    }

    /// Returns vector `vector` of a line times its scale.
    fn scaled_vector(&self, slot: usize, vector: usize) -> Vector<u32, Const<4>> {
        let pair = self.scale_pair(slot, vector / 2usize);
        let values = self.values[slot * VECTORS + vector];
        let mut scaled = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for i in 0..4usize {
            scaled.insert(i, ptx::mul_bf16x2(values.extract(i), pair));
        }
        scaled
    }

    /// Writes the values of the lines taken from turn `turn` on, times their scales.
    fn write_values(
        &self,
        turn: usize,
        at: &Position,
        out: &mut EdenOut,
        #[comptime] policy: EdenPolicy,
    ) {
        let unit = UNIT_POS_PLANE as usize;
        let first = self.plane * HALF;
        let half = turn / comptime!(TURNS / 2);
        for pair in 0..comptime!(HALF / 2) {
            let slot = pair * 2usize + unit / 16usize;
            let vector = unit % 16usize;
            let row = at.line0 + line_of_slot(slot, half, policy);
            if is_taken(slot, turn, policy) && row < at.lines {
                let scaled = self.scaled_vector(first + slot, vector);
                let group = row * at.pitch + at.first;
                out.values.store_unscaled(scaled, group * 16usize + vector);
            }
        }
    }
}

/// Returns true if a plane that corrects lines from turn `turn` of a tile on took the one in slot
/// `slot`: all lines of half a tile, or those of one turn.
#[cube]
fn is_taken(slot: usize, turn: usize, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(policy.corrected_turns() > 1) {
        true.runtime()
    } else {
        is_slot_of_turn(slot, turn % comptime!(TURNS / 2), policy)
    }
}
