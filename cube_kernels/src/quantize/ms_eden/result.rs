//! From the blocks of a cube to the result: corrects rotation groups and writes.

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

/// Words of codes per line of a tile.
const WORDS: usize = 16;

/// Position of a block in a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockPlace {
    /// Line in the tile.
    pub line: usize,
    /// Index within the line.
    pub segment: usize,
}

/// Data in shared memory of the blocks of a cube's tile, until their groups are corrected.
#[derive(CubeType)]
pub(super) struct Blocks {
    xx: Shared<[f32]>,
    xq: Shared<[f32]>,
    /// Scale bytes: before the correction, and also after it if the result is not packed.
    scales: Shared<[u32]>,
    /// Codes, if the result is not packed.
    codes: Shared<[u32]>,
}

#[cube]
impl Blocks {
    pub fn new(#[comptime] unscaled: bool) -> Blocks {
        let words = comptime!(if unscaled { LINES * WORDS } else { 1 });
        Blocks {
            xx: Shared::new_slice(comptime!(LINES * SUMS)),
            xq: Shared::new_slice(comptime!(LINES * SUMS)),
            scales: Shared::new_slice(comptime!(LINES * SUMS)),
            codes: Shared::new_slice(words),
        }
    }

    /// Stores a block with the scale byte `scale`. The codes of a packed result are final.
    pub fn take(
        &mut self,
        block: &EdenBlock,
        scale: u32,
        place: BlockPlace,
        at: &Position,
        out: &mut EdenOut,
        #[comptime] policy: EdenPolicy,
    ) {
        let slot = place.line * comptime!(SUMS) + place.segment;
        self.xx[slot] = block.sums.xx;
        self.xq[slot] = block.sums.xq;
        self.scales[slot] = scale;
        if comptime!(policy.unscaled) {
            let word = place.line * comptime!(WORDS) + place.segment * 2usize;
            self.codes[word] = block.codes.extract(0usize);
            self.codes[word + 1usize] = block.codes.extract(1usize);
        } else if at.line0 + place.line < at.lines {
            let group = (at.line0 + place.line) * at.pitch + at.first;
            out.values
                .store_codes(block.codes, group * 8usize + place.segment);
        }
    }

    /// Corrects the groups of a tile and writes the remaining results. All units must call it,
    /// after a barrier.
    pub fn finish(
        &mut self,
        at: &Position,
        out: &mut EdenOut,
        draw: &EdenDraw,
        random: &Random,
        #[comptime] policy: EdenPolicy,
    ) {
        let mut line = UNIT_POS as usize;
        while line < LINES {
            let row = at.line0 + line;
            if row < at.lines {
                let index = row * at.drawn_pitch + at.drawn_first;
                let numbering = comptime!(policy.numbering);
                let earlier = &draw.earlier;
                let index = draw
                    .position
                    .number(index, at.drawn_pitch, earlier, numbering);
                let found = correct_group(
                    &self.xx,
                    &self.xq,
                    &self.scales,
                    line,
                    index,
                    random,
                    policy.conversion,
                );
                if comptime!(policy.unscaled) {
                    let slot = line * comptime!(SUMS);
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
            line += CUBE_DIM as usize;
        }
        if comptime!(policy.unscaled) {
            sync_cube();
            let mut item = UNIT_POS as usize;
            while item < comptime!(LINES * WORDS) {
                let line = item / WORDS;
                let word = item % WORDS;
                let row = at.line0 + line;
                if row < at.lines {
                    let values = self.values_of_word(line, word, policy);
                    let group = row * at.pitch + at.first;
                    out.values
                        .store_unscaled(values, group * comptime!(WORDS) + word);
                }
                item += CUBE_DIM as usize;
            }
        }
    }
}

#[cube]
impl Blocks {
    /// Returns the decoded codes of word `word` of a line, in order.
    fn values_of_word(
        &self,
        line: usize,
        word: usize,
        #[comptime] policy: EdenPolicy,
    ) -> Vector<u32, Const<4>> {
        let codes = self.codes[line * comptime!(WORDS) + word];
        let scale = self.scales[line * comptime!(SUMS) + word / 2usize];
        unscaled_word(codes, scale_pair(scale), policy.conversion)
    }
}

#[cube]
impl EdenValues {
    pub(super) fn store_codes(&mut self, codes: Vector<u32, Const<2>>, block: usize) {
        #[comptime]
        match self {
            EdenValues::Packed(packed) => packed.codes[block] = codes,
            EdenValues::Bf16Unscaled(_) => {}
        }
    }

    /// Stores the eight scale bytes of a tile's rotation group on line `line`.
    pub(super) fn store_scales(
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

    pub(super) fn store_unscaled(&mut self, values: Vector<u32, Const<4>>, at: usize) {
        #[comptime]
        match self {
            EdenValues::Packed(_) => {}
            EdenValues::Bf16Unscaled(out) => out[at] = values,
        }
    }
}
