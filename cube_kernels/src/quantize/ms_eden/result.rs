//! From blocks to the result: the correction of rotation groups, and what is written.

use cubecl::prelude::*;

use super::{
    arguments::{EdenDraw, EdenOut, EdenValues, EdenValuesExpand},
    position::{EdenPolicy, Position},
};
use crate::cube::{
    eden::{EdenBlock, LINES, SUMS, correct_group},
    philox::Random,
    unscaled::{scale_pair, unscaled_word},
};

/// Words of codes of a line of a tile.
const WORDS: usize = 16;

/// A block of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockPlace {
    /// Its line in the tile.
    pub line: usize,
    /// Its number in the line.
    pub segment: usize,
}

/// The units that work on a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Team {
    /// The number of the tile among those of the cube.
    pub tile: usize,
    /// The number of this unit.
    pub unit: usize,
    /// How many they are.
    pub units: usize,
}

/// What the blocks of a cube's tiles leave in shared memory until their groups are corrected.
#[derive(CubeType)]
pub(super) struct Blocks {
    /// Those that work on this unit's tile.
    team: Team,
    xx: Shared<[f32]>,
    xq: Shared<[f32]>,
    /// Scale bytes: before the correction, and behind it where the result is not packed.
    scales: Shared<[u32]>,
    /// Codes, where the result is not packed.
    codes: Shared<[u32]>,
}

#[cube]
impl Blocks {
    pub fn new(team: Team, #[comptime] tiles: usize, #[comptime] unscaled: bool) -> Blocks {
        let words = comptime!(if unscaled { tiles * LINES * WORDS } else { 1 });
        Blocks {
            team,
            xx: Shared::new_slice(comptime!(tiles * LINES * SUMS)),
            xq: Shared::new_slice(comptime!(tiles * LINES * SUMS)),
            scales: Shared::new_slice(comptime!(tiles * LINES * SUMS)),
            codes: Shared::new_slice(words),
        }
    }

    /// Takes a block with the scale byte `scale`. The codes of a packed result are final.
    pub fn take(
        &mut self,
        block: &EdenBlock,
        scale: u32,
        place: BlockPlace,
        at: &Position,
        out: &mut EdenOut,
        #[comptime] policy: EdenPolicy,
    ) {
        let line = self.team.tile * LINES + place.line;
        let slot = line * comptime!(SUMS) + place.segment;
        self.xx[slot] = block.xx;
        self.xq[slot] = block.xq;
        self.scales[slot] = scale;
        if comptime!(policy.unscaled) {
            let word = line * comptime!(WORDS) + place.segment * 2usize;
            self.codes[word] = block.codes.extract(0usize);
            self.codes[word + 1usize] = block.codes.extract(1usize);
        } else if at.line0 + place.line < at.lines {
            let group = (at.line0 + place.line) * at.pitch + at.first;
            out.values
                .store_codes(block.codes, group * 8usize + place.segment);
        }
    }

    /// Corrects the groups of a tile and writes what remains of it. All units of the team must be
    /// here, behind a barrier.
    pub fn finish(
        &mut self,
        at: &Position,
        out: &mut EdenOut,
        draw: &EdenDraw,
        random: &Random,
        #[comptime] policy: EdenPolicy,
    ) {
        let first = self.team.tile * LINES;
        let mut line = self.team.unit;
        while line < LINES {
            let row = at.line0 + line;
            if row < at.lines {
                let index = row * at.drawn_pitch + at.drawn_first;
                let numbering = comptime!(policy.numbering);
                let index = draw.position.number(index, at.drawn_pitch, numbering);
                let found = correct_group(
                    &self.xx,
                    &self.xq,
                    &self.scales,
                    first + line,
                    index,
                    random,
                );
                if comptime!(policy.unscaled) {
                    let slot = (first + line) * comptime!(SUMS);
                    #[unroll]
                    for block in 0..8usize {
                        let word = found.extract(comptime!(block / 4));
                        let byte = (word >> comptime!(8 * (block as u32 % 4))) & 0xFFu32;
                        self.scales[slot + block] = byte;
                    }
                } else {
                    out.values.store_scales(found, at, row, policy);
                }
            } else if comptime!(policy.swizzled) {
                out.values.store_scales(Vector::new(0u32), at, row, policy);
            }
            line += self.team.units;
        }
        if comptime!(policy.unscaled) {
            if comptime!(policy.planes()) {
                sync_plane();
            } else {
                sync_cube();
            }
            let mut item = self.team.unit;
            while item < comptime!(LINES * WORDS) {
                let line = item / WORDS;
                let word = item % WORDS;
                let row = at.line0 + line;
                if row < at.lines {
                    let codes = self.codes[(first + line) * comptime!(WORDS) + word];
                    let scale = self.scales[(first + line) * comptime!(SUMS) + word / 2usize];
                    let values = unscaled_word(codes, scale_pair(scale), policy.conversion);
                    let group = row * at.pitch + at.first;
                    out.values
                        .store_unscaled(values, group * comptime!(WORDS) + word);
                }
                item += self.team.units;
            }
        }
    }
}

#[cube]
impl EdenValues {
    fn store_codes(&mut self, codes: Vector<u32, Const<2>>, block: usize) {
        #[comptime]
        match self {
            EdenValues::Packed(packed) => packed.codes[block] = codes,
            EdenValues::Bf16Unscaled(_) => {}
        }
    }

    /// Stores the eight scale bytes of a tile's rotation group on line `line`.
    fn store_scales(
        &mut self,
        bytes: Vector<u32, Const<2>>,
        at: &Position,
        line: usize,
        #[comptime] policy: EdenPolicy,
    ) {
        #[comptime]
        match self {
            EdenValues::Packed(packed) => packed.scales.store(bytes, at, line, policy),
            EdenValues::Bf16Unscaled(_) => {}
        }
    }

    fn store_unscaled(&mut self, values: Vector<u32, Const<4>>, at: usize) {
        #[comptime]
        match self {
            EdenValues::Packed(_) => {}
            EdenValues::Bf16Unscaled(out) => out[at] = values,
        }
    }
}
